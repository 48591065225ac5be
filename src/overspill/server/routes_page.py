"""The page at `/`, its two files, and the data it shows.

The page is public, as a key is typed into it; /status is not. All of it is in the package: nothing is fetched from
elsewhere, and the browser is told so.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.responses import Response

from overspill.server.access import HostOf, MetricsOf
from overspill.server.errors import ApiError
from overspill.server.status import status_dict
from overspill.server.strict_json import Json

router = APIRouter()
page_router = APIRouter()

PAGE_FILES = {"page.css": "text/css; charset=utf-8", "page.js": "text/javascript; charset=utf-8"}
_FOLDER = Path(__file__).parent / "page"
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


@page_router.get("/", include_in_schema=False)
async def page() -> Response:
    """Chat, and a live view of the machine."""
    return _file("index.html", "text/html; charset=utf-8")


@page_router.get("/page/{name}", include_in_schema=False)
async def page_file(name: str) -> Response:
    """Style and script of the page."""
    if name not in PAGE_FILES:
        raise ApiError(404, "File Not Found")
    return _file(name, PAGE_FILES[name])


@router.get("/status")
async def status(host: HostOf, metrics: MetricsOf) -> Response:
    """The plan, memory by kind, busy shares, totals, and the last wave that was watched; asks to watch the next."""
    host.llm.watch.ask()
    counters, age_s = await metrics.read()
    return Json(status_dict(host, counters, age_s))


def _file(name: str, media_type: str) -> Response:
    return Response((_FOLDER / name).read_bytes(), media_type=media_type, headers=_HEADERS)
