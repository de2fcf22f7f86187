"""What of an encoder a saved posterior is compared with: its state, and its outputs for a few inputs."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from laplace import Laplace
from saved_cases import batches, encoder, inputs, predicts_the_same
from tables import each, refused
from torch import Tensor, nn

import contrastive_curvature as cc


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


def test_buffers_that_are_not_in_the_state_do_not_count(device: str, tmp_path: Path) -> None:
    la = posterior(Rotary(device), batches(device))
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
    refused(lambda: cc.load_pretrained(folder, other), "other numbers in 1 of 10 parameters and buffers: graph")


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


def word_batch(device: str, n: int = 18) -> dict[str, Any]:
    ids = torch.randint(32, (n, 2), generator=torch.Generator().manual_seed(3)).to(device)
    labels = torch.arange(n, device=device) % 3
    return {"labels": labels, "name_of_patient": [f"Jane Doe {i}" for i in range(n)], "input_ids": ids, "age": labels}


@each("kind", [WholeWords, NamedWords, AnyWords])
def test_of_a_mapping_made_up_entries_are_saved(kind: type[Words], device: str, tmp_path: Path) -> None:
    model = kind(device)
    la = posterior(model, [word_batch(device)])
    folder = la.save_pretrained(tmp_path / kind.__name__)
    content = b"".join(path.read_bytes() for path in folder.iterdir())
    assert b"input_ids" in content
    assert not any(word in content for word in (b"Jane", b"name_of_patient"))
    loaded = cc.load_pretrained(folder, copy.deepcopy(model))
    x = {"input_ids": word_batch(device)["input_ids"]}
    assert torch.equal(loaded(x).kappa, la(x).kappa)


def test_texts_as_an_example(device: str, tmp_path: Path) -> None:
    model = WholeWords(device)
    la = posterior(model, [word_batch(device)])
    folder = la.save_pretrained(tmp_path / "saved", example=["w1 w2", "w3", "secret"])
    assert torch.equal(cc.load_pretrained(folder, model)(["w4"]).kappa, la(["w4"]).kappa)
