"""NVIDIA's compute-sanitizer over the kernels: reads and writes outside of memory, and races within a program.

    python tools/sanitize.py [--tool memcheck] [--seconds 90] [FILE_OR_TEST ...]

Runs tests of the Triton kernels (by default a few of each file) on the GPU under the tool, which makes them ten to a
hundred times slower, with torch's caching of memory switched off, so that the end of a tensor is the end of its memory.
Exit code 0: nothing found; 1: something was found, or a test failed; 77: skipped, and why.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

SKIPPED = 77
FOUND = 9
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
FILES = ("dequant", "experts", "few", "few_experts", "heads", "attention", "steps", "delta")
_PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/cuda/bin")


def find_sanitizer() -> str | None:
    """The program: on the path, beside a CUDA toolkit, or in a Python package of NVIDIA's."""
    homes = [os.environ[name] + "/bin" for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    packages = [str(path) for root in sys.path for path in Path(root).glob("nvidia/*/bin")]
    return shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ["PATH"], *homes, *_PLACES, *packages]))


def skip(why: str) -> int:
    print(f"skipped: {why}")
    return SKIPPED


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", default=TOOLS[0], choices=TOOLS)
    parser.add_argument("--seconds", type=int, default=90, help="at most, for each file")
    parser.add_argument("tests", nargs="*", default=[f"tests/kernels/test_triton_{name}.py" for name in FILES])
    args = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        return skip("no CUDA device")
    sanitizer = find_sanitizer()
    if sanitizer is None:
        return skip("compute-sanitizer is not installed; it comes with the CUDA toolkit")
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    worst = 0
    for test in args.tests:
        command = [sanitizer, "--tool", args.tool, "--error-exitcode", str(FOUND), "--print-limit", "5", "--"]
        command += [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=args.seconds)
        except subprocess.TimeoutExpired as late:
            text = (late.stdout or b"").decode(errors="replace")
            is_clean = "Invalid" not in text and "Error" not in text
            print(f"{test}: not finished in {args.seconds} s, {'nothing found so far' if is_clean else text[-2000:]}")
            worst = max(worst, int(not is_clean))
            continue
        lines = [line for line in done.stdout.splitlines() if "ERROR SUMMARY" in line or " passed" in line]
        print(f"{test}: exit {done.returncode}; {'; '.join(line.strip('= ') for line in lines)}", flush=True)
        if done.returncode:
            print(done.stdout[-3000:], done.stderr[-1000:])
            worst = 1
    return worst


if __name__ == "__main__":
    sys.exit(main())
