"""Bodies and events of the Responses API, from the engine's chunks; pure."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from paceline.actors.engine.request import FINISH_LENGTH, GenerationChunk
from paceline.deploy.api.request_schemas import ToolMode
from paceline.deploy.api.response_builder import (
    ResponseContext,
    UsageCounter,
    chat_logprobs,
    event_frame,
    speculative_metrics,
)
from paceline.deploy.api.response_schemas import ChatTokenLogprob, Metrics
from paceline.deploy.api.responses_request import FunctionTool, NamedFunction, ResponsesRequest
from paceline.deploy.api.tool_calls import CallDelta, Piece, ToolCallParser
from paceline.deploy.errors import ApiError
from paceline.deploy.monitoring.outcomes import note_failure

MessageStatus = Literal["in_progress", "completed", "incomplete"]
Status = MessageStatus | Literal["failed"]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True)


class OutputText(_Model):
    """The text of an answer."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: tuple[()] = ()
    logprobs: list[ChatTokenLogprob] = []


class OutputMessage(_Model):
    """An answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: MessageStatus
    content: list[OutputText]


class OutputCall(_Model):
    """A call of a function."""

    id: str
    type: Literal["function_call"] = "function_call"
    status: MessageStatus
    call_id: str
    name: str
    arguments: str


class InputTokensDetails(_Model):
    """``cached_tokens`` come from the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(_Model):
    """No tokens are counted as reasoning."""

    reasoning_tokens: int = 0


class ResponsesUsage(_Model):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int


class IncompleteDetails(_Model):
    """Why an answer is cut."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseError(_Model):
    """Why there is no answer."""

    code: Literal["server_error"] = "server_error"
    message: str


class ResponseObject(_Model):
    """A response; ``metrics`` is Paceline's."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    background: Literal[False] = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage | OutputCall]
    parallel_tool_calls: bool
    previous_response_id: None = None
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: ToolMode | NamedFunction
    tools: list[FunctionTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponsesUsage | None = None
    metrics: Metrics | None = None


Event = tuple[str, dict[str, Any]]  # kind and fields


@dataclass(slots=True)
class _Message:
    """A message under way."""

    id: str
    text: str = ""
    logprobs: list[ChatTokenLogprob] = field(default_factory=list)

    def item(self, status: MessageStatus, *, empty: bool = False) -> OutputMessage:
        return OutputMessage(id=self.id, status=status, content=[] if empty else [self.part()])

    def part(self) -> OutputText:
        return OutputText(text=self.text, logprobs=self.logprobs)


@dataclass(slots=True)
class _Call:
    """A call under way."""

    id: str
    call_id: str
    name: str
    arguments: str = ""

    def item(self, status: MessageStatus) -> OutputCall:
        return OutputCall(
            id=self.id,
            status=status,
            call_id=self.call_id,
            name=self.name,
            arguments=self.arguments,
        )


class ResponsesBuilder:
    """Builds the one response to a request.

    Args:
        context: of the request as chat.
        request: as received.
    """

    def __init__(self, context: ResponseContext, request: ResponsesRequest) -> None:
        self._context = context
        self._request = request
        self._usage = UsageCounter(context)
        whole = not request.stream
        tools = context.tools
        self._parser = None if tools is None else ToolCallParser(tools, whole=whole)
        self._items: list[_Message | _Call] = []  # the last one is under way
        self._waiting: list[tuple[int, ChatTokenLogprob]] = []  # with the start of the token's text
        self._metrics: Metrics | None = None
        self._status: Status = "in_progress"

    def add(self, chunk: GenerationChunk) -> list[Event]:
        """Add a chunk; returns its events."""
        self._usage.add(0, chunk)
        logprobs = chat_logprobs(chunk, self._context.names)
        if logprobs is not None:
            starts = [entry.text_offset for entry in chunk.logprobs or ()]
            self._waiting += zip(starts, logprobs.content, strict=True)
        pieces = self._pieces(chunk)
        events: list[Event] = []
        ready = self._text_logprobs(last=chunk.finish_reason is not None)
        for piece in pieces:
            if isinstance(piece, str):
                events += self._add_text(piece, ready)
                ready = []
            else:
                events += self._add_call(piece)
        if ready:
            events += self._add_text("", ready)
        if chunk.speculative is not None:
            self._metrics = speculative_metrics([(chunk.speculative, self._context.topic(0))])
        if chunk.finish_reason is not None:
            if not self._items:
                events += self._open_message()
            self._status = "incomplete" if chunk.finish_reason == FINISH_LENGTH else "completed"
        return events

    def _pieces(self, chunk: GenerationChunk) -> list[Piece]:
        """Text and calls of a chunk."""
        if self._parser is None:
            return [chunk.text] if chunk.text else []
        last, cut = chunk.finish_reason is not None, chunk.finish_reason == FINISH_LENGTH
        return self._parser.feed(chunk.text, last=last, cut=cut)

    def _text_logprobs(self, *, last: bool) -> list[ChatTokenLogprob]:
        """Log-probabilities of the tokens that are text, not part of a call; all if there is none.

        Text behind a call has none.
        """
        end = None if self._parser is None else self._parser.text_end
        if self._parser is not None and end is None and not last:
            end = self._parser.num_released
        ready = [entry for start, entry in self._waiting if end is None or start < end]
        self._waiting = self._waiting[len(ready) :]
        return ready

    def _add_text(self, text: str, logprobs: list[ChatTokenLogprob]) -> list[Event]:
        events = [] if self._in_message else self._open_message()
        message = self._items[-1]
        assert isinstance(message, _Message)
        message.text += text
        message.logprobs += logprobs
        part = self._place() | {"content_index": 0}
        return [
            *events,
            ("response.output_text.delta", part | {"delta": text, "logprobs": logprobs}),
        ]

    @property
    def _in_message(self) -> bool:
        return bool(self._items) and isinstance(self._items[-1], _Message)

    def _open_message(self) -> list[Event]:
        events = self._close_item("completed")
        name = self._context.id.replace("resp_", "msg_")
        message = _Message(f"{name}_{len(self._items)}" if self._items else name)
        self._items.append(message)
        added = {"output_index": len(self._items) - 1}
        part = self._place() | {"content_index": 0}
        return [
            *events,
            (
                "response.output_item.added",
                added | {"item": message.item("in_progress", empty=True)},
            ),
            ("response.content_part.added", part | {"part": OutputText(text="")}),
        ]

    def _add_call(self, piece: CallDelta) -> list[Event]:
        events: list[Event] = []
        if piece.name is not None:
            events = self._close_item("completed")
            call_id = self._context.call_id(0, piece.index)
            call = _Call(call_id.replace("call_", "fc_"), call_id, piece.name)
            self._items.append(call)
            added = {"output_index": len(self._items) - 1, "item": call.item("in_progress")}
            events.append(("response.output_item.added", added))
        if piece.arguments:
            under_way = self._items[-1]
            assert isinstance(under_way, _Call)
            under_way.arguments += piece.arguments
            delta = self._place() | {"delta": piece.arguments}
            events.append(("response.function_call_arguments.delta", delta))
        return events

    def _place(self) -> dict[str, Any]:
        """Where the item under way is."""
        return {"output_index": len(self._items) - 1, "item_id": self._items[-1].id}

    def _close_item(self, status: MessageStatus) -> list[Event]:
        """The events at the end of the item under way."""
        if not self._items:
            return []
        item, place = self._items[-1], self._place()
        done: Event = (
            "response.output_item.done",
            {"output_index": place["output_index"], "item": item.item(status)},
        )
        if isinstance(item, _Call):
            whole = place | {"name": item.name, "arguments": item.arguments}
            return [("response.function_call_arguments.done", whole), done]
        place |= {"content_index": 0}
        text = {"text": item.text, "logprobs": item.logprobs}
        return [
            ("response.output_text.done", place | text),
            ("response.content_part.done", place | {"part": item.part()}),
            done,
        ]

    def body(self) -> bytes:
        """The JSON body of a response that is not streamed."""
        return self._response().model_dump_json().encode()

    async def events(
        self, chunks: AsyncIterator[tuple[int, GenerationChunk]]
    ) -> AsyncGenerator[bytes, None]:
        """OpenAI's events of a streamed response; a late failure becomes ``response.failed``."""
        numbers = count()

        def frame(event: Event) -> bytes:
            kind, fields = event
            return event_frame(kind, {"type": kind, "sequence_number": next(numbers), **fields})

        for kind in ("response.created", "response.in_progress"):
            yield frame((kind, {"response": self._response()}))
        if self._parser is None:
            for event in self._open_message():
                yield frame(event)
        try:
            async for _, chunk in chunks:
                for event in self.add(chunk):
                    yield frame(event)
        except ApiError as error:
            note_failure(error.status)
            self._status = "failed"
            failed = self._response(error=ResponseError(message=error.message))
            yield frame(("response.failed", {"response": failed}))
            return
        for event in self._close_item(self._last_status):
            yield frame(event)
        yield frame((f"response.{self._status}", {"response": self._response()}))

    @property
    def _last_status(self) -> MessageStatus:
        """Of the last item; a call that a stop string has cut must not be run."""
        is_cut = self._parser is not None and self._parser.in_call
        return "incomplete" if is_cut or self._status == "failed" else self._status

    def _output(self) -> list[OutputMessage | OutputCall]:
        last = len(self._items) - 1
        return [
            item.item(self._last_status if i == last else "completed")
            for i, item in enumerate(self._items)
        ]

    def _response(self, error: ResponseError | None = None) -> ResponseObject:
        request, usage = self._request, self._usage.usage()
        done = self._status in ("completed", "incomplete")
        return ResponseObject(
            id=self._context.id,
            created_at=self._context.created,
            status=self._status,
            error=error,
            incomplete_details=IncompleteDetails() if self._status == "incomplete" else None,
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            metadata=request.metadata or {},
            model=self._context.model,
            output=self._output(),
            parallel_tool_calls=request.parallel_tool_calls is not False,
            store=request.store is not False,
            temperature=1.0 if request.temperature is None else request.temperature,
            text={"format": request.text_format},
            tool_choice=request.tool_choice or "auto",
            tools=list(request.tools or ()),
            top_logprobs=request.top_logprobs or 0,
            top_p=1.0 if request.top_p is None else request.top_p,
            usage=ResponsesUsage(
                input_tokens=usage.prompt_tokens,
                input_tokens_details=InputTokensDetails(
                    cached_tokens=usage.prompt_tokens_details.cached_tokens
                ),
                output_tokens=usage.completion_tokens,
                total_tokens=usage.total_tokens,
            )
            if done
            else None,
            metrics=self._metrics,
        )
