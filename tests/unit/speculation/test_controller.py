"""Engines that leave k to the controller, with a perfect draft and a hopeless one.

A forward of the target takes a second and so does a round's drafting, by the engine's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import count

import pytest
from engines import engine_of, request, run, served, tokens_of
from tiny_models import tiny_llama

from paceline.actors.engine.engine import Engine
from paceline.actors.speculation.costs import DraftCosts, StepCosts
from paceline.actors.speculation.early_end import EarlyEnd
from paceline.actors.speculation.goodput import DraftGroup, GoodputPolicy

CAP, ROWS = 6, 4
PERFECT, HOPELESS = "perfect", "hopeless"


class RecordingPolicy(GoodputPolicy):
    """Keeps its choices."""

    def __init__(self) -> None:
        rows = (1, 2, ROWS)
        target = StepCosts({(r, t): 1.0 for r in rows for t in (1, 2, CAP + 1)})
        draft = DraftCosts({(r, e): 1.0 / CAP for r in rows for e in (1, 2)})
        super().__init__(target, draft, CAP)
        self.choices: list[Mapping[DraftGroup, int]] = []

    def choose(
        self,
        rows: Mapping[DraftGroup, int],
        others: int = 0,
        prefill_s: Callable[[], Mapping[DraftGroup, float]] = dict,
        prefilling: Mapping[DraftGroup, int] | None = None,
    ) -> Mapping[DraftGroup, int]:
        self.choices.append(super().choose(rows, others, prefill_s, prefilling))
        return self.choices[-1]


def made() -> tuple[Engine, RecordingPolicy]:
    """The perfect draft has the target's own weights, the hopeless one random others."""
    policy = RecordingPolicy()
    target = served(tiny_llama(1, vocab=300))
    drafts = {PERFECT: served(tiny_llama(1, vocab=300)), HOPELESS: served(tiny_llama(9, vocab=300))}
    ticks = count()
    engine = engine_of(
        target,
        [drafts],
        k=None,
        max_num_seqs=ROWS,
        policy=policy,
        clock=lambda: float(next(ticks)),
    )
    return engine, policy


def answered(engine: Engine, drafts: Iterable[str], times: int) -> list[list[int]]:
    """Greedy answers; each draft's requests one after the other, the drafts beside each other."""
    found = []
    for turn in range(times):
        asked = [
            request(f"{d}-{turn}", [5 + turn, 9, 40], draft=d, max_tokens=80, ignore_eos=True)
            for d in drafts
        ]
        found += [tokens_of(outputs) for outputs in run(engine, asked).values()]
    return found


def test_a_perfect_draft_is_used_to_the_cap() -> None:
    engine, policy = made()
    answered(engine, [PERFECT], 6)
    chosen = [plan[DraftGroup(PERFECT)] for plan in policy.choices]
    assert max(chosen) == CAP
    late = chosen[len(chosen) // 2 :]
    assert sum(k == CAP for k in late) >= 0.9 * len(late)
    assert len(chosen) < 6 * 80 / 4  # rounds, of which a plain token each would take 480


def test_the_first_token_does_not_wait_for_a_draft_prefill() -> None:
    engine, _ = made()
    answered(engine, [PERFECT], 6)  # by now it pays to draft to the cap
    outputs = run(engine, [request("late", [7, 9, 40], draft=PERFECT, max_tokens=80)])["late"]
    gave = [(len(o.chunk.rounds), len(o.chunk.token_ids)) for o in outputs]
    assert gave[0] == (0, 1)
    assert gave[1] == (1, CAP + 1)


def test_a_hopeless_draft_is_off_except_for_probes() -> None:
    engine, policy = made()
    answered(engine, [HOPELESS], 10)
    chosen = [plan[DraftGroup(HOPELESS)] for plan in policy.choices]
    assert max(chosen[:20]) > 0  # it had its chance
    late = chosen[len(chosen) // 2 :]
    assert sum(k > 0 for k in late) <= 0.1 * len(late)
    assert max(late) <= 2  # what a probe drafts


@pytest.mark.parametrize(("rows", "least", "most"), [(1, 1.0, 1.0), (ROWS, 0.2, 0.5)])
def test_a_large_batch_is_asked_about_less_often_where_nothing_pays(
    rows: int, least: float, most: float
) -> None:
    engine, policy = made()
    answered(engine, [HOPELESS], 10)
    began = len(policy.choices)
    asked = [
        request(f"{row}", [5 + row, 9, 40], draft=HOPELESS, max_tokens=80, ignore_eos=True)
        for row in range(rows)
    ]
    rounds = len(run(engine, asked)["0"])
    assert rounds >= 70
    assert least <= (len(policy.choices) - began) / rounds <= most


def test_each_draft_has_its_own_k_and_answers_are_the_targets() -> None:
    engine, policy = made()
    both = answered(engine, [PERFECT, HOPELESS], 4)
    beside = [
        plan
        for plan in policy.choices
        if plan.keys() == {DraftGroup(PERFECT), DraftGroup(HOPELESS)}
    ]
    late = beside[len(beside) // 2 :]
    assert sum(plan[DraftGroup(PERFECT)] == CAP for plan in late) >= 0.9 * len(late) > 10
    # beside the other it drafts for nothing by this clock; by itself it would cost the round
    began = len(policy.choices)
    alone = answered(engine, [HOPELESS], 1)
    chosen = [plan[DraftGroup(HOPELESS)] for plan in policy.choices[began:]]
    assert sum(k > 0 for k in chosen) <= 0.1 * len(chosen)
    plain = answered(made()[0], ["off"], 4)
    assert both[::2] == both[1::2] == plain
    assert alone == plain[:1]


def test_a_policy_that_cannot_say_where_drafts_end_costs_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(_: DraftGroup) -> EarlyEnd:
        raise ZeroDivisionError

    engine, policy = made()
    monkeypatch.setattr(policy, "early_end", fails)
    asked = request("perfect", [5, 9, 40], draft=PERFECT, max_tokens=80, ignore_eos=True)
    outputs = run(engine, [asked], draft_failures=True)["perfect"]
    assert [tokens_of(outputs)] == answered(made()[0], ["off"], 1)
    assert engine.draft_failures > 0
    assert max(drafted for o in outputs for drafted, _ in o.chunk.rounds) > 0
