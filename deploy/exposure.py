"""Who can reach the server: what is said where everybody can and no API key is asked for."""

from __future__ import annotations

import logging

from paceline.deploy.addresses import is_loopback

logger = logging.getLogger(__name__)


def exposure(host: str, variable: str | None, *, keyed: bool) -> str | None:
    """One line where other machines can reach the server without a key, else None.

    Args:
        host: address that it listens on.
        variable: of the environment, which holds the API keys; None: none does.
        keyed: whether there are keys.
    """
    if keyed or is_loopback(host):
        return None
    cure = f"set {variable}" if variable else "name a variable with keys in auth.api_keys_env"
    return (
        f"host {host} can be reached from other machines and no API key is asked for: {cure}, or "
        "listen on 127.0.0.1"
    )


def serves_on() -> str | None:
    """The address that Serve's proxies listen on; None where Serve does not tell.

    On a cluster it is in Serve's own file, of which the application sees its part alone.
    """
    from ray.serve.context import _get_global_client  # there is no public way to ask

    try:
        host = _get_global_client().http_config.host
    except Exception:
        logger.warning("Serve does not tell its address", exc_info=True)
        return None
    return None if host is None else str(host)
