"""``paceline demo``: the whole loop on this machine, with a live table and a result on disk."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from rich.console import Console
from rich.live import Live

from paceline.actors.weights.history import read_all_decisions
from paceline.deploy.config.config import PacelineConfig, load_config
from paceline.deploy.config.preflight import check
from paceline.deploy.demo import plot, summary
from paceline.deploy.demo.live import View, failure_lines, progress_line, render
from paceline.deploy.demo.prompts import TOPICS, split
from paceline.deploy.demo.script import Course, Plan, play
from paceline.deploy.demo.stats import Log
from paceline.deploy.demo.traffic import Client, Clock
from paceline.deploy.errors import ConfigError
from paceline.deploy.signals import interrupt_once, on_signals

if TYPE_CHECKING:
    from paceline.deploy.app import RunningApp

EXIT_OK, EXIT_FAILED = 0, 1
_MARKER = ".paceline-demo"  # in a state folder that a demo has made and may delete
_CANARY_SHARE = 0.5  # a topic sees a hundred requests here, not tens of thousands
_MAX_OCCUPANCY = 0.25  # learns beside requests: there are minutes here, not nights
_NUM_SPECULATIVE_TOKENS = 4  # of both arms, so that their acceptance compares
_LINE_EVERY_S = 15.0
_REFRESH_S = 1.0


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Options of the command line.

    Attributes:
        minutes: length of the whole demo.
        seed: of prompts and arrivals.
        port: to serve on; 0: a free one.
        out: folder of the result.
        dtype: of the target.
        measured: most prompts per topic in each measurement.
    """

    minutes: float
    seed: int
    port: int
    out: Path
    dtype: str
    measured: int


def run(options: DemoOptions) -> int:
    """Run the demo; returns the exit code: 1 if a request failed, else 0.

    Raises:
        ConfigError: for an option that cannot be used.
        StartError: the server did not start.
    """
    began = time.monotonic()
    return _run(options, _config(options), Console(), began)


def _config(options: DemoOptions) -> PacelineConfig:
    config = load_config(
        None,
        {
            "port": options.port or _free_port(),
            "state_dir": str(fresh_state(options.out).absolute()),
            "target.dtype": options.dtype,
            "ray.dashboard": False,
            "training.canary_share": _CANARY_SHARE,
            "training.max_occupancy": _MAX_OCCUPANCY,
            "replay.max_records_per_s": None,  # a hundred requests are all that there is to learn
            "auth.api_keys_env": None,  # its clients have none
        },
    )
    check(config)
    return config


def fresh_state(out: Path) -> Path:
    """An empty state folder below ``out``: every demo starts from the first weight versions.

    Raises:
        ConfigError: there is one that no demo has made, or it cannot be made.
    """
    state = out / "state"
    try:
        if state.exists():
            if not (state / _MARKER).is_file():
                raise ConfigError(
                    f"--out: {state} was not made by a demo; remove it or choose another folder"
                )
            shutil.rmtree(state)
        state.mkdir(parents=True)
        (state / _MARKER).touch()
    except OSError as error:
        raise ConfigError(f"--out: {out}: {error.strerror or error}") from error
    return state


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _run(options: DemoOptions, config: PacelineConfig, console: Console, began: float) -> int:
    console.print("Starting Ray, the learning actors and the server ...", style="bright_black")
    # Threads that spin while they wait would starve their neighbours on a small machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from paceline.deploy import app  # imports Ray: not before the options are sound

    on_signals(interrupt_once)
    plan = Plan(seed=options.seed, seconds=options.minutes * 60)
    log, view = Log(), View(total=plan.seconds)

    def clock() -> float:
        return time.monotonic() - began

    with app.start(config, checked=True) as running:
        on_signals(interrupt_once)  # Ray has put a handler of its own on SIGTERM
        _greet(console, config, running, clock())
        course = asyncio.run(
            _drive(plan, options.measured, config, running, log, view, clock, console)
        )
    result = summary.summarize(
        TOPICS,
        log,
        course.speed,
        read_all_decisions(config.state_path),
        view.versions,
        clock(),
        options.measured,
    )
    summary.write(result, log, options.out)
    plot.draw(options.out / "acceptance.png", TOPICS, log, course.phases, course.end)
    _report(console, result, log, options)
    return EXIT_FAILED if log.failures else EXIT_OK


def _greet(console: Console, config: PacelineConfig, running: RunningApp, seconds: float) -> None:
    facts = running.description
    console.print(
        f"Serving {config.model_name} at {running.base_url}/v1 after {seconds:.0f} s: "
        f"{facts.get('dtype')} on {facts.get('device')}, "
        f"{_NUM_SPECULATIVE_TOKENS} drafted tokens a round.",
        highlight=False,
        soft_wrap=True,
    )


async def _drive(
    plan: Plan,
    measured: int,
    config: PacelineConfig,
    running: RunningApp,
    log: Log,
    view: View,
    clock: Clock,
    console: Console,
) -> Course:
    prompts = {topic: split(topic, plan.seed, measured) for topic in TOPICS}
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=running.base_url, limits=limits, trust_env=False) as http,
        _display(http, log, view, clock, console),
    ):
        client = Client(
            http,
            log,
            clock,
            config.model_name,
            num_speculative_tokens=_NUM_SPECULATIVE_TOKENS,
        )
        scheduler = running.scheduler

        async def pause() -> None:
            await scheduler.pause.remote()
            await asyncio.sleep(0.5)  # a micro-step that has begun is finished

        async def resume() -> None:
            await scheduler.resume.remote()

        course = await play(plan, client, prompts, clock, view, pause, resume)
        await _take_status(http, view)
    return course


@asynccontextmanager
async def _display(
    http: httpx.AsyncClient, log: Log, view: View, clock: Clock, console: Console
) -> AsyncIterator[None]:
    """A table that redraws itself on a terminal, a line now and then elsewhere."""
    live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    async def redraw() -> None:
        said = clock()
        while True:
            await _take_status(http, view)
            view.elapsed = clock()
            if live is not None:
                live.update(render(TOPICS, log, view), refresh=True)
            elif view.elapsed - said >= _LINE_EVERY_S:
                said = view.elapsed
                console.print(progress_line(TOPICS, log, view), highlight=False, soft_wrap=True)
            await asyncio.sleep(_REFRESH_S)

    if live is not None:
        live.start()
    task = asyncio.create_task(redraw())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        if live is not None:
            view.elapsed = clock()
            live.update(render(TOPICS, log, view), refresh=True)
            live.stop()


async def _take_status(http: httpx.AsyncClient, view: View) -> None:
    """What the server says of itself; without an answer the last one stays on show."""
    with suppress(httpx.HTTPError, ValueError):
        response = await http.get("/v1/paceline/status", timeout=5.0)
        if response.status_code == httpx.codes.OK:
            view.take_status(response.json())


def _report(console: Console, result: dict[str, Any], log: Log, options: DemoOptions) -> None:
    console.print(summary.result_table(result, options.measured))
    for line in summary.result_lines(result):
        console.print(line, highlight=False, soft_wrap=True)
    routed = log.routed_right()
    if routed is not None:
        console.print(f"router: {routed:.0%} of the requests went to their topic", highlight=False)
    console.print(f"{len(log.failures)} failed requests", style="red" if log.failures else "green")
    for line in failure_lines(log.failures):
        console.print(line, style="red", highlight=False, markup=False)
    for line in summary.goal_lines(result):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(
        f"{result['wall_seconds']:.0f} s in all; "
        f"{options.out}/summary.json, {options.out}/acceptance.png",
        highlight=False,
        soft_wrap=True,
    )
