"""At what rates links and CPU read host memory while they share the experts of few tokens.

Rates taken alone add up to more than what memory gives, so these are taken with all at work (`overspill calibrate`),
or given in the JSON of a machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Final

from overspill.errors import UserError
from overspill.placement.fields import checked

_FIELDS: Final = {
    "n_tokens": int,
    "links_gbps": tuple,
    "links_beside_cpu_gbps": tuple,
    "cpu_gbps": float,
    "cpu_call_us": float,
}


@dataclass(frozen=True, slots=True)
class PartyRates:
    """Rates, GB/s, at the experts that `n_tokens` meet in a layer; those of links by device, in the machine's order.

    links_gbps: kernels of all devices read over their links, the CPU rests. links_beside_cpu_gbps: it computes at the
    same time, and cpu_gbps is what it reads then. cpu_call_us: what its part takes besides, however small.
    """

    n_tokens: int
    links_gbps: tuple[float, ...]
    links_beside_cpu_gbps: tuple[float, ...]
    cpu_gbps: float
    cpu_call_us: float

    def of_devices(self, numbers: Sequence[int]) -> PartyRates:
        """The rates of some devices: a lower bound, as all were measured together."""
        links, beside = (tuple(gbps[i] for i in numbers) for gbps in (self.links_gbps, self.links_beside_cpu_gbps))
        return PartyRates(self.n_tokens, links, beside, self.cpu_gbps, self.cpu_call_us)

    def as_record(self) -> dict[str, Any]:
        """Of JSON types, as `party_rates_from` reads them."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}


def party_rates_from(records: Sequence[Any], path: str, n_devices: int) -> tuple[PartyRates, ...]:
    """From JSON, ascending by tokens. `UserError` that names file and field."""
    found = [_one_from(record, path, f"party_rates[{i}].", n_devices) for i, record in enumerate(records)]
    for i, (rates, following) in enumerate(pairwise(found)):
        if rates.n_tokens >= following.n_tokens:
            raise UserError(f"{path}: party_rates[{i + 1}].n_tokens is {following.n_tokens}; give ascending numbers")
    return tuple(found)


def _one_from(record: Any, path: str, where: str, n_devices: int) -> PartyRates:
    fields = checked(record, path, where, _FIELDS, {})
    for name in ("links_gbps", "links_beside_cpu_gbps"):
        if len(fields[name]) != n_devices:
            raise UserError(f"{path}: {where}{name} has {len(fields[name])} rates for {n_devices} devices")
    if fields["n_tokens"] == 0:
        raise UserError(f"{path}: {where}n_tokens is 0; give at least 1")
    return PartyRates(
        n_tokens=fields["n_tokens"],
        links_gbps=tuple(fields["links_gbps"]),
        links_beside_cpu_gbps=tuple(fields["links_beside_cpu_gbps"]),
        cpu_gbps=fields["cpu_gbps"],
        cpu_call_us=fields["cpu_call_us"],
    )
