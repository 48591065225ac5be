"""Random damage: a file loads or is refused in one line, always quickly; what loads can be read to the last byte."""

from __future__ import annotations

import contextlib
import struct
import time
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from overspill.errors import UserError
from overspill.gguf import GgufFile, open_gguf
from tests.helpers import gguf_files as files
from tests.helpers.gguf_files import Document, base

GOOD = base().to_bytes()
N_KEYS, N_HEADER = 12247, 13920
EXTREMES = [0, 1, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1]

number = st.sampled_from(EXTREMES) | st.integers(0, 2**64 - 1)
place = st.one_of(
    st.integers(0, 900), st.integers(0, N_KEYS), st.integers(N_KEYS, N_HEADER), st.integers(N_HEADER, len(GOOD) - 1)
)
flip = st.tuples(place, st.binary(min_size=1, max_size=4))
overwrite = st.tuples(place, number.map(lambda value: struct.pack("<Q", value)))
damage = st.lists(flip | overwrite, max_size=3)
QUICK = settings(
    max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def check(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    start = time.perf_counter()
    try:
        file = open_gguf(path)
    except UserError as error:
        message = str(error)
    else:
        message = ""
        read_everything(file)
    assert "\n" not in message
    assert len(message) < 1000
    assert time.perf_counter() - start < 2


def read_everything(file: GgufFile) -> None:
    assert sum(len(file.bytes_of(name)) for name in file.tensors) == file.n_bytes
    for name in file.tensors:
        file.bytes_of(name).sum()
    for read in (file.keys.u32, file.keys.text, file.keys.texts, file.keys.f32s, file.keys.i32s, file.keys.flags):
        for name in file.keys:
            with contextlib.suppress(UserError):
                read(name)


@given(damage=damage, n_kept=st.none() | st.none() | place)
@QUICK
def test_damaged_base(damage: list[tuple[int, bytes]], n_kept: int | None, tmp_path: Path) -> None:
    data = bytearray(GOOD)
    for at, value in damage:
        data[at : at + len(value)] = value
    check(tmp_path / "damaged.gguf", bytes(data[:n_kept]))


raw_value = st.one_of(
    st.binary(max_size=40),
    st.tuples(st.integers(0, 14), st.binary(max_size=24)).map(lambda v: struct.pack("<I", v[0]) + v[1]),
    st.builds(files.array_of, st.integers(0, 13), number, st.binary(max_size=64)),
    st.lists(st.binary(max_size=9), max_size=4).map(files.strings),
)
raw_info = st.builds(
    lambda name, dims, type, offset: (
        files.raw_string(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims) + struct.pack("<IQ", type, offset)
    ),
    st.binary(min_size=1, max_size=9),
    st.lists(st.sampled_from([0, 1, 2, 32, 256]) | number, max_size=5),
    st.integers(0, 45),
    st.sampled_from([0, 32, 64, 96]) | number,
)


@given(
    keys=st.lists(st.tuples(st.text(min_size=1, max_size=5), raw_value), max_size=4, unique_by=lambda key: key[0]),
    infos=st.lists(raw_info, max_size=4),
    n_data=st.integers(0, 200),
)
@QUICK
def test_made_up_headers(keys: list[tuple[str, bytes]], infos: list[bytes], n_data: int, tmp_path: Path) -> None:
    document = Document(tuple(keys), extra_infos=tuple(infos))
    check(tmp_path / "made-up.gguf", document.to_bytes() + bytes(n_data))
