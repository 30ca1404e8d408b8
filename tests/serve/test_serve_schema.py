"""schemathesis against the server's own OpenAPI document: no 5xx, and answers as described."""

from collections import Counter
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from openai.types import Completion
from openai.types.chat import ChatCompletion
from openai.types.responses import Response
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from paceline.deploy.api.openapi import openapi_document

pytestmark = pytest.mark.cluster

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
_MOST_TOKENS = 8
_MODEL = "paceline"

OPERATORS = "operators"  # whose legal calls would drain or change the server
described = schemathesis.openapi.from_dict(openapi_document(_MODEL))
OPERATIONS = [result.ok() for result in described.get_all_operations()]
QUIET = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)


CASES = [
    pytest.param(operation, mode, id=f"{operation.label} {mode.value}")
    for operation in OPERATIONS
    for mode in GenerationMode
    if (OPERATORS not in (operation.tags or ()) and mode is GenerationMode.POSITIVE)
    or (operation.method == "post" and mode is GenerationMode.NEGATIVE)
]


@pytest.mark.parametrize("examples", [60, pytest.param(300, marks=pytest.mark.full)])
@pytest.mark.parametrize(("operation", "mode"), CASES)
def test_whatever_is_sent_no_5xx_comes_back(
    base_url: str, operation: Any, mode: GenerationMode, examples: int
) -> None:
    codes: Counter[int] = Counter()

    @settings(QUIET, max_examples=examples)
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: schemathesis.Case) -> None:
        _keep_short(case)
        if mode is GenerationMode.POSITIVE:
            _fill_in(case)
        answer = case.call_and_validate(base_url=base_url, checks=CHECKS, timeout=60)
        codes[answer.status_code] += 1

    send()
    # Some of what is legal is answered (not token ids that no vocabulary has), nothing else is.
    least = min(1, codes.total())
    assert codes[200] >= least if mode is GenerationMode.POSITIVE else codes[200] == 0, codes


_LIMITS = {
    "/v1/completions": ("max_tokens",),
    "/v1/chat/completions": ("max_tokens", "max_completion_tokens"),
    "/v1/responses": ("max_output_tokens",),
}


def _keep_short(case: schemathesis.Case) -> None:
    """A legal request may ask for thousands of tokens, or name some that no vocabulary has.

    Short answers and known tokens meet the same code. What is too large stays so: that it is
    refused is the point.
    """
    body = case.body
    if not isinstance(body, dict):
        return
    for field in _LIMITS.get(case.path, ()):
        asked = body.get(field)
        if asked is None or (type(asked) is int and _MOST_TOKENS < asked < 2**63):
            body[field] = _MOST_TOKENS
    tokens = body.get("tokens")
    if isinstance(tokens, list) and all(type(t) is int and 0 <= t < 2**31 for t in tokens):
        body["tokens"] = [token % 256 for token in tokens]


def _fill_in(case: schemathesis.Case) -> None:
    """Give messages the content that the document lets them leave out: an assistant's may be null.

    Else nearly all legal requests end at that.
    """
    messages = case.body.get("messages") if isinstance(case.body, dict) else None
    for message in messages or ():
        if message.get("role") != "assistant" and message.get("content") is None:
            message["content"] = "x"


def test_the_document_describes_what_the_openai_client_sends(http: httpx.Client) -> None:
    served = http.get("/openapi.json").json()
    assert served == openapi_document(_MODEL)
    posts = {path for path, methods in served["paths"].items() if "post" in methods}
    operators = {f"/v1/paceline/{name}" for name in ("topics", "rollback", "replay/purge", "drain")}
    assert posts == {*_LIMITS, "/tokenize", "/detokenize"} | operators
    for name in ("CompletionRequest", "ChatCompletionRequest"):
        fields = served["components"]["schemas"][name]["properties"]
        assert {"n", "logprobs", "logit_bias", "stop_token_ids", "speculative"} <= set(fields)
    body = {"model": "paceline", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    ChatCompletion.model_validate(http.post("/v1/chat/completions", json=body).json())
    body = {"model": "paceline", "input": "hi", "max_output_tokens": 2}
    Response.model_validate(http.post("/v1/responses", json=body).json())
    body = {"model": "paceline", "prompt": "hi", "max_tokens": 2}
    Completion.model_validate(http.post("/v1/completions", json=body).json())
