"""Scores of embeddings from the features of the last layer, with only numpy and the standard library.

``la.export("scorer.npz")`` writes files for this module. The module does not import its own package: copy it to a
machine without torch, and import it there::

    from numpy_scorer import Scorer

    scorer = Scorer.load("scorer.npz")
    mu, kappa, uncertainty, p_value = scorer(features)

``features`` (N, F) are the inputs of the encoder's last linear layer, computed by any program. After
``la.export("scorer.npz", match=match)``, ``scorer.same`` gives the probabilities of ``match``; after
``retriever.export("scorer.npz")``, ``scorer.answer`` gives the answers of the retriever.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

FORMAT, VERSION = "contrastive_curvature.scorer", 4

CAP, WEIGHT, NEAREST = 0.85, 3.0, 4
"""Of the position between class centres: the largest ratio, its weight, and how many centres are looked at closely."""

TAIL = (
    *(-1.2655121234847422, 1.000000000085138, 0.3749999876202876, 0.08333404321731487, -0.08595887819528081),
    *(-0.14335982785093354, -0.09648985845800909, 0.06878120462341214, -0.10218119421100404, 1.1515735586724292),
    *(-3.333543467853752, 7.446609161359192, -12.275184316640647, 10.743464342300873, 1.6832199676406254),
    *(-16.696460796364075, 21.6613980688489, -15.345296269036949, 6.555878025039342, -1.5971863447915142),
    0.17191471747949272,
)
"""Coefficients of the polynomial in ``t = 1 / (1 + x / 2)`` that interpolates ``log(erfc(x) exp(x^2) / t)`` at the 21
Chebyshev nodes of 0 <= t <= 1: its error is 2e-13. NumPy and graphs for ONNX have no logarithm of a normal tail."""

RANDOM = 1e8
"""Largest sum of relative variances: there a direction is random."""

HITS, FLOOR, ENTRIES = 10, 1e-6, 2**24
"""Of an answer: how many nearest points count, what is added to a distance, and numbers in one block of queries."""

_TINY, _LARGEST = np.finfo(np.float64).tiny, np.finfo(np.float64).max
_DTYPES: dict[str, np.dtype[Any]] = {"F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "I64": np.dtype("<i8")}

Array = NDArray[Any]
_Times = Callable[[Array], Array]
_Raw = tuple[Array, Array, Array, _Times]
"""Of raw outputs: unit vectors (N, D) and norms (N,); of their covariances: traces (N,) and products with vectors."""


class Scorer:
    """``mu, kappa, uncertainty, p_value = scorer(features)``; without calibration only the first three.

    Args:
        arrays: Arrays by name, as :func:`Scorer.load` reads them.
        metadata: ``format``, ``version``, ``form``, ``structure``, ``score`` and ``checksum``.

    Attributes:
        outputs: Names of the results of a call, in order.
        structure: Structure of the posterior; ``"none"`` for the embeddings of a retriever without a posterior.
        score: Score of the p-values, ``"novelty"`` or ``"uncertainty"``.
        n: Number of calibration inputs; the smallest p-value is ``1 / (n + 1)``. Zero without calibration.

    Raises:
        ValueError: The arrays have another format or version, or their checksum is wrong.
    """

    def __init__(self, arrays: Mapping[str, Array], metadata: Mapping[str, Any]) -> None:
        if metadata.get("format") != FORMAT:
            raise ValueError(f"expected format {FORMAT}, got {metadata.get('format')!r}.")
        version = metadata.get("version")
        if version != VERSION:
            raise ValueError(
                f"expected version {VERSION}, got {version!r}. Use the numpy_scorer.py of the library that wrote it."
            )
        if metadata.get("checksum") != checksum(arrays, metadata):
            raise ValueError("expected the arrays that la.export wrote, got changed ones. Export again.")
        self.form, self.structure, self.score = (metadata[name] for name in ("form", "structure", "score"))
        self._arrays = dict(arrays)
        self.n = len(arrays["statistics"]) if "statistics" in arrays else 0
        self.outputs = ("mu", "kappa", "uncertainty") + (("p_value",) if self.n else ())
        self._labels = np.array(metadata.get("labels", []))
        if self.form == "dense":
            covariance = arrays["covariance"].astype(np.float64)
            self._arrays |= {"covariance": covariance, "trace": _traces(covariance, *arrays["weight"].shape)}

    @classmethod
    def load(cls, path: Any) -> Scorer:
        """Read a file that ``la.export`` wrote; nothing in it is executed.

        Args:
            path: Path of a ``.npz`` or ``.safetensors`` file; the content determines the format.

        Raises:
            OSError: The file cannot be read.
            ValueError: The file has another format, is damaged, or has a later version.
        """
        with open(path, "rb") as file:
            start = file.read(2)
        try:
            arrays, metadata = _read_npz(path) if start == b"PK" else _read_safetensors(path)
        except OSError:
            raise
        except Exception as error:
            raise ValueError(
                f"{path}: expected a file of la.export, got a damaged one or another format ({error})."
            ) from error
        try:
            return cls(arrays, metadata)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def __call__(self, features: Array) -> tuple[Array, ...]:
        """Score N inputs.

        Args:
            features: Inputs of the last layer, shape (N, F).

        Returns:
            ``mu`` (N, D), ``kappa`` (N,), ``uncertainty`` (N,) in the dtype of the layer, and ``p_value`` (N,) in
            float64 if the posterior was calibrated. A row without finite outputs holds NaN.

        Raises:
            ValueError: The features are not numbers or have another shape.
        """
        return self._score(features)[0]

    def same(self, features_a: Array, features_b: Array) -> Array:
        """Return the probability that rows i of both have one class, as ``MatchProbability.same`` does.

        Args:
            features_a: Inputs of the last layer, shape (N, F).
            features_b: Inputs of the last layer for the other side of each pair. Exchanging the sides changes nothing.

        Returns:
            Probabilities, shape (N,), in the dtype of the layer; NaN if an output of either side is not finite or is
            zero.

        Raises:
            ValueError: The file has no match, or the features are not numbers or have another shape.
        """
        fitted = self._under("match.pairs.")
        if not fitted:
            raise ValueError("expected a file with a fitted match, got one without. Use la.export(path, match=...).")
        a, b = (self._score(features) for features in (features_a, features_b))
        ((mu, _, angle, *_), raw, _), ((other, _, other_angle, *_), other_raw, _) = a, b
        if len(mu) != len(other):
            raise ValueError(f"features: expected as many rows on both sides, got {len(mu)} and {len(other)}.")
        with np.errstate(all="ignore"):
            columns = (mu.astype(np.float64) * other).sum(1)[:, None]
            if len(fitted["shift"]) > 1:
                towards = _angle_variance(*raw, other) + _angle_variance(*other_raw, mu)
                both = np.stack([angle, other_angle], axis=1).astype(np.float64)
                columns = np.concatenate([columns, np.log(towards)[:, None], np.log(-np.sort(-both, axis=1))], axis=1)
            return _regression(columns, fitted).astype(mu.dtype)

    def answer(self, features: Array) -> dict[str, Array]:
        """Answer queries like the exported retriever.

        Args:
            features: Inputs of the last layer, shape (N, F); for a retriever with a head, the outputs of its encoder;
                for a retriever without a posterior, its embeddings.

        Returns:
            ``decision``, ``label``, ``neighbour``, ``confidence`` and ``p_value``, each of shape (N,), as from a call
            of the retriever. A row without finite outputs is ``"unsure"``, and its numbers are NaN.

        Raises:
            ValueError: The file has no retriever, or the features are not numbers or have another shape.
        """
        r = self._under("retriever.")
        if not r:
            raise ValueError("expected a file of a retriever, got one without. Write one by retriever.export(path).")
        gallery, classes = r["gallery"], r["classes"]
        if "hidden_weight" in r:
            hidden = r["hidden_weight"]
            features = np.maximum(
                _checked(features, hidden.shape[1]).astype(np.float32) @ hidden.T + r["hidden_bias"], 0
            )
        if self.structure == "none":
            mu = _checked(features, gallery.shape[1])
            alone = np.zeros((len(mu), 2))
        else:
            (mu, _, angle, *_), _, novelty = self._score(features)
            alone = np.column_stack([angle, novelty]).astype(np.float64)
        with np.errstate(all="ignore"):
            u = mu.astype(np.float32)
            u = u / np.sqrt(np.square(u).sum(1, keepdims=True))
            step = max(1, ENTRIES // (len(gallery) + 2 * (HITS + 1) * gallery.shape[1]))
            blocks = [_search(u[k : k + step], gallery, classes) for k in range(0, max(len(u), 1), step)]
            columns, match = (np.concatenate(part) for part in zip(*blocks, strict=True))
            columns = np.hstack([columns, np.log(np.maximum(alone, FLOOR))])
            right, present = (
                -((columns - r[f"{name}.location"]) / r[f"{name}.scale"] @ r[f"{name}.weights"][:-1])
                - r[f"{name}.weights"][-1]
                for name in ("right", "present")
            )
            novelty = np.exp(columns[:, 1]) if self.structure == "none" else alone[:, 1]
            n, rounded = len(r["novelties"]), novelty * (1 - r["rounding"])
            p_value = np.where(np.isnan(rounded), np.nan, (1 + n - np.searchsorted(r["novelties"], rounded)) / (n + 1))
            limit, present_limit, alarms = r["limits"]
            decision = np.where((right <= limit) & (present <= present_limit), "answer", "unsure")
            return {
                "decision": np.where(p_value <= alarms, "unknown", decision),
                "label": self._labels[classes[match]],
                "neighbour": r["identifiers"][match],
                "confidence": 1 / (1 + np.exp(right)),
                "p_value": p_value,
            }

    def _under(self, start: str) -> dict[str, Array]:
        """Return the arrays whose names begin with ``start``, by the rest of their names."""
        return {name.removeprefix(start): a for name, a in self._arrays.items() if name.startswith(start)}

    def _score(self, features: Array) -> tuple[tuple[Array, ...], _Raw, Any]:
        """Return the results for N inputs, the intermediate numbers, and the scores of the p-values."""
        a = self._arrays
        if self.structure == "none":
            raise ValueError("expected a file with a posterior, got one of embeddings. Call scorer.answer(embeddings).")
        weight = a["weight"]
        phi = _checked(features, weight.shape[1]).astype(weight.dtype)
        with np.errstate(all="ignore"):
            z = phi @ weight.T + a.get("bias", weight.dtype.type(0))
            wide = z.astype(np.float64)
            size = np.maximum(np.abs(wide).max(1), _TINY)
            scaled = wide / size[:, None]
            length = np.sqrt(np.square(scaled).sum(1))
            u = scaled / np.maximum(length, _TINY)[:, None]
            total, times = getattr(self, f"_{self.form}")(phi)
            radial = (times(u) * u).sum(1)
            norm = np.where(length > 0, length * size, np.nan)
            mu = (scaled / np.where(length > 0, length, np.nan)[:, None]).astype(z.dtype)
            tangential = np.maximum(total - radial, 0) / norm / norm
            between = self._between(mu) if "centres" in a else None
            angle = turning_angle(tangential, norm, a.get("typical_norm"), between)
            out = (mu, _kappa(tangential.astype(z.dtype), z.shape[1]), angle.astype(z.dtype))
            raw = (u, norm, total, times)
            if not self.n:
                return out, raw, None
            least = z.shape[1] * np.finfo(z.dtype).eps * total
            spread = np.log(np.maximum(np.maximum(total - radial, least), _TINY))
            lengths = np.maximum(np.log(np.maximum(length, _TINY)) + np.log(size), math.log(_TINY))
            known = np.abs(wide).sum(1) + total <= _LARGEST
            if "counts" in a or self.score != "novelty":
                known &= length > 0
            score = self._novelty(spread, lengths, phi, wide) if self.score == "novelty" else out[2].astype(np.float64)
            return (*out, np.where(known, self._p_value(score, mu), np.nan)), raw, score

    def _diagonal(self, phi: Array) -> tuple[Array, _Times]:
        a = self._arrays
        values = np.square(phi) @ a["variance"].astype(phi.dtype).T
        wide = (values + a.get("bias_variance", np.zeros(1)).astype(phi.dtype)).astype(np.float64)
        return wide.sum(1), lambda v: wide * v

    def _axes(self, phi: Array) -> tuple[Array, _Times]:
        a = self._arrays
        axes, basis = a["axes"].astype(np.float64), a["basis"]
        phi = phi.astype(basis.dtype)
        coordinates = phi @ basis
        values = np.square(coordinates) @ a["along"].T
        if "across" in a:
            left = np.square(phi - coordinates @ basis.T).sum(1, keepdims=True)
            values = values + left * a["across"]
        wide = values.astype(np.float64)
        total = wide @ np.square(axes).sum(0)
        if "common" not in a:
            return total, lambda v: ((v @ axes) * wide) @ axes.T
        common = a["common"].astype(np.float64)
        return total + common.trace(), lambda v: ((v @ axes) * wide) @ axes.T + v @ common

    def _dense(self, phi: Array) -> tuple[Array, _Times]:
        covariance, trace = self._arrays["covariance"], self._arrays["trace"]
        wide = phi.astype(np.float64)
        n, width = wide.shape
        bias = len(trace) > width

        def times(v: Array) -> Array:
            weights = (v[:, :, None] * wide[:, None, :]).reshape(n, v.shape[1] * width)
            if bias:
                weights = np.concatenate([weights, np.broadcast_to(v, (n, v.shape[1]))], axis=1)
            pushed = weights @ covariance
            out = (pushed[:, : v.shape[1] * width].reshape(n, v.shape[1], width) @ wide[:, :, None])[:, :, 0]
            return out + pushed[:, v.shape[1] * width :] if bias else out

        ones = np.concatenate([wide, np.ones((n, 1))], axis=1) if bias else wide
        return ((ones @ trace) * ones).sum(1), times

    def _between(self, mu: Array) -> Array:
        """Return the factors of angles: more than 1 between two class centres, less than 1 near one."""
        centres = self._arrays["centres"].astype(mu.dtype)
        cosine = np.where(np.isnan(mu[:, :1]), 0, mu @ centres.T)
        few = min(NEAREST, len(centres))
        nearest = np.argpartition(-cosine, few - 1, axis=1)[:, :few]
        apart = np.sort(np.sqrt(np.square(mu[:, None] - centres[nearest]).sum(2)), axis=1)
        first, second = apart[:, 0], apart[:, 1]
        ratio = np.where(second == 0, 1, first / np.where(second == 0, 1, second))
        return between_classes(ratio, self._arrays["typical_ratio"]).astype(mu.dtype)

    def _novelty(self, spread: Array, length: Array, phi: Array, z: Array) -> Array:
        a = self._arrays
        wide = phi.astype(np.float64)
        norms = np.clip(np.sqrt(np.square(wide).sum(1)), _TINY, _LARGEST)
        features = np.log(norms)
        components = [spread - features, spread - 2 * features, -length]
        if "known_centre" in a:
            apart = z - a["known_centre"]
            squared = np.square(apart @ a["known_axes"]) @ a["known_inside"]
            squared += a["known_outside"] * np.square(apart).sum(1)
            components.append(np.log(np.clip(squared, _TINY, _LARGEST)))
        if "known_basis" in a:
            u = wide / norms[:, None]
            nearest = (u @ a["known_slopes"].T + a["known_offsets"]).min(1)
            components.append(np.square(u @ a["known_basis"]) @ a["known_weights"] + nearest)
        return combine((np.stack(components, axis=1) - a["location"]) / a["scale"])

    def _p_value(self, score: Array, mu: Array) -> Array:
        """Compare with all calibration inputs, or with the calibration inputs of the nearest class centre."""
        a, least = self._arrays, score - self._arrays["rounding"]
        if "counts" not in a:
            return np.asarray((1 + self.n - np.searchsorted(a["statistics"], least)) / (self.n + 1))
        classes = (mu @ a["centres"].astype(mu.dtype).T).argmax(1)
        n, below = a["counts"][classes], np.zeros(len(mu), dtype=np.int64)
        of_class = np.split(a["statistics"], a["counts"].cumsum()[:-1])
        for one in np.unique(classes):
            below[classes == one] = np.searchsorted(of_class[one], least[classes == one])
        return np.asarray((1 + n - below) / (n + 1))


def _checked(features: Any, width: int) -> Array:
    x = np.asarray(features)
    if x.dtype.kind not in "fiu" or x.ndim != 2 or x.shape[1] != width:
        raise ValueError(f"features: expected numbers of shape (N, {width}), got {x.dtype} of shape {x.shape}.")
    return x


def _search(u: Array, gallery: Array, classes: Array) -> tuple[Array, Array]:
    """Return the evidence of a search (N, 4), and the rows of the matches (N,): the library's ``evidence``."""
    cosine, k = np.where(np.isnan(u[:, :1]), 0, u @ gallery.T), min(HITS, len(gallery))
    hits = np.argpartition(-cosine, k - 1, axis=1)[:, :k]
    hits = np.take_along_axis(hits, np.argsort(-np.take_along_axis(cosine, hits, 1), axis=1, kind="stable"), 1)
    own = classes[hits[:, :1]]
    others = np.where(classes == own, -np.inf, cosine)
    looked_at = np.hstack([hits, others.argmax(1)[:, None]])
    apart = np.square(u[:, None].astype(np.float64) - gallery[looked_at]).sum(2) / 2
    apart[np.isneginf(others.max(1)), -1] = 2
    first, mean, other = (np.log(d + FLOOR) for d in (apart[:, 0], apart[:, :-1].mean(1), apart[:, -1]))
    return np.stack([first, mean, (classes[hits] == own).mean(1), first - other], axis=1), hits[:, 0]


def turning_angle(tangential: Array, norm: Array, typical_norm: Any = None, between: Array | None = None) -> Array:
    """``arctan(sqrt(V / n^2) sqrt(t / n) b)``: the library's function of this name."""
    angle = np.sqrt(tangential if typical_norm is None else tangential * (typical_norm / norm))
    return np.asarray(np.arctan(angle if between is None else angle * between))


def _angle_variance(u: Array, norm: Array, total: Array, times: _Times, towards: Array) -> Array:
    """Return variances (N,) of directions along the great circles to others: the library's ``angle_variance``."""
    dim, there, equal = u.shape[1], towards.astype(np.float64), 8 * np.finfo(towards.dtype).eps
    apart = there / np.sqrt(np.square(there).sum(1, keepdims=True)) - u
    tangent = apart - (apart * u).sum(1, keepdims=True) * u
    length = np.sqrt(np.square(tangent).sum(1))
    tangent = tangent / np.maximum(length, equal)[:, None]
    root = np.minimum(1 / norm, np.sqrt(RANDOM / total))
    scale = root[:, None]
    pushed = scale * times(u) * scale
    rho = (pushed * u).sum(1)
    tau = np.maximum(root * total * root - rho, 0)
    bend = np.square(pushed - rho[:, None] * u).sum(1)
    entries = sum(np.square(scale * times(axis) * scale).sum(1) for axis in np.eye(dim)[:, None])
    square = np.clip(entries - 2 * bend - rho**2, tau**2 / (dim - 1), tau**2)
    whole = 1 + tau
    ratio = (3 * rho * tau + 6 * bend - 1.5 * square) / (tau + _TINY) / whole**2
    by_tau = (1 + np.where(ratio > 0, ratio / (1 + np.maximum(ratio * tau, 0)), ratio)) / whole
    radial_by_tau = (square / (tau + _TINY) / 2 + rho * tau) / whole**2 / (whole + rho)
    along = np.maximum(by_tau - radial_by_tau, 0) * (scale * times(tangent) * scale * tangent).sum(1)
    lost = np.maximum(tau * by_tau - bend * (whole + rho) ** -3, 0)
    return np.maximum(np.where(length > equal, along, (lost - radial_by_tau * tau) / (dim - 1)), 0)


def _regression(features: Array, fitted: Mapping[str, Array]) -> Array:
    """Return probabilities (N,) of features (N, F): the library's ``Regression``."""
    weight, n = fitted["weight"], features.shape[1]
    x = (np.clip(features, fitted["low"], fitted["high"]) - fitted["shift"]) / fitted["scale"]
    slope = weight[0] + (weight[n] * x[:, 1] if n > 1 else 0)
    logit = np.maximum(slope, 0) * x[:, 0] + x[:, 1:] @ weight[1:n] + fitted["bias"]
    if "knots" not in fitted:
        return np.asarray(1 / (1 + np.exp(-logit)))
    # With one knot, the interpolation of NaN is a number.
    return np.where(np.isnan(logit), np.nan, np.interp(logit, fitted["knots"], fitted["levels"]))


def between_classes(ratio: Array, typical: Any) -> Array:
    """Return factors of angles, like the library's function of this name."""
    return np.asarray(np.exp(WEIGHT * (np.minimum(ratio, CAP) - typical)))


def combine(standardised: Array) -> Array:
    """Return Fisher's combination of normal tails, like the library's function of this name."""
    tails = np.concatenate([standardised, -standardised[:, :1]], axis=1)
    z = np.abs(tails)
    t = 1 / (1 + z / math.sqrt(8))
    log_p = np.log(t) + np.polyval(TAIL[::-1], t) - np.square(z) / 2 - math.log(2)
    both = np.where(tails > 0, -log_p, -np.log1p(-np.exp(log_p)))
    return np.asarray(np.sqrt(2 * both.sum(1)))


def _kappa(tangential: Array, dim: int) -> Array:
    """Return the concentrations for tangential variances (Sra, 2012)."""
    spread = np.maximum(tangential / (1 + tangential), np.square(np.finfo(tangential.dtype).eps))
    kappa: Array = (dim - 1 + spread) / spread / np.sqrt(1 + tangential)
    return kappa


def _traces(covariance: Array, dim: int, width: int) -> Array:
    """Return the covariances of the inputs' weights, summed over the outputs; a bias is the last input."""
    rows = np.arange(dim * width).reshape(dim, width)
    if len(covariance) > dim * width:
        rows = np.concatenate([rows, np.arange(dim * width, len(covariance))[:, None]], axis=1)
    return np.asarray(covariance[rows[:, :, None], rows[:, None, :]].sum(0))


def checksum(arrays: Mapping[str, Array], metadata: Mapping[str, Any]) -> str:
    """Return the SHA-256 of all arrays with their names, dtypes and shapes, and of the other metadata."""
    told = {name: value for name, value in metadata.items() if name != "checksum"}
    found = hashlib.sha256(json.dumps(told, sort_keys=True).encode())
    for name, array in sorted(arrays.items()):
        found.update(f"{name} {array.dtype.str} {array.shape}".encode())
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()


def _read_npz(path: Any) -> tuple[dict[str, Array], dict[str, Any]]:
    with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    return arrays, json.loads(str(arrays.pop("metadata")))


def _read_safetensors(path: Any) -> tuple[dict[str, Array], dict[str, Any]]:
    """Read eight bytes with the length of a JSON header, the header, and the bytes of the arrays."""
    with open(path, "rb") as file:
        content = file.read()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    metadata = json.loads(header.pop("__metadata__")["metadata"])
    arrays = {}
    for name, entry in header.items():
        size, first = math.prod(entry["shape"]), start + entry["data_offsets"][0]
        arrays[name] = np.frombuffer(content, _DTYPES[entry["dtype"]], size, first).reshape(entry["shape"])
    return arrays, metadata
