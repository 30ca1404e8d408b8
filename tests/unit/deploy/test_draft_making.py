"""`paceline draft make`: what it starts from, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from fixture_models import TARGET
from tiny_models import save_tiny

from paceline.actors.training import draft_maker
from paceline.actors.training.draft_maker import DraftMaker, MakerSettings, Speed
from paceline.actors.weights.eagle import new_draft, save_draft
from paceline.deploy import draft_making
from paceline.deploy.draft_making import make, start_of
from paceline.deploy.errors import ConfigError


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "target", 1, max_position_embeddings=512)


def test_it_goes_on_with_a_draft_of_this_target_and_size(target: Path, tmp_path: Path) -> None:
    learnt = tmp_path / "learnt"
    save_draft(new_draft(target), learnt)
    assert start_of(learnt, target, 1) == learnt
    assert start_of(learnt, target, 2) is None
    assert start_of(learnt, save_tiny(tmp_path / "other", 2), 1) is None
    assert start_of(None, target, 1) is None
    with pytest.raises(ConfigError, match="--target: no model folder at"):
        start_of(learnt, tmp_path / "nowhere", 1)
    (learnt / "config.json").write_text('{"model_type": "eagle"}')
    with pytest.raises(ConfigError, match="holds no EAGLE draft"):
        start_of(learnt, target, 1)


def test_another_model_in_its_folder_stays_as_it_is(target: Path) -> None:
    before = (target / "config.json").read_bytes()
    with pytest.raises(ConfigError, match=r"--out: .* holds another model"):
        make("tiny", MakerSettings(str(target), target, 0.0))
    assert (target / "config.json").read_bytes() == before
    assert not (target / "making").exists()


def test_no_time_makes_no_draft_and_leaves_the_one_there_is(target: Path, tmp_path: Path) -> None:
    out = tmp_path / "draft"
    save_draft(new_draft(target), out)
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match="--minutes: no answer is held out yet"):
        make("tiny", MakerSettings(str(target), out, 0.0, start=out))
    assert (out / "model.safetensors").read_bytes() == before
    assert not (out / "README.md").exists()


def test_what_a_run_has_left_goes_on_as_it_was_begun(target: Path, tmp_path: Path) -> None:
    out = tmp_path / "draft"
    settings = MakerSettings(str(target), out, 0.0, seed=3)
    DraftMaker(settings, lambda: 0.0)._save()
    (out / "making" / "initial" / "config.json").unlink()  # killed while it was written
    state = out / "making" / "state.json"
    facts = json.loads(state.read_text()) | {"elapsed_s": 50.0, "generated_s": 35.0}
    state.write_text(json.dumps(facts))
    maker = DraftMaker(settings, lambda: 0.0)
    assert (maker.progress.elapsed_s, maker._generated) == (50.0, 35.0)
    for other in (
        MakerSettings(str(target), out, 0.0, seed=4),
        MakerSettings(str(target), out, 0.0, seed=3, layers=2),
    ):
        with pytest.raises(ConfigError, match=r"was begun with (seed 3|layers 1)"):
            make("tiny", other)


@pytest.mark.usefixtures("deepspeed")
@pytest.mark.parametrize("learnt", [False, True])
def test_a_run_that_was_stopped_behind_its_draft_writes_the_card(
    learnt: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft is by then the one to go on from, as for a run that begins."""
    for name, value in {
        "_PROMPTS": 12,
        "_STEPS": 1,
        "_FIRST_RECORDS": 12,
        "_PROMPT_TOKENS": 48,
        "_ANSWER_TOKENS": 40,
        "_HELD_OUT": 0.3,
    }.items():
        monkeypatch.setattr(draft_maker, name, value)
    speeds = iter([KeyboardInterrupt(), Speed(2, 1.1, 1.2, 1.5)])

    def measure_speed(*_: object) -> Speed:
        if isinstance(speed := next(speeds), Speed):
            return speed
        raise speed

    monkeypatch.setattr(draft_making, "measure_speed", measure_speed)
    start, out = tmp_path / "learnt", tmp_path / "draft"
    if learnt:
        save_draft(new_draft(TARGET), start)
    begun = MakerSettings(str(TARGET), out, 1.0, start=start if learnt else None)
    with pytest.raises(KeyboardInterrupt):
        make("small", begun)
    card = make("small", replace(begun, start=start_of(out, TARGET, 1)))
    assert (out / "README.md").read_text() == card
    began = "went on from a draft" if learnt else "started from the target's first layers"
    assert f"It {began}" in card
    assert start_of(out, TARGET, 1) == out
    assert not (out / "making").exists()


@pytest.mark.parametrize(
    ("generated", "elapsed", "start", "answers"),
    [(35.0, 40.0, True, False), (34.0, 34.0, True, True), (30.0, 80.0, False, False)],
)
def test_generation_has_its_share_over_all_runs(
    generated: float,
    elapsed: float,
    start: bool,
    answers: bool,
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(draft_maker, "_FIRST_RECORDS", 0)
    save_draft(new_draft(target), tmp_path / "start")
    given = tmp_path / "start" if start else None
    maker = DraftMaker(
        MakerSettings(str(target), tmp_path / "out", 100.0, start=given), lambda: 0.0
    )
    maker._generated, maker._elapsed = generated, elapsed
    assert maker._needs_answers() == answers


def test_two_processes_make_no_draft_in_one_folder(target: Path, tmp_path: Path) -> None:
    hold = (
        "import sys; from paceline.actors.weights.state_folder import lock_folder; "
        "lock_folder(sys.argv[1]); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path / "making")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match="--out: another process makes a draft"):
            make("tiny", MakerSettings(str(target), tmp_path, 0.0))
