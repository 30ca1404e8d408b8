"""The reference of all configuration keys, as Markdown, from the models and ``default.yaml``.

python -m paceline.deploy.config.reference > docs/configuration.md
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.cluster.section import Section
from paceline.deploy.config.config import PacelineConfig

DEFAULTS = Path(__file__).parent / "default.yaml"
_HEAD = """# Configuration

Every key of `paceline serve CONFIG` (YAML). A missing key takes its default, an unknown one is an
error. [`default.yaml`](../deploy/config/default.yaml) has all keys with their defaults.

Generated, do not edit:
`python -m paceline.deploy.config.reference > docs/configuration.md`.
"""
_LINE = re.compile(r"^(?P<indent> *)(?P<key>\w+):(?P<value>[^#]*)(?:#(?P<text>.*))?$")
_MORE = re.compile(r"^ {8,}#(?P<text>.*)$")
_WORDS = {"integer": "whole number", "number": "number", "boolean": "true, false", "null": "null"}


def reference() -> str:
    """The page."""
    notes = comments(DEFAULTS.read_text(encoding="utf-8"))
    schema = PacelineConfig.model_json_schema()
    top, sections = [], []
    for name, field in PacelineConfig.model_fields.items():
        model = field.annotation
        if isinstance(model, type) and issubclass(model, Section):
            sections.append(_section(name, model, schema["$defs"][model.__name__], notes))
        else:
            top.append(_row(name, schema["properties"][name], notes.get(name, "")))
    return "\n".join([_HEAD, _table(top), *sections]) + "\n"


def comments(text: str) -> dict[str, str]:
    """Dotted key to its comment in ``default.yaml``, continuation lines joined."""
    notes: dict[str, str] = {}
    section = key = ""
    for line in text.splitlines():
        if more := _MORE.match(line):
            notes[key] = f"{notes[key]} {more['text'].strip()}".strip()
        elif found := _LINE.match(line):
            section = section if found["indent"] else ""
            key = f"{section}.{found['key']}" if section else found["key"]
            if not found["indent"] and not found["value"].strip():
                section = found["key"]
            notes[key] = (found["text"] or "").strip()
    return notes


def _section(
    name: str, model: type[Section], schema: Mapping[str, Any], notes: Mapping[str, str]
) -> str:
    rows = [
        _row(f"{name}.{key}", facts, notes.get(f"{name}.{key}", ""))
        for key, facts in schema["properties"].items()
    ]
    about = " ".join(line.strip() or "\n\n" for line in (model.__doc__ or "").splitlines())
    about = "\n\n".join(part.strip() for part in about.split("\n\n")).replace("``", "`")
    return f"\n## {name}\n\n{about.strip()}\n\n{_table(rows)}"


def _table(rows: list[str]) -> str:
    return "\n".join(["| key | values | default | |", "|---|---|---|---|", *rows])


def _row(key: str, facts: Mapping[str, Any], note: str) -> str:
    cells = (f"`{key}`", " or ".join(_values(facts)), f"`{_shown(facts.get('default', {}))}`", note)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _values(facts: Mapping[str, Any]) -> Iterator[str]:
    """The values that a key accepts, in words."""
    for part in facts.get("anyOf", [facts]):
        if "enum" in part or "const" in part:
            every = part["enum"] if "enum" in part else [part["const"]]
            yield ", ".join(f"`{_shown(value)}`" for value in every)
        elif part.get("type") == "array":
            yield "list of names"
        elif part.get("type") == "object" or "$ref" in part:
            yield "mapping"
        else:
            yield " ".join([_WORDS.get(part.get("type", ""), "text"), *_limits(part)]).strip()


def _limits(part: Mapping[str, Any]) -> Iterator[str]:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    for name, sign in signs.items():
        if name in part:
            yield f"{sign} {part[name]:g}"


def _shown(value: object) -> str:
    """A default in YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(str, value)) + "]"
    return "{}" if value == {} else str(value)


if __name__ == "__main__":
    sys.stdout.write(reference())
