"""These tests need CUDA; they are skipped where there is none.

Several processes (`pytest -n`) have CPUs of their own: threads of the CPU's part look for work without sleeping, and
would take each other's time.
"""

from __future__ import annotations

import os

import pytest
import torch


def _keep_to_own_cpus() -> None:
    worker, n_workers = os.environ.get("PYTEST_XDIST_WORKER"), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if worker is None:
        return
    cpus = sorted(os.sched_getaffinity(0))
    n, first = max(1, len(cpus) // n_workers), int(worker.removeprefix("gw"))
    own = cpus[first * n :][:n] or cpus
    os.sched_setaffinity(0, own)
    torch.set_num_threads(len(own))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything here, and skip it without a GPU."""
    if torch.cuda.is_available():
        _keep_to_own_cpus()
    for item in items:
        if "tests/gpu/" in item.nodeid:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
