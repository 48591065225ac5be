"""Layers that keep a state: a short causal convolution, and the gated delta rule.

The gated delta rule (arXiv:2412.06464; with a decay for each channel, arXiv:2510.26692): a state S `[K, V]` of each
head maps keys to values. A token with query q, key k, value v, decay g <= 0 and strength beta makes of it

    S <- exp(g) S;   d = beta (v - S^T k);   S <- S + k d^T;   o = S^T q

One token is computed so. Many are computed in chunks (same paper, section 3.3): inside a chunk all d follow from one
triangular system, and the state goes from chunk to chunk. Both give the same numbers but for rounding.

Everything is float32 and plain torch: no size depends on data, nothing waits for a device. Inputs are not changed.
Shape suffixes: B sequences side by side, T tokens, H heads, K key channels, V value channels, C channels of the
convolution, J its taps; N chunks of L tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from overspill.cache.recurrent import put_states, runs, states_before
from overspill.kernels import Ops, StateSteps
from overspill.models.base import UbatchView
from overspill.models.specs.recurrent import DeltaParams

_BLOCK = 8

Step = Callable[[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]], tuple[torch.Tensor, tuple[torch.Tensor, ...]]]
"""Inputs `[B, T, ...]` and states `[B, ...]` -> outputs `[B, T, ...]` and new states."""


def run_segments(
    view: UbatchView, inputs: Sequence[torch.Tensor], kept: Sequence[torch.Tensor], step: Step
) -> torch.Tensor:
    """Take the states of all sequences of a ubatch on, and return the outputs `[T, ...]` of its rows.

    inputs: `[T, ...]` each, contiguous. kept: the state tensors of the layer.
    """
    if view.state_rows is not None:
        return _run_steps(view.state_rows, inputs, kept, step)
    outputs, row = [], 0
    for run in runs(view.segments):
        B, n = len(run), run[0].n_tokens
        rows = tuple(x[row : row + B * n].unflatten(0, (B, n)) for x in inputs)
        y, after = step(rows, tuple(states_before(tensor, run) for tensor in kept))
        for tensor, states in zip(kept, after, strict=True):
            put_states(tensor, run, states)
        outputs.append(y.flatten(0, 1))
        row += B * n
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _run_steps(
    rows: StateSteps, inputs: Sequence[torch.Tensor], kept: Sequence[torch.Tensor], step: Step
) -> torch.Tensor:
    """A token of each of several sequences, none of them the first."""
    y, after = step(tuple(x[:, None] for x in inputs), tuple(tensor.index_select(0, rows.before) for tensor in kept))
    for tensor, states in zip(kept, after, strict=True):
        tensor.index_copy_(0, rows.after.long(), states)
    return y.flatten(0, 1)


def causal_conv(
    x_BTC: torch.Tensor, before_BJC: torch.Tensor, taps_CJ: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """silu of each channel's sum over the last J tokens, the oldest by the first tap; and the last J - 1 inputs.

    before: the J - 1 inputs before the first.
    """
    T, seen = x_BTC.shape[1], torch.cat([before_BJC, x_BTC], 1)
    y = seen[:, :T] * taps_CJ[:, 0]
    for j in range(1, taps_CJ.shape[1]):
        y.addcmul_(seen[:, j : j + T], taps_CJ[:, j])
    return F.silu(y), seen[:, T:].clone()  # a view would keep all of `seen`


def unit_heads(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / |x| over the last dimension, with `eps` added to the sum of squares."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


class Tokens(NamedTuple):
    """What the delta rule takes of tokens. q, k: `[B, T, H, K]`; v: `[B, T, H, V]`; beta: `[B, T, H, 1]`.

    g: logarithm of the decay, `[B, T, H, 1]`, or `[B, T, H, K]` for a decay of each key channel.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor


class Decay(NamedTuple):
    """How tokens of a chunk see each other: `products`, and how long a chunk should be at most.

    products(x, k, G): sum over channels of x_i k_j exp(G_i - G_j) for i >= j, 0 elsewhere: `[..., L, L]`. G: decays
    summed up. No exponent above 0 may count, however strong the decay.
    """

    products: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    n_chunk: int


def _head_products(x: torch.Tensor, k: torch.Tensor, G: torch.Tensor) -> torch.Tensor:
    return (x @ k.mT) * (G - G.mT).tril().exp().tril()


def _channel_products(x: torch.Tensor, k: torch.Tensor, G: torch.Tensor) -> torch.Tensor:
    L = x.shape[-2]
    out = x.new_zeros(*x.shape[:-1], L)
    for j in range(L):
        decay = (G[..., j:, :] - G[..., j : j + 1, :]).exp()
        out[..., j:, j] = (x[..., j:, :] * decay * k[..., j : j + 1, :]).sum(-1)
    return out


PER_HEAD = Decay(_head_products, 64)
PER_CHANNEL = Decay(_channel_products, 16)


def mix_tokens(
    ops: Ops,
    params: DeltaParams,
    view: UbatchView,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    kept: Sequence[torch.Tensor],
    taps_CJ: torch.Tensor,
    decay: Decay,
    *,
    eps: float,
) -> torch.Tensor:
    """Convolution and delta rule over a ubatch, `[T, H, V]`.

    inputs: products [q | k | v] `[T, C]`; g and beta, `[T, H, *]` as in `Tokens`. kept: inputs of the convolution, and
    states. eps: of the lengths of q and k.
    """
    if view.state_rows is not None and ops.delta_steps is not None:
        conv, states = kept
        return ops.delta_steps(*inputs, (conv, states), taps_CJ, view.state_rows, n_adjacent=params.n_adjacent, eps=eps)

    def step(
        rows: tuple[torch.Tensor, ...], states: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        mixed, before = causal_conv(rows[0], states[0], taps_CJ)
        parts = mixed.split([params.key_dim, params.key_dim, params.value_dim], -1)
        q, k, v = (x.unflatten(-1, (-1, params.head_dim)) for x in parts)
        q, k = (_spread(x, params) for x in (unit_heads(q, eps) * params.head_dim**-0.5, unit_heads(k, eps)))
        y, state = delta_rule(Tokens(q, k, v, *rows[1:]), states[1], decay)
        return y, (before, state)

    return run_segments(view, inputs, kept, step)


def _spread(x: torch.Tensor, params: DeltaParams) -> torch.Tensor:
    """Key heads `[..., G, K]` -> value heads `[..., H, K]`."""
    shape = (*x.shape[:-2], params.n_heads // params.n_key_heads // params.n_adjacent, params.n_key_heads)
    return x[..., None, :, None, :].expand(*shape, params.n_adjacent, -1).flatten(-4, -2)


def delta_rule(tokens: Tokens, state_BHKV: torch.Tensor, decay: Decay) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs `[B, T, H, V]` of the tokens, and the state after the last."""
    if tokens.v.shape[1] == 1:
        return _one_token(Tokens(*(x[:, 0] for x in tokens)), state_BHKV)
    return _in_chunks(tokens, state_BHKV, decay)


def _one_token(token: Tokens, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rule as it stands, the state read once for both products."""
    q, k, v, g, beta = token
    state = state * g.exp()[..., None]
    of_k, of_q = (torch.stack([k, q], -2) @ state).unbind(-2)
    d = beta * (v - of_k)
    o = of_q + (k * q).sum(-1, keepdim=True) * d
    return o[:, None], state.addcmul_(k[..., None], d[..., None, :])


def _in_chunks(tokens: Tokens, state: torch.Tensor, decay: Decay) -> tuple[torch.Tensor, torch.Tensor]:
    T = tokens.v.shape[1]
    N = -(-T // decay.n_chunk)
    q, k, v, g, beta = (_cut(x, N, -(-T // N)) for x in tokens)
    G = g.cumsum(-2)
    seen = G.exp()
    news = unit_lower_inverse((decay.products(k, k, G) * beta).tril(-1)) @ (torch.cat([v, k * seen], -1) * beta)
    own, of_state = news.split([v.shape[-1], k.shape[-1]], -1)
    to_end = (k * (G[..., -1:, :] - G).exp()).mT
    among, q, left = decay.products(q, k, G), q * seen, seen[..., -1, :, None]
    outputs = []
    for n in range(N):
        d = own[:, :, n] - of_state[:, :, n] @ state
        outputs.append(q[:, :, n] @ state + among[:, :, n] @ d)
        state = state * left[:, :, n] + to_end[:, :, n] @ d
    return torch.cat(outputs, 2)[:, :, :T].transpose(1, 2), state


def unit_lower_inverse(A: torch.Tensor) -> torch.Tensor:
    """(I + A)^-1 of matrices `[..., L, L]` that are zero on and above the diagonal.

    Rows of small blocks on the diagonal are solved one after the other; then neighbours are joined: what is below them
    is -R^-1 Q P^-1. No power of A is taken: those can be as large as the inverse is small.
    """
    L, n = A.shape[-1], _BLOCK
    size = n * (1 << max(0, -(-L // n) - 1).bit_length())
    A = F.pad(A, (0, size - L, 0, size - L))
    inverse = torch.eye(n, dtype=A.dtype, device=A.device).expand(*A.shape[:-2], size // n, n, n).clone()
    blocks = _diagonal(A, n)
    for i in range(1, n):
        inverse[..., i, :i] = -(blocks[..., i, :i, None] * inverse[..., :i, :i]).sum(-2)
    while n < size:
        P, R = inverse[..., ::2, :, :], inverse[..., 1::2, :, :]
        Q = _diagonal(A, 2 * n)[..., n:, :n]
        below = torch.cat([-(R @ Q @ P), R], -1)
        inverse = torch.cat([F.pad(P, (0, n)), below], -2)
        n *= 2
    return inverse[..., 0, :L, :L]


def _diagonal(A: torch.Tensor, n: int) -> torch.Tensor:
    """The blocks on the diagonal, `[..., L / n, n, n]`."""
    blocks: torch.Tensor = A.unflatten(-1, (-1, n)).unflatten(-3, (-1, n)).diagonal(dim1=-4, dim2=-2)
    return blocks.movedim(-1, -3)


def _cut(x: torch.Tensor, N: int, L: int) -> torch.Tensor:
    """`[B, T, H, *]` -> `[B, H, N, L, *]`, filled up with zeros, which change nothing."""
    padded = F.pad(x, (0, 0, 0, 0, 0, N * L - x.shape[1]))
    cut: torch.Tensor = padded.unflatten(1, (N, L)).permute(0, 3, 1, 2, 4)
    return cut.contiguous()
