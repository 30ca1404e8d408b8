"""Operators' endpoints of a running server, beside those for topics.

POST /v1/paceline/rollback       {"topic", "version"}
POST /v1/paceline/replay/purge   {"topic"}, {"request_id"} or {"all"}
POST /v1/paceline/drain          {"on"}, {} to switch it on
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from paceline.actors.replay.host import ShardHostHandle, shard_of
from paceline.actors.replay.shard import ShardHandle
from paceline.actors.training.scorer import ScorerHandle
from paceline.actors.weights.subscriber import RegistryHandle
from paceline.actors.weights.versions import VersionChangedError
from paceline.cluster.scheduler.trainer_scheduler import TrainerSchedulerHandle
from paceline.deploy.api.actor_calls import (
    Call,
    call_or_none,
    call_required,
    call_with_timeout,
    remote_message,
)
from paceline.deploy.api.admission import DrainState
from paceline.deploy.api.auth import authorize, forbidden
from paceline.deploy.api.request_parser import parse_json, read_body
from paceline.deploy.errors import (
    UNKNOWN_OUTCOME,
    VERSION_CHANGED,
    ApiError,
    invalid_value,
    overloaded,
)

logger = logging.getLogger(__name__)

_MAX_BODY_BYTES = 2**16
_TIMEOUT_S, TOPICS_TIMEOUT_S = 30.0, 5.0
_ADMITTED_TIMEOUT_S = 5.0  # less than the command waits for the whole call
# Keys among the shards' in a purge's result; not valid topic names.
SCORER, REPLICAS = "(scorer)", "(replicas)"


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class RollbackRequest(_Body):
    """Roll a topic's draft back to a version, or to the one before if it is None.

    ``expected`` is the newest served version that the caller knows; if it has changed the call is
    refused, so that a repeated call rolls back once.
    """

    topic: str
    version: int | None = Field(default=None, ge=0)
    expected: int | None = Field(default=None, ge=0)


class PurgeRequest(_Body):
    """Remove a topic's replay records, those of one request, or all: one of the three."""

    topic: str | None = None
    request_id: str | None = Field(default=None, min_length=1)
    all: bool = False


class DrainRequest(_Body):
    """Switch draining on or off."""

    on: bool = True


class FoundShards(NamedTuple):
    """Replay shards by topic, and the names of hosts that did not say what they hold."""

    by_topic: dict[str, ShardHandle]
    silent: tuple[str, ...] = ()


async def shards_of(hosts: Sequence[ShardHostHandle]) -> FoundShards:
    """All shards of the hosts that answer: some topics may be configured no more."""
    calls = (call_or_none(host.topics.remote, TOPICS_TIMEOUT_S) for host in hosts)
    found = await asyncio.gather(*calls)
    by_topic: dict[str, ShardHandle] = {
        topic: shard_of(topic, hosts) for own in found for topic in own or ()
    }
    silent = tuple(f"(shard host {i})" for i, own in enumerate(found) if own is None)
    return FoundShards(by_topic, silent)


T = TypeVar("T")
BodyT = TypeVar("BodyT", bound=_Body)


class Operations:
    """The operators' endpoints of one ingress replica.

    Args:
        registry: actor handle of the weight registry.
        scheduler: actor handle of the trainer scheduler.
        shards: gives the replay shards of all topics that may have records.
        drain_state: of this replica.
        purge_replicas: removes an answer (None: all) of a topic (None: all) from the target
            replicas, and returns once what they handed over before has arrived.
        admitted: gives the number of sequences that ingress replicas have admitted and that have
            not ended.
        scorer: actor handle; keeps a sample of the records. None if there is none.
        enabled: False refuses every call.
        keyed: whether the server has API keys.
    """

    def __init__(
        self,
        registry: RegistryHandle,
        scheduler: TrainerSchedulerHandle,
        shards: Callable[[], Awaitable[FoundShards]],
        drain_state: DrainState,
        purge_replicas: Callable[[str | None, str | None], Awaitable[int]],
        admitted: Callable[[], Awaitable[int]],
        *,
        scorer: ScorerHandle | None = None,
        enabled: bool,
        keyed: bool,
    ) -> None:
        self._registry = registry
        self._scheduler = scheduler
        self._shards = shards
        self._scorer = scorer
        self._purge_replicas = purge_replicas
        self._admitted = admitted
        self._drain_state = drain_state
        self._enabled = enabled
        self._keyed = keyed

    def add_routes(self, api: FastAPI) -> None:
        """Add the endpoints."""
        api.add_api_route("/v1/paceline/rollback", self.roll_back, methods=["POST"])
        api.add_api_route("/v1/paceline/replay/purge", self.purge, methods=["POST"])
        api.add_api_route("/v1/paceline/drain", self.drain, methods=["POST"])

    async def roll_back(self, request: Request) -> Response:
        """Remove a topic's candidate, or restore earlier weights of its draft."""
        body = await self._parse(request, RollbackRequest, "A rollback")
        arguments = (body.topic, body.version, body.expected)
        try:
            version = await _call(
                "weight registry", lambda: self._registry.roll_back.remote(*arguments)
            )
        except KeyError as error:
            raise _unknown_topic(body.topic) from error
        except VersionChangedError as error:
            text = f"{remote_message(error)}: nothing was changed."
            raise ApiError(409, text, param="expected", code=VERSION_CHANGED) from error
        except ValueError as error:
            text = f"{remote_message(error)}."
            raise ApiError(409, text, param="version", code="no_such_version") from error
        logger.warning("%s was rolled back, stable is now version %d", body.topic, version)
        return JSONResponse({"topic": body.topic, "weight_version": version})

    async def purge(self, request: Request) -> Response:
        """Remove records from memory and disk; gives counts per topic, null if unknown."""
        body = await self._parse(request, PurgeRequest, "A purge")
        if [body.topic is not None, body.request_id is not None, body.all].count(True) != 1:
            raise invalid_value("all", "give exactly one of topic, request_id and all (true)")
        shards, silent = await self._shards()
        if body.topic is not None and body.topic not in shards:
            if silent:
                hosts = ", ".join(silent)
                raise overloaded(f"{hosts} did not answer, and may hold records of {body.topic}.")
            raise _unknown_topic(body.topic)
        names = [body.topic] if body.topic is not None else list(shards)
        calls: list[Call[int]] = [
            partial(shards[topic].delete.remote, body.request_id) for topic in names
        ]
        if self._scorer is not None:
            names.append(SCORER)
            calls.append(partial(self._scorer.delete.remote, body.request_id, body.topic))
        replicas = [partial(self._purge_replicas, body.request_id, body.topic)]
        held = await _counts([REPLICAS], replicas)  # first: what they hand over must not come last
        removed = await _counts(names, calls) | held
        if body.topic is None:  # they may hold records of topics that are configured no more
            removed |= dict.fromkeys(silent)
        logger.warning("replay was purged: %s", removed)
        return JSONResponse({"removed": removed})

    async def drain(self, request: Request) -> Response:
        """Switch draining on or off; gives the number of running and waiting requests."""
        body = await self._parse(request, DrainRequest, "A drain")
        await _call("trainer scheduler", lambda: self._scheduler.drain.remote(body.on))
        self._drain_state.ensure_polling()
        await self._drain_state.refresh()
        status = await _call("trainer scheduler", self._scheduler.status.remote)
        admitted = await self._still_admitted() if body.on else 0  # nobody waits for an end
        state = {
            "draining": status.draining,
            "running": status.running,
            # Some are at no replica: they wait for a grammar, or for another after one died.
            "waiting": max(status.waiting, admitted - status.running),
        }
        logger.warning("draining: %s", state)
        return JSONResponse(state)

    async def _still_admitted(self) -> int:
        text = "The server is draining; an ingress replica does not say what it still runs."
        return await call_required(
            "ingress", self._admitted, _ADMITTED_TIMEOUT_S, text, UNKNOWN_OUTCOME
        )

    async def _parse(self, request: Request, model: type[BodyT], what: str) -> BodyT:
        if not self._enabled:
            raise forbidden(f"{what} over HTTP is off (operations.enabled is false).")
        authorize(request, what, keyed=self._keyed)
        return parse_json(await read_body(request, _MAX_BODY_BYTES), model)


async def _counts(names: Sequence[str], calls: Sequence[Call[int]]) -> dict[str, int | None]:
    """Counts of several calls by name; None of one that failed."""
    counts = await asyncio.gather(
        *(call_with_timeout(call, _TIMEOUT_S) for call in calls), return_exceptions=True
    )
    return {
        name: None if isinstance(count, BaseException) else count
        for name, count in zip(names, counts, strict=True)
    }


async def _call(name: str, call: Call[T]) -> T:
    """See `call_required`; an actor that does not answer may still have carried out the call."""
    text = f"The {name} did not answer: `paceline status` shows whether it was done."
    return await call_required(name, call, _TIMEOUT_S, text, UNKNOWN_OUTCOME)


def _unknown_topic(name: str) -> ApiError:
    return ApiError(404, f"There is no topic {name}.", param="topic", code="topic_not_found")
