"""What the dashboard shows of drafts: how well they do, and how they learn. Pure data."""

from __future__ import annotations

from paceline.deploy.monitoring.promql import (
    TOPIC,
    Panel,
    Query,
    gauge,
    quantiles,
    rate,
    ratio,
)

_LEARNT = f'{TOPIC},slot!="initial"'
_FIRST = f'{TOPIC},position="0"'
_DRAFTS = "spec_decode_num_drafts"
_DRAFTED = "spec_decode_num_draft_tokens"
_ACCEPTED = "spec_decode_num_accepted_tokens"
_PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"

SPECULATION = (
    Panel(
        "Acceptance by topic",
        "Accepted over drafted tokens of the drafts that learn. Lines across: a weight_version "
        "begins to draft.",
        (
            Query(
                ratio(rate(_ACCEPTED, "topic", _LEARNT), rate(_DRAFTED, "topic", _LEARNT)),
                "{{topic}}",
            ),
        ),
        "percentunit",
    ),
    Panel(
        "First-position acceptance by slot",
        "Does not move with k: stable weights, candidates on trial and initial weights compare.",
        (
            Query(
                ratio(
                    rate(_PER_POSITION, "draft, slot", _FIRST), rate(_DRAFTS, "draft, slot", TOPIC)
                ),
                "{{draft}} {{slot}}",
            ),
        ),
        "percentunit",
    ),
    Panel(
        "Mean acceptance length",
        "Tokens of a round with drafts, the bonus or recovered token included.",
        (
            Query(
                "1 + " + ratio(rate(_ACCEPTED, "topic", _LEARNT), rate(_DRAFTS, "topic", _LEARNT)),
                "{{topic}}",
            ),
        ),
    ),
    Panel(
        "Acceptance by position",
        "Share of the rounds with drafts in which this position was accepted.",
        (
            Query(
                f"{rate(_PER_POSITION, 'position', TOPIC)} / on () group_left () "
                f"({rate(_DRAFTS, '', TOPIC)} > 0)",
                "{{position}}",
            ),
        ),
        "percentunit",
    ),
    Panel(
        "Speed-up against plain decoding",
        "Seconds that plain decoding would take for the same tokens, by the engine's step costs, "
        "over the seconds of the rounds. Only where num_speculative_tokens is auto.",
        (Query(ratio(rate("plain_decode_seconds"), rate("decode_seconds")), "speed-up"),),
    ),
    Panel(
        "Goodput",
        "Tokens per second of decoding, measured and as the controller expects them.",
        (
            Query(ratio(rate("decode_tokens"), rate("decode_seconds")), "measured"),
            Query(gauge("predicted_goodput", how="avg"), "predicted"),
        ),
    ),
    Panel(
        "Chosen k",
        "num_speculative_tokens of the controller's choice, and drafted tokens per round.",
        (
            Query(gauge("num_speculative_tokens", "draft, slot"), "{{draft}} {{slot}} chosen"),
            Query(
                ratio(rate(_DRAFTED, "draft"), rate("spec_decode_num_rounds", "draft")),
                "{{draft}} drafted",
            ),
        ),
    ),
    Panel(
        "Time spent drafting",
        "Share of the rounds' seconds.",
        (Query(ratio(rate("draft_seconds"), rate("decode_seconds")), "drafting"),),
        "percentunit",
    ),
    Panel(
        "Failures and preemptions",
        "Rounds that lost their drafts, requests that began anew, and requests that failed "
        "because their logits were not finite, per second.",
        (
            Query(rate("draft_failures"), "draft failures"),
            Query(rate("preemptions"), "preemptions"),
            Query(rate("not_finite_requests"), "not finite"),
        ),
    ),
)

LEARNING = (
    Panel(
        "Decisions on weights",
        "What gate, canary and operators decided, per minute.",
        (Query(f"60 * {rate('weight_updates', 'outcome')}", "{{outcome}}"),),
        stacked=True,
    ),
    Panel(
        "Expected acceptance at the gate",
        "Candidate and served draft on held-out records, at the topic's last gate.",
        (Query(gauge("expected_acceptance", "draft, of"), "{{draft}} {{of}}"),),
        "percentunit",
    ),
    Panel(
        "Acceptance by weight_version",
        "Accepted over drafted tokens of each version since it began to draft.",
        (
            Query(
                ratio(
                    gauge("version_num_accepted_tokens", "draft, weight_version", how="sum"),
                    gauge("version_num_draft_tokens", "draft, weight_version", how="sum"),
                ),
                "{{draft}} v{{weight_version}}",
            ),
        ),
        "percentunit",
    ),
    Panel(
        "Weight versions",
        "Announced by the registry, and the oldest that a replica still drafts with.",
        (
            Query(gauge("weight_version", "draft, slot"), "{{draft}} {{slot}}"),
            Query(
                gauge("draft_weight_version", "draft, slot", 'slot="stable"', "min"),
                "{{draft}} oldest in use",
            ),
        ),
    ),
    Panel(
        "Candidates on trial",
        "Requests that a candidate is judged by so far.",
        (Query(gauge("canary_requests", "draft"), "{{draft}}"),),
    ),
    Panel(
        "Live acceptance and drift",
        "Fast and slow mean of first-position acceptance; the fast one below: drift.",
        (
            Query(gauge("live_acceptance", "draft, mean"), "{{draft}} {{mean}}"),
            Query(gauge("drifting", "draft"), "{{draft}} drifts"),
        ),
        "percentunit",
    ),
    Panel(
        "Trainer",
        "What the trainer is at.",
        (Query(gauge("trainer_state", "state"), "{{state}}"),),
        states=True,
    ),
    Panel(
        "Leave to train",
        "Whether the board would give leave, share of the questions that got it, and why not.",
        (
            Query(gauge("training_leave"), "leave"),
            Query(ratio(rate("training_leave_granted"), rate("training_leave_asked")), "granted"),
            Query(gauge("training_paused"), "paused"),
            Query(gauge("draining"), "draining"),
        ),
        "percentunit",
    ),
    Panel(
        "Idle time",
        "Seconds per second in which serving was idle, by the use that trainers made of them.",
        (Query(rate("idle_seconds", "use"), "{{use}}"),),
        "percentunit",
        stacked=True,
    ),
    Panel(
        "Leases",
        "Trainers by what they do, those that made room for replicas, and replicas that wait.",
        (
            Query(gauge("training_leases", "state", how="sum"), "{{state}}"),
            Query(gauge("trainers_freed"), "freed"),
            Query(gauge("serving_replicas_pending"), "replicas waiting"),
            Query(f"60 * {rate('training_leases_ended', 'how')}", "{{how}} per minute"),
        ),
    ),
    Panel(
        "Time to yield",
        "From a request that ends idleness to the trainer's stop.",
        quantiles("training_yield_seconds"),
        "s",
    ),
    Panel(
        "Training",
        "Micro-steps per second, and seconds of training per second.",
        (
            Query(rate("trainer_micro_steps"), "micro-steps"),
            Query(rate("trainer_seconds"), "seconds"),
        ),
    ),
    Panel(
        "Rounds of training",
        "Rounds that were decided, and that raised, per minute; the last loss in nats.",
        (
            Query(f"60 * {rate('trainer_rounds', 'outcome')}", "{{outcome}}"),
            Query(f"60 * {rate('trainer_failures')}", "raised"),
            Query(gauge("trainer_loss"), "loss"),
        ),
    ),
)
