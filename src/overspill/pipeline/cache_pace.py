"""Whether decoding steps use the expert cache: measured now and then, against steps that do not.

A cache can lose: what it saves may be less than what it costs to look into it, and the CPU may compute an expert sooner
than a link brings it. So some steps in a row are timed with and without it, by turns, and the faster way is kept until
the next such trial, which comes later each time. Steps of different numbers of tokens are judged apart. Pure.
"""

from __future__ import annotations

import logging
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from overspill.pipeline.schedule import WaveSchedule

N_TIMED: Final = 8
FIRST_TRIAL: Final = 32
PAUSE: Final = 512
LONGEST_PAUSE: Final = 8192
N_WARM: Final = 32
"""Steps before a trial in which a cache that was not used fills again."""

_FASTER = 1.02
_log = logging.getLogger(__name__)


@dataclass
class _Course:
    """Steps of so many tokens. pause: steps between the next trial and the one after it. n_until: steps until the next
    one. times: of a trial, with the cache and without."""

    is_used: bool = True
    pause: int = PAUSE
    n_until: int = FIRST_TRIAL
    times: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))

    @property
    def is_next_cached(self) -> bool:
        """Whether the next step uses the cache."""
        if self.n_until > 0:
            return self.is_used or self.n_until <= N_WARM
        return len(self.times[0]) == len(self.times[1])


class CachePace:
    """Chooses how each step runs. uncached: the schedule of steps that do without, by the number of tokens."""

    def __init__(self, uncached: Callable[[int], WaveSchedule]) -> None:
        self._uncached = uncached
        self._courses: defaultdict[int, _Course] = defaultdict(_Course)

    def chosen(self, schedule: WaveSchedule, n_tokens: int) -> WaveSchedule:
        """The schedule of the next step, given the one with a cache."""
        return schedule if self._courses[n_tokens].is_next_cached else self._uncached(n_tokens)

    def note(self, n_tokens: int, seconds: float) -> None:
        """What the step took that was chosen last."""
        course = self._courses[n_tokens]
        if course.n_until > 0:
            course.n_until -= 1
            return
        course.times[0 if course.is_next_cached else 1].append(seconds)
        if len(course.times[1]) == N_TIMED:
            self._decide(course, n_tokens)

    def _decide(self, course: _Course, n_tokens: int) -> None:
        with_it, without = (statistics.median(times) for times in course.times)
        is_used = with_it <= _FASTER * without
        if is_used != course.is_used:
            verb = "is used again" if is_used else "steps aside"
            _log.warning(
                "expert cache %s: steps of %d tokens take %.2f ms with it, %.2f ms without; measured again in %d steps",
                verb,
                n_tokens,
                1e3 * with_it,
                1e3 * without,
                course.pause,
            )
        self._courses[n_tokens] = _Course(is_used, min(2 * course.pause, LONGEST_PAUSE), course.pause)
