"""The picture and the costs of docs/research.md, from the encoder and the data that its first block of code makes.

    python -m benchmarks.research [--out benchmarks/results] [--picture docs/images/research.png]

A cost is the processor time of the fastest of three calls. Beside it stands autograd: the Jacobian of all outputs, and
``torch.func.hessian`` of the loss in them, from which the same result follows.
"""

from __future__ import annotations

import argparse
import copy
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from curvlinops import CGInverseLinearOperator
from curvlinops.examples import IdentityLinearOperator
from curvlinops.papyan2020traces.spectrum import lanczos_approximate_spectrum
from laplace import Laplace
from matplotlib.figure import Figure
from scipy.sparse.linalg import eigsh
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import contrastive_curvature as cc
from benchmarks.machine import describe, machine_line, measure_time, options, table, write_results
from benchmarks.style import BLUE, GREEN, GREY, ORANGE, finish
from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.hosts.curvlinops import ContrastiveGGNLinearOperator
from contrastive_curvature.testing import dense_jacobian

DOCS = Path(__file__).parent.parent / "docs"
PICTURE = DOCS / "images" / "research.png"
DAMPING = 100.0
COST_POINTS = 100
"""Of 200 points, autograd's Hessian in the outputs would need 256 MB for each of its intermediate results."""


class Setting:
    """The encoder, the data and the loss of the page, after ``steps`` more of training on some of its points."""

    def __init__(self, steps: int = 0, points: int = 200) -> None:
        code = re.search(r"^```python\n(.*?)^```$", (DOCS / "research.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)
        assert code
        page: dict[str, Any] = {}
        exec(code[1], page)
        self.encoder: nn.Module = page["encoder"]
        self.x, self.y, self.loss = (page[name] for name in ("x", "y", "loss"))
        self.x, self.y = self.x[:points], self.y[:points]
        self.loader = list(zip(self.x.split(120), self.y.split(120), strict=True))
        self.train: Callable[..., None] = page["train"]
        self.train(self.encoder, self.x, self.y, steps)

    @property
    def psd(self) -> cc.losses.CosineLoss:
        return self.loss.replaced(pd_fix="psd")

    def operator(self, loss: cc.losses.CosineLoss) -> ContrastiveGGNLinearOperator:
        return ContrastiveGGNLinearOperator(self.encoder, loss, None, self.loader)

    def gradient(self) -> Tensor:
        parts = torch.autograd.grad(self.loss(self.encoder(self.x), self.y), list(self.encoder.parameters()))
        return torch.cat([part.flatten() for part in parts])

    def posterior(self, structure: str, loss: cc.losses.CosineLoss, **arguments: Any) -> Any:
        la = Laplace(self.encoder, "contrastive", "all", structure, backend_kwargs={"loss": loss}, **arguments)
        la.fit(self.loader)
        return la

    def evidence(self, scale: Tensor, bias: Tensor) -> Tensor:
        loss = cc.LogisticLoss(scale, bias, normalization="sum", pd_fix="full")
        return self.posterior("diag", loss, temperature=0.5).log_marginal_likelihood()

    def by_cg(self, gradient: Tensor) -> Tensor:
        shapes = [tuple(p.shape) for p in self.encoder.parameters()]
        damping = DAMPING * IdentityLinearOperator(shapes, gradient.device, gradient.dtype)
        return CGInverseLinearOperator(self.operator(self.psd) + damping, eps=0, tolerance=1e-10) @ gradient

    def by_kfac(self, gradient: Tensor) -> Tensor:
        la = self.posterior("kron", self.psd, prior_precision=DAMPING)
        return la.posterior_precision.bmm(gradient, exponent=-1)

    def by_autograd(self, loss: Any) -> Tensor:
        """Return the Gauss-Newton matrix (P, P) of all pairs."""
        z, jacobian = self.encoder(self.x).detach(), dense_jacobian(self.encoder, self.x)
        hessian = torch.func.hessian(lambda z: loss(z, self.y))(z).reshape(z.numel(), -1)
        return jacobian.T @ hessian @ jacobian


def numbers() -> list[Tensor]:
    """Return scale and bias of the page."""
    return [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (4.0, -2.0)]


def costs(at: Setting) -> Iterator[tuple[str, Callable[[], object], Callable[[], object]]]:
    """Yield what the page computes, by its lines and by autograd."""
    gradient = at.gradient()
    hessian, v = at.operator(at.loss), torch.ones_like(gradient)

    def evidence_by_autograd() -> object:
        scale, bias = numbers()
        loss = cc.LogisticLoss(scale, bias, normalization="sum")
        ratio = (at.by_autograd(loss).diagonal().clamp(min=0) / 0.5 + 1).log().sum()
        return torch.autograd.grad(-loss(at.encoder(at.x).detach(), at.y) / 0.5 - ratio / 2, (scale, bias))

    def product_by_autograd() -> object:
        names = list(dict(at.encoder.named_parameters()))
        theta = tuple(p.detach() for p in at.encoder.parameters())
        parts = tuple(part.view_as(p) for part, p in zip(v.split([p.numel() for p in theta]), theta, strict=True))

        def outputs(*weights: Tensor) -> Tensor:
            return torch.func.functional_call(at.encoder, dict(zip(names, weights, strict=True)), (at.x,))

        z, moved = torch.func.jvp(outputs, theta, parts)
        curved = torch.func.jvp(torch.func.grad(lambda z: at.loss(z, at.y)), (z,), (moved,))[1]
        return torch.func.vjp(outputs, *theta)[1](curved)

    def evidence_by_fit() -> object:
        both = numbers()
        return torch.autograd.grad(at.evidence(*both), both)

    def sharpness() -> object:
        trace = cc.ggn(at.encoder, at.x, at.y, loss=at.loss, clamp=False).sum()
        return trace, eigsh(at.operator(at.loss).to_scipy(), 1, which="LA")[0]

    def penalty(fitted: Callable[[], Callable[[Tensor], Tensor]]) -> Callable[[], object]:
        def of_step() -> object:
            weights = (parameters_to_vector(at.encoder.parameters()).detach() + 0.1).requires_grad_()
            return torch.autograd.grad(fitted()(weights), weights)

        return of_step

    def of_posterior() -> Callable[[Tensor], Tensor]:
        la = at.posterior("full", at.psd)
        return lambda weights: -la.log_prob(weights, normalized=False)

    def of_matrix() -> Callable[[Tensor], Tensor]:
        h, mean = at.by_autograd(at.loss), parameters_to_vector(at.encoder.parameters()).detach()
        return lambda weights: (weights - mean) @ h @ (weights - mean) / 2

    eye = DAMPING * torch.eye(len(v), dtype=v.dtype)
    yield "gradient of the marginal likelihood in two numbers", evidence_by_fit, evidence_by_autograd
    yield "one product with the curvature", lambda: hessian @ v, product_by_autograd
    yield "trace and sharpness", sharpness, lambda: torch.linalg.eigvalsh(at.by_autograd(at.loss))
    solve = lambda: torch.linalg.solve(at.by_autograd(at.loss) + eye, gradient)  # noqa: E731
    yield "natural-gradient step, conjugate gradients", lambda: at.by_cg(gradient), solve
    yield "natural-gradient step, K-FAC", lambda: at.by_kfac(gradient), solve
    yield "posterior of a task, and a gradient of its penalty", penalty(of_posterior), penalty(of_matrix)


def draw(quick: bool) -> Figure:
    """Draw the five results of the page."""
    figure = Figure(figsize=(11, 6.4), layout="constrained", facecolor="white")
    (margin, density, sharp), (step, forget, nothing) = figure.subplots(2, 3)
    nothing.set_axis_off()
    at = Setting()

    both, evidence, distance, trained = numbers(), [], [], Setting(60)
    adam = torch.optim.Adam(both, lr=0.3)
    for _ in range(2 if quick else 40):
        adam.zero_grad()
        found = trained.evidence(*both)
        (-found).backward()
        evidence.append(found.item())
        distance.append((2 + 2 * both[1] / both[0]).clamp(0, 4).sqrt().item())
        adam.step()
    margin.plot(evidence, color=BLUE)
    margin.annotate(f"margin {distance[0]:.2f}", (0, evidence[0]), (4, 0), textcoords="offset points", fontsize=8)
    end = len(evidence) - 1, evidence[-1]
    margin.annotate(f"margin {distance[-1]:.2f}", end, (0, -12), textcoords="offset points", ha="right", fontsize=8)
    margin.set(xlabel="steps of Adam on scale and bias", ylabel="log marginal likelihood", title="choose the margin")

    for steps, colour in zip((0, 20, 60), (GREY, ORANGE, BLUE), strict=True):
        trained = Setting(steps)
        grid, share = lanczos_approximate_spectrum(trained.operator(at.loss), 16 if quick else 128, num_repeats=4)
        density.semilogy(grid, share.clamp(min=1e-7), color=colour, label=f"step {steps + 10}")
    density.set(xlabel="eigenvalue", ylabel="density", title="spectral density", ylim=(1e-7, None))

    trained, found_at = Setting(), []
    for _ in range(2 if quick else 12):
        trace = cc.ggn(trained.encoder, at.x, at.y, loss=at.loss, clamp=False).sum()
        top = eigsh(trained.operator(at.loss).to_scipy(), 1, which="LA")[0]
        found_at.append((trace.item(), top.item()))
        trained.train(trained.encoder, at.x, at.y, 5)
    for values, name, colour in zip(zip(*found_at, strict=True), ("trace", "sharpness"), (BLUE, ORANGE), strict=True):
        sharp.semilogy([10 + 5 * k for k in range(len(values))], values, color=colour, label=name)
    sharp.set(xlabel="steps of training", title="trace and sharpness")

    gradient, rates = at.gradient(), torch.logspace(-5, -2, 40)

    def after(change: Tensor) -> float:
        moved = copy.deepcopy(at.encoder)
        vector_to_parameters(parameters_to_vector(at.encoder.parameters()) - change, moved.parameters())
        return at.loss(moved(at.x), at.y).item()

    step.semilogx(rates, [after(rate * gradient) for rate in rates], color=GREY, label="SGD, by its step size")
    for change, name, colour in ((at.by_kfac(gradient), "K-FAC", ORANGE), (at.by_cg(gradient), "exact, CG", BLUE)):
        step.axhline(after(change), color=colour, label=name)
    step.set(xlabel="step size of SGD", ylabel="loss after one step", title="a natural-gradient step")
    step.set_ylim(0, 2 * after(0 * gradient))

    _draw_forgetting(forget, at, 2 if quick else 60)
    for axes in (margin, density, sharp, step, forget):
        finish(axes, columns=3)
    return figure


def _draw_forgetting(axes: Any, at: Setting, steps: int) -> None:
    """Draw the accuracy on held-out first digits while the others are learned."""
    rest, labels = (torch.as_tensor(part)[200:] for part in load_digits(return_X_y=True))
    first = at.y < 5
    at.train(at.encoder, at.x[first], at.y[first], steps)
    la: Any = Laplace(at.encoder, "contrastive", "all", "full", prior_precision=1e-3, backend_kwargs={"loss": at.psd})
    la.fit([(at.x[first], at.y[first])])

    def accuracy(encoder: nn.Module) -> float:
        with torch.no_grad():
            u, v = (normalize(encoder(part))[0] for part in (rest[labels < 5] / 16, at.x[first]))
        return float((at.y[first][(u @ v.T).argmax(1)] == labels[labels < 5]).double().mean())

    penalties: list[tuple[str, str, Callable[[Tensor], Any]]] = [
        ("without", GREY, lambda _: 0.0),
        ("penalty -la.log_prob", GREEN, lambda weights: -la.log_prob(weights, normalized=False)),
    ]
    for name, colour, penalty in penalties:
        encoder = copy.deepcopy(at.encoder)
        scores = [accuracy(encoder)]
        for _ in range(steps // 2):
            at.train(encoder, at.x[~first], at.y[~first], 2, penalty)
            scores.append(accuracy(encoder))
        axes.plot([2 * k for k in range(len(scores))], scores, color=colour, label=name)
    axes.set(xlabel="steps on digits 5 to 9", ylabel="1-NN accuracy, digits 0 to 4", title="continual learning")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--picture", type=Path, default=PICTURE, help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="in small, to see that it runs")
    given: argparse.Namespace = parser.parse_args(arguments)
    machine, rows, cases = describe(), [], []
    for name, ours, autograd in costs(Setting(points=COST_POINTS)):
        mine, theirs = (measure_time(call, 1 if given.quick else 3)["cpu_seconds"] for call in (ours, autograd))
        cases.append({"case": name, "ours": mine, "autograd": theirs})
        rows.append((name, f"{mine:.3f} s", f"{theirs:.3f} s", f"{mine / theirs:.2g}"))
    head = ("", "these lines", "autograd", "ratio")
    text = f"# What research costs\n\n`python -m benchmarks.research`, {machine_line(machine)}. The page's encoder "
    text += f"and losses, {COST_POINTS} of its points; processor time, the fastest of 3.\n\n{table(head, rows)}\n"
    write_results(given.out, "research", {"machine": machine, "cases": cases}, text)
    given.picture.parent.mkdir(parents=True, exist_ok=True)
    draw(given.quick).savefig(given.picture, dpi=110)


if __name__ == "__main__":
    main()
