"""A real server on a free port of this process, over the tiny model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.scripted import Says, scripted
from tests.server.served import Served, serving


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    with serving() as served:
        yield served


@pytest.fixture
def says(served: Served, monkeypatch: pytest.MonkeyPatch) -> Says:
    """Makes the model say a text, then its end token."""
    return scripted(served, monkeypatch)


@pytest.fixture(autouse=True)
def _nothing_is_left(served: Served) -> Iterator[None]:
    """After every test, all slots are free."""
    yield
    served.wait_until_idle()
