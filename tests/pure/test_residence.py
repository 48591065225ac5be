"""Which experts are pinned, and what the kernel is asked for mapped weights."""

from __future__ import annotations

import ctypes
import logging
import mmap
import resource
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overspill.pipeline import residence
from overspill.pipeline.reading import LoadMode
from overspill.pipeline.residence import Bytes, Residence, choose_pinned, lock, read_ahead, reserve_bytes

GIB = 1 << 30
PAGE = mmap.PAGESIZE


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(-10, 40_000))
def test_pinned_parts_stay_in_the_budget_and_leave_no_room_for_another(sizes: list[int], budget: int) -> None:
    pinned = choose_pinned(sizes, budget)
    used = sum(size for size, is_pinned in zip(sizes, pinned, strict=True) if is_pinned)
    assert used <= max(0, budget)
    left = [size for size, is_pinned in zip(sizes, pinned, strict=True) if not is_pinned]
    assert all(used + size > budget for size in left)
    assert bool(left) == (sum(sizes) > budget)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_pinned_parts_are_spread_evenly(share: float) -> None:
    """Of any run of layers about the same share is pinned, so that no device uploads the slow way alone."""
    n = 96
    pinned = choose_pinned([10] * n, round(share * n * 10))
    assert sum(pinned) == share * n
    for first in range(0, n - 16, 8):
        assert abs(sum(pinned[first : first + 16]) - 16 * share) <= 1


def test_reserve() -> None:
    assert [reserve_bytes(n) for n in (0, 16 * GIB, 32 * GIB, 128 * GIB)] == [0, GIB, 2 * GIB, 4 * GIB]


@pytest.fixture
def mapped(tmp_path: Path) -> Bytes:
    file = tmp_path / "weights"
    file.write_bytes(bytes(range(256)) * (16 * PAGE // 256))
    with file.open("rb") as opened:
        return np.frombuffer(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)


class FakeKernel:
    """Answers `mlock` with success for the first so many calls, and writes down what it was asked."""

    def __init__(self, n_allowed: int = 1000) -> None:
        self.calls: list[tuple[str, int, int]] = []
        self._n_allowed = n_allowed

    def _note(self, name: str, start: ctypes.c_void_p, n_bytes: ctypes.c_size_t) -> None:
        assert start.value is not None
        self.calls.append((name, start.value, n_bytes.value))

    def mlock(self, start: ctypes.c_void_p, n_bytes: ctypes.c_size_t) -> int:
        self._note("mlock", start, n_bytes)
        self._n_allowed -= 1
        return 0 if self._n_allowed >= 0 else -1

    def munlock(self, start: ctypes.c_void_p, n_bytes: ctypes.c_size_t) -> int:
        self._note("munlock", start, n_bytes)
        return 0

    def madvise(self, start: ctypes.c_void_p, n_bytes: ctypes.c_size_t, advice: int) -> int:
        assert advice == mmap.MADV_WILLNEED
        self._note(f"will need on {threading.current_thread().name}", start, n_bytes)
        return 0


def use(kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    monkeypatch.setattr(residence, "_libc", kernel)
    return kernel


def started(thread: threading.Thread | None) -> threading.Thread:
    assert thread is not None
    return thread


def test_read_ahead_asks_for_whole_pages_once_on_a_thread(mapped: Bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, base = use(FakeKernel(), monkeypatch), mapped.ctypes.data
    views = [mapped[5 * PAGE + 7 : 6 * PAGE], mapped[10:20], mapped[PAGE - 1 : PAGE + 1], mapped[0:0]]
    started(read_ahead(views, 1 << 30)).join()
    name = "will need on read ahead"
    assert kernel.calls == [(name, base, 2 * PAGE), (name, base + 5 * PAGE, PAGE)]


def test_read_ahead_stops_at_its_budget(mapped: Bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = use(FakeKernel(), monkeypatch)
    views = [mapped[:PAGE], mapped[4 * PAGE : 6 * PAGE], mapped[8 * PAGE : 9 * PAGE]]
    started(read_ahead(views, 2 * PAGE)).join()
    assert [n_bytes for _, _, n_bytes in kernel.calls] == [PAGE]
    assert read_ahead([mapped], PAGE) is None
    assert read_ahead([], PAGE) is None


def test_the_real_kernel_takes_the_advice(mapped: Bytes) -> None:
    started(read_ahead([mapped], 1 << 30)).join()
    assert mapped[7] == 7


def _locked_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmLck:"))


def test_locking_locks(mapped: Bytes, caplog: pytest.LogCaptureFixture) -> None:
    before = _locked_kib()
    views = [mapped[10:20], mapped[3 * PAGE : 5 * PAGE]]
    assert lock(views, 1 << 30) == 3 * PAGE
    assert _locked_kib() - before == 3 * PAGE // 1024
    assert caplog.records == []


def test_refused_locks_are_told_once_with_needed_and_allowed_bytes(
    mapped: Bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernel, base = use(FakeKernel(n_allowed=1), monkeypatch), mapped.ctypes.data
    monkeypatch.setattr(resource, "getrlimit", lambda which: {resource.RLIMIT_MEMLOCK: (65536, -1)}[which])
    views = [mapped[:1], mapped[4 * PAGE : 6 * PAGE], mapped[9 * PAGE : 10 * PAGE]]
    with caplog.at_level(logging.WARNING):
        assert lock(views, 1 << 30) == 0
    assert kernel.calls == [
        ("mlock", base, PAGE),
        ("mlock", base + 4 * PAGE, 2 * PAGE),
        ("munlock", base, PAGE),
    ]
    (record,) = caplog.records
    assert f"{4 * PAGE} bytes" in record.getMessage()
    assert "65536 are allowed (ulimit -l)" in record.getMessage()


def test_more_than_is_free_is_not_locked(
    mapped: Bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Locked memory cannot be taken back: the kernel would kill somebody instead."""
    kernel = use(FakeKernel(), monkeypatch)
    with caplog.at_level(logging.WARNING):
        assert lock([mapped[: 2 * PAGE]], 2 * PAGE - 1) == 0
    assert kernel.calls == []
    (record,) = caplog.records
    assert f"{2 * PAGE} bytes" in record.getMessage()
    assert f"{2 * PAGE - 1} are free" in record.getMessage()


def test_residence_says_what_there_is() -> None:
    mib = 1 << 20
    shown = str(Residence(LoadMode.AUTO, 5 * mib, 1536 * mib, 0, mib // 2, 0, 0))
    assert shown == "load mode auto: 5.0 MiB on devices, 1,536.0 MiB pinned, 0.5 MiB mapped for the CPU"
