"""Scores without a posterior: distances to training inputs, to classes, and to the test inputs that are searched."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from benchmarks.experiments.methods.scores import NEIGHBORS, feature_distance
from contrastive_curvature import metrics
from contrastive_curvature.hessian.sphere import normalize

_FEATURES = 2**26
"""Numbers in the searched features: 256 MiB, and the time of the search grows with them."""

_RANK = 2048
"""Covariances of more features than this are estimated in the span of as many training inputs."""


class FeatureNeighbors:
    """Mean cosine distance to the ten nearest training inputs, between features.

    This is the distance to neighbours among normalised features of Sun et al. (2022, "Out-of-Distribution Detection
    with Deep Nearest Neighbors", arXiv 2204.06507): a cosine distance is half of the squared Euclidean one. They take
    the k-th neighbour alone, with k chosen on validation data (50 for CIFAR-10); here it is the mean of the first ten.

    Args:
        features: Of the training inputs, shape (N, F). Of very many numbers a part is searched,
            drawn with a fixed seed.
    """

    def __init__(self, features: Tensor) -> None:
        most = max(_FEATURES // features.shape[1], NEIGHBORS)
        order = torch.randperm(len(features), generator=torch.Generator().manual_seed(0))
        chosen = features[order[:most]] if len(features) > most else features
        self.gallery = chosen[(chosen != 0).any(1)]

    def __call__(self, features: Tensor) -> Tensor:
        """The distance, in [0, 2], shape (M,); one where all features of an input are zero."""
        out = features.new_ones(len(features))
        some = (features != 0).any(1)
        if bool(some.any()):
            out[some] = feature_distance(features if bool(some.all()) else features[some], self.gallery)
        return out


def match_distance(queries: Tensor, gallery: Tensor, rows: Tensor | None) -> Tensor:
    """Cosine distance to the nearest test input: how far the match is that a search returns.

    Args:
        queries: Raw outputs, shape (N, D).
        gallery: Raw outputs of the test inputs, shape (M, D).
        rows: The test input that each query is, or was made from, which is left out of its search; ``None``: none is.

    Returns:
        Shape (N,), in [0, 2].
    """
    match = _nearest_others(queries, gallery, 1, rows)[:, 0]
    u, v = normalize(queries)[0], normalize(gallery)[0]
    return (u - v[match]).square().sum(1) / 2


def match_votes(queries: Tensor, gallery: Tensor, labels: Tensor, rows: Tensor | None) -> Tensor:
    """Minus the share of the ten nearest test inputs that are of the class of the nearest, the match.

    Args:
        queries: Raw outputs, shape (N, D).
        gallery: Raw outputs of the test inputs, shape (M, D).
        labels: Their classes, shape (M,).
        rows: As in :func:`match_distance`.

    Returns:
        Shape (N,), in [-1, 0). It takes ten values at most: many queries are tied.
    """
    classes = labels[_nearest_others(queries, gallery, NEIGHBORS, rows)]
    return -(classes == classes[:, :1]).double().mean(1)


def _nearest_others(queries: Tensor, gallery: Tensor, k: int, rows: Tensor | None) -> Tensor:
    """Return the k nearest test inputs, nearest first, shape (N, k), without the query itself."""
    nearest = metrics.nearest_neighbors(queries, gallery, k=k + (rows is not None))
    if rows is None:
        return nearest
    # A stable sort moves the own row to the end and keeps the order of the others; the last one is dropped.
    own = nearest == rows.to(nearest).unsqueeze(1)
    return nearest.gather(1, own.long().argsort(dim=1, stable=True))[:, :k]


class ClassGaussians:
    """Mahalanobis distance of features to the nearest class: class means, one covariance for all (Lee et al. 2018).

    With one label for all inputs, the distance to one centre (Kamoi and Kobayashi 2020, arXiv 2003.00402). Of features
    divided by their length, the distance of "Mahalanobis++" (Mueller and Hein 2025, arXiv 2505.18032). Stores the
    covariance and one mean a class.

    The covariance is shrunk towards a multiple of the identity by the rule of Ledoit and Wolf (2004), as in
    ``sklearn.covariance.ledoit_wolf`` of the features minus their class means; the papers invert it as it is. Features
    wider than a limit have it estimated from as many inputs, in their span, without a matrix of F x F numbers.

    Args:
        features: Shape (N, F).
        labels: Shape (N,).
    """

    def __init__(self, features: Tensor, labels: Tensor) -> None:
        _, index, sizes = labels.unique(return_inverse=True, return_counts=True)
        # Where a covariance has little shrinkage, its inverse needs the digits; a wide one has much of it.
        features = features if features.shape[1] > _RANK else features.double()
        self.centre = features.mean(0)
        sums = features.new_zeros(len(sizes), features.shape[1]).index_add_(0, index, features - self.centre)
        means = sums / sizes.unsqueeze(1)
        rows = _some(features)
        # Rows of classes with one input are zero, and would only count as certainty that is not there.
        rows = rows[sizes[index[rows]] > 1]
        left = features[rows] - self.centre - means[index[rows]]
        shrinkage, size, values, self.axes = _spectrum(left)
        floor = max(shrinkage * size, torch.finfo(left.dtype).eps * size)
        # The inverse is 1 / floor, less along the axes: weight is the root of how much less.
        self.weight = (1 / floor - 1 / ((1 - shrinkage) * values + floor)).clamp(min=0).sqrt()
        self.floor = floor
        self.means = means.double()
        self.along = (means @ self.axes).double() * self.weight
        self.share = sizes / len(features)

    def __call__(self, features: Tensor) -> Tensor:
        """Squared distance to the nearest class, float64, shape (M,)."""
        parts = []
        for block in features.split(_RANK):
            moved = block.to(self.centre) - self.centre
            flat = torch.cdist(moved.double(), self.means).square() / self.floor
            gain = torch.cdist((moved @ self.axes).double() * self.weight, self.along).square()
            parts.append((flat - gain).amin(1))
        return torch.cat(parts)

    def relative(self, features: Tensor) -> Tensor:
        """That distance minus the one to the centre of all inputs (Ren et al. 2021, arXiv 2106.09022).

        The covariance of all inputs is the one within classes, shrunk, plus the one between them: without shrinkage it
        is the paper's. Shrunk apart, the two covariances of wide features differ by their shrinkage where no class
        differs, and there the difference would measure nothing else.

        Returns:
            Float64, shape (M,).
        """
        precise, own, between = self._relative
        parts = []
        for block in features.split(_RANK):
            moved = (block.to(self.centre) - self.centre).double()
            parts.append((own - 2 * moved @ precise.T).amin(1) + (moved @ between.T).square().sum(1))
        return torch.cat(parts)

    @cached_property
    def _relative(self) -> tuple[Tensor, Tensor, Tensor]:
        """Means times the inverse of the covariance, their squared lengths by it, and how the other inverse differs."""
        precise = self.means / self.floor - (self.along * self.weight) @ self.axes.double().T
        gram = precise @ self.means.T
        # Woodbury: the covariance between classes has the rank of the means.
        factor = torch.linalg.cholesky(gram + torch.diag(1 / self.share))
        between = torch.linalg.solve_triangular(factor, precise, upper=False)
        if len(gram) > self.means.shape[1]:
            # As many rows as features give the same lengths, with less work for each input.
            between = torch.linalg.qr(between, mode="r").R
        return precise, gram.diagonal(), between


def principal_space(features: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Find where most of the training features are, for :func:`residual`.

    The space is that of ViM (Wang et al. 2022, arXiv 2203.10807): the leading eigenvectors of the second moment about
    the point whose raw output is zero, 1,000 of 2,048 features or more, else 512, but at most half of them (as OpenOOD
    takes 256 of 512). ViM's virtual logit needs a classifier, which an encoder lacks.

    Args:
        features: Shape (N, F). As in :class:`ClassGaussians`, wide ones are those of as many inputs.
        weight: Of the last layer, shape (D, F).
        bias: Shape (D,).

    Returns:
        The origin, shape (F,), and the axes, shape (F, K).
    """
    width = features.shape[1]
    origin = -torch.linalg.pinv(weight) @ bias
    left = features[_some(features)] - origin
    most = 1000 if width >= 2048 else min(512, width // 2)
    return origin, _spectrum(left if width > _RANK else left.double())[3][:, -most:]


def residual(features: Tensor, origin: Tensor, axes: Tensor) -> Tensor:
    """Distance of features from the principal space, float64, shape (M,); nothing else is stored."""
    moved = (features - origin).to(axes)
    return (moved - moved @ axes @ axes.T).norm(dim=1).double()


def _some(features: Tensor) -> Tensor:
    """Row numbers of all inputs, or, where features are wide, of a part of them drawn with a fixed seed."""
    if features.shape[1] <= _RANK:
        return torch.arange(len(features))
    return torch.randperm(len(features), generator=torch.Generator().manual_seed(0))[:_RANK]


def _spectrum(left: Tensor) -> tuple[float, float, Tensor, Tensor]:
    """Ledoit and Wolf's shrinkage, the mean variance, and the eigenpairs of ``left.T @ left / N`` that are not zero."""
    n, width = left.shape
    dual = n < width
    gram = left @ left.T if dual else left.T @ left
    values, vectors = torch.linalg.eigh(gram.double())
    values = values.clamp(min=0)
    kept = values > values[-1] * torch.finfo(left.dtype).eps * max(n, width)
    values, vectors = values[kept], vectors[:, kept]
    axes = left.T @ (vectors / values.sqrt()).to(left) if dual else vectors.to(left)
    size = float(values.sum()) / (n * width)
    # || left.T @ left ||_F^2 is the sum of the squared eigenvalues.
    square = float(values.square().sum()) / n**2
    fourth = float(left.double().square().sum(1).square().sum()) / n
    distance = (square - width * size**2) / width
    error = min((fourth - square) / (n * width), distance)
    return (0.0 if error <= 0 else error / distance), size, values / n, axes
