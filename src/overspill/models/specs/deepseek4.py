"""DeepSeek-V4: residual streams, a window of keys beside compressed blocks of older ones, experts chosen by token id in
the first layers.

Every layer sees a window of keys. Most layers also see blocks: each `ratio` positions become one key by a learned
weighted mean. With ratio 4 the means overlap, and an indexer picks the best blocks for each query.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from overspill.cache.cells import BlockShape, KvShape
from overspill.errors import UserError
from overspill.gguf.keys import Keys
from overspill.models.specs import base
from overspill.models.specs.base import TensorSpec, require_experts
from overspill.models.specs.parts import expert_tensors, global_tensors, router_bias, shared_tensors
from overspill.models.specs.rope import RopeParams, rope_base
from overspill.models.specs.router import Gating
from overspill.models.specs.streams import StreamHParams, read_n_streams

INDEXED, LONG = 4, 128  # ratios that exist: blocks of which an indexer picks some, and blocks that are all seen
_NO_CLAMP = 1e-6


@dataclass(frozen=True, kw_only=True)
class Compression:
    """How `ratio` positions become one key of `dim` channels.

    reach: blocks whose positions take part in a mean, the last its own. A position has `reach` candidates for a key,
    and as many scores.
    """

    ratio: int
    dim: int

    @property
    def reach(self) -> int:
        """2 where means overlap."""
        return 2 if self.ratio == INDEXED else 1

    @property
    def n_rows(self) -> int:
        """Positions whose candidates must be at hand when a block is completed."""
        return self.reach * self.ratio

    @property
    def row_dim(self) -> int:
        """Numbers of a position: candidates, or their scores."""
        return self.reach * self.dim

    @property
    def state(self) -> tuple[int, ...]:
        """Shape of the state: candidates and scores of the last positions, by position modulo `n_rows`."""
        return self.n_rows, 2, self.row_dim

    @property
    def blocks(self) -> BlockShape:
        """What is kept of every block."""
        return BlockShape(self.ratio, self.dim)


@dataclass(frozen=True, kw_only=True)
class DeepSeek4HParams(StreamHParams):
    """ratios: per layer, positions of a block; 0 = the layer has none. n_window: keys that every layer sees.

    rope_blocks: how layers with blocks rotate. n_latent_q: of queries. n_groups, n_latent_out: of heads, and of the
    output of each. index_heads, index_dim, n_index_best: the indexer, and how many blocks it picks. n_sinkhorn: steps
    that make the mixing of streams doubly stochastic; mix_eps keeps its divisions from zero. n_layer_hash: so many
    first layers choose experts by token id. limits: per layer, of routed experts; shared_limits: of the shared ones.
    """

    n_window: int
    ratios: tuple[int, ...]
    rope_blocks: RopeParams
    n_latent_q: int
    n_groups: int
    n_latent_out: int
    index_heads: int
    index_dim: int
    n_index_best: int
    n_sinkhorn: int
    mix_eps: float
    n_layer_hash: int
    limits: tuple[float | None, ...]
    shared_limits: tuple[float | None, ...]

    def window(self, i_layer: int) -> int:
        """The same in every layer."""
        return self.n_window

    def rope_of(self, i_layer: int) -> RopeParams:
        """Layers with blocks have a base and a scaling of their own."""
        return self.rope_blocks if self.ratios[i_layer] else self.rope

    def expert_limit(self, i_layer: int) -> float | None:
        """Gates are at most so large."""
        return self.limits[i_layer]

    def compression(self, i_layer: int) -> Compression | None:
        """Of keys; None where the layer has no blocks."""
        ratio = self.ratios[i_layer]
        return Compression(ratio=ratio, dim=self.head_dim) if ratio else None

    def index(self, i_layer: int) -> Compression | None:
        """Of the indexer's keys; None where the layer has none."""
        ratio = self.ratios[i_layer]
        return Compression(ratio=ratio, dim=self.index_dim) if ratio == INDEXED else None

    def kv_shape(self, i_layer: int) -> KvShape:
        """One key, which is also the value, for all heads; blocks, and the positions that are not in one yet."""
        kinds = [c for c in (self.compression(i_layer), self.index(i_layer)) if c is not None]
        return KvShape(
            1,
            self.head_dim,
            self.head_dim,
            has_values=False,
            blocks=tuple(c.blocks for c in kinds),
            state=tuple(c.state for c in kinds),
            reach=self.n_window,
        )


def read_hparams(keys: Keys) -> DeepSeek4HParams:
    """Everything is in the file; only one way of scoring experts, and two ratios, are known."""
    hp = require_experts(base.read_hparams(keys))
    a = keys.scoped(hp.arch)
    _check_gating(hp, a)
    if hp.n_head_kv != 1 or hp.value_dim != hp.head_dim:
        raise UserError(
            f"{hp.arch} has {hp.n_head_kv} kv heads of {hp.head_dim} and {hp.value_dim} channels: keys and values "
            "must be the same, of one head"
        )
    limits = _limits(a, "swiglu_clamp_exp", hp.n_layer)
    has_shared_limits = "swiglu_clamp_shexp" in a
    return DeepSeek4HParams(
        **vars(
            replace(hp, rope=_plain(hp.rope), n_ff_shared=hp.n_ff_exp * base.at_least_one(a, "expert_shared_count"))
        ),
        n_streams=read_n_streams(a),
        n_window=base.at_least_one(a, "attention.sliding_window"),
        ratios=_ratios(a, hp.n_layer),
        rope_blocks=_unscaled(replace(hp.rope, base=rope_base(a, "attention.compress_rope_freq_base", hp.rope.base))),
        n_latent_q=base.at_least_one(a, "attention.q_lora_rank"),
        n_groups=_groups(a, hp.n_head),
        n_latent_out=base.at_least_one(a, "attention.output_lora_rank"),
        index_heads=base.at_least_one(a, "attention.indexer.head_count"),
        index_dim=_index_dim(a, hp.rope.n_rot),
        n_index_best=base.at_least_one(a, "attention.indexer.top_k"),
        n_sinkhorn=base.at_least_one(a, "hyper_connection.sinkhorn_iterations"),
        mix_eps=a.f32("hyper_connection.epsilon"),
        n_layer_hash=a.u32("hash_layer_count"),
        limits=limits,
        shared_limits=_limits(a, "swiglu_clamp_shexp", hp.n_layer) if has_shared_limits else limits,
    )


def _check_gating(hp: base.HParams, a: Keys) -> None:
    assert hp.router is not None
    if hp.router.gating is not Gating.SQRT_SOFTPLUS or hp.router.n_groups > 1:
        raise UserError(
            f"{a.full_name('expert_gating_func')} is {hp.router.gating.value} with {hp.router.n_groups} group(s): only "
            f"{Gating.SQRT_SOFTPLUS.value} ({Gating.SQRT_SOFTPLUS.name.lower()}) without groups is supported"
        )


def _plain(rope: RopeParams) -> RopeParams:
    """Layers without blocks never look further than the window: their rotation is not scaled."""
    return replace(rope, scaling="none", factor=1.0, attn_factor=1.0)


def _unscaled(rope: RopeParams) -> RopeParams:
    """Scaling changes angles, never the size of keys."""
    return replace(rope, attn_factor=1.0, log_multiplier=0.0)


def _ratios(a: Keys, n_layer: int) -> tuple[int, ...]:
    name = "attention.compress_ratios"
    ratios = a.u32s(name)
    if len(ratios) < n_layer:
        raise UserError(f"{a.full_name(name)} has {len(ratios)} values: expected one for each of {n_layer} layers")
    for i, ratio in enumerate(ratios[:n_layer]):
        if ratio not in (0, INDEXED, LONG):
            raise UserError(f"{a.full_name(name)} of layer {i} is {ratio}: only 0, {INDEXED} and {LONG} are supported")
    return ratios[:n_layer]


def _limits(a: Keys, name: str, n_layer: int) -> tuple[float | None, ...]:
    """Per layer; 0 stands for none."""
    n_values = a.u32("block_count") if a.is_array(name) else n_layer
    values = a.per_layer_f32(name, n_values)[:n_layer]
    return tuple(value if value > _NO_CLAMP else None for value in values)


def _groups(a: Keys, n_head: int) -> int:
    n = base.at_least_one(a, "attention.output_group_count")
    if n_head % n:
        raise UserError(
            f"{a.full_name('attention.output_group_count')} is {n}: must divide attention.head_count, {n_head}"
        )
    return n


def _index_dim(a: Keys, n_rot: int) -> int:
    n = a.u32("attention.indexer.key_length")
    if n < n_rot:
        raise UserError(
            f"{a.full_name('attention.indexer.key_length')} is {n}: must be at least rope.dimension_count, {n_rot}"
        )
    return n


def tensors(hp: base.HParams) -> list[TensorSpec]:
    """Every tensor of the architecture."""
    assert isinstance(hp, DeepSeek4HParams)
    R = hp.n_streams
    specs = [
        *global_tensors(hp, is_tied=False),
        TensorSpec("output_hc_fn.weight", (R, hp.streams_dim)),
        TensorSpec("output_hc_base.weight", (R,)),
        TensorSpec("output_hc_scale.weight", (1,)),
    ]
    for i in range(hp.n_layer):
        specs += [*_attention(hp, i), *_compressors(hp, i), *expert_tensors(hp, i), *shared_tensors(hp, i)]
        specs += [_choice(hp, i), *_mixing(hp, i)]
    return specs


def _attention(hp: DeepSeek4HParams, i_layer: int) -> list[TensorSpec]:
    b, D, H, A = f"blk.{i_layer}.", hp.n_embd, hp.n_head, hp.head_dim
    return [
        TensorSpec(b + "attn_norm.weight", (D,)),
        TensorSpec(b + "attn_sinks.weight", (H,)),
        TensorSpec(b + "attn_q_a.weight", (hp.n_latent_q, D)),
        TensorSpec(b + "attn_q_a_norm.weight", (hp.n_latent_q,)),
        TensorSpec(b + "attn_q_b.weight", (H * A, hp.n_latent_q)),
        TensorSpec(b + "attn_kv.weight", (A, D)),
        TensorSpec(b + "attn_kv_a_norm.weight", (A,)),
        TensorSpec(b + "attn_output_a.weight", (hp.n_groups * hp.n_latent_out, H * A // hp.n_groups)),
        TensorSpec(b + "attn_output_b.weight", (D, hp.n_groups * hp.n_latent_out)),
    ]


def _compressors(hp: DeepSeek4HParams, i_layer: int) -> list[TensorSpec]:
    b, specs = f"blk.{i_layer}.", []
    for name, c in (("attn_compressor", hp.compression(i_layer)), ("indexer_compressor", hp.index(i_layer))):
        if c is not None:
            specs += [
                TensorSpec(f"{b}{name}_kv.weight", (c.row_dim, hp.n_embd)),
                TensorSpec(f"{b}{name}_gate.weight", (c.row_dim, hp.n_embd)),
                TensorSpec(f"{b}{name}_ape.weight", (c.ratio, c.row_dim)),
                TensorSpec(f"{b}{name}_norm.weight", (c.dim,)),
            ]
    if hp.index(i_layer) is not None:
        specs += [
            TensorSpec(b + "indexer.proj.weight", (hp.index_heads, hp.n_embd)),
            TensorSpec(b + "indexer.attn_q_b.weight", (hp.index_heads * hp.index_dim, hp.n_latent_q)),
        ]
    return specs


def _choice(hp: DeepSeek4HParams, i_layer: int) -> TensorSpec:
    """What chooses experts beside the router: a table of token ids, or a bias."""
    if i_layer >= hp.n_layer_hash:
        return router_bias(hp, i_layer)._replace(is_required=True)
    return TensorSpec(f"blk.{i_layer}.ffn_gate_tid2eid.weight", (hp.n_vocab, hp.n_expert_used), is_index=True)


def _mixing(hp: DeepSeek4HParams, i_layer: int) -> list[TensorSpec]:
    b, n = f"blk.{i_layer}.", (2 + hp.n_streams) * hp.n_streams
    return [
        spec
        for half in ("attn", "ffn")
        for spec in (
            TensorSpec(f"{b}hc_{half}_fn.weight", (n, hp.streams_dim)),
            TensorSpec(f"{b}hc_{half}_base.weight", (n,)),
            TensorSpec(f"{b}hc_{half}_scale.weight", (3,)),
        )
    ]
