"""The benchmark of scaling: its rows on virtual devices, and the plans that its settings for GPUs make."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scaling import COUNTS, LONG, SHAPES, gpu_settings, main, with_efficiency
from scaling_predicted import described, plan_of

from overspill.pipeline.schedule import Order
from tests.helpers.cli import Capture

N_LAYER, N_VIRTUAL_LAYERS, N_UBATCHES = 8, 16, 4


@pytest.mark.parametrize("n_devices", COUNTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_settings_of_gpus(shape: str, n_devices: int) -> None:
    """On a described host, with which they share all but the devices."""
    seen = []
    for setting in gpu_settings(shape, n_devices, N_LAYER):
        plan = plan_of(setting, described(400.0, 600.0))
        assert [device.name for device in plan.machine.devices] == setting.options["devices"].split(",")
        assert plan.schedule.order == setting.schedule
        assert plan.has_host_experts == all(plan.layout.slabs) == (setting.experts_home == "host")
        dealt = tuple(i % n_devices for i in range(N_LAYER))
        is_dealt = plan.schedule.order is Order.BREADTH_FIRST
        assert plan.layout.layer_device == (dealt if is_dealt else tuple(sorted(dealt)))
        assert plan.placement.n_wave == max(LONG) == max(test.n_tokens for test in setting.tests)
        seen.append((setting.experts_home, plan.schedule.order.value))
    assert sorted(seen) == sorted(
        (home, order) for home in ("host", "resident") for order in ("breadth-first", "depth-first")
    )


def test_rows_of_virtual_devices(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "rows.json"
    args = ["--devices", "virtual", "--counts", "1,2", "--link-gbps", "0.5", "--repetitions", "1", "--out", str(out)]
    main(args)
    document = json.loads(out.read_text())
    rows = document["rows"]
    assert document["command"].split()[1:] == ["benchmarks/scaling.py", *args]
    assert [(r["n_devices"], r["schedule"], r["grain"]) for r in rows] == [
        (1, "breadth-first", 1),
        (1, "depth-first", N_VIRTUAL_LAYERS),
        (2, "breadth-first", 1),
        (2, "depth-first", N_VIRTUAL_LAYERS // 2),
    ]
    n_bytes = rows[0]["uploaded_bytes"]
    for row in rows:
        assert row["uploaded_bytes"] == n_bytes * (1 if row["schedule"] == "breadth-first" else N_UBATCHES)
        assert len(row["busy"]) == len(row["upload_gbps"]) == row["n_devices"]
        assert all(0 < rate < 0.5 for rate in row["upload_gbps"].values())
        assert row["predicted_ts"] > 0
    assert rows[0]["efficiency"] == rows[1]["efficiency"] == 1
    assert rows[2]["efficiency"] == pytest.approx(rows[2]["avg_ts"] / rows[0]["avg_ts"] / 2, abs=1e-3)
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 2 + len(rows)


def test_efficiency_compares_like_with_like() -> None:
    same = {"model_filename": "a", "experts_home": "host", "n_prompt": 8, "n_gen": 0}
    rows = [
        same | {"n_devices": 2, "schedule": "depth-first", "avg_ts": 30.0},
        same | {"n_devices": 1, "schedule": "depth-first", "avg_ts": 20.0},
        same | {"n_devices": 2, "schedule": "breadth-first", "avg_ts": 40.0},
    ]
    assert [row["efficiency"] for row in with_efficiency(rows)] == [0.75, 1.0, None]
