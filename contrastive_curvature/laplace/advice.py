"""Warnings about legal but probably unintended use: labels, several processes, no gradient, a default prior, norms."""

from __future__ import annotations

import warnings

import torch
from scipy.stats import spearmanr
from torch import Tensor, distributed, nn
from torch.nn.functional import linear

from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.network.last_layer import diag_last_layer_variance

_MOST_CORRELATION = 0.93

_FEWEST_POINTS = 100
"""With fewer points a rank correlation is too uncertain."""


class DefaultPriorWarning(UserWarning):
    """Prediction whose prior precision was not chosen after ``fit`` (1.0 suits no encoder) or ``update``."""


class LabelWarning(UserWarning):
    """Labels of a fit are all of one class, or -1 (often "no class"); or an evaluation has labels of other classes."""


class FeatureNormWarning(UserWarning):
    """The variance of a diagonal last-layer posterior says little more than the norm of the features."""


class LabelRange:
    """Smallest and largest class label that a fit has read, on the device of the labels, shape (2,)."""

    def __init__(self) -> None:
        self.ends: Tensor | None = None

    def note(self, labels: Tensor | None) -> None:
        """Record the labels of a batch; ignore targets that are not class labels."""
        if labels is None or labels.is_floating_point() or labels.is_complex() or labels.layout != torch.strided:
            return
        if labels.ndim != 1 or not len(labels):
            return
        # torch has no minimum for some integer dtypes.
        labels = labels.long()
        if self.ends is not None:
            labels = torch.cat([labels, self.ends.to(labels.device)])
        # No comparison here: reading numbers from a GPU would synchronise in every batch.
        self.ends = torch.stack(labels.aminmax())


def advise_on_processes() -> None:
    """Warn about a fit in one of several processes of ``torch.distributed``."""
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        msg = (
            f"fit: each of the {distributed.get_world_size()} processes of torch.distributed fits only the data of its "
            "own loader, and has its own posterior. docs/large_data.md#several-processes-torchrun has the fit of all "
            "data together."
        )
        warnings.warn(msg, UserWarning, stacklevel=3)


def advise_on_labels(seen: LabelRange, adds: bool) -> None:
    """Warn about unusual labels of a fit; a fit that ``adds`` to another one may have only one class."""
    if seen.ends is None:
        return
    low, high = seen.ends.tolist()
    if not adds and low == high:
        msg = (
            f"train_loader: all labels are {low}, so nothing says which embeddings must stay apart. Yield labels of "
            "two classes or more, or two views of every input, (view, view), with a loss such as InfoNCELoss."
        )
        warnings.warn(msg, LabelWarning, stacklevel=3)
    elif low == -1:
        msg = (
            "train_loader: some labels are -1, which is a class like any other here. Leave such points out of the "
            "loader; if they are a class, give it a number that is not negative."
        )
        warnings.warn(msg, LabelWarning, stacklevel=3)


def advise_on_gradients(model: nn.Module, reached: Tensor) -> None:
    """Warn about layers of which no trainable tensor was ``reached`` by a gradient, booleans in their order."""
    layers: dict[str, list[tuple[int, bool]]] = {}
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    for (name, p), some in zip(trainable, reached.tolist(), strict=True):
        if p.numel() > 1:  # a temperature, which moves no embedding, is a single number
            layers.setdefault(name.rpartition(".")[0] or name, []).append((p.numel(), some))
    silent = {layer: own for layer, own in layers.items() if not any(some for _, some in own)}
    if silent:
        count = sum(size for own in silent.values() for size, _ in own)
        names = ", ".join(repr(layer) for layer in list(silent)[:5]) + (", ..." if len(silent) > 5 else "")
        msg = (
            f"no gradient reaches {count} of the posterior's {sum(p.numel() for _, p in trainable)} weights, all of "
            f"{names}: their curvature is zero, and the prior alone speaks about them. Does forward compute them under "
            "torch.no_grad(), detach their output or not use them? Remove that, or leave them out with "
            "requires_grad_(False) or subset_of_weights='last_layer'."
        )
        warnings.warn(msg, UserWarning, stacklevel=4)


def advise_on_norms(phi: Tensor, weight: Tensor, bias: Tensor | None, diagonal: Tensor) -> None:
    """Warn if the variance of a diagonal posterior at training points is almost a function of the feature norm.

    For non-negative and strongly correlated features, such as pooled activations, the sum over independent weights is
    roughly proportional to the squared norm (``docs/defaults.md``).
    """
    if len(phi) < _FEWEST_POINTS:
        return
    correlation = norm_correlation(phi, weight, bias, diagonal)
    if correlation > _MOST_CORRELATION:
        msg = (
            f"hessian_structure='diag': the variance has a rank correlation of {correlation:.3f} with the norm of the "
            "features, and says little more than it. The default, 'kron_lowrank', sees correlations between features."
        )
        warnings.warn(msg, FeatureNormWarning, stacklevel=4)


@torch.no_grad()
def norm_correlation(phi: Tensor, weight: Tensor, bias: Tensor | None, diagonal: Tensor) -> float:
    """Return the rank correlation between tangential variance and feature norm, for features (N, F).

    The layer has ``weight`` (D, F) and ``bias`` (D,); the prior precision is the mean of the clamped ``diagonal`` (P,)
    of the curvature, so the result does not depend on the scale of the loss. NaN if variance or norm is constant.
    """
    variance = 1 / (diagonal + diagonal.mean())
    u = normalize(linear(phi, weight, bias))[0]
    across = (diag_last_layer_variance(phi, variance, len(weight)) * (1 - u.square())).sum(1)
    with warnings.catch_warnings():
        # SciPy warns about constant numbers.
        warnings.simplefilter("ignore")
        correlation = spearmanr(across.double().cpu().numpy(), phi.double().norm(dim=1).cpu().numpy())
    return float(correlation.statistic)
