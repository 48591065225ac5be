"""What each verb does: the bodies of launches and copies, in terms of buffers and the model contract.

`Work.give` hands one action to its stream. Bodies run later, on the stream, and touch only the buffers that the
action names; everything they need of the wave is bound when the action is given. Bodies of prompts that the action and
the ubatch's segments decide alone are recorded and replayed (`pipeline.recorded`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch

from overspill.cache.cells import Segment
from overspill.cache.kv import KvCache
from overspill.device.base import Stream
from overspill.gpu_memory import FEW_TOKENS
from overspill.kernels import Ops
from overspill.models.base import HParams, Model, Routing, UbatchView
from overspill.pipeline.copies import copy, hand_off, hand_tile, read_ids
from overspill.pipeline.ledger import Resource
from overspill.pipeline.memory import Memory
from overspill.pipeline.recorded import OfDevice, Recorded
from overspill.pipeline.ring import PinnedRing
from overspill.pipeline.schedule import Action, Verb
from overspill.pipeline.split import Layout
from overspill.pipeline.staging import NOTHING_HELD, Held, Staging
from overspill.pipeline.upload import HostExperts, widened_alike
from overspill.pipeline.wave import Ubatch
from overspill.quant.experts import ExpertWeights

_Body = Callable[[], None]
_REPEATED = frozenset({Verb.ATTEND, Verb.EXPERTS, Verb.LAYERS, Verb.WIDEN})


class Work:
    """The verbs over one model's memory.

    host_ops: kernels of the CPU; tables: of the devices, by number. recorded: None: all work is issued.
    """

    def __init__(
        self,
        model: Model,
        layout: Layout,
        memory: Memory,
        host_experts: Mapping[int, HostExperts],
        host_ops: Ops,
        rings: Mapping[int, PinnedRing],
        *,
        tables: Sequence[Ops],
        recorded: Recorded | None = None,
    ) -> None:
        self._model = model
        self._layout = layout
        self._memory = memory
        self._host_experts = host_experts
        self._host_ops = host_ops
        self._tables = tables
        self.staging = Staging(model, layout, memory, host_experts, rings)
        # Made by the first work of a wave, on its device, that needs them.
        self._views: defaultdict[tuple[int, int], list[UbatchView]] = defaultdict(list)
        self._recorded = recorded
        self._caches: dict[int, KvCache] = {}
        self._compute: dict[Verb, Callable[[Action, Ubatch], _Body]] = {
            Verb.EMBED: self._embed,
            Verb.LAYERS: self._layers,
            Verb.PLACE: lambda action, _: self.staging.place(action),
            Verb.WIDEN: lambda action, _: self.staging.widen(action),
            Verb.ATTEND: self._attend,
            Verb.EXPERTS: self._experts,
            Verb.DIVIDE: self._divide,
            Verb.SHARE: self._share,
            Verb.ADD: self._add,
            Verb.OUTPUT: self._output,
        }

    @property
    def hparams(self) -> HParams:
        """The model's."""
        return self._model.hparams

    def give(self, action: Action, stream: Stream, ubatches: Sequence[Ubatch]) -> None:
        """Give an action to its stream."""
        make = self._compute.get(action.verb)
        if make is not None:
            if self.staging.has_work(action):
                self._launch(action, stream, make, ubatches[action.ubatch])
            return
        match action.verb:
            case Verb.INPUTS:
                copy(self._memory, action, stream, len(ubatches) * 2 * self._memory.sizes.n_ubatch * 4)
            case Verb.UPLOAD:
                self.staging.upload(action, stream)
            case Verb.READ_IDS:
                read_ids(self._memory, action, stream, ubatches[action.ubatch])
            case Verb.HAND_OFF:
                hand_off(self._memory, action, stream, ubatches[action.ubatch])
            case Verb.HAND_DOWN | Verb.HAND_UP:
                hand_tile(self._memory, action, stream, ubatches[action.ubatch])
            case Verb.DOWNLOAD:
                n_rows = len(self.output_rows(ubatches[action.ubatch], action.chunk))
                copy(self._memory, action, stream, n_rows * self._model.hparams.n_vocab * 4)
            case _:
                raise AssertionError(action.verb)

    def _launch(self, action: Action, stream: Stream, make: Callable[[Action, Ubatch], _Body], ubatch: Ubatch) -> None:
        reads, writes = self._memory.all_of(action.reads), self._memory.all_of(action.writes)
        of_device = self._recordings(action, stream)
        place = action.ubatch, ubatch.segments if action.ubatch >= 0 else ()
        repeated = None if of_device is None else of_device.of(*place)
        if of_device is None or repeated is None:
            stream.launch(make(action, ubatch), label=action.label, reads=reads, writes=writes)
            return
        recording = repeated.recordings.get(action.work_name)
        if recording is not None:
            stream.replay(recording, label=action.label, reads=reads, writes=writes)
            return
        body = make(action, ubatch)
        stream.launch(body, label=action.label, reads=reads, writes=writes)
        of_device.record(repeated, action.work_name, body, max(1, action.last_layer - action.layer))

    def _recordings(self, action: Action, stream: Stream) -> OfDevice | None:
        """Of such work; None where it is always issued. Selected experts are never the same."""
        if self._recorded is None or action.verb not in _REPEATED or not stream.device.can_record:
            return None
        if self.staging.is_selected(action):
            return None
        return self._recorded.on(action.device, stream.device, self._tables[action.device])

    def output_rows(self, ubatch: Ubatch, chunk: int) -> tuple[int, ...]:
        """Rows of a ubatch whose logits one OUTPUT action computes."""
        n = self._memory.sizes.n_logits_rows
        return ubatch.output_rows[chunk * n : (chunk + 1) * n]

    def n_chunks(self, ubatch: Ubatch) -> int:
        """OUTPUT actions a ubatch needs."""
        return -(-len(ubatch.output_rows) // self._memory.sizes.n_logits_rows)

    def n_tiles(self, ubatch: Ubatch) -> int:
        """Tiles of host memory that hidden states take on their way to a device that no direct copy reaches."""
        return -(-ubatch.n_tokens * self._memory.x_row_bytes // self._memory.tile_bytes)

    def put_tokens(self, slot: int, ids: Sequence[int]) -> None:
        """A slot's first cells came from elsewhere; these are their tokens."""
        if ids:
            self._memory.history.add(ids, (Segment(slot, 0, len(ids)),))

    def begin_wave(self, ubatches: Sequence[Ubatch] = (), held: Held = NOTHING_HELD) -> None:
        """Slabs hold the experts of the layout again, and nothing that depends on a former wave's positions is left.

        ubatches: those that are about to be computed. held: experts that need not go up.
        """
        if self._recorded is not None:
            self._recorded.begin_wave(ubatches)
        self.staging.begin_wave(held)
        self._views = defaultdict(list)

    def _view(self, ubatch: Ubatch, device: int, m: int) -> UbatchView:
        positions, ids = self._memory.one(("pos", device)).tensor[m, :, : ubatch.n_tokens]
        return UbatchView(ubatch.segments, positions, ids)

    def _views_of(self, action: Action, ubatch: Ubatch) -> list[UbatchView]:
        """The view that layers share, or an empty list for it."""
        repeated = None if self._recorded is None else self._recorded.known(action.device, action.ubatch)
        return self._views[action.device, action.ubatch] if repeated is None else repeated.views

    def _cache(self, i_layer: int) -> KvCache:
        tensors = [buffer.tensor for buffer in self._memory["kv", i_layer]]  # every time: buffers check who asks
        if i_layer not in self._caches:
            shape, rows = self._model.hparams.kv_shape(i_layer), self._model.ops(i_layer).q8_rows
            self._caches[i_layer] = KvCache.over(shape, tensors, rows)
        return self._caches[i_layer]

    def _x(self, action: Action, ubatch: Ubatch) -> torch.Tensor:
        (x,) = self.rows(("x", action.device, action.ubatch), ubatch.n_tokens)
        return x

    def _embed(self, action: Action, ubatch: Ubatch) -> Callable[[], None]:
        before = self._memory.history.add(ubatch.ids, ubatch.segments)

        def body() -> None:
            self._x(action, ubatch).copy_(self._model.embed(self._ids(action, ubatch), before))

        return body

    def _ids(self, action: Action, ubatch: Ubatch) -> torch.Tensor:
        if action.device == self._layout.host:
            return torch.tensor(ubatch.ids)
        return self._memory.one(("pos", action.device)).tensor[action.ubatch, 1, : ubatch.n_tokens]

    def _layers(self, action: Action, ubatch: Ubatch) -> Callable[[], None]:
        views = self._views_of(action, ubatch)

        def body() -> None:
            target = self._x(action, ubatch)
            if not views:
                views.append(self._view(ubatch, action.device, action.ubatch))
            caches = [self._cache(i) for i in range(action.layer, action.last_layer)]
            target.copy_(self._model.layers(action.layer, target, caches, views[0]))

        return body

    def _attend(self, action: Action, ubatch: Ubatch) -> Callable[[], None]:
        views = self._views_of(action, ubatch)

        def body() -> None:
            target = self._x(action, ubatch)
            if not views:
                views.append(self._view(ubatch, action.device, action.ubatch))
            x = self._model.attend(action.layer, target, self._cache(action.layer), views[0])
            routing = self._model.route(action.layer, x, views[0])
            assert routing is not None
            self._keep(("x", action.device, action.ubatch), [x])
            self._keep(("route", action.device, action.ubatch), routing)

        return body

    def _keep(self, resource: Resource, found: Sequence[torch.Tensor]) -> None:
        """Store what was computed, of each token, for other actions."""
        for part, buffer in zip(found, self._memory[resource], strict=True):
            buffer.tensor[: len(part)].copy_(part)

    def rows(self, resource: Resource, n_tokens: int) -> list[torch.Tensor]:
        """What is stored, of each token."""
        return [buffer.tensor[:n_tokens] for buffer in self._memory[resource]]

    def _routing(self, action: Action, ubatch: Ubatch) -> Routing:
        return Routing(*self.rows(("route", action.device, action.ubatch), ubatch.n_tokens))

    def _experts(self, action: Action, ubatch: Ubatch) -> Callable[[], None]:
        layer, experts = action.layer, self._host_experts[action.layer]
        if action.slab < 0:
            return lambda: self._add_experts(action, ubatch, experts.in_place(), self._host_ops)
        weights, ops = self.staging.weights(action), self._model.ops(layer)
        return lambda: self._add_experts(action, ubatch, weights(), ops)

    def _divide(self, action: Action, ubatch: Ubatch) -> Callable[[], None]:
        """Which party computes which of the experts that the ids name."""
        ops, layer = self._model.ops(action.layer), action.layer
        keeps = ("cache", layer) in action.writes

        def body() -> None:
            tally = self._memory.one(("tally", action.device)).tensor[layer]
            ids, who = self._routing(action, ubatch).ids, self._who(action)
            if keeps:
                ops.look_up(ids, action.shares, who, tally, self.staging.kept(action)[1], self._layout.host)
            else:
                ops.divide(ids, action.shares, who, tally, action.n_slices, self._layout.host)

        return body

    def _who(self, action: Action) -> torch.Tensor:
        """The party of each expert, or of each slice."""
        who = self._memory.one(("who", action.device, action.ubatch)).tensor[0]
        return who[: self._host_experts[action.layer].n_experts * action.n_slices]

    def _share(self, action: Action, ubatch: Ubatch) -> Callable[[], None]:
        """A party's experts: the owner adds them to the hidden states, the others to what they send back."""
        party = action.device
        ops = self._host_ops if party == self._layout.host else self._tables[party]
        keeps = ("cache", action.layer) in action.writes

        def body() -> None:
            (out,) = self.rows(action.writes[0], ubatch.n_tokens)
            out = out.zero_() if action.writes[0][0] == "y" else self._model.added_to(out)
            found = self._cached(action, ubatch, ops) if keeps else [self._fetched(action, ubatch, ops)]
            for weights in found:
                self._model.experts(action.layer, out, self._routing(action, ubatch), weights, ops)

        return body

    def _fetched(self, action: Action, ubatch: Ubatch, ops: Ops) -> ExpertWeights:
        """What a party reads from host memory; the CPU reads it where it is."""
        who = self._who(action)
        if action.device == self._layout.host:
            return self._host_experts[action.layer].of_party(who, action.device)
        return self._brought(action, ubatch, ops, who)

    def _brought(self, action: Action, ubatch: Ubatch, ops: Ops, who: torch.Tensor) -> ExpertWeights:
        source = self._host_experts[action.layer].in_place()
        room, wide = self._memory.one(("slot", action.device, action.slot)).tensor, ("wide", action.device)
        weights = ops.fetch(source, who, action.device, room, self._model.expert_vectors(action.layer))
        if wide not in action.writes or ubatch.n_tokens <= FEW_TOKENS:
            return weights
        assert ops.widen is not None
        plain = widened_alike(weights, self._memory.one(wide).tensor)
        ops.widen(weights, plain)
        return plain

    def _cached(self, action: Action, ubatch: Ubatch, ops: Ops) -> list[ExpertWeights]:
        """What lies in the owner's slots now, and, where they may be too few for a step, what found none."""
        source, vectors = self._host_experts[action.layer].in_place(), self._model.expert_vectors(action.layer)
        slots, state = self.staging.kept(action)
        kept = ops.fill(source, state, slots, vectors)
        hp = self._model.hparams
        most = min(hp.n_expert, ubatch.n_tokens * hp.n_expert_used) * state.n_slices
        return [kept] if most <= state.n_slots else [kept, self._brought(action, ubatch, ops, state.rest)]

    def _add(self, action: Action, ubatch: Ubatch) -> Callable[[], None]:
        """What the other parties say, one after the other."""

        def body() -> None:
            y = self._model.added_to(self._x(action, ubatch))
            for resource in action.reads[1:]:
                y += self._memory.one(resource).tensor[: ubatch.n_tokens]

        return body

    def _add_experts(self, action: Action, ubatch: Ubatch, weights: ExpertWeights, ops: Ops) -> None:
        y, routing = self._model.added_to(self._x(action, ubatch)), self._routing(action, ubatch)
        self._model.experts(action.layer, y, routing, weights, ops)

    def one_token(self, ubatch: Ubatch) -> Callable[[], torch.Tensor]:
        """What makes the logits `[1, V]` of a ubatch of one token, where the CPU has the whole model."""
        before = self._memory.history.add(ubatch.ids, ubatch.segments)

        def body() -> torch.Tensor:
            (token,), (segment,) = ubatch.ids, ubatch.segments
            caches = [self._cache(i) for i in range(self._layout.n_layer)]
            found = self._model.token_logits(token, segment, caches)
            if found is not None:
                return found
            ids, positions = torch.tensor(ubatch.ids), torch.tensor([segment.first_pos], dtype=torch.int32)
            x = self._model.embed(ids, before)
            return self._model.output(self._model.layers(0, x, caches, UbatchView(ubatch.segments, positions, ids)))

        return body

    def _output(self, action: Action, ubatch: Ubatch) -> Callable[[], None]:
        rows = self.output_rows(ubatch, action.chunk)

        def body() -> None:
            x = self._x(action, ubatch)
            logits = self._memory.one(("logits", action.device, action.slot)).tensor
            is_run = rows[-1] - rows[0] + 1 == len(rows)
            wanted = x[rows[0] : rows[-1] + 1] if is_run else x[list(rows)]
            logits[: len(rows)].copy_(self._model.output(wanted))

        return body
