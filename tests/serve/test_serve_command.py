"""``paceline serve`` as people run it: a process that starts, answers, and ends without a trace."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
import yaml
from serve_process import COMMAND, below_of, read_until
from tiny_models import tiny_llama, tiny_tokenizer

from paceline.deploy.config.config import PacelineConfig

pytestmark = pytest.mark.cluster

Write = Callable[..., Path]


@pytest.fixture
def write_config(tiny_config: PacelineConfig, tmp_path: Path, free_port: int) -> Write:
    """Writes the tiny config to a file, on a port of its own, with changes by dotted key."""

    def write(changes: dict[str, Any]) -> Path:
        data = tiny_config.model_dump(mode="json") | {"port": free_port}
        for key, value in changes.items():
            section, _, name = key.rpartition(".")
            (data[section] if section else data)[name] = value
        file = tmp_path / "config.yaml"
        file.write_text(yaml.safe_dump(data))
        return file

    return write


@contextmanager
def serving(config: Path, **options: Any) -> Iterator["subprocess.Popen[str]"]:
    """The command, killed with all below it should the test fail."""
    process = subprocess.Popen(
        [*COMMAND, str(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONFAULTHANDLER": "1"},
        **options,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            for below in [*below_of(process), psutil.Process(process.pid)]:
                below.kill()
            process.wait()


def ended(process: "subprocess.Popen[str]", within_s: float) -> int:
    """The exit code; where it does not end, the failure shows where its threads are."""
    try:
        return process.wait(timeout=within_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        said, _ = process.communicate(timeout=30)
        pytest.fail(f"still there after {within_s} s: {said}")


def assert_gone(processes: list[psutil.Process]) -> None:
    """None of them runs any more; Ray's own may take a moment."""
    assert processes
    _, left = psutil.wait_procs(processes, timeout=30)
    assert [process for process in left if process.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.full
def test_a_stop_that_streams_delay_starts_no_second_session(
    write_config: Write, free_port: int
) -> None:
    with serving(write_config({})) as process:
        read_until(process, "Ctrl-C ends it")
        body = {"model": "paceline", "prompt": "SELECT", "max_tokens": 2000, "ignore_eos": True}
        url = f"http://127.0.0.1:{free_port}/v1/completions"
        with ThreadPoolExecutor(48) as pool, suppress(httpx.TransportError):  # they may be cut off
            streams = [
                pool.submit(httpx.post, url, json=body | {"stream": True}, timeout=60)
                for _ in range(48)
            ]
            time.sleep(1.0)
            assert not all(stream.done() for stream in streams)
            process.send_signal(signal.SIGINT)
            code = ended(process, 60)
            assert process.stdout is not None
            assert code == 0, process.stdout.read()
            for stream in streams:
                stream.result()
        sessions = Path("/tmp/ray").glob(f"session_*_{process.pid}")
        assert len(list(sessions)) == 1


@pytest.mark.full
def test_a_stop_gives_streams_the_configured_time(write_config: Write, free_port: int) -> None:
    """They need about twenty seconds; by default they get five."""
    drains = {"target.drain_timeout_s": 90, "ingress.drain_timeout_s": 90}
    with serving(write_config(drains)) as process:
        read_until(process, "Ctrl-C ends it")
        body = {"model": "paceline", "prompt": "SELECT", "max_tokens": 2000, "ignore_eos": True}
        url = f"http://127.0.0.1:{free_port}/v1/completions"
        with ThreadPoolExecutor(16) as pool:
            streams = [
                pool.submit(httpx.post, url, json=body | {"stream": True}, timeout=120)
                for _ in range(16)
            ]
            time.sleep(2.0)
            process.send_signal(signal.SIGINT)
            signalled = time.monotonic()
            answers = [stream.result() for stream in streams]
            assert time.monotonic() - signalled > 7
        assert all(answer.text.endswith("data: [DONE]\n\n") for answer in answers)
        assert ended(process, 60) == 0


def test_it_starts_answers_and_ends_on_ctrl_c_whatever_logits_are_not_finite(
    write_config: Write, free_port: int, tmp_path: Path
) -> None:
    """Such requests fail alone: an error in OpenAI's shape, also in a stream; others and later
    ones answer as before.
    """
    tokenizer = tiny_tokenizer()
    target = tiny_llama(1, vocab=len(tokenizer), max_position_embeddings=2048)
    head = target.lm_head.weight.detach().clone()
    target.lm_head.weight, target.config.tie_word_embeddings = torch.nn.Parameter(head), False
    target.model.embed_tokens.weight.data[tokenizer.encode("~", add_special_tokens=False)] = (
        torch.inf
    )
    for part in (target, tokenizer):
        part.save_pretrained(tmp_path / "broken")
    changes = {"target.path": str(tmp_path / "broken"), "target.dtype": "float32"}
    with serving(write_config(changes)) as process:
        banner = read_until(process, "Ctrl-C ends it")
        base_url = f"http://127.0.0.1:{free_port}/v1"
        assert base_url in banner
        assert "float32" in banner
        with httpx.Client(base_url=base_url, timeout=60) as http:

            def post(prompt: str, **more: Any) -> httpx.Response:
                body = {"model": "paceline", "prompt": prompt, "max_tokens": 24, "temperature": 0}
                return http.post("/completions", json=body | {"ignore_eos": True} | more)

            sound = "SELECT name FROM people WHERE age"
            answer = post(sound)
            assert answer.status_code == 200
            before = answer.json()["choices"][0]["text"]
            with ThreadPoolExecutor(6) as pool:
                broken = [pool.submit(post, f"{sound} ~~~~ {i}") for i in range(3)]
                others = [pool.submit(post, sound) for _ in range(3)]
            assert [other.result().json()["choices"][0]["text"] for other in others] == 3 * [before]
            for answer in (each.result() for each in broken):
                error = answer.json()["error"]
                assert (answer.status_code, error["code"]) == (500, "internal_error")
                assert "not finite" in error["message"]
            events = post("~", stream=True).text
            assert '"internal_error"' in events
            assert "not finite" in events
            assert post(sound).json()["choices"][0]["text"] == before
            status = http.get("/paceline/status").json()
            assert status["failover"]["given_up"] == 4
            assert status["failover"]["broken"] == status["failover"]["faults"] == 0
        started = below_of(process)
        process.send_signal(signal.SIGINT)
        assert ended(process, 60) == 0
        assert process.stdout is not None
        assert "Traceback" not in process.stdout.read()
    assert_gone(started)


def runs(process: "subprocess.Popen[str]", name: str) -> bool:
    """Whether a process of this name is among those that the command has started."""
    for below in below_of(process):
        with suppress(psutil.NoSuchProcess):
            if name in " ".join(below.cmdline()):
                return True
    return False


@pytest.mark.full
@pytest.mark.parametrize(
    ("moment", "after_s"),
    # Ray's daemon runs; its agents run and wait for its store; Serve starts; the target loads
    [("raylet", 0.0), ("raylet", 1.3), ("raylet", 1.8), ("ray::ServeReplica", 0.0)],
)
def test_a_signal_during_the_start_ends_it_too(
    write_config: Write, moment: str, after_s: float
) -> None:
    with serving(write_config({})) as process:
        deadline = time.monotonic() + 120
        while not runs(process, moment):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(after_s)
        started = below_of(process)
        process.send_signal(signal.SIGTERM)
        while process.poll() is None:  # an impatient user: it must not skip the clean-up
            process.send_signal(signal.SIGINT)
            time.sleep(0.2)
            assert time.monotonic() < deadline
        assert process.returncode > 0, "killed by the signal, or aborted"
        assert process.stdout is not None
        # For an instant of its start Ray's native handler is in place, which writes this.
        assert after_s or "SIGTERM received" not in process.stdout.read()
    assert_gone(started)


def test_a_signal_to_its_group_stops_it_as_one_to_itself_does(write_config: Write) -> None:
    """As ``timeout`` sends it: had Ray's processes got it too, Ray would write its errors."""
    with serving(write_config({}), start_new_session=True) as process:
        read_until(process, "Ctrl-C ends it")
        started = below_of(process)
        os.killpg(process.pid, signal.SIGTERM)
        assert ended(process, 25) == 0
        assert process.stdout is not None
        assert process.stdout.read() == "Stopping ...\n"
    assert_gone(started)


def signal_all(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    """SIGTERM to the command and to all that it has started, which are returned."""
    started = below_of(process)
    for each in (process, *started):
        with suppress(psutil.NoSuchProcess):
            each.terminate()
    return started


@pytest.mark.full
def test_a_signal_to_everything_that_runs_ends_it_within_seconds(write_config: Write) -> None:
    with serving(write_config({})) as process:
        read_until(process, "Ctrl-C ends it")
        started = signal_all(process)
        ended(process, 25)
    assert_gone(started)


def test_it_ends_with_its_raylet_and_frees_the_port(write_config: Write, free_port: int) -> None:
    with serving(write_config({})) as process:
        read_until(process, "Ctrl-C ends it")
        started = below_of(process)
        (raylet,) = [each for each in started if each.name() == "raylet"]
        raylet.kill()
        assert ended(process, 30) == 1
        assert process.stdout is not None
        assert "paceline: a process of Ray has died" in process.stdout.read()
    assert_gone(started)
    socket.create_server(("127.0.0.1", free_port)).close()


@pytest.mark.full
@pytest.mark.parametrize("after_s", [0.0, 1.3])
def test_a_signal_to_everything_during_the_start_ends_it_within_seconds(
    write_config: Write, after_s: float
) -> None:
    with serving(write_config({})) as process:
        deadline = time.monotonic() + 120
        while not runs(process, "raylet"):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(after_s)
        started = signal_all(process)  # Ray's start then waits for its own processes
        assert ended(process, 25) != 0  # Ray may abort, now that its own are gone
    assert_gone(started)


@pytest.mark.full
def test_a_learning_actor_that_cannot_start_is_an_error_and_not_a_silence(
    write_config: Write, tmp_path: Path
) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "replay").touch()  # a file where the shards want a folder
    changes = {"state_dir": str(tmp_path / "state"), "replay.persist": True}
    done = subprocess.run(
        [*COMMAND, str(write_config(changes))], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]
    assert said.startswith("paceline: Paceline did not start: the host of replay shards does not")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target.dtpye": "auto"}, "target.dtpye: no such key; did you mean dtype?"),
        ({"drafts.general": "other"}, "its tokenizer differs from the target's"),
        ({"host": "203.0.113.1"}, "port: cannot listen on 203.0.113.1"),
    ],
)
def test_what_cannot_be_served_is_one_line_and_2_before_anything_starts(
    write_config: Write, tiny_folders: dict[str, Path], changes: dict[str, Any], said: str
) -> None:
    """Found in the file, among the models, and last of all; tests/unit/deploy/cli has more."""
    changes = {key: str(tiny_folders.get(str(v), v)) if v == "other" else v
               for key, v in changes.items()}  # fmt: skip
    done = subprocess.run(
        [*COMMAND, str(write_config(changes))], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.startswith("paceline: ")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_a_replica_that_ray_cannot_place_is_one_line_and_2(
    write_config: Write, tmp_path: Path
) -> None:
    changes = {"state_dir": str(tmp_path / "state"), "placement.target": {"serving": 1}}
    done = subprocess.run(
        [*COMMAND, str(write_config(changes))], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert done.stderr.startswith("paceline: placement.target: 1 x 1 serving cannot be placed")
    assert done.stderr.count("\n") == 1


def test_a_taken_port_of_the_dashboard_is_one_line_and_2(
    write_config: Write, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        own = {"state_dir": str(tmp_path / "state")}
        config = write_config(own | {"ray.dashboard": True, "ray.dashboard_port": port})
        done = subprocess.run([*COMMAND, str(config)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    said = f"paceline: ray.dashboard_port: cannot listen on 127.0.0.1:{port} ("
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
