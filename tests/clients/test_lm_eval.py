"""lm-eval over HTTP: the same scores with speculation and without, to the last digit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from real_clients import SCRIPTS, Clients, Serve, Server

pytestmark = [pytest.mark.cluster, pytest.mark.full]

FOUR = {"speculative": {"num_speculative_tokens": 4}}  # not as many as pay: the same on any machine


class Evaluation(NamedTuple):
    """What a run wrote.

    Attributes:
        scores: by task and metric, standard errors included.
        answers: by task, of each row: log-likelihoods or texts.
        counted: what the server counted meanwhile.
    """

    scores: dict[str, dict[str, Any]]
    answers: dict[str, list[Any]]
    counted: dict[str, float]


def evaluate(
    clients: Clients, server: Server, folder: Path, chat: bool, body: dict[str, Any]
) -> Evaluation:
    """Run the tasks; with ``chat`` only those that chat completions can answer."""
    before = server.counters()
    name, path = ("local-chat-completions", "chat/completions") if chat else (
        "local-completions", "completions"
    )  # fmt: skip
    clients.run(
        "lm-eval", "run", "--model", name,
        "--model_args", f"model=paceline,base_url={server.base_url}/{path},num_concurrent=4",
        "--tasks", "facts_explain", *(["--apply_chat_template"] if chat else ["facts_choice"]),
        "--include_path", ".", "--gen_kwargs", json.dumps(body),
        "--output_path", str(folder), "--log_samples",
        cwd=SCRIPTS / "lm_eval_tasks",
    )  # fmt: skip
    (results,) = folder.rglob("results_*.json")
    answers = {}
    for file in folder.rglob("samples_*.jsonl"):
        rows = sorted(map(json.loads, file.read_text().splitlines()), key=lambda row: row["doc_id"])
        answers[file.name.split("_2")[0]] = [row["resps"] for row in rows]
    scores = json.loads(results.read_text())["results"]
    return Evaluation(scores, answers, server.counted_since(before))


@pytest.fixture(scope="module")
def plain_server(serve: Serve) -> Any:
    """The same target, and no drafts."""
    with serve(drafts={"general": "none"}) as running:
        yield running


@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
def test_scores_are_the_same_with_speculation_and_without(
    clients: Clients, server: Server, plain_server: Server, tmp_path: Path, chat: bool
) -> None:
    on = evaluate(clients, server, tmp_path / "on", chat, FOUR)
    off = evaluate(clients, plain_server, tmp_path / "off", chat, {})
    assert on.counted["spec_decode_num_accepted_tokens_total"] > 0
    assert off.counted["spec_decode_num_draft_tokens_total"] == 0
    assert on.scores == off.scores
    assert on.answers == off.answers
    tokens = "generation_tokens_total"
    assert on.counted[tokens] == off.counted[tokens] > 20 * 10
    explain = on.scores["facts_explain"]
    assert explain["sample_len"] == len(on.answers["samples_facts_explain"]) == 20
    assert explain["chrf,none"] > 10
    if not chat:
        choice = on.scores["facts_choice"]
        assert choice["sample_len"] == len(on.answers["samples_facts_choice"]) == 40
        assert choice["acc,none"] > 0.4  # chance: 0.25
        assert 0 < choice["brier_score,none"] < 1
