"""Forwards that are replayed give what forwards give; here a replay is the function again."""

from __future__ import annotations

from collections.abc import Callable

import torch
from engines import engine_of, request, run, served, tokens_of
from tiny_models import tiny_llama
from torch import Tensor

from paceline.actors.decoding.graphs import GraphedDecoder, columns_of
from paceline.actors.decoding.runner import ModelRunner


class Recorded:
    """A capture that remembers what it was given, and reads the same memory at every replay."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        self.captured += 1
        result = run().clone()

        def replay() -> None:
            self.replayed += 1
            result.copy_(run())

        return replay, result


def graphed(runner: ModelRunner, most_tokens: int = 4) -> Recorded:
    capture = Recorded()
    runner.decoder = GraphedDecoder(runner.decoder, capture, most_tokens)
    return capture


def test_columns_come_in_few_sizes() -> None:
    assert [columns_of(n, 100) for n in (1, 2, 3, 4, 5, 9, 65)] == [1, 2, 4, 4, 8, 16, 100]


def test_other_tokens_rows_and_positions_go_through_a_recorded_shape() -> None:
    plain, replayed = (ModelRunner([served(tiny_llama(1))], 3, 64) for _ in range(2))
    capture = graphed(replayed)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(3, 300, (3, 20), generator=generator)
    for runner in (plain, replayed):
        for row in range(3):
            assert runner.kv.reserve(row, 40)
            runner.prefill(row, prompts[row].tolist(), 0)
    assert capture.captured == 0  # prompts are too long for it
    kept = []
    for turn, rows in enumerate([(0, 1), (1, 2), (2, 0), (0, 2)]):
        tokens = torch.randint(3, 300, (2, 3), generator=generator)
        positions = torch.tensor([[20], [18]]) + torch.arange(3) - turn % 2
        expected = plain.forward(rows, tokens, positions, 24)
        given = replayed.forward(rows, tokens, positions, 24)
        assert torch.equal(given, expected)
        kept.append((given, expected))
    assert (capture.captured, capture.replayed) == (1, 3)
    assert all(torch.equal(given, expected) for given, expected in kept)  # none written over


def test_new_weights_are_what_a_replay_reads() -> None:
    runner, other = (ModelRunner([served(tiny_llama(seed))], 1, 64) for seed in (1, 2))
    capture = graphed(runner)
    tokens, positions = torch.tensor([[7, 8]]), torch.tensor([[0, 1]])
    for each in (runner, other):
        assert each.kv.reserve(0, 8)
    for _ in range(2):
        runner.forward([0], tokens, positions, 2)
    assert capture.captured == 1
    runner.load_weights(other.models[0].state_dict())
    assert torch.equal(
        runner.forward([0], tokens, positions, 2), other.forward([0], tokens, positions, 2)
    )
    assert capture.captured == 1


def test_an_engine_of_replays_gives_the_same_answers() -> None:
    def answers(*, replay: bool) -> list[list[int]]:
        drafts = {name: served(tiny_llama(seed, layers=1)) for name, seed in (("a", 2), ("b", 3))}
        engine = engine_of(served(tiny_llama(1)), [drafts], k=3)
        runners = [engine._runner, engine._drafting._proposer._stacks["a"].runner]  # type: ignore[attr-defined]
        captures = [graphed(runner) for runner in runners] if replay else []
        asked = [
            request(
                f"{i}", [5 + i, 6, 7], draft="ab"[i % 2], max_tokens=12 + 8 * i, ignore_eos=True
            )
            for i in range(6)
        ]
        found = [tokens_of(outputs) for outputs in run(engine, asked).values()]
        assert all(capture.replayed > capture.captured > 0 for capture in captures)
        return found

    assert answers(replay=True) == answers(replay=False)
