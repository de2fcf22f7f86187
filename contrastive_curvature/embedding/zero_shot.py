"""Zero-shot classification with calibrated probabilities: uncertain images against uncertain prompts of classes.

The logit of a class is the scaled cosine between an image and the class. Both are uncertain, so the probabilities are
the softmax integrated over the cosines. With the logits ``l_c`` and their mean over the other classes, the difference

``d_c = l_c - mean_{k != c} l_k``

determines the softmax, ``softmax(l) = softmax((1 - 1 / C) d)``. The part that all logits of an image share cancels in
``d_c``, in mean and variance. That part says nothing about the class, and in encoders of images and texts it is the
largest. The integral is approximated with MacKay's factor,

``p = softmax((1 - 1 / C) E[d_c] / sqrt(1 + pi / 8 Var[d_c]))``

which for two classes is his approximation of the integrated sigmoid. For more classes it is the mean-field
approximation of Lu et al., with the difference in place of the logit: it treats the classes as independent. The table
gives the total variation distance to the probabilities of sampled embeddings, for classes that share most of their
direction and a scale of 100 (``benchmarks/zero_shot.py`` at commit 1e1b25c explains the errors):

| classes, uncertain | softmax of the means | mean field of logits | this |
|---|---|---|---|
| 2, images | 0.06 to 0.16 | 0.04 to 0.06 | 0.01 |
| 10, images | 0.15 to 0.35 | 0.12 to 0.20 | 0.03 to 0.04 |
| 100, images | 0.30 to 0.54 | 0.33 to 0.35 | 0.15 to 0.19 |
| 2, both | 0.41 | 0.27 | 0.01 |
| 10, both | 0.39 | 0.19 | 0.19 |
| 100, both | 0.69 | 0.45 | 0.46 |

So probabilities of many classes with very uncertain prompts are still too sure.
:meth:`ZeroShotClassifier.fit_temperature` corrects this with labelled images.

Sources: MacKay, The Evidence Framework Applied to Classification Networks, 1992; Lu, Ie and Sha, Mean-Field
Approximation to Gaussian-Softmax Integral with Application to Uncertainty Estimation, 2020; prompts and their mean:
Radford et al., Learning Transferable Visual Models From Natural Language Supervision, 2021.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.embedding.distribution import EmbeddingDistribution
from contrastive_curvature.embedding.similarity import Directions, check_embeddings, cosine_distribution, directions
from contrastive_curvature.errors import InputError
from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.pairs.relation import check_labels

_ENTRIES = 2**24
"""Cosines between images and prompts that are held at once."""

_CANCELS = 1e-6
"""Length of the mean of unit vectors below which they are opposite."""

_MOST_TEMPERATURE = 100.0


class ZeroShotClassifier:
    """Zero-shot classifier whose classes are defined by prompts.

    Args:
        prompts: Distribution over the embeddings of P prompts, ``la.b(prompts)``; or their embeddings without
            uncertainty, of any norm, shape (P, D).
        scale: Factor of the model's cosines, positive: ``1 / temperature`` of an
            :class:`~contrastive_curvature.InfoNCELoss`, ``model.logit_scale.exp().item()`` of CLIP. A bias of the
            logits, as in SigLIP, cancels.
        labels: Class of every prompt, whole numbers, shape (P,); ``None``: every prompt is a class. The embedding of a
            class with several prompts is their mean direction, divided by the length that it would have without
            uncertainty, as in CLIP; errors of the prompts count as independent.

    Attributes:
        classes: The labels, sorted, shape (C,); the columns of :meth:`probabilities`.
        temperature: Divisor of the logits; 1 before :meth:`fit_temperature`.

    Raises:
        InputTypeError: An argument has a wrong type.
        InputError: There are fewer than two classes, an embedding is zero or not finite, the prompts of a class cancel,
            or the scale or a label is malformed.
    """

    def __init__(self, prompts: EmbeddingDistribution | Tensor, *, scale: float, labels: Tensor | None = None) -> None:
        mean = check_embeddings("prompts", prompts)
        self.scale = validate.number("scale", scale, positive=True)
        if labels is None:
            labels = torch.arange(len(mean), device=mean.device)
        self.classes, index = check_labels(labels, len(mean)).to(mean.device).unique(return_inverse=True)
        if len(self.classes) < 2:
            raise InputError("labels", "prompts of two classes or more", f"{len(self.classes)} class")
        self.temperature = 1.0
        self._dtype = torch.promote_types(mean.dtype, torch.float32)
        of_prompts = directions("prompts", prompts)
        counts = torch.bincount(index, minlength=len(self.classes)).double().unsqueeze(1)
        certain = self._summed(normalize(mean.double())[0], index) / counts
        length = certain.norm(dim=1, keepdim=True)
        if bool((length < _CANCELS).any()):
            which = self.classes[(length[:, 0] < _CANCELS)][:5].tolist()
            raise InputError("prompts", "prompts of a class in one direction", f"opposite ones in {which}")
        centres = self._summed(of_prompts.mean, index) / counts / length
        self._centred = centres - centres.mean(0)
        # Only the spread of the prompts: the class embeddings hold the means.
        self._spread = (
            None
            if isinstance(prompts, Tensor)
            else replace(of_prompts, mean=torch.zeros_like(of_prompts.mean), lost=torch.ones_like(of_prompts.lost))
        )
        self._index, self._share = index, (1 / (counts * length).square())[index, 0]

    def probabilities(self, images: EmbeddingDistribution | Tensor) -> Tensor:
        """Return the class probabilities, integrated over the uncertain embeddings.

        Args:
            images: Distribution over N embeddings, ``la.a(images)``; or embeddings without uncertainty, shape (N, D).

        Returns:
            Shape (N, C); every row sums to one. Without uncertainty, a softmax.

        Raises:
            InputTypeError: ``images`` has another type.
            InputError: Dimension or device differ from the prompts, or the embeddings are malformed.
        """
        return (self._logits(images) / self.temperature).softmax(1).to(self._dtype)

    def predict(self, images: EmbeddingDistribution | Tensor) -> Tensor:
        """Return the most probable classes.

        Args:
            images: See :meth:`probabilities`.

        Returns:
            Labels, shape (N,).
        """
        return self.classes[self._logits(images).argmax(1)]

    def fit_temperature(self, images: EmbeddingDistribution | Tensor, labels: Tensor) -> float:
        """Choose the temperature that makes the labels of the images most probable.

        Call it with images that neither encoder was trained on. The negative log-likelihood is convex in ``1 / T``.

        Args:
            images: See :meth:`probabilities`.
            labels: Their classes, shape (N,).

        Returns:
            The temperature, between 1/100 and 100. If all images are classified correctly, it is small and arbitrary.

        Raises:
            InputError: A label is not a class, or the embeddings are malformed. The temperature does not change.

        Source: Guo et al., On Calibration of Modern Neural Networks, 2017.
        """
        from scipy.optimize import minimize_scalar  # slow, so only this method imports it

        logits = self._logits(images).detach()
        labels = check_labels(labels, len(logits)).to(self.classes.device)
        place = torch.searchsorted(self.classes, labels).clamp(max=len(self.classes) - 1)
        unknown = self.classes[place] != labels
        if bool(unknown.any()):
            wanted = "labels of classes that have a prompt"
            raise InputError("labels", wanted, f"{labels[unknown][:5].tolist()}")

        def cost(log_temperature: float) -> float:
            scaled = logits / math.exp(log_temperature)
            return float((scaled.logsumexp(1) - scaled.gather(1, place.unsqueeze(1))[:, 0]).mean())

        most = math.log(_MOST_TEMPERATURE)
        best = minimize_scalar(cost, bounds=(-most, most), method="bounded", options={"xatol": 1e-6})
        # The bounded search never tries the end points.
        self.temperature = math.exp(min((float(best.x), -most, most), key=cost))
        return self.temperature

    def _logits(self, images: EmbeddingDistribution | Tensor) -> Tensor:
        """Return logits whose softmax are the probabilities at temperature 1, float64, shape (N, C)."""
        mean = check_embeddings("images", images)
        if (mean.device, mean.shape[1]) != (self._centred.device, self._centred.shape[1]):
            wanted = f"D = {self._centred.shape[1]} on {self._centred.device}, as of the prompts"
            raise InputError("images", wanted, f"D = {mean.shape[1]} on {mean.device}")
        of_images = directions("images", images)
        step = max(1, _ENTRIES // len(self._index))
        return torch.cat([self._logits_of(of_images[i : i + step]) for i in range(0, len(mean), step)])

    def _logits_of(self, images: Directions) -> Tensor:
        many = len(self.classes)
        # Half a difference of unit vectors has a length of at most one, like a direction.
        half = self._centred / 2
        certain = Directions.of(half, 1 - half.square().sum(1))
        variance = 4 * cosine_distribution(images, certain, pairwise=True).variance
        if self._spread is not None:
            of_prompts = self._share * cosine_distribution(images, self._spread, pairwise=True).variance
            own = self._summed(of_prompts.mT, self._index).mT
            variance = variance + (1 - 2 / many) * own + own.mean(1, keepdim=True) / many
        factor = math.pi / 8 * (self.scale * many / (many - 1)) ** 2
        return self.scale * (images.mean @ self._centred.mT) / (1 + factor * variance).sqrt()

    def _summed(self, rows: Tensor, index: Tensor) -> Tensor:
        """Return sums of rows (P, K) over the prompts of every class, shape (C, K)."""
        return rows.new_zeros(len(self.classes), rows.shape[1]).index_add(0, index, rows)
