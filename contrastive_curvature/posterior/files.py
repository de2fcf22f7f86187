"""A posterior as a tree of tensors and plain values, and back: keys, dtypes, shapes and finite numbers are checked.

``torch.load(..., weights_only=True)`` runs no code, but does not check the content of the file.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Never

import torch
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.codec import from_tree
from contrastive_curvature.embedding.known import Calibration, Reference, TrainingGaussians, statistic_name
from contrastive_curvature.embedding.score import Score
from contrastive_curvature.errors import InputError
from contrastive_curvature.fit.class_centres import ClassCentres
from contrastive_curvature.posterior.predict import LinearizedEncoder, parameters_of
from contrastive_curvature.posterior.value import Fitted, Posterior, Prior
from contrastive_curvature.structures import Structure
from contrastive_curvature.structures.structure import Room

KEYS: dict[str, Any] = {
    "mean": Tensor,
    "curvature": dict,
    "loss": Tensor,
    "cost": float,
    "prior_mean": Tensor,
    "prior_precision": Tensor,
    "prior_chosen": bool,
    "temperature": float,
    "keeps_temperature": bool,
    "n_data": int,
    "n_outputs": int,
    "encoder": Tensor,
    "calibration": (dict, type(None)),
    "refusal": (str, type(None)),
    "typical_norm": (float, type(None)),
    "class_centres": (dict, type(None)),
}
"""Keys of a posterior in a state, and types of their values."""

_CALIBRATION = (Calibration, Reference, Score, TrainingGaussians)


def entries(posterior: Posterior, last_layer: bool) -> dict[str, Any]:
    """Return everything that a posterior holds but the sample of training inputs, by the names of :data:`KEYS`."""
    fitted, prior = posterior.fitted, posterior.prior
    values = (
        *(fitted.mean, fitted.curvature, fitted.loss, fitted.cost),
        *(
            prior.mean,
            prior.precision,
            prior.chosen,
            validate.without_graph(prior.temperature),
            prior.keeps_temperature,
        ),
        *(fitted.n, fitted.dim, fitted.encoder, _saved_calibration(posterior.calibration, last_layer)),
        *(posterior.refusal, fitted.typical_norm, fitted.classes),
    )
    return dict(zip(KEYS, values, strict=True))


def posterior_of(
    state: Mapping[str, Any], structure: type[Structure], read: LinearizedEncoder, like: Tensor
) -> Posterior:
    """Return the posterior of :func:`entries` for an encoder; tensors must have the dtype and device of ``like``."""
    n_params = sum(p.numel() for p in parameters_of(read.model, read.last_layer))
    _check_settings(state, like, n_params)
    width, dim = read.model.last_layer.in_features if read.last_layer else None, state["n_outputs"]
    parameters, rank = read.parameters, read.backend.options.rank
    fitted = Fitted(
        curvature=_loaded_curvature(state["curvature"], structure, Room(parameters, rank), like),
        mean=state["mean"],
        sizes=[p.numel() for p in parameters],
        rank=rank,
        subnetwork=read.subnetwork,
        dim=dim,
        n=state["n_data"],
        loss=state["loss"],
        cost=state["cost"],
        typical_norm=state["typical_norm"],
        encoder=_check_tensor("encoder", state["encoder"], state["encoder"], (4,), torch.float64).cpu(),
        classes=_loaded_classes(state["class_centres"], dim, like),
    )
    prior = Prior(
        *(state[name] for name in ("prior_precision", "prior_mean", "temperature", "prior_chosen", "keeps_temperature"))
    )
    calibration = _loaded_calibration(state["calibration"], width, dim, like)
    # A curvature that cannot be decomposed is refused here.
    _ = fitted.clamped
    return Posterior(fitted, prior, calibration, None if calibration is None else state["refusal"])


def _loaded_curvature(saved: Mapping[str, Any], structure: type[Structure], room: Room, like: Tensor) -> Structure:
    """Return the curvature of a state; its tensors must have the shapes that the weights of the encoder need."""
    curvature: Structure = from_tree("state_dict['curvature']", saved, [structure])
    try:
        shapes = curvature.shapes(room)
    except (TypeError, AttributeError, IndexError) as error:
        refuse("curvature", f"the fields of {structure.name!r}", f"others ({error})")
    _check_shapes("curvature", saved, like, shapes)
    return curvature


def refuse(key: str, wanted: str, got: object, instead: str = "") -> Never:
    """Raise the error of a malformed state, which names the key."""
    raise InputError(f"state_dict[{key!r}]", wanted, got, instead) from None


def _check_settings(state: Mapping[str, Any], like: Tensor, n_params: int) -> None:
    """Check everything but the curvature, for an encoder with a parameter ``like``.

    The setters of the prior check its numbers and shapes.
    """
    _check_tensor("mean", state["mean"], like, (n_params,))
    for name in ("prior_mean", "prior_precision"):
        _check_tensor(name, state[name], like, None)
    if state["n_data"] < 1 or state["n_outputs"] < 1:
        refuse("n_data, n_outputs", "positive whole numbers", f"{state['n_data']}, {state['n_outputs']}")
    for key, least in (("loss", -math.inf), ("cost", 0), ("typical_norm", 0)):
        number = 0.0 if state[key] is None else float(state[key])
        if not math.isfinite(number) or number < least:
            refuse(key, "one finite number" if least else "a number that is not negative", number)


def _check_shapes(key: str, value: Any, like: Tensor, shapes: Any, dtype: torch.dtype | None = None) -> None:
    """Refuse a value whose tensors do not have these shapes, in the same lists or under the same names.

    A shape is a tuple, or a dtype for a single number of this dtype.
    """
    if isinstance(shapes, torch.dtype):
        _check_tensor(key, value, like, (), shapes)
    elif isinstance(shapes, tuple):
        _check_tensor(key, value, like, shapes, dtype)
    elif isinstance(shapes, dict):
        for name, shape in shapes.items():
            _check_shapes(key, value[name], like, shape, dtype)
    elif isinstance(shapes, list):
        if not isinstance(value, (list, tuple)) or len(value) != len(shapes):
            refuse(key, f"{len(shapes)} parts", kind_of(value))
        for part, shape in zip(value, shapes, strict=True):
            _check_shapes(key, part, like, shape, dtype)


def _check_tensor(
    key: str, value: Any, like: Tensor, shape: tuple[int | None, ...] | None, dtype: torch.dtype | None = None
) -> Tensor:
    """Return a finite tensor of this shape and dtype (default: dtype of ``like``), on the device of ``like``."""
    wanted = "a tensor" if shape is None else f"a tensor of shape {shape}".replace("None", "*")
    if not isinstance(value, Tensor):
        refuse(key, wanted, kind_of(value))
    if shape is not None:
        got = tuple(value.shape)
        if len(got) != len(shape) or any(n is not None and n != m for n, m in zip(shape, got, strict=True)):
            refuse(key, wanted, f"shape {got}", "The encoder must be the one that the posterior was saved from.")
    if value.dtype != (dtype or like.dtype):
        hint = "Bring the encoder to the precision of the posterior."
        refuse(key, f"{dtype or like.dtype}", f"{value.dtype}", hint)
    if value.device != like.device:
        hint = f"Read the file with torch.load(..., map_location={str(like.device)!r})."
        refuse(key, f"a tensor on device {like.device}", f"one on {value.device}", hint)
    if not bool(value.detach().isfinite().all()):
        refuse(key, "finite numbers", "NaN or infinity")
    return value.detach()


def _saved_calibration(calibration: Calibration | None, with_features: bool) -> dict[str, Any] | None:
    """Return a calibration with the name of its statistic.

    The sample of training inputs is not saved, because the file of a posterior should not hold features of training
    data. The file does hold the mean of the sample's outputs, and transformed class means of features over two or more
    inputs.
    """
    if calibration is None:
        return None
    gaussians = calibration.gaussians
    distances = 0 if gaussians is None else gaussians.n_distances
    return {"statistic": statistic_name(with_features, calibration.score.name, distances), "calibration": calibration}


def _loaded_calibration(
    saved: Mapping[str, Any] | None, width: int | None, n_outputs: int, like: Tensor
) -> Calibration | None:
    """Return the calibration of a state; ``width`` is the dimension of the features, ``None`` without features."""
    if saved is None:
        return None
    if set(saved) != {"statistic", "calibration"}:
        refuse("calibration", "None, or a dictionary of statistic, calibration", f"the keys {sorted(saved)}")
    calibration = from_tree("state_dict['calibration']", saved["calibration"], _CALIBRATION)
    if not isinstance(calibration, Calibration):
        refuse("calibration", "a Calibration", kind_of(calibration))
    reference, score, gaussians = calibration.reference, calibration.score, calibration.gaussians
    kinds = (reference, Reference), (score, Score), (gaussians, TrainingGaussians | None)
    if not all(isinstance(part, kind) for part, kind in kinds):
        refuse("calibration", "a Reference, a Score and TrainingGaussians", "others")
    distances = 0 if gaussians is None else gaussians.n_distances
    if saved["statistic"] != statistic_name(width is not None, score.name, distances):
        msg = (
            f"state_dict['calibration']: it is of another statistic ({saved['statistic']!r}), which another version of "
            "this library used, so it is left out. Call la.calibrate(loader) again."
        )
        warnings.warn(msg, UserWarning, stacklevel=4)
        return None
    size = (3 + distances,)
    shapes = {"statistics": (None,), "location": size, "scale": size}
    _check_shapes("calibration", vars(reference), like, shapes, torch.float64)
    if not len(reference.statistics) or bool((reference.scale <= 0).any()):
        refuse("calibration", "statistics, and positive scales", "none, or others")
    if reference.counts is not None:
        counts = _check_tensor("calibration", reference.counts, like, (None,), torch.int64)
        if bool((counts < 0).any()) or int(counts.sum()) != len(reference.statistics):
            refuse("calibration", "counts of all statistics", "others")
    if gaussians is not None:
        _check_gaussians(gaussians, width, n_outputs, like)

    def numbers(value: Tensor, length: int) -> Tensor:
        return _check_tensor("calibration", value, value, (length,), torch.float64).cpu()

    marks, probe = (None if value is None else numbers(value, n) for value, n in ((score.marks, 6), (score.probe, 8)))
    score = replace(score, marks=marks, probe=probe)
    return Calibration(reference, numbers(calibration.encoder, 4), score, gaussians)


def _check_gaussians(gaussians: TrainingGaussians, width: int | None, n_outputs: int, like: Tensor) -> None:
    if width is None:
        refuse("calibration", "no gaussians but of a last layer", "some")
    tensors = {name: value for name, value in vars(gaussians).items() if value is not None}
    classes = {"basis", "weights", "slopes", "offsets"} & set(tensors)
    if len(classes) not in (0, 4):
        wanted = "gaussians with all of basis, weights, slopes and offsets, or none"
        refuse("calibration", wanted, f"{sorted(classes)}")
    lengths = {name: (None,) for name in ("inside", "weights", "offsets") if name in tensors}
    _check_shapes("calibration", tensors, like, lengths, torch.float64)
    shapes = {"centre": (n_outputs,), "axes": (n_outputs, len(tensors["inside"])), "outside": ()}
    if classes:
        shapes |= {"basis": (width, len(tensors["weights"])), "slopes": (len(tensors["offsets"]), width)}
        if not len(tensors["offsets"]):
            refuse("calibration", "gaussians of classes", "none")
    _check_shapes("calibration", tensors, like, shapes, torch.float64)


def _loaded_classes(saved: Mapping[str, Any] | None, dim: int, like: Tensor) -> ClassCentres | None:
    """Return the class centres of a state."""
    if saved is None:
        return None
    centres = from_tree("state_dict['class_centres']", saved, [ClassCentres])
    labels = _check_tensor("class_centres", centres.labels, like, (None,), torch.int64)
    _check_tensor("class_centres", centres.sums, like, (len(labels), dim), torch.float64)
    if centres.n < 1 or not math.isfinite(centres.typical):
        refuse("class_centres", "a number of points, and a finite angle", f"{centres.n}, {centres.typical}")
    return centres


def kind_of(value: object) -> str:
    """Return a short description of a value, for a message."""
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype}, shape {tuple(value.shape)}, on {value.device}"
    if isinstance(value, (str, int, float)) or value is None:
        shown = repr(value)
        return shown if len(shown) < 60 else f"{shown[:57]}..."
    return f"a {type(value).__name__}"
