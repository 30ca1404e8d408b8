"""The servers of a run: started when they are needed, stopped in their tracks between turns.

All that fit in memory stay alive; those that start fastest make room for others.
"""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import processes
import psutil
from harness import say
from held import SETTLE_S, STARTED, Held, end_leftovers, free_port, note

from peers import load
from peers.catalogue import Peer, Setup, variables_of
from peers.environments import PeerError, last_line
from peers.load import Reply, Work

_START_S = 420.0
_IDLE_S = 2.0
_LESSON_PART, _LESSON_TOKENS, _LESSON_AT_ONCE = 32, 96, 4
_REST_S = 0.75  # after a part of the lesson, per prompt
_UNKNOWN_MIB = 3500.0  # of a server that was never started
_RESERVE_MIB = 2500.0  # of the machine's memory: Ray kills at 95 %
_FASTEST_WORST = 2.0  # tokens/s of a request, for the limit of a block's time
_MIB = 2.0**20


@dataclass
class Facts:
    """What was seen of a server.

    Attributes:
        start_s: seconds from its start to its first answer.
        memory_mib: of all its processes, shared pages in proportion.
        idle_cores: that it uses without any request.
    """

    start_s: float = 0.0
    memory_mib: float = 0.0
    idle_cores: float = 0.0


class Server:
    """A peer's processes.

    Args:
        peer: its catalogue entry.
        setup: of the run.

    Attributes:
        unavailable: whether it cannot be had on this machine, so that no retry helps.
    """

    def __init__(self, peer: Peer, setup: Setup) -> None:
        self.peer, self.facts = peer, Facts()
        self.unavailable = False
        self._setup = setup
        slug = "".join(c if c.isalnum() else "-" for c in peer.name)
        self._log = setup.work / f"{slug}.log"
        self.held: Held | None = None
        self._url = ""
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    @property
    def alive(self) -> bool:
        """Whether its first process runs, or is suspended."""
        return self.held is not None and self.held.alive

    def start(self, note: Callable[[], None]) -> None:
        """Start it, call ``note`` at once, and wait for its first answer.

        Raises:
            PeerError: it cannot be had, ended, or took too long.
        """
        port = free_port()
        self.unavailable = True
        command = self.peer.command(self._setup, port)
        self.unavailable = False
        self._url = f"http://127.0.0.1:{port}"
        say(f"  starting {self.peer.name}")
        began = time.monotonic()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("w", encoding="utf-8") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL if self.peer.over_http else subprocess.PIPE,
                stdout=log if self.peer.over_http else subprocess.PIPE,
                stderr=log,
                text=True,
                env=variables_of(self.peer, self._setup),
                start_new_session=True,
            )
        self.held = Held(process)
        note()
        try:
            self._wait(began + _START_S)
            self.warm_up()
            if self.peer.learns:
                self._learn()
            first, self.facts.start_s = self.facts.start_s == 0.0, time.monotonic() - began
            if first:
                used = self.held.seconds()
                time.sleep(_IDLE_S)
                self.facts.idle_cores = round((self.held.seconds() - used) / _IDLE_S, 3)
        except PeerError:
            self.stop()
            raise

    def _wait(self, deadline: float) -> None:
        if not self.peer.over_http:
            self._lines = queue.SimpleQueue()
            threading.Thread(target=self._read, args=(self._lines,), daemon=True).start()
            self._next_line(deadline - time.monotonic())
            return
        while True:
            try:
                with urllib.request.urlopen(f"{self._url}/health", timeout=5):
                    if not self.peer.ours or STARTED in self._log.read_text(encoding="utf-8"):
                        return
            except (urllib.error.URLError, OSError):
                pass
            if not self.alive:
                raise self._ended()
            if time.monotonic() > deadline:
                raise PeerError(f"no answer within {_START_S:.0f} s")
            time.sleep(0.2)

    def _read(self, lines: queue.SimpleQueue[str]) -> None:
        assert self.held is not None
        for line in self.held.first.stdout or ():
            lines.put(line)
        lines.put("")

    def _next_line(self, timeout_s: float) -> str:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty as error:
            raise PeerError(f"no answer within {timeout_s:.0f} s") from error
        if not line:
            raise self._ended()
        return line

    def _ended(self) -> PeerError:
        """How the server ended: its exit status, and the line of its log that says why."""
        assert self.held is not None
        log = self._log.read_text(encoding="utf-8", errors="replace")
        return PeerError(f"ended with {self.held.first.wait()}: {last_line(log)}")

    def warm_up(self) -> None:
        """A short answer: what was suspended finds its pages and timers again.

        Raises:
            PeerError: see run.
        """
        self.run(Work([[1, 2, 3, 4, 5, 6, 7, 8]], [8], 0.0, 1))

    def _learn(self) -> None:
        """Answer the lesson, with pauses in which drafts learn."""
        prompts = self._setup.lesson
        say(f"  {self.peer.name}: {len(prompts)} prompts to learn from")
        for at in range(0, len(prompts), _LESSON_PART):
            part = prompts[at : at + _LESSON_PART]
            self.run(Work(part, [_LESSON_TOKENS] * len(part), 0.0, _LESSON_AT_ONCE))
            time.sleep(_REST_S * len(part))

    def run(self, work: Work) -> list[Reply]:
        """Replies to a block.

        Raises:
            PeerError: a request failed, the server ended, or it took too long.
        """
        limit = 60.0 + sum(work.lengths) / _FASTEST_WORST / work.at_once
        try:
            if self.peer.over_http:
                return load.answer(self._url, work, self.peer.body, limit)
            assert self.held is not None
            stdin = self.held.first.stdin
            assert stdin is not None
            block = {name: getattr(work, name) for name in Work.__slots__}
            stdin.write(json.dumps(block) + "\n")
            stdin.flush()
            return [Reply(**reply) for reply in json.loads(self._next_line(limit))]
        except (PeerError, OSError) as error:
            if self.alive:
                raise PeerError(str(error)) from error
            raise self._ended() from error

    def suspend(self) -> None:
        """Stop it in its tracks; note its memory."""
        if self.held is not None:
            self.facts.memory_mib = round(self.held.memory_mib(), 0)
            self.held.suspend()

    def stop(self) -> None:
        """End it: as it wishes, then by force."""
        if self.held is not None:
            self.held.end(signal.SIGINT if self.peer.ours else signal.SIGTERM)
            self.held = None


class Fleet:
    """All servers of a run.

    Args:
        peers: to serve.
        setup: of the run.

    Attributes:
        failed: name of a peer that cannot be had, or died twice, to the cause.
    """

    def __init__(self, peers: Sequence[Peer], setup: Setup) -> None:
        self.servers = {peer.name: Server(peer, setup) for peer in peers}
        self.failed: dict[str, str] = {}
        self._pids = setup.work / "processes.json"
        end_leftovers(self._pids)

    def run(self, name: str, work: Work) -> tuple[list[Reply], dict[str, float]]:
        """Replies of a peer to a block, and processor seconds by role; the others are suspended.

        Raises:
            PeerError: it failed twice; it is not tried again.
        """
        if name in self.failed:
            raise PeerError(self.failed[name])
        server = self.servers[name]
        for attempt in (1, 2):
            try:
                self._ready(server)
                used = processes.seconds()
                replies = server.run(work)
                spent = processes.since(used)
                break
            except PeerError as error:
                say(f"  {name}: {error}")
                server.stop()
                if attempt == 2 or server.unavailable:
                    self.failed[name] = str(error)
                    raise
        server.suspend()
        self._note()
        return replies, spent

    def _ready(self, server: Server) -> None:
        if server.held is not None and server.alive:
            server.held.resume()
            if server.peer.ours:
                time.sleep(SETTLE_S)
            server.warm_up()
            return
        needed = server.facts.memory_mib or _UNKNOWN_MIB
        by_start = sorted(self.servers.values(), key=lambda each: each.facts.start_s)
        idle = [each for each in by_start if each.alive]
        while idle and _available_mib() < needed + _RESERVE_MIB:
            say(f"  stopping {idle[0].peer.name}: memory is short")
            idle.pop(0).stop()
        server.start(self._note)
        self._note()  # with what it has started itself

    def keep(self, names: Collection[str]) -> None:
        """End all other servers: they have no turn for a while."""
        for name, server in self.servers.items():
            if name not in names:
                server.stop()

    def _note(self) -> None:
        note(self._pids, [s.held for s in self.servers.values() if s.held is not None])

    def stop(self) -> None:
        """End all servers."""
        for server in self.servers.values():
            server.stop()
        self._pids.unlink(missing_ok=True)


def _available_mib() -> float:
    return float(psutil.virtual_memory().available / _MIB)
