"""Choosing how to compute attention: measured once per kind of problem and kind of device, then kept.

A way must be right on a small case before it is timed. Devices of one name share a choice, so that equal devices
compute equal bits; of ways that are about equally fast the first of the list wins, so that noise does not decide.
Measuring allocates and waits for the device: it happens at the first problem of a kind, or ahead, in `prepare`.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple

import torch

from overspill.errors import UserError
from overspill.kernels import ref
from overspill.kernels.triton.attend import CANDIDATES, Candidate

_log = logging.getLogger(__name__)

_ABOUT_EQUAL = 1.05
_MAX_ERROR = 0.02
_N_TIMED = 5

Timer = Callable[[Callable[[], object]], float]


class SizeClass(NamedTuple):
    """Problems that are timed by one example. Numbers of (queries, cells): of the example, and of the check."""

    name: str
    timed: tuple[int, int]
    checked: tuple[int, int]


_DECODE = SizeClass("decode", (1, 8192), (1, 1000))
_FEW = SizeClass("few queries", (128, 4096), (100, 700))
_FIRST = SizeClass("first ubatch", (2048, 2048), (512, 512))
_LATER = SizeClass("later ubatch", (2048, 10240), (512, 1600))
SIZE_CLASSES = (_DECODE, _FEW, _FIRST, _LATER)


def size_class(n_queries: int, n_cells: int) -> SizeClass:
    """The class of a problem."""
    if n_queries <= 16:
        return _DECODE
    if n_queries < 512:
        return _FEW
    return _FIRST if n_cells < 2 * n_queries else _LATER


class Heads(NamedTuple):
    """What else decides: query heads, kv heads, channels, and the dtype."""

    n_head: int
    n_head_kv: int
    head_dim: int
    dtype: torch.dtype


class AttentionChooser:
    """Rankings of ways, by kind of device, heads and size. Share one between all devices of a run."""

    def __init__(self, candidates: Sequence[Candidate] = CANDIDATES, timer: Timer | None = None) -> None:
        self._candidates = candidates
        self._timer = timer or time_us
        self._rankings: dict[tuple[str, Heads, str], list[Candidate]] = {}

    def choose(self, heads: Heads, n_queries: int, n_cells: int, device: torch.device) -> Candidate:
        """The fastest way for a problem, of those that suit it."""
        size = size_class(n_queries, n_cells)
        ranking = self._ranking(heads, size, device)
        return next(c for c in ranking if c.suits(n_queries, n_cells))

    def prepare(self, heads: Heads, device: torch.device) -> dict[str, str]:
        """Choose for all sizes now; returns the fastest way per size class, for the log."""
        return {size.name: self._ranking(heads, size, device)[0].name for size in SIZE_CLASSES}

    def _ranking(self, heads: Heads, size: SizeClass, device: torch.device) -> list[Candidate]:
        key = (_device_name(device), heads, size.name)
        if key not in self._rankings:
            self._rankings[key] = self._rank(heads, size, device)
            if device.type == "cuda":
                torch.cuda.empty_cache()  # otherwise what the problems took is kept, 0.3 GB for 32 heads
        return self._rankings[key]

    def _rank(self, heads: Heads, size: SizeClass, device: torch.device) -> list[Candidate]:
        problem = _problem(heads, *size.timed, device)
        times: dict[str, float] = {}
        for c in self._candidates:
            if c.suits(*size.timed) and _is_right(c, heads, size, device):
                times[c.name] = self._timer(partial(c.attend, *problem, scale=heads.head_dim**-0.5))
        if not times:
            raise UserError(f"{heads}: no attention kernel is right on {_device_name(device)}; report this device")
        _log.info("attention, %s, %s, us: %s", heads, size.name, times)
        limit = _ABOUT_EQUAL * min(times.values())
        right = [c for c in self._candidates if c.name in times]
        return sorted(right, key=lambda c: max(times[c.name], limit))


def _is_right(candidate: Candidate, heads: Heads, size: SizeClass, device: torch.device) -> bool:
    q, k, v = _problem(heads, *size.checked, device)
    scale = heads.head_dim**-0.5
    wanted = ref.attention(q.float(), k.float(), v.float(), scale=scale)
    try:
        error = (candidate.attend(q, k, v, scale=scale).float() - wanted).norm() / wanted.norm()
    except RuntimeError as e:
        _log.info("attention %s cannot do %s: %s", candidate.name, heads, str(e).splitlines()[0])
        return False
    if not error <= _MAX_ERROR:
        _log.warning("attention %s is wrong for %s, %s: error %.3g", candidate.name, heads, size.name, error)
        return False
    return True


def _problem(
    heads: Heads, n_queries: int, n_cells: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random queries, keys and values, laid out as the engine's."""
    generator = torch.Generator(device).manual_seed(n_queries * 1_000_003 + n_cells)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(heads.dtype)

    n_spare = 3
    q = normal(n_queries, heads.n_head, heads.head_dim)
    k, v = (normal(heads.n_head_kv, n_cells + n_spare, heads.head_dim)[:, :n_cells] for _ in range(2))
    return q, k, v


@cache
def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def time_us(run: Callable[[], object]) -> float:
    """Median time of a call on the current CUDA stream, microseconds. Waits for the device."""
    run()
    times = []
    for _ in range(_N_TIMED):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)
