"""The application: routes, errors, and the gate in front."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from overspill.engine.loop import EngineStopped
from overspill.errors import UserError
from overspill.server import routes_absent, routes_messages, routes_page, routes_status, routes_text
from overspill.server.errors import ApiError, ClientGone, as_api_error
from overspill.server.gate import Gate
from overspill.server.host import Host
from overspill.server.metrics import Metrics
from overspill.server.settings import ServerSettings
from overspill.server.strict_json import Json

_NOBODY_IS_THERE = 499


def create_app(host: Host, settings: ServerSettings) -> ASGIApp:
    """An ASGI application over a host, which may still be loading."""
    app = FastAPI(title="overspill", redoc_url=None)
    app.state.host = host
    app.state.settings = settings
    app.state.metrics = Metrics(host)
    routers = [routes.router for routes in (routes_page, routes_status, routes_text, routes_messages, routes_absent)]
    for router in [*routers, *([routes_page.page_router] if settings.has_page else [])]:
        app.include_router(router, prefix=settings.api_prefix)
    for kind in (ApiError, UserError, EngineStopped, Exception):
        app.add_exception_handler(kind, _tell)
    app.add_exception_handler(ClientGone, _hung_up)
    app.add_exception_handler(HTTPException, _tell_http)
    return Gate(app, host, settings)


async def _tell(request: Request, error: Exception) -> Response:
    known = as_api_error(error)
    is_anthropic = "/v1/messages" in request.url.path
    return Json({"type": "error", **known.body} if is_anthropic else known.body, known.code)


async def _tell_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = "File Not Found" if error.status_code == 404 else error.detail
    return Json(ApiError(error.status_code, message).body, error.status_code, headers=error.headers)


async def _hung_up(request: Request, error: Exception) -> Response:
    return Response(status_code=_NOBODY_IS_THERE)
