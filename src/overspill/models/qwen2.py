"""Qwen2 and Qwen2.5, dense: biases on the query, key and value projections."""

from __future__ import annotations

from overspill.models.transformer import Transformer


class Model(Transformer):
    """The plain decoder; the biases are in the file."""
