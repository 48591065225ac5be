"""Qwen3-VL-MoE, its text: Qwen3-MoE. For text all axes of the rotation have one position, and no image is added."""

from __future__ import annotations

from overspill.models import qwen3moe


class Model(qwen3moe.Model):
    """Qwen3-MoE."""
