"""The contract of a backend, as a test class to inherit: everything that is called exact, against the oracle.

Property-based: Hypothesis draws the network, the points, the pairs and the options; float64, on every device there is.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from contrastive_curvature.backends import ContrastiveBackend, ContrastiveGGN
from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.ggn import pullback
from contrastive_curvature.ggn.accumulate import clamp_curvature
from contrastive_curvature.laplace.features import RawFeatureExtractor
from contrastive_curvature.options import Structure
from contrastive_curvature.testing.cases import Case, close, network_cases, truth_and_size
from contrastive_curvature.testing.networks import NETWORKS, build_network, make_inputs
from contrastive_curvature.testing.oracle import dense_jacobian

__all__ = ["DEVICES", "BackendContract", "make_backend"]

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
"""The devices that tests run on."""

_Drawn = tuple[nn.Module, Tensor, Case]

# Every adapter inherits the same functions, which Hypothesis would report.
_shared = settings(suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow], deadline=None)


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


@pytest.mark.parametrize("device", DEVICES)
class BackendContract:
    """Inherit, name the backend, and say which networks it refuses.

    Attributes:
        backend: The backend's class.
        refused: Kinds of networks (:data:`~contrastive_curvature.testing.NETWORKS`) that it refuses with an
            ``UnsupportedError`` that names ``ContrastiveGGN``.
        refused_kron: Further kinds for which it has no Kronecker factors of all parameters.
        options: Backend options of its own.
    """

    backend: ClassVar[type[ContrastiveBackend]]
    refused: ClassVar[frozenset[str]] = frozenset()
    refused_kron: ClassVar[frozenset[str]] = frozenset({"embedding", "attention", "shared"})
    options: ClassVar[dict[str, Any]] = {}

    @_shared
    @given(data=st.data())
    def test_diag_and_full_of_a_batch_are_exact(self, data: st.DataObject, device: str) -> None:
        """All parameters, the last layer, and a subnetwork."""
        drawn = self._draw(data)
        truth, size, scale = self._truth(drawn)
        for weights, part in self._parts(drawn, truth, data):
            made, x, y = self._make(drawn, device, weights)
            want = scale * truth[part][:, part]
            assert close(made.diag(x, y, N=len(x))[1].cpu(), want.diagonal(), scale * size)
            assert close(made.full(x, y, N=len(x))[1].cpu(), want, scale * size)

    @_shared
    @given(data=st.data())
    def test_data_sets_couple_across_batches(self, data: st.DataObject, device: str) -> None:
        """A loader of small batches gives what all its points at once give; products with it too."""
        drawn = self._draw(data, min_points=2)
        if not self._fittable(drawn[2]):
            return
        truth, size, scale = self._truth(drawn)
        step = data.draw(st.integers(1, len(drawn[1])))
        for weights, part in self._parts(drawn, truth, data):
            made, x, y = self._make(drawn, device, weights)
            loader = list(zip(x.split(step), y.split(step), strict=True))
            want = scale * truth[part][:, part]
            assert close(made.fit(loader, Structure.DIAG).curvature.cpu(), want.diagonal(), scale * size)
            assert close(made.fit(loader, Structure.FULL).curvature.cpu(), want, scale * size)
            v = torch.linspace(-1, 1, len(want), dtype=torch.float64)
            reach = scale * size * len(want)
            assert close(made.matvec(loader, v.to(device)).cpu(), want @ v, reach)

    @_shared
    @given(data=st.data())
    def test_low_rank_of_full_rank_is_the_clamped_matrix(self, data: st.DataObject, device: str) -> None:
        """Eigenpairs of all parameters, for every fix."""
        drawn = self._draw(data, min_points=2)
        if not self._fittable(drawn[2]):
            return
        truth, size, scale = self._truth(drawn)
        made, x, y = self._make(drawn, device, "all", rank=len(truth))
        vectors, values = made.fit_lowrank([(x, y)]).curvature
        found = (vectors * values) @ vectors.T
        assert close(found.cpu(), clamp_curvature(scale * truth), scale * size, 1e-8)

    @_shared
    @given(data=st.data())
    def test_kron_factors(self, data: st.DataObject, device: str) -> None:
        """Exact where K-FAC is (one point; vectors), and everywhere the same factors as the reference backend's."""
        drawn = self._draw(data, without=self.refused_kron)
        truth, size, scale = self._truth(drawn)
        model, points, case = drawn
        made, x, y = self._make(drawn, device)
        factors = [[f.cpu() for f in group] for group in made.kron(x, y, N=len(x))[1].kfacs]
        reference = make_backend(ContrastiveGGN, model, x, **self._options(case))
        expected = [[f.cpu() for f in group] for group in reference.kron(x, y, N=len(x))[1].kfacs]
        assert all(
            close(f, g, scale * size if k == 0 else None)
            for group, other in zip(factors, expected, strict=True)
            for k, (f, g) in enumerate(zip(group, other, strict=True))
        )
        if case.options["pd_fix"] in ("positive", "full"):
            return
        start = 0
        for p, group in zip((p for p in model.parameters() if p.requires_grad), factors, strict=True):
            block = scale * truth[start : start + p.numel(), start : start + p.numel()]
            start += p.numel()
            if p.ndim == 1:
                assert close(group[0], block, scale * size)
            elif len(points) == 1 and p.ndim == 2:
                assert close(torch.kron(*group), block, scale * size)

    @_shared
    @given(data=st.data())
    def test_jacobians_are_those_of_the_raw_outputs(self, data: st.DataObject, device: str) -> None:
        """Shape (N, D, P), and the outputs beside them."""
        drawn = self._draw(data)
        truth = dense_jacobian(drawn[0], drawn[1])
        z = drawn[2].z
        for weights, part in self._parts(drawn, truth.T, data):
            made, x, _ = self._make(drawn, device, weights)
            jacobians, outputs = made.jacobians(x)
            assert close(jacobians.cpu().flatten(0, 1), truth[:, part], float(truth.abs().max()))
            assert close(outputs.cpu(), z, tolerance=1e-13)

    @_shared
    @given(data=st.data())
    def test_batch_estimates_add_up(self, data: st.DataObject, device: str) -> None:
        """``pairs="batch"`` is the sum of what the batches give, each for N points of the data set."""
        drawn = self._draw(data, min_points=4)
        drawn[2].options["normalization"] = "anchor"
        model, points, case = drawn
        x, y = points.to(device), self._targets(case).to(device)
        loader = list(zip(x.split(3), y.split(3), strict=True))
        if not any(self._fittable(Case(part, part_y, case.pairs, case.options)) for part, part_y in loader):
            return
        made = make_backend(self.backend, model.to(device), x, **self._options(case), pairs="batch")
        total = sum(made.diag(part, part_y, N=len(x))[1] for part, part_y in loader)
        assert close(made.fit(loader, Structure.DIAG).curvature, torch.as_tensor(total), tolerance=1e-13)

    @_shared
    @given(data=st.data())
    def test_a_positive_semidefinite_fix_stays_so(self, data: st.DataObject, device: str) -> None:
        """``psd``, and ``positive`` with ``euclidean``, in every structure, before any clamp."""
        drawn = self._draw(data)
        safe = data.draw(st.sampled_from(({"pd_fix": "psd"}, {"pd_fix": "positive", "distance": "euclidean"})))
        drawn[2].options.update(safe)
        _, size, scale = self._truth(drawn)
        made, x, y = self._make(drawn, device)
        full = made.full(x, y, N=len(x))[1]
        floor = -1e-12 * max(scale * size, float(full.abs().max()))
        assert float(torch.linalg.eigvalsh((full + full.T) / 2).min()) >= floor
        assert float(made.diag(x, y, N=len(x))[1].min()) >= floor

    def test_estimates_for_more_points_are_the_references(self, device: str) -> None:
        """Loss and curvature with N beyond the batch, a data set's loss, cost and factors, and bounded chunks."""
        torch.manual_seed(0)
        y = torch.tensor([0, 0, 1, 1, 2, 2], device=device)
        model, x = build_network("tanh", 2).to(device), make_inputs("tanh", 6).to(device)
        for normalization in ("sum", "type", "anchor"):
            chosen = {"normalization": normalization, **self.options}
            made, other = (make_backend(kind, model, x, **chosen) for kind in (self.backend, ContrastiveGGN))
            for name in ("diag", "full", "kron"):
                (loss, found), (want_loss, want) = (getattr(b, name)(x, y, N=11) for b in (made, other))
                assert close(loss, want_loss)
                found, want = (h.to_matrix() if name == "kron" else h for h in (found, want))
                assert close(found, want), name
            loader = [(x[:4], y[:4]), (x[4:], y[4:])]
            for structure in Structure:
                fit, want_fit = (b.fit(loader, structure) for b in (made, other))
                assert fit.n == want_fit.n == 6
                assert close(fit.loss, want_fit.loss)
                assert close(fit.cost, want_fit.cost)
            factors, wanted = (b.fit(loader, Structure.KRON).curvature for b in (made, other))
            assert all(close(f, g) for a, b in zip(factors, wanted, strict=True) for f, g in zip(a, b, strict=True))
            whole = made.full(x, y, N=6)[1]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(pullback, "JACOBIAN_ELEMENTS", 60)
                assert close(made.full(x, y, N=6)[1], whole)
                assert close(made.diag(x, y, N=6)[1], whole.diagonal())

    def test_float32_in_float32_out(self, device: str) -> None:
        """Single precision is kept, and as accurate as it can be."""
        torch.manual_seed(0)
        y = torch.tensor([0, 0, 1, 1, 1], device=device)
        for kind in self._accepted():
            model, x = build_network(kind, 2).to(device), make_inputs(kind, 5).to(device)
            exact = make_backend(self.backend, model, x, **self.options).diag(x, y, N=5)[1]
            single = x.float() if x.is_floating_point() else x
            found = make_backend(self.backend, model.float(), single, **self.options).diag(single, y, N=5)[1]
            assert found.dtype == torch.float32
            made = make_backend(self.backend, model, single, **self.options)
            others = [made.full(single, y, N=5)[1], *made.jacobians(single)]
            others.append(made.matvec([(single, y)], torch.ones_like(found)))
            if kind not in self.refused_kron:
                others += [factor for group in made.kron(single, y, N=5)[1].kfacs for factor in group]
            assert all(other.dtype == torch.float32 for other in others), kind
            assert close(found.double(), exact, tolerance=1e-4), kind

    def test_leaves_the_encoder_as_it_was(self, device: str) -> None:
        """Parameters, buffers, gradients, modes, hooks and attributes."""
        torch.manual_seed(0)
        y = torch.tensor([0, 0, 1, 1, 1], device=device)
        for kind in self._accepted():
            model, x = build_network(kind, 2).to(device).train(), make_inputs(kind, 5).to(device)
            before = _snapshot(model)
            made = make_backend(self.backend, model, x, **self.options)
            found = [made.diag(x, y, N=5)[1], made.full(x, y, N=5)[1], made.jacobians(x)[0]]
            if kind not in self.refused_kron:
                found += [factor for group in made.kron(x, y, N=5)[1].kfacs for factor in group]
            assert not any(tensor.requires_grad for tensor in found)
            assert _same(_snapshot(model), before), kind
            # The backend follows the parameters.
            with torch.no_grad():
                next(p for p in model.parameters() if p.requires_grad).mul_(1.5)
            fresh = make_backend(self.backend, model, x, **self.options)
            assert torch.equal(made.diag(x, y, N=5)[1], fresh.diag(x, y, N=5)[1])

    def test_refusals_name_the_backend_that_can(self, device: str) -> None:
        """What a host cannot differentiate is refused before anything is computed."""
        torch.manual_seed(0)
        y = torch.tensor([0, 0, 1], device=device)
        for kind in sorted(self.refused):
            model, x = build_network(kind, 2).to(device), make_inputs(kind, 3).to(device)
            with pytest.raises(UnsupportedError, match="ContrastiveGGN"):
                make_backend(self.backend, model, x, **self.options).diag(x, y, N=3)
        for kind in sorted(self.refused_kron - self.refused):
            model, x = build_network(kind, 2).to(device), make_inputs(kind, 3).to(device)
            with pytest.raises(UnsupportedError, match="diag"):
                make_backend(self.backend, model, x, **self.options).kron(x, y, N=3)

    def _accepted(self, without: frozenset[str] = frozenset()) -> list[str]:
        return [kind for kind in NETWORKS if kind not in self.refused | without]

    def _draw(self, data: st.DataObject, min_points: int = 1, without: frozenset[str] = frozenset()) -> _Drawn:
        networks = self._accepted(without)
        return data.draw(network_cases(networks=networks, by_target=True, min_points=min_points))

    def _make(
        self, drawn: _Drawn, device: str, weights: str | Tensor = "all", **more: Any
    ) -> tuple[ContrastiveBackend, Tensor, Tensor]:
        model, x, case = drawn
        x, y = x.to(device), self._targets(case).to(device)
        return make_backend(self.backend, model.to(device), x, weights, **self._options(case), **more), x, y

    def _options(self, case: Case) -> dict[str, Any]:
        return {**case.options, "relation": case.pairs, **self.options}

    def _truth(self, drawn: _Drawn) -> tuple[Tensor, float, float]:
        """The dense curvature, the size of the terms that may cancel in it, and the data set's scale."""
        drawn[0].to("cpu")
        scale = len(drawn[1]) / 2 if drawn[2].options["normalization"] == "type" else 1.0
        return *truth_and_size(*drawn), scale

    def _parts(self, drawn: _Drawn, rows: Tensor, data: st.DataObject) -> list[tuple[str | Tensor, Any]]:
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


def _snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything of a module that a backend could leave something in."""
    taken: dict[str, Any] = {name: value.clone() for name, value in model.state_dict().items()}
    for name, module in model.named_modules():
        taken[f"{name}:vars"] = sorted(vars(module))
        taken[f"{name}:mode"] = module.training
        taken[f"{name}:hooks"] = [len(vars(module)[key]) for key in sorted(vars(module)) if key.endswith("_hooks")]
    for name, p in model.named_parameters():
        taken[f"{name}:grad"] = (id(p), type(p), p.grad is None, p.requires_grad, sorted(vars(p)))
    return taken


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(value, b[key]) if isinstance(value, Tensor) else value == b[key] for key, value in a.items()
    )
