"""Slabs: cut so that they fit, and found again in their slot byte for byte, whole or selected, whatever the sizes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overspill.device.backend import move_parts
from overspill.device.cpu import CpuDevice
from overspill.gguf.types import TensorType
from overspill.kernels import ref
from overspill.pipeline.slabs import ALIGNMENT, WIDE_VALUE_BYTES, cut_slabs, slot_bytes_for
from overspill.pipeline.upload import HostExperts, HostPart, staged, upload_parts, widened
from overspill.quant.dequant import dequantize
from overspill.quant.experts import NO_VECTORS, ExpertWeights
from overspill.quant.qtensor import QTensor

E = 7
HOST = CpuDevice(is_asynchronous=False, cap_bytes=1 << 28)

sizes = st.lists(st.integers(1, 5000), min_size=1, max_size=3)
selections = st.sets(st.integers(0, E - 1), min_size=1).map(sorted)


def experts(n_model: int, n_hidden: int, types: tuple[TensorType, TensorType, TensorType]) -> HostExperts:
    """Random bytes in pinned memory; F32 gets random numbers."""
    random = torch.Generator().manual_seed(n_model)
    shapes = ((E, n_hidden, n_model), (E, n_hidden, n_model), (E, n_model, n_hidden))
    parts = []
    for type, shape in zip(types, shapes, strict=True):
        n_bytes = shape[0] * shape[1] * type.row_bytes(shape[2])
        buffer = HOST.allocate_pinned(n_bytes, name="part")
        if type is TensorType.F32:
            buffer.host_tensor.view(torch.float32).copy_(torch.randn(n_bytes // 4, generator=random).bfloat16())
        else:
            buffer.host_tensor.copy_(torch.randint(0, 50, (n_bytes,), dtype=torch.uint8, generator=random))
        parts.append(HostPart(buffer, type, shape))
    return HostExperts((parts[0], parts[1], parts[2]), E, NO_VECTORS)


F32, Q4_0, Q8_0 = TensorType.F32, TensorType.Q4_0, TensorType.Q8_0
MODELS = [
    experts(20, 9, (F32, F32, F32)),
    experts(32, 64, (Q4_0, Q4_0, Q8_0)),
    experts(96, 32, (Q8_0, Q4_0, Q4_0)),
]


def never_resident(i_part: int) -> QTensor:
    raise AssertionError(f"part {i_part} is on the host")


@given(n_experts=st.integers(1, 40), sizes=sizes, n_fit=st.integers(1, 45))
def test_slabs_cover_all_experts_evenly_and_fit(n_experts: int, sizes: list[int], n_fit: int) -> None:
    slabs = cut_slabs(n_experts, sizes, slot_bytes_for(sizes, n_fit))
    assert [e for slab in slabs for e in range(*slab)] == list(range(n_experts))
    counts = {slab.n_experts for slab in slabs}
    assert max(counts) - min(counts) <= 1
    assert max(counts) <= n_fit
    assert len(slabs) == -(-n_experts // min(n_fit, n_experts))


def test_a_slot_that_holds_no_expert_is_refused() -> None:
    with pytest.raises(AssertionError, match="holds no expert"):
        cut_slabs(4, [100, 100, 100], slot_bytes_for([100, 100, 100], 1) - 1)


def in_slot(model: HostExperts, ids: list[int]) -> torch.Tensor:
    """A slot of the smallest size that is right for so many experts, filled."""
    n_bytes = slot_bytes_for([part.expert_bytes for part in model.host_parts], len(ids))
    slot = HOST.allocate_pinned(n_bytes, name="slot")
    slot.host_tensor.fill_(0xFF)
    copies = upload_parts(model, ids)
    assert all(copy.dst_offset + copy.n_bytes <= n_bytes for copy in copies)
    assert sum(copy.n_bytes for copy in copies) == len(ids) * model.n_bytes // E
    move_parts(slot, tuple(copies))
    HOST.free(slot)
    return slot.host_tensor


def assert_holds(weights: ExpertWeights, model: HostExperts, ids: list[int]) -> None:
    """The same bytes for each expert that is there, and -1 for those that are not."""
    assert weights.slot_of is not None
    assert [i for i in range(E) if weights.slot_of[i] >= 0] == ids
    for part, whole in zip(weights.parts, model.in_place().parts, strict=True):
        assert (part.type, part.shape) == (whole.type, (len(ids), *whole.shape[1:]))
        for i in ids:
            assert torch.equal(part[int(weights.slot_of[i])].data, whole[i].data)


@pytest.mark.parametrize("model", MODELS)
@given(ids=selections)
def test_any_selection_is_found_in_its_slot(model: HostExperts, ids: list[int]) -> None:
    slot = in_slot(model, ids)
    weights = staged(model, ids, slot, never_resident, NO_VECTORS)
    assert_holds(weights, model, ids)
    start = slot.data_ptr()
    assert [(part.data.data_ptr() - start) % ALIGNMENT for part in weights.parts] == [0, 0, 0]


@pytest.mark.parametrize("model", MODELS)
def test_neighbours_go_up_in_one_copy(model: HostExperts) -> None:
    assert len(upload_parts(model, range(E))) == 3
    assert len(upload_parts(model, [0, 1, 3, 4, 6])) == 9
    assert [c.src_offset for c in upload_parts(model, [2, 3])] == [2 * part.expert_bytes for part in model.host_parts]


@pytest.mark.parametrize("i_resident", [0, 1, 2])
@pytest.mark.parametrize("ids", [range(2, 5), range(E), range(6, 7)])
def test_a_resident_part_joins_those_that_went_up(i_resident: int, ids: range) -> None:
    whole = MODELS[1]
    parts = [None if i == i_resident else part for i, part in enumerate(whole.parts)]
    model = HostExperts((parts[0], parts[1], parts[2]), E, NO_VECTORS)
    slot = in_slot(model, list(ids))

    def resident(i_part: int) -> QTensor:
        assert i_part == i_resident
        return whole.in_place().parts[i_part]

    assert_holds(staged(model, ids, slot, resident, NO_VECTORS), whole, list(ids))


@given(ids=selections)
def test_a_dequantised_slab_holds_the_same_values(ids: list[int]) -> None:
    """Exactly, where bfloat16 can: gate and up of an expert behind one another, then down."""
    model = MODELS[0]
    weights = staged(model, ids, in_slot(model, ids), never_resident, NO_VECTORS)
    n_values = 3 * 20 * 9
    wide = torch.full((len(ids) * n_values * WIDE_VALUE_BYTES,), 0xFF, dtype=torch.uint8)
    target = widened(model, ids, wide, never_resident, NO_VECTORS)
    ref.widen(weights, target)
    assert not wide.view(torch.bfloat16).isnan().any()
    for narrow, part in zip(weights.parts, target.parts, strict=True):
        assert part.type is TensorType.BF16
        for i in range(len(ids)):
            assert torch.equal(dequantize(part[i]), dequantize(narrow[i]))
    assert target.gate.data[:1].data_ptr() + 2 * 20 * 9 == target.up.data[:1].data_ptr()
