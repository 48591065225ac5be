"""MiniMax-M2: queries and keys normed over all heads at once, sigmoid routing with a bias for the choice."""

from __future__ import annotations

from overspill.models import olmoe


class Model(olmoe.Model):
    """OLMoE's attention; the router is in the hyper-parameters."""
