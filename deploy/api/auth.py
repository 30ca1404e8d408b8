"""API keys: who may use the server. Of a key only its SHA-256 is kept."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
from collections.abc import Collection, Mapping

from fastapi import Request
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.deploy.errors import ApiError


def is_loopback(host: str) -> bool:
    """Whether an address, or the name ``localhost``, is this machine's own."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


_FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip", "via")
_HAPROXY = "RAY_SERVE_ENABLE_HA_PROXY"  # "1" has Ray put HAProxy in the place of its own proxies


def authorize(request: Request, what: str, *, keyed: bool) -> None:
    """Refuse a call that is not an operator's.

    Args:
        request: of the call; where there are keys, it has shown one already.
        what: the call does, for the message.
        keyed: whether the server has API keys.

    Raises:
        ApiError: 403; 415 for a body that a web page of another site could have sent unasked.
    """
    host = request.client.host if request.client is not None else ""
    near = is_loopback(host) and is_loopback(request.url.hostname or "")
    near = near and not any(name in request.headers for name in _FORWARDED)
    near = near and os.environ.get(_HAPROXY) != "1"
    if not (near or keyed):
        raise forbidden(
            f"{what} is for operators: from the server's own machine, or with an API key where "
            "the server has some."
        )
    if "origin" in request.headers:
        raise forbidden(f"{what} is not for web pages.")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "The body must be application/json.", code="invalid_type")


def forbidden(message: str) -> ApiError:
    """Not allowed, whoever asks."""
    return ApiError(403, message, "permission_error", code="forbidden")


_SCHEME = "bearer"


def key_digests(variable: str | None, environment: Mapping[str, str]) -> tuple[bytes, ...]:
    """The keys that an environment variable holds, separated by commas, as digests.

    Args:
        variable: its name; None: there are no keys.
        environment: of the process.
    """
    keys = environment.get(variable, "").split(",") if variable else []
    return tuple(_digest(key.strip().encode()) for key in keys if key.strip())


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def check_key(authorization: str | None, digests: Collection[bytes]) -> None:
    """Refuse a request that shows none of the keys.

    The comparison takes the same time whatever the request shows: over digests, and over all.

    Args:
        authorization: the request's header of that name.
        digests: of the keys, see :func:`key_digests`.

    Raises:
        ApiError: 401.
    """
    scheme, _, key = (authorization or "").partition(" ")
    if scheme.lower() != _SCHEME or not key.strip():
        raise _unauthorized("No API key was sent: this server wants 'Authorization: Bearer KEY'.")
    shown = _digest(key.strip().encode("latin-1"))  # as HTTP gives headers: the bytes that came
    matches = [hmac.compare_digest(shown, digest) for digest in digests]
    if not any(matches):
        raise _unauthorized("The API key is not one of this server's.")


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key")


class KeyGuard:
    """ASGI middleware that lets requests through which show a key, and those of open paths."""

    def __init__(
        self, app: ASGIApp, digests: Collection[bytes], open_paths: Collection[str]
    ) -> None:
        """Guard ``app``.

        Args:
            app: what is guarded.
            digests: of the keys, at least one.
            open_paths: what is there for everybody; one that ends in a slash stands for all
                below it.
        """
        self._app = app
        self._digests = digests
        self._open = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        if scope["type"] == "http" and not self._is_open(scope["path"]):
            try:
                check_key(Headers(scope=scope).get("authorization"), self._digests)
            except ApiError as error:
                refusal = JSONResponse(error.body(), error.status, error.headers())
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_open(self, path: str) -> bool:
        return any(
            path == known or (known.endswith("/") and path.startswith(known))
            for known in self._open
        )
