from . import metrics, vmf
from . import testing as testing
from .apps import report
from .decisions.drift import DriftMonitor
from .decisions.match_threshold import MatchThreshold
from .decisions.retrieval_threshold import RetrievalThreshold
from .embedding.distribution import EmbeddingDistribution
from .embedding.known import OptimisticPValueWarning
from .embedding.similarity import CosineDistribution, similarity
from .errors import (
    ContrastiveCurvatureError,
    DivergenceError,
    InputError,
    InputTypeError,
    NotFittedError,
    ProcessError,
    UnsupportedError,
)
from .fit import ggn
from .hessian.output import OutputHessian
from .hessian.sphere import L2Norm
from .hosts.curvlinops import ContrastiveGGNLinearOperator
from .io import jobs, pretrained, serving
from .io.pretrained import load_pretrained
from .laplace.advice import DefaultPriorWarning, FeatureNormWarning, LabelWarning
from .laplace.backends import ContrastiveBackend, ContrastiveGGN
from .laplace.backends.backpack import BackPackContrastiveGGN
from .laplace.backends.stochman import StochManContrastiveGGN
from .laplace.influence import influence
from .losses import (
    ContrastiveLoss,
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
from .losses.choice import output_hessian
from .network.adapters import EncoderOutput, with_last_layer
from .network.encoder import Encoder
from .network.two_towers import TwoTowers
from .online import OnlineLaplace
from .options import Distance, Normalization, PDFix
from .registration import register, unregister
from .retriever.index import Index
from .retriever.retriever import Retriever

__version__: str

__all__ = [
    # pairs -> loss: of single pairs
    "PairLoss",
    "ContrastiveLoss",
    "LogisticLoss",
    "SoftContrastiveLoss",
    # of anchors with all their candidates, of class proxies
    "RowLoss",
    "InfoNCELoss",
    "SupConLoss",
    "SigLIPLoss",
    "MultiSimilarityLoss",
    "TripletLoss",
    "ProxyLoss",
    "Distance",
    "PDFix",
    "Normalization",
    # loss -> output Hessian -> parameter curvature
    "OutputHessian",
    "output_hessian",
    "ggn",
    "influence",
    "ContrastiveBackend",
    "ContrastiveGGN",
    "BackPackContrastiveGGN",
    "StochManContrastiveGGN",
    "ContrastiveGGNLinearOperator",
    # Laplace posterior -> embedding distribution
    "register",
    "unregister",
    "OnlineLaplace",
    "EmbeddingDistribution",
    # encoders: analysed once, and from elsewhere
    "Encoder",
    "EncoderOutput",
    "with_last_layer",
    # data that many machines share
    "jobs",
    # two encoders of one space
    "TwoTowers",
    # two embeddings: how similar
    "similarity",
    "CosineDistribution",
    "L2Norm",
    # a search that may be acted on, and decisions with a stated error
    "Retriever",
    "MatchThreshold",
    "RetrievalThreshold",
    "DriftMonitor",
    # a gallery that is searched elsewhere
    "Index",
    # the sphere, and how good it all is
    "vmf",
    "metrics",
    "report",
    # save, load, share, serve
    "pretrained",
    "load_pretrained",
    "serving",
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
