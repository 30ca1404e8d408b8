"""``/v1/paceline/topics``: what topics there are, and how one is added.

Adding is an operator's call, see :mod:`paceline.deploy.api.auth`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field

from paceline.actors.replay.record import RecordError, decode
from paceline.actors.router.growth import GrowthSettings
from paceline.actors.router.policy import GENERAL, LeastConfidence
from paceline.actors.weights.topics import OutOfDate, RouterHead, TopicExists, TopicsView
from paceline.deploy.api.auth import authorize, forbidden
from paceline.deploy.api.operations import Call, asked, needed, refusal_of
from paceline.deploy.api.prompt_encoder import PromptEncoder
from paceline.deploy.api.request_parser import parse_json
from paceline.deploy.api.status import LearningActors
from paceline.deploy.config.added_topics import TopicList
from paceline.deploy.config.sections import topic_name
from paceline.deploy.demo.prompts import TOPICS, generate
from paceline.deploy.errors import UNKNOWN_OUTCOME, ApiError, internal, invalid_value
from paceline.deploy.recipes.data import Row
from paceline.deploy.recipes.router_data import FORMS, general_prompts

logger = logging.getLogger(__name__)

_BUNDLED = 40  # per topic and form
_STORED = 40  # per shard
_SEED = 11
_TIMEOUT_S = 5.0


@lru_cache(maxsize=1)
def bundled() -> tuple[str, ...]:
    """Self-written prompts of the package: of the demo's topics, half in other words, and of none.

    In one form alone they would tell how a topic is asked for, not what it is about.
    """
    rng = np.random.default_rng(_SEED)
    found = [text for topic in TOPICS for text in generate(topic, _BUNDLED, _SEED)]
    for topic in TOPICS:
        rows = [Row("", topic, text, "") for text in generate(topic, _BUNDLED, _SEED + 1)]
        found += [FORMS[topic](row, rng) for row in rows]
    return (*dict.fromkeys(found), *general_prompts(rng, _BUNDLED))


async def stored(shards: Mapping[str, Any], encoder: PromptEncoder) -> list[str]:
    """Prompts of the topics' shards, of those that answer.

    Not of ``general``'s: a topic is mostly added because its prompts are among these, and they
    are to move.

    Args:
        shards: topic to the actor handle of its replay shard.
        encoder: turns their tokens into text.
    """
    asked = {topic: shard for topic, shard in shards.items() if topic != GENERAL}
    drawn = await asyncio.gather(*(_sample(shard) for shard in asked.values()))
    texts = []
    for data in (record for records in drawn for record in records):
        try:
            texts.append(encoder.decode(list(decode(data).prompt_token_ids)))
        except RecordError as error:
            logger.info("a record was left out: %s", error)
    return texts


async def _sample(shard: Any) -> list[bytes]:
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            found: list[bytes] = await shard.sample.remote(_STORED, "train")
            return found
    except Exception as error:  # the bundled ones have to do
        logger.info("a shard gave no prompts (%r)", error)
        return []


MOST_EXAMPLES = 2_000
_MOST_CHARACTERS = 20_000
_ASK_S = 5.0
_GROW_S = 120.0
_COMMIT_S = 30.0


@dataclass(frozen=True, slots=True)
class TopicRules:
    """Whether and how topics are added.

    Attributes:
        mutable: False: never.
        refusal: why this system cannot take a topic while it runs; None where it can.
        min_confidence: see `policy.choose`.
        most: topics, ``general`` not counted.
    """

    mutable: bool = True
    refusal: str | None = None
    min_confidence: LeastConfidence = 0.5
    most: int = 32


class NewTopic(BaseModel):
    """The body of the call: a name, and prompts of the topic."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    examples: list[str] = Field(default_factory=list, max_length=MOST_EXAMPLES)


class TopicAdmin:
    """Lists and adds topics."""

    def __init__(
        self,
        rules: TopicRules,
        topics: TopicList,
        router: Any,
        target: Any,
        actors: LearningActors,
        encoder: PromptEncoder,
        *,
        keyed: bool = False,
    ) -> None:
        """Take the handles.

        Args:
            rules: see TopicRules.
            topics: the experts as this process knows them; follows what is added here.
            router: Serve handle, or RouterHere; None where it is off.
            target: Serve handle of the target.
            actors: of which registry and shards are asked.
            encoder: of stored prompts.
            keyed: whether the server has API keys.
        """
        self._rules = rules
        self._topics = topics
        self._router = router
        self._target = target
        self._actors = actors
        self._encoder = encoder
        self._keyed = keyed
        self._adding = asyncio.Lock()

    async def describe(self) -> dict[str, Any]:
        """Every topic, and how far each part has taken it up; None where a part does not say.

        ``added``: not from the configuration; ``weight_version``: stable; ``routed``: the router
        (the replica that answered) tells it apart; ``drafting``: the target (likewise) has its
        expert; ``records``: kept of it.
        """
        registry = self._actors.registry
        view, versions, facts, labels = await asyncio.gather(
            asked(registry and registry.topics.remote, _ASK_S),
            asked(registry and registry.current.remote, _ASK_S),
            asked(self._target.describe.remote, _ASK_S),
            asked(self._router and self._router.labels.remote, _ASK_S),
        )
        if isinstance(view, TopicsView):
            self._topics.take(view)
        shards = self._shards()
        names = list(self._topics)
        stats = await asyncio.gather(
            *(asked(shards[n].stats.remote if n in shards else None, _ASK_S) for n in names)
        )
        added = {topic.name for topic in self._topics.view.topics}
        rows = []
        for name, own in zip(names, stats, strict=True):
            rows.append(
                {
                    "name": name,
                    "added": name in added,
                    "weight_version": (versions or {}).get(name),
                    "routed": None if labels is None else name in labels,
                    "drafting": None if facts is None else name in facts.get("drafts", {}),
                    "records": own and own["records_train"] + own["records_held_out"],
                }
            )
        return {"object": "list", "data": rows, "mutable": self._rules.mutable}

    async def add(self, request: Request, body: bytes) -> dict[str, Any]:
        """Add a topic: its expert a copy of ``general``, the router grown by its examples.

        Returns:
            name, weight_version, and under ``router`` what was measured on held-out prompts;
            None where the router is off.

        Raises:
            ApiError: 403 for who may not; 400 naming the field; 409 where there is one, or
                another came first; 503 where a part is down. Nothing has changed then.
        """
        self._authorize(request)
        new = _parse(body)
        if self._rules.refusal is not None:
            raise ApiError(409, self._rules.refusal, code="topic_needs_restart")
        if self._adding.locked():
            raise _conflict()
        async with self._adding:
            return await self._add(new)

    async def _add(self, new: NewTopic) -> dict[str, Any]:
        registry = self._actors.registry
        view = await _part("weight registry", registry.topics.remote, _ASK_S)
        self._topics.take(view)
        if new.name in self._topics:
            raise _exists(new.name)
        if len(self._topics) > self._rules.most:
            raise ApiError(409, f"There are {self._rules.most} topics already.", param="name")
        grown = None
        if self._router is not None:
            grown = await self._grow(new, view)
        version = await self._commit(new.name, grown, view.revision)
        logger.info("topic %s was added", new.name)
        figures = None if grown is None else grown.growth.figures()
        return {
            "object": "topic",
            "name": new.name,
            "weight_version": version,
            "examples": len(set(new.examples)),
            "router": figures,
        }

    async def _commit(self, name: str, grown: Any, revision: int) -> int:
        """Have the registry take the topic; its version."""
        head = None if grown is None else RouterHead(grown.facts, grown.arrays)
        told = (name, GENERAL, head, None if grown is None else revision)
        silent = (
            "The weight registry did not answer: whether the topic was added, `paceline topics` "
            "tells."
        )
        try:
            version: int = await needed(
                "weight registry",
                lambda: self._actors.registry.add_topic.remote(*told),
                _COMMIT_S,
                silent,
                UNKNOWN_OUTCOME,
            )
        except TopicExists as error:
            raise _exists(name) from error
        except OutOfDate as error:
            raise _conflict() from error
        except (KeyError, ValueError) as error:
            raise internal(f"The weight registry refuses: {refusal_of(error)}") from error
        return version

    async def _grow(self, new: NewTopic, view: TopicsView) -> Any:
        """The router's head with the topic.

        Raises:
            ApiError: 400 where the examples do not tell the topic apart.
        """
        settings = GrowthSettings(min_confidence=self._rules.min_confidence)
        examples = _distinct(new.examples)
        if len(examples) < settings.min_examples:
            raise invalid_value(
                "examples",
                f"{len(examples)} different prompts; the router learns a topic from at least "
                f"{settings.min_examples}, and better from some dozens",
            )
        others = [*bundled(), *await stored(self._shards(), self._encoder)]
        mine = set(examples)
        others = [text for text in _distinct(others) if text not in mine]
        head = None if view.head is None else (view.head.facts, view.head.arrays)
        experts = tuple(self._topics)
        told = (new.name, examples, others, experts, head, settings)
        grown = await _part("router", lambda: self._router.grow.remote(*told), _GROW_S)
        if grown.fault is not None:
            raise ApiError(
                400,
                f"The router cannot tell {new.name} apart: {grown.fault}. Of {len(examples)} "
                f"examples {_words(grown.growth.before)} before. Nothing has changed; other or "
                "more examples may help.",
                param="examples",
                code="topic_not_separable",
            )
        return grown

    def _shards(self) -> dict[str, Any]:
        return {**self._actors.shards, **self._topics.shards}

    def _authorize(self, request: Request) -> None:
        if not self._rules.mutable:
            raise forbidden("Topics cannot be added to this server (topics.mutable is false).")
        authorize(request, "Adding a topic", keyed=self._keyed)


def _parse(body: bytes) -> NewTopic:
    new = parse_json(body, NewTopic, code="invalid_value")
    for i, text in enumerate(new.examples):
        if not text.strip() or len(text) > _MOST_CHARACTERS:
            reason = f"it is empty, or longer than {_MOST_CHARACTERS} characters"
            raise invalid_value(f"examples.{i}", reason)
    try:
        topic_name(new.name)
    except ValueError as error:
        raise invalid_value("name", str(error)) from error
    return new


def _distinct(texts: list[str]) -> list[str]:
    return list(dict.fromkeys(text.strip() for text in texts if text.strip()))


def _words(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} went to {topic}" for topic, count in counts.items())


def _exists(name: str) -> ApiError:
    return ApiError(409, f"There is a topic {name} already.", param="name", code="topic_exists")


def _conflict() -> ApiError:
    text = "Another topic is being added or was added just now; try again."
    return ApiError(409, text, code="conflict", retry_after_s=1)


async def _part(name: str, call: Call, seconds: float) -> Any:
    """An answer before which nothing has been changed.

    Raises:
        ApiError: 503 where the part does not answer, 500 where it refuses.
    """
    try:
        return await needed(name, call, seconds, f"The {name} does not answer: nothing was added.")
    except (KeyError, ValueError) as error:
        raise internal(f"The {name} refuses: {refusal_of(error)}") from error
