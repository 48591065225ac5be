"""How a model marks thoughts and calls, read off its chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from overspill.server.reading import PlainReader, Reader
from overspill.server.reading_channels import CHANNEL, MARKS, ChannelReader
from overspill.server.reading_tags import CALL, CALLED, THINK, THOUGHT, TagReader
from overspill.text.tokenizer import Tokenizer

_OTHER_CALLS = ("<function=", "<arg_key>")


@dataclass(frozen=True, slots=True)
class Dialect:
    """has_channels: gpt-oss' way. has_thoughts: `<think>`. has_calls: calls of tools can be read."""

    has_channels: bool
    has_thoughts: bool
    has_calls: bool

    @classmethod
    def of(cls, template: str) -> Dialect:
        has_channels = CHANNEL in template
        has_json_calls = CALL in template and "arguments" in template
        is_other = any(mark in template for mark in _OTHER_CALLS)
        return cls(
            has_channels=has_channels,
            has_thoughts=not has_channels and THOUGHT in template,
            has_calls=has_channels or (has_json_calls and not is_other),
        )

    def reader(self, prompt: str, *, has_tools: bool, is_raw: bool) -> Reader:
        """For an answer to a rendered prompt. has_tools: the request offers some. is_raw: thoughts stay in the text."""
        if self.has_channels:
            return PlainReader() if is_raw else ChannelReader()
        has_thoughts = self.has_thoughts and not is_raw
        if not has_thoughts and not has_tools:
            return PlainReader()
        is_thinking = has_thoughts and prompt.rstrip().endswith(THINK)
        return TagReader(has_thoughts=has_thoughts, has_calls=has_tools, is_thinking=is_thinking)

    def mark_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Tokens that spell a mark: readers have to see them, whatever kind of token they are."""
        return frozenset(ids[0] for mark in self._marks() if len(ids := tokenizer.encode(mark, add_special=False)) == 1)

    def _marks(self) -> Sequence[str]:
        if self.has_channels:
            return MARKS
        return [*([THINK, THOUGHT] if self.has_thoughts else []), *([CALL, CALLED] if self.has_calls else [])]
