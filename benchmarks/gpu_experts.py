"""The routed experts on one GPU: whole, step by step, from blocks, and under different tiles."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import triton
from gpu_report import BF16, CUDA, Report, attention_flop, error, normal, q8_0, random_weight

from overspill.gguf.types import TensorType
from overspill.kernels import ref
from overspill.kernels.triton import Workspace, dequant, flash, grouped, grouped_torch
from overspill.kernels.triton.combine import combine
from overspill.kernels.triton.launch import Tuning
from overspill.kernels.triton.moe import MoeOp
from overspill.kernels.triton.norm import gated_silu
from overspill.kernels.triton.sort import sort_pairs
from overspill.kernels.triton.wide import stacks_in, wide_bytes, widen
from overspill.quant.dequant import dequantize
from overspill.quant.experts import Activation, ExpertWeights
from overspill.quant.qtensor import QTensor


class Layer(NamedTuple):
    """Shape of a layer's experts; n_slab: how many of them are multiplied."""

    name: str
    n_tokens: int
    n_experts: int
    n_slab: int
    n_used: int
    D: int
    F: int


LAYERS = (
    Layer("qwen3-30b, 4096 tokens", 4096, 128, 128, 8, 2048, 768),
    Layer("qwen3-30b, 512 tokens", 512, 128, 128, 8, 2048, 768),
    Layer("qwen3-30b, 1 token", 1, 128, 128, 8, 2048, 768),
    Layer("gpt-oss-20b, 4096 tokens", 4096, 32, 32, 4, 2880, 2880),
    Layer("deepseek, 4096 tokens, slab of 32", 4096, 256, 32, 8, 7168, 2048),
)


class Job(NamedTuple):
    """A layer's experts with everything the products need."""

    layer: Layer
    x: torch.Tensor
    ids: torch.Tensor
    mix: torch.Tensor
    wide: ExpertWeights
    stacks: grouped.Stacks


def job_of(layer: Layer) -> Job:
    n, D, F = layer.n_slab, layer.D, layer.F
    buffer = torch.empty(wide_bytes(n, D, F), dtype=torch.uint8, device=CUDA)
    stacks = stacks_in(buffer, n, F, D, BF16)
    for stack in stacks:
        stack.normal_(std=D**-0.5)
    ids = torch.rand(layer.n_tokens, layer.n_experts, device=CUDA).topk(layer.n_used, -1).indices.int()
    mix = torch.rand(layer.n_tokens, layer.n_used, device=CUDA)
    gate, up, down = (QTensor(s.view(torch.uint8), TensorType.BF16, tuple(s.shape)) for s in stacks)
    slot_of = torch.arange(layer.n_experts, dtype=torch.int32)
    slot_of[n:] = -1
    wide = ExpertWeights(gate, up, down, slot_of.numpy())
    return Job(layer, normal(layer.n_tokens, D, dtype=BF16), ids, mix, wide, stacks)


def expected(job: Job, n_tokens: int) -> torch.Tensor:
    """What the experts add for the first tokens, float32 products of the bfloat16 numbers."""
    x, out = job.x[:n_tokens].float(), torch.zeros(n_tokens, job.layer.D, device=CUDA)
    for e in range(job.layer.n_slab):
        tokens, ranks = (job.ids[:n_tokens] == e).nonzero(as_tuple=True)
        if len(tokens):
            gate, up, down = (stack[e].float() for stack in job.stacks)
            hidden = ref.swiglu(x[tokens] @ gate.T, x[tokens] @ up.T)
            out.index_add_(0, tokens, hidden @ down.T * job.mix[tokens, ranks, None])
    return out


def bench_experts(report: Report) -> None:
    for layer in LAYERS:
        job = job_of(layer)
        n_pairs = int((job.ids < layer.n_slab).sum())
        flop = 6.0 * n_pairs * layer.D * layer.F
        used = len(job.ids[job.ids < layer.n_slab].unique())
        n_bytes = 6 * used * layer.D * layer.F
        n_checked = min(layer.n_tokens, 256)
        wanted = expected(job, n_checked)
        for may_use_torch in (False, True):
            op = MoeOp(Workspace(CUDA), BF16, may_use_torch=may_use_torch)
            if may_use_torch and not op._is_for_torch(job.ids.numel() / layer.n_experts, job.wide):
                continue
            out = torch.zeros(layer.n_tokens, layer.D, device=CUDA)
            op(job.x, job.ids, job.mix, job.wide, Activation.SILU, out)
            is_right = error(out[:n_checked], wanted) < 1e-2
            name = f"experts, {layer.name}, {'torch' if may_use_torch else 'own'} products"
            run = partial(op, job.x, job.ids, job.mix, job.wide, Activation.SILU, out)
            report.add(name, run, flop=flop, n_bytes=n_bytes, is_right=is_right)
        bench_steps(report, job)
        torch.cuda.empty_cache()
    bench_quantised(report)


def bench_steps(report: Report, job: Job) -> None:
    """The parts of a layer's experts, one by one."""
    layer, workspace = job.layer, Workspace(CUDA)
    tile_m = grouped.tile_rows(job.ids.numel(), layer.n_experts)
    slot_of = torch.from_numpy(job.wide.slot_of).to(CUDA)
    run = partial(sort_pairs, job.ids, slot_of, 0, layer.n_slab, tile_m, workspace)
    rows = run()
    n_rows, n_all = int(rows.offsets[-1]), job.ids.numel()
    order = slot_of[job.ids.flatten().long()].masked_fill(slot_of[job.ids.flatten().long()] < 0, layer.n_slab)
    is_right = torch.equal(rows.order[:n_rows].long(), order.sort(stable=True).indices[:n_rows])
    report.add(f"  sort {n_all} pairs", run, n_bytes=12 * n_all, is_right=is_right)
    hidden = torch.empty(n_all, layer.F, dtype=BF16, device=CUDA)
    y = torch.empty(n_all, layer.D, dtype=BF16, device=CUDA)
    shape = grouped.Shape(layer.n_used, layer.D, layer.F)
    extras = grouped.Extras(None, (None, None, None), (None, None, None))
    flop = 2.0 * n_rows * layer.D * layer.F
    run = partial(grouped.gate_up, job.x, job.stacks, rows, hidden, extras, shape, gated_silu, tile_m)
    report.add(f"  own gate_up + swiglu, gathered ({tile_m} rows a tile)", run, flop=2 * flop)
    report.add("  own down", partial(grouped.down, hidden, job.stacks, rows, y, extras, shape, tile_m), flop=flop)
    out = torch.zeros(layer.n_tokens, layer.D, device=CUDA)
    run = partial(combine, out, y, job.ids, job.mix, rows.inverse)
    report.add("  combine", run, n_bytes=2 * n_rows * layer.D + 8 * out.numel())
    if layer.n_tokens >= 512:
        ends, whole = rows.offsets[1:], torch.cat(job.stacks[:2], 1)
        run = partial(grouped_torch.gather, job.x, rows, layer.n_used, y)
        report.add("  gather", run, n_bytes=2 * n_rows * layer.D + 2 * job.x.numel())
        gate_up = torch._grouped_mm(y, whole.transpose(1, 2), offs=ends)
        run = partial(torch._grouped_mm, y, whole.transpose(1, 2), offs=ends)
        report.add("  torch gate_up", run, flop=2 * flop)
        run = partial(grouped_torch.activate, gate_up, rows, gated_silu, hidden)
        report.add("  swiglu of gate_up", run, n_bytes=6 * n_rows * layer.F)
        run = partial(torch._grouped_mm, hidden, job.stacks.down.transpose(1, 2), offs=ends)
        report.add("  torch down", run, flop=flop)


def bench_quantised(report: Report) -> None:
    """Widening a layer, and experts straight from Q8_0 blocks."""
    layer = LAYERS[0]
    E, D, F = layer.n_experts, layer.D, layer.F
    weights = ExpertWeights(q8_0(E, F, D), q8_0(E, F, D), q8_0(E, D, F))
    buffer = torch.empty(wide_bytes(E, D, F), dtype=torch.uint8, device=CUDA)
    n_bytes = sum(q.n_bytes for q in weights.parts) + len(buffer)
    wide = widen(weights, buffer)
    is_right = all(
        torch.equal(wide.parts[i][e].data.view(BF16), dequantize(weights.parts[i][e]).bfloat16())
        for i in range(3)
        for e in (0, E - 1)
    )
    report.add("widen a layer of qwen3-30b, Q8_0", lambda: widen(weights, buffer), n_bytes=n_bytes, is_right=is_right)
    op = MoeOp(Workspace(CUDA, weight_bytes=2 << 30), BF16, may_use_torch=False)
    for n_tokens in (1, 8, 64, 512, 4096):
        ids = torch.rand(n_tokens, E, device=CUDA).topk(8, -1).indices.int()
        mix, x, out = torch.rand(n_tokens, 8, device=CUDA), normal(n_tokens, D, dtype=BF16), normal(n_tokens, D)
        n_bytes = len(ids.unique()) * 3 * D * F * 34 // 32
        run = partial(op, x, ids, mix, weights, Activation.SILU, out)
        report.add(f"experts from Q8_0 blocks, {n_tokens} tokens", run, n_bytes=n_bytes, flop=6.0 * ids.numel() * D * F)


GATE_UP_TRIES = (
    (128, 128, 64, 8, 3), (128, 128, 64, 8, 4), (128, 64, 64, 4, 3), (128, 64, 64, 4, 4), (128, 64, 64, 8, 4),
    (128, 128, 32, 8, 4), (64, 128, 64, 8, 3), (64, 128, 64, 4, 3), (64, 64, 64, 4, 4), (64, 128, 128, 8, 2),
)  # fmt: skip
DOWN_TRIES = (
    (128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (128, 128, 64, 8, 4), (128, 128, 64, 4, 3), (128, 128, 64, 4, 4),
    (128, 128, 128, 8, 2), (64, 256, 64, 8, 3), (64, 256, 64, 4, 3), (64, 128, 64, 4, 4), (64, 128, 128, 4, 3),
)  # fmt: skip
FLASH_TRIES = (
    (128, 64, 8, 3), (128, 64, 8, 2), (128, 128, 8, 2), (128, 128, 8, 3), (64, 64, 4, 3), (128, 64, 4, 3),
    (64, 128, 4, 2),
)  # fmt: skip


def bench_tiles(report: Report) -> None:
    """Which tiles are fastest: for whoever sets the tables in `grouped` and `flash`."""
    bench_dequant_tiles(report)
    job = job_of(LAYERS[0])
    layer, workspace = job.layer, Workspace(CUDA)
    slot_of = torch.arange(layer.n_experts, dtype=torch.int32, device=CUDA)
    n_rows = job.ids.numel()
    hidden = torch.empty(n_rows, layer.F, dtype=BF16, device=CUDA)
    y = torch.empty(n_rows, layer.D, dtype=BF16, device=CUDA)
    shape = grouped.Shape(layer.n_used, layer.D, layer.F)
    extras = grouped.Extras(None, (None, None, None), (None, None, None))
    flop = 2.0 * n_rows * layer.D * layer.F
    for m, n, k, n_warps, n_stages in GATE_UP_TRIES:
        rows = sort_pairs(job.ids, slot_of, 0, layer.n_slab, m, workspace)
        tiles = grouped.Tiles(m, n, k, Tuning(n_warps, n_stages))
        run = partial(grouped.gate_up, job.x, job.stacks, rows, hidden, extras, shape, gated_silu, m, tiles)
        attempt(report, f"  gate_up {m} x 2*{n} x {k}, {n_warps} warps, {n_stages} stages", run, 2 * flop)
    for m, n, k, n_warps, n_stages in DOWN_TRIES:
        rows = sort_pairs(job.ids, slot_of, 0, layer.n_slab, m, workspace)
        tiles = grouped.Tiles(m, n, k, Tuning(n_warps, n_stages))
        run = partial(grouped.down, hidden, job.stacks, rows, y, extras, shape, m, tiles)
        attempt(report, f"  down {m} x {n} x {k}, {n_warps} warps, {n_stages} stages", run, flop)
    q, k_, v = normal(4096, 32, 128, dtype=BF16), *(normal(4, 16384, 128, dtype=BF16) for _ in range(2))
    for m, n, n_warps, n_stages in FLASH_TRIES:
        run = partial(flash.flash, q, k_, v, scale=0.1, tile=flash.Tile(m, n, Tuning(n_warps, n_stages)))
        attempt(
            report, f"  flash {m} x {n}, {n_warps} warps, {n_stages} stages", run, attention_flop(4096, 16384, 32, 128)
        )


def attempt(report: Report, name: str, run: Callable[[], object], flop: float) -> None:
    """Time what may not fit on the device."""
    try:
        report.add(name, run, flop=flop)
    except triton.runtime.errors.OutOfResources as e:
        report.note(f"{name}: {e}")


def bench_dequant_tiles(report: Report) -> None:
    usual = dequant._GROUPS_A_PROGRAM, dequant._TUNING
    for type in (TensorType.Q8_0, TensorType.Q4_K, TensorType.Q6_K, TensorType.MXFP4):
        weight = random_weight(type, 64, 1536, 2048)
        out = torch.empty(weight.shape, dtype=BF16, device=CUDA)
        for n_groups, n_warps in ((128, 4), (256, 4), (256, 8), (512, 4), (512, 8), (1024, 8)):
            dequant._GROUPS_A_PROGRAM, dequant._TUNING = n_groups, Tuning(n_warps)
            run = partial(dequant.dequantize_into, weight, out)
            report.add(
                f"  {type.name}, {n_groups} groups, {n_warps} warps", run, n_bytes=weight.n_bytes + 2 * out.numel()
            )
    dequant._GROUPS_A_PROGRAM, dequant._TUNING = usual
