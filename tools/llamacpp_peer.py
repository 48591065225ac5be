"""llama.cpp through the low-level API of `llama-cpp-python`: its logits, its greedy continuation, its speed.

Why: it is the program to compare with, in values and in speed. The package's high-level class copies and converts
logits in Python, which would be measured with it; here only `llama_decode` and filling its batch (about a microsecond a
token) are timed.

Install, into any environment (a C++ compiler builds it: five minutes on two cores):
    CMAKE_ARGS="-DGGML_NATIVE=ON" pip install --no-binary llama-cpp-python llama-cpp-python
This file imports nothing of `overspill`, so that the environment needs only the one package.

    python tools/llamacpp_peer.py -m FILE -p 512 -n 64 -r 5 -t 2        prints the samples as JSON
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import llama_cpp
import numpy as np

N_UBATCH = 512  # llama.cpp's own default


@llama_cpp.llama_log_callback
def _discard_log(_level: int, _text: bytes, _user_data: ctypes.c_void_p) -> None:
    """llama.cpp reports every tensor it loads; what matters comes back as a result."""


class Peer:
    """One model and one context of llama.cpp on the CPU, sequence 0 only.

    `is_exact` asks for a float32 K/V cache and no flash attention (to compare values); otherwise llama.cpp's defaults
    apply (to compare speed).
    """

    def __init__(self, path: Path, *, n_ctx: int, n_threads: int, is_exact: bool = False) -> None:
        llama_cpp.llama_log_set(_discard_log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
        if not self._model:
            raise RuntimeError(f"{path}: llama.cpp {llama_cpp.__version__} does not load it")
        self._ctx = llama_cpp.llama_init_from_model(self._model, _context_params(n_ctx, n_threads, is_exact))
        if not self._ctx:
            raise RuntimeError(f"{path}: llama.cpp makes no context of {n_ctx} tokens")
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
        self._vocab = vocab
        self._batch = llama_cpp.llama_batch_init(n_ctx, 0, 1)
        self._n_past = 0

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, _type: type | None, _value: BaseException | None, _traceback: TracebackType | None) -> None:
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._ctx)
        llama_cpp.llama_model_free(self._model)

    def tokenize(self, text: str, *, has_specials: bool = False) -> list[int]:
        """Ids of `text`; special tokens are never added, and parsed only if `has_specials`."""
        data = text.encode()
        ids = (llama_cpp.llama_token * (len(data) + 1))()
        n_ids = llama_cpp.llama_tokenize(self._vocab, data, len(data), ids, len(ids), False, has_specials)
        return list(ids[:n_ids])

    def clear(self) -> None:
        """Forgets the sequence: the next token gets position 0."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._ctx), True)
        self._n_past = 0

    def decode(self, ids: Sequence[int], *, has_all_logits: bool = False) -> None:
        """Appends `ids` to the sequence and waits; logits are computed for the last token, or for every one."""
        batch = self._batch
        batch.n_tokens = len(ids)
        for i, token_id in enumerate(ids):
            batch.token[i] = token_id
            batch.pos[i] = self._n_past + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = has_all_logits or i == len(ids) - 1
        status = llama_cpp.llama_decode(self._ctx, batch)
        if status:
            raise RuntimeError(f"llama_decode of {len(ids)} tokens after {self._n_past} returned {status}")
        llama_cpp.llama_synchronize(self._ctx)
        self._n_past += len(ids)

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """float32 [T, V]: logits of every position of `ids`, in one go, as a fresh sequence."""
        self.clear()
        self.decode(ids, has_all_logits=True)
        return self._read_logits(len(ids))

    def greedy(self, ids: Sequence[int], n_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """int32 [n], float32 [n]: the greedy continuation (no stop token) and the top-1/top-2 gap of each step."""
        self.clear()
        self.decode(ids)
        chosen, gaps = [], []
        for _ in range(n_tokens):
            row_V = self._read_logits(1)[0]
            second, first = np.argsort(row_V)[-2:]
            chosen.append(int(first))
            gaps.append(row_V[first] - row_V[second])
            self.decode([int(first)])
        return np.array(chosen, np.int32), np.array(gaps, np.float32)

    def _read_logits(self, n_rows: int) -> np.ndarray:
        pointer = llama_cpp.llama_get_logits(self._ctx)
        return np.ctypeslib.as_array(pointer, shape=(n_rows, self.vocab_size)).copy()


def _context_params(n_ctx: int, n_threads: int, is_exact: bool) -> llama_cpp.llama_context_params:
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = n_ctx
    params.n_batch = n_ctx
    params.n_ubatch = N_UBATCH
    params.n_threads = n_threads
    params.n_threads_batch = n_threads
    if is_exact:
        params.type_k = llama_cpp.GGML_TYPE_F32
        params.type_v = llama_cpp.GGML_TYPE_F32
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return params


def bench(path: Path, *, n_prompt: int, n_gen: int, n_threads: int, n_repeats: int) -> dict[str, object]:
    """Samples in tokens/s, like llama-bench: random ids, one warm-up each, an empty context before every repeat.

    Prefill is one `llama_decode` of `n_prompt` tokens; decode is `n_gen` single tokens after nothing.
    """
    rng = np.random.default_rng(0)
    with Peer(path, n_ctx=max(n_prompt, n_gen), n_threads=n_threads) as peer:
        prompt = rng.integers(0, peer.vocab_size, n_prompt).tolist()
        steps = [[token_id] for token_id in rng.integers(0, peer.vocab_size, n_gen).tolist()]
        _rate(peer, [prompt])
        pp_samples = [_rate(peer, [prompt]) for _ in range(n_repeats)]
        _rate(peer, steps[:1])
        tg_samples = [_rate(peer, steps) for _ in range(n_repeats)]
    return {
        "version": f"llama-cpp-python {llama_cpp.__version__}",
        "system_info": llama_cpp.llama_print_system_info().decode(),
        "pp_samples": pp_samples,
        "tg_samples": tg_samples,
    }


def _rate(peer: Peer, batches: Sequence[Sequence[int]]) -> float:
    peer.clear()
    start = time.perf_counter()
    for ids in batches:
        peer.decode(ids)
    return sum(map(len, batches)) / (time.perf_counter() - start)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="speed of llama.cpp on one file, as JSON")
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("-p", "--n-prompt", type=int, default=512)
    parser.add_argument("-n", "--n-gen", type=int, default=64)
    parser.add_argument("-r", "--repeats", type=int, default=5)
    parser.add_argument("-t", "--threads", type=int, required=True)
    args = parser.parse_args(argv)
    result = bench(args.model, n_prompt=args.n_prompt, n_gen=args.n_gen, n_threads=args.threads, n_repeats=args.repeats)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
