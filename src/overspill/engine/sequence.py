"""A request on its way through the engine. Pure Python, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from overspill.engine.request import Request


@dataclass(slots=True, eq=False)
class Sequence:
    """A request and how far it has come.

    ids: prompt, then generated. n_done: how many of them have cells. n_reused: how many cells were there already.
    While decoding, exactly the last id has no cell yet.
    """

    request: Request
    ids: list[int] = field(init=False)
    stop_ids: frozenset[int] = field(init=False)
    slot: int | None = None
    n_done: int = 0
    n_reused: int = 0

    def __post_init__(self) -> None:
        self.ids = list(self.request.prompt_ids)
        self.stop_ids = self.request.stop_ids | self.request.params.stop_ids

    @property
    def n_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def n_generated(self) -> int:
        return len(self.ids) - self.n_prompt

    @property
    def is_decoding(self) -> bool:
        return self.n_done >= self.n_prompt
