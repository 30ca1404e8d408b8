"""The real engine without Ray: prompts in, what speculation did for each of them out."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from expert_cache import DRAFT, TARGET

from online.rows import Question
from paceline.actors.engine.build import build_engine
from paceline.actors.engine.engine import Engine
from paceline.actors.engine.request import GenerationRequest, SamplingParams, SpeculativeStats
from paceline.actors.engine.settings import TargetSettings
from paceline.actors.replay.record import ReplayRecord
from paceline.actors.router.policy import GENERAL

ROWS = 8  # requests at once
FROZEN = GENERAL + "@0"


@dataclass(frozen=True, slots=True)
class Serving:
    """How prompts are answered.

    Attributes:
        max_tokens: of an answer.
        temperature: 0 is greedy.
        num_speculative_tokens: drafted per round, always the same, so that windows compare.
        seed: of sampling.
    """

    max_tokens: int = 96
    temperature: float = 0.0
    num_speculative_tokens: int = 4
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Served:
    """One answered prompt.

    Attributes:
        number: of the prompt in its stream.
        key: of the prompt.
        rounds: speculative ones.
        drafted: tokens.
        accepted: drafted tokens that were accepted.
        tokens: of the answer.
        seconds: of the processor, of the engine's since an answer ended before, shared by those
            that end together; they add up to the whole. On one thread they are wall seconds of a
            machine that has the time.
        record: what it leaves for replay.
    """

    number: int
    key: str
    rounds: int
    drafted: int
    accepted: int
    tokens: int
    seconds: float
    record: ReplayRecord


def make_engine(
    serving: Serving,
    drafts: Mapping[str, str] | None = None,
    threads: int = 1,
    *,
    rows: int = ROWS,
    dtype: str = "auto",
) -> tuple[Engine, Any]:
    """The engine over the embedded target, with its tokenizer.

    Args:
        serving: see Serving.
        drafts: expert to the folder of its initial weights; default: ``general`` alone.
        threads: of torch.
        rows: requests at once.
        dtype: of target and drafts.
    """
    settings = TargetSettings(
        str(TARGET),
        drafts=dict(drafts or {GENERAL: str(DRAFT)}),
        num_threads=threads,
        max_num_seqs=rows,
        dtype=dtype,
        num_speculative_tokens=serving.num_speculative_tokens,
        seed=serving.seed,
    )
    engine, tokenizer, _ = build_engine(settings)
    return engine, tokenizer


def serve(
    engine: Engine,
    questions: Sequence[Question],
    drafts: Sequence[str],
    serving: Serving,
    *,
    topics: Sequence[str] | None = None,
    first: int = 0,
) -> Iterator[Served]:
    """Answer prompts, ``ROWS`` at once, and hand out each as it ends.

    The engine stands still while the caller works on one, and that time is not counted.

    Args:
        engine: from :func:`make_engine`, idle.
        questions: the prompts, in order of arrival.
        drafts: the draft of each.
        serving: see Serving.
        topics: the topic that each record bears; default: the prompt's own.
        first: number of the first prompt.

    Raises:
        RuntimeError: where a draft failed: what was measured then is not what was meant.
    """
    waiting = deque(enumerate(zip(questions, drafts, strict=True), start=first))
    numbers: dict[str, tuple[int, Question]] = {}
    sampling = SamplingParams(serving.max_tokens, temperature=serving.temperature)
    spent = 0.0
    while waiting or engine.has_work:
        while waiting and engine.num_running + engine.num_waiting < ROWS:
            number, (question, draft) = waiting.popleft()
            topic = topics[number - first] if topics else question.topic
            name = question.key
            numbers[name] = number, question
            engine.add(
                GenerationRequest(name, question.token_ids, sampling, topic=topic, draft=draft)
            )
        began = time.process_time()
        outputs = engine.step()
        spent += time.process_time() - began
        ended = [output for output in outputs if output.chunk.finish_reason is not None]
        for output in ended:
            if output.record is None:
                raise RuntimeError(f"{output.request_id} ended with {output.chunk.finish_reason}")
            stats, share = output.chunk.speculative, spent / len(ended)
            yield _served(*numbers.pop(output.request_id), stats, output.record, share)
        spent = 0.0 if ended else spent
    if engine.draft_failures:
        raise RuntimeError(f"drafts failed in {engine.draft_failures} rounds")


def _served(
    number: int,
    question: Question,
    stats: SpeculativeStats | None,
    record: ReplayRecord,
    seconds: float,
) -> Served:
    return Served(
        number=number,
        key=question.key,
        rounds=stats.num_spec_steps if stats else 0,
        drafted=stats.num_draft_tokens if stats else 0,
        accepted=stats.num_accepted_draft_tokens if stats else 0,
        tokens=len(record.output_token_ids),
        seconds=seconds,
        record=record,
    )
