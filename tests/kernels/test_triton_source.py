"""What the source of Triton kernels must not do, read without Triton.

A program's threads run apart. Where a number is read by many threads and one of them writes it, without a barrier
between, some may read what was written: `merge` once gave a few tokens of long prompts wrong attention so, in one run
of seventy.
"""

from __future__ import annotations

import ast
from pathlib import Path

import overspill

TRITON = Path(overspill.__file__).parent / "kernels" / "triton"
ACCESSES = {"tl.load": 0, "tl.store": 1}
IN_PLACE = {
    ("combine.py", "_combine", "out"): "a number is added to by the thread that has read it, and decides nothing else",
    ("few_experts.py", "_down", "out"): "likewise",
    ("merge.py", "_merge", "a"): "likewise",
    ("spread.py", "count_parties", "tally"): "one number, used for itself alone",
    ("expert_cache.py", "_look_up", "tally"): "likewise",
    ("expert_cache.py", "_look_up", "keys"): "barrier between",
    ("expert_cache.py", "_look_up", "given"): "barrier between",
    ("expert_cache.py", "_look_up", "heat"): "barriers between",
    ("expert_cache.py", "_look_up", "slot_of"): "barriers between",
}


def kernels() -> list[tuple[str, ast.FunctionDef]]:
    """All functions that Triton compiles, and their files."""
    found = []
    for path in sorted(TRITON.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
                found.append((path.name, node))
    return found


def accesses(kernel: ast.FunctionDef) -> tuple[set[str], set[str]]:
    """Names of the pointers that are read, and of those that are written."""
    uses: tuple[set[str], set[str]] = set(), set()
    for node in ast.walk(kernel):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ACCESSES:
            uses[ACCESSES[ast.unparse(node.func)]].add(first_name(node.args[0]))
    return uses


def first_name(address: ast.expr) -> str:
    """The pointer that an address is counted from."""
    while isinstance(address, ast.BinOp):
        address = address.left
    return ast.unparse(address)


def test_kernels_do_not_write_what_others_of_their_threads_read() -> None:
    found = {(file, kernel.name, name) for file, kernel in kernels() for name in set.intersection(*accesses(kernel))}
    assert found == IN_PLACE.keys()
