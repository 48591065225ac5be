"""How many of the experts that tokens need lie in a cache of so many slots: the device's rules, replayed in torch.

    python benchmarks/cache_hits.py [--experts FILE.npz]

FILE: `experts`, int `[layers, tokens, K]`, in the order of a text, as a trained model's router chose them. Beside it,
routing drawn by chance (`--routing`) with as many experts and as many used. Steps of one token; the owner of a layer
fetches half of what is missing, as with two GPUs. Hits are counted from step 64 on. "Best fixed": the slots hold what
this text uses most and are never changed, which nobody could know beforehand.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from overspill.kernels.expert_cache import look_up
from overspill.kernels.sharing import CacheState
from overspill.models.drawn import draw, exponent_of

N_WARM, N_STEPS = 64, 640
SHARES = [(0, 1), (1, 1)]


def hit_rate(ids: torch.Tensor, n_expert: int, n_slots: int) -> float:
    """Of the experts of one layer's steps, `[steps, K]`."""
    state = CacheState(n_slots, 1, *torch.full((4, n_expert), -1, dtype=torch.int32))
    who, tally = torch.empty(n_expert, dtype=torch.int32), torch.zeros(3, dtype=torch.int64)
    for step, named in enumerate(ids):
        if step == N_WARM:
            tally.zero_()
        look_up(named[None], SHARES, who, tally, state)
    return float(tally[0] / tally.sum())


def best_fixed(ids: torch.Tensor, n_expert: int, n_slots: int) -> float:
    """The same, of the experts named most often from `N_WARM` on."""
    used = torch.bincount(ids[N_WARM:].long().flatten(), minlength=n_expert).sort(descending=True).values
    return float(used[:n_slots].sum() / used.sum())


def table(name: str, layers: Iterable[torch.Tensor], n_expert: int) -> list[str]:
    """A row for each size of the cache, averaged over layers."""
    layers = list(layers)
    rows = []
    for share in (1 / 4, 1 / 2, 3 / 4):
        n_slots = int(share * n_expert)
        got, fixed = (np.mean([rate(ids, n_expert, n_slots) for ids in layers]) for rate in (hit_rate, best_fixed))
        rows.append(f"| {name} | {n_slots} of {n_expert} | {got:.1%} | {fixed:.1%} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=Path)
    args = parser.parse_args()
    lines = ["| routing | slots | hits | best fixed |", "|---|---|---|---|"]
    shapes = [(128, 8)]
    if args.experts:
        chosen = torch.from_numpy(np.load(args.experts)["experts"]).int()
        shapes = [(int(chosen.max()) + 1, chosen.shape[2]), *shapes]
        lines += table(args.experts.stem, chosen, shapes[0][0])
    for n_expert, n_used in shapes:
        for routing in ("uniform", "zipf:1.0"):
            layers = [draw(N_STEPS, n_expert, n_used, exponent_of(routing), seed) for seed in range(4)]
            lines += table(f"{routing}, top-{n_used}", layers, n_expert)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
