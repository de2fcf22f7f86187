"""Recipes of faces, text and characters in small: networks of a few numbers, data from random files."""

import gzip
import json
import zipfile
from io import BytesIO

import numpy as np
import pytest
import torch
from benchmark_data_files import write_mnist
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from benchmarks.transfer.corruption import KINDS, LEVELS, TEXT_KINDS, corrupt_text
from benchmarks.transfer.feature_file import load_features, save_features
from benchmarks.transfer.recipes import RECIPES, clinc150, text_encoder
from benchmarks.transfer.recipes.faces import SIDE, linear_layer, make_faces
from benchmarks.transfer.recipes.text_encoder import parts_of
from benchmarks.transfer.train import Training
from contrastive_curvature.errors import InputError

TRAIN, TEST = {"Ada_B": 3, "Cy_D": 2, "Flo_G": 1}, {"Eve_F": 3, "Gus_H": 1, "Hal_I": 2}
PAIRS = """2\t2
Ada_B\t1\t3
Eve_F\t2\t3
Ada_B\t1\tCy_D\t2
Eve_F\t1\tGus_H\t1
Hal_I\t1\t2
Eve_F\t1\t2
Hal_I\t2\tFlo_G\t1
Gus_H\t1\tHal_I\t2
"""
WEIGHT, BIAS = np.array([[1.0, -2.0], [0.5, 1.0], [3.0, 0.0]], dtype=np.float32), np.float32([1, 2, 3])


def png(pixels):
    content = BytesIO()
    Image.fromarray(pixels).save(content, "PNG")
    return content.getvalue()


def write_omniglot_full(root, background, evaluation):
    """Alphabet -> number of characters; twelve drawings of each, which differ in a bar of ink."""
    (root / "omniglot").mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for name, alphabets in (("images_background", background), ("images_evaluation", evaluation)):
        with zipfile.ZipFile(root / "omniglot" / f"{name}.zip", "w") as archive:
            for alphabet, count in alphabets.items():
                for character in range(count):
                    for number in range(12):
                        pixels = rng.random((105, 105)) < 0.9
                        pixels[10 * character : 10 * character + 10] = False
                        path = f"{name}/{alphabet}/character{character:02d}/{character:04d}_{number:02d}.png"
                        archive.writestr(path, png(pixels))


@pytest.fixture(scope="module")
def faces_root(tmp_path_factory):
    root, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    folder = root / "lfw-py"
    folder.mkdir()
    for part, people in (("Train", TRAIN), ("Test", TEST)):
        lines = [str(len(people)), *(f"{name}\t{count}" for name, count in people.items())]
        (folder / f"peopleDev{part}.txt").write_text("\n".join(lines) + "\n")
        for name, count in people.items():
            for number in range(1, count + 1):
                path = folder / "lfw-deepfunneled" / name / f"{name}_{number:04d}.jpg"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(rng.integers(0, 256, (250, 250, 3), dtype=np.uint8)).save(path)
    (folder / "pairs.txt").write_text(PAIRS)
    write_mnist(root, "MNIST", {"train": 3, "t10k": 5})
    write_omniglot_full(root, {"Greek": 1}, {"Tengwar": 1})
    for part in ("train", "test"):
        for number in range(2):
            path = root / "CIFAR-10-images" / part / "bird" / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(path)
    return root


def halves(images):
    """A network whose two features are the mean of the upper half and the red of the lower one."""
    features = []
    for image in images:
        assert image.shape == (SIDE, SIDE, 3)
        assert image.dtype == np.uint8
        features.append([image[:56].mean(), image[56:, :, 0].mean()])
    features = np.array(features, dtype=np.float32) - 127
    return features, features @ WEIGHT.T + BIAS


def face(root, name, number):
    """The crop that the README of the data names."""
    path = root / "lfw-py" / "lfw-deepfunneled" / name / f"{name}_{number:04d}.jpg"
    crop = Image.open(path).crop((58, 52, 191, 185))
    return np.asarray(crop.resize((112, 112), Image.Resampling.BILINEAR))


def test_faces_of_the_lists_and_of_the_pairs(faces_root, tmp_path):
    made = make_faces(halves, faces_root, 0)
    train = [(name, number) for name, count in TRAIN.items() for number in range(1, count + 1)]
    test = [(name, number) for name, count in TEST.items() for number in range(1, count + 1)]
    features = {one: halves([face(faces_root, *one)])[0][0] for one in [*train, *test]}
    assert np.array_equal(made.train_features, [features[one] for one in train])
    assert np.array_equal(made.test_features, [features[one] for one in test])
    assert made.train_labels.tolist() == [0, 0, 0, 1, 1, 2]
    assert made.test_labels.tolist() == [3, 3, 3, 4, 5, 5]
    assert np.allclose(made.weight, WEIGHT, atol=1e-4)
    assert np.allclose(made.bias, BIAS, atol=1e-3)
    pairs = made.pairs
    assert pairs.same.tolist() == [True, True, False, False] * 2
    assert pairs.fold.tolist() == [0] * 4 + [1] * 4
    assert pairs.people_in_train.tolist() == [True, False, True, False, False, False, True, False]
    left = [("Ada_B", 1), ("Eve_F", 2), ("Ada_B", 1), ("Eve_F", 1), ("Hal_I", 1), ("Eve_F", 1), ("Hal_I", 2)]
    right = [("Ada_B", 3), ("Eve_F", 3), ("Cy_D", 2), ("Gus_H", 1), ("Hal_I", 2), ("Eve_F", 2), ("Flo_G", 1)]
    assert np.array_equal(pairs.features[pairs.left], [features[one] for one in [*left, ("Gus_H", 1)]])
    assert np.array_equal(pairs.features[pairs.right], [features[one] for one in [*right, ("Hal_I", 2)]])
    assert len(pairs.features) == len({*left, *right, ("Gus_H", 1)})
    save_features(tmp_path / "faces.npz", made)
    read = load_features(tmp_path / "faces.npz").pairs
    assert np.array_equal(read.features, pairs.features)
    assert np.array_equal(read.people_in_train, pairs.people_in_train)


def test_corrupted_and_unknown_faces(faces_root):
    made, again, other = (make_faces(halves, faces_root, seed) for seed in (0, 0, 1))
    assert {name: len(found) for name, found in made.unknown.items()} == {"mnist": 5, "letters": 12, "cifar10": 2}
    assert set(made.corrupted) == {(kind, level) for kind in KINDS for level in LEVELS}
    # Gus has one image, so no right answer
    assert made.test_labels[made.corrupted_rows].tolist() == [3, 5]
    mild, strong = made.corrupted["contrast", 1], made.corrupted["contrast", 5]
    clean = made.test_features[made.corrupted_rows]
    assert 0 < np.abs(mild - clean).sum() < np.abs(strong - clean).sum()
    assert all(np.array_equal(made.corrupted[key], again.corrupted[key]) for key in made.corrupted)
    assert all(np.array_equal(made.unknown[key], again.unknown[key]) for key in made.unknown)
    assert not np.array_equal(made.corrupted["noise", 3], other.corrupted["noise", 3])


@given(width=st.integers(1, 6), dim=st.integers(1, 5), spare=st.integers(1, 9), seed=st.integers(0, 99))
def test_a_linear_layer_is_found(width, dim, spare, seed):
    rng = np.random.default_rng(seed)
    weight, bias = rng.standard_normal((dim, width)), rng.standard_normal(dim)
    features = rng.standard_normal((width + 4 + spare, width)).astype(np.float32)
    outputs = (features @ weight.T + bias).astype(np.float32)
    found = linear_layer(features, outputs)
    assert np.abs(features.astype(np.float64) @ (found[0] - weight).T + found[1] - bias).max() < 1e-4
    outputs[0, 0] += 0.01 * np.abs(outputs).max()
    with pytest.raises(InputError, match="outputs: expected a linear layer's"):
        linear_layer(features, outputs)


WORDS = st.lists(st.text("abcdefgh", min_size=1, max_size=6), min_size=1, max_size=9)


def distance(left, right):
    """Levenshtein's, by the textbook's table."""
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        last, row[0] = row[0], i
        for j, b in enumerate(right, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (a != b))
    return row[-1]


@given(words=WORDS, seed=st.integers(0, 99))
def test_words_that_a_level_removes_are_gone_at_the_next(words, seed):
    left = [f"{word}{place}" for place, word in enumerate(words)]
    text, counts = " ".join(left), []
    for level in LEVELS:
        found = corrupt_text([text], "deletion", level, seed)[0].split()
        assert [word for word in left if word in found] == found
        left = found
        counts.append(len(found))
    shares = (0.15, 0.30, 0.45, 0.60, 0.80)
    assert counts == [len(words) - min(len(words) - 1, max(1, round(share * len(words)))) for share in shares]


def test_typos_grow_with_the_level():
    texts = ["what is the balance of my checking account", "please book a table for two"] * 20
    means = [np.mean([distance(*both) for both in zip(texts, corrupt_text(texts, "typos", level, 3), strict=True)])
             for level in LEVELS]  # fmt: skip
    assert means[0] > 0.5
    assert (np.diff(means) > 0).all()
    assert corrupt_text(texts, "typos", 3, 3) != corrupt_text(texts, "typos", 3, 4)


def test_parts_of_a_text_are_its_words_pairs_and_runs():
    rows = parts_of(["What's up?", "what's UP", "up what's", "", "?!"])
    assert rows.shape == (5, 160)
    assert torch.equal(rows[0], rows[1])
    # A text without words is the pair of its ends. Else two words and three pairs; <what's> has six runs of three and
    # five of four, <up> two and one.
    assert (rows > 0).sum(1).tolist() == [19, 19, 19, 1, 1]
    counts = [sorted(row[row > 0].tolist()) for row in rows]
    assert len(set(counts[0]) ^ set(counts[2])) == 6  # order is in the pairs only
    long = parts_of(["one two three " * 99])
    assert (long > 0).all()
    assert int(long.max()) <= 20_000


def write_queries(root, **changed):
    """Three intents, each with a word of its own among others."""
    rng = np.random.default_rng(0)
    intents = {"balance": "money", "translate": "language", "alarm": "wake"}
    others = ["please", "can", "you", "tell", "me", "now", "today", "again"]

    def rows(count):
        return [
            [" ".join(rng.permutation([word, *rng.choice(others, 3)])), intent]
            for intent, word in intents.items()
            for _ in range(count)
        ]

    content = {"train": rows(24), "val": rows(3), "test": rows(5)}
    content |= {"oos_test": [["who won the cup", "oos"], ["why", "oos"]], "oos_val": [["left out", "oos"]]} | changed
    path = root / "clinc150" / "data_full.json.gz"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps(content).encode()))
    return content, path


def test_texts_train_an_encoder_that_repeats_itself(tmp_path, monkeypatch):
    content, _ = write_queries(tmp_path)
    monkeypatch.setattr(text_encoder, "_BUCKETS", 500)
    monkeypatch.setattr(clinc150, "_TRAINING", Training(epochs=12, rate=3e-3, batch=36, together=4))
    monkeypatch.setattr(clinc150, "_CORRUPTED", 6)
    made, again = (RECIPES["clinc150-64-supcon"].make(tmp_path, tmp_path, 0) for _ in range(2))
    names = ["alarm", "balance", "translate"]
    for part, labels in (("train", made.train_labels), ("val", made.calibration_labels), ("test", made.test_labels)):
        assert [names[label] for label in labels] == [intent for _, intent in content[part]]
    assert made.calibration_features.shape == (9, 256)
    assert made.unknown["outofscope"].shape == (2, 256)
    assert set(made.corrupted) == {(kind, level) for kind in TEXT_KINDS for level in LEVELS}
    assert len(made.corrupted_rows) == len(set(made.corrupted_rows.tolist())) == 6
    outputs = {part: made.outputs(getattr(made, f"{part}_features")) for part in ("train", "test")}
    directions = {part: found / np.linalg.norm(found, axis=1, keepdims=True) for part, found in outputs.items()}
    nearest = (directions["test"] @ directions["train"].T).argmax(1)
    assert (made.train_labels[nearest] == made.test_labels).all()
    assert np.array_equal(made.test_features, again.test_features)
    assert all(np.array_equal(made.corrupted[key], again.corrupted[key]) for key in made.corrupted)
    unseen = clinc150._make("supcon", 1, tmp_path, tmp_path, 0)
    (left_out,) = set(unseen.test_labels.tolist())
    assert set(unseen.train_labels.tolist()) == set(unseen.calibration_labels.tolist()) == {0, 1, 2} - {left_out}
    assert (len(unseen.train_labels), len(unseen.test_labels)) == (48, 5)
    save_features(tmp_path / "a.npz", made)
    read = load_features(tmp_path / "a.npz")
    assert np.array_equal(read.calibration_features, made.calibration_features)
    assert np.array_equal(read.calibration_labels, made.calibration_labels)
