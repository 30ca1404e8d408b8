"""The arithmetic of acceptance by place."""

from __future__ import annotations

import numpy as np
import pytest
from online.lengths import BIN, TOKENS, by_place, summary


def test_agreement_is_averaged_by_place_over_steps() -> None:
    first, second = np.zeros(TOKENS, dtype=bool), np.zeros(TOKENS, dtype=bool)
    first[:BIN] = True
    first[-BIN // 2 :] = second[-BIN:] = True
    shares = by_place([np.stack([first, second])] * 2)
    assert shares.shape == (2, TOKENS // BIN)
    assert shares[0].tolist() == [0.5, 0.0, 0.0, 0.0, 0.75]
    found = summary(shares)
    assert found["answers"] == 2
    assert found["last_less_first"]["value"] == pytest.approx(0.25)
