"""Reading good files, and refusing what no oracle file shows: tiny hostile headers, other formats, odd paths."""

from __future__ import annotations

import os
import struct
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from overspill.errors import UserError
from overspill.gguf import TensorInfo, TensorType, open_gguf
from tests.helpers import gguf_files as files
from tests.helpers.gguf_files import BASE, F32, SHARED_FILES, Document, Tensor, base

SMALL = Document((("general.architecture", files.string("x")),), (Tensor("t", (4, 2), F32, bytes(range(32))),))


def refused(path: Path | str) -> str:
    with pytest.raises(UserError) as caught:
        open_gguf(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


def refused_bytes(folder: Path, data: bytes) -> str:
    path = folder / "model.gguf"
    path.write_bytes(data)
    message = refused(path)
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


def header(n_tensors: int, n_keys: int, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_keys) + rest


def tensor_info(dims: tuple[int, ...], type: int = F32, offset: int = 0, name: str = "w") -> bytes:
    shape = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return files.raw_string(name) + shape + struct.pack("<IQ", type, offset)


def model_files() -> list[Path]:
    if not SHARED_FILES.is_dir():
        return [BASE]
    fixtures = SHARED_FILES.parent
    return [BASE, *sorted(fixtures.glob("quants/*.gguf")), fixtures / "models" / "qwen4_exp.gguf"]


@pytest.mark.parametrize("path", model_files(), ids=lambda path: path.name)
def test_agrees_with_the_gguf_package(path: Path) -> None:
    file, reference = open_gguf(path), gguf.GGUFReader(path)
    assert list(file.tensors) == [tensor.name for tensor in reference.tensors]
    for tensor in reference.tensors:
        info = file.tensors[tensor.name]
        assert info.shape == tuple(int(n) for n in tensor.shape)[::-1]
        assert (info.type, info.n_bytes, info.offset) == (tensor.tensor_type, tensor.n_bytes, tensor.data_offset)
        assert np.array_equal(file.bytes_of(tensor.name), tensor.data.reshape(-1).view(np.uint8))
    fields = {name: field.contents() for name, field in reference.fields.items() if not name.startswith("GGUF.")}
    assert list(file.keys) == list(fields)
    for name, expected in fields.items():
        value = file.keys[name]
        assert (list(value) if isinstance(expected, list) else value) == expected, name
    assert file.n_bytes == sum(tensor.n_bytes for tensor in reference.tensors)


def test_tensor_info_of_a_stack_of_experts() -> None:
    file = open_gguf(str(BASE))
    info = file.tensors["blk.1.ffn_down_exps.weight"]
    assert info == TensorInfo(
        name="blk.1.ffn_down_exps.weight",
        shape=(4, 32, 32),
        type=TensorType.Q8_0,
        n_bytes=4 * 32 * 34,
        part=0,
        offset=13920 + 62464,
    )
    assert (file.version, file.path, file.paths) == (3, BASE, (BASE,))


def test_views_are_read_only_share_the_map_and_outlive_it() -> None:
    with open_gguf(BASE) as file:
        first, again = file.bytes_of("output.weight"), file.bytes_of("output.weight")
    assert first.dtype == np.uint8
    assert first.shape == (17408,)
    assert not first.flags.writeable
    assert np.shares_memory(first, again)
    assert first.tobytes() == base().tensors[0].data
    with pytest.raises(ValueError, match="closed"):
        file.bytes_of("output.weight")


def test_dimensions_from_none_to_four(tmp_path: Path) -> None:
    dims = [(), (1,), (3, 1), (2, 3, 1), (2, 1, 3, 4)]
    tensors = [Tensor(f"t{len(d)}", d, F32, bytes(4 * int(np.prod(d)))) for d in dims]
    path = tmp_path / "dims.gguf"
    path.write_bytes(replace(SMALL, tensors=tuple(tensors)).to_bytes())
    shapes = [info.shape for info in open_gguf(path).tensors.values()]
    assert shapes == [(1,), (1,), (1, 3), (1, 3, 2), (4, 3, 1, 2)]


@pytest.mark.parametrize("alignment", [1, 8, 64, 4096])
def test_any_power_of_two_aligns(alignment: int, tmp_path: Path) -> None:
    document = replace(SMALL.with_key("general.alignment", files.u32(alignment)), alignment=alignment)
    path = tmp_path / "aligned.gguf"
    path.write_bytes(document.to_bytes())
    file = open_gguf(path)
    assert file.tensors["t"].offset % alignment == 0
    assert file.bytes_of("t").tobytes() == bytes(range(32))


def test_unpadded_tail_trailing_bytes_and_gaps_load(tmp_path: Path) -> None:
    odd = Tensor("odd", (3,), F32, bytes(range(12)))
    data = SMALL.with_tensor(odd).to_bytes()
    path = tmp_path / "tail.gguf"
    cut = data[:-20]  # 12 of 32 bytes are data
    gap = files.patched_info(data, "odd", 4 + 8 + 4, struct.pack("<Q", 128)) + bytes(64) + odd.data
    for content in (cut, data + b"rest", gap):
        path.write_bytes(content)
        assert open_gguf(path).bytes_of("odd").tobytes() == odd.data
    path.write_bytes(cut[:-1])
    assert "tensor odd needs 12 bytes" in refused(path)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (header(1, 0, tensor_info((2**63 - 1, 2))), ["tensor w", "dimensions"]),
        (header(1, 0, tensor_info((2**62,))), ["tensor w", "past the end"]),
        (header(1, 0, tensor_info((4, 0))), ["tensor w", "dimension of 0"]),
        (header(1, 0, tensor_info((1, 1, 1, 1, 1))), ["tensor w", "5 dimensions"]),
        (header(1, 0, tensor_info((4,), offset=2**64 - 32)), ["tensor w", "past the end"]),
        (header(1, 0, tensor_info((4,), offset=16) + bytes(200)), ["tensor w", "offset 16", "alignment 32"]),
        (header(1, 0, tensor_info((4,), type=2**32 - 1)), ["tensor w", "type 4294967295"]),
        (header(1, 0, tensor_info((4,), name="")), ["tensor 0", "empty name"]),
        (header(2**61, 0), ["tensor count 2305843009213693952"]),
        (header(2**64 - 1, 0), ["tensor count -1"]),
        (header(0, 2**64 - 1), ["metadata count -1"]),
        (header(0, 1, struct.pack("<Q", 2**62)), ["metadata count 1", "truncated"]),
        (header(0, 1, struct.pack("<Q", 2**62) + bytes(8)), ["key length 4611686018427387904"]),
        (header(0, 1, files.raw_string("k") + struct.pack("<IQ", 8, 2**62)), ["string length", "key k"]),
        (header(0, 1, files.raw_string("k") + files.array_of(4, 2**40, b"")), ["array length", "key k"]),
        (header(0, 1, files.raw_string("k") + files.array_of(8, 2**20, b"")), ["array length", "key k"]),
        (
            header(0, 1, files.raw_string("k") + files.array_of(8, 2, files.raw_string("a") + b"\xff" * 8)),
            ["element 1"],
        ),
        (
            header(0, 1, files.raw_string("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 1000),
            ["nested array", "key k"],
        ),
        (
            header(0, 1, files.raw_string("k") + files.strings(["abcdefgh"])[:-1]),
            ["string length 8 of element 0", "7 bytes"],
        ),
        (header(0, 1, files.raw_string("") + files.u32(1)), ["empty key"]),
        (header(0, 1, files.raw_string("k" * 70000) + files.u32(1)), ["key length 70000"]),
        (header(0, 1, files.raw_string("k") + files.flag(2)), ["key k", "bool"]),
        (header(0, 2, (files.raw_string("k") + files.u32(1)) * 2), ["duplicate key k"]),
        (header(0, 0, version=4), ["version 4"]),
        (b"GGUF" + struct.pack(">I", 2), ["big-endian"]),
        (b"GGUF\x03\x00", ["truncated", "version"]),
        (b"GGUF" + bytes(4), ["version 0"]),
    ],
)
def test_tiny_hostile_headers(data: bytes, words: list[str], tmp_path: Path) -> None:
    message = refused_bytes(tmp_path, data)
    assert all(word in message for word in words), message
    assert len(message) < 400


@pytest.mark.parametrize(
    "value",
    [
        files.u32(0),
        files.u32(3),
        files.i32(32),
        files.u64(32),
        files.u16(32),
        files.string("32"),
        files.array_of(4, 0, b""),
    ],
)
def test_alignment_must_be_a_u32_power_of_two(value: bytes, tmp_path: Path) -> None:
    message = refused_bytes(tmp_path, SMALL.with_key("general.alignment", value).to_bytes())
    assert "general.alignment" in message
    assert "power of two" in message


def test_alignment_beyond_the_file(tmp_path: Path) -> None:
    message = refused_bytes(tmp_path, SMALL.with_key("general.alignment", files.u32(2**31)).to_bytes())
    assert "tensor t needs 32 bytes at byte 2147483648" in message


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"<!DOCTYPE html>\n<html><title>Sign in</title>", "web page"),
        (b"\n\n  <html lang='en'>", "web page"),
        (b"tjgg\x03\x00\x00\x00" + bytes(40), "GGJT"),
        (b"lmgg\x01\x00\x00\x00" + bytes(40), "GGML"),
        (struct.pack("<Q", 20) + b'{"a":{}}' + bytes(20), "safetensors"),
        (b"PK\x03\x04" + bytes(40), "PyTorch"),
        (b"\x1f\x8b\x08" + bytes(40), "gzip"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "git lfs pull"),
        (b"FUGG" + bytes(40), "is not a GGUF file"),
        (b"", "empty"),
        (b"GG", "too short"),
    ],
)
def test_other_kinds_of_files_are_named(data: bytes, words: str, tmp_path: Path) -> None:
    assert words in refused_bytes(tmp_path, data)


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    assert "is a directory" in refused(folder)
    (folder / "b.gguf").write_bytes(b"")
    (folder / "a.gguf").write_bytes(b"")
    assert refused(folder).endswith("for example a.gguf")
    assert "No such file" in refused(tmp_path / "absent.gguf")
    assert "null byte" in refused("a\0b")
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in refused(tmp_path / "pipe")


def test_odd_paths_open_and_are_shown_on_one_line(tmp_path: Path) -> None:
    path = tmp_path / "m\u00f6del \u6a21\u578b 1.gguf"
    path.write_bytes(SMALL.to_bytes())
    assert list(open_gguf(path).tensors) == ["t"]
    path.write_bytes(b"none")
    assert str(path) in refused(path)
    evil = tmp_path / "a\nb\x1b[31m.gguf"
    evil.write_bytes(b"none")
    assert "\x1b" not in refused(evil)


def test_names_with_control_characters_are_escaped(tmp_path: Path) -> None:
    evil = "w\x1b]0;owned\x07\n"
    message = refused_bytes(tmp_path, header(1, 0, tensor_info((0,), name=evil)))
    assert "'w\\x1b]0;owned\\x07\\n'" in message
    long = refused_bytes(tmp_path, header(1, 0, tensor_info((0,), name="n" * 5000)))
    assert len(long) < 400
    bad_utf8 = files.raw_string(b"k\xff") + files.array_of(9, 1, bytes(8))
    assert "k\\xff" in refused_bytes(tmp_path, header(0, 1, bad_utf8))


def test_a_long_sparse_file_is_refused_at_once(tmp_path: Path) -> None:
    """Declared lengths that do fit the file, in a terabyte of zeros that takes no disk."""
    path = tmp_path / "sparse.gguf"
    for value in (files.array_of(8, 2**36, b""), files.array_of(4, 2**36, b""), struct.pack("<IQ", 8, 2**39)):
        path.write_bytes(header(0, 1, files.raw_string("k") + value))
        os.truncate(path, 2**40)
        assert "allowed" in refused(path)


def test_cut_at_every_byte_and_every_byte_changed(tmp_path: Path) -> None:
    """A whole small file: never anything but success or a one-line refusal."""
    document = SMALL.with_key("a", files.strings(["x", "yy"])).with_key("n", files.numbers(5, "i", [1, -2]))
    good = document.to_bytes()
    path = tmp_path / "small.gguf"
    path.write_bytes(good)
    assert list(open_gguf(path).tensors) == ["t"]
    for size in range(len(good)):
        path.write_bytes(good[:size])
        refused(path)
    for at in range(len(good)):
        for value in {0, 1, 0x7F, 0x80, 0xFF, good[at] ^ 1, good[at] ^ 0x20}:
            path.write_bytes(good[:at] + bytes([value]) + good[at + 1 :])
            assert "\n" not in outcome(path)


def outcome(path: Path) -> str:
    """The refusal, or nothing."""
    try:
        open_gguf(path)
    except UserError as error:
        return str(error)
    return ""
