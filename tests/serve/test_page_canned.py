"""The live page in a real browser over canned answers of a learning server."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from browser import Browser, find_chromium
from fastapi import FastAPI, Request
from free_ports import find_port
from starlette.responses import JSONResponse, Response

from paceline.deploy.api.page import add_page

CHROMIUM = find_chromium()
KEY = "sésame"
NOW = 1_760_000_100.0

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: chromium)"),
]


def decision(outcome: str, version: int, ago: float, **more: Any) -> dict[str, Any]:
    return {"time": NOW - ago, "topic": "sql", "outcome": outcome, "version": version, **more}


STATUS: dict[str, Any] = {
    "target": {"dtype": "bfloat16", "device": "cpu", "drafts": {"general": 0, "sql": 3}},
    "live_drafts": {
        "general": {"stable": 0, "candidate": None},
        "sql": {"stable": 3, "candidate": 4, "canary_requests": 12},
    },
    "decisions": [
        decision("rejected", 1, 80, gain_lower_bound=-0.01, records=40),
        decision("published", 1, 70, served_expected_acceptance=0.05, records=48),
        decision("published", 2, 60, canary=True),
        decision("rolled_back", 2, 50, stable_acceptance=0.5, canary_acceptance=0.4),
        decision("restored", 3, 40, restored_from=1),
        decision("plateau", 3, 35, reason="3 rounds in a row left little to hope for"),
        decision("drift", 3, 30, acceptance_slow=0.6, acceptance_fast=0.4),
        decision("published", 4, 20, canary=True),
        decision("added", 1, 10),
        decision("a word of tomorrow's", 4, 5),
    ],
    "routing": {"acceptance": {"sql": {"sql": 0.61, "general": 0.2}}},
    "scheduler": {
        "running": 1, "waiting": 0, "replicas": 1, "may_train": False, "paused": False,
        "permits_requested": 400, "permits_granted": 100, "longest_yield_s": 0.031,
        "leases": [{"trainer": "paceline-trainer", "topic": "sql", "state": "computes"}],
        "idle_s": {"used": 90.0, "waiting": 6.0, "unwanted": 4.0}, "leases_ended": {"killed": 2},
    },
    "trainer": {
        "state": "training", "topic": "sql", "steps": 42, "published": 3, "rejected": 1,
        "training_s": 81.0, "loss": 0.75, "failures": 0,
    },
    "shards": {
        "sql": {
            "splits": {"train": {"records": 80}, "held_out": {"records": 20}},
            "bytes": 2_000_000,
        },
        "general": {"error": "ActorDiedError"},
    },
}  # fmt: skip
MODELS: dict[str, Any] = {"data": [{"id": "paceline"}]}
LIVE: dict[str, Any] = {
    "replica": "r", "now": NOW, "bucket_s": 5.0, "keep_s": 900.0,
    "columns": ["at", "topic", "draft", "requests", "tokens", "rounds", "drafted", "accepted"],
    "rows": [
        [NOW - ago, "sql", draft, 2, 60, 20, 80, accepted]
        for ago in range(10, 90, 5)
        for draft, accepted in (("sql", 48), ("sql@0", 4), ("general", 16))
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The page over answers that need a key."""
    api = FastAPI()
    add_page(api)
    answers = {"status": STATUS, "live": LIVE, "models": MODELS}

    @api.get("/v1/{path:path}")
    async def answer(path: str, request: Request) -> Response:
        shown = request.headers.get("authorization", "").encode("latin-1").decode()
        if shown != f"Bearer {KEY}":
            return JSONResponse({"error": {"message": "No such key."}}, 401)
        return JSONResponse(answers[path.rsplit("/", 1)[-1]])

    port = find_port()
    server = uvicorn.Server(uvicorn.Config(api, port=port, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def page(address: str) -> Iterator[Browser]:
    """The live part after the key was entered."""
    with Browser(str(CHROMIUM)) as browser:
        browser.look_at(1280, 900)
        browser.open(f"{address}/ui/#live")
        browser.wait("document.getElementById('key-dialog').open")
        assert text(browser, "#banner") == "No such key."
        browser.value(f"document.getElementById('key').value = {KEY!r}")
        browser.value("document.querySelector('#key-form [type=submit], #key-form button').click()")
        browser.wait("document.querySelectorAll('#decisions tbody tr').length > 0")
        yield browser


def text(page: Browser, selector: str) -> str:
    return str(page.value(f"document.querySelector({selector!r}).textContent"))


def count(page: Browser, selector: str) -> int:
    return int(page.value(f"document.querySelectorAll({selector!r}).length"))


def test_every_decision_has_a_row_with_its_label(page: Browser) -> None:
    words = page.value("[...document.querySelectorAll('#decisions .chip')].map(c => c.textContent)")
    assert words == [
        "a word of tomorrow's", "added", "canary", "drift", "plateau", "restored", "rolled back",
        "canary", "published", "rejected",
    ]  # fmt: skip
    assert "gain at least -0.01" in text(page, "#decisions").replace("\u2212", "-")
    assert "weights of version 1" in text(page, "#decisions")


def test_a_topic_shows_both_arms_and_its_weight_versions(page: Browser) -> None:
    card = "[data-topic=sql]"
    assert count(page, f"{card} .online.dot") > 0
    assert count(page, f"{card} .frozen.dot") > 0
    said = text(page, f"{card} header")
    assert "v3" in said
    assert "v4 canary (12)" in said
    assert "40" in said  # 48 + 16 of 160 tokens that sql and general drafted, 4 of the twin's 80
    assert "frozen 5" in said
    chart = text(page, f"{card} .chart")
    for mark in ("v1", "✕ v2", "v3"):
        assert mark in chart


def test_trainer_leases_and_idle_time_are_shown(page: Browser) -> None:
    said = text(page, "#trainer")
    for word in ("training sql", "refused", "400", "computes (sql)", "90 of 100 s", "31 ms, 2"):
        assert word in said, word
    assert "training sql" in text(page, "#tiles")


def test_routing_evaluation_and_shards_are_shown(page: Browser) -> None:
    shares = text(page, "#shares")
    assert "sql (" in shares
    assert "evaluated on the same answers: sql 0.61, general 0.2" in shares
    replay = text(page, "#replay")
    assert "80 + 20 held out" in replay
    assert "general: does not answer" in replay


def test_experts_stay_when_the_registry_does_not_answer(
    page: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STATUS, "live_drafts", {"error": "TimeoutError"})
    page.wait("document.querySelector('[data-topic=sql] .chip') === null")
    assert count(page, "[data-topic=sql]") == 1
    assert count(page, "[data-topic=error]") == 0


def test_token_sources_have_different_colours(page: Browser) -> None:
    page.value("location.hash = '#playground'")
    kinds = ("accepted", "recovered", "bonus")
    colours = {
        page.value(
            f"getComputedStyle(document.querySelector('.legend .tok.{kind}')).backgroundColor"
        )
        for kind in kinds
    }
    assert len(colours) == len(kinds)
    page.value("location.hash = '#live'")


TIPS = """
import('./tokens.js').then(({ TokenText }) => {
  const shown = new TokenText(document.createElement('div')), tip = document.getElementById('tip')
  shown.add('abc', %s)
  return shown.entries.map((_, i) => { shown.show(i); return tip.textContent })
})
"""


def source(kind: str, draft: str, version: int | None, accepted: float | None) -> dict[str, Any]:
    return {
        "source": kind, "text_offset": 0, "token": "a", "draft": draft, "weight_version": version,
        "target_probability": 0.9, "acceptance_probability": accepted, "rejected_token": None,
    }  # fmt: skip


def test_the_tooltip_of_a_suffix_token_shows_no_version_and_no_rejection(page: Browser) -> None:
    entries = [
        source("accepted", "suffix", None, 0.8),
        source("accepted", "suffix", None, None),
        source("recovered", "suffix", None, None),
        source("recovered", "sql", 3, None),
    ]
    sampled, greedy, rejected, expert = page.value(TIPS % json.dumps(entries))
    assert "draftsuffixacceptance probability0.800target" in sampled
    assert "draftsuffixacceptance probability1, greedy or seededtarget" in greedy
    assert "draftsuffixtarget" in rejected
    assert "draftsql, version 3acceptance probability0, greedy or seededtarget" in expert
    page.value("document.getElementById('tip').hidden = true")


def test_a_renamed_model_is_noticed(page: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    assert text(page, "#server").startswith("paceline, ")
    monkeypatch.setitem(MODELS, "data", [{"id": "other"}])
    page.wait("document.getElementById('server').textContent.startsWith('other, ')")


WEEK = """
import('./live.js').then(({ Live }) => {
  const live = new Live(), view = %s
  for (let hour = 0; hour < 24 * 7; hour++) {
    view.now += 3600
    const decisions = Array.from({ length: 60 }, (_, i) => (
      { time: view.now - 60 * (60 - i), topic: 'sql', outcome: 'rejected', version: 1 }))
    live.take({ decisions }, view, true)
  }
  return live.decisions.size
})
"""


def test_decisions_of_long_ago_are_forgotten(page: Browser) -> None:
    assert page.value(WEEK % json.dumps(LIVE)) == 60


def test_tokens_are_counted_as_they_come(page: Browser) -> None:
    counts = """
    import('./tokens.js').then(({ TokenText }) => {
      const shown = new TokenText(document.createElement('div'))
      const add = (source) => shown.add('a', [{ source, text_offset: 0 }])
      for (const source of ['plain', 'accepted', 'plain']) add(source)
      const before = shown.counts
      shown.clear()
      return [before, shown.counts]
    })
    """
    before, cleared = page.value(counts)
    assert before == {"accepted": 1, "recovered": 0, "bonus": 0, "forced": 0, "plain": 2}
    assert set(cleared.values()) == {0}


def test_the_page_has_no_errors_but_the_missing_key(page: Browser) -> None:
    assert page.value("document.getElementById('banner').hidden")
    others = [one for one in page.complaints if "401" not in one]
    assert others == []
