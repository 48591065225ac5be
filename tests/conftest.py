"""For all tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.helpers.guards import guarded


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of slow tests first: what workers begin last should not take long."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(autouse=True, scope="module")
def _what_is_there_is_no_garbage() -> None:
    """Who collects garbage, as closing a model does, looks through what the file's own tests have made, no more."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _memory_of_kernels_is_guarded() -> Iterator[None]:
    with guarded():
        yield
