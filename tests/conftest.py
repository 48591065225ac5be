"""For all tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.helpers.guards import guarded


@pytest.fixture(autouse=True, scope="module")
def _what_is_there_is_no_garbage() -> None:
    """Who collects garbage, as closing a model does, looks through what the file's own tests have made, no more."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _memory_of_kernels_is_guarded() -> Iterator[None]:
    with guarded():
        yield
