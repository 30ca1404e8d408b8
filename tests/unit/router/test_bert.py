"""The brief reading of a text against the library's own forward, on random models."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BertConfig, BertModel

from paceline.actors.router import encoder as encoder_module
from paceline.actors.router.encoder import BertEncoder, Pooling, build_encoder, keep_layers

POSITIONS = 24
POOLINGS: tuple[Pooling, ...] = ("cls", "mean")


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
def by_the_library(model: BertModel, token_ids: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    ids = token_ids[None]
    read = model(input_ids=ids)
    if pooling == "mean":
        mean = read.last_hidden_state[0].mean(dim=0)
        return mean / mean.norm()
    embedded = model.embeddings(input_ids=ids).mean(dim=1)
    return torch.cat([read.pooler_output, embedded], dim=1)[0]


@settings(max_examples=60, deadline=None)
@given(
    heads=st.integers(1, 4),
    layers=st.integers(0, 3),
    activation=st.sampled_from(["gelu", "gelu_new", "relu", "silu"]),
    types=st.integers(1, 2),
    seed=st.integers(0, 1000),
    token_ids=st.lists(st.integers(0, 49), min_size=1, max_size=POSITIONS),
    pooling=st.sampled_from(["cls", "mean"]),
)
def test_it_reads_as_the_library_does(
    heads: int,
    layers: int,
    activation: str,
    types: int,
    seed: int,
    token_ids: list[int],
    pooling: Pooling,
) -> None:
    model = model_of(heads, layers, activation, types, seed).double()  # rounding aside
    found = BertEncoder(model, pooling)(torch.tensor(token_ids))
    torch.testing.assert_close(
        found, by_the_library(model, torch.tensor(token_ids), pooling), rtol=1e-8, atol=1e-10
    )


def test_every_token_counts() -> None:
    reader = BertEncoder(model_of(), "cls")
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
            BertEncoder(model, "cls")


def test_a_model_that_is_not_read_briefly_is_read_by_the_library() -> None:
    model, tokens = decoder(), torch.tensor([3, 1, 4, 1, 5])
    for pooling in POOLINGS:
        reader = build_encoder(model, pooling)
        assert not isinstance(reader, BertEncoder)
        torch.testing.assert_close(reader(tokens), by_the_library(model, tokens, pooling))


def test_a_brief_reading_that_differs_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(build_encoder(model_of(), "cls"), BertEncoder)
    own = BertEncoder.__call__
    monkeypatch.setattr(BertEncoder, "__call__", lambda self, ids: own(self, ids) + 0.01)
    assert not isinstance(build_encoder(model_of(), "cls"), BertEncoder)


@pytest.mark.parametrize(("native", "by_onednn"), [(True, True), (True, False), (False, True)])
def test_in_bfloat16_the_mean_is_nearly_the_same(
    monkeypatch: pytest.MonkeyPatch, native: bool, by_onednn: bool
) -> None:
    monkeypatch.setattr(encoder_module, "multiplies_floats_faster", lambda: not native)
    if not by_onednn:  # as on processors with AVX2 only, where its kernels refuse bfloat16
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    tokens = torch.tensor([3, 1, 4, 1, 5])
    reader = build_encoder(model_of(), "mean")
    assert isinstance(reader, BertEncoder)
    found, expected = reader(tokens), by_the_library(model_of(), tokens, "mean")
    assert found.dtype is torch.float32
    assert float(found @ expected) > 0.999
    assert torch.allclose(found, expected, atol=1e-5) == (not native)


@torch.inference_mode()
def test_the_first_layers_alone_read_what_they_read_in_the_whole_model() -> None:
    token_ids = torch.tensor([3, 1, 4])
    states = model_of(layers=4)(input_ids=token_ids[None], output_hidden_states=True).hidden_states
    found = BertEncoder(keep_layers(model_of(layers=4), 3), "mean")(token_ids)
    mean = states[3][0].mean(dim=0)
    torch.testing.assert_close(found, mean / mean.norm())
