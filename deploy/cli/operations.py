"""The command line of ``status``, ``rollback``, ``replay purge`` and ``drain``."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.deploy.cli.client import call
from paceline.deploy.cli.history import table
from paceline.deploy.errors import UNKNOWN_OUTCOME, VERSION_CHANGED, CallError, NoAnswerError

Say = Callable[[str], None]

_POLL_S = 1.0
# What was let in a moment ago is not on the board yet, and a new board knows nobody at first.
_QUIET_LOOKS = 4
_DECISIONS = 6
_TRIES = 3
_TAKEN_S = 30.0


def show_status(url: str, say: Say) -> None:
    """Print what a server does, on one screen.

    Raises:
        CallError: it does not answer, or refuses.
    """
    say(status_words(url, call(url, "GET", "/v1/paceline/status")))


def roll_back(
    url: str, topic: str, version: int | None, say: Say, *, expected: int | None = None
) -> None:
    """Roll a topic's draft back, once, and wait until the replicas serve the version.

    An answer that is lost is asked for again; the draft goes back once all the same.

    Args:
        url: of the server.
        topic: whose draft.
        version: see WeightRegistry.roll_back.
        say: prints a line.
        expected: the newest version that is served; None: whichever is when this is called.

    Raises:
        CallError: the server refuses, and nothing was changed; or it does not answer; or a replica
            has not taken the version within ``_TAKEN_S`` seconds, and the message says which.
    """
    expected = _served(url, topic)[-1] if expected is None else expected
    order = {"topic": topic, "version": version, "expected": expected}
    for attempt in range(_TRIES):
        try:
            answer = call(url, "POST", "/v1/paceline/rollback", order)
        except CallError as error:
            lost = isinstance(error, NoAnswerError) or error.code == UNKNOWN_OUTCOME
            if not lost and not (attempt and error.code == VERSION_CHANGED):
                raise
            if not lost:
                stable, *_ = _served(url, topic)
                if stable == expected:  # a candidate came before any of these calls
                    raise
                told = f"`paceline history --topic {topic}` says whose doing it is"
                _wait_until_taken(url, topic, stable, say)
                say(f"{topic}: stable is version {stable} (an answer was lost; {told})")
                return
            if attempt + 1 == _TRIES:
                named = topic if version is None else f"{topic} {version}"
                again = f"paceline rollback {named} --expect {expected}"
                raise NoAnswerError(f"{error}; `{again}` goes back only if it was not") from error
            time.sleep(_POLL_S)
        else:
            _wait_until_taken(url, topic, answer["weight_version"], say)
            say(f"{topic}: stable is version {answer['weight_version']}")
            return


def _wait_until_taken(url: str, topic: str, version: int, say: Say) -> None:
    """Ask the replicas, one by one as Serve chooses them, until all serve a version or a later."""
    served: dict[str, int] = {}
    deadline, looks = time.monotonic() + _TAKEN_S, 0
    while True:
        status = call(url, "GET", "/v1/paceline/status")
        target, board = _part(status, "target"), _part(status, "board")
        if "experts" in target:
            say(f"{topic}: the pool takes the version by itself, see `paceline status`")
            return
        if "drafts" in target:
            served[target["replica_id"]] = target["drafts"].get(topic, 0)
            looks += 1
        behind = {name: at for name, at in served.items() if at < version}
        # The board forgets replicas that are idle: a few looks meet those as well.
        enough = looks >= _QUIET_LOOKS and len(served) >= board.get("replicas", 1)
        if enough and not behind:
            return
        if time.monotonic() >= deadline:
            break
        time.sleep(_POLL_S)
    told = ", ".join(f"replica {name} has version {at}" for name, at in behind.items())
    raise CallError(
        f"{topic}: version {version} is stable, but not every replica has taken it within "
        f"{_TAKEN_S:.0f} s: {told or 'some did not answer'}; its log says why"
    )


def _served(url: str, topic: str) -> list[int]:
    """The stable version of a topic's draft, and the candidate where there is one."""
    live = _part(call(url, "GET", "/v1/paceline/status"), "live_drafts")
    if "error" in live:
        raise CallError("the weight registry does not answer: nothing was changed")
    if topic not in live:
        raise CallError(f"There is no topic {topic}.")
    own = live[topic]
    return [version for version in (own["stable"], own["candidate"]) if version is not None]


def purge(url: str, topic: str | None, request_id: str | None, say: Say) -> bool:
    """Have replay forget records.

    Returns:
        whether every part has done it.

    Raises:
        CallError: the server does not answer, or refuses.
    """
    order = {"topic": topic, "request_id": request_id}
    removed = call(url, "POST", "/v1/paceline/replay/purge", order)["removed"]
    for name, count in removed.items():
        say(f"{name}: {'does not answer, try again' if count is None else f'{count} removed'}")
    return None not in removed.values()


def drain(url: str, say: Say, *, on: bool = True, wait_s: float = 600.0) -> bool:
    """Have a server take nothing new, and wait for what is under way.

    Args:
        url: of the server.
        say: prints a line.
        on: False: let requests in again, at once.
        wait_s: longest wait.

    Returns:
        whether nothing is under way any more; True where ``on`` is False.

    Raises:
        CallError: the server does not answer, or refuses.
    """
    deadline, quiet, begun = time.monotonic() + wait_s, 0, False
    while True:  # told again each time: a load board that was restarted knows of no drain
        try:
            state = call(url, "POST", "/v1/paceline/drain", {"on": on})
        except CallError as error:
            if not (on and begun) or time.monotonic() > deadline:
                raise
            say(str(error))
            time.sleep(_POLL_S)
            continue
        begun = True
        if not on:
            say("requests are let in again")
            return True
        say(f"draining: {state['running']} running, {state['waiting']} waiting")
        quiet = 0 if state["running"] + state["waiting"] else quiet + 1
        if quiet == _QUIET_LOOKS:
            say("nothing is under way: the server can be stopped")
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)


def status_words(url: str, status: Mapping[str, Any]) -> str:
    """The status on one screen; a part that does not answer is named with its error."""
    lines = [*_target(url, _part(status, "target")), *_load(_part(status, "board"))]
    if warning := _part(status, "steward").get("warning"):
        lines.append(f"warning   {warning}")
    lines += ["", *_drafts(status), "", *_trainer(status), *_leases(_part(status, "board"))]
    decisions = status.get("decisions")
    if isinstance(decisions, list) and decisions:
        lines += ["", table(decisions[-_DECISIONS:])]
    return "\n".join(lines)


def _part(status: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = status.get(name)
    return part if isinstance(part, Mapping) else {"error": "not here"}


def _target(url: str, target: Mapping[str, Any]) -> list[str]:
    if "error" in target:
        return [f"{url}  the target does not answer ({target['error']})"]
    used = target["kv_blocks_total"] - target["kv_blocks_available"]
    return [
        f"{url}  {target.get('model_type')} in {target.get('dtype')} on {target.get('device')}, "
        f"{target.get('numerics')}",
        f"target    {target['running']} running, {target['waiting']} waiting, "
        f"{used} of {target['kv_blocks_total']} blocks of keys and values, "
        f"{target['draft_failures']} draft failures",
    ]


def _load(board: Mapping[str, Any]) -> list[str]:
    if "error" in board:
        return [f"load      the board does not answer ({board['error']})"]
    leave = "draining" if board.get("draining") else "training may run"
    if not board["may_train"] and not board.get("draining"):
        leave = "training waits" + (" (paused)" if board["paused"] else "")
    return [f"load      {board['running']} running on {board['replicas']} replicas, {leave}"]


def _drafts(status: Mapping[str, Any]) -> list[str]:
    versions, live = _part(status, "weight_versions"), _part(status, "live_drafts")
    shards = _part(status, "shards")
    lines = [f"{'draft':12}  {'version':>7}  {'accepted':>8}  {'requests':>8}  {'records':>7}"]
    for name in versions if "error" not in versions else [n for n in shards if n != "error"]:
        own, shard = _part(live, name), _part(shards, name)
        rounds = own.get("rounds", 0)
        share = f"{own['accepted'] / rounds:.2f}" if rounds else "-"
        records = (
            shard["records_train"] + shard["records_held_out"] + shard.get("records_synthetic", 0)
            if "records_train" in shard
            else shard.get("error", "-")
        )
        lines.append(
            f"{name:12}  {versions.get(name, '?')!s:>7}  {share:>8}  "
            f"{own.get('requests', '-')!s:>8}  {records!s:>7}"
        )
    return [*lines, "accepted: share of rounds whose first drafted token was"]


def _trainer(status: Mapping[str, Any]) -> list[str]:
    if "trainer" not in status:
        return ["trainer   off"]
    lines = _one_trainer(_part(status, "trainer"))
    for trainer in _part(status, "further_trainers").values():
        lines += _one_trainer(trainer) if isinstance(trainer, Mapping) else []
    return lines


def _one_trainer(trainer: Mapping[str, Any]) -> list[str]:
    if "error" in trainer:
        return [f"trainer   does not answer ({trainer['error']})"]
    topic = f" {trainer['topic']}" if trainer.get("topic") else ""
    lines = [
        f"trainer   {trainer.get('state')}{topic}; {trainer.get('rounds', 0)} rounds, "
        f"{trainer.get('published', 0)} published, {trainer.get('rejected', 0)} rejected, "
        f"{trainer.get('training_s', 0.0):.0f} s"
    ]
    if synthetic := trainer.get("synthetic"):
        lines.append(f"          {synthetic['made']} synthetic prompts answered")
    if trainer.get("last_error"):
        lines.append(f"          {trainer['failures']} failures, last: {trainer['last_error']}")
    return lines


def _leases(board: Mapping[str, Any]) -> list[str]:
    """Who computes, and what became of idle time; nothing of a board that does not tell."""
    if "leases_ended" not in board:
        return []
    states = [lease["state"] for lease in board["leases"]]
    said = [f"{states.count(state)} {state}" for state in sorted(set(states))]
    said += [f"{name} freed for a replica" for name in board["trainers_freed"]]
    used, idle = board["idle_s"]["used"], sum(board["idle_s"].values())
    longest = board["longest_yield_s"]
    tail = "" if longest is None else f", yields {1e3 * longest:.0f} ms at most"
    return [
        f"leases    {', '.join(said) or 'none'}; {used:.0f} of {idle:.0f} s idle used{tail}, "
        f"{board['leases_ended']['killed']} killed"
    ]


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
    from paceline.deploy.cli.operations import show_status

    show_status(url, say)
    return 0


def _rollback(url: str, options: argparse.Namespace, say: Say) -> int:
    from paceline.deploy.cli.operations import roll_back

    roll_back(url, options.topic, options.version, say, expected=options.expect)
    return 0


def _purge(url: str, options: argparse.Namespace, say: Say) -> int:
    from paceline.deploy.cli.operations import purge

    return 0 if purge(url, options.topic, options.request, say) else 1


def _drain(url: str, options: argparse.Namespace, say: Say) -> int:
    from paceline.deploy.cli.operations import drain

    return 0 if drain(url, say, on=not options.off, wait_s=options.wait) else 1
