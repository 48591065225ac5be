"""How `run` chooses tokens: its flags as the engine's parameters, a grammar and breakers for the model at hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from overspill.engine.params import SamplingParams
from overspill.engine.sampler_names import samplers_of
from overspill.errors import UserError
from overspill.text.breakers import DEFAULT_BREAKERS, breakers_of
from overspill.text.constrain import Grammars, Matching
from overspill.text.gbnf import lark_of
from overspill.text.tokenizer import Tokenizer

StartConstraint = Callable[[], Matching]

_OF_TEXT = ("dry_sequence_breakers", "grammar", "json_schema")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """params: all but what needs the model's vocabulary. breakers: of DRY, texts. grammar, json_schema: texts."""

    params: SamplingParams
    breakers: tuple[str, ...]
    grammar: str | None
    json_schema: str | None

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Sampling:
        """From fields of a request; UserError for what cannot be."""
        known = {name: value for name, value in fields.items() if name not in _OF_TEXT}
        known["max_tokens"] = known.pop("n_predict", -1)
        known["samplers"] = samplers_of(known.pop("samplers", None))
        known["seed"] = None if (seed := known.pop("seed", -1)) == -1 else seed
        if (grammar := fields.get("grammar")) is not None:
            lark_of(grammar)
        if known.get("ignore_eos") and (grammar or "json_schema" in fields):
            raise UserError("--ignore-eos: an answer that follows a grammar ends with it; leave one of them out")
        return cls(
            params=SamplingParams(**known),
            breakers=tuple(fields.get("dry_sequence_breakers", DEFAULT_BREAKERS)),
            grammar=grammar,
            json_schema=fields.get("json_schema"),
        )

    def params_for(self, tokenizer: Tokenizer) -> SamplingParams:
        """With the breakers in the model's tokens."""
        words = [word for word in self.breakers if word and self.params.dry_multiplier]
        return replace(self.params, dry_breakers=tuple(s for word in words for s in breakers_of(tokenizer, word)))

    def constraint_for(self, tokenizer: Tokenizer) -> StartConstraint | None:
        """What makes the constraint of an answer, if there is one."""
        if self.grammar is not None:
            return Grammars(tokenizer).gbnf(self.grammar).start
        return None if self.json_schema is None else Grammars(tokenizer).json_schema(self.json_schema).start
