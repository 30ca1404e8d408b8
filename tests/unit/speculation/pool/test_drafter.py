"""What an expert's server does between two frames: deltas, ahead, capacity, failures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from engines import served
from pools import VOCAB, make_drafter
from tiny_models import tiny_llama

from paceline.actors.engine.model_runner import ModelRunner
from paceline.actors.engine.request import SamplingParams
from paceline.actors.speculation.pool.drafter import SharedDrafter
from paceline.actors.speculation.pool.messages import Answer, Ask, AskRow

GREEDY = SamplingParams(max_tokens=50, temperature=0.0)
SEEDED = SamplingParams(max_tokens=50, temperature=0.9, seed=5)
PENALISED = SamplingParams(max_tokens=50, temperature=0.0, frequency_penalty=1.5)
PROMPT = (1, 17, 33, 60, 61, 7, 120)


def row(
    tokens: Sequence[int],
    base: int = 0,
    *,
    name: str = "r",
    k: int = 4,
    sampling: SamplingParams = GREEDY,
    draft: str = "a",
) -> AskRow:
    """The question about a whole sequence of which ``base`` tokens should be known."""
    return AskRow(
        request_id=name,
        draft=draft,
        base=base,
        tokens=tuple(tokens[base:]),
        num_output=len(tokens) - len(PROMPT),
        num_draft_tokens=k,
        sampling=sampling if base == 0 else None,
    )


def ask(drafter: SharedDrafter, *rows: AskRow, client: int = 0) -> Answer:
    (answer,) = drafter.answer([(client, Ask(1, rows))])
    return answer


def tokens_of(answer: Answer, i: int = 0) -> list[int]:
    found: list[int] = answer.token_ids[i, : answer.num_drafted[i]].tolist()
    return found


def fresh(tokens: Sequence[int], sampling: SamplingParams = GREEDY, k: int = 4) -> list[int]:
    """What an expert that never saw the sequence proposes."""
    return tokens_of(ask(make_drafter(), row(tokens, sampling=sampling, k=k)))


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED, PENALISED])
@pytest.mark.parametrize("ahead", ["on", "off"])
def test_proposals_are_those_of_an_expert_that_sees_the_sequence_anew(
    sampling: SamplingParams, ahead: str
) -> None:
    """Whatever was accepted: all, a part, or nothing; drafted ahead or not."""
    drafter = make_drafter(ahead=ahead)  # type: ignore[arg-type]
    tokens, base, random = list(PROMPT), 0, np.random.default_rng(0)
    hits = 0
    for number in range(12):
        answer = ask(drafter, row(tokens, base, sampling=sampling))
        drafts = tokens_of(answer)
        assert answer.unknown == ()
        assert drafts == fresh(tokens, sampling)
        hits += answer.ahead
        while drafter.may_draft_ahead:
            drafter.draft_ahead()
        base = len(tokens)
        if number % 3 == 2:  # a rejection
            accepted = int(random.integers(0, 4))
            tokens += [*drafts[:accepted], (drafts[accepted] + 1) % VOCAB]
        else:  # all of them, and the draft's own next token as the bonus
            bonus = fresh([*tokens, *drafts], sampling, k=1)
            tokens += [*drafts, *bonus]
    assert (hits > 3) == (ahead == "on")


def test_what_was_drafted_ahead_is_used_only_for_the_very_prefix() -> None:
    drafter = make_drafter(ahead="on")
    drafts = tokens_of(ask(drafter, row(PROMPT)))
    drafter.draft_ahead()
    other = [*PROMPT, *drafts, (fresh([*PROMPT, *drafts], k=1)[0] + 1) % VOCAB]
    answer = ask(drafter, row(other, len(PROMPT)))
    assert answer.ahead == 0
    assert tokens_of(answer) == fresh(other)
    assert drafter.ahead.misses == 1


def test_what_was_drafted_ahead_does_not_outlive_the_question_it_was_for() -> None:
    """The same tokens come twice; the second time they follow another prefix."""
    drafter = make_drafter(ahead="on")
    drafts = tokens_of(ask(drafter, row(PROMPT)))
    drafter.draft_ahead()
    new = [*drafts, *fresh([*PROMPT, *drafts], k=1)]
    drafter.absorb(0, Ask(2, (row([*PROMPT, *new], len(PROMPT)),)))
    twice = [*PROMPT, *new, *new]
    answer = ask(drafter, row(twice, len(PROMPT) + len(new)))
    assert answer.ahead == 0
    assert tokens_of(answer) == fresh(twice)


def test_fewer_tokens_than_drafted_ahead_are_a_prefix_of_them() -> None:
    drafter = make_drafter(ahead="on")
    drafts = tokens_of(ask(drafter, row(PROMPT)))
    drafter.draft_ahead()
    tokens = [*PROMPT, *drafts, *fresh([*PROMPT, *drafts], k=1)]
    answer = ask(drafter, row(tokens, len(PROMPT), k=2))
    assert answer.ahead == 1
    assert tokens_of(answer) == fresh(tokens, k=2)


def test_unseeded_drafts_ahead_follow_the_drafts_law() -> None:
    """The frequency of the first token drafted ahead, given its prefix, is q of that prefix."""
    sampling = SamplingParams(max_tokens=50, temperature=0.7)
    seen: dict[tuple[int, ...], list[int]] = {}
    laws: dict[tuple[int, ...], dict[int, float]] = {}
    drafter = make_drafter(ahead="on", support=2, seed=3)
    for number in range(1500):
        name = f"r{number}"
        drafts = tokens_of(ask(drafter, row(PROMPT, name=name, k=1, sampling=sampling)))
        drafter.draft_ahead()
        bonus = drafter._known[0][name].assumed[-1]  # any other would be a miss
        tokens = (*PROMPT, *drafts, bonus)
        answer = ask(drafter, row(tokens, len(PROMPT), name=name, k=1))
        assert answer.ahead == 1
        seen.setdefault(tokens, []).append(tokens_of(answer)[0])
        laws[tokens] = dict(
            zip(answer.support_ids[0, 0].tolist(), answer.support_probs[0, 0].tolist(), strict=True)
        )
        drafter.release(0, [name])
    tokens, found = max(seen.items(), key=lambda item: len(item[1]))
    assert len(found) >= 200
    for token, probability in laws[tokens].items():
        share = found.count(token) / len(found)
        deviation = (probability * (1 - probability) / len(found)) ** 0.5
        assert abs(share - probability) < 4.5 * deviation + 1e-9


def test_a_sequence_that_is_not_known_is_asked_for_whole() -> None:
    drafter = make_drafter()
    answer = ask(drafter, row(PROMPT, 3))
    assert answer.unknown == (0,)
    assert tokens_of(answer) == []
    assert tokens_of(ask(drafter, row(PROMPT))) == fresh(PROMPT)
    drafter.release(0, ["r"])
    assert ask(drafter, row([*PROMPT, 5], len(PROMPT))).unknown == (0,)


def test_clients_are_drafted_for_in_one_batch_and_know_nothing_of_each_other() -> None:
    drafter = make_drafter()
    other = [*PROMPT, 9, 8, 7]
    batch = [
        (0, Ask(1, (row(PROMPT), row(other, name="s", k=2, sampling=SEEDED)))),
        (1, Ask(7, (row(other, sampling=GREEDY),))),
    ]
    first, second = drafter.answer(batch)
    assert (first.round, second.round) == (1, 7)
    assert tokens_of(first) == fresh(PROMPT)
    assert tokens_of(first, 1) == fresh(other, SEEDED, k=2)
    assert tokens_of(second) == fresh(other)
    drafter.forget(0)
    assert drafter.num_sequences == 1
    assert ask(drafter, row([*other, 4], len(other)), client=1).unknown == ()


def test_more_sequences_than_rows_draft_nothing_and_take_a_row_when_one_is_free() -> None:
    drafter = make_drafter(rows=2)
    answer = ask(drafter, *(row(PROMPT, name=str(i)) for i in range(3)))
    assert answer.num_drafted.tolist() == [4, 4, 0]
    assert answer.unknown == (2,)
    assert drafter.failures == 0
    drafter.release(0, ["0"])
    assert tokens_of(ask(drafter, row(PROMPT, name="2"))) == fresh(PROMPT)


def test_tokens_of_a_question_given_up_are_not_lost() -> None:
    drafter = make_drafter()
    drafter.absorb(0, Ask(1, (row(PROMPT),)))
    tokens = [*PROMPT, 3, 4]
    assert tokens_of(ask(drafter, row(tokens, len(PROMPT)))) == fresh(tokens)


def test_new_weights_take_effect_at_once_and_drop_what_was_drafted_ahead() -> None:
    drafter = make_drafter(ahead="on")
    drafts = tokens_of(ask(drafter, row(PROMPT), row(PROMPT, name="old", draft="a@0")))
    drafter.draft_ahead()
    new = served(tiny_llama(77, layers=1, vocab=VOCAB))
    drafter.swap(5, new.state_dict())
    tokens = [*PROMPT, *drafts, *fresh([*PROMPT, *drafts], k=1)]
    answer = ask(
        drafter, row(tokens, len(PROMPT)), row(tokens, len(PROMPT), name="old", draft="a@0")
    )
    assert answer.ahead == 0
    assert answer.weight_versions == {"a": 5, "a@0": 0}
    assert tokens_of(answer) != fresh(tokens)
    assert tokens_of(answer, 1) == fresh(tokens)
    with pytest.raises(ValueError, match="shape"):
        drafter.swap(6, served(tiny_llama(1, layers=1, vocab=VOCAB, hidden=16)).state_dict())
    assert drafter.slots.versions["a"] == 5


def test_a_stack_that_fails_costs_a_round_its_drafts_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter = make_drafter()
    assert tokens_of(ask(drafter, row(PROMPT))) == fresh(PROMPT)
    with monkeypatch.context() as broken:
        broken.setattr(ModelRunner, "forward", None)
        answer = ask(drafter, row([*PROMPT, 5], len(PROMPT)))
    assert answer.unknown == (0,)
    assert tokens_of(answer) == []
    assert drafter.failures == 1
    assert tokens_of(ask(drafter, row([*PROMPT, 5]))) == fresh([*PROMPT, 5])


def test_drafts_never_reach_beyond_the_context() -> None:
    drafter = make_drafter(ahead="on")
    tokens = [*PROMPT, *[5] * (96 - len(PROMPT) - 5)]
    assert len(tokens_of(ask(drafter, row(tokens)))) == 4
    assert not drafter.may_draft_ahead


LONG = tuple(3 + i % 290 for i in range(41))


def test_a_question_reads_one_chunk_and_the_rest_is_read_after_the_answer() -> None:
    """39 tokens are to be read, 8 at a time; the last two are fed with the drafting."""
    drafter = make_drafter(chunk=8)
    read: list[int] = []
    runner_read = drafter._stack.runner.read

    def noted(rows: Sequence[int], tokens: Sequence[Sequence[int]], *further: Any) -> None:
        read.append(sum(map(len, tokens)))
        runner_read(rows, tokens, *further)

    drafter._stack.runner.read = noted  # type: ignore[method-assign]
    answer = ask(drafter, row(LONG))
    assert (answer.num_drafted.tolist(), answer.unknown, read) == ([0], (), [8])
    works = 0
    while drafter.has_work:
        drafter.work()
        works += 1
        assert len(read) == works + 1
    assert read == [8, 8, 8, 8, 7]
    tokens = [*LONG, 5]
    answer = ask(drafter, row(tokens, len(LONG)))
    assert tokens_of(answer) == fresh(tokens)
    assert max(read) == 8
    assert not drafter.has_work


def test_new_weights_read_what_is_known_again_between_the_questions() -> None:
    drafter = make_drafter(chunk=8)
    ask(drafter, row(LONG), row(LONG, name="old", draft="a@0"))
    while drafter.has_work:
        drafter.work()
    drafter.swap(5, served(tiny_llama(77, layers=1, vocab=VOCAB)).state_dict())
    works = 0
    while drafter.has_work:
        drafter.work()
        works += 1
    assert works == 5
    tokens = [*LONG, 5]
    answer = ask(drafter, row(tokens, 41), row(tokens, 41, name="old", draft="a@0"))
    assert answer.num_drafted.tolist() == [4, 4]


def test_reading_ends_without_memory_with_a_failure_and_with_the_sequence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter = make_drafter(chunk=8, positions=96)  # two of 48 with their drafts
    ask(drafter, *(row(LONG, name=str(i)) for i in range(3)))
    for _ in range(20):
        drafter.work()
    assert not drafter.has_work
    tokens = [*LONG, 5]
    answer = ask(drafter, *(row(tokens, 41, name=str(i)) for i in range(3)))
    assert answer.num_drafted.tolist()[:2] == [4, 4]
    assert tokens_of(answer) == fresh(tokens)
    assert drafter.failures == 0
    drafter = make_drafter(chunk=8)
    ask(drafter, row(LONG))
    drafter.release(0, ["r"])
    assert not drafter.has_work
    ask(drafter, row(LONG))
    with monkeypatch.context() as broken:
        broken.setattr(ModelRunner, "read", None)
        drafter.work()
    assert (drafter.failures, drafter.has_work, drafter.num_sequences) == (1, False, 0)
    assert ask(drafter, row(tokens, 41)).unknown == (0,)
