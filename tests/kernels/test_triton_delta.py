"""The delta rule for single tokens, in Triton's interpreter, against plain torch."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.triton_device import DEVICE, assert_near  # isort: skip (before Triton)

from overspill.kernels import StateSteps, ref
from overspill.kernels.triton.delta import delta_steps
from overspill.models.base import UbatchView
from overspill.models.recurrent import PER_CHANNEL, PER_HEAD, mix_tokens
from overspill.models.specs.recurrent import DeltaParams


@pytest.mark.parametrize("has_channels", [False, True])
@pytest.mark.parametrize(
    ("n_heads", "n_key_heads", "head_dim", "n_adjacent", "n_taps"),
    [(4, 2, 16, 2, 4), (6, 2, 24, 1, 4), (3, 3, 32, 1, 3), (4, 1, 64, 4, 2), (2, 2, 128, 1, 4)],
)
def test_single_tokens(
    n_heads: int, n_key_heads: int, head_dim: int, n_adjacent: int, n_taps: int, has_channels: bool
) -> None:
    """Three sequences: one in place, one to another row, one whose old row is kept."""
    params = DeltaParams(
        n_heads=n_heads, n_key_heads=n_key_heads, head_dim=head_dim, n_taps=n_taps, n_adjacent=n_adjacent
    )
    T, R, generator = 3, 7, torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE)

    kept = [random(*shape) for shape in params.state.state_shapes(R)]
    before, after = ([2, 0, 5], [2, 1, 6])
    rows = StateSteps(*(torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (before, after)))
    wide = random(T, params.n_channels + 8)
    qkv, taps = wide[:, : params.n_channels], random(params.n_channels, n_taps)
    g, beta = -random(T, n_heads, head_dim if has_channels else 1).abs(), random(T, n_heads, 1).sigmoid()

    wanted_kept = [x.clone() for x in kept]
    view = UbatchView((), torch.empty(0), torch.empty(0), state_rows=rows)
    decay = PER_CHANNEL if has_channels else PER_HEAD
    wanted = mix_tokens(ref.OPS, params, view, (qkv.contiguous(), g, beta), wanted_kept, taps, decay, eps=1e-6)

    conv, states = kept
    out = delta_steps(qkv, g, beta, (conv, states), taps, rows, n_adjacent=n_adjacent, eps=1e-6)

    assert_near(out, wanted)
    for a, b in zip(kept, wanted_kept, strict=True):
        assert_near(a, b)
