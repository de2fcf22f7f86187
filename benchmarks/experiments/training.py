"""What all methods share: the network, its training, and passing images through it.

RMSprop with a decaying rate, on all active pairs of a batch (paper, G.1); the checkpoint by :data:`PROTOCOLS`.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from operator import length_hint
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, Dataset, Sampler

from benchmarks.experiments.data import RetrievalData, Split, classes_of, loader, rank
from contrastive_curvature import ContrastiveLoss, DivergenceError, metrics
from contrastive_curvature.hessian.sphere import check_outputs, normalize
from contrastive_curvature.metrics.neighbors import Metric
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.pairs import RelationFunction
from contrastive_curvature.progress import Progress
from contrastive_curvature.vmf.estimation import sra

NETWORKS: dict[str, tuple[int, int, int]] = {
    "digits": (1, 8, 8),
    "fashionmnist": (1, 28, 28),
    "cifar10": (3, 32, 32),
    "resnet50": (3, 224, 224),
}
"""Names for :func:`make_network`, and the images (C, H, W) that each is made for."""
EVAL_BATCH = 200
"""Images a forward pass outside training."""
CACHE_BYTES = 2**30
"""Memory that intermediate results of a split may fill; where they need more they are computed again."""
_PROBE = 8
"""Images that show a step what its encoder does."""


class Protocol(NamedTuple):
    """Where the paper, its released code and clean practice differ.

    Args:
        chosen_on: What the checkpoint with the largest mAP@5 is chosen on: ``"test"``, or ``"held"``, a tenth of the
            training images (:func:`benchmarks.experiments.data.hold_out`); ``None`` takes the last epoch.
        decay: ``-log`` of the factor on the learning rate after every epoch.
        memory_factor: What online LAM forgets in a step, ``alpha`` of Eq. 5 (the released code gives what it keeps).
        per_image: Whether the learning rate is multiplied by the images of a batch (and the one GPU).
        weight_decay: Of RMSprop.
        first_of_class: Whether each image of an open set is paired only with the first of its class (in the code: LFW).
    """

    chosen_on: Literal["test", "held"] | None = None
    decay: float = 0.1
    memory_factor: float = 1e-4
    per_image: bool = False
    weight_decay: float = 0.0
    first_of_class: bool = False


PROTOCOLS = {
    "paper": Protocol(),
    "released": Protocol("test", 0.01, 1e-3, per_image=True, weight_decay=1e-5, first_of_class=True),
    "clean": Protocol("held"),
}
"""``released``: facts read off https://github.com/FrederikWarburg/bayesian-metric-learning, which has no licence."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How encoders are made and trained; the same for all methods of a table.

    Args:
        network: One of :data:`NETWORKS`.
        dim: Latent dimension D.
        epochs: Passes over the training images.
        batch_size: Images a training step, all of whose pairs count.
        lr: Learning rate of RMSprop at the first epoch.
        margin: Of the contrastive loss and its curvature, on the distance.
        per_class: Images of each class in a batch, for data with many classes; ``None`` draws images at random.
        own_order: Whether nothing but the order of the images is drawn from its generator, as in the committed results
            of the demonstration. In those of the tables torch's loader draws a number from it too, at each pass.
        n_samples: Sampled networks (or embeddings) for methods that have them.
        dropout_passes: Of MC dropout at most, whose every sample is a pass of the whole network; ``None``: no limit.
        memory_factor: ``alpha`` of online LAM (paper, Eq. 5).
        precision: Of the encoder's forward passes in training; ``"bfloat16"`` is autocast, and takes less than half the
            time on a CPU that has instructions for it (AMX or AVX512_BF16), and six to twelve times as long on others.
            Losses, weights and everything after training are float32.
        protocol: One of :data:`PROTOCOLS`.
        weights: Of ``resnet50``: ``"hub"`` (torchvision's of ImageNet), a file of its state, or ``"none"``.
        image_size: Side of photographs in pixels.
        device: Where torch computes.
        progress: Whether to show progress bars; ``None`` shows them from the tenth second on.
    """

    network: str = "fashionmnist"
    dim: int = 3
    epochs: int = 3
    batch_size: int = 64
    lr: float = 1e-3
    margin: float = 0.7
    per_class: int | None = None
    own_order: bool = False
    n_samples: int = 100
    dropout_passes: int | None = None
    memory_factor: float = 1e-4
    precision: Literal["float32", "bfloat16"] = "float32"
    protocol: str = "paper"
    weights: str = "hub"
    image_size: int = 224
    device: str = "cpu"
    progress: bool | None = None


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
            shape (N,). It tells images out of distribution, and ``uncertainty`` ranks retrievals.
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


@dataclass(frozen=True)
class Fitted:
    """A fitted method.

    Args:
        predict: What it says of images, in evaluation mode; equal images give equal predictions.
        samples: From images, a number S and a seed, S sampled embeddings of the images for votes and calibration, each
            float32 (N, D) on the CPU and of unit length where they are compared by cosine; fewer where there are no
            more (an ensemble's members). ``None`` for a method that has none.
    """

    predict: Callable[[Split], Prediction]
    samples: Callable[[Split, int, int], Iterable[Tensor]] | None = None


class GeM(nn.Module):
    """Generalised mean over the positions of a feature map, ``(mean_hw x^p)^(1/p)`` of every channel.

    Radenović et al. 2018, "Fine-tuning CNN Image Retrieval with No Human Annotation", equation 3; p starts at 3.
    """

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        """Pool (N, C, H, W) to (N, C)."""
        x = x.clamp(min=1e-6)
        # The scale cancels, and so has no gradient; without it large powers overflow in single precision.
        scale = x.detach().amax((-2, -1), keepdim=True)
        return (x / scale).pow(self.p).mean((-2, -1)).pow(1 / self.p) * scale.flatten(1)


def make_network(name: str, dim: int, dropout: float = 0.0, weights: str = "none") -> nn.Sequential:
    """Make an encoder whose raw outputs are not normalised (paper, G.2).

    Args:
        name: One of :data:`NETWORKS`. ``"fashionmnist"`` and ``"cifar10"`` are the paper's convolutional networks, both
            with 9216 features before the last layer; the paper prints ``conv2d(1, 32)`` for CIFAR10 too, whose images
            have three channels. ``"digits"`` is a small one for quick runs. ``"resnet50"`` pools by :class:`GeM`, and
            has dropout before its last layer only.
        dim: Latent dimension D.
        dropout: Rate of the dropout between all trainable layers (paper, G.4: 0.2 for MC dropout). At 0 there are no
            dropout modules. Names and shapes of the parameters do not depend on it.
        weights: Of ``"resnet50"``, see :class:`Setting`.

    Returns:
        The encoder, float32 (N, C, H, W) -> (N, D), in training mode. Its last part is the ``nn.Linear`` named
        ``"head"``.
    """
    if name == "resnet50":
        from torchvision.models import resnet50  # half a second; the small networks do without

        trunk = resnet50(weights="IMAGENET1K_V1" if weights == "hub" else None)
        if weights not in ("hub", "none"):
            trunk.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
        trunk.avgpool, trunk.fc = GeM(), nn.Identity()
        drop = [("head_drop", nn.Dropout(dropout))] if dropout else []
        return nn.Sequential(OrderedDict([("trunk", trunk), *drop, ("head", nn.Linear(2048, dim))]))
    channels, _, _ = NETWORKS[name]
    # 8x8 images are too small to lose their edge to every convolution.
    padding = 1 if name == "digits" else 0
    parts: list[tuple[str, nn.Module]] = [
        ("conv1", nn.Conv2d(channels, 32, 3, padding=padding)),
        # In place, as nothing else reads what goes in: half the memory traffic of a forward pass.
        ("relu1", nn.ReLU(inplace=True)),
        ("drop1", nn.Dropout(dropout)),
        ("conv2", nn.Conv2d(32, 64, 3, padding=padding)),
        ("relu2", nn.ReLU(inplace=True)),
        ("pool", nn.MaxPool2d(2)),
    ]
    if name == "cifar10":
        third = nn.Conv2d(64, 64, 3)
        parts += [("drop2", nn.Dropout(dropout)), ("conv3", third), ("relu3", nn.ReLU(inplace=True))]
    parts += [("flatten", nn.Flatten()), ("head_drop", nn.Dropout(dropout))]
    if not dropout:
        parts = [(part, module) for part, module in parts if not isinstance(module, nn.Dropout)]
    head = nn.Linear(1024 if name == "digits" else 9216, dim)
    return nn.Sequential(OrderedDict([*parts, ("head", head)]))


class ContrastiveStep(nn.Module):
    """The contrastive loss of a batch, over all positive pairs and the negative ones inside the margin."""

    def __init__(self, encoder: nn.Module, margin: float, relation: RelationFunction | None = None) -> None:
        super().__init__()
        self.encoder, self.loss, self.relation = encoder, ContrastiveLoss(margin, normalization="type"), relation

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        z = self.encoder(x)
        return self.loss(z, pairs=self.loss.mine(z, targets, self.relation))


def seed_everything(seed: int) -> None:
    """Seed every source of random numbers that torch, NumPy and scikit-learn draw from; ``seed`` in [0, 2^32)."""
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002  scikit-learn draws from this generator


def new_encoder(setting: Setting, outputs: int | None = None, dropout: float = 0.0) -> nn.Sequential:
    """A new encoder on the device; its weights come from torch's global generator."""
    network = make_network(setting.network, setting.dim if outputs is None else outputs, dropout, setting.weights)
    return network.to(setting.device, memory_format=torch.channels_last)


def train(
    setting: Setting,
    data: RetrievalData,
    seed: int,
    make_step: Callable[[nn.Module, Tensor], Any] | None = None,
    *,
    dropout: float = 0.0,
    outputs: int | None = None,
    batches: Iterable[tuple[Tensor, Tensor]] | None = None,
) -> Any:
    """Train a new encoder.

    Args:
        setting: Network and training.
        data: The training images are ``data.train``.
        seed: Of the initial weights, the order of the images and dropout.
        make_step: From the encoder and a few images on its device, the module whose call with a batch returns the loss;
            ``None`` for :class:`ContrastiveStep`.
        dropout: Rate of the dropout between all trainable layers.
        outputs: Raw outputs of the encoder, where a method needs more than the setting's ``dim``.
        batches: Of an epoch; ``None`` for :func:`training_loader`.

    Returns:
        The step, in evaluation mode.
    """
    seed_everything(seed)
    encoder = new_encoder(setting, outputs, dropout)
    probe = data.train.images(range(min(_PROBE, len(data.train)))).to(setting.device)
    step = ContrastiveStep(encoder, setting.margin, data.relation) if make_step is None else make_step(encoder, probe)
    if setting.precision == "bfloat16":
        plain, device = encoder.forward, torch.device(setting.device).type

        def forward(x: Tensor) -> Tensor:
            with torch.autocast(device, dtype=torch.bfloat16):
                z: Tensor = plain(x)
            return z.float()

        encoder.forward = forward  # type: ignore[method-assign]
    if batches is None:
        batches = training_loader(setting, data.train.augmented, data.train.targets, seed)
    run_training(setting, step, batches, setting.lr, data.selection)
    vars(encoder).pop("forward", None)
    return step.eval()


def run_training(
    setting: Setting,
    step: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    lr: float,
    selection: Split | None = None,
) -> None:
    """Train the parameters of a step with the paper's optimiser.

    Args:
        setting: Epochs, device and progress.
        step: ``step(x, targets)`` returns the loss of a batch. Where it has a method ``parameter_groups``, that gives
            the optimiser's groups from ``lr``; where it has an attribute ``optimizer``, that is its class.
        batches: Iterated once an epoch.
        lr: Learning rate of the first epoch.
        selection: Images; the step ends as it was after the epoch whose encoder had the largest mAP@5 on them.
    """
    protocol = PROTOCOLS[setting.protocol]
    lr *= setting.batch_size if protocol.per_image else 1
    grouped = getattr(step, "parameter_groups", None)
    kind: type[torch.optim.Optimizer] = getattr(step, "optimizer", torch.optim.RMSprop)
    optimizer = kind(
        step.parameters() if grouped is None else grouped(lr), **{"lr": lr, "weight_decay": protocol.weight_decay}
    )
    scheduler = ExponentialLR(optimizer, math.exp(-protocol.decay))
    steps, best, chosen = 0, -1.0, None
    step.train()
    with Progress(setting.progress).bar("[training]", setting.epochs * length_hint(batches) or None) as advance:
        for _epoch in range(setting.epochs):
            for x, targets in batches:
                steps += 1
                loss = step(x.to(setting.device), targets.to(setting.device))
                if not bool(loss.isfinite()):
                    raise DivergenceError(f"the loss is {float(loss)}.", steps)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                advance(1)
            if not all(bool(parameter.isfinite().all()) for parameter in step.parameters()):
                raise DivergenceError("a parameter is not finite.", steps)
            scheduler.step()
            if selection is not None:
                score = map_at_5(setting, step.eval().encoder, selection)
                if score > best:
                    best, chosen = score, copy.deepcopy(step.state_dict())
                step.train()
    if chosen is not None:
        step.load_state_dict(chosen)


def map_at_5(setting: Setting, encoder: nn.Module, split: Split) -> float:
    """MAP@5 of the first D outputs by the cosine, each image retrieved among the others."""
    nearest = metrics.nearest_neighbors(encode(setting, encoder, split)[:, : setting.dim], k=5)
    return metrics.map_at_k(rank(nearest, split.targets), 5)


def training_loader(setting: Setting, images: Dataset[Any], targets: Tensor, seed: int, **more: Any) -> DataLoader[Any]:
    """Batches in a new order each epoch.

    With ``setting.per_class``, each batch holds that many images of each of ``batch_size / per_class`` classes drawn at
    random, and an epoch has as many images as the training set, less an incomplete batch. A class with fewer images
    gives some of them twice. Under a protocol with ``first_of_class``, an image comes with the first one of its class.
    """
    targets = classes_of(targets)
    generator = torch.Generator().manual_seed(seed)
    if setting.per_class is not None and PROTOCOLS[setting.protocol].first_of_class:
        return loader(images, setting.batch_size, _WithFirst(targets, generator), **more)
    if setting.per_class is not None:
        # a second to import, and only data with many classes needs it
        from pytorch_metric_learning.samplers import MPerClassSampler

        class Restartable(MPerClassSampler):
            """Shuffles its classes anew from the same order, so that an epoch depends on the random state alone."""

            def __iter__(self) -> Iterator[int]:
                self.labels.sort()
                return super().__iter__()

        size = setting.batch_size
        sampler = Restartable(targets, setting.per_class, size, length_before_new_iter=len(targets))
        return loader(images, size, sampler, generator=generator, **more)
    if setting.own_order:
        return loader(images, setting.batch_size, _Permutation(len(targets), generator), **more)
    return loader(images, setting.batch_size, shuffle=True, generator=generator, **more)


class _Permutation(Sampler[int]):
    """All images in a new order each time; torch's own sampler draws one order more a pass."""

    def __init__(self, size: int, generator: torch.Generator) -> None:
        self.size, self.generator = size, generator

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.size, generator=self.generator).tolist())


class _WithFirst(Sampler[int]):
    """The images that are not the first of their class in a new order each time, each with that one behind it."""

    def __init__(self, targets: Tensor, generator: torch.Generator) -> None:
        first: dict[int, int] = {}
        self.pairs = [
            (row, first[label]) for row, label in enumerate(targets.tolist()) if first.setdefault(label, row) != row
        ]
        self.generator = generator

    def __len__(self) -> int:
        return 2 * len(self.pairs)

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(len(self.pairs), generator=self.generator).tolist()
        return (row for at in order for row in self.pairs[at])


def image_batches(setting: Setting, split: Split) -> Iterator[Tensor]:
    """Images on the device, (B, C, H, W), in their order."""
    for rows in torch.arange(len(split)).split(EVAL_BATCH):
        yield split.images(rows.tolist()).to(setting.device)


@torch.no_grad()
def encode(setting: Setting, network: Callable[[Tensor], Tensor], split: Split) -> Tensor:
    """What a network says of every image, shape (N, ...), on the CPU."""
    return torch.cat([network(x).cpu() for x in image_batches(setting, split)])


def features_of(setting: Setting, encoder: Encoder, split: Split) -> tuple[Tensor, Tensor]:
    """Raw outputs (N, D) of images, and what the last layer makes them from, (N, F), on the device."""
    with torch.no_grad():
        parts = [encoder.forward_with_features(x) for x in image_batches(setting, split)]
    return torch.cat([z for z, _ in parts]), torch.cat([phi for _, phi in parts])


def analysed(setting: Setting, encoder: nn.Module, data: RetrievalData) -> Encoder:
    """The library's view of an encoder, which knows its last layer."""
    return Encoder(encoder, data.test.images([0, 1]).to(setting.device))


def unit(z: Tensor) -> Tensor:
    """Unit embeddings; refuse raw outputs that are zero or not finite."""
    return normalize(check_outputs(z, "raw outputs"))[0]


def spread_of(samples: Iterable[Tensor]) -> Prediction:
    """Summarise samples (N, D) one after the other as :func:`contrastive_curvature.vmf.fit` does all of them.

    Means and sums of squared deviations are updated as Welford (1962) does, which keeps the digits of samples that
    almost agree. Three arrays of a sample's size are held.

    Returns:
        Mean directions (N, D); uncertainty ``1 / kappa`` (N,) of the von Mises-Fisher distribution fitted to the
        samples (paper, Eq. 42-43); variant ``"sum_std"`` (N,), the sum over dimensions of the (unbiased) standard
        deviation, which the code released with the paper scores by.
    """
    count, first, mean, squares = 0, torch.empty(0), torch.empty(0), torch.empty(0)
    for count, u in enumerate(samples, start=1):
        if count == 1:
            first, mean, squares = u, torch.zeros_like(u), torch.zeros_like(u)
        change = u - mean
        mean += change / count
        squares += change * (u - mean)
    length = mean.norm(dim=1)
    # Samples that cancel have no mean direction; the first stands in, as in vmf.fit.
    cancelled = (length <= torch.finfo(length.dtype).eps).unsqueeze(1)
    direction = torch.where(cancelled, first, mean / length.unsqueeze(1))
    kappa = sra(length.clamp(max=1), (squares.sum(1) / count).clamp(min=0, max=1), mean.shape[1])
    sum_std = (squares.clamp(min=0) / (count - 1)).sqrt().sum(1)
    return Prediction(direction, 1 / kappa, {"sum_std": sum_std})
