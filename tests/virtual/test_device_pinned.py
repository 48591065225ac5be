"""Pinned memory for GPUs, against a driver that only keeps accounts: all of it is given back, while it still exists."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from overspill.device import cuda
from overspill.errors import OutOfMemory

CHUNK = 4 << 20
SUCCESS, NO_MEMORY = 0, 2


class Driver:
    """Registers at most `n_allowed` chunks. unmapped: addresses that were given back after their memory."""

    def __init__(self) -> None:
        self.n_allowed = 1000
        self.registered: dict[int, int] = {}
        self.unmapped: list[int] = []

    def cudaHostRegister(self, address: int, n_bytes: int, flags: int) -> int:  # noqa: N802  (CUDA's name)
        assert is_mapped(address)
        if len(self.registered) == self.n_allowed:
            return NO_MEMORY
        self.registered[address] = n_bytes
        return SUCCESS

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802  (CUDA's name)
        if not is_mapped(address):
            self.unmapped.append(address)
        del self.registered[address]
        return SUCCESS


def is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, end = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= address < end:
            return True
    return False


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    driver = Driver()
    monkeypatch.setattr(cuda, "_PIN_CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    yield driver
    gc.collect()
    assert not driver.registered
    assert not driver.unmapped


@pytest.mark.parametrize("n_bytes", [1, CHUNK, 3 * CHUNK + 5, 40 << 20])
def test_all_of_it_is_registered_and_given_back_before_it_is_unmapped(driver: Driver, n_bytes: int) -> None:
    memory = cuda.pinned_memory(n_bytes)
    assert memory.shape == (n_bytes,)
    memory.fill_(7)
    assert n_bytes <= sum(driver.registered.values()) < n_bytes + CHUNK
    assert max(driver.registered.values()) <= CHUNK
    assert min(driver.registered) == memory.data_ptr()
    part = memory[-1:]
    del memory
    gc.collect()
    assert driver.registered, "a view keeps the memory"
    assert part.item() == 7


def test_a_refusal_leaves_nothing_registered(driver: Driver) -> None:
    driver.n_allowed = 2
    with pytest.raises(OutOfMemory, match="pinning 4 MiB"):
        cuda.pinned_memory(4 * CHUNK)
    assert not driver.registered
    assert len(cuda.pinned_memory(2 * CHUNK)) == 2 * CHUNK
