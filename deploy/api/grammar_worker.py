"""The process that tries out clients' grammars: it can be stopped, a thread cannot.

Reads JSON lines: the tokenizer, then sources of grammars; answers each with a line. A source that
takes too much time or memory ends the process. No torch, no Ray: it starts in a fraction of a
second.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, grammar_from

from paceline.actors.engine.grammar import (
    GrammarCompiler,
    GrammarError,
    GrammarState,
    allowed_tokens,
)
from paceline.deploy.api.tool_formats import FORMATS, JSON_LAYOUT, calls_grammar

_CPU_SECONDS = 2
_MEMORY = 2**30  # bytes, beyond those at the start
_TRIAL_TOKENS = 16
_LAYOUT: Any = JSON_LAYOUT


def _json_grammar(schema: Any) -> str:
    return LLMatcher.grammar_from_json_schema({} if schema is True else schema, defaults=_LAYOUT)


def _tools_grammar(source: dict[str, Any]) -> str:
    return calls_grammar(**source | {"form": FORMATS[source["form"]]})


_GRAMMARS: dict[str, Callable[[Any], str]] = {
    "json": _json_grammar,
    "regex": LLMatcher.grammar_from_regex,
    "choice": lambda texts: "start: " + " | ".join(map(json.dumps, texts)),
    "grammar": lambda text: grammar_from("grammar", text),
    "tools": _tools_grammar,
}


def make_grammar(kind: str, source: Any) -> str:
    """Translate a client's source to llguidance's.

    Args:
        kind: json (a JSON schema), regex, choice (a list of texts), grammar (Lark or GBNF), or
            tools (the arguments of calls_grammar, the form by name).
        source: of this kind.

    Raises:
        GrammarError: the source is invalid.
    """
    try:
        return _GRAMMARS[kind](source)
    except (ValueError, RecursionError) as error:
        raise GrammarError(" ".join(str(error).split())) from error


def try_grammar(compiler: GrammarCompiler, grammar: str) -> None:
    """Compile a grammar, and begin an answer: some only show there that they are too complex.

    Raises:
        GrammarError: it is invalid, allows no answer, or is too complex.
    """
    try:
        state = GrammarState(compiler, grammar)
        for _ in range(_TRIAL_TOKENS):
            tokens = [t for t in allowed_tokens(state.mask(())) if t not in state.eos_token_ids]
            if not tokens:
                break
            state.append(tokens[0])
    finally:
        compiler.forget(grammar)  # what has failed must not take the memory of the next one


def _reason(compiler: GrammarCompiler, kind: str, source: Any, error: GrammarError) -> str:
    """The reason of a failure, with the name of the function at fault."""
    for name, schema in source["functions"] if kind == "tools" else ():
        try:
            try_grammar(compiler, _json_grammar(schema))
        except GrammarError as fault:
            return f"the parameters of {name!r}: {fault}"
    return str(error)


def _allow_cpu_seconds(seconds: int) -> None:
    """End this process if it computes for longer from now on."""
    until = math.ceil(time.process_time()) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (until, resource.RLIM_INFINITY))


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + _MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> None:
    """Answer each line of standard input."""
    given = json.loads(sys.stdin.readline())
    compiler = GrammarCompiler(lambda: given["tokenizer"], given["vocab_size"], given["eos"])
    compiler.compile('start: "a"')  # reads the tokenizer
    _limit_memory()
    answer: dict[str, str] = {}
    while True:
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
        line = sys.stdin.readline()
        if not line:
            return
        _allow_cpu_seconds(_CPU_SECONDS)
        kind, source = json.loads(line)
        try:
            grammar = make_grammar(kind, source)
            try_grammar(compiler, grammar)
            answer = {"grammar": grammar}
        except GrammarError as error:
            answer = {"error": _reason(compiler, kind, source, error)}


if __name__ == "__main__":
    main()
