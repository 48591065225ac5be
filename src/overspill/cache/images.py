"""Images: what slots held, kept in host memory for later prompts. Pure Python, no torch.

An image is a copy of a slot's cells, and of the states that it kept, in blocks of one fixed area of host memory. So
nothing is allocated while requests run, no hole is too small, and blocks never straddle what is pinned together. The
image that nobody used for the longest time gives way first. A store only does the accounts; the bytes move when the
`Save`s and `Load`s that follow from it are carried out, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Image:
    """ids: of the tokens whose cells it has. positions: of its states, ascending. blocks: where its bytes lie.

    floor: a slot that it is loaded into can go on from there, or from any later position (see `cache.rings`).
    """

    ids: tuple[int, ...]
    positions: tuple[int, ...]
    blocks: tuple[int, ...]
    floor: int = 0


@dataclass(frozen=True, slots=True)
class Save:
    """Copy a slot into an image. rows: of the states, by position."""

    slot: int
    image: Image
    rows: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Load:
    """Copy the first `n_cells` cells of an image into a slot. rows: where states go, by position."""

    slot: int
    image: Image
    n_cells: int
    rows: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class ImageCounts:
    """n_images, n_blocks: held now, of `n_blocks_total`. The others since the start."""

    n_images: int = 0
    n_blocks: int = 0
    n_blocks_total: int = 0
    n_saved: int = 0
    n_loaded: int = 0
    n_dropped: int = 0
    n_tokens_loaded: int = 0

    @property
    def n_bytes(self) -> int:
        """Of the blocks that are held."""
        return self.n_blocks * BLOCK_BYTES


class ImageStore:
    """Images in `n_blocks` blocks, the least recently used first.

    n_bytes_of: bytes of an image by its numbers of cells and of states.
    """

    def __init__(self, n_blocks: int, n_bytes_of: Callable[[int, int], int]) -> None:
        self._n_bytes_of = n_bytes_of
        self._n_blocks = n_blocks
        self._free = list(range(n_blocks - 1, -1, -1))
        self._images: list[Image] = []
        self._n_saved = self._n_loaded = self._n_dropped = self._n_tokens_loaded = 0

    @property
    def counts(self) -> ImageCounts:
        return ImageCounts(
            n_images=len(self._images),
            n_blocks=self._n_blocks - len(self._free),
            n_blocks_total=self._n_blocks,
            n_saved=self._n_saved,
            n_loaded=self._n_loaded,
            n_dropped=self._n_dropped,
            n_tokens_loaded=self._n_tokens_loaded,
        )

    def best(self, n_usable: Callable[[Image], int]) -> tuple[Image | None, int]:
        """The image of which most cells are of use, and how many; (None, 0) where none is."""
        found = max(((n_usable(image), i) for i, image in enumerate(self._images)), default=(0, 0))
        return (self._images[found[1]], found[0]) if found[0] else (None, 0)

    def take(self, image: Image, n_cells: int) -> None:
        """An image is loaded; it stays, as the one used last."""
        self._touch(image)
        self._n_loaded += 1
        self._n_tokens_loaded += n_cells

    def put(
        self, ids: Sequence[int], positions: Sequence[int], *, floor: int = 0, spared: Image | None = None
    ) -> Image | None:
        """Room for an image; None where one has all of it already, or it is too large.

        Images that it has all of are dropped, then those not used for longest, but never the spared one.
        """
        new = Image(tuple(ids), tuple(positions), (), floor)
        for image in self._images:
            if _has_all_of(image, new):
                self._touch(image)
                return None
        n_blocks = -(-self._n_bytes_of(len(ids), len(positions)) // BLOCK_BYTES)
        if n_blocks > self._n_blocks - (0 if spared is None else len(spared.blocks)):
            return None
        for image in [old for old in self._images if old is not spared and _has_all_of(new, old)]:
            self._drop(image)
        while len(self._free) < n_blocks:
            self._drop(next(image for image in self._images if image is not spared))
        new = replace(new, blocks=tuple(self._free.pop() for _ in range(n_blocks)))
        self._images.append(new)
        self._n_saved += 1
        return new

    def clear(self) -> None:
        """Drop all images: what they hold is not trusted any more."""
        for image in list(self._images):
            self._drop(image)

    def _touch(self, image: Image) -> None:
        self._images.remove(image)
        self._images.append(image)

    def _drop(self, image: Image) -> None:
        self._images.remove(image)
        self._free += image.blocks
        self._n_dropped += 1


def _has_all_of(new: Image, old: Image) -> bool:
    is_longer = new.ids[: len(old.ids)] == old.ids and set(old.positions) <= set(new.positions)
    return is_longer and new.floor <= old.floor
