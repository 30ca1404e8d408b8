"""Who may operate a server over HTTP: change its topics and weights, purge replay, drain it.

Without API keys that is whoever is on the server's own machine, but not a web page that is open
there. Callers of a proxy may be anybody, and one on this machine cannot always be told: what it
forwards is refused where a header or the name of the host says so. Behind a proxy, have keys, or
turn these calls off. Where Ray puts HAProxy before Serve every call comes from this machine and no
header says so: there it takes a key. With keys it is whoever shows one.
"""

from __future__ import annotations

import os

from fastapi import Request

from paceline.deploy.addresses import is_loopback
from paceline.deploy.errors import ApiError

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
