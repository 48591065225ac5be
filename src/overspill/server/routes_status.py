"""What the server and its model are, and how they do: no request for text."""

from __future__ import annotations

from math import prod
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from overspill.engine.engine import SlotState
from overspill.llm import LLM
from overspill.server.access import HostOf, MetricsOf, SettingsOf
from overspill.server.errors import ApiError
from overspill.server.fields import SamplingFields, parse_body
from overspill.server.native import settings_dict
from overspill.server.params import sampling_params
from overspill.server.strict_json import Json

router = APIRouter()

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_VOCAB_TYPES = {"llama": 1, "gpt2": 2}


@router.get("/health")
@router.get("/v1/health")
async def health(host: HostOf) -> Response:
    """200 when the model is loaded and the device works."""
    if host.trouble is not None:
        raise ApiError(503, f"the last request failed: {host.trouble}")
    return Json({"status": "ok"})


@router.get("/models")
@router.get("/v1/models")
async def models(host: HostOf) -> Response:
    """The one model there is."""
    llm = host.llm
    meta = {
        "vocab_type": _VOCAB_TYPES[llm.source.keys.text("tokenizer.ggml.model")],
        "n_vocab": llm.hparams.n_vocab,
        "n_ctx": llm.sizes.n_cells,
        "n_ctx_train": llm.hparams.n_ctx_train,
        "n_embd": llm.hparams.n_embd,
        "n_params": sum(prod(info.shape) for info in llm.source.tensors.values()),
        "size": sum(info.n_bytes for info in llm.source.tensors.values()),
    }
    entry = {
        "id": host.name,
        "aliases": [host.name],
        "tags": [],
        "object": "model",
        "created": host.created,
        "owned_by": "overspill",
        "meta": meta,
    }
    unknown = dict.fromkeys(("modified_at", "size", "digest", "description", "parameters"), "")
    details = dict.fromkeys(("parent_model", "parameter_size", "quantization_level"), "") | {
        "format": "gguf",
        "family": llm.hparams.arch,
        "families": [llm.hparams.arch],
    }
    model = {"name": host.name, "model": host.name, "type": "model", "tags": [""], **unknown, "details": details}
    model["capabilities"] = ["completion"]
    return Json({"object": "list", "data": [entry], "models": [model]})


@router.get("/props")
async def props(host: HostOf, settings: SettingsOf) -> Response:
    """Defaults, sizes and the chat template."""
    llm = host.llm
    defaults = sampling_params(parse_body(SamplingFields, dict(settings.defaults)), llm.tokenizer, n_probs=0)
    return Json(
        {
            "default_generation_settings": {"params": settings_dict(defaults), "n_ctx": llm.sizes.n_cells},
            "total_slots": llm.sizes.n_slots,
            "model_alias": host.name,
            "model_path": llm.source.name,
            "modalities": {"vision": False, "video": False, "audio": False},
            "endpoint_slots": True,
            "endpoint_props": False,
            "endpoint_metrics": True,
            "chat_template": host.template.source,
            "bos_token": _text_of(llm, llm.tokenizer.bos_id),
            "eos_token": _text_of(llm, llm.tokenizer.eos_id),
            "build_info": "overspill",
            "is_sleeping": False,
            "ui": settings.has_page,
            "ui_settings": {},
            "cors_proxy_enabled": False,
        }
    )


@router.get("/slots")
async def slots(host: HostOf, fail_on_no_slot: bool = False) -> Response:
    """What each slot is doing."""
    states, n_ctx = host.llm.status.slots, host.llm.sizes.n_cells
    if fail_on_no_slot and all(state.is_busy for state in states):
        raise ApiError(503, "no slot available")
    return Json([_slot(state, n_ctx) for state in states])


@router.get("/metrics")
async def metrics(host: HostOf, metrics: MetricsOf) -> Response:
    """For Prometheus."""
    started = {"Process-Start-Time-Unix": str(host.created)}
    return Response(await metrics.scrape(), headers={"Content-Type": _METRICS_TYPE, **started})


def _slot(state: SlotState, n_ctx: int) -> dict[str, Any]:
    slot: dict[str, Any] = {
        "id": state.slot,
        "n_ctx": n_ctx,
        "speculative": False,
        "is_processing": state.is_busy,
    }
    if state.request_id is None or state.params is None:
        return slot
    most = state.params.max_tokens
    following = {
        "has_next_token": state.is_busy,
        "n_remain": -1 if most < 0 else most - state.n_generated,
        "n_decoded": state.n_generated,
    }
    return slot | {
        "id_task": int(state.request_id.removeprefix("r")),
        "n_prompt_tokens": state.n_prompt,
        "n_prompt_tokens_processed": state.n_done - state.n_cached,
        "n_prompt_tokens_cache": state.n_cached,
        "params": settings_dict(state.params),
        "next_token": [following],
    }


def _text_of(llm: LLM, token_id: int | None) -> str:
    return "" if token_id is None else llm.tokenizer.decode([token_id], skip_special=False)
