"""Experts behind a router against one draft of the same size and the same training steps.

    make bench-routes ARGS="--quick"
    make bench-routes ARGS="--data ../shared/data"

Both learn online from one mixed stream of all topics, from the same initial draft, under the same
gate, with as many micro-steps in all: one draft has every step, five experts (``general`` among
them) share them as the trainer's own schedule says. Then every draft is run over the target's
answers to prompts that neither has seen, which for greedy answers tells exactly what speculation
with it would have done; so one training run judges every policy of choosing a draft. Acceptance
along the stream is that of the weights served at the time, before they learn from the answer.

The embedded target knows four kinds of English text. What it says to other prompts is seldom
sense; acceptance there tells how a draft follows it, and nothing of the text.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import machine
import torch
from expert_cache import DRAFT
from transformers.utils import logging

from online import bench as harness
from online.bench import Bench
from online.fragments import command_of
from online.judging import MAX_LENGTH, Judge
from online.learning import Learning, tireless
from online.policies import Tally, replayed
from online.route_prompts import Asked, Counts, RoutePrompts
from online.routes_figures import EXPERTS, FROZEN, SINGLE
from online.routes_report import report
from online.serving import Served, Serving
from online.store import Store
from online.world import Learner
from paceline.actors.replay.record import ReplayRecord
from paceline.actors.replay.selection import is_scored
from paceline.actors.router.policy import GENERAL, choose_topic
from paceline.actors.training.batches import make_batch
from paceline.actors.training.deepspeed_setup import forbid_compiling, prepare_environment
from paceline.actors.training.distiller import load_state, logits_at
from paceline.deploy.config.config import PacelineConfig
from paceline.deploy.config.preflight import router_confidence
from paceline.deploy.config.sections import RouterConfig
from paceline.deploy.demo.prompts import TOPICS

ROUTER = RouterConfig()
# Above it the stream's records are their likeliest topic's. It is part of the results' names, and
# next to nothing to what the report says of the served rule: 1 of 1,600 prompts is less sure.
STREAM_CONFIDENCE = 0.5
_BATCH = 16


class Replayer(Judge):
    """Tells position by position whether a draft agrees with recorded greedy answers."""

    @torch.inference_mode()
    def tallies(
        self, state: dict[str, Any] | None, records: Sequence[ReplayRecord], serving: Serving
    ) -> list[Tally]:
        """One per record, under these weights (None: the initial ones)."""
        load_state(self._draft, self._initial if state is None else state)
        found: list[Tally] = []
        for start in range(0, len(records), _BATCH):
            batch = make_batch(records[start : start + _BATCH], MAX_LENGTH)
            agrees = (logits_at(self._draft, batch).argmax(-1) == batch.output_ids).tolist()
            rows = batch.rows.tolist()
            own: list[list[bool]] = [[] for _ in range(batch.num_records)]
            for row, agree in zip(rows, agrees, strict=True):
                own[row].append(agree)
            k = serving.num_speculative_tokens
            found += [replayed(positions, k, serving.max_tokens) for positions in own]
        return found


class Arm:
    """One way to spend the training steps: a draft for all, or experts."""

    def __init__(
        self, name: str, prompts: RoutePrompts, replayer: Replayer, learning: Learning
    ) -> None:
        """Take what is shared.

        Args:
            name: ``SINGLE`` or ``EXPERTS``.
            prompts: see RoutePrompts.
            replayer: see Replayer.
            learning: as the other arm's; its seed orders the stream too.
        """
        self.drafts = (GENERAL,) if name == SINGLE else (GENERAL, *TOPICS)
        self._beside = (FROZEN,) if name == SINGLE else ()
        self._prompts, self._replayer, self._learning = prompts, replayer, learning
        self._serving = prompts.bench.serving

    def run(self) -> dict[str, Any]:
        """Learn from the stream, then judge every draft on every group."""
        stream = self._prompts.stream(self._learning.seed)
        with tempfile.TemporaryDirectory() as folder:
            # nobody serves with them: they are judged on recorded answers
            learner = Learner(Path(folder), self.drafts, self._learning, lambda *_: None)
            along = self._learn(learner, stream)
            groups = {
                name: self._judged(learner, make()) for name, make in self._prompts.groups().items()
            }
            sampled = self._judged(learner, sample(stream, self._learning.held_out_fraction))
            return {
                "along": along,
                "groups": groups,
                "sampled": sampled,
                "learning": learner.facts(),
                "machine": machine.facts(),
            }

    def _learn(self, learner: Learner, stream: Asked) -> list[dict[str, Any]]:
        """Take the stream; the requests before each round under the weights that they found."""
        every, along = self._learning.requests_per_round, []
        for at in range(0, len(stream.served), every):
            part = Asked(
                stream.served[at : at + every],
                stream.labels[at : at + every],
                stream.probabilities[at : at + every],
            )
            along.append(self._judged(learner, part))
            for served, thoughts in zip(part.served, part.probabilities, strict=True):
                topic = choose_topic(thoughts, self.drafts, STREAM_CONFIDENCE)
                learner.take(replace(served.record, topic=topic))
            if (at // every) % 8 == 7:
                self._prompts.bench.say(f"{at + every} of {len(stream.served)} learnt from")
        return along

    def _judged(self, learner: Learner, asked: Asked) -> dict[str, Any]:
        """As JSON holds it: per prompt key, label, thoughts, and per draft its tally."""
        records = [served.record for served in asked.served]
        tallies = {
            draft: self._replayer.tallies(self._weights(learner, draft), records, self._serving)
            for draft in (*self.drafts, *self._beside)
        }
        return {
            "keys": [served.key for served in asked.served],
            "labels": list(asked.labels),
            "probabilities": [
                {topic: round(p, 4) for topic, p in own.items()} for own in asked.probabilities
            ],
            "tallies": {
                draft: [[t.rounds, t.drafted, t.accepted, round(t.gain, 5)] for t in own]
                for draft, own in tallies.items()
            },
        }

    def _weights(self, learner: Learner, draft: str) -> dict[str, Any] | None:
        return None if draft == FROZEN else learner.served(draft)[1]


def sample(stream: Asked, held_out_fraction: float) -> Asked:
    """The requests of the stream that the scorer would have been sent: none that was learnt."""
    share = ROUTER.sample_share
    kept = [
        i
        for i, served in enumerate(stream.served)
        if is_scored(served.record, share, held_out_fraction)
    ]
    return Asked(
        [stream.served[i] for i in kept],
        [stream.labels[i] for i in kept],
        [stream.probabilities[i] for i in kept],
    )


def check(prompts: RoutePrompts, replayer: Replayer) -> dict[str, Any]:
    """Replayed figures of the initial draft beside those of the engine, on the topics' tests."""
    served: list[Served] = [s for topic in TOPICS for s in prompts.bench.test(topic)]
    tallies = replayer.tallies(None, [s.record for s in served], prompts.bench.serving)
    return {
        "prompts": len(served),
        "engine": {
            n: sum(getattr(s, n) for s in served) for n in ("rounds", "drafted", "accepted")
        },
        "replayed": {
            n: sum(getattr(t, n) for t in tallies) for n in ("rounds", "drafted", "accepted")
        },
    }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    learning = Learning()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed, short stream, few prompts")
    parser.add_argument("--data", help="folder of rows; default: generated prompts, topics alone")
    parser.add_argument("--seeds", type=int, nargs="+", default=None)
    parser.add_argument("--micro-steps", type=int, default=None, help="of a round")
    parser.add_argument("--learning-rate", type=float, default=learning.learning_rate)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--out", type=Path, default=Path("out/bench"), help="results go to online/ in it"
    )
    parser.add_argument(
        "--published", type=Path, help="folder of units to go on from, and to add to"
    )
    options = parser.parse_args(argv)
    options.seeds = options.seeds or ([0] if options.quick else [0, 1, 2])
    options.micro_steps = options.micro_steps or (24 if options.quick else learning.micro_steps)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the arms that are missing; write table and plot from all."""
    options, began = parse(argv), time.monotonic()
    torch.set_num_threads(options.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    prepare_environment()
    forbid_compiling()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:7.0f} s  {text}", file=sys.stderr, flush=True)  # noqa: T201

    counts = Counts(64, 24, 16, 6) if options.quick else Counts(400, 100, 100, 40)
    sizes = replace(
        harness.QUICK if options.quick else harness.Sizes(), stream=counts.stream, test=counts.test
    )
    serving = Serving()
    bench = Bench(
        Store(options.out / "online"),
        options.data,
        sizes,
        serving,
        threads=options.threads,
        say=say,
    )
    prompts, replayer = RoutePrompts(bench, counts), Replayer(DRAFT)
    store = Store(options.out / "online" / "routes", options.published)
    recipe = tireless(
        Learning(micro_steps=options.micro_steps, learning_rate=options.learning_rate)
    )
    facts = {"counts": prompts.facts(), "router": router_facts(), "recipe": asdict(recipe)}
    common = bench.settings(TOPICS, facts)
    store.unit("routes-check", common, lambda: check(prompts, replayer))
    for seed in options.seeds:
        learning = replace(recipe, seed=seed)
        for name in (SINGLE, EXPERTS):
            say(f"{name}, seed {seed}")
            arm = Arm(name, prompts, replayer, learning)
            settings = common | {"arm": name, "learning": asdict(learning)}
            store.unit(f"routes-arm-{name.replace(' ', '-')}-{seed}", settings, arm.run)
    rule = router_confidence(PacelineConfig())
    report(store, common, rule, options.out / "online", command_of("bench-routes", argv))
    return 0


def router_facts() -> dict[str, Any]:
    """What of the router's settings decides a result."""
    return {"min_confidence": STREAM_CONFIDENCE, "sample_share": ROUTER.sample_share}


if __name__ == "__main__":
    sys.exit(main())
