"""Curvature of contrastive losses, and what it is for: encoders that know how sure an embedding is.

labels -> pairs -> output Hessian -> parameter curvature -> Laplace posterior -> embedding distribution

Importing the package registers ``likelihood="contrastive"`` with laplace-torch, and the loss and the normalisation with
BackPACK's extensions; :func:`unregister` undoes both.
"""

from typing import TYPE_CHECKING, Any

# host_imports stands first: it imports laplace-torch, without a warning that nobody here can do anything about.
from contrastive_curvature import host_imports, laplace, metrics, vmf  # noqa: F401
from contrastive_curvature.embedding.distribution import EmbeddingDistribution
from contrastive_curvature.embedding.gallery import RetrievalUncertainty
from contrastive_curvature.embedding.known import OptimisticPValueWarning
from contrastive_curvature.embedding.similarity import CosineDistribution, similarity
from contrastive_curvature.embedding.zero_shot import ZeroShotClassifier
from contrastive_curvature.errors import (
    ContrastiveCurvatureError,
    DivergenceError,
    InputError,
    InputTypeError,
    NotFittedError,
    ProcessError,
    UnsupportedError,
)
from contrastive_curvature.feature_folder import FeatureFolder, features
from contrastive_curvature.fit import ggn
from contrastive_curvature.hessian.output import OutputHessian
from contrastive_curvature.hessian.sphere import L2Norm
from contrastive_curvature.hosts import backpack
from contrastive_curvature.laplace import DefaultPriorWarning, FeatureNormWarning, LabelWarning
from contrastive_curvature.laplace.backends import ContrastiveBackend, ContrastiveGGN
from contrastive_curvature.losses import (
    ContrastiveLoss,
    CoSENTLoss,
    InfoNCELoss,
    LogisticLoss,
    MultiSimilarityLoss,
    PairLoss,
    ProxyLoss,
    RowLoss,
    SigLIPLoss,
    SoftContrastiveLoss,
    SupConLoss,
    TripletLoss,
)
from contrastive_curvature.losses.choice import output_hessian
from contrastive_curvature.matching import MatchProbability
from contrastive_curvature.network.adapters import EncoderOutput, with_last_layer
from contrastive_curvature.online import OnlineLaplace, Trainer
from contrastive_curvature.options import Distance, Normalization, PDFix
from contrastive_curvature.two_towers import TwoTowers

if TYPE_CHECKING:
    from contrastive_curvature import jobs, pretrained, report
    from contrastive_curvature.hosts.curvlinops import ContrastiveGGNLinearOperator
    from contrastive_curvature.laplace.backends.backpack import BackPackContrastiveGGN
    from contrastive_curvature.laplace.backends.curvlinops import CurvlinopsContrastiveGGN
    from contrastive_curvature.laplace.backends.stochman import StochManContrastiveGGN
    from contrastive_curvature.pretrained import load_pretrained
    from contrastive_curvature.stores import FaissStore, LanceStore, SearchResult, StoredEmbeddings

__version__ = "0.1.0"

__all__ = [
    # pairs -> loss: of single pairs
    "PairLoss",
    "ContrastiveLoss",
    "LogisticLoss",
    "SoftContrastiveLoss",
    # of anchors with all their candidates, of class proxies, of graded pairs
    "RowLoss",
    "InfoNCELoss",
    "SupConLoss",
    "SigLIPLoss",
    "MultiSimilarityLoss",
    "TripletLoss",
    "ProxyLoss",
    "CoSENTLoss",
    "Distance",
    "PDFix",
    "Normalization",
    # loss -> output Hessian -> parameter curvature
    "OutputHessian",
    "output_hessian",
    "ggn",
    "ContrastiveBackend",
    "ContrastiveGGN",
    "BackPackContrastiveGGN",
    "CurvlinopsContrastiveGGN",
    "StochManContrastiveGGN",
    "ContrastiveGGNLinearOperator",
    # Laplace posterior -> embedding distribution
    "register",
    "unregister",
    "OnlineLaplace",
    "Trainer",
    "EmbeddingDistribution",
    "RetrievalUncertainty",
    # encoders from elsewhere
    "EncoderOutput",
    "with_last_layer",
    # what the last layer takes in, on disk
    "features",
    "FeatureFolder",
    # data that many machines share
    "jobs",
    # two encoders of one space
    "TwoTowers",
    "ZeroShotClassifier",
    # two embeddings: how similar, and the same class or not
    "similarity",
    "CosineDistribution",
    "MatchProbability",
    "L2Norm",
    # a corpus in a vector store
    "FaissStore",
    "LanceStore",
    "SearchResult",
    "StoredEmbeddings",
    # the sphere, and how good it all is
    "vmf",
    "metrics",
    "report",
    # save, load, share
    "pretrained",
    "load_pretrained",
    # errors
    "ContrastiveCurvatureError",
    "DivergenceError",
    "InputError",
    "InputTypeError",
    "NotFittedError",
    "ProcessError",
    "UnsupportedError",
    # warnings
    "DefaultPriorWarning",
    "FeatureNormWarning",
    "LabelWarning",
    "OptimisticPValueWarning",
]

_BY_HOST = {
    "BackPackContrastiveGGN": "laplace.backends.backpack",
    "CurvlinopsContrastiveGGN": "laplace.backends.curvlinops",
    "ContrastiveGGNLinearOperator": "hosts.curvlinops",
    "StochManContrastiveGGN": "laplace.backends.stochman",
    "FaissStore": "stores",
    "LanceStore": "stores",
    "SearchResult": "stores",
    "load_pretrained": "pretrained",
    "StoredEmbeddings": "stores",
}


def __getattr__(name: str) -> Any:
    # A host is imported when somebody asks for it: stochman brings matplotlib and networkx.
    import importlib

    if name in ("jobs", "pretrained", "report", "testing"):
        return importlib.import_module(f"contrastive_curvature.{name}")
    if name in _BY_HOST:
        return getattr(importlib.import_module(f"contrastive_curvature.{_BY_HOST[name]}"), name)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)


def register() -> None:
    """Make ``likelihood="contrastive"`` known to laplace-torch, and ``ContrastiveLoss`` and ``L2Norm`` to BackPACK.

    Does nothing when they already are.
    """
    laplace.register()
    backpack.register()


def unregister() -> None:
    """Put both hosts back as they were; does nothing when nothing is registered."""
    backpack.unregister()
    laplace.unregister()


register()
