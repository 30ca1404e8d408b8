"""The engine on tiny random models: the same tokens as generate, with any drafts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from engines import MAX_LEN, TOKENIZER, make_engine, request, run, served, tokens_of, use_proposer
from tiny_models import tiny_llama

from paceline.actors.engine.engine import StepOutput
from paceline.actors.engine.model_runner import ModelRunner
from paceline.actors.speculation.colocated import ColocatedProposer
from paceline.actors.speculation.costs import DraftPrefill
from paceline.actors.speculation.experts import ExpertStack
from paceline.actors.speculation.pending_updates import SwapWeights
from paceline.actors.speculation.proposer import DraftRow
from paceline.actors.speculation.rejection_sampler import Proposal


def generate(prompt: Sequence[int], max_tokens: int, seed: int = 1) -> list[int]:
    """transformers' own greedy answer."""
    model = tiny_llama(seed)
    model.generation_config.eos_token_id = 2
    ids = model.generate(
        torch.tensor([list(prompt)]), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0
    )
    return [int(i) for i in ids[0, len(prompt) :]]


PROMPTS = [
    TOKENIZER.encode(text, add_special_tokens=False)
    for text in (
        "SELECT name",
        "Write",
        "a",
        "Ann has 12 apples. She buys 30 more.",
        "List all",
        "x y z",
    )
]


@pytest.mark.parametrize("k", [0, 1, 4, 7])
@pytest.mark.parametrize("draft_seed", [1, 2], ids=["perfect-draft", "hopeless-draft"])
def test_greedy_equals_generate_in_a_ragged_batch(k: int, draft_seed: int) -> None:
    """Six requests in four rows: they queue, join, leave and move rows."""
    engine = make_engine(k=k, draft_seed=draft_seed)
    lengths = [30, 5, 12, 40, 1, 23]
    requests = [
        request(f"r{i}", p, max_tokens=n, draft="ab"[i % 2])
        for i, (p, n) in enumerate(zip(PROMPTS, lengths, strict=True))
    ]
    outputs = run(engine, requests)
    for i, (prompt, length) in enumerate(zip(PROMPTS, lengths, strict=True)):
        assert tokens_of(outputs[f"r{i}"]) == generate(prompt, length), f"r{i}"


def test_the_targets_twin_as_draft_is_fully_accepted() -> None:
    engine = make_engine(k=4)
    twin = served(tiny_llama(1))
    use_proposer(
        engine,
        ColocatedProposer(
            [ExpertStack(ModelRunner([twin], 4, MAX_LEN), ["a"], 4)], 16, torch.Generator()
        ),
    )
    outputs = run(engine, [request("r", PROMPTS[0], max_tokens=21, ignore_eos=True)])["r"]
    stats_ = outputs[-1].chunk.speculative
    assert stats_ is not None
    assert stats_.num_draft_tokens == stats_.num_accepted_draft_tokens == 16
    assert stats_.acceptance_histogram == (0, 0, 0, 0, 4)
    assert stats_.mean_acceptance_length == 5.0


def test_eos_ends_the_answer_and_ignore_eos_does_not() -> None:
    answer = generate(PROMPTS[3], 30)
    eos = answer[7]
    first = answer.index(eos)
    outputs = run(make_engine(eos=eos), [request("r", PROMPTS[3], max_tokens=30)])["r"]
    assert tokens_of(outputs) == answer[: first + 1]
    assert outputs[-1].chunk.finish_reason == "stop"
    outputs = run(make_engine(eos=eos), [request("r", PROMPTS[3], max_tokens=30, ignore_eos=True)])
    assert tokens_of(outputs["r"]) == answer
    assert outputs["r"][-1].chunk.finish_reason == "length"


def test_a_stop_string_cuts_the_text() -> None:
    whole = TOKENIZER.decode(generate(PROMPTS[0], 30), skip_special_tokens=True)
    stop = whole[len(whole) // 2 : len(whole) // 2 + 3]
    outputs = run(make_engine(), [request("r", PROMPTS[0], max_tokens=30, stop=(stop,))])["r"]
    assert "".join(o.chunk.text for o in outputs) == whole[: whole.index(stop)]
    assert outputs[-1].chunk.finish_reason == "stop"


def test_a_seed_fixes_the_text_whatever_speculation_does() -> None:
    """Off, on with either draft, in a batch or alone, with a swap in between: the same tokens."""
    answers = []
    for draft, k, crowd in [("off", 0, 0), ("a", 4, 0), ("b", 2, 3), ("a", 7, 2)]:
        engine = make_engine()
        others = [request(f"o{i}", PROMPTS[i], temperature=1.0) for i in range(crowd)]
        mine = request(
            "r",
            PROMPTS[3],
            temperature=0.9,
            top_p=0.95,
            seed=11,
            draft=draft,
            num_speculative_tokens=k,
            max_tokens=40,
            ignore_eos=True,
        )
        answers.append(tokens_of(run(engine, [*others, mine])["r"]))
    assert all(answer == answers[0] for answer in answers)
    other = request("r", PROMPTS[3], temperature=0.9, top_p=0.95, seed=12, max_tokens=40)
    assert tokens_of(run(make_engine(), [other])["r"]) != answers[0]


def test_weights_swap_between_rounds_without_changing_the_answer() -> None:
    engine = make_engine(k=3)
    engine.add(request("r", PROMPTS[3], max_tokens=40, ignore_eos=True))
    outputs = [o for _ in range(6) for o in engine.step()]
    engine.updates.put(SwapWeights("a", 1, tiny_llama(1, layers=1).state_dict()))
    engine.updates.put(SwapWeights("nobody", 1, {}))
    engine.updates.put(SwapWeights("b", 1, {"lm_head.weight": torch.zeros(1)}))
    outputs += run(engine).get("r", [])
    assert tokens_of(outputs) == generate_ignoring_eos(PROMPTS[3], 40)
    assert engine.drafts() == {"a": 1, "b": 0, "a@0": 0}


def generate_ignoring_eos(prompt: Sequence[int], count: int) -> list[int]:
    model = tiny_llama(1)
    model.generation_config.eos_token_id = None
    ids = model.generate(
        torch.tensor([list(prompt)]), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return [int(i) for i in ids[0, len(prompt) :]]


def test_better_weights_are_accepted_after_the_swap() -> None:
    """A swap to the target's own weights, mid-answer: from then on every draft is right."""
    engine = make_engine(k=4)
    draft = served(tiny_llama(9))
    use_proposer(
        engine,
        ColocatedProposer(
            [ExpertStack(ModelRunner([draft], 4, MAX_LEN), ["a"], 4)], 16, torch.Generator()
        ),
    )
    engine.add(request("r", PROMPTS[0], max_tokens=60, ignore_eos=True))
    for _ in range(5):
        engine.step()
    engine.updates.put(SwapWeights("a", 1, tiny_llama(1).state_dict()))
    lengths = [len(o.chunk.token_ids) for o in run(engine)["r"]]
    assert lengths[:-1]
    assert all(length == 5 for length in lengths[:-1])


class BrokenProposer:
    """A proposer that fails every other time."""

    def __init__(self, inner: ColocatedProposer) -> None:
        self.inner, self.calls, self.always = inner, 0, False
        self.faulty: frozenset[str] = frozenset()

    def propose(self, rows: Sequence[DraftRow]) -> Proposal:
        self.calls += 1
        if self.calls % 2 or self.always:
            raise RuntimeError("the draft is on fire")
        return self.inner.propose(rows)

    def release(self, request_id: str) -> None:
        self.inner.release(request_id)

    def version(self, draft: str) -> int:
        return self.inner.version(draft)

    def drafts(self) -> dict[str, int]:
        return self.inner.drafts()


def test_a_failing_draft_costs_nothing_but_speed() -> None:
    engine = make_engine()
    use_proposer(engine, BrokenProposer(engine.draft_runner._proposer))  # type: ignore[arg-type]
    requests = [request(f"r{i}", p) for i, p in enumerate(PROMPTS)]
    outputs = run(engine, requests, draft_failures=True)
    for i, prompt in enumerate(PROMPTS):
        assert tokens_of(outputs[f"r{i}"]) == generate(prompt, 20)
    assert engine.draft_failures > 3


def test_abort_frees_the_row_and_leaves_the_others_alone() -> None:
    engine = make_engine(max_num_seqs=2)
    for i in range(3):
        engine.add(request(f"r{i}", PROMPTS[i], max_tokens=30))
    seen: dict[str, list[StepOutput]] = {}
    for _ in range(4):
        for o in engine.step():
            seen.setdefault(o.request_id, []).append(o)
    engine.abort("r0")
    engine.abort("unknown")
    for name, more in run(engine).items():
        seen.setdefault(name, []).extend(more)
    assert seen["r0"][-1].chunk.finish_reason is None
    for i in (1, 2):
        assert tokens_of(seen[f"r{i}"]) == generate(PROMPTS[i], 30)
    assert engine.num_running == engine.num_waiting == 0


def test_records_say_what_the_target_said() -> None:
    outputs = run(make_engine(), [request("r", PROMPTS[3]), request("s", PROMPTS[0], store=False)])
    assert outputs["s"][-1].record is None
    record = outputs["r"][-1].record
    assert record is not None
    answer = tokens_of(outputs["r"])
    assert record.output_token_ids.tolist() == answer
    assert record.target_top_ids[:, 0].tolist() == answer
    assert (record.topic, record.expert, record.created) == ("sql", "a", 1234.5)
    with torch.inference_mode():
        whole = tiny_llama(1)(torch.tensor([[*PROMPTS[3], *answer]])).logits[0]
    distribution = torch.log_softmax(whole[len(PROMPTS[3]) - 1 : -1], -1)
    top = distribution.gather(-1, torch.tensor(record.target_top_ids, dtype=torch.int64))
    torch.testing.assert_close(
        torch.tensor(record.target_top_logprobs).float(), top, atol=2e-2, rtol=1e-2
    )
    tail = 1 - top.exp().sum(-1)
    torch.testing.assert_close(torch.tensor(record.target_tail_mass), tail, atol=1e-4, rtol=1e-3)
    drafted = record.draft_token_ids >= 0
    assert (record.accepted[drafted] >= 0).all()
    assert (record.accepted[~drafted] == -1).all()
    hit = record.accepted == 1
    assert (record.draft_token_ids[hit] == record.output_token_ids[hit]).all()
    miss = record.accepted == 0
    assert (record.draft_token_ids[miss] != record.output_token_ids[miss]).all()
    stats_ = outputs["r"][-1].chunk.speculative
    assert stats_ is not None
    assert stats_.num_accepted_draft_tokens >= int(hit.sum())


@pytest.mark.parametrize("token", [-1, 300])
def test_a_token_that_the_target_lacks_is_refused_before_it_fails_others(token: int) -> None:
    engine = make_engine(vocab=300)
    for fields in ({"stop_token_ids": (token,), "min_tokens": 3}, {"logit_bias": ((token, 1.0),)}):
        with pytest.raises(ValueError, match="vocabulary of 300"):
            engine.add(request("r", [5, 6], **fields))
    assert not engine.has_work


def test_prompts_that_do_not_fit_are_refused_and_long_ones_end_at_the_context() -> None:
    engine = make_engine()
    for prompt in ([], [5] * MAX_LEN):
        with pytest.raises(ValueError, match="can be served"):
            engine.add(request("r", prompt))
    prompt = [5, 6] * (MAX_LEN // 2 - 2)
    answer = tokens_of(run(engine, [request("r", prompt, max_tokens=99, ignore_eos=True)])["r"])
    assert len(prompt) + len(answer) == MAX_LEN
    assert answer == generate_ignoring_eos(prompt, len(answer))


def test_a_prompt_of_one_token_is_served() -> None:
    outputs = run(make_engine(), [request("r", [7])])["r"]
    assert tokens_of(outputs) == generate([7], 20)


def test_a_draft_that_keeps_failing_is_asked_less_and_less() -> None:
    engine = make_engine()
    broken = BrokenProposer(engine.draft_runner._proposer)  # type: ignore[attr-defined,arg-type]
    broken.always = True
    use_proposer(engine, broken)
    run(engine, [request("r", PROMPTS[0], max_tokens=60, ignore_eos=True)], draft_failures=True)
    assert 4 <= engine.draft_failures <= 7


def test_a_record_that_cannot_be_kept_costs_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("paceline.actors.engine.recorder.target_top_k", full)
    engine = make_engine()
    outputs = run(engine, [request(f"r{i}", p) for i, p in enumerate(PROMPTS)])
    for i, prompt in enumerate(PROMPTS):
        assert tokens_of(outputs[f"r{i}"]) == generate(prompt, 20)
        assert outputs[f"r{i}"][-1].record is None
    monkeypatch.undo()
    assert run(engine, [request("s", PROMPTS[3])])["s"][-1].record is not None


def test_what_a_draft_reads_is_counted_once() -> None:
    model = served(tiny_llama(2, layers=1))
    stack = ExpertStack(ModelRunner([model], 2, MAX_LEN), ["a"], 2)
    proposer = ColocatedProposer([stack], 16, torch.Generator().manual_seed(0))
    prompt = [3 + i for i in range(20)]

    def rows(*extra: int) -> list[DraftRow]:
        sampling = request("r", prompt).sampling
        return [DraftRow("r", "a", [*prompt, *extra], len(extra), 3, sampling)]

    first = proposer.propose(rows())
    assert proposer.prefilled == DraftPrefill(1, len(prompt) - 2)  # the last two begin the round
    accepted = first.token_ids[0].tolist()
    assert proposer.num_uncomputed("r", "a", len(prompt) + len(accepted) + 1) == 0  # and a bonus
    proposer.propose(rows(*accepted))
    assert proposer.prefilled == DraftPrefill()
