"""Numba's decorators and settings, untyped.

Its annotations describe neither the typing context that an intrinsic's caller leaves out, nor the options of
`parallel`, nor the settings read from the environment.
"""

from __future__ import annotations

from typing import Any

import numba
from numba.core import config as _config
from numba.extending import intrinsic as _intrinsic

njit: Any = numba.njit
cfunc: Any = numba.cfunc
intrinsic: Any = _intrinsic
config: Any = _config
