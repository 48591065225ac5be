"""Rates of `overspill calibrate`, kept for a machine in a file of the user's cache folder.

The file says what hardware and which version of the measurement it is of: one of any other is left alone, and rates
are measured anew. Its name follows from the hardware, so machines that share a home folder keep apart. It is written
aside and moved into place, so a reader sees all of it or nothing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from overspill.errors import UserError
from overspill.placement.rates import PartyRates, party_rates_from

VERSION: Final = 1
_GIB = 1 << 30
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What rates depend on. devices: see `Device.description`, in order. n_threads: that the CPU's part uses."""

    devices: tuple[str, ...]
    cpu: str
    n_cores: int
    n_threads: int
    memory_gib: int

    @classmethod
    def of(cls, devices: Sequence[str], *, n_threads: int, memory_bytes: int) -> Hardware:
        """This machine, with so many devices, threads and bytes of host memory."""
        n_cores = len(os.sched_getaffinity(0))
        return cls(
            devices=tuple(devices),
            cpu=_cpu_name(Path("/proc/cpuinfo")),
            n_cores=n_cores,
            n_threads=n_threads,
            memory_gib=round(memory_bytes / _GIB),
        )

    def as_record(self) -> dict[str, Any]:
        """Of JSON types."""
        return asdict(self) | {"devices": list(self.devices)}


class Saved(NamedTuple):
    """Rates of one type of weights, and when they were measured."""

    party_rates: tuple[PartyRates, ...]
    measured: str


def _cpu_name(path: Path) -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", path.read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else "unknown"


def file_of(hardware: Hardware) -> Path:
    """Where the rates of a machine are kept: below `XDG_CACHE_HOME`, or `~/.cache`."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    name = hashlib.sha256(json.dumps(hardware.as_record(), sort_keys=True).encode()).hexdigest()[:12]
    return folder / "overspill" / f"rates-{name}.json"


def load_rates(hardware: Hardware) -> dict[str, Saved]:
    """Saved rates by type of weights; none where the file is absent, damaged (a line says so) or of something else."""
    path = file_of(hardware)
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(record, dict):
            raise UserError(f"{path}: no object")
        if record.get("version") != VERSION or record.get("hardware") != hardware.as_record():
            return {}
        return {name: _saved(of_type, str(path), len(hardware.devices)) for name, of_type in record["rates"].items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UserError) as error:
        reason = " ".join(str(error).split())
        _log.warning("%s: saved rates cannot be used (%s); overspill calibrate writes them anew", path, reason)
        return {}


def _saved(record: Mapping[str, Any], path: str, n_devices: int) -> Saved:
    return Saved(party_rates_from(record["party_rates"], path, n_devices), str(record["measured"]))


def save_rates(hardware: Hardware, rates: Mapping[str, tuple[PartyRates, ...]]) -> Path:
    """Keep rates by type of weights, beside those of other types. `UserError` where the file cannot be written."""
    path, now = file_of(hardware), datetime.now(UTC).isoformat(timespec="seconds")
    all_rates = load_rates(hardware) | {name: Saved(of_type, now) for name, of_type in rates.items()}
    record = {
        "version": VERSION,
        "hardware": hardware.as_record(),
        "rates": {
            name: {"measured": saved.measured, "party_rates": [rates.as_record() for rates in saved.party_rates]}
            for name, saved in all_rates.items()
        },
    }
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        raise UserError(f"{path}: rates cannot be saved ({error.strerror}); set XDG_CACHE_HOME") from None
    return path
