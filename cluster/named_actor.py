"""An actor by its name: found again after it was made anew under that name."""

from __future__ import annotations

import threading
import time
from typing import Any

import ray

from paceline.cluster.session import NAMESPACE

_FRESH_S = 5.0


class NotThereError(RuntimeError):
    """No actor of that name has been there yet; the text is the name."""


class NamedActor:
    """Stands for an actor handle where actors may be made anew: ``actor.method.remote(...)``.

    A handle is of one life of an actor; Ray's own restarts are within it. Every few seconds of
    use the name is looked up again, beside the caller. Calls to one that is not there fail as
    calls to a dead actor do, but for the first of all: before the actor was ever there, the call
    itself raises.

    It may be sent to other processes.
    """

    def __init__(self, name: str) -> None:
        """Look nothing up yet.

        Args:
            name: of the actor, in the namespace ``paceline``.
        """
        self._name = name
        self._handle: Any = None
        self._looked_at = 0.0
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[NamedActor], tuple[str]]:
        """By the name alone."""
        return NamedActor, (self._name,)

    def __getattr__(self, method: str) -> _Method:
        """A method of the actor."""
        if method.startswith("__"):
            raise AttributeError(method)
        return _Method(self, method)

    def find(self) -> Any:
        """The newest handle that is known.

        Raises:
            NotThereError: the actor has never been there.
        """
        now = time.monotonic()
        if self._handle is None:
            try:
                self._handle = ray.get_actor(self._name, NAMESPACE)
            except ValueError as error:
                raise NotThereError(self._name) from error
            self._looked_at = now
        elif now - self._looked_at > _FRESH_S and self._lock.acquire(blocking=False):
            # Whoever calls may be an event loop or between two rounds: it must not wait for this.
            threading.Thread(target=self._look, name="paceline-names", daemon=True).start()
        return self._handle

    def _look(self) -> None:
        try:
            self._handle = ray.get_actor(self._name, NAMESPACE)
        except Exception:
            return  # not there at the moment: the old handle says so in Ray's own words
        finally:
            self._looked_at = time.monotonic()
            self._lock.release()


class _Method:
    """What an actor handle's attribute is: something with ``remote``."""

    def __init__(self, actor: NamedActor, name: str) -> None:
        self._actor = actor
        self._name = name

    def remote(self, *arguments: Any, **named: Any) -> Any:
        """Call it; returns Ray's reference.

        Raises:
            NotThereError: the actor has never been there.
        """
        return getattr(self._actor.find(), self._name).remote(*arguments, **named)
