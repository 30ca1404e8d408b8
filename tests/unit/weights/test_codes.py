"""Codes of a quantized checkpoint: read instead of the weights, with the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf_files import write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from processors import WIDE, marked, use_kernels_of
from torch import Tensor

from paceline.actors.engine.linear import fuse
from paceline.actors.engine.model_loader import load_causal_lm
from paceline.actors.engine.native.kernels import Kernels, kernels_for
from paceline.actors.weights.codes import GROUP, Codes, codes_of, concatenated, read_codes
from paceline.deploy.model_store import convert

CPU = torch.device("cpu")


def kernels() -> Kernels:
    """Those of this machine, if it reads codes."""
    found = kernels_for(CPU, torch.bfloat16)
    if found is None or not torch.cpu._is_avx2_supported():
        pytest.skip("this processor reads no codes")
    return found


def quantized(bits: int, out: int, size: int, seed: int) -> tuple[Codes, Tensor]:
    """Codes, and the weights that they say."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 2**bits, (out, size), generator=generator)
    ends = torch.rand(2, out, size // GROUP, generator=generator) / 16 + 2**-8
    scales, mins = ends[0].half(), (ends[1] * -8).half()
    if bits == 4:
        codes = Codes(4, (values[:, ::2] | values[:, 1::2] << 4).byte(), scales, mins)
    else:
        codes, mins = Codes(8, values.byte(), scales), scales * 0
        values = values - 128
    wide = [part.float().repeat_interleave(GROUP, 1) for part in (scales, mins)]
    return codes, (wide[0] * values + wide[1]).bfloat16()


@settings(max_examples=40)
@given(
    bits=st.sampled_from([4, 8]),
    groups=st.integers(1, 5),
    out=st.integers(1, 300),
    rows=st.integers(1, 40),
    seed=st.integers(0, 99),
)
def test_products_have_the_bits_of_those_with_the_weights(
    bits: int, groups: int, out: int, rows: int, seed: int
) -> None:
    check_products(kernels(), bits, groups, out, rows, seed)


@pytest.mark.parametrize("processor", marked(WIDE))
@pytest.mark.parametrize("bits", [4, 8])
def test_the_same_on_other_processors(
    bits: int, processor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Kernels(use_kernels_of(processor, monkeypatch), torch.bfloat16)
    for rows in (*range(1, 10), 17, 40):
        check_products(own, bits, 3, 70, rows, seed=rows)


def check_products(own: Kernels, bits: int, groups: int, out: int, rows: int, seed: int) -> None:
    """Products with codes have the bits of those with the weights, on any threads."""
    codes, weight = quantized(bits, out, groups * GROUP, seed)
    coded, plain = own.pack(weight, codes=codes), own.pack(weight)
    assert (coded.bits, plain.bits) == (bits, 0)
    assert coded.packed.nbytes < 0.7 * plain.packed.nbytes
    x = torch.randn(rows, groups * GROUP, generator=torch.Generator().manual_seed(seed)).bfloat16()
    torch.set_num_threads(1)
    wanted = own.multiply(x, plain)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(own.multiply(x, coded), wanted)


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_that_say_other_weights_are_not_used(bits: int) -> None:
    codes, weight = quantized(bits, 40, 96, 0)
    assert kernels().pack(weight, codes=codes.rows(slice(20))).bits == 0
    weight[39, 95] += 1
    assert kernels().pack(weight, codes=codes).bits == 0


@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_weights_may_be_rounded_to_eight_bits(scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = (scale * torch.randn(50, 96, generator=generator)).bfloat16()
    weight[3, 32:64] = 0
    x = torch.randn(5, 96, generator=generator).bfloat16()
    exact = kernels().multiply(x, kernels().pack(weight)).float()
    packed = kernels().pack_rounded(weight)
    assert packed.bits == 8
    found = kernels().multiply(x, packed).float()
    assert (found - exact).norm() < 0.01 * exact.norm()
    again = kernels().pack_rounded(weight * 2, into=packed)
    assert again.packed is packed.packed
    assert (kernels().multiply(x, again).float() - 2 * exact).norm() < 0.02 * exact.norm()
    weight[7, 5] = torch.nan  # a draft of such weights must be noticed
    assert kernels().multiply(x, kernels().pack_rounded(weight))[:, 7].isnan().all()
    assert kernels().pack_rounded(weight[:, :50]).bits == 0


def test_codes_of_rows_and_of_fused_weights() -> None:
    (first, upper), (second, lower) = quantized(4, 33, 64, 0), quantized(4, 7, 64, 1)
    below = concatenated([first, second])
    assert below is not None
    assert kernels().pack(torch.cat([upper, lower]), codes=below).bits == 4
    index = torch.tensor([30, 2, 2])
    assert kernels().pack(upper[index], codes=first.rows(index)).bits == 4
    assert concatenated([first, None]) is None
    assert concatenated([first, quantized(8, 3, 64, 0)[0]]) is None


@pytest.mark.parametrize(("kind", "bits"), [("Q4_0", 4), ("Q4_1", 4), ("Q8_0", 8), ("F32", 0)])
def test_a_gguf_files_codes_are_kept(tmp_path: Path, kind: str, bits: int) -> None:
    write_gguf(tmp_path / "tiny.gguf", kind=kind)
    (tmp_path / "model").mkdir()
    convert(tmp_path / "tiny.gguf", tmp_path / "model")
    model = load_causal_lm(tmp_path / "model", torch.bfloat16)
    assert {codes.bits for codes in read_codes(tmp_path / "model").values()} == {bits} - {0}
    matrices = [name for name, part in model.named_parameters() if part.dim() == 2]
    for name in matrices:
        weight = model.get_parameter(name)
        assert kernels().pack(weight.data, codes=codes_of(weight)).bits == bits, name
    attention = model.model.layers[0].self_attn
    fused = fuse([(attention.q_proj, attention.k_proj, attention.v_proj)])
    fused.pack()
    assert fused.packed(0).bits == bits
    with torch.no_grad():
        attention.q_proj.weight[0, 0] += 1
    fused.pack()
    assert fused.packed(0).bits == 0, "the weights have changed since"
    other = load_causal_lm(tmp_path / "model", torch.float32)
    assert codes_of(other.get_parameter(matrices[0])) is None
