"""Where tests of the Triton kernels run: on a CUDA device if there is one, else in Triton's interpreter on the CPU.

Import this before anything that imports Triton: whether kernels are interpreted is decided when they are defined.
In the interpreter, kernels work in float32 only (it has no bfloat16 products), so tests take `DTYPE` and tolerances
from here.
"""

from __future__ import annotations

import os

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="Triton is not installed")
DEVICE = torch.device("cuda" if HAS_CUDA else "cpu")


DTYPES = (torch.float32, torch.bfloat16) if HAS_CUDA else (torch.float32,)


def _let_loops_take_tensors() -> None:
    """NumPy from 2.4 on does not turn an array of one element into a number, which the interpreter relies on."""
    from triton.runtime import interpreter

    plain_patch = interpreter._patch_lang_tensor

    def patch(tensor, scope):
        plain_patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


if not HAS_CUDA:
    _let_loops_take_tensors()


def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large tiles for few tokens: the interpreter takes a tenth of a second for a program, whatever its size."""
    from overspill.kernels.triton.launch import Tuning
    from overspill.kernels.triton.tuning import RowTile

    if HAS_CUDA:
        return
    tile = RowTile(64, 512, Tuning())
    for module in ("skinny", "few_experts"):
        monkeypatch.setattr(f"overspill.kernels.triton.{module}.tile_of", lambda tiles, type: tile)
    monkeypatch.setattr("overspill.kernels.triton.few_experts.down_tile", lambda type, n_tokens, n_slices: tile)
    monkeypatch.setattr("overspill.kernels.triton.skinny.token_tile", lambda type, n_rows: tile)
    monkeypatch.setattr("overspill.kernels.triton.routing.ROUTER", tile)


def assert_near(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Close by the norm of the difference: 1e-5 for float32, 1e-2 for results that were rounded to bfloat16."""
    assert got.shape == wanted.shape
    limit = 1e-5 if got.dtype == torch.float32 else 1e-2
    error = (got.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30)
    assert error <= limit, f"relative error {error:.3g}"
