"""What shards say of their topics, as the schedule counts it."""

from __future__ import annotations

import pytest
from replay_samples import make_record

from paceline.actors.replay.record import encode
from paceline.actors.replay.shard import ReplayShard
from paceline.actors.training.topic_stats import requests


@pytest.mark.parametrize("left_out", [0, 5])
def test_requests_that_left_no_record_are_traffic_all_the_same(left_out: int) -> None:
    shard = ReplayShard("sql", clock=lambda: 0.0)
    shard.insert(encode(make_record(request_id="a", created=0.0)))
    shard.insert(encode(make_record(request_id="b", created=0.0)), left_out)
    assert requests(shard.stats()) == 2 + left_out
    assert shard.stats().inserted_total == 2
