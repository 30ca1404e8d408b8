"""Sampling parameters that a model's generation_config.json gives to requests without them."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from local_ingress import ingress_client

from paceline.actors.engine.request import SamplingParams
from paceline.actors.engine.target import TargetReplica
from paceline.actors.weights.checkpoint import ModelError
from paceline.deploy.api import request_parser
from paceline.deploy.api.sampling_defaults import default_sampling_params

CHAT = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}


def written(folder: Path, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(config))
    return folder


def test_the_fields_that_requests_have_are_read(tmp_path: Path) -> None:
    folder = written(
        tmp_path, temperature=1, top_p=0.8, top_k=20, min_p=None, repetition_penalty=1.05,
        do_sample=True, eos_token_id=[2], max_new_tokens=7,
    )  # fmt: skip
    assert default_sampling_params(folder) == {
        "temperature": 1, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05,
    }  # fmt: skip
    (folder / "generation_config.json").unlink()
    assert default_sampling_params(folder) == {}


@pytest.mark.parametrize(
    "config", [{"temperature": -0.1}, {"top_p": "high"}, {"top_k": 2.5}, {"temperature": [1.0]}]
)
def test_a_value_that_no_request_may_have_is_named(tmp_path: Path, config: dict[str, Any]) -> None:
    (name,) = config
    with pytest.raises(ModelError, match=rf"generation_config\.json: {name}: "):
        default_sampling_params(written(tmp_path, **config))


@pytest.mark.parametrize(
    ("fields", "auto", "temperature", "top_p"),
    [
        ({}, True, 0.2, 0.9),
        ({"temperature": None}, True, 0.2, 0.9),
        ({"temperature": 1}, True, 1.0, 0.9),
        ({"temperature": 0, "top_p": 1}, True, 0.0, 1.0),
        ({}, False, 1.0, 1.0),
    ],
)
def test_requests_take_what_they_do_not_name_from_the_model(
    target: TargetReplica,
    target_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, Any],
    auto: bool,
    temperature: float,
    top_p: float,
) -> None:
    folder = tmp_path / "target"
    shutil.copytree(target_folder, folder)
    written(folder, temperature=0.2, top_p=0.9, eos_token_id=2)
    engines: list[SamplingParams] = []
    parsed = request_parser.sampling_params

    def seen(*args: Any) -> SamplingParams:
        engines.append(parsed(*args))
        return engines[-1]

    monkeypatch.setattr(request_parser, "sampling_params", seen)

    async def ask() -> list[Any]:
        async with ingress_client(target, folder, generation_config=auto) as http:
            prompt = {"model": "m", "max_tokens": 1, "prompt": "a"}
            return [
                await http.post("/v1/chat/completions", json=CHAT | fields),
                await http.post("/v1/completions", json=prompt | fields),
                await http.get("/v1/models/m"),
            ]

    chat, completion, card = asyncio.run(ask())
    assert (chat.status_code, completion.status_code) == (200, 200)
    assert [(e.temperature, e.top_p) for e in engines] == [(temperature, top_p)] * 2
    defaults = {"temperature": 0.2, "top_p": 0.9} if auto else {}
    assert card.json()["default_sampling_params"] == defaults
