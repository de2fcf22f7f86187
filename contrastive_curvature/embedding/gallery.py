"""The uncertainty of a retrieval, given the gallery that is searched and, where they are known, its classes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from contrastive_curvature import metrics, validate
from contrastive_curvature.errors import InputError
from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.metrics._checks import check_embeddings, check_k, check_labels, check_scores
from contrastive_curvature.metrics.neighbors import MORE, squared_distances

SHARE = 0.02
"""Share of the known inputs that may be flagged as unknown. Measured: ``docs/defaults.md``."""

_RATIO_WEIGHT, _AGREEMENT_WEIGHT = 2.0, 4.0
"""Weights of the distance ratio and of the share of neighbours that agree with the match, beside the logarithm of a
distance.

They were chosen together, in a trial on the 43 encoders of ``benchmarks.transfer`` in 8 families (data set and trunk),
by the mean over families of the R-AUROC without a threshold for unknown inputs: 0.885, against 0.783 for the order
without labels and 0.833 for the share of votes. With one family left out at a time, the others choose 2 or 3 and always
4; over the families that had no say, the mean is 0.883.
"""

_ENTRIES = 2**24
"""Similarities in one block: 64 MiB in float32."""


class RetrievalUncertainty:
    """One score for two causes of wrong matches: inputs unlike the training data, and inputs between classes.

    The novelty of an input (``embedding.novelty``) decides whether it is unknown, by a threshold that flags the
    fraction ``share`` of the known inputs. Inputs above the threshold are ranked last, ordered by novelty. All others
    are ordered by distance: the mean of that to the nearest gallery point and that to the k nearest. With the class
    ``labels`` of the gallery, they are ordered by three things: the distance, whether the neighbours agree with the
    match, and how much nearer the match is than any point of another class (Lowe 2004). Labels raise the mean R-AUROC
    of known inputs from 0.783 to 0.885 over eight families of encoders.

    Args:
        gallery: Embeddings that are searched, of any norm, shape (M, D).
        calibration: Novelties of inputs of a known kind, such as a validation set, shape (C,), or another score that is
            larger for unknown inputs.
        k: Number of neighbours.
        share: Fraction of known inputs that may be flagged as unknown (false-positive rate), in (0, 1). At most this
            share of new inputs like those of ``calibration`` is; takes ``1 / share - 1`` of them at least.
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
        self.k = check_k(k, len(self.gallery), f"There are {len(self.gallery)} gallery points.")
        validate.fraction("share", share)
        self._labels = None if labels is None else check_labels("labels", labels, len(self.gallery))
        known = check_scores("calibration", calibration)
        rank = math.ceil((1 - share) * (len(known) + 1) - 1e-9)
        if rank > len(known):
            wanted = f"at least {math.ceil(1 / share - 1e-9) - 1} novelties for share = {share:g}"
            raise InputError("calibration", wanted, len(known), "Give more of them, or a larger share.")
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
            [0, 2]. With ``labels`` it is ``2 / (1 + exp(-s))``, in (0, 2), of ``s = log(c1 + mean c) + 2 c1 / c_other -
            4 agree``, where ``c`` are distances of unit embeddings: ``c1`` to the nearest point, the match, ``mean c``
            to the k nearest, ``c_other`` to the nearest point of another class than the match (Lowe, 2004, section
            7.1); and ``agree`` is the number of the k nearest that are of the match's class, over the number that could
            be, ``min(k, points of that class)``. The score of an unknown input is 2 plus the excess of its novelty over
            the threshold, in standard deviations of ``calibration``.

        Raises:
            InputError: The arguments are malformed.
        """
        queries = check_embeddings("embeddings", embeddings)
        if queries.shape[1] != self.gallery.shape[1]:
            wanted = f"D = {self.gallery.shape[1]}, that of the gallery"
            raise InputError("embeddings", wanted, f"D = {queries.shape[1]}")
        score = check_scores("novelty", novelty, len(queries))
        own = None if itself is None else _check_rows(itself, len(queries), len(self.gallery), self.k)
        gallery = self.gallery.to(queries)
        nearest = nearest_others(embeddings, gallery, self.k, own)
        distances = _distances(embeddings, gallery, nearest)
        if self._labels is None:
            near = (distances[:, 0] + distances.mean(1)) / 2
        else:
            near = _by_class(embeddings, gallery, self._labels.to(nearest.device), nearest, distances, own)
        excess = ((score - self.threshold) / self._scale).to(near)
        return torch.where(score.to(near.device) > self.threshold, 2 + excess, near)


def _by_class(
    queries: Tensor, gallery: Tensor, labels: Tensor, nearest: Tensor, distances: Tensor, itself: Tensor | None
) -> Tensor:
    """Return the scores (N,) of known inputs by the labels (M,) of a gallery: see ``RetrievalUncertainty``.

    ``nearest`` (N, k) are the rows of the k nearest points, the match first, at cosine distances ``distances`` (N, k).
    """
    own = torch.full_like(nearest[:, 0], -1) if itself is None else itself.to(nearest)
    _, index, sizes = labels.unique(return_inverse=True, return_counts=True)
    match = index[nearest[:, 0]]
    votes = (index[nearest] == match.unsqueeze(1)).sum(1)
    # For a query that is in the gallery, the own row is no point that could agree.
    there = sizes[match] - ((own >= 0) & (index[own.clamp(min=0)] == match)).to(sizes)
    agree = votes.to(distances) / there.clamp(max=nearest.shape[1]).to(distances)
    chords = _chord(distances)
    first = chords[:, 0]
    # Rounding could let the match seem farther than the nearest of another class.
    ratio = (first / _nearest_other(queries, gallery, index, match, own)).clamp(max=1)
    s = (first + chords.mean(1)).log() + _RATIO_WEIGHT * ratio - _AGREEMENT_WEIGHT * agree
    return 2 * s.sigmoid()


def _nearest_other(queries: Tensor, gallery: Tensor, index: Tensor, match: Tensor, own: Tensor) -> Tensor:
    """Return distances (N,) to the nearest points of another class than ``match``, infinite where there is none."""
    v = normalize(gallery)[0]
    rows = max(1, _ENTRIES // max(v.shape))
    out = []
    for block, number, row in zip(queries.split(rows), match.split(rows), own.split(rows), strict=True):
        u = normalize(block)[0]
        with torch.autocast(u.device.type, enabled=False):
            cosine = (u.detach() @ v.T).masked_fill_(index == number.unsqueeze(1), -torch.inf)
        inside = (row >= 0).nonzero().squeeze(1)
        cosine[inside, row[inside]] = -torch.inf
        top, other = cosine.topk(min(1 + MORE, len(v)), dim=1)
        # The largest cosines of float32 are ranked again: 1 - cosine has lost all digits when points are close.
        apart = squared_distances(u, v, other).masked_fill(top == -torch.inf, torch.inf)
        out.append(_chord(apart.amin(1) / 2))
    return torch.cat(out)


def _chord(distances: Tensor) -> Tensor:
    """Return distances of unit vectors, from cosine distances; of equal vectors tiny, so that logarithms exist."""
    return (2 * distances).clamp(min=torch.finfo(distances.dtype).tiny).sqrt()


def neighbor_distance(queries: Tensor, gallery: Tensor, k: int = 10) -> Tensor:
    """Return the mean cosine distance (N,) of queries (N, D) to the k nearest gallery points, in [0, 2].

    For unit embeddings it is half the mean squared Euclidean distance, so both give the same order.
    """
    return _distances(queries, gallery, nearest_others(queries, gallery, k)).mean(1)


def nearest_others(queries: Tensor, gallery: Tensor, k: int, itself: Tensor | None = None) -> Tensor:
    """Return the rows (N, k) of the k nearest gallery points, nearest first, without the query itself.

    ``itself`` (N,) are the rows of the queries in the gallery, -1 for those that are not in it.
    """
    neighbors = metrics.nearest_neighbors(queries, gallery, k=k if itself is None else k + 1)
    if itself is None:
        return neighbors
    # A stable sort moves the own row to the end and keeps the order of the others; the last one is dropped.
    own = neighbors == itself.to(neighbors).unsqueeze(1)
    return neighbors.gather(1, own.long().argsort(dim=1, stable=True))[:, :k]


def _distances(queries: Tensor, gallery: Tensor, neighbors: Tensor) -> Tensor:
    """Return cosine distances to given gallery points, shape (N, k)."""
    return squared_distances(normalize(queries)[0], normalize(gallery)[0], neighbors) / 2


def _check_rows(itself: Tensor, n: int, m: int, k: int) -> Tensor:
    wanted = f"rows of the gallery, -1 or 0 to {m - 1}, int64, shape ({n},)"
    checked = check_labels("itself", itself, n)
    if not bool(((checked >= -1) & (checked < m)).all()):
        raise InputError("itself", wanted, f"{int(checked.min())} to {int(checked.max())}")
    if k >= m:
        hint = "An input has one neighbour less than there are gallery points."
        raise InputError("k with itself", f"at most {m - 1}", k, hint)
    return checked
