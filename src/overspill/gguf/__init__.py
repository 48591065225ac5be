"""GGUF: the container of model weights and metadata.

`open_gguf` gives a `GgufFile`: `keys` (typed metadata), `tensors` (where each one lies) and `bytes_of` (a view).
"""

from overspill.gguf.keys import REQUIRED, Keys, Required, Value
from overspill.gguf.reader import GgufFile, open_gguf
from overspill.gguf.tensors import TensorInfo
from overspill.gguf.types import Block, TensorType

__all__ = ["REQUIRED", "Block", "GgufFile", "Keys", "Required", "TensorInfo", "TensorType", "Value", "open_gguf"]
