"""The uncertainty of a retrieval, given the gallery that is searched."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from contrastive_curvature import metrics
from contrastive_curvature.embedding.gallery_labels import GalleryClasses
from contrastive_curvature.errors import InputError, InputTypeError, expected
from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.metrics._checks import check_count, check_embeddings, check_labels, check_scores
from contrastive_curvature.metrics.neighbors import squared_distances

__all__ = ["SHARE", "RetrievalUncertainty", "nearest_others", "neighbor_distance"]

SHARE = 0.02
"""Share of the known inputs that may be flagged as unknown. Measured: ``docs/defaults.md``."""


class RetrievalUncertainty:
    """One score for two causes of wrong matches: inputs unlike the training data, and inputs between classes.

    A match is right if the input is of a known kind and if its neighbours are of its class: ``P(match) = P(known)
    P(match | known)``. The novelty of an input (``embedding.novelty``) measures the first factor, its distance to the
    gallery the second. Neither can replace the other: among known inputs the novelty ranks worse than the distance, and
    an unknown input may lie close to a class. So the novelty only decides which inputs are unknown, by a threshold that
    flags the fraction ``share`` of the known inputs. Inputs above the threshold are ranked last, ordered by novelty;
    all others are ordered by distance: the mean of that to the nearest gallery point and that to the k nearest. In a
    trial on eleven encoders, adding the posterior's angle to this distance made the order worse (``docs/defaults.md``).

    With the class ``labels`` of the gallery, known inputs are ordered by three things: the distance, whether the
    neighbours agree with the match, and how much nearer the match is than any point of another class (Lowe 2004).
    Where labels are at hand, use them: without inputs of unknown kinds and without the threshold, the mean R-AUROC over
    eight families of encoders rises from 0.783 to 0.885. The threshold stays the same.

    Args:
        gallery: Embeddings that are searched, of any norm, shape (M, D).
        calibration: Novelties of inputs of a known kind, such as a validation set, shape (C,). Any other score that is
            larger for unknown inputs will do as well.
        k: Number of neighbours.
        share: Fraction of known inputs that may be flagged as unknown (false-positive rate), in (0, 1). Of new inputs
            that are exchangeable with those of ``calibration``, at most this share is, which takes ``1 / share - 1`` of
            them at least.
        labels: Class of each gallery point, int, shape (M,). Queries need none.

    Attributes:
        threshold: Novelty above which an input counts as unknown.

    Raises:
        InputTypeError: An argument has a wrong type.
        InputError: A shape is wrong, or a value is out of range.
    """

    def __init__(
        self,
        gallery: Tensor,
        calibration: Tensor,
        *,
        k: int = 10,
        share: float = SHARE,
        labels: Tensor | None = None,
    ) -> None:
        self.gallery = check_embeddings("gallery", gallery)
        self.k = check_count("k", k, 1, len(self.gallery), f"There are {len(self.gallery)} gallery points.")
        if isinstance(share, bool) or not isinstance(share, (int, float)):
            raise InputTypeError(expected("share", "a number in (0, 1)", repr(share)))
        if not 0 < share < 1:
            raise InputError(expected("share", "a number in (0, 1)", share))
        self._classes = None if labels is None else GalleryClasses(check_labels("labels", labels, len(self.gallery)))
        known = check_scores("calibration", calibration)
        rank = math.ceil((1 - share) * (len(known) + 1) - 1e-9)
        if rank > len(known):
            wanted = f"at least {math.ceil(1 / share - 1e-9) - 1} novelties for share = {share:g}"
            raise InputError(expected("calibration", wanted, len(known), "Give more of them, or a larger share."))
        self.threshold = float(known.double().sort().values[rank - 1])
        # Where all are equal, any unit will do.
        self._scale = float(known.double().std(correction=0)) or 1.0

    def __call__(self, embeddings: Tensor, novelty: Tensor, itself: Tensor | None = None) -> Tensor:
        """Score queries.

        Args:
            embeddings: Embeddings of N inputs, of any norm, shape (N, D).
            novelty: Novelties of the same inputs, computed as those in ``calibration``, shape (N,).
            itself: For inputs that are in the gallery, their rows in it, -1 for others, shape (N,). Without it, each of
                them is its own nearest neighbour.

        Returns:
            Scores, shape (N,); larger is less certain. The score of a known input is its mean cosine distance, in
            [0, 2]; with ``labels`` it is ``2 / (1 + exp(-s))`` of the sum s of log distance, distance ratio and
            agreement (:meth:`.GalleryClasses.score`), in (0, 2). That of an unknown input is 2 plus the excess of its
            novelty over the threshold, in standard deviations of ``calibration``.

        Raises:
            InputError: The arguments are malformed.
        """
        queries = check_embeddings("embeddings", embeddings)
        if queries.shape[1] != self.gallery.shape[1]:
            wanted = f"D = {self.gallery.shape[1]}, that of the gallery"
            raise InputError(expected("embeddings", wanted, f"D = {queries.shape[1]}"))
        score = check_scores("novelty", novelty)
        if len(score) != len(queries):
            raise InputError(expected("novelty", f"shape ({len(queries)},)", f"shape {tuple(score.shape)}"))
        own = None if itself is None else _check_rows(itself, len(queries), len(self.gallery), self.k)
        gallery = self.gallery.to(queries)
        nearest = nearest_others(embeddings, gallery, self.k, own)
        distances = _distances(embeddings, gallery, nearest)
        if self._classes is None:
            near = (distances[:, 0] + distances.mean(1)) / 2
        else:
            near = self._classes.score(embeddings, gallery, nearest, distances, own)
        excess = ((score.double() - self.threshold) / self._scale).to(near)
        return torch.where(score.to(near.device) > self.threshold, 2 + excess, near)


def neighbor_distance(queries: Tensor, gallery: Tensor, k: int = 10) -> Tensor:
    """Mean cosine distance to the k nearest gallery points.

    For unit embeddings it is half the mean squared Euclidean distance, so both give the same order.

    Args:
        queries: Embeddings of any norm, shape (N, D).
        gallery: Embeddings that are searched, of any norm, shape (M, D), M >= k.
        k: Number of neighbours.

    Returns:
        Shape (N,), in [0, 2].

    Raises:
        InputError: The arguments are malformed.
    """
    return _distances(queries, gallery, nearest_others(queries, gallery, k)).mean(1)


def nearest_others(queries: Tensor, gallery: Tensor, k: int, itself: Tensor | None = None) -> Tensor:
    """Rows of the k nearest gallery points, without the query itself.

    Args:
        queries: Embeddings of any norm, shape (N, D).
        gallery: Embeddings that are searched, of any norm, shape (M, D); M >= k, and M > k with ``itself``.
        k: Number of neighbours.
        itself: Row of each query in the gallery, -1 for those that are not in it, int64, shape (N,).

    Returns:
        int64, shape (N, k), nearest first up to rounding.

    Raises:
        InputError: The embeddings or ``k`` are malformed.
    """
    neighbors = metrics.nearest_neighbors(queries, gallery, k=k if itself is None else k + 1)
    if itself is None:
        return neighbors
    # A stable sort moves the own row to the end and keeps the order of the others; the last one is dropped.
    own = neighbors == itself.to(neighbors).unsqueeze(1)
    return neighbors.gather(1, own.long().argsort(dim=1, stable=True))[:, :k]


def _distances(queries: Tensor, gallery: Tensor, neighbors: Tensor) -> Tensor:
    """Cosine distances to given gallery points, shape (N, k)."""
    return squared_distances(normalize(queries)[0], normalize(gallery)[0], neighbors) / 2


def _check_rows(itself: object, n: int, m: int, k: int) -> Tensor:
    wanted = f"rows of the gallery, -1 or 0 to {m - 1}, int64, shape ({n},)"
    if not isinstance(itself, Tensor) or itself.dtype != torch.int64:
        shown = f"{itself.dtype}" if isinstance(itself, Tensor) else f"a {type(itself).__name__}"
        raise InputTypeError(expected("itself", wanted, shown))
    if tuple(itself.shape) != (n,) or not bool(((itself >= -1) & (itself < m)).all()):
        shown = f"shape {tuple(itself.shape)}"
        if itself.numel():
            shown += f", {int(itself.min())} to {int(itself.max())}"
        raise InputError(expected("itself", wanted, shown))
    if k >= m:
        hint = "An input has one neighbour less than there are gallery points."
        raise InputError(expected("k with itself", f"at most {m - 1}", k, hint))
    return itself
