"""Attention in Triton against the reference, merging of parts, and the choice between ways."""

# ruff: noqa: I001  (where Triton runs is decided before it is imported)
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.helpers.triton_device import DEVICE, DTYPES, assert_near

from overspill.errors import UserError
from overspill.kernels import ref
from overspill.kernels.triton import make_ops
from overspill.kernels.triton.attend import CANDIDATES, Attend, Candidate, past_pieces
from overspill.kernels.triton.chooser import AttentionChooser, Heads, size_class
from overspill.kernels.triton.flash import Partial, flash, flash_partial
from overspill.kernels.triton.merge import merged

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def qkv(
    T: int, C: int, H: int, G: int, A: int, B: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, and keys and values as views of a longer cache."""
    generator = torch.Generator().manual_seed(T + C)
    q, k, v = (torch.randn(s, generator=generator) for s in ((T, H, A), (G, C + 5, A), (G, C + 5, B)))
    return q.to(DEVICE, dtype), k.to(DEVICE, dtype)[:, :C], v.to(DEVICE, dtype)[:, :C]


SIZES = [(1, 1), (1, 37), (3, 3), (3, 70), (64, 64), (64, 130), (130, 130), (20, 300)]
HEADS = {"gqa": (6, 2, 32, 32), "odd-ratio": (7, 1, 24, 24), "latent": (4, 1, 80, 64), "narrow": (2, 2, 8, 8)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize(("n_queries", "n_cells"), SIZES)
def test_equals_the_reference(
    n_queries: int, n_cells: int, heads: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    q, k, v = qkv(n_queries, n_cells, *heads, dtype)
    wanted = ref.attention(q.float(), k.float(), v.float(), scale=0.3)
    assert_near(flash(q, k, v, scale=0.3), wanted)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [1, 8, 33, None])
@pytest.mark.parametrize(("n_queries", "n_cells"), [(1, 70), (33, 100), (40, 40)])
def test_windows_and_sinks(n_queries: int, n_cells: int, window: int | None, has_sinks: bool) -> None:
    q, k, v = qkv(n_queries, n_cells, 4, 2, 16, 16)
    sinks = torch.tensor([-2.0, 0.0, 1.0, 5.0], device=DEVICE) if has_sinks else None
    wanted = ref.attention(q, k, v, scale=0.5, window=window, sinks=sinks)
    assert_near(flash(q, k, v, scale=0.5, window=window, sinks=sinks), wanted)


def test_values_may_be_a_view_of_the_keys() -> None:
    q, k, _ = qkv(20, 50, 4, 1, 48, 48)
    assert_near(flash(q, k, k[..., :32], scale=0.2), ref.attention(q, k, k[..., :32], scale=0.2))


def full(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float) -> Partial:
    """Attention without a mask, and its log of the sum of exponentials."""
    H = q.shape[1]
    k, v = (t.repeat_interleave(H // len(k), 0) for t in (k, v))
    scores = torch.einsum("tha,hca->htc", q, k) * scale
    return Partial(torch.einsum("htc,hca->tha", scores.softmax(-1), v).contiguous(), scores.logsumexp(-1))


def test_parts_merge_to_the_whole() -> None:
    q, k, v = qkv(20, 100, 4, 2, 16, 16)
    whole = flash_partial(q, k[:, 70:], v[:, 70:], scale=0.5)
    for cells in (slice(0, 64), slice(64, 70)):
        whole = merged(whole, full(q, k[:, cells], v[:, cells], scale=0.5))
    assert_near(whole.out.flatten(1), ref.attention(q, k, v, scale=0.5))
    rows = torch.einsum("tha,hca->htc", q, k.repeat_interleave(2, 0)) * 0.5
    rows = rows.masked_fill(~ref.visible(20, 100, None, DEVICE), float("-inf"))
    assert_near(whole.lse, rows.logsumexp(-1))


def test_the_past_is_cut_into_powers_of_two() -> None:
    assert [s.stop - s.start for s in past_pieces(13 * 1024)] == [8192, 4096, 1024]
    assert list(past_pieces(0)) == []
    assert len({s.stop - s.start for n in range(64) for s in past_pieces(n * 1024)}) == 6


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda c: c.name)
@pytest.mark.parametrize(("n_queries", "n_cells"), [(512, 512), (512, 1536), (1024, 9000), (512, 4000)])
def test_every_way_is_right(candidate: Candidate, n_queries: int, n_cells: int) -> None:
    q, k, v = qkv(n_queries, n_cells, 8, 2, 128, 128, torch.bfloat16)
    wanted = ref.attention(q.float(), k.float(), v.float(), scale=0.1)
    assert_near(candidate.attend(q, k, v, scale=0.1), wanted)


class FakeWays:
    """Ways with made-up times: each returns the reference, or nonsense, or refuses."""

    def __init__(self, **times: float | str) -> None:
        self.times = times
        self.n_timed = 0

    def candidates(self, *, choosy: str = "") -> list[Candidate]:
        return [Candidate(n, self.way(n), self.suits(n == choosy)) for n in self.times]

    @staticmethod
    def suits(is_choosy: bool) -> Callable[[int, int], bool]:
        return lambda n_queries, n_cells: n_queries % 512 == 0 or not is_choosy

    def way(self, name: str) -> Attend:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float) -> torch.Tensor:
            if self.times[name] == "refuses":
                raise RuntimeError("no kernel\nfor this")
            self.last = name
            out = ref.attention(q, k, v, scale=scale)
            return -out if self.times[name] == "wrong" else out

        return attend

    def timer(self, run: Callable[[], object]) -> float:
        run()
        self.n_timed += 1
        return float(self.times[self.last])


MODEL = Heads(2, 1, 8, torch.float32)


def chosen(ways: FakeWays, n_queries: int = 20, n_cells: int = 50, *, choosy: str = "") -> str:
    chooser = AttentionChooser(ways.candidates(choosy=choosy), ways.timer)
    return chooser.choose(MODEL, n_queries, n_cells, torch.device("cpu")).name


def test_the_fastest_way_that_is_right_is_chosen() -> None:
    assert chosen(FakeWays(a=300.0, b=100.0, c="wrong", d="refuses")) == "b"


def test_of_ways_about_equally_fast_the_first_is_chosen() -> None:
    assert chosen(FakeWays(a=104.0, b=100.0)) == "a"
    assert chosen(FakeWays(a=106.0, b=100.0)) == "b"


def test_a_way_that_does_not_suit_the_problem_leaves_it_to_the_next() -> None:
    ways = FakeWays(a=100.0, b=300.0, c=200.0)
    chooser = AttentionChooser(ways.candidates(choosy="a"), ways.timer)
    device = torch.device("cpu")
    assert [chooser.choose(MODEL, T, T, device).name for T in (512, 513)] == ["a", "c"]


def test_a_choice_is_measured_once_for_its_kind() -> None:
    ways = FakeWays(a=1.0, b=2.0)
    chooser = AttentionChooser(ways.candidates(), ways.timer)
    for n_queries, n_cells in ((20, 50), (400, 900), (1, 7), (3, 9999)):
        chooser.choose(MODEL, n_queries, n_cells, torch.device("cpu"))
    assert ways.n_timed == 2 * len({size_class(20, 50), size_class(1, 7)})


def test_no_way_at_all_is_an_error_that_names_the_device() -> None:
    with pytest.raises(UserError, match="no attention kernel is right on cpu"):
        chosen(FakeWays(a="wrong", b="refuses"))


def test_the_op_rounds_queries_to_the_dtype_of_the_cache() -> None:
    q, k, v = qkv(5, 9, 4, 2, 16, 16)
    ops = make_ops(DEVICE, dtype=torch.float32)
    got = ops.attention(q.double(), k, v, scale=0.5, window=100)
    assert got.dtype == torch.float32
    assert_near(got, ref.attention(q, k, v, scale=0.5))
