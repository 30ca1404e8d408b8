"""Encode prompts as token ids with the target's tokenizer and chat template."""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json

from paceline.actors.engine import compatibility
from paceline.actors.engine.detokenizer import IncrementalDetokenizer
from paceline.actors.engine.turn_marks import TurnMarks, turn_marks
from paceline.deploy.api.request_schemas import (
    CONTEXT_LENGTH_EXCEEDED,
    ChatMessage,
    ChatTemplateOptions,
    CompletionRequest,
    GenerationOptions,
    Tool,
    ToolCall,
    prompt_too_long,
)
from paceline.deploy.api.token_length import token_length
from paceline.deploy.api.tools import shown_tools, template_tools
from paceline.deploy.errors import ApiError, invalid_value

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TEMPLATE_ROLES = {"developer": "system"}  # chat templates know the older name only


def context_length(model_path: str | Path, max_model_len: int | None) -> int:
    """Most tokens that prompt and answer may have together, from the model's config.json.

    Raises:
        ModelError: see compatibility.context_length.
    """
    return compatibility.context_length(_read_config(model_path), max_model_len)


def vocabulary_size(model_path: str | Path, tokenizer: PreTrainedTokenizerBase) -> int:
    """Token ids below it are known to both the tokenizer and the model."""
    model_size = _read_config(model_path).get("vocab_size")
    size: int = max(tokenizer.get_vocab().values()) + 1  # a vocabulary may have holes
    return min(size, model_size) if isinstance(model_size, int) else size


def _read_config(model_path: str | Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(
        (Path(model_path) / "config.json").read_text(encoding="utf-8")
    )
    return content


def check_token_ids(token_ids: Collection[int], vocab_size: int, param: str = "prompt") -> None:
    """Refuse token ids beyond the vocabulary.

    Raises:
        ApiError: 400 naming ``param``.
    """
    largest = max(token_ids, default=0)
    if largest >= vocab_size:
        reason = f"token id {largest} is not below the vocabulary's {vocab_size}"
        raise invalid_value(param, reason)


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """A prompt that answers repeat.

    Attributes:
        text: as the client sent it; of token ids, what they decode to with special tokens.
        token_ids: of the prompt.
        text_offsets: start of each token's text, in characters.
    """

    text: str
    token_ids: list[int]
    text_offsets: list[int]


class PromptEncoder:
    """Encodes the prompts of both endpoints.

    Args:
        tokenizer: a transformers fast tokenizer with the target's chat template.
        vocab_size: token ids must be below it, those of encoded text too: a tokenizer may have
            tokens without embeddings in the model.

    Attributes:
        template_tools: what the chat template knows of tools.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._token_length = token_length(tokenizer.backend_tokenizer)
        self.template_tools = template_tools(tokenizer)
        render = inspect.signature(tokenizer.apply_chat_template).parameters.values()
        self._reserved = {p.name for p in render if p.kind is not p.VAR_KEYWORD} | {"messages"}

    def check_options(self, options: GenerationOptions) -> None:
        """Refuse token ids beyond the vocabulary in the sampling options.

        Raises:
            ApiError: 400 naming ``logit_bias`` or ``stop_token_ids``.
        """
        check_token_ids(options.logit_bias or (), self._vocab_size, "logit_bias")
        check_token_ids(options.stop_token_ids or (), self._vocab_size, "stop_token_ids")

    def encode_text(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """Token ids of a text; with the tokenizer's special tokens unless ``False``."""
        special = add_special_tokens is not False
        return list(self._tokenizer(text, add_special_tokens=special)["input_ids"])

    def check_chars(self, text: str, context_length: int | None, param: str) -> None:
        """Refuse a text that is too long however it is encoded, which would take long to find out.

        Args:
            text: to encode.
            context_length: in tokens; None refuses nothing.
            param: the request's field of the text.

        Raises:
            ApiError: 400 ``context_length_exceeded`` naming ``param``.
        """
        if context_length is None or self._token_length is None:
            return
        fewest = self._token_length.fewest_tokens(text)
        if fewest >= context_length:
            reason = prompt_too_long(context_length, f"at least {fewest}")
            raise ApiError(400, reason, param=param, code=CONTEXT_LENGTH_EXCEEDED)

    def encode_prompts(
        self, request: CompletionRequest, context_length: int | None = None
    ) -> list[list[int]]:
        """Token ids of every prompt.

        Args:
            request: has the prompts.
            context_length: a text that cannot fit is refused; None encodes any.

        Raises:
            ApiError: 400 naming ``prompt`` for an empty one, an id beyond the vocabulary or a text
                that cannot fit.
        """
        encoded = []
        for prompt in request.prompts:
            if isinstance(prompt, str):
                self.check_chars(prompt, context_length, "prompt")
                token_ids = self.encode_text(prompt, request.add_special_tokens)
            else:
                token_ids = prompt
            check_token_ids(token_ids, self._vocab_size)
            if not token_ids:
                raise invalid_value("prompt", "it is empty")
            encoded.append(token_ids)
        return encoded

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        request: ChatTemplateOptions,
        param: str = "messages",
        tools: Sequence[Tool] = (),
        context_length: int | None = None,
    ) -> list[int]:
        """Token ids of a conversation, up to the start of the assistant's turn or of its rest.

        Args:
            messages: the conversation.
            request: options of the chat template.
            param: the request's field of the messages.
            tools: that the template shows.
            context_length: a conversation that cannot fit is refused; None encodes any.

        Raises:
            ApiError: 400 naming ``param`` if the template refuses them or is missing, or
                gives an id beyond the vocabulary or a text that cannot fit; 400 naming
                ``chat_template_kwargs``.
        """
        options = request.chat_template_kwargs or {}
        if reserved := sorted(self._reserved & options.keys()):
            raise invalid_value("chat_template_kwargs", f"{reserved[0]!r} is not the template's")
        if request.reasoning_effort is not None:
            options = {"reasoning_effort": request.reasoning_effort} | options
        generate, shown = request.add_generation_prompt, shown_tools(tools) or None
        called = {c.id: c.function.name for m in messages for c in m.tool_calls or () if c.id}
        try:
            shows_calls = "tool_calls" in self._tokenizer.get_chat_template(tools=shown)
            text = self._tokenizer.apply_chat_template(
                [_template_message(message, called, shows_calls) for message in messages],
                tools=shown,
                add_generation_prompt=not request.continue_final_message and generate is not False,
                continue_final_message=request.continue_final_message,
                tokenize=False,
                **options,
            )
        except Exception as error:  # a template is a program by the model's authors
            reason = " ".join(str(error).split())
            text = f"The target's chat template refuses these messages: {reason}"
            raise ApiError(400, text, param=param, code="invalid_value") from error
        self.check_chars(text, context_length, param)
        # A template writes the special tokens itself.
        token_ids = self.encode_text(text, bool(request.add_special_tokens))
        check_token_ids(token_ids, self._vocab_size, param)
        if not token_ids:
            raise invalid_value(param, "the chat template makes an empty prompt of them")
        return token_ids

    def echo(self, prompt: str | list[int], token_ids: list[int]) -> EchoedPrompt:
        """What answers to a prompt repeat.

        Args:
            prompt: as the client sent it.
            token_ids: of the prompt.
        """
        text = IncrementalDetokenizer(self._tokenizer, skip_special_tokens=False)
        for token in token_ids:
            text.append(token)
        whole = text.release(last=True)
        own = prompt if isinstance(prompt, str) else whole
        added = len(whole) - len(own) if whole.endswith(own) else 0  # by the tokenizer: "<s>"
        offsets = [max(0, text.start(i) - added) for i in range(len(token_ids))]
        return EchoedPrompt(own, token_ids, offsets)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids.

        Raises:
            ApiError: 400 naming ``tokens`` for an id beyond the vocabulary.
        """
        check_token_ids(token_ids, self._vocab_size, "tokens")
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    @cached_property
    def _turn_marks(self) -> TurnMarks | None:
        try:
            return turn_marks(self._tokenizer)
        except ValueError:
            return None

    def routed_text(self, token_ids: Sequence[int]) -> str | None:
        """What the router classified of a prompt: a chat's last user text, or all of another one.

        None if the chat template does not mark a user's text.

        Raises:
            ApiError: see decode.
        """
        text, marks = list(token_ids), self._turn_marks
        if marks is None and self._tokenizer.chat_template:
            return None
        start = None if marks is None else marks.last_user_text(text)
        if marks is not None and start is not None:
            text = list(takewhile(lambda token_id: token_id != marks.cue[0], text[start:]))
        return self.decode(text)

    def token_strs(self, token_ids: list[int]) -> list[str]:
        """The vocabulary's entries of token ids."""
        return [str(token) for token in self._tokenizer.convert_ids_to_tokens(token_ids)]

    def describe(self) -> dict[str, Any]:
        """The tokenizer's special tokens and chat template; no paths."""
        return {
            "tokenizer_class": type(self._tokenizer).__name__,
            "chat_template": self._tokenizer.chat_template,
            **dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token")),
            **self._tokenizer.special_tokens_map,
        }


def _template_message(
    message: ChatMessage, called: Mapping[str, str], shows_calls: bool
) -> dict[str, Any]:
    """A message as chat templates read it.

    Args:
        message: of the conversation.
        called: names of the functions by id of the call. Hermes' templates want that of a result.
        shows_calls: whether the template shows calls of tools.
    """
    given = message.model_dump(
        include={"name", "tool_call_id", "reasoning_content", "reasoning"}, exclude_none=True
    )
    role = _TEMPLATE_ROLES.get(message.role, message.role)
    given |= {"role": role, "content": message.text}
    if message.role == "tool" and (name := called.get(message.tool_call_id or "")):
        given = {"name": name} | given
    calls = [_template_call(call) for call in message.tool_calls or ()]
    if calls and shows_calls:
        given["tool_calls"] = calls
    elif calls:  # in Hermes' form: else the model would read answers to calls it does not see
        texts = (json.dumps(call["function"], ensure_ascii=False) for call in calls)
        written = "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)
        given["content"] = f"{message.text}\n{written}" if message.text else written
    return given


def _template_call(call: ToolCall) -> dict[str, Any]:
    """A tool call as chat templates read it, its arguments an object where they are JSON."""
    arguments = call.function.arguments
    if isinstance(arguments, str):
        with suppress(ValueError):  # of half a surrogate pair too, which no tokenizer encodes
            arguments = from_json(arguments or "{}")
    function = {"name": call.function.name, "arguments": arguments}
    return {"type": "function", "function": function} | ({"id": call.id} if call.id else {})


def last_user_message(messages: Sequence[ChatMessage]) -> str:
    """The last user message, which the router classifies; without one, the last message."""
    users = [message.text for message in messages if message.role == "user"]
    return users[-1] if users else messages[-1].text
