"""Qwen1.5-MoE and Qwen2-MoE: biases on query, key and value; a shared expert behind a gate of its own."""

from __future__ import annotations

from overspill.models.transformer import Transformer


class Model(Transformer):
    """The plain decoder; biases, shared expert and gate are in the file."""
