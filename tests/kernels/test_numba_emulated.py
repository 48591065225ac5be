"""The kernels for CPUs that multiply four bytes at once (AVX512-VNNI), on CPUs that do not: that instruction is made of
others here. So its path through the kernels is tested wherever tests run.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from overspill.kernels.numba import target

SCRIPT = """
import sys

import pytest
from llvmlite import ir

from overspill.kernels.numba import target

target.HAS_BYTE_PRODUCTS, target.HAS_PAIR_PRODUCTS = True, False
target.SOURCE_DIGEST += 1  # of what Numba caches

from overspill.kernels.numba.emit import I8, I32, Emitter

real = Emitter.intrinsic
WORDS, BYTES, PRODUCTS = ir.VectorType(I32, 16), ir.VectorType(I8, 64), ir.VectorType(I32, 64)


def intrinsic(self, name, result, arguments):
    if name != "llvm.x86.avx512.vpdpbusd.512":
        return real(self, name, result, arguments)
    module = self.builder.module
    if "vpdpbusd" not in module.globals:
        made = ir.Function(module, ir.FunctionType(WORDS, [WORDS] * 3), "vpdpbusd")
        made.linkage = "internal"
        b = ir.IRBuilder(made.append_basic_block())
        total, weights, digits = made.args
        weights, digits = b.zext(b.bitcast(weights, BYTES), PRODUCTS), b.sext(b.bitcast(digits, BYTES), PRODUCTS)
        products = b.mul(weights, digits)
        for i in range(4):
            of_lanes = ir.Constant(WORDS, [ir.Constant(I32, 4 * lane + i) for lane in range(16)])
            total = b.add(total, b.shuffle_vector(products, products, of_lanes))
        b.ret(total)
    return module.globals["vpdpbusd"]


Emitter.intrinsic = intrinsic
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-x", "tests/kernels/test_numba_panels.py"]))
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64" or target.HAS_BYTE_PRODUCTS, reason="for x86-64 CPUs without VNNI")
def test_kernels_for_products_of_four_bytes() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=root, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout or done.stdout.rstrip().endswith("[100%]"), done.stdout
    assert "skipped" not in done.stdout
