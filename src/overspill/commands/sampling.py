"""How tokens are chosen where a flag or a request does not say: what the model's file wants; and `run`'s flags as the
engine's parameters, a grammar and breakers for the model at hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from overspill.engine.params import SamplingParams
from overspill.engine.sampler_names import samplers_of
from overspill.errors import UserError
from overspill.gguf import Keys
from overspill.text.breakers import DEFAULT_BREAKERS, breakers_of
from overspill.text.constrain import Grammars, Matching
from overspill.text.gbnf import lark_of
from overspill.text.tokenizer import Tokenizer

StartConstraint = Callable[[], Matching]

_OF_TEXT = ("dry_sequence_breakers", "grammar", "json_schema")
_NUMBERS_OF_MODELS = {
    "temperature": "temp",
    "top_p": "top_p",
    "min_p": "min_p",
    "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold",
    "repeat_penalty": "penalty_repeat",
    "mirostat_tau": "mirostat_tau",
    "mirostat_eta": "mirostat_eta",
}
_COUNTS_OF_MODELS = {"top_k": "top_k", "repeat_last_n": "penalty_last_n", "mirostat": "mirostat"}
_ALL_THERE_ARE = 2**31 - 1


def with_fields_of_model(fields: Mapping[str, Any], keys: Keys) -> dict[str, Any]:
    """Fields of a request, from flags, completed by what a file's `general.sampling` keys say, as in llama.cpp."""
    return fields_of_model(keys) | dict(fields)


def fields_of_model(keys: Keys) -> dict[str, Any]:
    """What a file's `general.sampling` keys say, as fields of a request."""
    said = keys.scoped("general.sampling")
    fields: dict[str, Any] = {field: said.f32(key, None) for field, key in _NUMBERS_OF_MODELS.items()}
    counts = {field: said.f32(key, None) for field, key in _COUNTS_OF_MODELS.items()}
    fields |= {field: None if n is None else int(n) for field, n in counts.items()}
    if (fields["top_k"] or 0) < 0:
        fields["top_k"] = 0
    if (fields["repeat_last_n"] or 0) < 0:
        fields["repeat_last_n"] = _ALL_THERE_ARE
    if sequence := said.text("sequence", ""):
        fields["samplers"] = [name for name in sequence.split(";") if name]
    return {field: value for field, value in fields.items() if value is not None}


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
