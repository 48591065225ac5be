"""Records what llama.cpp computes on the demo model, as the reference for later runs.

    python tools/record_demo.py DIR OUT.npz [--full DIR2]

DIR holds `dense_T.gguf`, `moe_T.gguf` and `float_T.gguf` for T in Q8_0, Q4_1, written by `upcycle.py`; `float_T` is
`dense_T` dequantised to F32: llama.cpp rounds activations to 8 bits wherever weights are quantised, so only that one
says what the weights mean. K/V cache in float32, flash attention off. Runs where `llamacpp_peer.py` runs.

Arrays, prompt i (0: prose, 1: a chat turn), FILE one of the six names without suffix:
`text_i`; `input_ids_i` int32 [T]; `FILE_top_ids_i` int32 [T, 8] and `FILE_top_logits_i` float32 [T, 8], best first;
`FILE_logsumexp_i` float32 [T], so that top_logits - logsumexp are log-probabilities; `FILE_greedy_i` int32 [48] and
`FILE_greedy_gap_i` float32 [48], the top-1/top-2 gap of each step. With --full also every logit: DIR2/FILE.npz.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import llama_cpp
import numpy as np
from llamacpp_peer import Peer

N_TOP = 8
N_GREEDY = 48
TYPES = ("Q8_0", "Q4_1")
KINDS = ("dense", "moe", "float")
PROSE = Path(__file__).with_name("demo_prose.txt")
CHAT = "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n"


def record(path: Path, texts: tuple[str, ...]) -> dict[str, np.ndarray]:
    """`input_ids_i`, `logits_i` float32 [T, V], `greedy_i` and `greedy_gap_i` for each text."""
    arrays: dict[str, np.ndarray] = {}
    with Peer(path, n_ctx=512, n_threads=2, is_exact=True) as peer:
        for i, text in enumerate(texts):
            ids = peer.tokenize(text, has_specials=True)
            arrays[f"input_ids_{i}"] = np.array(ids, np.int32)
            arrays[f"logits_{i}"] = peer.logits(ids)
            arrays[f"greedy_{i}"], arrays[f"greedy_gap_{i}"] = peer.greedy(ids, N_GREEDY)
    return arrays


def summarize(logits_TV: np.ndarray) -> dict[str, np.ndarray]:
    """`top_ids`, `top_logits`, `logsumexp` of every position."""
    top_ids = np.argsort(-logits_TV, axis=1, kind="stable")[:, :N_TOP]
    top_logits = np.take_along_axis(logits_TV, top_ids, axis=1)
    shifted = np.exp(logits_TV.astype(np.float64) - top_logits[:, :1])
    logsumexp = top_logits[:, 0] + np.log(shifted.sum(axis=1))
    return {
        "top_ids": top_ids.astype(np.int32),
        "top_logits": top_logits,
        "logsumexp": logsumexp.astype(np.float32),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="llama.cpp's results on the demo model")
    parser.add_argument("models", type=Path, metavar="DIR")
    parser.add_argument("out", type=Path, metavar="OUT.npz")
    parser.add_argument("--full", type=Path, metavar="DIR2", help="also write every logit here")
    args = parser.parse_args(argv)
    texts = (PROSE.read_text(), CHAT)
    small: dict[str, np.ndarray] = {"llamacpp_version": np.array(llama_cpp.__version__)}
    small |= {f"text_{i}": np.array(text) for i, text in enumerate(texts)}
    for name in (f"{kind}_{type}" for kind in KINDS for type in TYPES):
        arrays = record(args.models / f"{name}.gguf", texts)
        if args.full:
            np.savez(args.full / f"{name}.npz", **arrays)
        for i in range(len(texts)):
            small[f"input_ids_{i}"] = arrays[f"input_ids_{i}"]
            summary = summarize(arrays[f"logits_{i}"])
            summary |= {key: arrays[f"{key}_{i}"] for key in ("greedy", "greedy_gap")}
            small |= {f"{name}_{key}_{i}": value for key, value in summary.items()}
    np.savez_compressed(args.out, **small)
    return 0


if __name__ == "__main__":
    sys.exit(main())
