"""``user_config``: what is right holds at once, what is wrong is named and changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from local_ingress import Handle, nothing_learns
from tiny_models import save_tiny, tiny_tokenizer
from waiting import wait_until

from paceline.actors.engine.request import GenerationRequest, SamplingParams
from paceline.actors.engine.settings import TargetSettings
from paceline.deploy.api.ingress import Ingress, IngressSettings
from paceline.deploy.config.user_config import (
    IngressUserConfig,
    TargetUserConfig,
    UserConfigState,
    UserConfigStatus,
)
from paceline.deploy.errors import ApiError
from paceline.deploy.monitoring.target import MeteredTarget


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root, vocab = tmp_path_factory.mktemp("models"), len(tiny_tokenizer())
    context = {"vocab": vocab, "max_position_embeddings": 1024}
    target = save_tiny(root / "target", 1, **context)
    return {"target": str(target), "draft": str(save_tiny(root / "draft", 1, **context))}


@pytest.fixture(scope="module")
def target(folders: dict[str, str]) -> Iterator[MeteredTarget]:
    """A target whose draft is the same model: its drafts are always accepted."""
    settings = TargetSettings(
        folders["target"],
        {"general": folders["draft"]},
        dtype="float32",
        num_threads=1,
        max_num_seqs=2,
        max_speculative_tokens=4,
        sample_share=0.5,
        held_out_fraction=0.25,
    )
    replica = MeteredTarget(settings)
    yield replica
    replica._exporter.stop()
    replica._loop.close()


def drafted(target: MeteredTarget, tokens: int = 60) -> int:
    """Tokens drafted for one answer."""

    async def ask() -> int:
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        request = GenerationRequest("r", (5, 6, 7), sampling, draft="general", topic="general")
        chunks = [chunk async for chunk in target.generate(request)]
        figures = chunks[-1].speculative
        return 0 if figures is None else figures.num_draft_tokens

    return asyncio.run(ask())


def retuned(target: MeteredTarget, user_config: Any) -> UserConfigStatus:
    async def ask() -> Any:
        await target.reconfigure(user_config)
        return (await target.status()).user_config

    found: UserConfigStatus = asyncio.run(ask())
    return found


def test_a_target_drafts_no_more_than_it_may_and_as_configured_again(
    target: MeteredTarget,
) -> None:
    looks = {"probe_share": 0.5}  # drafts as large as the target do not pay
    assert retuned(target, looks) == UserConfigStatus(looks, None)
    wait_until(lambda: drafted(target) > 0, "drafts", 30)
    asked = {"max_speculative_tokens": 0, "sample_share": 0.125}
    assert retuned(target, asked) == UserConfigStatus(asked, None)
    assert target._scored == (0.125, 0.25)
    assert drafted(target) == 0
    assert retuned(target, looks) == UserConfigStatus(looks, None)
    assert target._scored == (0.5, 0.25)
    wait_until(lambda: drafted(target) > 0, "drafts", 30)
    assert retuned(target, {}) == UserConfigStatus({}, None)
    assert target._loop.stats().draft_failures == 0


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            {"max_speculative_tokns": 2},
            "max_speculative_tokns: no such key; did you mean max_speculative_tokens?",
        ),
        ({"max_speculative_tokens": 5}, "max_speculative_tokens: at most 4, as configured"),
        ({"probe_share": 2, "sample_share": 0.3}, "probe_share: input should be less"),
        ([1], "input should be a valid dictionary"),
    ],
)
def test_what_is_wrong_is_named_and_the_old_values_stay(
    target: MeteredTarget, wrong: Any, said: str
) -> None:
    retuned(target, {"sample_share": 0.25})
    found = retuned(target, wrong)
    assert found.changed == {"sample_share": 0.25}
    assert (found.refused or "").startswith(said)
    assert target._scored == (0.25, 0.25)
    assert retuned(target, {}) == UserConfigStatus({}, None)


def test_a_fixed_number_of_tokens_cannot_be_limited(
    target: MeteredTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed = replace(target._settings, num_speculative_tokens=3)
    monkeypatch.setattr(target, "_settings", fixed)
    assert "is fixed" in retuned(target, {"max_speculative_tokens": 1}).refused
    monkeypatch.undo()
    assert retuned(target, {}).refused is None


@pytest.fixture
def ingress(target: MeteredTarget, folders: dict[str, str]) -> Ingress:
    settings = IngressSettings("m", folders["target"], None, ("general",), 1.0, 0.5, 8)
    return Ingress(settings, Handle(target), None, nothing_learns())


def lets_in(ingress: Ingress) -> int:
    """Sequences of one client that are let in beside nothing."""
    released: list[Callable[[], None]] = []
    try:
        while True:
            released.append(ingress._limiter.acquire(1, "me"))
    except ApiError:
        return len(released)
    finally:
        for release in released:
            release()


def test_the_ingress_applies_new_limits_and_keeps_running_requests(
    ingress: Ingress,
) -> None:
    under_way = ingress._limiter.acquire(5, "other")
    assert lets_in(ingress) == 3
    asked = {"max_in_flight": 7, "max_seqs_per_client": 1, "request_timeout_s": 5.0}
    more = {"router_timeout_s": 0.25, "min_confidence": 0.75, "failover_timeout_s": 30.0}
    asyncio.run(ingress.reconfigure(asked | more))
    assert ingress._user_config.status() == UserConfigStatus(asked | more, None)
    assert lets_in(ingress) == 1
    asyncio.run(ingress.reconfigure({"max_in_flight": 2}))
    assert lets_in(ingress) == 0
    under_way()
    assert lets_in(ingress) == 2
    assert ingress._settings.request_timeout_s == 600.0  # not named: as configured
    assert (ingress._route_selector._timeout_s, ingress._route_selector._min_confidence) == (
        1.0,
        0.5,
    )
    assert ingress._failover.policy.failover_timeout_s == 120.0


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"max_inflight": 3}, "max_inflight: no such key; did you mean max_in_flight?"),
        ({"max_in_flight": 0}, "max_in_flight: "),
        ({"failover_timeout_s": 20, "max_in_flight": 3}, "failover_timeout_s: must be more than"),
    ],
)
def test_the_ingress_refuses_an_invalid_user_config_whole(
    ingress: Ingress, wrong: dict[str, Any], said: str
) -> None:
    asyncio.run(ingress.reconfigure({"max_in_flight": 4}))
    asyncio.run(ingress.reconfigure(wrong))
    found = ingress._user_config.status()
    assert found.changed == {"max_in_flight": 4}
    assert (found.refused or "").startswith(said)
    assert lets_in(ingress) == 4


def test_every_user_config_key_of_the_ingress_is_one_of_its_settings() -> None:
    own = {"failover_timeout_s"}  # of the failover policy
    names = set(IngressSettings.__dataclass_fields__)
    assert set(IngressUserConfig.model_fields) - own <= names


def test_a_check_that_refuses_leaves_what_was_changed_before() -> None:
    taken: list[TargetUserConfig] = []

    def apply(asked: TargetUserConfig) -> None:
        if asked.sample_share == 1.0:
            raise ValueError("not that much")
        taken.append(asked)

    live = UserConfigState(TargetUserConfig, apply)
    live.update({"sample_share": 0.5})
    live.update({"sample_share": 1.0})
    assert live.status() == UserConfigStatus({"sample_share": 0.5}, "not that much")
    live.update(None)
    assert live.status() == UserConfigStatus({}, None)
    assert [asked.sample_share for asked in taken] == [0.5, None]
