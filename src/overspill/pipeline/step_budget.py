"""What decoding holds beside the buffers of waves: counted before loading, to the byte.

Placing has kept free as much as could be needed of each device. Here the layout is known, and with it who takes part.
"""

from __future__ import annotations

from dataclasses import replace

from overspill.pipeline.letter_sizes import step_letters
from overspill.pipeline.split import Layout
from overspill.pipeline.spread import n_spread_tokens
from overspill.pipeline.wave import MAX_STEP_TOKENS, STEP_WORDS
from overspill.placement.budget import KernelNeeds, most_spread_bytes, spread_bytes, tally_bytes, who_bytes
from overspill.placement.plan import Placement
from overspill.placement.shape import ModelShape

_LATE_BYTES = 8


def with_step_buffers(
    shape: ModelShape, placement: Placement, layout: Layout, needs: KernelNeeds, *, n_sequences: int
) -> Placement:
    """The placement, its budgets with what parties of spread experts hold, and inputs and letters of recorded steps."""
    n_ubatch, n_ubatches = placement.n_ubatch, -(-placement.n_wave // placement.n_ubatch)
    n_tokens, n_devices = n_spread_tokens(shape, layout, placement, needs), layout.n_accelerators
    used = sorted({layout.output_device, *layout.input_devices} - {layout.host})
    on_host = layout.host in {*layout.layer_device, layout.output_device}
    step_bytes = 4 * STEP_WORDS if needs.takes_steps and used and not on_host else 0
    of_device = step_bytes - most_spread_bytes(shape, n_ubatches=n_ubatches, needs=needs, n_devices=n_devices)
    of_host = pinned = 0
    if n_tokens:
        of_device += spread_bytes(
            shape,
            n_ubatches=n_ubatches,
            n_tokens=n_tokens,
            n_used=len(used),
            n_devices=n_devices,
        )
        of_host = who_bytes(shape, n_ubatches) + 4 * n_tokens * shape.n_embd
        pinned = len(used) * tally_bytes(shape, n_devices)
    if step_bytes:
        values = needs.normed_value_bytes
        n_rows = min(MAX_STEP_TOKENS, n_sequences) if shape.has_states else MAX_STEP_TOKENS
        letters = step_letters(shape, layout, n_ubatch, n_rows, normed_value_bytes=values, n_spread=n_tokens)
        pinned += step_bytes + _LATE_BYTES + letters.n_bytes
    budgets = list(placement.budgets)
    for i in used:
        budgets[i] = replace(budgets[i], compute_bytes=budgets[i].compute_bytes + of_device)
    host = budgets[-1]
    budgets[-1] = replace(host, compute_bytes=host.compute_bytes + of_host, staging_bytes=host.staging_bytes + pinned)
    return replace(placement, budgets=tuple(budgets))
