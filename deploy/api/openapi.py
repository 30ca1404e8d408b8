"""The OpenAPI document, from the schemas of requests and responses.

The routes parse raw bodies (for OpenAI's error shape), so FastAPI cannot derive it. Validators
beyond types are described here by field.
"""

from __future__ import annotations

import functools
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from paceline.actors.weights.topics import TOPIC_NAME
from paceline.deploy.api.operations import DrainRequest, PurgeRequest, RollbackRequest
from paceline.deploy.api.request_schemas import (
    INT32_MAX,
    MAX_BIASES,
    MAX_PROMPTS,
    MAX_STOP_CHARS,
    MAX_STOPS,
    NO_OP_VALUES,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from paceline.deploy.api.response_schemas import (
    DetokenizeResponse,
    ErrorResponse,
    GenerationResponse,
    ModelCard,
    ModelList,
    TokenizeResponse,
)
from paceline.deploy.api.responses_builder import ResponseObject
from paceline.deploy.api.responses_request import ResponsesRequest
from paceline.deploy.api.topic_admin import MAX_EXAMPLE_CHARS, MAX_EXAMPLES, AddTopicRequest

Schema = dict[str, Any]

_REF = "#/components/schemas/{model}"
_NULL: Schema = {"type": "null"}
_FLAG: Schema = {"anyOf": [{"type": "boolean"}, _NULL]}
_STRING: Schema = {"type": "string"}
_ANYTHING: Schema = {"application/json": {"schema": {"type": "object"}}}
_EVENT: Schema = {
    "type": "object",
    "description": "One event: data is a chunk of the answer in JSON, an error, or [DONE].",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
}
_STOP: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
_TOKENS: Schema = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": INT32_MAX},
    "minItems": 1,
}
_BIAS: Schema = {
    "type": "object",
    "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,8})$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    "maxProperties": MAX_BIASES,
}


def _list_of(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": MAX_PROMPTS}


# Fields with validators in code: of one request, and of all requests that have them.
_OF_COMPLETIONS: dict[str, Schema] = {
    "prompt": {"anyOf": [_STRING, _list_of(_STRING), _TOKENS, _list_of(_TOKENS)]},
    "echo": _FLAG,
}
_OF_TOPICS: dict[str, Schema] = {
    "name": {"type": "string", "pattern": f"^{TOPIC_NAME.pattern}$"},
    "examples": {
        "type": "array",
        "items": {"type": "string", "minLength": 1, "maxLength": MAX_EXAMPLE_CHARS},
        "maxItems": MAX_EXAMPLES,
    },
}
_FIELDS: dict[str, Schema] = {
    "stop": {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}, _NULL]},
    "logit_bias": {"anyOf": [_BIAS, _NULL]},
    "return_token_strs": _FLAG,
    "ignore_eos": _FLAG,
    "return_token_ids": _FLAG,
    "return_token_sources": _FLAG,
    "include_stop_str_in_output": _FLAG,
    "continue_final_message": _FLAG,
    "include_usage": _FLAG,
    "continuous_usage_stats": _FLAG,
    "include_obfuscation": _FLAG,
    "previous_response_id": _NULL,
    "conversation": _NULL,
    "draft": {"anyOf": [_STRING, _NULL]},
    "speculative": {"anyOf": [{"$ref": _REF.format(model="Speculative")}, _NULL]},
}
_NO_OP = "Known, and served at these values only."
_ERRORS = {
    "400": "The request is wrong; `param` names the field.",
    "401": "This server has API keys, and the request shows none of them.",
    "403": "Not from there: a call of operators alone, or by another site's name for loopback.",
    "404": "There is no such model, or topic.",
    "409": "The call does not fit the present state.",
    "413": "The body is too large.",
    "415": "The body of a web page, or of an operator's call, is not application/json.",
    "429": "This client has too much under way.",
    "500": "The server failed on this request.",
    "503": "The server is overloaded, or a part of it is not available.",
    "504": "The answer took longer than the server gives a request.",
}
_REQUESTS = (
    CompletionRequest,
    ChatCompletionRequest,
    ResponsesRequest,
    TokenizeRequest,
    DetokenizeRequest,
    AddTopicRequest,
    RollbackRequest,
    PurgeRequest,
    DrainRequest,
)
_RESPONSES = (
    GenerationResponse,
    ResponseObject,
    TokenizeResponse,
    DetokenizeResponse,
    ErrorResponse,
    ModelCard,
    ModelList,
)
_GENERATION = ("400", "401", "404", "413", "415", "429", "500", "503", "504")
_RETRYABLE = ("429", "503", "504")
_SELECTION = ("topic", "request_id", "all")  # of a purge: one of them
_KEYS: Schema = {
    "bearer": {
        "type": "http",
        "scheme": "bearer",
        "description": "An API key, where the server has any.",
    }
}


@functools.cache
def openapi_document(model_name: str) -> Schema:
    """The OpenAPI 3.1 document; ``model_name`` is the served model's."""
    kinds: list[tuple[type[BaseModel], Any]] = [
        *((kind, "validation") for kind in _REQUESTS),
        *((kind, "serialization") for kind in _RESPONSES),
    ]
    _, definitions = models_json_schema(kinds, ref_template=_REF)
    schemas: dict[str, Schema] = definitions["$defs"]
    requests = [kind.__name__ for kind in _REQUESTS]
    for name in (*requests, "StreamOptions", "Speculative"):
        _describe_validators(schemas[name])
    for name in requests:
        if "model" in schemas[name]["properties"]:
            required = "model" in schemas[name].get("required", ())
            names = [model_name] if required else [model_name, None]
            schemas[name]["properties"]["model"] = {"enum": names}
    schemas["CompletionRequest"]["properties"] |= _OF_COMPLETIONS
    schemas["AddTopicRequest"]["properties"] |= _OF_TOPICS
    text = schemas["ResponsesRequest"]["properties"]
    text["input"] = {"anyOf": [_STRING, text["input"]]}
    schemas["TokenizeRequest"]["oneOf"] = [
        {"required": [one], "properties": {one: {"not": _NULL}, other: _NULL}}
        for one, other in (("prompt", "messages"), ("messages", "prompt"))
    ]
    unset: Schema = {"enum": [None, False]}
    schemas["PurgeRequest"]["oneOf"] = [
        {"required": [one], "properties": dict.fromkeys(_SELECTION, unset) | {one: {"not": unset}}}
        for one in _SELECTION
    ]
    return {
        "openapi": "3.1.0",
        "info": {"title": "Paceline", "version": _version()},
        "paths": _paths(model_name),
        "components": {"schemas": schemas, "securitySchemes": _KEYS},
        "security": [{}, {"bearer": []}],
    }


def _version() -> str:
    try:
        return version("paceline")
    except PackageNotFoundError:  # run from a source tree
        return "0"


def _describe_validators(schema: Schema) -> None:
    for field in schema.get("properties", {}):
        if field in NO_OP_VALUES:
            schema["properties"][field] = {
                "enum": list(NO_OP_VALUES[field]),
                "description": _NO_OP,
            }
        elif field in _FIELDS:
            schema["properties"][field] = _FIELDS[field]


def _json(model: str) -> Schema:
    return {"application/json": {"schema": {"$ref": _REF.format(model=model)}}}


def _failures(*codes: str) -> Schema:
    answers: Schema = {}
    for code in sorted({*codes, "403"}):
        answers[code] = {"description": _ERRORS[code], "content": _json("ErrorResponse")}
        if code in _RETRYABLE:
            answers[code]["headers"] = {
                "Retry-After": {"description": "seconds", "schema": {"type": "integer"}}
            }
    return answers


def _get(summary: str, content: Schema, *codes: str, **more: Any) -> Schema:
    responses = {"200": {"description": summary, "content": content}} | _failures(*codes)
    return {"get": {"summary": summary, "responses": responses} | more}


def _post(summary: str, model: str, content: Schema, *codes: str, **more: Any) -> Schema:
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": _json(model)},
            "responses": {"200": {"description": summary, "content": content}} | _failures(*codes),
        }
        | more
    }


def _operation(summary: str, model: str, *codes: str) -> Schema:
    """An operator's call."""
    codes = "400", "401", *codes, "413", "415", "503"
    return _post(summary, model, _ANYTHING, *codes, tags=["operators"])


def _paths(model_name: str) -> Schema:
    model = {
        "name": "model",
        "in": "path",
        "required": True,
        "schema": _STRING,
        "example": model_name,
    }
    answer = _json("GenerationResponse") | {"text/event-stream": {"schema": _EVENT}}
    refused = "400", "401", "404", "413", "415", "429", "503"
    return {
        "/v1/completions": _post("Complete prompts.", "CompletionRequest", answer, *_GENERATION),
        "/v1/chat/completions": _post(
            "Answer a conversation.", "ChatCompletionRequest", answer, *_GENERATION
        ),
        "/v1/responses": _post(
            "Answer a conversation, in the form of the Responses API.",
            "ResponsesRequest",
            _json("ResponseObject") | {"text/event-stream": {"schema": _EVENT}},
            *_GENERATION,
        ),
        "/tokenize": _post(
            "Token ids of a text or a conversation.",
            "TokenizeRequest",
            _json("TokenizeResponse"),
            *refused,
        ),
        "/detokenize": _post(
            "The text of token ids.", "DetokenizeRequest", _json("DetokenizeResponse"), *refused
        ),
        "/tokenizer_info": _get("Special tokens and chat template.", _ANYTHING, "401"),
        "/metrics": _get(
            "Metrics with vLLM's names.", {"text/plain": {"schema": _STRING}}, "401", "503"
        ),
        "/v1/models": _get("The models that are served.", _json("ModelList"), "401"),
        "/v1/models/{model}": _get(
            "A model.", _json("ModelCard"), "401", "404", parameters=[model]
        ),
        "/health": _get("Whether the target answers.", _ANYTHING, "503"),
        "/v1/paceline/status": _get("What every part is doing.", _ANYTHING, "401"),
        "/v1/paceline/topics": _get("The topics, and which parts know them.", _ANYTHING, "401")
        | _operation("Add a topic.", "AddTopicRequest", "409", "500"),
        "/v1/paceline/rollback": _operation(
            "Withdraw a draft's candidate, or restore earlier weights.",
            "RollbackRequest",
            "404",
            "409",
        ),
        "/v1/paceline/replay/purge": _operation(
            "Delete records: of a topic, of an answer, or all.", "PurgeRequest", "404"
        ),
        "/v1/paceline/drain": _operation(
            "Admit no new requests, or admit them again.", "DrainRequest"
        ),
        "/v1/paceline/live": _get(
            "What went through this replica of the ingress in the last minutes.",
            _ANYTHING,
            "400",
            "401",
            parameters=[{"name": "since", "in": "query", "schema": {"type": "number"}}],
        ),
    }
