"""`overspill serve` that cannot begin: one line, exit code 2."""

from __future__ import annotations

import pytest

from tests.helpers.cli import main
from tests.server.served import MODEL


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--port", "99999"], "--port 99999"),
        (["--api-prefix", "llm"], "--api-prefix llm"),
        (["--api-key", "a,,b"], "--api-key"),
        (["--np", "x"], "--np"),
        (["-np", "0"], "-np 0"),
        (["-m", "nowhere.gguf"], "nowhere.gguf"),
    ],
)
def test_bad_flags(capsys: pytest.CaptureFixture[str], flags: list[str], says: str) -> None:
    assert says in main(capsys, "serve", "-m", MODEL, "--port", "0", *flags).refusal


def test_a_model_that_cannot_be_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    """It listens first; what loading finds ends it all the same."""
    small = ["-dev", "virtual:1", "--device-memory", "1KiB", "-ngl", "99", "-fit", "off"]
    ran = main(capsys, "serve", "-m", MODEL, "--port", "0", *small)
    assert ran.code == 2
    listening, error, end = ran.err.split("\n")
    assert listening.startswith("overspill: listening on http://127.0.0.1:")
    assert error.startswith("overspill: error: the model does not fit")
    assert end == ""
