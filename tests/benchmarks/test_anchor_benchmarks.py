"""The benchmarks of losses of anchors and of zero-shot probabilities run, on small cases."""

from __future__ import annotations

import pytest

from benchmarks import anchor_losses, zero_shot


def test_costs_of_losses_of_anchors() -> None:
    found = [
        anchor_losses.run({"kind": "output", "loss": "supcon", "fix": "psd_parts", "points": 80, "dim": 4}),
        anchor_losses.run({"kind": "layer", "loss": "siglip", "fix": "psd", "points": 20, "dim": 4, "features": 6}),
    ]
    machine = {"cpu": "a machine", "threads": 1, "torch": "2", "load": 0.0, "date": "2026-01-01"}
    table = anchor_losses.table(found, machine)
    assert "| supcon | `psd_parts` | 80 | 4 |" in table
    assert "| siglip | `psd` | 20 | 6 | 4 |" in table
    assert found[1]["diag_ratio"] > 0


def test_zero_shot_probabilities_are_nearer_than_those_of_the_means(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero_shot, "SAMPLES", 400)
    found = zero_shot.measure({"classes": 2, "image": 0.05, "prompt": 0.0})
    # Of 400 samples the noise is 0.025 a probability.
    assert found["this"] < 0.05 < found["means"]
