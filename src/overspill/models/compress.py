"""Keys of blocks: `ratio` positions become one key, by weights that are learned for each channel (DeepSeek-V4).

A position has candidates and scores. A block's key is the mean of its positions' candidates, weighted by the softmax of
their scores, normed, and rotated as if it stood at the block's first position. Where means overlap, a position has two
candidates: the first counts in the block after its own, the second in its own.

The positions of a block that is not complete, and with overlap those of the block before, wait in the state, by
position modulo their number.
"""

from __future__ import annotations

import torch

from overspill.cache.cells import Segment
from overspill.kernels import StateSteps, Steps
from overspill.models.base import Block, UbatchView
from overspill.models.layers import linear
from overspill.models.masked import put_whole_blocks
from overspill.models.rope import Rope
from overspill.models.specs.deepseek4 import Compression


class Compressor:
    """One layer's compression under the names that begin with `name`. rope: of the layer."""

    def __init__(self, block: Block, name: str, shape: Compression, rope: Rope, eps: float) -> None:
        self._block = block
        self._name = name
        self._shape = shape
        self._rope = rope
        self._eps = eps

    def rows(self, x_TD: torch.Tensor, view: UbatchView) -> torch.Tensor:
        """Candidates and scores of each position, float32 `[T, 2, reach * dim]`."""
        block, name = self._block, self._name
        at_TC = block.ops.embed(block.matrix(name + "_ape"), view.positions % self._shape.ratio)
        scores = linear(block, name + "_gate", x_TD) + at_TC
        return torch.stack([linear(block, name + "_kv", x_TD).float(), scores.float()], 1)

    def put(self, rows: torch.Tensor, segment: Segment, state: torch.Tensor, keys: torch.Tensor) -> None:
        """A segment's rows into the state `[R, n_rows, 2, reach * dim]`, and the keys of the blocks that it completes
        into `keys [C / ratio, dim]`."""
        ratio, n_rows = self._shape.ratio, self._shape.n_rows
        first, last = segment.first_pos // ratio, segment.end_pos // ratio
        start = max(0, first - self._shape.reach + 1) * ratio
        before, after = segment.states
        waiting = state[before, _places(start, segment.first_pos, n_rows, rows.device)]
        if before != after:
            state[after].copy_(state[before])
        n_new = min(segment.n_tokens, n_rows)
        state[after, _places(segment.end_pos - n_new, segment.end_pos, n_rows, rows.device)] = rows[-n_new:]
        if last > first:
            whole = torch.cat([waiting, rows])[: last * ratio - start].unflatten(0, (-1, ratio))
            n, positions = last - first, torch.arange(first, last, device=rows.device) * ratio
            keys[first:last] = self._keys(whole[-n:], self._former(whole, n), positions)

    def put_steps(
        self, rows: torch.Tensor, steps: Steps, at: StateSteps, state: torch.Tensor, keys: torch.Tensor
    ) -> None:
        """The same for one position of each of several sequences; keys: `[S, 1, C / ratio, dim]`."""
        ratio, reach, n_rows = self._shape.ratio, self._shape.reach, self._shape.n_rows
        each, positions = torch.arange(len(rows), device=rows.device), steps.positions.long()
        waiting = state.index_select(0, at.before)
        waiting[each, positions % n_rows] = rows
        state.index_copy_(0, at.after.long(), waiting)
        if keys.shape[2] == 0:
            return
        starts = positions // ratio * ratio
        run = torch.arange(-(reach - 1) * ratio, ratio, device=rows.device)
        blocks = waiting[each[:, None], (starts[:, None] + run) % n_rows].unflatten(1, (reach, ratio))
        former = torch.where((starts == 0)[:, None, None, None], _nothing_like(blocks[:, 0]), blocks[:, 0])
        put_whole_blocks(keys, steps, ratio, self._keys(blocks[:, -1], former, starts))

    def _keys(self, own_NRSC: torch.Tensor, former_NRSC: torch.Tensor, positions_N: torch.Tensor) -> torch.Tensor:
        """Keys of N blocks by the rows of each, of the block before each, and the first position of each."""
        dim = self._shape.dim
        parts = [own_NRSC[..., -dim:]]
        if self._shape.reach > 1:
            parts.insert(0, former_NRSC[..., :dim])
        candidates, scores = torch.cat(parts, 1).unbind(2)
        means = (candidates * scores.softmax(1)).sum(1)
        normed = self._block.ops.rms_norm(means, self._block.vector(self._name + "_norm"), self._eps)
        return rotate_last(self._block, normed[:, None], self._rope.angles(positions_N))[:, 0]

    def _former(self, rows_BRSC: torch.Tensor, n: int) -> torch.Tensor:
        """The blocks before each of the last `n`, where they count: nothing, for the first block of a sequence."""
        former = rows_BRSC[-n - 1 : -1]
        return former if len(former) == n else torch.cat([_nothing_like(rows_BRSC[:1]), former])


def _nothing_like(rows_BRSC: torch.Tensor) -> torch.Tensor:
    """Rows that do not count in a mean."""
    nothing = torch.zeros_like(rows_BRSC)
    nothing[:, :, 1] = float("-inf")
    return nothing


def _places(first: int, last: int, n_rows: int, device: torch.device) -> torch.Tensor:
    """Where positions `first <= p < last` wait."""
    return torch.arange(first, last, device=device) % n_rows


def rotate_last(block: Block, x_THA: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate the last channels of each head, in pairs of neighbours."""
    n_plain = x_THA.shape[-1] - 2 * angles[0].shape[-1]
    plain, rotated = x_THA[..., :n_plain], x_THA[..., n_plain:].contiguous()
    return torch.cat([plain, block.ops.rope_pairs(rotated, *angles)], -1)
