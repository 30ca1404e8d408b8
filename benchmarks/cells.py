"""The measurement itself: which blocks run, every variant once on each, in a turning order."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from measure import Timing, differing, geometric_mean, paired_ratio, rotation, topic_rates
from prompts import Prompt
from runs import Drafted, Run, Variant

MIXED = "mixed"
_FILLS = 3  # blocks of the pairs, in batches


@dataclass(frozen=True, slots=True)
class Cell:
    """One setting: prompts at once, temperature, and whether a block mixes the topics."""

    batch: int
    temperature: float
    mixed: bool = False

    @property
    def label(self) -> str:
        """For people."""
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
    """All that a cell gave: timings, greedy answers by variant and prompt, drafting.

    ``by_topic`` is drafting by (variant, topic).
    """

    timings: list[Timing] = field(default_factory=list)
    answers: dict[str, dict[int, list[int]]] = field(default_factory=dict)
    drafted: dict[str, Drafted] = field(default_factory=dict)
    by_topic: dict[tuple[str, str], Drafted] = field(default_factory=dict)

    def take(self, variant: str, block: Block, run: Run, *, greedy: bool) -> None:
        """Note one run."""
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

    Args:
        prompts: by topic, each with more than ``size * per_topic``.
        size: prompts per block.
        per_topic: blocks per topic; in all, where they are mixed.
        mixed: whether every block takes from all topics in turn.

    Raises:
        ValueError: where there are too few prompts.
    """
    if mixed:
        queue = [p for group in zip(*prompts.values(), strict=False) for p in group]
        queues = {MIXED: queue}
    else:
        queues = {topic: list(own) for topic, own in prompts.items()}
    short = [topic for topic, own in queues.items() if len(own) < size * (per_topic + 1)]
    if short:
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
    cell: Cell,
    variants: Sequence[Variant],
    blocks: Sequence[Block],
    max_tokens: int,
    progress: Callable[[], None],
) -> Outcome:
    """Run every variant on every block; ``progress`` is called after each run."""
    outcome = Outcome()
    for block in blocks:
        for variant in rotation(variants, block.number):
            gc.collect()
            run = variant.run(block.prompts, cell.batch, cell.temperature, max_tokens)
            if block.number:
                outcome.take(variant.name, block, run, greedy=cell.temperature == 0)
            progress()
    return outcome


def summary(
    cell: Cell, outcome: Outcome, pairs: Sequence[tuple[str, str]], reference: str
) -> dict[str, Any]:
    """A cell's figures.

    Args:
        cell: its setting.
        outcome: of :func:`run_cell`.
        pairs: (faster, slower) variants whose ratio is wanted.
        reference: the variant whose greedy answers the others' must equal.
    """
    variants: dict[str, Any] = {}
    for name in sorted({timing.variant for timing in outcome.timings}):
        rates = topic_rates(outcome.timings, name)
        drafted = outcome.drafted[name]
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
    return {
        "batch": cell.batch,
        "temperature": cell.temperature,
        "mixed": cell.mixed,
        "variants": variants,
        "ratios": ratios,
    }


def run_pairs(
    auto: Variant,
    off: Variant,
    prompts: Mapping[str, Sequence[Prompt]],
    cell: Cell,
    count: int,
    max_tokens: int,
    progress: Callable[[], None],
) -> dict[str, Any]:
    """Blocks run by both variants, who goes first taking turns, topics too.

    A block has several times as many prompts as run at once: what is measured is a server at that
    load, and not how the last requests of a burst end.

    Returns:
        the ratio of their tokens per second with its 95 % interval, whose lower end says
        whether speculation can have been slower than plain decoding.
    """
    topics, size = list(prompts), _FILLS * max(cell.batch, 4)
    timings: list[Timing] = []
    for number in range(count + 1):  # the first warms up
        topic = topics[number % len(topics)]
        own = prompts[topic]
        at = number // len(topics) * size
        block = tuple(own[(at + i) % len(own)] for i in range(size))
        for variant in rotation([auto, off], number // len(topics)):
            gc.collect()
            run = variant.run(block, cell.batch, cell.temperature, max_tokens)
            if number:
                timings.append(Timing(variant.name, number, topic, run.num_tokens, run.seconds))
            progress()
    result = paired_ratio(timings, auto.name, off.name)
    return {
        "batch": cell.batch,
        "temperature": cell.temperature,
        "pairs": result.blocks,
        "ratio": result.ratio,
        "low": result.low,
        "high": result.high,
    }
