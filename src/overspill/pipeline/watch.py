"""Watching a wave: what every stream did during it, for those who ask to see the next one.

Nobody pays for it who does not ask: a wave is traced only after `ask`, and each asking traces one. A watched wave ends
with all devices idle, so that its picture is whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from overspill.device.base import Devices, Span
from overspill.pipeline.wave import Wave

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class WatchedWave:
    """A wave that is over. start_us: on the clock of the spans; spans: of each device, by name."""

    n_tokens: int
    n_ubatches: int
    start_us: float
    wall_us: float
    spans: Mapping[str, tuple[Span, ...]]


class WaveWatch:
    """The last waves that were watched. `ask` and reading are for any thread, `run` for the one that runs waves.

    last: of any kind; last_prompt: the last one with more tokens than ubatches, None until there was one.
    """

    def __init__(self, devices: Devices) -> None:
        self.last: WatchedWave | None = None
        self.last_prompt: WatchedWave | None = None
        self._devices = devices
        self._is_asked = False

    def ask(self) -> None:
        """Watch the next wave."""
        self._is_asked = True

    def run(self, wave: Wave, compute: Callable[[], T]) -> T:
        """Compute a wave, and watch it if that was asked for."""
        return self._watched(wave, compute) if self._is_asked else compute()

    def _watched(self, wave: Wave, compute: Callable[[], T]) -> T:
        self._is_asked = False
        for device in self._devices.all:
            device.synchronize_host()
            device.start_trace()
        start_us = time.monotonic_ns() / 1e3
        try:
            result = compute()
            for device in self._devices.all:
                device.synchronize_host()
            wall_us = time.monotonic_ns() / 1e3 - start_us
        finally:
            spans = {device.name: tuple(device.take_trace()) for device in self._devices.all}
        self._keep(wave, start_us, wall_us, spans)
        return result

    def _keep(self, wave: Wave, start_us: float, wall_us: float, spans: Mapping[str, tuple[Span, ...]]) -> None:
        n_tokens, n_ubatches = wave.n_tokens, len(wave.ubatches)
        self.last = WatchedWave(
            n_tokens=n_tokens, n_ubatches=n_ubatches, start_us=start_us, wall_us=wall_us, spans=spans
        )
        if n_tokens > n_ubatches:
            self.last_prompt = self.last
