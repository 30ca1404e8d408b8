"""Decoding measured: every variant once on each block of prompts, in a turning order."""

from __future__ import annotations

import gc
import itertools
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from harness import FILLS, Timing, differing, geometric_mean, paired_ratio, rotation, topic_rates
from prompts import Prompt
from tqdm import tqdm

from paceline.actors.engine.engine import Engine, StepOutput
from paceline.actors.engine.request import FAILED, GenerationRequest, SamplingParams
from paceline.actors.replay.record import ReplayRecord


@dataclass(slots=True)
class Drafted:
    """Sums over speculative rounds.

    Attributes:
        rounds: speculative rounds.
        accepted: accepted tokens.
        drafted: drafted tokens; None if the variant does not report them.
    """

    rounds: int = 0
    accepted: int = 0
    drafted: int | None = None

    def add(self, other: Drafted) -> None:
        """Add another run's sums."""
        self.rounds += other.rounds
        self.accepted += other.accepted
        if other.drafted is not None:
            self.drafted = (self.drafted or 0) + other.drafted

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens per speculative round, the bonus token included."""
        return 1.0 + self.accepted / self.rounds if self.rounds else None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens."""
        return self.accepted / self.drafted if self.drafted else None


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to the request ``key``.

    Attributes:
        key: of the request.
        token_ids: of the answer.
        finish_reason: see GenerationChunk.
        drafted: of its speculative rounds.
        seconds: processor seconds of the engine since the answer that ended before.
        record: for replay; None of a request that is not stored.
        rounds: forwards of the target that made it.
    """

    key: str
    token_ids: tuple[int, ...]
    finish_reason: str
    drafted: Drafted
    seconds: float
    record: ReplayRecord | None
    rounds: int = 0


def drive(
    engine: Engine, requests: Iterable[GenerationRequest], in_flight: int
) -> Iterator[StepOutput]:
    """Yield an engine's outputs, ``in_flight`` requests at a time if there are so many.

    Raises:
        RuntimeError: a request or a draft failed.
    """
    waiting = deque(requests)
    while waiting or engine.has_work:
        while waiting and engine.num_running + engine.num_waiting < in_flight:
            engine.add(waiting.popleft())
        for output in engine.step():
            if output.chunk.finish_reason in FAILED:
                raise RuntimeError(f"request {output.request_id} ended with an error")
            yield output
    if engine.draft_failures:
        raise RuntimeError(f"drafts failed in {engine.draft_failures} rounds")


def answers(
    engine: Engine, requests: Iterable[GenerationRequest], in_flight: int
) -> Iterator[Answer]:
    """Yield each answer as it ends, see :func:`drive`; the engine stands still between two."""
    tokens: defaultdict[str, list[int]] = defaultdict(list)
    rounds: Counter[str] = Counter()
    began = time.process_time()
    for output in drive(engine, requests, in_flight):
        key, chunk, stats = output.request_id, output.chunk, output.chunk.speculative
        tokens[key].extend(chunk.token_ids)
        rounds[key] += 1
        if chunk.finish_reason is None:
            continue
        drafted = Drafted(drafted=0)
        if stats is not None:
            sums = stats.num_spec_steps, stats.num_accepted_draft_tokens
            drafted = Drafted(*sums, stats.num_draft_tokens)
        own, seconds = tuple(tokens.pop(key)), time.process_time() - began
        made = chunk.finish_reason, drafted, seconds, output.record, rounds.pop(key)
        yield Answer(key, own, *made)
        began = time.process_time()


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a block: output tokens per prompt, seconds, what drafts did, rounds."""

    outputs: list[list[int]]
    seconds: float
    drafted: Drafted = field(default_factory=Drafted)
    rounds: int = 0

    @property
    def num_tokens(self) -> int:
        """Output tokens of all prompts."""
        return sum(map(len, self.outputs))


class Variant(Protocol):
    """One way to decode."""

    name: str

    def run(
        self, prompts: Sequence[Prompt], batch: int, temperature: float, max_tokens: int
    ) -> Run:
        """Answer all prompts, at most ``batch`` at once; temperature 0 is greedy."""
        ...


class Served:
    """Paceline's engine in this process, driven as the target replica's thread drives it.

    Args:
        name: of the variant.
        engine: may be shared by variants that do not run at the same time.
        k: tokens drafted per round; None leaves it to the engine.
        draft_of: prompt to its draft.
        clock: seconds of a run; on one thread processor seconds depend less on neighbours.
        grammar: of the answers; empty allows every text.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        k: int | None,
        draft_of: Callable[[Prompt], str] = lambda prompt: prompt.topic,
        clock: Callable[[], float] = time.perf_counter,
        grammar: str = "",
    ) -> None:
        self.name = name
        self._engine, self._k, self._draft_of, self._clock = engine, k, draft_of, clock
        self._grammar = grammar
        self._ids = itertools.count()

    def run(
        self, prompts: Sequence[Prompt], batch: int, temperature: float, max_tokens: int
    ) -> Run:
        """See Variant."""
        sampling = SamplingParams(max_tokens, temperature=temperature)
        requests = [
            GenerationRequest(
                f"{self.name}/{next(self._ids)}",
                prompt.token_ids,
                sampling,
                topic=prompt.topic,
                draft=self._draft_of(prompt),
                num_speculative_tokens=self._k,
                store=False,
                grammar=self._grammar,
            )
            for prompt in prompts
        ]
        began = self._clock()
        found = {answer.key: answer for answer in answers(self._engine, requests, batch)}
        seconds = self._clock() - began
        drafted = Drafted(drafted=0)
        for answer in found.values():
            drafted.add(answer.drafted)
        outputs = [list(found[r.request_id].token_ids) for r in requests]
        return Run(outputs, seconds, drafted, sum(answer.rounds for answer in found.values()))


@dataclass(frozen=True, slots=True)
class Cell:
    """One setting: prompts at once, and temperature."""

    batch: int
    temperature: float

    def __str__(self) -> str:
        return f"batch {self.batch}, temperature {self.temperature:g}"


@dataclass(frozen=True, slots=True)
class Block:
    """Prompts that every variant runs once; ``number`` 0 warms up and is not counted."""

    number: int
    topic: str
    prompts: tuple[Prompt, ...]


@dataclass(slots=True)
class Outcome:
    """Timings, runs by variant, and greedy answers by variant and prompt, of a cell."""

    timings: list[Timing] = field(default_factory=list)
    runs: dict[str, list[Run]] = field(default_factory=dict)
    answers: dict[str, dict[str, list[int]]] = field(default_factory=dict)

    def add(self, variant: str, block: Block, run: Run, *, greedy: bool) -> None:
        """Add one run."""
        self.timings.append(Timing(variant, block.number, block.topic, run.num_tokens, run.seconds))
        self.runs.setdefault(variant, []).append(run)
        if greedy:
            for prompt, output in zip(block.prompts, run.outputs, strict=True):
                self.answers.setdefault(variant, {})[prompt.key] = output


def make_blocks(prompts: Mapping[str, Sequence[Prompt]], size: int, per_topic: int) -> list[Block]:
    """A warm-up block, then blocks of distinct prompts, the topics taking turns.

    Raises:
        ValueError: there are too few prompts.
    """
    needed = size * (per_topic + 1)
    if short := [topic for topic, own in prompts.items() if len(own) < needed]:
        raise ValueError(f"{', '.join(short)}: fewer than {needed} prompts")
    # The warm-up takes from the end what no counted block uses.
    first = next(iter(prompts))
    blocks = [Block(0, first, tuple(prompts[first][-size:]))]
    for index in range(per_topic):
        for topic, own in prompts.items():
            part = own[index * size : (index + 1) * size]
            blocks.append(Block(len(blocks), topic, tuple(part)))
    return blocks


def make_full_blocks(
    prompts: Mapping[str, Sequence[Prompt]], batch: int, count: int
) -> list[Block]:
    """A warm-up block, then ``count`` with several times as many prompts as run at once.

    They measure a server under that load, not how the last requests of a burst end. The topics
    take turns, and prompts may come again.
    """
    topics, size = list(prompts), FILLS * max(batch, 4)
    blocks = []
    for number in range(count + 1):
        own, at = prompts[topics[number % len(topics)]], number // len(topics) * size
        block = tuple(own[(at + i) % len(own)] for i in range(size))
        blocks.append(Block(number, topics[number % len(topics)], block))
    return blocks


def run_cell(
    cell: Cell, variants: Sequence[Variant], blocks: Sequence[Block], max_tokens: int
) -> Outcome:
    """Run every variant on every block, each at every place of the order for every topic."""
    outcome, topics = Outcome(), len({block.topic for block in blocks})
    with tqdm(total=len(blocks) * len(variants), desc=str(cell), leave=False) as bar:
        for block in blocks:
            for variant in rotation(variants, block.number % topics + block.number // topics):
                gc.collect()
                run = variant.run(block.prompts, cell.batch, cell.temperature, max_tokens)
                if block.number:
                    outcome.add(variant.name, block, run, greedy=cell.temperature == 0)
                bar.update()
    return outcome


def summary(
    cell: Cell, outcome: Outcome, pairs: Sequence[tuple[str, str]], reference: str
) -> dict[str, Any]:
    """Figures of a cell, with ratios of speed of the ``pairs``."""
    variants: dict[str, Any] = {}
    for name in sorted({timing.variant for timing in outcome.timings}):
        rates, drafted = topic_rates(outcome.timings, name), Drafted()
        for run in outcome.runs[name]:
            drafted.add(run.drafted)
        variants[name] = {
            "tokens_per_s": geometric_mean(list(rates.values())),
            "tokens_per_s_by_topic": rates,
            "mean_acceptance_length": drafted.mean_acceptance_length,
            "acceptance_rate": drafted.acceptance_rate,
        }
        if outcome.answers:
            found = differing(outcome.answers[name], outcome.answers[reference])
            variants[name]["answers"] = len(outcome.answers[name])
            variants[name]["answers_that_differ"] = len(found)
    ratios = {
        f"{upper} / {lower}": asdict(paired_ratio(outcome.timings, upper, lower))
        for upper, lower in pairs
    }
    return asdict(cell) | {"variants": variants, "ratios": ratios}
