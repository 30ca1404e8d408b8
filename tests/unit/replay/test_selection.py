"""Which requests are scored: by hash alone, of held-out prompts alone, never more than asked.

And those without a record are counted.
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from replay_samples import make_record

from paceline.actors.replay.record import ReplayRecord, is_held_out
from paceline.actors.replay.selection import LeftOut, is_scored

BASE = make_record()


def request(number: int) -> ReplayRecord:
    prompt = np.array([1, number, number + 1], dtype=np.int32)
    return dataclasses.replace(BASE, request_id=f"chatcmpl-{number}-0", prompt_token_ids=prompt)


@pytest.mark.parametrize(
    ("share", "held_out", "expected"),
    [(0.0, 0.2, 0.0), (0.05, 0.2, 0.05), (0.2, 0.2, 0.2), (0.9, 0.2, 0.2), (0.05, 0.0, 0.05)],
)
def test_the_share_is_that_of_all_requests(share: float, held_out: float, expected: float) -> None:
    picked = sum(is_scored(request(n), share, held_out) for n in range(4000))
    assert picked / 4000 == pytest.approx(expected, abs=0.02)
    assert picked > 0 or expected == 0


def test_only_prompts_that_no_draft_learns_from_are_taken() -> None:
    requests = [request(n) for n in range(1000)]
    picked = [r for r in requests if is_scored(r, 0.1, 0.2)]
    assert picked
    assert all(is_held_out(r.conversation, 0.2) for r in picked)
    assert [is_scored(r, 1.0, 0.0) for r in requests] == [True] * 1000


def test_a_prompt_that_comes_again_is_not_always_taken_with_it() -> None:
    again = [
        dataclasses.replace(request(n), prompt_token_ids=BASE.prompt_token_ids) for n in range(400)
    ]
    picked = sum(is_scored(r, 0.5, 1.0) for r in again)
    assert 150 < picked < 250


def test_requests_without_a_record_are_counted_once_and_by_topic() -> None:
    left_out = LeftOut()
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(left_out.add, ["sql"] * 400))
    assert (left_out.take("shell"), left_out.take("sql")) == (0, 400)
    assert left_out.take("sql") == 0
