"""The base of all losses: a value, an output Hessian, and the options of its curvature."""

from __future__ import annotations

import copy
import hashlib
import inspect
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Literal, Self, TypeVar

import torch
from torch import Tensor
from torch.nn.modules.loss import _Loss

from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError
from contrastive_curvature.hessian.derivatives import CosineDerivatives
from contrastive_curvature.hessian.output import OutputHessian
from contrastive_curvature.hessian.sphere import check_outputs, normalize
from contrastive_curvature.options import Distance, PDFix, parse_option
from contrastive_curvature.pairs import Pairs, make_relation
from contrastive_curvature.pairs.relation import Relation

_T = TypeVar("_T", bound=Any)


class _LastCall:
    """Labels and pairs of a call, kept as long as its embeddings exist; copies and saved files do not keep them."""

    def __init__(self, z: Tensor | None = None, labels: Any = None, pairs: Any = None) -> None:
        self.given = labels, pairs
        self.z = None if z is None else weakref.ref(z, self._forget)

    def _forget(self, _: Any) -> None:
        self.given = None, None

    def __reduce__(self) -> Any:
        return _LastCall, ()


class CosineLoss(_Loss, ABC):
    """A loss that depends on embeddings only through cosines ``s_ij = u_i . u_j`` of unit vectors.

    Its Hessian in the raw outputs is ``F + K``: the first-order part ``F`` from the first derivatives in the cosines,
    indefinite in general, and the second-order part ``K`` from the second derivatives, positive semidefinite where the
    loss is convex in the cosines (``docs/losses.md``).

    Args:
        distance: How the curvature of the loss is split, without effect on the loss, see
            :class:`~contrastive_curvature.options.Distance`.
        pd_fix: How the curvature is made positive definite, without effect on the loss, see
            :class:`~contrastive_curvature.options.PDFix`.

    Raises:
        InputError: An option is unknown.
        UnsupportedError: ``pd_fix="ggn"`` for a loss that is piecewise linear in the cosines.
    """

    compares: ClassVar[Literal["pairs", "anchors", "proxies"]]
    """What the loss compares: the points of ``"pairs"``, each pair by itself; ``"anchors"`` with all candidates of a
    batch; or points with the ``"proxies"`` of numbered classes."""

    supervised: ClassVar[bool] = True
    """Whether labels say what belongs together, where a loader has two views of every input and labels, too."""

    from_sums: ClassVar[bool] = False
    """Whether sums over neighbours say all about the loss of positive pairs, so that a class is known by its sums."""

    convex: bool = True
    """Whether the loss is convex in the cosines, so that its second-order part is positive semidefinite; where that
    depends on options, a subclass sets it and checks the fix again."""

    linear: ClassVar[bool] = False
    """Whether the loss is piecewise linear in the cosines, so that its second derivatives are zero."""

    _options: ClassVar[Mapping[str, Callable[[Any], Any]]] = {
        "distance": partial(parse_option, Distance, "distance"),
        "pd_fix": partial(parse_option, PDFix, "pd_fix"),
    }
    """How the options that :meth:`replaced` takes are parsed."""

    def __init__(self, *, distance: Distance | str, pd_fix: PDFix | str) -> None:
        # Hosts read this as a sum over pairs; options of the loss set the divisor.
        super().__init__(reduction="sum")
        self.distance = parse_option(Distance, "distance", distance)
        self.pd_fix = parse_option(PDFix, "pd_fix", pd_fix)
        self._check_fix()
        self._last_call = _LastCall()

    @property
    def coupled(self) -> bool:
        """Return whether the Hessian with this loss's fix has cross terms between two points."""
        return self.compares != "proxies" and self.pd_fix.coupled

    @property
    def sums_suffice(self) -> bool:
        """Return whether sums over classes suffice for the negatives of class labels, so no sampling is needed."""
        return False

    @property
    def pairs_by_class(self) -> bool:
        """Return whether a pair's weight in the curvature depends only on the classes of its points."""
        return False

    def uncoupled(self) -> Self:
        """Return this loss with the fix that has the same diagonal blocks but no cross terms, if it exists."""
        fixes = {PDFix.FULL: PDFix.FIXED, PDFix.GGN: PDFix.GGN_FIXED}
        return self.replaced(pd_fix=fixes.get(self.pd_fix, self.pd_fix))

    def data_scale(self, n: int) -> float:
        """Return the factor that makes the loss of ``n`` points grow with the data."""
        return 1.0

    def forward(self, z: Tensor, labels: Tensor | None = None, *, pairs: Pairs | None = None) -> Tensor:
        """Compute the loss of a batch.

        Args:
            z: Raw or normalised embeddings, shape (N, D); half precision is computed in float32.
            labels: Integer class labels, shape (N,).
            pairs: Instead of labels, in a form that the loss accepts (``docs/losses.md``): index tuples, masks or a
                callable, among others, see :func:`contrastive_curvature.pairs.make_relation`.

        Returns:
            A scalar; zero, with a zero gradient, if there is nothing to compare.

        Raises:
            InputError: Embeddings, labels or pairs are malformed.
        """
        if isinstance(z, Tensor) and z.requires_grad and torch.is_grad_enabled():
            self._last_call = _LastCall(z, labels, pairs)
        z = check_outputs(z)
        return self._at(normalize(z)[0], self.relate(z, labels, pairs))

    @abstractmethod
    def _at(self, u: Tensor, relation: Any) -> Tensor:
        """Compute the loss of unit embeddings (N, D) and a relation, differentiable by autograd."""

    def relate(self, z: Tensor, labels: Tensor | None, pairs: Pairs | None) -> Relation:
        """Make the relation of checked outputs (N, D) from the user's labels or pairs."""
        return make_relation(len(z), z.device, labels, pairs)

    @abstractmethod
    def derivatives(self, relation: Any, u: Tensor) -> CosineDerivatives:
        """Return the derivatives of this loss in the cosines of N points with unit embeddings ``u`` (N, D).

        ``relation`` comes from :meth:`relate` of this loss.
        """

    def data_hessian(self, z: Tensor, relation: Relation, n_data: int | None = None) -> OutputHessian:
        """Return a batch's part of the Hessian of a data set.

        Args:
            z: Checked raw outputs, shape (B, D).
            relation: Relation of these points, from :meth:`relate`.
            n_data: Number of points of the data set, for a loss whose pairs lie in different batches.
        """
        return self.hessian_at(z, relation)

    def given_with(self, z: Tensor) -> tuple[Tensor | None, Pairs | None] | None:
        """Return labels and pairs of the last differentiable call, for hosts that need them in the backward pass.

        ``None`` if the last call had another tensor. Labels and pairs are kept as long as the tensor exists.
        """
        last = self._last_call
        return last.given if last.z is not None and last.z() is z else None

    def output_hessian(
        self,
        z: Tensor,
        labels: Tensor | None = None,
        *,
        pairs: Pairs | None = None,
        distance: Distance | str | None = None,
        pd_fix: PDFix | str | None = None,
    ) -> OutputHessian:
        """Return the Hessian of this loss with respect to raw outputs.

        Args:
            z: Raw outputs, before any l2-normalisation, shape (N, D); half precision becomes float32.
            labels: Integer class labels, shape (N,).
            pairs: Instead of labels, see :meth:`forward`.
            distance: Used instead of this loss's own distance.
            pd_fix: Used instead of this loss's own fix.

        Returns:
            The Hessian. With ``distance="arccos"`` and ``pd_fix="full"`` it is the exact Hessian of the loss.

        Raises:
            InputError: An argument is malformed, or the norms of the outputs are so large or small that the dtype
                cannot hold the Hessian.
        """
        chosen = self.replaced(distance=distance, pd_fix=pd_fix)
        z = check_outputs(z)
        return chosen.hessian_at(z, chosen.relate(z, labels, pairs))

    def hessian_at(self, z: Tensor, relation: Relation, **how: Any) -> OutputHessian:
        """Return the Hessian at checked raw outputs (N, D) with a relation, see :meth:`derivatives`."""
        return self.hessian_of(z, self.derivatives(relation, normalize(z)[0], **how))

    def hessian_of(self, z: Tensor, derivatives: CosineDerivatives) -> OutputHessian:
        """Return the Hessian at checked raw outputs (N, D) from derivatives of the same points."""
        return OutputHessian(z, derivatives, self.distance, self.pd_fix)

    def replaced(self, **options: Any) -> Self:
        """Return this loss with other values of the options shared by losses of its kind; ``None`` keeps a value.

        Args:
            **options: ``distance`` or ``pd_fix``; for a loss of pairs also ``normalization`` and ``negative_weight``.
        """
        foreign = sorted(set(options) - set(self._options))
        if foreign:
            hint = f"Make another {type(self).__name__} for its other options."
            raise InputError("replaced", " or ".join(self._options), str(foreign), hint)
        values = {name: self._options[name](value) for name, value in options.items() if value is not None}
        if all(getattr(self, name) == value for name, value in values.items()):
            return self
        loss = copy.copy(self)
        for name, value in values.items():
            setattr(loss, name, value)
        loss._check_fix()
        return loss

    def with_gradient(self) -> dict[str, Tensor]:
        """Return the options that are a tensor with one number and a gradient, by name."""
        own = {**vars(self), **self._parameters}
        return {k: v for k, v in own.items() if isinstance(v, Tensor) and v.ndim == 0 and v.requires_grad}

    def with_number(self, name: str, value: Tensor) -> Self:
        """Return this loss with another value of one option of :meth:`with_gradient`."""
        loss = copy.copy(self)
        loss._parameters = {k: p for k, p in self._parameters.items() if k != name}
        vars(loss)[name] = value
        return loss

    def _check_fix(self) -> None:
        """Refuse a fix that leaves no curvature, or does not keep its promise."""
        name = type(self).__name__
        if self.pd_fix.second_only and self.linear:
            raise UnsupportedError(
                f"pd_fix={str(self.pd_fix)!r}: {name} is piecewise linear in the cosines, so its second derivatives, "
                "which this fix keeps alone, are zero. Use pd_fix='fixed', 'psd', 'positive' or 'full'."
            )
        if (self.pd_fix.second_only or self.pd_fix is PDFix.PSD_PARTS) and not self.convex:
            raise UnsupportedError(
                f"pd_fix={str(self.pd_fix)!r}: with these options {name} is not convex in the cosines, so its second "
                "derivatives, which this fix leaves as they are, can be indefinite. Use pd_fix='psd', which projects "
                "the whole block of every point."
            )

    def _check_terms(self, terms: Any, kind: type[_T], cosine: Tensor) -> _T:
        """Check derivatives and roots of a block of cosines, expand them to its shape, and return them as ``kind``."""
        name, wanted = f"{type(self).__name__}._terms", f"{kind.__name__}({', '.join(kind._fields)})"
        if not isinstance(terms, tuple) or len(terms) != len(kind._fields):
            raise InputTypeError(name, wanted, f"a {type(terms).__name__}")
        first, second, *roots = terms
        if (second is None) != self.linear:
            wanted = f"{'None as' if self.linear else 'some'} second derivatives, as linear = {self.linear} says"
            hint = "Where they are zero, set linear = True in the class, and give None."
            raise InputError(name, wanted, "None" if second is None else f"a {type(second).__name__}", hint)
        checked = [None if part is None else _check_block(name, part, cosine) for part in (first, second)]
        return kind(*checked, *(tuple(_check_block(name, root, cosine) for root in part) for part in roots))

    @classmethod
    def arguments(cls) -> dict[str, inspect.Parameter]:
        """Return the constructor's arguments by name, including the ``**options`` for the base classes."""
        named: dict[str, inspect.Parameter] = {}
        for kind in (kind for kind in cls.__mro__ if "__init__" in vars(kind)):
            own = list(inspect.signature(kind).parameters.values())
            named = {**{p.name: p for p in own if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}, **named}
            if kind is CosineLoss or not any(p.kind is p.VAR_KEYWORD for p in own):
                break
        return named

    def config(self) -> dict[str, Any]:
        """Return the options of this loss, for :meth:`from_config`.

        Returns:
            Every constructor argument, of the class and its base classes, that the loss keeps under the same name:
            numbers, strings, and tensors without a graph.
        """
        kept = {**vars(self), **self._buffers, **self._parameters}
        kinds = [kind for kind in type(self).__mro__ if issubclass(kind, CosineLoss)]
        names = dict.fromkeys(name for kind in kinds for name in inspect.signature(kind.__init__).parameters)
        return {name: plain_option(kept[name]) for name in names if name in kept}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Make the loss of a :meth:`config`.

        Args:
            config: Options by name. Options that the class fixes, so that its constructor does not accept them, are
                only compared.

        Raises:
            InputError: The constructor makes a loss with other options.
        """
        loss = cls(**{name: config[name] for name in cls.arguments() if name in config})
        if _text_of(loss.config()) != _text_of(config):
            wanted = f"options that make a {cls.__name__} with {_text_of(config)}"
            hint = "Its constructor has to keep its arguments as attributes of the same names."
            raise InputError("config", wanted, f"one with {_text_of(loss.config())}", hint)
        return loss

    @property
    def description(self) -> str:
        """Return the class and the options on one line, equal for equal losses."""
        return " ".join(repr(self).split())

    def extra_repr(self) -> str:
        """Return the options of :meth:`config`, with a checksum in place of a tensor."""
        return _text_of(self.config())


def plain_option(value: Any) -> Any:
    """Return an option as saved posteriors store it: one number, a tensor without a graph, a plain ``str``."""
    if isinstance(value, Tensor):
        return value.detach() if value.ndim else value.item()
    return str(value) if isinstance(value, str) else value


def _text_of(config: Mapping[str, Any]) -> str:
    texts = {}
    for name, value in config.items():
        texts[name] = repr(value)
        if isinstance(value, Tensor):
            data = value.cpu().contiguous().view(torch.uint8)
            checksum = hashlib.sha256(data.numpy().tobytes()).hexdigest()[:12]
            texts[name] = f"{tuple(value.shape)} sha256:{checksum}"
    return ", ".join(f"{name}={text}" for name, text in texts.items())


def _check_block(name: str, value: object, cosine: Tensor) -> Tensor:
    """Check a rule's result for a block of cosines, of the same shape and dtype; one zero expands to zeros."""
    if isinstance(value, Tensor) and (value.dtype, value.device) == (cosine.dtype, cosine.device):
        if value.shape == cosine.shape:
            return value
        if value.ndim == 0 and not bool(value):
            # No pair of one kind counts, so the weights are a single zero.
            return value.expand_as(cosine)
    wanted = f"a tensor of {cosine.dtype} on {cosine.device}, of the shape of the cosines, {tuple(cosine.shape)}"
    got = f"a {type(value).__name__}"
    if isinstance(value, Tensor):
        got = f"one of {value.dtype} on {value.device}, of shape {tuple(value.shape)}"
    raise InputError(name, wanted, got, "Call .expand_as(cosine) if it broadcasts.")
