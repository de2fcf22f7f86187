"""Any input gives finite numbers, or an error of this library, of Python or of torch: nothing is silently wrong.

``make test`` tries the same examples every time; ``make fuzz`` draws new ones, and many more.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from fuzz_calls import CALLS, POSTERIORS, data, encoder, posterior
from fuzz_values import anything, is_checked, outputs
from hypothesis import given, settings
from hypothesis import strategies as st
from laplace import Laplace
from strategies import DISTANCES, FIXES, NETWORKS, NORMALIZATIONS, build_network, make_inputs
from torch import Tensor

import contrastive_curvature as cc
from contrastive_curvature.codec import sealed
from contrastive_curvature.laplace.state import SEALED

ERRORS = (cc.ContrastiveCurvatureError, TypeError, ValueError, RuntimeError, IndexError)
"""Of options and shapes by name, which the tests of bad input hold; beyond them Python's and torch's own."""

# A single argument gone wrong is what users do; two at once find checks that rely on each other.
MOST_REPLACED = 2


def tried(call: Any, given: dict[str, Any], what: str) -> None:
    """Call; an error must be one of :data:`ERRORS`, and a result finite."""
    # Warnings are answers too, and do not stop the call.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = call(**given)
        except ERRORS:
            return
    assert is_checked(found), what


@pytest.mark.parametrize("name", list(CALLS))
def test_the_calls_work_as_they_stand(name: str) -> None:
    call, arguments = CALLS[name]
    assert is_checked(call(**arguments))


@pytest.mark.parametrize("name", list(CALLS))
@given(drawn=st.data())
def test_any_value_for_any_argument(name: str, drawn: st.DataObject) -> None:
    call, arguments = CALLS[name]
    names = st.lists(st.sampled_from(list(arguments)), min_size=1, max_size=MOST_REPLACED, unique=True)
    replaced = {key: drawn.draw(anything(), label=key) for key in drawn.draw(names, label="replaced")}
    before = torch.random.get_rng_state()
    tried(call, {**arguments, **replaced}, f"{name}: {replaced}")
    torch.random.set_rng_state(before)


OPTIONS = {
    "distance": st.sampled_from(DISTANCES),
    "pd_fix": st.sampled_from(FIXES),
    "normalization": st.sampled_from(NORMALIZATIONS),
    "margin": st.sampled_from([None, 1e-6, 0.7, 1.999999, 2]),
    "negative_weight": st.sampled_from([0, 0.3, 0.5, 1]),
}


@given(z=outputs(), classes=st.integers(1, 6), options=st.fixed_dictionaries(OPTIONS))
def test_the_core_at_any_numbers(z: Tensor, classes: int, options: dict[str, Any]) -> None:
    """One point, one class, no positive pair; norms from the smallest to the largest of the type."""
    labels = torch.arange(len(z)) % classes
    pairs = {key: options[key] for key in ("margin", "negative_weight", "normalization")}
    tried(lambda **given: cc.ContrastiveLoss(**given)(z, labels), pairs, "loss")
    hessian, arguments = CALLS["output_hessian"]
    tried(hessian, {**arguments, "z": z, "labels": labels, **options}, "Hessian")


@settings(max_examples=60)
@given(
    z=outputs(widest=3),
    kind=st.sampled_from(POSTERIORS),
    classes=st.integers(1, 4),
    options=st.fixed_dictionaries(OPTIONS),
    prior=st.sampled_from(["none", "average_information", "marglik"]),
    batch=st.integers(1, 12),
)
def test_posteriors_at_any_inputs(
    z: Tensor, kind: Any, classes: int, options: dict[str, Any], prior: str, batch: int
) -> None:
    """Inputs of any size, fitted and predicted; the encoder squashes them, so that outputs are usual."""
    weights, structure, more = kind
    x = torch.zeros(len(z), data()[0].shape[1], dtype=z.dtype)
    x[:, : z.shape[1]] = z
    labels = torch.arange(len(z)) % classes
    more = {**more, "backend_kwargs": {**options, **more.get("backend_kwargs", {})}}
    if structure == "gp":
        more["n_subset"] = min(more["n_subset"], len(x))

    def fitted() -> Any:
        la = Laplace(encoder().to(x.dtype), "contrastive", weights, structure, **more)
        la.fit(list(zip(x.split(batch), labels.split(batch), strict=True)))
        if prior != "none":
            la.optimize_prior_precision(method=prior, n_steps=3)
        out = la(x)
        twin = Laplace(encoder().to(x.dtype), "contrastive", weights, structure, **more)
        twin.load_state_dict(la.state_dict())
        again = twin(x)
        assert torch.equal(out.mu, again.mu), "a loaded posterior is the same"
        return la.H_raw, out.mu, out.kappa, out.uncertainty, out.variance, out.sample(2), la.sample(2)

    tried(fitted, {}, f"{kind}")


@settings(max_examples=60)
@given(
    name=st.sampled_from(sorted(NETWORKS)),
    n=st.integers(1, 6),
    scale=st.sampled_from([1e-30, 1e-12, 1.0, 1e12, 1e30]),
    structure=st.sampled_from(["diag", "full", "kron"]),
    options=st.fixed_dictionaries(OPTIONS),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
)
def test_the_curvature_of_any_network(
    name: str, n: int, scale: float, structure: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = build_network(name, 3).to(dtype)
    x = make_inputs(name, n)
    x = x * scale if isinstance(x, Tensor) and x.is_floating_point() else x
    x = x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
    tried(cc.ggn, {"model": model, "x": x, "labels": torch.arange(n) % 2, "structure": structure, **options}, name)


@pytest.mark.parametrize(("weights", "structure", "more"), POSTERIORS, ids=[f"{a}-{b}" for a, b, _ in POSTERIORS])
@given(drawn=st.data())
def test_any_state_of_a_posterior(weights: str, structure: str, more: dict[str, Any], drawn: st.DataObject) -> None:
    la = posterior(weights, structure, more)
    state = la.state_dict()
    key = drawn.draw(st.sampled_from(sorted(state)), label="key")
    value = drawn.draw(anything(), label=key)

    def loaded() -> Any:
        la.load_state_dict(sealed({**state, key: value}, SEALED))
        out = la(data()[0])
        return out.mu, out.kappa, la.sample(2)

    tried(loaded, {}, f"{key}: {value!r}")
