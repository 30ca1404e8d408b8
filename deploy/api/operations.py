"""What operators may do to a running server over HTTP, beside adding topics.

POST /v1/paceline/rollback       {"topic", "version"}
POST /v1/paceline/replay/purge   {"topic", "request_id"}
POST /v1/paceline/drain          {"on"}
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from paceline.actors.weights.versions import VersionChanged
from paceline.deploy.api.admission import Drain
from paceline.deploy.api.auth import authorize, forbidden
from paceline.deploy.api.request_parser import parse_json, read_body
from paceline.deploy.errors import UNKNOWN_OUTCOME, VERSION_CHANGED, ApiError, overloaded

logger = logging.getLogger(__name__)

Call = Callable[[], Awaitable[Any]]


async def bounded(call: Call, seconds: float) -> Any:
    """An answer.

    Args:
        call: asks the part.
        seconds: longest wait.

    Raises:
        TimeoutError: the part is late.
    """
    async with asyncio.timeout(seconds):
        return await call()


async def asked(call: Call | None, seconds: float) -> Any:
    """An answer, None where there is none: what merely shows things never fails over a part.

    Args:
        call: asks the part; None: there is no such part.
        seconds: longest wait.
    """
    if call is None:
        return None
    try:
        return await bounded(call, seconds)
    except Exception as error:
        logger.info("a part does not say (%r)", error)
        return None


async def needed(name: str, call: Call, seconds: float, silent: str, code: str = "") -> Any:
    """An answer that is needed.

    Args:
        name: of the part, for the log.
        call: asks it.
        seconds: longest wait.
        silent: what is told where it does not answer.
        code: of that error; ``server_overloaded`` where it is left out.

    Raises:
        ApiError: 503 where the part does not answer.
        KeyError: the part knows of no such thing.
        ValueError: it refuses.
    """
    try:
        return await bounded(call, seconds)
    except (KeyError, ValueError):
        raise
    except Exception as error:
        logger.warning("the %s does not answer", name, exc_info=True)
        if code:
            raise ApiError(503, silent, "server_error", code=code) from error
        raise overloaded(silent) from error


def refusal_of(error: Exception) -> str:
    """What a part refuses with: Ray's own error has the whole remote traceback as its text."""
    return str(getattr(error, "cause", None) or error)


_MOST_BODY_BYTES = 2**16
_ASK_S = 30.0
SCORER = "(scorer)"  # among the shards' names; no topic is called so


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Rollback(_Body):
    """Which topic's draft goes back; to which version, None being the one before.

    ``expected`` is the newest version that is served, as the caller knows it; where it is another
    one the call is refused, so that a repeated call goes back once.
    """

    topic: str
    version: int | None = Field(default=None, ge=0)
    expected: int | None = Field(default=None, ge=0)


class Purge(_Body):
    """What replay forgets: a topic's records (None: all topics'), or those of one request."""

    topic: str | None = None
    request_id: str | None = Field(default=None, min_length=1)


class DrainOrder(_Body):
    """Whether to drain."""

    on: bool = True


Body = TypeVar("Body", bound=_Body)


class Operations:
    """The operators' endpoints of one replica of the front door."""

    def __init__(
        self,
        registry: Any,
        scheduler: Any,
        shards: Callable[[], Awaitable[Mapping[str, Any]]],
        drain: Drain,
        *,
        scorer: Any = None,
        enabled: bool,
        keyed: bool,
    ) -> None:
        """Take the handles.

        Args:
            registry: of weights.
            scheduler: of trainers.
            shards: gives the replay shards by topic, those of today.
            drain: this replica's view of the switch.
            scorer: keeps a sample of the records, too; None where there is none.
            enabled: False refuses every call.
            keyed: whether the server has API keys.
        """
        self._registry = registry
        self._scheduler = scheduler
        self._shards = shards
        self._scorer = scorer
        self._drain = drain
        self._enabled = enabled
        self._keyed = keyed

    def add_to(self, api: FastAPI) -> None:
        """Serve the endpoints."""
        api.add_api_route("/v1/paceline/rollback", self.roll_back, methods=["POST"])
        api.add_api_route("/v1/paceline/replay/purge", self.purge, methods=["POST"])
        api.add_api_route("/v1/paceline/drain", self.drain, methods=["POST"])

    async def roll_back(self, request: Request) -> Response:
        """Withdraw a candidate, or put earlier weights of a topic's draft back."""
        order = await self._order(request, Rollback, "A rollback")
        told = (order.topic, order.version, order.expected)
        try:
            version = await _part("weight registry", lambda: self._registry.roll_back.remote(*told))
        except KeyError as error:
            raise _unknown(order.topic) from error
        except VersionChanged as error:
            text = f"{refusal_of(error)}: nothing was changed."
            raise ApiError(409, text, param="expected", code=VERSION_CHANGED) from error
        except ValueError as error:
            text = f"{refusal_of(error)}."
            raise ApiError(409, text, param="version", code="no_such_version") from error
        logger.warning("%s was rolled back, stable is now version %d", order.topic, version)
        return JSONResponse({"topic": order.topic, "weight_version": version})

    async def purge(self, request: Request) -> Response:
        """Drop records from memory and disk; says how many per topic, null where unknown."""
        order = await self._order(request, Purge, "A purge")
        shards = dict(await _part("weight registry", self._shards))
        if order.topic is not None and order.topic not in shards:
            raise _unknown(order.topic)
        wanted = [order.topic] if order.topic is not None else list(shards)
        calls = [partial(shards[topic].delete.remote, order.request_id) for topic in wanted]
        if self._scorer is not None:
            wanted.append(SCORER)
            calls.append(partial(self._scorer.delete.remote, order.request_id, order.topic))
        found = await asyncio.gather(
            *(bounded(call, _ASK_S) for call in calls), return_exceptions=True
        )
        removed = {
            topic: None if isinstance(count, BaseException) else count
            for topic, count in zip(wanted, found, strict=True)
        }
        logger.warning("replay was purged: %s", removed)
        return JSONResponse({"removed": removed})

    async def drain(self, request: Request) -> Response:
        """Let nothing new in, or let it in again; says what is under way."""
        order = await self._order(request, DrainOrder, "A drain")
        await _part("trainer scheduler", lambda: self._scheduler.drain.remote(order.on))
        self._drain.follow()
        await self._drain.look()
        facts = await _part("trainer scheduler", lambda: self._scheduler.snapshot.remote())
        state = {name: facts[name] for name in ("draining", "running", "waiting")}
        logger.warning("draining: %s", state)
        return JSONResponse(state)

    async def _order(self, request: Request, model: type[Body], what: str) -> Body:
        if not self._enabled:
            raise forbidden(f"{what} over HTTP is off (operations.enabled is false).")
        authorize(request, what, keyed=self._keyed)
        body = await read_body(request, _MOST_BODY_BYTES)
        return parse_json(body or b"{}", model)


async def _part(name: str, call: Call) -> Any:
    """See `needed`; a part that does not answer may have done what was asked."""
    text = f"The {name} did not answer: whether it was done, `paceline status` tells."
    return await needed(name, call, _ASK_S, text, UNKNOWN_OUTCOME)


def _unknown(topic: str) -> ApiError:
    return ApiError(404, f"There is no topic {topic}.", param="topic", code="topic_not_found")
