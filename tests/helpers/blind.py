"""A ledger that makes mistakes, for tests that must find them."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from overspill.pipeline import runner
from overspill.pipeline.ledger import Ledger, StreamId


class BlindLedger(Ledger):
    """Overlooks every resource of some names."""

    names: Collection[str] = ()

    def add(
        self, number: int, stream: StreamId, reads: Iterable[Hashable], writes: Iterable[Hashable]
    ) -> dict[StreamId, int]:
        return super().add(number, stream, self._seen(reads), self._seen(writes))

    def _seen(self, resources: Iterable[Hashable]) -> list[Hashable]:
        return [r for r in resources if isinstance(r, tuple) and r[0] not in self.names]


@contextmanager
def blind_to(names: Collection[str]) -> Iterator[None]:
    """Runners that are made meanwhile overlook the resources of these names."""
    with patch.object(runner, "Ledger", BlindLedger), patch.object(BlindLedger, "names", names):
        yield
