"""Synthetic prompts: the beginning of a stored prompt, continued by the target. Pure.

A draft that has seen a thousand prompts hundreds of times learns no more from them; the target
knows many more like them. What a language model writes in a user's turn is much like what users
write (Magpie, Xu et al., arXiv 2406.08464); the beginning of a stored prompt keeps it to its topic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.actors.engine.request import DRAFT_OFF, GenerationRequest, SamplingParams
from paceline.actors.engine.turn_marks import TurnMarks
from paceline.actors.replay.record import ReplayRecord, synthetic_id

SHORTEST, LONGEST = 2, 8  # tokens of the stored text that are kept
_MIN_ADDED = 2  # tokens


@dataclass(frozen=True, slots=True)
class SyntheticSettings:
    """How many synthetic prompts are made; plain data that crosses process borders.

    Attributes:
        marks: of the target's chat template.
        per_record: synthetic records to make for each training record.
        held_out_fraction: of prompts; a synthetic prompt that is held out is not answered.
        at_once: requests in flight at most.
        least_records: training records of a topic before any synthetic one is made.
        refresh_s: pause when there was nothing to do, seconds.
        timeout_s: of calls to shards and scheduler.
        seed: None is unseeded.
    """

    marks: TurnMarks
    per_record: float
    held_out_fraction: float
    at_once: int
    least_records: int = 8
    refresh_s: float = 1.0
    timeout_s: float = 10.0
    seed: int | None = None


def cut_prompt(
    prompt: Sequence[int], marks: TurnMarks, rng: np.random.Generator
) -> tuple[int, ...] | None:
    """Cut a prompt in its last user's text.

    Args:
        prompt: token ids.
        marks: of the target's chat template.
        rng: where to cut, after 2 to 8 tokens of the text, and before its last one.

    Returns:
        None for a prompt that is not templated, or with a last text shorter than 2 tokens.
    """
    end = len(prompt) - len(marks.cue)
    if end < 0 or tuple(prompt[end:]) != marks.cue:
        return None
    start = marks.last_user_text(prompt[:end])
    if start is None or end - start < SHORTEST:
        return None
    kept = int(rng.integers(SHORTEST, LONGEST + 1))
    return tuple(prompt[: start + min(kept, end - start - 1)])


def prompt_request(
    source: ReplayRecord, start: tuple[int, ...], marks: TurnMarks, mark: str
) -> GenerationRequest:
    """The request that continues a user's text; leaves no record.

    Prompt and answer together may be as long as the stored ones were.

    Args:
        source: the stored record.
        start: its prompt as :func:`cut_prompt` returned it.
        marks: of the target's chat template.
        mark: see :func:`paceline.actors.replay.record.synthetic_id`.
    """
    room = len(source.prompt_token_ids) + len(source.output_token_ids) - len(start) - len(marks.cue)
    sampling = SamplingParams(max(room, 1), temperature=1.0, stop_token_ids=marks.cue[:1])
    return GenerationRequest(
        request_id=synthetic_id(source.request_id, mark) + "?",
        prompt_token_ids=start,
        sampling=sampling,
        topic=source.topic,
        draft=DRAFT_OFF,
        store=False,
        background=True,
    )


def synthetic_prompt(
    start: tuple[int, ...], added: Sequence[int], marks: TurnMarks
) -> tuple[int, ...] | None:
    """The whole prompt; None if the target did not end the text, or added nothing.

    Args:
        start: as :func:`cut_prompt` returned it.
        added: the target's tokens, the one that ended the text included.
        marks: of the chat template.
    """
    if len(added) <= _MIN_ADDED or added[-1] != marks.cue[0]:
        return None
    return (*start, *added[:-1], *marks.cue)


def answer_request(
    source: ReplayRecord, prompt: tuple[int, ...], mark: str
) -> GenerationRequest | None:
    """The request that answers a synthetic prompt as the stored one was answered; is recorded.

    The record expires with the stored one: its prompt begins with words of the same user.

    Args:
        source: the stored record.
        prompt: the synthetic one.
        mark: as in :func:`prompt_request`.

    Returns:
        None if there is no room for an answer.
    """
    whole = len(source.prompt_token_ids) + len(source.output_token_ids)
    room = min(len(source.output_token_ids), whole - len(prompt))
    if room < 1 or list(prompt) == source.prompt_token_ids.tolist():
        return None
    sampling = SamplingParams(
        room, temperature=source.temperature, top_p=source.top_p, top_k=source.top_k
    )
    return GenerationRequest(
        request_id=synthetic_id(source.request_id, mark),
        prompt_token_ids=prompt,
        sampling=sampling,
        topic=source.topic,
        draft=DRAFT_OFF,
        background=True,
        created=source.created,
    )
