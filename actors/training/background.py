"""A low-priority thread that runs a loop until it is stopped."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from paceline.actors.backoff import Backoff
from paceline.actors.priority import lower_priority
from paceline.actors.training.progress import Stopped

logger = logging.getLogger(__name__)

_RETRY_S, _LONGEST_RETRY_S = 1.0, 30.0  # doubles with each failure in a row


class BackgroundLoop:
    """Calls a function for ever in a thread of its own; failures are counted and retried.

    Attributes:
        stopping: set by :meth:`stop`.
        failures: calls that raised, of ``prepare`` too.
        last_error: of the last one, None before the first.
    """

    def __init__(
        self,
        name: str,
        prepare: Callable[[], Callable[[], bool]],
        idle_s: float,
        *,
        low_priority: bool = True,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare to start.

        Args:
            name: of the thread.
            prepare: called in the thread until it succeeds, for heavy imports; returns the
                function to call, which returns False if there was nothing to do and may raise
                Stopped.
            idle_s: pause when there was nothing to do, seconds.
            low_priority: whether the thread gives way to all others.
            close: called at the thread's end.
        """
        self.stopping = threading.Event()
        self.failures = 0
        self.last_error: str | None = None
        self._prepare, self._close = prepare, close
        self._idle_s = idle_s
        self._low_priority = low_priority
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def stop(self, timeout_s: float) -> None:
        """End the thread after its present call."""
        self.stopping.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        if self._low_priority:
            lower_priority()
        call: Callable[[], bool] | None = None
        backoff = Backoff(_RETRY_S, _LONGEST_RETRY_S)
        try:
            while not self.stopping.is_set():
                try:
                    if call is None:
                        call = self._prepare()
                    worked = call()
                    backoff.reset()
                    if not worked:
                        self.stopping.wait(self._idle_s)
                except Stopped:
                    return
                except Exception as error:
                    self.failures += 1
                    self.last_error = f"{type(error).__name__}: {error}"
                    logger.warning("%s: failed, going on", self._thread.name, exc_info=True)
                    self.stopping.wait(backoff.fail())
        finally:
            self._close()
