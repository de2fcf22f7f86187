"""Predicted against real effects of leaving training items out, by retraining last layers (``docs/influence.md``).

    python -m benchmarks.influence digits supcon [features.npz]

A linear layer is trained on 24 principal components of the features of 200 points, to a gradient of 1e-7 in float64,
once with all points and 60 times without 10 drawn at random. The features of ``digits`` are the pixels; those of other
data are read from a file of arrays ``train_features``, ``train_labels``, ``test_features`` and ``test_labels``, whose
classes beyond the first 20 are left out. LDS is the mean over queries of the rank correlation of the predicted change
of the margin with the real one; the slope is that of the real changes on the predicted ones, through the origin.
"""

import argparse
from collections.abc import Callable

import numpy as np
import torch
from scipy.stats import spearmanr
from sklearn.datasets import load_digits
from torch import Tensor, nn

import contrastive_curvature as cc

POINTS, FEATURES, DIM, PRIOR, RETRAININGS, LEFT_OUT, QUERIES, CLASSES = 200, 24, 16, 10.0, 60, 10, 300, 20
GRADIENT = 1e-7
SPARE = 8
"""Retrainings in place of those that find no minimum, as where a point has come to the origin."""
LOSSES: dict[str, Callable[[], cc.RowLoss | cc.PairLoss]] = {
    "supcon": lambda: cc.SupConLoss(temperature=0.2, reduction="sum"),
    "contrastive": lambda: cc.ContrastiveLoss(margin=None),
    "soft": lambda: cc.SoftContrastiveLoss(),
}
FIXES = ("full", "fixed", "psd", "psd_parts", "positive", "ggn", "ggn_fixed")


def load(path: str | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return features and labels of training points and queries."""
    if path is None:
        x, y = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(x))
        x, y, xq, yq = x[order[:1000]] / 16, y[order[:1000]], x[order[1000:]] / 16, y[order[1000:]]
    else:
        with np.load(path) as file:
            x, y, xq, yq = (file[f"{part}_{kind}"] for part in ("train", "test") for kind in ("features", "labels"))
        classes = np.unique(y)[:CLASSES]
        keep, keep_q = np.isin(y, classes), np.isin(yq, classes)
        x, y, xq, yq = x[keep], y[keep], xq[keep_q], yq[keep_q]
    order, queries = (np.random.default_rng(1).permutation(len(part)) for part in (y, yq))
    x, y, xq, yq = (torch.tensor(part) for part in (x[order[:1000]], y[order], xq[queries], yq[queries]))
    x, xq = x.double(), xq.double()
    mean = x.mean(0)
    _, size, axes = torch.linalg.svd(x - mean, full_matrices=False)
    basis = axes[:FEATURES].T * len(x) ** 0.5 / size[0]
    return ((x - mean) @ basis)[:POINTS], y[:POINTS].long(), ((xq - mean) @ basis)[:QUERIES], yq[:QUERIES].long()


class Problem:
    """The loss of a linear layer with a Gaussian prior around where training began."""

    def __init__(self, loss: cc.RowLoss | cc.PairLoss, x: Tensor, y: Tensor) -> None:
        self.loss, self.x, self.y = loss, x, y
        self.start = torch.randn(DIM, FEATURES, generator=torch.Generator().manual_seed(2)) / FEATURES**0.5

    def value(self, weight: Tensor, keep: Tensor) -> Tensor:
        """Return the loss of some of the points, and the prior's part."""
        prior = (weight - self.start).square().sum() * PRIOR / 2
        return self.loss(self.x[keep] @ weight.T, self.y[keep]) + prior

    def gradient(self, weight: Tensor, keep: Tensor) -> Tensor:
        """Return the gradient (P,)."""
        weight = weight.detach().requires_grad_()
        return torch.autograd.grad(self.value(weight, keep), weight)[0].flatten()

    def curvature(self, weight: Tensor, keep: Tensor, distance: str, fix: str, *, clamp: bool = True) -> Tensor:
        """Return the curvature (P, P) with a fix, and the prior's; unclamped ``arccos``, ``full`` is the Hessian."""
        model = nn.Linear(FEATURES, DIM, bias=False)
        model.weight.data = weight.clone()
        options = {"loss": self.loss, "structure": "full", "subset_of_weights": "last_layer", "clamp": clamp}
        found = cc.ggn(model, self.x[keep], self.y[keep], distance=distance, pd_fix=fix, **options)
        return found + PRIOR * torch.eye(weight.numel())

    def trained(self, weight: Tensor, keep: Tensor) -> Tensor:
        """Return the weights of a minimum: L-BFGS, then Newton steps in which every eigenvalue counts by its size."""
        weight = weight.clone().requires_grad_()
        search = torch.optim.LBFGS(
            [weight],
            max_iter=1500,
            tolerance_grad=1e-6,
            tolerance_change=0,
            history_size=50,
            line_search_fn="strong_wolfe",
        )

        def evaluate() -> Tensor:
            search.zero_grad()
            value = self.value(weight, keep)
            value.backward()
            return value

        search.step(evaluate)
        weight = weight.detach()
        for _ in range(50):
            gradient = self.gradient(weight, keep)
            if gradient.norm() < GRADIENT:
                return weight
            values, vectors = torch.linalg.eigh(self.curvature(weight, keep, "arccos", "full", clamp=False))
            step = (vectors @ ((vectors.T @ gradient) / values.abs())).view_as(weight)
            before, size = self.value(weight, keep), 1.0
            slope = float(gradient @ step.flatten())
            while self.value(weight - size * step, keep) > before - 1e-4 * size * slope + 1e-12 * before.abs():
                size /= 2
            weight = weight - size * step
        raise RuntimeError(f"gradient {float(gradient.norm()):.1e} after all steps")

    def own(self, weight: Tensor) -> Tensor:
        """Return the loss of every point as an anchor, all others as they are, shape (N,)."""
        u = nn.functional.normalize(self.x @ weight.T)
        itself = torch.eye(len(u), dtype=torch.bool)
        cosine, same = (u @ u.T).masked_fill(itself, 0), (self.y[:, None] == self.y)
        positive, negative = (same & ~itself).double(), (~same).double()
        if isinstance(self.loss, cc.RowLoss):
            return self.loss._value(cosine, positive, negative)
        w = self.loss.negative_weight
        attract = (1 - w) * positive / positive.sum(1, keepdim=True).clamp(min=1)
        repel = w * negative / negative.sum(1, keepdim=True)
        rows = zip(cosine, attract, repel, strict=True)
        return torch.stack([self.loss._value(*(part[None] for part in row)) for row in rows]) / 2


def main(name: str, kind: str, path: str | None = None) -> None:
    """Print the table of an encoder."""
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    x, y, xq, yq = load(path)
    problem, every = Problem(LOSSES[kind](), x, y), torch.ones(POINTS, dtype=torch.bool)
    weight = problem.trained(problem.start, every)

    unit = nn.functional.normalize
    cosine, same = unit(xq @ weight.T) @ unit(x @ weight.T).T, yq[:, None] == y
    known = same.any(1)
    cosine, same, xq = cosine[known], same[known], xq[known]
    match, other = (cosine.masked_fill(mask, -2).argmax(1) for mask in (~same, same))

    def margin(weight: Tensor) -> Tensor:
        u = unit(x @ weight.T)
        return (unit(xq @ weight.T) * (u[match] - u[other])).sum(1)

    whole = problem.gradient(weight, every)
    without = [every.clone().index_fill(0, torch.tensor([k]), False) for k in range(POINTS)]
    terms = whole - torch.stack([problem.gradient(weight, keep) for keep in without])
    anchors = problem.own(weight)
    assert torch.allclose(anchors.sum(), problem.loss(x @ weight.T, y)), "the points' terms are not the loss"
    own = torch.autograd.functional.jacobian(problem.own, weight).flatten(1)
    of_margin = torch.autograd.functional.jacobian(margin, weight).flatten(1)

    generator, changes, left_out = torch.Generator().manual_seed(5), [], []
    for _ in range(RETRAININGS + SPARE):
        keep = every.clone()
        keep[torch.randperm(POINTS, generator=generator)[:LEFT_OUT]] = False
        try:
            changes.append(margin(problem.trained(weight, keep)) - margin(weight))
        except RuntimeError as error:
            print(f"left out of the table: {error}")
            continue
        left_out.append((~keep).double())
    changes, left_out = changes[:RETRAININGS], left_out[:RETRAININGS]
    real, groups = torch.stack(changes), torch.stack(left_out)
    hits = float((cosine.argmax(1) == match).double().mean())
    print(f"{name}, {kind}: recall@1 {hits:.2f}, gradient {float(whole.norm()):.0e}, {len(match)} queries")

    def report(label: str, curvature: Tensor | None, gradients: Tensor) -> None:
        moved = gradients.T if curvature is None else torch.linalg.solve(curvature, gradients.T)
        predicted = groups @ (of_margin @ moved).T
        pairs = zip(predicted.T, real.T, strict=True)
        lds = np.mean([spearmanr(one, two).statistic for one, two in pairs])
        slope = float((predicted * real).sum() / predicted.square().sum())
        print(f"| {label} | {lds:.2f} | {slope:.2f} |", flush=True)

    hessian = problem.curvature(weight, every, "arccos", "full", clamp=False)
    report("all terms, exact Hessian", hessian, terms)
    report("own term, exact Hessian (classical)", hessian, own)
    report("all terms, no curvature", None, terms)
    report("own term, no curvature", None, own)
    for distance in ("arccos", "euclidean"):
        for fix in FIXES:
            try:
                curvature = problem.curvature(weight, every, distance, fix)
            except cc.UnsupportedError:
                continue
            report(f"all terms, {distance} {fix}", curvature, terms)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of the data, for the heading")
    parser.add_argument("kind", choices=LOSSES, help="the loss")
    parser.add_argument("path", nargs="?", help="file of features (default: scikit-learn's digits)")
    main(**vars(parser.parse_args()))
