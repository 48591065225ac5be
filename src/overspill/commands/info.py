"""`overspill info`: what is in a file, and whether it can be loaded; from its headers alone.

No weight is read and torch is not imported: a file of 100 GB is described, and checked, in a fraction of a second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from overspill.gguf import GgufFile, Keys, open_gguf
from overspill.models.check import tokenizer_of, understand
from overspill.models.registry import names
from overspill.placement.shape import Role, role_of

_COUNTS = {
    "n_layer": "block_count",
    "n_embd": "embedding_length",
    "n_head": "attention.head_count",
    "n_head_kv": "attention.head_count_kv",
    "n_expert": "expert_count",
    "n_expert_used": "expert_used_count",
    "n_ctx_train": "context_length",
}


def info_dict(path: Path) -> dict[str, Any]:
    """What the file says, of any architecture: null where it says nothing. Sizes in bytes."""
    with open_gguf(path) as file:
        arch = file.keys.text("general.architecture", default=None)
        scope = file.keys.scoped(arch or "")
        infos = file.tensors.values()
        return {
            "file": file.name,
            "parts": [{"file": str(part), "n_bytes": part.stat().st_size} for part in file.paths],
            "gguf_version": file.version,
            "name": file.keys.text("general.name", default=None),
            "architecture": arch,
            "is_supported": arch in list(names()),
            "n_bytes": file.n_bytes,
            "n_expert_bytes": sum(info.n_bytes for info in infos if role_of(info.name)[0] is Role.EXPERT),
            "n_params": sum(prod(info.shape) for info in infos),
            "n_tensors": len(file.tensors),
            **{name: _count(scope, key) for name, key in _COUNTS.items()},
            "n_vocab": _n_vocab(file, scope),
            "types": _types(file),
            "tokenizer": _tokenizer(file.keys),
            "has_chat_template": "tokenizer.chat_template" in file.keys,
        }


def _count(scope: Keys, key: str) -> int | list[int] | None:
    """One number, or one for each layer where they differ."""
    if key not in scope:
        return None
    values = scope.u32s(key) if scope.is_array(key) else (scope.u32(key),)
    return values[0] if len(set(values)) == 1 else list(values)


def _n_vocab(file: GgufFile, scope: Keys) -> int | None:
    if "token_embd.weight" in file.tensors:
        return file.tensors["token_embd.weight"].shape[0]
    return scope.u32("vocab_size", default=None)


def _types(file: GgufFile) -> dict[str, dict[str, int]]:
    """Per tensor type, the biggest first: tensors, values, bytes."""
    n_tensors, n_params, n_bytes = Counter[str](), Counter[str](), Counter[str]()
    for info in file.tensors.values():
        n_tensors[info.type.name] += 1
        n_params[info.type.name] += prod(info.shape)
        n_bytes[info.type.name] += info.n_bytes
    return {
        name: {"n_tensors": n_tensors[name], "n_params": n_params[name], "n_bytes": size}
        for name, size in n_bytes.most_common()
    }


def _tokenizer(keys: Keys) -> dict[str, Any] | None:
    model = keys.text("tokenizer.ggml.model", default=None)
    if model is None:
        return None
    tokens = keys.texts("tokenizer.ggml.tokens", default=None)
    return {
        "model": model,
        "pre": keys.text("tokenizer.ggml.pre", default=None),
        "n_tokens": None if tokens is None else len(tokens),
    }


def info_text(path: Path) -> str:
    """`info_dict` for people."""
    info = info_dict(path)
    rows = {
        "name": info["name"] or "-",
        "architecture": f"{info['architecture']}{'' if info['is_supported'] else ' (not supported)'}",
        "size": f"{_size(info['n_bytes'])} in {info['n_tensors']} tensors, {_params(info['n_params'])} parameters",
        "layers": f"{_shown(info['n_layer'])}, embedding {_shown(info['n_embd'])}",
        "heads": f"{_shown(info['n_head'])}, for keys and values {_shown(info['n_head_kv'])}",
        "experts": _experts(info),
        "context": _shown(info["n_ctx_train"]),
        "vocabulary": _shown(info["n_vocab"]),
        "tokenizer": _tokenizer_text(info["tokenizer"]),
        "chat template": "yes" if info["has_chat_template"] else "no",
    }
    lines = [info["file"], *(f"  {title:<14}{value}" for title, value in rows.items())]
    lines += [f"  {'type':<14}{'tensors':>8}{'parameters':>14}{'size':>14}"]
    for name, of in info["types"].items():
        lines.append(f"    {name:<12}{of['n_tensors']:>8}{_params(of['n_params']):>14}{_size(of['n_bytes']):>14}")
    if len(info["parts"]) > 1:
        lines += [f"  {'part':<14}{part['file']}  {_size(part['n_bytes'])}" for part in info["parts"]]
    return "\n".join(lines)


def _experts(info: Mapping[str, Any]) -> str:
    if not info["n_expert"]:
        return "none"
    share = info["n_expert_bytes"] / max(1, info["n_bytes"])
    used = _shown(info["n_expert_used"])
    return f"{_shown(info['n_expert'])}, {used} per token; {_size(info['n_expert_bytes'])}, {share:.0%} of the model"


def _tokenizer_text(tokenizer: Mapping[str, Any] | None) -> str:
    if tokenizer is None:
        return "none"
    return f"{tokenizer['model']}{'' if tokenizer['pre'] is None else ', ' + tokenizer['pre']}"


def _shown(value: int | list[int] | None) -> str:
    if isinstance(value, list):
        return f"{min(value):,} to {max(value):,}"
    return "-" if value is None else f"{value:,}"


def _size(n_bytes: int) -> str:
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if n_bytes >= 1 << shift:
            return f"{n_bytes / (1 << shift):,.2f} {unit}"
    return f"{n_bytes} B"


def _params(n: int) -> str:
    for factor, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if n >= factor:
            return f"{n / factor:.2f} {unit}"
    return str(n)


def check_file(path: Path) -> str:
    """One line that says what would be loaded. `UserError` with the first thing that would keep it from loading.

    Checked: container, metadata, hyper-parameters, every tensor's presence, shape, type and place, and the tokenizer.
    """
    with open_gguf(path) as file:
        understood, tokenizer = understand(file), tokenizer_of(file)
        hp, n_parts = understood.hparams, len(file.paths)
        experts = f", {hp.n_expert} experts" if hp.n_expert else ""
        return (
            f"{file.name}: ok: {hp.arch}, {hp.n_layer} layers{experts}, {len(understood.specs)} tensors of "
            f"{_size(file.n_bytes)} in {n_parts} file{'s' if n_parts > 1 else ''}, {tokenizer.n_vocab} tokens"
        )
