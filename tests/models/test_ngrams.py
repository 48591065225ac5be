"""Hashes of n-grams against whole numbers of any size, and a table of which only the rows asked for are read."""

from __future__ import annotations

import ctypes
import mmap
import tempfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from overspill.gguf import open_gguf
from overspill.gguf.keys import Keys
from overspill.gguf.types import TensorType
from overspill.llm import LLM
from overspill.models.ngrams import table_rows
from overspill.models.specs.qwen4exp import NGramParams
from overspill.pipeline.history import TokenHistory
from overspill.pipeline.wave import Segment
from overspill.placement.shape import LOOKUP_TABLE
from tests.helpers.edited import Edited
from tests.models.fixtures import fixture

EOS = 7
PARAMS = NGramParams(
    layer=0,
    n_tokens=3,
    multipliers=(2**63 + 12345, 2**62 + 99, 31),
    sizes=(1009, 1013, 2003, 2011),
    offsets=(0, 1009, 2022, 4025),
    dim=4,
    eos=EOS,
    n_taps=4,
)


def expected_rows(ids: list[int], at: int) -> list[int]:
    """Rows of the token at a position, written down from the rule in Python's own numbers."""
    tokens, is_cut = [ids[at]], False
    for back in (1, 2):
        is_cut = is_cut or at < back or ids[at - back] == EOS
        tokens.append(EOS if is_cut else ids[at - back])
    rows = []
    for n, hashes in ((2, (0, 1)), (3, (2, 3))):
        mixed = 0
        for token, multiplier in zip(tokens[:n], PARAMS.multipliers, strict=False):
            mixed ^= token * multiplier % 2**64
        rows += [mixed % PARAMS.sizes[h] + PARAMS.offsets[h] for h in hashes]
    return rows


@pytest.mark.parametrize("sizes", [(12,), (1,) * 12, (5, 1, 6)])
def test_rows(sizes: tuple[int, ...]) -> None:
    ids = [3, 250000, EOS, 9, 11, EOS, EOS, 4, 5, 6, 200001, 8]
    history, rows, first = TokenHistory(2, n_slots=2, n_cells=12), [], 0
    for n in sizes:
        piece = ids[first : first + n]
        before = history.add([1, *piece], [Segment(0, first, 1), Segment(1, first, n)])
        rows.append(table_rows(torch.tensor([1, *piece], dtype=torch.int32), before, PARAMS)[1:])
        first += n
    assert torch.cat(rows).tolist() == [expected_rows(ids, i) for i in range(len(ids))]


def test_a_sequence_that_starts_again_has_other_tokens_before() -> None:
    history = TokenHistory(2, n_slots=1, n_cells=8)
    history.add([10, 11, 12, 13], [Segment(0, 0, 4)])
    assert history.add([21], [Segment(0, 2, 1)]).tolist() == [[11, 10]]
    assert history.add([22], [Segment(0, 3, 1)]).tolist() == [[21, 11]]
    assert history.add([30], [Segment(0, 0, 1)]).tolist() == [[-1, -1]]


def n_resident_pages(view: NDArray[np.uint8]) -> int:
    """Pages of a mapped file that are in memory."""
    n_pages = -(-len(view) // mmap.PAGESIZE)
    flags = (ctypes.c_ubyte * n_pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(len(view)), flags) == 0
    return sum(flag & 1 for flag in flags)


@pytest.mark.parametrize("mode", ["mmap", "none", "mlock"])
def test_only_rows_that_are_asked_for_are_read(mode: str) -> None:
    """A table of 48 MiB in the file, of which a prompt of 40 tokens needs 8 rows each."""
    source, n = Edited.of(open_gguf(fixture("qwen4_exp.gguf"))), 200_000
    values = {"ple.head_vocab_sizes": (n,) * 8, "ple.head_offsets": tuple(range(0, 8 * n, n))}
    made = Keys.of({f"qwen4exp.{name}": value for name, value in values.items()}, "edited")
    keys = Keys({**source.keys._entries, **made._entries}, fixture("qwen4_exp.gguf"))
    with tempfile.TemporaryFile() as file:
        file.truncate(8 * n * 32)
        table = np.memmap(file, np.uint8, "r", shape=(8 * n * 32,))
    source = replace(source, keys=keys).with_blocks(LOOKUP_TABLE, TensorType.F32, (8 * n, 8), table)
    assert n_resident_pages(table) == 0
    with LLM(source, devices="virtual:2", load_mode=mode, n_ctx=64) as llm:
        assert n_resident_pages(table) == 0
        llm.logits([(7 * i + 3) % 500 for i in range(40)])
        assert 200 < n_resident_pages(table) <= 8 * 40
        assert llm.plan.placement.budgets[-1].weights_bytes < 4 << 20
