"""Serve's ``user_config`` of target and ingress: settings that change while replicas run.

A key that is left out is as configured; an empty mapping restores the configuration.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

from pydantic import Field, ValidationError

from paceline.actors.engine.target_handle import TargetStatus
from paceline.cluster.section import Count, Fraction, Seconds, Section
from paceline.deploy.config.config import explain

logger = logging.getLogger(__name__)


class TargetUserConfig(Section):
    """``user_config`` of the deployment ``target``.

    Attributes:
        max_speculative_tokens: most tokens per round if the controller chooses, 0 for none; at
            most ``drafts.max_speculative_tokens``.
        probe_share: share of the rounds' time for probing drafts that do not seem to pay.
        sample_share: see ``router.sample_share``.
    """

    max_speculative_tokens: Annotated[int, Field(ge=0)] | None = None
    probe_share: Annotated[float, Field(ge=0.0, le=0.5)] | None = None
    sample_share: Fraction | None = None


class IngressUserConfig(Section):
    """``user_config`` of the deployment ``ingress``, for each replica.

    Attributes:
        max_in_flight: most concurrent sequences.
        max_seqs_per_client: of one client; see ``target``, as the next two.
        request_timeout_s: likewise.
        failover_timeout_s: likewise.
        router_timeout_s: see ``router.timeout_s``.
        min_confidence: see ``router.min_confidence``.
    """

    max_in_flight: Count | None = None
    max_seqs_per_client: Count | None = None
    request_timeout_s: Seconds | None = None
    failover_timeout_s: Seconds | None = None
    router_timeout_s: Seconds | None = None
    min_confidence: Fraction | None = None


ConfigT = TypeVar("ConfigT", bound=Section)


@dataclass(frozen=True, slots=True)
class UserConfigStatus:
    """What a ``user_config`` has changed, and why the last one was refused.

    Attributes:
        changed: key to value, of what differs from the configuration now.
        refused: error of the last ``user_config``, None if it was applied.
    """

    changed: Mapping[str, object]
    refused: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeteredTargetStatus(TargetStatus):
    """Status of a target replica, and what its ``user_config`` has changed."""

    user_config: UserConfigStatus


class UserConfigState(Generic[ConfigT]):
    """Applies a ``user_config`` completely or not at all.

    An invalid one is logged and reported, not raised: Serve would end the replica and could not
    start another.

    Args:
        model: schema of the ``user_config``.
        apply: applies it; raises ValueError before it changes anything.

    Attributes:
        changed: see UserConfigStatus.
        refused: likewise.
    """

    def __init__(self, model: type[ConfigT], apply: Callable[[ConfigT], None]) -> None:
        self._model = model
        self._apply = apply
        self.changed: dict[str, object] = {}
        self.refused: str | None = None

    def update(self, user_config: Any) -> None:
        """Apply a ``user_config``, or keep the present one and record the error."""
        try:
            parsed = self._model.model_validate({} if user_config is None else user_config)
            self._apply(parsed)
        except ValidationError as error:
            self._refuse(explain(error, self._model))
        except ValueError as error:
            self._refuse(str(error))
        else:
            self.changed, self.refused = parsed.model_dump(exclude_none=True), None

    def _refuse(self, reason: str) -> None:
        self.refused = reason
        logger.error("user_config: %s; nothing was changed", reason)

    def status(self) -> UserConfigStatus:
        """The attributes."""
        return UserConfigStatus(self.changed, self.refused)
