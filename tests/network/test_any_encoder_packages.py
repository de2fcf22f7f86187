"""Encoders of sentence-transformers, transformers, timm, Lightning and open_clip, small and with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from devices import DEVICES
from laplace import Laplace
from torch import Tensor, nn
from torch.nn import functional as F

import contrastive_curvature as cc

pytestmark = [
    pytest.mark.parametrize("device", DEVICES),
    # What the packages warn of at their import and when a model is made is not ours to change.
    pytest.mark.filterwarnings("ignore"),
]

WORDS = ["a", "cat", "dog", "sat", "ran", "red", "blue", "mat", "sun", "sea"]
TEXTS = ["a cat sat", "a red dog ran", "blue sea", "a dog sat", "red cat", "sun", "a mat", "a blue cat ran"]
LABELS = torch.arange(len(TEXTS)) % 2
IMAGES = torch.randn(len(TEXTS), 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def bert_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    folder = tmp_path_factory.mktemp("bert")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(vocabulary), encoding="utf-8")
    config = transformers.BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
    )
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained(folder)
    transformers.BertTokenizerFast(vocab_file=str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


def sentence_model(folder: Path, dense: nn.Module | None, normalize: bool) -> Any:
    package = pytest.importorskip("sentence_transformers")
    models = pytest.importorskip("sentence_transformers.models")
    torch.manual_seed(1)
    parts = [models.Transformer(str(folder)), models.Pooling(16, "mean")]
    if dense is not None:
        parts.append(models.Dense(16, 6, activation_function=dense))
    return package.SentenceTransformer(modules=[*parts, *([models.Normalize()] if normalize else [])], device="cpu")


def fit(model: nn.Module, batch: Any, device: str, **options: Any) -> Any:
    la: Any = Laplace(model.to(device), "contrastive", **options)
    loader = [(batch, LABELS)] if not isinstance(batch, dict) else [{**batch, "labels": LABELS}]
    la.fit(loader, progress_bar=False)
    la.optimize_prior_precision()
    return la


def check_everything(model: nn.Module, batch: Any, device: str, folder: Path, wanted: Tensor) -> None:
    """The default posterior, its predictions and files, the curvature of a batch, and training."""
    la = fit(model, batch, device)
    torch.testing.assert_close(la(batch).mu.cpu(), F.normalize(wanted), rtol=1e-4, atol=1e-5)
    la.calibrate([batch], progress_bar=False)
    assert la(batch).p_value.shape == LABELS.shape
    tensors = batch if not isinstance(batch, dict) else {k: v.to(device) for k, v in batch.items()}
    tensors = tensors.to(device) if isinstance(tensors, Tensor) else tensors
    size = sum(p.numel() for p in la.model.last_layer.parameters())
    assert cc.ggn(model, tensors, LABELS.to(device), subset_of_weights="last_layer").shape == (size,)
    learner = cc.OnlineLaplace(model, probe=tensors, n_data=len(LABELS))
    learner(tensors, LABELS.to(device)).backward()
    assert len(learner.laplace()(tensors)) == len(LABELS)


@pytest.mark.parametrize("normalize", [False, True])
def test_sentence_transformers_with_dense(device: str, bert_folder: Path, tmp_path: Path, normalize: bool) -> None:
    model = sentence_model(bert_folder, nn.Identity(), normalize)
    wanted = model.encode(TEXTS, convert_to_tensor=True).cpu()
    check_everything(model, TEXTS, device, tmp_path, wanted)
    if not normalize:
        model.prompts, model.default_prompt_name = {"query": "red blue "}, "query"
        for with_prompt in (True, False):
            model[1].include_prompt = with_prompt
            prompted = model.encode(TEXTS, convert_to_tensor=True).cpu()
            assert not torch.allclose(prompted, wanted)
            found = fit(model, TEXTS, device)(TEXTS).mu.cpu()
            torch.testing.assert_close(found, F.normalize(prompted), rtol=1e-4, atol=1e-5)
        return
    tokens = {k: v for k, v in model.preprocess(TEXTS).items() if isinstance(v, Tensor)}
    torch.testing.assert_close(fit(model, tokens, device)(tokens).kappa, fit(model, TEXTS, device)(TEXTS).kappa)


@pytest.mark.parametrize(("dense", "normalize"), [(None, True), (nn.Identity(), False)], ids=["pooling", "dense"])
def test_truncated_sentence_transformers(
    device: str, bert_folder: Path, tmp_path: Path, dense: nn.Module | None, normalize: bool
) -> None:
    model = sentence_model(bert_folder, dense, normalize).to(device)
    whole = model.encode(TEXTS, convert_to_tensor=True).cpu()
    model.truncate_dim = 4
    wanted = model.encode(TEXTS, convert_to_tensor=True).cpu()
    assert torch.equal(wanted, whole[:, :4])
    with pytest.raises(cc.UnsupportedError, match=r"with_last_layer\(encoder, x\).*subset_of_weights='all'"):
        fit(model, TEXTS, device)
    encoder = cc.with_last_layer(model, TEXTS)
    assert encoder.last_layer.weight.shape == (4, 16 if isinstance(dense, nn.Identity) else 4)
    check_everything(encoder, TEXTS, device, tmp_path, wanted)
    la = fit(model, TEXTS, device, subset_of_weights="all", hessian_structure="diag")
    torch.testing.assert_close(la(TEXTS).mu.cpu(), F.normalize(wanted), rtol=1e-4, atol=1e-5)
    # As of an encoder whose forward cuts and normalises what the Dense layer puts out.
    if isinstance(dense, nn.Identity):
        model.truncate_dim = None
        layer = model[2].linear
        layer.weight, layer.bias = nn.Parameter(layer.weight.detach()[:4]), nn.Parameter(layer.bias.detach()[:4])
        layer.out_features = 4
        torch.testing.assert_close(fit(encoder, TEXTS, device)(TEXTS).kappa, fit(model, TEXTS, device)(TEXTS).kappa)


def test_transformers_name_their_outputs(device: str, bert_folder: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.BertModel.from_pretrained(bert_folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(bert_folder)
    tokens = dict(tokenizer(TEXTS, padding=True, return_tensors="pt"))
    with pytest.raises(cc.InputTypeError, match=r"'pooler_output'\) or .*EncoderOutput\(model, 'last_hidden_state'"):
        fit(model, tokens, device)
    mean = cc.EncoderOutput(model, "last_hidden_state", pooling="mean")
    hidden, mask = model.cpu()(**tokens).last_hidden_state.detach(), tokens["attention_mask"].unsqueeze(2)
    wanted = (hidden * mask).sum(1) / mask.sum(1)
    on_device = {k: v.to(device) for k, v in tokens.items()}
    check_everything(cc.with_last_layer(mean.to(device), on_device), tokens, device, tmp_path, wanted)


def test_transformers_with_a_projection(device: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = transformers.CLIPVisionConfig(**sizes, image_size=32, patch_size=16, projection_dim=6)
    text = transformers.CLIPTextConfig(**sizes, vocab_size=20, projection_dim=6, bos_token_id=18, eos_token_id=19)
    torch.manual_seed(0)
    whole = transformers.CLIPModel(
        transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=6)
    ).eval()
    whole.save_pretrained(tmp_path / "clip")
    tokens = torch.randint(1, 18, (len(TEXTS), 7)).index_fill(1, torch.tensor([6]), 19)
    for kind, batch, public in (
        ("Vision", {"pixel_values": IMAGES}, whole.get_image_features),
        ("Text", {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}, whole.get_text_features),
    ):
        model = getattr(transformers, f"CLIP{kind}ModelWithProjection").from_pretrained(tmp_path / "clip").eval()
        (tmp_path / kind).mkdir()
        check_everything(model, batch, device, tmp_path / kind, public(**batch).pooler_output.detach())


@pytest.mark.parametrize("classes", [0, 6])
def test_timm(device: str, tmp_path: Path, classes: int) -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model("test_vit", pretrained=False, num_classes=classes, img_size=32).eval()
    wanted = model(IMAGES).detach()
    if not classes:
        # A fresh layer norm at the end: all outputs have one norm, and none is normalised.
        assert float(wanted.norm(dim=1).std()) < 1e-3
        with pytest.raises(cc.UnsupportedError, match=r"no linear layer computes the raw outputs.*with_last_layer"):
            fit(model, IMAGES, device)
        model = cc.with_last_layer(model.to(device), IMAGES)
    check_everything(model, IMAGES, device, tmp_path, wanted)


def test_open_clip(device: str, tmp_path: Path) -> None:
    open_clip = pytest.importorskip("open_clip")
    vision = open_clip.CLIPVisionCfg(layers=1, width=16, head_width=8, patch_size=16, image_size=32)
    text = open_clip.CLIPTextCfg(context_length=8, vocab_size=20, width=16, heads=2, layers=1)
    torch.manual_seed(0)
    model = open_clip.CLIP(embed_dim=6, vision_cfg=vision, text_cfg=text).eval()
    with pytest.raises(cc.InputTypeError, match=r"got a tuple .*EncoderOutput\(model, 0\)"):
        fit(model, IMAGES, device)
    wanted = model.cpu().visual(IMAGES).detach()
    with pytest.raises(cc.UnsupportedError, match="with_last_layer"):
        fit(model.visual, IMAGES, device)
    assert torch.equal(wanted, model.cpu().encode_image(IMAGES))
    check_everything(cc.with_last_layer(model.visual.to(device), IMAGES), IMAGES, device, tmp_path, wanted)
    # Its whole forward normalises what no module puts out.
    whole = cc.EncoderOutput(model, 0)
    with pytest.raises(cc.UnsupportedError, match=r"normalises its output inside forward .*has norm 1"):
        fit(whole, IMAGES, device)
