"""The folder of a posterior that the command line writes: the posterior, and a description to rebuild its encoder.

``la.save_pretrained`` writes the posterior, its options and a model card. ``encoder-<checksum>.safetensors`` is the
encoder: its name and options in the metadata, or the weights of a last layer alone. The checksum is that of the
encoder's weights in the file of the posterior, so that a posterior finds its own encoder also where the process was
killed while another posterior took its place.
"""

from __future__ import annotations

import json
import os
import tempfile
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from contrastive_curvature.apps.cli.console import Job
from contrastive_curvature.apps.cli.encoders import (
    LIBRARIES,
    NO_ENCODER,
    Encoder,
    check_device,
    encoder_of,
    last_layer_encoder,
    use,
)
from contrastive_curvature.apps.cli.sources import Source
from contrastive_curvature.artifact import Header, folder_path, read_tensors, target_folder, write_tensors
from contrastive_curvature.errors import InputError
from contrastive_curvature.io.pretrained import load_pretrained, read_info
from contrastive_curvature.io.pretrained.save import FILE, Saved
from contrastive_curvature.network.digest import encoder_digest
from contrastive_curvature.network.given_features import FeatureSource
from contrastive_curvature.retriever.retriever import Retriever
from contrastive_curvature.retriever.saved import ARRAYS, POSTERIOR, RetrieverHeader


class EncoderFile(Header):
    """Description to rebuild the encoder of a saved posterior, and the classes of its fit.

    Only digests of class names are kept, because they may be names of persons.
    """

    kind: ClassVar[str] = "encoder"
    described: ClassVar[str] = "the encoder that fit wrote"
    repaired_by: ClassVar[str] = "Copy the folder again, or fit again with --overwrite."

    spec: dict[str, Any]
    classes: list[str] | None = None


def holds_retriever(folder: Path) -> bool:
    """Return whether a folder holds a saved retriever; its posterior is in the subfolder ``posterior``."""
    return (folder / ARRAYS).exists()


def check_target(folder: Path, *, overwrite: bool, retriever: bool = False) -> None:
    """Refuse a folder that cannot or must not be written, before anything is computed."""
    file, described = (ARRAYS, RetrieverHeader.described) if retriever else (FILE, Saved.described)
    check_writable(
        target_folder(f"--out {folder}", folder, file, described, overwrite=overwrite, how="Give --overwrite")
    )


def check_writable(folder: Path) -> None:
    """Refuse a folder that cannot be created or written."""
    above = next(path for path in (folder, *folder.parents) if path.exists())
    # Only a trial detects a file system without folders or without long names. Writers use such names too.
    os.rmdir(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=above))


def write_posterior(fitted: Any, encoder: Encoder, folder: Path, *, overwrite: bool, about: Mapping[str, Any]) -> None:
    """Write a fitted posterior or retriever that can be used without the arguments of the fit.

    A new folder appears complete or not at all. In an existing folder, the posterior is replaced in one step, and other
    files stay.

    Args:
        fitted: The posterior, or the retriever; the retriever's posterior goes to a subfolder.
        encoder: The encoder of the fit.
        folder: The user's folder, already checked by :func:`check_target`.
        overwrite: Whether a saved posterior may be replaced.
        about: Entries about data and encoder, for the model card.
    """
    target = folder_path("--out", folder)
    if isinstance(fitted, Retriever):
        save, inside, module = fitted.save, POSTERIOR, fitted._head or encoder.module
    else:
        save, inside, module = fitted.save_pretrained, "", encoder.module
    digest = encoder_digest(module)
    if target.exists() and os.listdir(target):
        # Write the file of the new encoder first: it replaces no file that the old posterior needs.
        kept = _write_encoder(encoder, target / inside, digest)
        save(target, overwrite=overwrite, **about)
        for other in set(kept.parent.glob("encoder-*.safetensors")) - {kept}:
            other.unlink()
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as unfinished:
        whole = Path(unfinished) / target.name  # the model card contains the folder's name
        save(whole, **about)
        _write_encoder(encoder, whole / inside, digest)
        os.rename(whole, target)


def _write_encoder(encoder: Encoder, folder: Path, digest: str) -> Path:
    path = _encoder_file(folder, digest)
    weights = dict(encoder.module.named_parameters()) if encoder.width is not None else {}
    write_tensors(path, EncoderFile(spec=dict(encoder.spec), classes=encoder.classes), weights, follow=False)
    return path


def _encoder_file(folder: Path, digest: str) -> Path:
    return folder / f"encoder-{digest}.safetensors"


def read_encoder(folder: Path) -> tuple[EncoderFile | None, dict[str, Tensor]]:
    """Return the description of a saved posterior's encoder (``None`` if missing), and the weights of a last layer."""
    path = _encoder_file(folder, read_info(folder).posteriors[0].encoder)
    return read_tensors(path, EncoderFile) if path.exists() else (None, {})


def opened(job: Job) -> tuple[Any, Encoder]:
    """Call :func:`open_posterior` with the options of a command."""
    options = job.options
    return open_posterior(options.folder, job.sources, options.encoder, options.encoder_options, options.device)


def opened_retriever(job: Job) -> tuple[Retriever, Encoder]:
    """Return the retriever in the folder of a command and its encoder."""
    if not holds_retriever(job.options.folder):
        hint = "contrastive-curvature fit SOURCE --held-out HELD_OUT --out FOLDER writes one."
        raise InputError(f"{job.options.folder}", "a saved retriever", f"no {ARRAYS} in it", hint)
    return opened(job)


def open_posterior(
    folder: Path,
    sources: Mapping[str, Source] = types.MappingProxyType({}),
    encoder: str | None = None,
    encoder_options: Mapping[str, Any] | None = None,
    device: str = "cpu",
) -> tuple[Any, Encoder]:
    """Return a saved posterior or retriever and its encoder, and prepare the sources for the encoder.

    Args:
        folder: Folder of ``fit``, ``la.save_pretrained`` or ``retriever.save``.
        sources: Inputs of the encoder.
        encoder: ``--encoder``, which replaces the encoder that the folder names.
        encoder_options: ``--encoder-options``; the default for the folder's encoder is the saved options.
        device: Device of the computation.
    """
    check_device(device)
    if encoder is None and encoder_options:
        raise InputError("--encoder-options", "them with --encoder", "no encoder")
    load: Callable[..., Any] = Retriever.load if holds_retriever(folder) else load_pretrained
    header, weights = read_encoder(folder / POSTERIOR if holds_retriever(folder) else folder)
    spec = {} if header is None else header.spec
    if encoder is not None:
        if encoder_options is None:
            encoder_options = spec["options"] if spec.get("encoder") == encoder else {}
        made = encoder_of(encoder, encoder_options)
    elif header is None:
        raise InputError(f"{folder}", "a posterior with its encoder", "one without", NO_ENCODER)
    elif spec["encoder"] is not None:
        _check_trusted(spec, folder)
        made = encoder_of(spec["encoder"], spec["options"])
    else:
        weight, bias = (weights[name].numpy() for name in ("weight", "bias"))
        source = None if spec["features_of"] is None else FeatureSource.of_plain(spec["features_of"])
        made = last_layer_encoder(weight, bias, width=weight.shape[1], identity=spec["identity"], source=source)
    made.classes = None if header is None else header.classes
    use(made, sources, device)
    return load(folder, encoder=made.module), made


def _check_trusted(spec: Mapping[str, Any], folder: Path) -> None:
    """Refuse to run code that only the folder names, not the user, because a folder may come from anybody."""
    named = spec["encoder"]
    if named.partition(":")[0] not in LIBRARIES:
        hint = f"If you trust that code, run it with: --encoder {named}"
        wanted = "it to be given, since the folder names code and code runs at your word only"
        raise InputError("--encoder", wanted, f"none ({folder} names {named})", hint)
    if "trust_remote_code" in json.dumps(spec["options"]):
        hint = f"Give --encoder {named} and --encoder-options yourself, if you trust it."
        raise InputError(f"{folder}", "an encoder without code of its own", "trust_remote_code", hint)
