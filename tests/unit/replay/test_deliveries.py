"""Records on their way to receivers that answer, and to one that hangs."""

from __future__ import annotations

from paceline.actors.replay.deliveries import Deliveries


def test_a_receiver_that_hangs_is_not_sent_more_and_more() -> None:
    arrived: set[str] = set()
    deliveries = Deliveries(arrived.__contains__, most_bytes=1_000)
    assert deliveries.accepts("nobody")

    def send(receiver: str, count: int) -> int:
        sent = 0
        while sent < count and deliveries.accepts(receiver):
            deliveries.sent(receiver, f"{receiver}-{sent}", 300)
            sent += 1
        return sent

    assert send("hangs", 50) == 4
    assert not deliveries.accepts("hangs")
    arrived |= {f"answers-{n}" for n in range(50)}
    assert send("answers", 50) == 50
    assert deliveries.latest() == ["hangs-3", "answers-49"]
    arrived |= {"hangs-0", "hangs-1"}
    assert send("hangs", 50) == 2
