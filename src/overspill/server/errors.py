"""Errors as clients see them: `{"error": {"code", "message", "type", ...}}`, the HTTP status equal to the code."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from overspill.engine.loop import EngineStopped
from overspill.engine.scheduler import ContextOverflow
from overspill.errors import UserError

_TYPES = MappingProxyType(
    {
        400: "invalid_request_error",
        401: "authentication_error",
        404: "not_found_error",
        405: "invalid_request_error",
        413: "invalid_request_error",
        501: "not_supported_error",
        503: "unavailable_error",
    }
)


class ApiError(Exception):
    """An answer that is an error. kind: the `type` of the reference, by default the one of the code."""

    def __init__(
        self, code: int, message: str, *, kind: str | None = None, details: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.kind = kind or _TYPES.get(code, "server_error")
        self.details = details

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"code": self.code, "message": self.message, "type": self.kind, **self.details}}


class ClientGone(Exception):
    """The client hung up; nobody reads the answer."""


def as_api_error(error: Exception) -> ApiError:
    """What a client is told about an error. Faults of ours say no more than that they are."""
    match error:
        case ApiError():
            return error
        case ContextOverflow():
            details = {"n_prompt_tokens": error.n_prompt, "n_ctx": error.n_ctx}
            return ApiError(400, str(error), kind="exceed_context_size_error", details=details)
        case UserError():
            return ApiError(400, str(error))
        case EngineStopped():
            return ApiError(503, str(error))
        case _:
            return ApiError(500, "internal error; the server's log has more")
