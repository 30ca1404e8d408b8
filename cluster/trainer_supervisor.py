"""Keeps the trainers: starts them, and ends those that do not yield or must make room.

No ``from __future__ import annotations`` here: Ray reads the annotations of what it wraps.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError

from paceline.cluster.pending_replicas import Rooms
from paceline.cluster.scheduler.leases import Action

logger = logging.getLogger(__name__)

_EVERY_S = 0.25
_PING_S = 2.0
_LOOK_S = 1.0
_RETRY_S = 2.0
_ANSWER_S = 5.0
_JOIN_S = 10.0

Amounts = Mapping[str, float]


@dataclass(slots=True)
class _Kept:
    """A trainer's handle, and the question whether it lives; ``up`` since it last answered."""

    handle: Any
    asked: Any = None
    asked_at: float = 0.0
    up: bool = False


@dataclass(slots=True)
class _Counts:
    made: dict[str, int] = field(default_factory=dict)
    error: str | None = None


class TrainerKeeper:
    """Does what the load board says of trainers, in threads of the process that owns them.

    Whoever starts an actor owns it: trainers end with this process. Without the board nothing
    changes; trainers whose processes die are Ray's to restart, those it has given up on are made
    anew here.
    """

    def __init__(
        self,
        makers: Mapping[str, Callable[[], Any]],
        held: Amounts,
        board: Any,
        rooms: Callable[[Amounts, int], Rooms],
    ) -> None:
        """Start nothing yet, see :meth:`start`.

        Args:
            makers: trainer to what starts its actor and returns the handle.
            held: resource to what Ray books for each.
            board: actor handle of the load board.
            rooms: tells which replicas of Serve wait, see :func:`pending_replicas.rooms`; asked
                where something is booked.
        """
        self._makers = makers
        self._held = {name: amount for name, amount in held.items() if amount > 0.0}
        self._board = board
        self._rooms = rooms
        self._kept: dict[str, _Kept] = {}
        self._absent: set[str] = set()
        self._retry_at = 0.0
        self._counts = _Counts(dict.fromkeys(makers, 0))
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> "TrainerKeeper":
        """Start the trainers and keep them from now on; returns itself."""
        if not self._makers:
            return self
        self._make_missing()
        loops = [(self._turn, _EVERY_S)]
        if self._held:
            loops.append((self._look, _LOOK_S))
        for turn, every_s in loops:
            thread = threading.Thread(
                target=self._run, args=(turn, every_s), name="paceline-trainers", daemon=True
            )
            thread.start()
            self._threads.append(thread)
        return self

    def stop(self) -> None:
        """End the trainers for good."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(_JOIN_S)
        for kept in self._kept.values():
            ray.kill(kept.handle, no_restart=True)
        self._kept.clear()

    def handles(self) -> dict[str, Any]:
        """Trainer to actor handle, of those that are there."""
        return {name: kept.handle for name, kept in list(self._kept.items())}

    def describe(self) -> dict[str, Any]:
        """How often each trainer was made here, and the last error in words, or None."""
        return {"made": dict(self._counts.made), "last_error": self._counts.error}

    def _run(self, turn: Callable[[], None], every_s: float) -> None:
        while not self._stopped.wait(every_s):
            try:
                turn()
            except Exception as error:  # the board is away, or Ray's store: later
                logger.info("trainers: %s: %s", type(error).__name__, error)

    def _turn(self) -> None:
        died = self._dead()
        self._make_missing()
        held = dict.fromkeys(self._makers, self._held)
        answer = self._board.sync_trainers.remote(held, sorted(self._absent), died)
        for instruction in ray.get(answer, timeout=_ANSWER_S):
            try:
                self._carry_out(instruction.action, instruction.trainer)
            except Exception:  # the others' orders are told once
                logger.warning("%s was not carried out", instruction, exc_info=True)

    def _look(self) -> None:
        waiting = sum(not kept.up for kept in list(self._kept.values()))
        found = self._rooms(self._held, waiting)
        ray.get(self._board.report_pending.remote(found.demands, found.free), timeout=_ANSWER_S)

    def _carry_out(self, order: Action, name: str) -> None:
        kept = self._kept.get(name)
        if order is Action.START:
            logger.info("%s returns: there is room again", name)
            self._absent.discard(name)
            self._make_missing()
        elif order is Action.PREEMPT:
            logger.info("%s is ended: a replica waits for its room", name)
            self._absent.add(name)
            if kept is not None:
                del self._kept[name]
                ray.kill(kept.handle, no_restart=True)
        elif order is Action.KILL and kept is not None:
            logger.warning("%s is killed: it did not yield in time", name)
            kept.up = False
            ray.kill(kept.handle, no_restart=False)

    def _make_missing(self) -> None:
        if time.monotonic() < self._retry_at:
            return
        for name, make in self._makers.items():
            if name in self._kept or name in self._absent:
                continue
            try:
                self._kept[name] = _Kept(make())
                self._counts.made[name] += 1
            except Exception as error:  # its predecessor's name is free only when that is dead
                self._retry_at = time.monotonic() + _RETRY_S
                self._counts.error = f"{name}: {type(error).__name__}: {error}"
                logger.info("%s is not made yet (%s)", name, error)

    def _dead(self) -> list[str]:
        """Trainers that have died since the last call; those that Ray gave up on are dropped."""
        dead = []
        now = time.monotonic()
        for name, kept in list(self._kept.items()):
            if kept.asked is None:
                if now - kept.asked_at >= _PING_S:
                    kept.asked, kept.asked_at = kept.handle.ping.remote(), now
                continue
            if not ray.wait([kept.asked], timeout=0)[0]:
                continue
            answer, kept.asked = kept.asked, None
            try:
                ray.get(answer)
                kept.up = True
            except ActorDiedError as error:
                self._counts.error = f"{name}: {' '.join(str(error).split())[-300:]}"
                logger.warning("%s is made anew: %s", name, error)
                del self._kept[name]
                self._retry_at = now + _RETRY_S
                dead.append(name)
            except RayError as error:  # it restarts, was killed for memory, or has no place
                if not isinstance(error, ActorUnavailableError):
                    logger.info("%s: %s: %s", name, type(error).__name__, error)
                kept.up = False
                dead.append(name)
        return dead
