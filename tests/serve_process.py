"""``paceline serve`` as a process."""

import subprocess
import sys

import psutil

COMMAND = [sys.executable, "-m", "paceline.deploy.cli.main", "serve"]


def below_of(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    """Every process that the command has started, however far down."""
    return psutil.Process(process.pid).children(recursive=True)


def read_until(process: "subprocess.Popen[str]", text: str) -> str:
    """The output up to a line with the text."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return "".join(lines)
    raise AssertionError("ended early: " + "".join(lines))
