"""What all requests together took: the counters behind /metrics."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

from overspill.engine.request import DoneEvent


@dataclass(frozen=True, slots=True)
class Counts:
    """Sums over the requests that have ended; times in seconds."""

    n_requests: int = 0
    n_cancelled: int = 0
    n_errors: int = 0
    n_prompt: int = 0
    n_cached: int = 0
    n_predicted: int = 0
    prompt_s: float = 0.0
    predicted_s: float = 0.0
    n_tokens_max: int = 0

    def minus(self, other: Counts) -> Counts:
        """What came since `other`; n_tokens_max stays."""
        return replace(
            self,
            n_prompt=self.n_prompt - other.n_prompt,
            n_predicted=self.n_predicted - other.n_predicted,
            prompt_s=self.prompt_s - other.prompt_s,
            predicted_s=self.predicted_s - other.predicted_s,
        )


class Totals:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = Counts()

    @property
    def counts(self) -> Counts:
        return self._counts

    def count(self, done: DoneEvent, *, is_stopped: bool) -> None:
        """A request has ended. is_stopped: by a stop string, so it was not cancelled by its client."""
        t = done.timings
        with self._lock:
            c = self._counts
            self._counts = Counts(
                n_requests=c.n_requests + 1,
                n_cancelled=c.n_cancelled + (done.reason == "cancelled" and not is_stopped),
                n_errors=c.n_errors + (done.reason == "error"),
                n_prompt=c.n_prompt + t.prompt_n,
                n_cached=c.n_cached + t.cache_n,
                n_predicted=c.n_predicted + t.predicted_n,
                prompt_s=c.prompt_s + t.prompt_ms / 1e3,
                predicted_s=c.predicted_s + t.predicted_ms / 1e3,
                n_tokens_max=max(c.n_tokens_max, t.cache_n + t.prompt_n + t.predicted_n),
            )
