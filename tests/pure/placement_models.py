"""Models and machines of stated sizes for the placement tests."""

from __future__ import annotations

from collections.abc import Sequence

from overspill.placement.machine import DeviceSpec, Machine
from overspill.placement.shape import ModelShape, sized_tensors

MIB = 1 << 20
GIB = 1 << 30


def make_shape(
    n_layer: int,
    *,
    dense_bytes: int = 10 * MIB,
    expert_bytes: int = 900 * MIB,
    n_lead: int = 0,
    n_expert: int = 16,
    n_expert_used: int = 4,
    n_embd: int = 256,
    n_vocab: int = 1000,
    output_bytes: int = 20 * MIB,
    is_tied: bool = False,
    kv_per_cell: int = 1024,
    state_bytes: int = 0,
    n_ctx_train: int = 4096,
) -> ModelShape:
    """`dense_bytes` and `expert_bytes` are per layer; the first `n_lead` layers have no routed experts."""
    names = [("token_embd.weight", output_bytes), ("output_norm.weight", 4 * n_embd)]
    if not is_tied:
        names.append(("output.weight", output_bytes))
    for l in range(n_layer):
        names += [(f"blk.{l}.attn_q.weight", dense_bytes // 2), (f"blk.{l}.attn_norm.weight", dense_bytes // 4)]
        names.append((f"blk.{l}.ffn_gate_inp.weight", dense_bytes - dense_bytes // 2 - dense_bytes // 4))
        if l >= n_lead and expert_bytes:
            parts = expert_bytes // 3
            names += [(f"blk.{l}.ffn_gate_exps.weight", parts), (f"blk.{l}.ffn_up_exps.weight", parts)]
            names.append((f"blk.{l}.ffn_down_exps.weight", expert_bytes - 2 * parts))
    return ModelShape(
        name="T-moe",
        arch="qwen3moe",
        n_layer=n_layer,
        n_embd=n_embd,
        n_vocab=n_vocab,
        n_expert=n_expert,
        n_expert_used=n_expert_used,
        n_ctx_train=n_ctx_train,
        tensors=sized_tensors(names, n_layer=n_layer),
        kv_bytes_per_cell=(kv_per_cell,) * n_layer,
        state_bytes=(state_bytes,) * n_layer,
        flops_per_token=(1e9,) * n_layer,
        attention_flops=(1e5,) * n_layer,
        output_flops=1e9,
        x_dim=n_embd,
    )


def make_machine(*free_gib: float, host_gib: float = 512) -> Machine:
    """Capped devices CUDA0, CUDA1, ... with this much free memory."""
    sizes = [int(free * GIB) for free in free_gib]
    devices = tuple(DeviceSpec(f"CUDA{i}", size, size, 50.0, 100.0) for i, size in enumerate(sizes))
    return Machine(int(host_gib * GIB), devices, 100.0, 300.0, 100.0)


def host_bytes_by_device(shape: ModelShape, layer_device: Sequence[int], home: dict[str, int], n: int) -> list[int]:
    """Routed expert bytes at home on the host, per device that computes their layer."""
    totals = [0] * n
    for t in shape.tensors:
        if t.layer is not None and t.role == "expert" and layer_device[t.layer] < n and home[t.name] == n:
            totals[layer_device[t.layer]] += t.n_bytes
    return totals
