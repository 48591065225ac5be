"""`overspill run` without a prompt: a conversation in the terminal, on the engine that the server uses too.

A line is a message; the answer comes as it is generated, thoughts dimmed. Ctrl-C stops an answer (what was said stays
in the conversation), the end of the input leaves. What the model or the template refuses is told, and the conversation
goes on without that message.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from overspill.commands.answering import answer
from overspill.commands.files import open_for_text
from overspill.commands.sampling import Sampling, with_fields_of_model
from overspill.commands.screen import loading_bar, on_interrupt
from overspill.engine.constraint import Constraint
from overspill.engine.request import Timings
from overspill.errors import UserError
from overspill.llm import LLM
from overspill.server.dialect import Dialect
from overspill.server.reading import Part, Reader, Said, Thought
from overspill.text.chat import ChatTemplate
from overspill.text.constrain import Deferred

_WELCOME = "Ctrl-C stops an answer, /reset forgets the conversation, /exit or Ctrl-D leaves; a \\ at the end goes on."
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


def run_chat(
    model: Path, fields: Mapping[str, Any], *, system: str | None, stop: Sequence[str], options: Mapping[str, Any]
) -> None:
    """Load, then talk until the input ends. fields: of a request, from the flags."""
    if "trace" in options:
        raise UserError("--trace: a conversation's trace would have no end; give a prompt with -p or -f")
    source = open_for_text(model)
    sampling = Sampling.of(with_fields_of_model(fields, source.keys))
    template = ChatTemplate.from_keys(source.keys)
    with loading_bar() as progress:
        llm = LLM(source, progress=progress, **options)
    with llm, on_interrupt(_nothing):
        print(_WELCOME, file=sys.stderr)
        chat = _Chat(llm, template, sampling, system, stop)
        for line in _lines():
            if line in ("/exit", "/quit"):
                return
            if line == "/reset":
                chat.reset()
                print("(forgotten)", file=sys.stderr)
            elif line:
                chat.say(line)


class _Chat:
    """A conversation so far."""

    def __init__(
        self, llm: LLM, template: ChatTemplate, sampling: Sampling, system: str | None, stop: Sequence[str]
    ) -> None:
        self._llm = llm
        self._template = template
        self._dialect = Dialect.of(template.all_source)
        self._params = sampling.params_for(llm.tokenizer)
        self._start = sampling.constraint_for(llm.tokenizer)
        self._stop = stop
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self._messages: list[dict[str, Any]] = list(self._first)

    def reset(self) -> None:
        self._messages = list(self._first)

    def say(self, text: str) -> None:
        """A message, and the answer to it."""
        messages = [*self._messages, {"role": "user", "content": text}]
        try:
            self._messages = [*messages, self._answer(messages)]
        except UserError as error:
            print(f"overspill: {error}", file=sys.stderr)

    def _answer(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        tokenizer = self._llm.tokenizer
        segments = self._template.render_marked(messages, special_texts=tokenizer.special_texts)
        prompt = "".join(segment.text for segment in segments)
        screen = _Screen(self._dialect.reader(prompt, tools=(), is_raw=False))
        shown_ids = self._dialect.mark_ids(tokenizer)
        request = self._llm.request(tokenizer.encode_marked(segments), self._params, self._constraint(prompt))
        with on_interrupt(lambda: self._llm.cancel(request.id)):
            answered = answer(self._llm, request, screen.show, stop=self._stop, shown_ids=shown_ids)
        screen.finish()
        print(_told(answered.timings, answered.finish_reason), file=sys.stderr)
        return screen.message

    def _constraint(self, prompt: str) -> Constraint | None:
        """Of one answer, from where its thoughts end."""
        is_over = self._dialect.ends_thoughts(prompt)
        if self._start is None or is_over is None:
            return self._start() if self._start else None
        return Deferred(self._start(), self._llm.tokenizer, is_over)


class _Screen:
    """Shows an answer, and remembers it as a message."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._is_dim = False
        self._said: list[str] = []
        self._thoughts: list[str] = []

    @property
    def message(self) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(self._said)}
        return message | ({"reasoning_content": "".join(self._thoughts)} if self._thoughts else {})

    def show(self, text: str) -> None:
        for part in self._reader.push(text):
            self._print(part)

    def finish(self) -> None:
        for part in self._reader.finish():
            self._print(part)
        print(self._shade(is_dim=False), flush=True)

    def _print(self, part: Part) -> None:
        match part:
            case Thought():
                self._thoughts.append(part.text)
                print(self._shade(is_dim=True), part.text, sep="", end="", flush=True)
            case Said():
                gap = "\n\n" if self._thoughts and not self._said else ""
                self._said.append(part.text)
                print(self._shade(is_dim=False), gap, part.text, sep="", end="", flush=True)

    def _shade(self, *, is_dim: bool) -> str:
        if is_dim == self._is_dim or not sys.stdout.isatty():
            return ""
        self._is_dim = is_dim
        return _DIM if is_dim else _PLAIN


def _lines() -> Iterator[str]:
    """What the user types: a line, or several that end with a backslash each but the last."""
    is_terminal = sys.stdin.isatty()
    if is_terminal and find_spec("readline"):
        import readline  # noqa: F401 - makes input() an editor with a history
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")
    begun: list[str] = []
    while True:
        try:
            with on_interrupt(_leave_the_line):
                line = input(("… " if begun else "> ") if is_terminal else "")
        except EOFError:
            return
        except KeyboardInterrupt:
            begun.clear()
            print("\n(/exit or Ctrl-D leaves)", file=sys.stderr)
            continue
        begun.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            yield "\n".join(begun).strip()
            begun.clear()


def _nothing() -> None:
    """What an interrupt does between a message and its answer."""


def _leave_the_line() -> None:
    raise KeyboardInterrupt


def _told(t: Timings, reason: str) -> str:
    if reason == "cancelled":
        return "(stopped)"
    ended = "" if reason == "stop" else f", ended by {reason}"
    return (
        f"({t.cache_n} + {t.prompt_n} tokens read at {t.prompt_per_second:.1f} t/s, "
        f"{t.predicted_n} written at {t.predicted_per_second:.1f} t/s{ended})"
    )
