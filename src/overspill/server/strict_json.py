"""Strict JSON in and out: what comes in is an object or an error 400, what goes out is valid UTF-8 without NaN."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from starlette.requests import Request
from starlette.responses import Response

from overspill.server.errors import ApiError, ClientGone


def dump(value: Any) -> bytes:
    """Compact JSON; lone surrogates, which no UTF-8 can hold, as '?'."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")


class Json(Response):
    """A value as the body of an answer."""

    media_type = "application/json; charset=utf-8"

    def render(self, content: Any) -> bytes:
        return dump(content)


async def read_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """The body as a JSON object, keys with null left out. ApiError 400 or 413; ClientGone."""
    value = parse(await _read(request, max_bytes))
    if not isinstance(value, dict):
        raise ApiError(400, "the body is no JSON object")
    return {key: item for key, item in value.items() if item is not None}


def parse(data: bytes) -> Any:
    """JSON text to a value; ApiError 400 for anything that is none, NaN and too deep nesting included."""
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is no valid JSON: {error}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


async def _read(request: Request, max_bytes: int) -> bytes:
    pieces: list[bytes] = []
    n_bytes = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        pieces.append(message.get("body", b""))
        n_bytes += len(pieces[-1])
        if n_bytes > max_bytes:
            raise ApiError(413, f"the body is larger than {max_bytes} bytes")
        if not message.get("more_body", False):
            return b"".join(pieces)
