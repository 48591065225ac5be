"""`overspill bench --server URL`: how a server does, seen from its clients."""

from __future__ import annotations

from overspill.bench.client import ServerUnderTest
from overspill.bench.server import ServerBench, bench_server
from overspill.bench.server_report import OUTPUTS
from overspill.commands.screen import bar
from overspill.errors import UserError


def measure_server(url: str, bench: ServerBench, *, output: str, api_key: str | None, text: str | None) -> str:
    """The report, when all rounds are over."""
    if output not in OUTPUTS:
        raise UserError(f"-o {output}: with --server, choose one of {', '.join(OUTPUTS)}")
    server = ServerUnderTest(url, api_key)
    model = server.model()
    n_rounds = len(bench.tests) * len(bench.clients) * bench.repetitions
    rounds = []
    with bar("measuring", "rounds") as progress:
        for one in bench_server(server, bench, text=text):
            rounds.append(one)
            progress(len(rounds), n_rounds)
    return OUTPUTS[output](model, rounds)
