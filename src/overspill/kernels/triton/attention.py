"""`kernels.Attention` on one device: the chosen way for plain attention, `flash` for all that only it can do."""

from __future__ import annotations

import torch

from overspill.kernels.triton.chooser import AttentionChooser, Heads
from overspill.kernels.triton.flash import flash


class AttentionOp:
    """Attention of one device; queries are rounded to the dtype of the cache."""

    def __init__(self, device: torch.device, chooser: AttentionChooser) -> None:
        self._device = device
        self._chooser = chooser

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
        """See `kernels.Attention`; returns the dtype of the cache."""
        q = q.to(k.dtype)
        T, H, A = q.shape
        G, C, B = v.shape
        if window is not None and window >= C:
            window = None
        is_plain = window is None and sinks is None and A == B
        if not is_plain or self._device.type != "cuda":
            return flash(q, k, v, scale=scale, window=window, sinks=sinks)
        return self._chooser.choose(Heads(H, G, A, q.dtype), T, C, self._device).attend(q, k, v, scale=scale)
