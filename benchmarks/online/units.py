"""Units of work: streams, rehearsals, synthetic prompts, offline ceilings, shifts of topics.

Each function returns the unit from disk, or runs it; with ``run=False`` None if it is missing.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from expert_cache import DRAFT
from harness import machine, say
from safetensors.torch import save_file
from torch import Tensor

from online.bench import Bench
from online.figures import packed
from online.learner import (
    MAX_LENGTH,
    Evaluator,
    Learner,
    Learning,
    LocalClient,
    Synthetic,
)
from online.rows import Question
from online.serving import Answer, serve
from paceline.actors.engine.request import DRAFT_OFF, FINISH_ERROR, GenerationRequest
from paceline.actors.replay.record import ReplayRecord, encode, is_held_out
from paceline.actors.router.policy import GENERAL
from paceline.actors.speculation.pending_updates import SwapWeights
from paceline.actors.training.batches import make_batch, micro_batches
from paceline.actors.training.distiller import Distiller
from paceline.actors.training.settings import DistillerSettings
from paceline.actors.training.synthetic.generator import Completion, SyntheticPromptGenerator
from paceline.actors.training.synthetic.prompts import SyntheticSettings, turn_marks

ORDER = ("math", "sql", "shell", "code")
KINDS = ("abrupt", "mixed")
ONE, EXPERTS = "one draft", "experts"
SYSTEMS = (ONE, EXPERTS)
# Prompts of an offline draft: the whole train side, or those of the stream.
WHOLE, SAME = "ceiling", "offline"
Unit = dict[str, Any] | None


@contextmanager
def _learner(bench: Bench, *args: Any, **options: Any) -> Iterator[Learner]:
    with tempfile.TemporaryDirectory() as folder:
        yield Learner(Path(folder), *args, dtype=bench.dtype, **options)


def _serve_test(bench: Bench, engine: Any, topic: str) -> list[list[float]]:
    test = bench.questions(topic).test
    return packed(serve(engine, test, [topic] * len(test), bench.serving))


def _checkpoints(
    bench: Bench, topic: str, learner: Learner, answers: Iterable[Answer], count: int
) -> tuple[dict[str, Any], list[Answer]]:
    """Learn from answers as they come; scores on the test by number of answers, and answers."""
    tests, done = [answer.record for answer in bench.test(topic)], []
    found = {"0": bench.evaluator.checkpoint(learner, topic, tests)}
    for answer in answers:
        learner.add(answer.record)
        done.append(answer)
        if len(done) in bench.sizes.checkpoints or len(done) == count:
            scores = bench.evaluator.checkpoint(learner, topic, tests)
            found[str(len(done))] = scores
            say(f"{topic}: {len(done)} requests, acceptance {np.mean(scores['acceptance']):.3f}")
    return found, done


def stream_settings(bench: Bench, topic: str, learning: Learning) -> dict[str, Any]:
    """All that decides a stream."""
    sizes = {"stream": len(bench.stream(topic)), "checkpoints": list(bench.sizes.checkpoints)}
    return bench.settings([topic], {"learning": asdict(learning), **sizes})


def stream(bench: Bench, topic: str, learning: Learning, *, run: bool = True) -> Unit:
    """A topic's stream served by a draft that learns from it alone.

    ``frozen`` and ``online``: counts per request, each of one pass; ``checkpoints``: scores per
    test prompt by requests served; ``test_frozen`` and ``test_online``: counts of the test served
    with the initial and with the last weights; ``learning``: its cost and decisions.
    """

    def make() -> dict[str, Any]:
        questions = bench.stream(topic)
        drafts = [topic] * len(questions)
        # An engine and a pass of its own: seconds of answers from disk do not compare.
        frozen = packed(serve(bench.engine([topic]), questions, drafts, bench.serving))
        engine = bench.engine([topic])
        with _learner(bench, [topic], learning, engine.updates.put) as learner:
            answers = serve(engine, questions, drafts, bench.serving)
            checkpoints, online = _checkpoints(bench, topic, learner, answers, len(questions))
            return {
                "frozen": frozen,
                "online": packed(online),
                "checkpoints": checkpoints,
                "test_frozen": packed(bench.test(topic)),
                "test_online": _serve_test(bench, engine, topic),
                "learning": learner.facts(),
                "machine": machine(),
            }

    settings = stream_settings(bench, topic, learning)
    return bench.find_or_run(f"stream-*-{topic}", settings, make if run else None)


def rehearsal(bench: Bench, topic: str, learning: Learning, *, run: bool = True) -> Unit:
    """Training on the frozen twin's records, in their order: compares seeds without serving.

    No draft changes what the target says, so the records are those of the real stream, but for
    the order in which neighbours end.
    """

    def make() -> dict[str, Any]:
        frozen = bench.frozen(topic)
        with _learner(bench, [topic], learning, lambda _: None) as learner:
            checkpoints, _ = _checkpoints(bench, topic, learner, frozen, len(frozen))
            return {
                "checkpoints": checkpoints,
                "learning": learner.facts(),
                "machine": machine(),
            }

    settings = stream_settings(bench, topic, learning)
    return bench.find_or_run(f"rehearsal-*-{topic}", settings, make if run else None)


def synthetic(
    bench: Bench, topic: str, learning: Learning, amount: Synthetic, *, run: bool = True
) -> Unit:
    """A rehearsal in which the target makes up further prompts before every round of training.

    ``imagined``: the generator's counts, processor ``seconds``, and prompts dropped since they
    are ``in_test``.
    """
    own = amount.of(learning)

    def make() -> dict[str, Any]:
        frozen, engine = bench.frozen(topic), bench.engine([topic])
        source = SyntheticSource(bench, topic, learning=own, amount=amount)
        options = {"synthetic": amount, "generate": source.catch_up}
        with _learner(bench, [topic], own, engine.updates.put, **options) as learner:
            checkpoints, _ = _checkpoints(bench, topic, learner, frozen, len(frozen))
            return {
                "checkpoints": checkpoints,
                "test_online": _serve_test(bench, engine, topic),
                "learning": learner.facts(),
                "imagined": source.facts(),
                "machine": machine(),
            }

    settings = stream_settings(bench, topic, own) | amount.facts()
    settings["imagined_per_record"] = amount.per_record
    return bench.find_or_run(f"imagined-*-{topic}", settings, make if run else None)


class SyntheticSource:
    """Generates synthetic records of a topic on an engine of its own."""

    def __init__(self, bench: Bench, topic: str, learning: Learning, amount: Synthetic) -> None:
        names = map(str, itertools.count())
        settings = SyntheticSettings(
            turn_marks(bench.tokenizer),
            amount.per_record,
            learning.held_out_fraction,
            at_once=amount.at_once,
            seed=learning.seed,
        )
        dtype = bench.dtype if amount.dtype == "auto" else amount.dtype
        self._engine = bench.engine([GENERAL], rows=amount.at_once, dtype=dtype)
        self._excluded = frozenset(q.token_ids for q in bench.questions(topic).test)
        self._most = 2 * amount.at_once  # turns in a row that bring nothing
        self._generator = SyntheticPromptGenerator(settings, mark=lambda: next(names))
        self._seconds, self._in_test = 0.0, 0
        self._client: LocalClient

    def catch_up(self, client: LocalClient) -> None:
        """Generate as much as the shards lack."""
        began, vain, self._client = time.process_time(), 0, client
        while vain < self._most and self._generator.lacks(client):
            vain = 0 if self._generator.run_once(client, self) else vain + 1
        self._seconds += time.process_time() - began

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Answer each request but prompts of the test; records go to the shards."""
        tokens: dict[str, list[int]] = {request.run_id: [] for request in requests}
        reasons: dict[str, str] = {}
        for request in requests:
            if request.prompt_token_ids in self._excluded:
                self._in_test += 1
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

    def facts(self) -> dict[str, Any]:
        """Counts, seconds and prompts of the test."""
        counts = dict(self._generator.counts)
        return counts | {"seconds": self._seconds, "in_test": self._in_test}


@dataclass(frozen=True, slots=True)
class Offline:
    """Training of the ceiling.

    Attributes:
        learning_rates: one after the other, each from the best weights so far.
        micro_batch: records.
        look_every: micro-steps between two evaluations on the held-out answers.
        patience: evaluations without a gain after which a rate ends.
        least_gain: of the held-out acceptance, that counts as one.
        held_out_fraction: of the prompts, kept from training.
        max_steps: micro-steps in all; a run that needs them all has not converged.
        seed: of the order.
    """

    learning_rates: tuple[float, ...] = (1.5e-3, 5e-4, 1.5e-4)
    micro_batch: int = 16
    look_every: int = 100
    patience: int = 3
    least_gain: float = 0.001
    held_out_fraction: float = 0.08
    max_steps: int = 8_000
    seed: int = 0


QUICK_OFFLINE = Offline(learning_rates=(1.5e-3, 4e-4), look_every=50, patience=2, max_steps=150)


class Plateau:
    """Best value so far, and whether ``patience`` values in a row brought no gain."""

    def __init__(self, patience: int, least_gain: float, best: float) -> None:
        self._patience, self._least_gain, self._waited = patience, least_gain, 0
        self.best = best

    def update(self, value: float) -> bool:
        """Whether the value is the best so far, by ``least_gain`` at least."""
        if value > self.best + self._least_gain:
            self.best, self._waited = value, 0
            return True
        self._waited += 1
        return False

    @property
    def over(self) -> bool:
        """Whether ``patience`` values in a row brought no gain."""
        return self._waited >= self._patience


def ceiling(
    bench: Bench, topic: str, offline: Offline, kind: str = WHOLE, *, run: bool = True
) -> Unit:
    """The same draft distilled offline until it gains no more; the weights lie beside the unit.

    ``WHOLE`` learns from the whole train side, ``SAME`` from the stream's prompts. ``test``: scores
    per test prompt; ``test_counts``: counts of the test served; ``looks``: [micro-steps, learning
    rate, held-out acceptance]; ``records``, ``converged``.
    """
    most = bench.sizes.stream if kind == SAME else bench.sizes.ceiling
    settings = bench.settings([topic], {"offline": asdict(offline), "prompts_at_most": most})

    def make() -> dict[str, Any]:
        whole = bench.questions(topic).train[:most]
        first = bench.frozen(topic, min(len(whole), bench.sizes.stream))
        rest = bench.answers(topic, "rest", whole[len(first) :], DRAFT_OFF)
        records = [answer.record for answer in (*first, *rest)]
        state, facts = distil(records, offline, bench.evaluator, bench.dtype)
        name = f"{kind}-{settings['data']}-{topic}"
        weights = bench.store.path(name, settings, ".safetensors")
        save_file({k: v.contiguous() for k, v in state.items()}, weights)
        engine = bench.engine([topic])
        engine.updates.put(SwapWeights(topic, 1, dict(state)))
        tests = [answer.record for answer in bench.test(topic)]
        return {
            "test": bench.evaluator.score(state, tests).facts(),
            "test_counts": _serve_test(bench, engine, topic),
            **facts,
            "machine": machine(),
        }

    return bench.find_or_run(f"{kind}-*-{topic}", settings, make if run else None)


def distil(
    records: Sequence[ReplayRecord], offline: Offline, evaluator: Evaluator, dtype: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights that are best on held-out records, and how they were found."""
    held_out, train = sides_of(records, offline.held_out_fraction)
    rng = np.random.default_rng(offline.seed)

    def evaluate(state: dict[str, Tensor] | None) -> float:
        scores = evaluator.score(state, held_out)  # together less noise than either alone
        return float((scores.acceptance.mean() + scores.overlap.mean()) / 2.0)

    plateau = Plateau(offline.patience, offline.least_gain, evaluate(None))
    best: dict[str, Tensor] | None = None
    looks: list[list[float]] = [[0, 0.0, plateau.best]]
    steps, converged = 0, True
    for rate in offline.learning_rates:
        distiller = Distiller(str(DRAFT), DistillerSettings(learning_rate=rate, dtype=dtype))
        distiller.reset(best)
        plateau = Plateau(offline.patience, offline.least_gain, plateau.best)
        while not plateau.over:
            if steps >= offline.max_steps:
                converged = False
                break
            left = offline.look_every
            while left > 0:
                for batch in micro_batches(train, offline.micro_batch, rng)[:left]:
                    distiller.micro_step(make_batch(batch, MAX_LENGTH))
                    left -= 1
            steps += offline.look_every
            state = distiller.state_dict()
            value = evaluate(state)
            looks.append([steps, rate, round(value, 5)])
            say(f"ceiling: {looks[-1]}")
            if plateau.update(value):
                best = state
    facts = {
        "records": len(records),
        "records_train": len(train),
        "records_held_out": len(held_out),
        "positions_per_epoch": sum(len(r.output_token_ids) for r in train),
        "steps": steps,
        "looks": looks,
        "converged": converged,
    }
    return best or distiller.state_dict(), facts


def sides_of(
    records: Sequence[ReplayRecord], held_out_fraction: float
) -> tuple[list[ReplayRecord], list[ReplayRecord]]:
    """Held-out records and training records."""
    sides: dict[bool, list[ReplayRecord]] = {True: [], False: []}
    for record in records:
        sides[is_held_out(record.prompt_token_ids, held_out_fraction)].append(record)
    return sides[True], sides[False]


def phases_of(bench: Bench, kind: str, order: Sequence[str], seed: int = 0) -> list[list[Question]]:
    """The stream in as many phases as there are topics, the same prompts in either kind.

    ``abrupt``: a phase is one topic. ``mixed``: all phases together are shuffled.
    """
    parts = [list(bench.stream(topic, bench.sizes.phase)) for topic in order]
    if kind == "abrupt":
        return parts
    every = [question for part in parts for question in part]
    shuffled = [every[i] for i in np.random.default_rng(seed).permutation(len(every))]
    ends = np.cumsum([len(part) for part in parts])
    return [shuffled[end - len(part) : end] for end, part in zip(ends, parts, strict=True)]


def shift(
    bench: Bench,
    kind: str,
    system: str,
    learning: Learning,
    order: Sequence[str] = ORDER,
    *,
    rehearsed: bool = False,
    run: bool = True,
) -> Unit:
    """Phases of topics, served by one draft or by experts; after each the tests are evaluated.

    Experts are routed by the prompts' own topics. Both systems are offered the same micro-steps in
    all, and neither rests. ``phases``: counts per request and its topic, unless ``rehearsed`` (from
    the frozen twins' records); ``scores``: per phase (0 is before the first) and topic, acceptance
    per test prompt; ``learning``: cost and decisions.
    """
    own = learning.tireless()
    more = {"learning": asdict(own), "phase": bench.sizes.phase, "kind": kind, "system": system}
    experts = [GENERAL] if system == ONE else list(order)

    def draft_of(topic: str) -> str:
        return GENERAL if system == ONE else topic

    def scores_of(learner: Learner) -> dict[str, list[float]]:
        found = {}
        for topic in order:
            _, state = learner.served(draft_of(topic))
            tests = [answer.record for answer in bench.test(topic)]
            found[topic] = bench.evaluator.score(state, tests).facts()["acceptance"]
        say(f"{kind}, {system}: " + ", ".join(f"{t} {np.mean(v):.3f}" for t, v in found.items()))
        return found

    def make() -> dict[str, Any]:
        engine = None if rehearsed else bench.engine(experts)
        put: Callable[[SwapWeights], None] = lambda _: None  # noqa: E731
        with _learner(bench, experts, own, engine.updates.put if engine else put) as learner:
            scores, phases = [scores_of(learner)], []
            for number, questions in enumerate(phases_of(bench, kind, order)):
                drafts = [draft_of(question.topic) for question in questions]
                answers: Iterable[Answer]
                if engine is None:
                    kept = {a.key: a for t in order for a in bench.frozen(t, bench.sizes.phase)}
                    answers = (
                        replace(kept[q.key], record=replace(kept[q.key].record, topic=draft))
                        for q, draft in zip(questions, drafts, strict=True)
                    )
                else:
                    first = number * bench.sizes.phase
                    answers = serve(
                        engine, questions, drafts, bench.serving, topics=drafts, first=first
                    )
                done = []
                for answer in answers:
                    learner.add(answer.record)
                    done.append(answer)
                topics = [question.topic for question in questions]
                phases.append({"topics": topics, "counts": packed(done)})
                scores.append(scores_of(learner))
            found = {
                "order": list(order),
                "scores": scores,
                "learning": learner.facts(),
                "machine": machine(),
            }
            return found if rehearsed else found | {"phases": phases}

    name = f"shift-{'rehearsal-' if rehearsed else ''}*-{kind}-{system}"
    return bench.find_or_run(name, bench.settings(order, more), make if run else None)
