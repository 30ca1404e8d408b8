"""The forms in which models write calls of tools, and grammars of such calls; no torch, no Ray.

A model learns its form together with its chat template, so the template shows which one it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PROBE = "paceline_probe"  # a tool's name that no template has of its own

# As json.dumps writes it. Free white space would let a model write nothing else for ever, and
# leave little that is forced.
JSON_LAYOUT: dict[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A form of calls: JSON objects with the function's name and its arguments.

    Attributes:
        name: of the form.
        tag: starts a call.
        bare: whether an object at the start of a line starts a call without the tag.
        closing: may follow a call.
        written: before a call, between two and behind one, in parts that may be tokens.
        arguments: keys of the arguments, the first one as the template writes it.
        shown: matches what a template with this form renders for `PROBE`.
    """

    name: str
    tag: str
    bare: bool
    closing: str
    written: tuple[Sequence[str], str, Sequence[str]]
    arguments: tuple[str, ...]
    shown: re.Pattern[str]


HERMES = ToolFormat(
    name="hermes",  # Qwen's too
    tag="<tool_call>",
    bare=False,
    closing="</tool_call>",
    written=(("<tool_call>", "\n"), "\n", ("\n", "</tool_call>")),
    arguments=("arguments",),
    shown=re.compile(r'<tool_call>\s*\{\s*"(?:name|arguments)"\s*:'),
)
LLAMA3 = ToolFormat(
    name="llama3",
    tag="<|python_tag|>",
    bare=True,
    closing=";",
    written=((), "; ", ()),
    arguments=("parameters", "arguments"),
    shown=re.compile(rf'\{{"name": (?:"{PROBE}_call"|[^"{{]{{1,40}}), "parameters": '),
)
FORMATS = {form.name: form for form in (HERMES, LLAMA3)}


def shown_format(rendered: str) -> ToolFormat | None:
    """The form of the calls in what a template renders, None for another one."""
    return next((form for form in FORMATS.values() if form.shown.search(rendered)), None)


def calls_grammar(
    form: ToolFormat,
    functions: Sequence[tuple[str, dict[str, Any]]],
    *,
    several: bool,
    tokens: Mapping[str, int],
    text_schema: Any = None,
    free_text: bool = False,
) -> str:
    """A Lark grammar of answers that call functions.

    Args:
        form: of the calls.
        functions: name and JSON schema of the arguments of each function that may be called.
        several: whether there may be more than one call.
        tokens: ids of the parts of the form that are tokens of the vocabulary: llguidance knows
            these by name only, not by their characters.
        text_schema: JSON schema of an answer that calls nothing; None if it has to call.
        free_text: whether there may be any text beside calls, none included; the form's tag must be
            a token.
    """

    def literals(parts: Sequence[str]) -> list[str]:
        return [part if part in tokens else json.dumps(part) for part in parts]

    before, between, behind = form.written
    call = " ".join(("", *literals(before), "object", *literals(behind)))
    more = f" ({json.dumps(between)} call)*" if several else ""
    start = "calls" if text_schema is None else "text | calls"
    if free_text:
        start = "text (call text)*" if several else "text call?"
    rules = [
        "%llguidance {}",
        f"start: {start}",
        f"calls: call{more}",
        f"call:{call}",
        "object: " + " | ".join(f"f{i}" for i in range(len(functions))),
    ]
    if free_text:
        rules += ["text: other*", f"other: <[^{tokens[form.tag]}]>"]
    elif text_schema is not None:
        rules.append(f"text: {_json_rule(text_schema)}")
    for i, (name, schema) in enumerate(functions):
        head = f'{{"name": {json.dumps(name)}, "{form.arguments[0]}": '
        rules.append(f'f{i}: {json.dumps(head)} {_json_rule(schema)} "}}"')
    return "\n".join(rules)


def _json_rule(schema: Any) -> str:
    asked = schema.get("x-guidance")
    options = (asked if isinstance(asked, dict) else {}) | JSON_LAYOUT
    return "%json " + json.dumps({**schema, "x-guidance": options})


def lenient(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, of which llguidance leaves out the keywords and formats that it does not know.

    So is a schema meant that is not ``strict``; of a strict one they are an error.
    """
    return {**schema, "x-guidance": {"lenient": True}}
