"""llama-server's own format: POST /completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from overspill.engine.params import SamplingParams
from overspill.server.answers import Answer, Piece
from overspill.server.fields import NativeBody
from overspill.server.formats import UnnamedEvents, progress_of, timings_dict, timings_so_far
from overspill.server.generation import Job, Progress
from overspill.server.params import RANDOM_SEED
from overspill.text.tokenizer import Tokenizer


class NativeFormat(UnnamedEvents):
    """One object per answer; a list of them where several were asked for."""

    marks_end = False

    def __init__(self, body: NativeBody, job: Job, tokenizer: Tokenizer, model: str) -> None:
        self._body = body
        self._job = job
        self._tokenizer = tokenizer
        self._model = model

    def progress(self, answer: Answer, progress: Progress) -> list[dict[str, Any]]:
        if not self._body.return_progress:
            return []
        return [self._partial(answer, Piece("", [], [])) | progress_of(self._body, progress)]

    def piece(self, answer: Answer, piece: Piece) -> list[dict[str, Any]]:
        return [self._partial(answer, piece) | timings_so_far(self._body, answer)]

    def end(self, answer: Answer, piece: Piece) -> list[dict[str, Any]]:
        held_back = self.piece(answer, piece) if piece.text or piece.logprobs else []
        told: dict[str, Any] = {"content": "", "tokens": []}
        if answer.has_logprobs:
            told["completion_probabilities"] = []
        return [*held_back, chosen(self._result(answer) | told, self._body.response_fields)]

    def closing(self, answers: Sequence[Answer]) -> list[dict[str, Any]]:
        return []

    def whole(self, answers: Sequence[Answer]) -> Any:
        results = [chosen(self._result(answer), self._body.response_fields) for answer in answers]
        return results[0] if len(results) == 1 else results

    def _partial(self, answer: Answer, piece: Piece) -> dict[str, Any]:
        partial = {
            "index": answer.index,
            "content": piece.text,
            "tokens": piece.token_ids,
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": len(answer.token_ids),
            "tokens_evaluated": len(answer.prompt_ids),
        }
        return partial | ({"completion_probabilities": piece.logprobs} if answer.has_logprobs else {})

    def _result(self, answer: Answer) -> dict[str, Any]:
        assert answer.done is not None
        n_tokens = len(answer.prompt_ids) + len(answer.token_ids)
        result = {
            "index": answer.index,
            "content": answer.text,
            "tokens": answer.token_ids if self._body.return_tokens else [],
            "id_slot": -1 if answer.done.slot is None else answer.done.slot,
            "stop": True,
            "model": self._model,
            "tokens_predicted": len(answer.token_ids),
            "tokens_evaluated": len(answer.prompt_ids),
            "generation_settings": settings_dict(self._job.params, self._body.stop)
            | {
                "stream": self._body.stream,
                "timings_per_token": self._body.timings_per_token,
                "seed": self._seed(answer),
                "dry_sequence_breakers": self._body.dry_sequence_breakers,
            },
            "prompt": self._tokenizer.decode(answer.prompt_ids, skip_special=False),
            "has_new_line": "\n" in answer.text,
            "truncated": answer.is_limited and len(answer.token_ids) != self._job.params.max_tokens,
            "stop_type": _stop_type(answer),
            "stopping_word": answer.stopped_by or "",
            "tokens_cached": n_tokens - 1 if answer.token_ids else n_tokens,
            "timings": timings_dict(answer.done.timings),
        }
        return result | ({"completion_probabilities": answer.logprobs} if answer.has_logprobs else {})

    def _seed(self, answer: Answer) -> int:
        """What drew the answer, so that it can be drawn again."""
        assert answer.done is not None
        return RANDOM_SEED if answer.done.seed is None else answer.done.seed


def chosen(result: dict[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """The fields that `response_fields` names, all if it names none; `a/b` is b of a, under its own name."""
    if not paths:
        return result
    found: dict[str, Any] = {}
    for path in paths:
        value: Any = result
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            found[path.rsplit("/", 1)[-1]] = value
    return found


def settings_dict(params: SamplingParams, stop: Sequence[str] = ()) -> dict[str, Any]:
    """`generation_settings`, the keys that mean something here. A random seed reads 4294967295."""
    return {
        "seed": RANDOM_SEED if params.seed is None else params.seed,
        "temperature": params.temperature,
        "dynatemp_range": params.dynatemp_range,
        "dynatemp_exponent": params.dynatemp_exponent,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "top_n_sigma": params.top_n_sigma,
        "typical_p": params.typical_p,
        "xtc_probability": params.xtc_probability,
        "xtc_threshold": params.xtc_threshold,
        "repeat_last_n": params.repeat_last_n,
        "repeat_penalty": params.repeat_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "dry_multiplier": params.dry_multiplier,
        "dry_base": params.dry_base,
        "dry_allowed_length": params.dry_allowed_length,
        "dry_penalty_last_n": params.dry_penalty_last_n,
        "mirostat": params.mirostat,
        "mirostat_tau": params.mirostat_tau,
        "mirostat_eta": params.mirostat_eta,
        "stop": list(stop),
        "max_tokens": params.max_tokens,
        "n_predict": params.max_tokens,
        "ignore_eos": params.ignore_eos,
        "logit_bias": [{"token": i, "bias": bias if bias > -1e38 else False} for i, bias in params.logit_bias],
        "n_probs": params.n_probs,
        "min_keep": params.min_keep,
        "samplers": list(params.samplers),
        "post_sampling_probs": params.post_sampling_probs,
    }


def _stop_type(answer: Answer) -> str:
    return "word" if answer.is_stopped else "limit" if answer.is_limited else "eos"
