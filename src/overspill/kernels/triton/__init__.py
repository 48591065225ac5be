"""GPU kernels in Triton, and the op table of a CUDA device.

Precision: the hidden states between layers are float32; normed inputs, heads, the cache, dequantised weights and
hidden activations are bfloat16; products accumulate in float32 and dense ones are returned so. Where the user wants
cells of float16, or of bytes (`q8_rows`), heads are float16. Routers are multiplied in float32. Nothing here waits for
the device once kernels are compiled and attention is chosen.

`make_ops(dtype=torch.float32)` computes the same in float32 throughout, slowly: to tell a rounding from an error.
"""

from __future__ import annotations

from functools import cache, partial

import torch

from overspill.kernels import Ops, Steps
from overspill.kernels.sharing import Mail
from overspill.kernels.triton.attention import AttentionOp
from overspill.kernels.triton.chooser import AttentionChooser, Heads
from overspill.kernels.triton.delta import delta_steps
from overspill.kernels.triton.dequant import dequantize_bf16
from overspill.kernels.triton.expert_cache import look_up
from overspill.kernels.triton.heads import Angles, HeadGains, prepare_heads, rope
from overspill.kernels.triton.linear import LinearOp, embed
from overspill.kernels.triton.mail import add_mail, copy_pinned, put_mail, take_mail
from overspill.kernels.triton.moe import MoeOp
from overspill.kernels.triton.norm import rms_norm, swiglu
from overspill.kernels.triton.q8_heads import prepare_q8_heads, prepare_q8_steps
from overspill.kernels.triton.q8_rows import TritonRows
from overspill.kernels.triton.routing import Choice, pick_experts, route
from overspill.kernels.triton.spread import divide, fetch, fill, place
from overspill.kernels.triton.steps import attend_steps, prepare_steps
from overspill.kernels.triton.wide import plain_into, wide_bytes, widen, widen_into
from overspill.kernels.triton.workspace import Workspace, workspace_bytes

__all__ = [
    "Angles",
    "AttentionChooser",
    "Choice",
    "HeadGains",
    "Heads",
    "Workspace",
    "dequantize_bf16",
    "make_ops",
    "pick_experts",
    "prepare_heads",
    "route",
    "shared_chooser",
    "wide_bytes",
    "widen",
    "workspace_bytes",
]

_TORCH_PRODUCTS_ON = (9, 0)


@cache
def shared_chooser() -> AttentionChooser:
    """The one of this process: two models, or two runs of one, attend alike."""
    return AttentionChooser()


def make_ops(
    device: torch.device,
    *,
    workspace: Workspace | None = None,
    chooser: AttentionChooser | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Ops:
    """The op table of one device, for one stream at a time.

    workspace: scratch memory, made here if None. chooser: shared by the devices of a run, so that equal devices
    compute equal bits. dtype: of everything that is not kept in float32.
    """
    workspace = workspace or Workspace(device)
    linear = LinearOp(workspace, dtype)
    has_torch_products = device.type == "cuda" and torch.cuda.get_device_capability(device) == _TORCH_PRODUCTS_ON

    def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, is_interleaved: bool) -> torch.Tensor:
        return rope(x, Angles(cos, sin, is_interleaved), dtype=dtype)

    def prepare(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cells: tuple[torch.Tensor, torch.Tensor],
        angles: tuple[torch.Tensor, torch.Tensor],
        gains: tuple[torch.Tensor | None, torch.Tensor | None],
        *,
        eps: float,
        is_interleaved: bool,
    ) -> torch.Tensor:
        how = Angles(*angles, is_interleaved), HeadGains(*gains, eps)
        if cells[0].dtype == torch.uint8:
            return prepare_q8_heads(q, k, v, cells, *how, dtype=dtype)
        return prepare_heads(q, k, v, cells, *how)

    def prepare_each(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        caches: tuple[torch.Tensor, torch.Tensor],
        steps: Steps,
        angles: tuple[torch.Tensor, torch.Tensor],
        gains: tuple[torch.Tensor | None, torch.Tensor | None],
        *,
        eps: float,
        is_interleaved: bool,
    ) -> torch.Tensor:
        how = Angles(*angles, is_interleaved), HeadGains(*gains, eps)
        if caches[0].dtype == torch.uint8:
            return prepare_q8_steps(q, k, v, caches, steps, *how, dtype=dtype)
        return prepare_steps(q, k, v, caches, steps, *how)

    def choose_experts(
        x: torch.Tensor,
        gain: torch.Tensor,
        router: torch.Tensor,
        bias: torch.Tensor | None,
        logit_bias: torch.Tensor | None,
        *,
        eps: float,
        n_used: int,
        gating: int,
        is_normalised: bool,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        choice = Choice(n_used, gating, is_normalised, scale, bias, logit_bias)
        return route(x, gain, eps, router, choice, dtype=dtype)

    return Ops(
        embed=embed,
        linear=linear.linear,
        linear_heads=linear.linear_heads,
        rms_norm=partial(rms_norm, dtype=dtype),
        rope_halves=partial(rotate, is_interleaved=False),
        rope_pairs=partial(rotate, is_interleaved=True),
        attention=AttentionOp(device, chooser or AttentionChooser(), dtype),
        swiglu=partial(swiglu, dtype=dtype),
        experts=MoeOp(workspace, dtype, may_use_torch=has_torch_products and dtype == torch.bfloat16),
        widen=widen_into,
        plain=plain_into,
        divide=divide,
        fetch=fetch,
        look_up=look_up,
        fill=fill,
        place=place,
        prepare_heads=prepare,
        prepare_steps=prepare_each,
        attend_steps=partial(attend_steps, dtype=dtype),
        delta_steps=delta_steps,
        mail=Mail(put_mail, take_mail, add_mail, copy_pinned),
        scratch=workspace.buffers,
        route=choose_experts,
        add_linear=linear.add_linear,
        linears=linear.linears,
        norm_linears=linear.norm_linears,
        normed_dtype=dtype,
        q8_rows=TritonRows(workspace, dtype),
    )
