"""Two encoders into one space, for example for images and texts, or for queries and documents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from contrastive_curvature.errors import InputTypeError


class TwoTowers(nn.Module):
    """Two encoders trained with one loss; an input of one encoder has its partner among the other's inputs.

    Pass the towers to ``laplace.Laplace(..., likelihood="contrastive")`` for a posterior of both
    (:class:`~contrastive_curvature.laplace.tower_posteriors.TwoTowerLaplace`).

    Args:
        encoder_a: Maps a batch of the first kind, a tensor or a mapping, to (N, D).
        encoder_b: Maps a batch of the second kind to (M, D). Pass the same module twice if one encoder embeds both
            kinds.

    Attributes:
        encoder_a: See above.
        encoder_b: See above.

    Raises:
        InputTypeError: An encoder is not a module.
    """

    def __init__(self, encoder_a: nn.Module, encoder_b: nn.Module) -> None:
        super().__init__()
        for name, encoder in (("encoder_a", encoder_a), ("encoder_b", encoder_b)):
            if not isinstance(encoder, nn.Module):
                raise InputTypeError(name, "a torch.nn.Module", f"a {type(encoder).__name__}")
            if isinstance(encoder, TwoTowers):
                raise InputTypeError(name, "one encoder", "a TwoTowers", "It has two of its own.")
        self.encoder_a, self.encoder_b = encoder_a, encoder_b

    @property
    def shared(self) -> bool:
        """Return whether both encoders are the same module."""
        return self.encoder_a is self.encoder_b

    def forward(self, a: Tensor | Mapping[str, Any], b: Tensor | Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Embed inputs of both kinds.

        Args:
            a: N inputs of the first encoder.
            b: M inputs of the second encoder.

        Returns:
            Embeddings (N, D) and (M, D).
        """
        return self.encoder_a(a), self.encoder_b(b)
