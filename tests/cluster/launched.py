"""`ray up` and `serve deploy` as an operator types them, with the files that are shipped."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from hosts import RESOURCES, ROOT, Host, Hosts

TOKEN = "not-a-secret-" + "0" * 32
_BIN = Path(sys.prefix) / "bin"
# Three of Ray's nodes and eleven processes with torch share two cores here.
_SMALL = " --num-cpus=2 --object-store-memory=157286400"
_OTHERS_RESOURCES = "/etc/paceline/resources.json"


class Launched:
    """The cluster of some hosts: its files, and the commands on them."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        """Write the files; :meth:`up` starts it."""
        self.hosts = hosts
        self.head, *self.others = hosts.hosts
        self.file = folder / "cluster.yaml"
        self._serve_file = hosts.storage / "serve.yaml"
        self._environment = os.environ | {
            "PATH": f"{_BIN}:{os.environ['PATH']}:/usr/sbin:/sbin",
            "HOME": str(folder / "home"),  # for Ray's token, which `ray up` hands out
            "RAY_TMPDIR": str(folder / "ray"),
            "TMPDIR": str(folder / "tmp"),
            "RAY_AUTH_MODE": "token",
            "RAY_UP_enable_autoscaler_v2": "0",  # it starts one worker too few with these hosts
        }
        for name in ("home/.ray", "ray", "tmp"):
            (folder / name).mkdir(parents=True)
        (folder / "home/.ray/auth_token").write_text(TOKEN)
        self.file.write_text(yaml.safe_dump(self._cluster()))

    @property
    def url(self) -> str:
        """Where requests go, from outside of the hosts."""
        return f"http://{self.head.address}:8000"

    def _cluster(self) -> dict[str, Any]:
        """cluster/local.yaml for these hosts, on which Paceline is there already."""
        config: dict[str, Any] = yaml.safe_load((ROOT / "cluster/local.yaml").read_text())
        config["cluster_name"] = f"paceline-test-{os.getpid()}"
        config["provider"]["head_ip"] = self.head.address
        config["provider"]["worker_ips"] = [host.address for host in self.others]
        config["auth"]["ssh_private_key"] = str(self.hosts.key)
        del config["file_mounts"]["~/install"]
        config["setup_commands"] = ["python -c 'import paceline.deploy.cluster_app'"]
        for commands in ("head_start_ray_commands", "worker_start_ray_commands"):
            last = config[commands][-1]
            assert _OTHERS_RESOURCES in last
            config[commands][-1] = last.replace(_OTHERS_RESOURCES, RESOURCES) + _SMALL
        return config

    def up(self) -> None:
        """``ray up``; the head starts the others by itself."""
        self._run("ray", "up", "-y", "--no-config-cache", str(self.file), timeout_s=240)

    def deploy(self, arguments: dict[str, Any]) -> None:
        """``serve deploy`` on the head, with cluster/serve.yaml and these arguments over its own.

        Args:
            arguments: section to its keys.
        """
        config = yaml.safe_load((ROOT / "cluster/serve.yaml").read_text())
        (application,) = config["applications"]
        for section, keys in arguments.items():
            application["args"][section] = application["args"].get(section, {}) | keys
        self._serve_file.write_text(yaml.safe_dump(config))
        self.on_head("serve deploy /srv/paceline/serve.yaml")

    def down(self) -> None:
        """``ray down``, which with these hosts stops the head alone; then the others."""
        self._run("ray", "down", "-y", str(self.file), timeout_s=120)
        for host in self.others:
            if host.first is not None:
                self.hosts.on(host, "ray stop --grace-period 10")

    def forget(self) -> None:
        """Remove what Ray's ssh leaves in /tmp of this machine, where no setting moves it."""
        name = yaml.safe_load(self.file.read_text())["cluster_name"]
        for folder in Path("/tmp").glob(
            f"ray_ssh_*/{hashlib.sha256(name.encode()).hexdigest()[:10]}"
        ):
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # another cluster's is in it
                folder.parent.rmdir()

    def on_head(self, command: str) -> str:
        """Run a command of Ray's on the head."""
        return self.on(self.head, command)

    def on(self, host: Host, command: str) -> str:
        """Run a command of Ray's on a host."""
        return self.hosts.on(host, f"export RAY_AUTH_MODE=token; {command}")

    def _run(self, *command: str, timeout_s: float) -> None:
        done = subprocess.run(
            command,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        assert done.returncode == 0, (
            f"{' '.join(command)}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
        )
