"""The steward: on a cluster, the replica that keeps the learning actors.

No ``from __future__ import annotations`` here: Ray reads the annotations of what it wraps.
"""

import logging
import math
import threading
import time
from typing import Any

import ray
from ray.exceptions import ActorDiedError

from paceline.cluster.named_actor import NamedActor
from paceline.deploy.config.config import PacelineConfig
from paceline.deploy.config.preflight import exposure, serves_on
from paceline.deploy.learning import SCHEDULER, keep_trainers, makers

logger = logging.getLogger(__name__)

_EVERY_S = 2.0
_ANSWER_S = 5.0
_HANGS_AFTER_S = 120.0
_LOOPBACK = "127.0.0.1"  # Serve's own default


class Steward:
    """Starts the learning actors, and makes anew what Ray has given up on.

    They are its own: they end when it ends, so that nothing of a withdrawn application goes on
    learning or holds the storage's lock, and a new configuration begins with new ones. Ray
    restarts those whose process or host dies; those whose constructor failed (the storage was
    not there, another registry still had it) it does not, and these are made again here.
    """

    def __init__(self, config: PacelineConfig, *, keyed: bool = False) -> None:
        """Begin.

        Args:
            config: see PacelineConfig.
            keyed: whether the front door asks for API keys.
        """
        self._variable, self._keyed = config.auth.api_keys_env, keyed
        self._warning: str | None = None
        self._makers = makers(config)
        self._handles: dict[str, Any] = {}
        self._made = dict.fromkeys(self._makers, 0)
        self._trainers = keep_trainers(config, NamedActor(SCHEDULER))
        self._error: str | None = None
        self._unmade: str | None = None  # what cannot be made now, and why
        self._looked_at = time.monotonic()
        threading.Thread(target=self._keep, name="paceline-steward", daemon=True).start()

    async def describe(self) -> dict[str, Any]:
        """How often each actor was made here; the last error and a warning in words, or None."""
        trainers = self._trainers.describe()
        return {
            "made": self._made | trainers["made"],
            "last_error": self._unmade or trainers["last_error"] or self._error,
            "warning": self._warning,
        }

    def check_health(self) -> None:
        """Serve's health check; RuntimeError has Serve replace this replica."""
        if time.monotonic() - self._looked_at > _HANGS_AFTER_S:
            raise RuntimeError("the steward does not get on")

    def _keep(self) -> None:
        self._warning = exposure(serves_on() or _LOOPBACK, self._variable, keyed=self._keyed)
        if self._warning is not None:
            logger.warning(self._warning)
        learns = False
        while True:
            for name in self._missing():
                self._looked_at = math.inf  # marks of large models are read for minutes
                try:
                    self._handles[name] = self._makers[name]()
                    self._made[name] += 1
                except Exception as error:  # its predecessor's name is free only when that is dead
                    self._unmade = f"{name}: {type(error).__name__}: {error}"
                    logger.info("%s is not made yet (%s)", name, error)
                    break  # those after it need it
            else:
                self._unmade = None
            if not learns and len(self._handles) == len(self._makers):
                self._trainers.start()
                learns = True
            self._looked_at = time.monotonic()
            time.sleep(_EVERY_S)

    def _missing(self) -> list[str]:
        """Actors that were never made or that Ray has given up on."""
        asked = {name: handle.ping.remote() for name, handle in self._handles.items()}
        if asked:
            ray.wait(list(asked.values()), num_returns=len(asked), timeout=_ANSWER_S)
        for name, answer in asked.items():
            try:
                ray.get(answer, timeout=0)
            except ActorDiedError as error:
                self._error = f"{name}: {' '.join(str(error).split())[-300:]}"
                logger.warning("%s is made anew: %s", name, error)
                del self._handles[name]
            except Exception:  # on its way up, or busy: that is Ray's business
                continue
        return [name for name in self._makers if name not in self._handles]
