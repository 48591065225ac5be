"""Flags that say how tokens are chosen, for `run` and as the defaults of `serve`; spelled as in llama.cpp.

Fields are named as in llama-server's requests. What a value may be is checked by `SamplingParams`.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from overspill.errors import UserError


class SamplingFlag(NamedTuple):
    """flags: the long one first. kind: of the value; a list may be given several times."""

    flags: tuple[str, ...]
    kind: Any
    doc: str


SAMPLING_FLAGS: Final[dict[str, SamplingFlag]] = {
    "n_predict": SamplingFlag(("--n-predict", "--predict", "-n"), int, "most tokens to generate; -1: no limit"),
    "temperature": SamplingFlag(("--temp", "--temperature"), float, "0: greedy (0.8)"),
    "dynatemp_range": SamplingFlag(("--dynatemp-range",), float, "the temperature moves so far with the entropy (0)"),
    "dynatemp_exponent": SamplingFlag(("--dynatemp-exp",), float, "curve of that (1)"),
    "top_k": SamplingFlag(("--top-k",), int, "0: off (40)"),
    "top_p": SamplingFlag(("--top-p",), float, "1: off (0.95)"),
    "min_p": SamplingFlag(("--min-p",), float, "0: off (0.05)"),
    "typical_p": SamplingFlag(("--typical", "--typical-p"), float, "1: off (1)"),
    "top_n_sigma": SamplingFlag(("--top-nsigma", "--top-n-sigma"), float, "0 and below: off (-1)"),
    "xtc_probability": SamplingFlag(("--xtc-probability",), float, "0: off (0)"),
    "xtc_threshold": SamplingFlag(("--xtc-threshold",), float, "above 0.5: off (0.1)"),
    "repeat_last_n": SamplingFlag(("--repeat-last-n",), int, "tokens the penalties look at (64)"),
    "repeat_penalty": SamplingFlag(("--repeat-penalty",), float, "1: off (1)"),
    "presence_penalty": SamplingFlag(("--presence-penalty",), float, "0: off (0)"),
    "frequency_penalty": SamplingFlag(("--frequency-penalty",), float, "0: off (0)"),
    "dry_multiplier": SamplingFlag(("--dry-multiplier",), float, "0: off (0)"),
    "dry_base": SamplingFlag(("--dry-base",), float, "growth of the penalty by length (1.75)"),
    "dry_allowed_length": SamplingFlag(("--dry-allowed-length",), int, "repetitions shorter than this go free (2)"),
    "dry_penalty_last_n": SamplingFlag(("--dry-penalty-last-n",), int, "tokens DRY looks at; -1: all (64)"),
    "dry_sequence_breakers": SamplingFlag(
        ("--dry-sequence-breaker",), list[str] | None, "text no repetition reaches across; repeatable; none: no such"
    ),
    "mirostat": SamplingFlag(("--mirostat",), int, "1 or 2: instead of the other samplers (0)"),
    "mirostat_eta": SamplingFlag(("--mirostat-lr",), float, "learning rate (0.1)"),
    "mirostat_tau": SamplingFlag(("--mirostat-ent",), float, "surprise to aim at, bits (5)"),
    "samplers": SamplingFlag(("--samplers",), str, "which samplers in which order, separated by ';'"),
    "sampler_letters": SamplingFlag(("--sampling-seq", "--sampler-seq"), str, "the same as letters (edskypmxt)"),
    "seed": SamplingFlag(("--seed", "-s"), int, "of the sampler; -1: random"),
    "ignore_eos": SamplingFlag(("--ignore-eos",), bool, "never end by itself"),
    "grammar": SamplingFlag(("--grammar",), str, "GBNF grammar that answers follow"),
    "grammar_file": SamplingFlag(("--grammar-file",), str, "the same, from a file"),
    "json_schema": SamplingFlag(("--json-schema", "-j"), str, "JSON schema that answers follow; {}: any object"),
    "json_schema_file": SamplingFlag(("--json-schema-file", "-jf"), str, "the same, from a file"),
}


def sampling_fields(given: dict[str, Any]) -> dict[str, Any]:
    """What was given, as fields of a request: files read, the two ways to name samplers joined."""
    fields = {name: value for name, value in given.items() if value is not None and value is not False and value != []}
    for name in ("grammar", "json_schema"):
        if f"{name}_file" in fields:
            fields[name] = _read(fields.pop(f"{name}_file"), SAMPLING_FLAGS[f"{name}_file"].flags[0])
    if "grammar" in fields and "json_schema" in fields:
        raise UserError("--grammar, --json-schema: they exclude each other; leave one out")
    if "sampler_letters" in fields:
        fields["samplers"] = fields.pop("sampler_letters")
    elif "samplers" in fields:
        fields["samplers"] = [name for name in fields["samplers"].split(";") if name]
    if fields.get("dry_sequence_breakers") == ["none"]:
        fields["dry_sequence_breakers"] = [""]
    return fields


def _read(path: str, flag: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{flag} {path}: cannot be read as UTF-8 text ({error})") from None
