"""Vocabularies for tests: the tiny BPE under other names, small ones made up, and the real ones outside the project."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from overspill.gguf import Keys, open_gguf
from overspill.text import Tokenizer
from tests.helpers.gguf_files import Document, flag, numbers, string, strings, u32

DATA = Path(__file__).parent.parent / "data" / "vocab"
SHARED = Path(__file__).parents[3] / "shared" / "fixtures"
T = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def shared(name: str) -> Path:
    """A large fixture next to the project; the test is skipped where it is absent."""
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"needs {name} of the fixtures, which are not part of the project")
    return path


def read_cases(inp: Path, out: Path) -> list[tuple[str, list[int]]]:
    """Texts and expected ids; the texts are read without newline translation."""
    texts = inp.read_bytes().decode().split("\n__ggml_vocab_test__\n")[:-1]
    lines = out.read_text().split("\n")
    assert len(texts) == len(lines) - 1
    return [(text, [int(i) for i in line.split()]) for text, line in zip(texts, lines, strict=False)]


@cache
def own_ids() -> dict[str, dict[str, list[int]]]:
    loaded: dict[str, dict[str, list[int]]] = json.loads((DATA / "own.json").read_text())
    return loaded


@cache
def tiny() -> Document:
    """`tiny.gguf` taken apart with the gguf package."""
    from gguf import GGUFReader

    fields = GGUFReader(DATA / "tiny.gguf").fields.items()
    keys = [(k, b"".join(p.tobytes() for p in f.parts[2:])) for k, f in fields if not k.startswith("GGUF.")]
    return Document(tuple(keys))


def keys_of(document: Document, folder: Path) -> Keys:
    """The document's metadata, read by the project's own reader."""
    path = folder / f"vocab-{len(list(folder.iterdir()))}.gguf"
    path.write_bytes(document.to_bytes())
    return open_gguf(path).keys


def bpe_document(extra: dict[str, int], *, pre: str | None = "gpt-2", merges: tuple[str, ...] = ()) -> Document:
    """All 256 bytes, what the merges make, then the special tokens `extra` (text -> kind)."""
    from overspill.text.bpe import BYTE_OF

    tokens = [*BYTE_OF, *(merge.replace(" ", "", 1) for merge in merges)]
    kinds = [NORMAL] * len(tokens) + list(extra.values())
    document = Document().with_key("general.architecture", string("llama"))
    document = document.with_key(T + "model", string("gpt2"))
    document = document if pre is None else document.with_key(T + "pre", string(pre))
    return _with_tokens(document, [*tokens, *extra], kinds).with_key(T + "merges", strings(merges))


def spm_document(scores: dict[str, float], extra: dict[str, int] | None = None) -> Document:
    """`<unk> <s> </s>`, 256 byte tokens, scored tokens, special tokens."""
    special = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL}
    byte_tokens = dict.fromkeys((f"<0x{byte:02X}>" for byte in range(256)), BYTE)
    kinds = special | byte_tokens | dict.fromkeys(scores, NORMAL) | (extra or {})
    document = Document().with_key("general.architecture", string("llama"))
    document = _with_tokens(document.with_key(T + "model", string("llama")), list(kinds), list(kinds.values()))
    return document.with_key(T + "scores", numbers(6, "f", [scores.get(text, 0.0) for text in kinds]))


def with_ids(document: Document, **ids: int) -> Document:
    """Special ids by the short name of their key: `eos=3`."""
    for name, i in ids.items():
        document = document.with_key(f"{T}{name}_token_id", u32(i))
    return document


def with_flags(document: Document, **flags: bool) -> Document:
    for name, value in flags.items():
        document = document.with_key(T + name, flag(value))
    return document


def _with_tokens(document: Document, tokens: list[str], kinds: list[int]) -> Document:
    return document.with_key(T + "tokens", strings(tokens)).with_key(T + "token_type", numbers(5, "i", kinds))


@cache
def tiny_tokenizer() -> Tokenizer:
    """Of `tiny.gguf`."""
    return Tokenizer.from_keys(open_gguf(DATA / "tiny.gguf").keys)


def spelled(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """The pieces of ids as text."""
    return [tokenizer.piece(i, special=True).decode("utf-8", "backslashreplace") for i in ids]
