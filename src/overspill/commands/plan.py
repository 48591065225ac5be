"""`overspill plan`: placement, schedule and predicted speed, without loading weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overspill.gguf.source import ModelSource
from overspill.models.check import understand
from overspill.needs import expert_type, main_weight, needs_on, shape_for
from overspill.options import Options, options_from
from overspill.pipeline.choose import Plan, choose
from overspill.pipeline.schedule import Policy
from overspill.pipeline.simulate import WaveShape, grid
from overspill.placement.machine import Machine
from overspill.placement.report import as_dict, report

_GRID_UBATCHES = 3
_SHOWN_TOKENS = (1, 4, 16)


@dataclass(frozen=True)
class MadePlan:
    """A plan, and what one decoded token is predicted to take after the reference prompt."""

    plan: Plan
    decode_us: float

    @property
    def decode_per_second(self) -> float:
        return 1e6 / self.decode_us


def make_plan(source: ModelSource, machine: Path | None, options: Mapping[str, Any]) -> MadePlan:
    """Plan for the machine at hand, or for one described in a file."""
    chosen = options_from(options)
    _, hparams, specs, source = understand(source)
    if machine is None:
        from overspill.hardware import machine_for

        target = machine_for(chosen, main_weight(source, specs))
    else:
        target = Machine.from_json(machine).select(chosen.devices).capped(chosen.device_memory)
    shape = shape_for(target, chosen, source, hparams, specs)
    plan = choose(shape, target, chosen, needs_on(target, chosen, hparams, specs))
    if machine is None and plan.n_spread_tokens:
        plan = _with_saved_rates(plan, chosen, expert_type(source, specs))
    decode = plan.predict(WaveShape.of_step(1, sum(plan.reference.n_tokens)))
    return MadePlan(plan, decode.wave_us)


def _with_saved_rates(plan: Plan, options: Options, type_name: str) -> Plan:
    from overspill.calibration import with_saved_rates
    from overspill.hardware import n_threads_for, open_for

    devices = open_for(options)
    try:
        return with_saved_rates(plan, devices, n_threads_for(options), type_name)
    finally:
        devices.close()


def _shares(plan: Plan) -> dict[str, dict[str, dict[str, int]]]:
    """Experts by party, by owner of a layer, by number of tokens."""
    names = plan.machine.names
    return {
        str(n): {
            names[shares[0][0]]: {names[party]: count for party, count in shares}
            for shares in plan.step_schedule(n).shares
            if shares
        }
        for n in _SHOWN_TOKENS
        if plan.step_schedule(n).policy is Policy.SPREAD
    }


def plan_dict(made: MadePlan) -> dict[str, Any]:
    """Everything the text says, for programs."""
    plan = made.plan
    return as_dict(plan.shape, plan.placement) | {
        "schedule": plan.schedule.order.value,
        "prompts_recorded": plan.schedule.is_recorded,
        "policy": plan.schedule_for(sum(plan.reference.n_tokens)).policy.value,
        "decode_policy": plan.step_schedule(1).policy.value,
        "shares": _shares(plan),
        "party_rates_from": plan.party_rates_from,
        "predicted": {
            "prompt_tokens": sum(plan.reference.n_tokens),
            "prompt_per_second": plan.predicted_tokens_per_second,
            "decode_per_second": made.decode_per_second,
            "uploaded_bytes": plan.predicted.uploaded_bytes,
            "busy": {plan.machine.names[device]: share for device, share in plan.predicted.busy.items()},
        },
    }


def plan_text(made: MadePlan, *, with_grid: bool) -> str:
    """For people."""
    plan = made.plan
    n_prompt = sum(plan.reference.n_tokens)
    lines = [
        *report(plan.shape, plan.placement),
        f"schedule  {plan.schedule.order}, grain {plan.placement.grain}, ubatch {plan.placement.n_ubatch}, "
        f"wave {plan.placement.n_wave}; host experts: {plan.schedule_for(n_prompt).policy} for prompts, "
        f"{plan.step_schedule(1).policy} for single tokens" + ", prompts recorded" * plan.schedule.is_recorded,
        f"predicted pp{n_prompt} {plan.predicted_tokens_per_second:,.0f} tokens/s, "
        f"tg {made.decode_per_second:,.1f} tokens/s, {plan.predicted.uploaded_bytes / 2**20:,.0f} MiB up a wave",
    ]
    by_tokens = _shares(plan)
    for n, by_owner in by_tokens.items():
        (owner, shares), *_ = by_owner.items()
        parts = ", ".join(f"{name} {count}" for name, count in shares.items())
        lines.append(f"shares    {n} token{'s' * (n != '1')}: of a layer of {owner}, experts of {parts}")
    if by_tokens:
        lines.append(f"          by rates {plan.party_rates_from}; overspill calibrate measures and keeps them")
    if with_grid:
        lines += ["", grid(plan.layout, plan.schedule, _GRID_UBATCHES)]
    return "\n".join(lines)
