"""Tensors read into memory: the right bytes whatever the offsets, through the page cache and past it."""

from __future__ import annotations

import errno
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from overspill.errors import UserError
from overspill.gguf import open_gguf
from overspill.gguf.source import FileRange
from overspill.models.check import understand
from overspill.pipeline import reading
from overspill.pipeline.reading import LoadMode, TensorReader
from tests.helpers.plain import DATA

N_BYTES = 3 * 4096 + 1000
CONTENT = np.random.default_rng(0).integers(0, 256, N_BYTES, dtype=np.uint8)


class OneFile(NamedTuple):
    """A source whose tensors are named `offset:size`, of one file; `made` makes them instead."""

    path: Path
    is_made: bool = False
    file_id: tuple[int, int] = (0, 0)

    def bytes_of(self, name: str) -> NDArray[np.uint8]:
        offset, size = map(int, name.split(":"))
        return CONTENT[offset : offset + size]

    def file_range(self, name: str) -> FileRange | None:
        offset, size = map(int, name.split(":"))
        return None if self.is_made else FileRange(self.path, self.file_id, offset, size)


@pytest.fixture
def source(tmp_path: Path) -> OneFile:
    file = tmp_path / "weights"
    file.write_bytes(CONTENT.tobytes())
    return OneFile(file, file_id=(file.stat().st_dev, file.stat().st_ino))


def read(source: OneFile, name: str, *, is_direct: bool, first: int = 0, n: int | None = None) -> torch.Tensor:
    target = torch.zeros(int(name.split(":")[1]) if n is None else n, dtype=torch.uint8)
    with TensorReader(source, is_direct=is_direct) as reader:  # type: ignore[arg-type]
        reader.open(name)(first, target)
    return target


RANGES = ["0:4096", "0:1", "32:100", "4095:2", "4096:4096", "100:12000", f"0:{N_BYTES}", f"{N_BYTES - 1}:1", "7:0"]


@pytest.mark.parametrize("is_direct", [False, True])
@pytest.mark.parametrize("name", RANGES)
def test_bytes(source: OneFile, name: str, is_direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_CHUNK_BYTES", 8192)
    monkeypatch.setattr(reading, "_READ_BYTES", 5000)
    expected = source.bytes_of(name)
    assert np.array_equal(read(source, name, is_direct=is_direct).numpy(), expected)
    assert np.array_equal(read(source._replace(is_made=True), name, is_direct=is_direct).numpy(), expected)


@pytest.mark.parametrize("is_direct", [False, True])
def test_a_range_of_a_tensor(source: OneFile, is_direct: bool) -> None:
    found = read(source, "100:9000", is_direct=is_direct, first=5000, n=77)
    assert np.array_equal(found.numpy(), CONTENT[5100:5177])


def test_many_threads_share_a_reader(source: OneFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_CHUNK_BYTES", 4096)
    offsets = range(0, N_BYTES - 3000, 97)
    targets = [torch.zeros(3000, dtype=torch.uint8) for _ in offsets]
    with TensorReader(source, is_direct=True) as reader, ThreadPoolExecutor(8) as pool:  # type: ignore[arg-type]
        list(pool.map(lambda job: reader.open(f"{job[0]}:3000")(0, job[1]), zip(offsets, targets, strict=True)))
    for offset, target in zip(offsets, targets, strict=True):
        assert np.array_equal(target.numpy(), CONTENT[offset : offset + 3000])


def test_direct_reads_really_are(source: OneFile, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda *args: flags.append(args[1]) or real(*args))
    read(source, "32:9000", is_direct=True)
    read(source, "32:9000", is_direct=False)
    assert [bool(f & os.O_DIRECT) for f in flags] == [True, False]


@pytest.mark.parametrize("refuses", ["open", "first read"])
def test_refused_direct_reads_are_told_once_and_go_through_the_cache(
    source: OneFile, refuses: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real_open, real_read = os.open, os.preadv
    direct = set()

    def open_file(name: Path, flags: int) -> int:
        if flags & os.O_DIRECT and refuses == "open":
            raise OSError(errno.EINVAL, "Invalid argument")
        fd = real_open(name, flags)
        if flags & os.O_DIRECT:
            direct.add(fd)
        return fd

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        if fd in direct:
            direct.remove(fd)  # it is closed next, and its number used again
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_read(fd, buffers, offset)

    monkeypatch.setattr(os, "open", open_file)
    monkeypatch.setattr(os, "preadv", preadv)
    with caplog.at_level(logging.WARNING), TensorReader(source, is_direct=True) as reader:  # type: ignore[arg-type]
        for name in ("32:5000", "5032:100"):
            offset, n = map(int, name.split(":"))
            target = torch.zeros(n, dtype=torch.uint8)
            reader.open(name)(0, target)
            assert np.array_equal(target.numpy(), CONTENT[offset : offset + n])
    (record,) = caplog.records
    assert "-lm dio" in record.getMessage()
    assert str(source.path) in record.getMessage()


@pytest.mark.parametrize("is_direct", [False, True])
def test_a_file_that_became_shorter(source: OneFile, is_direct: bool) -> None:
    os.truncate(source.path, 6000)
    with pytest.raises(UserError, match=r"weights: ended while tensor 5000:4000 was read"):
        read(source, "5000:4000", is_direct=is_direct)


@pytest.mark.parametrize("is_direct", [False, True])
def test_a_file_that_was_replaced(source: OneFile, is_direct: bool) -> None:
    other = source.path.with_name("other")
    other.write_bytes(CONTENT.tobytes())
    other.rename(source.path)
    with pytest.raises(UserError, match=r"weights: was replaced while it was being loaded"):
        read(source, "0:100", is_direct=is_direct)


def test_a_file_that_is_gone(source: OneFile) -> None:
    source.path.unlink()
    with pytest.raises(UserError, match=r"weights: cannot read tensor 0:100: No such file"):
        read(source, "0:100", is_direct=False)


def test_modes() -> None:
    assert {mode.value for mode in LoadMode if mode.is_mapped} == {"auto", "mmap", "mlock", "mmap+mlock"}
    assert {mode.value for mode in LoadMode if mode.is_locked} == {"mlock", "mmap+mlock"}


@pytest.mark.parametrize("name", ["qwen3moe", "mixtral"])
def test_file_ranges_of_models_name_the_bytes_of_their_tensors(name: str) -> None:
    """mixtral's file holds an expert per tensor, or all of them: what has to be put together lies in no range."""
    _, _, specs, source = understand(open_gguf(DATA / "models" / f"{name}.gguf"))
    n_in_file = 0
    for spec in specs:
        where = source.file_range(spec.name)
        if where is not None:
            n_in_file += 1
            with where.path.open("rb") as file:
                file.seek(where.offset)
                assert file.read(where.n_bytes) == source.bytes_of(spec.name).tobytes()
    assert n_in_file > len(specs) // 2
