"""EAGLE drafts: exact answers on every fused architecture, what they read, and what they learn."""

from __future__ import annotations

import dataclasses
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES
from distributions import chi_square, law_of_tokens
from engines import DEVICE, MAX_LEN, TOKENIZER, engine_of, request, run, served, tokens_of
from safetensors.torch import load_file, save_file
from tiny_models import tiny_llama
from training_records import learn

from paceline.actors.engine.engine import Engine
from paceline.actors.engine.model_loader import load_causal_lm
from paceline.actors.engine.model_runner import ModelRunner
from paceline.actors.engine.native.kernels import kernels_for
from paceline.actors.replay.record import ReplayRecord, decode, encode
from paceline.actors.speculation.colocated import ColocatedProposer
from paceline.actors.speculation.controller import SpeculationController
from paceline.actors.speculation.eagle import EagleDecoder, EagleRunner, EagleStack, kept_hidden
from paceline.actors.speculation.early_end import NEVER, EarlyEnd, kept_lengths
from paceline.actors.speculation.pending_updates import AddExpert, SwapWeights
from paceline.actors.speculation.proposer import DraftRow
from paceline.actors.speculation.rejection_sampler import Proposal
from paceline.actors.training.batches import make_batch, token_counts
from paceline.actors.training.candidate import Candidate
from paceline.actors.training.distiller import Distiller
from paceline.actors.training.eagle import state_basis, step_states
from paceline.actors.training.forward import score_positions
from paceline.actors.training.settings import DistillerSettings, ObjectiveSettings, TrainerSettings
from paceline.actors.training.shares import make_shares, split_share
from paceline.actors.weights.checkpoint import ModelError
from paceline.actors.weights.eagle import (
    VOCABULARY,
    EagleDraft,
    choose_vocabulary,
    first_tokens,
    grown_vocabulary,
    is_eagle,
    load_draft,
    new_draft,
    read_draft,
    save_draft,
    target_mark,
)
from paceline.actors.weights.flat_weights import flatten

PROMPTS = [[5, 6, 7, 8, 9] * 4, [11, 12], [40], list(range(60, 91))]
VOCAB = 300
SMALL = torch.arange(3, 250, 2, dtype=torch.int32)


def save_target(folder: Path, kind: str = "llama", vocab: int = VOCAB, **more: Any) -> Path:
    """A random target of an architecture, with the test tokenizer."""
    torch.manual_seed(1)
    if kind == "llama":
        model = tiny_llama(1, vocab=vocab, **more)
    else:
        from transformers import AutoModelForCausalLM

        config = ARCHITECTURES[kind](2, vocab_size=vocab, **more)
        model = AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("eagle") / "target")


@pytest.fixture(scope="module")
def draft(target: Path) -> Path:
    folder = target.parent / "draft"
    save_draft(new_draft(target, vocabulary=SMALL), folder)
    return folder


def eagle_engine(
    target: Path,
    drafts: dict[str, Path],
    draft_chunk: int = 8,
    dtype: torch.dtype = torch.float32,
    others: Sequence[dict[str, Any]] = (),
    vocab: int = VOCAB,
    **more: Any,
) -> Engine:
    model = load_causal_lm(target, dtype, DEVICE)
    rows = more.get("max_num_seqs", 4)

    def beside(runner: ModelRunner) -> list[EagleStack]:
        loaded = [
            (name, load_draft(path, target, dtype, DEVICE).eval().requires_grad_(False))
            for name, path in drafts.items()
        ]
        names, models = zip(*loaded, strict=True)
        positions = more.get("draft_positions")
        eagles = EagleRunner(models, rows, runner.max_model_len, positions, vocab_size=vocab)
        return [EagleStack(eagles, names, rows, kept_hidden(runner.kv), draft_chunk)]

    return engine_of(model, others, beside=beside, record_hidden=True, **more)


def asked(length: int = 40, **fields: Any) -> list[Any]:
    return [
        request(f"{i}", prompt, max_tokens=length - 7 * i, ignore_eos=True, **fields)
        for i, prompt in enumerate(PROMPTS)
    ]


def answers(engine: Engine, requests: Sequence[Any]) -> list[list[int]]:
    found = run(engine, requests)
    return [tokens_of(found[r.request_id]) for r in requests]


def records_of(engine: Engine, requests: Sequence[Any]) -> list[ReplayRecord]:
    found = [run(engine, [r])[r.request_id][-1].record for r in requests]
    assert all(record is not None for record in found)
    return [record for record in found if record is not None]


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("layers", [1, 2])
def test_greedy_answers_are_the_targets_in_a_ragged_batch(
    tmp_path: Path, kind: str, layers: int
) -> None:
    folder = save_target(tmp_path / "target", kind)
    save_draft(new_draft(folder, layers), tmp_path / "draft")
    drafts = {"a": tmp_path / "draft"}
    plain = answers(eagle_engine(folder, drafts), asked(num_speculative_tokens=0))
    engine = eagle_engine(folder, drafts, k=4)
    assert answers(engine, asked()) == plain
    assert answers(engine, asked()) == plain  # with cached prefixes
    assert engine.draft_failures == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_draft_reads_the_last_positions_of_a_long_text(
    target: Path, draft: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """As many as records have; of those before it computes nothing, and drafts the same."""
    monkeypatch.setattr("paceline.actors.speculation.eagle.WINDOW", 24)
    prompts = [[(7 * i + 3 * n) % 290 + 5 for n in range(50 + i)] for i in range(3)]
    requests = [request(str(i), p, max_tokens=30, ignore_eos=True) for i, p in enumerate(prompts)]
    drafted, read = [], []
    for whole in (True, False):
        engine = eagle_engine(target, {"a": draft}, 64, dtype, k=3)
        stack = engine.draft_runner._proposer._stacks["a"]  # type: ignore[attr-defined]
        for part in (*stack.runner.kv.keys, *stack.runner.kv.values):
            part.uniform_(-9.0, 9.0)  # what others have left there
        if whole:
            stack.window = None
        read.append(0)
        prefill = stack._prefill_forward

        def counted(part: Any, prefill: Any = prefill) -> None:
            read[-1] += sum(end - start for _, start, end in part)
            prefill(part)

        monkeypatch.setattr(stack, "_prefill_forward", counted)
        drafted.append([own.draft_token_ids.tolist() for own in records_of(engine, requests)])
    assert drafted[0] == drafted[1]
    assert read == [51 - 16 + 52 - 16 + 53 - 16, 3 * (24 - 16)]  # each with its first token


@pytest.mark.parametrize("more", [{"kv_positions": MAX_LEN}, {"draft_positions": MAX_LEN}])
def test_preempted_requests_answer_the_same(target: Path, draft: Path, more: Any) -> None:
    plain = answers(eagle_engine(target, {"a": draft}), asked(60, num_speculative_tokens=0))
    assert answers(eagle_engine(target, {"a": draft}, k=3, **more), asked(60)) == plain


def test_a_seed_fixes_the_text_with_and_without_drafts(target: Path, draft: Path) -> None:
    fields = {"temperature": 0.9, "seed": 5}
    plain = answers(eagle_engine(target, {"a": draft}), asked(num_speculative_tokens=0, **fields))
    assert answers(eagle_engine(target, {"a": draft}, k=4), asked(**fields)) == plain


@pytest.mark.parametrize(
    ("kind", "filters", "rolls_out"),
    [
        pytest.param("unseeded", {}, True, marks=pytest.mark.full),
        pytest.param("unseeded", {"top_p": 0.8}, True, marks=pytest.mark.full),
        pytest.param("unseeded", {"top_k": 4, "min_p": 0.05}, False, marks=pytest.mark.full),
        pytest.param("seeded", {"top_p": 0.8}, True, marks=pytest.mark.full),
        pytest.param("mixed", {}, False, marks=pytest.mark.full),
        ("mixed", {"top_k": 4, "min_p": 0.05}, True),
    ],
)
def test_sampled_answers_keep_the_target_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, filters: Any, rolls_out: bool
) -> None:
    """Chi-square over 2,400 answers beside penalised ones, which are drafted step by step."""
    vocab, count, prompt, temperature = 7, 2400, [3, 5, 4], 1.2
    init = {"initializer_range": 0.5}
    target = save_target(tmp_path / "target", vocab=vocab, **init)
    save_draft(new_draft(target, vocabulary=torch.arange(1, 6)), tmp_path / "draft")
    monkeypatch.setattr(EagleDecoder, "rolls_out", rolls_out)
    monkeypatch.setattr(SpeculationController, "early_end", lambda *_: EarlyEnd(0.2))
    engine = eagle_engine(
        target,
        {"a": tmp_path / "draft"},
        others=[{"b": served(tiny_llama(2, layers=1, vocab=vocab))}],
        vocab=vocab,
        eos=-1,
        seed=5,
        support=3,
        max_num_seqs=240,
    )
    asked = [
        request(
            f"{i}",
            prompt,
            temperature=temperature,
            draft="b" if i % 8 == 0 else "a",
            num_speculative_tokens=1 + i % 3,
            seed=i if kind == "seeded" or (kind == "mixed" and i % 3) else None,
            max_tokens=4,
            **filters,
        )
        for i in range(count)
    ]
    # Only the last of these batches has a penalised row.
    other = request("penalised", prompt, presence_penalty=1.0, max_tokens=4, temperature=1.0)
    found = run(engine, [*asked, other])
    records = [own[-1].record for name, own in found.items() if name != "penalised"]
    first = {r.draft_token_ids[0] for r in records if r is not None and r.expert == "a"}
    assert len(first) == 1  # nothing is drawn
    stats = [found[r.request_id][-1].chunk.speculative for r in asked if r.draft == "a"]
    drafted, taken = (
        sum(getattr(own, f"num_{name}_tokens") for own in stats)
        for name in ("draft", "accepted_draft")
    )
    assert 0.02 < taken / drafted < 0.98
    law = law_of_tokens(tiny_llama(1, vocab=vocab, **init), prompt, 3, temperature, **filters)
    drawn = Counter(tuple(tokens_of(found[r.request_id])[:3]) for r in asked)
    assert chi_square(drawn, law) > 1e-3


def test_samples_are_only_drafted_from_the_draft_vocabulary(target: Path, draft: Path) -> None:
    engine = eagle_engine(target, {"a": draft}, k=4)
    records = records_of(engine, asked(temperature=1.2))
    drafted = {int(t) for record in records for t in record.draft_token_ids if t >= 0}
    assert drafted
    assert drafted <= set(SMALL.tolist())
    emitted = {int(t) for record in records for t in record.output_token_ids}
    assert emitted - set(SMALL.tolist())


def test_experts_of_several_vocabularies_run_together(target: Path, tmp_path: Path) -> None:
    folders = {}
    for name, vocabulary in (("a", SMALL), ("b", torch.arange(124, dtype=torch.int32))):
        folders[name] = tmp_path / name
        save_draft(new_draft(target, vocabulary=vocabulary), folders[name])
    both = [*asked(draft="a"), *(dataclasses.replace(r, draft="b") for r in asked())]
    mixed = [dataclasses.replace(r, request_id=f"{i}") for i, r in enumerate(both)]
    alone = [records_of(eagle_engine(target, folders, 64, k=3), [r])[0] for r in mixed]
    apart = {"max_num_seqs": 8, "prefill_chunk": 256, "prefix_cache": False}  # as they are alone
    found = run(eagle_engine(target, folders, 256, k=3, **apart), mixed)
    for r, record in zip(mixed, alone, strict=True):
        own = found[r.request_id][-1].record
        assert own is not None
        assert own.draft_token_ids.tolist() == record.draft_token_ids.tolist()


@pytest.mark.parametrize("ids", [torch.arange(-1, 99), torch.arange(VOCAB - 98, VOCAB + 1)])
def test_a_vocabulary_beyond_the_targets_is_refused(
    target: Path, tmp_path: Path, ids: torch.Tensor
) -> None:
    save_draft(new_draft(target, vocabulary=ids.int()), tmp_path)
    with pytest.raises(ModelError, match="tokens that the target lacks"):
        eagle_engine(target, {"a": tmp_path})


def test_a_vocabulary_that_is_refused_leaves_the_other_drafts_alone(
    target: Path, tmp_path: Path
) -> None:
    folders = {name: tmp_path / name for name in "ab"}
    for folder in folders.values():
        save_draft(new_draft(target, vocabulary=SMALL), folder)
    good = dict(new_draft(target, vocabulary=SMALL).state_dict())
    engine = eagle_engine(target, folders, k=3)
    stack = engine.draft_runner._proposer._stacks["a"]  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="tokens that the target lacks"):
        stack.load_weights("a", 1, good | {"vocabulary": torch.full_like(SMALL, VOCAB)})
    for slot in "ab":
        stack.load_weights(slot, 1, good)
    assert records_of(engine, asked(draft="b"))


@pytest.mark.parametrize(("least", "longest"), [(0.0, {5}), (0.001, {2, 3, 4, 5}), (0.5, {1})])
def test_all_steps_in_one_call_draft_as_one_after_the_other(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least: float, longest: set[int]
) -> None:
    """Rows of several experts, vocabularies and lengths, which also end early."""
    folders, other = {}, torch.arange(124, dtype=torch.int32)
    for name, vocabulary in (("a", SMALL), ("b", other), ("c", SMALL)):
        folders[name] = tmp_path / name
        draft = new_draft(target, vocabulary=vocabulary)
        torch.nn.init.normal_(draft.fuse.weight, std=0.1)
        save_draft(draft, folders[name])
    found = []
    for _ in range(2):
        engine = eagle_engine(target, folders, 64, k=5, prefill_chunk=256)
        proposals: list[Proposal] = []
        original = ColocatedProposer.propose

        def propose(
            proposer: ColocatedProposer,
            rows: Sequence[DraftRow],
            kept: list[Proposal] = proposals,
            own: Any = original,
        ) -> Proposal:
            limits = [max(1, r.num_draft_tokens - i % 2) for i, r in enumerate(rows)]
            given = {"early_end": EarlyEnd(least)}
            rows = [
                dataclasses.replace(r, num_draft_tokens=limit, **given)
                for r, limit in zip(rows, limits, strict=True)
            ]
            kept.append(own(proposer, rows))
            return kept[-1]

        with monkeypatch.context() as patch:
            patch.setattr(ColocatedProposer, "propose", propose)
            run(engine, [dataclasses.replace(r, draft="abca"[i]) for i, r in enumerate(asked())])
        found.append(proposals)
        monkeypatch.setattr(EagleDecoder, "rolls_out", False)
    together, stepwise = found
    assert len(together) == len(stepwise) > 10
    for ours, theirs in zip(together, stepwise, strict=True):
        assert torch.equal(ours.num_drafted, theirs.num_drafted)
        assert ours.token_ids.shape == theirs.token_ids.shape
        for row, count in enumerate(ours.num_drafted.tolist()):
            assert torch.equal(ours.token_ids[row, :count], theirs.token_ids[row, :count])
            probs = ours.token_probs[row, :count], theirs.token_probs[row, :count]
            torch.testing.assert_close(*probs, rtol=1e-4, atol=1e-6)
    lengths = {n for p in together for n in p.num_drafted.tolist()}
    assert max(lengths) in longest


def with_basis(target: Path, folder: Path, basis: torch.Tensor, norm: float | None = None) -> Path:
    draft = new_draft(target, vocabulary=SMALL)
    torch.manual_seed(3)
    torch.nn.init.normal_(draft.fuse.weight, std=0.1)
    if norm is not None:
        torch.nn.init.constant_(draft.trunk.norm.weight, norm)
    draft.basis = basis
    save_draft(draft, folder)
    return folder


def test_a_basis_finds_the_token_of_the_whole_head(target: Path, tmp_path: Path) -> None:
    """A whole one always; one of few directions mostly, by states of other prompts."""
    if kernels_for(DEVICE, torch.float32) is None:
        pytest.skip("needs the kernels")
    whole, _ = torch.linalg.qr(torch.randn(32, 32, generator=torch.Generator().manual_seed(4)))
    plain = with_basis(target, tmp_path / "none", torch.zeros(8, 32))
    engine = eagle_engine(target, {"a": plain}, 64, k=5)
    records = records_of(engine, [request("r", [7, 8, 9], max_tokens=60, ignore_eos=True)])
    loaded = load_draft(plain, target, torch.float32, DEVICE)
    few = state_basis(loaded, [make_batch(records, 512)])
    assert few.shape == (8, 32)
    torch.testing.assert_close(few @ few.T, torch.eye(8), rtol=0, atol=1e-4)
    found = []
    for i, basis in enumerate((torch.zeros(8, 32), whole, few)):
        folder = with_basis(target, tmp_path / f"{i}", basis)
        engine = eagle_engine(target, {"a": folder}, 64, k=1)
        own = records_of(engine, asked())
        found.append([token for record in own for token in record.draft_token_ids.tolist()])
    none, by_whole, by_few = found
    assert len(set(none)) > 5
    assert by_whole == none
    same = [a == b for a, b in zip(none, by_few, strict=True)]
    assert len(same) > 50
    assert sum(same) > 0.6 * len(same)


def test_experts_with_bases_of_several_sizes_run_together(target: Path, tmp_path: Path) -> None:
    whole, _ = torch.linalg.qr(torch.randn(32, 32, generator=torch.Generator().manual_seed(4)))
    longer = torch.cat([whole, torch.zeros(16, 32)])
    bases = {"a": longer, "b": whole}
    folders = {name: with_basis(target, tmp_path / name, own) for name, own in bases.items()}
    mixed = [dataclasses.replace(r, draft="abab"[i]) for i, r in enumerate(asked())]
    plain = with_basis(target, tmp_path / "none", torch.zeros(8, 32))
    exact = records_of(eagle_engine(target, dict.fromkeys("ab", plain), 64, k=5), mixed)
    engine = eagle_engine(target, folders, 64, k=5, prefill_chunk=256)
    found = run(engine, mixed)
    assert engine.draft_failures == 0
    for r, record in zip(mixed, exact, strict=True):
        own = found[r.request_id][-1].record
        assert own is not None
        assert own.draft_token_ids.tolist() == record.draft_token_ids.tolist()


@pytest.mark.usefixtures("deepspeed")
def test_weights_draft_by_the_basis_that_comes_with_them(target: Path, tmp_path: Path) -> None:
    """What a candidate publishes has one; without one the whole head drafts, for all of a round."""
    unknown = torch.zeros(8, 32)
    before = with_basis(target, tmp_path / "before", torch.eye(8, 32))
    records = records_of(eagle_engine(target, {"a": before}, 64, k=3), asked())
    settings = DistillerSettings(dtype="float32", target_path=str(target))
    candidate = Candidate("sql", TrainerSettings({"sql": str(before)}, settings))
    learn(candidate, records)
    state = candidate.compare(records, lambda: None).state
    assert not state["basis"].any()  # the one before is of no use to it
    waits: list[None] = []
    candidate.add_basis(state, records, lambda: waits.append(None))
    assert len(waits) == len(records)
    own = state["basis"].float()
    torch.testing.assert_close(own @ own.T, torch.eye(8), rtol=0, atol=0.05)
    for name, basis in (("none", unknown), ("own", own)):
        after = read_draft(before)
        after.load_state_dict(state | {"basis": basis})
        save_draft(after, tmp_path / name)
        swapped = eagle_engine(target, {"a": before, "b": before}, 64, k=3)
        swapped.updates.put(SwapWeights("a", 1, after.state_dict()))
        started = eagle_engine(target, {"a": tmp_path / name, "b": before}, 64, k=3)
        found = [
            [record.draft_token_ids.tolist() for record in records_of(engine, asked())]
            for engine in (swapped, started)
        ]
        assert found[0] == found[1]


@pytest.mark.usefixtures("deepspeed")
def test_weights_of_before_there_was_a_basis_are_served_and_learnt_on(
    target: Path, tmp_path: Path
) -> None:
    folder = with_basis(target, tmp_path / "d", torch.eye(8, 32))
    old = {name: t for name, t in read_draft(folder).state_dict().items() if name != "basis"}
    old["fuse.weight"] = (old["fuse.weight"] * 0.9).bfloat16()
    engine = eagle_engine(target, {"a": folder}, 64, k=3)
    engine.updates.put(SwapWeights("a", 7, old))
    records = records_of(engine, asked())
    assert {record.weight_version for record in records} == {7}
    whole = read_draft(folder)
    whole.load_state_dict(old | {"basis": torch.zeros(8, 32)})
    save_draft(whole, tmp_path / "whole")
    started = records_of(eagle_engine(target, {"a": tmp_path / "whole"}, 64, k=3), asked())
    drafted = [[r.draft_token_ids.tolist() for r in found] for found in (records, started)]
    assert drafted[0] == drafted[1]  # and not by the basis of the weights before
    settings = DistillerSettings(dtype="float32", target_path=str(target))
    candidate = Candidate("sql", TrainerSettings({"sql": str(folder)}, settings))
    candidate.load(7, flatten(old))
    served = candidate.compare(records, lambda: None).served
    assert np.isfinite(served).all()
    without = tmp_path / "without"
    shutil.copytree(folder, without)
    tensors = load_file(without / "model.safetensors")
    for basis in ({}, {"basis": torch.empty(0, 32)}):
        kept = {name: t for name, t in tensors.items() if name != "basis"}
        save_file(kept | basis, without / "model.safetensors", metadata={"format": "pt"})
        assert read_draft(without).basis.shape == (8, 32)


def test_states_that_are_not_finite_draft_nothing_by_a_basis(target: Path, tmp_path: Path) -> None:
    folder = with_basis(target, tmp_path / "d", torch.eye(32), float("nan"))
    engine = eagle_engine(target, {"a": folder}, 64, k=3)
    plain = engine_of(load_causal_lm(target, torch.float32, DEVICE), [])
    found = run(engine, asked(), draft_failures=True)
    assert [tokens_of(found[r.request_id]) for r in asked()] == answers(plain, asked())
    assert engine.draft_failures > 0


@pytest.mark.parametrize("positions", [None, 160])
def test_in_bfloat16_no_draft_changes_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, positions: int | None
) -> None:
    """Weights in 8 bits, a draft that is broken, answers to the last position, blocks for few."""
    if kernels_for(torch.device("cpu"), torch.bfloat16) is None:
        pytest.skip("no C++ compiler: bits depend on the batch")
    target = save_target(tmp_path / "target", hidden=128)
    folders: dict[str, Path] = {}
    for name, vocabulary in (
        ("a", SMALL),
        ("b", torch.arange(124, dtype=torch.int32)),
        ("c", SMALL),
    ):
        draft, folders[name] = new_draft(target, vocabulary=vocabulary), tmp_path / name
        torch.nn.init.normal_(draft.fuse.weight, std=0.1)
        if name == "b":
            draft.fuse.weight.data[0, 0] = torch.nan
        save_draft(draft, folders[name])
    monkeypatch.setattr(SpeculationController, "early_end", lambda *_: EarlyEnd(0.05))
    asked_for = [
        request(
            f"{i}",
            [(7 * i + 5 * at) % 290 + 3 for at in range(length)],
            max_tokens=MAX_LEN - length,
            ignore_eos=True,
            draft="acab"[i % 4],
        )
        for i, length in enumerate((20, 2, 1, 31, 80, 60, 5, 90))
    ]
    found = []
    for k in (7, 0):
        engine = eagle_engine(
            target, folders, 64, torch.bfloat16, k=k, draft_positions=positions, kv_positions=192
        )
        outputs = run(engine, asked_for, draft_failures=True)
        found.append({name: tokens_of(own) for name, own in outputs.items()})
        drafted = {n for own in outputs.values() for o in own for n, _ in o.chunk.rounds}
        assert max(drafted, default=0) == k
        assert (engine.draft_failures > 0) == (k > 0)
    assert found[0] == found[1]


def test_a_row_ends_before_the_token_that_would_hardly_be_accepted() -> None:
    probs = torch.tensor([[0.1, 0.9, 0.9], [0.9, 0.5, 0.9], [0.9, 0.9, 0.2], [1.0, 1.0, torch.nan]])
    table = torch.tensor([NEVER.acceptance] * 4)
    assert kept_lengths(probs, torch.tensor([0.3] * 4), table).tolist() == [1, 3, 2, 2]
    assert kept_lengths(probs, torch.zeros(4), table).tolist() == [3] * 4
    sure = torch.full_like(table, 0.95)  # whatever the draft says
    assert kept_lengths(probs, torch.tensor([0.3] * 4), sure).tolist() == [3] * 4


def test_records_hold_the_states_that_the_head_read(target: Path, draft: Path) -> None:
    records = records_of(eagle_engine(target, {"a": draft}, k=4), asked())
    model = load_causal_lm(target, torch.float32, attention="eager")
    for record in map(decode, map(encode, records)):
        text = [*record.prompt_token_ids.tolist(), *record.output_token_ids.tolist()][:-1]
        with torch.inference_mode():
            whole = model.model(torch.tensor([text])).last_hidden_state[0]
        assert record.hidden is not None
        own = torch.from_numpy(record.hidden.copy()).view(torch.bfloat16).float()
        torch.testing.assert_close(own, whole, rtol=0.02, atol=0.02)


def test_states_line_up_with_a_text_that_is_cut(target: Path, draft: Path) -> None:
    """A prompt is cut at its start; states that are not recorded are zeros."""
    record = records_of(eagle_engine(target, {"a": draft}), [request("r", PROMPTS[3])])[0]
    assert record.hidden is not None
    whole = make_batch([record], 512).hidden
    part = dataclasses.replace(record, hidden=record.hidden[25:], hidden_start=25)
    cut = make_batch([part], 32)
    assert whole is not None
    assert cut.hidden is not None
    start = len(record.prompt_token_ids) - int(cut.columns[0]) - 1
    assert 0 < start < 25
    known = 25 - start
    assert not cut.hidden[0, :known].any()
    assert torch.equal(cut.hidden[0, known:32], whole[0, 25 : start + 32])


def test_drafts_are_those_of_the_trained_module(target: Path, draft: Path) -> None:
    """Served steps equal the training's: the first reads the target's states, others its own."""
    model = load_draft(draft, target, torch.float32, torch.device("cpu")).eval()
    record = records_of(eagle_engine(target, {"a": draft}, k=3), [request("r", PROMPTS[0])])[0]
    batch = make_batch([record], 512)
    assert batch.hidden is not None
    with torch.inference_mode():
        logits = score_positions(model, batch, lambda own, _: own)
    ids = model.get_buffer(VOCABULARY)
    best = [ids[own[:, :-1].argmax(-1)].tolist() for own in logits]
    drafted, accepted = record.draft_token_ids.tolist(), record.accepted.tolist()
    step, agreed, compared = 0, 0, 0
    for position, (token, taken) in enumerate(zip(drafted, accepted, strict=True)):
        if token < 0:
            step = 0
            continue
        compared += 1
        agreed += token == best[step][position]
        step = (step + 1) % 3 if taken == 1 else 0
    assert compared > 5
    assert agreed >= 0.9 * compared  # states are recorded in bfloat16


@pytest.mark.usefixtures("deepspeed")
def test_a_draft_learns_its_targets_answers_and_is_swapped_in(target: Path, draft: Path) -> None:
    engine = eagle_engine(target, {"a": draft}, k=3)
    before = run(engine, asked())
    records = records_of(engine, asked())
    settings = DistillerSettings(
        learning_rate=1e-2, dtype="float32", average_decay=0.0, target_path=str(target)
    )
    distiller = Distiller(str(draft), settings)
    losses = [distiller.micro_step(make_batch(records, 512)).loss for _ in range(60)]
    assert losses[-1] < 0.5 * losses[0]
    state = distiller.state_dict()
    assert state[VOCABULARY].dtype is torch.int32
    engine.updates.put(SwapWeights("a", 1, state))
    after = run(engine, asked())

    def taken(found: dict[str, Any]) -> int:
        own = [outputs[-1].chunk.speculative for outputs in found.values()]
        return sum(stats.num_accepted_draft_tokens for stats in own)

    assert [tokens_of(after[i]) for i in after] == [tokens_of(before[i]) for i in after]
    assert taken(after) > taken(before) + 10


def test_an_added_expert_drafts_as_the_one_that_it_copies(target: Path, draft: Path) -> None:
    engine = eagle_engine(target, {"a": draft}, 64, k=3)
    before = records_of(engine, asked())
    engine.updates.put(AddExpert("new", "a"))
    added = [dataclasses.replace(r, request_id=f"n{r.request_id}", draft="new") for r in asked()]
    while "new" not in engine.drafts():
        engine.step()
    for one, other in zip(before, records_of(engine, added), strict=True):
        assert other.output_token_ids.tolist() == one.output_token_ids.tolist()
        assert other.draft_token_ids.tolist() == one.draft_token_ids.tolist()


def test_a_new_version_may_bring_another_vocabulary(target: Path, draft: Path) -> None:
    engine = eagle_engine(target, {"a": draft}, k=3)
    plain = answers(engine, asked(num_speculative_tokens=0))
    state = {name: tensor.clone() for name, tensor in read_draft(draft).state_dict().items()}
    state[VOCABULARY] = torch.arange(len(SMALL), dtype=torch.int32)
    engine.updates.put(SwapWeights("a", 1, state))
    records = records_of(engine, asked())
    assert [record.output_token_ids.tolist() for record in records] == plain
    drafted = {int(t) for record in records for t in record.draft_token_ids if t >= 0}
    assert drafted <= set(range(len(SMALL)))


@pytest.mark.usefixtures("deepspeed")
def test_shares_of_a_batch_have_the_gradient_of_the_whole(target: Path, draft: Path) -> None:
    records = records_of(eagle_engine(target, {"a": draft}, k=3), asked())
    settings = DistillerSettings(dtype="float32", target_path=str(target))
    whole = make_shares([make_batch(records, 512)], settings.objective)[0]
    distiller = Distiller(str(draft), settings)
    draft_module = distiller._engine.module

    def gradient(parts: Sequence[Any]) -> list[torch.Tensor]:
        draft_module.zero_grad()
        for part in parts:
            draft_module(part.batch, part.weights)[0].backward()
        return [p.grad.clone() for p in draft_module.parameters()]

    for one, many in zip(gradient([whole]), gradient(split_share(whole, 3)), strict=True):
        torch.testing.assert_close(many, one, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("tokens", [None, 10**6], ids=["all", "drawn"])
def test_the_loss_in_parts_is_the_loss_of_all_positions(
    target: Path, draft: Path, monkeypatch: pytest.MonkeyPatch, tokens: int | None
) -> None:
    from paceline.actors.training import eagle
    from paceline.actors.training.losses import objective, position_weights

    records = records_of(eagle_engine(target, {"a": draft}, k=3), asked())
    batch, settings = make_batch(records, 512), ObjectiveSettings()
    weights = position_weights([batch], settings)
    model = load_draft(draft, target, torch.float32, torch.device("cpu"))
    monkeypatch.setattr(eagle, "_POSITIONS", 16)
    effort = eagle.Effort(tokens=tokens, rng=np.random.default_rng(0))
    found = eagle.eagle_objective(model, batch, settings, weights, effort)
    found.loss.backward()
    parts = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    own, steps = eagle.draft_vocabulary(model, batch), eagle.step_states(model, batch)
    shares = np.array([eagle.STEP_DECAY**i for i in range(len(steps))])
    goals = [
        objective(eagle.head_logits(model, states), own, settings, weights) for states in steps
    ]
    whole = sum(share * goal.loss for share, goal in zip(shares / shares.sum(), goals, strict=True))
    assert isinstance(whole, torch.Tensor)
    whole.backward()
    torch.testing.assert_close(found.loss, whole)
    for one, other in zip(parts, (p.grad for p in model.parameters()), strict=True):
        assert other is not None
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("deepspeed")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_training_the_targets_ends_stay_in_its_dtype(
    target: Path, draft: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    """In float32 those of a large target, which are not trained, would take gigabytes."""
    records = records_of(eagle_engine(target, {"a": draft}), asked())
    folder = tmp_path / "target"
    load_causal_lm(str(target), torch.bfloat16).save_pretrained(folder)
    own = tmp_path / "draft"
    save_draft(new_draft(folder, vocabulary=SMALL), own)
    settings = DistillerSettings(target_path=str(folder), dtype=str(dtype).partition(".")[2])
    distiller = Distiller(str(own), settings)
    model = distiller.served(None)
    assert isinstance(model, EagleDraft)
    assert model.ends.embedding.dtype == model.ends.head.dtype == torch.bfloat16
    assert model.dtype == model.head.dtype == dtype
    [share] = make_shares([make_batch(records, 512)], settings.objective)
    assert 0.0 < distiller.learn(share).expected_acceptance < 1.0


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("layers", [1, 2])
def test_labelled_positions_alone_have_the_states_of_whole_texts(
    tmp_path: Path, kind: str, layers: int
) -> None:
    from paceline.actors.training import eagle

    folder = save_target(tmp_path / "target", kind)
    save_draft(new_draft(folder, layers), tmp_path / "draft")
    model = load_draft(tmp_path / "draft", folder, torch.float32, torch.device("cpu"))
    torch.nn.init.normal_(model.fuse.weight, std=0.2)
    batch = make_batch(records_of(eagle_engine(folder, {"a": tmp_path / "draft"}), asked()), 512)
    assert batch.hidden is not None
    lengths = torch.zeros(batch.num_records, dtype=torch.int64)
    lengths = lengths.scatter_reduce(0, batch.rows, batch.columns + 1, "amax")
    rows, columns = (torch.arange(int(lengths.max())) < lengths[:, None]).nonzero().T
    texts = dataclasses.replace(batch, rows=rows, columns=columns)
    labelled = (lengths.cumsum(0) - lengths)[batch.rows] + batch.columns
    found: list[list[torch.Tensor]] = []
    gradients: list[list[torch.Tensor]] = []
    for given, at in ((batch, torch.arange(batch.num_positions)), (texts, labelled)):
        model.zero_grad()
        states = [state[at] for state in step_states(model, given)]
        torch.stack(states).square().sum().backward()
        found.append([state.detach() for state in states])
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)
    with torch.inference_mode():
        inputs = model.inputs(batch.input_ids, eagle.shifted(batch.hidden.float()))
        whole = model.trunk(inputs_embeds=inputs).last_hidden_state
    torch.testing.assert_close(found[0][0], whole[batch.rows, batch.columns], rtol=1e-4, atol=1e-4)


def test_a_step_sees_the_tokens_before_and_its_own_drafts(target: Path, draft: Path) -> None:
    """A later token, or a state that is not known yet, changes no earlier prediction."""
    record = records_of(eagle_engine(target, {"a": draft}), [request("r", PROMPTS[0])])[0]
    model = load_draft(draft, target, torch.float32, torch.device("cpu")).eval()
    torch.nn.init.normal_(model.fuse.weight, std=0.2)
    batch = make_batch([record], 512)
    assert batch.hidden is not None
    changed = batch.hidden.clone()
    column = int(batch.columns[8])
    changed[0, column - 2] = 1.0
    with torch.inference_mode():
        before = step_states(model, batch)
        after = step_states(model, dataclasses.replace(batch, hidden=changed))
    # The state of column c - 2 is read at c - 1 in the first step: the second drafted token at c
    # still follows from it, the third at c does not.
    for step, first in ((0, 7), (1, 8), (2, 9)):
        same = (before[step] == after[step]).all(dim=1)
        assert same[:first].all()
        assert not same[first]


def test_a_draft_is_saved_and_made_for_one_target(target: Path, tmp_path: Path) -> None:
    model = new_draft(target)
    model.basis.copy_(torch.eye(8, 32))
    save_draft(model, tmp_path / "draft")
    assert is_eagle(tmp_path / "draft")
    assert not is_eagle(target)
    assert not is_eagle(tmp_path)
    again = read_draft(tmp_path / "draft")
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], tensor, rtol=0.01, atol=0.01)
    assert again.has_basis
    loaded = load_draft(tmp_path / "draft", target, torch.float32, torch.device("cpu"))
    assert loaded.has_basis
    twin = loaded.twin()
    assert not twin.has_basis  # its weights are random
    twin.load_state_dict(loaded.state_dict())
    assert twin.has_basis
    tiny_llama(7, vocab=VOCAB).save_pretrained(tmp_path / "other")
    assert target_mark(tmp_path / "other") != target_mark(target)
    with pytest.raises(ModelError, match="made for another target"):
        load_draft(tmp_path / "draft", tmp_path / "other", torch.float32, torch.device("cpu"))
    with pytest.raises(ModelError, match="no draft can be made from models of type gpt2"):
        new_draft(save_target(tmp_path / "gpt2", "gpt2"))


def test_the_first_draft_is_the_targets_first_layer(target: Path) -> None:
    """Its states are those that the target's own first layer, norm and head make."""
    model = new_draft(target)
    model.ends = load_draft_ends(target)
    full = load_causal_lm(target, torch.float32, attention="eager")
    ids = torch.tensor([PROMPTS[0]])
    with torch.inference_mode():
        hidden = torch.randn(1, len(PROMPTS[0]), 32)
        own = model.trunk(inputs_embeds=model.inputs(ids, hidden)).last_hidden_state
        del full.model.layers[1:]
        expected = full.model(ids).last_hidden_state
    torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-4)


def load_draft_ends(target: Path) -> Any:
    from paceline.actors.weights.target_ends import read_target_ends

    return read_target_ends(str(target), torch.device("cpu"), torch.float32)


def test_a_vocabulary_grows_by_what_a_topic_uses() -> None:
    ids = torch.arange(2000, dtype=torch.int32)
    counts = {5: 900, 1500: 50, 1999: 1, 3000: 40, 4000: 30, 4990: 20}
    grown = grown_vocabulary(ids, counts, 5000, {1998})
    assert len(grown) == len(ids)
    assert set(grown.tolist()) - set(ids.tolist()) == {3000, 4000, 4990}
    assert set(ids.tolist()) - set(grown.tolist()) == {1997, 1996, 1995}
    assert grown_vocabulary(grown, counts, 5000, {1998}) is grown
    assert grown_vocabulary(ids, {5: 9000, 3000: 40}, 5000, ()) is ids


@pytest.mark.usefixtures("deepspeed")
@pytest.mark.parametrize("loss", ["forward_kl", "hard_label"])
def test_adapters_and_other_losses_train_a_draft(target: Path, draft: Path, loss: Any) -> None:
    records = records_of(eagle_engine(target, {"a": draft}, k=3), asked())
    settings = DistillerSettings(
        learning_rate=2e-2,
        dtype="float32",
        adapter="lora",
        average_decay=0.0,
        target_path=str(target),
        objective=ObjectiveSettings(loss=loss),
    )
    distiller = Distiller(str(draft), settings)
    batch = make_batch(records, 512)
    losses = [distiller.micro_step(batch).loss for _ in range(30)]
    assert losses[0] < 30.0
    assert losses[-1] < 0.9 * losses[0]
    assert distiller.state_dict().keys() == read_draft(draft).state_dict().keys()


@pytest.mark.usefixtures("deepspeed")
def test_a_candidate_takes_up_its_topics_tokens(target: Path, draft: Path) -> None:
    records = records_of(eagle_engine(target, {"a": draft}, k=3), asked(temperature=1.5))
    settings = TrainerSettings(
        {"sql": str(draft)}, DistillerSettings(dtype="float32", target_path=str(target))
    )
    candidate = Candidate("sql", settings)
    before = candidate._distiller.vocabulary
    assert before is not None
    before = before.clone()
    candidate.grow_vocabulary(records)
    assert torch.equal(before, candidate._distiller.vocabulary)  # nearly all are single characters
    candidate._distiller.plain_tokens = set(range(40))
    candidate.grow_vocabulary(records)
    now = candidate._distiller.vocabulary
    assert now is not None
    used = token_counts(records)
    seen = sum(used[token] for token in now.tolist())
    assert seen > sum(used[token] for token in before.tolist())
    assert set(range(40)) & set(before.tolist()) <= set(now.tolist())
    changed = torch.arange(len(before), dtype=torch.int32)
    candidate._distiller.set_vocabulary(changed)
    learn(candidate, records)
    scores, served, state, *_ = candidate.compare(records, lambda: None)
    assert torch.equal(state[VOCABULARY], changed)
    assert len(scores) == len(served) == len(records)


@pytest.mark.usefixtures("deepspeed")
def test_coverage_is_of_the_served_vocabulary_and_comes_back_with_the_next_version(
    target: Path, draft: Path, tmp_path: Path
) -> None:
    records = records_of(eagle_engine(target, {"a": draft}), asked(temperature=1.5))
    probs = np.concatenate([np.exp(r.target_top_logprobs.astype(np.float32)) for r in records])
    ids = np.concatenate([r.target_top_ids for r in records])
    lacking = np.bincount(ids[:, 0], minlength=VOCAB).argsort()[-20:]  # the most probable tokens
    vocabulary = np.setdiff1d(np.arange(VOCAB - 30), lacking).astype(np.int32)
    covered = np.where(np.isin(ids, vocabulary), probs, 0.0).sum(axis=1) / probs.sum(axis=1)
    save_draft(new_draft(target, vocabulary=torch.from_numpy(vocabulary)), tmp_path / "draft")
    settings = TrainerSettings(
        {"sql": str(tmp_path / "draft")},
        DistillerSettings(dtype="float32", target_path=str(target)),
    )
    candidate = Candidate("sql", settings)
    before = candidate.coverage(records)
    assert before == pytest.approx(covered.mean(), abs=1e-5)
    assert before < 0.7
    candidate._distiller.plain_tokens = set()
    candidate.grow_vocabulary(records)
    assert candidate.coverage(records) == before  # what is served has not changed
    scores, _, state, *_ = candidate.compare(records, lambda: None)
    candidate.mark_published(1, state, records, scores)
    after = candidate.coverage(records)
    assert after is not None
    assert after > 0.9


def test_vocabularies() -> None:
    assert first_tokens(50, 100).tolist() == list(range(50))
    few = first_tokens(1000, 64).tolist()
    assert few == [*range(60), *range(996, 1000)]
    chosen = choose_vocabulary({7: 3, 400: 9, 2000: 5}, {1, 999}, 1000, 6)
    assert chosen.tolist() == [0, 1, 2, 7, 400, 999]
    assert chosen.dtype is torch.int32
