"""Which tokens are computed next: requests into slots, slots into waves. Pure Python, no torch.

A slot holds the cells of one sequence at a time. A request waits for a free slot, its prompt is computed in ubatches,
then it decodes one token a wave. The rules:

- Prompts are served first come, first served; a wave takes as many ubatches of them as fit into `n_wave` tokens.
- A wave has at most ceil(n_wave / n_ubatch) ubatches: what its buffers were reserved for.
- A prompt is cut at multiples of `n_ubatch` from its own start and shares a ubatch with nobody, so its cells do not
  depend on its neighbours. Where bits need not be the same anyway (`PrefixReuse.ANY_POINT`), a bound on the tokens
  beside decoding sequences cuts a ubatch shorter.
- A prompt enters the slot that has most of it, if that is worth it, so that other conversations keep theirs.
- Every decoding sequence gets one row a wave, in ubatches of their own. Where they and the next ubatch of a prompt
  exceed `n_wave`, decoding and prompts take turns, so neither starves.
- `next_wave` may be called again without a `commit` between: only `commit` moves a sequence on.
- A segment that starts at position p means that the slot's cells from p on are void.
- Where cells are rings (`cache.rings`), a slot goes on only as far back as they hold what is needed; a wave that was
  formed may have been computed, so one that is given up can leave less than it found.
- A model with recurrent layers goes on only from a position whose state was kept (`cache.states`): the ends of some of
  a prompt's whole ubatches, and the end of what was computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice

from overspill.cache.images import ImageCounts, ImageStore
from overspill.cache.rings import Rings
from overspill.cache.states import SlotStates
from overspill.engine.request import DoneReason, Request
from overspill.engine.sequence import Sequence
from overspill.engine.slots import Move, PrefixReuse, Slots
from overspill.errors import UserError
from overspill.pipeline.wave import Segment, Ubatch, Wave


class ContextOverflow(UserError):
    """The prompt leaves no room in a slot for one generated token. n_prompt, n_ctx: tokens."""

    def __init__(self, n_prompt: int, n_ctx: int) -> None:
        super().__init__(
            f"prompt: {n_prompt} tokens found, at most {n_ctx - 1} fit into a context of {n_ctx} "
            f"(one is left for the answer): shorten it or raise the context size"
        )
        self.n_prompt = n_prompt
        self.n_ctx = n_ctx


class Scheduler:
    """Holds waiting and active requests and says what to compute next. Not thread-safe, but for `validate`.

    n_states: recurrent states that each slot has room for; 0: the model has none. images: where cells of slots are
    saved that a prompt would overwrite; None: nowhere. rings: of cells, where the model has some.
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
        images: ImageStore | None = None,
        rings: Rings | None = None,
    ) -> None:
        _check_sizes(n_ctx_slot=n_ctx_slot, n_slots=n_slots, n_ubatch=n_ubatch, n_wave=n_wave)
        self._n_vocab = n_vocab
        self._n_ctx = n_ctx_slot
        self._n_ubatch = n_ubatch
        self._n_wave = n_wave
        self._n_ubatches = -(-n_wave // n_ubatch)
        self._slots = Slots(n_slots, n_ubatch=n_ubatch, n_states=n_states, reuse=reuse, images=images, rings=rings)
        self._n_states = n_states
        self._waiting: deque[Sequence] = deque()
        self._active: list[Sequence] = []  # in the order they came
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
        return tuple(slot.sequence for slot in self._slots.all)

    @property
    def image_counts(self) -> ImageCounts:
        return self._slots.image_counts

    def take_moves(self) -> list[Move]:
        """See `Slots.take_moves`."""
        return self._slots.take_moves()

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
        self._release(sequence, keep_cells=keep_cells)

    def forget_cells(self) -> None:
        """No cells of idle slots will be reused: the device lost them, or may have."""
        self._slots.forget_cells()

    def forget_images(self) -> None:
        """Nor will any image: saving them, or loading one, went wrong."""
        self._slots.forget_images()

    def next_wave(self, n_beside: int | None = None) -> Wave | None:
        """The next tokens to compute, at most `n_wave`; None if there is nothing to do.

        n_beside: most tokens of prompts in a wave that others decode in, or wait for; at least one ubatch where these
        are not cut. Wanted rows are the last of each prompt (none where max_tokens is 0) and every decoding row.
        """
        self._admit()
        decoding = [s for s in self._active if s.is_decoding]
        prompts = [s for s in self._active if not s.is_decoding]
        most = self._n_wave if n_beside is None or not decoding else n_beside
        if decoding and prompts and not self._fit_together(decoding, prompts[0], most):
            decoding, prompts = ([], prompts) if self._is_prompt_turn else (decoding, [])
        last = tuple(self._decode_ubatches(decoding))
        first = self._prompt_ubatches(prompts, self._n_wave - len(decoding), most)
        ubatches = (*islice(first, self._n_ubatches - len(last)), *last)
        if self._n_states:
            ubatches = tuple(self._with_states(ubatches))
        for segment in (segment for ubatch in ubatches for segment in ubatch.segments):
            self._slots.write(segment)
        return Wave(ubatches) if ubatches else None

    def _fit_together(self, decoding: list[Sequence], prompt: Sequence, most: int) -> bool:
        """Whether a wave has room for all decoding rows and the next ubatch of a prompt."""
        n_ubatches = -(-len(decoding) // self._n_ubatch) + 1
        n_next = min(self._next_cut(prompt), most) if self._slots.cuts_anywhere else self._next_cut(prompt)
        return len(decoding) + n_next <= self._n_wave and n_ubatches <= self._n_ubatches

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
            free = [i for i, slot in enumerate(self._slots.all) if slot.sequence is None]
            if not free:
                return
            wanted = sequence.request.slot
            if wanted is not None:
                free = [i for i in free if i == wanted % len(self._slots)]
            if free:
                self._waiting.remove(sequence)
                self._slots.enter(sequence, free)
                self._active.append(sequence)

    def _release(self, sequence: Sequence, *, keep_cells: bool = True) -> None:
        self._slots.release(sequence, keep_cells=keep_cells)
        self._active.remove(sequence)

    # --- ubatches

    def _next_cut(self, sequence: Sequence, first_pos: int | None = None) -> int:
        """Tokens from first_pos (default: where the sequence stands) to the next multiple of n_ubatch or the end."""
        first_pos = sequence.n_done if first_pos is None else first_pos
        return min(self._n_ubatch - first_pos % self._n_ubatch, sequence.n_prompt - first_pos)

    def _prompt_ubatches(self, prompts: list[Sequence], budget: int, most: int) -> Iterator[Ubatch]:
        """The next ubatches of prompts, of at most `budget` tokens together, and of `most` if the first allows."""
        left, is_first = min(budget, most), True
        for sequence in prompts:
            pos = sequence.n_done
            while pos < sequence.n_prompt:
                n_tokens = self._next_cut(sequence, pos)
                if n_tokens > left and not is_first:
                    return
                n_tokens = min(n_tokens, left) if self._slots.cuts_anywhere else n_tokens
                yield _prompt_ubatch(sequence, pos, n_tokens)
                pos += n_tokens
                left -= n_tokens
                is_first = False

    def _decode_ubatches(self, decoding: list[Sequence]) -> Iterator[Ubatch]:
        for i in range(0, len(decoding), self._n_ubatch):
            rows = decoding[i : i + self._n_ubatch]
            ids = tuple(s.ids[-1] for s in rows)
            segments = tuple(Segment(_slot_of(s), s.n_done, 1) for s in rows)
            yield Ubatch(ids, segments, tuple(range(len(rows))))

    # --- recurrent states

    def _with_states(self, ubatches: Iterable[Ubatch]) -> Iterator[Ubatch]:
        """The same, each segment with the rows of its states."""
        planned = [slot.states.copy() for slot in self._slots.all if slot.states is not None]
        for ubatch in ubatches:
            segments = [self._with_rows(segment, planned[segment.slot]) for segment in ubatch.segments]
            yield replace(ubatch, segments=tuple(segments))

    def _with_rows(self, segment: Segment, states: SlotStates) -> Segment:
        sequence = self._slots[segment.slot].sequence
        assert sequence is not None
        keeps = self._slots.keeps_state(sequence, segment.first_pos)
        segment = replace(segment, rows=states.plan(segment.first_pos, keeps=keeps))
        states.put(segment)
        return segment


def output_slots(wave: Wave) -> list[int]:
    """The slot each wanted row of a wave belongs to, in the order of the rows."""
    slots = []
    for ubatch in wave.ubatches:
        row_slots = [segment.slot for segment in ubatch.segments for _ in range(segment.n_tokens)]
        slots += [row_slots[row] for row in ubatch.output_rows]
    return slots


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
