"""A topic's stream with a target that makes up further prompts while nobody asks for anything.

What the stream brings is the frozen twin's records, as in a rehearsal: no draft changes what the
target says. Before every round of training the target catches up with what it may imagine.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

import machine

from online import rows
from online.bench import Bench, counts_of, packed
from online.judging import look
from online.learning import Imagining, Learning
from online.serving import serve
from online.streams import stream_settings
from online.world import Learner, LocalClient
from paceline.actors.engine.engine import Engine
from paceline.actors.engine.request import FINISH_ERROR, GenerationRequest
from paceline.actors.replay.record import encode
from paceline.actors.training.synthetic.generator import Completion, SyntheticPromptGenerator
from paceline.actors.training.synthetic.prompts import SyntheticSettings, turn_marks


class EngineVoice:
    """An engine that nobody else uses; its records go to the world's shards."""

    def __init__(self, engine: Engine, client: LocalClient, never: Set[tuple[int, ...]]) -> None:
        """Take an idle engine, and the prompts of the test, which it must not answer."""
        self._engine, self._client, self._never = engine, client, never
        self.in_test = 0

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Answer each request."""
        tokens: dict[str, list[int]] = {request.run_id: [] for request in requests}
        reasons: dict[str, str] = {}
        for request in requests:
            if request.prompt_token_ids in self._never:
                self.in_test += 1
                reasons[request.run_id] = FINISH_ERROR
            else:
                self._engine.add(request)
        while self._engine.has_work:
            for output in self._engine.step():
                tokens[output.request_id] += output.chunk.token_ids
                if output.chunk.finish_reason is not None:
                    reasons[output.request_id] = output.chunk.finish_reason
                if output.record is not None:
                    self._client.shards[output.record.topic].insert(encode(output.record))
        return [Completion(tuple(tokens[r.run_id]), reasons[r.run_id]) for r in requests]


class Muse:
    """Imagines as much as is wanted each time that it is called, and counts its seconds."""

    def __init__(self, bench: Bench, topic: str, learning: Learning, amount: Imagining) -> None:
        """Nothing is imagined yet.

        Args:
            bench: gives engine, tokenizer and the test.
            topic: whose test's prompts are left out.
            learning: see Learning.
            amount: see Imagining.
        """
        names = map(str, itertools.count())
        settings = SyntheticSettings(
            turn_marks(bench.tokenizer),
            amount.per_record,
            learning.held_out_fraction,
            at_once=amount.at_once,
            seed=learning.seed,
        )
        self._engine = bench.engine(rows=amount.at_once, dtype=amount.dtype)
        self._never = frozenset(q.token_ids for q in bench.questions(topic).test)
        self.in_test = 0
        self._most = 2 * amount.at_once  # turns in a row that bring nothing
        self.generator = SyntheticPromptGenerator(settings, mark=lambda: next(names))
        self.amount = amount
        self.seconds = 0.0

    def __call__(self, client: LocalClient) -> None:
        """Catch up."""
        began, vain = time.process_time(), 0
        target = EngineVoice(self._engine, client, self._never)
        while vain < self._most and self.generator.lacks(client):
            vain = 0 if self.generator.run_once(client, target) else vain + 1
        self.seconds += time.process_time() - began
        self.in_test += target.in_test


def imagined_settings(
    bench: Bench, topic: str, learning: Learning, imagining: Imagining
) -> dict[str, Any]:
    """All that decides :func:`run_imagined`."""
    settings = stream_settings(bench, topic, imagining.of(learning)) | imagining.facts()
    return settings | {"imagined_per_record": imagining.per_record}


def find(
    bench: Bench, topic: str, learning: Learning, imagining: Imagining
) -> dict[str, Any] | None:
    """The result on disk, None where there is none."""
    settings = imagined_settings(bench, topic, learning, imagining)
    return bench.store.find(f"imagined-{rows.label(bench.data)}-{topic}", settings)


def imagined_unit(bench: Bench, topic: str, learning: Learning, imagining: Imagining) -> Any:
    """The result on disk, or made now."""
    settings = imagined_settings(bench, topic, learning, imagining)
    name = f"imagined-{rows.label(bench.data)}-{topic}"
    return bench.store.unit(name, settings, lambda: run_imagined(bench, topic, learning, imagining))


def run_imagined(
    bench: Bench, topic: str, learning: Learning, imagining: Imagining
) -> dict[str, Any]:
    """Learn from a stream that has been served, and from what the target made up beside it.

    Returns:
        ``checkpoints`` and ``learning`` as ``streams.run_stream``; ``test_online``: counts of the
        test served with the last weights; ``imagined``: the generator's counts, ``seconds``, and
        prompts that were dropped because they are ``in_test``.
    """
    learning = imagining.of(learning)
    tests = [served.record for served in bench.test(topic)]
    frozen = bench.frozen(topic)
    engine, muse = bench.engine([topic]), Muse(bench, topic, learning, imagining)
    with tempfile.TemporaryDirectory() as folder:
        learner = Learner(
            Path(folder), [topic], learning, engine.updates.put, muse=muse, dtype=bench.dtype
        )
        checkpoints = {"0": look(bench.judge, learner, topic, tests)}
        for done, served in enumerate(frozen, start=1):
            learner.take(served.record)
            if done in bench.sizes.checkpoints or done == len(frozen):
                checkpoints[str(done)] = found = look(bench.judge, learner, topic, tests)
                mean = sum(found["acceptance"]) / len(tests)
                made = muse.generator.counts["made"]
                bench.say(f"{topic}, {made} imagined: {done} requests, test acceptance {mean:.3f}")
        test = bench.questions(topic).test
        after = list(serve(engine, test, [topic] * len(test), bench.serving))
        return {
            "checkpoints": checkpoints,
            "test_online": packed(counts_of(after)),
            "learning": learner.facts(),
            "imagined": dict(muse.generator.counts)
            | {"seconds": muse.seconds, "in_test": muse.in_test},
            "machine": machine.facts(),
        }
