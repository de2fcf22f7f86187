"""The folder of a saved posterior: ``config.json``, which names the file of numbers, and a model card."""

from __future__ import annotations

import contextlib
import hashlib
import re
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError
from torch import Tensor

from contrastive_curvature.artifact import VERSION, ArtifactFolder, Header, sha256_of, write_whole
from contrastive_curvature.embedding.known import NOVELTY
from contrastive_curvature.errors import InputError
from contrastive_curvature.io.pretrained.options import About

CONFIG, CARD, NUMBERS = "config.json", "README.md", "posterior-*.safetensors"

_NUMBERS = re.compile(r"posterior-[0-9a-f]{16}\.safetensors")
"""The name has the checksum of the content, so that new numbers never replace those of the present ``config.json``."""

_UNFINISHED = re.compile(rf"\.({CONFIG}|{CARD}|{_NUMBERS.pattern})\.[0-9a-f]{{12}}\.tmp")


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PosteriorInfo(_Model):
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
        score: What p-values are of: ``"novelty"``, ``"uncertainty"`` or the name of a function, perhaps ``by class``.
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
    options: dict[str, Any]
    prior_precision: float | None
    prior_precisions: tuple[int, float, float]
    temperature: float
    typical_norm: float | None
    n_classes: int | None
    calibrated: bool
    n_calibration: int | None
    score: str = NOVELTY
    curvature_error: float | None
    encoder: str
    n_encoder_tensors: int


class PretrainedInfo(_Model):
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
    versions: dict[str, str]
    towers: bool
    shared: bool
    posteriors: tuple[PosteriorInfo, ...]
    match: bool
    metrics: dict[str, float]
    about: dict[str, Any]
    size: int

    def to_plain(self) -> dict[str, Any]:
        """Return the same as strings, numbers, lists and dictionaries, for JSON."""
        return self.model_dump(mode="json")


class SavedPosterior(_Model):
    """One posterior: what is said of it, and what it is made from; states are as :func:`.packed` gives them."""

    info: PosteriorInfo
    arguments: Any
    options: Any
    loss_name: str
    loss_options: Any
    backend: str | None
    encoder: list[tuple[str, str, list[int], str]]
    example_outputs: Any
    state: Any


class NumbersFile(_Model):
    """The file of numbers beside ``config.json``; its name leads nowhere else."""

    name: str = Field(pattern=f"^{_NUMBERS.pattern}$")
    sha256: str
    size: int


class Saved(Header):
    """Everything that is in the folder but the numbers."""

    kind: ClassVar[str] = "pretrained"
    file_name: ClassVar[str] = CONFIG
    described: ClassVar[str] = "a saved posterior"
    made_by: ClassVar[str] = "Name a folder that la.save_pretrained(folder) wrote."
    repaired_by: ClassVar[str] = (
        "Copy or download the folder again, or replace it with la.save_pretrained(folder, overwrite=True)."
    )

    versions: dict[str, str]
    towers: bool
    shared: bool
    posteriors: list[SavedPosterior]
    match: Any
    about: About
    numbers: NumbersFile

    def info(self, folder: Path) -> PretrainedInfo:
        """Return what is said of it."""
        about = self.about.model_dump(exclude_none=True)
        return PretrainedInfo(
            folder=folder,
            format_version=VERSION,
            versions=self.versions,
            towers=self.towers,
            shared=self.shared,
            posteriors=tuple(one.info for one in self.posteriors),
            match=self.match is not None,
            metrics=about.pop("metrics", {}),
            about=about,
            size=self.numbers.size,
        )


def place_of(folder: object, argument: str = "folder") -> ArtifactFolder[Saved]:
    """Return the folder, with ``~`` and all symbolic links followed."""
    return ArtifactFolder(folder, Saved, argument, _NUMBERS)


def check_target(place: ArtifactFolder[Saved], *, overwrite: bool) -> None:
    """Refuse a folder that must not be written, before anything is computed.

    Raises:
        InputError: It holds something else than a saved posterior, or one, and ``overwrite`` is false.
    """
    place.check()
    if not place.exists:
        return
    # A damaged folder has the numbers or the name of the format still.
    if not any(place.path.glob(NUMBERS)) and Saved.format_name().encode() not in place.header_path.read_bytes():
        hint = "Name another folder: this one may hold something that nobody wants to lose."
        received = f"{place.path}, which holds {CONFIG!r} and no saved posterior"
        raise InputError("folder", "a new folder, or one with a saved posterior", received, hint)
    if not overwrite:
        hint = "Pass overwrite=True to replace it, or name another folder."
        received = f"{place.path}, which holds a saved posterior"
        raise InputError("folder", "a new folder", received, hint)


def numbers_file(content: bytes) -> NumbersFile:
    """Return name, checksum and size of the file for these numbers."""
    sha256 = hashlib.sha256(content).hexdigest()
    return NumbersFile(name=f"posterior-{sha256[:16]}.safetensors", sha256=sha256, size=len(content))


def write(place: ArtifactFolder[Saved], saved: Saved, numbers: bytes, card: str, *, overwrite: bool) -> None:
    """Write the folder such that a reader finds the old posterior or the new one, complete.

    The numbers come first, under a name of their own; then ``config.json``, which names them, is replaced in one step.

    Raises:
        InputError: The folder holds by now what must not be replaced.
    """
    place.make(parents=True)
    with place.locked():
        # Somebody else may have saved there since the first check.
        check_target(place, overwrite=overwrite)
        try:
            write_whole(place.path / saved.numbers.name, lambda file: file.write(numbers), follow=False)
            place.write(saved)
        finally:
            _remove_remains(place)
        write_whole(place.path / CARD, lambda file: file.write(card.encode()), follow=False)


def _remove_remains(place: ArtifactFolder[Saved]) -> None:
    """Remove numbers that ``config.json`` does not name, and unfinished files of killed writers."""
    try:
        named = place.read().numbers.name if place.exists else None
    except InputError:
        # It is damaged, or of another release: its numbers may be worth something.
        return
    for path in place.path.iterdir():
        old = _NUMBERS.fullmatch(path.name) and path.name != named
        if old or _UNFINISHED.fullmatch(path.name):
            # A file that cannot be removed does no harm.
            with contextlib.suppress(OSError):
                path.unlink()


def read(folder: Path, *, again: bool = True) -> tuple[Saved, dict[str, Tensor]]:
    """Return what is in a folder, with its tensors on the CPU.

    Raises:
        InputError: A file is missing, foreign, damaged or of another version.
    """
    from safetensors.torch import load_file

    saved = place_of(folder, "source").read()
    path = folder / saved.numbers.name
    try:
        if sha256_of(path) != saved.numbers.sha256:
            Saved.refuse(str(path), "a damaged one: its checksum is another", Saved.repaired_by)
        return saved, load_file(path)
    except SafetensorError:
        Saved.refuse(str(path), "something else", Saved.repaired_by)
    except (FileNotFoundError, IsADirectoryError):
        if again:
            # Somebody may have replaced the posterior between the two files.
            return read(folder, again=False)
        Saved.refuse(str(path), "no such file", Saved.repaired_by)
