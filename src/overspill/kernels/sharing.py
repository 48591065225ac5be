"""Contracts of what devices and the CPU share out in a decoding step: experts, and the letters by which they meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from overspill.quant.experts import ExpertVectors, ExpertWeights
from overspill.quant.qtensor import QTensor


class Term(NamedTuple):
    """What is added to others: float32 numbers on the device; or, with flags, in the box of a letter (int32 words)."""

    numbers: torch.Tensor
    flags: torch.Tensor | None = None


class Mail(NamedTuple):
    """Passing rows through pinned memory inside recorded work, see `kernels.triton.mail`.

    put: (step, parts, box, flags). take: (step, parts, box, flags, late). add: (step, out, terms, late). copy: from
    pinned memory, without a flag.
    """

    put: Callable[[torch.Tensor, Sequence[torch.Tensor], torch.Tensor, torch.Tensor], None]
    take: Callable[[torch.Tensor, Sequence[torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor], None]
    add: Callable[[torch.Tensor, torch.Tensor, Sequence[Term], torch.Tensor], None]
    copy: Callable[[torch.Tensor, torch.Tensor], None]


Shares = Sequence[tuple[int, int]]
"""Parties that share out experts, in order: number of the party, and its weight."""


class Divide(Protocol):
    """Share out the experts that ids name: of those, in ascending order, the first are the first party's, and so on.

    ids: int32 `[T, K]`. who: int32 `[E n_slices]`, written: the party of each slice of an expert (see `ExpertWeights`),
    -1 where no id names it. tally: int64 `[1 + parties]`, added to: experts found in a cache (none here), then those of
    each party, by its number; in `MAX_SLICES`-ths. whole: a party that takes whole experts only; the last one.
    """

    def __call__(
        self,
        ids: torch.Tensor,
        shares: Shares,
        who: torch.Tensor,
        tally: torch.Tensor,
        n_slices: int = 1,
        whole: int | None = None,
    ) -> None: ...


class Fetch(Protocol):
    """Read a party's experts from host memory into its own.

    source: all experts of the layer, in host memory that the device can read. who: the party of each, or of each of
    their slices. room: uint8, where they go. vectors: biases and scales for the result. Returns the experts, or slices,
    that who gives to the party.
    """

    def __call__(
        self,
        source: ExpertWeights,
        who: torch.Tensor,
        party: int,
        room: torch.Tensor,
        vectors: ExpertVectors,
    ) -> ExpertWeights: ...


class CacheState(NamedTuple):
    """What is known of a layer's experts, or of their slices (see `ExpertWeights`), that lie in slots on its device.

    All but the first two int32 `[E n_slices]`, and -1 at first. slot_of: the slot of each, -1: it has none. heat: how
    often it was named, old uses counting less. fills: of those to be fetched in this step the slot, else -1. rest: the
    owner's number for those it computes that no slot is left for, else -1.
    """

    n_slots: int
    n_slices: int
    slot_of: torch.Tensor
    heat: torch.Tensor
    fills: torch.Tensor
    rest: torch.Tensor


class LookUp(Protocol):
    """`Divide` where the owner, the first party, has slices in slots: they are its own. The others are shared out, the
    hottest, and one at least, to the owner.

    What the owner fetches replaces what is coldest and not named in this step; its slots are valid after `Fill`.
    whole: a party, the last one, that gets all slices of an expert or none. The tally counts slices.
    """

    def __call__(
        self,
        ids: torch.Tensor,
        shares: Shares,
        who: torch.Tensor,
        tally: torch.Tensor,
        state: CacheState,
        whole: int | None = None,
    ) -> None: ...


class Fill(Protocol):
    """Read the experts that `state.fills` names from host memory into their slots. Returns all that lie in slots.

    source, vectors: as for `Fetch`. memory: uint8, that of the slots.
    """

    def __call__(
        self, source: ExpertWeights, state: CacheState, memory: torch.Tensor, vectors: ExpertVectors
    ) -> ExpertWeights: ...


class Place(Protocol):
    """Copy experts from their slots to where they stand in the file's order: those of which all slices lie in slots.

    kept: what lies in slots, as `Fill` returns it. target: gate, up and down of some experts in a row, whole, from the
    expert `first` on; what is not in slots stays as it is.
    """

    def __call__(self, kept: ExpertWeights, target: Sequence[QTensor], first: int) -> None: ...
