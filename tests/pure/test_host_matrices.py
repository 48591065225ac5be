"""What the CPU computes with: which load modes copy it, and that copies of what it multiplies with become panels."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from overspill.device.cpu import CpuDevice
from overspill.gguf.source import FileRange
from overspill.gguf.types import TensorType
from overspill.kernels.numba import interleave
from overspill.pipeline import host_matrices
from overspill.pipeline.host_matrices import HostMatrices
from overspill.pipeline.reading import LoadMode, TensorReader
from overspill.quant.panels import Panels
from tests.kernels.weights import random_weight

SHAPE = (3, 48, 256)
WEIGHT = random_weight(TensorType.Q4_K, SHAPE)
INFO = SimpleNamespace(name="blk.0.ffn_up_exps.weight", n_bytes=WEIGHT.n_bytes, type=WEIGHT.type, shape=SHAPE)


class Source:
    """One tensor, in a file or not."""

    def __init__(self, path: Path, *, is_in_file: bool) -> None:
        self.raw = WEIGHT.data.flatten().numpy()
        path.write_bytes(b"head" + self.raw.tobytes())
        status = os.stat(path)
        where = FileRange(path, (status.st_dev, status.st_ino), 4, WEIGHT.n_bytes)
        self.where = where if is_in_file else None
        self.tensors = {INFO.name: INFO}

    def bytes_of(self, name: str) -> np.ndarray:
        return self.raw

    def file_range(self, name: str) -> FileRange | None:
        return self.where


def matrices(
    tmp_path: Path,
    mode: LoadMode,
    *,
    is_in_file: bool = True,
    huge_bytes: int = 1 << 30,
    panel_types: frozenset[TensorType] = frozenset({WEIGHT.type}),
) -> HostMatrices:
    source, host = Source(tmp_path / "weights", is_in_file=is_in_file), CpuDevice(is_asynchronous=False)
    reader = TensorReader(source, is_direct=False)  # type: ignore[arg-type]
    options = {"n_threads": 2, "huge_bytes": huge_bytes, "interleave": interleave, "panel_types": panel_types}
    return HostMatrices(source, reader, host, mode, **options)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_matrices, "_LEAST_FILE_BYTES", 1)
    monkeypatch.setattr(host_matrices, "_LEAST_BYTES", 1)
    monkeypatch.setattr(host_matrices, "_PANELS_BYTES", 5000)


@pytest.mark.parametrize("mode", [LoadMode.AUTO, LoadMode.NONE])
@pytest.mark.parametrize("is_in_file", [True, False])
def test_copies_become_panels(tmp_path: Path, mode: LoadMode, is_in_file: bool) -> None:
    on_host = matrices(tmp_path, mode, is_in_file=is_in_file)
    weight = on_host.matrix(INFO, SHAPE)  # type: ignore[arg-type]
    assert isinstance(weight, Panels)
    assert torch.equal(weight.in_rows().data, WEIGHT.data)
    assert (on_host.n_copied_bytes, on_host.mapped) == (WEIGHT.n_bytes, {})


@pytest.mark.parametrize(("mode", "huge_bytes"), [(LoadMode.MMAP, 1 << 30), (LoadMode.AUTO, WEIGHT.n_bytes - 1)])
def test_what_stays_in_the_file_keeps_its_rows(tmp_path: Path, mode: LoadMode, huge_bytes: int) -> None:
    on_host = matrices(tmp_path, mode, huge_bytes=huge_bytes)
    weight = on_host.matrix(INFO, SHAPE)  # type: ignore[arg-type]
    assert not isinstance(weight, Panels)
    assert weight.data.data_ptr() == on_host.mapped[INFO.name].ctypes.data
    assert on_host.n_copied_bytes == 0


@pytest.mark.parametrize("name", ["_LEAST_FILE_BYTES", "_LEAST_BYTES"])
def test_what_is_small_stays_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(host_matrices, name, WEIGHT.n_bytes + 1)
    on_host = matrices(tmp_path, LoadMode.AUTO)
    on_host.matrix(INFO, SHAPE)  # type: ignore[arg-type]
    assert (on_host.n_copied_bytes, list(on_host.mapped)) == (0, [INFO.name])


def test_types_whose_rows_the_kernels_read_are_copied_as_they_are(tmp_path: Path) -> None:
    on_host = matrices(tmp_path, LoadMode.NONE, panel_types=frozenset({TensorType.Q8_0}))
    weight = on_host.matrix(INFO, SHAPE)  # type: ignore[arg-type]
    assert not isinstance(weight, Panels)
    assert torch.equal(weight.data, WEIGHT.data)


def test_rows_that_are_no_multiple_of_sixteen_and_tables_are_copied_as_they_are(tmp_path: Path) -> None:
    on_host = matrices(tmp_path, LoadMode.NONE)
    ragged = on_host.matrix(INFO, (6, 24, 256))  # type: ignore[arg-type]
    table = on_host.table(INFO, (144, 256))  # type: ignore[arg-type]
    for weight in (ragged, table):
        assert not isinstance(weight, Panels)
        assert torch.equal(weight.data.flatten(), WEIGHT.data.flatten())
