"""The vocabulary of a model: token texts, their kinds and the ids with a meaning of their own.

Read once from the `tokenizer.ggml.*` keys and validated there, so that the tokenizers index without checks.
Invariants: every id of a `Vocab` is below `n_vocab`; `kinds` is as long as `texts`; `eog_ids` holds every id that ends
a generation. A special id out of range is ignored with a warning, because such files exist and generate well.

Two properties of a token that files mix up are kept apart: its *kind* decides whether plain text may become it, and
`shown_ids` whether it is visible in generated text although it is a control token (the channel marks of gpt-oss).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from overspill.errors import UserError
from overspill.gguf.keys import Keys

_log = logging.getLogger(__name__)

PREFIX = "tokenizer.ggml."


class Kind(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """What a tokenizer model means where a key is absent; a `None` id means there is no such token."""

    bos_id: int | None = None
    eos_id: int | None = None
    unknown_id: int | None = None
    add_bos: bool = False
    add_eos: bool = False


@dataclass(frozen=True, kw_only=True)
class Vocab:
    """Token texts by id, their kinds, ids by text (the lowest id of a text), and the special ids.

    file: where it is from, for messages.
    """

    texts: Sequence[str]
    kinds: Sequence[int]
    ids: Mapping[str, int]
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    add_bos: bool
    add_eos: bool
    eog_ids: frozenset[int]
    shown_ids: frozenset[int]
    suppressed_ids: frozenset[int]
    file: str = ""

    @property
    def n_vocab(self) -> int:
        return len(self.texts)

    def of_kind(self, *kinds: Kind) -> list[int]:
        """Ids of all tokens of these kinds, rising."""
        wanted = {int(kind) for kind in kinds}
        return [i for i, kind in enumerate(self.kinds) if kind in wanted]

    def spelled(self, ids: Iterable[int]) -> dict[str, int]:
        """Text -> id of these tokens; of equal texts the first one counts."""
        return {self.texts[i]: i for i in reversed(tuple(ids))}


EOG_TEXTS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
    *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
)
# The first text of a row that is in the vocabulary stands for an absent key; all of these end a generation.
DETECTED = {
    "eot_token_id": (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>"),
        *("_<EOT>", "[EOT]", "<｜end▁of▁sentence｜>", "<end_of_utterance>"),
    ),
    "eom_token_id": ("<|eom_id|>",),
    "fim_pad_token_id": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep_token_id": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep_token_id": ("<|file_sep|>",),
}
SHOWN_TEXTS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
# Where all marks of one of these sets exist, "<|end|>" ends a message of several in one generation.
END_IS_NO_EOG = ({"<|return|>", "<|call|>"}, {"<|flush|>", "<|call|>"}, {"<|flush|>", "<|calls|>"})


def read_vocab(keys: Keys, defaults: Defaults) -> Vocab:
    """The vocabulary in `keys`. `UserError` names the key that is missing, of a wrong type or too short."""
    texts = keys.texts(PREFIX + "tokens")
    if not texts:
        raise UserError(f"{PREFIX}tokens is empty: the file has no tokenizer; use a complete model file")
    ids = _ids_by_text(texts)
    kinds = _read_kinds(keys, len(texts))
    read = _IdReader(keys, len(texts))
    bos_id, eos_id = read("bos_token_id", defaults.bos_id), read("eos_token_id", defaults.eos_id)
    eog_ids = _end_of_generation(ids, kinds, read) | ({eos_id} if eos_id is not None else set())
    shown = {ids[text] for text in SHOWN_TEXTS if text in ids}
    return Vocab(
        texts=texts,
        kinds=kinds,
        ids=ids,
        bos_id=bos_id,
        eos_id=eos_id,
        unknown_id=read("unknown_token_id", defaults.unknown_id),
        add_bos=_adds(keys, "bos", bos_id, defaults.add_bos),
        add_eos=_adds(keys, "eos", eos_id, defaults.add_eos),
        eog_ids=frozenset(eog_ids),
        shown_ids=frozenset(shown | ({ids["<|end|>"]} - eog_ids if "<|end|>" in ids else set())),
        suppressed_ids=frozenset(i for i in keys.i32s(PREFIX + "suppress_tokens", default=()) if 0 <= i < len(texts)),
        file=keys.file,
    )


def _ids_by_text(texts: Sequence[str]) -> dict[str, int]:
    ids = dict(zip(reversed(texts), range(len(texts) - 1, -1, -1), strict=True))
    if len(ids) < len(texts):
        _log.warning("%stokens holds %d texts twice; the lower id is used", PREFIX, len(texts) - len(ids))
    return ids


def _read_kinds(keys: Keys, n_vocab: int) -> list[int]:
    kinds = keys.i32s(PREFIX + "token_type", default=None)
    if kinds is None:
        return [Kind.NORMAL] * n_vocab
    if len(kinds) < n_vocab:
        raise UserError(
            f"{PREFIX}token_type has {len(kinds)} values for {n_vocab} tokens of {PREFIX}tokens; "
            "convert the model again"
        )
    return list(kinds[:n_vocab])


class _IdReader:
    """Reads special ids; one out of range is worth a warning and counts as absent."""

    def __init__(self, keys: Keys, n_vocab: int) -> None:
        self._keys = keys
        self._n_vocab = n_vocab

    def __call__(self, name: str, default: int | None = None) -> int | None:
        i = self._keys.u32(PREFIX + name, default=None)
        if i is not None and i < self._n_vocab:
            return i
        if i is not None:
            _log.warning("%s%s is %d but there are %d tokens; the key is ignored", PREFIX, name, i, self._n_vocab)
        return default if default is not None and default < self._n_vocab else None


def _adds(keys: Keys, name: str, i: int | None, default: bool) -> bool:
    """Whether `add_{name}_token` holds; without an id to add there is nothing to add, which is worth a warning."""
    is_added = keys.flag(f"{PREFIX}add_{name}_token", default=default)
    if is_added and i is None:
        _log.warning("%sadd_%s_token is true but there is no %s token; none is added", PREFIX, name, name)
    return is_added and i is not None


def _end_of_generation(ids: Mapping[str, int], kinds: list[int], read: _IdReader) -> set[int]:
    """Ids that end a generation, the end-of-sequence id aside; those found by their text become control tokens."""
    marks = {ids[text] for text in EOG_TEXTS if text in ids}
    found = {name: _first(texts, ids) for name, texts in DETECTED.items()}
    for i in marks | {i for i in found.values() if i is not None}:
        kinds[i] = Kind.CONTROL
    eog = marks | {i for i in (read(name, default) for name, default in found.items()) if i is not None}
    if "<|end|>" in ids and any(marks <= ids.keys() for marks in END_IS_NO_EOG):
        eog.discard(ids["<|end|>"])
    if "<|tool_response>" in ids and "</s>" in ids:
        eog.discard(ids["</s>"])
        kinds[ids["</s>"]] = Kind.NORMAL
    return eog


def _first(texts: Sequence[str], ids: Mapping[str, int]) -> int | None:
    return next((ids[text] for text in texts if text in ids), None)
