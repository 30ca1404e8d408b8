"""Scoring of experts by real tiny drafts on text that one of them would have written."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from local_client import LocalClient
from tiny_models import tiny_llama
from training_records import TINY_VOCAB, training_record
from waiting import wait_until

from paceline.actors.engine.model_loader import load_causal_lm
from paceline.actors.replay.record import ReplayRecord, encode
from paceline.actors.router.hedge import HedgeSettings
from paceline.actors.router.policy import route
from paceline.actors.training import client as ray_world
from paceline.actors.training.expert_evaluation import ExpertEvaluator
from paceline.actors.training.progress import Stopped
from paceline.actors.training.scorer import Scorer, ScoringLoop
from paceline.actors.training.settings import ScorerSettings
from paceline.actors.weights.canary import CanarySettings
from paceline.actors.weights.flat_weights import flatten
from paceline.actors.weights.versions import TopicStatus

EXPERTS = ("general", "sql")


def settings_of(draft: Path, **changes: Any) -> ScorerSettings:
    base = ScorerSettings(
        draft_paths=dict.fromkeys(EXPERTS, str(draft)),
        fingerprints=dict.fromkeys(EXPERTS, "mark"),
        dtype="float32",
        low_priority=False,
        refresh_s=0.01,
        poll_s=0.01,
        retention_s=1e12,
    )
    return dataclasses.replace(base, **changes)


@pytest.fixture(scope="module")
def texts(draft: Path) -> list[ReplayRecord]:
    """Greedy answers as the initial draft itself would give them."""
    model = load_causal_lm(str(draft), torch.float32, attention="eager")
    records = []
    for number in range(12):
        record = training_record(number)
        ids = record.prompt_token_ids.tolist()
        for _ in record.output_token_ids:
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        outputs = np.array(ids[len(record.prompt_token_ids) :], dtype=np.int32)
        top = record.target_top_ids.copy()
        top[:, 0] = outputs
        records.append(dataclasses.replace(record, output_token_ids=outputs, target_top_ids=top))
    return records


def noise(seed: int = 5) -> Any:
    return flatten(tiny_llama(seed, vocab=TINY_VOCAB, layers=1).state_dict())


def offer(scoring: ScoringLoop | Scorer, records: Sequence[ReplayRecord]) -> None:
    for record in records:
        scoring.offer(encode(record))


def run_out(scoring: ScoringLoop, client: LocalClient, evaluator: ExpertEvaluator) -> int:
    """Tick until there is nothing to do."""
    for ticks in range(20):
        if not scoring.run_once(client, evaluator):
            return ticks
    raise AssertionError("scoring does not come to its end")


def draft_for(scoring: ScoringLoop | Scorer) -> str:
    return route({"sql": 1.0}, EXPERTS, 0.5, scoring.table().weights).draft


def test_a_bad_expert_gives_way_and_a_better_version_of_it_comes_back_at_once(
    draft: Path, texts: list[ReplayRecord], tmp_path: Path
) -> None:
    client, settings = LocalClient(tmp_path, EXPERTS), settings_of(draft)
    scoring, evaluator = ScoringLoop(settings), ExpertEvaluator(settings)
    assert draft_for(scoring) == "sql"
    client.publish("sql", noise(), {})
    offer(scoring, texts)
    assert scoring.table().waiting == len(texts)
    assert run_out(scoring, client, evaluator) == 2  # one go per expert
    table = scoring.table()
    assert table.acceptance["sql"]["general"] == pytest.approx(1.0)
    assert table.acceptance["sql"]["sql"] < 0.5
    assert table.versions == {"general": 0, "sql": 1}
    assert (table.waiting, table.scores) == (0, 2 * len(texts))
    assert draft_for(scoring) == "general"
    # no request comes in between: the new version is scored on the stored ones
    client.publish("sql", flatten(torch_state(draft)), {})
    assert run_out(scoring, client, evaluator) == 1
    assert scoring.table().acceptance["sql"]["sql"] == pytest.approx(1.0)
    assert draft_for(scoring) == "sql"


def torch_state(draft: Path) -> dict[str, torch.Tensor]:
    model = load_causal_lm(str(draft), torch.float32, attention="eager")
    return {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}


def test_experts_with_a_candidate_on_trial_are_named(
    draft: Path, texts: list[ReplayRecord], tmp_path: Path
) -> None:
    client, settings = LocalClient(tmp_path, EXPERTS, canary=CanarySettings()), settings_of(draft)
    scoring, evaluator = ScoringLoop(settings), ExpertEvaluator(settings)
    offer(scoring, texts)
    run_out(scoring, client, evaluator)
    assert scoring.table().on_trial == ()
    client.publish("sql", noise(), {})
    assert run_out(scoring, client, evaluator) == 0  # what is served is what it was
    assert scoring.table().on_trial == ("sql",)
    assert scoring.table().acceptance["sql"]["sql"] == pytest.approx(1.0)


def test_without_a_permit_nothing_is_scored_and_the_end_is_at_once(
    draft: Path, texts: list[ReplayRecord], tmp_path: Path
) -> None:
    client, settings = LocalClient(tmp_path, EXPERTS), settings_of(draft)
    asked: list[int] = []
    stop = [False]

    def permit() -> bool:
        asked.append(1)
        stop[0] = len(asked) >= 3
        return False

    client.permitted = permit
    scoring = ScoringLoop(settings, sleep=lambda _: None, stopped=lambda: stop[0])
    offer(scoring, texts)
    with pytest.raises(Stopped):
        scoring.run_once(client, ExpertEvaluator(settings))
    assert scoring.table().scores == 0
    assert len(asked) == 3


def test_records_expire_while_a_permit_is_waited_for(draft: Path) -> None:
    now, settings = [0.0], settings_of(draft, retention_s=10.0)
    scoring = ScoringLoop(
        settings, clock=lambda: now[0], sleep=lambda _: None, stopped=lambda: now[0] > 20.0
    )
    offer(scoring, [training_record(n, created=0.0) for n in range(4)])

    class Busy(_Initial):
        def acquire_permit(self) -> bool:
            now[0] += 3.0
            return False

    with pytest.raises(Stopped):
        scoring.run_once(Busy(), _UnusedEvaluator())
    assert scoring.table().waiting == 0


def test_a_deleted_record_is_scored_no_more(draft: Path) -> None:
    settings = settings_of(draft)
    scoring = ScoringLoop(settings, sleep=lambda _: None)
    offer(scoring, [training_record(n, created=time.time()) for n in range(20)])
    seen: list[int] = []

    class Slow(_UnusedEvaluator):
        def score(self, *given: Any) -> list[float]:
            _, _, records, before_batch = given
            seen.append(len(records))
            before_batch()
            if len(seen) == 1:
                scoring.delete(records[0].request_id)
            before_batch()
            return [0.5] * len(records)

    assert scoring.run_once(_Initial(), Slow())
    assert scoring.table().scores == 0
    for _ in range(4):  # two experts, a part of the records at a time
        assert scoring.run_once(_Initial(), Slow())
    assert not scoring.run_once(_Initial(), Slow())
    assert (seen, scoring.table().scores) == ([16, 16, 16, 3, 3], 38)


def test_what_was_purged_and_comes_then_is_refused(draft: Path) -> None:
    now = [100.0]
    scoring = ScoringLoop(settings_of(draft), clock=lambda: now[0], sleep=lambda _: None)
    late = training_record(0, created=99.0)
    scoring.delete(None, "poetry")
    offer(scoring, [training_record(1, created=99.0)])
    scoring.delete(None, late.topic)
    offer(scoring, [late, training_record(2, created=106.0)])
    table = scoring.table()
    assert (table.waiting, table.offered, table.refused) == (1, 3, 1)


def test_nothing_is_scored_if_all_has_expired_before_the_permit(draft: Path) -> None:
    now, settings = [0.0], settings_of(draft, retention_s=10.0)
    scoring = ScoringLoop(settings, clock=lambda: now[0], sleep=lambda _: None)
    offer(scoring, [training_record(0, created=0.0)])

    class Late(_Initial):
        def acquire_permit(self) -> bool:
            now[0] += 20.0
            return now[0] > 30.0

    assert scoring.run_once(Late(), _UnusedEvaluator())
    assert not scoring.run_once(Late(), _UnusedEvaluator())
    assert not scoring._resting


def test_what_made_way_for_others_and_is_deleted_then_is_let_go_of_too(draft: Path) -> None:
    settings = settings_of(draft)
    scoring = ScoringLoop(settings, sleep=lambda _: None)
    first = training_record(0, created=time.time())
    offer(scoring, [first])
    asked: list[int] = []

    class Slow(_UnusedEvaluator):
        def score(self, *given: Any) -> list[float]:
            asked.append(len(given[2]))
            scoring._remove(first.request_id)
            scoring.delete(first.request_id)
            given[3]()
            raise AssertionError("it was deleted")

    assert scoring.run_once(_Initial(), Slow())
    assert asked == [1]
    assert not scoring.run_once(_Initial(), Slow())


def test_a_dead_registry_leaves_things_as_they_are(
    draft: Path, texts: list[ReplayRecord], tmp_path: Path
) -> None:
    client, settings = LocalClient(tmp_path, EXPERTS), settings_of(draft)
    client.registry = None
    scoring = ScoringLoop(settings)
    offer(scoring, texts)
    assert not scoring.run_once(client, ExpertEvaluator(settings))


def test_an_expert_that_cannot_be_scored_rests_and_the_others_go_on(
    draft: Path, texts: list[ReplayRecord], tmp_path: Path
) -> None:
    now = [0.0]
    client, settings = LocalClient(tmp_path, EXPERTS), settings_of(draft)
    client.publish("sql", flatten({"model.norm.weight": torch.zeros(7)}), {})
    scoring, evaluator = ScoringLoop(settings, clock=lambda: now[0]), ExpertEvaluator(settings)
    offer(scoring, texts)
    assert run_out(scoring, client, evaluator) == 2
    assert scoring.table().scores == len(texts)
    assert draft_for(scoring) == "sql"  # of which nothing is known
    client.publish("sql", noise(), {})
    assert run_out(scoring, client, evaluator) == 1  # other weights: no rest
    assert draft_for(scoring) == "general"


def test_weights_that_are_not_finite_say_nothing(
    draft: Path, texts: list[ReplayRecord], tmp_path: Path
) -> None:
    broken = {k: torch.full_like(v, float("nan")) for k, v in torch_state(draft).items()}

    class Broken(LocalClient):
        def weights(self, topic: str) -> Any:
            return super().weights(topic) if topic == "general" else (0, flatten(broken))

    client, settings = Broken(tmp_path, EXPERTS), settings_of(draft)
    sampled = [
        dataclasses.replace(
            r,
            temperature=1.0,
            processed_top_probs=np.exp(r.target_top_logprobs.astype(np.float32)).astype(np.float16),
        )
        for r in texts
    ]
    scoring, evaluator = ScoringLoop(settings), ExpertEvaluator(settings)
    offer(scoring, sampled)
    run_out(scoring, client, evaluator)
    table = scoring.table()
    assert table.waiting == 0
    assert table.weights == {}
    json.dumps(dataclasses.asdict(table), allow_nan=False)


def test_what_waits_is_bounded_in_bytes_rows_and_age(draft: Path) -> None:
    size = len(encode(training_record(0)))
    now = [0.0]
    settings = settings_of(
        draft, capacity_bytes=5 * size, hedge=HedgeSettings(window=8), retention_s=10.0
    )
    scoring = ScoringLoop(settings, clock=lambda: now[0])
    offer(scoring, [training_record(n) for n in range(12)])
    table = scoring.table()
    assert table.waiting in (4, 5)  # an id may be a byte longer
    assert table.rows["sql"] == 8
    offer(scoring, [training_record(11)])  # a second time
    scoring.offer(b"no record")
    scoring.offer(encode(dataclasses.replace(training_record(50), topic="poetry")))
    assert scoring.table().refused == 3
    assert scoring.delete("r11") == 1
    assert scoring.table().rows["sql"] == 7
    now[0] = 11.0
    assert not scoring.run_once(_Down(), _UnusedEvaluator())  # expiry waits for no registry
    assert scoring.table().waiting == 0
    offer(scoring, [training_record(3, created=11.0)])
    assert scoring.delete(None) == 1


class _Nothing:
    def acquire_permit(self) -> bool:
        return True

    def until_idle(self) -> None:
        pass

    def versions(self) -> dict[str, int] | None:
        return {}

    def topic_status(self) -> dict[str, TopicStatus] | None:
        return {}

    def weights(self, topic: str) -> None:  # noqa: ARG002 - the protocol's
        return None


class _Initial(_Nothing):
    """Every expert is served with its initial weights."""

    def versions(self) -> dict[str, int]:
        return dict.fromkeys(EXPERTS, 0)

    def weights(self, topic: str) -> Any:  # noqa: ARG002 - the protocol's
        return 0, None


class _Down(_Nothing):
    def versions(self) -> dict[str, int] | None:
        return None


class _UnusedEvaluator:
    def score(self, *_: Any) -> list[float]:
        raise AssertionError("there is nothing to score")


def test_gains_outlive_the_process_and_those_of_other_drafts_do_not(
    draft: Path, texts: list[ReplayRecord], tmp_path: Path
) -> None:
    client, settings = LocalClient(tmp_path, EXPERTS), settings_of(draft)
    client.publish("sql", noise(), {})
    scoring = ScoringLoop(settings)
    offer(scoring, texts)
    run_out(scoring, client, ExpertEvaluator(settings))
    state = json.loads(json.dumps(scoring.export()))
    assert "prompt" not in json.dumps(state)
    again = ScoringLoop(settings)
    again.restore(state)
    assert again.table().weights == scoring.table().weights
    assert run_out(again, client, ExpertEvaluator(settings)) == 0
    other = ScoringLoop(
        dataclasses.replace(settings, fingerprints={"general": "mark", "sql": "another"})
    )
    other.restore(state)
    assert other.table().weights == {}
    for broken in (None, {}, {"fingerprints": {}, "hedge": {}}):
        with pytest.raises(ValueError, match=r"scorer|hedge"):
            other.restore(broken)


def test_the_thread_scores_keeps_its_state_and_comes_back_with_it(
    draft: Path,
    texts: list[ReplayRecord],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = LocalClient(tmp_path / "weights", EXPERTS)
    client.publish("sql", noise(), {})
    monkeypatch.setattr(
        ray_world, "RayTrainerClient", lambda *_: client
    )  # what is beyond it is Ray's
    file = tmp_path / "state" / "routing.json"
    settings = settings_of(draft, state_file=str(file))
    scorer = Scorer(settings, ExpertEvaluator(settings), None, None)
    offer(scorer, texts)
    wait_until(lambda: scorer.table().scores == 2 * len(texts), "the scores", 60)
    wait_until(file.is_file, "the state on disk", 10)
    scorer.stop()
    again = Scorer(settings, ExpertEvaluator(settings), None, None)
    assert draft_for(again) == "general"
    kept = texts[0].request_id
    assert kept in file.read_text(encoding="utf-8")
    again.delete(kept)  # whose record was lost with the process
    assert kept not in file.read_text(encoding="utf-8")
    again.stop()
    assert again.table().failures == 0
    file.write_text("{", encoding="utf-8")
    again = Scorer(settings, ExpertEvaluator(settings), None, None)
    assert draft_for(again) == "sql"
    again.stop()


def test_an_added_expert_is_scored_from_the_prior_on(
    draft: Path, texts: list[ReplayRecord], tmp_path: Path
) -> None:
    client, settings = LocalClient(tmp_path, EXPERTS), settings_of(draft)
    scoring, evaluator = ScoringLoop(settings), ExpertEvaluator(settings)
    client.publish("general", noise(), {})
    mine = [dataclasses.replace(r, topic="geo", request_id=f"geo-{i}") for i, r in enumerate(texts)]
    offer(scoring, [*texts, *mine])
    assert scoring.table().refused == len(mine)
    assert client.registry is not None
    client.registry.add_topic("geo", "general")
    assert client.added_topics() == {"geo": "general"}
    assert scoring.add_expert("geo", "general")
    assert not scoring.add_expert("geo", "general")
    evaluator.add_expert("geo", "general")
    prior = scoring.hedge.weights("geo")
    assert max(prior, key=lambda name: prior[name]) == "geo"
    client.publish("geo", flatten(torch_state(draft)), {})
    offer(scoring, mine)
    assert run_out(scoring, client, evaluator) == 6  # three experts, 24 records in two parts each
    table = scoring.table()
    assert table.acceptance["geo"]["geo"] == pytest.approx(1.0)
    assert table.acceptance["sql"]["geo"] == pytest.approx(1.0)
    assert table.acceptance["geo"]["general"] < 0.5
    assert table.versions["geo"] == 2
    everyone = (*EXPERTS, "geo")
    assert route({"geo": 1.0}, everyone, 0.5, table.weights).draft == "geo"
    again = ScoringLoop(settings)
    assert again.add_expert("geo", "general")
    again.restore(json.loads(json.dumps(scoring.export())))
    assert again.table().acceptance == table.acceptance


def test_trials_are_followed_while_a_permit_is_waited_for(draft: Path) -> None:
    now, status = [0.0], [TopicStatus(candidate=1)]
    scoring = ScoringLoop(
        settings_of(draft),
        clock=lambda: now[0],
        sleep=lambda _: None,
        stopped=lambda: now[0] > 60.0,
    )
    offer(scoring, [training_record(0)])
    seen: dict[float, tuple[str, ...]] = {}
    asked: list[float] = []

    class Busy(_Initial):
        def topic_status(self) -> dict[str, TopicStatus]:
            asked.append(now[0])
            return {"sql": status[0]}

        def acquire_permit(self) -> bool:
            return False

        def until_idle(self) -> None:
            now[0] += 0.5
            if now[0] == 30.0:
                status[0] = TopicStatus()
            seen[now[0]] = scoring.table().on_trial

    with pytest.raises(Stopped):
        scoring.run_once(Busy(), _UnusedEvaluator())
    assert seen[30.0] == ("sql",)
    assert seen[34.0] == seen[60.0] == ()
    assert len(asked) <= 21  # the registry takes processor time too


def test_what_an_expert_scored_before_its_weights_changed_is_dropped(draft: Path) -> None:
    now, version, denied = [0.0], [0], [False]
    scoring = ScoringLoop(settings_of(draft), clock=lambda: now[0], sleep=lambda _: None)
    offer(scoring, [training_record(n) for n in range(4)])

    class Changing(_Initial):
        def versions(self) -> dict[str, int]:
            return dict.fromkeys(EXPERTS, version[0])

        def weights(self, topic: str) -> Any:  # noqa: ARG002 - the protocol's
            return version[0], None

        def acquire_permit(self) -> bool:
            denied[0] = not denied[0] and now[0] == 5.0
            return not denied[0]

        def until_idle(self) -> None:
            now[0] += 10.0
            version[0] = 1

    class Slow(_UnusedEvaluator):
        def score(self, *given: Any) -> list[float]:
            _, _, records, before_batch = given
            now[0] = max(now[0], 5.0)
            before_batch()
            return [0.5] * len(records)

    assert scoring.run_once(Changing(), Slow())
    table = scoring.table()
    assert (table.scores, table.versions) == (0, dict.fromkeys(EXPERTS, 1))
    assert not scoring._resting
    for _ in EXPERTS:
        assert scoring.run_once(Changing(), Slow())
    assert scoring.table().scores == 8


def test_an_expert_whose_weights_cannot_be_had_rests_and_the_others_go_on(draft: Path) -> None:
    now = [0.0]
    scoring = ScoringLoop(settings_of(draft), clock=lambda: now[0], sleep=lambda _: None)
    offer(scoring, [training_record(n) for n in range(4)])

    class Lost(_Initial):
        def weights(self, topic: str) -> Any:
            return None if topic == "general" and not now[0] else (0, None)

    class Half(_UnusedEvaluator):
        def score(self, *given: Any) -> list[float]:
            return [0.5] * len(given[2])

    while scoring.run_once(Lost(), Half()):
        pass
    assert scoring.table().scores == 4
    now[0] = settings_of(draft).rest_s
    assert scoring.run_once(Lost(), Half())
    assert scoring.table().scores == 8
