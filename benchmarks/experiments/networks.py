"""A network from its name, its latent dimension and its dropout rate; all end in one linear layer named head."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from contrastive_curvature.errors import InputError


class GeM(nn.Module):
    """Generalised mean over the positions of a feature map, ``(mean_hw x^p)^(1/p)`` for every channel.

    Radenović et al. 2018, "Fine-tuning CNN Image Retrieval with No Human Annotation", equation 3. ``p = 1`` is average
    pooling, ``p -> inf`` maximum pooling.

    Args:
        p: Exponent at the start, at least 1; learned with the network.
        eps: Activations below it count as ``eps``: a power needs a positive base.
    """

    def __init__(self, p: float = 3.0, eps: float = 1e-6) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.tensor(float(p)))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Pool.

        Args:
            x: Shape (N, C, H, W).

        Returns:
            Shape (N, C).
        """
        x = x.clamp(min=self.eps)
        # The scale cancels, and so has no gradient; without it large powers overflow in single precision.
        scale = x.detach().amax((-2, -1), keepdim=True)
        pooled = (x / scale).pow(self.p).mean((-2, -1)).pow(1 / self.p)
        return pooled * scale.flatten(1)


NETWORKS: dict[str, tuple[int, int, int]] = {
    "digits": (1, 8, 8),
    "fashionmnist": (1, 28, 28),
    "cifar10": (3, 32, 32),
    "resnet50": (3, 224, 224),
    "resnet50_untrained": (3, 224, 224),
}
"""Names for :func:`make_network`, and the images (C, H, W) that each is made for. The residual networks take any size
from 32 pixels on."""

_TRUNK_FEATURES = 2048


def make_network(name: str, dim: int, dropout: float = 0.0) -> nn.Sequential:
    """Make an encoder whose raw outputs are not normalised (paper, G.2).

    Args:
        name: One of :data:`NETWORKS`. ``"fashionmnist"`` and ``"cifar10"`` are the paper's convolutional networks, both
            with 9216 features before the last layer; the paper prints ``conv2d(1, 32)`` for CIFAR10 too, whose images
            have three channels. ``"resnet50"`` is torchvision's trunk with ImageNet weights (``IMAGENET1K_V1``, read
            from torch's cache or downloaded into it), GeM pooling and a linear whitening layer; with ``dim=2048`` it
            preserves the dimension as the paper's does. ``"resnet50_untrained"`` is the same from random weights.
            ``"digits"`` is a small one for quick runs.
        dim: Latent dimension D, at least 2.
        dropout: Rate of the dropout between all trainable layers, with the residual trunk and its pooling as one layer
            (paper, G.4: 0.2 for MC dropout). At 0 there are no dropout modules. Names and shapes of the parameters do
            not depend on it.

    Returns:
        The encoder, float32 (N, C, H, W) -> (N, D), in training mode. Its last part is the ``nn.Linear`` named
        ``"head"``.

    Raises:
        InputError: The name is unknown, or the ImageNet weights are neither there nor can be fetched.
    """
    if name not in NETWORKS:
        raise InputError("name", f"one of {', '.join(map(repr, NETWORKS))}", name)
    if name.startswith("resnet50"):
        parts = [("trunk", _trunk(pretrained=name == "resnet50")), ("pool", GeM()), ("head_drop", None)]
        features = _TRUNK_FEATURES
    else:
        parts, features = _convolutions(name)
    if dropout > 0:
        parts = [(name, nn.Dropout(dropout) if part is None else part) for name, part in parts]
    kept = [(name, part) for name, part in parts if part is not None]
    return nn.Sequential(OrderedDict([*kept, ("head", nn.Linear(features, dim))]))


def _convolutions(name: str) -> tuple[list[tuple[str, nn.Module | None]], int]:
    """The parts up to the last layer, ``None`` where dropout may stand, and the number of features after them."""
    channels, _, _ = NETWORKS[name]
    # 8x8 images are too small to lose their edge to every convolution.
    padding = 1 if name == "digits" else 0
    parts: list[tuple[str, nn.Module | None]] = [
        ("conv1", nn.Conv2d(channels, 32, 3, padding=padding)),
        # In place, as nothing else reads what goes in: half the memory traffic of a forward pass.
        ("relu1", nn.ReLU(inplace=True)),
        ("drop1", None),
        ("conv2", nn.Conv2d(32, 64, 3, padding=padding)),
        ("relu2", nn.ReLU(inplace=True)),
        ("pool", nn.MaxPool2d(2)),
    ]
    if name == "cifar10":
        parts += [("drop2", None), ("conv3", nn.Conv2d(64, 64, 3)), ("relu3", nn.ReLU(inplace=True))]
    return [*parts, ("flatten", nn.Flatten()), ("head_drop", None)], 1024 if name == "digits" else 9216


def _trunk(pretrained: bool) -> nn.Sequential:
    # torchvision is needed by this network only, and takes a second to import
    from torchvision.models import ResNet50_Weights, resnet50

    try:
        network = resnet50(weights=ResNet50_Weights.IMAGENET1K_V1 if pretrained else None)
    except (OSError, RuntimeError) as error:
        command = "python -c \"from torchvision.models import resnet50; resnet50(weights='IMAGENET1K_V1')\""
        came = f"none that can be read or fetched ({str(error).strip().splitlines()[-1]})"
        hint = f"On a machine that may download: {command}. For a quick try take 'resnet50_untrained'."
        raise InputError("name='resnet50'", "ImageNet weights in torch's cache", came, hint) from None
    # Without its average pooling and its classifier, ResNet.forward is its children one after the other.
    return nn.Sequential(OrderedDict(list(network.named_children())[:-2]))
