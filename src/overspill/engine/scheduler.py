"""Which tokens are computed next: requests into slots, slots into waves. Pure Python, no torch.

A slot holds the cells of one sequence at a time. A request waits for a free slot, its prompt is computed in ubatches,
then it decodes one token a wave. The rules:

- Prompts are served first come, first served; a wave takes as many ubatches of them as fit into `n_wave` tokens.
- A wave has at most ceil(n_wave / n_ubatch) ubatches: what its buffers were reserved for.
- A prompt is always cut at multiples of `n_ubatch` from its own start and shares a ubatch with nobody, so its cells do
  not depend on its neighbours.
- A prompt enters the slot that has most of it, if that is worth it, so that other conversations keep theirs.
- Every decoding sequence gets one row a wave, in ubatches of their own. Where they and the next ubatch of a prompt
  exceed `n_wave`, decoding and prompts take turns, so neither starves.
- `next_wave` may be called again without a `commit` between: only `commit` moves a sequence on.
- A segment that starts at position p means that the slot's cells from p on are void.
- A model with recurrent layers goes on only from a position whose state was kept (`cache.states`): the ends of some of
  a prompt's whole ubatches, and the end of what was computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import accumulate, islice

from overspill.cache.states import SlotStates
from overspill.engine.request import DoneReason, Request
from overspill.engine.sequence import Sequence
from overspill.errors import UserError
from overspill.pipeline.wave import Segment, Ubatch, Wave

_LEAST_ALIKE = 0.1  # llama-server's --slot-prompt-similarity


class PrefixReuse(Enum):
    """How much of the cells that a former request left in a slot a new prompt with the same beginning may keep.

    NONE: nothing.
    WHOLE_UBATCHES: cells that full ubatches of a prompt computed. The rest is cut as it would be in an empty slot, so
    the logits are the same bits as without reuse. A former answer is computed again as part of the new prompt.
    ANY_POINT: up to the first token that differs, answers included: least work, sums may run in another order.
    """

    NONE = "none"
    WHOLE_UBATCHES = "whole-ubatches"
    ANY_POINT = "any-point"


class ContextOverflow(UserError):
    """The prompt leaves no room in a slot for one generated token. n_prompt, n_ctx: tokens."""

    def __init__(self, n_prompt: int, n_ctx: int) -> None:
        super().__init__(
            f"prompt: {n_prompt} tokens found, at most {n_ctx - 1} fit into a context of {n_ctx} "
            f"(one is left for the answer): shorten it or raise the context size"
        )
        self.n_prompt = n_prompt
        self.n_ctx = n_ctx


@dataclass(slots=True)
class _Slot:
    """cells: the ids whose cells may be reused. last_used: when it was freed, in releases.

    states: where its recurrent states stand, None in models without any.
    """

    states: SlotStates | None
    cells: list[int] = field(default_factory=list)
    last_used: int = 0
    sequence: Sequence | None = None

    def keep(self, n_cells: int) -> None:
        """Trust the first `n_cells` cells only."""
        self.cells = self.cells[:n_cells]
        if self.states is not None:
            self.states.cut(n_cells)


class Scheduler:
    """Holds waiting and active requests and says what to compute next. Not thread-safe, but for `validate`.

    n_states: recurrent states that each slot has room for; 0: the model has none.
    """

    def __init__(
        self,
        *,
        n_vocab: int,
        n_ctx_slot: int,
        n_slots: int,
        n_ubatch: int,
        n_wave: int,
        reuse: PrefixReuse = PrefixReuse.WHOLE_UBATCHES,
        n_states: int = 0,
    ) -> None:
        _check_sizes(n_ctx_slot=n_ctx_slot, n_slots=n_slots, n_ubatch=n_ubatch, n_wave=n_wave)
        self._n_vocab = n_vocab
        self._n_ctx = n_ctx_slot
        self._n_ubatch = n_ubatch
        self._n_wave = n_wave
        self._n_ubatches = -(-n_wave // n_ubatch)
        self._reuse = reuse
        self._slots = [_Slot(SlotStates.of_slot(i, n_slots, n_states) if n_states else None) for i in range(n_slots)]
        self._n_states = n_states
        self._waiting: deque[Sequence] = deque()
        self._active: list[Sequence] = []  # in the order they came
        self._n_releases = 0
        self._is_prompt_turn = False

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._active)

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    @property
    def in_slots(self) -> tuple[Sequence | None, ...]:
        """What each slot works on, by slot."""
        return tuple(slot.sequence for slot in self._slots)

    def validate(self, request: Request) -> None:
        """Raise UserError (ContextOverflow for a prompt that is too long) if the request cannot be served."""
        n_prompt, params = len(request.prompt_ids), request.params
        if n_prompt == 0:
            raise UserError("prompt: it is empty, give at least one token")
        if n_prompt >= self._n_ctx:
            raise ContextOverflow(n_prompt, self._n_ctx)
        self._check_ids("prompt", request.prompt_ids)
        self._check_ids("stop_ids", params.stop_ids)
        self._check_ids("logit_bias", (token_id for token_id, _ in params.logit_bias))
        if params.n_probs > self._n_vocab:
            raise UserError(f"n_probs: {params.n_probs} found, the vocabulary has {self._n_vocab} tokens")

    def _check_ids(self, name: str, ids: Iterable[int]) -> None:
        for i, token_id in enumerate(ids):
            if type(token_id) is not int or not 0 <= token_id < self._n_vocab:
                last_id = self._n_vocab - 1
                raise UserError(f"{name}: {token_id!r} at place {i} is no token id, give whole numbers 0 to {last_id}")

    def add(self, request: Request) -> Sequence:
        """Queue a request. Raises UserError as `validate` does."""
        self.validate(request)
        sequence = Sequence(request)
        self._waiting.append(sequence)
        return sequence

    def drop(self, sequence: Sequence, *, keep_cells: bool) -> None:
        """Take a request out, wherever it is. keep_cells: its cells are sound and may serve a later prompt."""
        if sequence.slot is None:
            self._waiting.remove(sequence)
            return
        slot = self._slots[sequence.slot]
        self._release(sequence)
        if not keep_cells:
            slot.keep(0)

    def forget_cells(self) -> None:
        """No cells of idle slots will be reused: the device lost them, or may have."""
        for slot in self._slots:
            if slot.sequence is None:
                slot.keep(0)

    def next_wave(self, n_beside: int | None = None) -> Wave | None:
        """The next tokens to compute, at most `n_wave`; None if there is nothing to do.

        n_beside: most tokens of prompts in a wave that others decode in, beyond the first ubatch. Wanted rows are the
        last of each prompt (none where max_tokens is 0) and every decoding row.
        """
        self._admit()
        decoding = [s for s in self._active if s.is_decoding]
        prompts = [s for s in self._active if not s.is_decoding]
        if decoding and prompts and not self._fit_together(decoding, prompts[0]):
            decoding, prompts = ([], prompts) if self._is_prompt_turn else (decoding, [])
        last = tuple(self._decode_ubatches(decoding))
        first = list(islice(self._prompt_ubatches(prompts, self._n_wave - len(decoding)), self._n_ubatches - len(last)))
        if decoding and n_beside is not None:
            first = first[: max(1, _n_within(first, n_beside))]
        ubatches = (*first, *last)
        if self._n_states:
            ubatches = tuple(self._with_states(ubatches))
        return Wave(ubatches) if ubatches else None

    def _fit_together(self, decoding: list[Sequence], prompt: Sequence) -> bool:
        """Whether a wave has room for all decoding rows and the next ubatch of a prompt."""
        n_ubatches = -(-len(decoding) // self._n_ubatch) + 1
        return len(decoding) + self._next_cut(prompt) <= self._n_wave and n_ubatches <= self._n_ubatches

    def sequences_in(self, wave: Wave) -> list[Sequence]:
        """The sequences a wave works on, each once."""
        slots = dict.fromkeys(segment.slot for ubatch in wave.ubatches for segment in ubatch.segments)
        return [sequence for slot in slots if (sequence := self._slots[slot].sequence) is not None]

    def commit(self, wave: Wave, sampled: Mapping[int, int]) -> list[tuple[Sequence, DoneReason]]:
        """The wave was computed and `sampled` (slot -> id) came of its wanted rows. Returns what is finished now."""
        sequences = self.sequences_in(wave)
        self._is_prompt_turn = any(s.is_decoding for s in sequences)
        for segment in (segment for ubatch in wave.ubatches for segment in ubatch.segments):
            slot = self._slots[segment.slot]
            assert slot.sequence is not None
            assert slot.sequence.n_done == segment.first_pos
            slot.sequence.n_done += segment.n_tokens
            if slot.states is not None:
                slot.states.put(segment)
        for sequence in sequences:
            if (token_id := sampled.get(_slot_of(sequence))) is not None:
                sequence.ids.append(token_id)
        finished = [(s, reason) for s in sequences if (reason := self._reason_to_end(s)) is not None]
        for sequence, _ in finished:
            self._release(sequence)
        return finished

    def _reason_to_end(self, sequence: Sequence) -> DoneReason | None:
        if not sequence.is_decoding:
            return None
        if sequence.n_generated and sequence.ids[-1] in sequence.stop_ids:
            return "stop"
        is_full = len(sequence.ids) >= self._n_ctx
        return "length" if is_full or sequence.n_generated == sequence.request.params.max_tokens else None

    # --- slots

    def _admit(self) -> None:
        """Waiting requests enter free slots, first come, first served; one that wants a certain slot waits for it."""
        for sequence in list(self._waiting):
            free = [i for i, slot in enumerate(self._slots) if slot.sequence is None]
            if not free:
                return
            wanted = sequence.request.slot
            if wanted is not None:
                free = [i for i in free if i == wanted % len(self._slots)]
            if free:
                self._waiting.remove(sequence)
                self._enter(sequence, free)

    def _enter(self, sequence: Sequence, free: list[int]) -> None:
        """Take the slot that saves most work, if that is a tenth of it; otherwise the least recently used one."""
        n_reusable = {i: self._n_reusable(self._slots[i], sequence) for i in free}
        is_worth_it = max(n_reusable.values()) > _LEAST_ALIKE * sequence.n_prompt
        sequence.slot = min(free, key=lambda i: (-n_reusable[i] * is_worth_it, self._slots[i].last_used))
        sequence.n_done = sequence.n_reused = n_reusable[sequence.slot]
        self._slots[sequence.slot].keep(sequence.n_done)
        self._slots[sequence.slot].sequence = sequence
        self._active.append(sequence)

    def _n_reusable(self, slot: _Slot, sequence: Sequence) -> int:
        if not sequence.request.reuses_cells:
            return 0
        n_common = min(_n_common_prefix(slot.cells, sequence.ids), sequence.n_prompt - 1)
        n_reusable = self._rounded(n_common)
        return n_reusable if slot.states is None else slot.states.latest(n_reusable)

    def _release(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        slot = self._slots[sequence.slot]
        self._n_releases += 1
        slot.cells = sequence.ids
        slot.keep(self._n_keepable(sequence))
        slot.last_used = self._n_releases
        slot.sequence = None
        self._active.remove(sequence)

    def _n_keepable(self, sequence: Sequence) -> int:
        if self._reuse is PrefixReuse.ANY_POINT:
            return sequence.n_done
        return self._rounded(min(sequence.n_done, sequence.n_prompt))

    def _rounded(self, n_cells: int) -> int:
        if self._reuse is PrefixReuse.NONE:
            return 0
        return n_cells if self._reuse is PrefixReuse.ANY_POINT else n_cells - n_cells % self._n_ubatch

    # --- ubatches

    def _next_cut(self, sequence: Sequence, first_pos: int | None = None) -> int:
        """Tokens from first_pos (default: where the sequence stands) to the next multiple of n_ubatch or the end."""
        first_pos = sequence.n_done if first_pos is None else first_pos
        return min(self._n_ubatch - first_pos % self._n_ubatch, sequence.n_prompt - first_pos)

    def _prompt_ubatches(self, prompts: list[Sequence], budget: int) -> Iterator[Ubatch]:
        for sequence in prompts:
            pos = sequence.n_done
            while pos < sequence.n_prompt:
                n_tokens = self._next_cut(sequence, pos)
                if n_tokens > budget:
                    return
                yield _prompt_ubatch(sequence, pos, n_tokens)
                pos += n_tokens
                budget -= n_tokens

    def _decode_ubatches(self, decoding: list[Sequence]) -> Iterator[Ubatch]:
        for i in range(0, len(decoding), self._n_ubatch):
            rows = decoding[i : i + self._n_ubatch]
            ids = tuple(s.ids[-1] for s in rows)
            segments = tuple(Segment(_slot_of(s), s.n_done, 1) for s in rows)
            yield Ubatch(ids, segments, tuple(range(len(rows))))

    # --- recurrent states

    def _with_states(self, ubatches: Iterable[Ubatch]) -> Iterator[Ubatch]:
        """The same, each segment with the rows of its states."""
        planned = [slot.states.copy() for slot in self._slots if slot.states is not None]
        for ubatch in ubatches:
            segments = [self._with_rows(segment, planned[segment.slot]) for segment in ubatch.segments]
            yield replace(ubatch, segments=tuple(segments))

    def _with_rows(self, segment: Segment, states: SlotStates) -> Segment:
        segment = replace(segment, rows=states.plan(segment.first_pos, keeps=self._keeps_state(segment)))
        states.put(segment)
        return segment

    def _keeps_state(self, segment: Segment) -> bool:
        """Whether a later prompt may want to go on from where a segment begins."""
        pos, sequence = segment.first_pos, self._slots[segment.slot].sequence
        assert sequence is not None
        if self._reuse is PrefixReuse.ANY_POINT and pos == sequence.n_prompt:
            return True
        return self._reuse is not PrefixReuse.NONE and pos <= sequence.n_prompt and pos % self._n_ubatch == 0


def output_slots(wave: Wave) -> list[int]:
    """The slot each wanted row of a wave belongs to, in the order of the rows."""
    slots = []
    for ubatch in wave.ubatches:
        row_slots = [segment.slot for segment in ubatch.segments for _ in range(segment.n_tokens)]
        slots += [row_slots[row] for row in ubatch.output_rows]
    return slots


def _n_within(ubatches: Iterable[Ubatch], n_tokens: int) -> int:
    """How many of the first ubatches have at most so many tokens together."""
    return sum(total <= n_tokens for total in accumulate(ubatch.n_tokens for ubatch in ubatches))


def _prompt_ubatch(sequence: Sequence, pos: int, n_tokens: int) -> Ubatch:
    has_output = pos + n_tokens == sequence.n_prompt and sequence.request.params.max_tokens != 0
    return Ubatch(
        ids=tuple(sequence.ids[pos : pos + n_tokens]),
        segments=(Segment(_slot_of(sequence), pos, n_tokens),),
        output_rows=(n_tokens - 1,) if has_output else (),
    )


def _slot_of(sequence: Sequence) -> int:
    assert sequence.slot is not None
    return sequence.slot


def _n_common_prefix(a: list[int], b: list[int]) -> int:
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)


def _check_sizes(*, n_ctx_slot: int, n_slots: int, n_ubatch: int, n_wave: int) -> None:
    if min(n_slots, n_ubatch) < 1 or n_ctx_slot < 2:
        raise UserError(
            f"slots {n_slots}, ubatch {n_ubatch}, context per slot {n_ctx_slot}: "
            f"need at least 1 slot, 1 token a ubatch and 2 tokens of context"
        )
    if n_wave < max(n_ubatch, n_slots):
        raise UserError(
            f"a wave of {n_wave} tokens cannot hold a ubatch of {n_ubatch} or one token of each of {n_slots} slots: "
            f"raise the wave size to {max(n_ubatch, n_slots)} or more"
        )
