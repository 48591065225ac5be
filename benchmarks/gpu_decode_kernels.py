"""Checks and times the kernels of decoding on one GPU, each next to the least time its bytes can take.

    python benchmarks/gpu_decode_kernels.py [--only check dense route experts chain cells] [--tune] [--out FILE]

Sizes are those of qwen3-30b-a3b: 48 layers, 2048 wide, 32 / 4 heads of 128, 8 of 128 experts of 768, dense matrices in
bfloat16, experts in Q8_0. A call is recorded many times in one CUDA graph, each on weights of its own, so that they
come from memory and not from the L2 cache; a time is the graph's divided by the number of calls, launch included.
Prints a line of JSON per measurement, and a last one with the number of wrong results, which is the exit status.
--tune: times other cuts than those of `kernels/triton/tuning.py` too, and other ways to read rows.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from gpu_report import BF16, CUDA, error, graph_us, normal, q8_0, random_weight

from overspill.gguf.types import TensorType
from overspill.kernels import Steps, ref
from overspill.kernels.triton import few_experts, launch, make_ops, norm, routing, rows, skinny
from overspill.kernels.triton.decode import DECODERS
from overspill.kernels.triton.few_experts import Pairs, add_experts
from overspill.kernels.triton.launch import Tuning
from overspill.kernels.triton.moe import MoeOp
from overspill.kernels.triton.tuning import (
    EXPERT_GATE_UP,
    ROUTER,
    SEVERAL,
    RowTile,
    down_tile,
    tile_of,
    token_tile,
)
from overspill.kernels.triton.workspace import Workspace
from overspill.quant.dequant import dequantize
from overspill.quant.experts import NO_LIMIT, NO_VECTORS, Activation, ExpertVectors, ExpertWeights
from overspill.quant.q8_rows import decode, encode
from overspill.quant.qtensor import QTensor

T = TensorType
D, F, E, K, H, G, A, V = 2048, 768, 128, 8, 32, 4, 128, 151936
TB_PER_S = 4.0
EPS = 1e-6
SILU = norm.gated(Activation.SILU, NO_LIMIT)
_MIN_BYTES = 400e6  # what a graph should touch at least, many times the L2 cache


class Lines:
    """JSON lines on the screen and in a file."""

    def __init__(self, out: Path | None) -> None:
        self._file = out.open("w") if out else None
        self.n_wrong = 0

    def add(self, **row: Any) -> None:
        self.n_wrong += not row.get("ok", True)
        line = json.dumps(row)
        print(line, flush=True)
        if self._file:
            print(line, file=self._file, flush=True)

    def timed(self, name: str, us: float, n_bytes: float, **more: Any) -> None:
        rate = n_bytes / us / 1e3
        self.add(name=name, us=round(us, 2), gb_s=round(rate), percent=round(rate / TB_PER_S / 10, 1), **more)

    def checked(self, name: str, got: torch.Tensor, wanted: torch.Tensor, limit: float, **more: Any) -> None:
        e = error(got, wanted)
        self.add(name=name, error=float(f"{e:.3g}"), ok=e <= limit, **more)


def replayed(call: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What a call makes when it is recorded and replayed."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    graph.replay()
    return out.clone()


def copies_for(n_bytes: float) -> int:
    return max(2, min(32, round(_MIN_BYTES / n_bytes) + 1))


def bf16(*shape: int) -> QTensor:
    return QTensor((normal(*shape, dtype=BF16) * 0.02).view(torch.uint8), T.BF16, shape)


def sane(type: TensorType, *shape: int) -> QTensor:
    """Random blocks whose values are finite."""
    for _ in range(100):
        q = random_weight(type, *shape)
        if type in (T.F32, T.F16, T.BF16):
            plain = {T.F32: torch.float32, T.F16: torch.float16, T.BF16: BF16}[type]
            return QTensor(normal(*shape).to(plain).view(torch.uint8), type, shape)
        blocks = q.data.view(-1, type.block.n_bytes)
        if type is T.MXFP4:
            blocks[:, 0] = 120
        # Small scales, wherever the type keeps them.
        for at in {T.Q3_K: (108,), T.Q6_K: (208,), T.Q2_K: (80, 82)}.get(type, (0, 2)[: 1 + (type in _TWO_SCALES)]):
            if type is not T.MXFP4:
                blocks[:, at], blocks[:, at + 1] = 0, 0x14
        if bool(torch.isfinite(dequantize(q)).all()):
            return q
    raise AssertionError(type)


_TWO_SCALES = (T.Q4_1, T.Q5_1, T.Q4_K, T.Q5_K)


def check(lines: Lines) -> None:
    """Every kernel, type and class of numbers of tokens against float64."""
    ops = make_ops(CUDA)
    for type, n_tokens in product(DECODERS, (1, 2, 5, 16, 32)):
        x, weight = normal(n_tokens, 1024), sane(type, 333, 1024)
        x = x if type is T.F32 else x.bfloat16()
        wanted = x.double() @ dequantize(weight).double().T
        lines.checked("linear", ops.linear(x, weight), wanted, 4e-3, type=type.name, tokens=n_tokens)
    for n_tokens in (1, 3, 32):
        x, gain, y = 3 * normal(n_tokens, D), normal(D), normal(n_tokens, 512)
        weights = [bf16(n, D) for n in (4096, 512, 512)]
        normed = ref.rms_norm(x, gain, EPS)
        wanted = [normed.double() @ dequantize(w).double().T for w in weights]
        got = ops.norm_linears(x, gain, EPS, weights, ())  # type: ignore[misc]
        lines.checked("norm_linears", torch.cat(got, 1), torch.cat(wanted, 1), 5e-3, tokens=n_tokens)
        got = ops.add_linear(y, normed, weights[1])  # type: ignore[misc]
        lines.checked("add_linear", got, y + wanted[1], 5e-3, tokens=n_tokens)
        check_route(lines, x, gain)
    for type, n_tokens in product(DECODERS, (1, 5)):
        check_experts(lines, (type,) * 3, n_tokens, NO_VECTORS)
    vectors = ExpertVectors((normal(16, 256), normal(16, 256), normal(16, 512)), (normal(16), None, normal(16)))
    for n_tokens in (1, 16):
        check_experts(lines, (T.Q4_K, T.Q4_K, T.Q6_K), n_tokens, vectors)
    check_cuts(lines)


def check_route(lines: Lines, x: torch.Tensor, gain: torch.Tensor) -> None:
    router = normal(E, D) / D**0.5
    got = routing.route(x, gain, EPS, router, routing.Choice(K), dtype=BF16)
    normed = ref.rms_norm(x.double(), gain.double(), EPS)
    mix, ids = (normed @ router.double().T).topk(K, -1)
    same = float((got.ids == ids).float().mean())
    lines.checked("route, normed", got.normed, normed, 4e-3, tokens=len(x))
    e = error(got.mix, mix.softmax(-1))
    lines.add(name="route, choice", tokens=len(x), same_ids=same, error=e, ok=same > 0.98 and e < 1e-3)


def expert_case(types: Sequence[TensorType], n_tokens: int, vectors: ExpertVectors) -> tuple[Any, ...]:
    shapes = ((16, 256, 512), (16, 256, 512), (16, 512, 256))
    parts = [sane(type, *shape) for type, shape in zip(types, shapes, strict=True)]
    ids = torch.stack([torch.randperm(16, device=CUDA)[:4] for _ in range(n_tokens)]).int()
    return normal(n_tokens, 512).bfloat16(), ids, normal(n_tokens, 4).abs(), ExpertWeights(*parts, vectors=vectors)


def check_experts(lines: Lines, types: Sequence[TensorType], n_tokens: int, vectors: ExpertVectors) -> None:
    x, ids, mix, weights = expert_case(types, n_tokens, vectors)
    got, wanted = torch.zeros(n_tokens, 512, device=CUDA), torch.zeros(n_tokens, 512, device=CUDA)
    MoeOp(Workspace(CUDA), BF16, may_use_torch=False)(x, ids, mix, weights, Activation.SILU, got)
    ref.experts(x.float(), ids, mix, weights, Activation.SILU, wanted)
    lines.checked("experts", got, wanted, 8e-3, type=types[2].name, tokens=n_tokens, vectors=not vectors.is_empty)


def check_cuts(lines: Lines) -> None:
    """Two calls, ascending, are one bit for bit; what is in no slot leaves no trace."""
    x, ids, mix, weights = expert_case((T.Q8_0,) * 3, 7, NO_VECTORS)
    slot_of = torch.arange(16, dtype=torch.int32, device=CUDA)
    maps = [slot_of, torch.where(slot_of < 6, slot_of, -1), torch.where(slot_of < 6, -1, slot_of)]
    whole, cut, none = (torch.ones(7, 512, device=CUDA) for _ in range(3))
    for out, used in ((whole, maps[:1]), (cut, maps[1:]), (none, [torch.full_like(slot_of, -1)])):
        for m in used:
            add_experts(x, Pairs(ids, mix, m), weights.parts, NO_VECTORS, SILU, out, dtype=BF16)
    lines.add(name="experts in two calls", ok=torch.equal(whole, cut) and bool((none == 1).all()))


Call = Callable[[RowTile], Sequence[Callable[[], object]]]


def tuned(lines: Lines, name: str, usual: RowTile, others: Iterable[RowTile], calls: Call, n_bytes: float) -> None:
    """Time the usual cut, and others if there are any."""
    for tile in dict.fromkeys((usual, *others)):
        made = calls(tile)
        more = {"tile": [*tile[:2], *tile.tuning], "usual": tile == usual}
        lines.timed(name, graph_us(made, 2 * len(made)), n_bytes, **more)


def tiles(is_tuning: bool, rows: Sequence[int], widths: Sequence[int], warps: Sequence[int],
          stages: Sequence[int] = (1,)) -> list[RowTile]:  # fmt: skip
    if not is_tuning:
        return []
    return [RowTile(r, w, Tuning(n, s)) for r, w, n, s in product(rows, widths, warps, stages)]


def dense(lines: Lines, is_tuning: bool) -> None:
    """Projections and the head, of one token and of several."""
    x, gain, y = normal(1, D), normal(D), normal(1, D)
    for name, sizes, width, is_normed in (
        ("q k v with norm", (H * A, G * A, G * A), D, True),
        ("output projection with residual", (D,), H * A, False),
        ("head with norm", (V,), D, True),
    ):
        n_bytes = 2.0 * sum(sizes) * width
        made = [[bf16(n, width) for n in sizes] for _ in range(copies_for(n_bytes))]
        inputs = x if is_normed else normal(1, width)
        norms, residual = (skinny.Norm(gain, EPS), None) if is_normed else (None, y)

        def calls(tile: RowTile, made=made, inputs=inputs, norms=norms, residual=residual):
            return [lambda w=w: skinny.multiply(inputs, w, dtype=BF16, norm=norms, y=residual, tile=tile) for w in made]

        others = tiles(is_tuning, (4, 8), (1024, 2048), (4,))
        tuned(lines, f"{name}, 1 token", token_tile(T.BF16, sum(sizes)), others, calls, n_bytes)
        for n_tokens in (8, 16):
            some = normal(n_tokens, width).bfloat16()

            def several(tile: RowTile, made=made, some=some):
                return [lambda w=w: skinny.multiply(some, w, dtype=BF16, tile=tile) for w in made]

            others = tiles(is_tuning and n_tokens == 16, (16, 32), (128,), (2,), (4,))
            tuned(lines, f"{name}, {n_tokens} tokens", tile_of(SEVERAL, T.BF16), others, several, n_bytes)
            plain = [[w.data.view(BF16) for w in weights] for weights in made]
            of_torch = [lambda w=w, some=some: [torch.mm(some, m.T, out_dtype=torch.float32) for m in w] for w in plain]
            lines.timed(f"{name}, {n_tokens} tokens, torch", graph_us(of_torch, 2 * len(of_torch)), n_bytes)
    for type in (T.Q8_0, T.Q4_K, T.Q6_K, T.MXFP4, T.Q4_0):
        made = [sane(type, 4096, D) for _ in range(16)]
        for n_tokens in (1, 8):
            some = normal(n_tokens, D).bfloat16()

            def quantised(tile: RowTile, made=made, some=some):
                return [lambda w=w: skinny.multiply(some, [w], dtype=BF16, tile=tile) for w in made]

            others = tiles(is_tuning and n_tokens == 1, (4,), (1024,), (2, 4))
            usual = token_tile(type, 4096) if n_tokens == 1 else tile_of(SEVERAL, type)
            tuned(lines, f"{type.name} 4096 x {D}, {n_tokens} tokens", usual, others, quantised, made[0].n_bytes)


def route(lines: Lines, is_tuning: bool) -> None:
    for n_tokens in (1, 8, 32):
        x, gain = normal(n_tokens, D), normal(D)
        routers = [normal(E, D) / D**0.5 for _ in range(32)]

        def calls(tile: RowTile, x=x, gain=gain, routers=routers):
            return [
                lambda r=r: routing._route_few(x, gain, EPS, r, routing.Choice(K), BF16, tile=tile) for r in routers
            ]

        others = tiles(is_tuning and n_tokens == 1, (1, 2, 4), (1024, 2048), (4, 8))
        tuned(lines, f"route, {n_tokens} tokens (2 launches)", ROUTER, others, calls, 4.0 * E * D)
    logits = normal(1, E)
    us = graph_us([lambda: routing.pick_experts(logits, routing.Choice(K))], 64)
    lines.timed("  choice alone, 1 token", us, 4.0 * E)


def expert_stacks(type: TensorType, F: int, D: int, E: int) -> ExpertWeights:
    if type is T.Q8_0:
        return ExpertWeights(q8_0(E, F, D), q8_0(E, F, D), q8_0(E, D, F))
    if type is T.BF16:
        return ExpertWeights(bf16(E, F, D), bf16(E, F, D), bf16(E, D, F))
    return ExpertWeights(sane(type, E, F, D), sane(type, E, F, D), sane(type, E, D, F))


EXPERT_TILES: dict[TensorType, tuple[list[RowTile], list[RowTile]]] = {
    T.Q8_0: (
        [RowTile(r, w, Tuning(n, 1)) for r, w, n in ((4, 2048, 2), (2, 2048, 1), (4, 1024, 2), (8, 1024, 4))],
        [RowTile(r, w, Tuning(n, 1)) for r, w, n in ((1, 256, 1), (1, 256, 2), (2, 1024, 2), (4, 1024, 2))],
    ),
    T.Q4_K: (
        [RowTile(r, w, Tuning(n, 1)) for r, w, n in ((4, 1024, 4), (2, 2048, 2), (4, 1024, 2))],
        [RowTile(r, w, Tuning(n, 1)) for r, w, n in ((1, 256, 2), (2, 512, 2), (2, 1024, 4))],
    ),
    T.MXFP4: (
        [RowTile(r, w, Tuning(n, 1)) for r, w, n in ((4, 1024, 4), (2, 1024, 2), (4, 1024, 2))],
        [RowTile(r, w, Tuning(n, 1)) for r, w, n in ((4, 256, 2), (2, 512, 2), (2, 1024, 4))],
    ),
}
OTHER_ROWS = {T.Q4_K: rows.decoded_rows, T.MXFP4: rows.decoded_rows}


def experts(lines: Lines, is_tuning: bool) -> None:
    """One token and several, in other cuts and read in another way; several against the way of many tokens."""
    for type, shape, token_counts in (
        (T.Q8_0, (F, D, E, K), (1, 8, 16)),
        (T.MXFP4, (2880, 2880, 32, 4), (1, 8)),
        (T.Q4_K, (F, D, E, K), (1, 8)),
    ):
        n_ff, n_embd, n_experts, n_used = shape
        weights = expert_stacks(type, n_ff, n_embd, n_experts)
        slot_of = torch.arange(n_experts, dtype=torch.int32, device=CUDA)
        expert_bytes = sum(q.n_bytes for q in weights.parts) / n_experts
        others = EXPERT_TILES[type] if is_tuning else ([], [])
        ways = ("usual", "other") if is_tuning and type in OTHER_ROWS else ("usual",)
        for way, n_tokens in product(ways, token_counts):
            x, out = normal(n_tokens, n_embd).bfloat16(), normal(n_tokens, n_embd)
            mix = normal(n_tokens, n_used).abs()
            chosen = different_ids(n_tokens, n_experts, n_used)
            usual = tile_of(EXPERT_GATE_UP, type), down_tile(type, n_tokens, 1)
            cuts = dict.fromkeys((usual, *((t, usual[1]) for t in others[0]), *((usual[0], t) for t in others[1])))
            n_bytes = expert_bytes * sum(len(ids.unique()) for ids in chosen) / len(chosen)
            reader = rows.READERS[type]
            if way == "other":
                rows.READERS[type] = reader._replace(rows=OTHER_ROWS[type])
            for tiles in cuts:
                call = partial(call_experts, x, mix, slot_of, weights, out, tiles)
                calls = [partial(call, ids) for ids in chosen]
                cut = [[*t[:2], *t.tuning] for t in tiles]
                name = f"experts {type.name}, {n_tokens} tokens"
                lines.timed(name, graph_us(calls, 2 * len(calls)), n_bytes, way=way, tiles=cut, usual=tiles == usual)
            rows.READERS[type] = reader
            if way == "usual" and n_tokens > 1:
                us = way_of_many_us(x, chosen, mix, weights, out)
                lines.timed(f"experts {type.name}, {n_tokens} tokens, way of many", us, n_bytes)


def call_experts(
    x: torch.Tensor,
    mix: torch.Tensor,
    slot_of: torch.Tensor,
    weights: ExpertWeights,
    out: torch.Tensor,
    tiles: tuple[RowTile, RowTile],
    ids: torch.Tensor,
) -> None:
    pairs = Pairs(ids, mix, slot_of)
    add_experts(x, pairs, weights.parts, NO_VECTORS, SILU, out, dtype=BF16, tiles=tiles)


def different_ids(n_tokens: int, n_experts: int, n_used: int) -> list[torch.Tensor]:
    """Choices `[T, K]` that follow each other with different experts."""
    if n_tokens == 1:
        every = torch.randperm(n_experts, device=CUDA).int()
        return list(every.view(-1, 1, n_used))
    return [
        torch.stack([torch.randperm(n_experts, device=CUDA)[:n_used] for _ in range(n_tokens)]).int() for _ in range(8)
    ]


def way_of_many_us(
    x: torch.Tensor, chosen: list[torch.Tensor], mix: torch.Tensor, weights: ExpertWeights, out: torch.Tensor
) -> float:
    op = MoeOp(Workspace(CUDA), BF16, may_use_torch=False)
    limit, few_experts.FEW_TOKENS = few_experts.FEW_TOKENS, 0
    try:
        return graph_us([lambda i=i: op(x, i, mix, weights, Activation.SILU, out) for i in chosen], 2 * len(chosen))
    finally:
        few_experts.FEW_TOKENS = limit


def chain(lines: Lines, is_tuning: bool) -> None:
    """All launches of a step of 48 layers and the head, with what it would make of tokens/s; weights of 8 layers."""
    ops = make_ops(CUDA)
    n_layers, n_own, n_cells = 48, 8, 1024
    q_dim, kv_dim = H * A, G * A
    layers = [
        ([bf16(n, D) for n in (q_dim, kv_dim, kv_dim)], bf16(D, q_dim), normal(E, D), expert_stacks(T.Q8_0, F, D, E))
        for _ in range(n_own)
    ]
    head, gain, head_gain = bf16(V, D), normal(D).abs(), normal(A).abs()
    for n_tokens in (1, 4, 16):
        x0 = normal(n_tokens, D)
        caches = [torch.zeros(n_tokens, G, n_cells, A, dtype=BF16, device=CUDA) for _ in range(2)]
        steps = Steps(
            torch.arange(n_tokens, dtype=torch.int32, device=CUDA),
            torch.full((n_tokens,), 600, dtype=torch.int32, device=CUDA),
        )
        angles = (normal(n_tokens, A // 2).cos(), normal(n_tokens, A // 2).sin())

        def attend(x, layer, steps=steps, angles=angles, caches=caches):
            q, k, v = ops.norm_linears(x, gain, EPS, layer[0], ())
            q = ops.prepare_steps(q, k, v, caches, steps, angles, (head_gain, head_gain), eps=EPS, is_interleaved=False)
            return ops.add_linear(x, ops.attend_steps(q, *caches, A, steps, scale=A**-0.5), layer[1])

        def step(x0=x0, attend=attend):
            x = x0
            for i in range(n_layers):
                layer = layers[i % n_own]
                x = attend(x, layer)
                normed, ids, mix = ops.route(
                    x, gain, layer[2], None, None, eps=EPS, n_used=K, gating=1, is_normalised=True, scale=1.0
                )
                ops.experts(normed, ids, mix, layer[3], Activation.SILU, x)
            return ops.norm_linears(x, gain, EPS, [head], ())[0]

        n_bytes = n_layers * (2.0 * D * 2 * (q_dim + kv_dim) + 3 * K * F * D * 34 / 32) + 2.0 * V * D
        wanted = step()
        for chain_from in (None, (9, 0)):
            launch.CHAIN_FROM, usual = chain_from, launch.CHAIN_FROM
            us = graph_us([step], 1)
            same = all(torch.equal(replayed(step), wanted) for _ in range(3))
            more = {"chained": chain_from is not None, "ok": same, "tokens_per_s": round(n_tokens * 1e6 / us, 1)}
            lines.timed(f"step of {n_tokens} tokens", us, n_bytes, **more)
            launch.CHAIN_FROM = usual


def cells(lines: Lines, is_tuning: bool) -> None:
    """Attention of a step over long sequences, for each kind of cells; and what prompts decode first."""
    ops, n_cells, position = make_ops(CUDA), 1 << 15, 30_000
    for n_tokens in (1, 8):
        q, k, v = normal(n_tokens, H, A), *(normal(n_tokens, G, n_cells, A, dtype=BF16) for _ in range(2))
        steps = Steps(
            torch.arange(n_tokens, dtype=torch.int32, device=CUDA),
            torch.full((n_tokens,), position, dtype=torch.int32, device=CUDA),
        )
        for kind in ("bf16", "f16", "q8_0"):
            stored = {"bf16": lambda x: x, "f16": lambda x: x.half(), "q8_0": encode}[kind](torch.stack([k, v]))
            seen = (decode(stored, A) if kind == "q8_0" else stored)[:, :, :, : position + 1].double()
            wanted = torch.stack(
                [ref.attention(q[t : t + 1].double(), *seen[:, t], scale=A**-0.5)[0] for t in range(n_tokens)]
            )
            run = partial(ops.attend_steps, q, *stored, A, steps, scale=A**-0.5)  # type: ignore[misc, arg-type]
            lines.checked("attend_steps", run(), wanted, 8e-3, cells=kind, tokens=n_tokens)
            n_bytes = stored[..., : position + 1, :].numel() * stored.element_size()
            lines.timed("attend_steps", graph_us([run], 8), n_bytes, cells=kind, tokens=n_tokens)
            if kind == "q8_0" and n_tokens == 1:
                read = partial(ops.q8_rows.read, list(stored[:, 0, :, : position + 1]), (A, A))
                lines.timed("decode for prompts", graph_us([read], 8), n_bytes * (1 + 2 * 32 / 34), cells=kind)


SECTIONS: dict[str, Callable[[Lines, bool], None]] = {
    "check": lambda lines, is_tuning: check(lines),
    "dense": dense,
    "route": route,
    "experts": experts,
    "chain": chain,
    "cells": cells,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--out", type=Path, help="write all lines to this file too")
    args = parser.parse_args()
    torch.manual_seed(0)
    lines = Lines(args.out)
    lines.add(name="machine", gpu=torch.cuda.get_device_name(), torch=torch.__version__)
    for section in args.only:
        SECTIONS[section](lines, args.tune)
    lines.add(name="end", wrong=lines.n_wrong)
    return int(lines.n_wrong > 0)


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
