"""What a search in a vector store found, and how sure it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from contrastive_curvature.embedding.distribution import EmbeddingDistribution
from contrastive_curvature.embedding.gallery import SHARE, RetrievalUncertainty
from contrastive_curvature.embedding.match_probability import MatchProbability
from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.io.stores.embeddings import StoredEmbeddings
from contrastive_curvature.metrics._checks import check_scores

_QUERIES = 128
"""Queries whose hits are joined to one small gallery."""


@dataclass(frozen=True, eq=False)
class SearchResult:
    """The k best hits of N queries, by cosine, best first.

    Tensors are float32 and on the device of the queries.

    Attributes:
        ids: Identifiers, shape (N, k): an int64 tensor, or an object array of strings.
        cosine: Cosines between the mean directions of query and hit, shape (N, k).
        kappa: Concentrations of the hits, shape (N, k).
        uncertainty: Uncertainties of the hits, shape (N, k).
        vectors: Mean directions of the hits, shape (N, k, D).
        queries: What was searched for.
        size: Number of embeddings that were searched: those that a filter leaves.
        payload: Further columns of the hits, arrays of shape (N, k), from stores that keep some.
    """

    ids: Tensor | NDArray[Any]
    cosine: Tensor
    kappa: Tensor
    uncertainty: Tensor
    vectors: Tensor
    queries: EmbeddingDistribution | Tensor
    size: int
    payload: dict[str, NDArray[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return the number of queries."""
        return len(self.cosine)

    @property
    def k(self) -> int:
        """Number of hits of a query."""
        return self.cosine.shape[1]

    def hits(self, rank: int | None = None) -> StoredEmbeddings:
        """Return the hits as embeddings.

        Args:
            rank: Position among the hits, 0 for the best: N embeddings. ``None``: all, one query after another, N k
                embeddings.

        Raises:
            InputError: There is no such rank.
        """
        if rank is None:
            return StoredEmbeddings(self.vectors.flatten(0, 1), self.kappa.flatten(), self.uncertainty.flatten())
        if rank not in range(self.k):
            raise InputError(expected("rank", f"a whole number from 0 to {self.k - 1}", rank))
        return StoredEmbeddings(self.vectors[:, rank], self.kappa[:, rank], self.uncertainty[:, rank])

    def match_probability(self, match: MatchProbability) -> Tensor:
        """Return the probability that the best hit is of the query's class, as ``match.nearest`` gives it.

        Args:
            match: Fitted with ``fit_retrieval``, on queries like these and a gallery of stored embeddings
                (:meth:`.StoredEmbeddings.of`) of about the size of the store.

        Returns:
            Probabilities, shape (N,), of the dtype of the queries.

        Raises:
            InputTypeError: ``match`` takes uncertainties and the queries have none.
            NotFittedError: Before ``fit_retrieval``.
            InputError: The fit was in another dimension.

        Warns:
            UserWarning: The number of embeddings that were searched is less than half or more than twice that of the
                fit. The nearest of more points is nearer, whether right or wrong.
        """
        return match.hits(self.queries, self.hits(0), gallery_size=self.size)

    def same_probability(self, match: MatchProbability) -> Tensor:
        """Return the probability of each hit that it is of the query's class, as ``match.same`` gives it for a pair.

        Args:
            match: Fitted with ``fit_pairs``, one side of the pairs like these queries, the other stored embeddings.

        Returns:
            Probabilities, shape (N, k).

        Raises:
            InputTypeError: ``match`` takes uncertainties and the queries have none.
            NotFittedError: Before ``fit_pairs``.
            InputError: The fit was in another dimension.
        """
        return torch.stack([match.same(self.queries, self.hits(rank)) for rank in range(self.k)], 1)

    def retrieval_uncertainty(self, novelty: Tensor, calibration: Tensor, *, share: float = SHARE) -> Tensor:
        """Return the score of :class:`.RetrievalUncertainty` with the store as its gallery, k the number of hits.

        If the index is exact, it is the score that the whole store in memory would give. The k nearest of the store are
        among the hits, so the hits of some queries together serve as the gallery. With an approximate index, a nearer
        neighbour that only another query found counts, too.

        Args:
            novelty: Novelties of the queries, ``la(x).novelty``, shape (N,).
            calibration: Novelties of inputs of a known kind, shape (C,).
            share: Fraction of known inputs that may be flagged as unknown.

        Returns:
            Scores, shape (N,); larger is less certain.

        Raises:
            InputTypeError: An argument has a wrong type.
            InputError: A shape is wrong, or a value is out of range.
        """
        points = self.queries if isinstance(self.queries, Tensor) else self.queries.mu.detach()
        checked = check_scores("novelty", novelty, len(self))
        ids = self.ids.cpu().numpy() if isinstance(self.ids, Tensor) else self.ids
        scores = []
        for start in range(0, len(self), _QUERIES):
            rows = slice(start, start + _QUERIES)
            different = torch.from_numpy(np.unique(ids[rows], return_index=True)[1]).to(self.vectors.device)
            gallery = self.vectors[rows].flatten(0, 1)[different]
            score = RetrievalUncertainty(gallery, calibration, k=self.k, share=share)
            scores.append(score(points[rows], checked[rows]))
        return torch.cat(scores)
