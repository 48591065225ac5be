"""Qwen3, dense: an RMS norm on each query and key head before rotation."""

from __future__ import annotations

from overspill.models.transformer import Transformer


class Model(Transformer):
    """The plain decoder; the norms of the heads are in the file."""
