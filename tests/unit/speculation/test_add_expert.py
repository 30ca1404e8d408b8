"""Experts that are added while requests run: no text changes, other drafts are unaffected."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from architectures import ARCHITECTURES, make
from engines import engine_of, request, run, served, tokens_of
from torch import Tensor
from unit.engine.test_graphs import graphed

from paceline.actors.engine import fused as fused_layers
from paceline.actors.engine.engine import Engine, StepOutput
from paceline.actors.general import GENERAL
from paceline.actors.speculation.pending_updates import AddExpert, SwapWeights
from paceline.actors.weights.slots import in_canary

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("llama", {"tie_word_embeddings": True}),
    "untied": ("llama", {"tie_word_embeddings": False}),
    "norms of queries": ("qwen3", {}),
    "modules": ("gpt2", {}),
}
SHARE = 0.5
LAYERS = 2


def model(kind: str, seed: int) -> Any:
    name, changes = KINDS[kind]
    return make(ARCHITECTURES[name](LAYERS, **changes), seed)


def state(kind: str, seed: int) -> dict[str, Tensor]:
    found: dict[str, Tensor] = model(kind, seed).state_dict()
    return found


def engine_with(kind: str, experts: Iterable[str] = "ab", **more: Any) -> Engine:
    """The target is of seed 1, so that a draft of that seed is always accepted."""
    seeds = {name: 2 + i for i, name in enumerate(experts)}
    names = {**seeds, "a@0": 2} | ({f"{n}@candidate": s for n, s in seeds.items()} if more else {})
    drafts = {name: served(model(kind, seed)) for name, seed in names.items()}
    return engine_of(served(model(kind, 1)), [drafts], max_num_seqs=6, **more)


def asked(number: int, draft: str, **fields: Any) -> Any:
    return request(f"r{number}", [5 + number, 9, 11, 4 + number], draft=draft, **fields)


def crowd() -> list[Any]:
    return [asked(i, "ab"[i % 2], max_tokens=40, ignore_eos=True) for i in range(4)]


def stepped(engine: Engine, outputs: dict[str, list[StepOutput]]) -> None:
    for output in engine.step():
        outputs.setdefault(output.request_id, []).append(output)


def plain(kind: str, number: int, **fields: Any) -> list[int]:
    engine = engine_of(served(model(kind, 1)), [], k=0)
    found = run(engine, [asked(number, "off", **fields)])
    return tokens_of(found[f"r{number}"])


def accepted_all(outputs: list[StepOutput]) -> bool:
    outcome = outputs[-1].outcome
    return outcome is not None and 0 < outcome.rounds == outcome.accepted


@pytest.mark.parametrize("kind", KINDS)
def test_an_expert_is_added_while_answers_stream(kind: str) -> None:
    engine, undisturbed = engine_with(kind), run(engine_with(kind), crowd())
    outputs: dict[str, list[StepOutput]] = {}
    for own in crowd():
        engine.add(own)
    for _ in range(3):
        stepped(engine, outputs)
    engine.updates.put(AddExpert("c", "a"))
    engine.updates.put(SwapWeights("c", 7, state(kind, 1)))
    rounds = 0
    while "c" not in engine.drafts():
        stepped(engine, outputs)
        rounds += 1
    assert rounds >= (3 if kind != "modules" else 2)  # a part a round
    engine.add(asked(8, "c", max_tokens=30, ignore_eos=True))
    for name, parts in run(engine).items():
        outputs.setdefault(name, []).extend(parts)
    assert engine.draft_failures == 0
    for name, parts in undisturbed.items():  # round by round: no draft was lost or read again
        assert [o.chunk.token_ids for o in outputs[name]] == [o.chunk.token_ids for o in parts]
    assert tokens_of(outputs["r8"]) == plain(kind, 8, max_tokens=30, ignore_eos=True)
    assert accepted_all(outputs["r8"])
    record = outputs["r8"][-1].record
    assert record is not None
    assert (record.expert, record.weight_version) == ("c", 7)


@pytest.mark.parametrize("kind", ["tied", "modules"])
def test_weights_of_old_and_new_experts_are_swapped_afterwards(kind: str) -> None:
    engine = engine_with(kind)
    for name in ("c", "d"):
        engine.updates.put(AddExpert(name, "a"))
    run(engine)
    assert engine.drafts() == {"a": 0, "b": 0, "a@0": 0, "c": 0, "c@0": 0, "d": 0, "d@0": 0}
    for name in "abcd":
        first = run(engine, [asked(1, name, max_tokens=24, ignore_eos=True)])
        assert not accepted_all(first["r1"])
        engine.updates.put(SwapWeights(name, 3, state(kind, 1)))
        again = run(engine, [asked(2, name, max_tokens=24, ignore_eos=True)])
        assert accepted_all(again["r2"]), name
    initial = run(engine, [asked(3, "c@0", max_tokens=24, ignore_eos=True)])["r3"]
    like = run(engine, [asked(3, "a@0", max_tokens=24, ignore_eos=True)])["r3"]
    assert [o.chunk.token_ids for o in initial] == [o.chunk.token_ids for o in like]


def test_several_experts_draft_in_one_round() -> None:
    engine = engine_with("tied")
    engine.updates.put(AddExpert("c", "a"))
    engine.updates.put(SwapWeights("c", 7, state("tied", 1)))
    run(engine)
    batch = [asked(i, "abc"[i % 3], max_tokens=30, ignore_eos=True) for i in range(6)]
    outputs = run(engine, batch)
    for i in range(6):
        assert tokens_of(outputs[f"r{i}"]) == plain("tied", i, max_tokens=30, ignore_eos=True)
        assert accepted_all(outputs[f"r{i}"]) == ("abc"[i % 3] == "c")


def test_a_new_expert_has_a_candidate_slot_if_the_others_have_one() -> None:
    engine = engine_with("tied", canary_share=SHARE)
    engine.updates.put(AddExpert("c", "a"))
    engine.updates.put(SwapWeights("c", 1, state("tied", 4)))
    engine.updates.put(SwapWeights("c@candidate", 2, state("tied", 1)))
    run(engine)
    assert engine.drafts()["c@candidate"] == 2
    names = range(9)
    outputs = run(engine, [asked(i, "c", max_tokens=30, ignore_eos=True) for i in names])
    inside = [i for i in names if in_canary("c", f"r{i}", SHARE)]
    assert 0 < len(inside) < len(names)
    for i in names:
        assert accepted_all(outputs[f"r{i}"]) == (i in inside)


def test_recorded_forwards_do_not_read_what_has_moved() -> None:
    def answers(*, replay: bool) -> list[list[int]]:
        engine = engine_with("tied")
        stack = engine.draft_runner._proposer._stacks["a"]  # type: ignore[attr-defined]
        capture = graphed(stack.runner) if replay else None
        found = run(engine, [asked(1, "a", max_tokens=40, ignore_eos=True)])
        assert capture is None or capture.replayed > 0
        engine.updates.put(AddExpert("c", "a"))
        for i, name in enumerate("abc", 2):  # one expert at a time: mixed ones are not recorded
            engine.updates.put(SwapWeights(name, 2, state("tied", 1)))
            outputs = run(engine, [asked(i, name, max_tokens=40, ignore_eos=True)])
            assert accepted_all(outputs[f"r{i}"])
            found |= outputs
        assert capture is None or capture.replayed > capture.captured > 0
        return [tokens_of(parts) for parts in found.values()]

    assert answers(replay=True) == answers(replay=False)


def test_an_expert_that_cannot_be_added_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_with("tied")
    before = engine.drafts()
    engine.updates.put(AddExpert("c", "unknown"))
    engine.updates.put(AddExpert("a", "b"))
    run(engine)
    assert engine.drafts() == before
    extended, calls = fused_layers.Layer.extended, []

    def breaks(layer: Any, layers: Any, count: int) -> Any:
        calls.append(layer)
        if len(calls) == LAYERS:
            raise MemoryError
        return extended(layer, layers, count)

    with monkeypatch.context() as broken:
        broken.setattr(fused_layers.Layer, "extended", breaks)
        engine.updates.put(AddExpert("c", "a"))
        run(engine)
    assert engine.drafts() == before
    engine.updates.put(SwapWeights("b", 2, state("tied", 1)))
    outputs = run(engine, [asked(1, "a"), asked(2, "b"), asked(3, "c")])
    for i in (1, 2, 3):
        assert tokens_of(outputs[f"r{i}"]) == plain("tied", i)
    assert accepted_all(outputs["r2"])
    engine.updates.put(AddExpert("c", "a"))
    engine.updates.put(SwapWeights("c", 2, state("tied", 1)))
    run(engine)
    assert accepted_all(run(engine, [asked(4, "c", max_tokens=24, ignore_eos=True)])["r4"])


def test_an_expert_that_is_not_here_drafts_as_general() -> None:
    engine = engine_with("tied", ("a", GENERAL))
    engine.updates.put(SwapWeights(GENERAL, 3, state("tied", 1)))
    engine.updates.put(AddExpert("c", "unknown"))
    answer = plain("tied", 1, max_tokens=24, ignore_eos=True)
    parts = run(engine, [asked(1, "c", max_tokens=24, ignore_eos=True)])["r1"]
    assert tokens_of(parts) == answer
    assert accepted_all(parts)
    outcome = parts[-1].outcome
    assert outcome is not None
    assert (outcome.expert, outcome.weight_version) == (GENERAL, 3)
    for draft in ("c@0", "off"):  # general's initial weights are not here either
        parts = run(engine, [asked(1, draft, max_tokens=24, ignore_eos=True)])["r1"]
        assert tokens_of(parts) == answer
        assert parts[-1].outcome is None


@pytest.mark.parametrize("kind", ["tied", "untied", "norms of queries"])
def test_running_out_of_memory_at_any_allocation_changes_nothing(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later swaps work, and the memory of the failed attempt is freed."""
    engine, left = engine_with(kind), [0]
    decoder = engine.draft_runner._proposer._stacks["a"].runner.decoder  # type: ignore[attr-defined]
    new_empty = Tensor.new_empty

    def short(allocate: Any) -> Any:
        def allocated(*arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            return allocate(*arguments, **options)

        return allocated

    def experts() -> set[int]:
        return {len(weight) for weight in (own.weight for own in decoder.linears())}

    failures = 0
    while "c" not in engine.drafts():
        failures += 1
        left[0] = failures
        with monkeypatch.context() as scarce:
            scarce.setattr(Tensor, "new_empty", short(new_empty))
            engine.updates.put(AddExpert("c", "a"))
            run(engine)
        if "c" in engine.drafts():
            break
        assert experts() == {3}
        for version, seed in ((failures * 2, 1), (failures * 2 + 1, 3)):
            engine.updates.put(SwapWeights("b", version, state(kind, seed)))
            found = run(engine, [asked(1, "b", max_tokens=12, ignore_eos=True)])["r1"]
            assert accepted_all(found) == (seed == 1)
    assert experts() == {4}
    assert failures > LAYERS * 6
    engine.updates.put(SwapWeights("c", 2, state(kind, 1)))
    assert accepted_all(run(engine, [asked(4, "c", max_tokens=24, ignore_eos=True)])["r4"])
    assert engine.draft_failures == 0


@pytest.mark.parametrize("kind", ["tied", "modules"])
def test_experts_are_computed_as_one_until_they_have_learnt(kind: str) -> None:
    engine = engine_with(kind)
    engine.updates.put(AddExpert("c", "a"))
    run(engine)
    proposer: Any = engine.draft_runner._proposer
    stack = proposer._stacks["a"]

    def models() -> tuple[int, int]:
        """Of requests of all three: as they are counted, and as they were computed."""
        asked_all = [asked(i, "abc"[i % 3], max_tokens=24, ignore_eos=True) for i in range(6)]
        computed = []
        layout = stack._batch_layout

        def seen(rows: Any) -> Any:
            own = layout(rows)
            if len(rows) == 6:
                computed.append(len(own.experts))
            return own

        stack._batch_layout = seen
        outputs = run(engine, asked_all)
        stack._batch_layout = layout
        for i in range(6):
            assert tokens_of(outputs[f"r{i}"]) == plain(kind, i, max_tokens=24, ignore_eos=True)
        assert len(set(computed)) == 1
        return proposer.num_models(set("abc")), computed[0]

    assert models() == (2, 2)  # b began with other weights
    engine.updates.put(SwapWeights("c", 1, state(kind, 1)))
    assert models() == (3, 3)
    assert accepted_all(run(engine, [asked(9, "c", max_tokens=24, ignore_eos=True)])["r9"])
    engine.updates.put(SwapWeights("c", 0, state(kind, 2)))  # rolled back
    assert models() == (2, 2)
    assert proposer.num_models({"c", "a@0"}) == 1
