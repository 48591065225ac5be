"""Text to token ids and back, from the tokenizer that a GGUF file carries.

A text is cut at its special tokens (`special`), what lies between is encoded by the model's algorithm (`bpe`, `spm`),
and BOS and EOS are added as the file says. A BOS that is already there is not added again, whoever wrote it: a
template, a user or the caller; a prompt has exactly one.

Chat prompts come as `Segment`s: special tokens are recognised in the markup of the template only, so that no message
can forge the end of a turn. The text between special tokens is encoded as one, across segments: for harmless messages
the ids are those of the whole prompt.
"""

from __future__ import annotations

import logging
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Protocol

from overspill.errors import UserError
from overspill.gguf.keys import Keys
from overspill.text.bpe import BytePairEncoder, spelled_bytes
from overspill.text.pretokenize import find_pre_tokenizer
from overspill.text.special import Hit, Segment, SpecialFinder, SpecialTexts
from overspill.text.spm import SPACE, ScoreEncoder
from overspill.text.vocab import PREFIX, Defaults, Kind, Vocab, read_vocab

_log = logging.getLogger(__name__)

_BYTE_TEXT = re.compile("<0x[0-9A-F]{2}>")
SPM_DEFAULTS = Defaults(bos_id=1, eos_id=2, unknown_id=0, add_bos=True)


class Encoder(Protocol):
    """The algorithm of a model, for text without special tokens."""

    def encode(self, text: str) -> list[int]: ...


class Tokenizer:
    """Encodes and decodes; immutable and safe to share between threads. Build it with `from_keys`."""

    def __init__(self, vocab: Vocab, encoder: Encoder, *, is_byte_level: bool, adds_space: bool = False) -> None:
        """`is_byte_level`: tokens spell bytes in GPT-2's alphabet; `adds_space`: text begins with an extra space."""
        self._vocab = vocab
        self._encoder = encoder
        self._is_byte_level = is_byte_level
        self._adds_space = adds_space
        control_ids = vocab.of_kind(Kind.CONTROL, Kind.UNKNOWN)
        user_defined_ids = vocab.of_kind(Kind.USER_DEFINED)
        control, user_defined = vocab.spelled(control_ids), vocab.spelled(user_defined_ids)
        self._special_ids = frozenset((*control_ids, *user_defined_ids))
        self._hidden_ids = frozenset(control_ids) - vocab.shown_ids
        self._all = SpecialFinder(control | user_defined)
        self._user_defined = SpecialFinder(user_defined)
        self.special_texts = SpecialTexts(control=frozenset(control), user_defined=frozenset(user_defined))
        self.n_vocab = vocab.n_vocab
        self.bos_id = vocab.bos_id
        self.eos_id = vocab.eos_id
        self.eos_ids = vocab.eog_ids
        self.add_bos = vocab.add_bos
        self.add_eos = vocab.add_eos
        self.suppressed_ids = vocab.suppressed_ids

    @classmethod
    def from_keys(cls, keys: Keys) -> Tokenizer:
        """The tokenizer of a model file; `UserError` where it is missing, damaged or of a kind not supported."""
        model = keys.text(PREFIX + "model")
        if model == "gpt2":
            return cls._byte_level(keys)
        if model == "llama":
            vocab = read_vocab(keys, SPM_DEFAULTS)
            adds_space = keys.flag(PREFIX + "add_space_prefix", default=True)
            encoder = ScoreEncoder(vocab, keys.f32s(PREFIX + "scores"))
            return cls(vocab, encoder, is_byte_level=False, adds_space=adds_space)
        raise UserError(
            f"{PREFIX}model is {model[:60]!r}, a tokenizer that is not supported; supported are gpt2 and llama"
        )

    @classmethod
    def _byte_level(cls, keys: Keys) -> Tokenizer:
        name = keys.text(PREFIX + "pre", default=None)
        if not name:
            _log.warning("%spre is missing: words are cut by the default rule, which may not be the model's", PREFIX)
        pre = find_pre_tokenizer(name or "default")
        vocab = read_vocab(keys, Defaults(add_bos=pre.adds_bos))
        return cls(vocab, BytePairEncoder(vocab, keys.texts(PREFIX + "merges"), pre), is_byte_level=True)

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Ids of `text`. `add_special`: with BOS and EOS as the file says; `parse_special`: spelled control tokens
        become those tokens (user-defined tokens always do)."""
        text = _well_formed(text)
        finder = self._all if parse_special else self._user_defined
        return self._with_ends(self._encode(text, finder.find(text)), add_special)

    def encode_marked(self, segments: Iterable[Segment], *, add_special: bool = True) -> list[int]:
        """Ids of a prompt of which only the markup may hold special tokens; see `Segment`."""
        parts = [Segment(_well_formed(part.text), part.is_markup) for part in segments if part.text]
        text = "".join(part.text for part in parts)
        ends = list(accumulate(len(part.text) for part in parts))

        def is_open(hit: Hit) -> bool:
            touched = parts[bisect_right(ends, hit.start) : bisect_right(ends, hit.end - 1) + 1]
            is_whole = len(touched) == 1 or text[hit.start : hit.end].isspace()
            return is_whole and all(part.is_markup for part in touched)

        return self._with_ends(self._encode(text, self._all.find(text, is_open)), add_special)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text that `encode` made these ids from. Control tokens are left out if `skip_special`; bytes that are
        no UTF-8 read as U+FFFD. The space that encoding put in front is taken off again."""
        data = b"".join(self.piece(i, special=not skip_special) for i in ids)
        text = data.decode("utf-8", "replace")
        return text[1:] if self._adds_space and text.startswith(" ") else text

    def piece(self, token_id: int, *, special: bool = False) -> bytes:
        """The bytes of one token, maybe a part of a character; those of a control token only if `special`."""
        if not 0 <= token_id < self.n_vocab:
            raise UserError(f"token id {token_id} is out of range: the vocabulary has {self.n_vocab} tokens")
        return self._bytes_of(token_id) if special or token_id not in self._hidden_ids else b""

    def is_special(self, token_id: int) -> bool:
        """Whether this is a control, unknown or user-defined token."""
        return token_id in self._special_ids

    def _encode(self, text: str, hits: Sequence[Hit]) -> list[int]:
        ids: list[int] = []
        start = 0
        for hit in hits:
            ids += self._encode_between(text[start : hit.start])
            ids.append(hit.token_id)
            start = hit.end
        return ids + self._encode_between(text[start:])

    def _encode_between(self, text: str) -> list[int]:
        return self._encoder.encode(" " + text if self._adds_space else text) if text else []

    def _with_ends(self, ids: list[int], add_special: bool) -> list[int]:
        if add_special and self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids = [self.bos_id, *ids]
        if add_special and self.add_eos and self.eos_id is not None and ids[-1:] != [self.eos_id]:
            ids = [*ids, self.eos_id]
        return ids

    def _bytes_of(self, token_id: int) -> bytes:
        text, kind = self._vocab.texts[token_id], self._vocab.kinds[token_id]
        if kind == Kind.BYTE and _BYTE_TEXT.fullmatch(text):
            return bytes([int(text[3:5], 16)])
        if token_id in self._special_ids:
            return text.encode("utf-8", "replace")
        return spelled_bytes(text) if self._is_byte_level else text.replace(SPACE, " ").encode("utf-8", "replace")


def _well_formed(text: str) -> str:
    """Text that can be written as UTF-8: surrogate pairs joined, lone surrogates replaced by U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
