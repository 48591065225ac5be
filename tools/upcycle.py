"""Turns a dense `llama` GGUF into a Mixture-of-Experts GGUF that computes the same function.

Why: real weights of a real MoE do not fit a test machine. Every expert is a copy of the dense feed-forward block and
the router is random: routing, expert placement, uploads and caches all work as in any MoE ("Sparse Upcycling",
Komatsuzaki et al. 2022, without the training), while the output can be checked against the dense model, because this
architecture renormalises the weights of the chosen experts to a sum of 1.

Invariants: everything but the feed-forward tensors, the expert keys, `general.name` and `general.file_type` is kept;
with `type="keep"` every quantised byte is kept, so that the MoE's experts are exactly the dense weights. With
`n_experts=0` the file stays dense and is only requantised: the twin to compare with (`type="F32"`: the
values that a quantised file stands for).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, LlamaFileType, ReaderField, ReaderTensor
from gguf.quants import dequantize, quantize
from gguf_stream import Entry, Field, write_gguf

from overspill.errors import UserError

TYPES = ("Q8_0", "Q4_1", "F32", "keep")
ARCH = "llama"
FILE_TYPES = {
    "Q8_0": LlamaFileType.MOSTLY_Q8_0,
    "Q4_1": LlamaFileType.MOSTLY_Q4_1,
    "F32": LlamaFileType.ALL_F32,
}
# What the two ends of a model lose by 4 bits is out of proportion to their size, so they get 8.
END_TENSORS = ("token_embd.weight", "output.weight")
FOUR_BIT_TYPES = ("Q4_1",)
# Trained feed-forward norms of small models are far below 1 and turn outliers down, so that a gain of 2 gives logits of
# a standard deviation of 1 to 2 (SmolLM2-135M, English prose: all of 8 experts are used but in the last two layers).
ROUTER_GAIN = 2.0
DENSE_FFN = re.compile(r"(blk\.(\d+)\.ffn_)(gate|up|down)\.weight")


def upcycle(
    src: Path | str, dst: Path | str, *, n_experts: int = 8, n_used: int = 2, type: str = "Q8_0", seed: int = 0
) -> None:
    """Writes `dst`: `src` with `n_experts` copies of each feed-forward block, `n_used` of them chosen per token.

    `type` is the type of all matrices but the router ("keep": as they are); the token embedding and the output head
    become Q8_0 where it is a 4-bit type. Raises `UserError` for a file or options that cannot be upcycled.
    """
    src, dst = Path(src), Path(dst)
    _check_options(src, dst, n_experts, n_used, type)
    reader = _open(src)
    _check_source(src, reader)
    entries = list(_entries(reader, n_experts, type, seed))
    write_gguf(dst, ARCH, list(_fields(reader, n_experts, n_used, type)), entries)


def _check_options(src: Path, dst: Path, n_experts: int, n_used: int, type: str) -> None:
    if type not in TYPES:
        raise UserError(f"--type {type}: not one of {', '.join(TYPES)}")
    if n_experts < 0 or n_experts == 1:
        raise UserError(f"--experts {n_experts}: give 2 or more, or 0 for the dense twin")
    if n_experts and not 1 <= n_used <= n_experts:
        raise UserError(f"--top-k {n_used}: give 1 to {n_experts}, the number of experts")
    if src.exists() and dst.exists() and src.samefile(dst):
        raise UserError(f"{dst}: is the input file; choose another name for the output")


def _open(path: Path) -> GGUFReader:
    try:
        return GGUFReader(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    except (ValueError, KeyError, IndexError) as error:
        raise UserError(f"{path}: not a readable GGUF file ({error}); fetch it again") from error


def _check_source(path: Path, reader: GGUFReader) -> None:
    arch_field = reader.get_field("general.architecture")
    arch = arch_field.contents() if arch_field else None
    if arch != ARCH:
        raise UserError(f"{path}: general.architecture is {arch!r}; only dense {ARCH!r} files can be upcycled")
    names = {tensor.name for tensor in reader.tensors}
    layers = {match.group(2) for match in map(DENSE_FFN.fullmatch, names) if match}
    if not layers:
        raise UserError(f"{path}: no tensor blk.N.ffn_gate.weight; only dense {ARCH!r} files can be upcycled")
    for layer in layers:
        if f"blk.{layer}.ffn_norm.weight" not in names:
            raise UserError(f"{path}: tensor blk.{layer}.ffn_norm.weight is missing; only whole files can be upcycled")


def _fields(reader: GGUFReader, n_experts: int, n_used: int, type: str) -> Iterator[Field]:
    expert_keys = {f"{ARCH}.expert_count": n_experts, f"{ARCH}.expert_used_count": n_used}
    for field in reader.fields.values():
        if field.name == "general.name" and n_experts:
            name = f"{field.contents()} (upcycled: {n_experts} experts, top-{n_used})"
            yield Field(field.name, name, GGUFValueType.STRING)
        elif field.name == "general.file_type" and type in FILE_TYPES:
            yield Field(field.name, int(FILE_TYPES[type]), GGUFValueType.UINT32)
        elif not _is_rewritten(field, expert_keys):
            yield Field(field.name, field.contents(), field.types[0], field.types[-1])
    if n_experts:
        for key, value in expert_keys.items():
            yield Field(key, value, GGUFValueType.UINT32)


def _is_rewritten(field: ReaderField, expert_keys: dict[str, int]) -> bool:
    return field.name.startswith("GGUF.") or field.name == "general.architecture" or field.name in expert_keys


def _entries(reader: GGUFReader, n_experts: int, type: str, seed: int) -> Iterator[Entry]:
    norms = {tensor.name: tensor for tensor in reader.tensors if tensor.name.endswith("ffn_norm.weight")}
    for tensor in reader.tensors:
        ffn = DENSE_FFN.fullmatch(tensor.name)
        if not (ffn and n_experts):
            yield _entry(tensor, type)
            continue
        prefix, layer, part = ffn.groups()
        dense = _entry(tensor, type)
        make = partial(_stack, dense, n_experts)
        yield Entry(f"{prefix}{part}_exps.weight", (n_experts, *dense.shape), dense.type, make)
        if part == "gate":
            make = partial(_router, n_experts, norms[f"{prefix}norm.weight"], [seed, int(layer)])
            yield Entry(f"{prefix}gate_inp.weight", (n_experts, dense.shape[-1]), GGMLQuantizationType.F32, make)


def _entry(tensor: ReaderTensor, type: str) -> Entry:
    shape = tuple(int(n) for n in reversed(tensor.shape))
    target = _target(tensor, type)
    return Entry(tensor.name, shape, target, partial(_convert, tensor, target))


def _target(tensor: ReaderTensor, type: str) -> GGMLQuantizationType:
    if type == "keep" or len(tensor.shape) < 2:
        return tensor.tensor_type
    has_8_bits = tensor.name in END_TENSORS and type in FOUR_BIT_TYPES
    return GGMLQuantizationType.Q8_0 if has_8_bits else GGMLQuantizationType[type]


def _convert(tensor: ReaderTensor, target: GGMLQuantizationType) -> np.ndarray:
    if target == tensor.tensor_type:
        return tensor.data
    return quantize(dequantize(tensor.data, tensor.tensor_type), target)


def _stack(dense: Entry, n_experts: int) -> np.ndarray:
    data = dense.make()
    return np.broadcast_to(data, (n_experts, *data.shape))


def _router(n_experts: int, norm: ReaderTensor, seeds: list[int]) -> np.ndarray:
    """F32 [E, D], normal, scaled to the root mean square of the norm in front of it: logits do not depend on that."""
    norm_D = dequantize(norm.data, norm.tensor_type)
    gain = ROUTER_GAIN / np.sqrt(norm_D.size * np.mean(norm_D**2))
    rng = np.random.default_rng(seeds)
    return (gain * rng.standard_normal((n_experts, norm_D.size))).astype(np.float32)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="dense llama GGUF -> Mixture-of-Experts GGUF of the same function")
    parser.add_argument("src", type=Path, metavar="IN.gguf")
    parser.add_argument("dst", type=Path, metavar="OUT.gguf")
    parser.add_argument("--experts", type=int, default=8, help="0: stay dense, only requantise (default: 8)")
    parser.add_argument("--top-k", type=int, default=2, help="experts chosen per token (default: 2)")
    parser.add_argument("--type", choices=TYPES, default="Q8_0", help="type of the matrices (default: Q8_0)")
    parser.add_argument("--seed", type=int, default=0, help="of the random router (default: 0)")
    args = parser.parse_args(argv)
    try:
        upcycle(args.src, args.dst, n_experts=args.experts, n_used=args.top_k, type=args.type, seed=args.seed)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
