"""The options: the set of flags is frozen, and each bad value is one line that names its flag."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from overspill.errors import UserError
from overspill.options import (
    FLAGS,
    HELP,
    Options,
    Override,
    options_from,
    parse_device_memory,
    parse_fit_target,
    parse_n_gpu_layers,
    parse_override_tensor,
    parse_tensor_split,
)

FROZEN_FLAGS = """
--devices -dev | --device-memory | --n-gpu-layers -ngl | --tensor-split -ts | --split-mode -sm | --main-gpu -mg
--override-tensor -ot | --cpu-moe -cmoe | --n-cpu-moe -ncmoe | --fit -fit | --fit-target -fitt | --fit-ctx -fitc
--moe-cache-mib | --cache-type-k -ctk | --cache-type-v -ctv
--ctx-size -c | --ubatch-size -ub | --n-wave --batch-size -b | --parallel -np | --ctx-checkpoints -ctxcp | --swa-full
--prefix-reuse | --cache-ram -cram | --max-wave-ms | --schedule | --grain | --policy
--slab-mib | --staging-slots | --max-in-flight | --threads -t | --chaos-seed | --trace | --host-stage -hs
--host-stage-tile-mib | --force-xdev-sync | --record-prompts | --load-mode -lm
--load-threads -tl | --routing | --async-load | --virtual-h2d-gbps
"""


def test_set_of_flags_is_frozen() -> None:
    wanted = [tuple(part.split()) for line in FROZEN_FLAGS.strip().splitlines() for part in line.split("|")]
    assert list(FLAGS.values()) == wanted


def test_no_flag_is_used_twice_and_each_has_help() -> None:
    every = [flag for flags in FLAGS.values() for flag in flags]
    assert len(every) == len(set(every))
    assert [f.name for f in fields(Options)] == list(HELP)
    assert all(HELP.values())


def test_defaults() -> None:
    options = Options()
    assert (options.n_gpu_layers, options.fit, options.fit_ctx, options.n_staging_slots) == (-1, "on", 4096, 2)
    assert options.fit_target_mib is None
    assert options.is_layer_count_open
    assert not Options(n_gpu_layers="all").is_layer_count_open
    assert not Options(n_gpu_layers=-2).is_layer_count_open


def test_frozen_and_keyword_only() -> None:
    with pytest.raises(FrozenInstanceError):
        Options().fit = "off"  # type: ignore[misc]
    with pytest.raises(TypeError):
        Options("auto")  # type: ignore[misc]


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({"split_mode": "row"}, "-sm"),
        ({"fit": "yes"}, "-fit"),
        ({"schedule": "fast"}, "--schedule"),
        ({"policy": "gpu"}, "--policy"),
        ({"load_mode": "pinned"}, "-lm"),
        ({"host_stage": ""}, "-hs"),
        ({"host_stage": "2"}, "-hs"),
        ({"host_stage_tile_mib": 0}, "--host-stage-tile-mib"),
        ({"main_gpu": -1}, "-mg"),
        ({"n_cpu_moe": -3}, "-ncmoe"),
        ({"n_cpu_moe": 2.0}, "-ncmoe"),
        ({"n_ctx": -1}, "-c"),
        ({"n_ctx": True}, "-c"),
        ({"fit_ctx": 0}, "-fitc"),
        ({"n_ubatch": 0}, "-ub"),
        ({"n_wave": 0}, "-b"),
        ({"n_ubatch": 4096, "n_wave": 512}, "-b"),
        ({"n_parallel": 0}, "-np"),
        ({"n_parallel": None}, "-np"),
        ({"grain": 0}, "--grain"),
        ({"slab_mib": 0}, "--slab-mib"),
        ({"n_staging_slots": 1}, "--staging-slots"),
        ({"max_in_flight": 0}, "--max-in-flight"),
        ({"threads": 0}, "-t"),
        ({"load_threads": 0}, "-tl"),
        ({"load_threads": None}, "-tl"),
        ({"chaos_seed": -1}, "--chaos-seed"),
        ({"h2d_gbps": 0.0}, "--virtual-h2d-gbps"),
        ({"max_wave_ms": 0.0}, "--max-wave-ms"),
        ({"max_wave_ms": float("nan")}, "--max-wave-ms"),
        ({"cache_type_k": "q4_0"}, "-ctk"),
        ({"cache_type_k": "f16", "cache_type_v": "bf16"}, "-ctv"),
        ({"prefix_reuse": "some"}, "--prefix-reuse"),
        ({"h2d_gbps": float("nan")}, "--virtual-h2d-gbps"),
        ({"n_gpu_layers": "most"}, "-ngl"),
        ({"n_gpu_layers": 1.5}, "-ngl"),
        ({"tensor_split": (0.0, 0.0, 0.0)}, "-ts"),
        ({"tensor_split": (1.0, -1.0, 1.0)}, "-ts"),
        ({"tensor_split": (1.0, float("inf"))}, "-ts"),
        ({"tensor_split": "3,1"}, "-ts"),
        ({"fit_target_mib": ()}, "-fitt"),
        ({"fit_target_mib": (-1,)}, "-fitt"),
        ({"device_memory": (0,)}, "--device-memory"),
        ({"devices": "CUDA0,"}, "-dev"),
        ({"override_tensor": ("exps",)}, "-ot"),
        ({"override_tensor": ("=CPU",)}, "-ot"),
        ({"override_tensor": ("exps=",)}, "-ot"),
        ({"override_tensor": ("([=CPU",)}, "-ot"),
        ({"override_tensor": "exps=CPU"}, "-ot"),
    ],
)
def test_bad_value_names_its_flag(values: dict[str, Any], flag: str) -> None:
    with pytest.raises(UserError) as error:
        Options(**values)
    assert str(error.value).startswith(flag + " ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "shares"), [("3,1", (3, 1)), ("3/1", (3, 1)), ("0,32,32,32", (0, 32, 32, 32)), ("0.5,1.5", (0.5, 1.5))]
)
def test_tensor_split_text(text: str, shares: tuple[float, ...]) -> None:
    assert parse_tensor_split(text) == shares


@pytest.mark.parametrize("text", ["", "3,", "3;1", "a,b", "3,,1"])
def test_bad_tensor_split_text(text: str) -> None:
    with pytest.raises(UserError, match=r"^-ts "):
        parse_tensor_split(text)


def test_number_texts() -> None:
    assert parse_n_gpu_layers("33") == 33
    assert parse_n_gpu_layers("auto") == "auto"
    assert parse_n_gpu_layers("all") == "all"
    assert parse_fit_target("1024,512") == (1024, 512)
    with pytest.raises(UserError, match=r"^-ngl many"):
        parse_n_gpu_layers("many")
    with pytest.raises(UserError, match=r"^-fitt 1GiB"):
        parse_fit_target("1GiB")


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("24GiB,12GiB", (24 << 30, 12 << 30)),
        ("1.5g", (3 << 29,)),
        ("512", (512 << 20,)),
        ("64 MB", (64 << 20,)),
        ("100B", (100,)),
        ("2T", (2 << 40,)),
    ],
)
def test_device_memory_text(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_device_memory(text) == sizes


@pytest.mark.parametrize("text", ["", "GiB", "-1G", "12 parsecs", "1G,"])
def test_bad_device_memory_text(text: str) -> None:
    with pytest.raises(UserError, match=r"^--device-memory"):
        parse_device_memory(text)


def test_host_stage_is_read_as_a_value_not_as_presence() -> None:
    for value in ("0", "1", "auto"):
        assert options_from({"host_stage": value}).host_stage == value
    assert [options_from({"host_stage": value}).host_stage for value in (0, 1)] == ["0", "1"]
    with pytest.raises(UserError, match=r"^-hs 2: choose one of auto, 0, 1$"):
        options_from({"host_stage": 2})


def test_override_items_keep_their_order_over_flags_and_commas() -> None:
    options = Options(override_tensor=(r"blk\.(1|2)\..*=CUDA1,blk\..*=CPU", "exps=CUDA0"))
    assert options.overrides == (
        Override(r"blk\.(1|2)\..*", "CUDA1"),
        Override(r"blk\..*", "CPU"),
        Override("exps", "CUDA0"),
    )
    assert parse_override_tensor(["a=b=c"]) == (Override("a", "b=c"),)
