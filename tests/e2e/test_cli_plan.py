"""`overspill plan`: for machines that are here and others, and the schedule it prints."""

from __future__ import annotations

import json

import pytest

from tests.helpers.cli import HOST_EXPERT_BYTES, MACHINE, MODEL, SPILLING, Capture, main


def plan_args(*more: str) -> list[str]:
    return ["plan", "--shape", "qwen3-30b-a3b", "--quant", "Q8_0", "--machine", str(MACHINE), "-c", "8192", *more]


def test_plan_for_a_machine_that_is_not_here(capsys: Capture) -> None:
    ran = main(capsys, *plan_args("--device-memory", "12GiB", "--json"))
    assert (ran.code, ran.err) == (0, "")
    plan = json.loads(ran.out)
    assert (plan["arch"], plan["n_ctx"], len(plan["layer_device"])) == ("qwen3moe", 8192, 48)
    gib = 1 << 30
    used = [device["used_bytes"] for device in plan["devices"] if device["name"] != "host"]
    assert all(6 * gib < n <= 12 * gib for n in used)
    # 48 layers of 128 experts of three matrices of 768 x 2048, 34 bytes for 32 values
    expert_bytes = 48 * 128 * 3 * 768 * 2048 // 32 * 34
    assert expert_bytes - 2 * 12 * gib < plan["host_expert_bytes"] < expert_bytes
    predicted = plan["predicted"]
    assert predicted["prompt_tokens"] == 4096
    assert predicted["prompt_per_second"] > predicted["decode_per_second"] > 1
    assert predicted["uploaded_bytes"] >= plan["host_expert_bytes"]
    assert all(0 < share <= 1 for name, share in predicted["busy"].items() if name.startswith("CUDA"))


@pytest.mark.parametrize(("schedule", "n_uploads"), [("breadth-first", 1), ("depth-first", 3)])
def test_plan_prints_the_schedule(capsys: Capture, schedule: str, n_uploads: int) -> None:
    """Three ubatches over two layers: their experts go up once, or once for each."""
    args = plan_args("--layers", "2", "--grain", "1", "-cmoe", "--policy", "all", "--schedule", schedule)
    plain, ran = main(capsys, *args), main(capsys, *args, "--schedule-grid")
    assert f"schedule  {schedule}, grain 1, " in plain.out
    assert "predicted pp4096 " in plain.out
    assert ran.out.startswith(plain.out)
    grid = [row.split() for row in ran.out.removeprefix(plain.out).splitlines()]
    rows = {(row[1], row[2]): row[3:] for row in grid if row}
    for device in ("0", "1"):
        uploads = [cell for cell in rows[device, "upload"] if cell != "."]
        assert uploads == [f"U{device}/0"] * n_uploads
        assert [cell for cell in rows[device, "compute"] if cell[0] == "A"] == [f"A{device}.{m}" for m in range(3)]


def test_plan_of_a_file_on_devices_that_are_here(capsys: Capture) -> None:
    plan = json.loads(main(capsys, "plan", "-m", MODEL, *SPILLING, "--json").out)
    assert plan["host_expert_bytes"] == HOST_EXPERT_BYTES
    assert plan["home"]["blk.0.ffn_up_exps.weight"] == "host"
    assert plan["n_ubatch"] == 16


@pytest.mark.usefixtures("tiny_shape")
def test_plan_of_a_shape(capsys: Capture) -> None:
    plan = json.loads(main(capsys, "plan", "--shape", "tiny", "-dev", "virtual:1", "--json").out)
    assert plan["layer_device"] == ["virtual:0"] * 3
