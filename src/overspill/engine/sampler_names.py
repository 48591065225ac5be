"""Which samplers run, in which order, by llama.cpp's names or letters."""

from __future__ import annotations

from collections.abc import Sequence

from overspill.engine.params import DEFAULT_SAMPLERS
from overspill.errors import UserError

_LETTERS = dict(zip("edskypmxt", DEFAULT_SAMPLERS, strict=True))
_ALIASES = {
    "nucleus": "top_p",
    "temp": "temperature",
    "typ": "typ_p",
    "typical": "typ_p",
    "typical_p": "typ_p",
}
_NOT_THERE = {"i": "infill", "a": "adaptive_p"}


def samplers_of(given: Sequence[str] | str | None) -> tuple[str, ...]:
    """Names as the engine has them; without any, the default order. UserError for a sampler there is none of."""
    if given is None:
        return DEFAULT_SAMPLERS
    if isinstance(given, str):
        return tuple(_LETTERS.get(letter) or _refuse(_NOT_THERE.get(letter, letter)) for letter in given)
    return tuple(_named(name) for name in given)


def _named(name: str) -> str:
    plain = name.lower().replace("-", "_")
    known = {sampler.replace("_", ""): sampler for sampler in DEFAULT_SAMPLERS}
    return _ALIASES.get(plain) or known.get(plain.replace("_", "")) or _refuse(name)


def _refuse(name: str) -> str:
    raise UserError(f"samplers: {name[:40]!r} is not supported, there are {', '.join(DEFAULT_SAMPLERS)}")
