"""A draft made from a target and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from fixture_models import TARGET

from paceline.actors.training import draft_maker
from paceline.actors.training.batches import plain_tokens, token_counts
from paceline.actors.training.draft_maker import (
    DraftMaker,
    MakerProgress,
    MakerSettings,
    measure_speed,
)
from paceline.actors.training.expert_evaluation import step_agreement
from paceline.actors.weights.eagle import VOCABULARY, load_draft, new_draft, read_draft

pytestmark = pytest.mark.usefixtures("deepspeed")


def ticks() -> Callable[[], float]:
    """A clock that moves on by a second whenever it is read."""
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    return clock


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    sizes = {
        "_PROMPTS": 12,
        "_STEPS": 12,
        "_FIRST_RECORDS": 12,
        "_PROMPT_TOKENS": 48,
        "_ANSWER_TOKENS": 40,
        "_SAVE_S": 5.0,
        "_HELD_OUT": 0.3,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in sizes.items():
            patch.setattr(draft_maker, name, value)
        yield


@pytest.fixture(scope="module")
def maker(tmp_path_factory: pytest.TempPathFactory) -> DraftMaker:
    """One that was interrupted, has gone on, and has written its draft."""
    out, seen = tmp_path_factory.mktemp("made") / "draft", list[MakerProgress]()
    first = MakerSettings(str(TARGET), out, 12.0, seed=3)
    DraftMaker(first, ticks(), seen.append).run()
    state = json.loads((out / "making" / "state.json").read_text())
    assert state["elapsed_s"] >= 12.0
    assert seen[-1].steps > 0
    further = MakerSettings(str(TARGET), out, 30.0, seed=3)
    maker = DraftMaker(further, ticks(), seen.append)
    resumed = maker.progress
    assert (resumed.elapsed_s, resumed.records) == (state["elapsed_s"], seen[-1].records)
    steps = seen[-1].steps
    maker.run()
    assert maker.write() == out
    assert maker.progress.steps > steps
    return maker


@pytest.mark.full
def test_a_draft_is_made_resumed_and_learns(maker: DraftMaker) -> None:
    out = maker._settings.out
    held_out = maker.held_out()
    assert held_out
    made = load_draft(out, TARGET, torch.float32, torch.device("cpu")).eval()
    started = load_draft(
        out / "making" / "initial", TARGET, torch.float32, torch.device("cpu")
    ).eval()
    plain = new_draft(TARGET, vocabulary=made.get_buffer(VOCABULARY))
    plain = plain.cast(made.device, made.dtype)
    plain.ends = made.ends
    plain.eval()
    after, before = (step_agreement(d, held_out, max_length=512) for d in (made, plain))
    assert len(after) == 3
    rank, size = made.basis.shape
    assert rank == size // 4
    assert sum(after) > sum(before) + 0.05
    learnt = maker._usable(made.config.vocab_size)
    linear, first = (step_agreement(d, learnt, max_length=512)[0] for d in (started, plain))
    assert linear > first + 0.1
    assert maker.step_acceptance(held_out)[0] == pytest.approx(after, abs=0.02)  # not rounded
    prompts = [tuple(record.prompt_token_ids.tolist()) for record in held_out[:2]]
    speed = measure_speed(maker._settings, after, prompts, ticks())
    assert 1 <= speed.k <= 8
    assert speed.mean_acceptance_length > 1.0
    assert speed.predicted > 0.0
    assert speed.measured > 0.0


@pytest.mark.full
def test_a_draft_that_has_learnt_goes_on_from_what_it_knows(
    maker: DraftMaker, tmp_path: Path
) -> None:
    start, out = maker._settings.out, tmp_path / "further"
    seen: list[MakerProgress] = []
    further = MakerSettings(str(TARGET), out, 24.0, seed=4, start=start)
    maker = DraftMaker(further, ticks(), seen.append)
    maker.run()
    maker.write()
    assert all(now.elapsed_s > 0.35 * 24.0 for now in seen if now.steps)
    known = load_draft(start, TARGET, torch.float32, torch.device("cpu")).eval()
    learnt = load_draft(out, TARGET, torch.float32, torch.device("cpu"))
    assert learnt.get_buffer(VOCABULARY).equal(known.get_buffer(VOCABULARY))
    assert not learnt.fuse.weight.equal(known.fuse.weight)
    held_out = maker.held_out()
    after, before = maker.step_acceptance(held_out)
    assert before == pytest.approx(step_agreement(known, held_out, max_length=512), abs=0.03)
    assert sum(after) > sum(before) - 0.05


def test_the_vocabulary_has_what_was_seen_and_every_single_character(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.actors.weights.eagle.DRAFT_VOCABULARY", 600)
    maker = DraftMaker(MakerSettings(str(TARGET), tmp_path / "draft", 1.0), ticks())
    maker.run()
    maker.write()
    vocabulary = set(read_draft(tmp_path / "draft").get_buffer(VOCABULARY).tolist())
    counts = token_counts(maker.held_out())
    assert plain_tokens(maker._tokenizer) <= vocabulary
    assert sum(counts[token] for token in vocabulary) > 0.7 * counts.total()


def test_a_target_of_another_family_is_refused(tmp_path: Path) -> None:
    from architectures import ARCHITECTURES
    from tiny_models import tiny_tokenizer
    from transformers import AutoModelForCausalLM

    from paceline.actors.weights.checkpoint import ModelError

    AutoModelForCausalLM.from_config(ARCHITECTURES["gpt2"](1)).save_pretrained(tmp_path / "t")
    tiny_tokenizer().save_pretrained(tmp_path / "t")
    with pytest.raises(ModelError, match="no draft can be made from models of type gpt2"):
        DraftMaker(MakerSettings(str(tmp_path / "t"), tmp_path / "draft", 1.0), ticks())
