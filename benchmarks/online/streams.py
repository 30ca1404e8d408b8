"""A topic's stream: one draft learns while it serves, and is judged along the way."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import machine

from online import rows
from online.bench import Bench, counts_of, packed
from online.judging import look
from online.learning import Learning
from online.serving import Served, serve
from online.world import Learner


def stream_settings(bench: Bench, topic: str, learning: Learning) -> dict[str, Any]:
    """All that decides :func:`run_stream`."""
    sizes = {"stream": len(bench.stream(topic)), "checkpoints": list(bench.sizes.checkpoints)}
    return bench.settings([topic], {"learning": asdict(learning), **sizes})


def stream_unit(bench: Bench, topic: str, learning: Learning) -> dict[str, Any]:
    """The result on disk, or made now."""
    name = f"stream-{rows.label(bench.data)}-{topic}"
    settings = stream_settings(bench, topic, learning)
    return bench.store.unit(name, settings, lambda: run_stream(bench, topic, learning))


def run_stream(bench: Bench, topic: str, learning: Learning) -> dict[str, Any]:
    """Serve a topic's stream with a draft that learns from it alone.

    Returns:
        ``frozen`` and ``online``: counts per request, each of one pass; ``checkpoints``: scores
        per test prompt by requests served; ``test_frozen`` and ``test_online``: counts of the
        test served with the initial and with the last weights; ``learning``: its cost and
        decisions.
    """
    tests = [served.record for served in bench.test(topic)]
    questions = bench.stream(topic)
    drafts = [topic] * len(questions)
    # an engine and a pass of its own: seconds of answers from disk are those of other batches
    frozen = list(serve(bench.engine([topic]), questions, drafts, bench.serving))
    engine = bench.engine([topic])
    with tempfile.TemporaryDirectory() as folder:
        learner = Learner(Path(folder), [topic], learning, engine.updates.put, dtype=bench.dtype)
        online: list[Served] = []
        checkpoints = {"0": look(bench.judge, learner, topic, tests)}
        for served in serve(engine, questions, drafts, bench.serving):
            learner.take(served.record)
            online.append(served)
            done = len(online)
            if done in bench.sizes.checkpoints or done == len(questions):
                checkpoints[str(done)] = found = look(bench.judge, learner, topic, tests)
                bench.say(f"{topic}: {done} requests, {_brief(found)}")
        test = bench.questions(topic).test
        after = list(serve(engine, test, [topic] * len(test), bench.serving))
        return {
            "frozen": packed(counts_of(frozen)),
            "online": packed(counts_of(online)),
            "checkpoints": checkpoints,
            "test_frozen": packed(counts_of(bench.test(topic))),
            "test_online": packed(counts_of(after)),
            "learning": learner.facts(),
            "machine": machine.facts(),
        }


def rehearsal_unit(bench: Bench, topic: str, learning: Learning) -> dict[str, Any]:
    """The result on disk, or made now."""
    name = f"rehearsal-{rows.label(bench.data)}-{topic}"
    settings = stream_settings(bench, topic, learning)
    return bench.store.unit(name, settings, lambda: rehearse(bench, topic, learning))


def rehearse(bench: Bench, topic: str, learning: Learning) -> dict[str, Any]:
    """Learn from a stream that has been served: the frozen twin's records, in their order.

    No draft changes what the target says, so the lessons are those of the real stream, but for
    the order in which neighbours end. It costs no serving: seeds and settings are compared so.

    Returns:
        ``checkpoints`` and ``learning`` as :func:`run_stream`.
    """
    tests = [served.record for served in bench.test(topic)]
    with tempfile.TemporaryDirectory() as folder:
        learner = Learner(Path(folder), [topic], learning, lambda *_: None, dtype=bench.dtype)
        checkpoints = {"0": look(bench.judge, learner, topic, tests)}
        frozen = bench.frozen(topic)
        for done, served in enumerate(frozen, start=1):
            learner.take(served.record)
            if done in bench.sizes.checkpoints or done == len(frozen):
                checkpoints[str(done)] = found = look(bench.judge, learner, topic, tests)
                bench.say(f"{topic}, rehearsed: {done} requests, {_brief(found)}")
        facts = learner.facts()
    return {"checkpoints": checkpoints, "learning": facts, "machine": machine.facts()}


def _brief(found: dict[str, Any]) -> str:
    means = [sum(found[name]) / len(found[name]) for name in ("acceptance", "overlap")]
    return f"test acceptance {means[0]:.3f}, overlap {means[1]:.3f}"
