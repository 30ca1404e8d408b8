"""One call of the command line to a running server."""

from __future__ import annotations

import os
from typing import Any

import httpx

from paceline.deploy.config.config import PacelineConfig
from paceline.deploy.errors import CallError, NoAnswerError

KEY_VARIABLE = "PACELINE_API_KEY"
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def server_url(config: PacelineConfig) -> str:
    """Where the server of a configuration listens, as seen from this machine."""
    host = _EVERYWHERE.get(config.host, config.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{config.port}"


def call(url: str, method: str, path: str, body: Any = None, timeout_s: float = 30.0) -> Any:
    """The answer's JSON; the environment variable ``PACELINE_API_KEY`` is shown as key.

    Raises:
        CallError: the server refuses, or (NoAnswerError) does not answer; for people.
    """
    key = os.environ.get(KEY_VARIABLE, "").strip()
    headers = {b"Authorization": b"Bearer " + key.encode()} if key else {}
    try:
        address = url.rstrip("/") + path
        answer = httpx.request(method, address, json=body, headers=headers, timeout=timeout_s)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise NoAnswerError(f"{url} does not answer: {error}") from error
    try:
        content = answer.json()
    except ValueError as error:
        # A proxy's own words: what it stands before has died, perhaps after it had done its part.
        kind = NoAnswerError if answer.is_server_error else CallError
        raise kind(f"{url} answers {answer.status_code}, and no JSON") from error
    if answer.status_code != httpx.codes.OK:
        fault = content.get("error", {}) if isinstance(content, dict) else {}
        message = str(fault.get("message") or f"{url} answers {answer.status_code}")
        raise CallError(message, fault.get("code"))
    return content
