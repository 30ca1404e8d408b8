"""The command line of ``status``, ``rollback``, ``replay purge`` and ``drain``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

Say = Callable[[str], None]
Url = Callable[[argparse.Namespace], str]


def add_commands(
    commands: Any, parents: Sequence[argparse.ArgumentParser], url: Url, say: Say
) -> None:
    """Add them to a parser's commands.

    Args:
        commands: what ``add_subparsers`` gave.
        parents: with the options that say which server.
        url: of the server, from the options.
        say: prints a line.
    """

    def add(name: str, run: Callable[[argparse.Namespace], int], about: str) -> Any:
        parser = commands.add_parser(name, parents=list(parents), help=about)
        parser.set_defaults(command=run)
        return parser

    add("status", lambda o: _status(url(o), say), "what a running server does, on one screen")
    rollback = add(
        "rollback",
        lambda o: _rollback(url(o), o, say),
        "withdraw a draft's candidate, or put earlier weights back",
    )
    rollback.add_argument("topic")
    rollback.add_argument("version", nargs="?", type=int, help="left out: the one before")
    rollback.add_argument(
        "--expect", type=int, metavar="N", help="only while N is the newest version that is served"
    )
    replay = add("replay", lambda o: _purge(url(o), o, say), "what is kept of requests")
    replay.add_argument("action", choices=["purge"], help="forget, in memory and on disk")
    what = replay.add_mutually_exclusive_group(required=True)
    what.add_argument("--topic", help="all records of this topic")
    what.add_argument("--request", help="those of the answer with this id")
    what.add_argument("--all", action="store_true", help="all records of all topics")
    drain = add(
        "drain", lambda o: _drain(url(o), o, say), "take nothing new, wait for what is under way"
    )
    drain.add_argument("--off", action="store_true", help="let requests in again")
    drain.add_argument("--wait", type=float, default=600.0, help="seconds at most (600)")


def _status(url: str, say: Say) -> int:
    from paceline.deploy.operations_command import show_status

    show_status(url, say)
    return 0


def _rollback(url: str, options: argparse.Namespace, say: Say) -> int:
    from paceline.deploy.operations_command import roll_back

    roll_back(url, options.topic, options.version, say, expected=options.expect)
    return 0


def _purge(url: str, options: argparse.Namespace, say: Say) -> int:
    from paceline.deploy.operations_command import purge

    return 0 if purge(url, options.topic, options.request, say) else 1


def _drain(url: str, options: argparse.Namespace, say: Say) -> int:
    from paceline.deploy.operations_command import drain

    return 0 if drain(url, say, on=not options.off, wait_s=options.wait) else 1
