"""Forwards replayed from CUDA graphs give what the same forwards give when they are launched."""

from __future__ import annotations

import pytest
import torch
from rollouts import compare_rollout
from tiny_models import tiny_llama

from paceline.actors.engine.attention import ATTENTION_NAME
from paceline.actors.engine.cuda_graphs import GraphedDecoder
from paceline.actors.engine.expert_layout import ExpertLayout
from paceline.actors.engine.model_runner import ModelRunner

GPU = torch.device("cuda")


def on_gpu(seed: int, dtype: torch.dtype, **more: int) -> torch.nn.Module:
    model = tiny_llama(seed, hidden=128, **more)
    model.set_attn_implementation(ATTENTION_NAME)
    moved: torch.nn.Module = model.to(GPU, dtype)
    return moved


def pair(dtype: torch.dtype, seeds: tuple[int, ...] = (1,)) -> tuple[ModelRunner, ModelRunner]:
    """Launched and replayed, of the same weights."""
    launched, replayed = (
        ModelRunner([on_gpu(seed, dtype) for seed in seeds], 4, 64, graph_tokens=tokens)
        for tokens in (0, 6)
    )
    assert isinstance(replayed.decoder, GraphedDecoder)
    assert not isinstance(launched.decoder, GraphedDecoder)
    for runner in (launched, replayed):
        for row in range(4):
            assert runner.kv.allocate(row, 60)
    return launched, replayed


def prefill(runner: ModelRunner, prompts: torch.Tensor, expert: int = 0) -> None:
    for row, prompt in enumerate(prompts.tolist()):
        runner.prefill(row, prompt, 0, expert)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_replay_gives_the_logits_of_a_launch(dtype: torch.dtype) -> None:
    launched, replayed = pair(dtype)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(3, 300, (4, 20), generator=generator)
    for runner in (launched, replayed):
        prefill(runner, prompts)
    kept = []
    for turn, rows in enumerate([(0, 1), (1, 2), (2, 3), (3, 0), (0, 2), (1, 3)]):
        tokens = torch.randint(3, 300, (2, 3), generator=generator).to(GPU)
        positions = (torch.tensor([[20], [18]]) + torch.arange(3) - turn % 2).to(GPU)
        expected = launched.forward(rows, tokens, positions, 24)
        kept.append((replayed.forward(rows, tokens, positions, 24), expected))
    decoder = replayed.decoder
    assert isinstance(decoder, GraphedDecoder)
    assert decoder.num_graphs == 1
    for found, expected in kept:  # none of them written over by a later replay
        torch.testing.assert_close(
            found,
            expected,
            atol=1e-5 if dtype is torch.float32 else 0.05,
            rtol=1e-5 if dtype is torch.float32 else 0.05,
        )


def test_new_weights_and_new_blocks_are_what_a_replay_reads() -> None:
    launched, replayed = pair(torch.float32, (1, 2))
    layout = ExpertLayout([1, 1], GPU)
    prompts = torch.randint(3, 300, (2, 20), generator=torch.Generator().manual_seed(2))
    tokens = torch.tensor([[7, 8], [9, 10]], device=GPU)
    positions = torch.tensor([[20, 21], [20, 21]], device=GPU)
    fresh = on_gpu(3, torch.float32).state_dict()
    seen = []
    for turn in range(6):
        for runner in (launched, replayed):
            if turn == 3:
                runner.load_weights(fresh, 1)
            if turn == 4:  # other blocks than those that were recorded with
                for row in (0, 1):
                    runner.kv.free(row)
                for row in (1, 0):
                    assert runner.kv.allocate(row, 60)
            prefill(runner, prompts, 1)
        found, expected = (
            runner.forward((0, 1), tokens, positions, 22, layout=layout)
            for runner in (replayed, launched)
        )
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        seen.append(found)
    assert not torch.allclose(seen[2], seen[3], atol=1e-2)


def test_experts_are_recorded_by_themselves_and_survive_growth() -> None:
    launched, replayed = pair(torch.float32, (1, 2))
    tokens, positions = torch.tensor([[7]], device=GPU), torch.tensor([[0]], device=GPU)

    def compare(expert: int) -> None:
        for _ in range(3):
            layout = ExpertLayout([expert], GPU)
            found, expected = (
                runner.forward([0], tokens, positions, 1, layout=layout)
                for runner in (replayed, launched)
            )
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)

    compare(0)
    compare(1)
    assert replayed.decoder.num_graphs == 2  # type: ignore[attr-defined]
    with torch.inference_mode():
        for runner in (launched, replayed):
            for _ in runner.grow([on_gpu(4, torch.float32)]):
                compare(0)
    compare(2)
    compare(0)
    assert replayed.decoder.num_graphs > 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("experts", [[1, 1, 1], [0, 1, 2], [2, 1, 2]])
def test_a_rollout_is_its_steps_one_after_the_other(experts: list[int]) -> None:
    launched, replayed = pair(torch.float32, (1, 2, 3))
    layout, rows = ExpertLayout(experts, GPU), [0, 3, 2]
    prompts = torch.randint(3, 300, (4, 20), generator=torch.Generator().manual_seed(2))
    for runner in (launched, replayed):
        for row, prompt in enumerate(prompts.tolist()):
            runner.prefill(row, prompt, 0, row % 3)
    for turn in range(4):
        compare_rollout(replayed, launched, rows, turn, layout, 1e-4)
    assert replayed.decoder.num_graphs == 1  # type: ignore[attr-defined]


def test_mixed_experts_are_right() -> None:
    launched, replayed = pair(torch.float32, (1, 2, 3))
    tokens = torch.arange(8, device=GPU).view(4, 2) + 5
    positions = torch.arange(2, device=GPU).expand(4, 2)
    for experts in ([0, 1, 2, 0], [0, 2, 2, 0], [1, 1, 1, 1], [2, 1, 0, 1]):
        found, expected = (
            runner.forward(range(4), tokens, positions, 2, layout=ExpertLayout(experts, GPU))
            for runner in (replayed, launched)
        )
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        alone = [
            launched.forward(
                [row], tokens[row : row + 1], positions[:1], 2, layout=ExpertLayout([e], GPU)
            )
            for row, e in enumerate(experts)
        ]
        torch.testing.assert_close(found, torch.cat(alone), atol=1e-4, rtol=1e-4)
