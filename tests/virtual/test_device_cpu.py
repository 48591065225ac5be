"""The host alone (in place), its memory, and what the machine and its control groups allow."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from overspill.device import memory
from overspill.device.base import MemoryKind, Part
from overspill.device.cpu import CpuDevice
from overspill.device.lane import Lane
from overspill.device.memory import Space, read_host_memory
from overspill.errors import OutOfMemory, UserError

KIB = 1024
MIB = 1024**2
GIB = 1024**3


@pytest.fixture
def cpu() -> Iterator[CpuDevice]:
    device = CpuDevice(is_asynchronous=False, cap_bytes=MIB)
    yield device
    device.close()


def test_work_runs_in_place_on_the_calling_thread(cpu: CpuDevice) -> None:
    seen: list[int] = []
    stream = cpu.stream(Lane.COMPUTE)
    stream.launch(lambda: seen.append(threading.get_ident()), label="look")
    assert seen == [threading.get_ident()]
    event = stream.record()
    assert event.is_done()
    cpu.stream(Lane.UPLOAD).wait(event)
    event.wait_host()
    cpu.synchronize_host()
    assert (cpu.counters.n_host_waits, cpu.counters.n_device_syncs) == (1, 1)


def test_no_threads() -> None:
    before = threading.active_count()
    device = CpuDevice(is_asynchronous=False)
    for lane in Lane:
        device.stream(lane).launch(lambda: None, label="nothing")
    assert threading.active_count() == before
    device.close()
    device.close()


def test_an_error_is_raised_at_once_and_stays(cpu: CpuDevice) -> None:
    stream, seen = cpu.stream(Lane.COMPUTE), list[int]()
    with pytest.raises(ZeroDivisionError) as caught:
        stream.launch(lambda: seen.append(1 // 0), label="bad work")
    assert caught.value.__notes__ == ["in bad work on cpu/compute"]
    for later in (
        lambda: stream.launch(lambda: seen.append(1), label="later"),
        stream.record().wait_host,
        stream.synchronize_host,
        cpu.synchronize_host,
        lambda: cpu.stream(Lane.UPLOAD).wait(stream.record()),
    ):
        with pytest.raises(ZeroDivisionError):
            later()
    assert seen == []


def test_copy_upload_trace_and_counts(cpu: CpuDevice) -> None:
    source = cpu.allocate_pinned(8, name="source")
    target = cpu.allocate((2, 4), torch.uint8, kind=MemoryKind.STAGING, name="target")
    source.host_tensor.copy_(torch.arange(8))
    target.host_tensor.zero_()
    stream = cpu.stream(Lane.UPLOAD)
    cpu.start_trace()
    stream.upload(target, [Part(source, 4, 0, 4)], label="slab")
    assert target.host_tensor.tolist() == [[4, 5, 6, 7], [0, 0, 0, 0]]
    stream.copy(target, source, n_bytes=6, label="copy")
    assert target.host_tensor.tolist() == [[0, 1, 2, 3], [4, 5, 0, 0]]
    spans = cpu.take_trace()
    assert [(s.lane, s.label, s.n_bytes) for s in spans] == [(Lane.UPLOAD, "slab", 4), (Lane.UPLOAD, "copy", 6)]
    assert cpu.counters.busy_us[Lane.UPLOAD] == pytest.approx(sum(s.end_us - s.start_us for s in spans))
    counters = cpu.counters
    assert (counters.uploaded_bytes, counters.handed_off_bytes, counters.downloaded_bytes) == (4, 0, 0)


def test_wrapped_memory_is_shared_unpinned_and_not_counted(cpu: CpuDevice) -> None:
    mapped = torch.arange(4, dtype=torch.uint8)
    buffer = cpu.wrap(mapped, name="blk.0.ffn_up_exps")
    assert buffer.host_tensor.data_ptr() == mapped.data_ptr()
    assert (buffer.is_pinned, buffer.kind) == (False, MemoryKind.WEIGHTS)
    assert (cpu.free_bytes, cpu.counters.n_allocations) == (MIB, 0)
    target = cpu.allocate((4,), torch.uint8, kind=MemoryKind.STAGING, name="t")
    with pytest.raises(RuntimeError, match="which is not pinned"):
        cpu.stream(Lane.UPLOAD).upload(target, [Part(buffer, 0, 0, 4)], label="u")
    with pytest.raises(ValueError, match="strided: only contiguous host memory"):
        cpu.wrap(torch.zeros(4, 4).T, name="strided")
    with pytest.raises(ValueError, match="meta: only contiguous host memory"):
        cpu.wrap(torch.zeros(4, device="meta"), name="meta")


def test_accounting(cpu: CpuDevice) -> None:
    pinned = cpu.allocate_pinned(256 * KIB, name="arena", kind=MemoryKind.WEIGHTS)
    cpu.allocate_pinned(128 * KIB, name="ids")
    assert pinned.is_pinned
    assert cpu.allocated_bytes == {
        MemoryKind.WEIGHTS: 256 * KIB,
        MemoryKind.KV: 0,
        MemoryKind.COMPUTE: 0,
        MemoryKind.STAGING: 128 * KIB,
        MemoryKind.CACHE: 0,
    }
    cpu.free(pinned)
    assert (cpu.free_bytes, cpu.peak_bytes, cpu.counters.n_allocations) == (896 * KIB, 384 * KIB, 2)


def mapping_flags(tensor: torch.Tensor) -> list[str]:
    """What the kernel notes about the mapping that a tensor begins in."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            first, last = (int(word, 16) for word in words[0].split("-"))
            is_inside = first <= tensor.data_ptr() < last
        elif is_inside and words[0] == "VmFlags:":
            return words[1:]
    raise AssertionError("no mapping holds the tensor")


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="this kernel has no huge pages")
def test_large_host_memory_is_in_huge_pages() -> None:
    device = CpuDevice(is_asynchronous=False, cap_bytes=64 * MIB)
    with torch.inference_mode():
        large = device.allocate((1 << 20, 3), torch.float32, kind=MemoryKind.WEIGHTS, name="large")
        pinned = device.allocate_pinned(4 * MIB + 5, name="pinned")
    for tensor in (large.host_tensor, pinned.host_tensor):
        assert "hg" in mapping_flags(tensor)
        tensor.fill_(3)
        assert not tensor.is_inference()
    assert (large.host_tensor.shape, pinned.host_tensor.shape) == ((1 << 20, 3), (4 * MIB + 5,))


def test_nothing_stays_counted_when_there_is_no_such_memory() -> None:
    def refuse(n_bytes: int) -> torch.Tensor:
        raise OutOfMemory(f"cannot pin {n_bytes}")

    device = CpuDevice(is_asynchronous=False, cap_bytes=MIB, pinned_memory=refuse)
    with pytest.raises(OutOfMemory, match="cannot pin 7"):
        device.allocate_pinned(7, name="arena")
    assert (device.free_bytes, device.counters.n_allocations) == (MIB, 0)


def test_untouched_memory_counts_against_what_was_free_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel still calls memory available that was allocated but not touched; it must not be promised twice."""
    free = [10 * MIB]
    monkeypatch.setattr(memory, "read_host_memory", lambda: Space(16 * MIB, free[0]))
    monkeypatch.setattr(memory, "_FRESH_S", 0.0)
    device = CpuDevice(is_asynchronous=False)
    device.allocate((6 * MIB,), torch.uint8, kind=MemoryKind.WEIGHTS, name="first")
    assert (device.total_bytes, device.free_bytes) == (16 * MIB, 4 * MIB)
    with pytest.raises(OutOfMemory, match=r"cpu: out of memory: weights/second needs 6\.0 MiB, 4\.0 of 16\.0 MiB"):
        device.allocate((6 * MIB,), torch.uint8, kind=MemoryKind.WEIGHTS, name="second")
    free[0] = 3 * MIB
    assert device.free_bytes == 3 * MIB


def test_many_allocations_share_a_reading_and_cannot_overdraw_it(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([Space(16 * MIB, 10 * MIB)])
    monkeypatch.setattr(memory, "read_host_memory", lambda: next(readings))
    monkeypatch.setattr(memory, "_FRESH_S", 3600.0)
    device = CpuDevice(is_asynchronous=False)
    for i in range(10):
        device.allocate((MIB,), torch.uint8, kind=MemoryKind.WEIGHTS, name=str(i))
    with pytest.raises(OutOfMemory, match=r"0\.0 of 16\.0 MiB are free"):
        device.allocate((1,), torch.uint8, kind=MemoryKind.WEIGHTS, name="one more")


# --- what the machine allows ----------------------------------------------------------------------------------------


def machine(root: Path, files: dict[str, str]) -> Space:
    files = {"proc/meminfo": f"MemTotal: {64 * MIB} kB\nMemFree: 1 kB\nMemAvailable: {32 * MIB} kB\n", **files}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return read_host_memory(root)


def test_machine_without_control_groups(tmp_path: Path) -> None:
    assert machine(tmp_path, {}) == Space(64 * GIB, 32 * GIB)


def group(folder: str, limit: str, used: int, cached: int, *, is_v1: bool = False) -> dict[str, str]:
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if is_v1 else ("memory.max", "memory.current")
    field = "total_inactive_file" if is_v1 else "inactive_file"
    stat = f"anon 1\n{field} {cached}\n"
    return {f"{folder}/{names[0]}": limit, f"{folder}/{names[1]}": str(used), f"{folder}/memory.stat": stat}


def test_v2_limit_less_what_is_used_and_not_cache(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/a/b\n"} | group("sys/fs/cgroup/a/b", str(8 * GIB), 5 * GIB, 2 * GIB)
    assert machine(tmp_path, files) == Space(8 * GIB, 5 * GIB)


def test_v2_parent_binds_its_child(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/a/b\n"}
    files |= group("sys/fs/cgroup/a/b", "max", GIB, 0)
    files |= group("sys/fs/cgroup/a", str(4 * GIB), 3 * GIB, 0)
    assert machine(tmp_path, files) == Space(4 * GIB, GIB)


def test_v2_namespace_root(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n"} | group("sys/fs/cgroup", str(2 * GIB), 3 * GIB, 0)
    assert machine(tmp_path, files) == Space(2 * GIB, 0)


def test_v1_limit_at_the_mount_when_the_path_is_outside(tmp_path: Path) -> None:
    """In a container the path is the outside's; only the mount's root is seen."""
    files = {"proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/docker/x\n0::/\n"}
    files |= group("sys/fs/cgroup/memory", str(16 * GIB), 4 * GIB, GIB, is_v1=True)
    assert machine(tmp_path, files) == Space(16 * GIB, 13 * GIB)


def test_v1_without_a_limit(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "4:memory:/x\n"}
    files |= group("sys/fs/cgroup/memory/x", "9223372036854771712", 4 * GIB, 0, is_v1=True)
    assert machine(tmp_path, files) == Space(64 * GIB, 32 * GIB)


def test_unknown_memory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"proc/meminfo: this machine's free memory is unknown; give --device-memory"):
        read_host_memory(tmp_path)
    with pytest.raises(UserError, match="free memory is unknown"):
        machine(tmp_path, {"proc/meminfo": "MemTotal: 5 kB\n"})


def test_this_machine() -> None:
    space = read_host_memory()
    assert 0 < space.free_bytes < space.total_bytes


def test_tensors_that_fill_no_huge_page_share_some() -> None:
    device = CpuDevice(is_asynchronous=False, cap_bytes=GIB)
    sizes = [100_001, 3 * MIB, 7 * MIB] * 4  # 40 MiB: two areas of 32
    buffers = [device.allocate((n,), torch.uint8, kind=MemoryKind.WEIGHTS, name=str(n)) for n in sizes]
    tensors = [buffer.host_tensor.fill_(i) for i, buffer in enumerate(buffers)]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 2
    assert all(tensor.data_ptr() % 64 == 0 and bool((tensor == i).all()) for i, tensor in enumerate(tensors))
    assert device.allocated_bytes[MemoryKind.WEIGHTS] == sum(sizes)
    for n in (KIB, 9 * MIB):
        alone = device.allocate((n,), torch.uint8, kind=MemoryKind.WEIGHTS, name="alone").host_tensor
        assert alone.untyped_storage().data_ptr() == alone.data_ptr()
    device.close()
