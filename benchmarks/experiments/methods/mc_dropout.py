"""Monte Carlo dropout (Gal and Ghahramani 2016; paper, G.4): dropout stays on when images are embedded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from tqdm import tqdm

from benchmarks.experiments.data.split import RetrievalData, Split
from benchmarks.experiments.methods import embed
from benchmarks.experiments.methods.base import Method, Prediction, Setting
from benchmarks.experiments.methods.checks import check_count, check_fit, fitted
from benchmarks.experiments.methods.spread import SphereSpread
from benchmarks.experiments.methods.training import train
from contrastive_curvature.errors import InputError, expected


class MCDropout(Method):
    """Mean direction and spread of passes with dropout.

    A pass draws masks of its own for every image, as the released code does; so one sample is not one network for all
    images. All other modules, batch normalisation among them, stay in evaluation mode.

    Args:
        setting: ``n_samples``, or ``dropout_passes`` if that is less, is the number of passes.
        rate: Of the dropout between all trainable layers, in (0, 1); the paper's by default.

    Raises:
        InputError: The rate is out of range, or there are fewer than two passes.
    """

    name = "mc_dropout"
    title = "MC dropout"

    def __init__(self, setting: Setting, rate: float = 0.2) -> None:
        super().__init__(setting)
        # written so that NaN fails too
        if not 0 < rate < 1:
            hint = "Without dropout all passes are the same: take 'deterministic'."
            raise InputError(expected("rate", "a number above 0 and below 1", rate, hint))
        check_count("setting.n_samples", setting.n_samples, 2)
        if setting.dropout_passes is not None:
            check_count("setting.dropout_passes", setting.dropout_passes, 2)
        self.rate = rate
        self._seed = 0
        self._encoder: nn.Module | None = None

    @property
    def encoder(self) -> nn.Module:
        """The trained encoder, in evaluation mode: without dropout.

        Raises:
            InputError: It was neither trained nor loaded.
        """
        return fitted(self._encoder, self.name)

    def fit(self, data: RetrievalData, seed: int, folder: Path, base: Method | None = None) -> None:
        """See :meth:`Method.fit`; without ``base``."""
        check_fit(seed, folder)
        step = train(self.setting, data, seed, folder / "training.pt", dropout=self.rate)
        self._encoder = step.get_submodule("encoder")
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
        check_count("n_samples", n_samples)
        return self._passes(self.encoder, split, self._limited(n_samples), seed)

    def _limited(self, n_samples: int) -> int:
        most = self.setting.dropout_passes
        return n_samples if most is None else min(n_samples, most)

    def _passes(self, encoder: nn.Module, split: Split, n_samples: int, seed: int) -> Iterator[Tensor]:
        stem, rest = _split_at_dropout(encoder)
        read = self._stem_reader(stem, split)
        devices = [torch.device(self.setting.device)] if torch.device(self.setting.device).type == "cuda" else []
        for one in torch.randint(2**62, (n_samples,), generator=torch.Generator().manual_seed(seed)).tolist():
            # The caller's random numbers go on as if nothing had been drawn here.
            with torch.random.fork_rng(devices), torch.no_grad(), _dropout_on(rest):
                torch.manual_seed(one)
                z = torch.cat([rest(h).cpu() for h in read()])
            yield embed.unit(z)

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

    def state_dict(self) -> dict[str, Any]:
        """The weights, and the seed of the passes."""
        return {"encoder": dict(self.encoder.state_dict()), "seed": self._seed, "rate": self.rate}

    def load_state_dict(self, state: dict[str, Any], data: RetrievalData) -> None:
        """See :meth:`Method.load_state_dict`.

        Raises:
            InputError: It was trained with another rate.
        """
        if state["rate"] != self.rate:
            raise InputError(expected("rate", f"{state['rate']}, as in training", self.rate))
        encoder = self.setting.make_encoder(self.rate)
        encoder.load_state_dict(state["encoder"])
        self._encoder, self._seed = encoder.eval(), state["seed"]


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
