"""Whole rounds with real shards, registry, DeepSpeed and a tiny draft, in one process."""

from __future__ import annotations

import dataclasses
import gc
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from local_client import LocalClient, Ticks, fill, filled, make_loop, trainer_settings
from replay_samples import with_branches
from tiny_models import tiny_llama
from training_records import TINY_VOCAB, learn, training_record

from paceline.actors.replay.buffer import ReplaySettings
from paceline.actors.replay.record import ReplayRecord, encode, is_synthetic, synthetic_id
from paceline.actors.replay.shard import ReplayShard
from paceline.actors.training.gate import GateSettings
from paceline.actors.training.permits import Assignment, TopicProgress
from paceline.actors.training.progress import LeaseRevoked, Stopped
from paceline.actors.training.round_counts import RoundCounts
from paceline.actors.training.settings import DistillerSettings, Loss, ObjectiveSettings
from paceline.actors.training.shares import Share
from paceline.actors.training.topic_schedule import ScheduleSettings
from paceline.actors.training.training_loop import TrainingLoop
from paceline.actors.training.worker_group import WorkerGroupError
from paceline.actors.weights.canary import CanarySettings
from paceline.actors.weights.draft_outcomes import DraftOutcome
from paceline.actors.weights.flat_weights import FlatWeights, flatten, unflatten
from paceline.actors.weights.versions import TopicStatus

NUMBERS = itertools.count()
pytestmark = pytest.mark.usefixtures("deepspeed")


def test_learns_and_publishes_what_is_better(draft: Path, tmp_path: Path) -> None:
    client = filled(tmp_path)
    loop = make_loop(trainer_settings(draft), client)
    for _ in range(3):
        assert loop.run_round()
    assert client.registry is not None
    history = client.registry.history("sql")
    assert history[0]["outcome"] == "published"
    assert history[-1]["candidate_expected_acceptance"] > 0.8
    assert history[0]["served_expected_acceptance"] < 0.3
    version, flat = client.weights("sql") or (0, None)
    assert version == client.registry.stable_versions()["sql"] >= 1
    assert flat is not None
    assert {t.dtype for t in unflatten(flat).values()} == {torch.bfloat16}
    assert loop.progress.published + loop.progress.rejected == loop.progress.rounds


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.full)])
def test_the_loss_falls_in_either_dtype(draft: Path, tmp_path: Path, dtype: str) -> None:
    distiller = DistillerSettings(learning_rate=5e-3, dtype=dtype)
    loop = make_loop(trainer_settings(draft, distiller=distiller), filled(tmp_path))
    candidate = loop.candidate("sql")
    batch = [training_record(n) for n in range(16)]
    losses = [learn(candidate, batch).loss for _ in range(80)]
    assert losses[-1] < 0.4 * losses[0]
    assert candidate.steps == 80


def test_a_restarted_trainer_goes_on_from_the_published_weights(
    draft: Path, tmp_path: Path
) -> None:
    client = filled(tmp_path)
    make_loop(trainer_settings(draft), client).run_round()
    assert client.registry is not None
    published = client.registry.history("sql")[-1]
    again = make_loop(trainer_settings(draft, round_seconds=0.05), client)
    again.run_round()
    assert again.candidate("sql").version >= published["version"] == 1
    served = client.registry.history("sql")[-1]["served_expected_acceptance"]
    # the held-out sample is the same, so the served draft scores what the gate saw
    assert served == pytest.approx(published["candidate_expected_acceptance"], abs=0.02)


def test_what_is_not_better_is_rejected_learns_on_then_rests(draft: Path, tmp_path: Path) -> None:
    client = filled(tmp_path)
    no_learning = DistillerSettings(learning_rate=0.0, dtype="float32")
    schedule = ScheduleSettings(min_train=4, min_held_out=3, min_new=1, max_rejections=2)
    loop = make_loop(
        trainer_settings(draft, distiller=no_learning, schedule=schedule, round_seconds=0.05),
        client,
    )
    assert loop.run_round()
    assert not loop.run_round() or loop.progress.rejected == 2  # general may have its turn
    client.shards["sql"].insert(encode(training_record(1_000)))
    while loop.run_round():
        pass
    assert client.registry is not None
    assert set(client.registry.stable_versions().values()) == {0}
    assert {d["outcome"] for d in client.registry.history()} == {"rejected"}
    assert loop._topics.state("sql").counts.rejections == 2
    assert loop.candidate("sql").steps > 0  # what it has learnt is kept


def test_what_is_shown_to_be_worse_starts_again(draft: Path, tmp_path: Path) -> None:
    client = filled(tmp_path)
    distiller = DistillerSettings(learning_rate=5e-3, dtype="float32", average_decay=0.0)
    loop = make_loop(
        trainer_settings(draft, ("sql",), distiller=distiller, round_seconds=0.2), client
    )
    while client.registry is None or not client.registry.stable_versions()["sql"]:
        assert loop.run_round()
    draft_in_training = loop.candidate("sql")._distiller._engine.module.draft
    for weight in draft_in_training.parameters():
        weight.data.normal_(0.0, 0.5)
    for number in range(8):
        client.shards["sql"].insert(encode(training_record(2_000 + number)))
    version = client.registry.stable_versions()["sql"]
    assert loop.run_round()
    assert client.registry.stable_versions()["sql"] == version
    last = client.registry.history("sql")[-1]
    assert last["outcome"] == "rejected"
    assert last["gain_upper_bound"] < 0
    assert last["rate_share"] == 1.0
    candidate = loop.candidate("sql")
    assert candidate.steps == 0
    assert candidate.rate_share == pytest.approx(1 / 3)  # with shorter steps
    for _ in range(2 * distiller.warmup_steps):
        learn(candidate, [training_record(n) for n in range(4)])
    groups = candidate._distiller._engine.basic_optimizer.param_groups
    assert [group["lr"] for group in groups] == pytest.approx([5e-3 / 3] * 2)


def test_a_rate_that_throws_a_good_draft_back_is_lowered_until_it_does_not(
    draft: Path, tmp_path: Path
) -> None:
    """Another trainer goes on from a draft that knows its topic, at sixty times the rate."""
    client = filled(tmp_path)
    distiller = DistillerSettings(learning_rate=5e-3, dtype="float32", average_decay=0.0)
    gentle = trainer_settings(draft, ("sql",), distiller=distiller)
    good = make_loop(gentle, client)
    while good.progress.micro_steps < 200 and good.run_round():
        pass
    assert client.registry is not None
    known = len(client.registry.history("sql"))
    violent = dataclasses.replace(
        gentle, distiller=dataclasses.replace(distiller, learning_rate=0.3), round_seconds=0.1
    )
    loop = make_loop(violent, client)
    for number in range(10):
        for record in range(40):
            client.shards["sql"].insert(encode(training_record(3_000 + 40 * number + record)))
        loop.run_round()
    history = client.registry.history("sql")[known:]
    history = [d for d in history if "served_expected_acceptance" in d]  # of numbers
    shares = [d["rate_share"] for d in history]
    lost = [d["served_expected_acceptance"] - d["candidate_expected_acceptance"] for d in history]
    assert shares[0] == 1.0
    assert lost[0] > 0.2
    assert min(shares) < 0.2
    assert np.mean(lost[3:]) < 0.05  # a publication raises the rate again


@pytest.mark.full
def test_a_candidate_that_has_outgrown_its_first_records_starts_over(
    draft: Path, tmp_path: Path
) -> None:
    client = filled(tmp_path)
    assert client.registry is not None
    still = DistillerSettings(learning_rate=1e-7, dtype="float32")  # no round brings anything
    schedule = ScheduleSettings(min_train=4, min_held_out=3, min_new=1, max_rejections=1_000)
    loop = make_loop(
        trainer_settings(draft, ("sql",), distiller=still, schedule=schedule, round_seconds=0.05),
        client,
    )
    candidate = loop.candidate("sql")
    served = {
        name: weight + 0.01
        for name, weight in candidate.compare([training_record(1)], lambda: None).state.items()
    }
    client.registry.publish("sql", flatten(served), {})
    candidate.scale_rate(0.25)
    begun = client.stats()["sql"].records("train")
    steps, fruitless = [], []
    while client.stats()["sql"].records("train") < 5 * begun:
        for _ in range(8):
            client.shards["sql"].insert(encode(training_record(4_000 + next(NUMBERS))))
        assert loop.run_round()
        steps.append(candidate.steps)
        fruitless.append(loop._topics.state("sql").counts.fruitless)
    over = [n for n, (a, b) in enumerate(pairwise(steps), start=1) if b <= a]
    assert len(over) == 1
    assert over[0] > 0.7 * len(steps)
    assert fruitless[over[0]] <= 1  # earlier rounds do not count
    assert loop._topics.state("sql").counts.rejections == len(
        steps
    )  # but the gate has looked as often
    assert candidate.rate_share == 0.5
    now = candidate.compare([training_record(1)], lambda: None).state
    assert all((now[n] - w).abs().max() < 0.005 for n, w in served.items())  # from the served ones
    assert loop.progress.published == 0


@pytest.mark.parametrize(
    ("least_hope", "rolled_back", "before", "then"),
    [(-1.0, 0, 2, 0), (-1.0, 1, 2, 1), (-1.0, 3, 1, 1), (1.0, 0, 2, 3)],
)
def test_a_round_that_leaves_hope_ends_a_plateau(
    draft: Path, tmp_path: Path, least_hope: float, rolled_back: int, before: int, then: int
) -> None:
    client = filled(tmp_path)
    still = DistillerSettings(learning_rate=0.0, dtype="float32")
    schedule = ScheduleSettings(min_train=4, min_held_out=3, min_new=1, least_hope=least_hope)
    loop = make_loop(
        trainer_settings(draft, ("sql",), distiller=still, schedule=schedule, round_seconds=0.05),
        client,
    )
    assert loop.run_round()
    state = loop._topics.state("sql")
    state.counts = dataclasses.replace(state.counts, fruitless=before, rolled_back=rolled_back)
    client.shards["sql"].insert(encode(training_record(5_000)))
    assert loop.run_round()
    assert state.counts.rejections == 2
    assert state.counts.fruitless == then  # those in a row; rollbacks are not forgotten by it
    assert client.registry is not None
    plateaus = [d for d in client.registry.history("sql") if d["outcome"] == "plateau"]
    assert len(plateaus) == (then == schedule.max_rejections)
    assert all("3 rounds in a row" in d["reason"] for d in plateaus)


@pytest.mark.full
def test_a_candidate_that_is_ahead_goes_on_however_many_records_there_are(
    draft: Path, tmp_path: Path
) -> None:
    client = filled(tmp_path)
    schedule = ScheduleSettings(min_train=4, min_held_out=3, min_new=1, max_rejections=1_000)
    loop = make_loop(
        trainer_settings(
            draft, ("sql",), gate=GateSettings(min_gain=2.0), schedule=schedule, round_seconds=0.05
        ),
        client,
    )
    begun, steps = client.stats()["sql"].records("train"), [0]
    while client.stats()["sql"].records("train") < 5 * begun:
        for _ in range(16):
            client.shards["sql"].insert(encode(training_record(8_000 + next(NUMBERS))))
        assert loop.run_round()
        steps.append(loop.candidate("sql").steps)
    assert all(b > a for a, b in pairwise(steps[3:]))  # it is ahead after a few rounds
    assert loop.progress.published == 0


def test_general_does_not_start_over_because_shards_had_been_silent(
    draft: Path, tmp_path: Path
) -> None:
    client = filled(tmp_path)
    still = DistillerSettings(learning_rate=1e-7, dtype="float32")
    schedule = ScheduleSettings(min_train=4, min_held_out=3, min_new=0, max_rejections=1_000)
    for number in range(40):
        client.shards["general"].insert(encode(training_record(5_000 + number)))
    loop = make_loop(
        trainer_settings(draft, ("general", "sql"), distiller=still, schedule=schedule), client
    )
    general = loop.candidate("general")
    every, begun = client.stats(), []
    general.begin_round = lambda records, **_: begun.append(records)  # type: ignore
    silent = {"general": every["general"]}
    turn = Assignment("general")
    for stats in (silent, every):
        loop._round("general", turn, {"general": 0, "sql": 0}, stats)
    assert begun == [sum(shard.records("train") for shard in every.values())]


@pytest.mark.parametrize(
    ("loss", "sampling"),
    [
        pytest.param(loss, sampling, marks=() if loss == "lk_hybrid" else pytest.mark.full)
        for loss in get_args(Loss)
        for sampling in ("target", "mixed")
    ],
)
def test_every_objective_teaches(draft: Path, tmp_path: Path, loss: Loss, sampling: str) -> None:
    goal = ObjectiveSettings(
        loss,
        weighting="first_rejection",
        sampling=sampling,  # type: ignore[arg-type]
    )
    distiller = DistillerSettings(learning_rate=5e-3, dtype="float32", objective=goal)
    loop = make_loop(trainer_settings(draft, distiller=distiller), filled(tmp_path))
    candidate = loop.candidate("sql")
    batch = [rejecting(training_record(n)) for n in range(16)]
    first = learn(candidate, batch)
    accepted = [learn(candidate, batch).expected_acceptance for _ in range(60)]
    assert accepted[-1] > first.expected_acceptance + 0.4
    assert len(first.record_losses) == 16


def rejecting(record: ReplayRecord) -> ReplayRecord:
    """A record with two rejected draft tokens, behind which the shift goes on."""
    wrong = (record.output_token_ids[[2, 7]] + 9) % TINY_VOCAB
    changed = with_branches(record, [(2, wrong[:1].tolist()), (7, wrong[1:].tolist())])
    follow = (wrong[:, None] + 1 + np.arange(record.target_top_ids.shape[1])) % TINY_VOCAB
    return dataclasses.replace(
        changed,
        branch_top_ids=follow.astype(np.int32),
        branch_top_logprobs=record.target_top_logprobs[:2],
        branch_tail_mass=record.target_tail_mass[:2],
    )


def test_a_shard_gets_the_losses_on_its_own_records(draft: Path, tmp_path: Path) -> None:
    client = filled(tmp_path)
    sent: dict[str, dict[str, float]] = {}
    hand_on = client.update_losses

    def update_losses(topic: str, losses: dict[str, float]) -> None:
        sent[topic] = losses
        hand_on(topic, losses)

    client.update_losses = update_losses  # type: ignore[method-assign]
    quiet = make_loop(trainer_settings(draft, round_seconds=0.05), client)
    assert quiet.run_round()
    assert not sent
    loop = make_loop(trainer_settings(draft, report_losses=True), client)
    assert loop.run_round()
    assert set(sent) == {"sql"}
    assert len(sent["sql"]) > 20
    assert all(loss >= 0.0 for loss in sent["sql"].values())
    noted = dict(client.shards["sql"]._buffer._tables["train"]._losses)
    assert noted == sent["sql"]
    sent.clear()
    # what `general` makes of the topic's records says nothing of the topic's expert
    loop = make_loop(trainer_settings(draft, ("general",), report_losses=True), client)
    assert loop.run_round()
    assert loop.progress.micro_steps > 0
    assert not sent


def test_no_micro_step_without_a_permit(draft: Path, tmp_path: Path) -> None:
    client = filled(tmp_path)
    asked: list[int] = []
    stop = False

    def permit() -> bool:
        nonlocal stop
        asked.append(1)
        stop = len(asked) >= 5
        return False

    client.permitted = permit
    loop = make_loop(
        trainer_settings(draft), client, sleep=lambda _seconds: None, stopped=lambda: stop
    )
    with pytest.raises(Stopped):
        loop.run_round()
    assert len(asked) == 5
    assert loop.progress.micro_steps == 0
    assert loop.progress.state == "waiting for a permit"
    assert not loop._candidates  # putting one together takes seconds of a processor


def test_a_shard_that_answers_late_costs_its_topic_no_rest(draft: Path, tmp_path: Path) -> None:
    client = filled(tmp_path)
    shards = dict(client.shards)

    def permit() -> bool:
        client.shards.clear()
        return True

    client.permitted = permit
    loop = make_loop(trainer_settings(draft), client)
    assert not loop.run_round()
    assert loop.progress.state == "waiting for its shard"
    client.permitted = lambda: True
    client.shards.update(shards)
    assert loop.run_round()
    assert loop.progress.topic == "sql"
    assert not loop._topics.state("sql").backoff.failures


def test_a_round_that_waited_long_for_its_first_permit_counts_as_seldom_permitted(
    draft: Path, tmp_path: Path
) -> None:
    client, clock = filled(tmp_path), Ticks()
    loop = TrainingLoop(trainer_settings(draft), client, clock=clock, sleep=lambda _seconds: None)

    def permit() -> bool:
        clock.now += 5.0 if loop.progress.state == "waiting for a permit" else 0.0
        return clock.now >= 300.0

    client.permitted = permit
    assert loop.run_round()
    assert loop.progress.micro_steps > 1
    assert 0.0 < loop._steps._permit_share < 0.1


def test_a_round_that_found_no_time_leaves_its_records_new(draft: Path, tmp_path: Path) -> None:
    client, clock = filled(tmp_path), Ticks()
    settings = trainer_settings(draft, ("sql",), max_round_s=10.0)
    loop = TrainingLoop(settings, client, clock=clock, sleep=lambda _seconds: None)

    def permit() -> bool:  # each takes longer than a round may
        clock.now += 20.0 * (loop.progress.state == "training")
        return True

    client.permitted = permit
    assert not loop.run_round()
    state = loop._topics.state("sql")
    assert not loop.progress.micro_steps
    assert not state.inserted
    client.permitted = lambda: True
    assert loop.run_round()
    assert state.inserted == {("sql", 0.0): client.stats()["sql"].inserted_total}


def plateaued(draft: Path, client: LocalClient) -> TrainingLoop:
    """A loop of sql whose draft cannot learn, without hope, that every new record starts again."""
    still = DistillerSettings(learning_rate=0.0, dtype="float32")
    schedule = ScheduleSettings(
        min_train=4, min_held_out=3, min_new=1, rest_growth=0.0, least_hope=1.0
    )
    return make_loop(
        trainer_settings(draft, ("sql",), distiller=still, schedule=schedule, round_seconds=0.05),
        client,
    )


def plateaus(client: LocalClient) -> int:
    assert client.registry is not None
    return [d["outcome"] for d in client.registry.history("sql")].count("plateau")


@pytest.mark.parametrize(("theirs", "notes"), [(2, 1), (3, 0)])
def test_a_plateau_that_another_trainer_has_noted_is_not_noted_again(
    draft: Path, tmp_path: Path, theirs: int, notes: int
) -> None:
    client = filled(tmp_path)
    loop = plateaued(draft, client)
    client.topic_progress = lambda: {  # type: ignore[method-assign]
        "sql": TopicProgress(counts=RoundCounts(rejections=theirs, fruitless=theirs))
    }
    assert loop.run_round()
    assert loop._topics.state("sql").counts.fruitless == theirs + 1
    assert plateaus(client) == notes


def test_a_plateau_that_rollbacks_reach_is_noted(draft: Path, tmp_path: Path) -> None:
    client = filled(tmp_path)
    loop = plateaued(draft, client)
    assert loop.run_round()
    candidate = loop.candidate("sql")
    candidate.version = 1  # published, and rolled back since
    loop._topics.state("sql").counts = RoundCounts(rolled_back=2)
    client.shards["sql"].insert(encode(training_record(5_000)))
    assert loop.run_round()
    assert plateaus(client) == 1


def test_the_loss_of_the_other_ranks_leaves_rollbacks_alone_to_count(
    draft: Path, tmp_path: Path
) -> None:
    """Candidates are lost with them: the gate's looks at these are over."""
    loop = plateaued(draft, filled(tmp_path))
    assert loop.run_round()
    state = loop._topics.state("sql")
    state.counts = RoundCounts(rejections=2, fruitless=2, rolled_back=1)

    def lost(*_: object) -> None:
        raise WorkerGroupError("a rank has died")

    loop._client.shards["sql"].insert(encode(training_record(5_000)))
    loop.candidate("sql").learn = lost  # type: ignore
    with pytest.raises(WorkerGroupError):
        loop.run_round()
    assert state.counts == RoundCounts(rejections=1, fruitless=1, rolled_back=1)


def test_rollbacks_that_another_trainer_counted_end_with_a_promotion(
    draft: Path, tmp_path: Path
) -> None:
    client = filled(tmp_path)
    loop = plateaued(draft, client)
    assert client.registry is not None
    weights = loop.candidate("sql").compare([training_record(1)], lambda: None).state
    client.registry.publish("sql", flatten(weights), {})
    theirs = RoundCounts(stable=0, rejections=1, fruitless=1, rolled_back=1)
    client.topic_progress = lambda: {"sql": TopicProgress(counts=theirs)}  # type: ignore
    assert loop.run_round()
    counts = loop._topics.state("sql").counts
    assert counts == RoundCounts(stable=1, rejections=2, fruitless=2, rolled_back=0)


def test_an_unfinished_round_hands_on_the_last_trainers_counts(draft: Path, tmp_path: Path) -> None:
    client = filled(tmp_path)
    loop = plateaued(draft, client)
    theirs = TopicProgress({("sql", 0.0): 70}, RoundCounts(rejections=3, fruitless=3), 0.8)
    client.topic_progress = lambda: {"sql": theirs}  # type: ignore[method-assign]
    handed_on: list[TopicProgress | None] = []
    client.release_topic = handed_on.append  # type: ignore[method-assign]
    client.permitted = lambda: loop.progress.micro_steps < 1 or revoke()
    assert not loop.run_round()
    assert handed_on == [theirs]


def revoke() -> bool:
    raise LeaseRevoked


class Leased(LocalClient):
    """Notes whether shards and registry are called while a permit is held."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.held, self.called = False, list[tuple[str, bool]]()

    def acquire_permit(self) -> bool:
        self.held = True
        return True

    def release_permit(self) -> None:
        self.held = False

    def sample(self, topic: str, count: int, split: str) -> list[ReplayRecord]:
        self.called.append(("sample", self.held))
        return super().sample(topic, count, split)

    def topic_status(self) -> dict[str, TopicStatus] | None:
        self.called.append(("topic_status", self.held))
        return super().topic_status()

    def publish(
        self, topic: str, flat: FlatWeights, decision: dict[str, object], base: int | None = None
    ) -> int:
        self.called.append(("publish", self.held))
        return super().publish(topic, flat, decision, base)


def test_no_other_actor_is_called_with_a_permit(draft: Path, tmp_path: Path) -> None:
    """One that answers late would keep a request waiting."""
    client = Leased(tmp_path)
    fill(client, ("sql",), 80)
    assert make_loop(trainer_settings(draft), client).run_round()
    assert set(client.called) == {("sample", False), ("topic_status", False), ("publish", False)}


def test_a_lease_revoked_during_a_checkpoint_keeps_the_publication(
    draft: Path, tmp_path: Path
) -> None:
    """Each file needs a permit; a trainer that loses its lease there loses no more."""
    client = filled(tmp_path / "weights")
    folder = tmp_path / "optimizer"
    loop = make_loop(trainer_settings(draft, ("sql",), optimizer_dir=str(folder)), client)

    def permit() -> bool:
        if list(folder.glob("sql/.partial-*")):
            raise LeaseRevoked
        return True

    client.permitted = permit
    assert not loop.run_round()
    candidate = loop.candidate("sql")
    assert client.versions() == {"sql": 1, "general": 0}
    assert candidate.version == 1
    assert not list(folder.glob("sql/1-*"))
    client.permitted = lambda: True
    steps = candidate.steps
    assert loop.run_round()
    assert candidate.steps > steps
    assert candidate.version >= 1


def test_long_answers_are_learnt_from_their_first_part(draft: Path, tmp_path: Path) -> None:
    client = LocalClient(tmp_path)
    for number in range(60):
        client.shards["sql"].insert(encode(training_record(number, length=40)))
    loop = make_loop(trainer_settings(draft, max_length=16), client)
    assert loop.run_round()
    assert client.registry is not None
    assert client.registry.history("sql")[0]["outcome"] == "published"


class Counting(LocalClient):
    """How many records were drawn of each split."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.drawn = Counter[str]()

    def sample(self, topic: str, count: int, split: str) -> list[ReplayRecord]:
        records = super().sample(topic, count, split)
        self.drawn[split] += len(records)
        assert {is_synthetic(r.request_id) for r in records} <= {split == "synthetic"}
        return records


@pytest.mark.full
def test_synthetic_records_are_learnt_in_their_proportion(draft: Path, tmp_path: Path) -> None:
    reached = []
    for more in (False, True):
        client = Counting(tmp_path / str(more))
        settings = ReplaySettings(held_out_fraction=0.3, synthetic_per_record=4.0)
        client.shards["sql"] = ReplayShard("sql", settings, seed=0, clock=lambda: 0.0)
        for number in range(0, 60, 4):
            client.shards["sql"].insert(encode(training_record(number)))
        for number in range(60) if more else ():
            name = synthetic_id(f"r{number - number % 4}", str(number))
            record = dataclasses.replace(training_record(number), request_id=name)
            client.shards["sql"].insert(encode(record))
        loop = make_loop(trainer_settings(draft, train_records=20), client)
        for _ in range(4):
            loop.run_round()
        stats = client.shards["sql"].stats()
        share = stats.records("synthetic") / stats.records("synthetic", "train")
        assert client.drawn["synthetic"] == round(20 * share) * 4
        assert client.registry is not None
        history = client.registry.history("sql")
        reached.append(max(d["candidate_expected_acceptance"] for d in history))
    assert reached[1] > reached[0] + 0.1, reached


def test_a_topic_that_comes_while_the_trainer_runs_is_taught(draft: Path, tmp_path: Path) -> None:
    client = filled(tmp_path)
    assert client.registry is not None
    loop = make_loop(trainer_settings(draft), client)
    assert loop.run_round()
    client.publish("general", flatten(tiny_llama(4, vocab=TINY_VOCAB, layers=1).state_dict()), {})
    client.registry.add_topic("geo", "general")
    while loop.run_round():  # its shard is not there yet: nothing breaks
        pass
    client.shards["geo"] = ReplayShard(
        "geo", ReplaySettings(held_out_fraction=0.3), seed=0, clock=lambda: 0.0
    )
    for number in range(80):
        record = dataclasses.replace(
            training_record(number), topic="geo", request_id=f"geo-{number}"
        )
        client.shards["geo"].insert(encode(record))
    for _ in range(20):
        if client.registry.stable_versions()["geo"] > 1:
            break
        loop.run_round()
    first = next(d for d in client.registry.history("geo") if d["outcome"] == "published")
    assert (first["version"], first["parent"]) == (2, 1)
    assert first["candidate_expected_acceptance"] > first["served_expected_acceptance"] + 0.2


class Waits:
    """Denies a permit once, in the midst of a round's stage, and a day may pass meanwhile."""

    def __init__(self, draft: Path, client: LocalClient, stage: str, asks: int) -> None:
        self.now, self.clock, self.hours = 0.0, Ticks(), 0.0
        for shard in client.shards.values():
            shard._clock = lambda: self.now
        self.loop = TrainingLoop(
            trainer_settings(draft, ("sql",), round_seconds=0.3, max_round_s=1e6),
            client,
            clock=self.clock,
            sleep=lambda _seconds: None,
        )
        self.stage, self.left, self.waited = stage, asks, False
        client.permitted = self.permitted
        self.then: Callable[[], object] = lambda: None
        self.learnt: list[list[ReplayRecord]] = []
        candidate = self.loop.candidate("sql")
        make_shares = candidate.make_shares

        def spied(step: Sequence[Sequence[ReplayRecord]]) -> list[Share]:
            if self.waited:
                self.learnt += [list(batch) for batch in step]
            return make_shares(step)

        candidate.make_shares = spied  # type: ignore[method-assign]

    def permitted(self) -> bool:
        self.left -= self.loop.progress.state == self.stage
        if self.left or self.waited:
            return True
        self.waited = True
        self.clock.now += 3600.0 * self.hours + 1.5
        self.now += 3600.0 * self.hours
        self.then()
        return False


STAGES = [("training", 1), ("training", 8), ("evaluating", 1), ("evaluating", 4)]


@pytest.mark.parametrize(("stage", "asks"), STAGES)
def test_a_round_whose_records_were_purged_ends_and_lets_go_of_them(
    draft: Path, tmp_path: Path, stage: str, asks: int
) -> None:
    client = filled(tmp_path)
    waits = Waits(draft, client, stage, asks)
    waits.then = lambda: client.shards["sql"].delete(None)
    before = records_in_memory()
    assert not waits.loop.run_round()
    assert waits.waited
    assert not waits.learnt
    assert records_in_memory() == before
    assert client.registry is not None
    assert not client.registry.history("sql")
    assert not waits.loop.run_round()
    assert waits.loop.progress.state == "no new records"
    for number in range(80):
        client.shards["sql"].insert(encode(training_record(number, created=60.0)))
    assert waits.loop.run_round()


def records_in_memory() -> int:
    gc.collect()
    # Not isinstance: some modules warn of a look at their deprecated names.
    return sum(type(found) is ReplayRecord for found in gc.get_objects())


def test_the_purge_of_another_topic_ends_no_round(draft: Path, tmp_path: Path) -> None:
    client = filled(tmp_path)
    waits = Waits(draft, client, "training", 8)
    waits.then = lambda: client.shards["general"].delete(None)
    assert waits.loop.run_round()
    assert waits.loop.progress.published == 1


@pytest.mark.parametrize(("stage", "asks"), STAGES)
def test_after_a_long_wait_a_round_goes_on_without_what_has_expired(
    draft: Path, tmp_path: Path, stage: str, asks: int
) -> None:
    client, late = LocalClient(tmp_path), 20 * 3600.0
    for number in range(120):
        record = training_record(number, created=late * (number % 2))
        client.shards["sql"].insert(encode(record))
    waits = Waits(draft, client, stage, asks)
    waits.hours = 25.0
    before = client.stats()["sql"].records("held_out")
    assert waits.loop.run_round()
    assert waits.waited
    assert bool(waits.learnt) == (stage == "training")
    assert {record.created for batch in waits.learnt for record in batch} <= {late}
    assert client.registry is not None
    decision = client.registry.history("sql")[-1]
    assert decision["outcome"] == "published"
    assert decision["records"] == client.stats()["sql"].records("held_out") < before


def test_a_round_of_which_all_has_expired_ends(draft: Path, tmp_path: Path) -> None:
    client = filled(tmp_path)
    waits = Waits(draft, client, "training", 8)
    waits.hours = 25.0
    assert not waits.loop.run_round()
    assert not waits.learnt
    assert waits.loop._topics.state("sql").backoff.failures == 1


def test_of_a_step_that_was_put_together_nothing_expired_is_learnt(
    draft: Path, tmp_path: Path
) -> None:
    client = filled(tmp_path)
    waits = Waits(draft, client, "training", 10)
    settings = waits.loop._settings
    distiller = dataclasses.replace(settings.distiller, accumulation=4)
    waits.loop = TrainingLoop(
        dataclasses.replace(settings, distiller=distiller),
        client,
        clock=waits.clock,
        sleep=lambda _seconds: None,
    )
    waits.hours = 25.0
    asked: list[int] = []
    waits.then = lambda: asked.append(waits.loop.progress.micro_steps)
    waits.loop.run_round()
    assert asked[0] % 4  # in the midst of a step
    assert waits.loop.progress.micro_steps == asked[0]


def test_the_stable_version_s_checkpoint_outlives_candidates_without_a_verdict(
    draft: Path, tmp_path: Path
) -> None:
    client = filled(tmp_path, canary=CanarySettings(min_trial_s=0.0))
    registry, folder = client.registry, tmp_path / "optimizer"
    assert registry is not None
    sure = GateSettings(min_gain=-1.0)
    loop = make_loop(
        trainer_settings(draft, ("sql",), gate=sure, optimizer_dir=str(folder), round_seconds=0.05),
        client,
    )
    assert loop.run_round()
    registry.report([DraftOutcome("sql", version, 20, 20 * version) for version in (0, 1)] * 9)
    assert registry.stable_versions()["sql"] == 1
    for candidate in (2, 3):  # without a request
        client.shards["sql"].insert(encode(training_record(9_000 + candidate)))
        assert loop.run_round()
        status = registry.topic_status()["sql"]
        assert (status.stable, status.candidate) == (1, candidate)
        kept = sorted(path.name.partition("-")[0] for path in (folder / "sql").iterdir())
        assert kept == ["1", str(candidate)]
