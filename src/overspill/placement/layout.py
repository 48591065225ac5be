"""Layers to devices in turn: how many each gets, and in which order.

The *grain* is how many layers a device takes before the next one has its turn. With equal devices layer l goes to
device (l // grain) mod N; grain = ceil(L / N) is the contiguous split, grain = 1 the cyclic one. One rule serves all
grains and unequal counts: the layers are dealt in rounds of about grain * N, and in each round every device takes its
count's share of the round.

Invariant: each device gets exactly its count; the order of the devices is the same in every round.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


def apportion(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers that sum to `total` in proportion to `weights`, each within 1 of its exact share.

    Largest remainders get the leftover, the first ones where remainders are equal. At least one weight is above 0.
    """
    scale = total / sum(weights)
    shares = [weight * scale for weight in weights]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: (round(counts[i] - shares[i], 9), i))
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return tuple(counts)


@lru_cache(maxsize=256)
def deal(counts: tuple[int, ...], grain: int) -> tuple[int, ...]:
    """The position in `counts` that each layer goes to, for sum(counts) layers in order."""
    total = sum(counts)
    takers = [(i, count) for i, count in enumerate(counts) if count > 0]
    n_rounds = -(-total // (grain * len(takers))) if takers else 0
    dealt: list[int] = []
    for i_round in range(n_rounds):
        for i, count in takers:
            before = -(-count * i_round // n_rounds)
            after = -(-count * (i_round + 1) // n_rounds)
            dealt.extend([i] * (after - before))
    return tuple(dealt)


def spread(n: int, n_chosen: int) -> list[int]:
    """`n_chosen` of the positions 0..n-1, evenly apart, the last one always among them.

    Each chosen layer has as many resident layers before it as can be, so that its upload hides behind their compute.
    """
    return [(i + 1) * n // n_chosen - 1 for i in range(n_chosen)]
