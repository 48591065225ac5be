"""Starting Triton kernels at little cost on the host.

Triton's own call path works out, at every launch, which compiled variant fits the arguments; with a dozen kernels a
layer that is most of the host's time. A `Kernel` does it once per combination of constants, dtypes and alignment and
then calls the compiled program directly.

Convention for the functions given here, which makes that combination cheap to name: parameters are tensors (or None)
and run-time numbers first, constants (`tl.constexpr`) last, all passed by position; run-time integers are declared
`do_not_specialize` and stay below 2^31, so that no length of a prompt ever compiles anything; whatever a model fixes
(its widths) is a constant. In Triton's interpreter, the kernel simply runs.

Chained kernels start while the one before them on the stream still runs (programmatic dependent launch), and wait for
it in `follow`: before that they may only read what no kernel of the stream writes. So the gap between launches is spent
on starting programs and on fetching weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class Tuning(NamedTuple):
    """How a kernel is compiled: warps of a program, and stages of software pipelining in its loops."""

    n_warps: int = 4
    n_stages: int = 3


_PLAIN = Tuning()
_Tensor = torch.Tensor
CHAIN_FROM: tuple[int, int] | None = None
"""Compute capability from which kernels are chained, at least 9.0; None: they are not."""


@triton.jit
def follow(IS_CHAINED: tl.constexpr):
    """Lets the next kernel start, and waits for the one before; a chained kernel calls it once, in every program."""
    if IS_CHAINED:
        gdc_launch_dependents()
        gdc_wait()


class Kernel:
    """One Triton function. is_exact: products and sums are rounded one by one, never fused.

    may_chain: the function calls `follow`, and its last parameter is the constant that this takes.
    """

    def __init__(self, function: Callable[..., Any], *, is_exact: bool = False, may_chain: bool = False) -> None:
        self._function: Any = function
        self._is_exact = is_exact
        self._may_chain = may_chain
        self._is_compiled = isinstance(function, JITFunction)
        self._programs: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self, grid: tuple[int, ...], args: tuple[Any, ...], constants: tuple[Any, ...], tuning: Tuning = _PLAIN
    ) -> None:
        """Launch on the current stream of the device of `args[0]`, which must be the current device."""
        if 0 in grid:
            return
        device = args[0].get_device()
        if self._may_chain:
            constants = (*constants, self._is_compiled and CHAIN_FROM is not None and _capability(device) >= CHAIN_FROM)
        # What Triton specialises on; in place, because a call for each argument would double the cost of a launch.
        key = (
            device,
            constants,
            tuning,
            *[
                type(arg) if type(arg) is not _Tensor else arg.dtype if not arg.data_ptr() % 16 else (arg.dtype,)
                for arg in args
            ],
        )
        program = self._programs.get(key)
        if program is not None:
            _start(program, device, grid, args + constants)
            return
        options = {"num_warps": tuning.n_warps, "num_stages": tuning.n_stages, "enable_fp_fusion": not self._is_exact}
        if self._may_chain and constants[-1]:
            options["launch_pdl"] = True
        program = self._function[grid](*args, *constants, **options)
        if self._is_compiled:
            self._programs[key] = program


@cache
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def cdiv(n: int, d: int) -> int:
    """n / d rounded up."""
    return -(-n // d)


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 << (n - 1).bit_length()


def _start(program: Any, device: int, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
    n = len(grid)
    stream = driver.active.get_current_stream(device)
    program.run(
        grid[0], grid[1] if n > 1 else 1, grid[2] if n > 2 else 1,
        stream, program.function, program.packed_metadata, None, None, None, *args,
    )  # fmt: skip
