"""The wheel, built from the tracked files, imports where the repository is out of reach."""

import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SKIP = {".git", ".venv", ".typing", ".cache", "out", "build", "dist", "__pycache__"}

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
parts = ("models/*/*", "configs/*", "monitoring/*")
for path in sorted(found for part in parts for found in home.glob(part)):
    print(path.relative_to(home).as_posix())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of a copy of the tree, so that no stale ``build/`` gets into it."""
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"
    shutil.copytree(ROOT, source, ignore=lambda _, names: SKIP.intersection(names))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(work)]
    result = subprocess.run([*command, str(source)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    (built,) = work.glob("*.whl")
    return built


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
    for model in ("target", "draft-general", "router"):
        assert f"models/{model}/config.json" in data
        assert f"models/{model}/model.safetensors" in data
        assert f"models/{model}/README.md" in data
    assert any(name.startswith("configs/") and name.endswith(".yaml") for name in data)
    assert {"monitoring/alerts.yml", "monitoring/paceline.json"} <= set(data)


def test_wheel_installs_the_command(clean_python: Path, tmp_path: Path) -> None:
    command = [str(clean_python.parent / "paceline"), "--help"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "serve" in result.stdout
