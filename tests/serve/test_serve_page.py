"""The page in a real browser, against the real application."""

import re
from collections.abc import Iterator

import httpx
import pytest
from browser import Browser, find_chromium

CHROMIUM = find_chromium()
PROMPT = "Ann has 12 apples. <b>She</b> buys 30 more & <script>alert(1)</script>"
RUN = """
(() => {
  const form = document.getElementById('ask').elements
  form.prompt.value = %s
  form.draft.value = 'math'
  form.k.value = '3'
  form.max_tokens.value = '40'
  document.getElementById('run').click()
})()
"""
TEXT = "[...document.querySelectorAll('#pane-{} .tok')].map((token) => token.textContent).join('')"
KINDS = "[...new Set([...document.querySelectorAll('#pane-{} .tok')].map((t) => t.classList[1]))]"

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.full,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: chromium)"),
]


@pytest.fixture(scope="module")
def browser(base_url: str) -> Iterator[Browser]:
    """A connected page, without errors at the end."""
    with Browser(str(CHROMIUM)) as opened:
        opened.look_at(1280, 900)
        opened.open(f"{base_url}/ui/#playground")
        opened.wait("document.getElementById('draft').options.length > 2")
        yield opened
        opened.value("1")  # reads pending events
        assert opened.complaints == []
        assert {url.startswith((base_url, "about:", "data:")) for url in opened.requests} == {True}


@pytest.fixture(scope="module")
def answered(browser: Browser) -> Browser:
    """The playground after both runs of a prompt with HTML."""
    browser.value(RUN % repr(PROMPT))
    browser.wait("document.getElementById('pane-off').dataset.state === 'done'")
    return browser


def test_the_playground_shows_the_greedy_text_and_nothing_else(
    answered: Browser, http: httpx.Client
) -> None:
    body = {
        "model": "paceline",
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 40,
        "temperature": 0,
    }
    text = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    assert text
    assert answered.value(TEXT.format("on")) == text
    assert answered.value(TEXT.format("off")) == text
    assert answered.value("document.querySelectorAll('#main b, #main script').length") == 0
    verdict = answered.wait("document.getElementById('verdict').textContent")
    assert verdict.startswith("The same text, character for character.")


def test_every_token_has_the_colour_of_its_source(answered: Browser) -> None:
    drafted = set(answered.value(KINDS.format("on")))
    assert drafted <= {"accepted", "recovered", "bonus", "plain"}
    assert drafted & {"accepted", "recovered"}
    assert answered.value(KINDS.format("off")) == ["plain"]
    kind = next(iter(drafted - {"plain"}))
    for where in (f"#pane-on .tok.{kind}", f".legend .tok.{kind}"):
        colour = f"getComputedStyle(document.querySelector('{where}')).backgroundColor"
        assert answered.value(colour) not in ("rgba(0, 0, 0, 0)", None)


def test_the_tooltip_of_a_token_shows_its_source(answered: Browser) -> None:
    answered.hover("#pane-on .tok")
    tip = answered.wait("!document.getElementById('tip').hidden && tip.textContent")
    assert "target probability" in tip
    answered.value("document.querySelector('#pane-on .answer').focus()")
    press = {"key": "ArrowRight", "code": "ArrowRight", "windowsVirtualKeyCode": 39}
    for kind in ("keyDown", "keyUp"):
        answered.call("Input.dispatchKeyEvent", type=kind, **press)
    assert answered.wait("document.querySelectorAll('#pane-on .tok.here').length") == 1


DRAFTED = "#pane-on .tok.accepted, #pane-on .tok.recovered"


def test_the_tooltip_of_a_draft_token_shows_its_acceptance_probability(answered: Browser) -> None:
    answered.hover(DRAFTED)
    tip = answered.wait("!document.getElementById('tip').hidden && tip.textContent")
    assert re.search(r"acceptance probability[01], greedy or seeded", tip), tip
    answered.value("document.getElementById('ask').elements.temperature.value = '0.8'")
    answered.value(RUN % repr(PROMPT))
    answered.wait("document.getElementById('pane-off').dataset.state === 'running'")
    answered.wait("document.getElementById('pane-off').dataset.state === 'done'")
    answered.value("document.getElementById('ask').elements.temperature.value = '0'")
    answered.hover(DRAFTED)
    tip = answered.wait("!document.getElementById('tip').hidden && tip.textContent")
    chance = re.search(r"acceptance probability([\d.]+)target", tip)
    assert chance, tip
    assert 0.0 <= float(chance[1]) <= 1.0


def test_the_live_charts_show_the_requests(answered: Browser) -> None:
    answered.value("location.hash = '#live'")
    line = "document.querySelector('[data-topic=math] .online.dot')"
    answered.wait(f"{line} !== null")
    answered.wait("document.querySelectorAll('#speed .dot').length > 0")
    assert answered.value("document.querySelectorAll('#topics article').length") == 5
    assert "math" in answered.value("document.getElementById('shares').textContent")


def test_a_running_answer_can_be_cancelled(answered: Browser, http: httpx.Client) -> None:
    answered.value("location.hash = '#playground'")
    answered.value((RUN % repr("a")).replace("'40'", "'1900'"))
    answered.wait("document.querySelectorAll('#pane-on .tok').length > 5")
    answered.value("document.getElementById('cancel').click()")
    answered.wait("document.getElementById('pane-on').dataset.state === 'failed'")
    said = answered.value("document.querySelector('#pane-on .failed').textContent")
    assert said == "Cancelled."
    answered.wait("!document.getElementById('run').disabled")
    target = http.get("/v1/paceline/status").json()["target"]
    assert target["running"] <= 1


def test_nothing_is_wider_than_a_narrow_window(answered: Browser) -> None:
    answered.look_at(390, 844)
    for part in ("live", "playground"):
        answered.value(f"location.hash = '#{part}'")
        answered.wait(f"!document.getElementById('part-{part}').hidden")
        assert answered.value("document.documentElement.scrollWidth") <= 390
    answered.look_at(1280, 900)
