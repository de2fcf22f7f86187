"""``--encoder``: a function of the user, timm, sentence-transformers; recorded, used again, never a stranger's code."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_support import Run, error_of, rewrite_encoder
from tables import each
from test_cli_score import read
from torch import nn

from contrastive_curvature.apps.cli.saved import open_posterior

pytest.importorskip("PIL")

MINE = """
import torch
from torch import nn


def encoder(width=4, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, width))


def with_transform():
    from PIL import Image

    def transform(image):
        small = image.resize((8, 8), Image.Resampling.BILINEAR)
        return torch.tensor(list(small.tobytes()), dtype=torch.float32).view(192) / 255

    return encoder(), transform


def number():
    return 3


def leaves():
    raise SystemExit(0)


def bad_transform(kind):
    def transform(image):
        if kind == "raises":
            raise OSError("no such table")
        return [1.0]

    return encoder(), transform
"""


@pytest.fixture
def images(place: Path) -> Path:
    """Two classes of pictures in folders, ``mine.py``, and a module name that no other test has imported."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for part in ("train", "known"):
        for label, scale in (("cat", 1), ("dog", 3)):
            folder = place / part / label
            folder.mkdir(parents=True)
            for k in range(12):
                picture = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8) // scale
                Image.fromarray(picture).save(folder / f"{k}.png")
    name = f"mine_{abs(hash(str(place)))}"
    (place / f"{name}.py").write_text(MINE)
    yield Path(name)
    sys.modules.pop(name, None)
    sys.path[:] = [each for each in sys.path if each != str(place)]


def test_a_function_of_the_user_is_recorded_and_used_again(run: Run, images: Path) -> None:
    fit = ("fit", "train", "--encoder", f"{images}:encoder", "--encoder-options", '{"width": 3}')
    found = json.loads(run(*fit, "--out", "p", "--calibrate", "known", "--json").stdout)
    assert (found["dimension"], found["inputs"], found["calibration_inputs"]) == (3, 24, 24)
    # The folder may come from anybody: it names code, and does not run it.
    assert f"--encoder {images}:encoder" in error_of(run("score", "p", "train", "--out", "none.csv", code=2))
    again = ("--encoder", f"{images}:encoder")  # with the options that the folder remembers
    run("score", "p", "train", "--out", "scores.csv", *again, "--alpha", 0.1, "--batch-size", 5)
    without = ("score", "p", "train", "--out", "none.csv", "--encoder-options", '{"width": 3}')
    assert "--encoder" in error_of(run(*without, code=2))
    rows = read("scores.csv")
    assert rows[0]["id"] == "cat/0.png"
    assert rows[-1]["id"] == "dog/9.png"
    from PIL import Image

    pixels = torch.from_numpy(np.asarray(Image.open("train/cat/0.png"), dtype=np.float32).transpose(2, 0, 1) / 255)
    _, encoder = open_posterior(Path("p"), encoder=f"{images}:encoder")
    mu = nn.functional.normalize(encoder.module(pixels.unsqueeze(0)), dim=1)
    np.testing.assert_allclose([float(rows[0][f"mu_{k}"]) for k in range(3)], mu[0].detach().numpy(), atol=1e-6)
    # Recorded, and overridden by other weights, another width.
    for options in ('{"width": 3, "seed": 1}', '{"width": 5}'):
        score = ("score", "p", "train", "--out", "none.csv", "--encoder", f"{images}:encoder")
        error = error_of(run(*score, "--encoder-options", options, code=2))
        assert "the encoder that the posterior was saved from" in error
    assert not Path("none.csv").exists()


def test_a_transform_of_the_user(run: Run, images: Path) -> None:
    from PIL import Image

    Image.new("RGB", (30, 20), "red").save("train/cat/large.png")
    plain = ("fit", "train", "--out", "p", "--encoder")
    assert "one shape" in error_of(run(*plain, f"{images}:encoder", code=2))
    run(*plain, f"{images}:with_transform", "--quiet")
    run("score", "p", "train", "--out", "scores.csv", "--encoder", f"{images}:with_transform")
    assert len(read("scores.csv")) == 25


@each(
    "function, options, wanted",
    [
        ("number", "{}", "a torch.nn.Module"),
        ("leaves", "{}", "SystemExit"),
        ("bad_transform", '{"kind": "raises"}', "no such table"),
        ("bad_transform", '{"kind": "list"}', "a list"),
        ("nothing", "{}", "got none of that name"),
        ("encoder", '{"nonsense": 1}', "nonsense"),
        ("encoder", "[1]", "JSON object"),
    ],
)
def test_functions_that_give_no_encoder(run: Run, images: Path, function: str, options: str, wanted: str) -> None:
    fit = ("fit", "train", "--out", "p", "--encoder", f"{images}:{function}", "--encoder-options", options)
    error = error_of(run(*fit, code=2))
    assert wanted in error
    assert "train/cat/0.png" in error or function != "bad_transform"
    assert "--encoder" in error_of(run("fit", "train", "--out", "p", "--encoder", "no_such_module:f", code=2))
    assert not Path("p").exists()


def test_a_model_of_timm(run: Run, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timm = pytest.importorskip("timm")
    torch.save(timm.create_model("test_resnet", num_classes=7).state_dict(), "weights.pth")
    fit = ("fit", "train", "--out", "p", "--encoder", "timm:test_resnet", "--batch-size", 8, "--encoder-options")
    run(*fit, '{"checkpoint_path": "weights.pth"}', "--quiet")
    run("score", "p", "known", "--out", "scores.csv", "--batch-size", 8)
    model = timm.create_model("test_resnet", num_classes=0, checkpoint_path="").eval()
    state = {key: value for key, value in torch.load("weights.pth").items() if not key.startswith("fc.")}
    model.load_state_dict(state)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
    from PIL import Image

    with torch.no_grad():
        mu = nn.functional.normalize(model(transform(Image.open("known/cat/0.png")).unsqueeze(0)), dim=1)
    # The batch of one goes through other kernels than the batch of eight.
    np.testing.assert_allclose(float(read("scores.csv")[0]["mu_0"]), float(mu[0, 0]), atol=1e-4)
    # Recorded with its place: the folder is used from elsewhere, too.
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    run("score", "../p", "../known", "--out", "../again.csv", "--batch-size", 8)
    monkeypatch.chdir("..")
    assert read("again.csv") == read("scores.csv")


def test_names_that_timm_does_not_know_and_no_timm(run: Run, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("timm")
    fit = ("fit", "train", "--out", "p", "--encoder")
    assert "resnet1" in error_of(run(*fit, "timm:resnet1", code=2))
    monkeypatch.setitem(sys.modules, "timm", None)
    assert "pip install timm" in error_of(run(*fit, "timm:resnet18", code=2))
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    Path("t.csv").write_text("text,label\nred,a\n")
    error = error_of(run("fit", "t.csv", "--out", "p", "--encoder", "sentence-transformers:x", code=2))
    assert "pip install sentence-transformers" in error


@pytest.fixture
def sentences(place: Path) -> Path:
    """A tiny model of sentence-transformers with random weights, and ``train.csv`` with texts of two classes."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("sentence_transformers")
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red", "blue", "apple", "pear", "car", "bus"]
    Path("vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast("vocab.txt").save_pretrained("bert")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig(vocab_size=len(words), **sizes)).save_pretrained("bert")
    parts = [Transformer("bert"), Pooling(8, "mean"), Dense(8, 4, activation_function=nn.Identity()), Normalize()]
    SentenceTransformer(modules=parts, device="cpu").save("model")
    rows = [("red apple", "fruit"), ("blue pear", "fruit"), ("red car", "vehicle"), ("blue bus", "vehicle")] * 6
    Path("train.csv").write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in rows))
    return place / "model"


@pytest.mark.filterwarnings("ignore")
def test_a_model_of_sentence_transformers_and_its_own_code(run: Run, sentences: Path) -> None:
    from sentence_transformers import SentenceTransformer

    fit = ("fit", "train.csv", "--encoder", f"sentence-transformers:{sentences}", "--out", "p")
    run(*fit, "--quiet")
    run("score", "p", "train.csv", "--out", "scores.csv")
    wanted = SentenceTransformer(str(sentences), device="cpu").encode(["red apple"])[0]
    rows = read("scores.csv")
    np.testing.assert_allclose([float(rows[0][f"mu_{k}"]) for k in range(4)], wanted, atol=1e-5)
    assert "Dense" not in run("info", "p").stdout
    run(*fit, "--quiet", "--overwrite", "--encoder-options", '{"truncate_dim": 3}')
    run("score", "p", "train.csv", "--out", "cut.csv")
    found = [float(value) for name, value in read("cut.csv")[0].items() if name.startswith("mu_")]
    np.testing.assert_allclose(found, wanted[:3] / np.linalg.norm(wanted[:3]), atol=1e-5)
    # Python files beside a local model would be imported.
    listed = json.loads((sentences / "modules.json").read_text())
    listed[-1]["type"] = "own.Bomb"
    (sentences / "modules.json").write_text(json.dumps(listed))
    (sentences / "own.py").write_text("open('exploded', 'w')\n")
    assert "trust_remote_code" in error_of(run(*fit, "--overwrite", code=2))
    # Nor does a folder that somebody else wrote allow it.
    rewrite_encoder("p", options={"model_kwargs": {"trust_remote_code": True}})
    assert "trust_remote_code" in error_of(run("score", "p", "train.csv", "--out", "none.csv", code=2))
    assert not Path("exploded").exists()
