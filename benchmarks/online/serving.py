"""Answers of the real engine without Ray, with what speculation did for each; kept on disk."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgpack
from expert_cache import base_hashes
from harness import digest

from online.rows import Question
from paceline.actors.engine.engine import Engine
from paceline.actors.engine.request import GenerationRequest, SamplingParams, SpeculativeStats
from paceline.actors.replay.record import ReplayRecord, decode, encode
from paceline.actors.replay.shard import Journal
from paceline.actors.router.policy import GENERAL

ROWS = 8  # requests at once
FROZEN = GENERAL + "@0"
_PART = 128  # prompts that one engine answers before another may follow


@dataclass(frozen=True, slots=True)
class Serving:
    """Sampling and speculation: ``temperature`` 0 is greedy, k is constant so windows compare."""

    max_tokens: int = 96
    temperature: float = 0.0
    num_speculative_tokens: int = 4
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Answer:
    """One answered prompt.

    Attributes:
        number: of the prompt in its stream.
        key: of the prompt.
        rounds: speculative rounds.
        drafted: tokens.
        accepted: drafted tokens that were accepted.
        tokens: of the answer.
        seconds: processor seconds of the engine since the answer that ended before, shared by
            those that end together.
        record: for replay.
    """

    number: int
    key: str
    rounds: int
    drafted: int
    accepted: int
    tokens: int
    seconds: float
    record: ReplayRecord


def serve(
    engine: Engine,
    questions: Sequence[Question],
    drafts: Sequence[str],
    serving: Serving,
    *,
    topics: Sequence[str] | None = None,
    first: int = 0,
) -> Iterator[Answer]:
    """Answer prompts, ``ROWS`` at once, and yield each as it ends.

    The engine stands still between two steps of the iterator, and that time is not counted.
    ``topics`` replace the prompts' own in records; ``first`` is the number of the first prompt.

    Raises:
        RuntimeError: a request or a draft failed.
    """
    waiting = deque(enumerate(zip(questions, drafts, strict=True), start=first))
    numbers: dict[str, int] = {}
    sampling = SamplingParams(serving.max_tokens, temperature=serving.temperature)
    spent = 0.0
    while waiting or engine.has_work:
        while waiting and engine.num_running + engine.num_waiting < ROWS:
            number, (question, draft) = waiting.popleft()
            topic = topics[number - first] if topics else question.topic
            name, ids = question.key, question.token_ids
            numbers[name] = number
            engine.add(GenerationRequest(name, ids, sampling, topic=topic, draft=draft))
        began = time.process_time()
        outputs = engine.step()
        spent += time.process_time() - began
        ended = [output for output in outputs if output.chunk.finish_reason is not None]
        for output in ended:
            name, record = output.request_id, output.record
            if record is None:
                raise RuntimeError(f"{name} ended with {output.chunk.finish_reason}")
            stats = output.chunk.speculative or SpeculativeStats("", 0)
            counts = stats.num_spec_steps, stats.num_draft_tokens, stats.num_accepted_draft_tokens
            tokens = len(record.output_token_ids)
            yield Answer(numbers.pop(name), name, *counts, tokens, spent / len(ended), record)
        spent = 0.0 if ended else spent
    if engine.draft_failures:
        raise RuntimeError(f"drafts failed in {engine.draft_failures} rounds")


def answers_of(
    folder: Path,
    name: str,
    questions: Sequence[Question],
    serving: Serving,
    engine: Callable[[], Engine],
    *,
    draft: str = FROZEN,
) -> list[Answer]:
    """Answers with one draft, in the prompts' order; missing ones are computed and kept.

    ``engine`` gives an idle engine, and is called only if something is missing. A longer list than
    last time only adds to it. Seconds do not compare with those of other runs: every part ends
    with few rows at work.
    """
    facts = {"serving": asdict(serving), "draft": draft, "models": base_hashes()}
    journal = Journal(folder / f"{name}-{digest(facts | {'seconds': 'processor'})}.records")
    kept: dict[str, bytes] = {str(msgpack.unpackb(data)["key"]): data for data in journal.read()}
    journal.rewrite(kept.values())  # a torn end would hide what is appended behind it

    def is_kept(question: Question) -> bool:
        data = kept.get(question.key)
        ids = None if data is None else _unpack(data, 0).record.prompt_token_ids.tolist()
        return ids == [*question.token_ids]

    missing = [question for question in questions if not is_kept(question)]
    for at in range(0, len(missing), _PART):
        part = missing[at : at + _PART]
        for answer in serve(engine(), part, [draft] * len(part), serving):
            kept[answer.key] = data = _pack(answer)
            journal.append(data)
    return [_unpack(kept[q.key], number) for number, q in enumerate(questions)]


def _pack(answer: Answer) -> bytes:
    fields = {n: getattr(answer, n) for n in Answer.__slots__ if n not in ("number", "record")}
    packed: bytes = msgpack.packb(fields | {"record": encode(answer.record)})
    return packed


def _unpack(data: bytes, number: int) -> Answer:
    fields: dict[str, Any] = msgpack.unpackb(data)
    return Answer(number=number, **(fields | {"record": decode(fields["record"])}))
