"""What every unit of work stands on: prompts, cached answers, engines, a judge, the store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from expert_cache import DRAFT, TARGET, base_hashes

from online import rows
from online.answers import answers_of
from online.figures import Counts
from online.judging import Judge
from online.rows import Question, Questions
from online.serving import FROZEN, ROWS, Served, Serving, make_engine
from online.store import Store, digest
from online.world import trainer_facts
from paceline.actors.engine.engine import Engine
from paceline.actors.engine.model_loader import load_tokenizer, resolve_dtype


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured.

    Attributes:
        stream: prompts of a topic's stream.
        test: prompts of its test.
        phase: prompts of a phase of a shift.
        ceiling: prompts that the offline ceiling learns from at most; None takes the whole
            train side.
        window: requests per window.
        checkpoints: requests after which the served draft is judged on the test.
    """

    stream: int = 1_000
    test: int = 200
    phase: int = 500
    ceiling: int | None = None
    window: int = 50
    checkpoints: tuple[int, ...] = (0, 100, 200, 400, 700, 1_000)


# Of the ten minutes that --quick may take. A phase has some ten prompts to hold out, with
# `learning.QUICK`: an expert with less than four is not taught.
QUICK = Sizes(stream=96, test=24, phase=32, ceiling=160, window=16, checkpoints=(0, 48, 96))


class Bench:
    """Gives units of work what they need, each thing made once and only when asked for."""

    def __init__(
        self,
        store: Store,
        data: str | None,
        sizes: Sizes,
        serving: Serving,
        *,
        threads: int = 1,
        dtype: str = "auto",
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Nothing is loaded yet.

        Args:
            store: of results; answers lie in a folder beside them.
            data: see :func:`online.rows.load`.
            sizes: see Sizes.
            serving: how prompts are answered.
            threads: of torch.
            dtype: of all models; keys name what it comes to, but for float32, which all
                published units are of.
            say: told of progress.
        """
        self.store = store
        self.data = data
        self.sizes = sizes
        self.serving = serving
        self.threads = threads
        self.dtype = dtype
        computed = resolve_dtype(dtype, torch.device("cpu"))
        self._named = {} if computed is torch.float32 else {"dtype": str(computed)}
        self.say = say
        self._questions: dict[str, Questions] = {}

    @cached_property
    def tokenizer(self) -> Any:
        """The target's."""
        return load_tokenizer(str(TARGET))

    @cached_property
    def frozen_engine(self) -> Engine:
        """With the general draft, whose initial weights never change."""
        return self.engine()

    @cached_property
    def judge(self) -> Judge:
        """Over the general draft's architecture."""
        return Judge(DRAFT, dtype=self.dtype)

    def engine(
        self, experts: Sequence[str] | None = None, *, rows: int = ROWS, dtype: str = "auto"
    ) -> Engine:
        """A new one; every expert starts as the general draft. ``dtype`` auto is the bench's."""
        drafts = None if experts is None else dict.fromkeys(experts, str(DRAFT))
        own = self.dtype if dtype == "auto" else dtype
        return make_engine(self.serving, drafts, self.threads, rows=rows, dtype=own)[0]

    def questions(self, topic: str) -> Questions:
        """A topic's stream, as long as anything needs it, and its test."""
        if topic not in self._questions:
            self._questions[topic] = rows.load(
                self.data, topic, self.tokenizer, train=None, test=self.sizes.test
            )
        return self._questions[topic]

    def stream(self, topic: str, count: int | None = None) -> Sequence[Question]:
        """The first prompts of a topic's train side."""
        return self.questions(topic).train[: self.sizes.stream if count is None else count]

    def answers(
        self, topic: str, side: str, questions: Sequence[Question], draft: str = FROZEN
    ) -> list[Served]:
        """The target's answers with a frozen draft (or none), from disk or made now."""
        done = 0

        def progress(_: int) -> None:
            nonlocal done
            done += 1
            if done % 100 == 0:
                self.say(f"{topic}: {done} answers of the {side} side")

        name = "-".join([rows.label(self.data), topic, side, *self._named.values()])
        return answers_of(
            self.store.folder / "answers",
            name,
            questions,
            self.serving,
            lambda: self.frozen_engine,
            progress,
            draft=draft,
        )

    def frozen(self, topic: str, count: int | None = None) -> list[Served]:
        """The frozen twin of a topic's stream."""
        return self.answers(topic, "train", self.stream(topic, count))

    def test(self, topic: str) -> list[Served]:
        """A topic's test answered with the frozen draft."""
        return self.answers(topic, "test", self.questions(topic).test)

    def settings(self, topics: Sequence[str], more: Mapping[str, Any]) -> dict[str, Any]:
        """All that decides a unit over these topics; ``more`` must hold its Learning, if any."""
        prompts = [q for t in topics for q in (*self.stream(t), *self.questions(t).test)]
        return {
            "data": rows.label(self.data),
            "topics": list(topics),
            "prompts": rows.mark_of(prompts),
            "models": digest(base_hashes()),
            "serving": asdict(self.serving),
            "trainer": trainer_facts(),
            "threads": self.threads,
            **self._named,
            **more,
        }


def counts_of(served: Sequence[Served]) -> list[Counts]:
    """In the prompts' order."""
    return [
        Counts(s.rounds, s.drafted, s.accepted, s.tokens, s.seconds)
        for s in sorted(served, key=lambda s: s.number)
    ]


def packed(counts: Sequence[Counts]) -> list[list[float]]:
    """As JSON holds it; :func:`unpacked` reads it."""
    return [[c.rounds, c.drafted, c.accepted, c.tokens, round(c.seconds, 5)] for c in counts]


def unpacked(rows: Sequence[Sequence[float]]) -> list[Counts]:
    """What :func:`packed` wrote."""
    return [Counts(int(r), int(d), int(a), int(t), s) for r, d, a, t, s in rows]
