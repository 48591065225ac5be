"""overspill: Mixture-of-Experts models that are bigger than the GPUs' memory.

from overspill import LLM, SamplingParams

with LLM("model.gguf", devices="cuda:0,cuda:1") as llm:
    print(llm.generate("Once upon a time", SamplingParams(max_tokens=64)).text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from overspill.engine.params import SamplingParams
    from overspill.errors import UserError
    from overspill.llm import LLM
    from overspill.options import Options

__all__ = ["LLM", "Options", "SamplingParams", "UserError"]

_HOMES = {
    "LLM": "overspill.llm",
    "Options": "overspill.options",
    "SamplingParams": "overspill.engine.request",
    "UserError": "overspill.errors",
}


def __getattr__(name: str) -> Any:
    """Public names are imported when they are used: reading a file's header needs no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'overspill' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
