"""What may change while a replica serves: Serve's ``user_config`` of target and ingress.

A key that is left out is as configured, and so is everything under an empty mapping.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Annotated, Any, Generic, TypeVar

from pydantic import Field, ValidationError

from paceline.cluster.section import Count, Fraction, Seconds, Section
from paceline.deploy.config.config import explain

logger = logging.getLogger(__name__)


class LiveTarget(Section):
    """Of the deployment ``target``.

    ``max_speculative_tokens`` at most are drafted for a request that names no number, 0 drafts
    nothing; never more than ``drafts.max_speculative_tokens``. ``probe_share`` of the rounds' time
    goes into looks at drafts that do not seem to pay. ``sample_share`` is ``router.sample_share``.
    """

    max_speculative_tokens: Annotated[int, Field(ge=0)] | None = None
    probe_share: Annotated[float, Field(ge=0.0, le=0.5)] | None = None
    sample_share: Fraction | None = None


class LiveIngress(Section):
    """Of the deployment ``ingress``, for each of its replicas.

    ``max_in_flight`` sequences are let in at once, of one client ``max_per_client``.
    ``router_timeout_s`` and ``min_confidence`` are ``router.timeout_s`` and
    ``router.min_confidence``; the others are ``target``'s of their names.
    """

    max_in_flight: Count | None = None
    max_per_client: Count | None = None
    request_timeout_s: Seconds | None = None
    give_up_after_s: Seconds | None = None
    router_timeout_s: Seconds | None = None
    min_confidence: Fraction | None = None


Asked = TypeVar("Asked", bound=Section)


class Live(Generic[Asked]):
    """Takes a ``user_config`` whole or not at all.

    What is wrong is refused in words, never raised: Serve would end the replica over it, and no
    other would come up.

    Attributes:
        changed: key to value of what differs from the configuration now.
        refused: what was wrong with the last one, None where it was taken.
    """

    def __init__(self, model: type[Asked], apply: Callable[[Asked], None]) -> None:
        """Begin with everything as configured.

        Args:
            model: of what may be asked.
            apply: has it hold, None as configured; raises ValueError before it changes anything.
        """
        self._model = model
        self._apply = apply
        self.changed: dict[str, Any] = {}
        self.refused: str | None = None

    def take(self, user_config: Any) -> None:
        """Have the values hold from now on, or note why not."""
        try:
            asked = self._model.model_validate({} if user_config is None else user_config)
            self._apply(asked)
        except ValidationError as error:
            self._refuse(explain(error, self._model))
        except ValueError as error:
            self._refuse(str(error))
        else:
            self.changed, self.refused = asked.model_dump(exclude_none=True), None

    def _refuse(self, reason: str) -> None:
        self.refused = reason
        logger.error("user_config: %s; everything stays as it was", reason)

    def describe(self) -> dict[str, Any]:
        """For the status."""
        return {"changed": self.changed, "refused": self.refused}
