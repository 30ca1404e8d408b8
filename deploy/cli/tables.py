"""Text of the command line: decisions on weights, topics, a server's status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from paceline.actors.weights.history import decision_time
from paceline.deploy.model_store import CachedModel, Package

_DECISIONS = 6


def models_table(cached: Sequence[CachedModel], packaged: Mapping[str, Package]) -> str:
    """A line per cached model, then those that can be fetched."""
    rows = [
        f"{model.name:16}  {model.nbytes / 1e6:6.0f} MB  {model.licence:12}  {model.source}  "
        f"{model.folder}"
        for model in cached
    ]
    here = {model.name for model in cached}
    rows += [
        f"{name:16}  not here    {package.licence:12}  {package.model}, {package.size_mb} MB"
        for name, package in packaged.items()
        if name not in here
    ]
    return "\n".join(rows)


def decision_table(decisions: Sequence[Mapping[str, Any]]) -> str:
    """A line per decision under a heading.

    ``before`` and ``after`` are acceptances of the served draft and the candidate: on held-out
    records for the gate, on live requests for the canary; for drift the slow and the fast average.
    """
    heading = (
        f"{'time':19}  {'topic':10}  {'outcome':11}  {'version':>7}  {'before':>7}  {'after':>7}"
    )
    return "\n".join([heading, *(_decision_row(decision).rstrip() for decision in decisions)])


def outcome_label(decision: Mapping[str, Any]) -> str:
    """The outcome; ``canary`` for a version that is published for a part of the requests."""
    outcome = str(decision.get("outcome", "?"))
    return "canary" if outcome == "published" and decision.get("canary") else outcome


def acceptances(decision: Mapping[str, Any]) -> tuple[Any, Any]:
    """Acceptance before and after, from what the decision rests on; None if it has none."""
    for before, after in (
        ("stable_acceptance", "canary_acceptance"),
        ("acceptance_before", "acceptance"),
        ("acceptance_slow", "acceptance_fast"),
    ):
        if before in decision or after in decision:
            return decision.get(before), decision.get(after)
    return (
        decision.get("served_expected_acceptance"),
        decision.get("candidate_expected_acceptance"),
    )


def _decision_row(decision: Mapping[str, Any]) -> str:
    when = datetime.fromtimestamp(decision_time(decision)).astimezone()
    before, after = (
        f"{value:.3f}" if isinstance(value, int | float) else "-" for value in acceptances(decision)
    )
    return (
        f"{when:%Y-%m-%d %H:%M:%S}  {decision.get('topic', '?')!s:10}  "
        f"{outcome_label(decision):11}  {decision.get('version', '-')!s:>7}  "
        f"{before:>7}  {after:>7}  {_evidence(decision)}"
    )


def _evidence(decision: Mapping[str, Any]) -> str:
    """Confidence interval, sample sizes and reason."""
    parts = []
    for name in ("gain", "difference"):
        bounds = [decision.get(f"{name}_{side}_bound") for side in ("lower", "upper")]
        if any(isinstance(bound, int | float) for bound in bounds):
            low, high = (f"{b:+.3f}" if isinstance(b, int | float) else "?" for b in bounds)
            parts.append(f"{name} {low} to {high}")
    counts = ("records", "canary_requests", "stable_requests", "requests")
    parts += [
        f"{decision[name]} {name.replace('_', ' ')}"
        for name in counts
        if isinstance(decision.get(name), int)
    ]
    if decision.get("restored_from") is not None:
        parts.append(f"weights of version {decision['restored_from']}")
    if decision.get("reason") not in (None, "better"):
        parts.append(str(decision["reason"]))
    return ", ".join(parts)


def topic_table(topics: Sequence[Mapping[str, Any]]) -> str:
    """A line per topic under a heading; ``?`` for a part that did not answer."""
    rows = [f"{'topic':14}  {'from':6}  {'version':>7}  {'routed':6}  {'drafts':6}  {'records':>7}"]
    for topic in topics:
        source = "added" if topic["added"] else "config"
        facts = (topic[key] for key in ("routed", "drafting"))
        routed, drafting = ({True: "yes", False: "no"}.get(fact, "?") for fact in facts)
        version, records = (
            "?" if topic[key] is None else topic[key] for key in ("weight_version", "records")
        )
        rows.append(
            f"{topic['name']:14}  {source:6}  {version:>7}  {routed:6}  {drafting:6}  {records:>7}"
        )
    return "\n".join(rows)


def added_topic_lines(answer: Mapping[str, Any]) -> list[str]:
    """The server's answer to an added topic: its version, and the router's recall."""
    name, figures = answer["name"], answer.get("router")
    lines = [f"{name} added: its expert is a copy of general's, version {answer['weight_version']}"]
    if figures is None:
        return [*lines, "the router is off: requests name the expert themselves"]
    before = ", ".join(f"{count} {topic}" for topic, count in figures["examples_before"].items())
    prompts = figures["prompts_by_topic"]
    lines.append(
        f"router, on held-out prompts: {figures['recall']:.1%} of "
        f"{answer['examples']} examples go to {name} (before: {before})"
    )
    lines.append(f"  {figures['moved']:.1%} of {sum(prompts.values())} other prompts moved:")
    lines += [
        f"    {topic:12} {share:6.1%} of {prompts[topic]}"
        for topic, share in figures["moved_by_topic"].items()
    ]
    return lines


def status_text(url: str, status: Mapping[str, Any]) -> str:
    """The status on one screen; a part that does not answer is named with its error."""
    load = part(status, "scheduler")
    trains = status.get("trainer") is not None
    lines = [*_target_lines(url, part(status, "target")), _load_line(load, trains=trains)]
    if warning := part(status, "supervisor").get("warning"):
        lines.append(f"warning   {warning}")
    lines += ["", *_draft_lines(status), "", *_trainer_lines(status), *_lease_lines(load)]
    decisions = status.get("decisions")
    if isinstance(decisions, list) and decisions:
        lines += ["", decision_table(decisions[-_DECISIONS:])]
    return "\n".join(lines)


def part(status: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A part of the status, or an object with its ``error``."""
    found = status.get(name)
    return found if isinstance(found, Mapping) else {"error": "not here"}


def _target_lines(url: str, target: Mapping[str, Any]) -> list[str]:
    if "error" in target:
        return [f"{url}  the target does not answer ({target['error']})"]
    used = target["kv_blocks_total"] - target["kv_blocks_available"]
    return [
        f"{url}  {target.get('model_type')} in {target.get('dtype')} on {target.get('device')}, "
        f"{target.get('numerics')}",
        f"target    {target['running']} running, {target['waiting']} waiting, "
        f"{used} of {target['kv_blocks_total']} KV blocks, "
        f"{target['draft_failures']} draft failures",
    ]


def _load_line(load: Mapping[str, Any], *, trains: bool) -> str:
    if "error" in load:
        return f"load      the trainer scheduler does not answer ({load['error']})"
    if load.get("draining"):
        training = "draining"
    elif not trains:
        training = "training off"
    elif load["may_train"]:
        training = "training may run"
    else:
        training = "training waits" + (" (paused)" if load["paused"] else "")
    return f"load      {load['running']} running, {training}"


def _draft_lines(status: Mapping[str, Any]) -> list[str]:
    versions, live = part(status, "weight_versions"), part(status, "live_drafts")
    shards = part(status, "shards")
    lines = [
        f"{'draft':12}  {'version':>7}  {'candidate':>9}  {'accepted':>8}  {'requests':>8}  "
        f"{'records':>7}"
    ]
    for name in versions if "error" not in versions else [n for n in shards if n != "error"]:
        own, shard = part(live, name), part(shards, name)
        rounds = own.get("rounds", 0)
        share = f"{own['accepted'] / rounds:.2f}" if rounds else "-"
        records = (
            sum(split["records"] for split in shard["splits"].values())
            if "splits" in shard
            else shard.get("error", "-")
        )
        candidate = "-" if own.get("candidate") is None else own["candidate"]
        lines.append(
            f"{name:12}  {versions.get(name, '?')!s:>7}  {candidate!s:>9}  {share:>8}  "
            f"{own.get('requests', '-')!s:>8}  {records!s:>7}"
        )
    off = [] if status.get("records", True) else ["records   off: no request is recorded"]
    legend = (
        "accepted: share of the draft's first tokens; requests: that it, not suffixes, drafted for"
    )
    return [*lines, legend, *off]


def _trainer_lines(status: Mapping[str, Any]) -> list[str]:
    if status.get("trainer") is None:
        return ["trainer   off"]
    trainers = [part(status, "trainer"), *part(status, "further_trainers").values()]
    return [line for each in trainers if isinstance(each, Mapping) for line in _one_trainer(each)]


def _one_trainer(trainer: Mapping[str, Any]) -> list[str]:
    if trainer.get("error") == "TimeoutError":
        return ["trainer   is loading, or busy: no answer yet"]
    if "error" in trainer:
        return [f"trainer   does not answer ({trainer['error']})"]
    topic = f" {trainer['topic']}" if trainer.get("topic") else ""
    lines = [
        f"trainer   {trainer.get('state')}{topic}; {trainer.get('rounds', 0)} rounds, "
        f"{trainer.get('published', 0)} published, {trainer.get('rejected', 0)} rejected, "
        f"{trainer.get('training_s', 0.0):.0f} s"
    ]
    if synthetic := trainer.get("synthetic"):
        lines.append(f"          {synthetic['made']} synthetic records made")
    if trainer.get("last_error"):
        lines.append(f"          {trainer['failures']} failures, last: {trainer['last_error']}")
    return lines


def _lease_lines(load: Mapping[str, Any]) -> list[str]:
    """Trainers by state, and the use of idle time; none from a scheduler without leases."""
    if "leases_ended" not in load:
        return []
    states = [lease["state"] for lease in load["leases"]]
    counts = [f"{states.count(state)} {state}" for state in sorted(set(states))]
    counts += [f"{name} preempted for a replica" for name in load["trainers_preempted"]]
    used, idle = load["idle_s"]["used"], sum(load["idle_s"].values())
    longest = load["longest_yield_s"]
    tail = "" if longest is None else f", yields within {1e3 * longest:.0f} ms"
    return [
        f"leases    {', '.join(counts) or 'none'}; {used:.0f} of {idle:.0f} s idle used{tail}, "
        f"{load['leases_ended']['killed']} killed"
    ]
