"""What route functions ask for: the host, the settings, and a body of a kind."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

from fastapi import Depends
from pydantic import BaseModel
from starlette.requests import Request

from overspill.server.defaults import with_defaults
from overspill.server.fields import parse_body
from overspill.server.host import Host
from overspill.server.metrics import Metrics
from overspill.server.settings import ServerSettings
from overspill.server.strict_json import read_object

B = TypeVar("B", bound=BaseModel)


# Not plain functions: those would be called on threads of a pool, one after the other, for each request.


async def host_of(request: Request) -> Host:
    host: Host = request.app.state.host
    return host


async def settings_of(request: Request) -> ServerSettings:
    settings: ServerSettings = request.app.state.settings
    return settings


async def metrics_of(request: Request) -> Metrics:
    metrics: Metrics = request.app.state.metrics
    return metrics


def body_of(kind: type[B]) -> Callable[[Request], Awaitable[B]]:
    """A dependency that reads the body, whatever content type the client named."""

    async def read(request: Request) -> B:
        settings = await settings_of(request)
        values = await read_object(request, settings.max_body_bytes)
        return parse_body(kind, with_defaults(kind, values, settings.defaults))

    return read


def described(kind: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI description of a body that `body_of` reads."""
    content = {"application/json": {"schema": kind.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}


HostOf = Annotated[Host, Depends(host_of)]
SettingsOf = Annotated[ServerSettings, Depends(settings_of)]
MetricsOf = Annotated[Metrics, Depends(metrics_of)]
