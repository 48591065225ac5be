"""Qwen3-MoE: Qwen3's attention, every layer with softmax-routed experts whose weights are renormalised."""

from __future__ import annotations

from overspill.models import qwen3


class Model(qwen3.Model):
    """Qwen3 with experts."""
