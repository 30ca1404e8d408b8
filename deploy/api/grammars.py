"""Grammars of constrained answers: what a request asks for, tried out before it is admitted."""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

from paceline.deploy.api.fair_executor import FairExecutor
from paceline.deploy.api.request_schemas import ChatCompletionRequest, GenerationOptions
from paceline.deploy.api.tool_formats import lenient
from paceline.deploy.api.tools import RequestTools
from paceline.deploy.errors import ApiError, internal, invalid_value

logger = logging.getLogger(__name__)

MAX_SOURCE_CHARS = 128 * 2**10
_CACHED = 256  # grammars
_TIMEOUT_S = 30.0  # if the worker's own limit, of computing time, does not end it
_START_TIMEOUT_S = 60.0
_EXIT_S = 1.0  # from the end of its output to the end of the process
_WORKER = "paceline.deploy.api.grammar_worker"


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """What a request constrains its answers by.

    Attributes:
        line: the kind of grammar and its source, see grammar_worker.make_grammar, as JSON.
        param: the request's field.
    """

    line: str
    param: str


def grammar_source(
    options: GenerationOptions,
    format_field: str = "response_format",
    schema_field: str = "response_format.json_schema.schema",
    tools: RequestTools | None = None,
) -> GrammarSource | None:
    """Return a request's constraint, if it has one.

    Args:
        options: of the request.
        format_field: what the request calls ``response_format``, for messages.
        schema_field: what it calls the schema in there.
        tools: of a chat. If the answer has to call one, its text has no format.

    Raises:
        ApiError: 400 for two of them, or a large one.
    """
    found: list[tuple[str, str, Any]] = []
    response_format = (
        options.response_format if isinstance(options, ChatCompletionRequest) else None
    )
    if response_format is not None and response_format.type == "json_object":
        found.append((format_field, "json", {"type": "object"}))
    if response_format is not None and response_format.json_schema is not None:
        schema = response_format.json_schema.json_schema or {}
        strict = response_format.json_schema.strict
        found.append((schema_field, "json", schema if strict else lenient(schema)))
    if options.structured_outputs is not None:
        kind, source = options.structured_outputs.constraint
        found.append((f"structured_outputs.{kind}", kind, source))
        if tools is not None and tools.tools:
            reason = "the answer may call tools; send tool_choice 'none'"
            raise invalid_value("structured_outputs", reason)
    if len(found) > 1:
        raise invalid_value(found[1][0], f"{format_field} constrains the answer already")
    if tools is not None and (tools.functions or tools.strict or (tools.tools and found)):
        schemas = [schema for _, _, schema in found if not tools.functions]
        found = [("tools", "tools", tools.grammar_source(schemas))]
    for param, kind, source in found:
        line = json.dumps([kind, source])
        if len(line) > MAX_SOURCE_CHARS:
            reason = f"it has more than the {MAX_SOURCE_CHARS} characters that are compiled"
            raise invalid_value(param, reason)
        return GrammarSource(line, param)
    return None


class Grammars:
    """Translates and tries out the grammars of requests, in a process of their own.

    One after the other, a client's next one behind those of others; the latest results are kept.
    """

    def __init__(
        self, read_tokenizer: Callable[[], str], vocab_size: int, eos_token_ids: Collection[int]
    ) -> None:
        """Take the arguments of GrammarCompiler; the first grammar starts the process."""
        self._read_tokenizer, self._vocab_size = read_tokenizer, vocab_size
        self._eos = sorted(eos_token_ids)
        self._worker: subprocess.Popen[str] | None = None
        self._results: OrderedDict[str, dict[str, str]] = OrderedDict()
        self._lock = threading.Lock()
        self._thread = FairExecutor(1, "paceline-grammars")  # the event loop must not wait

    async def compile(self, source: GrammarSource, client: str = "") -> str:
        """Return the engine's grammar.

        Args:
            source: of the request.
            client: see `client_key`.

        Raises:
            ApiError: 400 with the reason if it is invalid or too complex; 500 if the process is
                killed or stands still.
        """
        result = self._known(source.line)
        if result is None:
            result = await self._thread.run(client, partial(self._compile, source.line))
        if "error" in result:
            raise invalid_value(source.param, result["error"].rstrip("."))
        return result["grammar"]

    def close(self) -> None:
        """End the process."""
        self._thread.close(self._stop)

    def _known(self, line: str) -> dict[str, str] | None:
        with self._lock:
            result = self._results.get(line)
            if result is not None:
                self._results.move_to_end(line)
            return result

    def _compile(self, line: str) -> dict[str, str]:
        """Have the worker try out a source; a new worker is started if that ended it."""
        known = self._known(line)
        if known is not None:  # since a request before this one
            return known
        if self._worker is not None and self._worker.poll() is not None:
            self._stop()  # it has ended since, which no grammar is to blame for
        worker = self._worker or self._start()
        result = self._ask(worker, line, _TIMEOUT_S)
        if result is None:
            ended_itself = _ended_itself(worker)
            self._stop()
            if not ended_itself:
                raise _not_now()
            logger.warning("a grammar took too much time or memory")
            result = {"error": "it takes too much time or memory"}
        with self._lock:
            self._results[line] = result
            if len(self._results) > _CACHED:
                self._results.popitem(last=False)
        return result

    def _start(self) -> subprocess.Popen[str]:
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self._worker = subprocess.Popen(
            [sys.executable, "-m", _WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path},
        )
        given = {"vocab_size": self._vocab_size, "eos": self._eos}
        line = json.dumps(given | {"tokenizer": self._read_tokenizer()})
        if self._ask(self._worker, line, _START_TIMEOUT_S) is None:
            self._stop()
            raise _not_now()
        return self._worker

    def _stop(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()
            worker.communicate()

    @staticmethod
    def _ask(worker: subprocess.Popen[str], line: str, timeout_s: float) -> dict[str, str] | None:
        """Send a line and return the answer; None if there is none."""
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            worker.stdin.write(line + "\n")
            worker.stdin.flush()
            poll = select.poll()
            poll.register(worker.stdout, select.POLLIN)
            if not poll.poll(1e3 * timeout_s):
                return None
            answer = worker.stdout.readline()
        except OSError:
            return None
        result: dict[str, str] | None = json.loads(answer) if answer.endswith("\n") else None
        return result


def _ended_itself(worker: subprocess.Popen[str]) -> bool:
    """Whether a worker without an answer met a limit or crashed.

    A grammar is not to blame for one that was killed, by the system if memory ran out, or that
    stands still.
    """
    try:
        return worker.wait(_EXIT_S) != -signal.SIGKILL
    except subprocess.TimeoutExpired:
        return False


def _not_now() -> ApiError:
    return internal("Grammars cannot be compiled just now.")
