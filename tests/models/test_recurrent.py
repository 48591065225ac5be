"""The delta rule and its convolution: chunks against the rule as written, at every length; states of sequences."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from overspill.cache.cells import Segment, StateRows
from overspill.kernels import ref
from overspill.models.base import UbatchView
from overspill.models.recurrent import (
    PER_CHANNEL,
    PER_HEAD,
    Decay,
    Tokens,
    causal_conv,
    delta_rule,
    mix_tokens,
    run_segments,
    unit_lower_inverse,
)
from overspill.models.specs.recurrent import DeltaParams

B, H, K, V = 2, 3, 8, 6
DECAYS = {"head": (PER_HEAD, 1), "channel": (PER_CHANNEL, K)}


def random_tokens(n: int, n_decays: int, *, strength: float = 1.0, seed: int = 0) -> Tokens:
    g = torch.Generator().manual_seed(seed)
    q, k = (torch.nn.functional.normalize(torch.randn(B, n, H, K, generator=g), dim=-1) for _ in range(2))
    decay = -strength * torch.rand(B, n, H, n_decays, generator=g) ** 3
    return Tokens(q, k, torch.randn(B, n, H, V, generator=g), decay, torch.rand(B, n, H, 1, generator=g))


def as_written(tokens: Tokens, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One token after the other, in float64."""
    q, k, v, g, beta = (x.double() for x in tokens)
    S, outputs = state.double(), []
    for t in range(v.shape[1]):
        S = S * g[:, t].exp()[..., None]
        d = beta[:, t] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t]))
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], d)
        outputs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
    return torch.stack(outputs, 1), S


@pytest.mark.parametrize("kind", DECAYS)
def test_chunks_equal_the_rule_at_every_length(kind: str) -> None:
    decay, n_decays = DECAYS[kind]
    tokens, start = random_tokens(200, n_decays), torch.randn(B, H, K, V, generator=torch.Generator().manual_seed(1))
    expected, _ = as_written(tokens, start)
    for n in range(1, 201):
        first = Tokens(*(x[:, :n] for x in tokens))
        y, state = delta_rule(first, start, decay)
        torch.testing.assert_close(y.double(), expected[:, :n], rtol=0, atol=1e-5)
        if n % 40 in (0, 1, 3):
            torch.testing.assert_close(state.double(), as_written(first, start)[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("n", [4095, 4097])
@pytest.mark.parametrize("kind", DECAYS)
def test_long_prompts(kind: str, n: int) -> None:
    decay, n_decays = DECAYS[kind]
    tokens, start = random_tokens(n, n_decays, strength=0.02), torch.zeros(B, H, K, V)
    expected, end = as_written(tokens, start)
    y, state = delta_rule(tokens, start, decay)
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(state.double(), end, rtol=0, atol=2e-5)


@pytest.mark.parametrize("strength", [30.0, 1000.0])
@pytest.mark.parametrize("kind", DECAYS)
def test_decays_beyond_what_exponentials_can_hold(kind: str, strength: float) -> None:
    """What a chunk forgets is zero, and never zero times infinity."""
    decay, n_decays = DECAYS[kind]
    tokens, start = random_tokens(130, n_decays, strength=strength), torch.ones(B, H, K, V)
    expected, end = as_written(tokens, start)
    y, state = delta_rule(tokens, start, decay)
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=strength * 2e-5)
    torch.testing.assert_close(state.double(), end, rtol=0, atol=strength * 2e-5)


def test_the_length_of_chunks_does_not_matter() -> None:
    tokens, start = random_tokens(70, 1), torch.zeros(B, H, K, V)
    expected, _ = as_written(tokens, start)
    for n_chunk in (1, 2, 7, 70, 500):
        y, _ = delta_rule(tokens, start, Decay(PER_HEAD.products, n_chunk))
        torch.testing.assert_close(y.double(), expected, rtol=0, atol=1e-5)


def test_one_decay_for_all_channels_is_that_of_a_head() -> None:
    tokens, start = random_tokens(50, 1), torch.zeros(B, H, K, V)
    y, state = delta_rule(tokens, start, PER_HEAD)
    same = tokens._replace(g=tokens.g.expand(-1, -1, -1, K))
    for a, b in zip(delta_rule(same, start, PER_CHANNEL), (y, state), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 9])
def test_convolution_looks_back_before_the_first_token(n: int) -> None:
    generator, C, J = torch.Generator().manual_seed(2), 5, 4
    x, before = torch.randn(B, n, C, generator=generator), torch.randn(B, J - 1, C, generator=generator)
    taps = torch.randn(C, J, generator=generator)
    y, after = causal_conv(x, before, taps)
    seen = torch.cat([before, x], 1)
    full = torch.nn.functional.conv1d(seen.mT, taps[:, None], groups=C).mT
    torch.testing.assert_close(y, torch.nn.functional.silu(full), rtol=0, atol=1e-5)
    assert torch.equal(after, seen[:, -(J - 1) :])


# --- sequences in a ubatch

PARAMS = DeltaParams(n_heads=4, n_key_heads=2, head_dim=6, n_taps=4, n_adjacent=2)
N = 40


def inputs(seed: int, n: int = N) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    decay = -torch.rand(n, PARAMS.n_heads, 1, generator=g)
    return torch.randn(n, PARAMS.n_channels, generator=g), decay, torch.rand(n, PARAMS.n_heads, 1, generator=g)


def mixed(segments: list[Segment], rows: tuple[torch.Tensor, ...], kept: list[torch.Tensor]) -> torch.Tensor:
    taps = torch.randn(PARAMS.n_channels, PARAMS.n_taps, generator=torch.Generator().manual_seed(3))
    qkv, g, beta = (x.contiguous() for x in rows)
    return mix_tokens(ref.OPS, PARAMS, view_of(segments), (qkv, g, beta), kept, taps, PER_HEAD, eps=1e-6)


def view_of(segments: list[Segment]) -> UbatchView:
    """The delta rule asks for segments alone."""
    return UbatchView(tuple(segments), torch.empty(0), torch.empty(0))


def new_states(n_rows: int) -> list[torch.Tensor]:
    """Nothing in them yet: whoever reads them gets NaN."""
    return [torch.full(dims, torch.nan) for dims in PARAMS.state.state_shapes(n_rows)]


def alone(seed: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Outputs and last states of a sequence that is computed at once."""
    kept = new_states(1)
    return mixed([Segment(0, 0, N)], inputs(seed), kept), kept


@pytest.mark.parametrize("n_ubatch", [1, 3, 16, 39])
def test_ubatches_go_on_from_each_other(n_ubatch: int) -> None:
    expected, states = alone(1)
    kept, rows = new_states(1), inputs(1)
    y = [
        mixed([Segment(0, i, len(rows[0][i : i + n_ubatch]))], tuple(x[i : i + n_ubatch] for x in rows), kept)
        for i in range(0, N, n_ubatch)
    ]
    torch.testing.assert_close(torch.cat(y), expected, rtol=0, atol=1e-5)
    for a, b in zip(kept, states, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_sequences_side_by_side_do_not_see_each_other() -> None:
    """Unequal lengths in one ubatch; then single tokens together, one of a sequence that begins."""
    (a, _), (b, _), (c, _) = alone(1), alone(2), alone(3)
    A, B_, C = inputs(1), inputs(2), inputs(3)
    kept = new_states(3)
    rows = tuple(torch.cat([x[:5], y[:30]]) for x, y in zip(A, B_, strict=True))
    y = mixed([Segment(2, 0, 5), Segment(0, 0, 30)], rows, kept)
    torch.testing.assert_close(y, torch.cat([a[:5], b[:30]]), rtol=0, atol=1e-5)
    assert all(x[1].isnan().all() for x in kept)
    rows = tuple(torch.cat([x[5:6], y[30:31], z[:1]]) for x, y, z in zip(A, B_, C, strict=True))
    y = mixed([Segment(2, 5, 1), Segment(0, 30, 1), Segment(1, 0, 1)], rows, kept)
    torch.testing.assert_close(y, torch.stack([a[5], b[30], c[0]]), rtol=0, atol=1e-5)


def test_a_sequence_may_go_on_within_a_ubatch() -> None:
    expected, _ = alone(1)
    kept = new_states(1)
    y = mixed([Segment(0, 0, 20), Segment(0, 20, 20)], inputs(1), kept)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-5)


def test_a_kept_state_stays_and_can_be_gone_on_from() -> None:
    expected, _ = alone(1)
    kept, rows = new_states(3), inputs(1)
    for first, last, where in ((0, 16, (0, 0)), (16, 32, (0, 1)), (32, 40, (1, 2)), (16, 40, (0, 1))):
        piece = tuple(x[first:last] for x in rows)
        y = mixed([Segment(0, first, last - first, StateRows(*where))], piece, kept)
        torch.testing.assert_close(y, expected[first:last], rtol=0, atol=1e-5)


def test_inputs_and_states_that_are_read_are_not_changed() -> None:
    kept, rows = new_states(2), inputs(1)
    mixed([Segment(0, 0, N)], rows, kept)
    before = [x.clone() for x in (*rows, *(k[0] for k in kept))]
    mixed([Segment(0, N, N, StateRows(0, 1))], rows, kept)
    mixed([Segment(0, N, 1, StateRows(0, 1))], tuple(x[:1] for x in rows), kept)
    assert all(torch.equal(a, b) for a, b in zip((*rows, *(k[0] for k in kept)), before, strict=True))


def test_outputs_keep_the_order_of_rows() -> None:
    segments = [Segment(0, 0, 1), Segment(1, 0, 1), Segment(2, 0, 3), Segment(3, 0, 1)]
    x = torch.arange(6.0)[:, None]
    y = run_segments(view_of(segments), [x], [torch.zeros(4, 1)], lambda rows, states: (rows[0] * 10, states))
    assert torch.equal(y, x * 10)
    assert replace(segments[0]).states == StateRows(0, 0)


@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 16, 33, 64])
@pytest.mark.parametrize("least", [-1.0, 1.0])
def test_inverse_of_a_unit_lower_matrix(n: int, least: float) -> None:
    """Of random entries, and of ones alone, whose powers are astronomic."""
    A = torch.empty(2, 3, n, n).uniform_(least, 1.0, generator=torch.Generator().manual_seed(n)).tril(-1)
    wanted = torch.linalg.inv(A.double() + torch.eye(n).double())
    error = (unit_lower_inverse(A) - wanted).abs().amax((-1, -2)) / wanted.abs().amax((-1, -2))
    assert error.max() < 1e-5
