"""Sizes of the scheduler of slots, for tests with any traffic."""

from __future__ import annotations

from hypothesis import strategies as st

from overspill.engine.slots import PrefixReuse


@st.composite
def slot_sizes(draw: st.DrawFn, *, n_ubatch: int, n_slots: int) -> dict[str, object]:
    """At most so many rows in a ubatch, and slots of 40 cells; waves hold a ubatch, and a token of every slot."""
    rows, slots = draw(st.integers(1, n_ubatch)), draw(st.integers(1, n_slots))
    return {
        "n_vocab": 100,
        "n_ctx_slot": 40,
        "n_slots": slots,
        "n_ubatch": rows,
        "n_wave": max(rows, slots) + draw(st.integers(0, 12)),
        "reuse": draw(st.sampled_from(PrefixReuse)),
    }
