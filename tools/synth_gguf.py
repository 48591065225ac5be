"""A GGUF of a named model's shape with random weights: for speed, where only shapes, types and routing count.

Random blocks are made in their quantised form (random codes under scales that give the wanted standard deviation), so
that any size is written at the speed of the random generator. Standard deviations keep activations and logits sane:
linear 1.15 / sqrt(fan-in), experts 1.3 / sqrt(fan-in), router 1.5 / sqrt(D), embeddings 1, norms 1 +- 0.25, head 3 /
sqrt(D). Routing is spread over all experts.

    python tools/synth_gguf.py --shape qwen3-30b-a3b --layers 4 --type Q8_0 OUT.gguf
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf_stream import Entry, Field, write_gguf

from overspill.errors import UserError

F32 = GGMLQuantizationType.F32


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Hyper-parameters of a plain mixture-of-experts transformer with grouped-query attention and q/k norms."""

    arch: str
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    n_experts: int
    n_used: int
    d_expert: int
    n_vocab: int
    n_context: int
    rope_base: float


SHAPES = {
    "qwen3-30b-a3b": Shape(
        arch="qwen3moe",
        n_layers=48,
        d_model=2048,
        n_heads=32,
        n_kv_heads=4,
        d_head=128,
        n_experts=128,
        n_used=8,
        d_expert=768,
        n_vocab=151936,
        n_context=32768,
        rope_base=1e6,
    ),
}


def synthesize(dst: Path | str, *, shape: str, type: str, n_layers: int | None = None, seed: int = 0) -> None:
    """Writes `dst`: the shape named `shape`, all matrices of `type` but the F32 router, `n_layers` deep if given.

    Raises `UserError` for an unknown shape or type, or a depth below 1.
    """
    if shape not in SHAPES:
        raise UserError(f"--shape {shape}: not one of {', '.join(SHAPES)}")
    if type not in BLOCK_MAKERS:
        raise UserError(f"--type {type}: not one of {', '.join(BLOCK_MAKERS)}")
    if n_layers is not None and n_layers < 1:
        raise UserError(f"--layers {n_layers}: give 1 or more")
    dims = SHAPES[shape]
    dims = replace(dims, n_layers=n_layers or dims.n_layers)
    fields = [*_fields(dims, f"random {shape}"), *_tokenizer(dims.n_vocab)]
    write_gguf(Path(dst), dims.arch, fields, list(_Tensors(dims, GGMLQuantizationType[type], seed).entries()))


def _q8_0(rng: np.random.Generator, n_blocks: int, std: float) -> np.ndarray:
    """d: f16, then 32 int8 codes q; value d * q. Uniform codes in -127..127 have a standard deviation of 73.3."""
    blocks = np.empty((n_blocks, 34), np.uint8)
    blocks[:, :2] = _f16_bytes(_jitter(rng, n_blocks, std / 73.3))
    codes = _random_bytes(rng, n_blocks, 32)
    codes[codes == 0x80] = 0
    blocks[:, 2:] = codes
    return blocks


def _q4_1(rng: np.random.Generator, n_blocks: int, std: float) -> np.ndarray:
    """d, m: f16, then 32 nibbles q; value d * q + m. Uniform nibbles: mean 7.5, standard deviation 4.61."""
    blocks = np.empty((n_blocks, 20), np.uint8)
    scales = _jitter(rng, n_blocks, std / 4.61)
    blocks[:, :2] = _f16_bytes(scales)
    blocks[:, 2:4] = _f16_bytes(-7.5 * scales)
    blocks[:, 4:] = _random_bytes(rng, n_blocks, 16)
    return blocks


def _q4_k(rng: np.random.Generator, n_blocks: int, std: float) -> np.ndarray:
    """d, dmin: f16; 8 pairs (sc, m) of 6 bits in 12 bytes; 256 nibbles q; value d * sc * q - dmin * m.

    m = sc and dmin = 7.5 d centre the values. sc is uniform in 32..63 (root mean square 48.4).
    """
    blocks = np.empty((n_blocks, 144), np.uint8)
    scales = _jitter(rng, n_blocks, std / (4.61 * 48.4))
    blocks[:, :2] = _f16_bytes(scales)
    blocks[:, 2:4] = _f16_bytes(7.5 * scales)
    codes = rng.integers(32, 64, (n_blocks, 8), dtype=np.uint8)
    low, high = codes[:, :4], codes[:, 4:]
    # The first four pairs lie in bytes 0-3 and 4-7; the others' low nibbles share bytes 8-11, their two high bits sit
    # above the first four.
    blocks[:, 4:8] = low | (high >> 4 << 6)
    blocks[:, 8:12] = blocks[:, 4:8]
    blocks[:, 12:16] = (high & 15) | (high << 4)
    blocks[:, 16:] = _random_bytes(rng, n_blocks, 128)
    return blocks


def _jitter(rng: np.random.Generator, n_blocks: int, scale: float) -> np.ndarray:
    return scale * rng.uniform(0.8, 1.2, n_blocks)


def _f16_bytes(values: np.ndarray) -> np.ndarray:
    return values.astype("<f2").view(np.uint8).reshape(-1, 2)


def _random_bytes(rng: np.random.Generator, n_rows: int, n_bytes: int) -> np.ndarray:
    return np.frombuffer(bytearray(rng.bytes(n_rows * n_bytes)), np.uint8).reshape(n_rows, n_bytes)


BLOCK_MAKERS: dict[str, Callable[[np.random.Generator, int, float], np.ndarray]] = {
    "Q8_0": _q8_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
}


@dataclass(frozen=True)
class _Tensors:
    """The tensors of one model; each has its own generator, so that none depends on another."""

    dims: Shape
    type: GGMLQuantizationType
    seed: int

    def entries(self) -> Iterator[Entry]:
        dims = self.dims
        yield self._matrix("token_embd.weight", (dims.n_vocab, dims.d_model), 1.0)
        yield self._matrix("output.weight", (dims.n_vocab, dims.d_model), 3.0 / dims.d_model**0.5)
        yield self._norm("output_norm.weight", dims.d_model)
        for i_layer in range(dims.n_layers):
            yield from self._attention(f"blk.{i_layer}.")
            yield from self._experts(f"blk.{i_layer}.")

    def _attention(self, prefix: str) -> Iterator[Entry]:
        dims = self.dims
        q_width, kv_width = dims.n_heads * dims.d_head, dims.n_kv_heads * dims.d_head
        yield self._norm(prefix + "attn_norm.weight", dims.d_model)
        yield self._linear(prefix + "attn_q.weight", (q_width, dims.d_model), 1.15)
        yield self._linear(prefix + "attn_k.weight", (kv_width, dims.d_model), 1.15)
        yield self._linear(prefix + "attn_v.weight", (kv_width, dims.d_model), 1.15)
        yield self._linear(prefix + "attn_output.weight", (dims.d_model, q_width), 1.15)
        yield self._norm(prefix + "attn_q_norm.weight", dims.d_head)
        yield self._norm(prefix + "attn_k_norm.weight", dims.d_head)

    def _experts(self, prefix: str) -> Iterator[Entry]:
        dims = self.dims
        yield self._norm(prefix + "ffn_norm.weight", dims.d_model)
        yield self._router(prefix + "ffn_gate_inp.weight")
        yield self._linear(prefix + "ffn_gate_exps.weight", (dims.n_experts, dims.d_expert, dims.d_model), 1.3)
        yield self._linear(prefix + "ffn_up_exps.weight", (dims.n_experts, dims.d_expert, dims.d_model), 1.3)
        yield self._linear(prefix + "ffn_down_exps.weight", (dims.n_experts, dims.d_model, dims.d_expert), 1.3)

    def _linear(self, name: str, shape: tuple[int, ...], gain: float) -> Entry:
        return self._matrix(name, shape, gain / shape[-1] ** 0.5)

    def _matrix(self, name: str, shape: tuple[int, ...], std: float) -> Entry:
        block_elements, _ = GGML_QUANT_SIZES[self.type]
        n_blocks = int(np.prod(shape, dtype=np.int64)) // block_elements
        make = BLOCK_MAKERS[self.type.name]
        return Entry(name, shape, self.type, lambda: make(self._rng(name), n_blocks, std))

    def _norm(self, name: str, width: int) -> Entry:
        make = partial(self._normal, name, (width,), 1.0, 0.25)
        return Entry(name, (width,), F32, make)

    def _router(self, name: str) -> Entry:
        shape = (self.dims.n_experts, self.dims.d_model)
        make = partial(self._normal, name, shape, 0.0, 1.5 / self.dims.d_model**0.5)
        return Entry(name, shape, F32, make)

    def _normal(self, name: str, shape: tuple[int, ...], mean: float, std: float) -> np.ndarray:
        return self._rng(name).normal(mean, std, shape).astype(np.float32)

    def _rng(self, name: str) -> np.random.Generator:
        return np.random.default_rng([self.seed, *name.encode()])


def _fields(dims: Shape, name: str) -> Iterator[Field]:
    yield Field("general.name", name, GGUFValueType.STRING)
    integers = {
        "block_count": dims.n_layers,
        "context_length": dims.n_context,
        "embedding_length": dims.d_model,
        "feed_forward_length": dims.d_expert * dims.n_used,
        "attention.head_count": dims.n_heads,
        "attention.head_count_kv": dims.n_kv_heads,
        "attention.key_length": dims.d_head,
        "attention.value_length": dims.d_head,
        "expert_count": dims.n_experts,
        "expert_used_count": dims.n_used,
        "expert_feed_forward_length": dims.d_expert,
        "vocab_size": dims.n_vocab,
    }
    for key, value in integers.items():
        yield Field(f"{dims.arch}.{key}", value, GGUFValueType.UINT32)
    yield Field(f"{dims.arch}.attention.layer_norm_rms_epsilon", 1e-6, GGUFValueType.FLOAT32)
    yield Field(f"{dims.arch}.rope.freq_base", dims.rope_base, GGUFValueType.FLOAT32)


def _tokenizer(n_vocab: int) -> Iterator[Field]:
    """A byte-level BPE that spells any text byte by byte: 256 bytes, one merge, an end token, unused fillers.

    Token types: 1 normal, 3 control, 5 unused.
    """
    n_fillers = n_vocab - 258
    tokens = [*_byte_letters(), "he", "<|endoftext|>", *(f"<|unused_{i}|>" for i in range(n_fillers))]
    string, integer = GGUFValueType.STRING, GGUFValueType.INT32
    yield Field("tokenizer.ggml.model", "gpt2", string)
    yield Field("tokenizer.ggml.pre", "qwen2", string)
    yield Field("tokenizer.ggml.tokens", tokens, GGUFValueType.ARRAY, string)
    yield Field("tokenizer.ggml.token_type", [1] * 257 + [3] + [5] * n_fillers, GGUFValueType.ARRAY, integer)
    yield Field("tokenizer.ggml.merges", ["h e"], GGUFValueType.ARRAY, string)
    yield Field("tokenizer.ggml.eos_token_id", 257, GGUFValueType.UINT32)
    yield Field("tokenizer.ggml.add_bos_token", False, GGUFValueType.BOOL)


def _byte_letters() -> list[str]:
    """The letter that stands for each byte in GPT-2's vocabulary: printable Latin-1 for itself, others from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(substitutes)) for byte in range(256)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="GGUF of a named shape with random weights")
    parser.add_argument("dst", type=Path, metavar="OUT.gguf")
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--layers", type=int, help="depth (default: the shape's own)")
    parser.add_argument("--type", choices=BLOCK_MAKERS, default="Q8_0")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    try:
        synthesize(args.dst, shape=args.shape, type=args.type, n_layers=args.layers, seed=args.seed)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
