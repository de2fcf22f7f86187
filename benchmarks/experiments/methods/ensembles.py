"""Monte Carlo dropout (Gal and Ghahramani 2016) and deep ensembles (Lakshminarayanan et al. 2017; paper, G.4)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import torch
from scipy.linalg import orthogonal_procrustes
from torch import Tensor, nn

from benchmarks.experiments import training
from benchmarks.experiments.data import RetrievalData, Split

_RATE = 0.2
"""Of the dropout between all trainable layers, the paper's."""


def mc_dropout(setting: training.Setting, data: RetrievalData, seed: int, encoders: list[nn.Module]) -> training.Fitted:
    """Take mean direction, ``1 / kappa`` and ``"sum_std"`` of passes with dropout.

    A pass draws masks of its own for every image, as the released code does; so one sample is not one network for all
    images. An image's masks depend on where in the split it stands.
    """
    parts = list(training.train(setting, data, seed, dropout=_RATE).encoder.children())
    first = next(i for i, part in enumerate(parts) if isinstance(part, nn.Dropout))
    stem, rest = nn.Sequential(*parts[:first]), nn.Sequential(*parts[first:])

    @torch.no_grad()
    def before_dropout(split: Split) -> Iterable[Tensor]:
        """What is the same in all passes: kept if it fits in memory."""
        kept: list[Tensor] = []
        for x in training.image_batches(setting, split):
            kept.append(stem(x))
            if kept[0].numel() * kept[0].element_size() / len(kept[0]) * len(split) > training.CACHE_BYTES:
                return ()
        return kept

    def samples(split: Split, n_samples: int, seed: int) -> Iterator[Tensor]:
        kept = before_dropout(split)
        count = n_samples if setting.dropout_passes is None else min(n_samples, setting.dropout_passes)
        devices = [torch.device(setting.device)] if torch.device(setting.device).type == "cuda" else []
        for one in torch.randint(2**62, (count,), generator=torch.Generator().manual_seed(seed)).tolist():
            # The caller's random numbers go on as if nothing had been drawn here.
            with torch.random.fork_rng(devices), torch.no_grad():
                torch.manual_seed(one)
                for module in rest.modules():
                    module.train(isinstance(module, nn.Dropout))
                z = torch.cat([rest(h).cpu() for h in kept or map(stem, training.image_batches(setting, split))])
            yield training.unit(z)

    return training.Fitted(lambda split: training.spread_of(samples(split, setting.n_samples, seed)), samples)


def deep_ensemble(
    setting: training.Setting, data: RetrievalData, seed: int, encoders: list[nn.Module], alignment: str = "none"
) -> training.Fitted:
    """Take mean direction and spread of the embeddings of deterministic encoders of several seeds.

    The contrastive loss does not change when all embeddings are rotated together, so every member has a frame of its
    own, and the mean of embeddings in different frames says little. The paper's rows are such means
    (``alignment="none"``), and retrieve worse than a single encoder. With ``"procrustes"`` each member is rotated onto
    the first one, so that their embeddings of the training images lie as close as they can.
    """
    rotations: list[Tensor | None] = [None] * len(encoders)
    if alignment == "procrustes":
        embedded = [training.unit(training.encode(setting, encoder, data.train)) for encoder in encoders]
        rotations = [torch.eye(setting.dim), *(rotation_onto(other, embedded[0]) for other in embedded[1:])]

    def embeddings(split: Split) -> Iterator[Tensor]:
        for encoder, rotation in zip(encoders, rotations, strict=True):
            u = training.unit(training.encode(setting, encoder, split))
            yield u if rotation is None else u @ rotation

    # Each member is one sample, and there are no others, whatever the seed.
    return training.Fitted(
        lambda split: training.spread_of(embeddings(split)), lambda split, n, _: islice(embeddings(split), n)
    )


def rotation_onto(moving: Tensor, reference: Tensor) -> Tensor:
    """The orthogonal (D, D) that brings ``moving @ R`` closest to ``reference``, both (N, D) (Schönemann 1966)."""
    rotation, _ = orthogonal_procrustes(moving.double().numpy(), reference.double().numpy())
    return torch.from_numpy(rotation).float()
