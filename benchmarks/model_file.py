"""Writes a random model to a real file: what loading takes, and programs that read files, are measured with it.

Blocks are random and the same in every layer, so that a file is written at the speed of memory. There is no
vocabulary, only its size: token ids go in and out.
"""

from __future__ import annotations

import os
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from overspill.bench.shapes import SHAPES
from overspill.bench.synth import SyntheticModel, synthetic

_ALIGNMENT = 32
_WRITERS = 16
_U32, _F32, _BOOL, _STRING = 4, 6, 7, 8


def _text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def _key(name: str, value: object) -> bytes:
    match value:
        case bool():
            return _text(name) + struct.pack("<IB", _BOOL, value)
        case int():
            return _text(name) + struct.pack("<II", _U32, value)
        case float():
            return _text(name) + struct.pack("<If", _F32, value)
        case str():
            return _text(name) + struct.pack("<I", _STRING) + _text(value)
    raise TypeError(f"{name}: {value!r}")


def _header(model: SyntheticModel, values: dict[str, object]) -> tuple[bytes, dict[str, int]]:
    """The head of the file, padded, and where each tensor's bytes begin."""
    table, offsets, end = b"", {}, 0
    for name, info in model.tensors.items():
        dims = tuple(reversed(info.shape))
        table += _text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, int(info.type), end)
        offsets[name] = end
        end += -(-info.n_bytes // _ALIGNMENT) * _ALIGNMENT
    head = b"GGUF" + struct.pack("<IQQ", 3, len(model.tensors), len(values))
    head += b"".join(_key(name, value) for name, value in values.items()) + table
    head += bytes(-len(head) % _ALIGNMENT)
    return head, {name: len(head) + offset for name, offset in offsets.items()}


def write(path: Path, shape: str, *, quant: str, n_layer: int) -> int:
    """Write the model on many threads; returns its bytes."""
    model = synthetic(shape, quant=quant, n_layer=n_layer)
    arch = SHAPES[shape]["general.architecture"]
    values = SHAPES[shape] | {f"{arch}.block_count": n_layer, "tokenizer.ggml.model": "none"}
    head, offsets = _header(model, dict(values))
    kinds = {name: name.split(".", 2)[2] for name in model.tensors if name.startswith("blk.")}
    firsts = {kind: model.bytes_of(f"blk.0.{kind}").data for kind in set(kinds.values())}

    def put(name: str) -> None:
        raw = memoryview(firsts[kinds[name]] if name in kinds else np.ascontiguousarray(model.bytes_of(name)).data)
        done = 0
        while done < len(raw):
            done += os.pwrite(fd, raw[done : done + (64 << 20)], offsets[name] + done)

    fd = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    try:
        os.pwrite(fd, head, 0)
        os.ftruncate(fd, max(offsets[name] + info.n_bytes for name, info in model.tensors.items()))
        with ThreadPoolExecutor(_WRITERS) as pool:
            list(pool.map(put, model.tensors))
        return os.fstat(fd).st_size
    finally:
        os.close(fd)
