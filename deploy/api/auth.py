"""API keys, their settings, and operators' permission. Only the SHA-256 of a key is kept."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from fastapi import Request
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.deploy.config.sections import AuthConfig
from paceline.deploy.errors import ApiError


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Whether a host is a loopback address or ``localhost``."""
    address = _address(host)
    if address is None:
        return host == "localhost"
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


# Ends of names that are in no public DNS: no site is there.
_PRIVATE_NAMES = (".localhost", ".internal", ".local")
_HTTP_PORT = 80


def is_rebound(host: str, server: tuple[str, int | None] | None) -> bool:
    """Whether a request came over loopback by a public name with the server's own port.

    So comes that of another site's page once the site's name resolves to this machine (DNS
    rebinding). A proxy on this machine that passes its public name on has another port.

    Args:
        host: the header ``Host``.
        server: address and port that the request came to.
    """
    if server is None or not is_loopback(server[0]):
        return False
    try:
        url = urlsplit(f"//{host}")
        name, port = (url.hostname or "").rstrip("."), url.port or _HTTP_PORT
    except ValueError:  # no browser sends it
        return False
    is_public = "." in name and _address(name) is None and not name.endswith(_PRIVATE_NAMES)
    return is_public and port == (server[1] or _HTTP_PORT)


_PROXY_HEADERS = ("forwarded", "x-forwarded-for", "x-real-ip", "via")
_STATE = "api_key"  # of a request, its key
_BLANK = " \t"  # around a key; other white space of Python's may be bytes of its last character


def authorize(request: Request, what: str, *, keyed: bool) -> None:
    """Refuse a request that is not from an operator.

    Operators call over loopback, or with an API key.

    Args:
        request: has passed the ApiKeyMiddleware if there are keys.
        what: name of the operation, for the message.
        keyed: whether the server has API keys.

    Raises:
        ApiError: 403; 415 for a content type that a page of another site can send without CORS.
    """
    host = request.client.host if request.client is not None else ""
    is_local = is_loopback(host) and is_loopback(request.base_url.hostname or "")
    is_local = is_local and not any(name in request.headers for name in _PROXY_HEADERS)
    if not (is_local or keyed):
        raise forbidden(
            f"{what} is for operators: over loopback (127.0.0.1), or with an API key where "
            "the server has some."
        )
    if "origin" in request.headers:
        raise forbidden(f"{what} is not for web pages.")
    check_json(request)


def check_json(request: Request) -> None:
    """Refuse a body that is not JSON: a page of another site can send it without CORS's consent.

    Raises:
        ApiError: 415 for another content type than JSON.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "The body must be application/json.", code="invalid_type")


def forbidden(message: str) -> ApiError:
    """A 403."""
    return ApiError(403, message, "permission_error", code="forbidden")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An API key and the settings of its requests.

    Attributes:
        digest: SHA-256 of the key.
        name: in ``auth.keys``; empty for a key of the environment.
        store: of requests that do not say it.
    """

    digest: bytes = field(repr=False)
    name: str = ""
    store: bool = True

    @property
    def id(self) -> str:
        """Its name, else the start of its digest, which does not give the key away."""
        return self.name or f"sha256:{self.digest.hex()[:16]}"


def api_keys(config: AuthConfig, environment: Mapping[str, str]) -> tuple[ApiKey, ...]:
    """All API keys: those of the config, then further ones of the environment.

    Args:
        config: see AuthConfig.
        environment: of the process; keys are separated by commas.
    """
    found = {
        bytes.fromhex(own.sha256): ApiKey(bytes.fromhex(own.sha256), name, own.store)
        for name, own in config.keys.items()
    }
    variable = config.api_keys_env
    for key in environment.get(variable, "").split(",") if variable else ():
        if key := key.strip(_BLANK):
            digest = _digest(key.encode())
            found.setdefault(digest, ApiKey(digest))
    return tuple(found.values())


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def check_key(authorization: str | None, keys: Collection[ApiKey]) -> ApiKey:
    """The API key of a request, found in constant time.

    Args:
        authorization: the request's header.
        keys: the valid ones.

    Raises:
        ApiError: 401.
    """
    scheme, _, key = (authorization or "").partition(" ")
    key = key.strip(_BLANK)
    if scheme.lower() != "bearer" or not key:
        raise _unauthorized("No API key was sent: this server wants 'Authorization: Bearer KEY'.")
    digest = _digest(key.encode("latin-1"))  # the header's raw bytes
    matches = [key for key in keys if hmac.compare_digest(digest, key.digest)]
    if not matches:
        raise _unauthorized("The API key is not one of this server's.")
    return matches[0]


def request_key(request: Request) -> ApiKey | None:
    """The API key of a request that has passed the ApiKeyMiddleware; None if there are no keys."""
    key: ApiKey | None = getattr(request.state, _STATE, None)
    return key


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key")


class ApiKeyMiddleware:
    """ASGI middleware that answers requests without a valid API key with 401.

    Args:
        app: the application.
        keys: the valid ones, at least one.
        open_paths: paths that need no key; one that ends in a slash includes all below it, but
            for the root, which is itself alone.
    """

    def __init__(self, app: ASGIApp, keys: Collection[ApiKey], open_paths: Collection[str]) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] == "http" and not self._is_open(scope["path"]):
            try:
                key = check_key(Headers(scope=scope).get("authorization"), self._keys)
            except ApiError as error:
                await _refuse(error)(scope, receive, send)
                return
            scope.setdefault("state", {})[_STATE] = key
        await self._app(scope, receive, send)

    def _is_open(self, path: str) -> bool:
        folders = tuple(open_path for open_path in self._open_paths if open_path[1:].endswith("/"))
        return path in self._open_paths or path.startswith(folders)


class ReboundMiddleware:
    """ASGI middleware that answers what pages of other sites send by DNS rebinding with 403.

    For servers without API keys: pages of other sites have none.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        host = Headers(scope=scope).get("host", "") if scope["type"] == "http" else ""
        if is_rebound(host, scope.get("server")):
            text = f"Without API keys this server is not called {host}: use 127.0.0.1, or set keys."
            await _refuse(forbidden(text))(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _refuse(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body(), error.status, error.headers())
