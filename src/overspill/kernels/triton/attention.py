"""`kernels.Attention` on one device: the chosen way for plain attention, `flash` for all that only it can do."""

from __future__ import annotations

import torch

from overspill.kernels.triton.attend import Attend
from overspill.kernels.triton.chooser import AttentionChooser, Heads
from overspill.kernels.triton.flash import flash

_CHOICES_KEPT = 4096


class AttentionOp:
    """Attention of one device; queries are rounded to the dtype of the keys. dtype: of the results."""

    def __init__(self, device: torch.device, chooser: AttentionChooser, dtype: torch.dtype) -> None:
        self._device = device
        self._chooser = chooser
        self._dtype = dtype
        self._chosen: dict[tuple[Heads, int, int], Attend] = {}

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `kernels.Attention`."""
        q = q if q.dtype == k.dtype else q.to(k.dtype)
        T, H, A = q.shape
        G, C, B = v.shape
        if window is not None and window >= C:
            window = None
        is_plain = window is None and sinks is None and A == B
        if not is_plain or self._device.type != "cuda":
            return flash(q, k, v, scale=scale, window=window, sinks=sinks).to(self._dtype)
        problem = Heads(H, G, A, q.dtype), T, C
        attend = self._chosen.get(problem)
        if attend is None:
            if len(self._chosen) >= _CHOICES_KEPT:
                self._chosen.clear()
            attend = self._chosen[problem] = self._chooser.choose(*problem, self._device).attend
        return attend(q, k, v, scale=scale).to(self._dtype)
