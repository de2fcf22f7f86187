"""What every method offers: it is trained and evaluated in one and the same way.

A method is made from a :class:`Setting`, fitted on training images, and then gives for any images mean embeddings, one
uncertainty per input, and, where it has them, samples. Those that build on a trained deterministic encoder
(``needs_base``) are given it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from benchmarks.experiments.data.split import RetrievalData, Split
from benchmarks.experiments.networks import make_network
from contrastive_curvature.metrics.neighbors import Metric
from contrastive_curvature.pairs import RelationFunction


@dataclass(frozen=True)
class Setting:
    """How encoders are made and trained; the same for all methods of a table.

    Args:
        network: Name for :func:`benchmarks.experiments.networks.make_network`.
        dim: Latent dimension D.
        epochs: Passes over the training images.
        batch_size: Images a training step, all of whose pairs count.
        lr: Learning rate of RMSprop at the first epoch; multiplied by exp(-0.1) after each (paper, G.1).
        margin: Of the contrastive loss and its curvature, on the distance; ``None``: every negative counts.
        per_class: Images of each class in a batch, for data with many classes; ``None`` draws images at random.
        own_order: Whether nothing but the order of the images is drawn from its generator, as in the committed results
            of the demonstration. In those of the tables torch's loader draws a number from it too, at each pass.
        relation: On positions, which images show the same place; ``None`` for class labels.
        n_samples: Sampled networks (or embeddings) for methods that have them.
        dropout_passes: Of MC dropout at most, whose every sample is a pass of the whole network; ``None``: no limit.
        memory_factor: ``alpha`` of online LAM (paper, Eq. 5).
        distance: Of the curvature, where a row does not say its own; ``None`` for the library's default.
        pd_fix: The same for the positive semi-definite approximation.
        negative_weight: Weight of the negative pairs in the curvature; ``None`` for the library's default.
        baseline_features: Training images whose features nearest-neighbour methods search, at most.
        eval_batch: Images a forward pass outside training.
        workers: Processes that read images.
        precision: Of the encoder's forward passes in training; ``"bfloat16"`` is autocast, and takes less than half the
            time on a CPU that has instructions for it (AMX or AVX512_BF16), and six to twelve times as long on others.
            Losses, weights and everything after training are float32.
        device: Where torch computes.
        progress: Whether to show progress bars.
    """

    network: str = "fashionmnist"
    dim: int = 3
    epochs: int = 3
    batch_size: int = 64
    lr: float = 1e-3
    margin: float | None = 0.7
    per_class: int | None = None
    own_order: bool = False
    relation: RelationFunction | None = None
    n_samples: int = 100
    dropout_passes: int | None = None
    memory_factor: float = 1e-4
    distance: str | None = None
    pd_fix: str | None = None
    negative_weight: float | None = None
    baseline_features: int = 10_000
    eval_batch: int = 200
    workers: int = 0
    precision: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    progress: bool = True

    def make_encoder(self, dropout: float = 0.0, outputs: int | None = None) -> nn.Module:
        """A new encoder on the device; its weights come from torch's global generator.

        Args:
            dropout: See :func:`~benchmarks.experiments.networks.make_network`.
            outputs: Raw outputs, where a method predicts more than the ``dim`` coordinates of a point.
        """
        network = make_network(self.network, self.dim if outputs is None else outputs, dropout=dropout)
        return network.to(self.device, memory_format=torch.channels_last)


@dataclass(frozen=True)
class Prediction:
    """What a method says of N images, on the CPU.

    Args:
        mean: Embeddings to retrieve with, of any length; float32, shape (N, D).
        uncertainty: The method's own score, larger is less certain, shape (N,); ``None`` if it has none.
        variants: Further scores by name, as the released code's.
        means: Embeddings that belong to a variant and differ from ``mean``, by the variant's name.
        seconds: What mean and uncertainty took, where the variants took more; ``None`` for the whole call.
        variant_seconds: The same for a variant, where it is known.
        novelty: Where a method has another score for how unlike the known images an image is: larger is less like them,
            shape (N,). It tells images out of distribution, and ``uncertainty`` ranks retrievals. ``None`` where
            ``uncertainty`` does both.
        p_value: Conformal p-values of "this image is of a known kind", shape (N,), where the method was calibrated with
            known images that it was not trained on.
        metric: How ``mean``, ``means`` and the method's samples are compared.
    """

    mean: Tensor
    uncertainty: Tensor | None = None
    variants: dict[str, Tensor] = field(default_factory=dict)
    means: dict[str, Tensor] = field(default_factory=dict)
    seconds: float | None = None
    variant_seconds: dict[str, float] = field(default_factory=dict)
    novelty: Tensor | None = None
    p_value: Tensor | None = None
    metric: Metric = "cosine"


class Method(ABC):
    """One row of a table.

    Args:
        setting: How encoders are made and trained.
        **options: The method's own, see there.
    """

    name: ClassVar[str]
    """As on the command line and in file names."""
    needs_base: ClassVar[bool] = False
    """Whether :meth:`fit` takes a trained deterministic method."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    @abstractmethod
    def fit(self, data: RetrievalData, seed: int, base: Method | None = None) -> None:
        """Train.

        Args:
            data: The training images are ``data.train``; nothing else of it may be used.
            seed: Of weights, order of images and noise.
            base: The fitted deterministic method of the same seed, where ``needs_base``. It is not changed.
        """

    @abstractmethod
    def predict(self, split: Split) -> Prediction:
        """Embeddings and uncertainties of images, in evaluation mode; equal images give equal predictions."""

    def samples(self, split: Split, n_samples: int, seed: int) -> Iterator[Tensor] | None:
        """Sampled embeddings of the images, for votes and calibration.

        Args:
            split: N images.
            n_samples: Number S of samples.
            seed: Of the samples; equal seeds give equal ones.

        Returns:
            S tensors of embeddings, each float32 (N, D) on the CPU and of unit length where they are compared by
            cosine; or fewer where the method has no more (an ensemble's members), or ``None`` where it has none.
        """
        return None
