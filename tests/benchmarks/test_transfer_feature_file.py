"""Feature files: what is written is read, and what does not fit is refused by its name."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.transfer.feature_file import FeatureFile, Pairs, load_features, save_features
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
        "harmed_blur_1": rng.standard_normal((K, F)),
        "harmed_salt_and_pepper_12": rng.standard_normal((K, F)),
        "harmed_rows": np.array([4, 0]),
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
    found |= {name: getattr(content, name) for name in ("test_labels", "weight", "bias", "harmed_rows")}
    found |= {f"unknown_{name}": value for name, value in content.unknown.items()}
    found |= {f"harmed_{kind}_{level}": value for (kind, level), value in content.harmed.items()}
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
    assert set(content.harmed) == {("blur", 1), ("salt_and_pepper", 12)}
    wanted = given["test_features"] @ given["weight"].T + given["bias"]
    assert np.allclose(content.outputs(content.test_features), wanted, atol=1e-5)


@given(
    sizes=st.tuples(st.integers(1, 4), st.integers(2, 4), st.integers(1, 5), st.integers(2, 4)),
    unknown=st.lists(st.sampled_from(["mnist", "faces_32", "a-b.c"]), unique=True),
    harmed=st.lists(st.tuples(st.sampled_from(["blur", "x_y"]), st.integers(1, 30)), unique=True),
    verified=st.booleans(),
    half=st.booleans(),
    seed=st.integers(0, 99),
)
def test_what_is_saved_is_loaded(sizes, unknown, harmed, verified, half, seed, tmp_path_factory):
    n, m, f, d = sizes
    rng = np.random.default_rng(seed)
    content = FeatureFile(
        rng.standard_normal((n, f)),
        rng.integers(-3, 9, n),
        rng.standard_normal((m, f)),
        rng.integers(-3, 9, m),
        rng.standard_normal((d, f)),
        rng.standard_normal(d),
        unknown={name: rng.standard_normal((3, f)) for name in unknown},
        harmed={key: rng.standard_normal((2, f)) for key in harmed},
        harmed_rows=rng.integers(0, m, 2) if harmed else None,
        pairs=Pairs(np.array([0]), np.array([1]), np.array([1]), np.array([4])) if verified else None,
    )
    path = tmp_path_factory.mktemp("features") / "new" / "a.npz"
    save_features(path, content, half=half)
    before, after = flat(content), flat(load_features(path))
    assert before.keys() == after.keys()
    for name, value in before.items():
        rounded = half and value.ndim == 2 and name != "weight"
        wanted = value.astype(np.float16).astype(np.float32) if rounded else value
        assert after[name].dtype == value.dtype
        assert np.array_equal(after[name], wanted)
    assert [child.name for child in path.parent.iterdir()] == ["a.npz"]


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.npz"
    content = load_features(write(path))
    before = path.read_bytes()

    def fail(*_args, **_arrays):
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez", fail)
    with pytest.raises(OSError, match="disk full"):
        save_features(path, content)
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("name", ["train_features", "train_labels", "test_features", "test_labels", "weight", "bias"])
def test_a_missing_array_is_named(name, tmp_path):
    with pytest.raises(InputError, match=rf"got no {name}\. It holds"):
        load_features(write(tmp_path / "a.npz", **{name: None}))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"train_features": np.ones((N, F + 1))}, r"train_features: .*\(number of inputs, 4\).*\(7, 5\)"),
        ({"train_features": np.ones(F)}, "train_features: expected 2 axes"),
        ({"test_features": np.full((M, F), np.nan)}, "test_features: expected finite.*20"),
        ({"test_features": np.full((M, F), 1e300)}, "test_features: expected finite"),
        ({"test_features": np.ones((1, F)), "test_labels": np.array([1])}, "test_features: expected at least two"),
        ({"train_features": np.ones((0, F)), "train_labels": np.ones(0, int)}, "train_features: .*none of length 0"),
        ({"train_features": np.full((N, F), "a")}, "train_features: expected real numbers"),
        ({"train_features": np.ones((N, F), complex)}, "train_features: expected real numbers"),
        ({"train_labels": np.zeros(N + 1, int)}, "train_labels: expected 7.*got 8"),
        ({"train_labels": np.zeros(N)}, "train_labels: expected whole numbers.*float64"),
        ({"test_labels": np.full(M, "ada")}, "test_labels: expected whole numbers.*return_inverse"),
        ({"test_labels": np.zeros((M, 1), int)}, "test_labels: expected whole numbers on one axis"),
        ({"weight": np.ones((1, F)), "bias": np.ones(1)}, "weight: .*D at least 2"),
        ({"weight": np.ones(F)}, "weight: expected 2 axes"),
        ({"bias": np.ones(D + 1)}, r"bias: expected shape \(3,\).*zeros"),
        ({"unknown_other_kind": np.ones((3, F - 1))}, r"unknown_other_kind: .*\(3, 3\)"),
        ({"unknown_other_kind": np.ones((0, F))}, "unknown_other_kind: .*none of length 0"),
        ({"unknown_a/b": np.ones((3, F))}, "unknown_NAME: .*a/b"),
        ({"harmed_blur_1": np.ones((K + 1, F))}, "harmed_blur_1: expected 2 inputs.*got 3"),
        ({"harmed_rows": None}, "harmed_rows: expected row numbers"),
        ({"harmed_blur_1": None, "harmed_salt_and_pepper_12": None}, "harmed: expected harmed_KIND_LEVEL"),
        ({"harmed_rows": np.array([0, M])}, "harmed_rows: expected row numbers of the 5.*0 to 5"),
        ({"harmed_rows": np.array([-1, 0])}, "harmed_rows: .*-1 to 0"),
        ({"harmed_blur_0": np.ones((K, F))}, "a level from 1 .*harmed_blur_0"),
        ({"harmed_blur_x": np.ones((K, F))}, "harmed_KIND_LEVEL.*harmed_blur_x"),
        ({"pairs_same": None}, "all of pairs_left.*only pairs_left, pairs_right, pairs_fold"),
        ({"pairs_left": np.array([0, 1, M])}, "pairs_left: .*0 to 5"),
        ({"pairs_right": np.array([0, 1])}, "pairs_right: expected 3"),
        ({"pairs_right": np.array([0, 2, 3])}, "pairs_right: .*itself"),
        ({"pairs_same": np.array([0, 1, 2])}, "pairs_same: expected 3 truth values"),
        ({"pairs_fold": np.array([0.0, 1.0, 1.0])}, "pairs_fold: expected whole numbers"),
    ],
)
def test_an_array_that_does_not_fit_is_named(changed, message, tmp_path):
    path = write(tmp_path / "a.npz", **changed)
    with pytest.raises(InputError, match=message) as caught:
        load_features(path)
    assert str(path) in str(caught.value)


def test_an_array_of_no_meaning_is_left_out_with_a_warning(tmp_path):
    path = write(tmp_path / "a.npz", unkown_faces=np.ones((3, F)))
    with pytest.warns(UserWarning, match=r"unkown_faces not used.*unknown_NAME"):
        content = load_features(path)
    assert list(content.unknown) == ["other_kind"]


@pytest.mark.parametrize("damage", ["no file", "folder", "text", "empty", "cut short", "one array", "objects"])
def test_a_file_that_is_no_archive_is_refused(damage, tmp_path):
    path = tmp_path / "a.npz"
    if damage == "folder":
        path.mkdir()
    elif damage == "text":
        path.write_text("features")
    elif damage == "empty":
        path.touch()
    elif damage == "cut short":
        path.write_bytes(write(path).read_bytes()[:-40])
    elif damage == "one array":
        with path.open("wb") as file:
            np.save(file, np.ones(3))
    elif damage == "objects":
        write(path, train_labels=np.array([{}] * N, dtype=object))
    with pytest.raises(InputError, match=r"a\.npz: expected a \.npz archive of arrays"):
        load_features(path)


@pytest.mark.parametrize("level", [0, True, 1.0])
def test_a_level_is_a_whole_number(level, tmp_path):
    content = load_features(write(tmp_path / "a.npz"))
    with pytest.raises(InputError, match=r"harmed_blur_.*level"):
        replace(content, harmed={("blur", level): np.ones((K, F))})


def test_what_half_precision_cannot_hold_is_refused(tmp_path):
    content = load_features(write(tmp_path / "a.npz", unknown_far=np.full((1, F), 1e6)))
    with pytest.raises(InputError, match="unknown_far: expected at most 65504"):
        save_features(tmp_path / "b.npz", content, half=True)
    with pytest.raises(InputError, match=r"ends in \.npz"):
        save_features(tmp_path / "b.zip", content)
    assert [child.name for child in tmp_path.iterdir()] == ["a.npz"]
