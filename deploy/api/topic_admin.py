"""``/v1/paceline/topics``: list topics, and add one while the server runs.

Adding is for operators, see :func:`paceline.deploy.api.auth.authorize`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Literal, TypedDict, TypeVar

import numpy as np
from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field

from paceline.actors.engine.target_handle import TargetHandle
from paceline.actors.general import GENERAL
from paceline.actors.replay.record import RecordError, decode
from paceline.actors.replay.shard import ShardHandle
from paceline.actors.router.key_scope import topic_of
from paceline.actors.router.policy import MinConfidence
from paceline.actors.router.topic_fit import TopicFitFigures, TopicFitSettings
from paceline.actors.weights.topics import (
    StaleRevisionError,
    TopicExistsError,
    TopicsView,
)
from paceline.cluster.learning_actors import LearningActors
from paceline.deploy.api.actor_calls import Call, call_or_none, call_required, remote_message
from paceline.deploy.api.auth import authorize, forbidden
from paceline.deploy.api.prompt_encoder import PromptEncoder
from paceline.deploy.api.request_parser import parse_json
from paceline.deploy.api.routing import ExpertList, RouterHandle
from paceline.deploy.config.config import MAX_TOPICS
from paceline.deploy.config.sections import check_name
from paceline.deploy.demo.prompts import TOPICS, generate
from paceline.deploy.errors import UNKNOWN_OUTCOME, ApiError, internal, invalid_value
from paceline.deploy.recipes.data import Row
from paceline.deploy.recipes.router_data import FORMS, general_prompts

if TYPE_CHECKING:  # imports torch: seconds
    from paceline.actors.router.router import RouterFit

T = TypeVar("T")

logger = logging.getLogger(__name__)

MAX_EXAMPLES = 2_000
MAX_EXAMPLE_CHARS = 20_000
_BUNDLED_PROMPTS = 40  # per topic and form
_STORED_PROMPTS = 40  # per shard
_SEED = 11
_QUERY_TIMEOUT_S = 5.0
_FIT_TIMEOUT_S = 120.0
_COMMIT_TIMEOUT_S = 30.0


@lru_cache(maxsize=1)
def bundled_prompts() -> tuple[str, ...]:
    """Counterexamples of the package: the demo's topics in two forms each, and prompts of none.

    In one form alone the router would learn how prompts are phrased, not what they are about.
    """
    rng = np.random.default_rng(_SEED)
    found = [text for topic in TOPICS for text in generate(topic, _BUNDLED_PROMPTS, _SEED)]
    for topic in TOPICS:
        rows = [Row("", topic, text, "") for text in generate(topic, _BUNDLED_PROMPTS, _SEED + 1)]
        found += [FORMS[topic](row, rng) for row in rows]
    return (*dict.fromkeys(found), *general_prompts(rng, _BUNDLED_PROMPTS))


async def stored_prompts(shards: Mapping[str, ShardHandle], encoder: PromptEncoder) -> list[str]:
    """Counterexamples from the replay shards that answer.

    Without ``general``'s: its prompts may be of the new topic, and shall move there.

    Args:
        shards: topic to the actor handle of its replay shard.
        encoder: decodes what the router classified of them.
    """
    samples = await asyncio.gather(
        *(
            call_or_none(partial(shard.sample.remote, _STORED_PROMPTS, "train"), _QUERY_TIMEOUT_S)
            for topic, shard in shards.items()
            if topic != GENERAL
        )
    )
    texts = []
    for data in (record for records in samples for record in records or ()):
        try:
            text = encoder.routed_text(decode(data).prompt_token_ids.tolist())
        except (RecordError, ApiError) as error:  # ApiError: a token that the target lacks
            logger.info("skipped a replay record: %s", error)
            continue
        if text is not None:
            texts.append(text)
    return texts


@dataclass(frozen=True, slots=True)
class TopicAdminSettings:
    """Settings of topic administration.

    Attributes:
        mutable: False refuses every addition.
        restart_reason: why an addition needs a restart; None if it does not.
        min_confidence: see `policy.choose_topic`.
        max_topics: without ``general``.
    """

    mutable: bool = True
    restart_reason: str | None = None
    min_confidence: MinConfidence = 0.5
    max_topics: int = MAX_TOPICS


class TopicRow(TypedDict):
    """A topic's state in each part; None if the part does not answer.

    Attributes:
        name: of the topic.
        added: whether it was added while the server runs, not by the configuration.
        weight_version: the stable one.
        routed: whether the router replica that answered knows it.
        drafting: whether the target replica that answered has its expert.
        records: in replay.
    """

    name: str
    added: bool
    weight_version: int | None
    routed: bool | None
    drafting: bool | None
    records: int | None


class TopicList(TypedDict):
    """All topics; ``mutable`` is whether any can be added."""

    object: Literal["list"]
    data: list[TopicRow]
    mutable: bool


class NewTopic(TypedDict):
    """An added topic.

    Attributes:
        object: its kind.
        name: of the topic.
        weight_version: of its expert.
        examples: number of different ones.
        router: figures on held-out prompts, None if the router is off.
    """

    object: Literal["topic"]
    name: str
    weight_version: int
    examples: int
    router: TopicFitFigures | None


class AddTopicRequest(BaseModel):
    """Body of an addition: the name, and example prompts of the topic."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    examples: list[str] = Field(default_factory=list, max_length=MAX_EXAMPLES)


class TopicAdmin:
    """Lists and adds topics.

    Args:
        settings: see TopicAdminSettings.
        experts: of this process.
        router: Serve handle, or InProcessRouter; None if it is off.
        target: Serve handle of the target.
        actors: registry and shards are used.
        encoder: decodes stored prompts.
        keyed: whether the server has API keys.
    """

    def __init__(
        self,
        settings: TopicAdminSettings,
        experts: ExpertList,
        router: RouterHandle | None,
        target: TargetHandle,
        actors: LearningActors,
        encoder: PromptEncoder,
        *,
        keyed: bool = False,
    ) -> None:
        self._settings = settings
        self._experts = experts
        self._router = router
        self._target = target
        self._actors = actors
        self._encoder = encoder
        self._keyed = keyed
        self._adding = asyncio.Lock()

    async def list_topics(self) -> TopicList:
        """Every topic and its state in each part."""
        registry, router = self._actors.registry, self._router
        _, versions, target, labels = await asyncio.gather(
            self._refresh(),
            call_or_none(registry.stable_versions.remote, _QUERY_TIMEOUT_S),
            call_or_none(self._target.status.remote, _QUERY_TIMEOUT_S),
            call_or_none(None if router is None else router.labels.remote, _QUERY_TIMEOUT_S),
        )
        shards = self._shards()
        names = list(self._experts)
        stats = await asyncio.gather(
            *(
                call_or_none(shards[n].stats.remote if n in shards else None, _QUERY_TIMEOUT_S)
                for n in names
            )
        )
        added = {topic.name for topic in self._experts.view.topics}
        rows: list[TopicRow] = [
            {
                "name": name,
                "added": name in added,
                "weight_version": (versions or {}).get(name),
                "routed": None if labels is None else topic_of(name) in labels,
                "drafting": None if target is None else name in target.drafts,
                "records": None if own is None else own.records("train", "held_out"),
            }
            for name, own in zip(names, stats, strict=True)
        ]
        mutable = self._settings.mutable and self._settings.restart_reason is None
        return {"object": "list", "data": rows, "mutable": mutable}

    async def _refresh(self) -> None:
        """Take the registry's view as it comes: later it might replace a newer one."""
        view = await call_or_none(self._actors.registry.topics.remote, _QUERY_TIMEOUT_S)
        if view is not None:
            self._experts.update(view)

    async def add(self, request: Request, body: bytes) -> NewTopic:
        """Add a topic with a copy of ``general`` as its expert, and its examples to the router.

        Raises:
            ApiError: 403 if the client may not; 400 naming the field; 409 if the topic exists or
                another addition was first; 503 if a part is down. Nothing has changed then.
        """
        self._authorize(request)
        new = _parse(body)
        if self._settings.restart_reason is not None:
            raise ApiError(409, self._settings.restart_reason, code="topic_needs_restart")
        if self._adding.locked():
            raise _conflict()
        async with self._adding:
            return await self._add(new)

    async def _add(self, new: AddTopicRequest) -> NewTopic:
        registry = self._actors.registry
        view = await _call("weight registry", registry.topics.remote, _QUERY_TIMEOUT_S)
        self._experts.update(view)
        if new.name in self._experts:
            raise _exists(new.name)
        if len(self._experts) > self._settings.max_topics:
            text = f"There are {self._settings.max_topics} topics already."
            raise ApiError(409, text, param="name", code="too_many_topics")
        fit = None if self._router is None else await self._fit(self._router, new, view)
        version = await self._commit(new.name, fit, view.revision)
        logger.info("topic %s was added", new.name)
        return {
            "object": "topic",
            "name": new.name,
            "weight_version": version,
            "examples": len(set(new.examples)),
            "router": None if fit is None else fit.fit.figures(),
        }

    async def _commit(self, name: str, fit: RouterFit | None, revision: int) -> int:
        """Add the topic to the registry; returns the weight version."""
        head = None if fit is None else fit.head
        arguments = (name, GENERAL, head, None if fit is None else revision)
        message = (
            "The weight registry did not answer: `paceline topics` shows whether it was added."
        )
        try:
            return await call_required(
                "weight registry",
                lambda: self._actors.registry.add_topic.remote(*arguments),
                _COMMIT_TIMEOUT_S,
                message,
                UNKNOWN_OUTCOME,
            )
        except TopicExistsError as error:
            raise _exists(name) from error
        except StaleRevisionError as error:
            raise _conflict() from error
        except (KeyError, ValueError) as error:
            raise internal(f"The weight registry refuses: {remote_message(error)}") from error

    async def _fit(self, router: RouterHandle, new: AddTopicRequest, view: TopicsView) -> RouterFit:
        """The router's head with the topic.

        Raises:
            ApiError: 400 if the router cannot separate the topic by its examples.
        """
        settings = TopicFitSettings(min_confidence=self._settings.min_confidence)
        examples = _distinct(new.examples)
        if len(examples) < settings.min_examples:
            raise invalid_value(
                "examples",
                f"{len(examples)} different prompts; the router learns a topic from at least "
                f"{settings.min_examples}, and better from some dozens",
            )
        others = [*bundled_prompts(), *await stored_prompts(self._shards(), self._encoder)]
        known = set(examples)
        others = [text for text in _distinct(others) if text not in known]
        experts = tuple(self._experts)
        arguments = (new.name, examples, others, experts, view.head, settings)
        call = partial(router.fit_topic.remote, *arguments)
        fit = await _call("router", call, _FIT_TIMEOUT_S)
        if fit.rejection is not None:
            raise ApiError(
                400,
                f"The router cannot separate {new.name}: {fit.rejection}. Of {len(examples)} "
                f"examples {_format_counts(fit.fit.before)} before. Nothing has changed; "
                "other or more examples may help.",
                param="examples",
                code="topic_not_separable",
            )
        return fit

    def _shards(self) -> dict[str, ShardHandle]:
        return {**self._actors.shards, **self._experts.shards}

    def _authorize(self, request: Request) -> None:
        if not self._settings.mutable:
            raise forbidden("Topics cannot be added to this server (topics.mutable is false).")
        authorize(request, "Adding a topic", keyed=self._keyed)


def _parse(body: bytes) -> AddTopicRequest:
    new = parse_json(body, AddTopicRequest)
    for i, text in enumerate(new.examples):
        if not text.strip() or len(text) > MAX_EXAMPLE_CHARS:
            reason = f"it is empty, or longer than {MAX_EXAMPLE_CHARS} characters"
            raise invalid_value(f"examples.{i}", reason)
    try:
        check_name(new.name, "topic")
    except ValueError as error:
        raise invalid_value("name", str(error)) from error
    return new


def _distinct(texts: list[str]) -> list[str]:
    return list(dict.fromkeys(text.strip() for text in texts if text.strip()))


def _format_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} went to {topic}" for topic, count in counts.items())


def _exists(name: str) -> ApiError:
    return ApiError(409, f"There is a topic {name} already.", param="name", code="topic_exists")


def _conflict() -> ApiError:
    text = "Another topic is being added or was added just now; try again."
    return ApiError(409, text, code="conflict", retry_after_s=1)


async def _call(name: str, call: Call[T], timeout_s: float) -> T:
    """The result of a call before anything has been changed.

    Raises:
        ApiError: 503 if the actor does not answer, 500 if it raises.
    """
    try:
        text = f"The {name} does not answer: nothing was added."
        return await call_required(name, call, timeout_s, text, code="")
    except (KeyError, ValueError) as error:
        raise internal(f"The {name} refuses: {remote_message(error)}") from error
