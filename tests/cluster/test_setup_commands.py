"""The `setup_commands` of cluster/local.yaml, run as a new host would run them: real pip, no cache.

What `ray up` takes along is built here; else the home folder is empty. It needs a package index,
and takes some minutes: torch and all that DeepSpeed builds beside it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from wheels import ROOT, build_wheel

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]

INSTALL_S = 900


def test_a_new_host_can_start_ray_and_serve_after_them(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    home = tmp_path / "home"
    (home / "install").mkdir(parents=True)
    wheel = build_wheel(tmp_path_factory.mktemp("wheel"))
    for file in (wheel, ROOT / "constraints.txt"):
        shutil.copy(file, home / "install")
    commands = yaml.safe_load((ROOT / "cluster/local.yaml").read_text())["setup_commands"]
    kept = {name: os.environ[name] for name in os.environ if name.startswith("PIP_")}
    environment = {
        "HOME": str(home),
        "PATH": f"{Path(sys.base_prefix) / 'bin'}:/usr/local/bin:/usr/bin:/bin",
        **kept,
    }

    def login(command: str) -> str:
        """As ssh runs it: a login shell, nothing of this process' environment."""
        done = subprocess.run(
            ["bash", "--login", "-c", command],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=INSTALL_S,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
        return done.stdout

    for command in commands:
        login(command)
    assert login("command -v ray").strip() == str(home / "paceline/bin/ray")
    assert "paceline" in login("paceline --version")
    output = login(
        "python -c 'import paceline.deploy.cluster_app as a, deepspeed; print(a.__file__)'"
    )
    assert str(home) in output
    for model in ("smollm2", "minilm"):
        assert list((home / ".cache/paceline/models").glob(f"{model}-*/model.safetensors"))
    # a second `ray up` runs them again, over what is there
    for command in commands[-1:]:
        login(command)
    assert (home / ".profile").read_text().count("paceline/bin") == 1
