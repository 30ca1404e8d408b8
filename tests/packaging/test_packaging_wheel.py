"""The wheel, built from the tracked files, imports where the repository is out of reach."""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from wheels import ROOT, build_wheel

# Every package and module, then the data files that `paceline serve` needs.
PROBE = """
import importlib, pathlib, pkgutil, sys
import paceline.actors, paceline.cluster, paceline.deploy

names = []
for package in (paceline.actors, paceline.cluster, paceline.deploy):
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        names.append(found.name)
        importlib.import_module(found.name)
home = pathlib.Path(paceline.deploy.__file__).parent
print(len(names), home)
for pattern in ("models/*/*", "recipes/*.txt", "config/*.yaml", "monitoring/*", "ui/*"):
    for path in sorted(home.glob(pattern)):
        print(path.relative_to(home).as_posix())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the tree as it is."""
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def clean_python(wheel: Path) -> Path:
    """An environment with the wheel; the dependencies come by path, the editable install not."""
    home = wheel.parent / "venv"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    site = next((home / "lib").glob("python*/site-packages"))
    # Paths named in a .pth file are searched, but .pth files in them are not read.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*command, "--no-deps", "--no-index", str(wheel)], check=True)
    return python


def test_wheel_imports_and_carries_its_data(clean_python: Path, tmp_path: Path) -> None:
    result = subprocess.run(
        [str(clean_python), "-c", PROBE], capture_output=True, text=True, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr[-2000:]
    first, *data = result.stdout.splitlines()
    count, home = first.split(" ", 1)
    assert int(count) >= 30
    assert Path(home).is_relative_to(clean_python.parents[1])
    models = {path.name for path in (ROOT / "deploy" / "models").iterdir() if path.is_dir()}
    assert "router-minilm" in models
    for model in models:
        own = {name.rpartition("/")[2] for name in data if name.startswith(f"models/{model}/")}
        assert {"config.json", "README.md"} < own
        assert any(name.endswith(".safetensors") for name in own)
    assert "recipes/router_prompts.txt" in data
    assert any(name.startswith("config/") and name.endswith(".yaml") for name in data)
    assert {"monitoring/alerts.yml", "monitoring/paceline.json"} <= set(data)
    page = {path.name for path in (ROOT / "deploy" / "ui").iterdir()}
    assert {f"ui/{name}" for name in page} <= set(data)
    assert {"index.html", "style.css", "main.js"} <= page


def test_wheel_installs_the_command(clean_python: Path, tmp_path: Path) -> None:
    command = [str(clean_python.parent / "paceline"), "--help"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "serve" in result.stdout
