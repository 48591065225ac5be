"""What a block decoder is, and the pieces that several of them share.

A decoder turns one unit (a block; 32 values for the plain floats) into vectors of float32 in ascending element
order, bit-equal to `quant.dequant`. Types with scales per group first `prepare` them: float steps (and offsets) go to
a small stack array, then `run(i)` decodes the i-th of `n_runs` equal parts with `i` known only at run time, which
keeps the code small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from llvmlite import ir

from overspill.kernels.numba.emit import Codebook, Emitter, Steps, Vec, const
from overspill.kernels.numba.target import LANES

Prepare = Callable[[Emitter, ir.Value, ir.Value], None]
Run = Callable[[Emitter, ir.Value, ir.Value, ir.Value], Iterator[Vec]]
SCRATCH_FLOATS = 32


@dataclass(frozen=True)
class Decoder:
    """How to read one unit: `run(e, unit, i_run, scratch)` yields `n_elements / n_runs` values, LANES at a time.

    is_plain: a number is a number, so a row may end within a unit.
    """

    n_elements: int
    n_bytes: int
    run: Run
    n_runs: int = 1
    prepare: Prepare | None = None
    is_plain: bool = False

    @property
    def run_elements(self) -> int:
        return self.n_elements // self.n_runs


def quants(e: Emitter, unit: ir.Value, offset: ir.Value | int, n_bytes: int) -> list[Vec]:
    """`n_bytes` unsigned bytes as int32, LANES to a vector."""
    start = offset if isinstance(offset, ir.Value) else const(offset)
    return [e.bytes_u(unit, e.builder.add(start, const(at))) for at in range(0, n_bytes, LANES)]


def nibbles(e: Emitter, unit: ir.Value, offset: ir.Value | int, values: Steps | Codebook) -> Iterator[Vec]:
    """16 bytes: low nibbles are the first 16 values, high ones the next."""
    raw = quants(e, unit, offset, 16)
    yield from (values[q] for q in raw)
    yield from (values[q >> 4] for q in raw)


def group_floats(e: Emitter, scratch: ir.Value, i_run: ir.Value, n_per_run: int, group: int, base: int = 0) -> Vec:
    """scratch[base + i_run * n_per_run + group] in all lanes."""
    return e.splat_float(scratch, e.offset(i_run, 4 * n_per_run, 4 * (base + group)))
