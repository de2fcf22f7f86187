"""Feature files: what is written is read, and what does not fit is refused by its name."""

import numpy as np
import pytest
from tables import each

from benchmarks.transfer.feature_file import load_features, save_features
from contrastive_curvature.errors import InputError

N, M, F, D, K = 7, 5, 4, 3, 2


def arrays(**changed):
    rng = np.random.default_rng(0)
    made = {
        "train_features": rng.standard_normal((N, F)),
        "train_labels": rng.integers(0, 3, N),
        "test_features": rng.standard_normal((M, F)),
        "test_labels": rng.integers(5, 8, M),
        "weight": rng.standard_normal((D, F)),
        "bias": rng.standard_normal(D),
        "unknown_other_kind": rng.standard_normal((3, F)),
        "corrupted_blur_1": rng.standard_normal((K, F)),
        "corrupted_salt_and_pepper_12": rng.standard_normal((K, F)),
        "corrupted_rows": np.array([4, 0]),
        "pairs_left": np.array([0, 1, 2]),
        "pairs_right": np.array([1, 2, 3]),
        "pairs_same": np.array([True, False, True]),
        "pairs_fold": np.array([0, 0, 1]),
    }
    return {name: value for name, value in (made | changed).items() if value is not None}


def write(path, **changed):
    np.savez(path, **arrays(**changed))
    return path


def flat(content):
    """All arrays of a feature file by the names that they have in the archive."""
    found = {name: getattr(content, name) for name in ("train_features", "train_labels", "test_features")}
    found |= {name: getattr(content, name) for name in ("test_labels", "weight", "bias", "corrupted_rows")}
    found |= {f"unknown_{name}": value for name, value in content.unknown.items()}
    found |= {f"corrupted_{kind}_{level}": value for (kind, level), value in content.corrupted.items()}
    if content.pairs is not None:
        found |= {f"pairs_{name}": getattr(content.pairs, name) for name in ("left", "right", "same", "fold")}
    return {name: value for name, value in found.items() if value is not None}


def test_anybodys_archive_is_read(tmp_path):
    content = load_features(write(tmp_path / "a.npz"))
    given = arrays()
    found = flat(content)
    assert found.keys() == given.keys()
    for name, value in given.items():
        assert found[name].dtype == (np.float32 if value.dtype == np.float64 else value.dtype)
        assert np.array_equal(found[name], value.astype(found[name].dtype))
    assert (content.dim, content.features) == (D, F)
    assert set(content.corrupted) == {("blur", 1), ("salt_and_pepper", 12)}
    wanted = given["test_features"] @ given["weight"].T + given["bias"]
    assert np.allclose(content.outputs(content.test_features), wanted, atol=1e-5)


@each("half", [False, True])
def test_what_is_saved_is_loaded(half, tmp_path):
    content = load_features(write(tmp_path / "a.npz"))
    path = tmp_path / f"new{half}" / "a.npz"
    save_features(path, content, half=half)
    before, after = flat(content), flat(load_features(path))
    assert before.keys() == after.keys()
    for name, value in before.items():
        rounded = half and value.ndim == 2 and name != "weight"
        wanted = value.astype(np.float16).astype(np.float32) if rounded else value
        assert after[name].dtype == value.dtype
        assert np.array_equal(after[name], wanted)
    assert [child.name for child in path.parent.iterdir()] == ["a.npz"]


@each(
    "changed, message",
    [
        ({"train_features": np.ones((N, F + 1))}, r"train_features: .*\(number of inputs, 4\).*\(7, 5\)"),
        ({"test_features": np.full((M, F), np.nan)}, "test_features: expected finite.*20"),
        ({"test_features": np.ones((1, F)), "test_labels": np.array([1])}, "test_features: expected at least two"),
        ({"train_features": np.full((N, F), "a")}, "train_features: expected real numbers"),
        ({"train_labels": np.zeros(N + 1, int)}, "train_labels: expected 7.*got 8"),
        ({"test_labels": np.full(M, "ada")}, "test_labels: expected whole numbers.*return_inverse"),
        ({"weight": np.ones((1, F)), "bias": np.ones(1)}, "weight: .*D at least 2"),
        ({"bias": np.ones(D + 1)}, r"bias: expected shape \(3,\).*zeros"),
        ({"unknown_other_kind": np.ones((3, F - 1))}, r"unknown_other_kind: .*\(3, 3\)"),
        ({"corrupted_blur_1": np.ones((K + 1, F))}, "corrupted_blur_1: expected 2 inputs.*got 3"),
        ({"corrupted_rows": None}, "corrupted_rows: expected row numbers"),
        ({"corrupted_rows": np.array([0, M])}, "corrupted_rows: expected row numbers of the 5.*0 to 5"),
        ({"corrupted_blur_0": np.ones((K, F))}, "a level from 1 .*corrupted_blur_0"),
        ({"pairs_same": None}, "all of pairs_left.*only pairs_left, pairs_right, pairs_fold"),
        ({"pairs_left": np.array([0, 1, M])}, "pairs_left: .*0 to 5"),
        ({"pairs_right": np.array([0, 2, 3])}, "pairs_right: .*itself"),
    ],
)
def test_an_array_that_does_not_fit_is_named(changed, message, tmp_path):
    path = write(tmp_path / "a.npz", **changed)
    with pytest.raises(InputError, match=message) as caught:
        load_features(path)
    assert str(path) in str(caught.value)
