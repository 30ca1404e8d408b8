"""``paceline topics``: ask a running server for its topics, or have it add one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.deploy.cli.client import call
from paceline.deploy.errors import ConfigError, NoAnswerError

PATH = "/v1/paceline/topics"
_ADD_S = 180.0
_ASK_S = 30.0
_TAKEN_UP_S = 30.0
_POLL_S = 0.5


def read_examples(path: Path) -> list[str]:
    """The prompts of a file: one a line, or in ``.jsonl`` one object a line with a ``prompt``.

    Raises:
        ConfigError: names the file, and the line that is wrong.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
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


def list_topics(url: str, say: Callable[[str], None]) -> None:
    """Print the server's topics.

    Raises:
        CallError: it does not answer, or refuses.
    """
    say(table(call(url, "GET", PATH, timeout_s=_ASK_S)["data"]))


def add_topic(
    url: str,
    name: str,
    examples: Sequence[str],
    say: Callable[[str], None],
    *,
    wait_s: float = _TAKEN_UP_S,
) -> None:
    """Have the server add a topic, say what came of it, and wait until it is taken up.

    Args:
        url: of the server.
        name: of the topic.
        examples: prompts of it.
        say: prints a line.
        wait_s: longest wait for the parts; without them the topic is there all the same.

    Raises:
        CallError: the server does not answer, or refuses; the topic was not added then.
    """
    body = {"name": name, "examples": list(examples)}
    try:
        answer = call(url, "POST", PATH, body, _ADD_S)
    except NoAnswerError as error:
        raise NoAnswerError(
            f"{error}; whether the topic was added, `paceline topics` tells"
        ) from error
    for line in added_words(answer):
        say(line)
    deadline = time.monotonic() + wait_s
    while missing := _missing(name, call(url, "GET", PATH, timeout_s=_ASK_S)["data"]):
        if time.monotonic() > deadline:
            say(f"not yet everywhere, it will be taken up: {', '.join(missing)}")
            return
        time.sleep(_POLL_S)
    say("it is served")


def added_words(answer: Mapping[str, Any]) -> list[str]:
    """What the server said of an addition, in lines for people."""
    name, figures = answer["name"], answer.get("router")
    lines = [f"{name} added: its expert is general's copy, version {answer['weight_version']}"]
    if figures is None:
        return [*lines, "the router is off: requests name the expert themselves"]
    before = ", ".join(f"{count} {topic}" for topic, count in figures["examples_before"].items())
    prompts = figures["prompts_by_topic"]
    lines.append(
        f"router, on prompts it did not learn from: {figures['recall']:.1%} of "
        f"{answer['examples']} examples go to {name} (before: {before})"
    )
    lines.append(f"  {figures['moved']:.1%} of {sum(prompts.values())} other prompts moved:")
    lines += [
        f"    {topic:12} {share:6.1%} of {prompts[topic]}"
        for topic, share in figures["moved_by_topic"].items()
    ]
    return lines


def table(topics: Sequence[Mapping[str, Any]]) -> str:
    """The topics as lines of text under a heading; ``?`` where a part did not answer."""
    rows = [f"{'topic':14}  {'from':6}  {'version':>7}  {'routed':6}  {'drafts':6}  {'records':>7}"]
    for topic in topics:
        source = "added" if topic["added"] else "config"
        facts = (topic[key] for key in ("routed", "drafting"))
        routed, drafting = ({True: "yes", False: "no"}.get(fact, "?") for fact in facts)
        version, records = (
            "?" if topic[key] is None else topic[key] for key in ("weight_version", "records")
        )
        rows.append(
            f"{topic['name']:14}  {source:6}  {version:>7}  {routed:6}  {drafting:6}  {records:>7}"
        )
    return "\n".join(rows)


def _missing(name: str, topics: Sequence[Mapping[str, Any]]) -> list[str]:
    """The parts that do not know a topic yet, in words."""
    own = next((topic for topic in topics if topic["name"] == name), None)
    if own is None:
        return ["front door"]
    parts = {
        "router": own["routed"] is not False,
        "target": own["drafting"],
        "replay shard": own["records"] is not None,
    }
    return [part for part, there in parts.items() if not there]
