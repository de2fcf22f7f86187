"""A folder that an earlier version saved is refused by name, with what to do."""

from pathlib import Path

import pytest
from torch import nn

import contrastive_curvature as cc

SAVED = Path(__file__).resolve().parent / "versions" / "0.2.0" / "posterior"


def test_a_posterior_of_another_version_says_what_to_do() -> None:
    encoder = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    with pytest.raises(cc.InputError, match=r"of version 3, got version 2\. contrastive_curvature 0\.2\.0 wrote it"):
        cc.load_pretrained(SAVED, encoder)
