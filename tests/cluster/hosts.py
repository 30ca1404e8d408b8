"""Hosts on this machine: namespaces of their own on a bridge of their own, each with an sshd."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
STORAGE = "/srv/paceline"  # as the hosts see it
RESOURCES = "/srv/own/resources.json"
NEEDED = ("ip", "sshd", "ssh", "ssh-keygen", "rsync", "unshare", "nsenter")
_SCRIPT = Path(__file__).with_name("host.sh")
_REPLACED = ("/tmp", "/run", "/root", "/srv", "/mnt")
_SEARCH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
_SSHD = """\
Port 22
HostKey /srv/own/host_key
AuthorizedKeysFile /srv/own/authorized_keys
PidFile none
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
UseDNS no
StrictModes no
PrintMotd no
MaxStartups 100
Subsystem sftp internal-sftp
"""


def missing() -> str | None:
    """Why hosts cannot be made here, in words; None where they can."""
    if os.geteuid() != 0:
        return "hosts need root, to make namespaces"
    absent = [tool for tool in NEEDED if shutil.which(tool, path=_SEARCH) is None]
    if absent:
        packages = "iproute2 openssh-server rsync"
        return f"hosts need {', '.join(absent)} (Debian: apt-get install {packages})"
    try:
        _run("unshare", "--mount", "--pid", "--fork", "--uts", "--net", "true")
    except subprocess.CalledProcessError as error:
        return f"no namespaces can be made here: {error.stderr.strip()}"
    return None


def _run(*command: str) -> str:
    """Run a command of the system; CalledProcessError where it fails."""
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env=os.environ | {"PATH": _SEARCH}
    )
    return done.stdout


@dataclass
class Host:
    """One host: its address, its folder and, while it is on, its first process."""

    name: str
    address: str
    folder: Path
    space: str  # network namespace
    link: str  # our end of its cable
    first: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def processes(self) -> list[psutil.Process]:
        """Everything that runs on it."""
        if self.first is None:
            return []
        try:
            return psutil.Process(self.first.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def cut_off(self) -> None:
        """Pull the cable, then the plug: no peer is notified."""
        _run("ip", "link", "set", self.link, "down")
        self.switch_off()

    def switch_off(self) -> None:
        """End every process at once."""
        if self.first is None:
            return
        for process in psutil.Process(self.first.pid).children():  # the init of its namespace
            process.kill()
        self.first.kill()
        self.first.wait(20)
        self.first = None


class Hosts:
    """Some hosts, and this machine at their bridge."""

    def __init__(self, folder: Path, names: Sequence[str], environment: Mapping[str, str]) -> None:
        """Say what they are; :meth:`start` makes them.

        Args:
            folder: for keys, logs and the storage that all of them see.
            names: of the hosts.
            environment: of every login shell on them.
        """
        self._folder = folder
        self._mark = f"pl{os.getpid() % 0xFFFF:04x}"
        self._net = f"10.213.{os.getpid() % 250}"
        self._environment = environment
        self.storage = folder / "storage"
        self.key = folder / "key"
        self.hosts = [
            Host(
                name=name,
                address=f"{self._net}.{number}",
                folder=folder / name,
                space=f"{self._mark}-{number}",
                link=f"{self._mark}v{number}",
            )
            for number, name in enumerate(names, start=1)
        ]

    def start(self, resources: Mapping[str, Mapping[str, float]]) -> None:
        """Make bridge, cables and hosts, and return when every sshd listens.

        Args:
            resources: host to its Ray resources.
        """
        self.storage.mkdir()
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.key))
        _run("ip", "link", "add", self._mark, "type", "bridge")
        _run("ip", "addr", "add", f"{self._net}.254/24", "dev", self._mark)
        _run("ip", "link", "set", self._mark, "up")
        for host in self.hosts:
            self._furnish(host, resources.get(host.name, {}))
            self._wire(host)
            self.switch_on(host)

    def _furnish(self, host: Host, resources: Mapping[str, float]) -> None:
        (host.folder / "root").mkdir(parents=True)
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(host.folder / "host_key"))
        exports = [f"export {name}='{value}'" for name, value in self._environment.items()]
        files = {
            "sshd_config": _SSHD,
            "authorized_keys": self.key.with_suffix(".pub").read_text(),
            "profile.sh": "\n".join([*exports, f"export PATH={sys.prefix}/bin:$PATH", ""]),
            "root/.bashrc": "",
            "hosts": "127.0.0.1 localhost\n"
            + "".join(f"{other.address} {other.name}\n" for other in self.hosts),
            "resolv.conf": "nameserver 127.0.0.1\n",
            "resources.json": json.dumps(resources),
        }
        for name, text in files.items():
            (host.folder / name).write_text(text)

    def _wire(self, host: Host) -> None:
        inside = ("ip", "-n", host.space)
        _run("ip", "netns", "add", host.space)
        ends = ("type", "veth", "peer", "name", "eth0", "netns", host.space)
        _run("ip", "link", "add", host.link, *ends)
        _run("ip", "link", "set", host.link, "master", self._mark, "up")
        _run(*inside, "addr", "add", f"{host.address}/24", "dev", "eth0")
        _run(*inside, "link", "set", "lo", "up")
        _run(*inside, "link", "set", "eth0", "up")
        # Ray finds a host's own address by the way to the outside; this one leads nowhere.
        _run(*inside, "route", "add", "default", "via", f"{self._net}.254")

    def switch_on(self, host: Host) -> None:
        """Start a host, plugged in, and return when its sshd listens."""
        _run("ip", "link", "set", host.link, "up")
        paths = {str(ROOT), sys.prefix, sys.base_prefix}
        keep = sorted(path for path in paths if path.startswith(_REPLACED))
        environment = {
            "PATH": _SEARCH,
            "NAME": host.name,
            "OWN": str(host.folder),
            "STORAGE": str(self.storage),
            "KEEP": "\n".join(keep) or str(host.folder),
        }
        spaces = ["--mount", "--pid", "--fork", "--kill-child", "--uts", "--ipc"]
        with (host.folder / "log").open("ab") as log:
            host.first = subprocess.Popen(
                ["nsenter", f"--net=/run/netns/{host.space}", "unshare", *spaces, "bash", _SCRIPT],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._wait_for_sshd(host)

    def _wait_for_sshd(self, host: Host) -> None:
        deadline = time.monotonic() + 30
        while True:
            done = subprocess.run(self.ssh(host, "true"), capture_output=True, text=True)
            if done.returncode == 0:
                return
            if time.monotonic() > deadline:
                log = (host.folder / "log").read_text()
                raise RuntimeError(f"{host.name} does not come up: {done.stderr} {log}")
            time.sleep(0.2)

    def ssh(self, host: Host, command: str) -> list[str]:
        """The command line that runs a command on a host, in a login shell."""
        options = ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR")
        flags = [part for option in options for part in ("-o", option)]
        login = f"root@{host.address}"
        return ["ssh", "-i", str(self.key), *flags, login, f"bash --login -c {_quoted(command)}"]

    def on(self, host: Host, command: str, timeout_s: float = 120.0) -> str:
        """Run a command on a host; returns what it said, and raises where it fails."""
        done = subprocess.run(
            self.ssh(host, command), capture_output=True, text=True, timeout=timeout_s
        )
        if done.returncode != 0:
            raise RuntimeError(f"{host.name}: {command}: {done.stdout}{done.stderr}")
        return done.stdout

    def stop(self) -> None:
        """End and remove everything that :meth:`start` made, as far as it came."""
        for host in self.hosts:
            try:
                host.switch_off()
            except (psutil.Error, OSError, subprocess.TimeoutExpired):
                _kill(host)
        for command in (
            *(("ip", "netns", "del", host.space) for host in self.hosts),
            *(("ip", "link", "del", host.link) for host in self.hosts),
            ("ip", "link", "del", self._mark),
        ):
            subprocess.run(command, capture_output=True, env=os.environ | {"PATH": _SEARCH})


def _kill(host: Host) -> None:
    if host.first is not None and host.first.poll() is None:
        os.kill(host.first.pid, signal.SIGKILL)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
