"""Proof of overlap without clocks: work that waits, on its stream, for other work to be in flight too."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NamedTuple, cast

from overspill.device.base import Devices
from overspill.device.lane import Lane
from overspill.device.virtual import VirtualBackend


class Piece(NamedTuple):
    """A piece of work: the number of its device in the plan, the host last, and its label."""

    device: int
    label: str


class Meeting:
    """Holds each of these pieces of work back until all of them have come up, or until time is over.

    Those that have come wait in the meantime, so when `took_place` all were in flight at one moment. Work that comes
    up again, in another wave, passes.
    """

    def __init__(self, devices: Devices, pieces: Iterable[Piece], *, timeout_s: float) -> None:
        self._missing = set(pieces)
        self._timeout_s = timeout_s
        self._is_over = False
        self._changed = threading.Condition()
        for i, device in enumerate(devices.all):
            cast(VirtualBackend, device).before = lambda lane, label, i=i: self._come(Piece(i, label))

    @property
    def took_place(self) -> bool:
        return not self._missing and not self._is_over

    def _come(self, piece: Piece) -> None:
        with self._changed:
            if piece not in self._missing or self._is_over:
                return
            self._missing.remove(piece)
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: not self._missing or self._is_over, self._timeout_s):
                self._is_over = True
                self._changed.notify_all()


class Gate:
    """Holds one piece of work back until the test opens the gate; `has_come` says that the work stands before it."""

    def __init__(self, devices: Devices, piece: Piece) -> None:
        self._opened = threading.Event()
        self._come = threading.Event()
        self._piece = piece
        device = cast(VirtualBackend, devices.all[piece.device])
        device.before = self._before

    def open(self) -> None:
        self._opened.set()

    @property
    def has_come(self) -> bool:
        return self._come.is_set()

    def _before(self, lane: Lane, label: str) -> None:
        if label == self._piece.label:
            self._come.set()
            assert self._opened.wait(60.0), f"nobody opened the gate before {self._piece}"
