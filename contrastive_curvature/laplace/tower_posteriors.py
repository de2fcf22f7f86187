"""Posteriors of two towers trained with one loss: one posterior for each, from one pass over pairs of inputs."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import laplace
import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError
from contrastive_curvature.fit.loop import Fit, fit
from contrastive_curvature.fit.passes import Passes
from contrastive_curvature.fit.tower_batches import TOWERS, TowerBatch, TowerReader, read_towers, towers_product
from contrastive_curvature.laplace.advice import advise_on_processes
from contrastive_curvature.laplace.arguments import CONTRASTIVE
from contrastive_curvature.laplace.posterior import ContrastiveLaplace
from contrastive_curvature.laplace.state_dict import load_state
from contrastive_curvature.losses.row_loss import RowLoss
from contrastive_curvature.network.encoder import evaluation_mode
from contrastive_curvature.network.inputs import slice_inputs
from contrastive_curvature.network.loader import check_loader, first_batch, in_fixed_order
from contrastive_curvature.network.pullback import Pullback
from contrastive_curvature.network.two_towers import TwoTowers
from contrastive_curvature.posterior.prior import PriorMethod
from contrastive_curvature.posterior.value import Posterior
from contrastive_curvature.progress import Progress
from contrastive_curvature.structures import structure_of


class TwoTowerLaplace:
    """Posteriors of two encoders into one space, built by ``laplace.Laplace(TwoTowers(...), "contrastive", ...)``.

    The loss of a batch depends on the outputs of both towers. The curvature in the parameters of both has a block for
    each tower, and blocks between the two. :attr:`a` and :attr:`b` are ordinary posteriors, each from the exact block
    of its tower, in the chosen structure. The blocks between the towers, which couple the weights of both, are dropped:
    in the posterior the two towers are independent. :meth:`curvature_product` keeps these blocks. If both towers are
    one module, :attr:`a` and :attr:`b` are one posterior, from the whole curvature.

    Args:
        model: Both encoders.
        likelihood: ``"contrastive"``.
        subset_of_weights: ``"last_layer"`` or ``"all"``.
        hessian_structure: ``"diag"``, ``"kron"`` or ``"full"``.
        *args: As for ``laplace.Laplace``; both towers get the same arguments.
        **kwargs: The same by name. ``backend_kwargs`` must have the ``loss`` that the towers were trained with: a loss
            of anchors (:class:`~contrastive_curvature.losses.row_loss.RowLoss`). ``last_layer_name`` may be two names.

    Attributes:
        a: Posterior of the first tower; ``la.a(x)`` predicts.
        b: Posterior of the second tower; the same object if both towers are one module.

    Raises:
        InputError: An option is unknown or out of range.
        UnsupportedError: The combination has no correct answer; the loss compares points of one tower; or two different
            towers share parameters of the posterior.
    """

    def __init__(
        self,
        model: TwoTowers,
        likelihood: str = CONTRASTIVE,
        subset_of_weights: str = "last_layer",
        hessian_structure: str = "kron",
        *args: Any,
        **kwargs: Any,
    ) -> None:
        _check_towers(model, likelihood, subset_of_weights, hessian_structure)
        self.model = model
        if subset_of_weights == "all":
            _refuse_shared_parameters(model, None)
        names = kwargs.pop("last_layer_name", None)
        both = names if isinstance(names, (tuple, list)) else (names, names)
        if len(both) != 2:
            raise InputError("last_layer_name", "one name, or one for each tower", f"{len(both)} names")
        posteriors: list[ContrastiveLaplace] = []
        for tower, encoder, name in zip("ab", (model.encoder_a, model.encoder_b), both, strict=True):
            if posteriors and model.shared:
                break
            named = kwargs if name is None else {**kwargs, "last_layer_name": name}
            with _naming(tower):
                posteriors.append(
                    laplace.Laplace(encoder, likelihood, subset_of_weights, hessian_structure, *args, **named)
                )
        self.a, self.b = posteriors[0], posteriors[-1]
        self.loss_of_towers = _loss_of(self.a)

    @property
    def shared(self) -> bool:
        """Whether both towers are one module, with one posterior."""
        return self.a is self.b

    @property
    def loss(self) -> float:
        """Value of the loss over the data of the fit; each tower has half of it."""
        return sum(float(la.loss) for la in self._each())

    def fit(self, train_loader: Iterable[Any], progress_bar: bool | None = None) -> None:
        """Fit both posteriors; an anchor is compared with the candidates in its batch, as in training.

        Args:
            train_loader: Batches ``(a, b)`` where ``a[i]`` belongs to ``b[i]``, ``((a, b), labels)`` or
                ``(a, b, labels)`` with one label for each pair, which losses of classes use
                (``backend_kwargs=dict(positives=...)`` chooses whether a loss uses labels),
                ``(a, b, (labels of a, labels of b))`` for any numbers of inputs. ``a`` and ``b`` are tensors or
                mappings. Use the batch composition of training.
            progress_bar: Whether to show progress bars; ``None`` shows them from the tenth second on.

        Raises:
            InputError: No data, a malformed batch, no positive pair or no negative pair, towers of different output
                dimension, or outputs or a curvature that are not finite. Both posteriors do not change.
            UnsupportedError: The raw outputs of an encoder cannot be reached, the loader is made for several processes,
                or the towers share their last layer.
        """
        check_loader(train_loader)
        advise_on_processes()
        probe = self._begin(train_loader)
        backend = self.a.backend
        with self._ready(probe) as pullbacks:
            backend.options.check_structure(self.a.structure)
            f = Fit(TOWERS, pullbacks, self.a.structure, backend.options, Progress(progress_bar))
            reader = TowerReader(in_fixed_order(train_loader, mixed=True), self._read)
            results = fit(f, Passes(reader, backend.encoder(probe.a), pullbacks[0]))
        self._replace([la.after(result) for la, result in zip(self._each(), results, strict=True)])

    def optimize_prior_precision(self, *args: Any, **kwargs: Any) -> None:
        """Choose the prior precision of both posteriors, each from its own curvature.

        Args:
            *args: As for :meth:`~contrastive_curvature.laplace.posterior.ContrastiveLaplace.optimize_prior_precision`.
            **kwargs: The same by name.

        Raises:
            InputError: An argument is malformed. Both posteriors do not change.
            UnsupportedError: ``"gridsearch"``, because its criterion needs labelled inputs of one tower.
            NotFittedError: Before ``fit``.
        """
        method = kwargs.get("method", args[1] if len(args) > 1 else None)
        if method == PriorMethod.GRIDSEARCH:
            raise UnsupportedError(
                "method='gridsearch': call la.a.optimize_prior_precision(...) with batches (a, labels), and la.b."
            )
        later = [copy.copy(la) for la in self._each()]
        for la in later:
            la.optimize_prior_precision(*args, **kwargs)
        self._replace([la.posterior for la in later])

    def calibrate(self, loader: Iterable[Any], progress_bar: bool | None = None, **options: Any) -> None:
        """Store known inputs of both towers: calls ``la.a.calibrate`` and ``la.b.calibrate``, which also work alone.

        Args:
            loader: Batches as for :meth:`fit`; run over once for each tower. A shared posterior uses the inputs of both
                sides.
            progress_bar: Whether to show a progress bar; ``None`` shows it from the tenth second on.
            **options: ``score`` and ``by_class``, see :meth:`ContrastiveLaplace.calibrate`.

        Raises:
            NotFittedError: Before ``fit``.
            InputError: See :meth:`ContrastiveLaplace.calibrate`. The calibration does not change.
        """
        check_loader(loader, "loader")
        batches = in_fixed_order(loader, "loader")
        sides = [("a", "b")] if self.shared else [("a",), ("b",)]
        later = [copy.copy(la) for la in self._each()]
        for la, side in zip(later, sides, strict=True):
            inputs = (getattr(batch, tower) for batch in map(self._read, batches) for tower in side)
            la.calibrate(inputs, progress_bar, **options)
        self._replace([la.posterior for la in later])

    def curvature_product(self, loader: Iterable[Any], v_a: Tensor, v_b: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return ``J^T H J (v_a, v_b)`` over a data set, with the blocks between the towers, unclamped.

        ``H`` is the Hessian of the loss in the outputs of both towers, with the ``pd_fix`` of the loss: only ``ggn``,
        ``full`` and ``positive`` have blocks between points, and so between the towers.

        Args:
            loader: Batches as for :meth:`fit`; run over once.
            v_a: Vector for the parameters of the first tower, in the order of ``la.a.mean``, shape (P_a,).
            v_b: Vector for the second tower, shape (P_b,); ``None`` if both towers are one module.

        Returns:
            The two parts of the product, (P_a,) and (P_b,); for a shared module one part, (P,).

        Raises:
            InputError: A vector or a batch is malformed, or the product is not finite.
            NotFittedError: Before ``fit``.
        """
        check_loader(loader, "loader")
        if (v_b is None) is not self.shared:
            wanted = "None: one module" if self.shared else "a vector over the parameters of the second tower"
            raise InputError("v_b", wanted, "none" if v_b is None else "a vector")
        vectors = [v_a] if v_b is None else [v_a, v_b]
        for name, la, v in zip(("v_a", "v_b"), self._each(), vectors, strict=False):
            la.check_weights(v, name)
        with self._ready(self._read(first_batch(loader))) as pullbacks:
            return tuple(
                towers_product(
                    pullbacks,
                    TowerReader(in_fixed_order(loader, "loader", mixed=True), self._read),
                    self.loss_of_towers,
                    vectors,
                )
            )

    def save_pretrained(self, folder: Path | str, *, overwrite: bool = False, example: Any = None) -> Path:
        """See :meth:`~contrastive_curvature.laplace.ContrastiveLaplace.save_pretrained`; both posteriors."""
        from contrastive_curvature.io.pretrained.save import save_pretrained

        return save_pretrained(self, folder, overwrite=overwrite, example=example)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of both posteriors; ``torch.load(..., weights_only=True)`` can read them from a file.

        Raises:
            NotFittedError: Before ``fit``.
        """
        states = [la.state_dict() for la in self._each()]
        return {"cls_name": type(self).__name__, "shared": self.shared, "a": states[0], "b": states[-1]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of :meth:`state_dict` into an object constructed with the same options.

        Raises:
            InputError: An entry is malformed, or belongs to other towers or options. Both posteriors do not change.
        """
        if not isinstance(state_dict, Mapping) or state_dict.get("cls_name") != type(self).__name__:
            hint = "The state of one posterior goes into la.a or la.b."
            raise InputError("state_dict", "one of two towers", "another one", hint)
        if state_dict.get("shared") is not self.shared:
            both = "one of two modules", "one of a module that both towers share"
            raise InputError("state_dict", both[self.shared], both[not self.shared])
        posteriors = []
        for tower, la in zip("ab", self._each(), strict=False):
            with _naming(tower):
                posteriors.append(load_state(la, state_dict.get(tower, {})))
        self._replace(posteriors)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: an input belongs to one of the towers.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError("la(x): an input belongs to one of the two towers. Call la.a(x) or la.b(x).")

    def __repr__(self) -> str:
        """Return the classes of the posteriors."""
        kinds = " and ".join(type(la).__name__ for la in self._each())
        return f"TwoTowerLaplace({kinds}{', shared by both towers' if self.shared else ''})"

    def _each(self) -> list[ContrastiveLaplace]:
        return [self.a] if self.shared else [self.a, self.b]

    def _read(self, batch: Any) -> TowerBatch:
        encoders = self.a.model, self.b.model
        return read_towers(encoders, batch, self.loss_of_towers, self.a.curvature_options.positives)

    def _begin(self, loader: Iterable[Any]) -> TowerBatch:
        """Analyse both encoders with the first batch."""
        probe = self._read(first_batch(loader))
        for tower, la, x in zip("ab", self._each(), (probe.a, probe.b), strict=False):
            with _naming(tower):
                la.prepare(slice_inputs(x, slice(0, 8)))
        a, b = self.a.backend.encoder(probe.a).dim, self.b.backend.encoder(probe.a if self.shared else probe.b).dim
        if a != b:
            wanted = "two encoders into one space, with the same number of outputs"
            raise InputError("encoder_a, encoder_b", wanted, f"{a} outputs of encoder_a and {b} of encoder_b")
        if self.a.on_last_layer:
            # The posteriors hold copies of the encoders, and copies share nothing.
            _refuse_shared_parameters(self.model, [str(la.model.last_layer_name) for la in (self.a, self.b)])
        return probe

    @contextmanager
    def _ready(self, probe: TowerBatch) -> Iterator[list[Pullback]]:
        """Yield the pullbacks of both towers, with the towers in evaluation mode."""
        with ExitStack() as stack:
            for la in self._each():
                stack.enter_context(evaluation_mode(la.model))
            stack.enter_context(torch.no_grad())
            yield [la.backend.pullback(x) for la, x in zip(self._each(), (probe.a, probe.b), strict=False)]

    def _replace(self, posteriors: list[Posterior]) -> None:
        """Replace the posteriors of both towers, in one statement, which nothing interrupts."""
        self.a._value, self.b._value = posteriors[0], posteriors[-1]


@contextmanager
def _naming(tower: str) -> Iterator[None]:
    """Name the tower in the message of an error."""
    try:
        yield
    except (InputError, UnsupportedError) as error:
        if type(error) not in (InputError, InputTypeError, UnsupportedError):
            raise
        raise type(error)(f"encoder_{tower}: {error}") from None


def _check_towers(model: object, likelihood: object, weights: object, structure: object) -> None:
    """Refuse a combination that has no posterior of two towers."""
    if not isinstance(model, TwoTowers):
        raise InputTypeError("model", "a TwoTowers(encoder_a, encoder_b)", f"a {type(model).__name__}")
    if likelihood != CONTRASTIVE:
        raise InputError("likelihood", repr(CONTRASTIVE), likelihood)
    structure_of(structure, "hessian_structure")
    if weights == "subnetwork":
        raise UnsupportedError(
            "subset_of_weights='subnetwork': two towers have posteriors of the last layers or of all weights."
        )
    places = [
        f"{p.dtype} on {p.device}" for one in (model.encoder_a, model.encoder_b) for p in list(one.parameters())[:1]
    ]
    if len(set(places)) > 1:
        hint = "The outputs of both are compared: move and convert them to one device and dtype."
        raise InputError("encoder_b", f"{places[0]}, as encoder_a", places[1], hint)


def _loss_of(la: ContrastiveLaplace) -> RowLoss:
    """Return the loss of both towers, from the options of one posterior."""
    options = la.curvature_options
    loss = options.loss
    if not options.given_loss:
        hint = "CLIP: InfoNCELoss(temperature=...), SigLIP: SigLIPLoss(scale=..., bias=...), with the trained numbers."
        raise InputError("backend_kwargs: loss", "the loss that the towers were trained with", "none", hint)
    if loss.compares != "anchors":
        raise UnsupportedError(
            f"loss: {type(loss).__name__} compares points of one tower. Use a loss of anchors, such as InfoNCELoss, "
            "SupConLoss or SigLIPLoss."
        )
    if options.relation is not None:
        raise UnsupportedError(
            "relation: inputs of two towers belong together by pairs or labels. Yield (a, b) or (a, b, labels)."
        )
    return cast("RowLoss", loss)


def _refuse_shared_parameters(model: TwoTowers, last_layers: Sequence[str] | None) -> None:
    """Refuse towers that share a parameter of both posteriors: in the named last layers, or in any layer."""
    if model.shared:
        return
    of_a, of_b = model.encoder_a, model.encoder_b
    if last_layers is not None:
        of_a, of_b = of_a.get_submodule(last_layers[0]), of_b.get_submodule(last_layers[1])
    second = {id(p) for p in of_b.parameters() if p.requires_grad}
    common = [name for name, p in of_a.named_parameters() if p.requires_grad and id(p) in second]
    if common:
        raise UnsupportedError(
            f"encoder_a, encoder_b: two modules that share the parameters {', '.join(map(repr, common[:3]))}, so that "
            "these would have two posteriors. Pass one module as both encoders, or, where only earlier layers are "
            "shared, use subset_of_weights='last_layer'."
        )
