"""Recipes of faces, text and characters in small: networks of a few numbers, data from random files."""

import gzip
import json
import sys
import zipfile
from io import BytesIO
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from benchmark_data_files import write_mnist
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from benchmarks.transfer.feature_file import load_features, save_features
from benchmarks.transfer.harm import KINDS, LEVELS
from benchmarks.transfer.recipes import RECIPES, clinc150, grey, text_encoder
from benchmarks.transfer.recipes.faces import SIDE, FaceNetwork, linear_layer, make_faces, read_pairs
from benchmarks.transfer.recipes.harmed_text import TEXT_KINDS, harm_text
from benchmarks.transfer.recipes.image_encoder import Sizes
from benchmarks.transfer.recipes.queries import read_queries
from benchmarks.transfer.recipes.text_encoder import make_text_encoder, parts_of
from benchmarks.transfer.train import LOSSES, Training, train
from contrastive_curvature.errors import InputError, UnsupportedError

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


def test_harmed_and_unknown_faces(faces_root):
    made, again, other = (make_faces(halves, faces_root, seed) for seed in (0, 0, 1))
    assert {name: len(found) for name, found in made.unknown.items()} == {"mnist": 5, "letters": 12, "cifar10": 2}
    assert set(made.harmed) == {(kind, level) for kind in KINDS for level in LEVELS}
    # Gus has one image, so no right answer
    assert made.test_labels[made.harmed_rows].tolist() == [3, 5]
    mild, strong = made.harmed["contrast", 1], made.harmed["contrast", 5]
    unharmed = made.test_features[made.harmed_rows]
    assert 0 < np.abs(mild - unharmed).sum() < np.abs(strong - unharmed).sum()
    assert all(np.array_equal(made.harmed[key], again.harmed[key]) for key in made.harmed)
    assert all(np.array_equal(made.unknown[key], again.unknown[key]) for key in made.unknown)
    assert not np.array_equal(made.harmed["noise", 3], other.harmed["noise", 3])


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("2\n", "numbers of folds"),
        ("0\t3\n", "numbers of folds"),
        (PAIRS.replace("2\t2\n", "2\t3\n", 1), "12 pairs, as its first line states, got 8"),
        (PAIRS.replace("Eve_F\t2\t3", "Eve_F\t2"), "NAME NUMBER NUMBER in fold 1"),
        (PAIRS.replace("Hal_I\t1\t2", "Hal_I\tone\t2"), "NAME NUMBER NUMBER in fold 2"),
        (PAIRS.replace("Ada_B\t1\tCy_D\t2", "Ada_B\t1\tAda_B\t2"), "of two people, in fold 1"),
        (PAIRS.replace("Gus_H\t1\tHal_I\t2", "Gus_H\t1\t2"), "of two people, in fold 2"),
    ],
)
def test_a_damaged_list_of_pairs_is_refused(text, wanted, tmp_path):
    path = tmp_path / "pairs.txt"
    path.write_text(text)
    with pytest.raises(InputError, match=wanted):
        read_pairs(path)


def test_a_pair_of_an_unknown_image_is_refused(faces_root):
    path = faces_root / "lfw-py" / "pairs.txt"
    path.write_text(PAIRS.replace("Hal_I\t1\t2", "Hal_I\t1\t7"))
    try:
        with pytest.raises(InputError, match=r"got image 7 of Hal_I"):
            make_faces(halves, faces_root, 0)
    finally:
        path.write_text(PAIRS)


@given(width=st.integers(1, 6), dim=st.integers(1, 5), spare=st.integers(1, 9), seed=st.integers(0, 99))
def test_a_linear_layer_is_found(width, dim, spare, seed):
    rng = np.random.default_rng(seed)
    weight, bias = rng.standard_normal((dim, width)), rng.standard_normal(dim)
    features = rng.standard_normal((width + 4 + spare, width)).astype(np.float32)
    outputs = (features @ weight.T + bias).astype(np.float32)
    found = linear_layer(features, outputs)
    assert np.abs(features.astype(np.float64) @ (found.weight - weight).T + found.bias - bias).max() < 1e-4
    assert found.error < 1e-6
    outputs[0, 0] += 0.01 * np.abs(outputs).max()
    with pytest.raises(InputError, match="outputs: expected a linear layer's"):
        linear_layer(features, outputs)


def test_features_that_do_not_determine_a_layer_are_refused():
    features = np.random.default_rng(0).standard_normal((9, 3)).astype(np.float32)
    with pytest.raises(InputError, match="features: expected more images than the 3 features and a bias have"):
        linear_layer(features[:3], features[:3])
    features[:, 2] = features[:, 0]
    with pytest.raises(InputError, match="got 9 of rank 3"):
        linear_layer(features, features)
    outputs = features.copy()
    outputs[0, 0] = np.nan
    features[:, 2] = features[:, 0] ** 2
    with pytest.raises(InputError, match="a linear layer's, got a relative deviation of nan"):
        linear_layer(features, outputs)


@pytest.fixture
def network_files(tmp_path):
    (tmp_path / "encoders").mkdir()
    for ending in ("param", "bin"):
        (tmp_path / "encoders" / f"mobilefacenet.{ending}").write_bytes(b"x")
    return tmp_path


def test_without_ncnn_the_error_says_what_to_install(network_files, monkeypatch):
    monkeypatch.setitem(sys.modules, "ncnn", None)
    with pytest.raises(UnsupportedError, match="pip install ncnn"):
        FaceNetwork(network_files)
    with pytest.raises(UnsupportedError, match="pip install ncnn"):
        RECIPES["faces"].make(network_files, network_files, 0)
    with pytest.raises(InputError, match=r"mobilefacenet\.param.*liguiyuan"):
        FaceNetwork(network_files / "elsewhere")


def fake_ncnn(code):
    """What the recipe uses of ncnn; a blob is the mean of the image and the length of the blob's name."""

    class Extractor:
        def input(self, name, mat):
            assert name == "data"
            self.mat = mat

        def extract(self, blob):
            return 0, [self.mat.mean(), len(blob)]

    class Mat:
        PixelType = SimpleNamespace(PIXEL_RGB="rgb")

        @staticmethod
        def from_pixels(pixels, kind, width, height):
            assert (kind, width, height) == ("rgb", 112, 112)
            assert pixels.flags.c_contiguous
            return pixels.astype(float)

    class Net:
        def __init__(self):
            self.opt = SimpleNamespace()
            self.load_param = self.load_model = lambda _path: code

        def create_extractor(self):
            half = {name: value for name, value in vars(self.opt).items() if "fp16" in name}
            assert len(half) == 3
            assert not any(half.values())
            return Extractor()

    return SimpleNamespace(Net=Net, Mat=Mat)


def test_features_and_outputs_are_the_blobs_that_the_data_names(network_files, monkeypatch):
    monkeypatch.setitem(sys.modules, "ncnn", fake_ncnn(0))
    images = [np.full((SIDE, SIDE, 3), shade, dtype=np.uint8)[:, ::-1] for shade in (7, 9)]
    features, outputs = FaceNetwork(network_files)(images)
    assert features.tolist() == [[7, len("conv_6dw7_7_batchnorm")], [9, len("conv_6dw7_7_batchnorm")]]
    assert outputs.tolist() == [[7, len("fc1")], [9, len("fc1")]]
    monkeypatch.setitem(sys.modules, "ncnn", fake_ncnn(-1))
    with pytest.raises(InputError, match=r"mobilefacenet\.param: expected a network of ncnn"):
        FaceNetwork(network_files)


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
        found = harm_text([text], "deletion", level, seed)[0].split()
        assert [word for word in left if word in found] == found
        left = found
        counts.append(len(found))
    shares = (0.15, 0.30, 0.45, 0.60, 0.80)
    assert counts == [len(words) - min(len(words) - 1, max(1, round(share * len(words)))) for share in shares]


@given(words=WORDS, level=st.sampled_from(LEVELS), seed=st.integers(0, 99))
def test_typos_are_as_many_as_the_level_says(words, level, seed):
    text = " ".join(words)
    found = harm_text([text, text], "typos", level, seed)
    assert found == harm_text([text, text], "typos", level, seed)
    edits = max(1, round((0.04, 0.08, 0.14, 0.22, 0.35)[level - 1] * sum(map(len, words))))
    # swapping two letters costs two
    assert all(distance(text, one) <= 2 * edits for one in found)


def test_typos_grow_with_the_level():
    texts = ["what is the balance of my checking account", "please book a table for two"] * 20
    means = [np.mean([distance(*both) for both in zip(texts, harm_text(texts, "typos", level, 3), strict=True)])
             for level in LEVELS]  # fmt: skip
    assert means[0] > 0.5
    assert (np.diff(means) > 0).all()
    assert harm_text(texts, "typos", 3, 3) != harm_text(texts, "typos", 3, 4)


def test_harm_that_is_not_known_is_refused():
    with pytest.raises(InputError, match="kind: expected one of typos, deletion, got blur"):
        harm_text(["a"], "blur", 1, 0)
    for level in (0, 6, True, 1.5):
        with pytest.raises(InputError, match="level: expected a whole number from 1 to 5"):
            harm_text(["a"], "typos", level, 0)


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


def test_the_encoder_of_texts_takes_no_notice_of_padding():
    encoder = make_text_encoder(5).eval()
    rows = parts_of(["transfer money", "", "a"])
    with torch.no_grad():
        outputs, features = encoder(rows), encoder[:-1](rows)
        assert torch.allclose(encoder(rows[:1, : int((rows[0] > 0).sum())]), outputs[:1], atol=1e-6)
    assert outputs.shape == (3, 5)
    assert outputs.isfinite().all()
    assert (features >= 0).all()
    assert features.shape == (3, 256)


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
    monkeypatch.setattr(clinc150, "_HARMED", 6)
    made, again = (RECIPES["clinc150-64-supcon"].make(tmp_path, tmp_path, 0) for _ in range(2))
    names = ["alarm", "balance", "translate"]
    for part, labels in (("train", made.train_labels), ("val", made.calibration_labels), ("test", made.test_labels)):
        assert [names[label] for label in labels] == [intent for _, intent in content[part]]
    assert made.calibration_features.shape == (9, 256)
    assert made.unknown["outofscope"].shape == (2, 256)
    assert set(made.harmed) == {(kind, level) for kind in TEXT_KINDS for level in LEVELS}
    assert len(made.harmed_rows) == len(set(made.harmed_rows.tolist())) == 6
    outputs = {part: made.outputs(getattr(made, f"{part}_features")) for part in ("train", "test")}
    directions = {part: found / np.linalg.norm(found, axis=1, keepdims=True) for part, found in outputs.items()}
    nearest = (directions["test"] @ directions["train"].T).argmax(1)
    assert (made.train_labels[nearest] == made.test_labels).all()
    assert np.array_equal(made.test_features, again.test_features)
    assert all(np.array_equal(made.harmed[key], again.harmed[key]) for key in made.harmed)
    save_features(tmp_path / "a.npz", made)
    read = load_features(tmp_path / "a.npz")
    assert np.array_equal(read.calibration_features, made.calibration_features)
    assert np.array_equal(read.calibration_labels, made.calibration_labels)


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ({"val": []}, r"under 'val', got none"),
        ({"test": [["a", "alarm"], ["b"]]}, r"under 'test', got \['b'\]"),
        ({"train": [["a", 3]]}, r"under 'train', got \['a', 3\]"),
        ({"oos_test": [[" ", "oos"]]}, r"under 'oos_test'"),
        ({"val": [["a", "cooking"]]}, r"val: expected intents that train has, got cooking"),
    ],
)
def test_damaged_queries_are_refused(changed, wanted, tmp_path):
    write_queries(tmp_path, **changed)
    with pytest.raises(InputError, match=wanted):
        read_queries(tmp_path)


def test_queries_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"data_full\.json\.gz.*oos-eval"):
        read_queries(tmp_path)
    _, path = write_queries(tmp_path)
    for content in (b"no gzip", path.read_bytes()[:-30], gzip.compress(b"{"), gzip.compress(b"[1]")):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"data_full\.json\.gz: expected"):
            read_queries(tmp_path)


def test_names_are_those_of_the_table():
    assert {"faces", *(f"{name}-64-{loss}" for name in ("clinc150", "omniglot") for loss in LOSSES)} <= set(RECIPES)


def test_new_characters_are_judged(tmp_path, monkeypatch):
    write_omniglot_full(tmp_path, {"Greek": 2, "Korean": 2}, {"Tengwar": 3, "Angelic": 2})
    for name in ("MNIST", "FashionMNIST"):
        write_mnist(tmp_path, name, {"t10k": 4})
    monkeypatch.setattr(grey, "_TRAINING_OMNIGLOT", Training(epochs=1, batch=16, together=4))
    monkeypatch.setattr(grey, "_CHARACTERS", 4)
    monkeypatch.setattr(grey, "_SIZES_OMNIGLOT", Sizes(8, 24, 2, 3))
    grey._load_omniglot.cache_clear()
    made, again = (RECIPES["omniglot-64-supcon"].make(tmp_path, tmp_path, 0) for _ in range(2))
    grey._load_omniglot.cache_clear()
    assert made.train_features.shape == (8, 9216)
    assert set(made.train_labels) <= set(range(4))
    characters, counts = np.unique(made.test_labels, return_counts=True)
    assert set(characters) < set(range(4, 9))
    assert counts.tolist() == [6] * 4
    assert {name: len(found) for name, found in made.unknown.items()} == {"mnist": 3, "fashionmnist": 3}
    assert np.array_equal(made.weight, again.weight)
    assert np.array_equal(made.test_features, again.test_features)


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    together=st.integers(2, 5),
    batch=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_inputs_of_one_class_come_together(sizes, together, batch, seed):
    labels = torch.cat([torch.full((size,), label) for label, size in enumerate(sizes)])
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))]
    groups = sum(size // together for size in sizes)
    how, seen = Training(epochs=2, batch=batch * together, together=together), []

    def inputs(rows):
        seen.append(rows)
        return torch.ones(len(rows), 2)

    network = torch.nn.Linear(2, 2)
    if groups < batch:
        with pytest.raises(InputError, match=f"at least {batch * together}, one batch, got {groups * together}"):
            train(network, inputs, labels, "contrastive", how, seed)
        return
    train(network, inputs, labels, "contrastive", how, seed)
    assert len(seen) == 2 * (groups // batch)
    for epoch in (seen[: len(seen) // 2], seen[len(seen) // 2 :]):
        rows = torch.cat(epoch)
        assert len(rows.unique()) == len(rows)
        assert (labels[rows].view(-1, together) == labels[rows].view(-1, together)[:, :1]).all()


def feature_arrays(**changed):
    rng = np.random.default_rng(0)
    made = {name: rng.standard_normal((4, 3)) for name in ("train_features", "test_features", "calibration_features")}
    made |= {name: np.arange(4) for name in ("train_labels", "test_labels", "calibration_labels")}
    made |= {"weight": rng.standard_normal((2, 3)), "bias": np.zeros(2), "pairs_features": rng.standard_normal((6, 3))}
    made |= {"pairs_left": np.array([0, 5]), "pairs_right": np.array([5, 1]), "pairs_fold": np.array([0, 1])}
    made |= {"pairs_same": np.array([True, False]), "pairs_people_in_train": np.array([1, 0])}
    return {name: value for name, value in (made | changed).items() if value is not None}


def test_inputs_for_calibration_and_pairs_of_their_own_are_read(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, **feature_arrays())
    found = load_features(path)
    assert found.pairs.features.shape == (6, 3)
    assert found.pairs.people_in_train.tolist() == [True, False]
    assert found.calibration_features.dtype == np.float32
    save_features(tmp_path / "half.npz", found, half=True)
    with np.load(tmp_path / "half.npz") as archive:
        assert archive["pairs_features"].dtype == archive["calibration_features"].dtype == np.float16
    np.savez(path, **feature_arrays(pairs_features=None, pairs_left=[0, 3], pairs_right=[1, 2]))
    assert load_features(path).pairs.features is None


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ({"calibration_labels": None}, "calibration_labels: expected an array beside calibration_features"),
        ({"calibration_features": None}, "calibration_features: expected an array beside calibration_labels"),
        ({"calibration_labels": np.arange(3)}, "calibration_labels: expected 4, one for each input"),
        ({"calibration_features": np.ones((4, 2))}, "calibration_features: expected shape"),
        ({"pairs_features": np.ones((5, 3))}, "pairs_left: expected row numbers of the 5 pairs' inputs"),
        ({"pairs_features": None}, "pairs_left: expected row numbers of the 4 test inputs"),
        ({"pairs_features": np.ones((6, 2))}, "pairs_features: expected shape"),
        ({"pairs_people_in_train": np.array([1, 2])}, "pairs_people_in_train: expected 2 truth values"),
        ({"pairs_left": None}, "all of pairs_left, pairs_right"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changed, wanted, tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, **feature_arrays(**changed))
    with pytest.raises(InputError, match=wanted):
        load_features(path)
