"""Handle of a named actor that outlives the actor: it is looked up again by name."""

from __future__ import annotations

import threading
import time
from typing import Any

import ray

from paceline.cluster.session import NAMESPACE

_REFRESH_S = 5.0


class ActorNotFoundError(RuntimeError):
    """No actor of that name was ever started; the text is the name."""


class NamedActor:
    """Actor handle, picklable, that follows an actor through new starts under its name.

    Ray's handle follows restarts by Ray only. While in use the name is looked up again every few
    seconds, in a thread. Calls to a missing actor fail like calls to a dead one; if it was never
    started, the call itself raises.
    """

    def __init__(self, name: str) -> None:
        """Take the actor's name, in the namespace ``paceline``; it is looked up on first use."""
        self._name = name
        self._handle: Any = None
        self._looked_at = 0.0
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[NamedActor], tuple[str]]:
        return NamedActor, (self._name,)

    def __getattr__(self, method: str) -> _Method:
        if method.startswith("__"):
            raise AttributeError(method)
        return _Method(self, method)

    def find(self) -> Any:
        """The newest known handle.

        Raises:
            ActorNotFoundError: the actor was never started.
        """
        now = time.monotonic()
        if self._handle is None:
            try:
                self._handle = ray.get_actor(self._name, NAMESPACE)
            except ValueError as error:
                raise ActorNotFoundError(self._name) from error
            self._looked_at = now
        elif now - self._looked_at > _REFRESH_S and self._lock.acquire(blocking=False):
            # In a thread: the caller may be an event loop.
            threading.Thread(target=self._refresh, name="paceline-names", daemon=True).start()
        return self._handle

    def _refresh(self) -> None:
        try:
            self._handle = ray.get_actor(self._name, NAMESPACE)
        except Exception:
            return  # missing: calls on the old handle raise Ray's errors
        finally:
            self._looked_at = time.monotonic()
            self._lock.release()


class _Method:
    """Method of an actor handle."""

    def __init__(self, actor: NamedActor, name: str) -> None:
        self._actor = actor
        self._name = name

    def remote(self, *arguments: Any, **named: Any) -> Any:
        """Call it and return Ray's reference; raises as :meth:`NamedActor.find`."""
        return getattr(self._actor.find(), self._name).remote(*arguments, **named)
