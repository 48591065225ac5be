"""Half a layer for one token in one compiled call: what the ops of `rows`, `matmul`, `attend` and `pick` do, one after
the other, by the same compiled functions, hence with the same bits.

For one token Python costs as much as the numbers do: here it only says where the token and its cells are. Everything
else of the calls is written once, for the thread that calls and for its number of threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from overspill.kernels import AttentionWeights, RouterWeights
from overspill.kernels.numba.attend import AttentionCall, attend_address, scores_room
from overspill.kernels.numba.crew import Crew, n_threads
from overspill.kernels.numba.matmul import OUT_NUMBER, X_NUMBER, product_steps
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
from overspill.kernels.numba.workspace import Memory

# Where in a norm's block x is, before its output, and where in that of a choice the ids are, before their weights.
_X, _IDS = 2, 4
_TASKS_PER_THREAD = 2


class TokenAttention:
    """Norm, q, k, v, heads, attention, output projection, residual."""

    def __init__(self, weights: AttentionWeights) -> None:
        self._weights = weights
        self._written_for: tuple[object, ...] = ()

    def __call__(self, x: Tensor, keys: Tensor, values: Tensor, position: int, angles: tuple[Tensor, Tensor]) -> Tensor:
        """`kernels.TokenAttention`."""
        circumstances = circumstances_of(x, keys, values, angles[0])
        if self._written_for != circumstances:
            self._write(x, keys, values, angles)
            self._written_for = circumstances
        w, out = self._weights, x.clone()
        first = 0 if w.window is None else max(0, position - w.window + 1)
        n_cells, n_ring = position + 1 - first, keys.shape[1]
        own, first = position % n_ring, first % n_ring
        k_address, v_address = keys.data_ptr(), values.data_ptr()
        k_stride, v_stride = 4 * keys.stride(1), 4 * values.stride(1)
        self._norm.write((x.data_ptr(),), _X)
        self._heads.write((k_address + own * k_stride,), len(Heads._fields) + _HEADS_OUT)
        self._heads.write((v_address + own * v_stride,), 2 * len(Heads._fields) + _HEADS_OUT)
        self._heads.write((angles[0].data_ptr(), angles[1].data_ptr()), 3 * len(Heads._fields))
        self._add.write((out.data_ptr(),), OUT_NUMBER)
        self._cells.write((k_address + first * k_stride,), _K)
        self._cells.write((v_address + first * v_stride,), _V)
        self._cells.write((scores_room(n_cells, n_threads()),), _SCORES)
        self._cells.write((n_cells, n_ring - first), _N_CELLS)
        self._cells.write((0,), _NEXT_TASK)
        self._crew.run()
        return out

    def _write(self, x: Tensor, keys: Tensor, values: Tensor, angles: tuple[Tensor, Tensor]) -> None:
        check_rows(x, keys, values, *angles)
        w, pieces, n_model, n_half = self._weights, Pieces(), x.shape[1], angles[0].shape[1]
        (G, _, A), B = keys.shape, values.shape[2]
        H = w.q.shape[0] // A
        if w.q.shape != (H * A, n_model) or w.k.shape != (G * A, n_model) or w.v.shape != (G * B, n_model):
            raise ValueError(f"queries {w.q.shape}, keys {w.k.shape}, values {w.v.shape} do not fit {keys.shape}")
        if x.shape != (1, n_model) or w.output.shape != (n_model, H * B) or 2 * n_half > A or H % G:
            raise ValueError(f"{x.shape}, an output {w.output.shape}, {n_half} angles do not fit {H} heads of {B}")
        normed, q, k, v = (pieces.tensor(1, n) for n in (n_model, H * A, G * A, G * B))
        self._queries, self._attended = pieces.tensor(1, H, A), pieces.tensor(1, H * B)
        norm = (0, normed.data_ptr(), w.gain.data_ptr(), 1, n_model)
        self._norm = pieces.block(norm_rows_address(), w.eps, *norm)
        project = product_steps(
            (normed.data_ptr(), 4 * n_model),
            (1, n_model),
            (w.q, w.k, w.v),
            [(y.data_ptr(), 4 * y.shape[1]) for y in (q, k, v)],
            STORE,
            pieces.memory,
        )
        gains = [0 if gain is None else gain.data_ptr() for gain in w.gains]
        self._heads = pieces.memory("heads", 3 * HEADS_BYTES + 8 * len(Rotation._fields))
        self._heads.write(
            Heads(q.data_ptr(), 4 * H * A, self._queries.data_ptr(), 4 * H * A, 4 * A, H, A, gains[0])
            + Heads(k.data_ptr(), 4 * G * A, 0, 4 * keys.stride(1), 4 * keys.stride(0), G, A, gains[1])
            + Heads(v.data_ptr(), 4 * G * B, 0, 4 * values.stride(1), 4 * values.stride(0), G, B, 0)
            + Rotation(0, 0, n_half, int(w.is_interleaved))
        )
        heads = pieces.block(prepare_heads_address(), w.eps, self._heads.address, 1)
        self._cells = self._attention_call(pieces, keys, values)
        add = product_steps(
            (self._attended.data_ptr(), 4 * H * B), (1, H * B), (w.output,), [(0, 4 * n_model)], ADD, pieces.memory
        )
        self._add = pieces.latest["call"]
        steps = [
            Step(block_step_address(5), self._norm.address),
            *project,
            Step(block_step_address(2), heads.address),
            Step(attend_address(), self._cells.address, n_threads()),
            *add,
        ]
        self._crew = Crew(steps, n_threads(), pieces.kept)

    def _attention_call(self, pieces: Pieces, keys: Tensor, values: Tensor) -> Memory:
        w, (G, n_all_cells, A), B = self._weights, keys.shape, values.shape[2]
        H = w.q.shape[0] // A
        cells = pieces.memory("cells", 8 * len(AttentionCall._fields))
        cells.write(
            AttentionCall(
                *(self._queries.data_ptr(), 4 * H * A, 4 * A),
                *(0, 4 * keys.stride(1), 4 * keys.stride(0)),
                *(0, 4 * values.stride(1), 4 * values.stride(0)),
                out=self._attended.data_ptr(),
                sinks=0 if w.sinks is None else w.sinks.data_ptr(),
                scores=0,
                n_queries=1,
                n_cells=0,
                n_run=0,
                n_heads=H,
                n_kv_heads=G,
                n_channels=A,
                n_values=B,
                window=n_all_cells if w.window is None else w.window,
                scale=float_bits(w.scale),
                n_tasks=min(H, _TASKS_PER_THREAD * n_threads()),
                k_ring_bytes=4 * n_all_cells * keys.stride(1),
                v_ring_bytes=4 * n_all_cells * values.stride(1),
            )
        )
        return cells


_HEADS_OUT = Heads._fields.index("out")
_K, _V, _SCORES, _N_CELLS, _NEXT_TASK = (
    AttentionCall._fields.index(name) for name in ("k", "v", "scores", "n_cells", "next_task")
)


class TokenRouter:
    """Norm, router product, choice of experts."""

    def __init__(self, weights: RouterWeights) -> None:
        self._weights = weights
        self._written_for: tuple[object, ...] = ()

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`kernels.TokenRouter`."""
        circumstances = circumstances_of(x)
        if self._written_for != circumstances:
            self._write(x)
            self._written_for = circumstances
        normed, n_used = torch.empty_like(x), self._weights.n_used
        ids, mix = torch.empty(1, n_used, dtype=torch.int32), torch.empty(1, n_used)
        self._norm.write((x.data_ptr(), normed.data_ptr()), _X)
        self._product.write((normed.data_ptr(),), X_NUMBER)
        self._pick.write((ids.data_ptr(), mix.data_ptr()), _IDS)
        self._crew.run()
        return normed, ids, mix

    def _write(self, x: Tensor) -> None:
        check_rows(x)
        w, pieces, n_model = self._weights, Pieces(), x.shape[1]
        n_experts = w.router.shape[0]
        if x.shape != (1, n_model) or w.router.shape != (n_experts, n_model):
            raise ValueError(f"a router {w.router.shape} does not fit {n_model} channels")
        logits = pieces.tensor(1, n_experts)
        self._norm = pieces.block(norm_rows_address(), w.eps, 0, 0, w.gain.data_ptr(), 1, n_model)
        product = product_steps(
            (0, 4 * n_model), (1, n_model), (w.router,), [(logits.data_ptr(), 4 * n_experts)], STORE, pieces.memory
        )
        self._product = pieces.latest["call"]
        scores = pieces.memory("scores", 8 * n_experts).address
        bias = 0 if w.bias is None else w.bias.data_ptr()
        rule = (1, n_experts, w.n_used, w.gating, int(w.is_normalised))
        self._pick = pieces.block(pick_address(), w.scale, logits.data_ptr(), bias, 0, 0, scores, *rule)
        norm, pick = Step(block_step_address(5), self._norm.address), Step(block_step_address(10), self._pick.address)
        self._crew = Crew([norm, *product, pick], n_threads(), pieces.kept)
