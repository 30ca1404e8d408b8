"""Two trainers, one scheduler: a topic is taken over with what was learnt, never stale."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
from local_client import LocalClient, filled, make_loop, trainer_settings
from training_records import training_record

from paceline.actors.replay.record import encode
from paceline.actors.training.distiller import DistillerSettings
from paceline.actors.training.permits import Assignment, Permit, TopicProgress, TrainerIdentity
from paceline.actors.training.progress import LeaseRevoked
from paceline.actors.training.settings import TrainerSettings
from paceline.actors.training.topic_schedule import ScheduleSettings, TopicPriority
from paceline.actors.training.training_loop import TrainingLoop
from paceline.cluster.scheduler.trainer_scheduler import TrainerScheduler

pytestmark = pytest.mark.usefixtures("deepspeed")

SCHEDULE = ScheduleSettings(min_train=4, min_held_out=3, min_new=0, max_rejections=10**9)


class Guest(LocalClient):
    """A host's shards and registry, and a scheduler that several trainers ask."""

    def __init__(self, host: LocalClient, scheduler: TrainerScheduler, name: str) -> None:
        self.shards, self.registry = host.shards, host.registry
        self.scheduler, self.name, self.life = scheduler, name, "life"
        self.turns: list[Assignment] = []

    def acquire_topic(self, wanted: Sequence[TopicPriority]) -> Assignment:
        gains = {want.topic: want.gain for want in wanted}
        self.turns.append(
            self.scheduler.acquire_topic(TrainerIdentity(self.name), self.life, gains)
        )
        return self.turns[-1]

    def topic_progress(self) -> dict[str, TopicProgress]:
        return self.scheduler.topic_progress(self.name)

    def acquire_permit(self) -> bool:
        permit = self.scheduler.acquire_permit(self.name, self.life)
        if permit is Permit.UNASSIGNED:
            raise LeaseRevoked
        return permit is Permit.GRANTED

    def until_idle(self) -> None:
        pass

    def release_permit(self) -> None:
        self.scheduler.release_permit(self.name, self.life)

    def release_topic(self, progress: TopicProgress | None) -> None:
        self.scheduler.release_topic(self.name, self.life, progress)


def two(
    host: LocalClient, settings: TrainerSettings
) -> tuple[TrainingLoop, TrainingLoop, Guest, Guest]:
    scheduler = TrainerScheduler()
    guests = Guest(host, scheduler, "one"), Guest(host, scheduler, "two")
    return (*(make_loop(settings, guest) for guest in guests), *guests)


def only_sql(draft: Path, tmp_path: Path, **changes: object) -> TrainerSettings:
    return trainer_settings(
        draft,
        ("sql",),
        schedule=SCHEDULE,
        optimizer_dir=str(tmp_path / "optimizer"),
        **changes,
    )


def test_a_takeover_continues_from_the_published_weights(draft: Path, tmp_path: Path) -> None:
    host = filled(tmp_path)
    one, two_, first, second = two(host, only_sql(draft, tmp_path))
    assert one.run_round()
    assert host.registry is not None
    published = host.registry.history("sql")[-1]
    assert (published["outcome"], published["version"]) == ("published", 1)
    assert two_.run_round()
    assert second.turns[-1].stale
    after = host.registry.history("sql")[-1]
    assert after["served_expected_acceptance"] == pytest.approx(
        published["candidate_expected_acceptance"], abs=0.02
    )
    assert two_.candidate("sql").steps > published["steps"]  # with the optimizer state
    # and back again: what the first one has in memory is not the last any more
    before = one.candidate("sql").version
    assert one.run_round()
    assert first.turns[-1].stale
    assert one.candidate("sql").version >= before
    assert one.progress.published + one.progress.rejected == 2


def test_unpublished_steps_of_another_are_not_mixed_with_stale_ones(
    draft: Path, tmp_path: Path
) -> None:
    host = filled(tmp_path)
    no_learning = DistillerSettings(learning_rate=0.0, dtype="float32")
    one, two_, *_ = two(host, only_sql(draft, tmp_path, distiller=no_learning, round_seconds=0.05))
    assert one.run_round()
    steps = one.candidate("sql").steps
    assert one.run_round()
    assert one.candidate("sql").steps > steps  # its own: it goes on
    assert two_.run_round()
    assert one.run_round()
    assert one.candidate("sql").steps <= steps + 1  # another's since: from the served weights
    assert host.registry is not None
    assert set(host.registry.stable_versions().values()) == {0}


def test_the_share_of_the_rate_goes_with_the_topic(draft: Path, tmp_path: Path) -> None:
    host = filled(tmp_path)
    no_learning = DistillerSettings(learning_rate=0.0, dtype="float32")
    one, two_, *_ = two(host, only_sql(draft, tmp_path, distiller=no_learning, round_seconds=0.05))
    one.candidate("sql").scale_rate(1 / 9)
    assert one.run_round()
    assert two_.run_round()
    assert two_.candidate("sql").rate_share == pytest.approx(1 / 9)


def test_a_restarted_trainer_has_the_share_of_the_publication(draft: Path, tmp_path: Path) -> None:
    host = filled(tmp_path)
    settings = only_sql(draft, tmp_path)
    first = make_loop(settings, host)
    first.candidate("sql").scale_rate(1 / 4)
    assert first.run_round()
    assert first.progress.published == 1
    again = make_loop(dataclasses.replace(settings, round_seconds=0.05), host)
    shares = []
    learn = again.candidate("sql").learn

    def noting(*arguments: object) -> object:
        shares.append(again.candidate("sql").rate_share)
        return learn(*arguments)  # type: ignore[arg-type]

    again.candidate("sql").learn = noting  # type: ignore[method-assign, assignment]
    assert again.run_round()
    assert shares[0] == 0.5  # a publication's are longer


def test_rounds_in_vain_count_over_all_trainers(draft: Path, tmp_path: Path) -> None:
    host = filled(tmp_path)
    no_learning = DistillerSettings(learning_rate=0.0, dtype="float32")
    schedule = dataclasses.replace(SCHEDULE, min_new=1, max_rejections=2, least_hope=0.015)
    settings = only_sql(draft, tmp_path, distiller=no_learning, round_seconds=0.05)
    one, two_, *_ = two(host, dataclasses.replace(settings, schedule=schedule))
    assert one.run_round()
    assert not two_.run_round()  # there is nothing new since the other's round
    host.shards["sql"].insert(encode(training_record(1_000)))
    assert two_.run_round()
    assert two_._topics.state("sql").counts.rejections == 2
    host.shards["sql"].insert(encode(training_record(1_001)))
    assert not one.run_round()
    assert not two_.run_round()


def test_a_scheduler_that_was_restarted_ends_the_round_and_no_more(
    draft: Path, tmp_path: Path
) -> None:
    host = filled(tmp_path)
    one, _, guest, _ = two(host, only_sql(draft, tmp_path))
    learn = one.candidate("sql").learn
    calls: list[int] = []

    def interrupted(*arguments: object) -> object:
        calls.append(1)
        if len(calls) == 3:
            guest.scheduler = TrainerScheduler()
        return learn(*arguments)  # type: ignore[arg-type]

    one.candidate("sql").learn = interrupted  # type: ignore[method-assign,assignment]
    assert not one.run_round()
    assert len(calls) == 3
    assert one.progress.state == "waiting for a topic"
    assert one.run_round()
    assert host.registry is not None
    assert host.registry.history("sql")
