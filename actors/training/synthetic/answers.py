"""Synthetic records: further answers of the target to stored prompts, sampled. Pure.

A draft that has seen a topic's answers a hundred times learns no more from them. The target knows
other answers to the same prompts, with other tokens at other places, and its distribution there is
what the draft has to learn.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.actors.engine.request import DRAFT_OFF, GenerationRequest, SamplingParams
from paceline.actors.replay.record import ReplayRecord, synthetic_id

_MOST_TOKENS = 256
_LEAST_TEMPERATURE = 0.7  # so that answers differ from the stored one, and are still the target's


@dataclass(frozen=True, slots=True)
class SyntheticSettings:
    """How many further answers are made; plain data that crosses process borders.

    Attributes:
        per_record: synthetic records to make for each training record.
        most_records: training and synthetic records of a topic above which none are made.
        at_once: requests in flight at most.
        least_records: training records of a topic before any synthetic one is made.
        refresh_s: pause when there was nothing to do, seconds.
        timeout_s: of calls to shards and scheduler.
    """

    per_record: float
    at_once: int
    most_records: int = 1024
    least_records: int = 8
    refresh_s: float = 1.0
    timeout_s: float = 10.0


def further_answer(source: ReplayRecord, mark: str) -> GenerationRequest:
    """The request that answers a stored prompt again; is recorded.

    The record expires with the stored one, and is of its conversation. The answer is as long at
    most, and ends after 256 tokens.

    Args:
        source: the stored record.
        mark: see :func:`paceline.actors.replay.record.synthetic_id`.
    """
    sampling = SamplingParams(
        min(len(source.output_token_ids), _MOST_TOKENS),
        temperature=max(source.temperature, _LEAST_TEMPERATURE),
        top_p=source.top_p,
        top_k=source.top_k,
    )
    return GenerationRequest(
        request_id=synthetic_id(source.request_id, mark),
        prompt_token_ids=tuple(source.prompt_token_ids.tolist()),
        sampling=sampling,
        topic=source.topic,
        draft=DRAFT_OFF,
        background=True,
        created=source.created,
        first_prompt=source.conversation,
    )
