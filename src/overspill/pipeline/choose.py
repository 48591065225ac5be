"""The plan: placement and schedule together, chosen by simulating the candidates.

Candidates are (schedule, grain, n_ubatch, prompts recorded) as far as the user left them open; each is placed, then a
reference prompt is simulated with the machine's measured rates, and a long one too for those at least half as fast as
the fastest. The highest product of the two rates wins: on few ubatches, uploads hide that small ones keep the host
busy, on many they do not. A user's flag is never overruled. The plan also answers, per wave, whether host experts go up
or are computed on the CPU: whichever the simulation finds quicker for that many tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from overspill.errors import UserError
from overspill.gpu_memory import FEW_TOKENS
from overspill.options import Options
from overspill.pipeline.host_budget import with_host_buffers
from overspill.pipeline.lay_out import layout_of, with_detours, with_embedding
from overspill.pipeline.rows import n_step_rows
from overspill.pipeline.schedule import Order, Policy, WaveSchedule
from overspill.pipeline.simulate import Prediction, WaveShape, is_replayed_step, predict
from overspill.pipeline.split import Layout
from overspill.pipeline.spread import n_kept_slices, n_spread_tokens, owners_of, spread
from overspill.pipeline.step_budget import with_step_buffers
from overspill.pipeline.wave import MAX_STEP_TOKENS
from overspill.placement.budget import NO_NEEDS, KernelNeeds
from overspill.placement.expert_cache import kept_bytes, slot_bytes, with_cache
from overspill.placement.machine import Machine
from overspill.placement.plan import GIB, Placement, place
from overspill.placement.rates import PartyRates
from overspill.placement.shape import ModelShape

REFERENCE_PROMPT, LONG_PROMPT = 4096, 16384
DEFAULT_IN_FLIGHT = 256
_MAX_WAVE = 32768
_WORTH_A_LOOK = 0.5
_MIN_IDS_PER_EXPERT = 16
_FEWEST_BESIDE, _WORTH = 16, 1.5
_WITH_CACHE = ("auto", "spread")
_UBATCHES = (128, 512, 2048, 4096)

Needs = Callable[[int], KernelNeeds]


@dataclass(frozen=True)
class Plan:
    """Everything decided before loading.

    schedule: of prompts whose experts all go up. policy: what the user chose, None where the plan chooses per wave.
    min_upload_tokens: waves of at least so many tokens send all experts up, smaller ones do what costs least.
    n_spread_tokens: most tokens whose experts are shared out, 0 where they cannot be. spreads_alone: see `KernelNeeds`.
    party_rates_from: where the rates come from by which they are shared out. takes_steps: see `KernelNeeds`.
    """

    shape: ModelShape
    machine: Machine
    placement: Placement
    layout: Layout
    schedule: WaveSchedule
    policy: Policy | None
    min_upload_tokens: int
    max_in_flight: int
    reference: WaveShape
    predicted: Prediction
    n_spread_tokens: int = 0
    spreads_alone: bool = False
    party_rates_from: str = "assumed"
    takes_steps: bool = False

    def without_spread(self) -> Plan:
        """For experts that accelerators cannot read themselves, because not all of them could be pinned."""
        return replace(self, n_spread_tokens=0, schedule=replace(self.schedule, n_cached=()))

    def with_party_rates(self, rates: tuple[PartyRates, ...], source: str) -> Plan:
        """For shares by these rates of the machine's devices."""
        return replace(self, machine=replace(self.machine, party_rates=rates), party_rates_from=source)

    @property
    def spread_owners(self) -> list[int]:
        """The devices that read host experts of few tokens."""
        return owners_of(self.layout)

    @property
    def cache_bytes(self) -> dict[int, int]:
        """Memory of the slots of layers whose devices keep some of their experts."""
        n_cached = {d: n for d, n in enumerate(self.placement.n_cached) if n}
        return {
            i: slot_bytes(self.shape, i, n_cached[d])
            for i, (d, slabs) in enumerate(zip(self.layout.layer_device, self.layout.slabs, strict=True))
            if slabs and d in n_cached
        }

    @property
    def predicted_tokens_per_second(self) -> float:
        """Simulated prefill rate of the reference prompt."""
        return sum(self.reference.n_tokens) / self.predicted.wave_us * 1e6

    @cached_property
    def has_host_experts(self) -> bool:
        return any(self.layout.slabs)

    def schedule_for(self, n_tokens: int) -> WaveSchedule:
        """How a wave of so many tokens runs whose actions are issued one by one."""
        if self._is_fixed:
            return replace(self.schedule, policy=self.policy or self.schedule.policy)
        if self.policy is Policy.SPREAD and n_tokens <= self.n_spread_tokens:
            return self._spread_for(n_tokens)
        bucket, is_small = 1 << (n_tokens - 1).bit_length(), n_tokens < self.min_upload_tokens
        if not self.has_host_experts or not (is_small or bucket <= self.n_spread_tokens):
            return self.schedule
        n = n_tokens if is_small and n_tokens <= FEW_TOKENS else bucket
        return self._cheapest(WaveShape.of_prompt(n, self.placement.n_ubatch), is_small=is_small)

    def step_schedule(self, n_rows: int) -> WaveSchedule:
        """How a step of so many rows runs: experts are shared out where they can be."""
        if not self._is_fixed and n_rows <= self.n_spread_tokens:
            return self._spread_for(n_rows, is_step=self.takes_steps)
        if self._is_fixed or not self.takes_steps or not self.has_host_experts:
            return self.schedule_for(n_rows)
        return self._cheapest(WaveShape.of_step(n_rows, sum(self.reference.n_tokens)), is_small=True)

    def step_rows(self, n_tokens: int, end_pos: int) -> int:
        """Rows of the step that computes a prompt of so many tokens, the last before `end_pos`; 0 where a wave does."""
        if not self.takes_steps or self.shape.has_states:
            return 0
        most = min(MAX_STEP_TOKENS, self.placement.n_ubatch, self.n_spread_tokens or MAX_STEP_TOKENS)
        n_rows = n_step_rows(n_tokens, end_pos, most)
        if n_rows and n_tokens not in self._gains_as_step:
            self._gains_as_step[n_tokens] = self._gains(WaveShape((n_tokens,)), self.step_schedule(n_rows))
        return n_rows if n_rows and self._gains_as_step[n_tokens] else 0

    def _gains(self, wave: WaveShape, schedule: WaveSchedule) -> bool:
        """Whether a prompt is sooner done as a step. Where nothing is in host RAM it is: launches of whole layers take
        longer than a step, and longer than the simulation says."""
        step = replace(wave, is_step=True)
        if not is_replayed_step(self.layout, step, schedule):
            return False
        issued = self.schedule_for(sum(wave.n_tokens))
        return not self.has_host_experts or self._predict(step, schedule).wave_us < self._predict(wave, issued).wave_us

    @cached_property
    def _gains_as_step(self) -> dict[int, bool]:
        """Of prompts of so many tokens, as far as was asked."""
        return {}

    @property
    def _is_fixed(self) -> bool:
        """Whether the user has said what happens to experts in host RAM, whatever the number of tokens."""
        return self.policy not in (None, Policy.SPREAD)

    def uncached(self, n_tokens: int) -> WaveSchedule:
        """How a step of so many tokens runs whose experts are shared out, where no device uses what it keeps."""
        return self._spread_by(n_tokens, (), is_step=True)

    def _spread_for(self, n_tokens: int, *, is_step: bool = False) -> WaveSchedule:
        """Few tokens use what devices keep; many would only turn it over."""
        return self._spread_by(n_tokens, self.placement.n_cached if n_tokens <= FEW_TOKENS else (), is_step=is_step)

    def _spread_by(self, n_tokens: int, n_cached: tuple[int, ...], *, is_step: bool) -> WaveSchedule:
        key = n_tokens, n_cached, is_step
        if key not in self._spread:
            schedule = replace(self.schedule, n_cached=n_cached)
            how = (self.shape, self.machine, self.layout, schedule, n_tokens)
            self._spread[key] = spread(*how, spreads_alone=self.spreads_alone, is_step=is_step)
        return self._spread[key]

    @cached_property
    def _spread(self) -> dict[tuple[int, tuple[int, ...], bool], WaveSchedule]:
        """The schedules with shares found so far, by number of tokens and of experts kept, of waves and of steps."""
        return {}

    def _cheapest(self, wave: WaveShape, *, is_small: bool) -> WaveSchedule:
        """The quickest of all that can be done with the experts; is_small: not all need go up, whatever is quickest."""
        if (wave, is_small) not in self._found:
            n_tokens, found = sum(wave.n_tokens), [self.schedule]
            if is_small:
                found += [replace(self.schedule, policy=policy) for policy in (Policy.SELECTED, Policy.CPU)]
            if n_tokens <= self.n_spread_tokens:
                found.append(self._spread_for(n_tokens))
            self._found[wave, is_small] = min(found, key=lambda schedule: self._predict(wave, schedule).wave_us)
        return self._found[wave, is_small]

    @cached_property
    def _found(self) -> dict[tuple[WaveShape, bool], WaveSchedule]:
        """What was quickest so far."""
        return {}

    def predict(self, wave: WaveShape) -> Prediction:
        """Simulate a wave."""
        n_tokens = sum(wave.n_tokens)
        if wave.is_step:
            return self._predict(replace(wave, is_step=self.takes_steps), self.step_schedule(n_tokens))
        if n_rows := self.step_rows(n_tokens, wave.first_pos + n_tokens):
            return self._predict(replace(wave, n_tokens=(n_tokens,), is_step=True), self.step_schedule(n_rows))
        return self._predict(wave, self.schedule_for(n_tokens))

    def prompt_us(self, n_tokens: int, first_pos: int = 0) -> float:
        """What a prompt is predicted to take, in as many waves as it needs."""
        n_ubatch = self.placement.n_ubatch
        n_wave = -(-self.placement.n_wave // n_ubatch) * n_ubatch
        pieces = [(i, min(n_wave, n_tokens - i)) for i in range(0, n_tokens, n_wave)]
        return sum(self.predict(WaveShape.of_prompt(n, n_ubatch, first_pos + i)).wave_us for i, n in pieces)

    def _predict(self, wave: WaveShape, schedule: WaveSchedule) -> Prediction:
        return predict(self.shape, self.machine, self.layout, wave, schedule)

    def beside(self, max_ms: float) -> tuple[int, int]:
        """For waves that others decode in: tokens of prompts that are predicted to take max_ms, and those that take
        half as long again as the fewest do, below which a wave is not worth its uploads."""
        n_ubatch, n_wave = self.placement.n_ubatch, self.placement.n_wave
        sizes = [n for n in (_FEWEST_BESIDE << i for i in range(32)) if n < n_wave] + [n_wave]
        took = [(n, self.predict(WaveShape.of_prompt(n, n_ubatch)).wave_us) for n in sizes]
        n_least = max(n for n, us in took if us <= _WORTH * took[0][1])
        return max([n for n, us in took if us <= 1e3 * max_ms], default=n_least), n_least


def choose(shape: ModelShape, machine: Machine, options: Options, needs: Needs = lambda n_ubatch: NO_NEEDS) -> Plan:
    """The fastest plan that fits. needs: what the accelerators' kernels take, by the size of a ubatch.

    Raises `UserError` when none does, with the reason of the last one tried.
    """
    plans: list[Plan] = []
    refusal: UserError | None = None
    for order, grain, n_ubatch in _candidates(shape, machine, options):
        seen: list[tuple[object, ...]] = []
        for is_recorded in needs(n_ubatch).recordings:
            kernels = needs(n_ubatch).recorded(is_recorded)
            try:
                placement, layout = _place(shape, machine, options, grain=grain, n_ubatch=n_ubatch, needs=kernels)
                alike = layout, placement.n_ctx, placement.n_wave, placement.n_cached
                if alike not in seen:  # otherwise the choice before is no slower, and simulating takes a second or two
                    seen.append(alike)
                    plans.append(_plan(shape, machine, options, order, is_recorded, placement, layout, kernels))
            except UserError as error:
                refusal = error
    if not plans:
        assert refusal is not None
        raise refusal
    return _fastest(plans)


def _fastest(plans: Sequence[Plan]) -> Plan:
    """On the reference prompt and a long one, as far as the context has room for one."""
    best = max(plans, key=_rate)
    n_long = min(LONG_PROMPT, *(plan.placement.n_ctx for plan in plans))
    alike = [plan for plan in plans if _rate(plan) >= _WORTH_A_LOOK * _rate(best)]
    if len(alike) == 1 or n_long <= REFERENCE_PROMPT:
        return best
    return max(alike, key=lambda plan: _rate(plan) / plan.prompt_us(n_long))


def _rate(plan: Plan) -> float:
    return plan.predicted_tokens_per_second


def _candidates(shape: ModelShape, machine: Machine, options: Options) -> Iterator[tuple[Order, int, int]]:
    n_devices = max(1, len(machine.devices))
    contiguous = math.ceil(shape.n_layer / n_devices)
    orders = [Order.BREADTH_FIRST, Order.DEPTH_FIRST] if options.schedule == "auto" else [Order(options.schedule)]
    for n_ubatch in _ubatches(shape, options):
        for order in orders:
            grains = [1, contiguous] if order is Order.BREADTH_FIRST and n_devices > 1 else [contiguous]
            for grain in grains if options.grain is None else [options.grain]:
                yield order, grain, n_ubatch


def _ubatches(shape: ModelShape, options: Options) -> list[int]:
    if options.n_ubatch is not None:
        return [options.n_ubatch]
    limit = min(n for n in (options.n_ctx or shape.n_ctx_train, options.n_wave or _MAX_WAVE))
    return [n for n in _UBATCHES if n < limit] or [limit]


def _plan(
    shape: ModelShape,
    machine: Machine,
    options: Options,
    order: Order,
    is_recorded: bool,
    placement: Placement,
    layout: Layout,
    needs: KernelNeeds,
) -> Plan:
    policy = None if options.policy == "auto" else Policy(options.policy)
    usual = Policy.ALL if policy in (None, Policy.SPREAD) else policy
    widens = needs.wide_value_bytes > 0
    schedule = WaveSchedule(order, usual, options.n_staging_slots, widens, is_recorded=is_recorded)
    if any(placement.n_cached):
        n_slices = n_kept_slices(shape, layout, spreads_alone=needs.spreads_alone)
        schedule = replace(schedule, n_cached=placement.n_cached, n_slices=n_slices)
    reference = WaveShape.of_prompt(min(REFERENCE_PROMPT, placement.n_ctx, placement.n_wave), placement.n_ubatch)
    predicted = predict(shape, machine, layout, reference, schedule)
    in_flight = options.max_in_flight or DEFAULT_IN_FLIGHT
    min_upload = _min_upload_tokens(shape, options)
    plan = Plan(shape, machine, placement, layout, schedule, policy, min_upload, in_flight, reference, predicted)
    plan = replace(
        plan, takes_steps=needs.takes_steps and layout.host not in {*layout.layer_device, layout.output_device}
    )
    if machine.party_rates:
        plan = replace(plan, party_rates_from="given")
    n_tokens = n_spread_tokens(shape, layout, placement, needs)
    if n_tokens:
        plan = replace(plan, n_spread_tokens=n_tokens, spreads_alone=needs.spreads_alone)
    elif policy is Policy.SPREAD and any(layout.slabs):
        raise UserError(
            "--policy spread: needs GPUs, experts of whole layers in host RAM, and slots that hold those of a token"
        )
    return plan


def _place(
    shape: ModelShape, machine: Machine, options: Options, *, grain: int, n_ubatch: int, needs: KernelNeeds
) -> tuple[Placement, Layout]:
    """With the largest wave that fits, where the user left it open: a wave costs memory, and saves uploads."""
    n_ctx = options.n_ctx or shape.n_ctx_train
    wished = options.n_wave or max(n_ubatch, min(n_ctx, _MAX_WAVE))
    n_wave = wished
    while True:
        try:
            placement, layout = _placed(shape, machine, options, grain, n_ubatch, n_wave, needs)
        except UserError:
            if options.n_wave is not None or n_wave <= n_ubatch:
                raise
            n_wave = max(n_ubatch, n_wave // 2)
        else:
            lowered = [f"wave lowered from {wished} to {n_wave} tokens to fit; -b overrides"] * (n_wave < wished)
            return replace(placement, notes=(*placement.notes, *lowered)), layout


def _placed(
    shape: ModelShape,
    machine: Machine,
    options: Options,
    grain: int,
    n_ubatch: int,
    n_wave: int,
    needs: KernelNeeds,
    kept: Sequence[int] = (),
) -> tuple[Placement, Layout]:
    """With waves of this size. kept: what each device leaves free for a cache of experts, once that is known."""
    placement = place(
        shape, machine, options, n_ubatch=n_ubatch, n_wave=n_wave, grain=grain, needs=needs, kept_bytes=kept
    )
    placement, layout = with_embedding(shape, machine, placement, layout_of(shape, machine, placement), kept)
    placement, layout = with_detours(machine, options, placement, layout)
    placement = with_host_buffers(
        shape, placement, layout, needs, n_parallel=options.n_parallel, n_image_bytes=options.n_image_bytes
    )
    placement = with_step_buffers(shape, placement, layout, needs, n_sequences=options.n_parallel)
    _check_host(placement, options)
    if not options.moe_cache_mib or not any(layout.slabs) or not _keeps(shape, options, placement, layout, needs):
        return placement, layout
    wanted = kept_bytes(options, placement)
    if wanted and not kept:
        return _placed(shape, machine, options, grain, n_ubatch, n_wave, needs, wanted)
    return with_cache(shape, machine, options, placement, kept), layout


def _keeps(shape: ModelShape, options: Options, placement: Placement, layout: Layout, needs: KernelNeeds) -> bool:
    """Whether a cache can serve. `UserError` where one was asked for that cannot."""
    can_spread = n_spread_tokens(shape, layout, placement, needs) > 0
    if (not can_spread or options.policy not in _WITH_CACHE) and options.moe_cache_mib != "auto":
        raise UserError(
            f"--moe-cache-mib {options.moe_cache_mib}: needs GPUs, experts of whole layers in host RAM, slots that "
            "hold those of a token, and --policy auto or spread; leave it out"
        )
    return can_spread and options.policy in _WITH_CACHE


def _check_host(placement: Placement, options: Options) -> None:
    """`UserError` when the host's buffers do not fit beside its weights, or alone where those stay in the file."""
    budget = placement.budgets[-1]
    weights = 0 if options.load_mode == "mmap" else budget.weights_bytes
    others = budget.used_bytes - budget.weights_bytes
    if weights + others > budget.free_bytes:
        raise UserError(
            f"the model does not fit: {budget.name} needs {weights / GIB:.2f} GiB for weights, {others / GIB:.2f} GiB "
            f"for buffers, and may use {budget.free_bytes / GIB:.2f} GiB; lower -b or -c, or read weights from the "
            "file as they are needed (-lm mmap)"
        )


def _min_upload_tokens(shape: ModelShape, options: Options) -> int:
    """So many that an expert gets enough tokens to be worth its bytes; with a schedule asked for, any prompt."""
    if options.schedule != "auto":
        return 2
    return math.ceil(_MIN_IDS_PER_EXPERT * shape.n_expert / max(1, shape.n_expert_used))
