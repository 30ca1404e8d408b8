"""Decoding measured: every variant once on each block of prompts, in a turning order."""

from __future__ import annotations

import gc
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from expert_cache import TARGET
from harness import Timing, differing, geometric_mean, paired_ratio, rotation, topic_rates
from prompts import Prompt
from tqdm import tqdm

from paceline.actors.engine.build import build_engine
from paceline.actors.engine.engine import Engine, StepOutput
from paceline.actors.engine.request import (
    FAILED,
    GenerationRequest,
    SamplingParams,
)
from paceline.actors.engine.settings import TargetSettings
from paceline.actors.replay.record import ReplayRecord

MIXED = "mixed"
_FILLS = 3  # blocks of the pairs, in batches


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
class Run:
    """One run of a block: output tokens per prompt, seconds, what drafts did, records."""

    outputs: list[list[int]]
    seconds: float
    drafted: Drafted = field(default_factory=Drafted)
    records: list[ReplayRecord] = field(default_factory=list)

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


def drive(
    engine: Engine, requests: Iterable[GenerationRequest], in_flight: int
) -> Iterator[StepOutput]:
    """Yield an engine's outputs, ``in_flight`` requests at a time if there are so many.

    Raises:
        RuntimeError: a request ended with an error.
    """
    waiting = deque(requests)
    while waiting or engine.has_work:
        while waiting and engine.num_running + engine.num_waiting < in_flight:
            engine.add(waiting.popleft())
        for output in engine.step():
            if output.chunk.finish_reason in FAILED:
                raise RuntimeError(f"request {output.request_id} ended with an error")
            yield output


def load_engine(
    drafts: Mapping[str, str],
    *,
    threads: int,
    k: int | None = None,
    target: Path = TARGET,
    **settings: Any,
) -> tuple[Engine, Any, dict[str, Any]]:
    """Engine of a target, its tokenizer and facts; ``settings`` as TargetSettings.

    Without a prefix cache, since prompts come back for every variant.
    """
    common: dict[str, Any] = {"num_threads": threads, "num_speculative_tokens": k}
    common |= {"prefix_cache": False, "seed": 1}
    return build_engine(TargetSettings(str(target), dict(drafts), **(common | settings)))


class Served:
    """Paceline's engine in this process, driven as the target replica's thread drives it.

    Args:
        name: of the variant.
        engine: may be shared by variants that do not run at the same time.
        k: tokens drafted per round; None leaves it to the engine.
        draft_of: prompt to its draft.
        clock: seconds of a run; on one thread processor seconds depend less on neighbours.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        k: int | None,
        draft_of: Callable[[Prompt], str] = lambda prompt: prompt.topic,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.name = name
        self._engine, self._k, self._draft_of, self._clock = engine, k, draft_of, clock
        self._ids = itertools.count()

    def run(
        self,
        prompts: Sequence[Prompt],
        batch: int,
        temperature: float,
        max_tokens: int,
        *,
        store: bool = False,
    ) -> Run:
        """See Variant; ``store`` keeps the records."""
        run = next(self._ids)
        requests = {
            f"{self.name}/{run}/{i}": GenerationRequest(
                f"{self.name}/{run}/{i}",
                prompt.token_ids,
                SamplingParams(prompt.max_tokens or max_tokens, temperature=temperature),
                topic=prompt.topic,
                draft=self._draft_of(prompt),
                num_speculative_tokens=self._k,
                store=store,
            )
            for i, prompt in enumerate(prompts)
        }
        outputs: dict[str, list[int]] = {name: [] for name in requests}
        drafted, records = Drafted(drafted=0), []
        began = self._clock()
        for output in drive(self._engine, requests.values(), batch):
            outputs[output.request_id].extend(output.chunk.token_ids)
            if output.record is not None:
                records.append(output.record)
            if output.chunk.finish_reason is not None and output.chunk.speculative is not None:
                own = output.chunk.speculative
                sums = own.num_spec_steps, own.num_accepted_draft_tokens, own.num_draft_tokens
                drafted.add(Drafted(*sums))
        seconds = self._clock() - began
        return Run(list(outputs.values()), seconds, drafted, records)


@dataclass(frozen=True, slots=True)
class Cell:
    """One setting: prompts at once, temperature, and whether a block mixes the topics."""

    batch: int
    temperature: float
    mixed: bool = False

    def __str__(self) -> str:
        topics = "mixed topics" if self.mixed else "one topic"
        return f"batch {self.batch}, temperature {self.temperature:g}, {topics}"


@dataclass(frozen=True, slots=True)
class Block:
    """Prompts that every variant runs once; ``number`` 0 warms up and is not counted."""

    number: int
    topic: str
    prompts: tuple[Prompt, ...]


@dataclass(slots=True)
class Outcome:
    """Timings, greedy answers by variant and prompt, and drafting of a cell.

    ``by_topic`` is drafting by (variant, topic).
    """

    timings: list[Timing] = field(default_factory=list)
    answers: dict[str, dict[int, list[int]]] = field(default_factory=dict)
    drafted: dict[str, Drafted] = field(default_factory=dict)
    by_topic: dict[tuple[str, str], Drafted] = field(default_factory=dict)

    def add(self, variant: str, block: Block, run: Run, *, greedy: bool) -> None:
        """Add one run."""
        self.timings.append(Timing(variant, block.number, block.topic, run.num_tokens, run.seconds))
        self.drafted.setdefault(variant, Drafted()).add(run.drafted)
        self.by_topic.setdefault((variant, block.topic), Drafted()).add(run.drafted)
        if greedy:
            for prompt, output in zip(block.prompts, run.outputs, strict=True):
                self.answers.setdefault(variant, {})[prompt.number] = output


def make_blocks(
    prompts: Mapping[str, Sequence[Prompt]], size: int, per_topic: int, *, mixed: bool = False
) -> list[Block]:
    """A warm-up block, then blocks of distinct prompts, the topics taking turns.

    Raises:
        ValueError: there are too few prompts.
    """
    queues = {topic: list(own) for topic, own in prompts.items()}
    if mixed:
        queues = {MIXED: [p for group in zip(*prompts.values(), strict=False) for p in group]}
    if short := [topic for topic, own in queues.items() if len(own) < size * (per_topic + 1)]:
        raise ValueError(f"{', '.join(short)}: fewer than {size * (per_topic + 1)} prompts")
    # The warm-up takes from the end what no counted block uses.
    first = next(iter(queues))
    blocks = [Block(0, first, tuple(queues[first][-size:]))]
    for index in range(per_topic):
        for topic, own in queues.items():
            part = own[index * size : (index + 1) * size]
            blocks.append(Block(len(blocks), topic, tuple(part)))
    return blocks


def run_cell(
    cell: Cell, variants: Sequence[Variant], blocks: Sequence[Block], max_tokens: int
) -> Outcome:
    """Run every variant on every block."""
    outcome = Outcome()
    with tqdm(total=len(blocks) * len(variants), desc=str(cell), leave=False) as bar:
        for block in blocks:
            for variant in rotation(variants, block.number):
                gc.collect()
                run = variant.run(block.prompts, cell.batch, cell.temperature, max_tokens)
                if block.number:
                    outcome.add(variant.name, block, run, greedy=cell.temperature == 0)
                bar.update()
    return outcome


def summary(
    cell: Cell, outcome: Outcome, pairs: Sequence[tuple[str, str]], reference: str
) -> dict[str, Any]:
    """Figures of a cell."""
    variants: dict[str, Any] = {}
    for name in sorted({timing.variant for timing in outcome.timings}):
        rates, drafted = topic_rates(outcome.timings, name), outcome.drafted[name]
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


def run_pairs(
    auto: Variant,
    off: Variant,
    prompts: Mapping[str, Sequence[Prompt]],
    cell: Cell,
    count: int,
    max_tokens: int,
) -> dict[str, Any]:
    """Ratio of two variants' speed from ``count`` blocks, order and topics taking turns.

    A block has several times as many prompts as run at once: this measures a server under that
    load, not how the last requests of a burst end.
    """
    topics, size = list(prompts), _FILLS * max(cell.batch, 4)
    blocks = []
    for number in range(count + 1):  # the first warms up
        own, at = prompts[topics[number % len(topics)]], number // len(topics) * size
        block = tuple(own[(at + i) % len(own)] for i in range(size))
        blocks.append(Block(number, topics[number % len(topics)], block))
    timings: list[Timing] = []
    for block in tqdm(blocks, desc=f"pairs, {cell}", leave=False):
        for variant in rotation([auto, off], block.number // len(topics)):
            gc.collect()
            run = variant.run(block.prompts, cell.batch, cell.temperature, max_tokens)
            if block.number:
                timings.append(
                    Timing(variant.name, block.number, block.topic, run.num_tokens, run.seconds)
                )
    return asdict(cell) | asdict(paired_ratio(timings, auto.name, off.name))
