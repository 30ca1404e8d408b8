"""A running application of a study, and its status."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
from models import config_of

from paceline.deploy import app
from paceline.deploy.app import RunningApp


@contextmanager
def application(
    target: str, port: int, keys: Mapping[str, Any], state_dir: Path | None = None
) -> Iterator[RunningApp]:
    """Serve a target (see models.config_of) on a port of this machine, with keys of the config.

    The state folder is removed with it, unless it is given.
    """
    with ExitStack() as stack:
        folder = state_dir or stack.enter_context(tempfile.TemporaryDirectory())
        common = {"port": port, "state_dir": str(folder), "ray.dashboard": False}
        yield stack.enter_context(app.start(config_of(target, common | dict(keys))))


def status(url: str, timeout_s: float = 60.0) -> dict[str, Any]:
    """The server's status.

    Raises:
        httpx.HTTPError: it does not answer.
    """
    return dict(httpx.get(f"{url}/v1/paceline/status", timeout=timeout_s).json())
