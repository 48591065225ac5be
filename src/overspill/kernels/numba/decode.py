"""The block decoders of all tensor types that hold weights, see `decoder`."""

from __future__ import annotations

from overspill.gguf.types import TensorType
from overspill.kernels.numba import decode_codebooks, decode_k, decode_linear
from overspill.kernels.numba.decoder import Decoder

DECODERS: dict[TensorType, Decoder] = decode_linear.DECODERS | decode_k.DECODERS | decode_codebooks.DECODERS
