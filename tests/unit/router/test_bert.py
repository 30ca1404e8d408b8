"""The brief reading of a text against the library's own forward, on random models."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BertConfig, BertModel

from paceline.actors.router.classifier import BertEncoder, build_encoder

POSITIONS = 24


def model_of(
    heads: int = 2, layers: int = 2, activation: str = "gelu", types: int = 1, seed: int = 0
) -> BertModel:
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=50,
        hidden_size=8 * heads,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=20,
        max_position_embeddings=POSITIONS,
        type_vocab_size=types,
        hidden_act=activation,
        initializer_range=0.5,
    )
    model = BertModel(config).eval()
    for name, weights in model.named_parameters():  # the library's biases and norms begin at 0, 1
        if weights.dim() == 1:
            weights.data += torch.randn(weights.shape) * 0.3
        assert weights.dtype == torch.float32, name
    return model


@torch.inference_mode()
def by_the_library(model: BertModel, token_ids: torch.Tensor) -> torch.Tensor:
    ids = token_ids[None]
    mean = model.embeddings(input_ids=ids).mean(dim=1)
    return torch.cat([model(input_ids=ids).pooler_output, mean], dim=1)[0]


@settings(max_examples=60, deadline=None)
@given(
    heads=st.integers(1, 4),
    layers=st.integers(0, 3),
    activation=st.sampled_from(["gelu", "gelu_new", "relu", "silu"]),
    types=st.integers(1, 2),
    seed=st.integers(0, 1000),
    token_ids=st.lists(st.integers(0, 49), min_size=1, max_size=POSITIONS),
)
def test_it_reads_as_the_library_does(
    heads: int, layers: int, activation: str, types: int, seed: int, token_ids: list[int]
) -> None:
    model = model_of(heads, layers, activation, types, seed).double()  # rounding aside
    found = BertEncoder(model)(torch.tensor(token_ids))
    torch.testing.assert_close(
        found, by_the_library(model, torch.tensor(token_ids)), rtol=1e-8, atol=1e-10
    )


def test_every_token_counts() -> None:
    reader = BertEncoder(model_of())
    first = reader(torch.tensor([1, 2, 3, 4]))
    size = len(first) // 2
    for changed in ([5, 2, 3, 4], [1, 2, 3, 5], [1, 3, 2, 4]):
        other = reader(torch.tensor(changed))
        assert not torch.allclose(first[:size], other[:size], atol=1e-3)


def decoder() -> BertModel:
    return BertModel(BertConfig(**(model_of().config.to_dict() | {"is_decoder": True}))).eval()


def test_what_is_no_encoder_with_a_pooler_is_refused() -> None:
    without = BertModel(model_of().config, add_pooling_layer=False)
    for model in (without, decoder()):
        with pytest.raises(ValueError, match="router"):
            BertEncoder(model)


def test_a_model_that_is_not_read_briefly_is_read_by_the_library() -> None:
    model, tokens = decoder(), torch.tensor([3, 1, 4, 1, 5])
    reader = build_encoder(model)
    assert not isinstance(reader, BertEncoder)
    torch.testing.assert_close(reader(tokens), by_the_library(model, tokens))


def test_a_brief_reading_that_differs_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(build_encoder(model_of()), BertEncoder)
    own = BertEncoder.__call__
    monkeypatch.setattr(BertEncoder, "__call__", lambda self, ids: own(self, ids) + 0.01)
    assert not isinstance(build_encoder(model_of()), BertEncoder)
