"""What llama-server has and this server has not: 501, and what to do instead."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import MappingProxyType

from fastapi import APIRouter
from starlette.responses import Response

from overspill.server.errors import ApiError

router = APIRouter()

_EMBEDDINGS = "there are no embeddings here; ask a server of an embedding model"
_RANKS = "there is no reranking here; ask a server of a reranking model"
_ABSENT = MappingProxyType(
    {
        "/v1/responses": "use /v1/chat/completions",
        "/responses": "use /v1/chat/completions",
        "/v1/chat/completions/control": "close the connection to end an answer",
        "/infill": "give /completion a prompt with the model's own marks for infilling",
        "/embedding": _EMBEDDINGS,
        "/embeddings": _EMBEDDINGS,
        "/v1/embeddings": _EMBEDDINGS,
        "/rerank": _RANKS,
        "/reranking": _RANKS,
        "/v1/rerank": _RANKS,
        "/v1/reranking": _RANKS,
        "/lora-adapters": "adapters are not supported; merge them into the model",
        "/slots/{id}": "slots are not saved to files; --cache-ram keeps what they held in host RAM",
    }
)


def _refusing(why: str) -> Callable[[], Awaitable[Response]]:
    async def refuse() -> Response:
        raise ApiError(501, why)

    return refuse


for _path, _why in _ABSENT.items():
    router.add_api_route(_path, _refusing(_why), methods=["GET", "POST"], include_in_schema=False)
router.add_api_route(
    "/props",
    _refusing("properties cannot be changed while the server runs; start it with other flags"),
    methods=["POST"],
    include_in_schema=False,
)
