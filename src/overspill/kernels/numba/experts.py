"""The routed experts of one layer, for any number of tokens, in one compiled call.

This is the Python side: checks, and the block of numbers that the compiled parts in `expert_loops` work from.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from overspill.kernels.numba import crew
from overspill.kernels.numba.crew import Crew, run
from overspill.kernels.numba.digits import digit_bytes
from overspill.kernels.numba.expert_loops import (
    IS_WRONG,
    Call,
    digitise_hidden_address,
    digitise_x_address,
    down_address,
    group_address,
    hidden_address,
)
from overspill.kernels.numba.matmul import padded
from overspill.kernels.numba.native import Step, float_bits
from overspill.kernels.numba.panel import (
    SCRATCH_BYTES,
    SILU,
    SWIGLU_OAI,
    Rows,
    describe,
    multiply_address,
    takes_digits,
)
from overspill.kernels.numba.pieces import Pieces, circumstances_of
from overspill.kernels.numba.target import UNIT_ELEMENTS
from overspill.kernels.numba.workspace import WORKSPACE, Memory
from overspill.quant.experts import NO_VECTORS, Activation, ExpertVectors, ExpertWeights
from overspill.quant.qtensor import QTensor

# Hidden activations in memory at once; more tokens are taken in turns.
_MAX_HIDDEN_BYTES = 1 << 26
# So many rows of activations become digits in less time than it takes to wake another thread.
_ROWS_OF_DIGITS = 8
# What panel.multiply does with the up products, which meet the gate products in the output.
_THEN = {Activation.SILU: SILU, Activation.SWIGLU_OAI: SWIGLU_OAI}
_NONE = (0,) * 6
_N_FIELDS = len(Call._fields)
_N_ROWS_FIELDS = len(Rows._fields)


def experts(
    x: Tensor,
    w_gate: QTensor,
    w_up: QTensor,
    w_down: QTensor,
    ids: Tensor,
    weights: Tensor,
    slot_of: npt.NDArray[np.int32] | None,
    out: Tensor,
    act: Activation = Activation.SILU,
    *,
    vectors: ExpertVectors = NO_VECTORS,
) -> None:
    """Add the weighted outputs of the routed experts to `out`, in place.

    x float32 [T, D]; w_gate, w_up [S, F, D] and w_down [S, D, F] are stacked over slots, of any types that have a
    kernel. ids int32 or int64 [T, K] and weights float32 [T, K] name the experts of each token. slot_of int32 [E]
    gives the slot of an expert, -1 where it is absent (its contribution is left out); None: expert e is in slot e.
    out float32 [T, D], rows contiguous. vectors: scales and biases of the products, for all E experts. A token's
    contributions are added in ascending order of expert id.
    Raises IndexError for an id that is no expert or a slot that is no slot, ValueError if shapes do not fit.
    """
    stacks = w_gate, w_up, w_down
    _check(x, stacks, ids, weights, out)
    n_experts = w_gate.shape[0] if slot_of is None else len(slot_of)
    adjustments = _NONE if vectors.is_empty else _adjustments(vectors, n_experts, w_gate)
    x, ids, weights = padded(x), ids.to(torch.int32).contiguous(), weights.contiguous()
    slots = None if slot_of is None else np.ascontiguousarray(slot_of, dtype=np.int32)
    n_tokens, n_at_once = x.shape[0], max(_MAX_HIDDEN_BYTES // (ids.shape[1] * _hidden_stride(w_gate)), 1)
    if n_tokens <= n_at_once:
        return _run(x, stacks, ids, weights, slots, out, _THEN[act], adjustments, vectors.limit)
    for part in (slice(i, i + n_at_once) for i in range(0, n_tokens, n_at_once)):
        _run(x[part], stacks, ids[part], weights[part], slots, out[part], _THEN[act], adjustments, vectors.limit)
    return None


def _run(
    x: Tensor,
    stacks: tuple[QTensor, QTensor, QTensor],
    ids: Tensor,
    weights: Tensor,
    slot_of: npt.NDArray[np.int32] | None,
    out: Tensor,
    then: int,
    adjustments: tuple[int, ...],
    limit: float,
) -> None:
    steps, call = _steps(x, stacks, ids, weights, slot_of, out, then, adjustments, limit, WORKSPACE.memory)
    run(steps)
    _check_done(call, stacks[0].shape[0], slot_of)


def _check_done(call: Memory, n_slots: int, slot_of: npt.NDArray[np.int32] | None) -> None:
    if call.read(IS_WRONG):
        n_experts = n_slots if slot_of is None else len(slot_of)
        raise IndexError(f"expert ids must be 0 to {n_experts - 1} and slots at most {n_slots - 1}")


def _steps(
    x: Tensor,
    stacks: tuple[QTensor, QTensor, QTensor],
    ids: Tensor,
    weights: Tensor,
    slot_of: npt.NDArray[np.int32] | None,
    out: Tensor,
    then: int,
    adjustments: tuple[int, ...],
    limit: float,
    memory: Callable[[str, int], Memory],
) -> tuple[list[Step], Memory]:
    """What adds the experts' outputs, and the call block that it works from. memory: gives it."""
    (n_tokens, n_used), (n_slots, n_hidden, n_model) = ids.shape, stacks[0].shape
    n_experts = n_slots if slot_of is None else len(slot_of)
    n_threads, n_pairs, hidden_stride = crew.n_threads(), n_tokens * n_used, _hidden_stride(stacks[0])
    # The call block: fields, three descriptions, then arrays of int64.
    call = memory("call", 8 * (_N_FIELDS + 3 * _N_ROWS_FIELDS + 4 * n_experts + 1 + 6 * n_pairs))
    gate = call.address + 8 * _N_FIELDS
    first = gate + 8 * 3 * _N_ROWS_FIELDS
    slots = first + 8 * (n_experts + 1)
    pairs = slots + 8 * 3 * n_experts
    gate_digits, up_digits, down_digits = (takes_digits(stack.type) for stack in stacks)
    x_digits = hidden_digits = 0
    x_digits_stride, hidden_digits_stride = digit_bytes(x.shape[1]), digit_bytes(hidden_stride // 4)
    if gate_digits or up_digits:
        x_digits = memory("digits", n_tokens * x_digits_stride).address
    if down_digits:
        hidden_digits = memory("hidden digits", n_pairs * hidden_digits_stride).address
    pair_x_digits, pair_hidden_digits = pairs + 8 * 4 * n_pairs, pairs + 8 * 5 * n_pairs
    fields = Call(
        i_task_x=0,
        i_task_hidden=0,
        i_task_digits=0,
        i_task_down=0,
        is_wrong=0,
        n_groups=0,
        n_tokens=n_tokens,
        n_used=n_used,
        n_experts=n_experts,
        n_slots=n_slots,
        n_hidden=n_hidden,
        n_model=n_model,
        then=then,
        n_threads=n_threads,
        ids=ids.data_ptr(),
        weights=weights.data_ptr(),
        slot_of=0 if slot_of is None else slot_of.__array_interface__["data"][0],
        x=x.data_ptr(),
        x_stride=4 * x.stride(0),
        x_elements=x.shape[1],
        out=out.data_ptr(),
        out_stride=4 * out.stride(0),
        hidden=memory("hidden", n_pairs * hidden_stride).address,
        hidden_stride=hidden_stride,
        multiply=multiply_address(),
        gate=gate,
        up=gate + 8 * _N_ROWS_FIELDS,
        down=gate + 8 * 2 * _N_ROWS_FIELDS,
        gate_scales=adjustments[0],
        up_scales=adjustments[1],
        down_scales=adjustments[2],
        gate_biases=adjustments[3],
        up_biases=adjustments[4],
        down_biases=adjustments[5],
        first=first,
        slots=slots,
        members=slots + 8 * n_experts,
        ends=slots + 8 * 2 * n_experts,
        pair_inputs=pairs,
        pair_hidden=pairs + 8 * n_pairs,
        pair_outputs=pairs + 8 * 2 * n_pairs,
        pair_weights=pairs + 8 * 3 * n_pairs,
        pair_limits=pairs + 8 * 3 * n_pairs + 4 * n_pairs,
        limit=float_bits(limit),
        x_digits=x_digits,
        x_digits_stride=x_digits_stride,
        hidden_digits=hidden_digits,
        hidden_digits_stride=hidden_digits_stride,
        pair_x_digits=pair_x_digits,
        pair_hidden_digits=pair_hidden_digits,
        gate_inputs=pair_x_digits if gate_digits else pairs,
        up_inputs=pair_x_digits if up_digits else pairs,
        down_inputs=pair_hidden_digits if down_digits else pairs + 8 * n_pairs,
        scratch=memory("scratch", n_threads * SCRATCH_BYTES).address,
    )
    call.write(fields + describe(stacks[0]) + describe(stacks[1]) + describe(stacks[2]))
    n_at_digits = min(n_threads, -(-n_tokens // _ROWS_OF_DIGITS)), min(n_threads, -(-n_pairs // _ROWS_OF_DIGITS))
    steps = [Step(group_address(), call.address)]
    steps += [Step(digitise_x_address(), call.address, n_at_digits[0])] * bool(x_digits)
    steps += [Step(hidden_address(), call.address, n_threads)]
    steps += [Step(digitise_hidden_address(), call.address, n_at_digits[1])] * bool(hidden_digits)
    return [*steps, Step(down_address(), call.address, n_threads)], call


class TokenExperts:
    """`experts` for one token, again and again with the same weights: what Python writes for a call is kept."""

    def __init__(self, weights: ExpertWeights, act: Activation) -> None:
        self._weights = weights
        self._act = act
        self._written_for: tuple[object, ...] = ()

    def __call__(self, x: Tensor, ids: Tensor, mix: Tensor, out: Tensor) -> None:
        """x, out `[1, D]`; ids, mix `[1, K]`."""
        x, ids, mix = x.contiguous(), ids.to(torch.int32).contiguous(), mix.contiguous()
        circumstances = circumstances_of(x, ids, mix, out)
        if self._written_for != circumstances:
            self._write(x, ids, mix, out)
            self._written_for = circumstances
        self._call.write((x.data_ptr(),), _X)
        self._call.write((ids.data_ptr(), mix.data_ptr()), _IDS)
        self._call.write((out.data_ptr(),), _OUT)
        self._crew.run()
        slot_of = self._weights.slot_of
        assert not isinstance(slot_of, Tensor)
        _check_done(self._call, self._weights.gate.shape[0], slot_of)

    def _write(self, x: Tensor, ids: Tensor, mix: Tensor, out: Tensor) -> None:
        w, pieces = self._weights, Pieces()
        _check(x, w.parts, ids, mix, out)
        if len(x) != 1 or x.shape[1] % UNIT_ELEMENTS:
            raise ValueError(f"activations {tuple(x.shape)} are not one token in whole units")
        n_experts = w.gate.shape[0] if w.slot_of is None else len(w.slot_of)
        adjustments = _NONE if w.vectors.is_empty else _adjustments(w.vectors, n_experts, w.gate)
        slots = None if w.slot_of is None else np.ascontiguousarray(w.slot_of, dtype=np.int32)
        then, limit = _THEN[self._act], w.vectors.limit
        steps, self._call = _steps(x, w.parts, ids, mix, slots, out, then, adjustments, limit, pieces.memory)
        self._crew = Crew(steps, crew.n_threads(), [*pieces.kept, slots])


class PreparedExperts:
    """`experts` to be run again and again on the same memory, with new numbers in it: `steps` add to the output.

    x float32 `[T, D]`, rows of whole units; ids int32, weights float32 `[T, K]`, contiguous; slot_of int32 `[E]`, None:
    expert e is in slot e; out float32 `[T, D]`. As many threads take part as there are now.
    """

    def __init__(
        self,
        x: Tensor,
        ids: Tensor,
        mix: Tensor,
        weights: ExpertWeights,
        slot_of: npt.NDArray[np.int32] | None,
        out: Tensor,
        act: Activation,
        pieces: Pieces,
    ) -> None:
        vectors, n_slots = weights.vectors, weights.gate.shape[0]
        _check(x, weights.parts, ids, mix, out)
        if padded(x) is not x or ids.dtype != torch.int32 or not (ids.is_contiguous() and mix.is_contiguous()):
            raise ValueError(f"not ready for kernels: {tuple(x.shape)}, {ids.dtype}, or rows that are apart")
        n_experts = n_slots if slot_of is None else len(slot_of)
        adjustments = _NONE if vectors.is_empty else _adjustments(vectors, n_experts, weights.gate)
        how = (slot_of, out, _THEN[act], adjustments, vectors.limit, pieces.memory)
        self.steps, self._call = _steps(x, weights.parts, ids, mix, *how)
        self._kept = (pieces.kept, x, ids, mix, weights, out)
        self._slot_of = slot_of
        self._n_slots = n_slots

    def check(self) -> None:
        """After the steps. Raises IndexError for an id that was no expert or a slot that was no slot."""
        _check_done(self._call, self._n_slots, self._slot_of)


_X, _IDS, _OUT = (Call._fields.index(name) for name in ("x", "ids", "out"))


def _adjustments(vectors: ExpertVectors, n_experts: int, w_gate: QTensor) -> tuple[int, ...]:
    """Addresses of the scales and of the biases of gate, up and down; 0 for none."""
    _, n_hidden, n_model = w_gate.shape
    shapes = [(n_experts,)] * 3 + [(n_experts, n_hidden)] * 2 + [(n_experts, n_model)]
    all_vectors = (*vectors.scales, *vectors.biases)
    return tuple(_vector_address(vector, shape) for vector, shape in zip(all_vectors, shapes, strict=True))


def _vector_address(vector: Tensor | None, shape: tuple[int, ...]) -> int:
    if vector is None:
        return 0
    if vector.shape != shape or vector.dtype != torch.float32 or not vector.is_contiguous() or not vector.is_cpu:
        raise ValueError(f"scales and biases must be contiguous float32 {shape}: {tuple(vector.shape)}, {vector.dtype}")
    return vector.data_ptr()


def _hidden_stride(w_gate: QTensor) -> int:
    """Bytes of one pair's hidden activations, padded to whole units."""
    n_hidden = w_gate.shape[1]
    return 4 * (n_hidden + -n_hidden % UNIT_ELEMENTS)


def _check(x: Tensor, stacks: tuple[QTensor, QTensor, QTensor], ids: Tensor, weights: Tensor, out: Tensor) -> None:
    """Compiled code follows addresses: what does not fit must not get there."""
    gate, up, down = (w.shape for w in stacks)
    if up != gate or down != (gate[0], gate[2], gate[1]):
        raise ValueError(f"expert shapes do not fit: gate {gate}, up {up}, down {down}")
    if x.shape[1] != gate[2] or out.shape != x.shape or out.stride(1) != 1:
        raise ValueError(f"activations {tuple(x.shape)} or output {tuple(out.shape)} do not fit {gate}")
    if ids.shape != weights.shape or ids.shape[0] != x.shape[0]:
        raise ValueError(f"ids {tuple(ids.shape)} and weights {tuple(weights.shape)} do not fit {len(x)} tokens")
    if not (x.is_cpu and stacks[0].data.is_cpu and out.is_cpu):
        raise ValueError(f"all must be in host memory: {x.device}, {stacks[0].data.device}, {out.device}")
    if not x.dtype == weights.dtype == out.dtype == torch.float32:
        raise ValueError(f"activations, weights and output must be float32: {x.dtype}, {weights.dtype}, {out.dtype}")
