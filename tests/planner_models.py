"""Configs of well-known models, as far as their sizes go."""

from typing import Any

from paceline.deploy.planner.models import parse_shape
from paceline.deploy.planner.roofline import Hardware

LLAMA_70B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
LLAMA_1B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}
MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
    "tie_word_embeddings": False,
}

LARGE, SMALL = parse_shape(LLAMA_70B, "llama-70b"), parse_shape(LLAMA_1B, "llama-1b")
MIXTURE = parse_shape(MIXTRAL, "mixtral")

# Figures that divide easily: 1 TB/s, 1 PFLOP/s.
PLAIN = Hardware("plain", bandwidth=1e12, flops=1e15)
