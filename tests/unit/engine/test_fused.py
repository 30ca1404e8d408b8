"""The fused decoder against transformers' own modules, per architecture, dtype and expert."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import tiny_llama
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from paceline.actors.engine.attention import ATTENTION_NAME, StepContext
from paceline.actors.engine.decoders import ModuleDecoder, make_decoder
from paceline.actors.engine.expert_layout import ExpertLayout
from paceline.actors.engine.fused import FusedDecoder, Rotary
from paceline.actors.engine.kv_cache import KVCache
from paceline.actors.engine.model_runner import ModelRunner, kv_shapes

VOCAB, CAPACITY = 64, 48
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CAPACITY,
    "initializer_range": 0.3,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "llama_tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama_biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama3_rope": LlamaConfig(
        **SIZES,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
    "llama_stray_window": LlamaConfig(**SIZES, sliding_window=5),
    "mistral_window": MistralConfig(**SIZES, sliding_window=5),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2_window": Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
}


def make(config: Any, seed: int, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval().to(dtype)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter.data, 1.0 if "norm" in name else 0.0, 0.3)
    model.set_attn_implementation(ATTENTION_NAME)
    return model.requires_grad_(False)


@torch.inference_mode()
def logits(decoder: Any, model: Any, experts: list[int], keep: int = 0) -> torch.Tensor:
    """Two forwards, 9 tokens and then 3, of rows that do not follow each other."""
    batch, dtype = len(experts), model.dtype
    kv = KVCache(kv_shapes(model.config), batch + 1, CAPACITY, dtype, "cpu")
    for row in range(batch + 1):
        kv.allocate(row, 12)
    rows = torch.arange(batch).flip(0) + 1
    generator = torch.Generator().manual_seed(5)
    found = []
    for start, count in ((0, 9), (9, 3)):
        tokens = torch.randint(VOCAB, (batch, count), generator=generator)
        positions = torch.arange(start, start + count).expand(batch, -1)
        step = StepContext.at(kv, rows, positions, start + count)
        found.append(decoder(tokens, step, ExpertLayout(experts, "cpu"), keep))
    return torch.cat(found, dim=1)


def _tolerance(expected: torch.Tensor) -> float:
    """What the order of sums may change, which differs between processors and libraries."""
    share = 1e-4 if expected.dtype is torch.float32 else 0.05
    return share * float(expected.float().std())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_fused_logits_are_transformers_own(name: str, dtype: torch.dtype) -> None:
    model = make(CONFIGS[name], 3, dtype)
    expected = logits(ModuleDecoder([model]), model, [0, 0])
    decoder = make_decoder([model], kv_shapes(model.config), CAPACITY)
    assert isinstance(decoder, FusedDecoder)
    tolerance = _tolerance(expected)
    torch.testing.assert_close(
        logits(decoder, model, [0, 0]), expected, rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("width", [7, 48, 50])
def test_gates_far_below_zero_let_nothing_through(width: int) -> None:
    """Where the exponential of the activation would overflow; widths that no vector divides too."""
    model = make(LlamaConfig(**SIZES | {"intermediate_size": width}), 3)
    gates: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.gate_proj.weight.mul_(60.0)
        layer.mlp.gate_proj.register_forward_hook(lambda *own: gates.append(own[2]))
    expected = logits(ModuleDecoder([model]), model, [0, 0])
    assert min(float(own.min()) for own in gates) < -120.0
    decoder = make_decoder([model], kv_shapes(model.config), CAPACITY)
    assert isinstance(decoder, FusedDecoder)
    tolerance = 10 * _tolerance(expected)  # large gates make sums that cancel
    torch.testing.assert_close(
        logits(decoder, model, [0, 0]), expected, rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize(
    "experts",
    # of the last two, 81 tokens are computed as 88
    [[1], [2, 2], [0, 1, 2], [2, 0, 2], [1, 0, 1, 1, 2], [0, 2], 9 * [1], [*(9 * [0]), 2, 2]],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("keep", [0, 2])
def test_a_row_gets_its_own_experts_logits(
    experts: list[int], dtype: torch.dtype, keep: int
) -> None:
    models = [make(CONFIGS["llama_tied"], seed, dtype) for seed in (1, 2, 3)]
    expected = logits(ModuleDecoder(models), models[0], experts, keep)
    decoder = FusedDecoder(models, CAPACITY)
    tolerance = _tolerance(expected)
    found = logits(decoder, models[0], experts, keep)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert found.shape == (len(experts), 2 * keep or 12, VOCAB)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "llama_tied", "qwen3"])
def test_swapped_weights_are_served_and_the_neighbours_keep_theirs(
    name: str, dtype: torch.dtype
) -> None:
    models = [make(CONFIGS[name], seed, dtype) for seed in (1, 2)]
    runner = ModelRunner(models, 2, CAPACITY)
    news = make(CONFIGS[name], 9, dtype)
    untouched = logits(runner.decoder, models[0], [0])
    runner.load_weights({k: v.clone() for k, v in news.state_dict().items()}, expert=1)
    fresh = logits(FusedDecoder([news], CAPACITY), news, [0])
    assert torch.equal(logits(runner.decoder, models[0], [1]), fresh)
    assert torch.equal(logits(runner.decoder, models[0], [0]), untouched)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("keep", [0, 1])
def test_a_row_has_the_same_bits_among_rows_of_other_experts(dtype: torch.dtype, keep: int) -> None:
    """A single expert's forward is one call of the kernels, that of several experts is not."""
    models = [make(CONFIGS["llama_tied"], seed, dtype) for seed in (1, 2)]
    decoder = FusedDecoder(models, CAPACITY)
    if not decoder.has_kernels:
        pytest.skip("no C++ compiler here")
    alone, among = (logits(decoder, models[0], own, keep) for own in ([1, 1], [1, 0]))
    assert torch.equal(alone[0], among[0])


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_an_unknown_token_is_an_error(token: int) -> None:
    model = make(CONFIGS["llama"], 1)
    runner = ModelRunner([model], 1, CAPACITY)
    runner.kv.allocate(0, 2)
    tokens, positions = torch.tensor([[3, token]]), torch.tensor([[0, 1]])
    with pytest.raises(IndexError):
        runner.forward([0], tokens, positions, 2)


def test_other_architectures_run_through_their_modules() -> None:
    model = make(
        GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=CAPACITY), 1
    )
    decoder = make_decoder([model], kv_shapes(model.config), CAPACITY)
    assert isinstance(decoder, ModuleDecoder)
    assert logits(decoder, model, [0, 0]).shape == (2, 12, VOCAB)


class BackwardRotary(Rotary):
    """Turns the wrong way round."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sin = -self.sin


def test_a_fused_model_that_is_off_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama(1)
    model.set_attn_implementation(ATTENTION_NAME)
    monkeypatch.setattr("paceline.actors.engine.fused.Rotary", BackwardRotary)
    decoder = make_decoder([model.requires_grad_(False)], kv_shapes(model.config), CAPACITY)
    assert isinstance(decoder, ModuleDecoder)


def test_a_model_with_wrong_logits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4), 1)
    monkeypatch.setattr(StepContext, "mask", lambda _self, _window: None)
    with pytest.raises(ValueError, match=r"gpt2 cannot be served: .* off by"):
        ModelRunner([model], 2, CAPACITY)
