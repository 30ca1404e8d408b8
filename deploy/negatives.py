"""Prompts that shall stay where they are when the router learns a further topic."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from paceline.actors.replay.record import RecordError, decode
from paceline.actors.routing.policy import GENERAL
from paceline.deploy.demo.prompts import TOPICS, generate
from paceline.deploy.prompts import PromptEncoder
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
            texts.append(encoder.plain_text(list(decode(data).prompt_token_ids)))
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
