"""The contract of a backend, as a test class to inherit.

The tests are property-based: Hypothesis draws the network, the points, the pairs and the options, in float64 and
float32, on every available device.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.hessian.sphere import L2Norm, normalize
from contrastive_curvature.laplace.backends import ContrastiveBackend, ContrastiveGGN
from contrastive_curvature.losses.contrastive import ContrastiveLoss
from contrastive_curvature.network import pullback
from contrastive_curvature.network.encoder import evaluation_mode
from contrastive_curvature.structures import Dense, Diagonal, Kron
from contrastive_curvature.testing.cases import Case, close, network_cases, truth_and_size
from contrastive_curvature.testing.losses import (
    LOSSES,
    batches,
    check_batch,
    check_data,
    draw_loss_case,
    fittable,
    is_exact,
    make_backend,
    near,
    parts_of,
    size_of_terms,
)
from contrastive_curvature.testing.networks import NETWORKS, build_network, make_inputs, repeats_weights
from contrastive_curvature.testing.oracle import dense_ggn, dense_jacobian

__all__ = ["DEVICES", "BackendContract", "make_backend"]

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
"""The devices that tests run on."""

# Without this, Hypothesis would report that adapters inherit the same functions.
_shared = settings(suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow], deadline=None)
_few = settings(
    suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow, HealthCheck.filter_too_much],
    deadline=None,
    max_examples=10,
)
_of_a_loss = settings(_few, max_examples=3)
"""All losses together then have as many examples as the tests that draw the options of one."""

_LEAST_NORM = 0.02
"""Of raw outputs in float32. They are sums of numbers of about one, so shorter ones keep few digits of a direction."""

_GAP = 1e-4
"""Distance from the margin within which rounding to float32 may decide whether a pair counts."""

_LEAST_ENTRY = 1e-15
"""Of a curvature: float32 does not hold the squares of much smaller numbers, which saturated losses have."""

_Drawn = tuple[nn.Module, Tensor, Case]
"""A network, its inputs, and the pairs of its outputs."""


@pytest.mark.parametrize("device", DEVICES)
class BackendContract:
    """The contract of a backend: inherit, set ``backend``, and list the networks that it refuses.

    Attributes:
        backend: The backend's class.
        refused: Kinds of networks (:data:`~contrastive_curvature.testing.NETWORKS`) that it refuses with an
            ``UnsupportedError`` that names ``ContrastiveGGN``.
        refused_kron: Other kinds for which it has no Kronecker factors of all parameters.
        options: Additional options of the backend.
    """

    backend: ClassVar[type[ContrastiveBackend]]
    refused: ClassVar[frozenset[str]] = frozenset()
    refused_kron: ClassVar[frozenset[str]] = frozenset()
    options: ClassVar[dict[str, Any]] = {}

    # Numbers: every exact result against the oracle, for drawn networks, pairs and options.

    @_shared
    @given(data=st.data())
    def test_numbers_are_exact(self, data: st.DataObject, device: str) -> None:
        """Check all parameters, the last layer and a subnetwork."""
        drawn = self._draw(data)
        truth, size, scale = self._truth(drawn)
        jacobian, coupled = dense_jacobian(*drawn[:2]), fittable(drawn[2])
        step = data.draw(st.integers(1, len(drawn[1]))) if coupled else None
        for weights, part in parts_of(drawn[0], truth, data):
            backend, x, y = self._make(drawn, device, weights)
            want = scale * truth[part][:, part]
            _check_numbers(backend, x, y, step, want, scale * size, jacobian[:, part], drawn[2].z)

    @_shared
    @given(data=st.data())
    def test_kron_factors(self, data: st.DataObject, device: str) -> None:
        """Check factors where K-FAC is exact (one point; blocks), and everywhere against the reference backend."""
        drawn = self._draw(data, without=self.refused_kron)
        truth, size, scale = self._truth(drawn)
        model, points, case = drawn
        backend, x, y = self._make(drawn, device)
        factors = backend.kron(x, y, N=len(x))[1].kfacs
        reference = make_backend(ContrastiveGGN, model, x, **self._options(case)).kron(x, y, N=len(x))[1].kfacs
        _check_factors(factors, reference, scale * size)
        if case.options["pd_fix"] in ("positive", "full"):
            return
        start = 0
        for p, group in zip((p for p in model.parameters() if p.requires_grad), factors, strict=True):
            block = scale * truth[start : start + p.numel(), start : start + p.numel()]
            start += p.numel()
            if len(group) == 1:
                assert near(group[0], block, scale * size)
            elif len(points) == 1 and p.ndim == 2 and not repeats_weights(model):
                assert near(torch.kron(*group), block, scale * size)

    @_shared
    @given(data=st.data())
    def test_batch_estimates_are_the_references(self, data: st.DataObject, device: str) -> None:
        """Compare ``pairs="batch"`` in every normalisation with the reference, whose weights have their own tests."""
        model, points, case = self._draw(data, min_points=4)
        x, y = points.to(device), _targets(case).to(device)
        loader = batches(x, y, 3)
        if not any(fittable(Case(part, part_y, case.pairs, case.options)) for part, part_y in loader):
            return
        for normalization in ("sum", "type", "anchor"):
            case.options["normalization"] = normalization
            kinds = (self.backend, ContrastiveGGN)
            both = [make_backend(kind, model.to(device), x, **self._options(case), pairs="batch") for kind in kinds]
            curvature, want = (b.fit(loader, Dense).curvature.plain() for b in both)
            assert close(curvature, want, float(want.abs().max()) + float(want.norm()))

    @_shared
    @given(data=st.data())
    def test_a_positive_semidefinite_fix_stays_so(self, data: st.DataObject, device: str) -> None:
        """Check ``psd``, and ``positive`` with ``euclidean``, in every structure, before clamping."""
        drawn = self._draw(data)
        safe = data.draw(st.sampled_from(({"pd_fix": "psd"}, {"pd_fix": "positive", "distance": "euclidean"})))
        drawn[2].options.update(safe)
        _, size, scale = self._truth(drawn)
        backend, x, y = self._make(drawn, device)
        full = backend.full(x, y, N=len(x))[1]
        floor = -1e-12 * max(scale * size, float(full.abs().max()))
        assert float(torch.linalg.eigvalsh((full + full.T) / 2).min()) >= floor
        assert float(backend.diag(x, y, N=len(x))[1].min()) >= floor
        factors = _factors(backend, x, y) if drawn[2].options["pd_fix"] == "psd" else None
        for factor in (f for group in factors or [] for f in group):
            lowest = torch.linalg.eigvalsh((factor + factor.mT) / 2).min()
            assert float(lowest) >= -1e-12 * max(scale * size, float(factor.abs().max()))

    # Losses: a backend does not depend on the loss, so it is exact for every loss.

    @pytest.mark.parametrize("name", sorted(LOSSES))
    @_of_a_loss
    @given(data=st.data())
    def test_every_loss_is_exact(self, name: str, data: st.DataObject, device: str) -> None:
        """Compare with autograd: all parameters, the last layer and a subnetwork; batches and data sets."""
        drawn = draw_loss_case(data, self._accepted())
        fixes = ("full", "fixed", "psd_parts", *(() if name == "triplet" else ("ggn", "ggn_fixed", "psd")))
        options = {
            "reduction": data.draw(st.sampled_from(("mean", "sum"))),
            "distance": data.draw(st.sampled_from(("arccos", "euclidean"))),
            "pd_fix": data.draw(st.sampled_from(fixes)),
        }
        is_exact(self.backend, LOSSES[name](**options), drawn, data, device, **self.options)

    @pytest.mark.parametrize("name", sorted(LOSSES))
    def test_factors_of_every_loss_are_the_references(self, name: str, device: str) -> None:
        """Compare K-FAC of a batch and of a data set with the reference, for block-diagonal fixes."""
        torch.manual_seed(0)
        loss = LOSSES[name](pd_fix="psd" if name == "triplet" else "ggn_fixed")
        for kind in self._accepted(self.refused_kron):
            model, x = build_network(kind, 2).to(device), make_inputs(kind, 6).to(device)
            y = (torch.arange(6, device="cpu") % 2).to(device)
            pair = [make_backend(k, model, x, loss=loss, **self.options) for k in (self.backend, ContrastiveGGN)]
            try:
                factors, want = (b.fit([(x, y)], Kron).curvature.plain() for b in pair)
            except UnsupportedError:
                continue
            for group, other in zip(factors, want, strict=True):
                assert all(close(f, g, tolerance=1e-8) for f, g in zip(group, other, strict=True))

    # Single precision: the exact numbers again, up to the rounding of float32.

    @_few
    @given(data=st.data())
    def test_float32_is_exact_to_its_rounding(self, data: st.DataObject, device: str) -> None:
        """Check drawn networks, pairs and options; all parameters, the last layer and a subnetwork."""
        model, x, case = drawn = self._rounded(data)
        if not fittable(case):
            return
        truth, size, scale = self._truth(drawn)
        jacobian, reach = dense_jacobian(model, x), 50 * scale * size
        parts = parts_of(model, truth, data)
        targets = _targets(case)
        kinds = (self.backend, ContrastiveGGN)
        own, reference = (_factors(make_backend(k, model, x, **self._options(case)), x, targets) for k in kinds)
        single, y, step = _single(x, device), targets.to(device), data.draw(st.integers(1, len(x)))
        model.to(device, torch.float32)
        for weights, part in parts:
            backend = make_backend(self.backend, model, single, weights, **self._options(case))
            want = scale * truth[part][:, part]
            _check_numbers(backend, single, y, step, want, reach, jacobian[:, part], case.z, torch.float32)
        if own is not None and reference is not None:
            backend = make_backend(self.backend, model, single, **self._options(case))
            _check_factors(backend.kron(single, y, N=len(x))[1].kfacs, reference, reach, torch.float32)

    @pytest.mark.parametrize("name", sorted(LOSSES))
    @_of_a_loss
    @given(data=st.data())
    def test_float32_of_every_loss(self, name: str, data: st.DataObject, device: str) -> None:
        """Check a batch for all parameters, the last layer and a subnetwork."""
        model, x, labels = draw_loss_case(data, self._accepted())
        model, x = _rounded_pair(model, x)
        distance = data.draw(st.sampled_from(("arccos", "euclidean")))
        loss = LOSSES[name](distance=distance, pd_fix="full" if name == "triplet" else "psd_parts")
        z = model(x).detach()
        assume(float(z.norm(dim=1).min()) > _LEAST_NORM)
        hessian, jacobian = loss.output_hessian(z, labels), dense_jacobian(model, x)
        if not hessian.derivatives.anchors:
            return
        scale = float(hessian.derivatives.anchors) if loss.averages else 1.0
        truth = scale * (jacobian.T @ hessian.dense() @ jacobian)
        assume(float(truth.abs().max()) > _LEAST_ENTRY)
        reach = scale * size_of_terms(loss, z, labels) * float(jacobian.square().sum())
        parts, single, y = parts_of(model, truth, data), _single(x, device), labels.to(device)
        model.to(device, torch.float32)
        for weights, part in parts:
            backend = make_backend(self.backend, model, single, weights, loss=loss, **self.options)
            check_batch(backend, single, y, truth[part][:, part], reach, torch.float32)

    def test_float32_in_float32_out(self, device: str) -> None:
        """Check that results keep single precision and its accuracy."""
        torch.manual_seed(0)
        y = torch.tensor([0, 0, 1, 1, 1], device=device)
        for kind in self._accepted():
            model, x = build_network(kind, 2).to(device), make_inputs(kind, 5).to(device)
            exact = make_backend(self.backend, model, x, **self.options).diag(x, y, N=5)[1]
            single = _single(x, device)
            backend = make_backend(self.backend, model.float(), single, **self.options)
            diagonal = backend.diag(single, y, N=5)[1]
            others = [backend.full(single, y, N=5)[1], *backend.jacobians(single)]
            if kind not in self.refused_kron:
                others += [factor for group in backend.kron(single, y, N=5)[1].kfacs for factor in group]
            assert all(other.dtype == torch.float32 for other in (diagonal, *others)), kind
            assert close(diagonal.double(), exact, tolerance=1e-4), kind

    # Conduct: other properties that a user relies on.

    def test_what_is_differentiated_are_the_raw_outputs(self, device: str) -> None:
        """Check that a final l2-normalisation is skipped, even if the same module also runs in the middle."""
        torch.manual_seed(0)
        norm, labels = L2Norm(), torch.tensor([0, 0, 1, 1, 2, 2], device="cpu")
        for kind in self._accepted():
            body, points = build_network(kind, 3), make_inputs(kind, 6)
            inside = nn.Sequential(body, norm, nn.Linear(3, 2)).double().eval()
            x, y = points.to(device), labels.to(device)
            for raw in (body, inside):
                for distance in ("arccos", "euclidean"):
                    truth, jacobian = dense_ggn(raw, points, labels, distance=distance), dense_jacobian(raw, points)
                    whole = nn.Sequential(raw, norm).to(device)
                    backend = make_backend(self.backend, whole, x, distance=distance, **self.options)
                    check_batch(backend, x, y, truth, float(truth.abs().max()))
                    assert near(backend.jacobians(x)[0].flatten(0, 1), jacobian, float(jacobian.abs().max())), kind
                    raw.cpu()

    def test_modules_of_two_names(self, device: str) -> None:
        """Check modules with two names, with which torch's functional calls would leave tensors in the model."""

        class Listed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.body, self.head = nn.Linear(4, 3), nn.Linear(3, 2)
                self.layers = nn.ModuleList([self.body, self.head])

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                out: torch.Tensor = self.head(torch.tanh(self.body(x)))
                return out

        torch.manual_seed(0)
        model, x, y = Listed().double(), make_inputs("tanh", 6), torch.tensor([0, 0, 1, 1, 2, 2], device="cpu")
        truth = dense_ggn(model, x, y)
        model, x, y = model.to(device), x.to(device), y.to(device)
        before = _snapshot(model)
        backend = make_backend(self.backend, model, x, **self.options)
        try:
            matrix = backend.full(x, y, N=6)[1]
        except UnsupportedError as error:
            assert "ContrastiveGGN" in str(error)  # noqa: PT017  a host may not support the user's own modules
        else:
            assert near(matrix, truth)
        assert _same(_snapshot(model), before)

    def test_estimates_for_more_points_are_the_references(self, device: str) -> None:
        """Check loss and curvature for N above the batch size, loss, cost and factors of a data set, and chunks."""
        torch.manual_seed(0)
        y = torch.tensor([0, 0, 1, 1, 2, 2], device=device)
        model, x = build_network("tanh", 2).to(device), make_inputs("tanh", 6).to(device)
        for normalization in ("sum", "type", "anchor"):
            chosen = {"normalization": normalization, **self.options}
            backend, other = (make_backend(kind, model, x, **chosen) for kind in (self.backend, ContrastiveGGN))
            for name in ("diag", "full", "kron"):
                (loss, curvature), (want_loss, want) = (getattr(b, name)(x, y, N=11) for b in (backend, other))
                assert close(loss, want_loss)
                curvature, want = (h.to_matrix() if name == "kron" else h for h in (curvature, want))
                assert close(curvature, want), name
            value = ContrastiveLoss(normalization=normalization)(model(x).detach(), y)
            assert close(backend.diag(x, y, N=6)[0], (3.0 if normalization == "type" else 1.0) * value)
            loader = batches(x, y, 4)
            for structure in (Diagonal, Dense, Kron):
                fit, want_fit = (b.fit(loader, structure) for b in (backend, other))
                assert fit.n == want_fit.n == 6
                assert close(fit.loss, want_fit.loss)
                assert close(fit.cost, want_fit.cost)
            factors, wanted = (b.fit(loader, Kron).curvature.plain() for b in (backend, other))
            assert all(close(f, g) for a, b in zip(factors, wanted, strict=True) for f, g in zip(a, b, strict=True))
            whole = backend.full(x, y, N=6)[1]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(pullback, "JACOBIAN_ELEMENTS", 60)
                check_batch(backend, x, y, whole)

    def test_leaves_the_encoder_as_it_was(self, device: str) -> None:
        """Check parameters, buffers, gradients, modes, hooks and attributes."""
        torch.manual_seed(0)
        y = torch.tensor([0, 0, 1, 1, 1], device=device)
        for kind in self._accepted():
            model, x = build_network(kind, 2).to(device).train(), make_inputs(kind, 5).to(device)
            before = _snapshot(model)
            backend = make_backend(self.backend, model, x, **self.options)
            tensors = [backend.diag(x, y, N=5)[1], backend.full(x, y, N=5)[1], backend.jacobians(x)[0]]
            if kind not in self.refused_kron:
                tensors += [factor for group in backend.kron(x, y, N=5)[1].kfacs for factor in group]
            assert not any(tensor.requires_grad for tensor in tensors)
            assert _same(_snapshot(model), before), kind
            # The backend follows the parameters.
            with torch.no_grad():
                next(p for p in model.parameters() if p.requires_grad).mul_(1.5)
            fresh = make_backend(self.backend, model, x, **self.options)
            assert torch.equal(backend.diag(x, y, N=5)[1], fresh.diag(x, y, N=5)[1])

    def test_refusals_name_the_backend_that_can(self, device: str) -> None:
        """Check that a host refuses unsupported networks before it computes anything."""
        torch.manual_seed(0)
        y = torch.tensor([0, 0, 1], device=device)
        for name, kinds, advice in (
            ("diag", self.refused, "ContrastiveGGN"),
            ("kron", self.refused_kron - self.refused, "diag"),
        ):
            for kind in sorted(kinds):
                model, x = build_network(kind, 2).to(device), make_inputs(kind, 3).to(device)
                with pytest.raises(UnsupportedError, match=advice):
                    getattr(make_backend(self.backend, model, x, **self.options), name)(x, y, N=3)

    def _accepted(self, without: frozenset[str] = frozenset()) -> list[str]:
        return [kind for kind in NETWORKS if kind not in self.refused | without]

    def _draw(self, data: st.DataObject, min_points: int = 1, without: frozenset[str] = frozenset()) -> _Drawn:
        return data.draw(network_cases(networks=self._accepted(without), by_target=True, min_points=min_points))

    def _rounded(self, data: st.DataObject) -> _Drawn:
        """Draw a case that float32 represents exactly, without pairs so close to the margin that rounding decides."""
        model, x, case = self._draw(data, min_points=2)
        model, x = _rounded_pair(model, x)
        case.z = model(x).detach()
        assume(float(case.z.norm(dim=1).min()) > _LEAST_NORM)
        if case.options["margin"] is not None:
            u = normalize(case.z)[0]
            assume(float((torch.cdist(u, u) - case.options["margin"]).abs().min()) > _GAP)
        return model, x, case

    def _make(
        self, drawn: _Drawn, device: str, weights: str | Tensor = "all", **more: Any
    ) -> tuple[ContrastiveBackend, Tensor, Tensor]:
        model, x, case = drawn
        x, y = x.to(device), _targets(case).to(device)
        return make_backend(self.backend, model.to(device), x, weights, **self._options(case), **more), x, y

    def _options(self, case: Case) -> dict[str, Any]:
        return {**case.options, "relation": case.pairs, **self.options}

    def _truth(self, drawn: _Drawn) -> tuple[Tensor, float, float]:
        """Return the dense curvature, the size of the terms that may cancel in it, and the data set's scale."""
        drawn[0].to("cpu")
        scale = len(drawn[1]) / 2 if drawn[2].options["normalization"] == "type" else 1.0
        return *truth_and_size(*drawn), scale


def _check_numbers(
    backend: ContrastiveBackend,
    x: Tensor,
    y: Tensor,
    step: int | None,
    want: Tensor,
    reach: float,
    jacobian: Tensor,
    z: Tensor,
    dtype: torch.dtype = torch.float64,
) -> None:
    """Compare a batch, its Jacobians, products, and the same points in coupled batches of ``step``, with the truth."""
    check_batch(backend, x, y, want, reach, dtype)
    if step is not None:
        check_data(backend, batches(x, y, step), want, reach, dtype)
    jacobians, outputs = backend.jacobians(x)
    assert near(jacobians.flatten(0, 1), jacobian, float(jacobian.abs().max()), dtype)
    assert near(outputs, z, float(z.abs().max()), dtype)
    entries, width = z.numel(), len(want)
    v, w = (torch.linspace(-1, 1, size, dtype=torch.float64, device="cpu") for size in (width, entries))
    with evaluation_mode(backend.model), torch.no_grad():
        pullback = backend.pullback(x)
        forward, backward = pullback.jvp(x, v.to(outputs))[1], pullback.vjp_sum(x, w.view_as(z).to(outputs))
    size = float(jacobian.abs().max())
    assert near(forward.flatten(), jacobian @ v, width * size, dtype)
    assert near(backward, jacobian.T @ w, entries * size, dtype)


def _check_factors(factors: Any, want: Any, reach: float, dtype: torch.dtype = torch.float64) -> None:
    for group, other in zip(factors, want, strict=True):
        for k, (f, g) in enumerate(zip(group, other, strict=True)):
            assert near(f, g, None if k else reach, dtype)


def _factors(backend: ContrastiveBackend, x: Tensor, y: Tensor) -> list[list[Tensor]] | None:
    """Return the factors of a backend; ``None`` if it refuses, which the test of refusals checks."""
    try:
        return [list(group) for group in backend.kron(x, y, N=len(x))[1].kfacs]
    except UnsupportedError:
        return None


def _targets(case: Case) -> Tensor:
    assert case.labels is not None
    return case.labels


def _rounded_pair(model: nn.Module, x: Tensor) -> tuple[nn.Module, Tensor]:
    return model.float().double(), x.float().double() if x.is_floating_point() else x


def _single(x: Tensor, device: str) -> Tensor:
    return x.to(device, torch.float32) if x.is_floating_point() else x.to(device)


def _snapshot(model: nn.Module) -> dict[str, Any]:
    """Return all state of a module that a backend could change."""
    taken: dict[str, Any] = {name: value.clone() for name, value in model.state_dict().items()}
    for name, module in model.named_modules():
        taken[f"{name}:vars"] = sorted(vars(module))
        taken[f"{name}:mode"] = module.training
        taken[f"{name}:hooks"] = [len(vars(module)[key]) for key in sorted(vars(module)) if key.endswith("_hooks")]
    for name, p in model.named_parameters():
        taken[f"{name}:grad"] = (id(p), type(p), p.grad is None, p.requires_grad, sorted(vars(p)))
    return taken


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Return whether two snapshots are of the same state."""
    return a.keys() == b.keys() and all(
        torch.equal(value, b[key]) if isinstance(value, Tensor) else value == b[key] for key, value in a.items()
    )
