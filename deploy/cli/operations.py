"""Commands to a running server: status, topics, rollback, replay purge, drain."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from paceline.deploy.api.auth import is_loopback
from paceline.deploy.cli.tables import added_topic_lines, part, status_text, topic_table
from paceline.deploy.errors import (
    UNKNOWN_OUTCOME,
    VERSION_CHANGED,
    CallError,
    ConfigError,
    NoAnswerError,
)

if TYPE_CHECKING:
    from paceline.deploy.config.config import PacelineConfig

Echo = Callable[[str], None]

KEY_VARIABLE = "PACELINE_API_KEY"
_STATUS, _TOPICS = "/v1/paceline/status", "/v1/paceline/topics"
_ROLLBACK, _PURGE = "/v1/paceline/rollback", "/v1/paceline/replay/purge"
_DRAIN = "/v1/paceline/drain"
# Fields of the answers that are read here: another service may answer with any JSON.
_FIELDS = {
    ("GET", _STATUS): {"target", "scheduler", "live_drafts"},
    ("GET", _TOPICS): {"data"},
    ("POST", _TOPICS): {"name", "weight_version"},
    ("POST", _ROLLBACK): {"weight_version"},
    ("POST", _PURGE): {"removed"},
    ("POST", _DRAIN): {"running", "waiting"},
}
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_POLL_S, _TOPIC_POLL_S = 1.0, 0.5
# Requests admitted a moment ago are not reported yet, and a restarted scheduler has no reports.
_QUIET_POLLS = 4
_ATTEMPTS = 3
_ROLLOUT_S = 30.0
_SEVERAL_PARTS_S = 180.0  # what asks several parts, one after the other


def server_url(config: PacelineConfig) -> str:
    """URL of a configuration's server, seen from this machine."""
    host = _WILDCARDS.get(config.host, config.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{config.port}"


def call(url: str, method: str, path: str, body: Any = None, timeout_s: float = 30.0) -> Any:
    """Send a request with the API key of ``PACELINE_API_KEY``; returns the answer's JSON.

    Raises:
        CallError: the server refuses, or (NoAnswerError) does not answer, or the environment
            has a proxy or certificates that cannot be used.
    """
    key = os.environ.get(KEY_VARIABLE, "").strip()
    try:
        headers = {b"Authorization": b"Bearer " + key.encode()} if key else {}
        address = httpx.URL(url.rstrip("/") + path)
        # A proxy of the environment is for other hosts: it would get the key.
        trust = not is_loopback(address.host)
        answer = httpx.request(
            method, address, json=body, headers=headers, timeout=timeout_s, trust_env=trust
        )
    except (httpx.LocalProtocolError, UnicodeEncodeError) as error:  # its text is the key's
        raise CallError(f"{KEY_VARIABLE}: no valid key") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise NoAnswerError(f"{url} does not answer: {error}") from error
    except (ImportError, OSError, ValueError) as error:  # nothing was sent
        reason = f"the environment's proxy or certificates cannot be used: {error}"
        raise CallError(f"{url} is not called: {reason}") from error
    try:
        content = answer.json()
    except ValueError as error:
        # A proxy's error: the server behind it has died, perhaps after it had done the work.
        kind = NoAnswerError if answer.is_server_error else CallError
        raise kind(f"{url} answers {answer.status_code}, and no JSON") from error
    if answer.status_code != httpx.codes.OK:
        fault = content.get("error") if isinstance(content, dict) else None
        fault = fault if isinstance(fault, dict) else {}
        message = str(fault.get("message") or f"{url} answers {answer.status_code}")
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            message += f" This command takes the key from {KEY_VARIABLE}."
        raise CallError(message, fault.get("code"))
    if not isinstance(content, dict) or not _FIELDS[method, path] <= content.keys():
        raise CallError(f"{url} is no Paceline server")
    return content


def show_status(url: str, echo: Echo) -> None:
    """Print a server's status on one screen.

    Raises:
        CallError: the server does not answer, or refuses.
    """
    echo(status_text(url, call(url, "GET", _STATUS)))


def roll_back(
    url: str, topic: str, version: int | None, echo: Echo, *, expected: int | None = None
) -> None:
    """Roll a topic's draft back once, and wait until the replicas serve the version.

    A lost answer is requested again; the draft is still rolled back only once.

    Args:
        url: of the server.
        topic: of the draft.
        version: see WeightRegistry.roll_back.
        echo: prints a line.
        expected: newest version that is served, or the rollback is refused; None: the one that is
            served now.

    Raises:
        CallError: the server refuses and has changed nothing; or it does not answer; or a replica
            has not taken the version within ``_ROLLOUT_S`` seconds: the message says which.
    """
    expected = _served(url, topic)[-1] if expected is None else expected
    order = {"topic": topic, "version": version, "expected": expected}
    for attempt in range(_ATTEMPTS):
        try:
            answer = call(url, "POST", _ROLLBACK, order)
        except CallError as error:
            lost = isinstance(error, NoAnswerError) or error.code == UNKNOWN_OUTCOME
            if not lost and not (attempt and error.code == VERSION_CHANGED):
                raise
            if not lost:
                stable, *_ = _served(url, topic)
                if stable == expected:  # a candidate came before any of these calls
                    raise
                hint = f"`paceline history --topic {topic}` shows the decisions"
                _wait_for_rollout(url, topic, stable)
                echo(f"{topic}: stable is version {stable} (an answer was lost; {hint})")
                return
            if attempt + 1 == _ATTEMPTS:
                named = topic if version is None else f"{topic} {version}"
                again = f"paceline rollback {named} --expect {expected}"
                raise NoAnswerError(
                    f"{error}; `{again}` rolls back only if this did not"
                ) from error
            time.sleep(_POLL_S)
        else:
            stable = answer["weight_version"]
            _wait_for_rollout(url, topic, stable)
            if version is not None:
                how = f"with the weights of version {version}"
            elif stable < expected:
                how = f"candidate {expected} is withdrawn"
            else:  # numbers never fall
                how = "with the weights of the one before"
            echo(f"{topic}: stable is version {stable}, {how}")
            return


def _wait_for_rollout(url: str, topic: str, version: int) -> None:
    """Poll the registry until every process that drafts has loaded the topic's weights.

    These are the target's replicas, or those of the topic's expert in a pool.
    """
    deadline = time.monotonic() + _ROLLOUT_S
    while True:
        status = call(url, "GET", _STATUS)
        state, load = part(part(status, "live_drafts"), topic), part(status, "scheduler")
        pooled = bool(part(status, "target").get("experts"))
        # A restarted registry does not know all of them yet; idle replicas report no load.
        expected = 1 if pooled else max(1, load.get("replicas", 1))
        if state.get("subscribers", 0) >= expected and not state["lagging"]:
            return
        if time.monotonic() >= deadline:
            break
        time.sleep(_POLL_S)
    late = ", ".join(state.get("lagging", ())) or "some of them do not ask for weights"
    raise CallError(
        f"{topic}: version {version} is stable, but not every replica has loaded it within "
        f"{_ROLLOUT_S:.0f} s: {late}; its log says why"
    )


def _served(url: str, topic: str) -> list[int]:
    """The stable version of a topic's draft, then the candidate if there is one."""
    live = part(call(url, "GET", _STATUS), "live_drafts")
    if "error" in live:
        raise CallError("the weight registry does not answer: nothing was changed")
    if topic not in live:
        raise CallError(f"There is no topic {topic}.")
    own = live[topic]
    return [version for version in (own["stable"], own["candidate"]) if version is not None]


def purge(url: str, order: Mapping[str, Any], echo: Echo) -> bool:
    """Delete records from replay; returns whether every part did.

    Args:
        url: of the server.
        order: see PurgeRequest.
        echo: prints a line.

    Raises:
        CallError: the server does not answer, or refuses.
    """
    answer = call(url, "POST", _PURGE, order, _SEVERAL_PARTS_S)
    removed = answer["removed"]
    for name, count in removed.items():
        echo(f"{name}: {'does not answer, try again' if count is None else f'{count} removed'}")
    return None not in removed.values()


def drain(url: str, echo: Echo, *, on: bool = True, wait_s: float = 600.0) -> bool:
    """Stop a server from admitting requests, and wait for the running ones.

    Args:
        url: of the server.
        echo: prints a line.
        on: False: admit requests again, without a wait.
        wait_s: longest wait, seconds.

    Returns:
        whether no request is left; True if ``on`` is False.

    Raises:
        CallError: the server does not answer, or refuses.
    """
    deadline, quiet, started, said = time.monotonic() + wait_s, 0, False, ""
    while True:  # repeated: a restarted trainer scheduler has forgotten the drain
        try:
            state = call(url, "POST", _DRAIN, {"on": on})
        except CallError as error:
            started |= error.code == UNKNOWN_OUTCOME  # perhaps: a part of the server is silent
            if not (on and started) or time.monotonic() > deadline:
                raise
            quiet, line = 0, str(error)
        else:
            if not on:
                echo("requests are admitted again")
                return True
            started, busy = True, state["running"] + state["waiting"]
            quiet = 0 if busy else quiet + 1
            line = f"draining: {state['running']} running, {state['waiting']} waiting"
        if line != said:
            echo(said := line)
        if quiet == _QUIET_POLLS:
            echo("no request is left: the server can be stopped")
            return True
        if time.monotonic() > deadline:
            echo(
                f"not done within {wait_s:g} s: the server goes on draining, and "
                "`paceline drain --off` ends that"
            )
            return False
        time.sleep(_POLL_S)


def list_topics(url: str, echo: Echo) -> None:
    """Print the server's topics.

    Raises:
        CallError: the server does not answer, or refuses.
    """
    echo(topic_table(call(url, "GET", _TOPICS)["data"]))


def add_topic(
    url: str, name: str, examples: Sequence[str], echo: Echo, *, wait_s: float = _ROLLOUT_S
) -> None:
    """Add a topic to a server, print its answer, and wait until every part has the topic.

    Args:
        url: of the server.
        name: of the topic.
        examples: prompts of the topic.
        echo: prints a line.
        wait_s: longest wait for the parts, seconds; the topic stays without them.

    Raises:
        CallError: the server does not answer, or refuses and has not added the topic.
    """
    body = {"name": name, "examples": list(examples)}
    try:
        answer = call(url, "POST", _TOPICS, body, _SEVERAL_PARTS_S)
    except NoAnswerError as error:
        raise NoAnswerError(
            f"{error}; `paceline topics` shows whether the topic was added"
        ) from error
    for line in added_topic_lines(answer):
        echo(line)
    deadline = time.monotonic() + wait_s
    while missing := _parts_without(name, call(url, "GET", _TOPICS)["data"]):
        if time.monotonic() > deadline:
            echo(f"not yet in {', '.join(missing)}; will follow")
            return
        time.sleep(_TOPIC_POLL_S)
    echo("it is served")


def _parts_without(name: str, topics: Sequence[Mapping[str, Any]]) -> list[str]:
    own = next((topic for topic in topics if topic["name"] == name), None)
    if own is None:
        return ["ingress"]
    parts = {
        "router": own["routed"] is not False,
        "target": own["drafting"],
        "replay shard": own["records"] is not None,
    }
    return [part for part, present in parts.items() if not present]


def read_examples(path: Path) -> list[str]:
    """Prompts of a file: one a line, or in ``.jsonl`` one object a line with a ``prompt``.

    Raises:
        ConfigError: names the file and the wrong line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # JSON has other breaks too
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a UTF-8 text"
        raise ConfigError(f"examples {path}: {reason}") from error
    if path.suffix != ".jsonl":
        return [line.strip() for line in lines if line.strip()]
    return [_prompt(path, i, line) for i, line in enumerate(lines, 1) if line.strip()]


def _prompt(path: Path, number: int, line: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError) as error:
        reason = "no JSON object with a prompt"
        raise ConfigError(f"examples {path}: line {number}: {reason}") from error
    if not isinstance(prompt, str) or not prompt.strip():
        raise ConfigError(f"examples {path}: line {number}: the prompt is no text")
    return prompt
