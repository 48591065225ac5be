"""Fields of a request to the engine's parameters; what is not served is refused by name."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from overspill.engine.params import SamplingParams
from overspill.engine.sampler_names import samplers_of
from overspill.server.errors import ApiError
from overspill.server.fields import ChatBody, SamplingFields, TextBody
from overspill.server.prompts import checked_id
from overspill.text.breakers import breakers_of
from overspill.text.tokenizer import Tokenizer

RANDOM_SEED = 2**32 - 1
_DRY_BASE = 1.75
_TOP_LOGPROBS = 20


def sampling_params(body: SamplingFields, tokenizer: Tokenizer, *, n_probs: int) -> SamplingParams:
    """What the engine is to do. ApiError 400 naming a field that would change the answer but is not served."""
    for field in unserved_fields(body):
        raise ApiError(400, f"Field '{field}': not supported by this server; leave it out")
    return SamplingParams(
        temperature=body.temperature,
        dynatemp_range=body.dynatemp_range,
        dynatemp_exponent=body.dynatemp_exponent,
        top_k=body.top_k,
        top_p=body.top_p,
        min_p=body.min_p,
        typical_p=body.typical_p,
        top_n_sigma=body.top_n_sigma,
        min_keep=body.min_keep,
        xtc_probability=body.xtc_probability,
        xtc_threshold=body.xtc_threshold,
        repeat_penalty=body.repeat_penalty,
        repeat_last_n=body.repeat_last_n,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        dry_multiplier=body.dry_multiplier,
        dry_base=body.dry_base if body.dry_base >= 1 else _DRY_BASE,
        dry_allowed_length=body.dry_allowed_length,
        dry_penalty_last_n=body.dry_penalty_last_n,
        dry_breakers=_breakers(body, tokenizer),
        mirostat=body.mirostat,
        mirostat_tau=body.mirostat_tau,
        mirostat_eta=body.mirostat_eta,
        samplers=samplers_of(body.samplers),
        seed=_seed(body.seed),
        max_tokens=body.most_tokens,
        ignore_eos=body.ignore_eos,
        logit_bias=tuple(_biases(tokenizer, body.logit_bias)),
        n_probs=n_probs,
        post_sampling_probs=body.post_sampling_probs,
    )


def unserved_fields(body: SamplingFields) -> Iterator[str]:
    """Fields whose values ask for what this server does not do."""
    asked = {
        "grammar_lazy": body.grammar_lazy,
        "n_indent": body.n_indent > 0,
        "lora": bool(body.lora),
    }
    yield from (field for field, is_asked in asked.items() if is_asked)
    if isinstance(body, TextBody):
        yield from _unserved_of_text(body)
    if isinstance(body, ChatBody):
        yield from _unserved_of_chat(body)


def _unserved_of_text(body: TextBody) -> Iterator[str]:
    asked = {
        "echo": body.echo and body.listed is not None,
        "best_of": body.best_of > body.n,
        "suffix": body.suffix != "",
    }
    yield from (field for field, is_asked in asked.items() if is_asked)


def _unserved_of_chat(body: ChatBody) -> Iterator[str]:
    asked = {
        "functions": bool(body.functions),
        "reasoning_budget_tokens": body.reasoning_budget_tokens > 0,
    }
    yield from (field for field, is_asked in asked.items() if is_asked)


def _breakers(body: SamplingFields, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    words = body.dry_sequence_breakers if body.dry_multiplier else []
    return tuple(sequence for word in words if word for sequence in breakers_of(tokenizer, word))


def check_tools(body: ChatBody, *, has_calls: bool) -> None:
    """ApiError 400 for tools where calls cannot be read, or not in a stream with logprobs."""
    if body.offered_tools and not has_calls:
        raise ApiError(400, "Field 'tools': not supported by this server for the calls of this model; leave it out")
    if body.offered_tools and (body.logprobs or body.n_probs) and body.stream:
        raise ApiError(400, "Field 'logprobs': not supported by this server together with tools in a stream")


def chat_probs(body: ChatBody) -> int | None:
    """How many of the likeliest tokens to list; None where no logprobs are wanted."""
    if body.logprobs:
        return _TOP_LOGPROBS if body.top_logprobs is None else body.top_logprobs
    if body.top_logprobs:
        raise ApiError(400, "Field 'top_logprobs': it needs 'logprobs' to be true")
    return body.n_probs or None


def _seed(seed: int) -> int | None:
    return None if seed in (-1, RANDOM_SEED) else seed % 2**32 if seed < 0 else seed


def _biases(tokenizer: Tokenizer, given: list[Any] | dict[str, Any]) -> Iterator[tuple[int, float]]:
    pairs = list(given.items()) if isinstance(given, dict) else given
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise ApiError(400, "Field 'logit_bias': give pairs [token, bias], or an object of them")
        token, bias = pair
        for token_id in _biased_ids(tokenizer, token, is_key=isinstance(given, dict)):
            yield token_id, _bias(bias)


def _biased_ids(tokenizer: Tokenizer, token: Any, *, is_key: bool) -> list[int]:
    if is_key and token.isascii() and token.isdigit() and len(token) < 20:
        return [checked_id(tokenizer, int(token), "logit_bias")]
    if isinstance(token, str):
        return tokenizer.encode(token, add_special=False)
    return [checked_id(tokenizer, token, "logit_bias")]


def _bias(value: Any) -> float:
    if value is False:
        return -math.inf
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
        raise ApiError(400, f"Field 'logit_bias': a bias is a number or false, not {str(value)[:60]}")
    return float(value)
