"""How a model marks thoughts and calls, read off its chat template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from overspill.server.reading import PlainReader, Reader, schemas_of
from overspill.server.reading_channels import CHANNEL, MARKS, ChannelReader, is_final
from overspill.server.reading_forms import CallForm, call_form
from overspill.server.reading_tags import CallMarks, TagReader, ThoughtMarks
from overspill.text.tokenizer import Tokenizer

_THOUGHTS = (ThoughtMarks(), ThoughtMarks("[THINK]", "[/THINK]"))


@dataclass(frozen=True, slots=True)
class Dialect:
    """has_channels: gpt-oss' way. thoughts: what marks them, if anything. calls: the form of calls, None if there is
    none that can be read."""

    has_channels: bool
    thoughts: ThoughtMarks | None
    calls: CallForm | None

    @classmethod
    def of(cls, template: str) -> Dialect:
        if CHANNEL in template:
            return cls(has_channels=True, thoughts=None, calls=None)
        thoughts = next((marks for marks in _THOUGHTS if marks.closing in template), None)
        return cls(has_channels=False, thoughts=thoughts, calls=call_form(template))

    @property
    def has_calls(self) -> bool:
        """Whether calls of tools can be read."""
        return self.has_channels or self.calls is not None

    @property
    def form(self) -> str:
        """The name of the form of calls; empty where there is none."""
        return "channels" if self.has_channels else self.calls.name if self.calls else ""

    def reader(self, prompt: str, *, tools: Sequence[Any], is_raw: bool) -> Reader:
        """For an answer to a rendered prompt. tools: those the request offers. is_raw: thoughts stay in the text."""
        if self.has_channels:
            return PlainReader() if is_raw else ChannelReader(has_calls=bool(tools))
        thoughts = None if is_raw else self.thoughts
        calls = _call_marks(self.calls, tools) if self.calls and tools else None
        if thoughts is None and calls is None:
            return PlainReader()
        is_thinking = thoughts is not None and prompt.rstrip().endswith(thoughts.opening)
        return TagReader(thoughts=thoughts, calls=calls, is_thinking=is_thinking)

    def ends_thoughts(self, prompt: str) -> Callable[[str], bool] | None:
        """Whether an answer so far has come to its proper text, past all thoughts; None where it begins with it."""
        if self.has_channels:
            return is_final
        if self.thoughts is None or not prompt.rstrip().endswith(self.thoughts.opening):
            return None
        closing = self.thoughts.closing
        return lambda text: closing in text

    def mark_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Tokens that spell a mark: readers have to see them, whatever kind of token they are."""
        return frozenset(ids[0] for mark in self._marks() if len(ids := tokenizer.encode(mark, add_special=False)) == 1)

    def _marks(self) -> list[str]:
        if self.has_channels:
            return list(MARKS)
        thoughts = [self.thoughts.opening, self.thoughts.closing] if self.thoughts else []
        return [*thoughts, *(self.calls.all_marks if self.calls else [])]


def _call_marks(form: CallForm, tools: Sequence[Any]) -> CallMarks:
    schemas = schemas_of(tools)
    return CallMarks(openings=dict(form.openings), read=lambda text: form.read(text, schemas), is_first=form.is_first)
