"""Keeping weights where they should be: which experts are pinned, mapped files read ahead or locked.

Memory that is pinned or locked cannot be taken back, and a program that takes too much of it is killed. So the budget
is what is free now, by the machine and by every control group, less a reserve; it is asked before anything is pinned.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import resource
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from overspill.pipeline.reading import LoadMode

_RANDOM, _WILL_NEED = 1, 3
_MAX_RESERVE_BYTES = 4 << 30
_RESERVE_SHARE = 16
_MIB = 1 << 20
_libc = ctypes.CDLL(None, use_errno=True)
_log = logging.getLogger(__name__)

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Residence:
    """Where a model's weights are, in bytes.

    devices: on accelerators. pinned, pageable: experts in host RAM that go up directly, or through a pinned ring.
    mapped, copied: what the CPU computes with, in place in the file or in memory of its own. locked: of those mapped.
    """

    mode: LoadMode
    device_bytes: int
    pinned_bytes: int
    pageable_bytes: int
    mapped_bytes: int
    copied_bytes: int
    locked_bytes: int

    def __str__(self) -> str:
        amounts = {
            "on devices": self.device_bytes,
            "pinned": self.pinned_bytes,
            "pageable": self.pageable_bytes,
            "mapped for the CPU": self.mapped_bytes,
            "copied for the CPU": self.copied_bytes,
            "locked": self.locked_bytes,
        }
        shown = ", ".join(f"{n_bytes / _MIB:,.1f} MiB {what}" for what, n_bytes in amounts.items() if n_bytes)
        return f"load mode {self.mode}: {shown}"


def reserve_bytes(total_bytes: int) -> int:
    """Of a host with so much memory, what stays free for everything else: a sixteenth, at most 4 GiB."""
    return min(total_bytes // _RESERVE_SHARE, _MAX_RESERVE_BYTES)


def choose_pinned(sizes: Sequence[int], budget_bytes: int) -> list[bool]:
    """Which of these parts are pinned: all that the budget allows, spread evenly, so that no link gets all the rest."""
    wanted, pinned = sum(sizes), [False] * len(sizes)
    n_seen = n_pinned = 0
    for i, size in enumerate(sizes):
        n_seen += size
        pinned[i] = n_pinned + size <= n_seen * budget_bytes // max(1, wanted)
        n_pinned += size * pinned[i]
    for i, size in enumerate(sizes):
        if not pinned[i] and n_pinned + size <= budget_bytes:
            pinned[i] = True
            n_pinned += size
    return pinned


def read_ahead(views: Iterable[Bytes], budget_bytes: int) -> threading.Thread | None:
    """Ask the kernel to bring mapped bytes in, on a thread of its own, until the budget is used up.

    Nobody has to wait for the thread: whoever reads a page that is not there yet waits for that page. None: nothing to
    do.
    """
    wanted = []
    for view in views:
        budget_bytes -= len(view)
        if budget_bytes < 0:
            break
        wanted.append(view)

    if not wanted:
        return None

    def run() -> None:
        for start, n_bytes in _pages(wanted):
            _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(n_bytes), _WILL_NEED)

    thread = threading.Thread(target=run, name="read ahead", daemon=True)
    thread.start()
    return thread


def read_at_random(view: Bytes) -> Bytes:
    """The same bytes, of which little will be read, here and there: nothing around it should be read too."""
    for start, n_bytes in _pages([view]):
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(n_bytes), _RANDOM)
    return view


def lock(views: Iterable[Bytes], free_bytes: int) -> int:
    """Lock mapped bytes in memory. Returns how many; 0, and one warning, when not all of them may be locked."""
    pages = _pages(views)
    needed = sum(n_bytes for _, n_bytes in pages)
    if needed > free_bytes:
        _refuse(needed, f"{free_bytes} are free")
        return 0
    for i, (start, n_bytes) in enumerate(pages):
        if not _mlock(start, n_bytes):
            for other, n_other in pages[:i]:
                _libc.munlock(ctypes.c_void_p(other), ctypes.c_size_t(n_other))
            _refuse(needed, f"{resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]} are allowed (ulimit -l)")
            return 0
    return needed


def _refuse(needed: int, why: str) -> None:
    _log.warning("-lm mlock: %d bytes of weights are to be locked in memory, %s; they stay unlocked", needed, why)


def _mlock(start: int, n_bytes: int) -> bool:
    return int(_libc.mlock(ctypes.c_void_p(start), ctypes.c_size_t(n_bytes))) == 0


def _pages(views: Iterable[Bytes]) -> list[tuple[int, int]]:
    """Address and length of the runs of whole pages that hold the views, in ascending order."""
    runs: list[tuple[int, int]] = []
    for first, last in sorted((v.ctypes.data, v.ctypes.data + len(v)) for v in views if len(v)):
        start, end = first - first % mmap.PAGESIZE, last + -last % mmap.PAGESIZE
        if runs and start <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(end, runs[-1][1]))
        else:
            runs.append((start, end))
    return [(start, end - start) for start, end in runs]
