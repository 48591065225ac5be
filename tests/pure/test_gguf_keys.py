"""Typed access to metadata: exact types or a message that names the key, what was found and what was expected."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from overspill.errors import UserError
from overspill.gguf import Keys, open_gguf
from tests.helpers import gguf_files as files
from tests.helpers.gguf_files import Document

ROOT = Path(__file__).parents[2]
STORED = {
    "general.architecture": files.string("toy"),
    "toy.u8": files.u8(200),
    "toy.i8": files.i8(-3),
    "toy.u16": files.u16(60000),
    "toy.i16": files.i16(-4),
    "toy.u32": files.u32(2**32 - 1),
    "toy.i32": files.i32(7),
    "toy.u64": files.u64(2**64 - 1),
    "toy.i64": files.i64(12),
    "toy.f32": files.f32(0.1),
    "toy.f64": files.f64(0.1),
    "toy.nan": files.f32(float("nan")),
    "toy.yes": files.flag(True),
    "toy.no": files.flag(False),
    "toy.text": files.string("h\u00e9"),
    "toy.bad": files.string(b"a\xffb"),
    "toy.u32s": files.numbers(4, "I", [1, 2, 3]),
    "toy.i32s": files.numbers(5, "i", [-1, 2, 3]),
    "toy.u64s": files.numbers(10, "Q", [2**64 - 1, 0]),
    "toy.f32s": files.numbers(6, "f", [0.5, -1.5, 2.0]),
    "toy.flags": files.array_of(7, 3, b"\x01\x00\x01"),
    "toy.texts": files.strings(["", "a b", "\u00e9"]),
    "toy.bads": files.strings([b"a", b"\xc3"]),
    "toy.none": files.strings([]),
}


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    path = tmp_path / "toy.gguf"
    path.write_bytes(Document(tuple(STORED.items())).to_bytes())
    return open_gguf(path).keys


@pytest.fixture
def toy(keys: Keys) -> Keys:
    return keys.scoped("toy")


def test_integers_of_any_width_that_fit(toy: Keys) -> None:
    values = [toy.u32(name) for name in ("u8", "u16", "u32", "i32", "i64")]
    assert values == [200, 60000, 2**32 - 1, 7, 12]
    assert all(type(value) is int for value in values)


def test_floats_flags_and_text(keys: Keys, toy: Keys) -> None:
    assert toy.f32("f32") == float(np.float32(0.1))
    assert toy.f32("f64") == 0.1
    assert type(toy.f32("i32")) is float
    assert (toy.flag("yes"), toy.flag("no")) == (True, False)
    assert (toy.text("text"), keys.arch, toy.arch) == ("h\u00e9", "toy", "toy")


def test_arrays(toy: Keys) -> None:
    assert toy.u32s("u32s") == (1, 2, 3)
    assert toy.i32s("i32s") == (-1, 2, 3)
    assert toy.u64s("u64s") == (2**64 - 1, 0)
    assert toy.f32s("f32s") == (0.5, -1.5, 2.0)
    assert toy.flags("flags") == (True, False, True)
    assert toy.texts("texts") == ["", "a b", "\u00e9"]
    assert toy.texts("none") == []
    assert type(toy.u32s("u32s")[0]) is int
    assert (toy.is_array("u32s"), toy.is_array("u32"), toy.is_array("absent")) == (True, False, False)


@pytest.mark.parametrize(
    ("read", "found", "expected"),
    [
        (lambda k: k.u32("text"), "key toy.text is the string 'h\u00e9'", "an unsigned 32-bit integer"),
        (lambda k: k.u32("i8"), "key toy.i8 is i8 -3", "an unsigned 32-bit integer"),
        (lambda k: k.u32("u64"), "key toy.u64 is u64 18446744073709551615", "an unsigned 32-bit integer"),
        (lambda k: k.u32("f32"), "key toy.f32 is f32 0.1", "an unsigned 32-bit integer"),
        (lambda k: k.u32("yes"), "key toy.yes is bool True", "an unsigned 32-bit integer"),
        (lambda k: k.u32("u32s"), "key toy.u32s is an array of 3 u32", "an unsigned 32-bit integer"),
        (lambda k: k.f32("text"), "key toy.text is the string", "a number"),
        (lambda k: k.f32("nan"), "key toy.nan is f32 nan", "a number"),
        (lambda k: k.f32("yes"), "key toy.yes is bool True", "a number"),
        (lambda k: k.flag("u8"), "key toy.u8 is u8 200", "a bool"),
        (lambda k: k.text("u8"), "key toy.u8 is u8 200", "a string"),
        (lambda k: k.text("texts"), "key toy.texts is an array of 3 string", "a string"),
        (lambda k: k.texts("text"), "key toy.text is the string", "an array of strings"),
        (lambda k: k.texts("u32s"), "key toy.u32s is an array of 3 u32", "an array of strings"),
        (lambda k: k.u32s("i32s"), "key toy.i32s is an array of 3 i32", "an array of unsigned 32-bit integers"),
        (lambda k: k.u32s("texts"), "key toy.texts is an array of 3 string", "an array of unsigned 32-bit integers"),
        (lambda k: k.i32s("u32"), "key toy.u32 is u32 4294967295", "an array of signed 32-bit integers"),
        (lambda k: k.i32s("flags"), "key toy.flags is an array of 3 bool", "an array of signed 32-bit integers"),
        (lambda k: k.f32s("texts"), "key toy.texts is an array of 3 string", "an array of numbers"),
        (lambda k: k.flags("u32s"), "key toy.u32s is an array of 3 u32", "an array of bools"),
    ],
)
def test_another_type_is_named(toy: Keys, read: Callable[[Keys], object], found: str, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        read(toy)
    message = str(caught.value)
    assert "toy.gguf: " in message
    assert found in message
    assert f", expected {expected}; " in message
    assert "\n" not in message


def test_missing_keys(keys: Keys, toy: Keys) -> None:
    with pytest.raises(UserError, match=r"toy\.gguf: key toy\.block_count is missing"):
        toy.u32("block_count")
    with pytest.raises(UserError, match=r"key general\.architecture is missing"):
        _ = Keys({}, Path("x.gguf")).scoped("toy").arch
    assert toy.u32("absent", default=3) == 3
    assert toy.texts("absent", default=None) is None
    with pytest.raises(UserError, match=r"toy\.text"):
        toy.u32("text", default=3)


def test_one_value_per_layer(toy: Keys) -> None:
    assert toy.per_layer("i32", 3) == (7, 7, 7)
    assert toy.per_layer("u32s", 3) == (1, 2, 3)
    assert toy.per_layer("absent", 2, default=5) == (5, 5)
    assert toy.per_layer("absent", 2, default=(5, 6)) == (5, 6)
    assert toy.per_layer_f32("f32s", 3) == (0.5, -1.5, 2.0)
    assert toy.per_layer_f32("absent", 2, default=1.5) == (1.5, 1.5)
    assert toy.per_layer_flags("flags", 3) == (True, False, True)
    assert toy.per_layer_flags("yes", 2) == (True, True)
    for n_layer in (2, 4):
        with pytest.raises(
            UserError, match=rf"toy\.u32s is an array of 3 values, expected one for each of {n_layer} la"
        ):
            toy.per_layer("u32s", n_layer)
    with pytest.raises(UserError, match=r"toy\.i32s is an array of 3 i32, expected an array of unsigned"):
        toy.per_layer("i32s", 3)
    with pytest.raises(UserError, match=r"toy\.absent is missing"):
        toy.per_layer("absent", 4)


def test_a_huge_layer_count_allocates_nothing(toy: Keys) -> None:
    with pytest.raises(UserError, match=r"block_count of 2147483648"):
        toy.per_layer("i32", 2**31)


def test_text_that_is_not_utf8(toy: Keys, caplog: pytest.LogCaptureFixture) -> None:
    assert toy["bad"] == "a\ufffdb"
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert toy.text("bad") == "a\ufffdb"
        assert toy.texts("bads") == ["a", "\ufffd"]
        assert toy.text("text") == "h\u00e9"
    assert [record.getMessage().split(" holds")[0] for record in caplog.records] == ["key toy.bad", "key toy.bads"]


def test_as_a_mapping(keys: Keys, toy: Keys) -> None:
    assert list(keys) == list(STORED)
    assert [*toy] == [name.removeprefix("toy.") for name in STORED if name.startswith("toy.")]
    assert len(toy) == len(keys) - 1
    assert "u32" in toy
    assert "toy.u32" in keys
    assert "general.architecture" not in toy
    assert toy["yes"] is True
    assert toy["i64"] == 12
    assert np.array_equal(toy["flags"], [True, False, True])
    assert np.array_equal(toy["u32s"], [1, 2, 3])
    assert toy["texts"][1:] == ["a b", "\u00e9"]
    assert toy["texts"][-1] == "\u00e9"
    with pytest.raises(IndexError):
        toy["texts"][3]
    with pytest.raises(KeyError):
        toy["absent"]


def test_keys_outlive_the_file(tmp_path: Path) -> None:
    path = tmp_path / "toy.gguf"
    path.write_bytes(Document(tuple(STORED.items())).to_bytes())
    with open_gguf(path) as file:
        keys = file.keys
    del file
    path.unlink()
    assert keys.scoped("toy").texts("texts") == ["", "a b", "\u00e9"]
    assert keys.scoped("toy").u32s("u32s") == (1, 2, 3)


READ_BIG = """
import sys, time
from overspill.gguf import open_gguf
start = time.process_time()
file = open_gguf(sys.argv[1])
opened = time.process_time()
keys = file.keys.scoped("tokenizer.ggml")
tokens, merges = keys.texts("tokens"), keys.texts("merges")
scores, types = keys.f32s("scores"), keys.i32s("token_type")
read = time.process_time()
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
assert tokens[262143] == "tok3ffff\\u00e9" and merges[-1] == "a3ffff b3ffff"
assert scores[262143] == -262143.0 and types[-1] == 1 and len(tokens) == len(merges) == 262144
print(opened - start, read - start, int(peak.split()[1]))
"""


def test_a_vocabulary_of_262144_tokens_opens_quickly(tmp_path: Path) -> None:
    n_tokens, path = 262144, tmp_path / "big.gguf"
    tokenizer = {
        "tokens": files.strings([f"tok{i:x}\u00e9" for i in range(n_tokens)]),
        "scores": files.numbers(6, "f", [-float(i) for i in range(n_tokens)]),
        "token_type": files.numbers(5, "i", [1] * n_tokens),
        "merges": files.strings([f"a{i:x} b{i:x}" for i in range(n_tokens)]),
    }
    document = Document(tuple((f"tokenizer.ggml.{name}", value) for name, value in tokenizer.items()))
    path.write_bytes(document.to_bytes())
    command = [sys.executable, "-c", READ_BIG, str(path)]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120).stdout
    open_s, read_s, peak_kib = map(float, output.split())
    assert open_s < 2
    assert read_s < 4
    assert peak_kib < 200 * 1024
