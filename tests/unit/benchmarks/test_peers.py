"""The comparison with other servers: its arithmetic, what it keeps, and what it leaves behind."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peers.__main__ as study
import pytest
from models import TARGET
from peers import report
from peers.catalogue import ALONE, AUTO, LLAMA_BF16, PLAIN, Peer, Setup
from peers.environments import PeerError
from peers.fleet import Fleet, Server
from peers.load import Reply, Work, tokens_of


def replies(count: int, seconds: float) -> list[Reply]:
    """Of 16 tokens each, one after another."""
    return [
        Reply(i * seconds, [i * seconds + 0.01, (i + 1) * seconds], 16, first_tokens=1)
        for i in range(count)
    ]


def block(number: int, served: float, alone: float) -> dict[str, Any]:
    """A block of 24 answers, whose times per token vary little."""
    spread = np.exp(0.001 * np.arange(24))
    peers = {PLAIN: {"tpot_s": served * spread}, ALONE: {"tpot_s": alone * spread}}
    return {"block": number, "topic": "sql", "peers": peers}


def test_what_http_adds_has_an_interval_over_blocks() -> None:
    adds = [0.05, 0.15, 0.25]
    units = [block(n, 0.01 * (1.0 + add), 0.01) for n, add in enumerate(adds)]
    found = report._http_adds(units, [PLAIN, ALONE])
    assert found is not None
    assert found["value"] == pytest.approx(math.prod(1.0 + add for add in adds) ** (1 / 3) - 1.0)
    assert found["low"] < 0.0 < 0.3 < found["high"]  # t(0.975, 2) = 4.3
    assert report._http_adds(units, [PLAIN]) is None


def test_figures_under_load_are_of_the_later_requests_of_whole_length() -> None:
    found = [Reply(0.0, [1.0, 2.0], 4, 1), Reply(0.0, [1.0, 5.0], 8, 1)]
    found += [
        Reply(2.0, [3.0, 9.0], 8, 1),
        Reply(5.0, [5.5, 12.5], 8, 1),
        Reply(9.0, [9.5, 13.0], 8, 1),
    ]
    figures = study._figures(2, found, {"target": 9.0})
    assert figures["ttft_s"] == [1.0, 0.5, 0.5]
    assert figures["tpot_s"] == pytest.approx([6 / 7, 1.0, 0.5])
    assert (figures["waits"], figures["longest_waits_s"]) == (3, [7.0])
    assert figures["whole_answers"] == 4.5
    assert report._processor_ms([figures]) == {"target": pytest.approx(2000.0)}
    # From 5 to 12.5: one event of the third, both of the fourth, one of the last.
    assert (figures["tokens"], figures["seconds"]) == (16, 7.5)


def test_time_per_token_is_of_the_tokens_behind_the_first_event() -> None:
    reply = Reply(0.0, [1.0, 2.0], 8, first_tokens=3)
    assert (reply.ttft_s, reply.tpot_s) == (1.0, pytest.approx(0.2))
    reply.tokens = 3
    assert reply.tpot_s is None
    with pytest.raises(PeerError, match="one event"):
        study._figures(1, [reply, reply], {})
    assert tokens_of('data: {"choices": [{"text": "a", "token_ids": [4, 5]}]}') == 2
    assert tokens_of('data: {"choices": [{"text": "a"}]}') == 1


class Servers:
    """A fleet of no processes: ``broken`` peers cannot be had; ``ran`` has who answered."""

    broken: set[str]
    ran: list[str]

    def __init__(self, *_: object) -> None:
        self.servers: dict[str, Server] = {}

    def keep(self, names: Sequence[str]) -> None:
        pass

    def stop(self) -> None:
        pass

    def run(self, name: str, work: Work) -> tuple[list[Reply], dict[str, float]]:
        if name in self.broken:
            raise PeerError("no space left on device")
        self.ran.append(name)
        return replies(len(work.prompts), 1.0), {}


def run(folder: Path, broken: set[str]) -> tuple[int, dict[str, Any], int]:
    """Exit status, figures, and blocks that were measured by the four topics' blocks of a run."""
    Servers.broken, Servers.ran = broken, []
    line = ["--in-flight", "1", "--temperatures", "0", "--max-tokens", "16", "--lesson", "1"]
    line += ["--peers", PLAIN, AUTO, LLAMA_BF16, "--target", str(TARGET), "--out", str(folder)]
    status = study.main(line)
    figures = json.loads((folder / "peers.json").read_text(encoding="utf-8"))
    return status, figures, len(Servers.ran)


@pytest.fixture
def _no_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "Fleet", Servers)
    monkeypatch.setattr(study, "_versions", lambda _: {})
    monkeypatch.setattr(study.signal, "signal", lambda *_: None)  # this process is the tests'


@pytest.mark.usefixtures("_no_servers")
def test_blocks_are_kept_until_a_peer_that_failed_is_back(tmp_path: Path) -> None:
    status, figures, ran = run(tmp_path, {LLAMA_BF16})
    assert (status, list(figures["failed"]), ran) == (0, [LLAMA_BF16], 4 * 2)
    assert run(tmp_path, {LLAMA_BF16})[2] == 0
    status, figures, ran = run(tmp_path, set())
    assert (status, figures["failed"]) == (0, {})
    assert ran == 4 * (1 + 3)  # the others too: pairs are of one time
    assert LLAMA_BF16 in figures["cells"][0]["peers"]
    assert run(tmp_path, set())[2] == 0


@pytest.mark.usefixtures("_no_servers")
def test_blocks_of_another_build_are_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, set())
    monkeypatch.setattr(study, "build", lambda: {"cpu": "another", "sources": "0"})
    assert run(tmp_path, set())[2] == 4 * 3


@pytest.mark.usefixtures("_no_servers")
def test_a_run_fails_if_any_of_paceline_s_own_could_not_be_measured(tmp_path: Path) -> None:
    assert run(tmp_path, {AUTO})[0] == 1


def test_a_server_is_noted_before_its_first_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = []

    def wait(self: Server, _: float) -> None:
        assert self.held is not None
        [[pid, _]] = json.loads((tmp_path / "processes.json").read_text(encoding="utf-8"))
        noted.append(pid == self.held.first.pid)
        raise PeerError("that is enough")

    monkeypatch.setattr(Server, "_wait", wait)
    sleeping = [sys.executable, "-c", "import time; time.sleep(300)"]
    peer = Peer("slow", lambda _setup, _port: sleeping)
    fleet = Fleet([peer], Setup(tmp_path, 1, 1, 64, None, tmp_path))
    with pytest.raises(PeerError, match="enough"):
        fleet.run("slow", Work([[1]], [1], 0.0, 1))
    assert noted == [True, True]  # it is tried twice
