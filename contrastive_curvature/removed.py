"""Public names that the library had, and what to use instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_GRADES = (
    "No loss takes grades of pairs. Use another loss of docs/losses.md, such as InfoNCELoss on the pairs that belong "
    "together."
)

_TRAINING = "Call OnlineLaplace in a loop of your own: docs/recipes/training.md#go-on-after-an-interruption."

_CURVLINOPS = "Fit with ContrastiveGGN, the default, which gives the same numbers."

_INDEX = "Write a class with `search` around your index or table: docs/recipes/indexes.md."

REMOVED: dict[str, str] = {
    "RetrievalUncertainty": (
        "Use Retriever, whose confidence is the probability that a nearest neighbour is right: "
        "docs/decide.md#a-gallery-ccretriever."
    ),
    "Trainer": _TRAINING,
    "online.Trainer": _TRAINING,
    "stores": _INDEX,
    "FaissStore": _INDEX,
    "LanceStore": _INDEX,
    "SearchResult": _INDEX,
    "ContrastiveEmbedder": "Write the transformer of docs/recipes/frameworks.md#scikit-learn around your encoder.",
    "CoSENTLoss": _GRADES,
    "losses.CoSENTLoss": _GRADES,
    "CurvlinopsContrastiveGGN": _CURVLINOPS,
    "laplace.backends.CurvlinopsContrastiveGGN": _CURVLINOPS,
    "hosts.curvlinops.contrastive_kfac": "contrastive_curvature.ggn(..., structure='kron') gives the same factors.",
    "hosts.curvlinops.contrastive_ekfac": "contrastive_curvature.ggn(..., structure='full') is exact; so is every "
    "product with ContrastiveGGNLinearOperator, see docs/backends.md#curvlinops.",
    "hosts.curvlinops.CurvlinopsPullback": "Use contrastive_curvature.network.layerwise.LayerwisePullback.",
    "laplace.FunctionSpaceLaplace": "Use ContrastiveLaplace of this module with structure 'full', see docs/laplace.md.",
    "io.pretrained.PushOptions": "Upload a saved folder: docs/keep_and_serve.md#the-hugging-face-hub.",
    "io.pretrained.SaveOptions": (
        "la.save_pretrained writes no model card, and `example` is an argument of it: "
        "docs/keep_and_serve.md#the-hugging-face-hub."
    ),
    "io.serving.Scorer": (
        "Export the encoder, or its last layer alone, as a graph: docs/keep_and_serve.md#features-from-another-program."
    ),
    "FaissIndex": _INDEX,
    "LanceIndex": _INDEX,
    "MatchProbability": (
        "Fit scikit-learn's LogisticRegression on cosine and uncertainties, see docs/decide.md#two-inputs-same-or-not; "
        "MatchThreshold decides at a stated false match rate. Of a hit in a gallery: Retriever, whose answers have a "
        "confidence."
    ),
    "StoredEmbeddings": (
        "Store mu and one variance, and build an EmbeddingDistribution of these columns, see docs/recipes/indexes.md."
    ),
    "select_unknown": (
        "Take scipy.stats.false_discovery_control(p_values) <= fdr, "
        "see docs/decide.md#no-gallery-uncertainty-novelty-p_value."
    ),
    "ZeroShotClassifier": "Average the softmax of sampled embeddings, see docs/clip.md#classify-by-prompts.",
    "io.pretrained.load_match": "Fit a regression on pairs yourself, see docs/decide.md#two-inputs-same-or-not.",
    "structures.Eigenpairs": "docs/backends.md#curvlinops has the leading eigenpairs of all weights.",
    "FeatureFolder": "docs/large_data.md#features-once reads features from a file of NumPy.",
    "features": "docs/large_data.md#features-once writes features into a file of NumPy.",
}
"""Name below the package -> what to use instead: one sentence that names the page with the recipe, if there is one."""


def refuse_removed(module: str, find: Callable[[str], Any] | None = None) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module: it refuses removed names, and leaves the others to ``find``."""

    def attribute(name: str) -> Any:
        full = f"{module}.{name}"
        instead = REMOVED.get(full.partition(".")[2])
        if instead is not None:
            # An AttributeError would lose its message in `from module import name`.
            raise ImportError(f"{full} was removed after version 0.2. {instead}", name=full)
        if find is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return find(name)

    return attribute
