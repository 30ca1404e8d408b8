"""Prompts for the router: a topic's rows in other words, and prompts of no topic.

The rows of a topic come in one or two fixed forms ("Could you translate the following question
into SQL …"). A router that saw only these would learn the form, so every topic is also put in
forms written for it (`router_words`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from paceline.actors.general import GENERAL
from paceline.deploy.errors import ConfigError
from paceline.deploy.recipes.data import Row
from paceline.deploy.recipes.router_words import (
    CODE_FORMS,
    GENERAL_FORMS,
    GENERAL_THEMES,
    GENRES,
    GREETINGS,
    MATH_FORMS,
    READING_FORMS,
    ROLES,
    SHELL_FORMS,
    SHELL_TASK_FORMS,
    SQL_FORMS,
)

Form = Callable[[Row, np.random.Generator], str]

# Written one by one for the router, see read_prompts.
WRITTEN_PROMPTS = Path(__file__).with_name("router_prompts.txt")


def sql_question(row: Row, rng: np.random.Generator) -> str:
    """A Spider question in another form; its fixed sentences are cut off."""
    question = row.prompt.split("explanation in the answer. ")[-1]
    return str(rng.choice(SQL_FORMS)).format(q=question)


def code_question(row: Row, rng: np.random.Generator) -> str:
    """A programming task in another form, mostly without its test or longer text."""
    text = row.prompt.removeprefix("Please generate code based on the following doc:\n")
    if rng.random() < 0.7:
        text = re.split(r" Your code should satisfy|\n\s*\n", text)[0]
    if rng.random() < 0.2:
        return text
    return str(rng.choice(CODE_FORMS)).format(q=text)


def shell_question(row: Row, rng: np.random.Generator) -> str:
    """A tldr page's command or one of its tasks in another form."""
    command = row.prompt.split("`")[1] if row.prompt.count("`") >= 2 else row.prompt
    tasks = re.findall(r"^- (.+?):?$", row.response, re.MULTILINE)
    if tasks and rng.random() < 0.6:
        task = str(rng.choice(tasks)).rstrip(":")
        return str(rng.choice(SHELL_TASK_FORMS)).format(q=task[:1].lower() + task[1:])
    return str(rng.choice(SHELL_FORMS)).format(c=command)


def general_question(row: Row, rng: np.random.Generator) -> str:
    """The question or the text of a reading exercise alone, the text with another wish."""
    body, found, question = row.prompt.rpartition("Question: ")
    if not found:  # tables and dialogue: the last line is the question or the latest turn
        return row.prompt.rstrip().rsplit("\n", 1)[-1].removeprefix("Question:").strip()
    if rng.random() < 0.5:
        return question
    text = body.partition("\n\n")[2].strip() or body
    return str(rng.choice(READING_FORMS)).format(q=text)


def math_question(row: Row, rng: np.random.Generator) -> str:
    """A word problem in another form."""
    return str(rng.choice(MATH_FORMS)).format(q=row.prompt)


FORMS: dict[str, Form] = {
    "sql": sql_question,
    "code": code_question,
    "shell": shell_question,
    "math": math_question,
    GENERAL: general_question,
}


def general_prompts(rng: np.random.Generator, count: int) -> list[str]:
    """Self-written prompts of none of the topics."""
    made = []
    for _ in range(count):
        theme, other = rng.choice(GENERAL_THEMES, size=2, replace=False)
        role, second = rng.choice(ROLES, size=2, replace=False)
        made.append(
            str(rng.choice(GENERAL_FORMS)).format(
                t=theme, u=other, r=role, s=second, g=rng.choice(GENRES)
            )
        )
    return [*made, *GREETINGS]


def read_prompts(path: Path) -> dict[str, list[str]]:
    """Prompts by topic: one a line below its ``[topic]``, with line breaks as ``\\n``.

    Raises:
        ConfigError: names the file that cannot be read.
    """
    found: dict[str, list[str]] = {}
    topic = ""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a UTF-8 text"
        raise ConfigError(f"prompts {path}: {reason}") from error
    for line in lines:
        if line.startswith("[") and line.endswith("]"):
            topic = line[1:-1]
        elif line:
            found.setdefault(topic, []).append(line.replace("\\n", "\n"))
    return found
