"""A server as people start it, and programs of the environment of other people's clients."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from free_ports import find_port
from serve_process import COMMAND, below_of, read_until

BIN = Path(__file__).parents[1] / ".venv-clients" / "bin"
SCRIPTS = Path(__file__).parent / "clients"
_BANNER_ENDS = "Ctrl-C ends it"
_TARGET = re.compile(r"^ +target +(.+) \(", re.MULTILINE)
_SAMPLE = re.compile(r"^vllm:(\w+)\{(.*)\} (\S+)$", re.MULTILINE)
_REASON = re.compile(r'finished_reason="(\w+)"')
_CLIENT_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Server:
    """A running ``paceline serve``.

    Attributes:
        root: scheme, host and port.
        model: folder of its target, for clients that tokenize.
    """

    root: str
    model: Path

    @property
    def base_url(self) -> str:
        """Where OpenAI's API is."""
        return f"{self.root}/v1"

    def counters(self) -> dict[str, float]:
        """Samples of its ``/metrics`` by name, summed over labels; finished requests by reason."""
        text = httpx.get(f"{self.root}/metrics", timeout=60).raise_for_status().text
        found: dict[str, float] = {}
        for name, labels, value in _SAMPLE.findall(text):
            reason = _REASON.search(labels)
            key = name if reason is None else f"finished_{reason[1]}"
            found[key] = found.get(key, 0.0) + float(value)
        return found

    def counted_since(self, before: Mapping[str, float]) -> dict[str, float]:
        """By how much each sample has grown."""
        return {name: value - before.get(name, 0.0) for name, value in self.counters().items()}


Serve = Callable[..., AbstractContextManager[Server]]


@contextmanager
def serving(folder: Path, **keys: Any) -> Iterator[Server]:
    """``paceline serve`` with the default config but for what a test must set, and ``keys``.

    The user's cache of models is used: other tiers of the tests have none.
    """
    port = find_port()
    own = {"port": port, "state_dir": str(folder / "state"), "ray": {"dashboard": False}}
    # On a machine that other work keeps busy a slow replica is not a hung one: a request that fails
    # over would be counted twice.
    target = {"stall_timeout_s": 90} | keys.pop("target", {})
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(own | {"target": target} | keys), encoding="utf-8")
    environment = dict(os.environ)
    if environment.get("PACELINE_CACHE_DIR") == os.devnull:
        del environment["PACELINE_CACHE_DIR"]
    process = subprocess.Popen(
        [*COMMAND, str(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    try:
        target = _TARGET.search(read_until(process, _BANNER_ENDS))
        assert target is not None
        yield Server(f"http://127.0.0.1:{port}", Path(target[1]))
    finally:
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    below = below_of(process) if process.poll() is None else []
    process.send_signal(signal.SIGINT)
    try:
        process.wait(timeout=60)
    finally:
        for each in below:
            if each.is_running():
                each.kill()
        process.kill()
        process.wait()


class Clients:
    """Programs of the clients' environment, without the hub.

    Args:
        home: folder of their caches.
    """

    def __init__(self, home: Path) -> None:
        dropped = ("OPENAI_", "PYTHONPATH", "HF_HUB_OFFLINE")
        self._environment = {
            name: value for name, value in os.environ.items() if not name.startswith(dropped)
        } | {"HF_HOME": str(home), "LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_API_KEY": "none"}

    def run(
        self, program: str, *arguments: str, cwd: Path | None = None, offline: bool = True
    ) -> str:
        """Run a program to its end; returns what it printed.

        Args:
            program: in the environment's ``bin``.
            arguments: of it.
            cwd: its working directory.
            offline: False for aiperf, which then takes a tokenizer's folder for a name of the hub.
        """
        done = subprocess.run(
            [str(BIN / program), *arguments],
            capture_output=True,
            text=True,
            cwd=cwd,
            env=self._environment | ({"HF_HUB_OFFLINE": "1"} if offline else {}),
            timeout=_CLIENT_TIMEOUT_S,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    def report(self, script: str, server: Server) -> Any:
        """What a script of ``tests/clients`` reports of a server."""
        return json.loads(self.run("python", str(SCRIPTS / script), server.base_url))
