"""Memory that GPU kernels take beside named buffers, as formulas: a plan counts it without a GPU at hand.

`kernels.triton` allocates by them; nothing here imports it.
"""

from __future__ import annotations

DEFAULT_WEIGHT_BYTES = 512 << 20
"""Room for resident experts that are dequantised for one product; more of them are taken in parts."""

FEW_TOKENS = 16
"""Most tokens that read experts as they are stored, block by block, in a product for each token and expert."""

MAX_SPREAD_TOKENS = 512
"""Most tokens whose experts are shared out without the host. More meet nearly all, and all go up sooner."""

MAX_SLICES = 2
"""Slices of an expert, when few experts are shared out among several parties."""

DENSE_PART_BYTES = 64 << 20
"""The same for a dense matrix, such as the head."""

MAX_RECORDED_LAYERS = 2048
"""Most layers in the recordings of prompts on a device, attention and experts counted apart."""

RECORDED_LAYER_BYTES = 130 << 10
"""What the graph of one of them took on an H200."""

_POOL_BYTES = 64 << 20  # what torch's allocator keeps in pieces too small to use


def temporary_bytes(
    n_tokens: int, *, n_embd: int, n_heads_dim: int, n_kv_dim: int, experts: tuple[int, int, int]
) -> int:
    """What the layers of one ubatch take and give back; recorded work keeps it from other work.

    n_heads_dim, n_kv_dim: values of all query heads, and of all key heads, of a token. experts: how many there are,
    how many a token uses, and their width.
    """
    n_experts, n_used, n_ff = experts
    attention = n_tokens * (8 * n_heads_dim + 12 * n_kv_dim + 10 * n_embd + 12 * n_experts)
    return attention + n_tokens * n_used * (2 * n_ff + n_embd) * 2


def kept_bytes(n_tokens: int, *, n_embd: int, experts: tuple[int, int, int]) -> int:
    """What kernels keep beside named buffers and temporaries, parts of torch's pool that are too small included."""
    n_experts, n_used, n_ff = experts
    return workspace_bytes(n_tokens, n_used, n_embd, n_ff, n_experts) + _POOL_BYTES


def workspace_bytes(n_tokens: int, n_used: int, n_embd: int, n_ff: int, n_experts: int, *, item_bytes: int = 2) -> int:
    """What the experts of ubatches of up to `n_tokens` take besides `Workspace.weight_bytes`.

    n_used: experts of a token; n_ff: width of an expert; n_experts: of a layer. The products of torch need the hidden
    values of gate and up in memory of their own besides, and their result; both are counted.
    """
    n_pairs = n_tokens * n_used
    rows = n_pairs * (2 * n_embd + 3 * n_ff) * item_bytes
    indices = 4 * (2 * n_pairs + n_experts + 1 + 2 * (n_pairs // 16 + n_experts + 1))
    return rows + indices
