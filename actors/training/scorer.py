"""The scorer: the part of the trainer's process that measures which expert suits a topic."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.actors.training.progress import Stopped
from paceline.actors.training.scorer_settings import ScorerSettings
from paceline.actors.training.scoring import Judge, Scoring

logger = logging.getLogger(__name__)

_RETRY_S = 1.0


class Scorer:
    """Scores in a thread of its own, from construction to death, while serving is idle.

    Killed at any moment and restarted, it goes on from the gains on disk; what records it held
    are gone, and other requests come.
    """

    def __init__(self, settings: ScorerSettings, judge: Judge, registry: Any, board: Any) -> None:
        """Start scoring.

        Args:
            settings: see ScorerSettings.
            judge: runs the experts; used by this thread alone from now on.
            registry: actor handle of the WeightRegistry.
            board: actor handle of the LoadBoard; None always gives leave.
        """
        self._settings = settings
        self._judge = judge
        self._handles = (registry, board)
        self._stop = threading.Event()
        self._failures = 0
        self._file = None if settings.state_file is None else Path(settings.state_file)
        self._scoring = Scoring(settings, sleep=self._stop.wait, stopped=self._stop.is_set)
        self._restore()
        self._thread = threading.Thread(target=self._run, name="paceline-scorer", daemon=True)
        self._thread.start()

    def offer(self, data: bytes) -> None:
        """Take an encoded record of a finished request."""
        self._scoring.offer(data)

    def table(self) -> dict[str, Any]:
        """Weights and mean acceptance by topic and expert, and counts; see Hedge.table."""
        return self._scoring.table() | {"failures": self._failures}

    def delete(self, request_id: str | None, topic: str | None = None) -> int:
        """See Scoring."""
        return self._scoring.delete(request_id, topic)

    def stop(self) -> None:
        """End the thread within a forward."""
        self._stop.set()
        self._thread.join(self._settings.timeout_s)

    def _run(self) -> None:
        from paceline.actors.training.trainer import lower_priority

        if self._settings.low_priority:
            lower_priority()
        from paceline.actors.training.world import RayWorld

        world = RayWorld({}, *self._handles, self._settings.timeout_s)
        while not self._stop.is_set():
            try:
                self._enlist(world.added())
                if self._scoring.tick(world, self._judge):
                    self._save()
                else:
                    self._stop.wait(self._settings.refresh_s)
            except Stopped:
                return
            except Exception:
                self._failures += 1
                logger.warning("scoring failed, going on", exc_info=True)
                self._stop.wait(_RETRY_S)

    def _enlist(self, added: Mapping[str, str]) -> None:
        for expert, like in added.items():
            if self._scoring.enlist(expert, like):
                self._judge.enlist(expert, like)

    def _save(self) -> None:
        """Replace the state on disk, whole or not at all."""
        if self._file is None:
            return
        partial = self._file.with_name(f".{self._file.name}.{os.getpid()}.partial")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(self._scoring.export()), encoding="utf-8")
            partial.replace(self._file)
        except OSError:
            logger.warning("the routing table was not kept", exc_info=True)

    def _restore(self) -> None:
        if self._file is None or not self._file.is_file():
            return
        try:
            self._scoring.restore(json.loads(self._file.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            logger.warning("the routing table on disk cannot be read, starting anew")
