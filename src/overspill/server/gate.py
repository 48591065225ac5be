"""In front of every path: cross-origin rules, the key, and whether the model is there."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from overspill.server.errors import ApiError
from overspill.server.host import Host
from overspill.server.settings import ServerSettings
from overspill.server.strict_json import Json

_PAGE = ("", "/", "/page/page.css", "/page/page.js")
_PUBLIC = ("/health", "/v1/health", *_PAGE)
_ALWAYS_THERE = ("/docs", "/openapi.json", *_PAGE)


class Gate:
    """Answers OPTIONS, wrong keys and requests that come before the model; passes the rest on."""

    def __init__(self, app: ASGIApp, host: Host, settings: ServerSettings) -> None:
        self._app = app
        self._host = host
        self._keys = [key.encode() for key in settings.api_keys]
        self._prefix = settings.api_prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # as GET; the server beneath leaves the body out
            scope = {**scope, "method": "GET"}
        headers = Headers(scope=scope)
        answer: ASGIApp = Response() if scope["method"] == "OPTIONS" else self._checked(scope["path"], headers)
        await answer(scope, receive, _with_headers(send, headers))

    def _checked(self, path: str, headers: Headers) -> ASGIApp:
        try:
            path = path.removeprefix(self._prefix)
            if self._keys and path not in _PUBLIC and not self._is_open_to(headers):
                raise ApiError(401, "Invalid API Key")
            if path not in _ALWAYS_THERE:
                _ = self._host.llm
        except ApiError as error:
            return Json(error.body, error.code)
        return self._app

    def _is_open_to(self, headers: Headers) -> bool:
        given = headers.get("authorization", "").removeprefix("Bearer ") or headers.get("x-api-key", "")
        return any(hmac.compare_digest(given.encode(), key) for key in self._keys)


def _with_headers(send: Send, request: Headers) -> Send:
    """Adds what every answer carries: the origin echoed, so that pages from elsewhere may read it."""
    origin = request.get("origin")

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["Server"] = "overspill"
            if origin is not None:
                headers["Access-Control-Allow-Origin"] = origin
                headers["Access-Control-Allow-Credentials"] = "true"
                headers["Access-Control-Allow-Methods"] = "GET, POST, OPTIONS"
                headers["Access-Control-Allow-Headers"] = request.get("access-control-request-headers", "*")
                headers.add_vary_header("Origin")
        await send(message)

    return sending
