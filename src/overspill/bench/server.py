"""Measuring a server as its users meet it: the first and the following requests, one client or many at once.

A round is one request from each client, all sent together; the first round meets a server that has not seen such a
prompt yet. Every prompt begins with words of its own, so that no round profits from the prefix of another.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from overspill.bench.bench import Test, parse_numbers, parse_pair
from overspill.bench.client import Sample, ServerUnderTest
from overspill.errors import UserError

_WORDS = (
    "time people water number part sound work place year back thing name sentence man line boy farm end men land home "
    "hand picture air animal house page letter point mother answer study world food country plant school father tree "
    "city earth eye thought head story example life paper group side feet car mile night sea book idea face mountain "
    "river state list mind body music color sun question fish area dog horse bird problem room knew king town field"
)


@dataclass(frozen=True, kw_only=True)
class ServerBench:
    """What to measure: each test with each number of clients, so many rounds."""

    tests: tuple[Test, ...]
    clients: tuple[int, ...]
    repetitions: int

    @classmethod
    def parse(cls, *, n_prompt: str, n_gen: str, pairs: Sequence[str], clients: str, repetitions: int) -> ServerBench:
        """From flag texts: every prompt length with every answer length, and the pairs. UserError names the flag."""
        if repetitions < 1:
            raise UserError(f"-r {repetitions}: give at least 1")
        lengths = [(p, g) for p in parse_numbers("-p", n_prompt) for g in parse_numbers("-n", n_gen)]
        lengths += [parse_pair(pair) for pair in pairs]
        if any(p < 1 or g < 1 for p, g in lengths):
            raise UserError("--server: give prompts (-p) and answers (-n) of at least 1 token")
        n_clients = parse_numbers("--clients", clients)
        if min(n_clients) < 1:
            raise UserError(f"--clients {clients}: give at least 1")
        tests = tuple(Test(p, g, 0) for p, g in lengths)
        return cls(tests=tests, clients=tuple(n_clients), repetitions=repetitions)


@dataclass(frozen=True, kw_only=True)
class Round:
    """A round that is over. i_round: 0 for the first of its test."""

    test: Test
    n_clients: int
    i_round: int
    samples: tuple[Sample, ...]

    @property
    def prompt_ts(self) -> float:
        """Prompt tokens per second: as the server says for one client; for several, all of them until the last one's
        first token."""
        if self.n_clients == 1:
            return self.samples[0].prompt_per_second
        seconds = max(s.first_s for s in self.samples) - min(s.start_s for s in self.samples)
        return sum(s.n_prompt for s in self.samples) / seconds

    @property
    def generated_ts(self) -> float:
        """Generated tokens per second of all clients, from the first token of the first to the last one's end."""
        seconds = max(s.end_s for s in self.samples) - min(s.first_s for s in self.samples)
        n_timed = sum(s.n_generated - 1 for s in self.samples)
        return n_timed / seconds if n_timed > 0 and seconds > 0 else 0.0

    @property
    def n_cached(self) -> int:
        """Prompt tokens that the server did not compute."""
        return sum(s.n_cached for s in self.samples)

    def ttft_ms(self, percent: float) -> float:
        """A percentile of the time to the first token."""
        return 1e3 * percentile([s.ttft_s for s in self.samples], percent)

    def gap_ms(self, percent: float) -> float:
        """A percentile of the time between two tokens of an answer; 0 where there are no two."""
        gaps = [gap for s in self.samples for gap in s.gaps_s]
        return 1e3 * percentile(gaps, percent) if gaps else 0.0


def bench_server(server: ServerUnderTest, bench: ServerBench, *, text: str | None = None) -> Iterator[Round]:
    """All rounds, as they are over. text: what prompts are made of; else common words."""
    words = text.split() if text is not None else random.Random(0).choices(_WORDS.split(), k=20_000)
    ids = server.tokenize(" ".join(words))
    if not ids:
        raise UserError("--text: the text has no tokens")
    i_prompt = 0
    for n_clients in bench.clients:
        for test in bench.tests:
            for i_round in range(bench.repetitions):
                prompts = [_prompt(server, ids, test.n_prompt, i_prompt + i) for i in range(n_clients)]
                i_prompt += n_clients
                yield Round(test=test, n_clients=n_clients, i_round=i_round, samples=_round(server, prompts, test))


def percentile(values: Sequence[float], percent: float) -> float:
    """Between the two nearest ranks, as NumPy's default does."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _round(server: ServerUnderTest, prompts: Sequence[Sequence[int]], test: Test) -> tuple[Sample, ...]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        return tuple(pool.map(lambda ids: server.complete(ids, test.n_gen), prompts))


def _prompt(server: ServerUnderTest, ids: Sequence[int], n_prompt: int, i_prompt: int) -> list[int]:
    """A prompt of so many tokens that begins unlike any other."""
    head = server.tokenize(f"{i_prompt} ")[:n_prompt]
    n_rest = n_prompt - len(head)
    return [*head, *(ids[i % len(ids)] for i in range(n_rest))]
