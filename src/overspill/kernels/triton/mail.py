"""Passing rows between a GPU and whoever else can reach the same pinned host memory, inside recorded work.

How a letter lies there: `letter_room`. A sender's program copies a piece into the box and then raises its flag to the
number of the step; a receiver's program waits for that number and takes the piece. So two recordings, or a recording
and the CPU, meet without the host's help, and no direct path between devices is needed. What is received to be added
is not stored before: `add_mail` adds it from the box.

A receiver that waits for too long notes it in `late` and goes on, so that a GPU never hangs for a sender that failed;
whoever started the step must look at `late` before it believes the result.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from overspill.kernels.sharing import Term
from overspill.kernels.triton.launch import Kernel, Tuning
from overspill.letter_room import ALIGNMENT, FLAG_STRIDE, MAX_PARTS, PIECE, n_pieces

# Every warp of a program looks at its flag, and what looks at one place in host memory stands in a queue.
_TUNING = Tuning(n_warps=1)
_MAX_LOOKS = tl.constexpr(4_000_000)
_WIDE = tl.constexpr(ALIGNMENT)
_STRIDE = tl.constexpr(FLAG_STRIDE)


@triton.jit(do_not_specialize=["n_a", "n_b", "n_c", "n_d"])
def _put(step, a, b, c, d, box, flags, n_a, n_b, n_c, n_d, PIECE: tl.constexpr):
    """Program (i, j): piece j of part i."""
    i, first = tl.program_id(0), tl.program_id(1) * PIECE
    if i == 0:
        _copy(a, box, first, n_a, PIECE, False)
    elif i == 1:
        _copy(b, box + _room(n_a), first, n_b, PIECE, False)
    elif i == 2:
        _copy(c, box + _room(n_a) + _room(n_b), first, n_c, PIECE, False)
    else:
        _copy(d, box + _room(n_a) + _room(n_b) + _room(n_c), first, n_d, PIECE, False)
    tl.debug_barrier()
    # An atomic operation on host memory that others look at would take its time. One here orders the words before the
    # number, which a plain store can carry then.
    number = tl.atomic_add(step, 0, sem="release", scope="sys")
    tl.store(flags + (i * tl.num_programs(1) + tl.program_id(1)) * _STRIDE, number, cache_modifier=".wt")


@triton.jit(do_not_specialize=["n_a", "n_b", "n_c", "n_d"])
def _take(step, a, b, c, d, box, flags, late, n_a, n_b, n_c, n_d, PIECE: tl.constexpr):
    """Program (i, j): piece j of part i, as soon as its flag is up."""
    i, first = tl.program_id(0), tl.program_id(1) * PIECE
    _wait(flags + (i * tl.num_programs(1) + tl.program_id(1)) * _STRIDE, tl.load(step), late)
    tl.debug_barrier()
    if i == 0:
        _copy(box, a, first, n_a, PIECE, True)
    elif i == 1:
        _copy(box + _room(n_a), b, first, n_b, PIECE, True)
    elif i == 2:
        _copy(box + _room(n_a) + _room(n_b), c, first, n_c, PIECE, True)
    else:
        _copy(box + _room(n_a) + _room(n_b) + _room(n_c), d, first, n_d, PIECE, True)


@triton.jit(do_not_specialize=["n"])
def _add(
    step, out, a, b, c, d, flags_a, flags_b, flags_c, flags_d, late, n,
    A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Program j: piece j of a + b + c + d. A ...: 0: is not there, 1: lies on this device, 2: comes by mail."""
    j, wanted = tl.program_id(0), tl.load(step)
    if A == 2:
        _wait(flags_a + j * _STRIDE, wanted, late)
    if B == 2:
        _wait(flags_b + j * _STRIDE, wanted, late)
    if C == 2:
        _wait(flags_c + j * _STRIDE, wanted, late)
    if D == 2:
        _wait(flags_d + j * _STRIDE, wanted, late)
    tl.debug_barrier()
    at = j * PIECE + tl.arange(0, PIECE)
    # Words that lie in whole fours can be read four at a time.
    _add_where(out, a, b, c, d, at, at < n // _WIDE * _WIDE, A, B, C, D)
    rest = n // _WIDE * _WIDE + tl.arange(0, _WIDE)
    _add_where(out, a, b, c, d, rest, (rest < n) & (rest // PIECE == j), A, B, C, D)


@triton.jit
def _add_where(
    out, a, b, c, d, at, is_there, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    total = tl.load(a + at, mask=is_there, other=0.0, volatile=A == 2)
    if B != 0:
        total += tl.load(b + at, mask=is_there, other=0.0, volatile=B == 2)
    if C != 0:
        total += tl.load(c + at, mask=is_there, other=0.0, volatile=C == 2)
    if D != 0:
        total += tl.load(d + at, mask=is_there, other=0.0, volatile=D == 2)
    tl.store(out + at, total, mask=is_there)


@triton.jit
def _wait(flag, wanted, late):
    found = tl.load(flag, volatile=True)
    n_looks = 0
    while (found < wanted) & (n_looks < _MAX_LOOKS):
        found = tl.load(flag, volatile=True)
        n_looks += 1
    if found < wanted:
        tl.atomic_xchg(late, wanted, sem="release", scope="sys")


@triton.jit
def _room(n):
    return (n + _WIDE - 1) // _WIDE * _WIDE


@triton.jit
def _copy(source, target, first, n, PIECE: tl.constexpr, IS_VOLATILE: tl.constexpr):
    # Words that lie in whole fours can be moved four at a time.
    at = first + tl.arange(0, PIECE)
    is_there = at < n // _WIDE * _WIDE
    words = tl.load(source + at, mask=is_there, other=0, volatile=IS_VOLATILE)
    tl.store(target + at, words, mask=is_there)
    rest = n // _WIDE * _WIDE + tl.arange(0, _WIDE)
    is_there = (rest < n) & (rest // PIECE * PIECE == first)
    words = tl.load(source + rest, mask=is_there, other=0, volatile=IS_VOLATILE)
    tl.store(target + rest, words, mask=is_there)


@triton.jit(do_not_specialize=["n"])
def _fetch(target, source, n, PIECE: tl.constexpr):
    _copy(source, target, tl.program_id(0) * PIECE, n, PIECE, True)


_put_kernel = Kernel(_put)
_take_kernel = Kernel(_take)
_add_kernel = Kernel(_add)
_fetch_kernel = Kernel(_fetch)


def put_mail(step: torch.Tensor, parts: Sequence[torch.Tensor], box: torch.Tensor, flags: torch.Tensor) -> None:
    """Send tensors of this device.

    step: int64 `[1]` on the device, the number of the step. parts: contiguous, of whole 32-bit words. box, flags: int32
    and int64, in pinned memory, see `letter_room`.
    """
    words = [_words(part) for part in parts]
    grid = len(words), n_pieces([len(word) for word in words])
    _put_kernel(grid, (step, *_four(words), box, flags, *_counts(words)), (PIECE,), _TUNING)


def take_mail(
    step: torch.Tensor, parts: Sequence[torch.Tensor], box: torch.Tensor, flags: torch.Tensor, late: torch.Tensor
) -> None:
    """Receive what `put_mail`, or the CPU, sent in this step into tensors of this device. late: int64 `[1]`, pinned."""
    words = [_words(part) for part in parts]
    grid = len(words), n_pieces([len(word) for word in words])
    _take_kernel(grid, (step, *_four(words), box, flags, late, *_counts(words)), (PIECE,), _TUNING)


def add_mail(step: torch.Tensor, out: torch.Tensor, terms: Sequence[Term], late: torch.Tensor) -> None:
    """out = the sum of the terms, added one after the other. out: float32, contiguous; it may be a term."""
    flat, rest = out.view(-1), list(terms)
    while rest:
        _add_some(step, flat, rest[:MAX_PARTS], late)
        rest = [Term(flat), *rest[MAX_PARTS:]] if len(rest) > MAX_PARTS else []


def _add_some(step: torch.Tensor, out: torch.Tensor, terms: Sequence[Term], late: torch.Tensor) -> None:
    n_absent = MAX_PARTS - len(terms)
    numbers = [*(term.numbers.view(-1).view(torch.float32) for term in terms), *[out] * n_absent]
    flags = [*(late if term.flags is None else term.flags for term in terms), *[late] * n_absent]
    kinds = [*(1 if term.flags is None else 2 for term in terms), *[0] * n_absent]
    args = (step, out, *numbers, *flags, late, len(out))
    _add_kernel((n_pieces([len(out)]),), args, (*kinds, PIECE), _TUNING)


def copy_pinned(target: torch.Tensor, source: torch.Tensor) -> None:
    """A few words from pinned memory, as they are when the copy runs: both int32 `[n]`."""
    _fetch_kernel((n_pieces([len(target)]),), (target, source, len(target)), (PIECE,), _TUNING)


def _words(part: torch.Tensor) -> torch.Tensor:
    return part.view(-1).view(torch.int32)


def _four(words: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [*words, *[words[0]] * (MAX_PARTS - len(words))]


def _counts(words: Sequence[torch.Tensor]) -> list[int]:
    return [*map(len, words), *[0] * (MAX_PARTS - len(words))]
