"""What people and programs read of a placement."""

from __future__ import annotations

import json
import shlex

from overspill.options import Options
from overspill.placement.notes import ranges
from overspill.placement.plan import Placement, place
from overspill.placement.report import as_dict, report
from overspill.placement.shape import ModelShape
from tests.pure.placement_models import MIB, make_machine, make_shape


def example() -> tuple[ModelShape, Placement]:
    shape = make_shape(8, expert_bytes=900 * MIB, n_lead=1)
    placement = place(shape, make_machine(24, 24), Options(n_cpu_moe=3), n_ubatch=512, n_wave=4096, grain=1)
    return shape, placement


def test_table() -> None:
    shape, placement = example()
    lines = report(shape, placement)
    assert lines[0] == "T-moe: 8 layers, 6420 MiB of weights (table in MiB)"
    header, *rows = (line.split("  ") for line in lines[1:5])
    assert [cell.strip() for cell in header if cell][:3] == ["device", "layers", "weights"]
    table = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert table[0][:2] == ["CUDA0", "4"]
    assert table[0][2] == f"{(4 * 10 + 2 * 900):.1f}"
    assert table[0][-1] == "2 resident, 1 host"
    assert table[1][:2] == ["CUDA1", "4+output"]
    assert table[1][-1] == "3 resident, 1 host"
    assert table[2][0] == "host"
    assert table[2][2] == f"{20 + 1800:.1f}"


def test_columns_are_aligned() -> None:
    lines = report(*example())[1:5]
    end_of_weights = [line.index(cell) + len(cell) for line, cell in zip(lines, ["weights", "1840.0"], strict=False)]
    assert len(set(end_of_weights)) == 1
    assert not any(line != line.rstrip() for line in lines)


def test_lines_after_the_table() -> None:
    shape, placement = example()
    text = "\n".join(report(shape, placement))
    assert "context 4096 cells, ubatch 512, wave 4096, grain 1, uploads per wave 1800.0 MiB" in text
    assert "layers on CUDA0: 0,2,4,6" in text
    assert "staging CUDA1: 2 slots of 900.0 MiB, 16 of 16 experts" in text
    assert "note: --n-cpu-moe 3: routed experts of 2 layers are in host RAM" in text
    flags = next(line for line in text.splitlines() if line.startswith("flags: "))
    assert tuple(shlex.split(flags.removeprefix("flags: "))) == placement.flags


def test_dict_is_json_and_adds_up() -> None:
    shape, placement = example()
    record = json.loads(json.dumps(as_dict(shape, placement)))
    assert record["layer_device"] == ["CUDA0", "CUDA1"] * 4
    assert record["output_device"] == "CUDA1"
    assert record["host_expert_bytes"] == 1800 * MIB
    assert [d["name"] for d in record["devices"]] == ["CUDA0", "CUDA1", "host"]
    assert record["devices"][0]["layers"] == [0, 2, 4, 6]
    assert record["devices"][0]["upload_bytes"] == record["devices"][1]["upload_bytes"] == 900 * MIB
    for device in record["devices"]:
        parts = ("weights_bytes", "kv_bytes", "compute_bytes", "staging_bytes")
        assert device["used_bytes"] == sum(device[part] for part in parts) <= device["free_bytes"]
    assert record["home"]["token_embd.weight"] == "host"


def test_ranges() -> None:
    assert ranges([0, 1, 2, 3, 7, 9, 10]) == "0-3,7,9-10"
    assert ranges([]) == ""
