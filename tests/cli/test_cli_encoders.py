"""``--encoder``: a function of the user, timm, sentence-transformers; recorded, used again, never a stranger's code."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_support import Run, error_of, opened, rewrite_encoder
from test_cli_score import column, read
from torch import nn

from contrastive_curvature.apps.cli.saved import open_posterior

pytest.importorskip("PIL")

MINE = """
import torch
from torch import nn


def encoder(width=4, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, width))


def precise(dtype):
    return encoder().to(getattr(torch, dtype))


def with_transform():
    from PIL import Image

    def transform(image):
        small = image.resize((8, 8), Image.Resampling.BILINEAR)
        return torch.tensor(list(small.tobytes()), dtype=torch.float32).view(192) / 255

    return encoder(), transform


def number():
    return 3


def fails():
    raise RuntimeError("no weights here")


def leaves():
    raise SystemExit(0)


def bad_transform(kind):
    def transform(image):
        if kind == "raises":
            raise OSError("no such table")
        if kind == "leaves":
            raise SystemExit(0)
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
    _, encoder = open_posterior(Path("p"), f"{images}:encoder")
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


def test_features_of_the_users_encoder(run: Run, images: Path) -> None:
    from torch.utils.data import DataLoader, TensorDataset

    import contrastive_curvature as cc

    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 4))
    x, labels = torch.randn(60, 192), torch.arange(60) % 3
    cc.features(module, DataLoader(TensorDataset(x, labels), batch_size=20), "saved")
    run("fit", "saved", "--out", "p", "--encoder", f"{images}:encoder", "--calibration-share", 0.5)
    np.savez("inputs.npz", inputs=x.numpy())
    again = ("--encoder", f"{images}:encoder", "--alpha", 0.1)
    run("score", "p", "saved", "--out", "features.csv", *again)
    run("score", "p", "inputs.npz", "--out", "inputs.csv", *again)
    # The same inputs, once from saved features: one matrix product in batches of another size.
    np.testing.assert_allclose(
        column(read("features.csv"), "uncertainty"), column(read("inputs.csv"), "uncertainty"), rtol=1e-4
    )
    np.savez("bare.npz", features=np.ones((3, 16)))
    assert "bare features" in error_of(run("score", "p", "bare.npz", "--out", "none.csv", *again, code=2))


@pytest.mark.parametrize(
    ("function", "options", "wanted"),
    [
        ("number", "{}", "a torch.nn.Module"),
        ("fails", "{}", "no weights here"),
        ("leaves", "{}", "SystemExit"),
        ("bad_transform", '{"kind": "raises"}', "no such table"),
        ("bad_transform", '{"kind": "leaves"}', "SystemExit"),
        ("bad_transform", '{"kind": "list"}', "a list"),
        ("nothing", "{}", "got none of that name"),
        ("encoder", '{"nonsense": 1}', "nonsense"),
        ("encoder", "[1]", "JSON object"),
        ("encoder", '{"seed": NaN}', "JSON object"),
    ],
)
def test_functions_that_give_no_encoder(run: Run, images: Path, function: str, options: str, wanted: str) -> None:
    fit = ("fit", "train", "--out", "p", "--encoder", f"{images}:{function}", "--encoder-options", options)
    error = error_of(run(*fit, code=2))
    assert wanted in error
    assert function in error or "--encoder-options" in error
    assert "train/cat/0.png" in error or function != "bad_transform"
    assert not Path("p").exists()


def test_a_module_that_ends_the_process_is_an_error(run: Run, images: Path) -> None:
    Path(f"{images}_ends.py").write_text("raise SystemExit(0)\n")
    error = error_of(run("fit", "train", "--out", "p", "--encoder", f"{images}_ends:encoder", code=2))
    assert "SystemExit" in error
    assert not Path("p").exists()


@pytest.mark.parametrize("kind", ["raises", "leaves"])
def test_a_transform_of_texts_that_fails_is_named(run: Run, images: Path, kind: str) -> None:
    Path("t.csv").write_text("text,label\nred,a\nblue,b\n")
    options = ("--encoder", f"{images}:bad_transform", "--encoder-options", json.dumps({"kind": kind}))
    error = error_of(run("fit", "t.csv", "--out", "p", *options, code=2))
    assert "bad_transform" in error
    assert "t.csv" in error


def test_class_folders_that_are_links(run: Run, images: Path) -> None:
    Path("linked").mkdir()
    Path("linked/dog").mkdir()
    for file in Path("train/dog").iterdir():
        Path("linked/dog", file.name).symlink_to(file.absolute())
    Path("linked/cat").symlink_to(Path("train/cat").absolute())
    found, wanted = opened("linked"), opened("train")
    assert found.ids == wanted.ids
    assert found.classes.tolist() == wanted.classes.tolist()
    Path("linked/null").symlink_to("/dev/null")
    assert opened("linked").ids == wanted.ids
    for name, target in (("fox", "nowhere"), ("circle", "circle")):
        Path("linked", name).symlink_to(target)
        fit = ("fit", "linked", "--out", "p", "--encoder", f"{images}:encoder")
        assert f"linked/{name}: expected" in error_of(run(*fit, code=2))
        Path("linked", name).unlink()


def test_a_picture_that_unpacks_to_too_much_is_named(run: Run, images: Path) -> None:
    from PIL import Image, PngImagePlugin

    notes = PngImagePlugin.PngInfo()
    notes.add_text("note", "x" * (PngImagePlugin.MAX_TEXT_CHUNK + 1), zip=True)
    Image.new("RGB", (8, 8)).save("train/dog/3.png", pnginfo=notes)
    error = error_of(run("fit", "train", "--out", "p", "--encoder", f"{images}:encoder", code=2))
    assert "train/dog/3.png" in error


@pytest.mark.parametrize("text", ["mine", ":f", "mine:", "no_such_module_anywhere:f"])
def test_texts_that_name_no_encoder(run: Run, images: Path, text: str) -> None:
    assert "--encoder" in error_of(run("fit", "train", "--out", "p", "--encoder", text, code=2))


def test_a_picture_that_cannot_be_read_is_named(run: Run, images: Path) -> None:
    whole = Path("train/dog/3.png").read_bytes()
    Path("train/dog/3.png").write_bytes(whole[: len(whole) // 2])
    error = error_of(run("fit", "train", "--out", "p", "--encoder", f"{images}:encoder", code=2))
    assert "train/dog/3.png" in error
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
    Path("bad.pth").write_bytes(b"nothing")
    assert "timm:test_resnet" in error_of(run(*fit, '{"checkpoint_path": "bad.pth"}', "--overwrite", code=2))
    assert "nowhere" in error_of(run(*fit, '{"checkpoint_path": "nowhere"}', "--overwrite", code=2))


def test_names_that_timm_does_not_know_and_no_timm(run: Run, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("timm")
    fit = ("fit", "train", "--out", "p", "--encoder")
    assert "resnet18" in error_of(run(*fit, "timm:resnet1", code=2))
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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_encoders_of_another_precision(run: Run, images: Path, dtype: str) -> None:
    again = ("--encoder", f"{images}:precise")
    run("fit", "train", "--out", "p", *again, "--encoder-options", json.dumps({"dtype": dtype}))
    run("score", "p", "known", "--out", "images.csv", *again)
    from PIL import Image

    files = opened("known").files  # type: ignore[attr-defined]
    pixels = [np.asarray(Image.open(file), dtype=np.float32).transpose(2, 0, 1) / 255 for file in files]
    np.savez("inputs.npz", inputs=np.stack(pixels))
    run("score", "p", "inputs.npz", "--out", "inputs.csv", *again)
    assert column(read("images.csv"), "uncertainty").tolist() == column(read("inputs.csv"), "uncertainty").tolist()
