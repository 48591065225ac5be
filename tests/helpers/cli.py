"""The command line, run as a process (exit codes, memory, what a user sees) or inside this one (everything else)."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest

from overspill import cli
from tests.helpers.plain import DATA

ROOT = Path(__file__).parents[2]
MODEL = DATA / "models" / "qwen3moe.gguf"
MACHINE = DATA / "machines" / "two-24gb.json"
SPILLING = ["-dev", "virtual:2", "-ngl", "all", "-cmoe", "-ub", "16", "-c", "96"]
HOST_EXPERT_BYTES = 4 * 8 * 3 * 64 * 64 * 4
Capture = pytest.CaptureFixture[str]

# What the installed script does; then the process tells what it took. (The system's own peak of a child counts the
# parent it was forked from.)
_MEASURED = """
import atexit, sys, time
def tell(path=sys.argv.pop(1)):
    peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
    with open(path, "w") as report:
        print(time.process_time(), peak, file=report)
atexit.register(tell)
from overspill.cli import main
sys.exit(main())
"""


@dataclass(frozen=True)
class Ran:
    """What a command did. cpu_s: user and system time. peak_bytes: resident memory. Both 0 for one run in here."""

    code: int
    out: str
    err: str
    cpu_s: float = 0.0
    peak_bytes: int = 0

    @property
    def refusal(self) -> str:
        """The one line of bad input, without its beginning."""
        assert self.code == 2, self
        assert self.out == ""
        assert self.err.startswith("overspill: error: "), self.err
        assert self.err.count("\n") == 1
        assert self.err.endswith("\n")
        return self.err.removeprefix("overspill: error: ").rstrip()


def overspill(*args: str | Path) -> Ran:
    """`overspill ARGS` as a process of its own."""
    with tempfile.NamedTemporaryFile("r") as report:
        command = [sys.executable, "-c", _MEASURED, report.name, *map(str, args)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
        cpu_s, peak_kib = map(float, report.read().split())
    return Ran(done.returncode, done.stdout, done.stderr, cpu_s, int(peak_kib) * 1024)


def main(capsys: pytest.CaptureFixture[str], *args: str | Path) -> Ran:
    """The same in this process, without the start of Python."""
    capsys.readouterr()
    with patch.object(sys, "argv", ["overspill", *map(str, args)]), pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capsys.readouterr()
    return Ran(int(ended.value.code or 0), out, err)
