"""GET /metrics: llama-server's names, and what is particular to experts in host RAM, in Prometheus' text format.

The devices' counters can only be read between two waves. A scrape does not wait for that longer than a moment; it
then tells the last ones read, and how old they are.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from overspill.server.host import Host
from overspill.server.totals import Counts

_PATIENCE_S = 0.5
Families = Iterator[Metric]


class Metrics:
    """One per server: remembers the previous scrape, since when the rates are averages."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._previous = Counts()
        self._reading: asyncio.Task[None] | None = None
        self._counters: dict[str, Any] = {}
        self._read_s = 0.0

    async def scrape(self) -> bytes:
        """All metrics as text."""
        await self.read()
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Snapshot([*self._requests(), *self._engine(), *self._devices()]))
        return generate_latest(registry)

    async def read(self) -> tuple[dict[str, Any], float]:
        """The counters as last read ({} before the first time), and seconds since then."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read())
        await asyncio.wait({self._reading}, timeout=_PATIENCE_S)
        return self._counters, time.monotonic() - self._read_s

    async def _read(self) -> None:
        self._counters = await asyncio.to_thread(self._host.llm.counters)
        self._read_s = time.monotonic()

    def _requests(self) -> Families:
        counts = self._host.totals.counts
        recent = counts.minus(self._previous)
        self._previous = counts
        yield _counter("llamacpp:prompt_tokens", "Prompt tokens computed", counts.n_prompt)
        yield _counter("llamacpp:prompt_tokens_cached", "Prompt tokens taken from a slot's cells", counts.n_cached)
        yield _counter("llamacpp:prompt_seconds", "Time spent on prompts", counts.prompt_s)
        yield _counter("llamacpp:tokens_predicted", "Tokens generated", counts.n_predicted)
        yield _counter("llamacpp:tokens_predicted_seconds", "Time spent on generating", counts.predicted_s)
        yield _gauge("llamacpp:n_tokens_max", "Largest number of tokens of a request", counts.n_tokens_max)
        yield _gauge(
            "llamacpp:prompt_tokens_seconds", "Prompt tokens per second", _rate(recent.n_prompt, recent.prompt_s)
        )
        predicted = _rate(recent.n_predicted, recent.predicted_s)
        yield _gauge("llamacpp:predicted_tokens_seconds", "Generated tokens per second", predicted)
        yield _counter("overspill:requests", "Requests that ended", counts.n_requests)
        yield _counter("overspill:requests_cancelled", "Requests whose clients left", counts.n_cancelled)
        yield _counter("overspill:requests_failed", "Requests that the device could not finish", counts.n_errors)
        yield _counter("overspill:restarts", "Times the model was loaded anew", self._host.n_restarts)

    def _engine(self) -> Families:
        status = self._host.llm.status
        n_busy = sum(slot.is_busy for slot in status.slots)
        yield _gauge("llamacpp:requests_processing", "Requests in slots", n_busy)
        yield _gauge("llamacpp:requests_deferred", "Requests that wait for a slot", status.n_waiting)
        mean_busy = _rate(status.n_in_waves, status.n_waves)
        yield _gauge("llamacpp:n_busy_slots_per_decode", "Sequences in a wave, on average", mean_busy)
        images = status.images
        yield _gauge("overspill:images", "What slots held, kept in host RAM (--cache-ram)", images.n_images)
        yield _gauge("overspill:image_bytes", "Bytes of host RAM that images take", images.n_bytes)
        yield _counter("overspill:images_saved", "Slots saved as images", images.n_saved)
        yield _counter("overspill:images_loaded", "Images loaded into slots", images.n_loaded)
        yield _counter("overspill:images_dropped", "Images that gave way", images.n_dropped)
        yield _counter("overspill:image_tokens_loaded", "Prompt tokens taken from images", images.n_tokens_loaded)

    def _devices(self) -> Families:
        c = self._counters
        if not c:
            return
        yield _counter("llamacpp:n_decode", "Waves computed", c["waves"])
        yield _gauge("overspill:pinned_bytes", "Bytes of experts in pinned host RAM", c["pinned_bytes"])
        yield _gauge("overspill:pageable_bytes", "Bytes of experts in pageable host RAM", c["pageable_bytes"])
        yield _counter("overspill:uploaded_bytes", "Bytes uploaded from host RAM", c["uploaded_bytes"])
        yield _counter("overspill:placed_bytes", "Bytes of kept experts that prompts did not upload", c["placed_bytes"])
        yield _counter("overspill:handed_off_bytes", "Bytes from device to device", c["handed_off_bytes"])
        yield _counter("overspill:ubatches", "Micro-batches computed", c["ubatches"])
        yield _gauge("overspill:host_expert_bytes", "Bytes of experts in host RAM", c["host_expert_bytes"])
        yield _per_device("overspill:busy_ratio", "Share of the waves' time a device computed", c["busy"])
        yield _per_device("overspill:peak_bytes", "Most bytes a device held", c["peak_bytes"])
        yield from metrics_of_experts(c["experts"])
        age_s = time.monotonic() - self._read_s
        yield _gauge("overspill:device_counters_age_seconds", "Since the devices' counters were read", age_s)


def metrics_of_experts(experts: Mapping[str, Any] | None) -> Families:
    """Of decoding with experts in host RAM."""
    if experts is not None:
        hits, read = experts["hit_rates"], experts["read_bytes"]
        yield _per_device("overspill:expert_hit_ratio", "Share of the experts that lay in the device's cache", hits)
        yield _per_device("overspill:expert_read_bytes", "Bytes of experts read from host RAM for single tokens", read)


class _Snapshot:
    """A collector of what was gathered before."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Families:
        return iter(self._families)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _per_device(name: str, text: str, values: dict[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=["device"])
    for device, value in values.items():
        family.add_metric([device], value)
    return family


def _rate(n: float, seconds: float) -> float:
    return n / seconds if seconds > 0 else 0.0
