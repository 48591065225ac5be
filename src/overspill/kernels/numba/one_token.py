"""Half a layer for one token as steps: what the ops of `rows`, `matmul`, `attend` and `pick` do, one after the other,
by the same compiled functions, hence with the same bits.

Everything in their calls is written once: where the token's cells are is found out by compiled code (`token_cells`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from overspill.kernels import AttentionWeights, RouterWeights
from overspill.kernels.numba.attend import AttentionCall, attend_address, scores_bytes
from overspill.kernels.numba.crew import Crew, n_threads
from overspill.kernels.numba.matmul import product_steps
from overspill.kernels.numba.native import Step, block_step_address, float_bits
from overspill.kernels.numba.panel import ADD, STORE
from overspill.kernels.numba.pick import pick_address
from overspill.kernels.numba.pieces import Pieces, circumstances_of
from overspill.kernels.numba.rows import (
    HEADS_BYTES,
    Heads,
    Rotation,
    check_rows,
    norm_rows_address,
    prepare_heads_address,
)
from overspill.kernels.numba.token_cells import LayerCells
from overspill.kernels.numba.workspace import Memory
from overspill.quant.qtensor import QTensor

_TASKS_PER_THREAD = 2


class _Sizes(NamedTuple):
    """D model, H heads, G kv heads, A channels of a key and B of a value, C cells of a sequence."""

    D: int
    H: int
    G: int
    A: int
    B: int
    C: int


def attention_steps(
    w: AttentionWeights, x: Tensor, cells: tuple[Tensor, Tensor], angles: tuple[Tensor, Tensor], pieces: Pieces
) -> tuple[list[Step], LayerCells]:
    """Norm, q, k, v, heads, attention and output projection, added to x `[1, D]`; and its cells.

    cells: keys `[S, G, C, A]` and values `[S, G, C, B]`. angles: cos and sin `[1, n_rot / 2]`.
    """
    keys, values = cells
    sizes = _sizes(w, x, keys, values, angles)
    D, H, G, A, B, C = sizes
    normed, attended = pieces.tensor("normed", 1, D), pieces.tensor("attended", 1, H * B)
    q, k, v = (pieces.tensor(name, 1, n) for name, n in (("q", H * A), ("k", G * A), ("v", G * B)))
    queries = pieces.tensor("queries", H, A)
    norm = pieces.block(norm_rows_address(), w.eps, x.data_ptr(), normed.data_ptr(), w.gain.data_ptr(), 1, D)
    outs = [(y.data_ptr(), 4 * y.shape[1]) for y in (q, k, v)]
    project = product_steps((normed.data_ptr(), 4 * D), (1, D), (w.q, w.k, w.v), outs, STORE, pieces.memory)
    gains = [0 if gain is None else gain.data_ptr() for gain in w.gains]
    heads = pieces.memory("heads", 3 * HEADS_BYTES + 8 * len(Rotation._fields))
    heads.write(
        Heads(q.data_ptr(), 4 * H * A, queries.data_ptr(), 4 * H * A, 4 * A, H, A, gains[0])
        + Heads(k.data_ptr(), 4 * G * A, 0, 4 * keys.stride(2), 4 * keys.stride(1), G, A, gains[1])
        + Heads(v.data_ptr(), 4 * G * B, 0, 4 * values.stride(2), 4 * values.stride(1), G, B, 0)
        + Rotation(angles[0].data_ptr(), angles[1].data_ptr(), angles[0].shape[1], int(w.is_interleaved))
    )
    prepare = pieces.block(prepare_heads_address(), w.eps, heads.address, 1)
    attend = _attention_call(w, sizes, (queries, attended), (keys, values), pieces)
    add = product_steps(
        (attended.data_ptr(), 4 * H * B), (1, H * B), (w.output,), [(x.data_ptr(), 4 * D)], ADD, pieces.memory
    )
    steps = [
        Step(block_step_address(5), norm.address),
        *project,
        Step(block_step_address(2), prepare.address),
        Step(attend_address(), attend.address, n_threads()),
        *add,
    ]
    found = LayerCells(
        *(keys.data_ptr(), 4 * keys.stride(0), 4 * keys.stride(2)),
        *(values.data_ptr(), 4 * values.stride(0), 4 * values.stride(2)),
        n_ring=C,
        window=C if w.window is None else w.window,
        heads=heads.address,
        attention=attend.address,
        i_angles=0,
    )
    return steps, found


def _sizes(w: AttentionWeights, x: Tensor, keys: Tensor, values: Tensor, angles: tuple[Tensor, Tensor]) -> _Sizes:
    check_rows(x, keys, values, *angles)
    (_, G, C, A), B, D, n_half = keys.shape, values.shape[3], x.shape[1], angles[0].shape[1]
    H = w.q.shape[0] // A
    if values.shape[:3] != keys.shape[:3]:
        raise ValueError(f"keys {tuple(keys.shape)} and values {tuple(values.shape)} do not fit each other")
    if w.q.shape != (H * A, D) or w.k.shape != (G * A, D) or w.v.shape != (G * B, D):
        raise ValueError(f"queries {w.q.shape}, keys {w.k.shape}, values {w.v.shape} do not fit {tuple(keys.shape)}")
    if x.shape != (1, D) or w.output.shape != (D, H * B) or 2 * n_half > A or H % G:
        raise ValueError(f"{tuple(x.shape)}, an output {w.output.shape}, {n_half} angles do not fit {H} heads of {B}")
    return _Sizes(D, H, G, A, B, C)


def _attention_call(
    w: AttentionWeights, sizes: _Sizes, ends: tuple[Tensor, Tensor], cells: tuple[Tensor, Tensor], pieces: Pieces
) -> Memory:
    """ends: queries and what becomes of them."""
    (_, H, G, A, B, C), (keys, values) = sizes, cells
    n_seen = C if w.window is None else min(w.window, C)
    call = pieces.memory("cells", 8 * len(AttentionCall._fields))
    call.write(
        AttentionCall(
            *(ends[0].data_ptr(), 4 * H * A, 4 * A),
            *(0, 4 * keys.stride(2), 4 * keys.stride(1)),
            *(0, 4 * values.stride(2), 4 * values.stride(1)),
            out=ends[1].data_ptr(),
            sinks=0 if w.sinks is None else w.sinks.data_ptr(),
            scores=pieces.memory("scores", n_threads() * scores_bytes(n_seen)).address,
            n_queries=1,
            n_cells=0,
            n_run=0,
            n_heads=H,
            n_kv_heads=G,
            n_channels=A,
            n_values=B,
            window=C if w.window is None else w.window,
            scale=float_bits(w.scale),
            n_tasks=min(H, _TASKS_PER_THREAD * n_threads()),
            k_ring_bytes=4 * C * keys.stride(2),
            v_ring_bytes=4 * C * values.stride(2),
        )
    )
    return call


def router_steps(w: RouterWeights, x: Tensor, pieces: Pieces) -> tuple[list[Step], tuple[Tensor, Tensor, Tensor]]:
    """Norm of x `[1, D]`, router product, choice of experts; and where they put what `kernels.Route` returns."""
    check_rows(x)
    n_model, n_experts = x.shape[1], w.router.shape[0]
    if x.shape != (1, n_model) or w.router.shape != (n_experts, n_model):
        raise ValueError(f"a router {w.router.shape} does not fit {n_model} channels")
    normed, logits = pieces.tensor("normed", 1, n_model), pieces.tensor("logits", 1, n_experts)
    ids, mix = pieces.tensor("ids", 1, w.n_used, dtype=torch.int32), pieces.tensor("mix", 1, w.n_used)
    product = norm_product_steps(w.gain, w.eps, w.router, (x, normed, logits), pieces)
    worth = pieces.memory("worth", 8 * n_experts).address
    bias = 0 if w.bias is None else w.bias.data_ptr()
    rule = (1, n_experts, w.n_used, w.gating, int(w.is_normalised))
    places = (logits.data_ptr(), bias, ids.data_ptr(), mix.data_ptr(), worth)
    pick = pieces.block(pick_address(), w.scale, *places, *rule)
    return [*product, Step(block_step_address(10), pick.address)], (normed, ids, mix)


def norm_product_steps(
    gain: Tensor, eps: float, matrix: QTensor, rows: tuple[Tensor, Tensor, Tensor], pieces: Pieces
) -> list[Step]:
    """rows: x `[1, D]`, its norm, and that times the matrix, `[1, N]`."""
    (x, normed, out), (n_rows, n_model) = rows, matrix.shape
    norm = pieces.block(norm_rows_address(), eps, x.data_ptr(), normed.data_ptr(), gain.data_ptr(), 1, n_model)
    ends = [(out.data_ptr(), 4 * n_rows)]
    product = product_steps((normed.data_ptr(), 4 * n_model), (1, n_model), (matrix,), ends, STORE, pieces.memory)
    return [Step(block_step_address(5), norm.address), *product]


class TokenRouter:
    """Norm, router product, choice of experts."""

    def __init__(self, weights: RouterWeights) -> None:
        self._weights = weights
        self._written_for: tuple[object, ...] = ()

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`kernels.TokenRouter`."""
        circumstances = circumstances_of(x)
        if self._written_for != circumstances:
            pieces = Pieces()
            self._x = pieces.tensor("x", *x.shape)
            steps, self._found = router_steps(self._weights, self._x, pieces)
            self._crew = Crew(steps, n_threads(), pieces.kept)
            self._written_for = circumstances
        self._x.copy_(x)
        self._crew.run()
        normed, ids, mix = self._found
        return normed.clone(), ids.clone(), mix.clone()
