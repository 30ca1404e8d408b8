"""``paceline demo``: serve, learn and measure on this machine, with a live table."""

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
from paceline.deploy import draft_store
from paceline.deploy.config.config import PacelineConfig, load_config
from paceline.deploy.config.preflight import check
from paceline.deploy.demo import plot, report
from paceline.deploy.demo.prompts import TOPICS, split
from paceline.deploy.demo.report import (
    LiveState,
    answer_line,
    failure_lines,
    progress_line,
    render,
)
from paceline.deploy.demo.stats import RequestLog
from paceline.deploy.demo.traffic import Client, Clock, DemoResult, DemoSettings, run_schedule
from paceline.deploy.errors import ConfigError
from paceline.deploy.signals import interrupt_once, on_signals

if TYPE_CHECKING:
    from paceline.deploy.app import RunningApp

EXIT_OK, EXIT_FAILED = 0, 1
_MARKER = ".paceline-demo"  # marks a state folder that a demo created and may delete
_CANARY_SHARE = 0.0  # a trial takes up to 64 requests, half of a topic's here
_HELD_OUT = 0.3  # of few records, so that the gate sees a gain early
_MAX_OCCUPANCY = 0.5  # train beside requests
_NUM_SPECULATIVE_TOKENS = 3  # of both arms: their acceptance must compare
_LINE_EVERY_S = 15.0
_ANSWER_EVERY = 4  # of the lines, one is followed by an answer
_LINE_CELLS = 160  # of an answer without a terminal
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
    console = Console()
    config = _config(options, console)
    return _run(options, config, console, time.monotonic())


def _config(options: DemoOptions, console: Console) -> PacelineConfig:
    """The demo's configuration, checked; models that are not there are fetched."""
    config = load_config(
        None,
        {
            "port": options.port or _free_port(),
            "state_dir": str(fresh_state(options.out).absolute()),
            "target.dtype": options.dtype,
            "ray.dashboard": False,
            "training.canary_share": _CANARY_SHARE,
            "training.max_occupancy": _MAX_OCCUPANCY,
            "replay.held_out_fraction": _HELD_OUT,
            "auth.api_keys_env": None,  # its clients send none
        },
    )
    config = draft_store.fetch_models(
        config, lambda line: console.print(line, highlight=False, markup=False, soft_wrap=True)
    )
    check(config)
    return config


def fresh_state(out: Path) -> Path:
    """Create an empty state folder below ``out``, over that of an earlier demo.

    Raises:
        ConfigError: the folder there was not made by a demo, or it cannot be created.
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


def _run(options: DemoOptions, config: PacelineConfig, console: Console, started_at: float) -> int:
    console.print("Starting Ray, the learning actors and the server ...", style="bright_black")
    # Spinning threads would starve other processes on a small machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from paceline.deploy import app  # imports Ray: after the options are checked

    on_signals(interrupt_once)
    settings = DemoSettings(seed=options.seed, seconds=options.minutes * 60)
    log, state = RequestLog(), LiveState(total=settings.seconds)

    def clock() -> float:
        return time.monotonic() - started_at

    with app.start(config, checked=True) as running:
        on_signals(interrupt_once)  # Ray has installed its own SIGTERM handler
        _greet(console, config, running, clock())
        outcome = asyncio.run(
            _drive(settings, options.measured, config, running, log, state, clock, console)
        )
    result = report.summarize(
        TOPICS,
        log,
        outcome.speed,
        read_all_decisions(config.state_path),
        state.versions,
        clock(),
        options.measured,
    )
    report.write(result, log, options.out)
    plot.draw(options.out / "acceptance.png", TOPICS, log, outcome.phases, outcome.end)
    _report(console, result, log, options)
    return EXIT_FAILED if log.failures else EXIT_OK


def _greet(console: Console, config: PacelineConfig, running: RunningApp, seconds: float) -> None:
    target = running.target
    console.print(
        f"Serving {config.model_name} at {running.base_url}/v1 after {seconds:.0f} s: "
        f"{target.dtype} on {target.device}, "
        f"{_NUM_SPECULATIVE_TOKENS} draft tokens per round. What drafts learn: "
        f"{running.base_url}/ui/",
        highlight=False,
        soft_wrap=True,
    )


async def _drive(
    settings: DemoSettings,
    measured: int,
    config: PacelineConfig,
    running: RunningApp,
    log: RequestLog,
    state: LiveState,
    clock: Clock,
    console: Console,
) -> DemoResult:
    prompts = {topic: split(topic, settings.seed, measured) for topic in TOPICS}
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=running.base_url, limits=limits, trust_env=False) as http,
        _display(http, log, state, clock, console),
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
            await asyncio.sleep(0.5)  # the running micro-step ends

        async def resume() -> None:
            await scheduler.resume.remote()

        outcome = await run_schedule(settings, client, prompts, clock, state, pause, resume)
        await _poll_status(http, state)
    return outcome


@asynccontextmanager
async def _display(
    http: httpx.AsyncClient, log: RequestLog, state: LiveState, clock: Clock, console: Console
) -> AsyncIterator[None]:
    """Show a live table on a terminal, else a line from time to time."""
    live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    async def redraw() -> None:
        printed_at, lines = clock(), 0
        while True:
            await _poll_status(http, state)
            state.elapsed = clock()
            if live is not None:
                live.update(render(TOPICS, log, state), refresh=True)
            elif state.elapsed - printed_at >= _LINE_EVERY_S:
                printed_at, lines = state.elapsed, lines + 1
                console.print(progress_line(TOPICS, log, state), highlight=False, soft_wrap=True)
                answer = answer_line(log, state.elapsed)
                if answer is not None and lines % _ANSWER_EVERY == 0:
                    answer.truncate(_LINE_CELLS, overflow="ellipsis")
                    console.print(answer, soft_wrap=True)
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
            state.elapsed = clock()
            live.update(render(TOPICS, log, state), refresh=True)
            live.stop()


async def _poll_status(http: httpx.AsyncClient, state: LiveState) -> None:
    """Update the state from the server; without an answer the last one stays."""
    with suppress(httpx.HTTPError, ValueError):
        response = await http.get("/v1/paceline/status", timeout=5.0)
        if response.status_code == httpx.codes.OK:
            state.update(response.json())


def _report(
    console: Console, result: dict[str, Any], log: RequestLog, options: DemoOptions
) -> None:
    console.print(report.result_table(result, options.measured))
    for line in report.result_lines(result):
        console.print(line, highlight=False, soft_wrap=True)
    routed = log.routing_accuracy()
    if routed is not None:
        console.print(f"router: {routed:.0%} of the requests went to their topic", highlight=False)
    console.print(f"{len(log.failures)} failed requests", style="red" if log.failures else "green")
    for line in failure_lines(log.failures):
        console.print(line, style="red", highlight=False, markup=False)
    for line in report.goal_lines(result):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(
        f"{result['wall_seconds']:.0f} s in all; "
        f"{options.out}/summary.json, {options.out}/acceptance.png",
        highlight=False,
        soft_wrap=True,
    )
