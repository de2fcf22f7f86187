"""The encoders."""

from __future__ import annotations

from torch import nn

__all__ = ["make_encoder"]


def make_encoder(dataset: str, dim: int) -> nn.Sequential:
    """Make an untrained encoder that ends in a linear layer: its raw outputs are not normalised.

    Args:
        dataset: ``"fashionmnist"`` for the paper's network (appendix G.2), (N, 1, 28, 28) -> 9216 features -> (N, dim);
            ``"digits"`` for a smaller one, (N, 1, 8, 8) -> 1024 features -> (N, dim).
        dim: Latent dimension D.

    Returns:
        The encoder.
    """
    # 8x8 images are too small to lose their edge to every convolution.
    features, padding = (9216, 0) if dataset == "fashionmnist" else (1024, 1)
    # In place, as nothing else reads what goes in: half the memory traffic of a forward pass.
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=padding),
        nn.ReLU(inplace=True),
        nn.Conv2d(32, 64, 3, padding=padding),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(features, dim),
    )
