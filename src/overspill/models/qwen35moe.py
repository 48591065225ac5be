"""Qwen3.5 with experts, one of them shared."""

from __future__ import annotations

from overspill.models import qwen35


class Model(qwen35.Model):
    """Qwen3.5; whether a layer has experts is in the file."""
