"""Llama and Mixtral: interleaved rotary pairs, dense or softmax-routed experts, optional Llama 3 frequency factors."""

from __future__ import annotations

from overspill.models.transformer import Transformer


class Model(Transformer):
    """The plain decoder with interleaved rotation."""

    is_rope_interleaved = True
