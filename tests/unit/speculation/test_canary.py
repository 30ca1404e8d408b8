"""Two weight slots per draft: which requests use which, and the cost of a bad candidate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributions import chi_square
from engines import make_engine, run, tokens_of
from pools import attached, make_drafter, pool_engine
from slotted import IDS, INSIDE, OUTSIDE, SHARE, asked, outcomes, plain, state, two_slots

from paceline.actors.engine.request import SamplingParams
from paceline.actors.engine.sampling import SamplingBatchCache
from paceline.actors.engine.target import OutcomeReporter
from paceline.actors.speculation.costs import DraftCosts, StepCosts
from paceline.actors.speculation.goodput import GoodputPolicy
from paceline.actors.speculation.pending_updates import RemoveCandidate, SwapWeights
from paceline.actors.speculation.pool.drafter import Drafter
from paceline.actors.speculation.pool.server import ExpertServer
from paceline.actors.speculation.rejection_sampler import (
    Proposal,
    drop_non_finite,
    rejection_sample,
)
from paceline.actors.weights.draft_outcomes import DraftOutcome

SAMPLED = {"temperature": 1.0}


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0, "seed": 5}])
def test_the_canarys_requests_use_the_candidate_and_no_text_depends_on_it(
    fields: dict[str, Any],
) -> None:
    assert len(INSIDE) >= 3
    assert len(OUTSIDE) >= 3
    outputs = run(two_slots(), [asked(name, **fields) for name in IDS])
    for name in IDS:
        assert tokens_of(outputs[name]) == plain(name, **fields)
    found = outcomes(outputs)
    for name in INSIDE:
        outcome = found[name]
        assert outcome is not None
        assert (outcome.expert, outcome.weight_version) == ("a", 7)
        assert outcome.accepted > 0
        if not fields:  # a seeded draft is cut to its support
            assert outcome.accepted == outcome.rounds
        chunk = outputs[name][-1].chunk
        assert chunk.speculative is not None
        assert chunk.speculative.draft == "a"
        assert outputs[name][-1].record is not None
        assert outputs[name][-1].record.weight_version == 7
    for name in OUTSIDE:
        outcome = found[name]
        assert outcome is not None
        assert outcome.weight_version == 0
        assert outcome.accepted < outcome.rounds


def test_further_choices_of_a_prompt_are_no_further_evidence() -> None:
    outputs = run(two_slots(), [asked(name, choice=int(name != IDS[0])) for name in IDS])
    found = outcomes(outputs)
    assert [name for name in IDS if found[name] is not None] == [IDS[0]]


def test_only_requests_of_the_expert_with_a_candidate_are_split() -> None:
    outputs = run(two_slots(), [asked(name, draft="b") for name in IDS])
    assert {outcome.weight_version for outcome in outcomes(outputs).values() if outcome} == {0}


def test_without_a_share_there_is_no_canary() -> None:
    engine = make_engine()
    outputs = run(engine, [asked(name) for name in IDS])
    assert set(engine.drafts()) == {"a", "b", "a@0"}
    assert {outcome.weight_version for outcome in outcomes(outputs).values() if outcome} == {0}


@pytest.mark.parametrize("promoted", [False, True])
def test_a_decision_during_answers_changes_no_text_and_mixes_no_outcomes(
    promoted: bool,
) -> None:
    engine, outputs = two_slots(), {}
    for name in IDS[:4]:
        engine.add(asked(name))
    for _ in range(3):
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    if promoted:
        engine.updates.put(SwapWeights("a", 7, state(1)))
    engine.updates.put(RemoveCandidate("a@candidate"))
    for name, parts in run(engine).items():
        outputs.setdefault(name, []).extend(parts)
    for name in IDS[:4]:
        assert tokens_of(outputs[name]) == plain(name)
    assert engine.drafts()["a"] == (7 if promoted else 0)
    assert "a@candidate" not in engine.drafts()
    found = outcomes(outputs)
    for name in set(INSIDE) & set(IDS[:4]):
        outcome = found[name]
        if promoted:  # the same weights all along, under the same number
            assert outcome is not None
            assert outcome.accepted == outcome.rounds
        else:
            assert outcome is None


@pytest.mark.parametrize("fields", [{}, SAMPLED])
def test_a_non_finite_candidate_costs_no_other_draft(
    fields: dict[str, Any],
) -> None:
    engine = two_slots()
    engine.updates.put(SwapWeights("a@candidate", 8, state(1, float("nan"))))
    outputs = run(engine, [asked(name, **fields) for name in IDS], draft_failures=True)
    assert engine.draft_failures == 1
    assert "a@candidate" not in engine.drafts()
    found = outcomes(outputs)
    failed = [name for name, outcome in found.items() if outcome and outcome.failed]
    assert failed
    assert set(failed) <= set(INSIDE)
    assert all(found[name].weight_version == 8 for name in failed)  # type: ignore[union-attr]
    for name in OUTSIDE:
        stats = outputs[name][-1].chunk.speculative
        assert stats is not None
        assert stats.num_spec_steps > 0
        if not fields:
            assert tokens_of(outputs[name]) == plain(name)


def test_stable_weights_that_never_draft_are_seen_beside_a_candidate() -> None:
    """Else a trial of what would replace them would never end."""
    rows = (1, len(IDS))
    target = StepCosts({(r, t): 1.0 for r in rows for t in (1, 2, 4)})
    policy = GoodputPolicy(target, DraftCosts({(r, e): 0.01 for r in rows for e in (1, 2)}), 3)
    engine = two_slots(k=None, policy=policy, max_num_seqs=len(IDS))
    engine.updates.put(SwapWeights("a", 8, state(1, float("nan"))))
    found = outcomes(run(engine, [asked(name) for name in IDS], draft_failures=True))
    assert {found[name] for name in OUTSIDE} == {DraftOutcome("a", 8, 0, 0)}
    assert all(found[name].rounds > 0 for name in INSIDE)  # type: ignore[union-attr]


def test_a_non_finite_draft_does_not_bias_sampled_text() -> None:
    """Verification by rejection with q = nan would give tokens that the target never gives."""
    engine = make_engine(target_seed=1)
    engine.updates.put(SwapWeights("a", 1, state(2, float("nan"))))
    outputs = run(
        engine,
        [asked(name, top_k=1, temperature=1.0) for name in IDS],
        draft_failures=True,
    )
    reference = run(make_engine(k=0), [asked(name, draft="off") for name in IDS])
    for name in IDS:  # of one token there is only one distribution
        assert tokens_of(outputs[name]) == tokens_of(reference[name])


def test_a_resumed_answer_has_no_outcome() -> None:
    whole = plain(INSIDE[0])
    again = asked(INSIDE[0], output_token_ids=tuple(whole[:5]))
    outputs = run(two_slots(), [again])
    assert outputs[INSIDE[0]][-1].outcome is None


def test_initial_weights_and_plain_decoding_have_no_outcome() -> None:
    requests = [asked(IDS[0], draft="a@0"), asked(IDS[1], draft="off"), asked(IDS[2], draft="x")]
    assert set(outcomes(run(make_engine(), requests)).values()) == {None}


def slotted_drafter() -> Drafter:
    drafter = make_drafter("a", candidate=True)
    drafter.load_weights("a@candidate", 7, state(1))
    return drafter


def test_an_expert_of_a_pool_has_two_slots_too() -> None:
    server = ExpertServer(slotted_drafter(), num_threads=1)
    try:
        engine = pool_engine(attached({"a": server}), target_layers=1, canary_share=SHARE)
        run(engine, [asked("first-1")])  # an answer shows which slots there are
        outputs = run(engine, [asked(name) for name in IDS])
        for name in IDS:
            assert tokens_of(outputs[name]) == plain(name)
        found = outcomes(outputs)
        for name in IDS:
            outcome = found[name]
            assert outcome is not None
            assert outcome.weight_version == (7 if name in INSIDE else 0)
            assert (outcome.accepted == outcome.rounds) == (name in INSIDE)
        server.load_weights("a@candidate", 0, None)
        assert server.ping(10.0)
        assert "a@candidate" not in server._drafter.slots.versions
        later = run(engine, [asked(name) for name in IDS])
        for name in IDS:
            assert tokens_of(later[name]) == plain(name)
    finally:
        server.close()


def test_an_expert_of_a_pool_removes_a_non_finite_candidate() -> None:
    drafter = make_drafter("a", candidate=True)
    drafter.load_weights("a@candidate", 8, state(1, float("nan")))
    server = ExpertServer(drafter, num_threads=1)
    try:
        engine = pool_engine(attached({"a": server}), target_layers=1, canary_share=SHARE)
        run(engine, [asked("first-1")])  # an answer shows which slots there are
        outputs = run(engine, [asked(name) for name in IDS])
        for name in IDS:
            assert tokens_of(outputs[name]) == plain(name)
        assert server.failed_candidate() == 8
        assert server.failed_candidate() == 8  # until the registry has taken it back
        assert "a@candidate" not in engine.drafts()
    finally:
        server.close()


def test_outcomes_go_together_when_it_is_time_or_nothing_runs() -> None:
    now, sent = [0.0], []
    reporter = OutcomeReporter(sent.append, lambda: now[0], every_s=1.0)
    one, two = (DraftOutcome("a", 1, 3, n) for n in (1, 2))
    reporter.flush(idle=True)
    reporter.add(one)
    reporter.flush(idle=False)
    assert sent == []
    now[0] = 1.0
    reporter.add(two)
    reporter.flush(idle=False)
    assert sent == [[one, two]]
    reporter.add(one)
    reporter.flush(idle=True)
    assert sent == [[one, two], [one]]


def test_outcomes_that_cannot_be_sent_are_lost_and_no_more() -> None:
    def broken(_: object) -> None:
        raise ConnectionError

    reporter = OutcomeReporter(broken, lambda: 0.0)
    reporter.add(DraftOutcome("a", 1, 3, 1))
    reporter.flush(idle=True)


def test_a_draft_that_fails_after_one_token_does_not_bias_the_others() -> None:
    """Position 2 has no probabilities where X was drawn at position 1, and some where Y was.

    To drop the whole row there would redraw X and keep every Y.
    """
    x, y = 0, 1
    distribution = {x: 0.5, y: 0.5}
    rows = 4000
    generator = torch.Generator().manual_seed(5)
    first = torch.randint(0, 2, (rows,), generator=generator)
    broken = torch.where(first == x, float("nan"), 1.0)
    proposal = Proposal(
        token_ids=torch.stack([first, torch.zeros_like(first)], dim=1),
        num_drafted=torch.full((rows,), 2),
        token_probs=torch.stack([torch.full((rows,), 0.5), broken], dim=1),
        support_ids=torch.tensor([x, y]).expand(rows, 2, 2).contiguous(),
        support_probs=torch.stack(
            [torch.full((rows, 2), 0.5), torch.stack([broken, 0 * broken], dim=1)], dim=1
        ),
    )
    kept, cut = drop_non_finite(proposal)
    assert cut is not None
    assert torch.equal(cut, first == x)
    assert torch.equal(kept.num_drafted, torch.where(first == x, 1, 2))
    assert bool(kept.support_probs.isfinite().all())
    logits = torch.zeros(rows, 3, 2)  # the target: both alike, everywhere
    params = SamplingBatchCache(torch.device("cpu")).get(
        [SamplingParams(4, temperature=1.0)] * rows
    )
    sampled = rejection_sample(
        logits, kept, params, torch.zeros(rows, dtype=torch.int64), generator, None
    )
    emitted = torch.where(sampled.num_accepted > 0, first, sampled.final_tokens)
    counts = {token: int((emitted == token).sum()) for token in distribution}
    assert chi_square(counts, distribution) > 1e-3


def test_padding_behind_a_short_row_is_not_taken_for_a_failure() -> None:
    probs = torch.tensor([[0.5, float("nan")], [0.5, 0.5]])
    ids = torch.zeros(2, 2, dtype=torch.int64)
    wide = probs[..., None].clone()
    kept, cut = drop_non_finite(Proposal(ids, torch.tensor([1, 2]), probs, ids[..., None], wide))
    assert cut is None
    assert kept.num_drafted.tolist() == [1, 2]
    assert bool(kept.token_probs.isfinite().all())


def test_a_failure_is_reported_at_once_by_a_resumed_answer_too() -> None:
    """Its client may go away, and then nothing would ever end the trial."""
    engine = two_slots()
    engine.updates.put(SwapWeights("a@candidate", 8, state(1, float("nan"))))
    engine.add(asked(INSIDE[0], output_token_ids=tuple(plain(INSIDE[0])[:3])))
    for _ in range(6):
        reported = [out.outcome for out in engine.step() if out.outcome is not None]
        if reported:
            break
    assert [(o.failed, o.weight_version) for o in reported] == [(True, 8)]
    assert engine.num_running == 1


def test_keys_and_values_of_faulty_weights_are_zeroed() -> None:
    engine = two_slots()
    engine.updates.put(SwapWeights("a@candidate", 8, state(1, float("nan"))))
    run(engine, [asked(name) for name in IDS], draft_failures=True)
    (stack,) = {id(s): s for s in engine.draft_runner._proposer._stacks.values()}.values()
    for part in (*stack.runner.kv.keys, *stack.runner.kv.values):
        assert bool(part.isfinite().all())
