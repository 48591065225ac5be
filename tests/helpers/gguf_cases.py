"""Malformed and unusual GGUF files: one defect each, what a loader must do with it and who finds it.

The same 90 files as the oracle's set, byte for byte (a test compares where that set is present), rebuilt from
`ok-base.gguf` because together they weigh 7 MB. `ok-base.npz` has the reference logits of every file that loads:
`input_ids_0`, `llamacpp_logits_0`, `llamacpp_greedy_0`, and `tied_logits_0` for `missing-output-tied.gguf`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from tests.helpers import gguf_files as files
from tests.helpers.gguf_files import Document, Tensor, base

ATTN_Q = "blk.0.attn_q.weight"
DOWN_EXPS = "blk.1.ffn_down_exps.weight"
OK, FAIL, EITHER = "load", "fail", "load-or-fail"
READER, KEYS, MODEL = "reader", "keys", "model"


@dataclass(frozen=True)
class Case:
    """expect: OK, FAIL, or EITHER (both are right).

    words: the message must hold all the words of one of these alternatives.
    found_by: READER (when opened), KEYS (when the value is read), MODEL (architecture or tokenizer).
    """

    file: str
    expect: str
    words: tuple[tuple[str, ...], ...] = ()
    found_by: str = READER


def _fail(file: str, *alternatives: str, by: str = READER) -> Case:
    """An alternative may hold several words that must all be there, with `&` between them."""
    return Case(f"{file}.gguf", FAIL, tuple(tuple(text.split("&")) for text in alternatives), by)


def _ok(file: str) -> Case:
    return Case(f"{file}.gguf", OK)


def _either(file: str, *alternatives: str, by: str = READER) -> Case:
    return replace(_fail(file, *alternatives, by=by), expect=EITHER)


_ARCH = "qwen3moe."
CASES = (
    _ok("ok-base"),
    _ok("ok-alignment-64"),
    _either("reversed-order", "offset"),
    _ok("ok-trailing-bytes"),
    _ok("ok-unknown-keys"),
    _ok("ok-invalid-utf8-value"),
    _either("nested-array", "zz.nested", "nested array"),
    _either("nested-array-deep", "nested"),
    _ok("split-00001-of-00003"),
    _either("split-00002-of-00003", "first part", "split file"),
    _either("split-00003-of-00003", "first part", "split file"),
    _ok("split-empty-first-00001-of-00003"),
    _fail("split-missing-00001-of-00003", "split-missing-00002-of-00003.gguf"),
    _fail("split-badcount-00001-of-00003", "tensor count"),
    _fail("split-duplicate-00001-of-00003", "duplicate tensor output.weight"),
    _fail("zero-byte", "empty", "too short"),
    _fail("three-bytes", "too short", "not a GGUF file"),
    _fail("magic-only", "truncated"),
    _fail("truncated-metadata", "truncated", "unexpected end"),
    _fail("truncated-tensor-info", "truncated", "unexpected end"),
    _fail("truncated-data", "blk.1.ffn_up_exps.weight&truncated", "blk.1.ffn_up_exps.weight&past the end of the file"),
    _fail("truncated-no-data", "truncated", "past the end"),
    _fail("bad-magic", "not a GGUF file", "magic"),
    _fail("safetensors-like", "not a GGUF file", "magic"),
    _fail("version-1", "version 1"),
    _ok("version-2"),
    _fail("version-99", "version 99"),
    _fail("version-0", "version 0"),
    _fail("big-endian", "big-endian", "byte order"),
    _fail("huge-kv-count", "metadata count", "truncated"),
    _fail("huge-tensor-count", "tensor count", "truncated"),
    _fail("zero-tensors", "token_embd.weight", "no tensors", by=MODEL),
    _fail("huge-string", "string length"),
    _fail("huge-key", "key length"),
    _fail("huge-array", "array length"),
    _fail("huge-string-array", "array length", "truncated"),
    _fail("bad-value-type", "value type 42"),
    _fail("bad-array-type", "type 77"),
    _fail("duplicate-key", "duplicate key qwen3moe.block_count"),
    _fail("key-wrong-type", _ARCH + "block_count", by=KEYS),
    _either("key-as-u64", _ARCH + "block_count", by=KEYS),
    _fail("alignment-0", "alignment"),
    _fail("alignment-3", "alignment"),
    _fail("missing-architecture", "general.architecture", by=KEYS),
    _fail("unknown-architecture", "frobnicator9000", by=MODEL),
    _fail("missing-block-count", _ARCH + "block_count", by=KEYS),
    _fail("missing-embedding-length", _ARCH + "embedding_length", by=KEYS),
    _either("missing-tokenizer", "tokenizer", by=MODEL),
    _either("unknown-tokenizer-model", "quantum", by=MODEL),
    _either("unknown-tokenizer-pre", "never-heard-of-it", by=MODEL),
    _fail("tokens-wrong-type", "tokenizer.ggml.tokens", by=KEYS),
    _fail("tokens-too-few", "vocabulary size", "token_embd.weight", by=MODEL),
    _either("eos-out-of-range", "eos_token_id", by=MODEL),
    _fail("experts-used-too-many", "expert_used_count", by=MODEL),
    _fail("experts-zero", "expert_count", by=MODEL),
    _fail("head-count-zero", "head_count", by=MODEL),
    _fail("huge-block-count", "block_count", "blk.2.", by=MODEL),
    _fail("block-count-too-big", "blk.2.", by=MODEL),
    _ok("huge-context"),
    _fail("offset-past-end", ATTN_Q),
    _fail("offset-overflow", ATTN_Q),
    _fail("offset-misaligned", ATTN_Q),
    _fail("overlapping-tensors", DOWN_EXPS, "overlap"),
    _fail("duplicate-tensor", "blk.0.attn_k.weight"),
    _fail("n-dims-5", ATTN_Q, "dimensions"),
    _fail("n-dims-huge", ATTN_Q, "dimensions"),
    _fail("n-dims-0", ATTN_Q),
    _fail("dims-overflow", ATTN_Q),
    _fail("dims-overflow-bytes", ATTN_Q),
    _fail("dims-negative", ATTN_Q),
    _fail("dims-zero", ATTN_Q),
    _fail("shape-transposed", ATTN_Q, by=MODEL),
    _fail("experts-wrong-shape", DOWN_EXPS, by=MODEL),
    _fail("row-not-block-multiple", ATTN_Q),
    _fail("unknown-tensor-type", ATTN_Q + "&99"),
    _fail("removed-tensor-type", ATTN_Q + "&type 4"),
    _fail("integer-weight-type", ATTN_Q + "&I32", by=MODEL),
    _fail("missing-output-norm", "output_norm.weight", by=MODEL),
    _fail("missing-expert-tensor", DOWN_EXPS, by=MODEL),
    _ok("missing-output-tied"),
    _either("extra-tensor", "blk.0.mystery.weight", by=MODEL),
    _either("long-tensor-name", "tensor name"),
    _ok("nan-weights"),
)


def write(folder: Path, file: str) -> Path:
    """Write a file of the set, with the other parts if it is one of a split; returns its path."""
    stem = file.partition("-0000")[0] if "-of-0000" in file else None
    for name, data in contents().items():
        if name == file or (stem is not None and name.partition("-0000")[0] == stem):
            (folder / name).write_bytes(data)
    return folder / file


@cache
def contents() -> dict[str, bytes]:
    """All files: name -> bytes."""
    return dict([*_raw_bytes(), *_key_files(), *_info_files(), *_tensor_files(), *_split_files()])


def _raw_bytes() -> Iterator[tuple[str, bytes]]:
    good = base().to_bytes()
    yield "ok-base.gguf", good
    yield "ok-trailing-bytes.gguf", good + b"\xaa" * 777
    cuts = {"zero-byte": 0, "three-bytes": 3, "magic-only": 4, "truncated-metadata": 900}
    cuts |= {"truncated-tensor-info": 13720, "truncated-data": len(good) - 1500, "truncated-no-data": 13920}
    for name, size in cuts.items():
        yield f"{name}.gguf", good[:size]
    yield "bad-magic.gguf", b"GGML" + good[4:]
    header = b'{"__metadata__":{"format":"pt"}}'.ljust(64)
    yield "safetensors-like.gguf", struct.pack("<Q", 64) + header + bytes(64)
    for version in (0, 1, 2, 99):
        yield f"version-{version}.gguf", replace(base(), version=version).to_bytes()
    name, value = b"general.architecture", b"qwen3moe"
    swapped = struct.pack(">IqqQ", 3, 27, 1, len(name)) + name + struct.pack(">IQ", 8, len(value)) + value
    yield "big-endian.gguf", b"GGUF" + swapped + bytes(256)
    yield "huge-tensor-count.gguf", _over(good, 8, struct.pack("<Q", 2**60))
    yield "huge-kv-count.gguf", _over(good, 16, struct.pack("<Q", 2**60))
    yield "huge-key.gguf", _over(good, 24, struct.pack("<Q", 2**63 + 5))


def _key_files() -> Iterator[tuple[str, bytes]]:
    for name, document in {**_added_keys(), **_changed_keys(), **_dropped_keys()}.items():
        yield f"{name}.gguf", document.to_bytes()
    keys = (("general.name", struct.pack("<IQ", 8, 2**62) + b"abc"), *base().keys)
    yield "huge-string.gguf", replace(base(), keys=keys).to_bytes()
    yield "duplicate-key.gguf", replace(base(), keys=(*base().keys, (_ARCH + "block_count", files.u32(7)))).to_bytes()


def _added_keys() -> dict[str, Document]:
    inner = struct.pack("<IQII", 4, 2, 1, 2) + files.strings(["a"])[4:]
    level = struct.pack("<IQ", 9, 1)
    added = {
        "ok-invalid-utf8-value": ("general.description", files.string(b"\xff\xfe\x80A")),
        "nested-array": ("zz.nested", files.array_of(9, 2, inner)),
        "nested-array-deep": ("zz.deep", struct.pack("<I", 9) + level * 20000 + struct.pack("<IQ", 4, 0)),
        "huge-array": ("zz.big", files.array_of(4, 2**61, bytes(8))),
        "huge-string-array": ("zz.bigs", files.array_of(8, 2**40, files.raw_string("a"))),
        "bad-value-type": ("zz.t", struct.pack("<IQ", 42, 0)),
        "bad-array-type": ("zz.t", files.array_of(77, 1, bytes(8))),
    }
    documents = {name: base().with_key(*item) for name, item in added.items()}
    documents["ok-unknown-keys"] = replace(base(), keys=(*base().keys, *_unknown_keys()))
    for name, alignment in {"ok-alignment-64": 64, "alignment-3": 3}.items():
        documents[name] = replace(base().with_key("general.alignment", files.u32(alignment)), alignment=alignment)
    documents["alignment-0"] = base().with_key("general.alignment", files.u32(0))
    return documents


def _unknown_keys() -> tuple[tuple[str, bytes], ...]:
    return (
        ("zz.future.key", files.string("x")),
        ("zz.bool", files.flag(True)),
        ("zz.f64", files.f64(1.5)),
        ("zz.i64", files.i64(-5)),
        ("zz.i8", files.i8(-1)),
        ("zz.u16", files.u16(1)),
        ("zz.i16", files.i16(-2)),
        ("zz.u64", files.u64(2**64 - 1)),
        ("zz.arr.bool", files.array_of(7, 3, b"\x01\x00\x01")),
        ("zz.arr.empty", files.array_of(4, 0, b"")),
        ("zz.arr.f64", files.numbers(12, "d", [2.5])),
    )


def _changed_keys() -> dict[str, Document]:
    tokens = dict(base().keys)["tokenizer.ggml.tokens"]
    changed = {
        "key-wrong-type": (_ARCH + "block_count", files.string("two")),
        "key-as-u64": (_ARCH + "block_count", files.u64(2)),
        "huge-block-count": (_ARCH + "block_count", files.u32(2**31)),
        "block-count-too-big": (_ARCH + "block_count", files.u32(3)),
        "huge-context": (_ARCH + "context_length", files.u32(2**32 - 1)),
        "head-count-zero": (_ARCH + "attention.head_count", files.u32(0)),
        "experts-zero": (_ARCH + "expert_count", files.u32(0)),
        "experts-used-too-many": (_ARCH + "expert_used_count", files.u32(9)),
        "unknown-architecture": ("general.architecture", files.string("frobnicator9000")),
        "unknown-tokenizer-model": ("tokenizer.ggml.model", files.string("quantum")),
        "unknown-tokenizer-pre": ("tokenizer.ggml.pre", files.string("never-heard-of-it")),
        "tokens-wrong-type": ("tokenizer.ggml.tokens", files.numbers(4, "I", [1, 1, 1])),
        "tokens-too-few": ("tokenizer.ggml.tokens", files.strings(_first_strings(tokens, 500))),
        "eos-out-of-range": ("tokenizer.ggml.eos_token_id", files.u32(100000)),
    }
    return {name: base().with_key(*item) for name, item in changed.items()}


def _dropped_keys() -> dict[str, Document]:
    return {
        "missing-architecture": base().without_keys("general.architecture".__eq__),
        "missing-block-count": base().without_keys((_ARCH + "block_count").__eq__),
        "missing-embedding-length": base().without_keys((_ARCH + "embedding_length").__eq__),
        "missing-tokenizer": base().without_keys(lambda key: key.startswith("tokenizer.")),
    }


def _info_files() -> Iterator[tuple[str, bytes]]:
    """Files with one number of a tensor info changed: n_dims at 0, dims from 4, then (two dims) type, offset."""
    at_type, at_offset = 4 + 16, 4 + 16 + 4
    patches = {
        "n-dims-5": (ATTN_Q, 0, struct.pack("<I", 5)),
        "n-dims-huge": (ATTN_Q, 0, struct.pack("<I", 2**32 - 1)),
        "dims-overflow": (ATTN_Q, 4, struct.pack("<QQ", 2**33, 2**33)),
        "dims-overflow-bytes": (ATTN_Q, 4, struct.pack("<QQ", 32, 2**62)),
        "dims-negative": (ATTN_Q, 4, struct.pack("<QQ", 32, 2**63 + 1)),
        "dims-zero": (ATTN_Q, 4, struct.pack("<QQ", 0, 64)),
        "shape-transposed": (ATTN_Q, 4, struct.pack("<QQ", 64, 32)),
        "row-not-block-multiple": (ATTN_Q, 4, struct.pack("<QQ", 33, 64)),
        "experts-wrong-shape": (DOWN_EXPS, 4, struct.pack("<QQQ", 32, 64, 2)),
        "unknown-tensor-type": (ATTN_Q, at_type, struct.pack("<I", 99)),
        "removed-tensor-type": (ATTN_Q, at_type, struct.pack("<I", 4)),
        "offset-past-end": (ATTN_Q, at_offset, struct.pack("<Q", 2**40)),
        "offset-overflow": (ATTN_Q, at_offset, struct.pack("<Q", 2**64 - 32)),
        "offset-misaligned": (ATTN_Q, at_offset, struct.pack("<Q", 38468)),
        "overlapping-tensors": (DOWN_EXPS, at_offset + 8, struct.pack("<Q", 64)),
    }
    good = base().to_bytes()
    for name, (tensor, skip, value) in patches.items():
        yield f"{name}.gguf", files.patched_info(good, tensor, skip, value)


def _tensor_files() -> Iterator[tuple[str, bytes]]:
    whole = base()
    again = next(tensor for tensor in whole.tensors if tensor.name == "blk.0.attn_k.weight").info(34944)
    changes = {
        "zero-tensors": replace(whole, tensors=()),
        "reversed-order": replace(whole, infos_reversed=True),
        "n-dims-0": whole.with_changed(ATTN_Q, lambda t: replace(t, dims=())),
        "integer-weight-type": whole.with_changed(ATTN_Q, lambda t: replace(t, type=files.I32, data=bytes(4 * 2048))),
        "missing-output-norm": whole.without_tensor("output_norm.weight"),
        "missing-expert-tensor": whole.without_tensor(DOWN_EXPS),
        "missing-output-tied": whole.without_tensor("output.weight"),
        "extra-tensor": whole.with_tensor(Tensor("blk.0.mystery.weight", (32,), files.F32, bytes(128))),
        "long-tensor-name": whole.with_tensor(Tensor("x" * 200, (32,), files.F32, bytes(128))),
        "duplicate-tensor": replace(whole, extra_infos=(again,)),
        "nan-weights": whole.with_changed("blk.0.ffn_norm.weight", lambda t: replace(t, data=b"\0\0\xc0\x7f" * 32)),
    }
    for name, document in changes.items():
        yield f"{name}.gguf", document.to_bytes()


def _split_files() -> Iterator[tuple[str, bytes]]:
    output = base().tensors[0]
    good = files.split(base(), [9, 18])
    doubled = files.split(base().with_tensor(output), [9, 18])
    sets = {
        "split": good,
        "split-empty-first": files.split(base(), [0, 18]),
        "split-missing": [good[0], None, good[2]],
        "split-badcount": files.split(base(), [9, 18], n_tensors=32),
        "split-duplicate": doubled,
    }
    for prefix, parts in sets.items():
        for i, data in enumerate(parts):
            if data is not None:
                yield files.part_name(prefix, i, 3), data


def _first_strings(stored: bytes, count: int) -> list[bytes]:
    texts, at = [], 16
    for _ in range(count):
        (length,) = struct.unpack_from("<Q", stored, at)
        texts.append(stored[at + 8 : at + 8 + length])
        at += 8 + length
    return texts


def _over(data: bytes, at: int, value: bytes) -> bytes:
    return data[:at] + value + data[at + len(value) :]
