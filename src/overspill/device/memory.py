"""How much memory there is, and who holds it.

`Ledger` counts a device's bytes by kind and refuses what does not fit, before anything is allocated.
`read_host_memory` is what the host may really use: the least of the machine's memory and the limits of every control
group (v1 or v2) above this process, because a process that trusts the machine alone is killed inside a container.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from overspill.device.base import MemoryKind
from overspill.errors import OutOfMemory, UserError

MIB = 1024 * 1024
_FRESH_S = 0.02


class Space(NamedTuple):
    """Capacity and what of it is unused, in bytes."""

    total_bytes: int
    free_bytes: int


def size_in_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    n_elements = 1
    for n in shape:
        n_elements *= n
    return n_elements * dtype.itemsize


class Ledger:
    """Bytes of one device by kind, and their highest sum.

    `space` gives the device's memory, not counting what this ledger holds: a constant for a capped device.
    """

    def __init__(self, device_name: str, space: Callable[[int], Space]) -> None:
        self._device_name = device_name
        self._space = space
        self._held = dict.fromkeys(MemoryKind, 0)
        self._peak_bytes = 0

    @property
    def held_bytes(self) -> int:
        return sum(self._held.values())

    @property
    def space(self) -> Space:
        return self._space(self.held_bytes)

    @property
    def by_kind(self) -> dict[MemoryKind, int]:
        return dict(self._held)

    @property
    def peak_bytes(self) -> int:
        return self._peak_bytes

    def take(self, n_bytes: int, *, kind: MemoryKind, name: str) -> None:
        """Count `n_bytes`; `OutOfMemory` when fewer are free."""
        space = self.space
        if n_bytes > space.free_bytes:
            raise OutOfMemory(
                f"{self._device_name}: out of memory: {kind}/{name} needs {n_bytes / MIB:.1f} MiB, "
                f"{space.free_bytes / MIB:.1f} of {space.total_bytes / MIB:.1f} MiB are free; place less on this device"
            )
        self._held[kind] += n_bytes
        self._peak_bytes = max(self._peak_bytes, self.held_bytes)

    def give_back(self, n_bytes: int, *, kind: MemoryKind) -> None:
        self._held[kind] -= n_bytes


def capped_space(total_bytes: int) -> Callable[[int], Space]:
    """The memory of a device that may hold `total_bytes` and no more."""
    return lambda held_bytes: Space(total_bytes, max(0, total_bytes - held_bytes))


def host_space() -> Callable[[int], Space]:
    """The memory of this machine.

    Memory that was allocated but not yet touched still counts as available with the kernel, so what is free is also
    bounded by what was free at first less what was allocated since. A reading takes about a millisecond and serves for
    some: a long context has thousands of buffers, which are allocated one after the other.
    """
    latest = at_first = read_host_memory()
    old_s = time.monotonic() + _FRESH_S

    def space(held_bytes: int) -> Space:
        nonlocal latest, old_s
        if time.monotonic() >= old_s:
            latest = read_host_memory()
            old_s = time.monotonic() + _FRESH_S
        return Space(latest.total_bytes, max(0, min(latest.free_bytes, at_first.free_bytes - held_bytes)))

    return space


def read_host_memory(root: Path = Path("/")) -> Space:
    """Memory that this process can use; `root` is where `proc` and `sys` lie. `UserError` where it is unknown."""
    try:
        fields = _read_fields(root / "proc/meminfo")
        machine = Space(fields["MemTotal:"] * 1024, fields["MemAvailable:"] * 1024)
    except (OSError, KeyError, ValueError):
        raise UserError(
            f"{root / 'proc/meminfo'}: this machine's free memory is unknown; give --device-memory"
        ) from None
    spaces = [machine, *_group_limits(root)]
    return Space(min(s.total_bytes for s in spaces), max(0, min(s.free_bytes for s in spaces)))


def _read_fields(path: Path) -> dict[str, int]:
    """`name value ...` lines; names as they stand in the file."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) >= 2}


class _GroupFiles(NamedTuple):
    """The files of a control group version: its mount, its limit, its use, and the name of its reclaimable cache."""

    mount: str
    limit: str
    usage: str
    cache_field: str


_V1 = _GroupFiles("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _GroupFiles("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


def _group_limits(root: Path) -> Iterator[Space]:
    """The limits of every control group this process is in, innermost first."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield from _limits_up_from(root, path, _V1)
        elif not controllers:
            yield from _limits_up_from(root, path, _V2)


def _limits_up_from(root: Path, path: str, files: _GroupFiles) -> Iterator[Space]:
    """A parent's limit binds its children. Folders that the process cannot see (a container's outside) are passed."""
    mount = root / files.mount
    group = mount / path.strip("/")
    for folder in (group, *group.parents):
        if not folder.is_relative_to(mount):
            return
        space = _group_space(folder, files)
        if space is not None:
            yield space


def _group_space(folder: Path, files: _GroupFiles) -> Space | None:
    """Limit and what is left of it; cached file pages that the kernel would drop first do not count as used."""
    try:
        limit = (folder / files.limit).read_text().strip()
        used = int((folder / files.usage).read_text())
        cache = _read_fields(folder / "memory.stat").get(files.cache_field, 0)
    except OSError:
        return None
    if limit == "max":
        return None
    return Space(int(limit), int(limit) - max(0, used - cache))
