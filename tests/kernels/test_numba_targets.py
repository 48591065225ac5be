"""The CPU kernels as compiled for other CPUs than this one: other vector widths, other ways to look values up."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from overspill.kernels.numba import target

AVX2 = "+avx,+avx2,+fma,+f16c,+sse,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+bmi,+bmi2"
AVX512 = AVX2 + ",+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl"
SCRIPT = """
import pytest
import torch
from overspill.gguf.types import TensorType
from overspill.kernels.numba import matmul, target
from overspill.quant.dequant import dequantize
from tests.kernels.weights import random_weight

assert (target.LANES, target.HAS_PAIR_PRODUCTS, target.HAS_BYTE_PRODUCTS) == ({lanes}, {has_pairs}, False)
for name in ("F32", "F16", "Q4_0", "Q5_0", "Q8_0", "Q2_K", "Q4_K", "Q6_K", "MXFP4", "NVFP4", "IQ1_M", "IQ3_S"):
    weight = random_weight(TensorType[name], (21, 768))
    x = torch.randn(24, 768)
    y = matmul(x, weight)
    expected = x.double() @ dequantize(weight).double().T
    assert (y - expected).abs().max() < 1e-5 * expected.abs().max(), name
    assert all(torch.equal(matmul(x[:n], weight), y[:n]) for n in (1, 2, 3, 7)), name
if pytest.main(["tests/kernels/test_numba_rows.py", "tests/kernels/test_numba_one_token.py", "-x"]) == 0:
    print("good")
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the features named are those of x86-64 CPUs")
@pytest.mark.parametrize(("cpu", "features"), [("generic", ""), ("haswell", AVX2), ("skylake-avx512", AVX512)])
def test_kernels_are_right_when_compiled_for(cpu: str, features: str) -> None:
    missing = {name[1:] for name in features.split(",") if name} - _host_features()
    if missing:
        pytest.skip(f"this CPU cannot run {cpu} code: it lacks {missing}")
    own = target.LANES, target.HAS_PAIR_PRODUCTS, target.HAS_BYTE_PRODUCTS
    wanted = (16 if features == AVX512 else 8, features == AVX2, False)
    if own == wanted and features:
        pytest.skip(f"this CPU's own kernels are those of {cpu}, and tested as such")
    env = os.environ | {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features}
    script = SCRIPT.format(lanes=wanted[0], has_pairs=wanted[1])
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=600)
    assert done.stdout.endswith("good\n"), done.stdout + done.stderr


def _host_features() -> set[str]:
    import llvmlite.binding as llvm

    return {name for name, has in llvm.get_host_cpu_features().items() if has}
