"""Replayed forwards equal eager ones; here a replay runs the function again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engines import engine_of, request, run, served, tokens_of
from rollouts import compare_rollout
from tiny_models import tiny_llama
from torch import Tensor

from paceline.actors.engine.cuda_graphs import (
    CudaCapture,
    GraphedDecoder,
    _GraphCache,
    bucket_columns,
)
from paceline.actors.engine.expert_layout import ExpertLayout, dense_layout
from paceline.actors.engine.model_runner import ModelRunner
from paceline.actors.speculation.profiling import profile_draft


class Recorded:
    """A capture that remembers what it was given, and reads the same memory at every replay."""

    max_result_bytes = 1 << 28

    def __init__(self) -> None:
        self.captured = self.replayed = self.forgotten = 0

    def __call__(
        self, run: Callable[[], tuple[Tensor, ...]]
    ) -> tuple[Callable[[], None], tuple[Tensor, ...]]:
        self.captured += 1
        results = tuple(result.clone() for result in run())

        def replay() -> None:
            self.replayed += 1
            for own, new in zip(results, run(), strict=True):
                own.copy_(new)

        return replay, results

    def reset(self) -> None:
        self.forgotten += 1


class Forgetful:
    """A capture that keeps nothing of what it runs, as CUDA graphs do."""

    max_result_bytes = 1 << 28

    def __call__(
        self, run: Callable[[], tuple[Tensor, ...]]
    ) -> tuple[Callable[[], None], tuple[Tensor, ...]]:
        return (lambda: None), run()

    def reset(self) -> None:
        pass


def graphed(runner: ModelRunner, max_tokens: int = 4) -> Recorded:
    capture = Recorded()
    runner.decoder = GraphedDecoder(runner.decoder, capture, max_tokens)
    return capture


def test_columns_have_few_sizes() -> None:
    assert [bucket_columns(n, 100) for n in (1, 4, 5, 16, 17, 65)] == [4, 4, 16, 16, 32, 100]


def test_other_tokens_rows_and_positions_use_the_graph_of_their_shape() -> None:
    plain, replayed = (ModelRunner([served(tiny_llama(1))], 3, 64) for _ in range(2))
    capture = graphed(replayed)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(3, 300, (3, 20), generator=generator)
    for runner in (plain, replayed):
        for row in range(3):
            assert runner.kv.allocate(row, 40)
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


def test_replayed_forwards_keep_the_hidden_states() -> None:
    plain, replayed = (
        ModelRunner([served(tiny_llama(1))], 3, 64, keep_hidden=True) for _ in range(2)
    )
    capture = graphed(replayed)
    tokens = torch.arange(5, 65).view(3, 20)
    for runner in (plain, replayed):
        for row in range(3):
            assert runner.kv.allocate(row, 40)
            runner.prefill(row, tokens[row].tolist(), 0)
    for turn in range(4):
        positions = 20 + 3 * turn + torch.arange(3).expand(2, -1)
        at = (0, 1) if turn % 2 else (1, 0)
        ids = tokens[:2, turn : turn + 3]
        found = [r.forward(at, ids, positions, 23 + 3 * turn) for r in (plain, replayed)]
        torch.testing.assert_close(found[1], found[0])
        states = [r.kv.read_hidden(at, positions) for r in (plain, replayed)]
        torch.testing.assert_close(states[1], states[0])
        assert states[1].abs().sum() > 0
    assert capture.replayed > 0


def test_a_replay_reads_new_weights() -> None:
    runner, other = (ModelRunner([served(tiny_llama(seed))], 1, 64) for seed in (1, 2))
    capture = graphed(runner)
    tokens, positions = torch.tensor([[7, 8]]), torch.tensor([[0, 1]])
    for each in (runner, other):
        assert each.kv.allocate(0, 8)
    for _ in range(2):
        runner.forward([0], tokens, positions, 2)
    assert capture.captured == 1
    runner.load_weights(other.models[0].state_dict())
    assert torch.equal(
        runner.forward([0], tokens, positions, 2), other.forward([0], tokens, positions, 2)
    )
    assert capture.captured == 1


def pair(experts: int, rows: int = 5) -> tuple[ModelRunner, ModelRunner, Recorded]:
    """Launched and replayed, of the same weights; every row has read a prompt of its own."""
    runners = [
        ModelRunner([served(tiny_llama(seed)) for seed in range(1, experts + 1)], rows, 64)
        for _ in range(2)
    ]
    capture = graphed(runners[1], max_tokens=9)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(3, 300, (rows, 20), generator=generator).tolist()
    for runner in runners:
        for row, prompt in enumerate(prompts):
            assert runner.kv.allocate(row, 40)
            runner.prefill(row, prompt, 0, row % experts)
    return runners[0], runners[1], capture


def test_padding_rows_and_tokens_to_few_sizes_changes_no_result() -> None:
    launched, replayed, capture = pair(1)
    for _ in range(3):
        for rows, tokens in (((0, 1, 2), 6), ((4, 3, 1), 7), ((0, 1, 2, 3), 9), ((4,), 4)):
            ids = torch.arange(len(rows) * tokens).view(len(rows), tokens) + 7
            at = (20 + torch.arange(tokens)).expand(len(rows), -1)
            expected = launched.forward(rows, ids, at, 20 + tokens)
            found = replayed.forward(rows, ids, at, 20 + tokens)
            assert found.shape == expected.shape
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert capture.captured == 2  # four rows of nine tokens, one of five
    ids, at = torch.tensor([[5], [6], [7], [8]]), torch.full((4, 1), 29)
    found, expected = (runner.forward(range(4), ids, at, 30) for runner in (replayed, launched))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_padding_beyond_the_context_is_lost() -> None:
    """It goes to the last position, which is not read before the request has ended."""
    launched, replayed, _ = pair(1, rows=2)
    for runner in (launched, replayed):
        assert runner.kv.allocate(0, 64)
    ids, at = torch.tensor([[5, 6, 7, 8, 9, 10]]), torch.arange(57, 63)[None]
    for _ in range(3):
        expected = launched.forward([0], ids, at, 63)
        torch.testing.assert_close(replayed.forward([0], ids, at, 63), expected)


def test_one_graph_serves_every_mixture_of_experts() -> None:
    launched, replayed, capture = pair(3)
    ids, at = torch.tensor([[5], [6], [7], [8]]), torch.full((4, 1), 20)
    for experts in ([0, 1, 2, 0], [0, 1, 1, 0], [2, 1, 2, 1], [0, 0, 0, 2]):
        layout = ExpertLayout(experts, "cpu")
        found, expected = (
            runner.forward(range(4), ids, at, 21, layout=layout) for runner in (replayed, launched)
        )
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert (capture.captured, capture.replayed) == (1, 3)


@pytest.mark.parametrize("experts", [[0, 0, 0], [0, 1, 2], [2, 1, 2]])
def test_a_rollout_is_its_steps_one_after_the_other(experts: list[int]) -> None:
    launched, replayed, capture = pair(3)
    assert (
        launched.rollout(
            [0], torch.tensor([[5, 6]]), torch.tensor([[19, 20]]), 24, 4, ExpertLayout([0], "cpu")
        )
        is None
    )
    layout, rows = ExpertLayout(experts, "cpu"), [0, 4, 2]
    for turn in range(3):
        compare_rollout(replayed, launched, rows, turn, layout, 1e-5)
    assert (capture.captured, capture.replayed) == (1, 2)


def test_large_stacks_are_not_computed_densely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.actors.engine.cuda_graphs._MAX_DENSE_BYTES", 0)
    launched, replayed, capture = pair(2)
    ids, at, layout = torch.tensor([[5], [6]]), torch.full((2, 1), 20), ExpertLayout([0, 1], "cpu")
    assert replayed.rollout([0, 1], ids.expand(-1, 2), at.expand(-1, 2), 24, 4, layout) is None
    for _ in range(3):
        found, expected = (
            runner.forward([0, 1], ids, at, 21, layout=layout) for runner in (replayed, launched)
        )
        torch.testing.assert_close(found, expected)
    assert capture.captured == 0


def test_a_graph_keeps_the_tensors_that_it_reads() -> None:
    """The places of other rows are copied to it; which rows experts compute lies in its memory."""
    _, replayed, _ = pair(3)
    replayed.decoder = GraphedDecoder(replayed.decoder.eager, Forgetful(), 9)  # type: ignore[attr-defined]
    dense_layout.cache_clear()
    ids, at, layout = torch.tensor([[5], [6]]), torch.full((2, 1), 20), ExpertLayout([0, 2], "cpu")
    for _ in range(2):
        replayed.forward([0, 1], ids, at, 21, layout=layout)
    gathered = weakref.ref(dense_layout((0, 2), 3, torch.device("cpu"))._gather_index)
    dense_layout.cache_clear()
    gc.collect()
    assert gathered() is not None
    replayed.decoder._graphs.clear()
    gc.collect()
    assert gathered() is None


def test_padding_with_a_not_finite_expert_affects_no_other_row() -> None:
    """Rows of other experts, three padded to four: what pads them is not what they read."""
    _, replayed, capture = pair(3)
    broken = replayed.models[0].state_dict()
    replayed.load_weights({name: torch.full_like(w, torch.nan) for name, w in broken.items()}, 0)
    ids, at, layout = (
        torch.tensor([[5], [6], [7]]),
        torch.full((3, 1), 20),
        ExpertLayout([1, 2, 1], "cpu"),
    )
    for row, expert in enumerate((1, 2, 1)):
        replayed.prefill(row, list(range(5, 25)), 0, expert)
    for _ in range(4):
        assert replayed.forward(range(3), ids, at, 21, layout=layout).isfinite().all()
    assert capture.replayed > 1


def test_too_many_graphs_are_dropped_together(monkeypatch: pytest.MonkeyPatch) -> None:
    launched, replayed, capture = pair(1)
    monkeypatch.setattr("paceline.actors.engine.cuda_graphs._MAX_GRAPHS", 2)
    for rows in (1, 2, 4) * 2:
        ids, at = torch.full((rows, 1), 5), torch.full((rows, 1), 20)
        for _ in range(2):
            found, expected = (r.forward(range(rows), ids, at, 21) for r in (replayed, launched))
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        assert replayed.decoder.num_graphs <= 2  # type: ignore[attr-defined]
    assert capture.forgotten > 1


def test_the_logits_of_large_batches_and_vocabularies_stay_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A share of the free memory holds what 64 rows of 152064 logits alternate between."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "Stream", object)
    before_the_cache = CudaCapture()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (64 << 30, 80 << 30))
    capture = Recorded()
    capture.max_result_bytes = before_the_cache.max_result_bytes
    graphs, at = _GraphCache(capture), torch.zeros(1)
    for _ in range(3):
        for columns in (16, 32, 64, 128):
            for width in (1, 2, 5, 9):
                logits = torch.empty(64, width, 152064, dtype=torch.bfloat16, device="meta")
                graphs.run((width, columns), lambda _, logits=logits: (logits,), at)
    assert (capture.captured, capture.forgotten) == (16, 0)
    capture.max_result_bytes = 1 << 28  # a small device: more than that are dropped together
    graphs.run((), lambda _: (at,), at)
    graphs.run((), lambda _: (at,), at)
    assert (len(graphs), capture.forgotten) == (1, 1)


def test_work_that_cannot_be_captured_runs_eagerly() -> None:
    launched, replayed, _ = pair(1)

    class Refusing(Forgetful):
        def __call__(self, _: object) -> Any:
            raise RuntimeError("out of memory")

    replayed.decoder = GraphedDecoder(launched.decoder, Refusing(), 9)  # type: ignore[arg-type]
    ids, at = torch.tensor([[5]]), torch.full((1, 1), 20)
    for _ in range(4):
        expected = launched.forward([0], ids, at, 21)
        assert torch.equal(replayed.forward([0], ids, at, 21), expected)
    assert replayed.decoder.num_graphs == 0


def test_an_engine_with_graphs_gives_the_same_answers() -> None:
    def answers(*, replay: bool) -> list[list[int]]:
        drafts = {name: served(tiny_llama(seed, layers=1)) for name, seed in (("a", 2), ("b", 3))}
        engine = engine_of(served(tiny_llama(1)), [drafts], k=3)
        runners = [engine._runner, engine.draft_runner._proposer._stacks["a"].runner]  # type: ignore[attr-defined]
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


def test_what_is_replayed_together_is_profiled_together() -> None:
    launched, replayed, capture = pair(2)
    for runner in (launched, replayed):
        times = profile_draft(runner, 20, [1, 2, 4], [1, 2])
        assert times.keys() == {(b, e) for b in (1, 2, 4) for e in (1, 2)}
        assert all(seconds > 0 for seconds in times.values())
    assert capture.replayed > capture.captured == 3  # an expert alone, two rows, four
