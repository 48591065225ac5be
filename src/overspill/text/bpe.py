"""Byte-level byte-pair encoding (`tokenizer.ggml.model` = gpt2).

The merging is the `tokenizers` library's, fed with the file's tokens, merges and pre-tokenizer. Tokens spell bytes in
GPT-2's alphabet: printable Latin-1 characters stand for themselves, the other 68 bytes for U+0100 and up.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache

from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as InOrder

from overspill.errors import UserError
from overspill.text.pretokenize import PreTokenizer
from overspill.text.vocab import PREFIX, Vocab

_log = logging.getLogger(__name__)


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte; printable bytes first, the others follow from U+0100 in their own order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()


def spelled_bytes(text: str) -> bytes:
    """The bytes that a token's text spells; a character outside the alphabet stands for its own UTF-8."""
    try:
        return bytes([BYTE_OF[character] for character in text])
    except KeyError:
        return b"".join(bytes([BYTE_OF[c]]) if c in BYTE_OF else c.encode("utf-8", "replace") for c in text)


class BytePairEncoder:
    """`encode(text)` gives the ids of a text that holds no special tokens. Safe to call from several threads."""

    def __init__(self, vocab: Vocab, merges: Sequence[str], pre: PreTokenizer) -> None:
        pairs = _split_merges(merges)
        try:
            model = BPE(dict(vocab.ids), pairs, ignore_merges=pre.ignores_merges)
        except Exception as error:  # the library raises plain Exception
            raise _explained(vocab, pairs) or error from error
        self._tokenizer = Tokenizer(model)
        words = [Split(Regex(pattern), "isolated") for pattern in pre.patterns]
        self._tokenizer.pre_tokenizer = InOrder([*words, ByteLevel(add_prefix_space=False, use_regex=False)])
        _warn_of_missing_bytes(vocab)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def _split_merges(merges: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs in order of rank; a pair listed twice keeps its first rank. The left part may begin with a space."""
    pairs = []
    for merge in dict.fromkeys(merges):
        cut = merge.find(" ", 1)
        if cut < 0:
            raise UserError(f"{PREFIX}merges holds {merge[:60]!r}, which has no space between two parts; convert again")
        pairs.append((merge[:cut], merge[cut + 1 :]))
    return pairs


def _explained(vocab: Vocab, pairs: Sequence[tuple[str, str]]) -> UserError | None:
    for left, right in pairs:
        missing = next((part for part in (left, right, left + right) if part not in vocab.ids), None)
        if missing is not None:
            merge = f"{left} {right}"
            return UserError(
                f"{PREFIX}merges needs the token {missing[:60]!r} for {merge[:60]!r}, but {PREFIX}tokens has no such "
                f"text (vocabulary size {vocab.n_vocab}); the token list is cut off or of another model"
            )
    return None


def _warn_of_missing_bytes(vocab: Vocab) -> None:
    n_missing = sum(1 for character in BYTE_OF if character not in vocab.ids)
    if n_missing:
        _tell_missing_bytes(vocab.file, n_missing)


@cache
def _tell_missing_bytes(file: str, n_missing: int) -> None:
    """Once for each file, however often it is opened."""
    _log.warning("%s: %stokens lacks %d of the 256 bytes; text that needs them loses them", file, PREFIX, n_missing)
