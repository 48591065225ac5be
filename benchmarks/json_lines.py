"""Rows of results as they come: printed, and added to a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path


def note(row: Mapping[str, object], out: Path | None) -> None:
    """A line of JSON; out: None for no file."""
    line = json.dumps(row)
    print(line, flush=True)
    if out is not None:
        with out.open("a") as file:
            file.write(line + "\n")
