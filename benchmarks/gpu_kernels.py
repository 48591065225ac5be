"""Checks and times the Triton kernels on one GPU, each next to the least time its bytes or products can take.

    python benchmarks/gpu_kernels.py [--only dequant dense routing experts attention host tiles] [--json FILE]

Every kernel is compared with the reference in higher precision on random data before it is timed; a wrong one is
marked WRONG and makes the exit status 1. Times are medians of `triton.testing.do_bench`, except the host's. Floors
are against two ceilings, which --tb-per-s and --tflops set; the defaults were measured on an H200.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import triton
from gpu_experts import LAYERS, bench_experts, bench_tiles, job_of
from gpu_report import BF16, CUDA, Report, attention_flop, error, median_us, normal, q8_0, random_weight

from overspill.gguf.types import TensorType
from overspill.kernels import ref
from overspill.kernels.triton import Workspace, attend, chooser, dequant, flash, make_ops
from overspill.kernels.triton.decode import DECODERS
from overspill.kernels.triton.heads import Angles, HeadGains, prepare_heads
from overspill.kernels.triton.linear import LinearOp
from overspill.kernels.triton.norm import rms_norm, swiglu
from overspill.kernels.triton.routing import Choice, pick_experts, route
from overspill.quant.dequant import dequantize
from overspill.quant.experts import Activation
from overspill.quant.qtensor import QTensor


def bench_dequant(report: Report) -> None:
    for type in DECODERS:
        small = random_weight(type, 3, 33, 512)
        exact, rounded = dequant.dequantize_f32(small), dequant.dequantize_bf16(small)
        wanted = dequantize(small)
        is_right = bool(((exact.view(torch.int32) == wanted.view(torch.int32)) | wanted.isnan()).all())
        is_right &= bool(((rounded == wanted.bfloat16()) | wanted.isnan()).all())
        weight = random_weight(type, 64, 1536, 2048)
        out = torch.empty(weight.shape, dtype=BF16, device=CUDA)
        n_bytes = weight.n_bytes + 2 * out.numel()
        report.add(
            f"dequantise {type.name}",
            partial(dequant.dequantize_into, weight, out),
            n_bytes=n_bytes,
            is_right=is_right,
        )


def bench_dense(report: Report) -> None:
    T, D, H, G, A = 4096, 2048, 32, 4, 128
    x, gain = normal(T, D), normal(D)
    is_right = error(rms_norm(x, gain, 1e-6, dtype=BF16), ref.rms_norm(x.double(), gain.double(), 1e-6)) < 4e-3
    report.add(
        "rms_norm 4096 x 2048", lambda: rms_norm(x, gain, 1e-6, dtype=BF16), n_bytes=6 * T * D, is_right=is_right
    )
    gate, up = normal(T, 6144), normal(T, 6144)
    is_right = error(swiglu(gate, up, dtype=BF16), ref.swiglu(gate.double(), up.double())) < 4e-3
    report.add("swiglu 4096 x 6144", lambda: swiglu(gate, up, dtype=BF16), n_bytes=10 * T * 6144, is_right=is_right)
    q, k, v = normal(T, H * A), normal(T, G * A), normal(T, G * A)
    cos, sin = normal(T, A // 2), normal(T, A // 2)
    gains = HeadGains(normal(A), normal(A), 1e-6)
    cells = torch.empty(2, G, 2 * T, A, dtype=BF16, device=CUDA)
    angles = Angles(cos, sin, False)
    run = partial(prepare_heads, q, k, v, (cells[0, :, :T], cells[1, :, :T]), angles, gains)
    wanted = ref.rope_halves(ref.rms_norm(q.view(T, H, A).double(), gains.q.double(), 1e-6), cos.double(), sin.double())
    is_right = error(run(), wanted) < 4e-3 and error(cells[1, :, :T], v.view(T, G, A).transpose(0, 1)) < 4e-3
    report.add("prepare heads 4096 x (32 + 2 x 4) x 128", run, n_bytes=6 * T * (H + 2 * G) * A, is_right=is_right)
    op = LinearOp(Workspace(CUDA), BF16)
    for n_tokens, N in ((4096, 4096), (1, 4096), (8, 4096), (1, 151936), (16, 151936)):
        weight, some = q8_0(N, D), x[:n_tokens].to(BF16)
        wanted = some.double() @ dequantize(weight).bfloat16().double().T
        flop, n_bytes = (2.0 * n_tokens * N * D, 0) if n_tokens > 16 else (0.0, weight.n_bytes)
        is_right = error(op.linear(some, weight), wanted) < 1e-4
        run = partial(op.linear, some, weight)
        report.add(f"linear Q8_0, {n_tokens} tokens, {N} x {D}", run, n_bytes=n_bytes, flop=flop, is_right=is_right)


def bench_routing(report: Report) -> None:
    for T, D, E, K in (
        (4096, 2048, 128, 8),
        (512, 2048, 128, 8),
        (1, 2048, 128, 8),
        (4096, 7168, 256, 8),
        (4096, 2048, 512, 10),
    ):
        x, gain, router = normal(T, D), normal(D), normal(E, D) / D**0.5
        choice = Choice(K)
        normed = ref.rms_norm(x.double(), gain.double(), 1e-6)
        logits = normed @ router.double().T
        mix, ids = logits.topk(K, -1)
        got = route(x, gain, 1e-6, router, choice, dtype=BF16)
        n_flipped = int((got.ids != ids).sum())
        is_right = (
            n_flipped <= T * K * 1e-4 and error(got.mix, mix.softmax(-1)) < 1e-3 and error(got.normed, normed) < 4e-3
        )
        name = f"route {T} x {D}, {K} of {E} ({n_flipped} ids differ from float64)"
        run = partial(route, x, gain, 1e-6, router, choice, dtype=BF16)
        report.add(name, run, n_bytes=6 * T * D, is_right=is_right)
        plain = logits.float()
        ids_of_plain = pick_experts(plain, choice)[0]
        is_right = bool((ids_of_plain == plain.topk(K, -1).indices).float().mean() > 0.9999)
        report.add(
            f"  pick alone {T} x {E}",
            partial(pick_experts, plain, choice),
            n_bytes=4 * T * E,
            is_right=is_right,
        )
        bf16_ids = (normed.bfloat16().float() @ router.T).topk(K, -1).indices
        report.note(f"  ids that differ when the normed input is bfloat16: {int((bf16_ids != ids).sum())} of {T * K}")


def bench_attention(report: Report) -> None:
    own = chooser.AttentionChooser()
    for H, G, A in ((32, 4, 128), (64, 8, 64)):
        model = chooser.Heads(H, G, A, BF16)
        report.note(f"chosen for {H}/{G} heads of {A}: {own.prepare(model, CUDA)}")
        sizes = ((4096, 4096), (4096, 12288), (4096, 53248), (2048, 10240), (1000, 9000), (64, 9000), (1, 9000))
        for T, C in sizes if A == 128 else sizes[1:3]:
            q, k, v = normal(T, H, A, dtype=BF16), *(normal(G, C, A, dtype=BF16) for _ in range(2))
            n_bytes = 4 * G * C * A if T <= 64 else 0
            for way in attend.CANDIDATES:
                if not way.suits(T, C):
                    continue
                started = time.perf_counter()
                got = way.attend(q, k, v, scale=A**-0.5)
                torch.cuda.synchronize()
                first_ms = 1e3 * (time.perf_counter() - started)
                rows = slice(max(0, T - 64), T)
                wanted = ref.attention(q[rows].float(), k.float(), v.float(), scale=A**-0.5)
                name = f"attention {way.name} {H}/{G}x{A}, {T} of {C} (first call {first_ms:.0f} ms)"
                run = partial(way.attend, q, k, v, scale=A**-0.5)
                is_right = error(got[rows], wanted) < 2e-2
                report.add(name, run, flop=attention_flop(T, C, H, A), n_bytes=n_bytes, is_right=is_right)


def bench_other_attention(report: Report) -> None:
    """What only the own kernel does: windows, sinks, heads of two sizes."""
    for name, H, G, A, B, T, C, window in (
        ("gpt-oss window", 64, 8, 64, 64, 4096, 12288, 128),
        ("gpt-oss full", 64, 8, 64, 64, 4096, 12288, None),
        ("deepseek latent", 128, 1, 576, 512, 1024, 8192, None),
    ):
        q, k, v = normal(T, H, A, dtype=BF16), normal(G, C, A, dtype=BF16), normal(G, C, B, dtype=BF16)
        sinks = normal(H) if A == 64 else None
        run = partial(flash.flash, q, k, v, scale=A**-0.5, window=window, sinks=sinks)
        wanted = ref.attention(q[-64:].float(), k.float(), v.float(), scale=A**-0.5, window=window, sinks=sinks)
        is_right = error(run()[-64:], wanted) < 2e-2
        flop = attention_flop(T, C, H, (A + B) // 2) if window is None else 2.0 * T * window * H * (A + B)
        report.add(f"attention {name}, {T} of {C}", run, flop=flop, is_right=is_right)


def layer_calls(T: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """The launches of one layer of qwen3-30b on a ubatch, resident and widened."""
    D, H, G, A, E, K = 2048, 32, 4, 128, 128, 8
    ops = make_ops(CUDA)
    x, gain, head_gain, router = normal(T, D), normal(D), normal(A), normal(E, D)
    matrices = [QTensor(normal(n, k, dtype=BF16).view(torch.uint8), TensorType.BF16, (n, k)) for n, k in
                ((H * A, D), (G * A, D), (G * A, D), (D, H * A))]  # fmt: skip
    cells = torch.empty(2, G, T, A, dtype=BF16, device=CUDA)
    angles = Angles(normal(T, A // 2), normal(T, A // 2), False)
    gains = HeadGains(head_gain, head_gain, 1e-6)
    job = job_of(LAYERS[0]._replace(n_tokens=T))
    normed = ops.rms_norm(x, gain, 1e-6)
    q, k, v = (ops.linear(normed, matrix) for matrix in matrices[:3])
    queries = prepare_heads(q, k, v, (cells[0], cells[1]), angles, gains)
    attended = ops.attention(queries, cells[0], cells[1], scale=A**-0.5)
    yield "norm", lambda: ops.rms_norm(x, gain, 1e-6)
    yield "q, k, v", lambda: [ops.linear(normed, matrix) for matrix in matrices[:3]]
    yield "heads", lambda: prepare_heads(q, k, v, (cells[0], cells[1]), angles, gains)
    yield "attention", lambda: ops.attention(queries, cells[0], cells[1], scale=A**-0.5)
    yield "output", lambda: x.add_(ops.linear(attended, matrices[3]))
    yield "route", lambda: route(x, gain, 1e-6, router, Choice(K), dtype=BF16)
    yield "experts", lambda: ops.experts(job.x, job.ids, job.mix, job.wide, Activation.SILU, x)


def bench_host(report: Report) -> None:
    """Time that the host needs to launch a layer: small ubatches, so that the device does not hold it up."""
    for T in (64, 4096):
        calls = list(layer_calls(T))
        for _, call in calls:
            call()
        torch.cuda.synchronize()
        parts = []
        for name, call in calls:
            n = 100 if T == 64 else 20
            started = time.perf_counter()
            for _ in range(n):
                call()
            us = 1e6 * (time.perf_counter() - started) / n
            torch.cuda.synchronize()
            parts.append((name, us, median_us(call)))
        total_us, device_us = sum(p[1] for p in parts), sum(p[2] for p in parts)
        report.note(f"a layer of {T} tokens: host {total_us:.0f} us, device {device_us:.0f} us (sum of parts)")
        report.note(
            "  " + ", ".join(f"{name} {host:.0f}/{device:.0f}" for name, host, device in parts) + "  (host/device us)"
        )


SECTIONS: dict[str, tuple[Callable[[Report], None], ...]] = {
    "dequant": (bench_dequant,),
    "dense": (bench_dense,),
    "routing": (bench_routing,),
    "experts": (bench_experts,),
    "attention": (bench_attention, bench_other_attention),
    "host": (bench_host,),
    "tiles": (bench_tiles,),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--tb-per-s", type=float, default=4.3, help="memory bandwidth that floors are taken from")
    parser.add_argument("--tflops", type=float, default=782.0, help="bfloat16 product rate that floors are taken from")
    parser.add_argument("--json", type=Path, help="write all rows to this file")
    args = parser.parse_args()
    torch.manual_seed(0)
    report = Report(args.tb_per_s, args.tflops)
    report.note(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    for section in args.only:
        started = time.perf_counter()
        for bench in SECTIONS[section]:
            bench(report)
        report.note(f"-- {section}: {time.perf_counter() - started:.0f} s")
    if args.json:
        args.json.write_text(json.dumps(report.rows, indent=1) + "\n")
    report.note(f"{report.n_wrong} wrong")
    return int(report.n_wrong > 0)


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
