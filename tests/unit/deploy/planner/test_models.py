"""Shapes from configs: parameters, cache, windows, experts, refusals."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from fixture_models import DRAFT, TARGET
from planner_models import LARGE, LLAMA_70B, MIXTURE, SMALL
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from paceline.actors.weights.eagle import BASIS, VOCABULARY
from paceline.deploy.config.config import MODELS_DIR
from paceline.deploy.errors import ConfigError
from paceline.deploy.planner.models import parse_shape, read_shape


def test_llama_70b_by_hand() -> None:
    # q and o 8192*8192 each, k and v 8192*1024 each       150,994,944
    # gate, up, down 3*8192*28672                          704,643,072
    # two norms                                                 16,384
    # a layer                                              855,654,400  x80 = 68,452,352,000
    # embedding and head 128256*8192 each                              +  2,101,346,304
    # last norm                                                        +          8,192
    assert LARGE.parameters == 70_553_706_496
    # 2 (key, value) * 80 layers * 8 heads * 128, 2 bytes each
    assert LARGE.kv_values_per_token * 2 == 327_680


def test_llama_1b_ties_its_head() -> None:
    assert SMALL.parameters == 1_235_814_400
    assert SMALL.active_parameters == SMALL.parameters


def test_mixtral_by_hand() -> None:
    # attention 2*4096*128*(32+8) = 41,943,040; router 8*4096 = 32,768; norms 8,192
    # an expert 3*4096*14336 = 176,160,768; head 32000*4096 = 131,072,000; last norm 4,096
    common = 32 * (41_943_040 + 32_768 + 8_192) + 131_072_000 + 4_096
    assert MIXTURE.common_parameters == common
    assert MIXTURE.parameters == common + 32 * 8 * 176_160_768 + 131_072_000 == 46_702_792_704
    assert MIXTURE.active_parameters == common + 32 * 2 * 176_160_768


@pytest.mark.parametrize("folder", [TARGET, DRAFT], ids=lambda folder: folder.name)
def test_models_have_the_parameters_that_their_files_hold(folder: Path) -> None:
    with safe_open(folder / "model.safetensors", framework="np") as file:
        held = sum(math.prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118
    assert read_shape(folder).parameters == held


def test_an_eagle_draft_reads_its_trunk_and_rows_of_the_targets_head() -> None:
    folder = MODELS_DIR / "draft-smollm2"
    with safe_open(folder / "model.safetensors", framework="np") as file:
        own = set(file.keys()) - {VOCABULARY, BASIS}
        held = sum(math.prod(file.get_slice(key).get_shape()) for key in own)
    shape = read_shape(folder)
    assert (shape.layers, shape.vocab, shape.tied) == (1, 16_384, True)
    assert shape.parameters == held + 16_384 * 576


_SMALL = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 128,
}  # fmt: skip
_MIXED = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


@pytest.mark.parametrize(
    ("kind", "extra", "left_out"),
    [
        ("llama", {"head_dim": 32}, 0),
        ("mistral", {}, 0),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, 0),
        # norms of queries and keys: 2 * head_dim in each of 4 layers
        ("qwen3", {"head_dim": 16}, 4 * 2 * 16),
        ("qwen3_moe", {**_MIXED, "head_dim": 16, "mlp_only_layers": [1]}, 4 * 2 * 16),
        ("qwen3_moe", {**_MIXED, "head_dim": 16, "decoder_sparse_step": 2}, 4 * 2 * 16),
        # biases of q, k and v, (4+2+2)*16, and the shared expert's gate, 64, in each layer
        ("qwen2_moe", {**_MIXED, "shared_expert_intermediate_size": 80}, 4 * (128 + 64)),
    ],
)
def test_parameters_are_those_of_the_real_model(
    kind: str, extra: dict[str, Any], left_out: int
) -> None:
    config = AutoConfig.for_model(kind, **_SMALL, **extra, tie_word_embeddings=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    held = sum(p.numel() for p in model.parameters())
    assert parse_shape(json.loads(config.to_json_string()), kind).parameters == held - left_out


def test_windows_bound_what_a_layer_keeps() -> None:
    kinds = ["sliding_attention", "full_attention"] * 40
    mixed = parse_shape({**LLAMA_70B, "sliding_window": 1000, "layer_types": kinds}, "mixed")
    assert mixed.cached_positions(4000) == 40 * 4000 + 40 * 1000
    assert mixed.cached_positions(500) == 80 * 500
    every = parse_shape({**LLAMA_70B, "sliding_window": 1000}, "all")
    assert every.cached_positions(4000) == 80 * 1000
    off = parse_shape({**LLAMA_70B, "sliding_window": 9, "use_sliding_window": False}, "off")
    assert off.cached_positions(4000) == 80 * 4000
    pattern = parse_shape(
        {**LLAMA_70B, "sliding_window": 1000, "sliding_window_pattern": 4}, "pattern"
    )
    assert pattern.cached_positions(4000) == 20 * 4000 + 60 * 1000


def test_a_model_of_text_and_images_is_read_by_its_text_part() -> None:
    assert parse_shape({"model_type": "x", "text_config": LLAMA_70B}, "both").layers == 80


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": None}, "hidden_size: missing"),
        ({"vocab_size": "many"}, "vocab_size: must be a positive whole number, not 'many'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: must be"),
        ({"num_key_value_heads": 7}, "num_key_value_heads: 7 does not divide 64 heads"),
        ({"model_type": "gpt2"}, "gpt2 is not Llama-like"),
        ({"model_type": "bert"}, "bert is an encoder"),
        ({"model_type": "eagle"}, "hidden_size: missing"),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"layer_types": ["linear_attention"] * 80}, "without a key/value cache"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok: 5 of 4"),
    ],
)
def test_what_is_not_modelled_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_shape({**LLAMA_70B, **change}, "changed")


def test_files_that_are_no_configs_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read"):
        read_shape(tmp_path)
    file = tmp_path / "config.json"
    for text in ("{", "[]", '{"hidden_size": 8}'):
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"config\.json: "):
            read_shape(file)
