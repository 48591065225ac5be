"""Flags of llama.cpp's programs that have no option here: taken, rewritten, or refused with what to do.

A command line for llama-server mostly works as it stands. Taken without effect is only what is so anyway, or concerns
nothing that answers show; a flag that would change them is refused by name. What is not listed here is for the
command's own parser.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from overspill.errors import UserError

_TAKEN = frozenset(
    (  # noqa: SIM905 - a list of words
        "-cb --cont-batching --jinja --metrics --slots --no-context-shift --warmup --no-warmup --offline --no-perf "
        "--perf --log-disable --log-prefix --log-timestamps -v --verbose --no-mmproj --no-display-prompt "
        "--no-conversation -no-cnv --simple-io --no-repack --no-host --no-direct-io -ndio --repack -nr "
        "-kvo --kv-offload --op-offload -no-kvu --no-kv-unified --no-log-prefix --no-log-timestamps "
        "--cache-idle-slots --no-cache-idle-slots --no-skip-chat-parsing --verbose-prompt --backend-sampling -bs"
    ).split()
)
_TAKEN_WITH_VALUE = frozenset(
    (  # noqa: SIM905 - a list of words
        "--threads-http --log-file --log-verbosity -lv --verbosity --poll --prio --prio-batch -tb --threads-batch "
        "--log-colors --defrag-thold -dt -to --timeout -sps --slot-prompt-similarity --tags --numa "
        "-cms --checkpoint-min-step --cache-reuse"
    ).split()
)
_FLASH_ATTENTION = ("-fa", "--flash-attn")
_FLASH_ATTENTION_VALUES = ("on", "off", "auto", "0", "1", "enabled", "disabled", "true", "false")
_REWRITTEN: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "--no-mmap": ("--load-mode", "none"),
        "--mmap": ("--load-mode", "mmap"),
        "--mlock": ("--load-mode", "mlock"),
        "--direct-io": ("--load-mode", "dio"),
        "-dio": ("--load-mode", "dio"),
        "--n-parallel": ("--parallel",),
        "--swa-checkpoints": ("--ctx-checkpoints",),
        "--webui": ("--ui",),
        "--no-webui": ("--no-ui",),
    }
)

_TEXT_ONLY = "this program takes text only; leave it out"
_NO_DRAFTS = "draft models are not supported; leave it out"
_FROM_FILES = "models are read from files; give -m FILE"
_YARN = ("orig-ctx", "ext-factor", "attn-factor", "beta-slow", "beta-fast")
_POSITIONS = "the model file says how positions are scaled; leave it out"
_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "-hf": _FROM_FILES,
        "--hf-repo": _FROM_FILES,
        "-hff": _FROM_FILES,
        "-mu": _FROM_FILES,
        "--model-url": _FROM_FILES,
        **dict.fromkeys(("-hfr", "-hfd", "-hfrd", "-hfv", "-hfrv", "-hft", "--hf-token", "-dr"), _FROM_FILES),
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
        "-mmu": _TEXT_ONLY,
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
        "-md": _NO_DRAFTS,
        "--model-draft": _NO_DRAFTS,
        "--spec-type": _NO_DRAFTS,
        "--draft-max": _NO_DRAFTS,
        **dict.fromkeys(("-td", "-tbd", "-cd", "-ngld", "-devd", "-ctkd", "-ctvd", "-mv", "--draft"), _NO_DRAFTS),
        "--rpc": "devices of other hosts are not supported; leave it out",
        "--rope-scaling": _POSITIONS,
        "--rope-scale": _POSITIONS,
        "--rope-freq-base": _POSITIONS,
        "--rope-freq-scale": _POSITIONS,
        **dict.fromkeys((f"--yarn-{what}" for what in _YARN), _POSITIONS),
        "--override-kv": "keys of the model file are taken as they are; leave it out",
        "--ssl-key-file": "put a proxy with TLS in front; leave it out",
        "--ssl-cert-file": "put a proxy with TLS in front; leave it out",
        "--slot-save-path": "slots are not saved to files; leave it out",
        "--props": "properties cannot be changed while it runs; leave it out",
        "--no-slots": "/slots is always there; leave it out, or use --api-key",
        "--special": "control tokens are not shown; leave it out",
        "-sp": "control tokens are not shown; leave it out",
        "--adaptive-target": "the sampler adaptive_p is not supported; leave it out",
        "--adaptive-decay": "the sampler adaptive_p is not supported; leave it out",
        "--skip-chat-parsing": "--reasoning-format none leaves thoughts in the text, and calls are always read",
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
    return list(_translated(args))


def _translated(given: Sequence[str]) -> Iterator[str]:
    args = deque(given)
    while args:
        arg = args.popleft()
        flag, equals, _ = arg.partition("=")
        if flag in _REFUSED:
            raise UserError(f"{flag}: {_REFUSED[flag]}")
        if flag in _VALUES_FOLLOW and not equals:
            yield from (arg, *_next(args))
        elif flag in _FLASH_ATTENTION:  # a switch, or with a value
            if args and args[0] in _FLASH_ATTENTION_VALUES:
                args.popleft()
        elif flag in _TAKEN_WITH_VALUE:
            if not equals:
                _next(args)
        elif flag in _REWRITTEN:
            yield from _REWRITTEN[flag]
        elif flag not in _TAKEN:
            yield arg


def _next(args: deque[str]) -> list[str]:
    return [args.popleft()] if args else []
