"""Split files: from any part to all of them, as one set or not at all.

The number and count in the keys of each part must agree with its name, all parts of the set must be there, and
their tensors must add up to `split.tensors.count` without a name twice. Names are tried in the folder of the given
path first and, if the path is a symbolic link, in the folder it leads to.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from overspill.errors import UserError
from overspill.gguf.cursor import shown, shown_path
from overspill.gguf.part import Part, read_part

_NAME = re.compile(r"(?P<prefix>.*)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})(?P<suffix>\.gguf)", re.I | re.S)
_PIECE = re.compile(r"(?P<stem>.*?)[.-](?:part|split)-?(?P<number>[0-9]+)-?of-?(?P<count>[0-9]+)", re.I | re.S)
_MAX_LISTED = 50


@dataclass(frozen=True)
class SplitName:
    """A file name of the form `prefix-00002-of-00003.gguf`; `number` counts from 0."""

    folder: Path
    prefix: str
    number: int
    n_parts: int
    suffix: str

    @classmethod
    def of(cls, path: Path) -> SplitName | None:
        match = _NAME.fullmatch(path.name)
        if match is None:
            return None
        return cls(path.parent, match["prefix"], int(match["number"]) - 1, int(match["count"]), match["suffix"])

    def name_of(self, number: int) -> str:
        return f"{self.prefix}-{number + 1:05d}-of-{self.n_parts:05d}{self.suffix}"

    def missing(self) -> list[str]:
        """The names of the parts that are not in the folder."""
        names = map(self.name_of, range(self.n_parts))
        return [name for name in names if not os.path.exists(os.path.join(self.folder, name))]


def is_piece(path: Path) -> bool:
    """Whether the name says that this is one of several byte ranges of a file (`.part1of2`)."""
    match = _PIECE.search(path.name)
    return match is not None and int(match["count"]) > 1 and SplitName.of(path) is None


def whole_set(opened: Part) -> tuple[Part, ...]:
    """All parts in order, `opened` among them; `UserError` if they are not a complete, consistent set."""
    if opened.n_parts == 1:
        _check_single(opened)
        return (opened,)
    name = _find(opened)
    parts = tuple(opened if i == opened.number else _read_member(name, i) for i in range(opened.n_parts))
    _check_tensors(parts)
    return parts


def _check_single(opened: Part) -> None:
    name = SplitName.of(opened.path)
    if name is not None and name.n_parts > 1:
        raise _fail(
            opened,
            f"is part {name.number + 1} of {name.n_parts} by its name, but a whole file by its keys (no split.count): "
            "fetch the right part, or rename a whole file",
        )


def _find(opened: Part) -> SplitName:
    """The name whose parts all exist."""
    paths = [opened.path, *([opened.path.resolve()] if opened.path.is_symlink() else [])]
    names = [name for path in paths if (name := SplitName.of(path)) is not None]
    missing = {name: name.missing() for name in names if _agrees(name, opened)}
    for name, absent in missing.items():
        if not absent:
            return name
    raise _fail(opened, _why_incomplete(opened, names, missing))


def _why_incomplete(opened: Part, names: Sequence[SplitName], missing: dict[SplitName, list[str]]) -> str:
    """`names`: what the path and the path behind a link say; `missing`: of those that agree with the keys."""
    if opened.is_followed_by_gguf:
        return "holds several parts of a split file joined end to end, which cannot be read; fetch the single parts"
    is_part = f"is part {opened.number + 1} of {opened.n_parts} of a split file by its keys"
    if missing:
        return f"{is_part}; missing beside it: {_listed(next(iter(missing.values())))}; fetch all parts"
    if names:
        by_name = f"part {names[0].number + 1} of {names[0].n_parts} by its name"
        return f"{is_part}, but {by_name}: give the parts their original names"
    return (
        f"{is_part}, but its name does not end in -{opened.number + 1:05d}-of-{opened.n_parts:05d}.gguf, so the first "
        "part and the others cannot be found: give the parts their original names"
    )


def _agrees(name: SplitName, part: Part) -> bool:
    return (name.number, name.n_parts) == (part.number, part.n_parts)


def _read_member(name: SplitName, number: int) -> Part:
    part = read_part(name.folder / name.name_of(number))
    if (part.number, part.n_parts) != (number, name.n_parts):
        raise _fail(
            part,
            f"is part {part.number + 1} of {part.n_parts} by its keys, but part {number + 1} of {name.n_parts} by its "
            "name: fetch the right part",
        )
    return part


def _check_tensors(parts: Sequence[Part]) -> None:
    seen: dict[str, Part] = {}
    for part in parts:
        for name in part.table.tensors:
            if name in seen:
                both = f"in {shown_path(seen[name].path.name)} and here"
                raise _fail(part, f"duplicate tensor {shown(name)}, {both}: not of one set; fetch all parts again")
            seen[name] = part
    n_expected = parts[0].keys.u32("split.tensors.count")
    if len(seen) != n_expected:
        raise _fail(
            parts[0],
            f"tensor count {n_expected} in key split.tensors.count, but the {len(parts)} parts hold {len(seen)}: "
            "not of one set; fetch all parts again",
        )


def _listed(names: Sequence[str]) -> str:
    listed = ", ".join(shown_path(name) for name in names[:_MAX_LISTED])
    return listed if len(names) <= _MAX_LISTED else f"{listed} and {len(names) - _MAX_LISTED} more"


def _fail(part: Part, message: str) -> UserError:
    return UserError(f"{shown_path(part.path)}: {message}")
