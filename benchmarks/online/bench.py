"""What every unit of work needs: prompts, kept answers, engines, an evaluator, the store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from expert_cache import DRAFT, TARGET, base_hashes
from harness import Store, digest, say
from transformers.utils import logging

from online import rows
from online.learner import Evaluator, trainer_facts
from online.rows import Question, Questions
from online.serving import FROZEN, ROWS, Answer, Serving, answers_of
from paceline.actors.engine.build import build_engine
from paceline.actors.engine.engine import Engine
from paceline.actors.engine.model_loader import load_tokenizer, resolve_dtype
from paceline.actors.engine.settings import TargetSettings
from paceline.actors.router.policy import GENERAL
from paceline.actors.training.deepspeed_setup import forbid_compiling, prepare_environment


def prepare(threads: int) -> None:
    """Make this process ready to serve and train on so many threads."""
    torch.set_num_threads(threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    prepare_environment()
    forbid_compiling()


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured.

    Attributes:
        stream: prompts of a topic's stream.
        test: prompts of its test.
        phase: prompts of a phase of a shift.
        ceiling: prompts of the offline ceiling at most; None takes the whole train side.
        window: requests per window.
        checkpoints: requests after which the served draft is evaluated on the test.
    """

    stream: int = 1_000
    test: int = 200
    phase: int = 500
    ceiling: int | None = None
    window: int = 50
    checkpoints: tuple[int, ...] = (0, 100, 200, 400, 700, 1_000)


# Ten minutes at most. A phase has some ten held-out prompts: an expert with less than four is
# not trained.
QUICK = Sizes(stream=96, test=24, phase=32, ceiling=160, window=16, checkpoints=(0, 48, 96))


class Bench:
    """Prompts, answers, engines and evaluator of units of work, each made once and when needed.

    Args:
        store: of results; answers lie in a folder beside them.
        data: see :func:`online.rows.load`.
        sizes: see Sizes.
        serving: see Serving.
        threads: of torch.
        dtype: of all models; keys name it unless it is float32, that of all published units.
    """

    def __init__(
        self,
        store: Store,
        data: str | None,
        sizes: Sizes,
        serving: Serving,
        *,
        threads: int = 1,
        dtype: str = "auto",
    ) -> None:
        self.store, self.data, self.sizes, self.serving = store, data, sizes, serving
        self.threads, self.dtype = threads, dtype
        computed = resolve_dtype(dtype, torch.device("cpu"))
        self._named = {} if computed is torch.float32 else {"dtype": str(computed)}
        self._questions: dict[str, Questions] = {}

    @cached_property
    def tokenizer(self) -> Any:
        """The target's tokenizer."""
        return load_tokenizer(str(TARGET))

    @cached_property
    def frozen_engine(self) -> Engine:
        """Engine with the general draft, whose initial weights never change."""
        return self.engine([GENERAL])

    @cached_property
    def evaluator(self) -> Evaluator:
        """Evaluator of the general draft's architecture."""
        return Evaluator(DRAFT, dtype=self.dtype)

    def engine(
        self, experts: Sequence[str], *, rows: int = ROWS, dtype: str | None = None, **more: Any
    ) -> Engine:
        """A new engine; every expert starts as the general draft. ``more`` are its settings."""
        settings = {
            "max_num_seqs": rows,
            "num_speculative_tokens": self.serving.num_speculative_tokens,
            "seed": self.serving.seed,
            "dtype": dtype or self.dtype,
            "num_threads": self.threads,
        }
        drafts = dict.fromkeys(experts, str(DRAFT))
        return build_engine(TargetSettings(str(TARGET), drafts=drafts, **(settings | more)))[0]

    def questions(self, topic: str) -> Questions:
        """A topic's whole train side, and its test."""
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
    ) -> list[Answer]:
        """Answers of the target with a frozen draft (or none), from disk or computed now."""
        return answers_of(
            self.store.folder / "answers",
            "-".join([rows.label(self.data), topic, side, *self._named.values()]),
            questions,
            self.serving,
            lambda: self.frozen_engine,
            draft=draft,
        )

    def frozen(self, topic: str, count: int | None = None) -> list[Answer]:
        """The frozen twin of a topic's stream."""
        return self.answers(topic, "train", self.stream(topic, count))

    def test(self, topic: str) -> list[Answer]:
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

    def find_or_run(
        self,
        name: str,
        settings: Mapping[str, Any],
        run: Callable[[], dict[str, Any]] | None,
    ) -> dict[str, Any] | None:
        """A unit from disk, else of ``run`` if there is one."""
        named = name.replace("*", rows.label(self.data)).replace(" ", "-")
        if run is None:
            return self.store.find(named, settings)

        found = self.store.find(named, settings)
        if found is None:
            say(f"{named} ...")
            found = self.store.put(named, settings, run())
        return found
