"""What the dashboard shows of serving: replay, requests, routing. Pure data."""

from __future__ import annotations

from paceline.deploy.monitoring.promql import TOPIC, Panel, Query, gauge, quantiles, rate

REPLAY = (
    Panel(
        "Shards in use",
        "Share of a shard's capacity that is taken.",
        (
            Query(
                f"{gauge('replay_bytes', 'topic, split', TOPIC)} / "
                f"{gauge('replay_capacity_bytes', 'topic, split', TOPIC)}",
                "{{topic}} {{split}}",
            ),
        ),
        "percentunit",
    ),
    Panel(
        "Records",
        "Kept, to learn from and to judge by.",
        (Query(gauge("replay_records", "topic, split", TOPIC), "{{topic}} {{split}}"),),
    ),
    Panel(
        "Records in and out",
        "Per second.",
        tuple(
            Query(rate(f"replay_{name}", "", TOPIC), name)
            for name in ("inserted", "evicted", "expired", "refused", "left_out")
        ),
    ),
)

REQUESTS = (
    Panel(
        "Time to first token",
        "From a request's arrival at the engine.",
        quantiles("time_to_first_token_seconds"),
        "s",
    ),
    Panel(
        "Time per output token",
        "Of a request, after its first token.",
        quantiles("time_per_output_token_seconds"),
        "s",
    ),
    Panel("Queue", "Wait for a row and memory.", quantiles("request_queue_time_seconds"), "s"),
    Panel(
        "Whole answers",
        "From a request's arrival at the front door to the end of its answer.",
        quantiles("e2e_request_latency_seconds"),
        "s",
    ),
    Panel(
        "Requests",
        "Per second, by what became of them.",
        (Query(rate("requests", "outcome"), "{{outcome}}"),),
        "reqps",
        stacked=True,
    ),
    Panel(
        "Load",
        "Requests in the engines, and sequences that the front door has let in.",
        (
            Query(gauge("num_requests_running", how="sum"), "running"),
            Query(gauge("num_requests_waiting", how="sum"), "waiting"),
            Query(gauge("requests_in_flight", how="sum"), "let in"),
            Query(gauge("serving_replicas"), "replicas"),
        ),
    ),
    Panel(
        "Tokens",
        "Per second, of answers and of prompts.",
        (
            Query(rate("generation_tokens", "topic", TOPIC), "{{topic}}"),
            Query(rate("prompt_tokens", "", TOPIC), "prompts"),
        ),
    ),
    Panel(
        "Blocks of keys and values",
        "Of all target replicas.",
        (Query(gauge("kv_blocks", "state", how="sum"), "{{state}}"),),
        stacked=True,
    ),
    Panel(
        "Failover",
        "Attempts that failed, requests resumed and given up, per second.",
        (Query(rate("failovers", "kind"), "{{kind}}"),),
    ),
)

ROUTING = (
    Panel(
        "Routed requests",
        "By topic, and by the expert that drafts, per second.",
        (Query(rate("routed_requests", "topic, draft", TOPIC), "{{topic}} by {{draft}}"),),
        "reqps",
        stacked=True,
    ),
    Panel(
        "Measured weights",
        "Of an expert for a topic, by measured acceptance.",
        (Query(gauge("routing_weight", "topic, draft", TOPIC), "{{topic}} by {{draft}}"),),
        "percentunit",
    ),
    Panel("Router's time", "Of its answers.", quantiles("router_latency_seconds"), "s"),
    Panel(
        "Router's answers",
        "Questions by what came of them, per second; late and failed ones mean general.",
        (Query(rate("router_requests", "outcome"), "{{outcome}}"),),
        "reqps",
        stacked=True,
    ),
)
