"""Which devices take part, and what the user fixed about their shares: `-sm`, `-mg`, `-ts`, memory that is unknown.

A device without a share is no stage: it gets no context, no cache, no buffers, and no activation passes through it.
"""

from __future__ import annotations

from dataclasses import dataclass

from overspill.errors import UserError
from overspill.options import Options
from overspill.placement.machine import Machine


@dataclass(frozen=True, slots=True)
class Stages:
    """used: device numbers in pipeline order. shares: the user's, one per used device; None when fit may choose."""

    used: tuple[int, ...]
    shares: tuple[float, ...] | None
    notes: tuple[str, ...]


def choose_stages(machine: Machine, options: Options) -> Stages:
    """`UserError` for shares or a main device that this machine does not have."""
    wished, why = _main_device(machine, options) if options.split_mode == "none" else _shares(machine, options)
    known = [i for i in wished if machine.devices[i].free_bytes > 0]
    notes = [f"{machine.names[i]} is not used: {why}" for i in range(machine.host_index) if i not in wished]
    notes += [f"{machine.names[i]} is not used: {_no_memory(machine, i)}" for i in wished if i not in known]
    if options.tensor_split and options.split_mode == "layer":
        if not known and machine.devices:
            raise UserError("-ts gives shares only to devices without free memory; give one to another device")
        return Stages(tuple(known), tuple(options.tensor_split[i] for i in known), tuple(notes))
    return Stages(tuple(known), None, tuple(notes))


def _main_device(machine: Machine, options: Options) -> tuple[list[int], str]:
    if not machine.devices:
        return [], ""
    if options.main_gpu >= len(machine.devices):
        raise UserError(f"-mg {options.main_gpu}: there are {len(machine.devices)} devices, counted from 0")
    if machine.devices[options.main_gpu].free_bytes == 0:
        name = machine.names[options.main_gpu]
        raise UserError(f"-mg {options.main_gpu}: {name} has no free memory; choose another device")
    return [options.main_gpu], "-sm none uses one device"


def _shares(machine: Machine, options: Options) -> tuple[list[int], str]:
    shares = options.tensor_split
    if not shares:
        return list(range(len(machine.devices))), ""
    if len(shares) > len(machine.devices):
        given = ",".join(f"{share:g}" for share in shares)
        names = ", ".join(machine.names[:-1]) or "none"
        raise UserError(f"-ts {given} has {len(shares)} shares for {len(machine.devices)} devices ({names}); drop some")
    return [i for i, share in enumerate(shares) if share > 0], "no share in -ts"


def _no_memory(machine: Machine, device: int) -> str:
    return "its memory is unknown" if machine.devices[device].total_bytes == 0 else "it has no free memory"
