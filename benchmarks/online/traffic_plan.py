"""What a block of traffic sends, and when: windows, loads, prompts by rank. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from online.open_loop import Planned
from online.rows import Question
from online.traces import Arrival, answer_tokens, pair_by_rank

PLAIN, FROZEN, ONLINE = "plain", "frozen", "online"
VARIANTS = (PLAIN, FROZEN, ONLINE)
OUTPUT_ROOM = 256  # tokens, of the embedded target's 1024


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is run.

    Attributes:
        loads: as fractions of the capacity.
        seconds: that the arrivals of a block last.
        repeats: windows of each trace.
        warm_up: requests before the clock runs.
        probe: requests that measure the capacity.
        drain_s: that answers may take after the last arrival.
        lesson_s: that ``online`` has learnt before the first block, from the same traffic.
        lesson_load: of that time, as a fraction of the capacity.
    """

    loads: tuple[float, ...]
    seconds: float
    repeats: int
    warm_up: int
    probe: int
    drain_s: float
    lesson_s: float
    lesson_load: float = 0.1


FULL = Plan((0.3, 0.6, 0.9), 180.0, 3, 16, 192, 120.0, 600.0)
QUICK = Plan((0.3, 0.8), 40.0, 1, 8, 48, 40.0, 0.0)


@dataclass(frozen=True, slots=True)
class Block:
    """A window of a trace at a load."""

    trace: str
    load: float
    repeat: int

    @property
    def name(self) -> str:
        """For file names and tables."""
        return f"{self.trace.replace(' ', '-')}-{self.load:g}-{self.repeat}"


@dataclass(frozen=True, slots=True)
class Prompts:
    """The pool that blocks draw from, topics in turn."""

    questions: Sequence[Question]
    texts: Sequence[str]

    def part(self, count: int, start: int) -> list[int]:
        """Indices of so many from ``start`` on, which goes on at 0 where the pool ends.

        Args:
            count: of prompts.
            start: how many the blocks before have had: blocks are of different lengths.
        """
        return [(start + i) % len(self.questions) for i in range(count)]

    def repeated(self, count: int, start: int) -> int:
        """How many of such a part have been in it or in a part before it already."""
        return min(count, max(0, start + count - len(self.questions)))


def turns(block: Block, traces: Sequence[str], loads: Sequence[float]) -> list[str]:
    """The variants in the order in which they run a block.

    Every variant is first, second and third equally often over three repeats of any trace and load,
    over three traces, and over three loads: whatever is first on a machine is first for all.
    """
    first = loads.index(block.load) + list(traces).index(block.trace) + block.repeat
    return [VARIANTS[(first + turn) % len(VARIANTS)] for turn in range(len(VARIANTS))]


def body(text: str, max_tokens: int, variant: str) -> dict[str, Any]:
    """A greedy chat request; only ``online`` has a use for its record."""
    return {
        "model": "paceline",
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "stream": True,
        "return_token_ids": True,
        "store": variant == ONLINE,
        **({"speculative": {"draft": "off"}} if variant == PLAIN else {}),
    }


def busy_rate(ended_s: Sequence[float], at_once: int) -> float:
    """Answers a second up to the moment when the last request was sent, and the rest fades out.

    Args:
        ended_s: when every answer had come, seconds after the first request was sent.
        at_once: how many were under way as long as there were so many.

    Raises:
        ValueError: all were sent at once.
    """
    count = len(ended_s) - at_once
    if count < 1:
        raise ValueError(f"{len(ended_s)} requests, {at_once} at once: no rate can be told")
    return count / sorted(ended_s)[count - 1]


def planned(
    arrivals: Sequence[Arrival], scale: float, prompts: Prompts, start: int, variant: str
) -> list[Planned]:
    """The requests of a block: what is due when, with which prompt and how long an answer.

    Args:
        arrivals: of the block.
        scale: of answers, see :func:`online.traces.output_scale`.
        prompts: the pool.
        start: see :meth:`Prompts.part`.
        variant: one of ``VARIANTS``.
    """
    part = prompts.part(len(arrivals), start)
    lengths = [len(prompts.questions[i].token_ids) for i in part]
    paired = pair_by_rank([arrival.input_tokens for arrival in arrivals], lengths)
    tokens = answer_tokens(arrivals, scale, OUTPUT_ROOM)
    requests = []
    for arrival, most, at in zip(arrivals, tokens, paired, strict=True):
        question, text = prompts.questions[part[at]], prompts.texts[part[at]]
        requests.append(
            Planned(arrival.at_s, question.topic, lengths[at], body(text, most, variant))
        )
    return requests
