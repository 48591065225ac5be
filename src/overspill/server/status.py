"""GET /status: the machine as the page shows it; docs/server.md describes the fields.

What does not change (the plan) and what does (slots, totals, counters, the last waves that were watched) come in one
object, so that a page needs one request a second and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

from overspill.cache.images import BLOCK_BYTES
from overspill.device.base import Span
from overspill.device.lane import Lane
from overspill.llm import LLM
from overspill.pipeline.watch import WatchedWave
from overspill.placement.report import as_dict
from overspill.server.host import Host
from overspill.server.totals import Counts

_FINENESS = 1500  # parts of a wave's time below which neighbours are drawn as one
_MEMORY = ("weights_bytes", "kv_bytes", "compute_bytes", "staging_bytes", "cache_bytes", "free_bytes", "total_bytes")


def status_dict(host: Host, counters: dict[str, Any], age_s: float) -> dict[str, Any]:
    """Everything. counters: of the devices, read so many seconds ago; {} if they never were."""
    llm = host.llm
    return {
        "model": _model(host, llm),
        "plan": _plan(llm),
        "devices": _devices(llm, counters),
        "requests": _requests(host.totals.counts) | {"waiting": llm.status.n_waiting},
        "images": _images(llm),
        "counters": counters,
        "counters_age_s": age_s,
        "trouble": host.trouble,
        "wave": _wave(llm.watch.last),
        "prompt_wave": _wave(llm.watch.last_prompt),
    }


def _model(host: Host, llm: LLM) -> dict[str, Any]:
    tensors = llm.source.tensors.values()
    return {
        "name": host.name,
        "architecture": llm.hparams.arch,
        "n_params": sum(prod(info.shape) for info in tensors),
        "bytes": sum(info.n_bytes for info in tensors),
        "n_layer": llm.plan.shape.n_layer,
        "n_ctx": llm.sizes.n_cells,
        "can_think": host.dialect.has_channels or host.dialect.thoughts is not None,
    }


def _plan(llm: LLM) -> dict[str, Any]:
    shape, placed = llm.plan.shape, llm.plan.placement
    expert_bytes = sum(shape.routed_bytes)
    return {
        "schedule": llm.plan.schedule.order.value,
        "grain": placed.grain,
        "n_ubatch": placed.n_ubatch,
        "n_wave": placed.n_wave,
        "expert_bytes": expert_bytes,
        "host_expert_bytes": llm.host_expert_bytes,
        "predicted_tokens_per_second": llm.plan.predicted_tokens_per_second,
    }


def _devices(llm: LLM, counters: dict[str, Any]) -> list[dict[str, Any]]:
    """Each device of the plan, the CPU last: memory by kind as planned, links as measured at the start."""
    planned = as_dict(llm.plan.shape, llm.plan.placement)["devices"]
    planned[-1]["name"] = llm.devices.host.name
    links = {spec.name: spec.h2d_gbps for spec in llm.plan.machine.devices}
    return [
        {
            "name": (name := device["name"]),
            "n_layers": len(device["layers"]),
            **{kind: device[kind] for kind in _MEMORY},
            "peak_bytes": counters.get("peak_bytes", {}).get(name),
            "busy": counters.get("busy", {}).get(name),
            "link_gbps": links.get(name),
        }
        for device in planned
    ]


def _requests(counts: Counts) -> dict[str, Any]:
    return {
        "served": counts.n_requests - counts.n_cancelled - counts.n_errors,
        "cancelled": counts.n_cancelled,
        "failed": counts.n_errors,
        "prompt_tokens": counts.n_prompt,
        "cached_tokens": counts.n_cached,
        "prompt_seconds": counts.prompt_s,
        "generated_tokens": counts.n_predicted,
        "generated_seconds": counts.predicted_s,
    }


def _images(llm: LLM) -> dict[str, int]:
    """What slots held, kept in host RAM; all zero without `--cache-ram`."""
    counts = llm.status.images
    return {
        "n": counts.n_images,
        "bytes": counts.n_bytes,
        "total_bytes": counts.n_blocks_total * BLOCK_BYTES,
        "saved": counts.n_saved,
        "loaded": counts.n_loaded,
        "dropped": counts.n_dropped,
        "tokens_loaded": counts.n_tokens_loaded,
    }


def _wave(wave: WatchedWave | None) -> dict[str, Any] | None:
    if wave is None:
        return None
    return {
        "n_tokens": wave.n_tokens,
        "n_ubatches": wave.n_ubatches,
        "wall_us": wave.wall_us,
        "devices": [_watched(wave, name, spans) for name, spans in wave.spans.items() if spans],
    }


def _watched(wave: WatchedWave, name: str, spans: Sequence[Span]) -> dict[str, Any]:
    """A device in a wave: share of the time it computed, what it uploaded and how fast, and its rows of the picture."""
    lanes = {lane: [s for s in spans if s.lane is lane] for lane in Lane}
    uploads = [s for s in spans if s.label.startswith("upload")]
    upload_us = sum(s.end_us - s.start_us for s in uploads)
    upload_bytes = sum(s.n_bytes for s in uploads)
    return {
        "name": name,
        "busy": sum(s.end_us - s.start_us for s in lanes[Lane.COMPUTE]) / max(wave.wall_us, 1e-9),
        "uploaded_bytes": upload_bytes,
        "upload_gbps": upload_bytes / upload_us / 1e3 if upload_us > 0 else 0.0,
        "rows": [
            {"lane": lane.value, "spans": list(drawn(on_lane, wave.start_us, wave.wall_us))}
            for lane, on_lane in lanes.items()
            if on_lane
        ],
    }


def drawn(spans: Iterable[Span], origin_us: float, wall_us: float) -> Iterator[tuple[str, float, float]]:
    """Bars of a row: kind, start and end in microseconds of the wave. Close neighbours of a kind are one bar."""
    bar: tuple[str, float, float] | None = None
    for span in sorted(spans, key=lambda s: s.start_us):
        kind = span.label.split()[0]
        start, end = span.start_us - origin_us, span.end_us - origin_us
        if bar is not None and bar[0] == kind and start - bar[2] < wall_us / _FINENESS:
            bar = (kind, bar[1], max(bar[2], end))
            continue
        if bar is not None:
            yield _rounded(bar)
        bar = (kind, start, end)
    if bar is not None:
        yield _rounded(bar)


def _rounded(bar: tuple[str, float, float]) -> tuple[str, float, float]:
    return bar[0], round(bar[1], 1), round(bar[2], 1)
