"""Monte Carlo dropout (Gal and Ghahramani 2016) and deep ensembles (Lakshminarayanan et al. 2017; paper, G.4)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import torch
from scipy.linalg import orthogonal_procrustes
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from tqdm import tqdm

from benchmarks.experiments.data.split import RetrievalData, Split
from benchmarks.experiments.methods import embed
from benchmarks.experiments.methods.base import Method, Prediction, Setting
from benchmarks.experiments.methods.deterministic import Deterministic, EncoderMethod
from benchmarks.experiments.methods.embed import SphereSpread
from benchmarks.experiments.methods.training import train


class MCDropout(EncoderMethod):
    """Mean direction and spread of passes with dropout.

    A pass draws masks of its own for every image, as the released code does; so one sample is not one network for all
    images. All other modules, batch normalisation among them, stay in evaluation mode.

    Args:
        setting: ``n_samples``, or ``dropout_passes`` if that is less, is the number of passes.
        rate: Of the dropout between all trainable layers, in (0, 1); the paper's by default.
    """

    name = "mc_dropout"

    def __init__(self, setting: Setting, rate: float = 0.2) -> None:
        super().__init__(setting)
        self.rate = rate

    def fit(self, data: RetrievalData, seed: int, base: Method | None = None) -> None:
        """See :meth:`Method.fit`; without ``base``."""
        self.encoder = train(self.setting, data, seed, dropout=self.rate).get_submodule("encoder")
        self._seed = seed

    def predict(self, split: Split) -> Prediction:
        """Mean direction, ``1 / kappa`` and ``"sum_std"`` of the passes, seeded by the fit's seed.

        Equal calls give equal predictions; an image's masks depend on where in the split it stands.
        """
        spread = SphereSpread()
        passes = self.samples(split, self.setting.n_samples, self._seed)
        total, hidden = self._limited(self.setting.n_samples), not self.setting.progress
        for u in tqdm(passes, desc="[dropout passes]", total=total, leave=False, disable=hidden):
            spread.add(u)
        return spread.prediction()

    def samples(self, split: Split, n_samples: int, seed: int) -> Iterator[Tensor]:
        """One pass after the other, ``setting.dropout_passes`` at most."""
        stem, rest = _split_at_dropout(self.encoder)
        read = self._stem_reader(stem, split)
        devices = [torch.device(self.setting.device)] if torch.device(self.setting.device).type == "cuda" else []
        draws = torch.randint(2**62, (self._limited(n_samples),), generator=torch.Generator().manual_seed(seed))
        for one in draws.tolist():
            # The caller's random numbers go on as if nothing had been drawn here.
            with torch.random.fork_rng(devices), torch.no_grad(), _dropout_on(rest):
                torch.manual_seed(one)
                z = torch.cat([rest(h).cpu() for h in read()])
            yield embed.unit(z)

    def _limited(self, n_samples: int) -> int:
        most = self.setting.dropout_passes
        return n_samples if most is None else min(n_samples, most)

    def _stem_reader(self, stem: nn.Module, split: Split) -> Callable[[], Iterable[Tensor]]:
        """Reads what comes out before the first dropout, the same in all passes: kept if it fits in memory."""

        def read() -> Iterator[Tensor]:
            for x in embed.image_batches(split, self.setting):
                # Not around the loop: what stands around a yield holds for the caller too.
                with torch.no_grad():
                    h = stem(x)
                yield h

        kept: list[Tensor] = []
        for h in read():
            kept.append(h)
            if h.numel() * h.element_size() / len(h) * len(split) > embed.CACHE_BYTES:
                return read
        return lambda: kept


def _split_at_dropout(encoder: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The parts of a sequential encoder before its first dropout, and those from there on."""
    parts = list(encoder.children())
    first = next(i for i, part in enumerate(parts) if isinstance(part, _DropoutNd))
    return nn.Sequential(*parts[:first]), nn.Sequential(*parts[first:])


@contextmanager
def _dropout_on(network: nn.Module) -> Iterator[None]:
    modules = [module for module in network.modules() if isinstance(module, _DropoutNd)]
    try:
        for module in modules:
            module.train()
        yield
    finally:
        for module in modules:
            module.eval()


class DeepEnsemble(Method):
    """Mean direction and spread of the members' embeddings.

    The contrastive loss does not change when all embeddings are rotated together, so every member has a frame of its
    own, and the mean of embeddings in different frames says little. The paper's rows are such means
    (``alignment="none"``), and retrieve worse than a single encoder.

    Args:
        setting: Of each member.
        alignment: ``"none"``, or ``"procrustes"``: each member is rotated onto the first one, so that their embeddings
            of the training images lie as close as they can.

    Attributes:
        members: Fitted deterministic methods, to be given before the fit.
    """

    name = "deep_ensemble"

    def __init__(self, setting: Setting, alignment: str = "none") -> None:
        super().__init__(setting)
        self.alignment = alignment
        self.members: Sequence[Deterministic] = ()

    def fit(self, data: RetrievalData, seed: int, base: Method | None = None) -> None:
        """Align the members."""
        self._rotations = [torch.eye(self.setting.dim) for _ in self.members]
        if self.alignment == "procrustes":
            first, *others = (member.predict(data.plain).mean for member in self.members)
            self._rotations[1:] = [rotation_onto(other, first) for other in others]

    def predict(self, split: Split) -> Prediction:
        """Mean direction, ``1 / kappa`` and ``"sum_std"`` of the members."""
        spread = SphereSpread()
        for u in self._embeddings(split):
            spread.add(u)
        return spread.prediction()

    def samples(self, split: Split, n_samples: int, seed: int) -> Iterator[Tensor]:
        """Each member is one sample, and there are no others, whatever the seed."""
        return islice(self._embeddings(split), n_samples)

    def _embeddings(self, split: Split) -> Iterator[Tensor]:
        for member, rotation in zip(self.members, self._rotations, strict=True):
            u = member.predict(split).mean
            yield u if self.alignment == "none" else u @ rotation


def rotation_onto(moving: Tensor, reference: Tensor) -> Tensor:
    """The orthogonal matrix R that brings ``moving @ R`` closest to ``reference`` (Schönemann 1966), by an SVD.

    Args:
        moving: Shape (N, D).
        reference: Of the same points, shape (N, D).

    Returns:
        Shape (D, D), float32; it may reflect.
    """
    rotation, _ = orthogonal_procrustes(moving.double().numpy(), reference.double().numpy())
    return torch.from_numpy(rotation).float()
