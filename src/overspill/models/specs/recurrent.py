"""Architectures in which most layers keep a state instead of keys and values: what their files say of it."""

from __future__ import annotations

from dataclasses import dataclass

from overspill.cache.cells import KvShape
from overspill.errors import UserError
from overspill.gguf.keys import Keys
from overspill.models.specs import base
from overspill.models.specs.base import HParams, TensorSpec
from overspill.models.specs.rope import RopeParams


@dataclass(frozen=True, kw_only=True)
class DeltaParams:
    """Sizes of a layer with the delta rule. n_heads: of values, and of states; n_key_heads: divides it.

    head_dim: channels of a key and of a value. n_taps: of the convolution before. n_adjacent: value head h has key head
    h // n_adjacent, counted on from the first when there are no more.
    """

    n_heads: int
    n_key_heads: int
    head_dim: int
    n_taps: int
    n_adjacent: int

    @property
    def key_dim(self) -> int:
        """Channels of all key heads."""
        return self.n_key_heads * self.head_dim

    @property
    def value_dim(self) -> int:
        """Channels of all value heads."""
        return self.n_heads * self.head_dim

    @property
    def n_channels(self) -> int:
        """What goes through the convolution: queries, keys, values."""
        return 2 * self.key_dim + self.value_dim

    @property
    def n_scratch(self) -> int:
        """Values for each token that `models.recurrent` holds at once: when it solves for what chunks add.

        Inputs before and after the convolution, 18 of each value channel, and 6 chunks of 64 tokens of each head.
        """
        return 2 * self.n_channels + 18 * self.value_dim + 6 * 64 * self.n_heads

    @property
    def state(self) -> KvShape:
        """Inputs that the convolution looks back to, and a matrix for each head."""
        return KvShape.of_state((self.n_taps - 1, self.n_channels), (self.n_heads, self.head_dim, self.head_dim))


@dataclass(frozen=True, kw_only=True)
class DeltaHParams(HParams):
    """is_recurrent: for each layer, whether it has the delta rule instead of attention."""

    delta: DeltaParams
    is_recurrent: tuple[bool, ...]

    @property
    def n_scratch(self) -> int:
        """Values for each token that the delta rule holds at once."""
        return self.delta.n_scratch

    def kv_shape(self, i_layer: int) -> KvShape:
        """A state, or keys and values."""
        return self.delta.state if self.is_recurrent[i_layer] else super().kv_shape(i_layer)

    def rope_of(self, i_layer: int) -> RopeParams | None:
        """Attention alone knows positions."""
        return None if self.is_recurrent[i_layer] else self.rope


def read_delta(a: Keys, *, is_tiled: bool) -> DeltaParams:
    """The `ssm.*` keys; `ssm.state_size` is the size of a head, `ssm.time_step_rank` counts those of values.

    is_tiled: whether value heads that follow each other have different key heads.
    """
    n_heads, n_key_heads = base.at_least_one(a, "ssm.time_step_rank"), base.at_least_one(a, "ssm.group_count")
    head_dim, n_inner = base.at_least_one(a, "ssm.state_size"), a.u32("ssm.inner_size")
    if n_heads % n_key_heads:
        raise UserError(f"{a.full_name('ssm.group_count')} is {n_key_heads}: must divide ssm.time_step_rank, {n_heads}")
    if n_inner != n_heads * head_dim:
        raise UserError(
            f"{a.full_name('ssm.inner_size')} is {n_inner}: must be ssm.time_step_rank * ssm.state_size, "
            f"{n_heads * head_dim}"
        )
    return DeltaParams(
        n_heads=n_heads,
        n_key_heads=n_key_heads,
        head_dim=head_dim,
        n_taps=read_taps(a),
        n_adjacent=1 if is_tiled else n_heads // n_key_heads,
    )


def read_taps(a: Keys) -> int:
    """Length of the convolution; one that looks back nowhere is none."""
    n_taps = a.u32("ssm.conv_kernel")
    if n_taps < 2:
        raise UserError(f"{a.full_name('ssm.conv_kernel')} is {n_taps}: must be at least 2")
    return n_taps


def read_recurrent_layers(a: Keys, n_layer: int) -> tuple[bool, ...]:
    """By flags for all layers of the file, prediction layers too; or all but each `full_attention_interval`th."""
    period = a.u32("full_attention_interval", default=4)
    if "attention.recurrent_layers" in a:
        return a.per_layer_flags("attention.recurrent_layers", a.u32("block_count"))[:n_layer]
    if period == 0:
        raise UserError(f"{a.full_name('full_attention_interval')} is 0: must be at least 1")
    return tuple((i + 1) % period != 0 for i in range(n_layer))


def gated_attention_tensors(hp: HParams, i_layer: int) -> list[TensorSpec]:
    """Attention with a gate: of each head first the query's rows, then the gate's."""
    b, D = f"blk.{i_layer}.", hp.n_embd
    return [
        TensorSpec(b + "attn_norm.weight", (D,)),
        TensorSpec(b + "attn_q.weight", (2 * hp.n_head * hp.head_dim, D)),
        TensorSpec(b + "attn_k.weight", (hp.n_head_kv * hp.head_dim, D)),
        TensorSpec(b + "attn_v.weight", (hp.n_head_kv * hp.value_dim, D)),
        TensorSpec(b + "attn_output.weight", (D, hp.n_head * hp.value_dim)),
    ]


def delta_tensors(hp: HParams, delta: DeltaParams, i_layer: int) -> list[TensorSpec]:
    """The gated delta rule, but for what gives decay and strength."""
    b, D = f"blk.{i_layer}.", hp.n_embd
    return [
        TensorSpec(b + "attn_norm.weight", (D,)),
        TensorSpec(b + "attn_qkv.weight", (delta.n_channels, D)),
        TensorSpec(b + "attn_gate.weight", (delta.value_dim, D)),
        TensorSpec(b + "ssm_conv1d.weight", (delta.n_channels, delta.n_taps)),
        TensorSpec(b + "ssm_dt.bias", (delta.n_heads,)),
        TensorSpec(b + "ssm_a", (delta.n_heads,)),
        TensorSpec(b + "ssm_norm.weight", (delta.head_dim,)),
        TensorSpec(b + "ssm_out.weight", (D, delta.value_dim)),
    ]
