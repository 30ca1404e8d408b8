"""LiteLLM: prints what it reports, as one JSON object.

Runs in the clients' environment: ``python with_litellm.py BASE_URL``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm

ASK = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
litellm.suppress_debug_info = True  # what it prints when it prices a model is no report
PRICES = {"input_cost_per_token": 0.001, "output_cost_per_token": 0.01}


def report(base_url: str) -> dict[str, Any]:
    """Complete, whole and streamed, with OpenAI's provider and vLLM's."""
    options: dict[str, Any] = {
        "api_base": base_url, "api_key": "none", "num_retries": 0, "timeout": 120,
        "temperature": 0, "max_tokens": 24,
    }  # fmt: skip
    found: dict[str, Any] = {}
    for provider in ("openai", "hosted_vllm"):
        model = f"{provider}/paceline"
        litellm.register_model({model: PRICES | {"litellm_provider": provider, "mode": "chat"}})
        whole = litellm.completion(model=model, messages=ASK, **options)
        found[provider] = whole.model_dump() | {"cost": whole._hidden_params["response_cost"]}
        chunks = list(
            litellm.completion(
                model=model,
                messages=ASK,
                stream=True,
                stream_options={"include_usage": True},
                **options,
            )
        )
        rebuilt = litellm.stream_chunk_builder(chunks, messages=ASK)
        found[f"{provider}_stream"] = rebuilt.model_dump() | {"chunks": len(chunks)}
    text = litellm.text_completion(
        model="text-completion-openai/paceline", prompt="The capital of France is", **options
    )
    found["text"] = text.model_dump()
    response = litellm.responses(
        model="openai/paceline",
        input=ASK[0]["content"],
        api_base=base_url,
        api_key="none",
        max_output_tokens=24,
        temperature=0,
    )
    found["responses"] = response.model_dump()
    return found


if __name__ == "__main__":
    json.dump(report(sys.argv[1]), sys.stdout)
