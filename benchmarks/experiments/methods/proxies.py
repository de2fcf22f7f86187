"""Encoders trained with learned proxies: by the cosine, and by distances of von Mises-Fisher distributions.

Source: Kirchhof et al. (2022), A Non-isotropic Probabilistic Take on Proxy-based Deep Metric Learning, supplement.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.experiments.data.split import RetrievalData, Split
from benchmarks.experiments.methods.base import Method, Prediction, Setting
from benchmarks.experiments.methods.checks import (
    check_choice,
    check_classes,
    check_count,
    check_fit,
    check_positive,
    check_saved,
    fitted,
)
from benchmarks.experiments.methods.embed import map_batches, unit
from benchmarks.experiments.methods.proxy_step import (
    DISTANCES,
    DISTRIBUTION,
    PER_AXIS,
    PROXY_KAPPA,
    SAMPLED,
    WITH_KAPPA,
    ProxyOptions,
    ProxyStep,
)
from benchmarks.experiments.methods.training import train
from contrastive_curvature import validate, vmf
from contrastive_curvature.errors import UnsupportedError, expected

__all__ = ["FIRST", "Proxies"]

FIRST: dict[str, tuple[float, float, float]] = {
    "cosine": (1.0, 1.0, 1.0),
    "l2": (200.0, 10.0, 10.0),
    "nivmf": (10.0, 1.0, 10.0),
    "b_vmf": (3.0, 30.0, 10.0),
    "el_vmf": (10.0, 30.0, 10.0),
    "kl_vmf": (10.0, 30.0, 10.0),
    "el_nivmf": (10.0, 30.0, 10.0),
}
"""Distance -> first temperature, mean concentration of embeddings, and concentration of proxies.

All temperatures are such that a logit rises by about 1 when the cosine rises by 1: with the cosine as with EL-nivMF, a
softmax that is almost even at first ends in a better recall than a sharp one.
"""


class Proxies(Method):
    """Every class has a proxy; an image is drawn to that of its class and away from all others.

    A raw output stands for a von Mises-Fisher distribution, whose concentration is its length times a learned scale
    (see :class:`ProxyStep`): the images that the encoder answers with long outputs are the certain ones. Retrieval is
    by the cosine, as in the document. The proxies are not used after training, but kept.

    Args:
        setting: How the encoder is made and trained; its margin is not used.
        distance: ``"cosine"``, ``"l2"``, ``"nivmf"``, ``"b_vmf"``, ``"el_vmf"``, ``"kl_vmf"`` or ``"el_nivmf"``.
            ``"cosine"`` and ``"nivmf"`` do not depend on an embedding's concentration: the score is the length of an
            output that the loss does not see. With them and with ``"l2"``, an embedding is no distribution, and there
            are no samples.
        proxy_lr: Learning rate of the proxies' directions and of the temperature as a multiple of the encoder's.
        kappa_lr: The same of concentrations, those of the proxies and the embeddings' mean one, for all but the cosine;
            ``None`` for 1.
        temperature: The first one; it is learned. ``None`` for the distance's own in :data:`FIRST`.
        embedding_kappa: The mean concentration of the first embeddings, where the distance depends on it; ``None`` for
            the distance's own.
        proxy_kappa: The first concentration of proxies, for all but the cosine; ``None`` for the distance's own.
        n_samples: Samples of each embedding in training, for ``"el_nivmf"``; ``None`` for 10, the document's.
        normalized: Whether the two non-isotropic distances take a density; ``None``, or ``False``, for the document's
            function, see :func:`contrastive_curvature.vmf.nivmf_log_prob`.

    Raises:
        InputError: An option is unknown or out of range.
        UnsupportedError: An option has no meaning for the distance.
    """

    name = "proxies"
    title = "Proxies"

    def __init__(
        self,
        setting: Setting,
        distance: str = "el_nivmf",
        proxy_lr: float = 10.0,
        kappa_lr: float | None = None,
        temperature: float | None = None,
        embedding_kappa: float | None = None,
        proxy_kappa: float | None = None,
        n_samples: int | None = None,
        normalized: bool | None = None,
    ) -> None:
        super().__init__(setting)
        check_choice("distance", distance, DISTANCES)
        for name, value, allowed in (
            ("kappa_lr", kappa_lr, PROXY_KAPPA),
            ("embedding_kappa", embedding_kappa, WITH_KAPPA),
            ("proxy_kappa", proxy_kappa, PROXY_KAPPA),
            ("n_samples", n_samples, (SAMPLED,)),
            ("normalized", normalized, PER_AXIS),
        ):
            if value is not None and distance not in allowed:
                shown = ", ".join(map(repr, allowed))
                raise UnsupportedError(expected(name, f"None for {distance!r}", value, f"It is an option of {shown}."))
        first = FIRST[distance]
        self.options = ProxyOptions(
            distance,
            check_positive("proxy_lr", proxy_lr),
            check_positive("kappa_lr", 1.0 if kappa_lr is None else kappa_lr),
            check_positive("temperature", first[0] if temperature is None else temperature),
            check_positive("embedding_kappa", first[1] if embedding_kappa is None else embedding_kappa),
            check_positive("proxy_kappa", first[2] if proxy_kappa is None else proxy_kappa),
            check_count("n_samples", 10 if n_samples is None else n_samples),
            False if normalized is None else normalized,
        )
        validate.flag("normalized", self.options.normalized)
        self._encoder: nn.Module | None = None
        self._scale = 1.0
        self._proxies: dict[str, Tensor] = {}

    @property
    def encoder(self) -> nn.Module:
        """The trained encoder, in evaluation mode.

        Raises:
            InputError: It was neither trained nor loaded.
        """
        return fitted(self._encoder, self.name)

    @property
    def proxies(self) -> dict[str, Tensor]:
        """What was learned beside the encoder, on the CPU.

        Returns:
            ``"directions"`` (C, D), not of unit length; ``"log_kappa"`` (C,) or (C, D), not there for the cosine;
            ``"log_embedding_kappa"`` (), where the distance depends on it; ``"log_temperature"`` (); ``"mean_length"``
            (), of raw outputs; ``"classes"``, the training labels, (C,).

        Raises:
            InputError: It was neither trained nor loaded.
        """
        fitted(self._encoder, self.name)
        return self._proxies

    def fit(self, data: RetrievalData, seed: int, folder: Path, base: Method | None = None) -> None:
        """See :meth:`Method.fit`; without ``base``.

        Raises:
            UnsupportedError: The training images have positions instead of classes.
        """
        check_fit(seed, folder)
        targets = data.train.targets
        if targets.is_floating_point() or targets.ndim != 1:
            msg = "proxies: the training images have positions and no classes for proxies. Take 'deterministic'."
            raise UnsupportedError(msg)

        check_classes(self.setting, data.train, positives=False)

        def make_step(encoder: nn.Module, probe: Tensor) -> nn.Module:
            return ProxyStep(encoder, probe, targets, self.options)

        step = train(self.setting, data, seed, folder / "training.pt", make_step=make_step)
        learned = {name: value for name, value in step.state_dict().items() if not name.startswith("encoder.")}
        assert isinstance(step, ProxyStep)
        learned["scale"] = step.scale().detach()
        self._take(step.get_submodule("encoder"), {name: value.cpu().clone() for name, value in learned.items()})

    def _take(self, encoder: nn.Module, learned: dict[str, Tensor]) -> None:
        self._scale = float(learned["scale"])
        self._encoder, self._proxies = encoder, {k: v for k, v in learned.items() if k != "scale"}

    def outputs(self, split: Split) -> Tensor:
        """Embeddings in units of their concentration, shape (N, D), on the CPU: raw outputs times the scale."""
        return self._scale * map_batches(self.encoder, split, self.setting, "embeddings")

    def predict(self, split: Split) -> Prediction:
        """Unit embeddings; one over the concentration."""
        z = self.outputs(split)
        return Prediction(unit(z), 1 / z.norm(dim=1))

    def samples(self, split: Split, n_samples: int, seed: int) -> Iterator[Tensor] | None:
        """Draws from each image's own distribution; ``None`` where the distance takes it for none."""
        check_count("n_samples", n_samples)
        fitted(self._encoder, self.name)
        return self._draw(split, n_samples, seed) if self.options.distance in DISTRIBUTION else None

    def _draw(self, split: Split, n_samples: int, seed: int) -> Iterator[Tensor]:
        mu, kappa = vmf.from_embedding(self.outputs(split))
        generator = torch.Generator().manual_seed(seed)
        for _ in range(n_samples):
            yield vmf.sample(mu, kappa, 1, generator)[0]

    def state_dict(self) -> dict[str, Any]:
        """The weights, what was learned beside them, and the distance."""
        own = {**self.proxies, "scale": torch.tensor(self._scale)}
        return {"encoder": dict(self.encoder.state_dict()), "proxies": own, "distance": self.options.distance}

    def load_state_dict(self, state: dict[str, Any], data: RetrievalData) -> None:
        """See :meth:`Method.load_state_dict`.

        Raises:
            InputError: It was trained with another distance.
        """
        check_saved(state, {"distance": self.options.distance})
        encoder = self.setting.make_encoder()
        encoder.load_state_dict(state["encoder"])
        self._take(encoder.eval(), {name: value.cpu() for name, value in state["proxies"].items()})
