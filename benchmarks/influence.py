"""Predicted against real effects of leaving training items out, by retraining last layers (``docs/influence.md``).

    python -m benchmarks.influence digits supcon [features.npz] [--out benchmarks/results]
    python -m benchmarks.influence --picture docs/images/influence.png

A linear layer is trained on 24 principal components of the features of 200 points, to a gradient of 1e-7 in float64,
once with all points and 60 times without 10 drawn at random. The features of ``digits`` are the pixels; those of other
data are read from a file of arrays ``train_features``, ``train_labels``, ``test_features`` and ``test_labels``, whose
classes beyond the first 20 are left out. LDS is the mean over queries of the rank correlation of the predicted change
of the margin with the real one; the slope is that of the real changes on the predicted ones, through the origin. How
far ``la.without(..., newton_step=True)`` is from a layer trained again is its distance over that of the old layer.

Every run adds its column to ``influence.json``, from which the table ``influence.md`` is written. A row is kronfluence
(1.0.1), where that is installed: its EK-FAC with a loss for each point, whose candidates are constants.

The picture is one query and the three items without which its margin would change most, of ``digits``, ``supcon``.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from laplace import Laplace
from matplotlib.figure import Figure
from scipy.stats import spearmanr
from sklearn.datasets import load_digits
from torch import Tensor, nn

import contrastive_curvature as cc
from benchmarks.machine import RESULTS, describe, machine_line, table, write_results

POINTS, FEATURES, DIM, PRIOR, RETRAININGS, LEFT_OUT, QUERIES, CLASSES = 200, 24, 16, 10.0, 60, 10, 300, 20
GRADIENT = 1e-7
SPARE = 8
"""Retrainings in place of those that find no minimum, as where a point has come to the origin."""
LOSSES: dict[str, Callable[[], cc.RowLoss | cc.PairLoss]] = {
    "supcon": lambda: cc.SupConLoss(temperature=0.2, reduction="sum"),
    "contrastive": lambda: cc.ContrastiveLoss(margin=None),
    "soft": lambda: cc.SoftContrastiveLoss(),
}
PICTURE = Path(__file__).parent.parent / "docs" / "images" / "influence.png"
_BLUE, _GREY = "#0072b2", "#777777"
FIXES = ("full", "fixed", "psd", "psd_parts", "positive", "ggn", "ggn_fixed")


def load(path: Path | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return features and labels of up to 1,000 training points, and of queries, in a random order."""
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
    return x.double(), y.long(), xq.double(), yq.long()


def components(x: Tensor, xq: Tensor) -> tuple[Tensor, Tensor]:
    """Return the principal components of some training points, and of some queries."""
    mean = x.mean(0)
    _, size, axes = torch.linalg.svd(x - mean, full_matrices=False)
    basis = axes[:FEATURES].T * len(x) ** 0.5 / size[0]
    return ((x - mean) @ basis)[:POINTS], ((xq - mean) @ basis)[:QUERIES]


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

    def anchors(self, u: Tensor, candidates: Tensor, numbers: Tensor) -> Tensor:
        """Return the loss (B,) of points with these numbers as anchors, from unit embeddings of them and of all."""
        itself = nn.functional.one_hot(numbers, len(self.y)).bool()
        cosine, same = (u @ candidates.T).masked_fill(itself, 0), self.y[numbers, None] == self.y
        positive, negative = (same & ~itself).double(), (~same).double()
        if isinstance(self.loss, cc.RowLoss):
            return self.loss._value(cosine, positive, negative)
        w = self.loss.negative_weight
        attract = (1 - w) * positive / positive.sum(1, keepdim=True).clamp(min=1)
        repel = w * negative / negative.sum(1, keepdim=True)
        rows = zip(cosine, attract, repel, strict=True)
        return torch.stack([self.loss._value(*(part[None] for part in row)) for row in rows]) / 2

    def own(self, weight: Tensor) -> Tensor:
        """Return the loss of every point as an anchor, shape (N,)."""
        u = nn.functional.normalize(self.x @ weight.T)
        return self.anchors(u, u, torch.arange(len(u)))

    def posterior(self, weight: Tensor) -> Any:
        """Return the library's posterior of the layer, with the fix that is closest to retraining."""
        model = nn.Linear(FEATURES, DIM, bias=False)
        model.weight.data = weight.clone()
        options = {"loss": self.loss, "pd_fix": "full"}
        la = Laplace(
            model, "contrastive", "last_layer", "full", prior_precision=PRIOR, temperature=1.0, backend_kwargs=options
        )
        la.fit([(self.x, self.y)])
        return la


def kronfluence(problem: Problem, weight: Tensor, triples: Tensor) -> Tensor | None:
    """Return its scores (Q, N) for queries with their matches and others (Q, 3, F); ``None`` if it is not installed."""
    try:
        from kronfluence.analyzer import Analyzer, prepare_model
        from kronfluence.arguments import FactorArguments, ScoreArguments
        from kronfluence.task import Task
    except ImportError:
        return None
    unit = nn.functional.normalize
    candidates = unit(problem.x @ weight.T)

    class Points(Task):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            return problem.anchors(unit(model(batch[0])), candidates, batch[1]).sum()

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            query, match, other = unit(model(batch[0]), dim=2).unbind(1)
            return (query * (match - other)).sum()

    model = nn.Sequential(nn.Linear(FEATURES, DIM, bias=False))
    model[0].weight.data = weight.clone()
    task, n = Points(), len(problem.x)
    precise = {"per_sample_gradient_dtype": torch.float64}
    of_factors = FactorArguments(
        use_empirical_fisher=True,
        activation_covariance_dtype=torch.float64,
        gradient_covariance_dtype=torch.float64,
        lambda_dtype=torch.float64,
        **precise,
    )
    # It takes the mean over the points, and the prior is of their sum.
    of_scores = ScoreArguments(
        damping_factor=PRIOR / n, score_dtype=torch.float64, precondition_dtype=torch.float64, **precise
    )
    items, asked = ([(row, k) for k, row in enumerate(part)] for part in (problem.x, triples))
    with tempfile.TemporaryDirectory() as folder:
        model = prepare_model(model, task)
        analyzer = Analyzer("influence", model, task, cpu=True, output_dir=folder, disable_tqdm=True)
        analyzer.fit_all_factors("factors", items, per_device_batch_size=50, factor_args=of_factors)
        sizes = {"per_device_query_batch_size": 50, "per_device_train_batch_size": 50}
        analyzer.compute_pairwise_scores("scores", "factors", asked, items, **sizes, score_args=of_scores)
        return analyzer.load_pairwise_scores("scores")["all_modules"] / n


def measure(kind: str, path: Path | None) -> dict[str, Any]:
    """Return the column of an encoder."""
    x, y, xq, yq = load(path)
    (x, xq), y, yq = components(x, xq), y[:POINTS], yq[:QUERIES]
    problem, every = Problem(LOSSES[kind](), x, y), torch.ones(len(x), dtype=torch.bool)
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
    without = [every.clone().index_fill(0, torch.tensor([k]), False) for k in range(len(x))]
    terms = whole - torch.stack([problem.gradient(weight, keep) for keep in without])
    anchors = problem.own(weight)
    assert torch.allclose(anchors.sum(), problem.loss(x @ weight.T, y)), "the points' terms are not the loss"
    own = torch.autograd.functional.jacobian(problem.own, weight).flatten(1)
    of_margin = torch.autograd.functional.jacobian(margin, weight).flatten(1)

    generator, retrained, kept, lost = torch.Generator().manual_seed(5), [], [], 0
    for _ in range(RETRAININGS + SPARE):
        keep = every.clone()
        keep[torch.randperm(len(x), generator=generator)[:LEFT_OUT]] = False
        try:
            retrained.append(problem.trained(weight, keep))
        except RuntimeError as error:
            print(f"left out of the table: {error}", flush=True)
            lost += 1
            continue
        kept.append(keep)
        if len(kept) == RETRAININGS:
            break
    real = torch.stack([margin(again) - margin(weight) for again in retrained])
    groups = torch.stack([(~keep).double() for keep in kept])
    rows: dict[str, list[float]] = {}

    def report(label: str, effects: Tensor) -> None:
        """Note how well the effects (N, Q) of the points add up to the real changes."""
        predicted = groups @ effects
        lds = np.mean([spearmanr(*pair).statistic for pair in zip(predicted.T, real.T, strict=True)])
        slope = float((predicted * real).sum() / predicted.square().sum())
        rows[label] = [round(float(lds), 3), round(slope, 3)]
        print(label, rows[label], flush=True)

    def solved(curvature: Tensor, gradients: Tensor) -> Tensor:
        return (of_margin @ torch.linalg.solve(curvature, gradients.T)).T

    hessian = problem.curvature(weight, every, "arccos", "full", clamp=False)
    report("all terms, exact Hessian", solved(hessian, terms))
    report("own term, exact Hessian (classical)", solved(hessian, own))
    report("all terms, no curvature", terms @ of_margin.T)
    report("own term, no curvature", own @ of_margin.T)
    scores = kronfluence(problem, weight, torch.stack([xq, x[match], x[other]], dim=1))
    if scores is not None:
        report("own term, EK-FAC (kronfluence)", scores.T)
    for distance in ("arccos", "euclidean"):
        for fix in FIXES:
            try:
                curvature = problem.curvature(weight, every, distance, fix)
            except cc.UnsupportedError:
                continue
            report(f'all terms, `distance="{distance}"`, `pd_fix="{fix}"`', solved(curvature, terms))

    la, left = problem.posterior(weight), []
    for keep, again, change in zip(kept, retrained, real, strict=True):
        step = la.without([(x, y)], (~keep).nonzero()[:, 0], newton_step=True).mean.view_as(weight)
        distances = (
            (step - again).norm() / (weight - again).norm(),
            (margin(step) - margin(again)).norm() / change.norm(),
        )
        left.append([float(distance) for distance in distances])
    return {
        "recall": float((cosine.argmax(1) == match).double().mean()),
        "queries": len(match),
        "without a minimum": lost,
        "rows": rows,
        "newton": np.median(left, axis=0).round(3).tolist(),
    }


def render(results: dict[str, Any]) -> str:
    """Write the table of all columns."""
    columns = results["columns"]
    labels = dict.fromkeys(label for column in columns.values() for label in column["rows"])
    cells = [[label, *(_cell(column["rows"].get(label)) for column in columns.values())] for label in labels]
    for number, what in enumerate(("the weights", "the margins")):
        label = f"distance of {what} to training again after a Newton step, median"
        cells.append([label, *(f"{column['newton'][number]:.2f}" for column in columns.values())])
    cells.append(["retrainings without a minimum", *(column["without a minimum"] for column in columns.values())])
    parts = [
        "# Predicted and real effects of training items",
        f"`python -m benchmarks.influence`, {machine_line(results['machine'])}. LDS / slope of {RETRAININGS} "
        f"retrainings without {LEFT_OUT} of {POINTS} points. `fixed` takes points as independent.",
        table(["estimate", *columns], cells),
    ]
    return "\n\n".join(parts) + "\n"


def _cell(pair: list[float] | None) -> str:
    return "" if pair is None else f"{pair[0]:.2f} / {pair[1]:.2f}"


def draw() -> Figure:
    """Draw one query of ``digits``, its match, and the three items that made the answer."""
    images, y, asked, yq = load(None)
    (x, xq), y, yq = components(images, asked), y[:POINTS], yq[:QUERIES]
    problem, every = Problem(LOSSES["supcon"](), x, y), torch.ones(len(x), dtype=torch.bool)
    weight = problem.trained(problem.start, every)
    effects = cc.influence(problem.posterior(weight), [(x, y)], [(xq, yq)])
    unit = nn.functional.normalize
    cosine, same = unit(xq @ weight.T) @ unit(x @ weight.T).T, yq[:, None] == y
    match, other = (cosine.masked_fill(mask, -2).argmax(1) for mask in (~same, same))
    # Of the queries that are answered rightly, the one that owes a single item most.
    right = cosine.argmax(1) == match
    query = int(effects.amin(1).masked_fill(~right, 0).argmin())
    pair = match[query], other[query]

    def margin(weight: Tensor) -> float:
        near, far = unit(x[torch.stack(pair)] @ weight.T)
        return float(unit(weight @ xq[query], dim=0) @ (near - far))

    figure = Figure(figsize=(9, 2.25), layout="constrained", facecolor="white")
    shown = [(asked[query], "query"), (images[pair[0]], f"its answer: {int(y[pair[0]])}\nmargin {margin(weight):.3f}")]
    for item in effects[query].argsort()[:3].tolist():
        again = problem.trained(weight, every.clone().index_fill(0, torch.tensor([item]), False))
        real, predicted = margin(again) - margin(weight), float(effects[query, item])
        shown.append((images[item], f"{int(y[item])}: without it {predicted:+.3f}\nretrained {real:+.3f}"))
        print(f"item {item}, class {int(y[item])}: predicted {predicted:+.4f}, retrained {real:+.4f}")
    for number, (axes, (image, title)) in enumerate(zip(figure.subplots(1, 5), shown, strict=True)):
        axes.imshow(image.view(8, 8), cmap="gray_r")
        axes.set_title(title, fontsize=10, color=_GREY if number < 2 else _BLUE)
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_color(_GREY)
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure an encoder and write the table, or the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", help="of the data, for the heading")
    parser.add_argument("kind", nargs="?", choices=LOSSES, help="the loss")
    parser.add_argument("path", nargs="?", type=Path, help="file of features (default: scikit-learn's digits)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results (default: %(default)s)")
    parser.add_argument("--picture", type=Path, nargs="?", const=PICTURE, help="write the picture instead")
    given = parser.parse_args(arguments)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    if given.picture:
        draw().savefig(given.picture, dpi=130)
        return
    if given.kind is None:
        parser.error("a name and a loss")
    file = given.out / "influence.json"
    column = measure(given.kind, given.path)
    columns = json.loads(file.read_text())["columns"] if file.exists() else {}
    results = {"machine": describe(), "columns": {**columns, f"{given.name}, {given.kind}": column}}
    write_results(given.out, "influence", results, render(results))


if __name__ == "__main__":
    main()
