"""Flags of llama.cpp's programs that have no option here: taken, rewritten, or refused with what to do.

A command line for llama-server mostly works as it stands. Taken without effect is only what is so anyway, or concerns
nothing that answers show; a flag that would change them is refused by name. What is not listed here is for the
command's own parser.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from overspill.errors import UserError

_TAKEN = frozenset(
    (  # noqa: SIM905 - a list of words
        "-cb --cont-batching --jinja --metrics --slots --no-context-shift --warmup --no-warmup --offline --no-perf "
        "--perf --log-disable --log-prefix --log-timestamps -v --verbose --no-mmproj --no-display-prompt "
        "--no-conversation -no-cnv --simple-io --swa-full --no-repack --no-host --no-direct-io -ndio"
    ).split()
)
_TAKEN_WITH_VALUE = frozenset(
    (  # noqa: SIM905 - a list of words
        "--threads-http --log-file --log-verbosity -lv --verbosity --poll --prio --prio-batch -tb --threads-batch "
        "-fa --flash-attn --defrag-thold -dt -to --timeout -sps --slot-prompt-similarity --tags --numa "
        "-cms --checkpoint-min-step --cache-reuse"
    ).split()
)
_REWRITTEN: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "--no-mmap": ("--load-mode", "none"),
        "--mmap": ("--load-mode", "mmap"),
        "--mlock": ("--load-mode", "mlock"),
        "--direct-io": ("--load-mode", "dio"),
        "-dio": ("--load-mode", "dio"),
        "--n-parallel": ("--parallel",),
    }
)

_TEXT_ONLY = "this program takes text only; leave it out"
_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "-hf": "models are read from files; give -m FILE",
        "--hf-repo": "models are read from files; give -m FILE",
        "-hff": "models are read from files; give -m FILE",
        "-mu": "models are read from files; give -m FILE",
        "--model-url": "models are read from files; give -m FILE",
        "-kvu": "-c is shared out evenly over the -np slots; raise -c and leave it out",
        "--kv-unified": "-c is shared out evenly over the -np slots; raise -c and leave it out",
        "-nocb": "requests are always batched; leave it out",
        "--no-cont-batching": "requests are always batched; leave it out",
        "--context-shift": "a full context ends the answer; raise -c instead",
        "--keep": "a full context ends the answer; raise -c instead",
        "--no-jinja": "chat templates are always rendered by Jinja; leave it out",
        "-nkvo": "keys and values stay with their layer's device; lower -c or -ngl instead",
        "--no-kv-offload": "keys and values stay with their layer's device; lower -c or -ngl instead",
        "-nopo": "--policy cpu computes host experts on the CPU",
        "--no-op-offload": "--policy cpu computes host experts on the CPU",
        "--mmproj": _TEXT_ONLY,
        "-mm": _TEXT_ONLY,
        "--image": _TEXT_ONLY,
        "--embedding": "there are no endpoints for embeddings; leave it out",
        "--embeddings": "there are no endpoints for embeddings; leave it out",
        "--pooling": "there are no endpoints for embeddings; leave it out",
        "--reranking": "there are no endpoints for reranking; leave it out",
        "--rerank": "there are no endpoints for reranking; leave it out",
        "--lora": "adapters are not supported; merge it into the model",
        "--lora-scaled": "adapters are not supported; merge it into the model",
        "--control-vector": "control vectors are not supported; leave it out",
        "-md": "draft models are not supported; leave it out",
        "--model-draft": "draft models are not supported; leave it out",
        "--spec-type": "draft models are not supported; leave it out",
        "--draft-max": "draft models are not supported; leave it out",
        "--rpc": "devices of other hosts are not supported; leave it out",
        "--rope-scaling": "the model file says how positions are scaled; leave it out",
        "--rope-scale": "the model file says how positions are scaled; leave it out",
        "--rope-freq-base": "the model file says how positions are scaled; leave it out",
        "--rope-freq-scale": "the model file says how positions are scaled; leave it out",
        "--yarn-orig-ctx": "the model file says how positions are scaled; leave it out",
        "--override-kv": "keys of the model file are taken as they are; leave it out",
        "--ssl-key-file": "put a proxy with TLS in front; leave it out",
        "--ssl-cert-file": "put a proxy with TLS in front; leave it out",
        "--slot-save-path": "slots are not saved to files; leave it out",
        "--props": "properties cannot be changed while it runs; leave it out",
        "--no-slots": "/slots is always there; leave it out, or use --api-key",
        "--special": "control tokens are not shown; leave it out",
        "-sp": "control tokens are not shown; leave it out",
        "--adaptive-target": "the sampler adaptive_p is not supported; leave it out",
        "-l": "biases are set per request, with logit_bias; leave it out",
        "--logit-bias": "biases are set per request, with logit_bias; leave it out",
        "--models-dir": "one model is served; give -m FILE",
    }
)
_VALUES_FOLLOW = frozenset(
    (  # noqa: SIM905 - a list of words
        "-p --prompt -sys --system --grammar -j --json-schema -f --file -m --model"
    ).split()
)


def translated(args: Sequence[str]) -> list[str]:
    """A command's arguments as its parser takes them. UserError for a flag that is refused."""
    return list(_translated(iter(args)))


def _translated(args: Iterator[str]) -> Iterator[str]:
    for arg in args:
        flag, equals, _ = arg.partition("=")
        if flag in _REFUSED:
            raise UserError(f"{flag}: {_REFUSED[flag]}")
        if flag in _VALUES_FOLLOW and not equals:
            yield from (arg, *_next(args))
        elif flag in _TAKEN_WITH_VALUE:
            if not equals:
                _next(args)
        elif flag in _REWRITTEN:
            yield from _REWRITTEN[flag]
        elif flag not in _TAKEN:
            yield arg


def _next(args: Iterator[str]) -> list[str]:
    return [value for _, value in zip(range(1), args, strict=False)]
