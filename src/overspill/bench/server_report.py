"""Rounds of a server's measurement as a markdown table or as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from overspill.bench.report import table
from overspill.bench.server import Round

_COLUMNS: dict[str, Callable[[Round], str]] = {
    "test": lambda r: r.test.name,
    "clients": lambda r: str(r.n_clients),
    "request": lambda r: str(r.i_round + 1),
    "prompt t/s": lambda r: f"{r.prompt_ts:.1f}",
    "generated t/s": lambda r: f"{r.generated_ts:.1f}",
    "first token ms p50/p95": lambda r: f"{r.ttft_ms(50):.0f} / {r.ttft_ms(95):.0f}",
    "between tokens ms p50/p95": lambda r: f"{r.gap_ms(50):.1f} / {r.gap_ms(95):.1f}",
    "cached": lambda r: str(r.n_cached),
}


def to_md(model: str, rounds: Iterable[Round]) -> str:
    """A table, a row a round."""
    return f"{model}\n\n" + table(list(_COLUMNS), [[column(r) for column in _COLUMNS.values()] for r in rounds])


def to_json(model: str, rounds: Iterable[Round]) -> str:
    """An array of objects."""
    return json.dumps([_record(model, r) for r in rounds], indent=1)


def _record(model: str, r: Round) -> dict[str, Any]:
    return {
        "model": model,
        "n_prompt": r.test.n_prompt,
        "n_gen": r.test.n_gen,
        "n_clients": r.n_clients,
        "request": r.i_round + 1,
        "prompt_ts": r.prompt_ts,
        "generated_ts": r.generated_ts,
        "ttft_ms": {"p50": r.ttft_ms(50), "p95": r.ttft_ms(95)},
        "inter_token_ms": {"p50": r.gap_ms(50), "p95": r.gap_ms(95)},
        "cached_tokens": r.n_cached,
        "samples": [
            {
                "ttft_ms": 1e3 * s.ttft_s,
                "total_ms": 1e3 * (s.end_s - s.start_s),
                "prompt_tokens": s.n_prompt,
                "cached_tokens": s.n_cached,
                "generated_tokens": s.n_generated,
                "prompt_ts": s.prompt_per_second,
            }
            for s in r.samples
        ],
    }


OUTPUTS: dict[str, Callable[[str, Iterable[Round]], str]] = {"md": to_md, "json": to_json}
