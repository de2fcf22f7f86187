"""All posteriors there are, for tests that hold for each of them."""

import pytest

__all__ = ["COMBINATIONS", "for_every_combination"]

COMBINATIONS = [
    ("last_layer", "diag"),
    ("last_layer", "kron"),
    ("last_layer", "kron_lowrank"),
    ("last_layer", "full"),
    ("all", "diag"),
    ("all", "kron"),
    ("all", "full"),
    ("subnetwork", "diag"),
    ("subnetwork", "full"),
]
for_every_combination = pytest.mark.parametrize(("weights", "structure"), COMBINATIONS)
