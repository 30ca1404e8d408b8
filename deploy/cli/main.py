"""``paceline``: serve, demo, status, history, topics, rollback, replay, drain, plan and more."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from paceline.deploy.api.auth import key_digests
from paceline.deploy.cli import operations as operator
from paceline.deploy.config.config import PacelineConfig, load_config
from paceline.deploy.config.preflight import check, warnings
from paceline.deploy.errors import CallError, ConfigError, StartError
from paceline.deploy.signals import interrupt_once, on_signals

if TYPE_CHECKING:
    from paceline.deploy.app import RunningApp

_LOOK_S = 0.2
EXIT_FAILED = 1
EXIT_BAD_CONFIG = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code.

    2: bad config, models or file; 1: could not start, or the server that was asked refused.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["demo"]:  # the demo reads its own options
        from paceline.deploy.demo.main import run

        return run(arguments[1:])
    try:
        if arguments[:1] == ["plan"]:  # so does the planner
            return _plan(arguments[1:])
        options = _parser().parse_args(arguments)
        code: int = options.command(options)
    except ConfigError as error:
        _say_error(str(error))
        return EXIT_BAD_CONFIG
    except (StartError, CallError) as error:
        _say_error(str(error))
        return EXIT_FAILED
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="paceline",
        description="An LLM server on Ray whose draft models learn from the traffic it serves.",
    )
    parser.add_argument("--version", action="version", version=f"paceline {version('paceline')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="serve until Ctrl-C")
    _add_config(serve)
    serve.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    serve.add_argument("--port", type=int, help="port to listen on (default 8000)")
    serve.add_argument(
        "--dtype", choices=("auto", "bfloat16", "float32", "float16"), help="of the target"
    )
    serve.add_argument("--state-dir", help="where weight versions outlive a restart")
    serve.add_argument("--no-training", action="store_true", help="serve, but do not learn")
    serve.add_argument("--no-dashboard", action="store_true", help="leave Ray's dashboard out")
    serve.set_defaults(command=_serve)
    commands.add_parser("demo", help="the whole loop on this machine, in minutes")
    commands.add_parser("plan", help="does speculation pay on hardware not rented yet?")
    history = commands.add_parser("history", help="every decision on weights, oldest first")
    _add_config(history)
    history.add_argument("--state-dir", help="as given to serve")
    history.add_argument("--topic", help="of this topic only")
    history.add_argument("--json", action="store_true", help="one JSON object a line")
    history.set_defaults(command=_history)
    _add_topics(commands)
    operator.add_commands(commands, [_server_options()], _url, _say)
    monitoring = commands.add_parser(
        "monitoring", help="write what Prometheus and Grafana start from"
    )
    monitoring.add_argument("out", nargs="?", type=Path, default=Path("monitoring"))
    monitoring.add_argument("--ray-dir", type=Path, help="where Ray keeps sessions (/tmp/ray)")
    monitoring.set_defaults(command=_monitoring)
    build = commands.add_parser("build-ops", help="build DeepSpeed's CPU op once")
    build.set_defaults(command=_build_ops)
    return parser


def _add_topics(commands: Any) -> None:
    server = _server_options()
    topics = commands.add_parser(
        "topics", parents=[server], help="list a running server's topics, or add one"
    )
    topics.set_defaults(command=_topics)
    actions = topics.add_subparsers(dest="action", metavar="ACTION")
    actions.add_parser("list", parents=[server], help="which there are, and who knows them")
    add = actions.add_parser(
        "add", parents=[server], help="a copy of general's expert, and a router that tells it"
    )
    add.add_argument("name", help="of the topic: a-z, 0-9, _ and -")
    add.add_argument(
        "--examples",
        type=Path,
        required=True,
        help="its prompts, one a line (.jsonl: objects with a prompt): at least 12, better dozens",
    )


def _server_options() -> argparse.ArgumentParser:
    """Options of a command to a running server, before or after an action's name."""
    # a default of the inner parser would undo what the outer one read
    server = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    server.add_argument("--url", help="of the server (default: the config's host and port)")
    server.add_argument("--config", type=Path, help="YAML file that the server was started with")
    return server


def _url(options: argparse.Namespace) -> str:
    from paceline.deploy.cli.client import server_url

    given = vars(options)
    return given.get("url") or server_url(load_config(given.get("config")))


def _topics(options: argparse.Namespace) -> int:
    from paceline.deploy.cli.topics import add_topic, list_topics, read_examples

    url = _url(options)
    if options.action == "add":
        add_topic(url, options.name, read_examples(options.examples), _say)
    else:
        list_topics(url, _say)
    return 0


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", nargs="?", type=Path, help="YAML file (default: the embedded models)"
    )


def _load(options: argparse.Namespace) -> PacelineConfig:
    """The config file with the command line's options over it."""
    given = vars(options)
    names = {
        "host": "host",
        "port": "port",
        "dtype": "target.dtype",
        "state_dir": "state_dir",
    }
    overrides: dict[str, Any] = {
        key: given[name] for name, key in names.items() if given.get(name) is not None
    }
    if given.get("no_training"):
        overrides["training.enabled"] = False
    if given.get("no_dashboard"):
        overrides["ray.dashboard"] = False
    return load_config(options.config, overrides)


def _serve(options: argparse.Namespace) -> int:
    config = _load(options)
    check(config)
    for warning in warnings(config):
        _say_error(f"warning: {warning}")
    on_signals(interrupt_once)
    _say("Starting Paceline (this takes some seconds) ...")
    from paceline.deploy import app  # imports Ray: not before the config is sound

    running: RunningApp | None = None
    try:
        running = app.start(config, checked=True)
        # Ray puts its own handler on SIGTERM; ours must come after it.
        signals: list[int] = []
        on_signals(lambda number, _: signals.append(number))
        _say(_banner(config, running))
        while not signals:  # no Event: a handler that comes while one is waited for may lock up
            time.sleep(_LOOK_S)
        _say("Stopping ...")
    finally:
        on_signals(signal.SIG_IGN)  # a second Ctrl-C must not leave half of it behind
        if running is not None:
            running.stop()
    return 0


def _banner(config: PacelineConfig, running: RunningApp) -> str:
    """What one needs to know to use the server."""
    facts = running.description
    drafts = ", ".join(
        f"{name} v{version}" for name, version in facts.get("drafts", {}).items() if "@" not in name
    )
    body = json.dumps(
        {"model": config.model_name, "messages": [{"role": "user", "content": "What is 12 + 30?"}]}
    )
    keys = key_digests(config.auth.api_keys_env, os.environ)
    key = "-H 'Authorization: Bearer KEY' " if keys else ""
    lines = [
        "",
        f"Paceline serves {config.model_name} at {running.base_url}/v1",
        f"  target   {config.target_path} ({facts.get('dtype')} on {facts.get('device')})",
        f"  drafts   {drafts}; num_speculative_tokens {config.drafts.num_speculative_tokens}",
        f"  learning {'on' if running.trainer is not None else 'off'}; "
        f"versions in {config.state_path}",
        *([f"  page     {running.base_url}/ui/"] if config.ui.enabled else []),
        *([f"  keys     those in {config.auth.api_keys_env}"] if keys else []),
        "",
        f"  curl {running.base_url}/v1/chat/completions \\",
        f"    {key}-H 'Content-Type: application/json' -d '{body}'",
        "",
        "Ctrl-C ends it.",
    ]
    return "\n".join(lines)


def _history(options: argparse.Namespace) -> int:
    from paceline.actors.weights.history import read_all_decisions
    from paceline.deploy.cli.history import table

    decisions = read_all_decisions(_load(options).state_path, options.topic)
    if options.json:
        for decision in decisions:
            _say(json.dumps(decision))
    else:
        _say(table(decisions) if decisions else "No decision has been taken yet.")
    return 0


def _monitoring(options: argparse.Namespace) -> int:
    from paceline.deploy.monitoring.files import ray_folder, write

    out = options.out.absolute()
    for path in write(out, options.ray_dir or ray_folder()):
        _say(str(path))
    _say(f"\nprometheus --config.file={out}/prometheus.yml --web.listen-address=127.0.0.1:9090")
    _say(f"grafana server --config {out}/grafana/grafana.ini --homepath /usr/share/grafana")
    return 0


def _plan(arguments: Sequence[str]) -> int:
    from paceline.deploy.planner.main import run

    return run(arguments)


def _build_ops(_options: argparse.Namespace) -> int:
    from paceline.actors.training.deepspeed_setup import main as build

    return build()


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _say_error(text: str) -> None:
    sys.stderr.write("paceline: " + " ".join(text.split()) + "\n")


def as_process() -> NoReturn:
    """:func:`main` as a process of its own, which ends with its exit code.

    It ends at once: by now all is stopped, and the interpreter would still wait for whatever Ray
    left in its threads, which crashes where a session was killed, and may never come back.
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
        except BrokenPipeError:  # nobody reads it any more
            continue
        except OSError:
            code = code or EXIT_FAILED
    os._exit(code)


if __name__ == "__main__":
    as_process()
