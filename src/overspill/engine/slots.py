"""Slots: whose cells each one holds, who is in it, and which one a request enters. Pure Python, no torch.

A slot that is free keeps the cells of its last sequence, for prompts that begin alike. What of them would be lost when
another one enters is saved first, where there is a store for it (`cache.images`); and a prompt of which an image has
more than any slot gets that image loaded. The copies are listed in `take_moves`, to be carried out before the next
wave. Cells, and states at the positions that a slot keeps, are the same bits after a save and a load.

Where cells are rings (`cache.rings`), a slot or an image cannot be cut back below its floor: what comes before that is
computed anew, from position 0.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum

from overspill.cache.cells import Segment
from overspill.cache.images import Image, ImageCounts, ImageStore, Load, Save
from overspill.cache.rings import Rings
from overspill.cache.states import SlotStates
from overspill.engine.sequence import Sequence

_LEAST_ALIKE = 0.1  # llama-server's --slot-prompt-similarity
_LEAST_LOST = 0.5  # and the share of a slot's cells whose loss makes it save them

Move = Save | Load


class PrefixReuse(Enum):
    """How much of the cells that a former request left in a slot a new prompt with the same beginning may keep.

    NONE: nothing.
    WHOLE_UBATCHES: cells that full ubatches of a prompt computed. The rest is cut as it would be in an empty slot, so
    the logits are the same bits as without reuse. A former answer is computed again as part of the new prompt.
    ANY_POINT: up to the first token that differs, answers included: least work, sums may run in another order.
    """

    NONE = "none"
    WHOLE_UBATCHES = "whole-ubatches"
    ANY_POINT = "any-point"


@dataclass(slots=True)
class Slot:
    """cells: the ids whose cells may be reused. last_used: when it was freed, in releases.

    states: where its recurrent states stand, None in models without any. floor: see `cache.rings`.
    """

    states: SlotStates | None
    floor: int = 0
    cells: list[int] = field(default_factory=list)
    last_used: int = 0
    sequence: Sequence | None = None

    def keep(self, n_cells: int) -> None:
        """Trust the first `n_cells` cells only."""
        self.cells = self.cells[:n_cells]
        if self.states is not None:
            self.states.cut(n_cells)


class Slots:
    """The slots of a scheduler, by number. images: where cells are saved; None: nowhere. rings: of cells, if any."""

    def __init__(
        self,
        n_slots: int,
        *,
        n_ubatch: int,
        n_states: int,
        reuse: PrefixReuse,
        images: ImageStore | None,
        rings: Rings | None,
    ) -> None:
        self._all = [Slot(SlotStates.of_slot(i, n_slots, n_states) if n_states else None) for i in range(n_slots)]
        self._n_ubatch = n_ubatch
        self._reuse = reuse
        self._images = images
        self._rings = rings
        self._moves: list[Move] = []
        self._n_releases = 0

    def __getitem__(self, i_slot: int) -> Slot:
        return self._all[i_slot]

    def __len__(self) -> int:
        return len(self._all)

    @property
    def all(self) -> tuple[Slot, ...]:
        return tuple(self._all)

    @property
    def image_counts(self) -> ImageCounts:
        return ImageCounts() if self._images is None else self._images.counts

    @property
    def cuts_anywhere(self) -> bool:
        """Whether prompts may be computed in any pieces, because cells need not be the same bits each time."""
        return self._reuse is PrefixReuse.ANY_POINT

    def take_moves(self) -> list[Move]:
        """Copies to make, in order, before any wave that was formed since; told once."""
        moves, self._moves = self._moves, []
        return moves

    def enter(self, sequence: Sequence, free: Collection[int]) -> None:
        """Give a sequence the slot, or the image, that saves most work, if that is a tenth of it; otherwise the least
        recently used slot."""
        n_reusable = {i: self._n_reusable_of(self._all[i], sequence) for i in free}
        n_most = max(n_reusable.values())
        image, n_saved = self._best_image(sequence)
        if image is not None and n_saved > max(n_most, _LEAST_ALIKE * sequence.n_prompt):
            sequence.slot = min(free, key=lambda i: self._all[i].last_used)
            slot = self._all[sequence.slot]
            self._save(sequence, slot, spared=image)
            self._load(sequence, slot, image, n_saved)
        else:
            is_worth_it = n_most > _LEAST_ALIKE * sequence.n_prompt
            sequence.slot = min(free, key=lambda i: (-n_reusable[i] * is_worth_it, self._all[i].last_used))
            slot = self._all[sequence.slot]
            self._save(sequence, slot)
            sequence.n_done = sequence.n_reused = n_reusable[sequence.slot]
            slot.keep(sequence.n_done)
        if sequence.n_done == 0:
            slot.floor = 0
        slot.sequence = sequence

    def release(self, sequence: Sequence, *, keep_cells: bool = True) -> None:
        """A sequence leaves its slot; its cells stay as far as they may serve a later prompt."""
        assert sequence.slot is not None
        slot = self._all[sequence.slot]
        self._n_releases += 1
        slot.cells = sequence.ids
        slot.keep(self._n_keepable(sequence) if keep_cells else 0)
        slot.last_used = self._n_releases
        slot.sequence = None

    def write(self, segment: Segment) -> None:
        """Cells of a segment are about to be written, whatever becomes of them."""
        if self._rings is not None:
            slot = self._all[segment.slot]
            slot.floor = self._rings.floor(slot.floor, segment.end_pos)

    def forget_cells(self) -> None:
        """No cells of free slots will be reused."""
        for slot in self._all:
            if slot.sequence is None:
                slot.keep(0)

    def forget_images(self) -> None:
        """No image will be loaded."""
        self._moves.clear()
        if self._images is not None:
            self._images.clear()

    def keeps_state(self, sequence: Sequence, pos: int) -> bool:
        """Whether a later prompt may want to go on from there."""
        if self._reuse is PrefixReuse.ANY_POINT and pos == sequence.n_prompt:
            return True
        return self._reuse is not PrefixReuse.NONE and pos <= sequence.n_prompt and pos % self._n_ubatch == 0

    # --- how much of what there is a prompt can use

    def _n_reusable_of(self, slot: Slot, sequence: Sequence) -> int:
        n_common = self._n_reusable(slot.cells, sequence)
        n_held = n_common if slot.states is None else slot.states.latest(n_common)
        return n_held if n_held >= slot.floor else 0

    def _best_image(self, sequence: Sequence) -> tuple[Image | None, int]:
        if self._images is None:
            return None, 0

        def n_usable(image: Image) -> int:
            n_common = self._n_reusable(image.ids, sequence)
            if self._all[0].states is not None:
                n_common = max((pos for pos in image.positions if pos <= n_common), default=0)
            return n_common if n_common >= image.floor else 0

        return self._images.best(n_usable)

    def _n_reusable(self, cells: Collection[int], sequence: Sequence) -> int:
        if not sequence.request.reuses_cells:
            return 0
        return self._rounded(min(_n_common_prefix(cells, sequence.ids), sequence.n_prompt - 1))

    def _n_keepable(self, sequence: Sequence) -> int:
        if self._reuse is PrefixReuse.ANY_POINT:
            return sequence.n_done
        return self._rounded(min(sequence.n_done, sequence.n_prompt))

    def _rounded(self, n_cells: int) -> int:
        if self._reuse is PrefixReuse.NONE:
            return 0
        return n_cells if self._reuse is PrefixReuse.ANY_POINT else n_cells - n_cells % self._n_ubatch

    # --- images

    def _save(self, sequence: Sequence, slot: Slot, *, spared: Image | None = None) -> None:
        """Save what a slot holds, if a prompt that enters it would leave too little of that."""
        assert sequence.slot is not None
        n_common = _n_common_prefix(slot.cells, sequence.ids)
        n_kept = n_common if n_common >= slot.floor else 0
        n_cells = len(slot.cells) if slot.states is None else slot.states.latest(len(slot.cells))
        if self._images is None or n_cells - n_kept <= _LEAST_LOST * n_cells or n_cells < slot.floor:
            return
        rows = {} if slot.states is None else slot.states.rows
        image = self._images.put(slot.cells[:n_cells], tuple(rows), floor=slot.floor, spared=spared)
        if image is not None:
            self._moves.append(Save(sequence.slot, image, rows))

    def _load(self, sequence: Sequence, slot: Slot, image: Image, n_cells: int) -> None:
        assert self._images is not None
        assert sequence.slot is not None
        self._images.take(image, n_cells)
        sequence.n_done = sequence.n_reused = n_cells
        slot.floor = image.floor
        if slot.states is not None:
            slot.states.place(pos for pos in image.positions if pos <= n_cells)
        rows = {} if slot.states is None else slot.states.rows
        self._moves.append(Load(sequence.slot, image, n_cells, rows))


def _n_common_prefix(a: Collection[int], b: Collection[int]) -> int:
    """How many ids two sequences have in common before the first that differs."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
