"""docs/server.md: every example runs, answers have the fields that it shows, and its tables are complete."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from overspill.cli import app
from tests.helpers.cli import ROOT
from tests.server.scripted import ANSWER, ARGUMENTS, Says
from tests.server.served import Served

TEXT = (ROOT / "docs" / "server.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
SHELL = [(code, after) for (kind, code), after in zip(BLOCKS, [*BLOCKS[1:], ("", "")], strict=True) if kind == "sh"]
PYTHON = [code for kind, code in BLOCKS if kind == "python"]
URL = "http://127.0.0.1:8080"


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize(("command", "after"), SHELL, ids=[code.splitlines()[0][:60] for code, _ in SHELL])
def test_commands(served: Served, tmp_path: Path, command: str, after: tuple[str, str]) -> None:
    installed = tmp_path / "overspill"
    installed.write_text(f'#!/bin/sh\nexec {sys.executable} -m overspill.cli "$@"\n')
    installed.chmod(0o755)
    script = f"set -euo pipefail; PATH={tmp_path}:$PATH\n" + command.replace(URL, served.url)
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    if after[0] == "json":
        assert_like(json.loads(done.stdout), json.loads(after[1]), "")


def assert_like(real: Any, shown: Any, where: str) -> None:
    """All that is shown is there, and of the same kind."""
    if isinstance(shown, dict):
        for key, value in shown.items():
            assert key in real, f"{where}.{key}"
            assert_like(real[key], value, f"{where}.{key}")
    elif isinstance(shown, list):
        assert real, where
        assert_like(real[0], shown[0], f"{where}[0]")
    elif isinstance(shown, bool | str):
        assert type(real) is type(shown), where
    else:
        assert isinstance(real, int | float), where
        assert not isinstance(real, bool), where


def test_the_error_shown_is_the_real_one(served: Served) -> None:
    (shown,) = (json.loads(code) for kind, code in BLOCKS if kind == "json" and "'temperature'" in code)
    assert served.post("/completion", prompt="Hello", temperature="hot").json() == shown


@pytest.mark.parametrize("code", PYTHON, ids=[re.findall(r"import (\w+)", code)[0] for code in PYTHON])
def test_programs(served: Served, says: Says, code: str) -> None:
    says(ANSWER if "tools=" in code else "Seven.")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        names: dict[str, Any] = {}
        exec(compile(code.replace(URL, served.url), "docs/server.md", "exec"), names)
        names["client"].close()
    assert out.getvalue().strip() == (f"weather {ARGUMENTS}" if "tools=" in code else "Seven.")


def test_every_endpoint_is_in_the_table(served: Served) -> None:
    section = TEXT.split("## Endpoints")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(GET|POST) (.*?)\|", section, re.MULTILINE)
    told = {(method.lower(), path.strip("` ")) for method, paths in rows for path in paths.split(",")}
    described = served.client.get("/openapi.json").json()["paths"]
    assert told == {(method, path) for path, methods in described.items() for method in methods}


def test_every_flag_of_the_server_is_in_the_table() -> None:
    (serve,) = (c.callback for c in app.registered_commands if c.callback and c.callback.__name__ == "serve")
    own = [p for p in serve.__signature__.parameters.values() if p.name in serve.__wrapped__.__annotations__]  # type: ignore[union-attr]
    options = [option for p in own for option in p.annotation.__metadata__]
    flags = {flag for option in options for flag in (option.default, *option.param_decls)}
    section = TEXT.split("## Flags")[1].split("\n## ")[0]
    told = {
        flag for row in re.findall(r"^\| (`-.*?)\|", section, re.MULTILINE) for flag in re.findall(r"`(-.+?)`", row)
    }
    assert told == flags
