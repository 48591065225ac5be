"""Passing rows between a GPU and whoever else can reach the same pinned host memory, inside recorded work.

A letter is up to four tensors; each has a box in pinned memory and a flag. The sender's program fills the box and then
raises the flag to the number of the step; the receiver's program waits for that number and empties the box. So two
recordings, or a recording and the CPU, meet without the host's help, and no direct path between devices is needed.

A receiver that waits for too long notes it in `late` and goes on, so that a GPU never hangs for a sender that failed;
whoever started the step must look at `late` before it believes the result.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from overspill.kernels.triton.launch import Kernel, Tuning

MAX_PARTS = 4
_BLOCK = 2048
_MAX_LOOKS = tl.constexpr(4_000_000)


@triton.jit(do_not_specialize=["n_a", "n_b", "n_c", "n_d"])
def _put(step, a, b, c, d, box, flags, n_a, n_b, n_c, n_d, BLOCK: tl.constexpr):
    """Program i: part i, into the box behind the parts before it."""
    i = tl.program_id(0)
    if i == 0:
        _copy(a, box, n_a, BLOCK, False)
    elif i == 1:
        _copy(b, box + n_a, n_b, BLOCK, False)
    elif i == 2:
        _copy(c, box + n_a + n_b, n_c, BLOCK, False)
    else:
        _copy(d, box + n_a + n_b + n_c, n_d, BLOCK, False)
    tl.debug_barrier()
    tl.atomic_xchg(flags + i, tl.load(step), sem="release", scope="sys")


@triton.jit(do_not_specialize=["n_a", "n_b", "n_c", "n_d"])
def _take(step, a, b, c, d, box, flags, late, n_a, n_b, n_c, n_d, BLOCK: tl.constexpr):
    """Program i: part i, as soon as its flag is up."""
    i = tl.program_id(0)
    wanted = tl.load(step)
    found = tl.load(flags + i, volatile=True)
    n_looks = 0
    while (found < wanted) & (n_looks < _MAX_LOOKS):
        found = tl.load(flags + i, volatile=True)
        n_looks += 1
    if found < wanted:
        tl.atomic_xchg(late, wanted, sem="release", scope="sys")
    tl.debug_barrier()
    if i == 0:
        _copy(box, a, n_a, BLOCK, True)
    elif i == 1:
        _copy(box + n_a, b, n_b, BLOCK, True)
    elif i == 2:
        _copy(box + n_a + n_b, c, n_c, BLOCK, True)
    else:
        _copy(box + n_a + n_b + n_c, d, n_d, BLOCK, True)


@triton.jit
def _copy(source, target, n, BLOCK: tl.constexpr, IS_VOLATILE: tl.constexpr):
    for first in range(0, n, BLOCK):
        at = first + tl.arange(0, BLOCK)
        words = tl.load(source + at, mask=at < n, other=0, volatile=IS_VOLATILE)
        tl.store(target + at, words, mask=at < n)


@triton.jit(do_not_specialize=["n"])
def _fetch(target, source, n, BLOCK: tl.constexpr):
    _copy(source, target, n, BLOCK, True)


_put_kernel = Kernel(_put)
_take_kernel = Kernel(_take)
_fetch_kernel = Kernel(_fetch)


def put_mail(step: torch.Tensor, parts: Sequence[torch.Tensor], box: torch.Tensor, flags: torch.Tensor) -> None:
    """Send tensors of this device.

    step: int64 `[1]` on the device, the number of the step. parts: contiguous, of whole 32-bit words. box: int32, in
    pinned memory. flags: int64 `[n parts]` there.
    """
    words = [_words(part) for part in parts]
    _put_kernel((len(words),), (step, *_four(words), box, flags, *_counts(words)), (_BLOCK,), Tuning(n_warps=8))


def take_mail(
    step: torch.Tensor, parts: Sequence[torch.Tensor], box: torch.Tensor, flags: torch.Tensor, late: torch.Tensor
) -> None:
    """Receive what `put_mail`, or the CPU, sent in this step into tensors of this device. late: int64 `[1]`, pinned."""
    words = [_words(part) for part in parts]
    _take_kernel((len(words),), (step, *_four(words), box, flags, late, *_counts(words)), (_BLOCK,), Tuning(n_warps=8))


def copy_pinned(target: torch.Tensor, source: torch.Tensor) -> None:
    """A few words from pinned memory, as they are when the copy runs: both int32 `[n]`."""
    _fetch_kernel((1,), (target, source, len(target)), (_BLOCK,), Tuning(n_warps=8))


def _words(part: torch.Tensor) -> torch.Tensor:
    return part.view(-1).view(torch.int32)


def _four(words: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [*words, *[words[0]] * (MAX_PARTS - len(words))]


def _counts(words: Sequence[torch.Tensor]) -> list[int]:
    return [*map(len, words), *[0] * (MAX_PARTS - len(words))]
