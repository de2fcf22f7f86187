"""What of an encoder a saved posterior is compared with: its state, and its outputs for a few inputs."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import DEVICES
from hypothesis import given
from hypothesis import strategies as st
from laplace import Laplace
from saved_cases import batches, encoder, inputs, predicts_the_same
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.network.digest import (
    dense_parts,
    encoder_digest,
    encoder_fingerprint,
    state_tensors,
    trunk_fingerprint,
)

pytestmark = pytest.mark.parametrize("device", DEVICES)


def posterior(model: nn.Module, data: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        # K-FAC leaves cross terms out, and says so.
        warnings.simplefilter("ignore", UserWarning)
        la = Laplace(model, "contrastive", **{"hessian_structure": "kron", **options})
        la.fit(data)
    la.prior_precision = 2.0
    return la


class Rotary(nn.Module):
    """Turns its inputs by angles from a table that is made late and grows, and that is not in the state."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.inner = encoder(device)
        self.register_buffer("table", torch.zeros(0, device=device), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if len(self.table) < len(x):
            self.table = torch.arange(len(x), dtype=x.dtype, device=x.device).cos()
        found: Tensor = self.inner(x * self.table[0])
        return found


@pytest.mark.parametrize("weights", ["last_layer", "all"])
def test_buffers_that_are_not_in_the_state_do_not_count(weights: str, device: str, tmp_path: Path) -> None:
    la = posterior(Rotary(device), batches(device), subset_of_weights=weights)
    la.calibrate([(inputs(1, 20, device), torch.zeros(20, device=device))])
    la(inputs(3, 40, device))
    folder = la.save_pretrained(tmp_path / "saved")
    loaded = cc.load_pretrained(folder, Rotary(device))
    # A larger batch than before makes another table.
    assert loaded(inputs(3, 90, device)).p_value.isfinite().all()
    assert predicts_the_same(la, loaded, device)
    other = Rotary(device)
    with torch.no_grad():
        other.inner[1].running_mean[0] += 1
    with pytest.raises(cc.InputError, match=r"other numbers in 1 of 9 parameters and buffers: inner\.1\.running_mean"):
        cc.load_pretrained(folder, other)


def test_fingerprints_and_digests_are_of_the_state(device: str) -> None:
    one, grown = Rotary(device), Rotary(device)
    grown(inputs(0, 9, device))
    assert encoder_digest(one) == encoder_digest(grown)
    assert torch.equal(encoder_fingerprint(one), encoder_fingerprint(grown))
    assert torch.equal(trunk_fingerprint(one, "inner.3"), trunk_fingerprint(grown, "inner.3"))
    assert {name for name, _ in state_tensors(grown)} == set(grown.state_dict())
    # The order is torch's, on which digests in saved folders depend.
    plain = encoder(device)
    names = [name for name, _ in (*plain.named_parameters(), *plain.named_buffers())]
    assert [name for name, _ in state_tensors(plain)] == names


LAYOUTS = [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc]


def sparse(x: Tensor, layout: torch.layout) -> Tensor:
    with warnings.catch_warnings():
        # torch says that compressed layouts are in beta.
        warnings.simplefilter("ignore", UserWarning)
        return x.to_sparse(layout=layout, blocksize=(2, 2) if layout in LAYOUTS[3:] else None)


@pytest.mark.parametrize("layout", LAYOUTS)
@given(seed=st.integers(0, 1000))
def test_sparse_tensors_are_told_apart(layout: torch.layout, device: str, seed: int) -> None:
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).relu()
    x[0, 0], x[3, 5] = 1.0, 0.0
    changed, moved = x.clone(), x.clone()
    changed[0, 0], moved[0, 0], moved[3, 5] = 1 + 1e-12, 0.0, 1.0
    models = [nn.Module() for _ in range(4)]
    for model, tensor in zip(models, (x, x.clone(), changed, moved), strict=True):
        model.register_buffer("graph", sparse(tensor.to(device), layout))
    digests = [encoder_digest(model) for model in models]
    assert digests[0] == digests[1]
    assert len({*digests}) == 3
    assert len({tuple(encoder_fingerprint(model).tolist()) for model in models}) == 3
    assert sum(part.numel() for part in dense_parts(models[0].graph)) > 0


class Graph(nn.Module):
    """Multiplies by a sparse buffer."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.inner = encoder(device)
        graph = (2.0 * torch.eye(4, dtype=torch.float64)).to_sparse()
        self.register_buffer("graph", graph.to(device))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(torch.sparse.mm(self.graph, x.T).T)
        return found


def test_an_encoder_with_a_sparse_buffer(device: str, tmp_path: Path) -> None:
    la = posterior(Graph(device), batches(device))
    la.calibrate([(inputs(1, 20, device), torch.zeros(20, device=device))])
    folder = la.save_pretrained(tmp_path / "saved")
    assert predicts_the_same(la, cc.load_pretrained(folder, Graph(device)), device)
    other = Graph(device)
    other.graph = 2 * other.graph
    with pytest.raises(cc.InputError, match="other numbers in 1 of 10 parameters and buffers: graph"):
        cc.load_pretrained(folder, other)


def test_inputs_of_zeros_as_an_example(device: str, tmp_path: Path) -> None:
    def model(activation: nn.Module) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 5, bias=False), activation, nn.Linear(5, 3, bias=False)).double().to(device)

    la = posterior(model(nn.Tanh()), batches(device))
    folder = la.save_pretrained(tmp_path / "saved", example=torch.zeros(1, 4, dtype=torch.float64, device=device))
    loaded = cc.load_pretrained(folder, model(nn.Tanh()))
    assert torch.equal(loaded(inputs(2, 3, device)).kappa, la(inputs(2, 3, device)).kappa)
    with pytest.raises(cc.InputError, match="outputs for the example inputs"):
        cc.load_pretrained(folder, model(nn.Sigmoid()))


class Words(nn.Module):
    """A model of texts with a tokenizer of its own."""

    def __init__(self, device: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.EmbeddingBag(32, 6).double(), nn.Linear(6, 3).double()
        self.to(device)

    def preprocess(self, texts: list[str]) -> dict[str, Any]:
        rows = [[sum(map(ord, word)) % 32 for word in f"{text} a b".split()[:2]] for text in texts]
        return {"input_ids": torch.tensor(rows), "modality": "text"}


class WholeWords(Words):
    def forward(self, batch: dict[str, Any]) -> Tensor:
        found: Tensor = self.head(self.words(batch["input_ids"]))
        return found


class NamedWords(Words):
    def forward(self, input_ids: Tensor, position: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        if labels is not None:
            raise AssertionError
        words = self.words(input_ids)
        found: Tensor = self.head(words if position is None else words + position.unsqueeze(1))
        return found


class AnyWords(Words):
    def forward(self, **batch: Any) -> Tensor:
        found: Tensor = self.head(self.words(batch["input_ids"]))
        return found


KINDS = [WholeWords, NamedWords, AnyWords]


def word_batch(device: str, n: int = 18) -> dict[str, Any]:
    ids = torch.randint(32, (n, 2), generator=torch.Generator().manual_seed(3)).to(device)
    labels = torch.arange(n, device=device) % 3
    return {"labels": labels, "name_of_patient": [f"Jane Doe {i}" for i in range(n)], "input_ids": ids, "age": labels}


@pytest.mark.parametrize("kind", KINDS)
def test_of_a_mapping_made_up_entries_are_saved(kind: type[Words], device: str, tmp_path: Path) -> None:
    model = kind(device)
    la = posterior(model, [word_batch(device)])
    folder = la.save_pretrained(tmp_path / "saved")
    content = b"".join(path.read_bytes() for path in folder.iterdir())
    assert b"input_ids" in content
    assert not any(word in content for word in (b"Jane", b"name_of_patient"))
    loaded = cc.load_pretrained(folder, copy.deepcopy(model))
    x = {"input_ids": word_batch(device)["input_ids"]}
    assert torch.equal(loaded(x).kappa, la(x).kappa)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_as_an_example(kind: type[Words], device: str, tmp_path: Path) -> None:
    model = kind(device)
    la = posterior(model, [word_batch(device)])
    folder = la.save_pretrained(tmp_path / "saved", example=["w1 w2", "w3", "secret"])
    assert torch.equal(cc.load_pretrained(folder, model)(["w4"]).kappa, la(["w4"]).kappa)
    with pytest.raises(cc.InputTypeError, match=r"example: expected a list of texts, got one text. Pass \[text\]"):
        la.save_pretrained(tmp_path / "wrong", example="w1 w2")
    other = posterior(encoder(device), batches(device))
    with pytest.raises(cc.InputTypeError, match="example: expected a tensor or a mapping of tensors"):
        other.save_pretrained(tmp_path / "wrong", example=["w1 w2"])
    assert not (tmp_path / "wrong").exists()
