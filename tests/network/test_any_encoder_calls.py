"""How encoders are called, what is taken out of what they return, texts, and the helpers for others' encoders."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from devices import DEVICES
from laplace import Laplace
from tables import covering, each
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.network.call import ModelCall
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.inputs import same_tokens

pytestmark = pytest.mark.parametrize("device", DEVICES)

N, DIM = 6, 3
LABELS = torch.arange(N) % 2


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, DIM).double()


class Whole(Base):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.inner(batch["x"])


class One(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Several(Base):
    def forward(self, x: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Tensor:
        assert labels is None
        return self.inner(x * attention_mask)


class Anything(Base):
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        assert not args
        assert set(kwargs) == {"x", "attention_mask"}
        return self.inner(kwargs["x"])


class Rest(Base):
    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        assert set(kwargs) == {"attention_mask"}
        return self.inner(x * kwargs["attention_mask"])


@covering(1, kind=[Whole, One, Several, Anything, Rest], wrapped=[False, True])
def test_a_mapping_arrives_as_forward_wants_it(device: str, kind: type[Base], wrapped: bool) -> None:
    model = kind().to(device)
    x = torch.randn(N, 4, dtype=torch.float64).to(device)
    batch = {"x": x, "attention_mask": torch.ones_like(x), "labels": LABELS.to(device)}
    if wrapped and kind is not Anything:
        # Its own forward takes anything.
        model = torch.nn.DataParallel(model) if device == "cpu" else model
    torch.testing.assert_close(ModelCall()(model, batch), kind().to(device).inner(x))
    assert set(batch) == {"x", "attention_mask", "labels"}


def returns(entries: Any) -> nn.Module:
    class Returns(Base):
        def forward(self, x: Tensor) -> Any:
            return entries(self.inner(x))

    return Returns()


UNCLEAR = [
    (lambda z: {"last_hidden_state": z[:, None]}, r"EncoderOutput\(model, 'last_hidden_state', pooling='mean'\)"),
    (lambda z: {"text_embeds": z, "image_embeds": z}, r"EncoderOutput\(model, 'text_embeds'\) or .*'image_embeds'"),
    (lambda z: {"first": z, "second": z}, r"'first' \(6, 3\), 'second' \(6, 3\)"),
    (lambda z: (z, z[:, None]), r"EncoderOutput\(model, 0\)"),
    (lambda _: "text", r"got a str\. Wrap it"),
    (lambda z: z[:, None], r"shape \(6, 1, 3\).*EncoderOutput\(model, pooling='mean'\)"),
    (lambda z: z[0], r"got shape \(3,\)\. One row is one embedding: pool or flatten"),
]


@each("entries, message", UNCLEAR)
def test_what_is_not_clear_is_refused_with_what_to_type(device: str, entries: Any, message: str) -> None:
    model, x = returns(entries).to(device), torch.randn(N, 4, dtype=torch.float64).to(device)
    with pytest.raises((cc.InputError, cc.InputTypeError), match=message):
        Encoder(model, x)


CLEAR = [
    lambda z: {"sentence_embedding": z, "token_embeddings": z[:, None], "pooler_output": 2 * z},
    lambda z: {"text_embeds": z, "last_hidden_state": z[:, None]},
    lambda z: {"anything": z, "count": torch.tensor(3), "ids": torch.ones(len(z), 2, dtype=torch.int64)},
]


@each("entries", CLEAR)
def test_what_is_clear_is_found(device: str, entries: Any) -> None:
    model, x = returns(entries).to(device), torch.randn(N, 4, dtype=torch.float64).to(device)
    torch.testing.assert_close(Encoder(model, x)(x), model.inner(x))


@each("pooling, side", product(["mean", "first", "last"], ["left", "right"]))
def test_pooling_counts_tokens_of_the_mask_alone(device: str, pooling: str, side: str) -> None:
    class Tokens(Base):
        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
            return {"last_hidden_state": self.inner(x)}

    model = Tokens().to(device)
    lengths = [5, 2, 3]
    x = torch.randn(3, 5, 4, dtype=torch.float64).to(device)
    mask = torch.tensor([[int(k < n) for k in range(5)] for n in lengths]).to(device)
    mask = mask.flip(1) if side == "left" else mask
    encoder = cc.EncoderOutput(model, "last_hidden_state", pooling=pooling)
    found = encoder({"x": x, "attention_mask": mask})
    pool = {"mean": lambda t: t.mean(0), "first": lambda t: t[0], "last": lambda t: t[-1]}[pooling]
    wanted = torch.stack([pool(model.inner(x[i])[mask[i] == 1]) for i in range(3)])
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(encoder({"x": x}), torch.stack([pool(model.inner(part)) for part in x]))


class Prompted(Base):
    """Prompt tuning: some tokens that are learned before those of the text; PEFT's models say how many."""

    def __init__(self, says: bool) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.randn(2, 4, dtype=torch.float64))
        if says:
            self.active_peft_config = SimpleNamespace(num_virtual_tokens=2)

    def forward(self, x: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        del attention_mask
        return {"last_hidden_state": self.inner(torch.cat([self.prompt.expand(len(x), 2, 4), x], dim=1))}


@each("pooling", ["mean", "first", "last"])
def test_a_mask_of_other_tokens_is_refused_or_extended(device: str, pooling: str) -> None:
    x, mask = torch.randn(3, 5, 4, dtype=torch.float64).to(device), torch.ones(3, 5, dtype=torch.int64).to(device)
    mask[1, 3:] = 0
    model = Prompted(says=True).to(device)
    encoder = cc.EncoderOutput(model, "last_hidden_state", pooling=pooling)
    found = encoder({"x": x, "attention_mask": mask})
    # Of the padded text alone, without its padding.
    alone = encoder({"x": x[1:2, :3], "attention_mask": mask[1:2, :3]})
    torch.testing.assert_close(found[1:2], alone)
    tokens = model(x[1:2, :3], mask)["last_hidden_state"]
    torch.testing.assert_close(alone, {"mean": tokens.mean(1), "first": tokens[:, 0], "last": tokens[:, -1]}[pooling])
    unknown = cc.EncoderOutput(Prompted(says=False).to(device), "last_hidden_state", pooling=pooling)
    for wrong in (mask, mask[:, None].expand(3, 5, 5)):
        with pytest.raises(
            cc.InputError, match=r"attention_mask: expected a mask of .* shape \(3, 7\), got shape \(3, 5"
        ):
            unknown({"x": x, "attention_mask": wrong})


def test_pooling_of_places_and_refused_options(device: str) -> None:
    model = nn.Conv2d(1, DIM, 1).to(device)
    x = torch.randn(2, 1, 4, 4).to(device)
    torch.testing.assert_close(cc.EncoderOutput(model, pooling="mean")(x), model(x).mean((2, 3)))
    with pytest.raises(cc.InputError, match=r"None or one of \['mean', 'first', 'last'\], got 'max'"):
        cc.EncoderOutput(model, pooling="max")
    named = cc.EncoderOutput(returns(lambda z: {"a": z, "b": z}).to(device), "c")
    with pytest.raises(cc.InputError, match=r"output: expected one of the outputs of Returns, \['a', 'b'\], got 'c'"):
        named(torch.randn(2, 4, dtype=torch.float64).to(device))


WORDS = {word: k + 1 for k, word in enumerate(["a", "cat", "dog", "sat", "ran", "red", "blue"])}


class Sentences(nn.Module):
    """As a SentenceTransformer: ``preprocess`` pads to the longest text, ``forward`` takes and returns mappings."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.dense = nn.Embedding(len(WORDS) + 1, 5).double(), nn.Linear(5, DIM).double()

    def preprocess(self, inputs: list[str]) -> dict[str, Any]:
        rows = [[WORDS[word] for word in text.split()] for text in inputs]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        return {"input_ids": ids, "attention_mask": (ids != 0).long(), "modality": "text"}

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        mask = features["attention_mask"].unsqueeze(2)
        tokens = self.words(features["input_ids"]) * mask
        features["sentence_embedding"] = self.dense(tokens.sum(1) / mask.sum(1))
        return features


TEXTS = ["a cat sat", "a dog ran", "red cat", "a blue dog sat", "cat", "a red dog ran"]


def fitted(model: nn.Module, **options: Any) -> Any:
    la: Any = Laplace(model, "contrastive", **options)
    # Batches of two texts look like two views.
    la.fit([(TEXTS[:2], LABELS[:2]), (tuple(TEXTS[2:]), LABELS[2:])], progress_bar=False)
    la.optimize_prior_precision()
    return la


@pytest.mark.filterwarnings("ignore:calibrate. about")
def test_texts_are_what_their_tokens_are(device: str) -> None:
    model = Sentences().to(device)
    la = fitted(model)
    of_tokens: Any = Laplace(model, "contrastive")
    parts = [model.preprocess(TEXTS[:2]), model.preprocess(TEXTS[2:])]
    of_tokens.fit([(parts[0], LABELS[:2]), (parts[1], LABELS[2:])], progress_bar=False)
    of_tokens.optimize_prior_precision()
    found, wanted = la(TEXTS), of_tokens(model.preprocess(TEXTS))
    torch.testing.assert_close(found.mu, wanted.mu)
    torch.testing.assert_close(found.kappa, wanted.kappa)
    la.calibrate([TEXTS[:3], (TEXTS[3:], LABELS[3:])], progress_bar=False)
    assert la(["a cat sat"]).p_value.shape == (1,)


def test_texts_in_ggn_training_and_views(device: str) -> None:
    model, labels = Sentences().to(device), LABELS.to(device)
    tokens = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in model.preprocess(TEXTS).items()}
    torch.testing.assert_close(cc.ggn(model, TEXTS, labels), cc.ggn(model, tokens, labels))
    learner = cc.OnlineLaplace(model, probe=TEXTS[:3], n_data=N)
    learner(TEXTS, labels).backward()
    torch.optim.SGD(model.parameters(), 0.01).step()
    options = {"loss": cc.InfoNCELoss()}
    la: Any = Laplace(model, "contrastive", backend_kwargs=options)
    la.fit([(TEXTS[:3], TEXTS[3:])], progress_bar=False)
    of_tokens: Any = Laplace(model, "contrastive", backend_kwargs=options)
    of_tokens.fit([(model.preprocess(TEXTS[:3]), model.preprocess(TEXTS[3:]))], progress_bar=False)
    torch.testing.assert_close(la.typical_norm, of_tokens.typical_norm)


def test_texts_without_a_tokenizer_are_refused(device: str) -> None:
    model = nn.Linear(4, DIM).to(device)
    la: Any = Laplace(model, "contrastive")
    with pytest.raises(cc.InputTypeError, match=r"got a list of texts\. This encoder has no method 'tokenize'"):
        la.fit([(TEXTS, LABELS)], progress_bar=False)
    with pytest.raises(cc.InputTypeError, match=r"x: expected a list of texts, got one text\. Pass \[text\]"):
        cc.ggn(Sentences().to(device), "a cat", LABELS.to(device))  # type: ignore[arg-type]


def test_an_exported_graph_of_texts_takes_tokens(device: str, tmp_path: Path) -> None:
    model = Sentences().to(device)
    la = fitted(model)
    la.export(tmp_path / "model.pt2", TEXTS, dynamic_axes={"input_ids": [1], "attention_mask": [1]})
    served = torch.export.load(tmp_path / "model.pt2").module()
    some = ["a red dog", "cat"]
    tokens = {k: v.to(device) for k, v in model.preprocess(some).items() if isinstance(v, Tensor)}
    torch.testing.assert_close(served(tokens)[0], la(some).mu)


def _tokens(device: str, *rows: str) -> dict[str, Tensor]:
    mask = torch.tensor([[int(digit) for digit in row] for row in rows]).to(device)
    return {"input_ids": 7 * mask, "attention_mask": mask}


@each("dtype", [torch.int64, torch.bool])
def test_padding_goes_where_there_is_padding(device: str, dtype: torch.dtype) -> None:
    short, full = _tokens(device, "11", "11"), _tokens(device, "111", "111")
    for masked, wanted in ((("0011", "1111"), "0011"), (("1100", "1111"), "1100")):
        long = _tokens(device, *masked)
        for part in (short, long):
            part["attention_mask"] = part["attention_mask"].to(dtype)
        found = same_tokens([short, long])
        assert found[0]["attention_mask"].int().tolist() == [[int(digit) for digit in wanted]] * 2
        assert found[0]["input_ids"].tolist() == [[7 * int(digit) for digit in wanted]] * 2
        assert all(torch.equal(found[1][key], long[key]) for key in long)
    # Every batch has its own side, where it shows one.
    left, right = _tokens(device, "01", "11"), _tokens(device, "10", "11")
    found = same_tokens([left, full, right, _tokens(device, "110", "111")])
    assert found[0]["attention_mask"].tolist() == [[0, 0, 1], [0, 1, 1]]
    assert found[2]["attention_mask"].tolist() == [[1, 0, 0], [1, 1, 0]]
    for parts in ([_tokens(device, "11"), full], [_tokens(device, "11"), left, right, full]):
        with pytest.raises(cc.InputError, match=r"batches of 2 and 3 tokens whose masks do not show.*max_length"):
            same_tokens(parts)


@each("normalize", [False, True])
def test_with_last_layer_changes_no_embedding(device: str, normalize: bool) -> None:
    torch.manual_seed(0)
    parts = [nn.Linear(4, DIM), nn.Dropout(), nn.Tanh(), *([cc.L2Norm()] if normalize else [])]
    model = nn.Sequential(*parts).double().to(device)
    model[1].eval()
    x, labels = torch.randn(N, 4, dtype=torch.float64).to(device), LABELS.to(device)
    encoder = cc.with_last_layer(model, x)
    assert encoder.training
    assert not model[1].training
    encoder.eval()
    torch.testing.assert_close(nn.functional.normalize(encoder(x)), nn.functional.normalize(model(x)))
    assert encoder(x).norm(dim=1).std() > 1e-3
    assert cc.ggn(encoder, x, labels, subset_of_weights="last_layer").shape == (DIM * DIM,)
    # Half precision gets a layer in single precision.
    assert cc.with_last_layer(model.bfloat16(), x.bfloat16()).last_layer.weight.dtype == torch.float32


class Lora(nn.Module):
    """As peft's, whose adapters take what the layer takes."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer, self.merged = nn.Linear(5, DIM), False
        self.lora_A, self.lora_B = nn.Linear(5, 2, bias=False), nn.Linear(2, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base_layer(x)
        return out if self.merged else out + 0.5 * self.lora_B(self.lora_A(x))


class Head(nn.Module):
    """A linear layer behind a function, what follows it, and a normalisation inside ``forward``."""

    def __init__(self, layer: nn.Module, *after: nn.Module) -> None:
        super().__init__()
        self.trunk, self.layer, self.after = nn.Linear(4, 5), layer, nn.Sequential(*after)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.normalize(self.after(self.layer(self.trunk(x).tanh())))


def linear() -> nn.Linear:
    return nn.Linear(5, DIM)


LINEAR_ENDS: dict[str, Callable[[], list[nn.Module]]] = {
    "batch norm": lambda: [linear(), nn.BatchNorm1d(DIM)],
    "batch norm without weights": lambda: [linear(), nn.BatchNorm1d(DIM, affine=False), nn.Dropout()],
    "two layers": lambda: [nn.Linear(5, 5), nn.ReLU(), linear(), nn.BatchNorm1d(DIM)],
    "weight norm": lambda: [nn.utils.parametrizations.weight_norm(linear())],
    "spectral norm": lambda: [nn.utils.parametrizations.spectral_norm(linear())],
    "adapter and batch norm": lambda: [Lora(), nn.BatchNorm1d(DIM)],
}


@covering(1, inside=[False, True], end=LINEAR_ENDS)
def test_a_linear_end_is_one_layer(device: str, end: str, inside: bool) -> None:
    """In evaluation mode it is; the layer is solved for here from what the end makes of points of its own."""
    torch.manual_seed(0)
    parts = LINEAR_ENDS[end]()
    model = Head(*parts) if inside else nn.Sequential(nn.Linear(4, 5), nn.Tanh(), *parts)
    model = model.double().to(device)
    x, labels = torch.randn(N, 4, dtype=torch.float64).to(device), LABELS.to(device)
    for _ in range(3):
        model(3 * x + 1)
    model.eval()
    encoder = cc.with_last_layer(model, x)
    trunk = parts[:-2] if end == "two layers" else []
    phi = torch.cat([torch.zeros(1, 5), torch.eye(5)]).double().to(device)
    with torch.no_grad():
        z = nn.Sequential(*parts[len(trunk) :])(phi)
    weight, bias = encoder.last_layer.weight, encoder.last_layer.bias
    torch.testing.assert_close(weight, (z[1:] - z[0]).T)
    torch.testing.assert_close(bias, z[0])
    plain = nn.Linear(5, DIM).double().to(device)
    plain.weight.data, plain.bias.data = (z[1:] - z[0]).T.contiguous(), z[0].clone()
    first = [model.trunk, nn.Tanh(), *trunk] if isinstance(model, Head) else [*model[:2], *trunk]
    found = []
    for network in (encoder, nn.Sequential(*first, plain)):
        la: Any = Laplace(network, "contrastive", hessian_structure="diag", backend_kwargs={"negative_weight": 0.1})
        la.fit([(x, labels)], progress_bar=False)
        found.append((la(x).mu, la(x).kappa, la.H))
    torch.testing.assert_close(found[0][0], nn.functional.normalize(model(x)))
    torch.testing.assert_close(found[0], found[1])


class Beside(nn.Module):
    """Of linear layers, none whose input is all that the outputs depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, DIM), nn.Linear(4, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x.tanh()) * self.b(x).sigmoid()


@each("make", [lambda: nn.Sequential(nn.Linear(4, DIM), nn.LayerNorm(DIM)), Beside])
def test_any_other_end_gets_an_identity(device: str, make: Any) -> None:
    torch.manual_seed(0)
    model, x = make().double().eval().to(device), torch.randn(N, 4, dtype=torch.float64).to(device)
    encoder = cc.with_last_layer(model, x)
    assert torch.equal(encoder.last_layer.weight, torch.eye(DIM, dtype=torch.float64, device=device))
    torch.testing.assert_close(encoder(x), model(x))


def test_equal_points_do_not_show_a_linear_end(device: str) -> None:
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), Beside()), torch.randn(1, 4)
    model[2].a, model[2].b = nn.Linear(5, DIM), nn.Linear(5, DIM)
    assert cc.with_last_layer(model.to(device), x.expand(3, 4).to(device)).replaced is None


def test_with_last_layer_refuses(device: str) -> None:
    x = torch.randn(N, 4).to(device)
    linear, tanh = (nn.Sequential(nn.Linear(4, DIM), end).to(device) for end in (cc.L2Norm(), nn.Tanh()))
    with pytest.raises(cc.InputError, match="does not end in a linear layer, got layer"):
        cc.with_last_layer(linear, x)
    with pytest.raises(cc.InputError, match="x: expected a batch of at least one point"):
        cc.with_last_layer(tanh, x[:0])


class _WithClasses(nn.Module):
    """As trained with class weights: embeddings, or with labels the outputs of the layer of classes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.classes = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, label: Tensor | None = None) -> Tensor:
        z: Tensor = self.embed(x)
        return z if label is None else self.classes(z)


@pytest.mark.parametrize("weights", ["last_layer", "all"])
@pytest.mark.filterwarnings("ignore:no gradient reaches 15 of")
def test_labels_under_another_name_are_not_given_to_the_encoder(weights: str, device: str) -> None:
    x, y = torch.randn(12, 6, device=device), torch.arange(12, device=device) % 3
    model, batch = _WithClasses().to(device), {"x": x, "label": y}
    how = {"subset_of_weights": weights, "hessian_structure": "diag", "prior_precision": 1.0}
    named, plain = Laplace(model, "contrastive", dict_key_y="label", **how), Laplace(model.embed, "contrastive", **how)
    named.fit([batch])
    plain.fit([(x, y)])
    assert named.n_outputs == 4
    n = plain.H.numel()  # of all weights, those of the classes come last, and have no part in embeddings
    torch.testing.assert_close(named.H[:n], plain.H)
    assert bool((named.H[n:] == 0).all())
    torch.testing.assert_close(named({"x": x}).mu, plain(x).mu)
    operator = cc.ContrastiveGGNLinearOperator(model, cc.ContrastiveLoss(), None, [batch], dict_key_y="label")
    assert operator.shape[0] == sum(p.numel() for p in model.parameters())
