"""For all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.guards import guarded


@pytest.fixture(autouse=True, scope="module")
def _memory_of_kernels_is_guarded() -> Iterator[None]:
    with guarded():
        yield
