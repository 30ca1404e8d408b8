"""A running application of a study, and its status."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
from held import SETTLE_S, STARTED, Held, environment, free_port
from models import config_of

from paceline.deploy import app
from paceline.deploy.app import RunningApp

_START_S = 420.0
_OBJECTS_MB = 200  # of Ray's memory for objects: several servers share a machine


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


class Turns:
    """``paceline serve`` in processes of its own, which stand still between its turns.

    They begin at once; :meth:`start` waits until they are ready.

    Args:
        target: see models.config_of.
        keys: of the configuration.
        folder: of its configuration, state and log; what was there is removed.

    Attributes:
        held: its processes.
        state_dir: of its configuration.
    """

    def __init__(self, target: str, keys: Mapping[str, Any], folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.state_dir = folder.absolute() / "state"
        common = {"port": free_port(), "state_dir": str(self.state_dir)}
        common |= {"ray.dashboard": False, "ray.object_store_mb": _OBJECTS_MB}
        config = config_of(target, common | dict(keys))
        file = folder / "paceline.yaml"  # JSON is YAML
        file.write_text(config.model_dump_json(), encoding="utf-8")
        self._url = f"http://127.0.0.1:{config.port}"
        self._log = folder / "log"
        with self._log.open("w", encoding="utf-8") as out:
            command = [sys.executable, "-m", "paceline.deploy.cli.main", "serve", str(file)]
            first = subprocess.Popen(
                command,
                stdout=out,
                stderr=out,
                text=True,
                env=environment(),
                start_new_session=True,
            )
        self.held = Held(first)

    def start(self) -> None:
        """Wait until it serves; it stands still then.

        Raises:
            RuntimeError: it does not start.
        """
        deadline = time.monotonic() + _START_S
        while STARTED not in self._log.read_text(encoding="utf-8"):
            if not self.held.alive or time.monotonic() > deadline:
                raise RuntimeError(f"{self._log.parent.name} did not start: {self._log}")
            time.sleep(0.2)
        self.held.suspend()

    @contextmanager
    def turn(self) -> Iterator[str]:
        """Its address, while it goes on."""
        self.held.resume()
        time.sleep(SETTLE_S)
        try:
            yield self._url
        finally:
            self.held.suspend()

    def end(self) -> None:
        """End it as Ctrl-C would."""
        self.held.end(signal.SIGINT)
