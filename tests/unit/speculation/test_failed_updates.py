"""Weights that cannot be loaded, and a policy that fails: both cost drafts, never an answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import pytest
import torch
from engines import engine_of, make_engine, request, run, served, tokens_of
from slotted import IDS, asked, outcomes, plain, short_of_memory, state, two_slots
from tiny_models import tiny_llama

from paceline.actors.engine import engine as decoding
from paceline.actors.engine.engine import Engine, StepOutput
from paceline.actors.speculation.colocated import ColocatedProposer
from paceline.actors.speculation.costs import DraftCosts, StepCosts
from paceline.actors.speculation.goodput import GoodputPolicy
from paceline.actors.speculation.pending_updates import PartialLoads, SetLimits, SwapWeights
from paceline.actors.speculation.proposer import DraftRow


def test_memory_that_runs_out_in_a_swap_costs_drafts_and_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The slot mixes old and new weights: its requests draft nothing until a load succeeds."""
    engine = make_engine(target_seed=1, clock=lambda: 0.0)
    engine.add(request("before", [3, 5, 7], max_tokens=30, ignore_eos=True))
    outputs = [o for _ in range(4) for o in engine.step()]
    with monkeypatch.context() as scarce:
        short_of_memory(scarce)
        engine.updates.put(SwapWeights("a", 1, state(1)))
        outputs += engine.step()
    assert engine.drafts()["a"] == 0
    found = run(engine, [asked("answer-1"), asked("answer-2", draft="b")])
    reference = run(make_engine(k=0), [request("x", [3, 5, 7], max_tokens=30, ignore_eos=True)])
    assert tokens_of([*outputs, *found["before"]]) == tokens_of(reference["x"])
    drafted = {name: parts[-1].chunk.speculative for name, parts in found.items()}
    steps = {name: stats and stats.num_spec_steps for name, stats in drafted.items()}
    assert steps["answer-1"] == 0
    assert steps["answer-2"]
    misfit = {"lm_head.weight": torch.zeros(1)}
    engine.updates.put(SwapWeights("a", 2, misfit))  # the slot still holds the partial load
    assert run(engine, [asked("answer-3")])["answer-3"][-1].chunk.speculative == drafted["answer-1"]
    engine.updates.put(SwapWeights("a", 3, state(1)))
    whole = run(engine, [asked("answer-4")])["answer-4"][-1].chunk.speculative
    assert whole is not None
    assert whole.num_spec_steps > 0


def drafted(engine: Engine, name: str, **fields: Any) -> tuple[int, int]:
    """Rounds in which a request was drafted for, and with which version at last."""
    stats = run(engine, [asked(name, **fields)])[name][-1].chunk.speculative
    assert stats is not None
    return stats.num_spec_steps, stats.weight_version


def load_in_part(engine: Engine, version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load a version of a in part."""
    with monkeypatch.context() as scarce:
        short_of_memory(scarce)
        engine.updates.put(SwapWeights("a", version, state(1)))
        run(engine)


def test_a_partial_load_is_retried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without another version, which may never be published."""
    now = [100.0]
    engine = make_engine(target_seed=1, clock=lambda: now[0])
    load_in_part(engine, 1, monkeypatch)
    now[0] += 0.9
    assert drafted(engine, IDS[0])[0] == 0
    now[0] += 0.2
    rounds, version = drafted(engine, IDS[1])
    assert rounds > 0
    assert version == engine.drafts()["a"] == 1
    assert engine.draft_failures == 0


def test_retries_of_a_load_that_keeps_failing_back_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, tried = [0.0], []
    engine = make_engine(target_seed=1, clock=lambda: now[0])
    load_in_part(engine, 1, monkeypatch)
    engine.add(request("long", [3, 5, 7], max_tokens=80, ignore_eos=True))

    def short(*_: Any) -> None:
        tried.append(now[0])
        raise RuntimeError("can't allocate memory")

    (stack,) = {id(s): s for s in engine.draft_runner._proposer._stacks.values()}.values()
    monkeypatch.setattr(stack.runner, "load_weights", short)
    for second in range(70):
        now[0] = float(second)
        assert engine.step()
    assert tried == [1.0, 3.0, 7.0, 15.0, 31.0, 63.0]


def test_retries_wait_at_most_a_minute_and_load_the_latest_weights() -> None:
    loads, error = PartialLoads(), RuntimeError()
    loads.add(SwapWeights("a", 1, {}), error)
    loads.add(SwapWeights("b@candidate", 1, {}), error)
    loads.add(SwapWeights("c", 1, {}), ValueError("shape"))
    assert [loads.affects(name, {"a", "a@0", "b"}) for name in ("a", "a@0", "b", "c")] == [
        True,
        False,
        False,
        False,
    ]
    assert loads.affects("a@candidate", {"a"})  # empty: it drafts as the stable slot
    assert loads.next_retry(0.0) is None
    for second in range(1, 1000):
        found = loads.next_retry(float(second))
        if found is not None:
            version = found.weight_version
            loads.add(SwapWeights("a", version + 1, {}), error)
    assert version == 21
    assert loads.next_retry_s == 63.0 + 16 * 60.0  # six tries, then one a minute
    loads.discard("a")
    assert not loads
    assert loads.next_retry_s is None


@pytest.mark.parametrize("fits", [False, True])
def test_a_candidate_that_cannot_be_loaded_has_failed(
    fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No request drafts with it: without a report its trial would never end."""
    engine = two_slots()
    with monkeypatch.context() as scarce:
        if fits:
            short_of_memory(scarce)
        weights = state(1) if fits else {"lm_head.weight": torch.zeros(1)}
        engine.updates.put(SwapWeights("a@candidate", 8, weights))
        run(engine)
    assert "a@candidate" not in engine.drafts()
    found = outcomes(outputs := run(engine, [asked(name) for name in IDS]))
    assert all(tokens_of(outputs[name]) == plain(name) for name in IDS)
    failed = [outcome for outcome in found.values() if outcome and outcome.failed]
    assert [(outcome.expert, outcome.weight_version) for outcome in failed] == [("a", 8)]
    found = outcomes(run(engine, [asked(name) for name in IDS]))  # reported once
    assert not any(outcome and outcome.failed for outcome in found.values())


def refused(engine: Engine, version: int) -> None:
    """A candidate of a that does not fit."""
    engine.updates.put(SwapWeights("a@candidate", version, {"lm_head.weight": torch.zeros(1)}))


def failures(outputs: Iterable[StepOutput]) -> list[tuple[str, int]]:
    return [(o.outcome.expert, o.outcome.weight_version) for o in outputs if failed(o)]


def failed(output: StepOutput) -> bool:
    return output.outcome is not None and output.outcome.failed


def test_a_request_without_an_outcome_does_not_take_the_report() -> None:
    engine = two_slots(initial=True)
    refused(engine, 8)
    engine.add(asked(IDS[0], draft="a@0"))
    engine.add(asked(IDS[1], draft="off"))
    engine.add(asked(IDS[2], draft="b"))
    outputs = [output for _ in range(4) for output in engine.step()]
    assert engine.num_running == 3
    assert failures(outputs) == []
    engine.add(asked(IDS[3]))
    outputs = [output for _ in range(2) for output in engine.step()]
    assert failures(outputs) == [("a", 8)]
    assert engine.num_running == 4


def test_a_request_reports_one_failure_only() -> None:
    engine = two_slots(max_num_seqs=2)
    for version, name in ((8, IDS[0]), (9, IDS[1])):
        refused(engine, version)
        engine.add(asked(name))
        outputs = [output for _ in range(2) for output in engine.step()]
        assert failures(outputs) == [("a", version)]
    assert engine.num_running == 2


def test_a_report_survives_a_failed_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If memory is short for weights, it may be for the target's forward too."""
    engine = two_slots()
    refused(engine, 8)
    with monkeypatch.context() as scarce:
        scarce.setattr(decoding, "rejection_sample", lambda *_: 1 // 0)
        engine.add(asked(IDS[0]))
        with pytest.raises(ZeroDivisionError):
            engine.step()
        assert failures(engine.fail_all()) == []
    outputs = run(engine, [asked(IDS[1])])[IDS[1]]
    assert failures(outputs)[0] == ("a", 8)


@pytest.mark.parametrize(
    "method", ["choose", "observe_round", "observe_finished", "reset_acceptance", "set_limits"]
)
def test_a_policy_that_fails_costs_drafts_and_no_answer(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError

    engine = two_slots(k=None)
    policy = GoodputPolicy(StepCosts({(1, 1): 0.01}), DraftCosts({(1, 1): 0.001}), 4)
    monkeypatch.setattr(policy, method, broken)
    monkeypatch.setattr(engine.draft_runner._controller, "_policy", policy)
    engine.updates.put(SetLimits(3, None))
    outputs = run(engine, [asked(name) for name in IDS[:5]], draft_failures=True)
    engine.updates.put(SwapWeights("a", 9, state(4)))
    outputs |= run(engine, [asked(name) for name in IDS[5:]], draft_failures=True)
    assert engine.draft_failures > 0
    assert all(tokens_of(outputs[name]) == plain(name) for name in IDS)


def test_a_policy_that_fails_at_new_weights_ends_no_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Versions that a proposer loaded by itself are observed within a round."""
    engine = two_slots(k=None)
    policy = GoodputPolicy(StepCosts({(1, 1): 0.01}), DraftCosts({(1, 1): 0.001}), 4)
    monkeypatch.setattr(policy, "reset_acceptance", lambda _: 1 // 0)
    monkeypatch.setattr(engine.draft_runner._controller, "_policy", policy)
    engine.add(asked(IDS[0]))
    outputs = [output for _ in range(3) for output in engine.step()]
    (stack,) = {id(s): s for s in engine.draft_runner._proposer._stacks.values()}.values()
    slot = next(iter(engine._running.values())).draft
    stack.versions[slot] += 1
    outputs += run(engine, draft_failures=True)[IDS[0]]
    assert engine.draft_failures == 1
    assert tokens_of(outputs) == plain(IDS[0])


def test_a_stack_that_fails_costs_its_own_drafts_and_not_a_candidate_of_another_stack(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names: list[dict[str, int]] = [{"a": 1, "a@candidate": 1}, {"wide": 3}]
    stacks = [{n: served(tiny_llama(seed, layers=1)) for n, seed in own.items()} for own in names]
    engine = engine_of(served(tiny_llama(1, layers=1)), stacks, canary_share=1.0)
    engine.updates.put(SwapWeights("a@candidate", 7, state(1)))
    run(engine)
    calls = []

    def broken(rows: Sequence[DraftRow], *_: object) -> None:
        calls.append(len(rows))
        raise RuntimeError("no drafts here")

    proposer = cast("ColocatedProposer", engine.draft_runner._proposer)  # type: ignore[attr-defined]
    monkeypatch.setattr(proposer._stacks["wide"], "propose", broken)
    requests = [
        asked(f"answer-{i}", draft=draft, max_tokens=60, ignore_eos=True)
        for i, draft in enumerate(("a", "wide"))
    ]
    outputs = run(engine, requests, draft_failures=True)
    assert engine.drafts()["a@candidate"] == 7
    stats = [outputs[r.request_id][-1].chunk.speculative for r in requests]
    assert stats[0] is not None
    assert stats[0].num_spec_steps >= 10
    assert stats[0].num_accepted_draft_tokens == stats[0].num_draft_tokens
    assert stats[1] is not None
    assert stats[1].num_draft_tokens == 0
    assert 4 <= engine.draft_failures == len(calls) <= 8  # asked less and less
    for r in requests:
        answer = tokens_of(outputs[r.request_id])
        assert answer == plain(r.request_id, max_tokens=60, ignore_eos=True)
