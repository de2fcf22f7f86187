"""The ``state_dict`` of a posterior, and the checks at loading: keys, dtypes, shapes, finite numbers.

``torch.load(..., weights_only=True)`` runs no code, but does not check the content of the file. An object that refuses
a state does not change.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Never

import torch
from torch import Tensor

from contrastive_curvature.codec import check_seal, from_tree, sealed, to_tree
from contrastive_curvature.embedding.known import Calibration, Reference, TrainingGaussians, statistic_name
from contrastive_curvature.embedding.score import Score
from contrastive_curvature.errors import InputError, UnsupportedError
from contrastive_curvature.fit.class_centres import ClassCentres
from contrastive_curvature.laplace.prediction import moved_inputs
from contrastive_curvature.network.digest import weight_norms
from contrastive_curvature.network.encoder import at_least_float32
from contrastive_curvature.removed import REMOVED
from contrastive_curvature.structures import Structure
from contrastive_curvature.structures.base import Room

if TYPE_CHECKING:
    from contrastive_curvature.laplace.posterior import ContrastiveLaplace

_KEYS: dict[str, Any] = {
    "mean": Tensor,
    "curvature": dict,
    "loss": object,
    "cost": object,
    "prior_mean": Tensor,
    "prior_precision": Tensor,
    "n_data": int,
    "n_outputs": int,
    "likelihood": str,
    "temperature": float,
    "temperature_given": bool,
    "enable_backprop": bool,
    "subset_of_weights": str,
    "contrastive": dict,
    "backend": str,
    "encoder_norms": Tensor,
    "calibration": (dict, type(None)),
    "typical_norm": (float, type(None)),
    "class_centres": (dict, type(None)),
    "prior_chosen": bool,
    "checksum": str,
}
"""Keys of a state, and types of their values."""

_COMPUTED = ("contrastive", "backend", "encoder_norms", "calibration", "class_centres", "checksum")
"""Keys whose values are not attributes of the posterior as they are."""

_FIXED = ("curvature", "likelihood", "subset_of_weights")
"""Attributes that a state does not set: of the curvature it holds fields, and the others have to be the same."""

_OF_LAST_LAYER = ("data", "_last_layer_name")
"""Further keys of the posterior of a last layer."""

SEALED = tuple(key for key in _KEYS if key != "checksum")
"""Entries that the checksum is of: all but ``"data"``, inputs that a user may replace."""

_CALIBRATION = (Calibration, Reference, Score, TrainingGaussians)

_BACKENDS = ("ContrastiveGGN", "BackPackContrastiveGGN", "StochManContrastiveGGN")


def state_of(la: ContrastiveLaplace) -> dict[str, Any]:
    """Implement :meth:`contrastive_curvature.laplace.posterior.ContrastiveLaplace.state_dict`."""
    la.check_fitted()
    state: dict[str, Any] = to_tree(
        {
            **{name: getattr(la, name) for name in _KEYS if name not in _COMPUTED},
            **({"data": la.data, "_last_layer_name": la.last_layer_name} if la.on_last_layer else {}),
            "contrastive": la.plain_options(),
            "backend": type(la.backend).__name__,
            "encoder_norms": weight_norms(la.model),
            "calibration": _saved_calibration(la.known.calibration, la.on_last_layer),
            "class_centres": la.classes,
        }
    )
    return sealed(state, SEALED)


def load_state(la: ContrastiveLaplace, state: Mapping[str, Any]) -> None:
    """Implement :meth:`contrastive_curvature.laplace.posterior.ContrastiveLaplace.load_state_dict`."""
    _check_state(state, {"subset_of_weights": la.subset_of_weights, "likelihood": la.likelihood}, la.plain_options())
    with la.unchanged_on_error():
        if la.on_last_layer:
            _find_last_layer(la, state)
        la.renew_backend()
        if state["backend"] not in (*_BACKENDS, type(la.backend).__name__):
            of_yours = "Where it is a backend of your own, construct this object with backend=... of it."
            hint = REMOVED.get(state["backend"], of_yours)
            _refuse("backend", f"one of {', '.join(_BACKENDS)}", repr(state["backend"]), hint)
        like = at_least_float32(next(la.model.parameters()).detach())
        _check_settings(state, like, la.n_params)
        curvature = _loaded_curvature(la, state["curvature"], like)
        if la.enable_backprop != state["enable_backprop"]:
            msg = "enable_backprop: the state was saved with another value, which now holds."
            warnings.warn(msg, UserWarning, stacklevel=3)
        # In the order of the table: setting the prior precision also sets ``prior_chosen``, which comes later.
        for name in _KEYS:
            if name not in (*_COMPUTED, *_FIXED):
                setattr(la, name, state[name])
        la.model.output_size = la.n_outputs
        la.curvature, la.clamped = curvature, la.clamp(curvature)
        width = la.model.last_layer.in_features if la.on_last_layer else None
        calibration = _loaded_calibration(state["calibration"], width, la.n_outputs, like)
        la.known = replace(la.known, sample=None, calibration=calibration)
        la.classes = _loaded_classes(state["class_centres"], la.n_outputs, like)
        now, saved = weight_norms(la.model), state["encoder_norms"].to(like.device)
        # The tolerance allows another precision. The encoder's weights may be loaded after this, so only warn.
        if saved.shape != now.shape or not torch.allclose(now, saved.to(now), rtol=1e-3, atol=1e-12):
            msg = (
                "The encoder has other weights than the one whose posterior is loaded, so predictions will be wrong. "
                "Load the encoder's state_dict first: laplace-torch keeps it apart from the posterior's."
            )
            warnings.warn(msg, UserWarning, stacklevel=3)


def _loaded_curvature(la: ContrastiveLaplace, saved: Mapping[str, Any], like: Tensor) -> Structure:
    """Return the curvature of a state; its tensors must have the shapes that these weights need."""
    curvature: Structure = from_tree("state_dict['curvature']", saved, [la.structure])
    try:
        shapes = curvature.shapes(Room(la.posterior_parameters(), la.curvature_options.rank))
    except (TypeError, AttributeError, IndexError) as error:
        _refuse("curvature", f"the fields of {la.hessian_structure!r}", f"others ({error})")
    _check_shapes("curvature", saved, like, shapes)
    return curvature


def _find_last_layer(la: ContrastiveLaplace, state: Mapping[str, Any]) -> None:
    """Find the last layer with the made-up inputs of a state, because a state can be checked only then."""
    name = state["_last_layer_name"]
    if name != la.last_layer_name:
        _refuse("_last_layer_name", f"{la.last_layer_name!r}, that of this object", _kind_of(name))
    if state["data"] is None and la.model.last_layer is not None:
        return
    try:
        la.find_last_layer(moved_inputs(la.model, state["data"], la._device))
    except UnsupportedError:
        raise
    except Exception as error:  # encoders raise any error for inputs of another kind
        reason = (str(error) or type(error).__name__).splitlines()[0]
        hint = "Where these are made up and the encoder needs real ones, set state_dict['data'] = x[:2] of yours."
        _refuse("data", "inputs that the encoder takes", f"{_kind_of(state['data'])} ({reason})", hint)
    if state["n_outputs"] != la.model.dim:
        _refuse("n_outputs", f"{la.model.dim}, that of the encoder", _kind_of(state["n_outputs"]))
    la.data = state["data"]


def _refuse(key: str, wanted: str, got: object, instead: str = "") -> Never:
    """Raise the error of a malformed state, which names the key."""
    raise InputError(f"state_dict[{key!r}]", wanted, got, instead) from None


def _check_state(state: object, kind: Mapping[str, str], options: Mapping[str, Any]) -> None:
    """Refuse a state of other weights or options, or a malformed state; the numbers are not checked."""
    if not isinstance(state, Mapping):
        raise InputError("state_dict", "what la.state_dict() gave", f"a {type(state).__name__}")
    keys = [*_KEYS, *(_OF_LAST_LAYER if kind["subset_of_weights"] == "last_layer" else ())]
    missing = [key for key in keys if key not in state]
    if missing:
        hint = "States of version 0.2 are not read: fit again."
        raise InputError("state_dict", f"the keys {', '.join(keys)}", f"none of {', '.join(missing)}", hint)
    for key, wanted in _KEYS.items():
        if not isinstance(state[key], wanted) or (wanted is int and isinstance(state[key], bool)):
            _refuse(key, f"a value of type {wanted}", _kind_of(state[key]))
    for key, value in kind.items():
        if state[key] != value:
            _refuse(key, repr(value), repr(state[key]), "Give this object the same arguments.")
    saved = state["contrastive"]
    names = sorted({*options, *saved}, key=str)
    differ = [name for name in names if name not in saved or saved[name] != options.get(name)]
    if differ:
        wanted, got = (", ".join(f"{name}={side.get(name)!r}" for name in differ) for side in (options, saved))
        hint = "Give this object the same backend_kwargs."
        raise InputError("state_dict", f"this object's options {wanted}", got, hint)
    check_seal(state, SEALED)


def _check_settings(state: Mapping[str, Any], like: Tensor, n_params: int) -> None:
    """Check everything but the curvature, for an encoder with a parameter ``like``.

    The setters of the prior check its numbers and shapes.
    """
    _check_tensor("mean", state["mean"], like, (n_params,))
    for name in ("prior_mean", "prior_precision"):
        _check_tensor(name, state[name], like, None)
    if state["n_data"] < 1 or state["n_outputs"] < 1:
        _refuse("n_data, n_outputs", "positive whole numbers", f"{state['n_data']}, {state['n_outputs']}")
    for key, least in (("loss", -math.inf), ("cost", 0), ("typical_norm", 0)):
        number = 0.0 if state[key] is None else float(state[key])
        if not math.isfinite(number) or number < least:
            _refuse(key, "one finite number" if least else "a number that is not negative", number)


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
            _refuse(key, f"{len(shapes)} parts", _kind_of(value))
        for part, shape in zip(value, shapes, strict=True):
            _check_shapes(key, part, like, shape, dtype)


def _check_tensor(
    key: str, value: Any, like: Tensor, shape: tuple[int | None, ...] | None, dtype: torch.dtype | None = None
) -> Tensor:
    """Return a finite tensor of this shape and dtype (default: dtype of ``like``), on the device of ``like``."""
    wanted = "a tensor" if shape is None else f"a tensor of shape {shape}".replace("None", "*")
    if not isinstance(value, Tensor):
        _refuse(key, wanted, _kind_of(value))
    if shape is not None:
        got = tuple(value.shape)
        if len(got) != len(shape) or any(n is not None and n != m for n, m in zip(shape, got, strict=True)):
            _refuse(key, wanted, f"shape {got}", "The encoder must be the one that the posterior was saved from.")
    if value.dtype != (dtype or like.dtype):
        hint = "Bring the encoder to the precision of the posterior."
        _refuse(key, f"{dtype or like.dtype}", f"{value.dtype}", hint)
    if value.device != like.device:
        hint = f"Read the file with torch.load(..., map_location={str(like.device)!r})."
        _refuse(key, f"a tensor on device {like.device}", f"one on {value.device}", hint)
    if not bool(value.detach().isfinite().all()):
        _refuse(key, "finite numbers", "NaN or infinity")
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
        _refuse("calibration", "None, or a dictionary of statistic, calibration", f"the keys {sorted(saved)}")
    calibration = from_tree("state_dict['calibration']", saved["calibration"], _CALIBRATION)
    if not isinstance(calibration, Calibration):
        _refuse("calibration", "a Calibration", _kind_of(calibration))
    reference, score, gaussians = calibration.reference, calibration.score, calibration.gaussians
    kinds = (reference, Reference), (score, Score), (gaussians, TrainingGaussians | None)
    if not all(isinstance(part, kind) for part, kind in kinds):
        _refuse("calibration", "a Reference, a Score and TrainingGaussians", "others")
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
        _refuse("calibration", "statistics, and positive scales", "none, or others")
    if reference.counts is not None:
        counts = _check_tensor("calibration", reference.counts, like, (None,), torch.int64)
        if bool((counts < 0).any()) or int(counts.sum()) != len(reference.statistics):
            _refuse("calibration", "counts of all statistics", "others")
    if gaussians is not None:
        _check_gaussians(gaussians, width, n_outputs, like)

    def numbers(value: Tensor, length: int) -> Tensor:
        return _check_tensor("calibration", value, value, (length,), torch.float64).cpu()

    marks, probe = (None if value is None else numbers(value, n) for value, n in ((score.marks, 6), (score.probe, 8)))
    score = replace(score, marks=marks, probe=probe)
    return Calibration(reference, numbers(calibration.fingerprint, 9), score, gaussians)


def _check_gaussians(gaussians: TrainingGaussians, width: int | None, n_outputs: int, like: Tensor) -> None:
    if width is None:
        _refuse("calibration", "no gaussians but of a last layer", "some")
    tensors = {name: value for name, value in vars(gaussians).items() if value is not None}
    classes = {"basis", "weights", "slopes", "offsets"} & set(tensors)
    if len(classes) not in (0, 4):
        wanted = "gaussians with all of basis, weights, slopes and offsets, or none"
        _refuse("calibration", wanted, f"{sorted(classes)}")
    lengths = {name: (None,) for name in ("inside", "weights", "offsets") if name in tensors}
    _check_shapes("calibration", tensors, like, lengths, torch.float64)
    shapes = {"centre": (n_outputs,), "axes": (n_outputs, len(tensors["inside"])), "outside": ()}
    if classes:
        shapes |= {"basis": (width, len(tensors["weights"])), "slopes": (len(tensors["offsets"]), width)}
        if not len(tensors["offsets"]):
            _refuse("calibration", "gaussians of classes", "none")
    _check_shapes("calibration", tensors, like, shapes, torch.float64)


def _loaded_classes(saved: Mapping[str, Any] | None, dim: int, like: Tensor) -> ClassCentres | None:
    """Return the class centres of a state."""
    if saved is None:
        return None
    centres = from_tree("state_dict['class_centres']", saved, [ClassCentres])
    labels = _check_tensor("class_centres", centres.labels, like, (None,), torch.int64)
    _check_tensor("class_centres", centres.sums, like, (len(labels), dim), torch.float64)
    if centres.n < 1 or not math.isfinite(centres.typical):
        _refuse("class_centres", "a number of points, and a finite angle", f"{centres.n}, {centres.typical}")
    return centres


def _kind_of(value: object) -> str:
    """Return a short description of a value, for a message."""
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype}, shape {tuple(value.shape)}, on {value.device}"
    if isinstance(value, (str, int, float)) or value is None:
        shown = repr(value)
        return shown if len(shown) < 60 else f"{shown[:57]}..."
    return f"a {type(value).__name__}"
