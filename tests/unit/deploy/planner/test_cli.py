"""``paceline plan``: tables, JSON, picture, one-line errors."""

import json
from pathlib import Path

import pytest
from planner_models import LLAMA_1B, LLAMA_70B, MIXTRAL

from paceline.deploy.cli.main import main
from paceline.deploy.config.config import MODELS_DIR


@pytest.fixture
def models(tmp_path: Path) -> list[str]:
    """Folders of a target and a draft."""
    folders = []
    for name, config in (("llama-70b", LLAMA_70B), ("llama-1b", LLAMA_1B), ("moe", MIXTRAL)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        folders.append(str(tmp_path / name))
    return folders[:2]


def test_json_has_everything(models: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--hardware", "H100", "--tensor-parallel", "4", "--draft-tensor-parallel", "1"]
    assert main(["plan", *models, *options, "--batch", "4", "--acceptance", "0.75", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["target"]["parameters"] == 70_553_706_496
    assert plan["target_hardware"]["tensor_parallel"] == 4
    assert plan["draft_hardware"]["tensor_parallel"] == 1
    assert [option["k"] for option in plan["options"]] == list(range(9))
    best = max(plan["options"], key=lambda option: option["speed_up"])
    assert (plan["best_k"], plan["best_speed_up"]) == (best["k"], best["speed_up"])
    assert plan["best_speed_up"] > 1.5
    assert plan["comparison"]["tokens"] == 10
    assert "fit" not in plan


def test_tables_end_with_a_conclusion(
    models: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    machine = ["--bandwidth-gbs", "1000", "--tflops", "100", "--memory-gb", "1000"]
    short = ["--context", "128", "--acceptance", "0.8"]
    assert main(["plan", *models, *machine, *short]) == 0
    out = capsys.readouterr().out
    assert "llama-70b: 70.6 G parameters" in out
    assert "times plain decoding" in out
    assert "It stops paying at batch" in out
    assert main(["plan", *models, *machine, "--acceptance", "0"]) == 0
    out = capsys.readouterr().out
    assert "speculation does not pay (k = 0)" in out
    assert "It pays at no batch size" in out


def test_plot_is_a_picture(
    models: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "new" / "plan.png"
    assert main(["plan", *models, "--hardware", "h200", "--json", "--plot", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")
    json.loads(capsys.readouterr().out)


def test_measured_steps_name_the_machine(
    models: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = {
        "context": 64,
        "precision": {"weight": 2, "kv": 4, "activation": 2},
        "target": {"1,1": 0.14, "1,2": 0.14, "2,1": 0.14, "16,9": 0.15},
        "draft": {"1,1": 0.003, "2,1": 0.003},
    }
    file = tmp_path / "steps.json"
    file.write_text(json.dumps(steps))
    assert main(["plan", *models, "--steps", str(file), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["precision"]["kv"] == 4.0
    # 139 GB in 0.14 s, less what overhead explains
    assert 0.9e12 < plan["target_hardware"]["bandwidth"] < 1.3e12
    assert plan["fit"]["errors"]["target"]["count"] == 4
    assert main(["plan", *models, "--steps", str(file)]) == 0
    assert "Fitted to measured steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "give --hardware, or --steps, or --bandwidth-gbs and --tflops"),
        (["--bandwidth-gbs", "100"], "give --hardware"),
        (["--bandwidth-gbs", "0", "--tflops", "1"], "must be positive"),
        (["--bandwidth-gbs", "inf", "--tflops", "1"], "must be positive and finite"),
        (["--hardware", "h100", "--memory-gb", "nan"], "must be positive and finite"),
        (["--hardware", "h100", "--overhead-us", "inf"], "must be finite and not negative"),
        (
            ["--hardware", "h100", "--max-speculative-tokens", "33"],
            "'--max-speculative-tokens': Input should be less than or equal to 32",
        ),
        (["--hardware", "b300"], "'--hardware': Value error, 'b300' is not one of"),
        (
            ["--hardware", "h100", "--batch", "0"],
            "'--batch': Input should be greater than",
        ),
        (["--hardware", "h100", "--acceptance", "1.5"], "acceptance must lie between 0 and 1"),
        (["--hardware", "cpu", "--tensor-parallel", "2"], "--interconnect-gbs"),
        (["--hardware", "h100", "--steps", "x.json"], "both name a machine"),
        (["--steps", "x.json", "--kv-dtype", "int8"], "the dtypes that were measured"),
        (["--steps", "/nowhere/steps.json"], "/nowhere/steps.json: cannot be read"),
        (["--hardware", "h100", "--plot", "plan.docx"], "--plot: "),
        (["--hardware", "h100", "--colour"], "No such option: --colour"),
    ],
)
def test_no_plan_is_one_line_and_2(
    models: list[str], capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    assert main(["plan", *models, *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("paceline: ")
    assert captured.err.count("\n") == 1
    assert said in captured.err


def test_a_model_that_is_missing_or_no_target_is_named(
    models: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "/nowhere", models[1], "--hardware", "h100"]) == 2
    assert capsys.readouterr().err.startswith("paceline: /nowhere: cannot be read")
    assert main(["plan", models[0]]) == 2
    assert "Missing argument 'draft'" in capsys.readouterr().err
    assert main(["plan", str(MODELS_DIR / "draft-smollm2"), models[1], "--hardware", "h100"]) == 2
    assert "draft-smollm2 is a draft and needs a target's" in capsys.readouterr().err


def test_help_names_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--help"]) == 0
    assert "paceline plan" in capsys.readouterr().out
