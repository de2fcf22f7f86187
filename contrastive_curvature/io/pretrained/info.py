"""What is in a saved posterior, without an encoder and without reading its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from contrastive_curvature.io.pretrained.config import damaged, read_config
from contrastive_curvature.io.pretrained.hub import local_folder
from contrastive_curvature.io.pretrained.layout import CONFIG

__all__ = ["PosteriorInfo", "PretrainedInfo", "info_of", "read_info"]


@dataclass(frozen=True)
class PosteriorInfo:
    """One posterior in a folder.

    Attributes:
        name: ``"encoder"``; of two towers ``"a"`` or ``"b"``.
        kind: Name of its class.
        subset_of_weights: ``"last_layer"``, ``"all"`` or ``"subnetwork"``.
        hessian_structure: ``"diag"``, ``"kron"``, ``"kron_lowrank"``, ``"full"``, ``"lowrank"`` or ``"gp"``.
        dtype: Precision of the encoder, as ``"torch.float32"``.
        n_outputs: Number D of dimensions of an embedding.
        n_params: Number P of weights that the posterior is about.
        n_data: Number of points that it was fitted on.
        loss: The loss with its options.
        needs_loss: Whether ``loss`` has to be given for loading, because its code is not in the folder.
        relation: Name of the relation that has to be given for loading, or None.
        options: Options of the curvature.
        prior_precision: The prior precision, where it is one number; else None.
        prior_precisions: How many there are, the smallest and the largest.
        temperature: Temperature.
        typical_norm: Mean norm of the raw outputs in training, or None.
        n_classes: Number of class centres, or None.
        calibrated: Whether p-values are calibrated.
        n_calibration: With how many inputs, or None.
        curvature_error: Relative standard error of a sampled curvature, or None.
        encoder: Checksum of the weights and buffers of the encoder.
        n_encoder_tensors: Number of these.
    """

    name: str
    kind: str
    subset_of_weights: str
    hessian_structure: str
    dtype: str
    n_outputs: int
    n_params: int
    n_data: int
    loss: str
    needs_loss: bool
    relation: str | None
    options: Mapping[str, Any]
    prior_precision: float | None
    prior_precisions: tuple[int, float, float]
    temperature: float
    typical_norm: float | None
    n_classes: int | None
    calibrated: bool
    n_calibration: int | None
    curvature_error: float | None
    encoder: str
    n_encoder_tensors: int


@dataclass(frozen=True)
class PretrainedInfo:
    """What is in a saved posterior.

    Attributes:
        folder: Where it is.
        format_version: Version of the format.
        versions: Versions of the libraries that wrote it: ``contrastive_curvature``, ``torch``, ``laplace-torch``.
        towers: Whether it is for two towers.
        shared: Whether both towers are one module.
        posteriors: One; of two towers with two modules, two.
        match: Whether a :class:`~contrastive_curvature.MatchProbability` is in it.
        metrics: What was measured, by name.
        about: What else its author said: ``fitted_on``, ``encoder_source``, ``license``, ``evaluated_on``, ...
        size: Bytes of its numbers.
    """

    folder: Path
    format_version: int
    versions: Mapping[str, str]
    towers: bool
    shared: bool
    posteriors: tuple[PosteriorInfo, ...]
    match: bool
    metrics: Mapping[str, float] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    size: int = 0

    def to_plain(self) -> dict[str, Any]:
        """The same as strings, numbers, lists and dictionaries, for JSON."""
        plain = {**asdict(self), "folder": str(self.folder)}
        plain["posteriors"] = [
            {**asdict(one), "prior_precisions": list(one.prior_precisions)} for one in self.posteriors
        ]
        return plain


def read_info(
    source: Path | str,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: Path | str | None = None,
    local_files_only: bool = False,
) -> PretrainedInfo:
    """Read what is in a saved posterior; needs no encoder.

    Args:
        source: The folder, or a repository of the Hugging Face hub, as ``"user/name"``.
        revision: Branch, tag or commit of the repository.
        token: Of the hub.
        cache_dir: Where the hub's files are kept.
        local_files_only: Whether only files that were downloaded before are used.

    Raises:
        InputError: There is no such folder or repository, or its ``config.json`` is missing, damaged, foreign, or of a
            later version.
    """
    folder = local_folder(source, revision, token, cache_dir, local_files_only)
    config = read_config(folder)
    try:
        return info_of(config, folder)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise damaged(folder / CONFIG, f"no such entry, or another type ({error})") from error


def info_of(config: Mapping[str, Any], folder: Path) -> PretrainedInfo:
    """The same from a configuration that is read already."""
    about = dict(config["about"])
    return PretrainedInfo(
        folder=folder,
        format_version=config.get("format_version", 0),
        versions=dict(config["versions"]),
        towers=bool(config["towers"]),
        shared=bool(config["shared"]),
        posteriors=tuple(_posterior(name, one) for name, one in config["posteriors"].items()),
        match=config["match"] is not None,
        metrics=about.pop("metrics", {}),
        about=about,
        size=int(config["tensors"]["bytes"]),
    )


def _posterior(name: str, plain: Mapping[str, Any]) -> PosteriorInfo:
    state, summary = plain["state"], plain["summary"]
    n, least, most = summary["prior_precisions"]
    return PosteriorInfo(
        name=name,
        kind=plain["class"],
        subset_of_weights=plain["subset_of_weights"],
        hessian_structure=plain["structure"],
        dtype=plain["dtype"],
        n_outputs=int(state["n_outputs"]),
        n_params=int(summary["n_params"]),
        n_data=int(state["n_data"]),
        loss=plain["loss"]["text"],
        needs_loss=plain["loss"]["options"] is None,
        relation=plain["relation"],
        options={key: value for key, value in state["contrastive"].items() if key != "loss"},
        prior_precision=summary["prior_precision"],
        prior_precisions=(int(n), float(least), float(most)),
        temperature=float(state["temperature"]),
        typical_norm=state["typical_norm"],
        n_classes=summary["classes"],
        calibrated=state["calibration"] is not None,
        n_calibration=summary["calibration_inputs"],
        curvature_error=state["curvature_error"],
        encoder=plain["encoder"]["digest"],
        n_encoder_tensors=len(plain["encoder"]["tensors"]),
    )
