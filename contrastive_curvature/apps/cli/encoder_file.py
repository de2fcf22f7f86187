"""``encoder.json`` in the folder of a posterior: how its encoder is made again.

For an encoder that is a last layer alone, its weights stand beside it, in ``encoder-<checksum>.safetensors``.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from contrastive_curvature.apps.cli.encoders import LIBRARIES, Encoder, LastLayer, encoder_of, last_layer_encoder
from contrastive_curvature.apps.cli.errors import BadInputError
from contrastive_curvature.artifact import write_whole
from contrastive_curvature.errors import expected
from contrastive_curvature.io.pretrained.layout import CONFIG
from contrastive_curvature.network.given_features import FeatureSource

__all__ = [
    "ENCODER",
    "WEIGHTS",
    "check_trusted",
    "checksum",
    "content_of",
    "read_encoder",
    "read_spec",
    "write_content",
    "write_spec",
    "write_weights",
]

ENCODER = "encoder.json"
_FORMAT, _VERSION = "contrastive_curvature.encoder", 1
_LARGEST = 2**20
"""Bytes of :data:`ENCODER` at most."""

WEIGHTS = re.compile(r"encoder-[0-9a-f]{16}\.safetensors")


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
        check_trusted(spec, folder)
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


def check_trusted(spec: Mapping[str, Any], folder: Path) -> None:
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
    if spec.pop("checksum", None) != checksum(spec):
        raise BadInputError(expected(f"{path}", "the file as fit wrote it", "other content", hint))
    return _spec_of_config(spec, folder)


def _spec_of_config(spec: dict[str, Any], folder: Path) -> dict[str, Any] | None:
    """Of a file that was left while a posterior was replaced, the part for the one that is there."""
    before = spec.pop("before", None)
    if not isinstance(before, dict) or not isinstance(before.get("spec"), (dict, type(None))):
        return spec
    config = content_of(folder / CONFIG)
    if config is None or hashlib.sha256(config).hexdigest() != before.get("config"):
        return spec
    earlier: dict[str, Any] | None = before["spec"]
    return earlier


def write_weights(encoder: Encoder, folder: Path) -> str | None:
    """Write the weights of a last layer that is the whole encoder; the name of the file."""
    if not isinstance(encoder.module, LastLayer):
        return None
    content = _weights(encoder)
    name = f"encoder-{hashlib.sha256(content).hexdigest()[:16]}.safetensors"
    write_whole(folder / name, lambda file: write_content(file, content))
    return name


def write_spec(encoder: Encoder, folder: Path, weights: str | None, before: Mapping[str, Any] | None = None) -> None:
    """Write :data:`ENCODER`; with ``before``, also for the posterior that the folder holds until it is replaced."""
    spec: dict[str, Any] = {"format": _FORMAT, "version": _VERSION, **encoder.spec}
    if weights is not None:
        spec |= {"weights": weights, "sha256": hashlib.sha256(_weights(encoder)).hexdigest()}
    if before is not None:
        spec["before"] = before
    text = json.dumps({**spec, "checksum": checksum(spec)}, indent=1, allow_nan=False) + "\n"
    write_whole(folder / ENCODER, lambda file: write_content(file, text.encode()))


def write_content(file: BinaryIO, content: bytes) -> None:
    """What :func:`.write_whole` calls."""
    file.write(content)


def checksum(spec: Mapping[str, Any]) -> str:
    """Of the file without it."""
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
    if weight.ndim != 2 or bias.shape != weight.shape[:1]:
        came = f"weight {tuple(weight.shape)}, bias {tuple(bias.shape)}"
        raise BadInputError(expected(f"{path}", "a weight (D, F) and a bias (D,)", came, hint))
    return weight.numpy(), bias.numpy()


def content_of(path: Path) -> bytes | None:
    """What is in a file; ``None`` where there is none."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
