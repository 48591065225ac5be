"""GBNF, llama.cpp's grammar notation, to the Lark dialect that llguidance reads.

Every character becomes a terminal of its own. llguidance's lexer takes the longest terminal it can, GBNF knows no
lexer: with longer terminals `[a-z]+ "z"` could never be finished. So the language stays exactly that of the GBNF text.
Source of the notation: llama.cpp, grammars/README.md. Tokens in angle brackets are refused by name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from overspill.errors import UserError

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_BLANK = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_BLANK_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_REPEATED = re.compile(r"\{\s*(\d+)\s*(?:(,)\s*(\d*)\s*)?\}")
_HEX = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]"}
_MOST_REPETITIONS = 2000
_MOST_DEPTH = 200


def lark_of(gbnf: str) -> str:
    """The same language in Lark. UserError in one line that says where it is no GBNF."""
    reader = _Reader(gbnf)
    rules = reader.rules()
    if "root" not in rules:
        raise UserError("grammar: there is no rule 'root', which the text would begin with")
    for name, line in reader.used.items():
        if name not in rules:
            raise UserError(f"grammar: line {line}: rule {name!r} is used but not defined")
    lines = [f"{reader.symbol(name)}: {body}" for name, body in rules.items()]
    return "\n".join([f"start: {reader.symbol('root')}", *lines])


@dataclass
class _Reader:
    """Reads from `at` on. used: names of rules, with the line that first uses each."""

    text: str
    at: int = 0
    used: dict[str, int] = field(default_factory=dict)
    _symbols: dict[str, str] = field(default_factory=dict)

    def symbol(self, name: str) -> str:
        """A rule's name in Lark."""
        return self._symbols.setdefault(name, f"r{len(self._symbols)}")

    def rules(self) -> dict[str, str]:
        found: dict[str, str] = {}
        self._skip(_BLANK_LINES)
        while self.at < len(self.text):
            name = self._name()
            self._skip(_BLANK)
            if not self.text.startswith("::=", self.at):
                self._fail("'::=' expected")
            self.at += 3
            self._skip(_BLANK_LINES)
            found[name] = self._alternatives(depth=0)
            if self.at < len(self.text) and self._next not in "\r\n":
                self._fail("the end of the line expected")
            self._skip(_BLANK_LINES)
        return found

    @property
    def _next(self) -> str:
        return self.text[self.at : self.at + 1]

    @property
    def _line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1

    def _fail(self, what: str) -> None:
        found = repr(self.text[self.at : self.at + 12]) if self._next else "the end"
        raise UserError(f"grammar: line {self._line}: {what}, {found} found")

    def _skip(self, pattern: re.Pattern[str]) -> None:
        match = pattern.match(self.text, self.at)
        self.at = self.at if match is None else match.end()

    def _name(self) -> str:
        match = _NAME.match(self.text, self.at)
        if match is None:
            self._fail("the name of a rule expected")
            return ""
        self.at = match.end()
        return match[0]

    def _alternatives(self, depth: int) -> str:
        if depth > _MOST_DEPTH:
            self._fail(f"parentheses go deeper than {_MOST_DEPTH}")
        sequences = [self._sequence(depth)]
        while self._next == "|":
            self.at += 1
            self._skip(_BLANK_LINES)
            sequences.append(self._sequence(depth))
        return " | ".join(sequences)

    def _sequence(self, depth: int) -> str:
        items: list[str] = []
        blank = _BLANK_LINES if depth else _BLANK
        self._skip(blank)
        while self._next and self._next not in "|)\r\n":
            item = self._item(depth)
            self._skip(blank)
            items.append(self._repeated(item))
            self._skip(blank)
        return " ".join(items) or '""'

    def _item(self, depth: int) -> str:
        match self._next:
            case '"':
                return self._literal()
            case "[":
                return self._one_of()
            case ".":
                self.at += 1
                return "/(?s:.)/"
            case "(":
                self.at += 1
                inner = self._alternatives(depth + 1)
                if not self.text.startswith(")", self.at):
                    self._fail("')' expected")
                self.at += 1
                return f"({inner})"
            case "<" | "!":
                self._fail("tokens in angle brackets are not supported")
        line, name = self._line, self._name()
        self.used.setdefault(name, line)
        return self.symbol(name)

    def _repeated(self, item: str) -> str:
        if self._next and self._next in "*+?":
            self.at += 1
            return f"({item}){self.text[self.at - 1]}"
        if self._next != "{":
            return item
        match = _REPEATED.match(self.text, self.at)
        if match is None:
            self._fail("a repetition such as {2}, {2,} or {2,5} expected")
            return ""
        least = int(match[1])
        most = least if match[2] is None else int(match[3]) if match[3] else None
        if max(least, most or 0) > _MOST_REPETITIONS or (most is not None and most < least):
            self._fail(f"a repetition counts up, to at most {_MOST_REPETITIONS}")
        self.at = match.end()
        return f"({item}){{{least},{'' if most is None else most}}}" if most != 0 else '""'

    def _literal(self) -> str:
        self.at += 1
        characters = []
        while self._next != '"':
            characters.append(f"/[{_in_class(self._character())}]/")
        self.at += 1
        return f"({' '.join(characters)})" if characters else '""'

    def _one_of(self) -> str:
        self.at += 1
        is_negated = self._next == "^"
        self.at += is_negated
        ranges = []
        while self._next != "]":
            first = last = self._character()
            if self._next == "-" and self.text[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                last = self._character()
            if last < first:
                self._fail("a range of characters goes up")
            ranges.append(f"{_in_class(first)}-{_in_class(last)}")
        self.at += 1
        if not ranges:
            return "/(?s:.)/" if is_negated else "/[^\\x{0}-\\x{10ffff}]/"
        return f"/[{'^' if is_negated else ''}{''.join(ranges)}]/"

    def _character(self) -> str:
        if not self._next or self._next in "\r\n":
            self._fail("the rest of a text or of a set of characters expected")
        self.at += 1
        first = self.text[self.at - 1]
        if first != "\\":
            return first
        kind = self._next
        if kind in _ESCAPES and kind:
            self.at += 1
            return _ESCAPES[kind]
        return self._hexadecimal(kind)

    def _hexadecimal(self, kind: str) -> str:
        n = _HEX.get(kind, 0)
        digits = self.text[self.at + 1 : self.at + 1 + n]
        if not n or not re.fullmatch(f"[0-9A-Fa-f]{{{n}}}", digits):
            self._fail("an escape such as \\n, \\x41 or \\u00e9 expected")
        code = int(digits, 16)
        if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            self._fail("there is no such character")
        self.at += 1 + n
        return chr(code)


def _in_class(character: str) -> str:
    """A character inside the brackets of a regular expression."""
    return f"\\x{{{ord(character):x}}}"
