"""Bodies and events of the Responses API, from the engine's chunks; pure."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from itertools import count
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from paceline.actors.engine.request import FINISH_LENGTH, GenerationChunk
from paceline.deploy.api.response_builder import (
    ResponseContext,
    UsageCounter,
    chat_logprobs,
    event_frame,
    speculative_metrics,
)
from paceline.deploy.api.response_schemas import ChatTokenLogprob, Metrics
from paceline.deploy.api.responses_request import ResponsesRequest
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
    output: list[OutputMessage]
    parallel_tool_calls: Literal[True] = True
    previous_response_id: None = None
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Literal["auto"] = "auto"
    tools: tuple[()] = ()
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponsesUsage | None = None
    metrics: Metrics | None = None


class ResponsesBuilder:
    """Builds the one response to a request.

    Args:
        context: of the request as chat.
        request: as received.
    """

    def __init__(self, context: ResponseContext, request: ResponsesRequest) -> None:
        self._context = context
        self._request = request
        self._item_id = context.id.replace("resp_", "msg_")
        self._usage = UsageCounter(context)
        self._text: list[str] = []
        self._logprobs: list[ChatTokenLogprob] = []
        self._metrics: Metrics | None = None
        self._status: Status = "in_progress"

    def add(self, chunk: GenerationChunk) -> list[ChatTokenLogprob]:
        """Add a chunk; returns its log-probabilities."""
        self._usage.add(0, chunk)
        self._text.append(chunk.text)
        logprobs = chat_logprobs(chunk, self._context.names)
        content = [] if logprobs is None else logprobs.content
        self._logprobs += content
        if chunk.finish_reason is not None:
            self._status = "incomplete" if chunk.finish_reason == FINISH_LENGTH else "completed"
        if chunk.speculative is not None:
            self._metrics = speculative_metrics([(chunk.speculative, self._context.topic(0))])
        return content

    def body(self) -> bytes:
        """The JSON body of a response that is not streamed."""
        return self._response().model_dump_json().encode()

    async def events(
        self, chunks: AsyncIterator[tuple[int, GenerationChunk]]
    ) -> AsyncGenerator[bytes, None]:
        """OpenAI's events of a streamed response; a late failure becomes ``response.failed``."""
        numbers = count()

        def event(kind: str, **fields: Any) -> bytes:
            return event_frame(kind, {"type": kind, "sequence_number": next(numbers), **fields})

        item = {"output_index": 0}
        part = item | {"content_index": 0, "item_id": self._item_id}
        for kind in ("response.created", "response.in_progress"):
            yield event(kind, response=self._response(output=[]))
        yield event("response.output_item.added", **item, item=self._message([]))
        empty = OutputText(text="")
        yield event("response.content_part.added", **part, part=empty)
        try:
            async for _, chunk in chunks:
                logprobs = self.add(chunk)
                if chunk.text or logprobs:
                    yield event(
                        "response.output_text.delta", **part, delta=chunk.text, logprobs=logprobs
                    )
        except ApiError as error:
            note_failure(error.status)
            self._status = "failed"
            failed = self._response(error=ResponseError(message=error.message))
            yield event("response.failed", response=failed)
            return
        whole = self._output_text()
        yield event("response.output_text.done", **part, text=whole.text, logprobs=whole.logprobs)
        yield event("response.content_part.done", **part, part=whole)
        yield event("response.output_item.done", **item, item=self._message([whole]))
        yield event(f"response.{self._status}", response=self._response())

    def _output_text(self) -> OutputText:
        return OutputText(text="".join(self._text), logprobs=self._logprobs)

    def _message(self, content: list[OutputText]) -> OutputMessage:
        status = "incomplete" if self._status == "failed" else self._status
        return OutputMessage(id=self._item_id, status=status, content=content)

    def _response(
        self, output: list[OutputMessage] | None = None, error: ResponseError | None = None
    ) -> ResponseObject:
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
            output=[self._message([self._output_text()])] if output is None else output,
            store=request.store is not False,
            temperature=1.0 if request.temperature is None else request.temperature,
            text={"format": request.text_format},
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
