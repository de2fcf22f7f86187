"""What the parts of the contract share: how a backend is made, what is drawn, and what the truth is."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from contrastive_curvature.laplace.backends import ContrastiveBackend
from contrastive_curvature.laplace.features import RawFeatureExtractor
from contrastive_curvature.testing.cases import Case, network_cases, truth_and_size
from contrastive_curvature.testing.networks import NETWORKS

__all__ = ["ContractBase", "Drawn", "make_backend", "same", "snapshot"]

Drawn = tuple[nn.Module, Tensor, Case]
"""A network, its inputs, and the pairs of its outputs."""


def make_backend(
    kind: type[ContrastiveBackend], model: nn.Module, x: Tensor, weights: str | Tensor = "all", **options: Any
) -> ContrastiveBackend:
    """Make a backend as the Laplace classes do.

    Args:
        kind: The backend's class.
        model: The encoder.
        x: A batch.
        weights: ``"all"``, ``"last_layer"``, or indices of a subnetwork.
        **options: For the backend.

    Returns:
        The backend.
    """
    if isinstance(weights, Tensor):
        return kind(model, "contrastive", subnetwork_indices=weights, **options)
    if weights == "all":
        return kind(model, "contrastive", **options)
    extractor = RawFeatureExtractor(model)
    extractor.analyse(x)
    return kind(extractor, "contrastive", last_layer=True, **options)


class ContractBase:
    """Attributes and helpers; :class:`~contrastive_curvature.testing.contract.BackendContract` says what they mean."""

    backend: ClassVar[type[ContrastiveBackend]]
    refused: ClassVar[frozenset[str]] = frozenset()
    refused_kron: ClassVar[frozenset[str]] = frozenset()
    options: ClassVar[dict[str, Any]] = {}

    def _accepted(self, without: frozenset[str] = frozenset()) -> list[str]:
        return [kind for kind in NETWORKS if kind not in self.refused | without]

    def _draw(self, data: st.DataObject, min_points: int = 1, without: frozenset[str] = frozenset()) -> Drawn:
        networks = self._accepted(without)
        return data.draw(network_cases(networks=networks, by_target=True, min_points=min_points))

    def _make(
        self, drawn: Drawn, device: str, weights: str | Tensor = "all", **more: Any
    ) -> tuple[ContrastiveBackend, Tensor, Tensor]:
        model, x, case = drawn
        x, y = x.to(device), self._targets(case).to(device)
        return make_backend(self.backend, model.to(device), x, weights, **self._options(case), **more), x, y

    def _options(self, case: Case) -> dict[str, Any]:
        return {**case.options, "relation": case.pairs, **self.options}

    def _truth(self, drawn: Drawn) -> tuple[Tensor, float, float]:
        """The dense curvature, the size of the terms that may cancel in it, and the data set's scale."""
        drawn[0].to("cpu")
        scale = len(drawn[1]) / 2 if drawn[2].options["normalization"] == "type" else 1.0
        return *truth_and_size(*drawn), scale

    def _parts(self, drawn: Drawn, rows: Tensor, data: st.DataObject) -> list[tuple[str | Tensor, Any]]:
        """Sets of weights, and where their entries are among those of all trainable parameters."""
        model, total = drawn[0], len(rows)
        parts: list[tuple[str | Tensor, Any]] = [("all", slice(None))]
        # The weights of a last layer are taken whole, frozen or not.
        last = list(list(model.modules())[-1].parameters())
        if last and all(p.requires_grad for p in last):
            parts.append(("last_layer", slice(total - sum(p.numel() for p in last), total)))
        seed = data.draw(st.integers(0, 99))
        chosen = torch.randperm(total, generator=torch.Generator().manual_seed(seed))[: 1 + seed % total]
        return [*parts, (chosen, chosen)]

    @staticmethod
    def _targets(case: Case) -> Tensor:
        if case.labels is None:
            msg = "this case has no targets"
            raise TypeError(msg)
        return case.labels

    def _fittable(self, case: Case) -> bool:
        y = self._targets(case)
        positive = case.pairs(y, y)[0] if case.pairs is not None else y[:, None] == y
        return bool(positive.fill_diagonal_(False).any())


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything of a module that a backend could leave something in."""
    taken: dict[str, Any] = {name: value.clone() for name, value in model.state_dict().items()}
    for name, module in model.named_modules():
        taken[f"{name}:vars"] = sorted(vars(module))
        taken[f"{name}:mode"] = module.training
        taken[f"{name}:hooks"] = [len(vars(module)[key]) for key in sorted(vars(module)) if key.endswith("_hooks")]
    for name, p in model.named_parameters():
        taken[f"{name}:grad"] = (id(p), type(p), p.grad is None, p.requires_grad, sorted(vars(p)))
    return taken


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two snapshots are of the same state."""
    return a.keys() == b.keys() and all(
        torch.equal(value, b[key]) if isinstance(value, Tensor) else value == b[key] for key, value in a.items()
    )
