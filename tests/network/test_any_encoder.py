"""Encoders that take or return mappings, or normalise inside forward, are the plain encoders that they compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from devices import DEVICES
from hypothesis import given, settings
from hypothesis import strategies as st
from laplace import Laplace
from tables import covering, each
from torch import Tensor, nn
from torch.nn import functional as F

import contrastive_curvature as cc
from contrastive_curvature.network.encoder import Encoder

pytestmark = pytest.mark.parametrize("device", DEVICES)

WIDTH, HIDDEN, DIM = 4, 5, 3
LABELS = torch.arange(9) % 3


def trunk(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh()).double()


def last(seed: int) -> nn.Linear:
    torch.manual_seed(seed + 1)
    return nn.Linear(HIDDEN, DIM).double()


class InMapping(nn.Module):
    """A module of sentence-transformers' kind: it reads one entry of a mapping, and writes another into it."""

    def __init__(self, inner: nn.Module, source: str, target: str) -> None:
        super().__init__()
        self.inner, self.source, self.target = inner, source, target

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        features[self.target] = self.inner(features[self.source])
        return features


class NormalizeInMapping(nn.Module):
    """As sentence-transformers' ``Normalize``, without a module inside."""

    def __init__(self, source: str = "sentence_embedding", target: str = "sentence_embedding") -> None:
        super().__init__()
        self.source, self.target = source, target

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        features.update({self.target: F.normalize(features[self.source], dim=1)})
        return features


class Named(nn.Module):
    """Takes its inputs by name, masked as tokens are, and returns an object."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.trunk, self.last = trunk(seed), last(seed)

    def forward(self, pixels: Tensor, scale: Tensor | None = None, unused: Tensor | None = None) -> Any:
        assert unused is None
        hidden = self.trunk(pixels if scale is None else pixels * scale)
        return Output(hidden.unsqueeze(1), self.last(hidden))


@dataclass
class Output:
    """As transformers' ``CLIPVisionModelOutput``."""

    last_hidden_state: Tensor
    image_embeds: Tensor


class NormalizesInside(nn.Module):
    """Normalises by a function."""

    def __init__(self, seed: int, after: nn.Module | None = None) -> None:
        super().__init__()
        self.trunk, self.last = trunk(seed), last(seed)
        self.after = nn.Identity() if after is None else after

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.after(self.last(self.trunk(x))), dim=1)


def mapping_encoder(seed: int, normalize: bool) -> nn.Module:
    parts: list[nn.Module] = [
        InMapping(trunk(seed), "pixels", "token"),
        InMapping(last(seed), "token", "sentence_embedding"),
    ]
    return nn.Sequential(*parts, *([NormalizeInMapping()] if normalize else []))


def other_name(seed: int) -> nn.Module:
    parts = [InMapping(trunk(seed), "pixels", "token"), InMapping(last(seed), "token", "raw")]
    return nn.Sequential(*parts, NormalizeInMapping("raw", "sentence_embedding"))


def as_pixels(x: Tensor) -> dict[str, Any]:
    return {"pixels": x, "modality": "text"}


KINDS: dict[str, tuple[Callable[[int], nn.Module], Callable[[Tensor], Any]]] = {
    "mapping": (lambda seed: mapping_encoder(seed, False), as_pixels),
    "mapping, normalised": (lambda seed: mapping_encoder(seed, True), as_pixels),
    "mapping, normalised under another name": (other_name, as_pixels),
    "keywords and an object": (Named, lambda x: {"pixels": x, "scale": torch.ones_like(x), "labels": x[:, 0]}),
    "named output": (lambda seed: cc.EncoderOutput(Named(seed), "image_embeds"), as_pixels),
    "normalises inside": (NormalizesInside, lambda x: x),
    "as a tuple": (lambda seed: cc.EncoderOutput(Tupled(seed), 1), lambda x: x),
}


class Tupled(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.named = Named(seed)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self.named(x)
        return out.last_hidden_state, out.image_embeds


def plain(seed: int) -> nn.Sequential:
    return nn.Sequential(trunk(seed), last(seed), cc.L2Norm())


def points(seed: int, n: int = 9) -> Tensor:
    return torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=4)
@given(seed=st.integers(0, 99), n=st.integers(3, 9), weights=st.sampled_from(["all", "last_layer"]))
def test_curvature_is_that_of_the_plain_encoder(device: str, kind: str, seed: int, n: int, weights: str) -> None:
    make, batch = KINDS[kind]
    x = points(seed, n).to(device)
    model = make(seed).to(device)
    given_x = batch(x)
    before = dict(given_x) if isinstance(given_x, dict) else None
    found = cc.ggn(model, given_x, LABELS[:n].to(device), subset_of_weights=weights, clamp=False)
    wanted = cc.ggn(plain(seed).to(device), x, LABELS[:n].to(device), subset_of_weights=weights, clamp=False)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    assert before is None or (set(given_x) == set(before) and all(given_x[k] is before[k] for k in before))


@covering(1, weights=["last_layer", "all"], kind=KINDS)
def test_posterior_is_that_of_the_plain_encoder(device: str, kind: str, weights: str) -> None:
    make, batch = KINDS[kind]
    x, labels = points(3).to(device), LABELS.to(device)
    posteriors = []
    for model, form in ((make(3).to(device), batch), (plain(3).to(device), lambda t: t)):
        la: Any = Laplace(model, "contrastive", subset_of_weights=weights, hessian_structure="diag")
        la.fit([(form(x[:5]), labels[:5]), (form(x[5:]), labels[5:])], progress_bar=False)
        la.optimize_prior_precision()
        posteriors.append((la, la(form(x[:4]))))
    (la, found), (_, wanted) = posteriors
    torch.testing.assert_close(found.mu, plain(3).to(device)(x[:4]), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.kappa, wanted.kappa, rtol=1e-6, atol=0)
    again: Any = Laplace(make(3).to(device), "contrastive", subset_of_weights=weights, hessian_structure="diag")
    again.load_state_dict(la.state_dict())
    torch.testing.assert_close(again(batch(x[:4])).kappa, found.kappa, rtol=1e-9, atol=0)


@each("after", [None, nn.LayerNorm(DIM), nn.Dropout()])
def test_any_module_that_feeds_the_normalisation_is_seen(device: str, after: nn.Module | None) -> None:
    model, x = NormalizesInside(2, after).double().eval().to(device), points(2).to(device)
    encoder = Encoder(model, x)
    wanted = model.after(model.last(model.trunk(x)))
    torch.testing.assert_close(encoder(x), wanted)
    assert encoder.normalizes_inside
    assert (encoder.last_layer is None) == isinstance(after, nn.LayerNorm)


def test_a_batch_that_is_not_normalised_is_refused(device: str) -> None:
    model, x = NormalizesInside(0).to(device), points(0).to(device)
    encoder = Encoder(model, x)
    forward = model.forward
    model.forward = lambda x: forward(x).roll(1, dims=1)  # type: ignore[method-assign]
    with pytest.raises(cc.UnsupportedError, match=r"of this one it is not\. Remove F\.normalize"):
        encoder(x)
    with pytest.raises(cc.UnsupportedError, match="of this one it is not"):
        encoder.forward_with_features(x)


def test_equal_inputs_are_no_normalisation(device: str) -> None:
    class Squared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, DIM)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).square()

    model, x = Squared().double().to(device), points(4)[:1].expand(5, -1).to(device)
    torch.testing.assert_close(Encoder(model, x)(x), model(x))


@each("weights", ["last_layer", "all"])
def test_a_loss_of_the_users_gets_what_the_encoder_gives(device: str, weights: str) -> None:
    seen: list[Tensor] = []

    def loss(embeddings: Tensor, labels: Tensor) -> Tensor:
        seen.append(embeddings.detach())
        return embeddings.sum() * 0

    more = {"plain": (lambda seed: plain(seed)[:2], lambda x: x), "with L2Norm": (plain, lambda x: x)}
    for make, batch in (KINDS["mapping, normalised"], KINDS["normalises inside"], *more.values()):
        x, model = points(1).to(device), make(1).to(device)
        how = {"subset_of_weights": weights, "sampling_temperature": 0}
        learner = cc.OnlineLaplace(model, probe=batch(x), n_data=9, loss=loss, **how)
        learner(batch(x), LABELS.to(device)).backward()
        given = model(batch(x))
        torch.testing.assert_close(seen[-1], given if isinstance(given, Tensor) else given["sentence_embedding"])
