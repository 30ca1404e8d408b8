"""The OpenAPI document describes the values that requests accept, and no others."""

from __future__ import annotations

from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel, ValidationError

from paceline.deploy.api.openapi import openapi_document
from paceline.deploy.api.operations import DrainRequest, PurgeRequest, RollbackRequest
from paceline.deploy.api.request_schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    TokenizeRequest,
)
from paceline.deploy.api.responses_request import ResponsesRequest

MESSAGES = [{"role": "user", "content": "hello"}]
COMPLETION = {"model": "paceline", "prompt": "hello"}
CHAT = {"model": "paceline", "messages": MESSAGES}


def is_described(model: type[BaseModel], body: dict[str, Any]) -> bool:
    document = openapi_document("paceline")
    schema = {"$ref": f"#/components/schemas/{model.__name__}"} | document
    return bool(Draft202012Validator(schema).is_valid(body))


def is_accepted(model: type[BaseModel], body: dict[str, Any]) -> bool:
    try:
        model.model_validate(body)
    except ValidationError:
        return False
    return True


@pytest.mark.parametrize(
    ("model", "body", "accepted"),
    [
        (TokenizeRequest, {"prompt": "hello"}, True),
        (TokenizeRequest, {"prompt": ["hello"]}, False),
        (TokenizeRequest, {"prompt": [1, 2]}, False),
        (TokenizeRequest, {"prompt": None, "messages": MESSAGES}, True),
        (TokenizeRequest, {"prompt": "hello", "messages": MESSAGES}, False),
        (TokenizeRequest, {}, False),
        (CompletionRequest, COMPLETION | {"prompt": ["hello"], "echo": True}, True),
        (CompletionRequest, COMPLETION | {"prompt": [1, 2], "echo": None}, True),
        (CompletionRequest, COMPLETION | {"prompt": None}, False),
        (ChatCompletionRequest, CHAT | {"echo": True}, False),
        (ChatCompletionRequest, CHAT | {"echo": False}, True),
        (ChatCompletionRequest, CHAT | {"echo": None}, True),
        (ResponsesRequest, {"model": "paceline", "input": "hello", "prompt": None}, True),
        (ResponsesRequest, {"model": "paceline", "input": "hello", "prompt": "hello"}, False),
        (DrainRequest, {}, True),
        (DrainRequest, {"on": None}, False),
        (RollbackRequest, {"topic": "sql", "version": None}, True),
        (RollbackRequest, {"version": 1}, False),
    ],
)
def test_bodies_are_described_as_they_are_served(
    model: type[BaseModel], body: dict[str, Any], accepted: bool
) -> None:
    assert is_accepted(model, body) == is_described(model, body) == accepted


@pytest.mark.parametrize(
    ("body", "described"),
    [
        ({"topic": "sql"}, True),
        ({"request_id": "cmpl-a", "topic": None, "all": False}, True),
        ({"all": True}, True),
        ({}, False),
        ({"all": False}, False),
        ({"topic": None}, False),
        ({"topic": "sql", "request_id": "cmpl-a"}, False),
        ({"topic": "sql", "all": True}, False),
    ],
)
def test_a_purge_is_described_with_one_selection(body: dict[str, Any], described: bool) -> None:
    assert is_described(PurgeRequest, body) == described
