"""Chat messages to a prompt, by the template that the model file carries.

Messages are brought into the form the template takes (`messages`), the template runs in a sandbox (`sandbox`), and
`render_marked` tells its markup from what clients wrote (`marks`). A BOS that a template prints stays in the text: the
tokenizer adds none where one is already there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any

from overspill.errors import UserError
from overspill.gguf.keys import Keys
from overspill.text.budget import Limits
from overspill.text.marks import Guards, Marks
from overspill.text.messages import Message, Shape, copied, normalise, odd_arguments, probe_shape
from overspill.text.sandbox import Program
from overspill.text.special import Segment, SpecialTexts

KEY = "tokenizer.chat_template"
TOOL_KEY = KEY + ".tool_use"
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PROBE_LIMITS = Limits(n_steps=50_000, seconds=0.5)
_SAMPLE_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "f", "parameters": {"type": "object", "properties": {}}},
}


class ChatTemplate:
    """A model's chat template. Immutable, safe to share between threads."""

    def __init__(
        self,
        source: str = CHATML,
        *,
        tool_source: str | None = None,
        bos_text: str = "",
        eos_text: str = "",
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`tool_source` is used instead of `source` where tools are given; `now` is what the templates' dates show."""
        self._plain = _Variant(source, KEY, now)
        self._with_tools = self._plain if tool_source is None else _Variant(tool_source, TOOL_KEY, now)
        self._constants = {"bos_token": bos_text, "eos_token": eos_text, "documents": None}
        self._now = now

    @classmethod
    def from_keys(cls, keys: Keys) -> ChatTemplate:
        """The template of a model file, ChatML if it has none. A template that does not compile is a `UserError`."""
        is_spm = keys.text("tokenizer.ggml.model", default="") == "llama"
        return cls(
            keys.text(KEY, default=CHATML),
            tool_source=keys.text(TOOL_KEY, default=None),
            bos_text=_token_text(keys, "bos", 1 if is_spm else None),
            eos_text=_token_text(keys, "eos", 2 if is_spm else None),
        )

    @property
    def source(self) -> str:
        """The template for conversations without tools."""
        return self._plain.source

    @property
    def all_source(self) -> str:
        """The template for conversations without tools and, where it is another one, that for those with tools."""
        return "\n".join(dict.fromkeys((self._plain.source, self._with_tools.source)))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for `messages` (OpenAI's form). `template_kwargs` are further variables for the template, such as
        `enable_thinking`. `UserError` for malformed messages and for whatever the template refuses or fails at."""
        template = self._with_tools if tools else self._plain
        variables = self._variables(tools, add_generation_prompt, template_kwargs)
        return template.prompt(variables, normalise(messages, template.shape))

    def render_marked(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        special_texts: SpecialTexts,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Segment]:
        """As `render`, cut so that no message can spell one of the tokenizer's `special_texts`; see `marks`.

        The segments joined are the rendered prompt, except where the template itself looks for special tokens in a
        message that forges them: it then sees ordinary text, and the prompt is the one for that.
        """
        template = self._with_tools if tools else self._plain
        variables = self._variables(tools, add_generation_prompt, template_kwargs)
        normal = normalise(messages, template.shape)
        plain = template.prompt(variables, normal)
        guards = _guards(special_texts, template.source)
        marks = Marks.unused_in(plain, json.dumps([normal, variables], ensure_ascii=False))
        guarded = variables | {"tools": marks.marked_tools(tools, guards) if tools else None}

        def marked(has_ends: bool) -> str:
            return template.run(guarded | {"messages": marks.marked_messages(normal, guards, has_ends=has_ends)})

        try:
            with_ends = marked(has_ends=True)
            is_same = marks.removed_from(with_ends) == plain
        except UserError:  # a template that cannot bear a mark at the end of a text
            is_same = False
        return marks.segments(with_ends if is_same else marked(has_ends=False))

    def _variables(
        self,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        extra = copied(template_kwargs or {}, "chat_template_kwargs")
        if taken := extra.keys() & {"messages", "tools", "add_generation_prompt"}:
            raise UserError(f"chat_template_kwargs has {min(taken)!r}, which has a place of its own in a request")
        if not all(isinstance(tool, Mapping) for tool in tools or ()):
            raise UserError("tools is no list of objects")
        dates = {"date_string": f"{self._now():%d %b %Y}", "datetime": f"{self._now():%b %d %Y}"}
        given = {"tools": copied(tools, "tools") if tools else None, "add_generation_prompt": add_generation_prompt}
        return self._constants | dates | given | dict(extra)


def _token_text(keys: Keys, name: str, default_id: int | None) -> str:
    texts = keys.get("tokenizer.ggml.tokens")
    i = keys.u32(f"tokenizer.ggml.{name}_token_id", default=default_id)
    if not isinstance(texts, Sequence) or i is None or i >= len(texts):
        return ""
    return str(texts[i])


@lru_cache(maxsize=8)
def _guards(special_texts: SpecialTexts, source: str) -> Guards:
    return Guards.of(special_texts, source)


class _Variant:
    """One of a model's templates, and what it takes."""

    def __init__(self, source: str, name: str, now: Callable[[], datetime]) -> None:
        self.source = source
        self.run = Program(source, name=name, now=now).run

    @cached_property
    def shape(self) -> Shape:
        return probe_shape(self.source, self._probe)

    def prompt(self, variables: Mapping[str, Any], messages: list[Message]) -> str:
        """The prompt for messages in the template's form; a failure names arguments that it may be due to."""
        try:
            return self.run({**variables, "messages": messages})
        except UserError as error:
            if (where := odd_arguments(messages, self.shape)) is None:
                raise
            raise UserError(f"chat template: {where} is no JSON object, which the template wants ({error})") from None

    def _probe(self, messages: list[Message]) -> str:
        """A rendering without tools, or with one if the template is made for tools only."""
        basics = {"bos_token": "", "eos_token": "", "documents": None, "add_generation_prompt": True}
        try:
            return self.run(basics | {"tools": None, "messages": messages}, PROBE_LIMITS)
        except UserError:
            return self.run(basics | {"tools": [_SAMPLE_TOOL], "messages": messages}, PROBE_LIMITS)
