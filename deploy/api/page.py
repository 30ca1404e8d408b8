"""The page at ``/ui``: static files of the package, served by the ingress."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from starlette.responses import RedirectResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

FOLDER = Path(__file__).parents[1] / "ui"
OPEN_PATHS = ("/", "/ui", "/ui/")
# The system's table of types, which Python uses, may be wrong or empty.
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "Cache-Control": "no-cache",  # revalidated by ETag
    "Content-Security-Policy": (
        "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class PageFiles(StaticFiles):
    """The folder's files, and its ``index.html`` for the folder itself."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """The response of a file, with content type and security headers."""
        response = await super().get_response(path, scope)
        kind = _TYPES.get(Path(path).suffix or ".html")
        if kind is not None and response.status_code == 200:
            response.headers["Content-Type"] = kind
        response.headers.update(_HEADERS)
        return response


def add_page(api: FastAPI) -> None:
    """Serve the page below ``/ui/``, to which ``/`` leads."""
    api.add_api_route("/", _to_folder, methods=["GET"], include_in_schema=False)
    api.add_api_route("/ui", _to_folder, methods=["GET"], include_in_schema=False)
    api.mount("/ui/", PageFiles(directory=FOLDER, html=True))


async def _to_folder() -> Response:
    """Redirect to the slash that relative URLs need; relative itself for proxies with a prefix."""
    return RedirectResponse("ui/", 307)
