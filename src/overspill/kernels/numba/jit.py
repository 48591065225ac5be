"""Numba's decorators and settings, untyped, and how this package uses its disk cache.

Its annotations describe neither the typing context that an intrinsic's caller leaves out, nor the options of
`parallel`, nor the settings read from the environment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from numba.core import config as _config
from numba.extending import intrinsic as _intrinsic

njit: Any = numba.njit
cfunc: Any = numba.cfunc
intrinsic: Any = _intrinsic
config: Any = _config
# What lets LLVM turn a sum into a sum of vectors.
REASSOCIATES = {"reassoc", "contract"}
# For functions that only compiled code calls: without the wrappers that Python would need, which take long to compile.
inner: Any = njit(nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)

inner_sums: Any = njit(
    nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, fastmath=REASSOCIATES
)


def cached(decorator: Any, function: Callable[..., Any], *signature: Any, **options: Any) -> Any:
    """Compile with Numba's disk cache, or without where there is no directory to write to."""
    try:
        return decorator(*signature, cache=True, **options)(function)
    except RuntimeError:
        return decorator(*signature, **options)(function)
