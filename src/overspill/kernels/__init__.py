"""The op table: every tensor function a model may call, bound once to the kernels of a kind of device.

Models get an `Ops` and never ask where they run. `kernels.ref` is the specification; the other tables must agree
with it (tests/kernels).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from overspill.gguf.types import TensorType
from overspill.kernels.sharing import Divide, Fetch, Fill, LookUp, Mail, Place
from overspill.quant.experts import Activation, ExpertWeights
from overspill.quant.panels import Panels
from overspill.quant.q8_rows import TORCH_ROWS, Q8Rows
from overspill.quant.qtensor import QTensor


class Attention(Protocol):
    """Causal attention of the last T positions of one sequence over its C visible cells.

    q: `[T, H, A]`; k: `[G, C, A]`; v: `[G, C, B]`, the last T cells being the queries' own; scale: of the products.
    window: a query sees so many keys, its own the last; None: all before it. sinks: float32 `[H]`, a logit per head
    that takes its share of the softmax and gives no value (arXiv:2309.17453); None: no such share.
    k and v may be views with any strides over cells and heads. Returns `[T, H * B]`. Query head h uses kv head
    h // (H / G).
    """

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


class PrepareHeads(Protocol):
    """Norm (where there are gains), rotate, and write keys and values to their cells, in one go.

    q: `[T, H * A]`; k: `[T, G * A]`; v: `[T, G * B]`; cells: views `[G, T, A]` and `[G, T, B]` of the cache, or rows of
    `quant.q8_rows` in their place; cos, sin: `[T, n_rot / 2]`; gains: float32 `[A]` of query and key heads, or None.
    Returns the queries `[T, H, A]`.
    """

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cells: tuple[torch.Tensor, torch.Tensor],
        angles: tuple[torch.Tensor, torch.Tensor],
        gains: tuple[torch.Tensor | None, torch.Tensor | None],
        *,
        eps: float,
        is_interleaved: bool,
    ) -> torch.Tensor: ...


class Steps(NamedTuple):
    """Where the tokens of a ubatch stand that has one token of each of several sequences: int32 `[T]`, on the device.

    Work that takes its positions from here, and none from the host, can be recorded once and replayed for the tokens
    that follow.
    """

    slots: torch.Tensor
    positions: torch.Tensor


class StateSteps(NamedTuple):
    """Rows of the states before and after each token of such a ubatch: int32 `[T]`, on the device."""

    before: torch.Tensor
    after: torch.Tensor


class DeltaSteps(Protocol):
    """Convolution and delta rule (see `models.recurrent`) for steps: token t goes on from the states in row
    `before[t]`, and leaves those after it in row `after[t]`.

    qkv: `[T, C]`, the channels of G query heads, as many key heads and H value heads of K channels each. g: float32
    `[T, H, 1]` or `[T, H, K]`; beta: float32 `[T, H, 1]`. kept: inputs of the convolution `[R, J - 1, C]` and states
    `[R, H, K, K]`. taps: `[C, J]`. n_adjacent: so many value heads that follow each other share a key head. eps: of the
    lengths of queries and keys. Returns float32 `[T, H, K]`.
    """

    def __call__(
        self,
        qkv: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        kept: tuple[torch.Tensor, torch.Tensor],
        taps: torch.Tensor,
        rows: StateSteps,
        *,
        n_adjacent: int,
        eps: float,
    ) -> torch.Tensor: ...


class PrepareSteps(Protocol):
    """`PrepareHeads` for steps: token t belongs in cell `positions[t]`, modulo C, of slot `slots[t]`.

    caches: keys `[S, G, C, A]` and values `[S, G, C, B]` of a layer, or rows of them.
    """

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        caches: tuple[torch.Tensor, torch.Tensor],
        steps: Steps,
        angles: tuple[torch.Tensor, torch.Tensor],
        gains: tuple[torch.Tensor | None, torch.Tensor | None],
        *,
        eps: float,
        is_interleaved: bool,
    ) -> torch.Tensor: ...


class AttendSteps(Protocol):
    """`Attention` for steps: token t sees the cells of its slot up to its own position; of position p, cell p modulo C.

    q: `[T, H, A]`; k: `[S, G, C, A]`; v: `[S, G, C, B]`, the tokens' own cells filled, or rows of them: the same rows
    twice where the value is the key's first B channels. value_dim: B. chunk: a token sees only its own run of so many
    positions, counted from 0. Returns `[T, H * B]`.
    """

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        value_dim: int,
        steps: Steps,
        *,
        scale: float,
        window: int | None = None,
        chunk: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


class Route(Protocol):
    """Norm, router product and choice of experts in one go; rules without groups only.

    x: float32 `[T, D]`; gain: `[D]`; router: float32 `[E, D]`; bias: `[E]`, for the choice alone; logit_bias: `[E]`, of
    the product. gating: number of the rule as in GGUF's `expert_gating_func`. Returns the normed input, ids int32
    `[T, K]`, weights float32 `[T, K]`.
    """

    def __call__(
        self,
        x: torch.Tensor,
        gain: torch.Tensor,
        router: torch.Tensor,
        bias: torch.Tensor | None,
        logit_bias: torch.Tensor | None,
        *,
        eps: float,
        n_used: int,
        gating: int,
        is_normalised: bool,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionWeights:
    """All of plain self-attention but its cells. gain: of the norm before; gains: of query and key heads.

    scale, window, sinks: see `Attention`. is_interleaved: see `PrepareHeads`.
    """

    gain: torch.Tensor
    q: QTensor
    k: QTensor
    v: QTensor
    output: QTensor
    gains: tuple[torch.Tensor | None, torch.Tensor | None]
    sinks: torch.Tensor | None
    eps: float
    scale: float
    window: int | None
    is_interleaved: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class RouterWeights:
    """A norm and a plain router: see `Route`. router: float32 `[E, D]`."""

    gain: torch.Tensor
    router: QTensor
    bias: torch.Tensor | None
    eps: float
    n_used: int
    gating: int
    is_normalised: bool
    scale: float


class RoutedWeights(NamedTuple):
    """A router and its experts, all of which are there."""

    router: RouterWeights
    weights: ExpertWeights
    activation: Activation


class TokenLayer(NamedTuple):
    """Attention with its norm and residual, and routed experts with theirs; experts: None for the attention alone.

    i_angles: which of the angles of a call turn its heads.
    """

    attention: AttentionWeights
    experts: RoutedWeights | None = None
    i_angles: int = 0


class TokenEnds(NamedTuple):
    """What is before and after all layers: the embedding of tokens `[V, D]`; a norm and the matrix of logits."""

    embedding: QTensor
    gain: torch.Tensor
    eps: float
    output: QTensor


class TokenLayers(Protocol):
    """Layers that follow each other, for one token: x `[1, D]` -> `[1, D]`. Bit-equal to the ops one by one.

    All layers between their ends: x is the id of a token, and its logits `[1, V]` are returned.
    cells: of each layer, keys `[S, G, C, A]` and values `[S, G, C, B]`: of sequence `slot` the token's own is
    `position`, modulo C. angles: as for `PrepareHeads`.
    """

    def __call__(
        self,
        x: torch.Tensor | int,
        cells: Sequence[tuple[torch.Tensor, torch.Tensor]],
        slot: int,
        position: int,
        angles: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor: ...


TokenRouter = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""`Route` for one token, x `[1, D]`."""


TokenExperts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""`Experts` for one token with the same weights every time: x, ids, mix, out."""

NormLinears = Callable[
    [torch.Tensor, torch.Tensor, float, Sequence[QTensor], Sequence[torch.Tensor]], list[torch.Tensor]
]


class Experts(Protocol):
    """Add the weighted outputs of the experts present in `weights` to `out`, in ascending expert id.

    x: `[T, D]` normed input; ids: int32 `[T, K]`; mix: float32 `[T, K]`; out: `[T, D]`, changed in place.
    """

    def __call__(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        mix: torch.Tensor,
        weights: ExpertWeights,
        activation: Activation,
        out: torch.Tensor,
    ) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Ops:
    """One function per field.

    embed: rows of a `[V, D]` weight for ids `[T]` -> float32 `[T, D]`.
    divide, fetch: experts of few tokens that several devices compute. look_up, fill: the same with some of them in
    slots of the owner. place: those that many tokens find there.
    linear: `x [T, K]`, weight `[N, K]` -> `[T, N]`.
    linear_heads: a matrix for each head: `x [T, H, K]`, weight `[H, N, K]` -> `[T, H, N]`.
    rms_norm: `x [..., D]`, weight `[D]`, eps -> x / sqrt(mean(x^2) + eps) * weight.
    widen: dequantise staged experts into bfloat16 stacks of the same shapes, once for all ubatches of a wave; None
    where kernels rather read the blocks. plain: the same for one matrix, when a model is loaded. interleave: rows to
    panels, likewise, for weights of the types in panel_types.
    prepare_heads, route: several of the others at once; None where that gains nothing.
    add_linear: `y [T, N]`, `x [T, K]`, weight `[N, K]` -> y + x W^T; None likewise. linears: `linear` of one x with
    several weights, each result with rows of any stride; None likewise. norm_linears: `linears` of `rms_norm(x [T, K],
    gain [K], eps)`, plus biases `[N]` of all weights or of none; None likewise.
    prepare_steps, attend_steps, delta_steps, mail: attention and delta rule whose positions lie on the device, and the
    way from one device to another, for work that is recorded; None where nothing is.
    token_layers, token_router, token_experts: for one token, with weights that stay where they are; None where the
    ops one by one do as well, and as a result where the kernels do not take such weights.
    scratch: memory that launched work may still refer to when it is replayed.
    q8_rows: cells of type q8_0, apart from the ops above.
    normed_dtype: what `rms_norm` gives.
    rope: `x [T, H, A]`, cos and sin `[T, n_rot / 2]` -> rotated in the split-halves (NEOX) or interleaved pairing.
    """

    embed: Callable[[QTensor, torch.Tensor], torch.Tensor]
    linear: Callable[[torch.Tensor, QTensor], torch.Tensor]
    linear_heads: Callable[[torch.Tensor, QTensor], torch.Tensor]
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    rope_halves: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    rope_pairs: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    attention: Attention
    swiglu: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    experts: Experts
    divide: Divide
    fetch: Fetch
    look_up: LookUp
    fill: Fill
    place: Place
    widen: Callable[[ExpertWeights, ExpertWeights], None] | None = None
    plain: Callable[[QTensor, QTensor], None] | None = None
    interleave: Callable[[QTensor, Panels], None] | None = None
    panel_types: frozenset[TensorType] = frozenset()
    prepare_heads: PrepareHeads | None = None
    route: Route | None = None
    add_linear: Callable[[torch.Tensor, torch.Tensor, QTensor], torch.Tensor] | None = None
    linears: Callable[[torch.Tensor, Sequence[QTensor]], list[torch.Tensor]] | None = None
    norm_linears: NormLinears | None = None
    prepare_steps: PrepareSteps | None = None
    attend_steps: AttendSteps | None = None
    delta_steps: DeltaSteps | None = None
    mail: Mail | None = None
    token_layers: Callable[[Sequence[TokenLayer], TokenEnds | None], TokenLayers | None] | None = None
    token_router: Callable[[RouterWeights], TokenRouter | None] | None = None
    token_experts: Callable[[ExpertWeights, Activation], TokenExperts | None] | None = None
    scratch: Callable[[], Sequence[torch.Tensor]] = list
    q8_rows: Q8Rows = TORCH_ROWS
    normed_dtype: torch.dtype = torch.float32
