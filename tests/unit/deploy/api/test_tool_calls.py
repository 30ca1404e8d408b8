"""Calls in the text of answers: what is a call, what is text, and streams like whole answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.deploy.api import tool_calls
from paceline.deploy.api.tool_calls import (
    CallDelta,
    Piece,
    ToolCallParser,
    ToolSyntax,
    WholeCall,
    collect,
)
from paceline.deploy.api.tool_formats import HERMES, LLAMA3, ToolFormat

NAMES = frozenset({"add", "get_weather"})
ADD = '{"name": "add", "arguments": {"a": 1}}'
LLAMA_ADD = '{"name": "add", "parameters": {"a": 1}}'
ONE = [WholeCall("add", '{"a": 1}')]


def whole(
    form: ToolFormat, text: str, *, cut: bool = False, several: bool = True
) -> tuple[str, list[WholeCall]]:
    parser = ToolCallParser(ToolSyntax(form, NAMES, several), whole=True)
    return collect(parser.feed(text, last=True, cut=cut))


def pieces(form: ToolFormat, chunks: list[str], *, cut: bool = False) -> list[Piece]:
    parser = ToolCallParser(ToolSyntax(form, NAMES))
    found = [piece for chunk in chunks for piece in parser.feed(chunk)]
    return found + parser.feed("", last=True, cut=cut)


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        (f"<tool_call>\n{ADD}\n</tool_call>", "", ONE),
        (f"I add.\n\n<tool_call>{ADD}</tool_call>\n", "I add.", ONE),
        (f"<tool_call>\n{ADD}\n</tool_call>\n<tool_call>\n{ADD}\n</tool_call>", "", ONE * 2),
        (f"<tool_call>{ADD}", "", ONE),  # a model may leave out the end
        (f"<tool_call>{ADD}</tool_call> Done.", "Done.", ONE),
        (f"First.<tool_call>{ADD}</tool_call>\nThen.", "First.\nThen.", ONE),
        ('<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', "", ONE),
        ('<tool_call>{"name": "add"}</tool_call>', "", [WholeCall("add", "{}")]),
        (
            '<tool_call>{"name": "add", "arguments": {"a":"}</tool_call>\\""}}</tool_call>',
            "",
            [WholeCall("add", '{"a":"}</tool_call>\\""}')],
        ),
    ],
)
def test_calls_in_hermes_form(text: str, said: str, calls: list[WholeCall]) -> None:
    assert whole(HERMES, text) == (said, calls)


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        (LLAMA_ADD, "", ONE),
        (f"<|python_tag|>{LLAMA_ADD}", "", ONE),
        (f"{LLAMA_ADD}; {LLAMA_ADD};{LLAMA_ADD}\n{LLAMA_ADD}", "", ONE * 4),
        ('{"name": "add", "arguments": {"a": 1}}', "", ONE),
        ('{"type": "function", "name": "add", "parameters": {"a": 1}}', "", ONE),
        (f"I add.\n{LLAMA_ADD}", "I add.", ONE),
    ],
)
def test_calls_in_llama_3_form(text: str, said: str, calls: list[WholeCall]) -> None:
    assert whole(LLAMA3, text) == (said, calls)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, "  Hello.\n"),
        (HERMES, "a < b, <tool_ and <tool_call> are text"),
        (HERMES, ADD),
        (HERMES, "<tool_call>\n[1]\n</tool_call>"),
        (HERMES, '\n<tool_call>\n{"name": "add", "arguments": {"a": }}\n</tool_call>'),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
        (HERMES, '<tool_call>{"name": "rm", "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"arguments": {}, "name": ["add"]}</tool_call>'),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": "</tool_call>'),
        (HERMES, "<tool_call>" * 3 + '{"a": ' + "[" * 300),
        (LLAMA3, f"The call is {LLAMA_ADD}"),
        (LLAMA3, '{"name": "Ada", "parameters": {}}'),
        (LLAMA3, '{"answer": 4}'),
        (LLAMA3, "<|python_tag|>print(1)"),
        (LLAMA3, "{}"),
        (LLAMA3, '{"' + "a" * 300 + '": 1}'),
        (HERMES, '<tool_call>{"name": "' + "a" * 300 + '", "arguments": {}}'),
    ],
)
def test_what_is_no_call_is_text_to_the_last_character(form: ToolFormat, text: str) -> None:
    assert whole(form, text) == (text, [])


@pytest.mark.parametrize(
    ("form", "opening"),
    [
        (HERMES, '<tool_call>\n{"name": "add", '),
        (HERMES, '<tool_call>\n{"name": "add", "arguments": "'),
        (LLAMA3, '{"name": "add", '),
    ],
)
@pytest.mark.parametrize("cut", [False, True])
def test_of_objects_without_an_end_few_are_read_to_the_end(
    form: ToolFormat, opening: str, cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scanners: list[tool_calls._ObjectScanner] = []

    class Counted(tool_calls._ObjectScanner):
        def __init__(self, start: int) -> None:
            super().__init__(start)
            scanners.append(self)

    monkeypatch.setattr(tool_calls, "_ObjectScanner", Counted)
    lines = [f"{opening}\n"] * 200
    assert whole(form, "".join(lines), cut=cut) == ("".join(lines), [])
    assert len(scanners) <= 17
    assert collect(pieces(form, lines, cut=cut)) == ("".join(lines), [])
    assert len(scanners) <= 2 * 17


def test_a_few_objects_without_an_end_hide_no_call_behind_them() -> None:
    bad = '<tool_call>{"name": "add", \n' * 8
    assert whole(HERMES, f"{bad}<tool_call>{ADD}</tool_call>") == (bad.rstrip(), ONE)


def test_a_bad_call_leaves_the_good_ones() -> None:
    bad = '<tool_call>{"name": "add", "arguments": {"a": "}}</tool_call>'
    assert whole(HERMES, f"{bad}\n<tool_call>{ADD}</tool_call>") == (bad, ONE)


def test_a_call_cut_at_the_limit_of_tokens_is_returned_as_far_as_it_came() -> None:
    text = '<tool_call>\n{"name": "add", "arguments": {"a": "he'
    assert whole(HERMES, text, cut=True) == ("", [WholeCall("add", '{"a": "he')])
    assert whole(HERMES, text) == (text, [])  # the model ended it there


def test_without_parallel_calls_the_first_ends_the_answer() -> None:
    text = f"Wait.<tool_call>{ADD}</tool_call>\n<tool_call>{ADD}</tool_call> Done."
    assert whole(HERMES, text, several=False) == ("Wait.", ONE)


def test_a_stream_gives_the_name_first_and_arguments_as_they_come() -> None:
    text = 'Wait.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    found = pieces(HERMES, list(text))
    at = next(i for i, piece in enumerate(found) if isinstance(piece, CallDelta))
    assert "".join(str(piece) for piece in found[:at]) == "Wait."
    fragments = [CallDelta(0, None, char) for char in '{"a": 1}']
    assert found[at:] == [CallDelta(0, "add", ""), *fragments]


def test_a_tag_with_nothing_but_space_behind_it_is_soon_text() -> None:
    """Or a model that writes spaces for ever would have them read again with each of them."""
    for space, calls in ((" " * 256, ONE), (" " * 257, [])):
        text = f"<tool_call>{space}{ADD}"
        assert collect(pieces(HERMES, list(text))) == whole(HERMES, text)
        assert whole(HERMES, text) == ("" if calls else text, calls)
    parser = ToolCallParser(ToolSyntax(HERMES, NAMES))
    early = [piece for char in "<tool_call>" + " " * 300 for piece in parser.feed(char)]
    assert "".join(map(str, early)).startswith("<tool_call>")


TEXTS = st.text(st.sampled_from('ab \n<>{}"tool_call'), max_size=12).filter(
    lambda text: "{" not in text
)
VALUES = st.recursive(
    st.none() | st.integers() | st.text(st.sampled_from('a"\\}{]</;é漢\n'), max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
ARGUMENTS = st.dictionaries(st.text(max_size=4), VALUES, max_size=3)


@st.composite
def answers(draw: st.DrawFn) -> tuple[ToolFormat, str]:
    """A form, and an answer with calls in it."""
    form = draw(st.sampled_from([HERMES, LLAMA3]))
    text = draw(TEXTS)
    for _ in range(draw(st.integers(0, 3))):
        call: dict[str, Any] = {"name": draw(st.sampled_from([*sorted(NAMES), "other"]))}
        call[form.arguments[0]] = draw(ARGUMENTS)
        keys = draw(st.permutations(sorted(call)))
        written = json.dumps({key: call[key] for key in keys}, ensure_ascii=draw(st.booleans()))
        space = draw(st.sampled_from(["", "\n", " \n"]))
        tag = form.tag if form is HERMES else draw(st.sampled_from(["", form.tag]))
        text += f"{space}{tag}{space}{written}{space}{form.closing}{draw(TEXTS)}"
    return form, text


def chunked(text: str, sizes: list[int]) -> list[str]:
    chunks, at = [], 0
    for size in sizes:
        chunks.append(text[at : at + size])
        at += size
    return [*chunks, text[at:]]


@given(answers(), st.lists(st.integers(0, 30), max_size=30), st.data())
def test_a_stream_says_what_the_whole_answer_says_however_it_is_cut_into_chunks(
    answer: tuple[ToolFormat, str], sizes: list[int], data: st.DataObject
) -> None:
    form, text = answer
    cut = data.draw(st.booleans())
    if cut:
        text = text[: data.draw(st.integers(0, len(text)))]
    expected = whole(form, text, cut=cut)
    for chunks in (chunked(text, sizes), list(text)):
        assert collect(pieces(form, chunks, cut=cut)) == expected


PARTS = ["<tool_call>", "</tool_call>", "<|python_tag|>", '{"name": "add", ', '"arguments": ',
         '"parameters": ', "{", "}", "[", '"', "\\", ";", "\n", " ", "a", "é"]  # fmt: skip


@given(
    st.sampled_from([HERMES, LLAMA3]),
    st.lists(st.sampled_from(PARTS), max_size=25),
    st.booleans(),
)
def test_any_text_is_read_without_an_error_and_without_calls_it_stays_itself(
    form: ToolFormat, chunks: list[str], cut: bool
) -> None:
    text = "".join(chunks)
    said, calls = whole(form, text, cut=cut)
    assert calls or said == text
    said, calls = collect(pieces(form, chunks, cut=cut))
    assert calls or said == text
