"""The scorer without torch: the numbers of ``la(x)``, and files that are damaged or of something else."""

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file
from serving_cases import STRUCTURES, assert_same, fitted, inputs, truth
from tables import covering, each

import contrastive_curvature as cc
from contrastive_curvature.embedding.distribution import turning_angle
from contrastive_curvature.embedding.match_regression import Regression
from contrastive_curvature.fit import class_centres
from contrastive_curvature.io.serving import Scorer, numpy_scorer

SUFFIXES = ("npz", "safetensors")


@covering(
    2,
    centres=[True, False],
    calibrated=[True, False],
    structure=STRUCTURES,
    dtype__tolerance=[(torch.float64, 1e-10), (torch.float32, 1e-5)],
)
def test_the_scorer_is_la(device, structure, calibrated, centres, dtype, tolerance, tmp_path) -> None:
    la = fitted(structure, calibrated=calibrated, centres=centres, bias=centres, dtype=dtype, device=device)
    x = inputs(20, 3, dtype, device)
    features = la.model.forward_with_features(x)[1].detach().cpu().numpy()
    for suffix in SUFFIXES:
        outputs = la.export(tmp_path / f"scorer.{suffix}")
        scorer = Scorer.load(tmp_path / f"scorer.{suffix}")
        assert scorer.outputs == outputs
        assert scorer.structure == structure.split()[0]
        assert scorer.n == 37 * calibrated
        assert_same(scorer(features), truth(la, x, outputs), tolerance)
        assert [len(value) for value in scorer(features[:0])] == [0] * len(outputs)


@each("dtype, tolerance", [(torch.float64, 1e-6), (torch.float32, 1e-4)])
def test_probabilities_of_a_match(device: str, dtype: torch.dtype, tolerance: float, tmp_path: Path) -> None:
    a, b = inputs(400, 5, dtype, device).split(200)
    noise = inputs(200, 6, dtype, device)[:, 0]
    for structure, bias in itertools.product(("diag", "full", "kron_lowrank", "kron_lowrank of rank 2"), (True, False)):
        la, path = fitted(structure, calibrated=bias, bias=bias, dtype=dtype, device=device), tmp_path / "scorer.npz"
        # Of an input with itself, the variance is the mean over all directions.
        sides = torch.cat([a[:60], a[:3]]), torch.cat([b[:60], a[:3]])
        phi = [la.model.forward_with_features(side)[1].detach().cpu().numpy() for side in sides]
        cosine = (la(a).mu * la(b).mu).sum(1)
        same = cosine + cosine.std() * noise / 2 > cosine.median()
        for use_uncertainty, curve in itertools.product((True, False), ("logistic", "isotonic")):
            case = f"{structure}, {bias}, {use_uncertainty}, {curve}"
            match = cc.MatchProbability(use_uncertainty=use_uncertainty, curve=curve).fit_pairs(la(a), la(b), same)
            la.export(path, match=match)
            scorer, old = Scorer.load(path), match.same(*map(la, sides))
            new, message = torch.from_numpy(scorer.same(*phi)), f"{case}: {{}}".format
            torch.testing.assert_close(new, old.cpu(), rtol=0, atol=tolerance, msg=message)
            assert old.std() > 0.01, case
            assert np.isnan(scorer.same(np.full_like(phi[0], np.nan), phi[1])).all()


@each("knots", [[], [0.3], [-1.0, 0.5, 2.0]])
def test_the_regression_is_that_of_the_library(knots: list[float]) -> None:
    rows = torch.randn(44, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    features, (shift, scale, low, high) = rows[4:], rows[:4]
    # The slope of the cosine is negative for some of the rows.
    weight = torch.tensor([0.2, 1.0, -1.0, 0.5, 2.0], dtype=torch.float64)
    curve = torch.tensor([knots, [0.1, 0.4, 0.9][: len(knots)]], dtype=torch.float64)
    fitted_ = Regression(shift, scale.abs(), -low.abs() - 1, high.abs() + 1, weight, weight[0], *curve, weight[0])
    arrays = {name: value.numpy() for name, value in fitted_.state().items() if value.numel()}
    found = numpy_scorer._regression(torch.cat([features, features[:1] * torch.nan]).numpy(), arrays)
    np.testing.assert_allclose(found[:-1], fitted_(features).numpy(), rtol=1e-12)
    assert np.isnan(found[-1])


def test_matches_that_are_not_in_the_file(device: str, tmp_path: Path) -> None:
    la = fitted("diag", device=device)
    a, b = (la(x) for x in inputs(400, 5, device=device).split(200))
    match = cc.MatchProbability().fit_pairs(a, b, (a.mu * b.mu).sum(1) > 0.2)
    phi = np.ones((2, 7))
    for suffix in SUFFIXES:
        path = tmp_path / f"scorer.{suffix}"
        la.export(path, match=match)
        scorer = Scorer.load(path)
        assert scorer.same(phi, phi).shape == (2,)
        with pytest.raises(ValueError, match="as many rows"):
            scorer.same(phi, phi[:1])
        la.export(path)
        with pytest.raises(ValueError, match=r"fitted match.*la\.export\(path, match=\.\.\.\)"):
            Scorer.load(path).same(phi, phi)


@each("score, by_class", [("uncertainty", False), ("novelty", True), ("uncertainty", True)])
def test_p_values_of_another_score_in_every_format(score: str, by_class: bool, device: str, tmp_path: Path) -> None:
    options = {"score": score, "by_class": by_class}
    la, x = fitted(dtype=torch.float32, device=device, calibrate=options), inputs(20, 3, torch.float32, device)
    features, wanted = la.model.forward_with_features(x)[1].detach().cpu().numpy(), truth(la, x)
    for suffix in SUFFIXES:
        la.export(tmp_path / f"scorer.{suffix}")
        assert_same(Scorer.load(tmp_path / f"scorer.{suffix}")(features), wanted, 1e-5)
    assert_same(cc.serving.ServedEncoder(la)(x), wanted, 1e-5)
    assert wanted[3].unique().numel() > 4
    assert not torch.equal(wanted[3], fitted(dtype=torch.float32, device=device)(x).p_value.cpu())


def test_the_file_alone_without_torch(device: str, tmp_path: Path) -> None:
    la, x = fitted(device=device, dtype=torch.float32), inputs(5, 3, torch.float32, device)
    for suffix in SUFFIXES:
        la.export(tmp_path / f"scorer.{suffix}")
    np.save(tmp_path / "features.npy", la.model.forward_with_features(x)[1].detach().cpu().numpy())
    (tmp_path / "numpy_scorer.py").write_text(Path(numpy_scorer.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    code = (
        "import sys\n"
        "for name in ('torch', 'laplace', 'safetensors', 'contrastive_curvature', 'scipy'):\n"
        "    sys.modules[name] = None\n"
        "import numpy as np, numpy_scorer\n"
        "for suffix in ('npz', 'safetensors'):\n"
        "    found = numpy_scorer.Scorer.load('scorer.' + suffix)(np.load('features.npy'))\n"
        "    np.savez(suffix + '-found.npz', *found)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=120)
    for suffix in SUFFIXES:
        with np.load(tmp_path / f"{suffix}-found.npz") as found:
            assert_same([found[name] for name in found.files], truth(la, x), 1e-5)


@given(seed=st.integers(0, 999), norm=st.booleans(), between=st.booleans())
def test_the_uncertainty_is_that_of_the_library(seed: int, norm: bool, between: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    variance, length, typical, ratio = 2 * torch.rand(4, 9, generator=generator, dtype=torch.float64)
    variance[0] = 0
    ours = class_centres.between_classes(ratio, 0.4)
    theirs = numpy_scorer.between_classes(ratio.numpy(), 0.4)
    np.testing.assert_allclose(theirs, ours.numpy(), rtol=1e-14)
    given_ = (variance, length, typical[0] if norm else None, ours if between else None)
    plain = (value if value is None else value.numpy() for value in given_)
    np.testing.assert_allclose(numpy_scorer.turning_angle(*plain), turning_angle(*given_).numpy(), rtol=1e-14)


def test_rows_that_are_not_finite_and_outputs_of_zeros(device: str, tmp_path: Path) -> None:
    la = fitted("diag", bias=False, device=device)
    la.export(tmp_path / "scorer.npz")
    scorer, phi = Scorer.load(tmp_path / "scorer.npz"), np.random.default_rng(0).normal(size=(4, 7))
    good = [value[[0, 3]] for value in scorer(phi)]
    phi[1], phi[2, 3] = 0, np.nan
    found = scorer(phi)
    assert all(np.isnan(value[2]).all() for value in found)
    assert all(np.isnan(value[1]).all() for value in found[:3])
    assert found[3][1] > 0
    for new, old in zip(found, good, strict=True):
        np.testing.assert_array_equal(new[[0, 3]], old)


@each("change, says", [({"format": "x"}, "format"), ({"version": 3}, "version 4"), ({"form": "diagonal"}, "changed")])
def test_what_is_wrong_is_refused_on_load(device: str, change: dict[str, Any], says: str, tmp_path: Path) -> None:
    fitted("kron_lowrank of rank 2", device=device).export(tmp_path / "right.safetensors")
    with safe_open(tmp_path / "right.safetensors", "np") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = json.dumps({**json.loads(file.metadata()["metadata"]), **change})
    np.savez(tmp_path / "wrong.npz", metadata=np.array(metadata), **arrays)
    save_file(arrays, tmp_path / "wrong.safetensors", {"metadata": metadata})
    for suffix in SUFFIXES:
        with pytest.raises(ValueError, match=f"wrong.*{says}"):
            Scorer.load(tmp_path / f"wrong.{suffix}")


def test_arrays_that_only_numpy_would_execute_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", metadata=np.array([{}], dtype=object))
    with pytest.raises(ValueError, match=r"expected a file of la\.export"):
        Scorer.load(tmp_path / "a.npz")
    with pytest.raises(FileNotFoundError):
        Scorer.load(tmp_path / "none.npz")


@given(data=st.data())
def test_a_damaged_file_is_refused_or_loads_whole(device, data, tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    suffix = data.draw(st.sampled_from(SUFFIXES))
    path = folder / f"scorer.{suffix}"
    fitted("diag", device=device).export(path)
    content, whole = bytearray(path.read_bytes()), Scorer.load(path)
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    try:
        scorer = Scorer.load(path)
    except ValueError:
        return
    for new, old in zip(scorer(np.ones((2, 7))), whole(np.ones((2, 7))), strict=True):
        np.testing.assert_array_equal(new, old)
