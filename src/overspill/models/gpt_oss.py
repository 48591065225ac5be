"""gpt-oss: sliding windows in every other layer, attention sinks, biases everywhere, a clamped activation."""

from __future__ import annotations

from overspill.models.specs.gpt_oss import FFN_NORM
from overspill.models.transformer import Transformer
from overspill.quant.experts import Activation


class Model(Transformer):
    """The plain decoder with its own activation; windows are hyper-parameters, sinks and biases in the file."""

    activation = Activation.SWIGLU_OAI
    ffn_norm = FFN_NORM
