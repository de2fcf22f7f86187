"""Distributions of embeddings as containers: rows, concatenation, another device or dtype."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import torch
from torch import Tensor

from contrastive_curvature.embedding.axis_covariance import same_axes
from contrastive_curvature.embedding.checks import check_destination
from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError, expected
from contrastive_curvature.fit.class_centres import same_centres

if TYPE_CHECKING:
    from contrastive_curvature.embedding.distribution import EmbeddingDistribution

__all__ = ["EmbeddingRows", "RowError", "rows_of"]


class RowError(InputError, IndexError):
    """There is no such row. It is an ``IndexError`` too, which sequences raise here."""


class EmbeddingRows:
    """What makes :class:`.EmbeddingDistribution` a container of B embeddings."""

    _rowwise: ClassVar[tuple[str, ...]] = ("raw_mean", "_variance", "_covariance")
    """Attributes that are tensors with one row an embedding, or ``None``."""

    def __getitem__(self, rows: int | slice | Sequence[int] | Sequence[bool] | Tensor) -> Self:
        """The distribution of some of the embeddings, with everything it can be asked, also ``p_value``.

        Args:
            rows: An integer, which gives a distribution of one embedding; a slice; a list or tensor of integers, or of
                B booleans.

        Raises:
            InputTypeError: It is something else.
            RowError: There is no such row, or the number of booleans is not B.
        """
        return self._select(rows_of(rows, len(self), self._self.raw_mean.device))

    def _select(self, rows: Tensor) -> Self:
        out = self._mapped(lambda value: value[rows])
        this, made = self._self, out._self
        if this._axes is not None:
            made._axes, made._covariance = this._axes.rows(rows), None
        if this._samples is not None:
            made._samples = this._samples[:, rows]
        if this._joint is not None:
            n, dim = this.raw_mean.shape
            blocks = this._joint.view(n, dim, n, dim)[rows][:, :, rows]
            made._joint = blocks.reshape(len(rows) * dim, len(rows) * dim)
        made._judge = None if this._judge is None else this._judge.rows(rows)
        return out

    def to(
        self, device: torch.device | str | int | torch.dtype | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        """The same distribution on another device or in another dtype, as ``torch.Tensor.to``.

        ``p_value``, ``novelty`` and ``is_known`` stay what they are. In another dtype everything else is computed from
        the rounded mean and spread.

        Args:
            device: The device; or the dtype.
            dtype: A floating-point dtype; None leaves it.

        Raises:
            InputTypeError: The dtype is no floating-point dtype of 16, 32 or 64 bits; or the device is none.
            InputError: There is no device of that name.
        """
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        check_destination(device, dtype)
        this = self._self
        judge = this._judge
        if judge is not None and dtype not in (None, this.raw_mean.dtype):
            judge = judge.fixed(this)
        out = self._mapped(lambda value: value.to(device=device, dtype=dtype))
        made = out._self
        for name in ("_samples", "_joint"):
            value: Tensor | None = getattr(this, name)
            setattr(made, name, None if value is None else value.to(device=device, dtype=dtype))
        if this._axes is not None:
            made._axes = this._axes.to(made.raw_mean.device, made.raw_mean.dtype)
        made._judge = judge
        return out

    def cpu(self) -> Self:
        """The same distribution on the CPU."""
        return self.to("cpu")

    @classmethod
    def cat(cls, distributions: Sequence[EmbeddingDistribution]) -> EmbeddingDistribution:
        """Concatenate distributions, as ``torch.cat`` does with tensors: of the batches of a data set, say.

        Args:
            distributions: One or more, of one kind (``variance``, covariances, or samples of the same number), one
                dimension D, dtype and device.

        Returns:
            The distribution of all their embeddings, in order. ``uncertainty``, ``p_value`` and ``novelty`` are those
            of the parts; the latter two are refused where a part is no plain prediction ``la(x)``, or the parts are of
            different states of a posterior. Of samples, sample s of the result is of one network only where the parts
            were drawn with generators of one seed; ``mu`` and ``kappa`` do not depend on that.

        Raises:
            InputTypeError: It is no sequence of distributions.
            InputError: There are none; or kind, dimension, dtype, device, typical norm or class centres differ.
            UnsupportedError: They hold joint covariances: between the parts there is none.
        """
        return _concatenated(distributions)

    def __iter__(self) -> Iterator[Tensor]:
        """Unpacking gives two tensors: ``mu, kappa = distribution``. For single embeddings, take indices."""
        return iter((self._self.mu, self._self.kappa))

    def __len__(self) -> int:
        """Number B of embeddings."""
        return len(self._self.raw_mean)

    @property
    def _self(self) -> EmbeddingDistribution:
        return cast("EmbeddingDistribution", self)

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> Self:
        """A copy whose rowwise tensors are changed."""
        out = copy(self)
        for name in self._rowwise:
            value: Tensor | None = getattr(self, name)
            setattr(out, name, None if value is None else change(value))
        return out


def rows_of(rows: Any, n: int, device: torch.device) -> Tensor:
    """Indices, not negative, int64, that an index into n rows stands for.

    Raises:
        InputTypeError: It is neither an integer, a slice nor a list or tensor of integers or booleans.
        RowError: There is no such row, or the number of booleans is not n.
    """
    wanted = "an integer, a slice, or a list or tensor of integers or booleans"
    if isinstance(rows, slice):
        return torch.arange(n, device=device)[list(range(*rows.indices(n)))]
    if isinstance(rows, (bool, str, tuple)) or rows is None or rows is Ellipsis:
        hint = "Rows alone can be chosen." if isinstance(rows, tuple) else ""
        raise InputTypeError(expected("index", wanted, repr(rows), hint))
    try:
        given = torch.as_tensor(rows if isinstance(rows, Tensor) or hasattr(rows, "__len__") else operator.index(rows))
    except (TypeError, ValueError, RuntimeError):
        raise InputTypeError(expected("index", wanted, f"a {type(rows).__name__}")) from None
    if not given.numel() and not isinstance(rows, Tensor):
        given = given.long()
    if given.ndim > 1 or given.is_floating_point() or given.is_complex():
        raise InputTypeError(expected("index", wanted, f"{given.dtype} of shape {tuple(given.shape)}"))
    if given.dtype == torch.bool:
        if tuple(given.shape) != (n,):
            raise RowError(expected("index", f"{n} booleans, one an embedding", f"shape {tuple(given.shape)}"))
        return given.to(device).nonzero().flatten()
    given = given.to(device).long().reshape(-1)
    outside = given[(given < -n) | (given >= n)]
    if len(outside):
        raise RowError(expected("index", f"rows of {n} embeddings", f"{int(outside[0])}"))
    return torch.where(given < 0, given + n, given)


def _concatenated(distributions: Sequence[EmbeddingDistribution]) -> EmbeddingDistribution:
    from contrastive_curvature.embedding.invalid import WithInvalidRows  # it is built on this module

    given = _checked(distributions)
    if any(isinstance(part, WithInvalidRows) for part in given):
        good, valid = WithInvalidRows.of_parts(given)
        return WithInvalidRows(_concatenated(good), valid)
    parts = _fitting(given)
    first = parts[0]
    names = type(first)._rowwise
    kinds = {part._kind for part in parts}
    out = copy(first)
    shared = kinds == {"covariance"} and all(same_axes(first._axes, part._axes) for part in parts)
    if shared and first._axes is not None:
        out._axes = first._axes.with_values(torch.cat([p._axes.values for p in parts if p._axes is not None]))
        out._covariance = None
    else:
        out._axes = None
        out._covariance = torch.cat([p.covariance for p in parts]) if kinds == {"covariance"} else None
    for name in names:
        if name != "_covariance" and getattr(first, name) is not None:
            setattr(out, name, torch.cat([getattr(part, name) for part in parts]))
    if first._samples is not None:
        out._samples = torch.cat([p._samples for p in parts if p._samples is not None], 1)
    judges = [part._judge for part in parts]
    out._judge = None if judges[0] is None else judges[0].joined(judges, parts)
    return out


def _checked(distributions: Any) -> list[Any]:
    """The parts of a concatenation."""
    from contrastive_curvature.embedding.distribution import EmbeddingDistribution  # it is built on this module

    wanted = "a list of EmbeddingDistributions, such as [la(x) for x in batches]"
    if isinstance(distributions, (EmbeddingDistribution, Tensor, str)) or not hasattr(distributions, "__iter__"):
        raise InputTypeError(expected("distributions", wanted, f"a {type(distributions).__name__}"))
    parts = list(distributions)
    for part in parts:
        if not isinstance(part, EmbeddingDistribution):
            raise InputTypeError(expected("distributions", wanted, f"one with a {type(part).__name__}"))
    if not parts:
        raise InputError(expected("distributions", wanted, "an empty one"))
    return parts


def _fitting(parts: list[Any]) -> list[Any]:
    """Parts that fit together."""
    if len(parts) > 1 and any(part._kind == "joint covariance" for part in parts):
        msg = (
            "distributions: joint covariances cannot be concatenated, because between the parts there is none. Call "
            "la(x, joint=True) with all inputs at once, or leave out joint=True."
        )
        raise UnsupportedError(msg)
    first = parts[0]
    for number, part in enumerate(parts[1:], 1):
        for what, has, now in (
            ("class", type(first).__name__, type(part).__name__),
            ("kind of spread", first._kind, part._kind),
            ("dimension", first.raw_mean.shape[1], part.raw_mean.shape[1]),
            ("dtype", first.raw_mean.dtype, part.raw_mean.dtype),
            ("device", first.raw_mean.device, part.raw_mean.device),
            ("number of samples", _count(first), _count(part)),
            ("typical_norm", first._typical_norm, part._typical_norm),
        ):
            if has != now:
                wanted = f"parts of one {what}, that of the first, {has}"
                raise InputError(expected(f"distributions[{number}]", wanted, now))
        if not same_centres(first._class_centres, part._class_centres):
            hint = "The uncertainties of the parts were compared with different ones."
            raise InputError(expected(f"distributions[{number}]", "the class centres of the first", "others", hint))
    return parts


def _count(part: EmbeddingDistribution) -> int | None:
    return None if part._samples is None else len(part._samples)
