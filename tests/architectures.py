"""Tiny configs of the architectures that docs/models.md names, and of those that are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    JambaConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    StableLmConfig,
    T5Config,
    T5ForConditionalGeneration,
)

CONTEXT, WINDOW = 96, 6
SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
UNTIED = {**SIZES, "tie_word_embeddings": False}
GPT_NEOX = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}
OTHERS = ("num_key_value_heads", "intermediate_size", "initializer_range")
OPT = {k: v for k, v in UNTIED.items() if k not in OTHERS}
GPT2 = {k: SIZES[k] for k in ("vocab_size", "initializer_range", "bos_token_id", "eos_token_id")}
GEMMA = {**UNTIED, "head_dim": 8, "query_pre_attn_scalar": 16, "sliding_window": WINDOW}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_experts": 4}
GEMMA4 = {
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 300,
}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [2.0, 4.0, 6.0, 8.0],
    "original_max_position_embeddings": CONTEXT,
}


def kinds(layers: int) -> list[str]:
    """Windowed and full layers by turns, the last one full."""
    return [("full_attention", "sliding_attention")[(layers - i + 1) % 2] for i in range(layers)]


# By model type: the config of so many layers, with fields to change.
ARCHITECTURES: dict[str, Callable[..., Any]] = {
    "llama": lambda n, **m: LlamaConfig(**{**SIZES, **m}, num_hidden_layers=n),
    "mistral": lambda n, **m: MistralConfig(
        **{**SIZES, "sliding_window": WINDOW, **m}, num_hidden_layers=n
    ),
    "qwen2": lambda n, **m: Qwen2Config(
        **{**SIZES, "use_sliding_window": True, "sliding_window": WINDOW, **m},
        max_window_layers=1,
        num_hidden_layers=n,
    ),
    "qwen3": lambda n, **m: Qwen3Config(**{**SIZES, **m}, head_dim=16, num_hidden_layers=n),
    "gemma2": lambda n, **m: Gemma2Config(
        **{**GEMMA, "attn_logit_softcapping": 1.0, **m}, layer_types=kinds(n), num_hidden_layers=n
    ),
    "gemma3_text": lambda n, **m: Gemma3TextConfig(
        **{**GEMMA, **m}, layer_types=kinds(n), num_hidden_layers=n
    ),
    "gemma3n_text": lambda n, **m: Gemma3nTextConfig(
        **{**UNTIED, "sliding_window": WINDOW, "num_kv_shared_layers": 1, **m},
        head_dim=8,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=300,
        laurel_rank=8,
        activation_sparsity_pattern=None,
        layer_types=["sliding_attention", *["full_attention"] * n],
        num_hidden_layers=n + 1,
    ),
    "gemma4_text": lambda n, **m: Gemma4TextConfig(
        **{**UNTIED, **GEMMA4, "sliding_window": WINDOW, **m},
        head_dim=8,
        layer_types=kinds(n),
        num_hidden_layers=n,
    ),
    "phi3": lambda n, **m: Phi3Config(**{**SIZES, **m}, num_hidden_layers=n),
    "gpt2": lambda n, **m: GPT2Config(
        **{**GPT2, **m}, n_embd=32, n_head=4, n_positions=128, n_layer=n
    ),
    "gpt_neox": lambda n, **m: GPTNeoXConfig(**{**GPT_NEOX, **m}, num_hidden_layers=n),
    "opt": lambda n, **m: OPTConfig(
        **{**OPT, **m}, ffn_dim=48, init_std=0.5, word_embed_proj_dim=32, num_hidden_layers=n
    ),
    "mixtral": lambda n, **m: MixtralConfig(
        **{**SIZES, "sliding_window": WINDOW, **m},
        num_local_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=n,
    ),
    "qwen2_moe": lambda n, **m: Qwen2MoeConfig(
        **{**SIZES, **EXPERTS, **m}, shared_expert_intermediate_size=24, num_hidden_layers=n
    ),
    "qwen3_moe": lambda n, **m: Qwen3MoeConfig(
        **{**SIZES, **EXPERTS, **m}, head_dim=8, num_hidden_layers=n
    ),
    "gpt_oss": lambda n, **m: GptOssConfig(
        **{**SIZES, "sliding_window": WINDOW, **m},
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=kinds(n),
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        num_hidden_layers=n,
    ),
}
# By model type: a config, and a pattern of the reason.
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "t5": (
        lambda: T5Config(vocab_size=300, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4),
        "an encoder beside the decoder",
    ),
    "mamba": (
        lambda: MambaConfig(vocab_size=300, hidden_size=32, num_hidden_layers=2),
        "no attention heads, so no keys and values",
    ),
    "jamba": (
        lambda: JambaConfig(
            **{**SIZES, "num_hidden_layers": 2, "use_mamba_kernels": False},
            attn_layer_period=2,
            attn_layer_offset=1,
            num_experts=1,
            num_experts_per_tok=1,
            mamba_d_state=4,
        ),
        "no layers of type linear_attention",
    ),
    "llama4_text": (
        lambda: Llama4TextConfig(
            **{**SIZES, "num_hidden_layers": 4}, intermediate_size_mlp=48, num_local_experts=2
        ),
        "no layers of type chunked_attention",
    ),
    "deepseek_v3": (
        lambda: DeepseekV3Config(
            **{**SIZES, "num_key_value_heads": 4, "num_hidden_layers": 1},
            kv_lora_rank=8,
            q_lora_rank=8,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
            first_k_dense_replace=1,
        ),
        "latent attention",
    ),
    "bloom": (
        lambda: BloomConfig(vocab_size=300, hidden_size=32, n_layer=2, n_head=4),
        "do not attend through the engine",
    ),
    "stablelm": (
        lambda: StableLmConfig(**SIZES, num_hidden_layers=2),
        "do not hand a forward's arguments on",
    ),
    "gemma3": (
        lambda: Gemma3Config(
            text_config={**GEMMA, "num_hidden_layers": 2},
            vision_config={**VISION, "num_hidden_layers": 1, "image_size": 4, "patch_size": 2},
            mm_tokens_per_image=4,
        ),
        "more than text",
    ),
}


def make(config: Any, seed: int) -> Any:
    """A random model in float32 in which no bias and no norm is idle."""
    torch.manual_seed(seed)
    maker = (
        T5ForConditionalGeneration
        if config.model_type == "t5"
        else AutoModelForCausalLM.from_config
    )
    model = maker(config).eval().float().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name or "ln_" in name:
            parameter.add_(0.3 * torch.randn(parameter.shape))
    return model
