"""Fit the router's topic head on a frozen encoder of sentence embeddings.

    python -m paceline.deploy.recipes.router_head --encoder minilm --out OUT

Prompts come from a file with a prompt a line under its ``[topic]``, and others under ``[general]``,
at least five of each; by default from the package's own, beside prompts of seeded generators. The
head is a multinomial logistic regression with a ridge. Ridge and minimum confidence
(`router.min_confidence: auto`) are chosen by cross-validation over the file's prompts.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file
from transformers import BertModel

from paceline.actors.general import GENERAL
from paceline.actors.router.classifier import HEAD_FILE
from paceline.actors.router.encoder import TextEncoder, fingerprint, keep_layers
from paceline.actors.router.regression import (
    ClassifiedTexts,
    Doubles,
    RegressionData,
    assign_folds,
    fit_row,
)
from paceline.deploy import model_store
from paceline.deploy.demo.prompts import TOPICS, generate
from paceline.deploy.errors import ConfigError
from paceline.deploy.recipes.data import Row
from paceline.deploy.recipes.router_data import (
    FORMS,
    WRITTEN_PROMPTS,
    general_prompts,
    read_prompts,
)

log = logging.getLogger(__name__)

MAX_TOKENS = 48  # of 32 and of 64 as many prompts go where they belong; a question may come last
_SEEDS, _PER_FORM = (31, 32), 100  # of generated prompts
_FOLDS = 5
_RIDGES = (0.003, 0.01, 0.03)
_CONFIDENCES = (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
_KEPT = 0.95  # of general's prompts
_CYCLES, _CONVERGED = 50, 0.003

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Examples:
    """Features float64 ``[N, F]`` and label numbers int64 ``[N]``; the last is ``general``."""

    features: Doubles
    labels: Ints

    def of(self, chosen: NDArray[np.bool_]) -> Examples:
        """The chosen ones."""
        return Examples(self.features[chosen], self.labels[chosen])

    def __add__(self, other: Examples) -> Examples:
        return Examples(
            np.concatenate([self.features, other.features]),
            np.concatenate([self.labels, other.labels]),
        )


@dataclass(frozen=True, slots=True)
class Head:
    """Weights float64 ``[labels, F]`` and biases ``[labels]``; the last label's are zero."""

    weight: Doubles
    bias: Doubles

    def logits(self, features: Doubles) -> Doubles:
        """``[N, labels]``."""
        return np.asarray(features @ self.weight.T + self.bias)

    def probabilities(self, features: Doubles) -> Doubles:
        """``[N, labels]``."""
        logits = self.logits(features)
        shares = np.exp(logits - logits.max(axis=1, keepdims=True))
        return np.asarray(shares / shares.sum(axis=1, keepdims=True))


def fit_head(examples: Examples, num_labels: int, ridge: float) -> Head:
    """Fit all rows but the last, which is the reference, in turns until they stay.

    With the other rows fixed, a row's part of the multinomial loss is a logistic regression with
    an offset: each turn lowers the whole loss, which is convex.

    Args:
        examples: of all labels.
        num_labels: number of them.
        ridge: see `regression.fit_row`.
    """
    size = examples.features.shape[1]
    head = Head(np.zeros((num_labels, size)), np.zeros(num_labels))
    for _ in range(_CYCLES):
        before = head.weight.copy()
        for label in range(num_labels - 1):
            own = examples.labels == label
            others = np.delete(head.logits(examples.features), label, axis=1)
            data = RegressionData.of(
                ClassifiedTexts(examples.features[own], others[own]),
                ClassifiedTexts(examples.features[~own], others[~own]),
                float(own.mean()),
            )
            row = fit_row(data, np.ones(len(own), bool), ridge)
            head.weight[label], head.bias[label] = row.weight, row.bias
        if np.abs(head.weight - before).max() <= _CONVERGED * np.abs(head.weight).max():
            break
    return head


def cross_validated(written: Examples, generated: Examples, ridge: float) -> Doubles:
    """Probabilities ``[N, labels]`` of written prompts, each by a head fitted without its fold."""
    num_labels = int(written.labels.max()) + 1
    found = np.zeros((len(written.labels), num_labels))
    folds = np.zeros(len(written.labels), np.int64)
    for label in range(num_labels):
        own = written.labels == label
        folds[own] = assign_folds(np.ones(int(own.sum())), _FOLDS, label)
    for fold in range(_FOLDS):
        out = folds == fold
        head = fit_head(written.of(~out) + generated, num_labels, ridge)
        found[out] = head.probabilities(written.features[out])
    return found


def least_confidence(probabilities: Doubles, labels: Ints) -> float:
    """The least confidence that a topic needs so that ``_KEPT`` of general's prompts stay there."""
    last = probabilities.shape[1] - 1
    general = probabilities[labels == last]
    taken = general.argmax(axis=1) != last
    for confidence in _CONFIDENCES:
        if np.mean(taken & (general.max(axis=1) >= confidence)) <= 1 - _KEPT:
            break
    return confidence


def figures(
    probabilities: Doubles, labels: Ints, names: Sequence[str], confidence: float
) -> dict[str, float]:
    """Share of each label's prompts that are routed to it, and of topics' to another topic."""
    last = len(names) - 1
    chosen = probabilities.argmax(axis=1)
    chosen[probabilities.max(axis=1) < confidence] = last
    found = {
        name: float(np.mean(chosen[labels == label] == label)) for label, name in enumerate(names)
    }
    topics = labels != last
    wrong = (chosen != labels) & (chosen != last)
    return found | {"wrong_topic": float(np.mean(wrong[topics]))}


def generated_prompts(per_form: int) -> list[tuple[str, str]]:
    """Prompt and label: per topic in two forms, and of none as many as of a topic."""
    rng = np.random.default_rng(_SEEDS[0])
    found = []
    for topic in TOPICS:
        found += [(text, topic) for text in generate(topic, per_form, _SEEDS[0])]
        rows = [Row("", topic, text, "") for text in generate(topic, per_form, _SEEDS[1])]
        found += [(FORMS[topic](row, rng), topic) for row in rows]
    return found + [(text, GENERAL) for text in general_prompts(rng, 2 * per_form)]


def encode(
    texts: TextEncoder, prompts: Sequence[tuple[str, str]], names: Sequence[str]
) -> Examples:
    """Features and labels of prompts that are not empty."""
    pairs = [(texts(prompt), label) for prompt, label in prompts]
    features = [row.double().numpy() for row, _ in pairs if row is not None]
    labels = [names.index(label) for row, label in pairs if row is not None]
    return Examples(np.stack(features), np.array(labels))


def main(argv: Sequence[str] | None = None) -> int:
    """Fit as the command line says, see the module's text; returns the exit code."""
    parser = argparse.ArgumentParser(prog="router_head", description=__doc__.split("\n")[0])
    parser.add_argument("--encoder", default="minilm", help="packaged name, or folder of a BERT")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--prompts", type=Path, default=WRITTEN_PROMPTS, help="by topic")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        _fit(args)
    except ConfigError as error:
        sys.stderr.write(f"router_head: {error}\n")
        return 2
    return 0


def _fit(args: argparse.Namespace) -> None:
    prompts = read_prompts(args.prompts)
    names = [*(label for label in prompts if label != GENERAL), GENERAL]
    if len(names) < 2 or any(len(prompts.get(label, ())) < _FOLDS for label in names):
        raise ConfigError(
            f"prompts {args.prompts}: needs [general] and topics, at least {_FOLDS} prompts of each"
        )
    folder = model_store.fetch(args.encoder, log.info, "--encoder")
    if not folder.is_dir():
        raise ConfigError(f"--encoder: there is no folder {folder}")
    bert = BertModel.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    mark = fingerprint(folder, bert)
    # the later ones tell sentences apart, and topics worse
    layers = max(1, bert.config.num_hidden_layers // 2)
    texts = TextEncoder(folder, keep_layers(bert, layers), "mean", MAX_TOKENS)
    written = encode(texts, [(t, label) for label, own in prompts.items() for t in own], names)
    generated = written.of(np.zeros(len(written.labels), bool))
    if args.prompts == WRITTEN_PROMPTS:
        generated = encode(texts, generated_prompts(_PER_FORM), names)
    log.info("%d written and %d generated prompts", len(written.labels), len(generated.labels))

    tried = {ridge: cross_validated(written, generated, ridge) for ridge in _RIDGES}
    places = np.arange(len(written.labels))
    losses = {r: -float(np.log(p[places, written.labels]).mean()) for r, p in tried.items()}
    ridge = min(losses, key=losses.__getitem__)
    confidence = least_confidence(tried[ridge], written.labels)
    result = figures(tried[ridge], written.labels, names, confidence)
    head = fit_head(written + generated, len(names), ridge)

    args.out.mkdir(parents=True, exist_ok=True)
    rows = {"weight": head.weight.astype(np.float32), "bias": head.bias.astype(np.float32)}
    save_file(rows, args.out / HEAD_FILE)
    config = {
        "encoder": args.encoder,
        "encoder_fingerprint": mark,
        "id2label": {str(place): label for place, label in enumerate(names)},
        "layers": layers,
        "max_tokens": MAX_TOKENS,
        "min_confidence": confidence,
    }
    (args.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    log.info("written: %s, ridge %g (losses %s)", args.out, ridge, losses)
    log.info("cross-validated: %s", json.dumps(result))


if __name__ == "__main__":
    raise SystemExit(main())
