"""The verbs that copy from buffer to buffer: inputs, logits, ids, and hidden states between devices."""

from __future__ import annotations

from overspill.device.base import Stream
from overspill.pipeline.memory import Memory
from overspill.pipeline.schedule import Action, Verb
from overspill.pipeline.wave import Ubatch


def copy(memory: Memory, action: Action, stream: Stream, n_bytes: int) -> None:
    """The front of what an action reads."""
    (source,), (target,) = memory[action.reads[0]], memory[action.writes[0]]
    stream.copy(target, source, n_bytes=n_bytes, label=action.label)


def hand_off(memory: Memory, action: Action, stream: Stream, ubatch: Ubatch) -> None:
    """Rows of a ubatch's tokens, to another device."""
    sources, targets = memory.all_of(action.reads), memory.all_of(action.writes)
    for source, target in zip(sources, targets, strict=True):
        n_rows = len(source.raw())
        n_bytes = source.n_bytes // n_rows * min(n_rows, ubatch.n_tokens)
        stream.copy(target, source, n_bytes=n_bytes, label=action.label)


def hand_tile(memory: Memory, action: Action, stream: Stream, ubatch: Ubatch) -> None:
    """One tile of hidden states, down to host memory or up from it."""
    (source,), (target,) = memory[action.reads[0]], memory[action.writes[0]]
    first = action.chunk * memory.tile_bytes
    n_bytes = min(memory.tile_bytes, ubatch.n_tokens * memory.x_row_bytes - first)
    if action.verb is Verb.HAND_DOWN:
        stream.copy(target, source, n_bytes=n_bytes, src_offset=first, label=action.label)
    else:
        stream.copy(target, source, n_bytes=n_bytes, dst_offset=first, label=action.label)


def read_ids(memory: Memory, action: Action, stream: Stream, ubatch: Ubatch) -> None:
    """The experts that a router has named, to the host."""
    _, ids, _ = memory[action.reads[0]]
    (target,) = memory[action.writes[0]]
    stream.copy(target, ids, n_bytes=ubatch.n_tokens * memory.n_expert_used * 4, label=action.label)
