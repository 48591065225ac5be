"""Every option of a user, in one frozen value that is checked once.

Each field carries its command-line flags and one line of help; flags are spelled as in llama.cpp wherever the
meaning is the same. A field holds the parsed value: the `parse_*` functions below turn flag texts into it. What is
wrong with a value alone is refused here; what is wrong for a given machine or model (more shares than devices, an
unknown device name) is refused by the placement, which knows them.

Invariant: an `Options` that exists is valid, and never changes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from types import MappingProxyType
from typing import Final, NamedTuple, TypeVar

from overspill.errors import UserError

MIB: Final = 1 << 20

_T = TypeVar("_T")


def _option(default: _T, flags: str, doc: str) -> _T:
    """A dataclass field with its flags (separated by spaces, the long one first) and its help line."""
    return field(default=default, metadata={"flags": tuple(flags.split()), "doc": doc})


class Override(NamedTuple):
    """One `-ot` item: tensors whose name contains a match of `pattern` go to the device named `target`."""

    pattern: str
    target: str


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user asked for. `UserError` naming the flag when a value cannot mean anything."""

    devices: str = _option("auto", "--devices -dev", "devices in pipeline order: auto, none, or names with commas")
    device_memory: tuple[int, ...] | None = _option(
        None, "--device-memory", "most bytes to use per device (one value for all, or one each); None: all there is"
    )
    n_gpu_layers: int | str = _option(
        -1, "--n-gpu-layers -ngl", "layers on devices, counted from the end, the output as one; -1/auto: fit, all"
    )
    tensor_split: tuple[float, ...] = _option((), "--tensor-split -ts", "share of the layers per device; 0: unused")
    split_mode: str = _option("layer", "--split-mode -sm", "layer: over all devices; none: the main one alone")
    main_gpu: int = _option(0, "--main-gpu -mg", "the device that `-sm none` uses")
    override_tensor: tuple[str, ...] = _option(
        (), "--override-tensor -ot", "items REGEX=DEVICE, the first that matches a tensor's name wins"
    )
    cpu_moe: bool = _option(False, "--cpu-moe -cmoe", "all routed experts in host RAM")
    n_cpu_moe: int = _option(0, "--n-cpu-moe -ncmoe", "routed experts of N layers in host RAM")
    fit: str = _option("on", "--fit -fit", "on: place what the flags leave open; balanced: equal slices; off: literal")
    fit_target_mib: tuple[int, ...] | None = _option(
        None, "--fit-target -fitt", "MiB to leave free (one for all, or one each); None: 1024, 0 on capped devices"
    )
    fit_ctx: int = _option(4096, "--fit-ctx -fitc", "lowest context per sequence that fit may choose")
    moe_cache_mib: int | str = _option(
        0, "--moe-cache-mib", "MiB over all devices for the experts in host RAM used most; auto: what is left; 0: none"
    )
    cache_type_k: str = _option(
        "auto", "--cache-type-k -ctk", "type of keys: auto (bf16 on GPUs, else f32), f16, bf16, q8_0, f32"
    )
    cache_type_v: str = _option("auto", "--cache-type-v -ctv", "type of values, that of the keys")
    n_ctx: int = _option(
        0, "--ctx-size -c", "context cells over all sequences; 0: what the model was made for, or fits"
    )
    n_ubatch: int | None = _option(None, "--ubatch-size -ub", "most tokens computed together; None: chosen")
    n_wave: int | None = _option(None, "--n-wave --batch-size -b", "most tokens that share uploads; None: chosen")
    n_parallel: int = _option(1, "--parallel -np", "sequences served at once")
    ctx_checkpoints: int = _option(
        3, "--ctx-checkpoints -ctxcp", "states kept per sequence to go on from, in models with recurrent layers"
    )
    swa_full: bool = _option(
        False, "--swa-full", "layers that see a window keep all positions, so that prompts are cut back to any of them"
    )
    prefix_reuse: str = _option(
        "any-point",
        "--prefix-reuse",
        "cells a prompt keeps of former ones: any-point, whole-ubatches (same bits), none",
    )
    cache_ram_mib: int = _option(
        0, "--cache-ram -cram", "MiB of host RAM for what slots held, to go on from later; 0: none"
    )
    max_wave_ms: float | None = _option(
        None, "--max-wave-ms", "bound on the time between tokens while prompts of others are computed; None: none"
    )
    schedule: str = _option("auto", "--schedule", "auto, serial, depth-first or breadth-first")
    grain: int | None = _option(None, "--grain", "layers a device takes in turn; None: chosen")
    policy: str = _option("auto", "--policy", "host experts: auto, all (upload whole layers), selected, cpu, spread")
    slab_mib: int | None = _option(None, "--slab-mib", "size of one expert upload; None: a layer where memory allows")
    n_staging_slots: int = _option(2, "--staging-slots", "uploads a device can hold at once")
    max_in_flight: int | None = _option(None, "--max-in-flight", "stages submitted ahead; None: chosen")
    threads: int | None = _option(None, "--threads -t", "CPU threads; None: all, but for some beside GPUs")
    chaos_seed: int | None = _option(None, "--chaos-seed", "testing: random delays on virtual devices")
    trace: str | None = _option(None, "--trace", "file to write a trace of the streams to")
    host_stage: str = _option(
        "auto", "--host-stage -hs", "hand-offs between devices through host memory: auto (where a test fails), 0 or 1"
    )
    host_stage_tile_mib: int = _option(16, "--host-stage-tile-mib", "size of a piece of a hand-off through host memory")
    force_xdev_sync: bool = _option(False, "--force-xdev-sync", "debugging: the host waits wherever devices do")
    record_prompts: str = _option(
        "auto", "--record-prompts", "prompts replay work that was there before: auto (where it is quicker), on, off"
    )
    load_mode: str = _option("auto", "--load-mode -lm", "auto, none, mmap, mlock, mmap+mlock or dio")
    load_threads: int = _option(4, "--load-threads -tl", "threads that read experts into host RAM")
    routing: str = _option(
        "model", "--routing", "testing: experts of tokens: model, or drawn by chance: uniform, zipf:S (rank to the -S)"
    )
    async_load: str = _option("auto", "--async-load", "weights go up to devices while the next are read: auto, on, off")
    h2d_gbps: float | None = _option(None, "--virtual-h2d-gbps", "testing: link speed of virtual devices, GB/s")

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            _check_choice(name, getattr(self, name), choices)
        for name, lowest in _LOWEST.items():
            _check_int(name, getattr(self, name), lowest)
        for name in ("device_memory", "fit_target_mib", "tensor_split", "override_tensor"):
            _check_tuple(name, getattr(self, name))
        for name in ("device_memory", "fit_target_mib"):
            _check_sizes(name, getattr(self, name), lowest=name == "device_memory")
        _check_layers(self.n_gpu_layers)
        if self.moe_cache_mib != "auto":
            _check_int("moe_cache_mib", self.moe_cache_mib, 0)
        _check_shares(self.tensor_split)
        _check_devices(self.devices)
        _check_batches(self.n_ubatch, self.n_wave)
        _check_routing(self.routing)
        if self.cache_type_v not in ("auto", self.cache_type_k):
            raise UserError(f"{flag_of('cache_type_v')} {self.cache_type_v}: give keys (-ctk) and values the same type")
        if self.h2d_gbps is not None and not (math.isfinite(self.h2d_gbps) and self.h2d_gbps > 0):
            raise UserError(f"{flag_of('h2d_gbps')} {self.h2d_gbps}: give a speed above 0, in GB/s")
        if self.max_wave_ms is not None and not (math.isfinite(self.max_wave_ms) and self.max_wave_ms > 0):
            raise UserError(f"{flag_of('max_wave_ms')} {self.max_wave_ms:g}: give milliseconds above 0")
        for override in self.overrides:
            _check_pattern(override)

    @cached_property
    def overrides(self) -> tuple[Override, ...]:
        """The `-ot` items in the order given."""
        return parse_override_tensor(self.override_tensor)

    @property
    def n_states(self) -> int:
        """Recurrent states of a sequence: the checkpoints, and the one at its end."""
        return 1 + self.ctx_checkpoints

    @property
    def n_image_bytes(self) -> int:
        """Host RAM for images of slots."""
        return self.cache_ram_mib * MIB

    @property
    def is_layer_count_open(self) -> bool:
        """True when fit may choose how many layers the devices compute."""
        return self.n_gpu_layers in (-1, "auto")


FLAGS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType({f.name: f.metadata["flags"] for f in fields(Options)})
"""Field name -> its flags, the long one first."""

HELP: Final[Mapping[str, str]] = MappingProxyType({f.name: f.metadata["doc"] for f in fields(Options)})
"""Field name -> its help line."""

_CHOICES: Final = {
    "split_mode": ("none", "layer"),
    "fit": ("on", "off", "balanced"),
    "cache_type_k": ("auto", "f32", "f16", "bf16", "q8_0"),
    "cache_type_v": ("auto", "f32", "f16", "bf16", "q8_0"),
    "prefix_reuse": ("any-point", "whole-ubatches", "none"),
    "schedule": ("auto", "serial", "depth-first", "breadth-first"),
    "policy": ("auto", "all", "selected", "cpu", "spread"),
    "host_stage": ("auto", "0", "1"),
    "load_mode": ("auto", "none", "mmap", "mlock", "mmap+mlock", "dio"),
    "async_load": ("auto", "on", "off"),
    "record_prompts": ("auto", "on", "off"),
}
_LOWEST: Final = {
    "main_gpu": 0,
    "n_cpu_moe": 0,
    "fit_ctx": 1,
    "n_ctx": 0,
    "n_ubatch": 1,
    "n_wave": 1,
    "n_parallel": 1,
    "ctx_checkpoints": 0,
    "cache_ram_mib": 0,
    "grain": 1,
    "slab_mib": 1,
    "n_staging_slots": 2,
    "max_in_flight": 1,
    "host_stage_tile_mib": 1,
    "threads": 1,
    "load_threads": 1,
    "chaos_seed": 0,
}
_NONE_ALLOWED: Final = frozenset({"n_ubatch", "n_wave", "grain", "slab_mib", "max_in_flight", "threads", "chaos_seed"})
_UNITS: Final = {"": MIB, "B": 1, "K": 1 << 10, "M": MIB, "G": 1 << 30, "T": 1 << 40}


def flag_of(name: str) -> str:
    """The flag a message names for a field: the short one where there is one."""
    return FLAGS[name][-1]


def parse_n_gpu_layers(text: str) -> int | str:
    """`-ngl`: a number, `auto` or `all`."""
    return text if text in ("auto", "all") else _to_int("n_gpu_layers", text, "a number, auto or all")


def parse_moe_cache_mib(text: str) -> int | str:
    """`--moe-cache-mib`: a number or `auto`."""
    return text if text == "auto" else _to_int("moe_cache_mib", text, "a number or auto")


def parse_tensor_split(text: str) -> tuple[float, ...]:
    """`-ts`: shares separated by `,` or `/`, as in `3,1`."""
    try:
        return tuple(float(part) for part in re.split("[,/]", text))
    except ValueError:
        raise UserError(f"-ts {text}: shares are numbers separated by ',' or '/', as in 3,1") from None


def parse_fit_target(text: str) -> tuple[int, ...]:
    """`-fitt`: MiB per device separated by `,`, or one value for all."""
    return tuple(_to_int("fit_target_mib", part, "MiB per device, as in 1024 or 1024,512") for part in text.split(","))


def parse_device_memory(text: str) -> tuple[int, ...]:
    """`--device-memory`: sizes separated by `,` -> bytes. Units B, K, M, G, T (also KiB ..., powers of 1024); MiB
    without one."""
    return tuple(_parse_size(part) for part in text.split(","))


def parse_override_tensor(texts: Sequence[str]) -> tuple[Override, ...]:
    """`-ot`: each text holds items `REGEX=DEVICE` separated by `,`; a regex can contain neither `,` nor `=`."""
    return tuple(_parse_override(item) for text in texts for item in text.split(","))


def _parse_override(item: str) -> Override:
    pattern, equals, target = item.partition("=")
    if not (pattern and equals and target.strip()):
        raise UserError(f"-ot {item}: an item is REGEX=DEVICE, and a regex can contain neither ',' nor '='")
    return Override(pattern, target.strip())


def _parse_size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(?:i?B)?|(B))?", text.strip(), re.IGNORECASE)
    if match is None:
        raise UserError(f"--device-memory {text}: give sizes such as 24GiB or 24GiB,12GiB")
    return int(float(match[1]) * _UNITS[(match[2] or match[3] or "").upper()])


def _to_int(name: str, text: str, expected: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{flag_of(name)} {text}: give {expected}") from None


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UserError(f"{flag_of(name)} {value}: choose one of {', '.join(choices)}")


def _check_int(name: str, value: object, lowest: int) -> None:
    if value is None and name in _NONE_ALLOWED:
        return
    if type(value) is not int or value < lowest:
        raise UserError(f"{flag_of(name)} {value}: give a whole number of at least {lowest}")


def _check_tuple(name: str, value: object) -> None:
    if not (value is None or isinstance(value, tuple)):
        raise UserError(f"{flag_of(name)} {value!r}: the field {name} holds a tuple, one entry per item")


def _check_sizes(name: str, values: tuple[int, ...] | None, *, lowest: int) -> None:
    if values is None:
        return
    if not values or any(type(v) is not int or v < lowest for v in values):
        shown = ",".join(str(v) for v in values)
        raise UserError(f"{flag_of(name)} {shown}: give one size for all devices or one each, at least {int(lowest)}")


def _check_layers(value: int | str) -> None:
    if type(value) is not int and value not in ("auto", "all"):
        raise UserError(f"-ngl {value}: give a number, auto or all")


def _check_shares(shares: tuple[float, ...]) -> None:
    shown = ",".join(f"{share:g}" for share in shares)
    if any(not math.isfinite(share) or share < 0 for share in shares):
        raise UserError(f"-ts {shown}: a share is a number of at least 0")
    if shares and sum(shares) == 0:
        raise UserError(f"-ts {shown}: no device gets a layer; give at least one share above 0")


def _check_devices(devices: str) -> None:
    if not all(name.strip() for name in devices.split(",")):
        raise UserError(f"-dev {devices}: give auto, none, or device names separated by ','")


def _check_routing(routing: str) -> None:
    law, _, exponent = routing.partition(":")
    if routing in ("model", "uniform") or (law == "zipf" and re.fullmatch(r"\d+(\.\d+)?", exponent)):
        return
    raise UserError(f"--routing {routing}: give model, uniform, or zipf:S with a number of at least 0, as in zipf:1.0")


def _check_batches(n_ubatch: int | None, n_wave: int | None) -> None:
    if n_ubatch is not None and n_wave is not None and n_wave < n_ubatch:
        raise UserError(f"-b {n_wave}: a wave holds at least one micro-batch of -ub {n_ubatch} tokens")


def _check_pattern(override: Override) -> None:
    try:
        re.compile(override.pattern)
    except re.error as error:
        raise UserError(f"-ot {override.pattern}={override.target}: bad regular expression ({error})") from None


_PARSERS: Final[Mapping[str, Callable[[str], object]]] = {
    "n_gpu_layers": parse_n_gpu_layers,
    "moe_cache_mib": parse_moe_cache_mib,
    "tensor_split": parse_tensor_split,
    "fit_target_mib": parse_fit_target,
    "device_memory": parse_device_memory,
    "override_tensor": lambda text: (text,),
    "h2d_gbps": lambda text: _to_float("h2d_gbps", text),
    "max_wave_ms": lambda text: _to_float("max_wave_ms", text),
}
_TEXTS: Final = frozenset({"devices", "trace", "routing", *_CHOICES})


def options_from(values: Mapping[str, object]) -> Options:
    """`Options` from fields by name; a text is parsed as on the command line. `UserError` for an unknown name."""
    unknown = values.keys() - FLAGS.keys()
    if unknown:
        raise UserError(f"option {min(unknown)!r} is unknown; there are {', '.join(FLAGS)}")
    return Options(**{name: _parsed(name, value) for name, value in values.items()})  # type: ignore[arg-type]


def _parsed(name: str, value: object) -> object:
    if isinstance(value, list):
        return tuple(value)
    if name == "host_stage" and type(value) is int:
        return str(value)
    if not isinstance(value, str) or name in _TEXTS:
        return value
    return _PARSERS[name](value) if name in _PARSERS else _to_int(name, value, "a whole number")


def _to_float(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{flag_of(name)} {text}: give a number") from None
