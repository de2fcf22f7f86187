"""The folder of a posterior that the command line writes: the posterior, and how its encoder is made again.

``la.save_pretrained`` writes the posterior, its options and a model card. ``encoder-<checksum>.safetensors`` is the
encoder: its name and options in the metadata, or the weights of a last layer alone. The checksum is that of the
encoder's weights in ``config.json``, so that a posterior finds its own encoder also where the process was killed while
another posterior took its place.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from numpy.typing import NDArray

from contrastive_curvature.apps.cli.console import BadInputError
from contrastive_curvature.apps.cli.encoders import LIBRARIES, Encoder, check_device, encoder_of, last_layer_encoder
from contrastive_curvature.apps.cli.outputs import check_writable
from contrastive_curvature.apps.cli.sources import Source
from contrastive_curvature.artifact import Header, read_tensors, write_tensors
from contrastive_curvature.errors import ContrastiveCurvatureError
from contrastive_curvature.io.pretrained import folder as posterior_folder
from contrastive_curvature.io.pretrained import load_pretrained, read_info
from contrastive_curvature.network.digest import encoder_digest
from contrastive_curvature.network.given_features import FeatureSource
from contrastive_curvature.retriever.retriever import Retriever


class EncoderFile(Header):
    """How the encoder of a saved posterior is made again, and which classes it was fitted on.

    Of names of classes, which may be those of persons, digests are kept.
    """

    kind: ClassVar[str] = "encoder"
    described: ClassVar[str] = "the encoder that fit wrote"
    repaired_by: ClassVar[str] = "Copy the folder again, or fit again with --overwrite."

    spec: dict[str, Any]
    classes: list[str] | None = None


def holds_retriever(folder: Path) -> bool:
    """Return whether a folder holds a saved retriever, whose posterior is in the folder ``posterior`` inside it."""
    return (folder / "retriever.safetensors").exists()


def check_target(folder: Path, *, overwrite: bool, retriever: bool = False) -> None:
    """Refuse a folder that cannot or must not be written, before anything is computed."""
    there = holds_retriever(folder)
    if (there or (folder / "config.json").exists()) and not overwrite:
        hint = "Give --overwrite to replace it, or another folder."
        holds = f"one that holds a saved {'retriever' if there else 'posterior'}"
        raise BadInputError(f"--out {folder}", "a new folder", holds, hint)
    if there != retriever and folder.is_dir() and os.listdir(folder) and (there or retriever):
        wanted = f"a new folder, or one with a {'retriever' if retriever else 'posterior'}"
        raise BadInputError(f"--out {folder}", wanted, "a folder with other files", "Name another folder.")
    place = posterior_folder.place_of(folder / "posterior" if retriever else folder)
    posterior_folder.check_target(place, overwrite=overwrite)
    check_writable(folder, place.path)


def write_posterior(fitted: Any, encoder: Encoder, folder: Path, *, overwrite: bool, about: Mapping[str, Any]) -> None:
    """Write a fitted posterior or retriever with what is needed to use it without the fit's arguments.

    A new folder appears whole or not at all. In one that is there, the posterior is replaced in one step, and files
    that are not of a posterior stay.

    Args:
        fitted: The posterior, or the retriever, whose posterior is in a folder inside its own.
        encoder: What it was fitted around.
        folder: From the user, seen by :func:`check_target`.
        overwrite: Whether a saved posterior may be replaced.
        about: Of the data and the encoder, for the model card.
    """
    target = posterior_folder.place_of(folder).path
    save, inside = (fitted.save, "posterior") if isinstance(fitted, Retriever) else (fitted.save_pretrained, "")
    if target.exists() and os.listdir(target):
        place = target / inside
        try:
            _write_encoder(encoder, place)
            save(target, overwrite=overwrite, **about)
        finally:
            # What cannot be tidied up does no harm.
            with contextlib.suppress(OSError, ContrastiveCurvatureError):
                kept = _encoder_file(place, read_info(place).posteriors[0].encoder)
                for other in set(place.glob("encoder-*.safetensors")) - {kept}:
                    other.unlink()
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    made = target.parent / f".{target.name}.{secrets.token_hex(6)}.tmp"
    made.mkdir()
    try:
        inner = made / target.name  # the model card tells the folder's name
        save(inner, **about)
        _write_encoder(encoder, inner / inside)
        os.rename(inner, target)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def open_posterior(
    folder: Path,
    sources: Mapping[str, Source] = types.MappingProxyType({}),
    encoder: str | None = None,
    encoder_options: Mapping[str, Any] | None = None,
    device: str = "cpu",
    note: Callable[[str], None] | None = None,
) -> tuple[Any, Encoder]:
    """Return a saved posterior or retriever and its encoder, for which the sources are prepared.

    Args:
        folder: What ``fit``, ``la.save_pretrained`` or ``retriever.save`` wrote.
        sources: Inputs of the encoder.
        encoder: ``--encoder``, in place of the one that the folder names.
        encoder_options: ``--encoder-options``; for the encoder that the folder names, its own by default.
        device: Of the computation.
        note: Takes a line that names the encoder, before it is made.
    """
    check_device(device)
    load: Callable[..., Any] = load_pretrained
    whole = folder
    if holds_retriever(folder):
        load, folder = Retriever.load, folder / "posterior"
    if encoder is None and encoder_options:
        raise BadInputError("--encoder-options", "them with --encoder", "no encoder")
    spec, weights = (None, {}) if encoder_options else read_encoder(folder)
    if encoder is not None:
        if note is not None:
            note(f"encoder {encoder}")
        if spec is not None and spec["encoder"] == encoder:
            encoder_options = spec["options"]
        found = encoder_of(encoder, encoder_options or {})
    elif spec is None:
        hint = "Give --encoder module:function, timm:NAME or sentence-transformers:NAME."
        raise BadInputError(f"{folder}", "a posterior with its encoder", "one without", hint)
    elif spec["encoder"] is not None:
        _check_trusted(spec, folder)
        if note is not None:
            note(f"encoder {spec['encoder']}, as {folder} names it")
        found = encoder_of(spec["encoder"], spec["options"])
    else:
        of = spec["features_of"]
        source = None if of is None else FeatureSource.of_plain(of)
        weight, identity = weights["weight"], spec["identity"]
        found = last_layer_encoder(weight, weights["bias"], width=weight.shape[1], identity=identity, source=source)
    found.module.to(device).eval()
    path = _encoder_file(folder, read_info(folder).posteriors[0].encoder)
    found.classes = read_tensors(path, EncoderFile)[0].classes if path.exists() else None
    fitted = load(whole, encoder=found.module)
    for inputs in sources.values():
        inputs.prepare(found)
    return fitted, found


def read_encoder(folder: Path) -> tuple[dict[str, Any] | None, dict[str, NDArray[Any]]]:
    """Return how the encoder of a saved posterior is made (``None``: nothing says), and the weights of a last layer."""
    path = _encoder_file(folder, read_info(folder).posteriors[0].encoder)
    if not path.exists():
        return None, {}
    header, weights = read_tensors(path, EncoderFile)
    return header.spec, {name: weight.numpy() for name, weight in weights.items()}


def _write_encoder(encoder: Encoder, folder: Path) -> None:
    weights = dict(encoder.module.named_parameters()) if encoder.width is not None else {}
    header = EncoderFile(spec=dict(encoder.spec), classes=encoder.classes)
    write_tensors(_encoder_file(folder, encoder_digest(encoder.module)), header, weights, follow=False)


def _encoder_file(folder: Path, digest: str) -> Path:
    return folder / f"encoder-{digest}.safetensors"


def _check_trusted(spec: Mapping[str, Any], folder: Path) -> None:
    """Refuse to run code that a folder names, which may come from anybody, and the user has not."""
    named = spec["encoder"]
    if named.partition(":")[0] not in LIBRARIES:
        hint = f"If you trust that code, run it with: --encoder {named}"
        wanted = "it to be given, since the folder names code and code runs at your word only"
        raise BadInputError("--encoder", wanted, f"none ({folder} names {named})", hint)
    if "trust_remote_code" in json.dumps(spec["options"]):
        hint = f"Give --encoder {named} and --encoder-options yourself, if you trust it."
        raise BadInputError(f"{folder}", "an encoder without code of its own", "trust_remote_code", hint)
