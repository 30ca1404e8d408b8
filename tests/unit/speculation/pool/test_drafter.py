"""Drafting for several targets: cached tokens, drafting ahead, capacity, prefill, failures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from engines import served
from pools import VOCAB, make_drafter
from tiny_models import tiny_llama

from paceline.actors.engine.model_runner import ModelRunner
from paceline.actors.engine.request import SamplingParams
from paceline.actors.speculation.pool.drafter import Drafter, pad_rows
from paceline.actors.speculation.pool.messages import DraftRequest, DraftRequestRow, DraftResponse
from paceline.actors.speculation.rejection_sampler import Proposal

GREEDY = SamplingParams(max_tokens=50, temperature=0.0)
SEEDED = SamplingParams(max_tokens=50, temperature=0.9, seed=5)
PENALISED = SamplingParams(max_tokens=50, temperature=0.0, frequency_penalty=1.5)
PROMPT = (1, 17, 33, 60, 61, 7, 120)


def row(
    tokens: Sequence[int],
    num_cached: int = 0,
    *,
    name: str = "r",
    k: int = 4,
    sampling: SamplingParams = GREEDY,
    draft: str = "a",
) -> DraftRequestRow:
    """A row of a sequence of which ``num_cached`` tokens should be cached."""
    return DraftRequestRow(
        request_id=name,
        draft=draft,
        num_cached_tokens=num_cached,
        tokens=tuple(tokens[num_cached:]),
        num_output=len(tokens) - len(PROMPT),
        num_draft_tokens=k,
        sampling=sampling if num_cached == 0 else None,
    )


def respond(drafter: Drafter, *rows: DraftRequestRow, client: int = 0) -> DraftResponse:
    (response,) = drafter.propose([(client, DraftRequest(1, rows))])
    return response


def tokens_of(response: DraftResponse, i: int = 0) -> list[int]:
    found: list[int] = response.token_ids[i, : response.num_drafted[i]].tolist()
    return found


def fresh(tokens: Sequence[int], sampling: SamplingParams = GREEDY, k: int = 4) -> list[int]:
    """The proposal of an expert without cached tokens."""
    return tokens_of(respond(make_drafter(), row(tokens, sampling=sampling, k=k)))


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED, PENALISED])
@pytest.mark.parametrize("draft_ahead", ["on", "off"])
def test_proposals_do_not_depend_on_what_is_cached(
    sampling: SamplingParams, draft_ahead: str
) -> None:
    """Whatever was accepted: all, a part, or nothing; drafted ahead or not."""
    drafter = make_drafter(draft_ahead=draft_ahead)  # type: ignore[arg-type]
    tokens, base, random = list(PROMPT), 0, np.random.default_rng(0)
    hits = 0
    for number in range(12):
        response = respond(drafter, row(tokens, base, sampling=sampling))
        drafts = tokens_of(response)
        assert response.unknown_rows == ()
        assert drafts == fresh(tokens, sampling)
        hits += response.num_ahead_hits
        while drafter.has_idle_work:
            drafter.run_idle_work()
        base = len(tokens)
        if number % 3 == 2:  # a rejection
            accepted = int(random.integers(0, 4))
            tokens += [*drafts[:accepted], (drafts[accepted] + 1) % VOCAB]
        else:  # all of them, and the draft's own next token as the bonus
            bonus = fresh([*tokens, *drafts], sampling, k=1)
            tokens += [*drafts, *bonus]
    assert (hits > 3) == (draft_ahead == "on")


def test_tokens_drafted_ahead_are_used_for_the_assumed_prefix_only() -> None:
    drafter = make_drafter(draft_ahead="on")
    drafts = tokens_of(respond(drafter, row(PROMPT)))
    drafter.run_idle_work()
    other = [*PROMPT, *drafts, (fresh([*PROMPT, *drafts], k=1)[0] + 1) % VOCAB]
    response = respond(drafter, row(other, len(PROMPT)))
    assert response.num_ahead_hits == 0
    assert tokens_of(response) == fresh(other)


def test_tokens_drafted_ahead_are_valid_for_the_next_request_only() -> None:
    """The same tokens come twice; the second time they follow another prefix."""
    drafter = make_drafter(draft_ahead="on")
    drafts = tokens_of(respond(drafter, row(PROMPT)))
    drafter.run_idle_work()
    new = [*drafts, *fresh([*PROMPT, *drafts], k=1)]
    drafter.skip(0, DraftRequest(2, (row([*PROMPT, *new], len(PROMPT)),)))
    twice = [*PROMPT, *new, *new]
    response = respond(drafter, row(twice, len(PROMPT) + len(new)))
    assert response.num_ahead_hits == 0
    assert tokens_of(response) == fresh(twice)


def test_fewer_tokens_than_drafted_ahead_are_a_prefix_of_them() -> None:
    drafter = make_drafter(draft_ahead="on")
    drafts = tokens_of(respond(drafter, row(PROMPT)))
    drafter.run_idle_work()
    tokens = [*PROMPT, *drafts, *fresh([*PROMPT, *drafts], k=1)]
    response = respond(drafter, row(tokens, len(PROMPT), k=2))
    assert response.num_ahead_hits == 1
    assert tokens_of(response) == fresh(tokens, k=2)


def test_unseeded_tokens_drafted_ahead_follow_the_drafts_distribution() -> None:
    """The frequency of the first token drafted ahead, given its prefix, is q of that prefix."""
    sampling = SamplingParams(max_tokens=50, temperature=0.7)
    seen: dict[tuple[int, ...], list[int]] = {}
    distributions: dict[tuple[int, ...], dict[int, float]] = {}
    drafter = make_drafter(draft_ahead="on", support=2, seed=3)
    for number in range(1500):
        name = f"r{number}"
        drafts = tokens_of(respond(drafter, row(PROMPT, name=name, k=1, sampling=sampling)))
        drafter.run_idle_work()
        bonus = drafter._sequences[0][name].assumed[-1]  # any other would be a miss
        tokens = (*PROMPT, *drafts, bonus)
        response = respond(drafter, row(tokens, len(PROMPT), name=name, k=1))
        assert response.num_ahead_hits == 1
        seen.setdefault(tokens, []).append(tokens_of(response)[0])
        distributions[tokens] = dict(
            zip(
                response.support_ids[0, 0].tolist(),
                response.support_probs[0, 0].tolist(),
                strict=True,
            )
        )
        drafter.release(0, [name])
    tokens, found = max(seen.items(), key=lambda item: len(item[1]))
    assert len(found) >= 200
    for token, probability in distributions[tokens].items():
        share = found.count(token) / len(found)
        deviation = (probability * (1 - probability) / len(found)) ** 0.5
        assert abs(share - probability) < 4.5 * deviation + 1e-9


def test_an_unknown_sequence_must_be_sent_whole() -> None:
    drafter = make_drafter()
    response = respond(drafter, row(PROMPT, 3))
    assert response.unknown_rows == (0,)
    assert tokens_of(response) == []
    assert tokens_of(respond(drafter, row(PROMPT))) == fresh(PROMPT)
    drafter.release(0, ["r"])
    assert respond(drafter, row([*PROMPT, 5], len(PROMPT))).unknown_rows == (0,)


def test_clients_share_a_batch_and_are_isolated() -> None:
    drafter = make_drafter()
    other = [*PROMPT, 9, 8, 7]
    batch = [
        (0, DraftRequest(1, (row(PROMPT), row(other, name="s", k=2, sampling=SEEDED)))),
        (1, DraftRequest(7, (row(other, sampling=GREEDY),))),
    ]
    first, second = drafter.propose(batch)
    assert (first.round, second.round) == (1, 7)
    assert tokens_of(first) == fresh(PROMPT)
    assert tokens_of(first, 1) == fresh(other, SEEDED, k=2)
    assert tokens_of(second) == fresh(other)
    drafter.release_client(0)
    assert drafter.num_sequences == 1
    assert respond(drafter, row([*other, 4], len(other)), client=1).unknown_rows == ()


def test_more_sequences_than_rows_draft_nothing_and_take_a_row_when_one_is_free() -> None:
    drafter = make_drafter(rows=2)
    response = respond(drafter, *(row(PROMPT, name=str(i)) for i in range(3)))
    assert response.num_drafted.tolist() == [4, 4, 0]
    assert response.unknown_rows == (2,)
    assert drafter.failures == 0
    drafter.release(0, ["0"])
    assert tokens_of(respond(drafter, row(PROMPT, name="2"))) == fresh(PROMPT)


def test_tokens_of_a_superseded_request_are_kept() -> None:
    drafter = make_drafter()
    drafter.skip(0, DraftRequest(1, (row(PROMPT),)))
    tokens = [*PROMPT, 3, 4]
    assert tokens_of(respond(drafter, row(tokens, len(PROMPT)))) == fresh(tokens)


def test_new_weights_take_effect_at_once_and_drop_what_was_drafted_ahead() -> None:
    drafter = make_drafter(draft_ahead="on")
    drafts = tokens_of(respond(drafter, row(PROMPT), row(PROMPT, name="old", draft="a@0")))
    drafter.run_idle_work()
    new = served(tiny_llama(77, layers=1, vocab=VOCAB))
    drafter.load_weights("a", 5, new.state_dict())
    tokens = [*PROMPT, *drafts, *fresh([*PROMPT, *drafts], k=1)]
    response = respond(
        drafter, row(tokens, len(PROMPT)), row(tokens, len(PROMPT), name="old", draft="a@0")
    )
    assert response.num_ahead_hits == 0
    assert response.weight_versions == {"a": 5, "a@0": 0}
    assert tokens_of(response) != fresh(tokens)
    assert tokens_of(response, 1) == fresh(tokens)
    with pytest.raises(ValueError, match="shape"):
        drafter.load_weights(
            "a", 6, served(tiny_llama(1, layers=1, vocab=VOCAB, hidden=16)).state_dict()
        )
    assert drafter.slots.versions["a"] == 5


def test_a_failing_stack_costs_one_rounds_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter = make_drafter()
    assert tokens_of(respond(drafter, row(PROMPT))) == fresh(PROMPT)
    with monkeypatch.context() as broken:
        broken.setattr(ModelRunner, "forward", None)
        response = respond(drafter, row([*PROMPT, 5], len(PROMPT)))
    assert response.unknown_rows == (0,)
    assert tokens_of(response) == []
    assert drafter.failures == 1
    assert tokens_of(respond(drafter, row([*PROMPT, 5]))) == fresh([*PROMPT, 5])


def test_drafts_stay_within_the_context() -> None:
    drafter = make_drafter(draft_ahead="on")
    tokens = [*PROMPT, *[5] * (96 - len(PROMPT) - 5)]
    assert len(tokens_of(respond(drafter, row(tokens)))) == 4
    assert not drafter.has_idle_work


LONG = tuple(3 + i % 290 for i in range(41))


def test_a_request_prefills_one_chunk_and_the_rest_follows_the_response() -> None:
    """39 tokens are prefilled, 8 at a time; the last two are fed with the drafting."""
    drafter = make_drafter(chunk=8)
    read: list[int] = []
    runner_prefill = drafter._stack.runner.prefill_batch

    def noted(rows: Sequence[int], tokens: Sequence[Sequence[int]], *further: Any) -> None:
        read.append(sum(map(len, tokens)))
        runner_prefill(rows, tokens, *further)

    drafter._stack.runner.prefill_batch = noted  # type: ignore[method-assign]
    response = respond(drafter, row(LONG))
    assert (response.num_drafted.tolist(), response.unknown_rows, read) == ([0], (), [8])
    works = 0
    while drafter.has_idle_work:
        drafter.run_idle_work()
        works += 1
        assert len(read) == works + 1
    assert read == [8, 8, 8, 8, 7]
    tokens = [*LONG, 5]
    response = respond(drafter, row(tokens, len(LONG)))
    assert tokens_of(response) == fresh(tokens)
    assert max(read) == 8
    assert not drafter.has_idle_work


def test_new_weights_prefill_known_sequences_again_between_requests() -> None:
    drafter = make_drafter(chunk=8)
    respond(drafter, row(LONG), row(LONG, name="old", draft="a@0"))
    while drafter.has_idle_work:
        drafter.run_idle_work()
    drafter.load_weights("a", 5, served(tiny_llama(77, layers=1, vocab=VOCAB)).state_dict())
    works = 0
    while drafter.has_idle_work:
        drafter.run_idle_work()
        works += 1
    assert works == 5
    tokens = [*LONG, 5]
    response = respond(drafter, row(tokens, 41), row(tokens, 41, name="old", draft="a@0"))
    assert response.num_drafted.tolist() == [4, 4]


def test_prefill_stops_without_memory_after_a_failure_and_with_the_sequence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter = make_drafter(chunk=8, positions=96)  # two of 48 with their drafts
    respond(drafter, *(row(LONG, name=str(i)) for i in range(3)))
    for _ in range(20):
        drafter.run_idle_work()
    assert not drafter.has_idle_work
    tokens = [*LONG, 5]
    response = respond(drafter, *(row(tokens, 41, name=str(i)) for i in range(3)))
    assert response.num_drafted.tolist()[:2] == [4, 4]
    assert tokens_of(response) == fresh(tokens)
    assert drafter.failures == 0
    drafter = make_drafter(chunk=8)
    respond(drafter, row(LONG))
    drafter.release(0, ["r"])
    assert not drafter.has_idle_work
    respond(drafter, row(LONG))
    with monkeypatch.context() as broken:
        broken.setattr(ModelRunner, "prefill_batch", None)
        drafter.run_idle_work()
    assert (drafter.failures, drafter.has_idle_work, drafter.num_sequences) == (1, False, 0)
    assert respond(drafter, row(tokens, 41)).unknown_rows == (0,)


def test_suffixes_fit_beside_an_expert_that_still_prefills() -> None:
    padded = {name: torch.from_numpy(array) for name, array in pad_rows([None]).items()}
    waiting = Proposal(
        token_ids=padded["token_ids"].long(),
        num_drafted=padded["num_drafted"].long(),
        token_probs=padded["token_probs"],
        support_ids=padded["support_ids"].long(),
        support_probs=padded["support_probs"],
    )
    both = waiting.scatter([0], 2).with_suffixes({1: [7, 8]})
    assert both.num_drafted.tolist() == [0, 2]
    assert both.token_ids.tolist() == [[0, 0], [7, 8]]
    assert both.draft_probs[1].tolist() == [1.0, 1.0]
