"""An operator's commands against the real application."""

import os
import sys
import time

import httpx
import processes
import pytest

from paceline.deploy.cli.main import main

pytestmark = pytest.mark.cluster

ASKED = {"model": "paceline", "prompt": "a", "max_tokens": 4, "temperature": 0}
SOON_S = 20.0


def test_status_is_one_screen(base_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--url", base_url]) == 0
    screen = capsys.readouterr().out
    assert base_url in screen
    assert "does not answer" not in screen
    assert len(screen.splitlines()) < 50


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such priority")
def test_what_learns_gives_way_to_what_serves(base_url: str) -> None:
    def policies(role: str) -> set[int]:
        threads = [thread.id for process in processes.of(role) for thread in process.threads()]
        return set(map(os.sched_getscheduler, threads))

    assert httpx.get(f"{base_url}/health").is_success
    assert policies("registry") == policies("scheduler") == policies("shard") == {os.SCHED_IDLE}
    assert policies("target") == policies("ingress") == {os.SCHED_OTHER}


def test_a_drained_server_takes_nothing_new_until_it_is_let(
    base_url: str, http: httpx.Client
) -> None:
    assert http.post("/v1/completions", json=ASKED).status_code == 200
    try:
        assert main(["drain", "--url", base_url]) == 0
        deadline = time.monotonic() + SOON_S
        while (refused := http.post("/v1/completions", json=ASKED)).status_code == 200:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        assert refused.headers["Retry-After"]
        assert http.get("/health").status_code == 503
    finally:
        assert main(["drain", "--off", "--url", base_url]) == 0
    deadline = time.monotonic() + SOON_S
    while http.post("/v1/completions", json=ASKED).status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_an_answer_is_forgotten_by_its_id(
    base_url: str, http: httpx.Client, capsys: pytest.CaptureFixture[str]
) -> None:
    deadline, removed = time.monotonic() + SOON_S, 0
    answer = http.post("/v1/completions", json=ASKED).json()["id"]
    while removed < 2:  # its record, and the answer that suffixes are drafted from, come after it
        assert time.monotonic() < deadline
        assert main(["replay", "purge", "--request", answer, "--url", base_url]) == 0
        lines = capsys.readouterr().out.splitlines()
        removed += sum(int(line.split()[1]) for line in lines if line.endswith("removed"))
        time.sleep(0.1)
    assert removed == 2


def test_a_draft_that_has_learnt_nothing_has_nothing_to_go_back_to(
    base_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rollback", "nobody", "--url", base_url]) == 1
    assert "There is no topic nobody." in "".join(capsys.readouterr())
