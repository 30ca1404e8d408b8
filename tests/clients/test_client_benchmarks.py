"""Benchmark tools: what they count is what the server has counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from real_clients import Clients, Server

pytestmark = [pytest.mark.cluster, pytest.mark.full]


@pytest.mark.parametrize(
    ("path", "is_chat"),
    [("/v1/chat/completions", True), ("/v1/completions", False), ("/v1/responses", True)],
)
def test_guidellm(
    clients: Clients, server: Server, tmp_path: Path, path: str, is_chat: bool
) -> None:
    before = server.counters()
    clients.run(
        "guidellm", "run", "--disable-progress",
        "--backend", f"kind=openai_http,target={server.root},model=paceline,request_format={path}",
        "--profile", "kind=concurrent,streams=2",
        "--constraint", "kind=max_requests,count=8",
        "--tokenizer", f"kind=huggingface_auto,model={server.model}",
        "--data", "kind=synthetic_text,prompt_tokens=40,output_tokens=16",
        "--output", f"kind=json,path={tmp_path / 'report.json'}",
    )  # fmt: skip
    counted = server.counted_since(before)
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (8, 0, 0)
    done = benchmark["requests"]["successful"]
    output = [request["output_metrics"]["text_tokens"] for request in done]
    prompts = [request["input_metrics"]["text_tokens"] for request in done]
    assert output == [16] * 8
    assert counted["generation_tokens_total"] == sum(output)
    assert counted["prompt_tokens_total"] == sum(prompts)
    assert all(tokens > 40 if is_chat else tokens == 40 for tokens in prompts)
    assert counted["finished_length"] == 8
    assert counted["finished_abort"] == counted["finished_error"] == 0
    assert benchmark["metrics"]["time_to_first_token_ms"]["successful"]["mean"] > 0
    assert benchmark["metrics"]["inter_token_latency_ms"]["successful"]["mean"] > 0


def test_aiperf(clients: Clients, server: Server, tmp_path: Path) -> None:
    before = server.counters()
    # It counts the tokens of the text: those of an end of text that was passed over are not in it.
    body = {"temperature": 0, "min_tokens": 24, "speculative": {"num_speculative_tokens": 4}}
    clients.run(
        "aiperf", "profile", "--model", "paceline", "--url", server.root,
        "--endpoint-type", "chat", "--streaming", "--tokenizer", str(server.model),
        "--request-count", "10", "--concurrency", "2", "--random-seed", "1",
        "--prompt-input-tokens-mean", "40", "--prompt-output-tokens-mean", "24",
        "--extra-inputs", json.dumps(body), "--ui-type", "none", "--no-gpu-telemetry",
        "--workers-max", "1", "--record-processor-service-count", "1",
        "--output-artifact-dir", str(tmp_path),
        offline=False,
    )  # fmt: skip
    counted = server.counted_since(before)
    report = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert report["is_complete"]
    assert report["error_summary"] == []
    assert report["request_count"]["avg"] == counted["finished_length"] == 10
    assert counted["finished_abort"] == counted["finished_error"] == 0
    assert report["total_output_tokens"]["avg"] == counted["generation_tokens_total"] == 240
    assert report["total_usage_completion_tokens"]["avg"] == 240
    assert report["total_usage_prompt_tokens"]["avg"] == counted["prompt_tokens_total"]
    records = [
        json.loads(line) for line in (tmp_path / "profile_export.jsonl").read_text().splitlines()
    ]
    assert len(records) == 10
    assert not any(record.get("error") for record in records)
    # Speculation: of each answer's ``metrics``, and of /metrics as the tool has scraped it.
    scraped = json.loads((tmp_path / "server_metrics_export.json").read_text())["metrics"]
    for field, name in [
        ("total_accepted_draft_tokens", "spec_decode_num_accepted_tokens"),
        ("total_draft_tokens", "spec_decode_num_draft_tokens"),
        ("total_spec_decode_steps", "spec_decode_num_drafts"),
    ]:
        (series,) = scraped[f"vllm:{name}"]["series"]
        assert report[field]["avg"] == series["stats"]["total"] == counted[f"{name}_total"] > 0
    drafted = counted["spec_decode_num_draft_tokens_total"]
    share = counted["spec_decode_num_accepted_tokens_total"] / drafted
    rate = report["spec_decode_overall_draft_acceptance_rate"]["avg"]
    assert rate == pytest.approx(100 * share)
