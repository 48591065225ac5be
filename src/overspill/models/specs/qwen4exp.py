"""Qwen3.8-Flash-Next (experimental Qwen4): Qwen3.5's layers between residual streams, attention to the best blocks of
keys, and an embedding of the last tokens from a huge table.

Attention layers keep an indexer's key of every position, and the mean of each `ratio` of them: a query attends to the
blocks whose means it likes best, and to the positions behind the last whole block. One layer adds to the streams what
the table has for the token and those before it (an n-gram), each of several hashes giving a part.
"""

from __future__ import annotations

from dataclasses import dataclass

from overspill.cache.cells import BlockShape, KvShape
from overspill.errors import UserError
from overspill.gguf.keys import Keys
from overspill.models.specs import base, qwen3next
from overspill.models.specs.base import HParams, TensorSpec
from overspill.models.specs.parts import expert_tensors, head_norms, shared_gate, shared_tensors
from overspill.models.specs.recurrent import DeltaHParams, delta_tensors, gated_attention_tensors
from overspill.models.specs.streams import StreamHParams, read_n_streams
from overspill.placement.shape import LOOKUP_TABLE

_MOST_NGRAM = 16


@dataclass(frozen=True, kw_only=True)
class NGramParams:
    """The table of n-grams. layer: which adds it. n_tokens: of the longest n-gram; all from 2 on are looked up.

    Each of them has as many hashes as `sizes` divided by the n-gram lengths: hash h gives row `offsets[h] + x mod
    sizes[h]` of the table, `dim` values. multipliers: of each token of an n-gram, the last one first. eos: the token
    before which nothing counts. n_taps: of the convolution over every `n_tokens`th token.
    """

    layer: int
    n_tokens: int
    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    dim: int
    eos: int
    n_taps: int

    @property
    def embed_dim(self) -> int:
        """Values of a token: of all hashes."""
        return len(self.sizes) * self.dim

    @property
    def n_rows(self) -> int:
        """Rows that can be asked for."""
        return max(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))

    @property
    def n_back(self) -> int:
        """Tokens that the convolution looks back."""
        return (self.n_taps - 1) * self.n_tokens


@dataclass(frozen=True, kw_only=True)
class Qwen4HParams(StreamHParams, DeltaHParams):
    """n_mix: width of what mixes the streams. ratios: per layer, positions of a block; 0: attention to all positions.

    index_heads, index_dim: the indexer. n_index_best: positions that it picks, in whole blocks.
    """

    n_mix: int
    ratios: tuple[int, ...]
    index_heads: int
    index_dim: int
    n_index_best: int
    ngrams: NGramParams

    @property
    def x_dim(self) -> int:
        """Streams as usual, and the embedding of the n-gram, which the host looks up."""
        return super().x_dim + self.ngrams.embed_dim

    @property
    def n_before(self) -> int:
        """The rest of the longest n-gram."""
        return self.ngrams.n_tokens - 1

    def kv_shape(self, i_layer: int) -> KvShape:
        """Keys of the indexer beside keys and values; inputs of the n-grams' convolution beside a state."""
        shape, ratio = super().kv_shape(i_layer), self.ratios[i_layer]
        if i_layer == self.ngrams.layer:
            return shape._replace(state=(*shape.state, (self.ngrams.n_back, self.streams_dim)))
        if ratio:
            return shape._replace(blocks=(BlockShape(1, self.index_dim), BlockShape(ratio, self.index_dim)))
        return shape


def read_hparams(keys: Keys) -> Qwen4HParams:
    """Qwen3-Next's keys, and those of streams, indexer and n-grams."""
    hp = qwen3next.read_hparams(keys, is_tiled=True)
    a = keys.scoped(hp.arch)
    index_dim = base.at_least_one(a, "attention.indexer.key_length")
    if index_dim < hp.rope.n_rot:
        raise UserError(
            f"{a.full_name('attention.indexer.key_length')} is {index_dim}: must be at least rope.dimension_count, "
            f"{hp.rope.n_rot}"
        )
    return Qwen4HParams(
        **vars(hp),
        n_streams=read_n_streams(a),
        n_mix=base.at_least_one(a, "hyper_connection.low_rank"),
        ratios=_ratios(a, hp),
        index_heads=base.at_least_one(a, "attention.indexer.head_count"),
        index_dim=index_dim,
        n_index_best=base.at_least_one(a, "attention.indexer.top_k"),
        ngrams=_ngrams(a, hp),
    )


def _ratios(a: Keys, hp: DeltaHParams) -> tuple[int, ...]:
    name, n_best = "attention.compress_ratios", a.u32("attention.indexer.top_k")
    ratios = a.per_layer(name, a.u32("block_count"))[: hp.n_layer]
    for i, ratio in enumerate(ratios):
        if ratio and (hp.is_recurrent[i] or n_best % ratio):
            raise UserError(
                f"{a.full_name(name)} of layer {i} is {ratio}: must be 0 in layers without attention, and divide "
                f"attention.indexer.top_k, {n_best}, in the others"
            )
    return ratios


def _ngrams(a: Keys, hp: DeltaHParams) -> NGramParams:
    n_tokens, n_hashes = a.u32("ple.ngram_size"), base.at_least_one(a, "ple.heads_per_ngram")
    if not 1 < n_tokens <= _MOST_NGRAM:
        raise UserError(f"{a.full_name('ple.ngram_size')} is {n_tokens}: must be from 2 to {_MOST_NGRAM}")
    n_all = (n_tokens - 1) * n_hashes
    n_taps = a.u32("ple.conv_kernel")
    if n_taps < 2:
        raise UserError(f"{a.full_name('ple.conv_kernel')} is {n_taps}: must be at least 2")
    return NGramParams(
        layer=_ngram_layer(a, hp),
        n_tokens=n_tokens,
        multipliers=_numbers(a, "ple.layer_multipliers", n_tokens)[:n_tokens],
        sizes=_sizes(a, n_all),
        offsets=_numbers(a, "ple.head_offsets", n_all, is_exact=True),
        dim=base.at_least_one(a, "embedding_length_per_layer_input"),
        eos=a.u32("ple.eos_token_id"),
        n_taps=n_taps,
    )


def _ngram_layer(a: Keys, hp: DeltaHParams) -> int:
    name = "ple.layers"
    layers = a.u32s(name)
    if len(layers) != 1 or layers[0] >= hp.n_layer or not hp.is_recurrent[layers[0]]:
        raise UserError(f"{a.full_name(name)} is {list(layers)}: must be one layer, which has a state")
    return layers[0]


def _sizes(a: Keys, n: int) -> tuple[int, ...]:
    name = "ple.head_vocab_sizes"
    sizes = _numbers(a, name, n, is_exact=True)
    if 0 in sizes:
        raise UserError(f"{a.full_name(name)} has a 0: every hash needs rows")
    return sizes


def _numbers(a: Keys, name: str, n: int, *, is_exact: bool = False) -> tuple[int, ...]:
    numbers = a.u64s(name)
    if len(numbers) < n or (is_exact and len(numbers) != n):
        raise UserError(f"{a.full_name(name)} has {len(numbers)} values: expected {n}")
    return numbers


def tensors(hp: HParams) -> list[TensorSpec]:
    """Every tensor of the architecture. Streams are normed where they are mixed: there are no other norms of layers."""
    assert isinstance(hp, Qwen4HParams)
    specs = [
        TensorSpec("token_embd.weight", (hp.n_vocab, hp.n_embd)),
        TensorSpec("output.weight", (hp.n_vocab, hp.n_embd), is_required=False),
        TensorSpec(LOOKUP_TABLE, (hp.ngrams.n_rows, hp.ngrams.dim), is_padded=True),
        *_mixing(hp, "output_hc"),
    ]
    for i in range(hp.n_layer):
        b = f"blk.{i}."
        layer = _delta(hp, i) if hp.is_recurrent[i] else _attention(hp, i)
        layer += [*expert_tensors(hp, i), *shared_tensors(hp, i), shared_gate(hp, i)]
        specs += [s for s in layer if s.name not in (b + "attn_norm.weight", b + "ffn_norm.weight")]
        for half in ("attn", "ffn"):
            specs += _mixing(hp, f"{b}hc_{half}")
            specs.append(TensorSpec(f"{b}hc_{half}_inject.weight", (hp.n_streams, hp.streams_dim)))
    return specs + _ngram_tensors(hp)


def _delta(hp: Qwen4HParams, i_layer: int) -> list[TensorSpec]:
    of_heads = [
        TensorSpec(f"blk.{i_layer}.{name}.weight", (hp.delta.n_heads, hp.n_embd)) for name in ("ssm_alpha", "ssm_beta")
    ]
    return delta_tensors(hp, hp.delta, i_layer) + of_heads


def _attention(hp: Qwen4HParams, i_layer: int) -> list[TensorSpec]:
    b, specs = f"blk.{i_layer}.", gated_attention_tensors(hp, i_layer) + head_norms(hp, i_layer)
    if hp.ratios[i_layer]:
        specs += [
            TensorSpec(b + "indexer.q_proj.weight", (hp.index_heads * hp.index_dim, hp.n_embd)),
            TensorSpec(b + "indexer.k_proj.weight", (hp.index_dim, hp.n_embd)),
            TensorSpec(b + "indexer.q_norm.weight", (hp.index_dim,)),
            TensorSpec(b + "indexer.k_norm.weight", (hp.index_dim,)),
        ]
    return specs


def _mixing(hp: Qwen4HParams, name: str) -> list[TensorSpec]:
    return [
        TensorSpec(f"{name}_norm.weight", (hp.streams_dim,)),
        TensorSpec(f"{name}_down.weight", (hp.n_mix, hp.streams_dim)),
        TensorSpec(f"{name}_up.weight", (hp.streams_dim, hp.n_mix)),
    ]


def _ngram_tensors(hp: Qwen4HParams) -> list[TensorSpec]:
    b, n = f"blk.{hp.ngrams.layer}.ple_", hp.streams_dim
    return [
        TensorSpec(b + "key.weight", (n, hp.ngrams.embed_dim)),
        TensorSpec(b + "value.weight", (hp.n_embd, hp.ngrams.embed_dim)),
        TensorSpec(b + "norm_key.weight", (n,)),
        TensorSpec(b + "norm_query.weight", (n,)),
        TensorSpec(b + "norm_conv.weight", (n,)),
        TensorSpec(b + "conv1d.weight", (n, hp.ngrams.n_taps)),
    ]
