"""Adapters and full copies: what both promise of a distiller, and what adapters add to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from local_client import filled, make_loop, trainer_settings
from tiny_models import tiny_llama
from training_records import TINY_VOCAB, learn, training_record

from paceline.actors.training.adapters import Adapters, is_adapter
from paceline.actors.training.batches import make_batch
from paceline.actors.training.candidate import Candidate
from paceline.actors.training.distiller import Distiller
from paceline.actors.training.permits import Assignment
from paceline.actors.training.round_counts import RoundCounts
from paceline.actors.training.settings import DistillerSettings, TrainerSettings
from paceline.actors.weights.flat_weights import flatten, unflatten

pytestmark = pytest.mark.usefixtures("deepspeed")

RECORDS = [training_record(number) for number in range(16)]
BATCH = make_batch(RECORDS, 64)


def settings(adapter: Any, dtype: str = "float32", **more: Any) -> DistillerSettings:
    return DistillerSettings(
        learning_rate=1e-2, dtype=dtype, device="cpu", adapter=adapter, lora_rank=8, **more
    )


def own(distiller: Distiller) -> dict[str, torch.Tensor]:
    """The weights under the draft's own names, as they lie in the process."""
    state = distiller._engine.module.draft.state_dict()
    return {name: t.clone() for name, t in state.items() if not is_adapter(name)}


@pytest.mark.parametrize("adapter", ["full", "lora"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_lowers_the_loss(draft: Path, adapter: str, dtype: str) -> None:
    distiller = Distiller(str(draft), settings(adapter, dtype))
    losses = [distiller.micro_step(BATCH).loss for _ in range(40)]
    # the tiny draft's embeddings are random: what its linear layers alone can do is less
    assert losses[-1] < (0.8 if adapter == "lora" else 0.5) * losses[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_published_is_the_base_and_the_scaled_product(draft: Path, dtype: str) -> None:
    distiller = Distiller(str(draft), settings("lora", dtype, lora_alpha=4.0, average_decay=0.0))
    base = own(distiller)
    for _ in range(5):
        distiller.micro_step(BATCH)
    assert all(torch.equal(base[name], weight) for name, weight in own(distiller).items())
    module = distiller._engine.module.draft
    published, changed = distiller.state_dict(), []
    assert not any(is_adapter(name) for name in published)
    for name, weight in published.items():
        expected = base[name].float()
        layer = module.get_submodule(name.rpartition(".")[0])
        if hasattr(layer, "adapter_up"):
            changed.append(name)
            up, down = layer.adapter_up.detach(), layer.adapter_down.detach()
            expected = expected + 4.0 / 8 * (up.float() @ down.float())
        assert torch.equal(weight, expected.to(torch.bfloat16)), name
    assert len(changed) == 7  # q, k, v, o, gate, up, down of the one layer


@pytest.mark.parametrize("embeddings", [False, True])
def test_the_merged_draft_says_what_the_adapted_one_says(embeddings: bool) -> None:
    draft = tiny_llama(0, vocab=TINY_VOCAB, layers=2)
    ids = BATCH.input_ids
    with torch.no_grad():
        before = draft(ids).logits
        adapters = Adapters(draft, 4, 8.0, embeddings=embeddings)
        assert torch.equal(draft(ids).logits, before)
        for parameter in adapters.parameters():
            parameter.normal_(0.0, 0.1)
        adapted, merged = draft(ids).logits, adapters.merged()
        adapters.remove()
        assert torch.equal(draft(ids).logits, before)
        draft.load_state_dict(merged)
        torch.testing.assert_close(draft(ids).logits, adapted, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(adapted, before, atol=1e-2)
    assert all(parameter.requires_grad for parameter in draft.parameters())


@pytest.mark.parametrize("adapter", ["full", "lora"])
def test_a_reset_starts_from_the_given_weights(draft: Path, adapter: str) -> None:
    distiller = Distiller(str(draft), settings(adapter))
    first = distiller.micro_step(BATCH).loss
    for _ in range(5):
        distiller.micro_step(BATCH)
    state = distiller.state_dict()
    distiller.reset(state)
    assert distiller.steps == 0
    assert all(torch.equal(state[name], weight) for name, weight in distiller.state_dict().items())
    assert distiller.micro_step(BATCH).loss < first
    with pytest.raises(ValueError, match="differ in names"):
        distiller.reset({"other": torch.zeros(3)})
    assert distiller.steps == 1
    distiller.reset(None)
    assert distiller.micro_step(BATCH).loss == pytest.approx(first, rel=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resumed_adapters_go_on_to_the_bit(tmp_path: Path, dtype: str) -> None:
    def candidate(rank: int = 8) -> Candidate:
        path = tmp_path / "draft"
        tiny_llama(0, vocab=TINY_VOCAB, layers=1).save_pretrained(path)
        distiller = DistillerSettings(
            learning_rate=5e-3, dtype=dtype, adapter="lora", lora_rank=rank
        )
        folder = str(tmp_path / "optimizer")
        return Candidate(
            "sql", TrainerSettings({"sql": str(path)}, distiller, optimizer_dir=folder)
        )

    def steps(one: Candidate) -> list[float]:
        return [learn(one, RECORDS[n : n + 4]).loss for n in range(8)]

    first = candidate()
    steps(first)
    state = first.compare(RECORDS, lambda: None).state
    first.mark_published(1, state, RECORDS, np.zeros(len(RECORDS)))
    expected = steps(first)
    second = candidate()
    second.load(1, flatten(state))
    assert second.steps == 8
    assert steps(second) == expected
    after = first.compare(RECORDS, lambda: None).state
    assert all(
        torch.equal(after[name], weight)
        for name, weight in second.compare(RECORDS, lambda: None).state.items()
    )
    other = candidate(rank=4)
    other.load(1, flatten(state))
    assert other.steps == 0  # another rank's adapters: it starts again on the published weights


def test_only_adapters_have_gradients_and_optimizer_state(draft: Path) -> None:
    full, lora = (Distiller(str(draft), settings(adapter)) for adapter in ("full", "lora"))
    sizes = []
    for distiller in (full, lora):
        distiller.micro_step(BATCH)
        state = distiller._engine.basic_optimizer.state
        sizes.append(sum(facts["exp_avg"].numel() for facts in state.values()))
    assert sizes[0] == sum(p.numel() for p in full._engine.module.draft.parameters())
    assert sizes[1] < 0.6 * sizes[0]
    frozen = [p for n, p in lora._engine.module.named_parameters() if not is_adapter(n)]
    assert all(p.grad is None and not p.requires_grad for p in frozen)


def test_an_expert_s_first_adapters_lie_on_what_general_is_served_as(
    draft: Path, tmp_path: Path
) -> None:
    client = filled(tmp_path)
    assert client.registry is not None
    loop = make_loop(trainer_settings(draft, distiller=settings("lora"), round_seconds=0.1), client)
    newer = {
        name: weight + 0.01
        for name, weight in loop.candidate("sql").compare(RECORDS[:1], lambda: None).state.items()
    }
    client.registry.publish("general", flatten(newer), {})
    assert loop.run_round()
    assert loop.progress.topic == "sql"
    base = own(loop.candidate("sql")._distiller)
    assert all(torch.equal(base[name], weight.float()) for name, weight in newer.items())
    # the base stays: general's next version is for those that have not begun
    client.registry.publish("general", flatten({n: w + 0.01 for n, w in newer.items()}), {})
    loop._base_on_general(loop.candidate("sql"), 2)
    kept = own(loop.candidate("sql")._distiller)
    assert all(torch.equal(base[name], weight) for name, weight in kept.items())
    # but one that starts over, never published, begins with what general is served as by then
    again = loop.candidate("sql")
    again._initial_records, again.version = 1, 0
    loop._topics.state("sql").counts = RoundCounts(rejections=1)
    again._ahead = False
    loop._round(
        "sql", Assignment("sql"), client.registry.stable_versions() | {"sql": 0}, client.stats()
    )
    newest = own(again._distiller)
    assert any(not torch.equal(base[name], weight) for name, weight in newest.items())
    _, flat = client.weights("general") or (0, None)
    assert flat is not None
    assert all(torch.equal(newest[n], w.float()) for n, w in unflatten(flat).items())
