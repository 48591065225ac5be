"""Hyper-parameters and tensor lists that architectures share.

An architecture is a module with `read_hparams(keys)` and `tensors(hparams)`. What a file may get wrong is found here,
with the key's full name; whoever opened the file puts its path in front (`models.check.understand`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from overspill.cache.cells import KvShape
from overspill.errors import UserError
from overspill.gguf.keys import Keys
from overspill.models.specs.rope import RopeParams
from overspill.models.specs.router import Gating, RouterParams

MAX_LAYERS = 4096  # thirty times the deepest model there is; a damaged count must not cost memory


class TensorSpec(NamedTuple):
    """A tensor an architecture reads: GGUF name, shape in torch order, and whether a file may lack it.

    is_index: it holds whole numbers (I32), such as expert ids, and not weights. is_padded: it may have more rows.
    """

    name: str
    shape: tuple[int, ...]
    is_required: bool = True
    is_index: bool = False
    is_padded: bool = False


@dataclass(frozen=True, kw_only=True)
class HParams:
    """Hyper-parameters of a decoder; an architecture with more of them derives from it.

    n_layer: layers that run; prediction layers behind them are not counted. head_dim, value_dim: channels of a query
    and key head, and of a value head. n_layer_dense: so many layers at the beginning have no experts. n_ff_shared:
    width of the experts that every token uses, 0 = there are none. router: None where there are no experts.
    """

    arch: str
    n_layer: int
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    n_head: int
    n_head_kv: int
    head_dim: int
    value_dim: int
    n_ff: int
    n_expert: int
    n_expert_used: int
    n_ff_exp: int
    rms_eps: float
    rope: RopeParams
    n_layer_dense: int = 0
    n_ff_shared: int = 0
    router: RouterParams | None = None

    @property
    def x_dim(self) -> int:
        """Numbers that go with a token from layer to layer: its hidden state, and whatever else a model hands on."""
        return self.n_embd

    @property
    def n_scratch(self) -> int:
        """Values for each token that the model's own functions hold at once, beside what the kernels take."""
        return 0

    @property
    def n_before(self) -> int:
        """So many tokens before it count in a token's embedding."""
        return 0

    def expert_limit(self, i_layer: int) -> float | None:
        """Gates of the layer's experts are at most so large, their other halves within it either way; None: any."""
        return None

    def is_moe(self, i_layer: int) -> bool:
        """Whether the layer has routed experts."""
        return self.n_expert > 0 and i_layer >= self.n_layer_dense

    def kv_shape(self, i_layer: int) -> KvShape:
        """What the layer keeps of each position."""
        return KvShape(self.n_head_kv, self.head_dim, self.value_dim, reach=self.reach(i_layer))

    @property
    def has_states(self) -> bool:
        """Whether some layer keeps a state, so that sequences cannot be cut back to any position."""
        return any(self.kv_shape(i).state for i in range(self.n_layer))

    def window(self, i_layer: int) -> int | None:
        """How many keys a query of the layer sees, its own the last; None: all."""
        return None

    def reach(self, i_layer: int) -> int | None:
        """How many keys a query of the layer may see, wherever it stands; None: all."""
        return self.window(i_layer)

    def rope_of(self, i_layer: int) -> RopeParams | None:
        """How the layer rotates queries and keys; None: it does not."""
        return self.rope


def read_hparams(
    keys: Keys, *, gating: Gating = Gating.SOFTMAX, is_normalised: bool = True, n_head_kv: int | None = None
) -> HParams:
    """The keys that all decoders share, checked; see the GGUF architecture keys.

    gating, is_normalised: the architecture's way of routing, for files that do not say it. n_head_kv: for
    architectures that use the key for something else.
    """
    a = keys.scoped(keys.arch)
    n_embd = at_least_one(a, "embedding_length")
    n_head, n_head_kv = _head_counts(a, n_head_kv)
    head_dim = a.u32("attention.key_length", default=n_embd // n_head)
    n_expert, n_used = _expert_counts(a)
    router = RouterParams.from_keys(a, n_expert, n_used, gating=gating, is_normalised=is_normalised)
    return HParams(
        arch=keys.arch,
        n_layer=_n_layer(a),
        n_embd=n_embd,
        n_vocab=_n_vocab(keys),
        n_ctx_train=at_least_one(a, "context_length"),
        n_head=n_head,
        n_head_kv=n_head_kv,
        head_dim=head_dim,
        value_dim=a.u32("attention.value_length", default=head_dim),
        n_ff=a.u32("feed_forward_length", default=0),
        n_expert=n_expert,
        n_expert_used=n_used,
        n_ff_exp=a.u32("expert_feed_forward_length", default=a.u32("feed_forward_length", default=0)),
        rms_eps=a.f32("attention.layer_norm_rms_epsilon"),
        rope=RopeParams.from_keys(a, head_dim),
        n_layer_dense=a.u32("leading_dense_block_count", default=0),
        router=router if n_expert else None,
    )


def _n_layer(a: Keys) -> int:
    """Layers that run: the prediction layers at the end are counted in `block_count`, but only draft tokens."""
    n_block = at_least_one(a, "block_count")
    if n_block > MAX_LAYERS:
        raise UserError(f"{a.full_name('block_count')} is {n_block}: at most {MAX_LAYERS} layers are possible")
    n_predict = a.u32("nextn_predict_layers", default=0)
    if n_predict >= n_block:
        raise UserError(f"{a.full_name('nextn_predict_layers')} is {n_predict}: must be below block_count, {n_block}")
    return n_block - n_predict


def at_least_one(a: Keys, name: str) -> int:
    """A count that cannot be 0."""
    n = a.u32(name)
    if n == 0:
        raise UserError(f"{a.full_name(name)} is 0: must be at least 1; convert the model again")
    return n


def require_experts(hp: HParams) -> HParams:
    """For architectures whose layers have routed experts: there must be some."""
    if hp.n_expert == 0:
        raise UserError(f"{hp.arch}.expert_count is 0 or missing: this architecture has routed experts")
    return hp


def _head_counts(a: Keys, n_head_kv: int | None) -> tuple[int, int]:
    n_head = at_least_one(a, "attention.head_count")
    n_head_kv = a.u32("attention.head_count_kv", default=n_head) if n_head_kv is None else n_head_kv
    if n_head_kv == 0 or n_head % n_head_kv:
        raise UserError(
            f"{a.full_name('attention.head_count_kv')} is {n_head_kv}: must divide attention.head_count, {n_head}"
        )
    return n_head, n_head_kv


def _expert_counts(a: Keys) -> tuple[int, int]:
    n_expert, n_used = a.u32("expert_count", default=0), a.u32("expert_used_count", default=0)
    if n_expert and not 0 < n_used <= n_expert:
        raise UserError(f"{a.full_name('expert_used_count')} is {n_used}: must be from 1 to expert_count, {n_expert}")
    return n_expert, n_used


def _n_vocab(keys: Keys) -> int:
    if "tokenizer.ggml.tokens" in keys:
        return len(keys.texts("tokenizer.ggml.tokens"))
    n_vocab = keys.u32(f"{keys.arch}.vocab_size", default=0)
    if n_vocab == 0:
        raise UserError(
            f"neither tokenizer.ggml.tokens nor {keys.arch}.vocab_size is there: the file has no tokenizer; convert "
            "the model again"
        )
    return n_vocab
