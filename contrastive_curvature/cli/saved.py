"""The folder of a posterior that the command line writes: the posterior, and how its encoder is made again.

``la.save_pretrained`` writes the posterior, its options and a model card. Beside them stand ``encoder.json``, and for
an encoder that is a last layer alone its weights, ``encoder-<checksum>.safetensors``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from contrastive_curvature.atomic import write_whole
from contrastive_curvature.cli.encoders import LIBRARIES, Encoder, LastLayer, encoder_of, last_layer_encoder
from contrastive_curvature.cli.errors import BadInputError
from contrastive_curvature.cli.folders import check_writable
from contrastive_curvature.errors import expected
from contrastive_curvature.network.given_features import FeatureSource
from contrastive_curvature.pretrained import load_pretrained
from contrastive_curvature.pretrained.layout import CONFIG

__all__ = ["ENCODER", "check_target", "open_posterior", "read_encoder", "read_spec", "write_posterior"]

ENCODER = "encoder.json"
_FORMAT, _VERSION = "contrastive_curvature.encoder", 1
_LARGEST = 2**20
"""Bytes of :data:`ENCODER` at most."""

_WEIGHTS = re.compile(r"encoder-[0-9a-f]{16}\.safetensors")


def check_target(folder: Path, *, overwrite: bool) -> None:
    """Refuse a folder that cannot or must not be written, before anything is computed.

    Raises:
        BadInputError: It is there and ``--overwrite`` was not given, or it cannot be written.
        InputError: It holds something else than a saved posterior.
    """
    from contrastive_curvature.pretrained.folder import check_target as check
    from contrastive_curvature.pretrained.folder import checked_path

    if (folder / "config.json").exists() and not overwrite:
        hint = "Give --overwrite to replace it, or another folder."
        raise BadInputError(expected(f"--out {folder}", "a new folder", "one that holds a saved posterior", hint))
    target = checked_path(folder)
    check(target, overwrite=overwrite)
    check_writable(folder, target)


def write_posterior(la: Any, encoder: Encoder, folder: Path, *, overwrite: bool, about: Mapping[str, Any]) -> None:
    """Write a fitted posterior with what is needed to use it without the fit's arguments.

    A new folder appears whole or not at all. In one that is there, the posterior is replaced in one step, and files
    that are not of a posterior stay.

    Args:
        la: The posterior.
        encoder: What it was fitted around.
        folder: From the user, seen by :func:`check_target`.
        overwrite: Whether a saved posterior may be replaced.
        about: Of the data and the encoder, for the model card.

    Raises:
        InputError: The folder cannot be written.
    """
    from contrastive_curvature.pretrained.folder import checked_path

    target = checked_path(folder)
    if target.exists() and os.listdir(target):
        _replace(la, encoder, target, overwrite, about)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    made = target.parent / f".{target.name}.{secrets.token_hex(6)}.tmp"
    made.mkdir()
    try:
        # The model card tells the folder's name.
        inner = made / target.name
        la.save_pretrained(inner, **about)
        _write_spec(encoder, inner, _write_weights(encoder, inner))
        os.rename(inner, target)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _replace(la: Any, encoder: Encoder, target: Path, overwrite: bool, about: Mapping[str, Any]) -> None:
    """Replace the posterior in a folder: ``config.json`` decides which one is there, and with it, which encoder."""
    names, config = set(os.listdir(target)), _content(target / CONFIG)
    kept = _content(target / ENCODER)
    try:
        earlier = read_spec(target)
    except BadInputError:
        earlier = None
    before = None if config is None else {"config": hashlib.sha256(config).hexdigest(), "spec": earlier}
    weights: str | None = None
    try:
        weights = _write_weights(encoder, target)
        _write_spec(encoder, target, weights, before)
        la.save_pretrained(target, overwrite=overwrite, **about)
    except BaseException:
        if _content(target / CONFIG) == config:
            # Where this fails too, the file says both.
            with contextlib.suppress(OSError):
                _put_back(target, kept)
                if weights is not None and weights not in names:
                    os.unlink(target / weights)
        raise
    # The new posterior is there. What cannot be tidied up does no harm.
    with contextlib.suppress(OSError):
        _write_spec(encoder, target, weights)
        for name in names - {weights}:
            if _WEIGHTS.fullmatch(name):
                os.unlink(target / name)


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _put_back(target: Path, kept: bytes | None) -> None:
    if kept is not None:
        write_whole(target / ENCODER, lambda file: _write(file, kept))
    elif (target / ENCODER).exists():
        os.unlink(target / ENCODER)


def open_posterior(
    folder: Path,
    encoder: str | None = None,
    options: Mapping[str, Any] | None = None,
    device: str = "cpu",
    note: Callable[[str], None] | None = None,
) -> tuple[Any, Encoder]:
    """A saved posterior and its encoder.

    Args:
        folder: What ``fit`` or ``la.save_pretrained`` wrote.
        encoder: ``--encoder``, in place of the one that the folder names.
        options: ``--encoder-options``.
        device: Of the computation.
        note: Takes a line that names the encoder, before it is made.

    Raises:
        BadInputError: The folder is missing, names no encoder and none is given, or names code of its user and that
            is not given.
        InputError: The folder is damaged, of a later version, or of another encoder.
    """
    if not folder.is_dir():
        hint = "contrastive-curvature fit writes one."
        raise BadInputError(expected(f"{folder}", "the folder of a saved posterior", "a path where none is", hint))
    if encoder is None and options:
        raise BadInputError(expected("--encoder-options", "them with --encoder", "no encoder"))
    spec = (read_spec(folder) or {}) if encoder is None or not options else {}
    if encoder is not None and not options and spec.get("encoder") == encoder and isinstance(spec.get("options"), dict):
        options = spec["options"]
    named = spec.get("encoder") if encoder is None else encoder
    if encoder is None:
        _check_trusted(spec, folder)
    if note is not None and named is not None:
        note(f"encoder {named}" + (f", as {folder} names it" if encoder is None else ""))
    found = read_encoder(folder) if encoder is None else encoder_of(encoder, options)
    if found is None:
        hint = "Give --encoder module:function, timm:NAME or sentence-transformers:NAME."
        raise BadInputError(expected(f"{folder}", f"an {ENCODER} that names the encoder", "none", hint))
    found.module.to(device).eval()
    la = load_pretrained(folder, encoder=found.module)
    return la, found


def read_encoder(folder: Path) -> Encoder | None:
    """The encoder that a folder names, made again; ``None`` where it names none.

    Raises:
        BadInputError: What it says is damaged or of a later version, or it names code, which only the user may run.
    """
    spec = read_spec(folder)
    if spec is None:
        return None
    path = folder / ENCODER
    if spec.get("kind") == "encoder" and isinstance(spec.get("encoder"), str):
        _check_trusted(spec, folder)
        options = spec.get("options")
        return encoder_of(spec["encoder"], options if isinstance(options, dict) else {})
    if spec.get("kind") != "last_layer":
        raise BadInputError(
            expected(f"{path}", "an encoder that this version makes", f"{str(spec.get('kind'))[:40]!r}")
        )
    weight, bias = _read_weights(folder, str(spec.get("weights")), str(spec.get("sha256")))
    of = spec.get("features_of")
    source = None if of is None else FeatureSource.of_plain(of, f"{path}: features_of")
    encoder = last_layer_encoder(weight, bias, weight.shape[1], source)
    return Encoder(**{**encoder.__dict__, "spec": {**encoder.spec, "identity": spec.get("identity") is True}})


def _check_trusted(spec: Mapping[str, Any], folder: Path) -> None:
    """Refuse to make an encoder that runs code which the user has not named.

    Raises:
        BadInputError: A folder, which may come from anybody, names it.
    """
    named, path = spec.get("encoder"), folder / ENCODER
    if spec.get("kind") != "encoder" or not isinstance(named, str):
        return
    if named.partition(":")[0] not in LIBRARIES:
        hint = f"If you trust that code, run it with: --encoder {named}"
        wanted = "it to be given, since the folder names code and code runs at your word only"
        raise BadInputError(expected("--encoder", wanted, f"none ({path} names {named})", hint))
    if "trust_remote_code" in json.dumps(spec.get("options")):
        hint = f"Give --encoder {named} and --encoder-options yourself, if you trust it."
        raise BadInputError(expected(f"{path}", "an encoder without code of its own", "trust_remote_code", hint))


def read_spec(folder: Path) -> dict[str, Any] | None:
    """What :data:`ENCODER` says; ``None`` where it is missing.

    Raises:
        BadInputError: It is damaged, foreign or of a later version.
    """
    path = folder / ENCODER
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST + 1)
    except FileNotFoundError:
        return None
    hint = "Copy the folder again, or fit again with --overwrite."
    try:
        spec = json.loads(content)
    except (ValueError, RecursionError):
        spec = None
    if not isinstance(spec, dict) or spec.get("format") != _FORMAT or type(spec.get("version")) is not int:
        raise BadInputError(expected(f"{path}", "what fit wrote", "something else, or a part of it", hint))
    if spec["version"] > _VERSION:
        hint = "Update with: pip install -U contrastive-curvature"
        raise BadInputError(expected(f"{path}", f"version {_VERSION} or lower", f"{spec['version']}", hint))
    if spec.pop("checksum", None) != _checksum(spec):
        raise BadInputError(expected(f"{path}", "the file as fit wrote it", "other content", hint))
    return _spec_of_config(spec, folder)


def _spec_of_config(spec: dict[str, Any], folder: Path) -> dict[str, Any] | None:
    """Of a file that was left while a posterior was replaced, the part for the one that is there."""
    before = spec.pop("before", None)
    if not isinstance(before, dict) or not isinstance(before.get("spec"), (dict, type(None))):
        return spec
    config = _content(folder / CONFIG)
    if config is None or hashlib.sha256(config).hexdigest() != before.get("config"):
        return spec
    earlier: dict[str, Any] | None = before["spec"]
    return earlier


def _write_weights(encoder: Encoder, folder: Path) -> str | None:
    """Write the weights of a last layer that is the whole encoder; the name of the file."""
    if not isinstance(encoder.module, LastLayer):
        return None
    content = _weights(encoder)
    name = f"encoder-{hashlib.sha256(content).hexdigest()[:16]}.safetensors"
    write_whole(folder / name, lambda file: _write(file, content))
    return name


def _write_spec(encoder: Encoder, folder: Path, weights: str | None, before: Mapping[str, Any] | None = None) -> None:
    """Write :data:`ENCODER`; with ``before``, also for the posterior that the folder holds until it is replaced."""
    spec: dict[str, Any] = {"format": _FORMAT, "version": _VERSION, **encoder.spec}
    if weights is not None:
        spec |= {"weights": weights, "sha256": hashlib.sha256(_weights(encoder)).hexdigest()}
    if before is not None:
        spec["before"] = before
    text = json.dumps({**spec, "checksum": _checksum(spec)}, indent=1, allow_nan=False) + "\n"
    write_whole(folder / ENCODER, lambda file: _write(file, text.encode()))


def _write(file: BinaryIO, content: bytes) -> None:
    file.write(content)


def _checksum(spec: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()


def _weights(encoder: Encoder) -> bytes:
    from safetensors.torch import save

    layer: Any = encoder.module
    return save({"weight": layer.weight.detach().cpu().contiguous(), "bias": layer.bias.detach().cpu().contiguous()})


def _read_weights(folder: Path, name: str, sha256: str) -> tuple[Any, Any]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    path = folder / Path(name).name
    hint = "Copy the folder again, or fit again with --overwrite."
    try:
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != sha256:
            raise BadInputError(expected(f"{path}", "the file as fit wrote it", "other content", hint))
        tensors = load(content)
        weight, bias = tensors["weight"].float(), tensors["bias"].float()
    except FileNotFoundError as error:
        raise BadInputError(expected(f"{path}", "the weights of the last layer", "no such file", hint)) from error
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise BadInputError(expected(f"{path}", "the weights of the last layer", f"{error}", hint)) from error
    assert torch.is_tensor(weight)
    return weight.numpy(), bias.numpy()
