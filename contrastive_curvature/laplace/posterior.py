"""The posterior of a contrastive encoder as a class of laplace-torch.

:mod:`contrastive_curvature.posterior` has the posterior as a value, and all numbers; the class here holds the encoder
and one such value, and replaces the value.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Self

import torch
from laplace.baselaplace import ParametricLaplace
from laplace.utils import Kron as HostKron
from laplace.utils.enums import LinkApprox, PredType
from laplace.utils.matrix import KronDecomposed
from torch import Tensor, nn
from tqdm import tqdm

from contrastive_curvature import validate
from contrastive_curvature.embedding.distribution import EmbeddingDistribution
from contrastive_curvature.errors import InputError, InputTypeError, NotFittedError, UnsupportedError
from contrastive_curvature.fit.api import check_indices
from contrastive_curvature.fit.class_centres import MOST_NUMBERS, CentreCollector, ClassCentres
from contrastive_curvature.fit.loop import DatasetCurvature
from contrastive_curvature.fit.part_state import STATISTICS, State
from contrastive_curvature.hessian.sphere import check_outputs
from contrastive_curvature.laplace import influence, parts
from contrastive_curvature.laplace.advice import (
    DefaultPriorWarning,
    LabelRange,
    advise_on_gradients,
    advise_on_labels,
    advise_on_norms,
    advise_on_processes,
)
from contrastive_curvature.laplace.arguments import CONTRASTIVE, check_options, class_and_options, given_options
from contrastive_curvature.laplace.backends.backend import ContrastiveBackend, ContrastiveGGN
from contrastive_curvature.laplace.state_dict import load_state, state_of
from contrastive_curvature.network import in_batches
from contrastive_curvature.network.call import refuse_compiled
from contrastive_curvature.network.digest import Watch
from contrastive_curvature.network.encoder import Encoder, evaluation_mode
from contrastive_curvature.network.inputs import Inputs, made_up_inputs, slice_inputs
from contrastive_curvature.network.loader import check_loader, check_model, check_not_empty, in_fixed_order, read_views
from contrastive_curvature.pairs.relation import check_labels
from contrastive_curvature.posterior import p_values, predict
from contrastive_curvature.posterior.predict import LinearizedEncoder
from contrastive_curvature.posterior.prior import (
    PriorMethod,
    RetrievalCriterion,
    best_of_grid,
    check_prior,
    check_temperature,
    informed,
    make_grid,
    parse_method,
    why_zero,
)
from contrastive_curvature.posterior.value import Posterior, Prior
from contrastive_curvature.progress import Progress
from contrastive_curvature.structures import STRUCTURES, KronLowRank, structure_of
from contrastive_curvature.structures.kron import EigenFactors, Kron

_log = logging.getLogger("contrastive_curvature")

WEIGHTS = ("last_layer", "all", "subnetwork")
"""Values of ``subset_of_weights``."""


def _of_fit(name: str, before: Any, doc: str) -> property:
    """Return a property that reads a field of the fit; ``before`` a fit, another value."""

    def read(la: ContrastiveLaplace) -> Any:
        return before if la._value is None else getattr(la._value.fitted, name)

    return property(read, doc=doc)


class ContrastiveLaplace(ParametricLaplace):
    """A laplace-torch class for the posterior of a contrastive encoder: it holds one value, and replaces it.

    :attr:`posterior` is that value. Everything that laplace-torch reads of a posterior is read from it, so an error or
    an interrupt leaves the posterior that was there, and an earlier prediction keeps its numbers.

    Args:
        model: The encoder. If it ends in an l2-normalisation module, the raw outputs are the inputs of that module.
        likelihood: ``"contrastive"``.
        subset_of_weights: ``"last_layer"``, ``"all"`` or ``"subnetwork"``.
        hessian_structure: Name of a structure (:data:`contrastive_curvature.structures.STRUCTURES`).
        prior_precision: One number, one for each parameter tensor, or one for each parameter; ``None`` for 1 until one
            is chosen.
        prior_mean: One number, or one for each parameter.
        temperature: Temperature of the likelihood; ``None`` for 1 until ``optimize_prior_precision`` chooses one.
        enable_backprop: Whether predictions keep a graph.
        dict_key_x: No effect; laplace-torch passes it.
        dict_key_y: Key of the labels in batches that are mappings.
        backend: ``ContrastiveGGN``, ``BackPackContrastiveGGN``, ``StochManContrastiveGGN`` or a
            :class:`~contrastive_curvature.ContrastiveBackend` of your own. The default ``ContrastiveGGN`` is exact for
            every encoder and needs no other package. An object of one of them, such as ``la.backend``, counts as its
            class with its options; those of ``backend_kwargs`` replace them.
        backend_kwargs: ``loss``, ``distance``, ``pd_fix``, ``margin``, ``negative_weight``, ``normalization``,
            ``pairs``, ``positives``, ``relation``, ``negative_samples``, ``rank``, ``mc_samples``: see the backend.
        last_layer_name: Name of the last linear layer; ``None`` finds it.
        subnetwork_indices: Entries of the flattened trainable parameters, for ``"subnetwork"``.
        **refused: Options of laplace-torch that have no meaning for embeddings.

    Attributes:
        backend_kwargs: The options as they were passed. Every argument can be read back: an object built from the
            attributes by the names of the arguments has the same options and prior. Prior and temperature then count as
            chosen.
        cost: The loss over the data minus its minimum, never negative. For ``SupConLoss``: the loss minus the entropy
            of its targets. For the contrastive loss: each repelling pair counts from the margin, or without a margin
            from the largest distance, 2. For all other losses: the loss itself.
        typical_norm: Mean norm of the raw outputs of the training inputs, to which ``uncertainty`` compares norms;
            ``None`` before ``fit``, and after loading a state without it.
        class_centres: Centres of the training classes, which ``uncertainty`` uses; ``None`` if the targets are not
            class labels, there are too many classes, or the fit has not read them. With ``None``, ``uncertainty``
            depends only on the posterior and the norm.

    Raises:
        InputError: An option is unknown or out of range.
        UnsupportedError: The combination has no correct answer.
    """

    _value: Posterior | None = None
    _advised: Prior | None = None
    _backend: ContrastiveBackend | None = None

    # Arguments of laplace-torch's classes that have one value here.
    asdl_fisher_kwargs = feature_reduction = None
    damping = False

    n_data = _of_fit("n", 0, "Number of points of the fit; 0 before ``fit``.")
    n_outputs = _of_fit("dim", 0, "Number D of outputs.")
    loss = _of_fit("loss", 0.0, "The loss over the data of the fit.")
    cost = _of_fit("cost", 0.0, "The loss minus its minimum.")
    mean = _of_fit("mean", None, "All trainable weights at the fit, shape (P,).")
    mean_subnet = _of_fit("weights", None, "Mean of the chosen weights of a subnetwork, shape (K,).")
    typical_norm = _of_fit("typical_norm", None, "Mean norm of the raw outputs of the training inputs.")
    curvature = _of_fit("curvature", None, "The curvature, unclamped; ``None`` before ``fit``.")

    def __init__(
        self,
        model: nn.Module,
        likelihood: str = CONTRASTIVE,
        subset_of_weights: str = "last_layer",
        hessian_structure: str = "kron_lowrank",
        *,
        prior_precision: float | Tensor | None = None,
        prior_mean: float | Tensor = 0.0,
        temperature: float | None = None,
        enable_backprop: bool = False,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        backend: type[ContrastiveBackend] | ContrastiveBackend | None = None,
        backend_kwargs: Mapping[str, Any] | None = None,
        last_layer_name: str | None = None,
        subnetwork_indices: Tensor | None = None,
        **refused: Any,
    ) -> None:
        if likelihood != CONTRASTIVE:
            raise InputError("likelihood", repr(CONTRASTIVE), likelihood)
        validate.choice("subset_of_weights", subset_of_weights, WEIGHTS)
        self.subset_of_weights = subset_of_weights
        known = tuple(name for name, kind in STRUCTURES.items() if subset_of_weights in kind.weights)
        self.structure = structure_of(hessian_structure, "hessian_structure", known)
        self.hessian_structure = self.structure.name
        of_some = {
            "last_layer_name": (last_layer_name, self.on_last_layer),
            "subnetwork_indices": (subnetwork_indices, self.subset_of_weights == "subnetwork"),
        }
        for name, (value, allowed) in of_some.items():
            if value is not None and not allowed:
                wanted = f"nothing with {self.subset_of_weights!r} weights and the structure {self.hessian_structure!r}"
                raise InputTypeError(name, wanted, repr(value))
        check_model(model, half=self.on_last_layer)
        if not self.on_last_layer:
            refuse_compiled(model)
        kind, of_object = class_and_options(backend)
        self.backend_kwargs = given_options(backend_kwargs)
        self.curvature_options, self._own_options = check_options(
            self.structure,
            kind,
            {**of_object, **self.backend_kwargs},
            {**refused, "enable_backprop": enable_backprop},
            list(inspect.signature(ContrastiveLaplace).parameters)[:-1],
        )
        self.chooses_backend = backend is None
        # laplace-torch's constructor would write the numbers of the posterior, which are read from the value here.
        self.model: Any = model
        self.likelihood, self.enable_backprop = CONTRASTIVE, enable_backprop
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.dict_key_x, self.dict_key_y = dict_key_x, dict_key_y
        self._sigma_noise = torch.ones((), dtype=self._dtype, device=self._device)
        self._backend_cls = kind or ContrastiveGGN
        self._backend_kwargs = {
            **self._own_options,
            "options": self.curvature_options,
            "last_layer": self.on_last_layer,
        }
        self._watch = Watch(shared=not self.on_last_layer)
        self.subnetwork_indices: Tensor | None = None
        self.last_layer_name = last_layer_name
        self.data: Inputs | None = None
        if self.on_last_layer:
            # ``la.model`` of another object counts as the encoder in it.
            self._hold(_copied(model.model if isinstance(model, Encoder) else model))
        if self.subset_of_weights == "subnetwork":
            self.subnetwork_indices = check_indices(
                subnetwork_indices, sum(p.numel() for p in self.params), "subnetwork_indices"
            )
        self._prior = Prior(
            self._of_prior("prior_precision", 1.0 if prior_precision is None else prior_precision),
            self._of_prior("prior_mean", prior_mean),
            1.0 if temperature is None else check_temperature(temperature, self._dtype),
            chosen=prior_precision is not None,
            keeps_temperature=temperature is not None,
        )

    @classmethod
    def around(cls, encoder: nn.Module, probe: Inputs, **arguments: Any) -> Self:
        """Build a posterior that holds an encoder in training; the encoder's mode does not change."""
        training = [(module, module.training) for module in encoder.modules()]
        try:
            la = cls(encoder, **arguments)
            la._hold(encoder)
            la._watch = Watch(shared=True)
            with evaluation_mode(la.model):
                la.prepare(probe)
        finally:
            for module, mode in training:
                module.training = mode
        return la

    def with_encoder(self, model: nn.Module) -> Self:
        """Return an object of the same options, prior and posterior, around an encoder of the same layers."""
        other = copy.copy(self)
        other.model, other._backend, other._watch = model, None, Watch(shared=self._watch.shared)
        return other

    @property
    def posterior(self) -> Posterior:
        """The present posterior, a value that nothing changes.

        Raises:
            NotFittedError: Before ``fit``.
        """
        if self._value is None:
            raise NotFittedError("Laplace not fitted. Run la.fit(train_loader) first, or la.load_state_dict(state).")
        return self._value

    @posterior.setter
    def posterior(self, value: Posterior) -> None:
        self._value = value

    @property
    def read(self) -> LinearizedEncoder:
        """The encoder as predictions use it."""
        indices, watch = self.subnetwork_indices, self._watch
        return LinearizedEncoder(self.model, self.backend, self.on_last_layer, indices, self.enable_backprop, watch)

    @property
    def prior(self) -> Prior:
        """The present prior and temperature."""
        return self._prior if self._value is None else self._value.prior

    def _change_prior(self, **changes: Any) -> None:
        prior = replace(self.prior, **changes)
        if self._value is None:
            self._prior = prior
        else:
            self._value = self._value.with_prior(prior)

    def plain_options(self) -> dict[str, Any]:
        """Return the options of the curvature as strings and numbers; for a relation, only whether it is set."""
        return {**self.curvature_options.plain(), **self._own_options}

    @property
    def on_last_layer(self) -> bool:
        """Whether the posterior is over the last linear layer, which has closed forms."""
        return self.subset_of_weights == "last_layer"

    @property
    def class_centres(self) -> ClassCentres | None:
        """Centres of the training classes; ``None`` without labels, for one class, or for too many classes."""
        return None if self._value is None else self._value.fitted.class_centres

    @class_centres.setter
    def class_centres(self, centres: ClassCentres | None) -> None:
        self._value = replace(self.posterior, fitted=replace(self.posterior.fitted, classes=centres))

    @property
    def backend(self) -> ContrastiveBackend:
        """The curvature backend, constructed at first use."""
        if self._backend is None:
            options = {**self._backend_kwargs, "dict_key_x": self.dict_key_x, "dict_key_y": self.dict_key_y}
            self._backend = self._backend_cls(self.model, CONTRASTIVE, **options)
            self._backend.subnetwork_indices = self.subnetwork_indices
            self._backend.sketches_inputs = issubclass(self.structure, KronLowRank)
        return self._backend

    def prepare(self, probe: Inputs) -> None:
        """Analyse the encoder with a few inputs, and construct the backend.

        Raises:
            InputError: The embeddings have one dimension.
            UnsupportedError: The encoder's raw outputs cannot be reached.
        """
        self.model.eval()
        self.find_last_layer(probe)
        self.renew_backend()
        dim = self.backend.encoder(probe).dim
        if dim < 2:
            hint = "The direction of one number is its sign, which no small change of the weights moves."
            raise InputError("model", "embeddings of D >= 2 dimensions", f"D = {dim}", hint)
        self.model.output_size = dim

    def find_last_layer(self, probe: Inputs) -> None:
        """Find the last layer of the encoder, which the backend needs."""
        if not self.on_last_layer or self.model.last_layer is not None:
            return
        self.model.analyse(probe)
        self.model.require_last_layer()
        # Saved with the posterior, to find the last layer again after loading.
        self.data = made_up_inputs(probe)

    def renew_backend(self) -> None:
        """Construct a new backend, unless the user named one: the encoder may have changed since the last fit."""
        if not self.chooses_backend:
            return
        self._backend_cls, self._backend = ContrastiveGGN, None
        _log.info("curvature by ContrastiveGGN: the default, exact for every encoder (backend=... takes another)")

    def _hold(self, encoder: nn.Module) -> None:
        """Use this encoder; only a last-layer posterior has to wrap it."""
        if self.on_last_layer:
            self.model = Encoder(encoder, None, self.last_layer_name, label_key=self.dict_key_y)

    def first_inputs(self, loader: Iterable[Any]) -> list[Inputs]:
        """Return a few inputs of the first batch in a list; an empty list for an empty loader."""
        # Both views are inputs of the encoder; the first one is used.
        views = [read_views(self.model, batch, self.dict_key_y) for batch in islice(loader, 1)]
        return [slice_inputs(view.first, slice(0, 8)) for view in views]

    def fit(self, train_loader: Iterable[Any], override: bool = True, progress_bar: bool | None = None) -> None:
        """Fit the posterior over all pairs of the data set (or inside its batches, with ``pairs="batch"``).

        In a ``torch.distributed`` process group, each process fits only the data of its own loader, and warns;
        ``docs/large_data.md#several-processes-torchrun`` has the fit of all data together.

        Args:
            train_loader: Batches ``(x, labels)`` or mappings; iterated several times. A ``DataLoader`` that shuffles is
                read whole, in the order of its data set; by a loss that compares points within their batch (of anchors,
                or with ``pairs="batch"``) in one random order, always the same, without the last batch if it has
                ``drop_last``. ``without`` and ``cc.influence`` read the same batches. Any other loader must give the
                same order in every pass, or have an attribute ``numbers`` with the index of every point. A warning says
                if a ``DataLoader`` leaves points of its data set out, or repeats some.
            override: ``False`` adds this data set to an earlier fit; pairs between the two data sets are not formed.
            progress_bar: Whether to show progress bars; ``None`` shows them from the tenth second on. A fit that forms
                very many pairs always says so before it starts.

        For each number of the loss that is a tensor with a gradient, as in ``ContrastiveLoss(margin=tensor)``, the data
        are passed over once more, so that :attr:`log_det_ratio`, :attr:`log_likelihood` and
        :meth:`log_marginal_likelihood` have a gradient in it; predictions have none.

        Raises:
            InputError: No data, one point, no positive pair, malformed batches, other data in the second pass, or a
                curvature that is not finite.
            UnsupportedError: The encoder's raw outputs cannot be reached, the structure does not support the fix, or
                the loader gives each of several processes a part of the data.
        """
        self._begin(train_loader, override)
        advise_on_processes()
        self.backend.labels_seen = LabelRange()
        result = self.backend.fit(train_loader, self.structure, progress_bar)
        posterior = self.after(result, override=override)
        advise_on_labels(self.backend.labels_seen, bool(self.n_data) and not override)
        self._value = posterior

    def _begin(self, loader: Iterable[Any], override: object) -> None:
        """Check the arguments of ``fit``, analyse the encoder with the first batch, and construct the backend."""
        # Check this first: in la.fit(x, labels), the labels would be taken for override.
        check_loader(loader)
        validate.flag("override", override)
        probes = self.first_inputs(loader)
        check_not_empty(len(probes))
        self.prepare(probes[0])

    def after(self, result: DatasetCurvature, *, override: bool = True) -> Posterior:
        """Return the posterior of a curvature at the encoder's present weights, with the present prior.

        Args:
            result: Unclamped curvature, loss, cost and number of points. The backend must have analysed the encoder
                before.
            override: ``False`` adds the curvature to an earlier one.
        """
        read = self.read
        fitted = read.fitted(result)
        if self._value is not None and not override:
            fitted = self._value.fitted + fitted
        diagonal = fitted.clamped.diagonal()
        if not bool(diagonal.any()):
            why = why_zero(fitted.curvature, self.on_last_layer)
            msg = f"The clamped curvature is zero everywhere: the posterior is the prior. {why}"
            warnings.warn(msg, UserWarning, stacklevel=3)
        elif self.subset_of_weights == "all":
            advise_on_gradients(self.model, fitted.curvature.reached(fitted.sizes))
        if result.features is not None and self.on_last_layer and self.hessian_structure == "diag":
            weight, *bias = read.parameters
            advise_on_norms(result.features.columns["features"], weight, bias[0] if bias else None, diagonal)
        return Posterior(fitted, self.checked(self._prior) if self._value is None else self._value.prior)

    def checked(self, prior: Prior) -> Prior:
        """Return a prior that was made before the weights were known, or elsewhere; its sizes must be theirs."""
        return replace(
            prior,
            precision=self._of_prior("prior_precision", prior.precision),
            mean=self._of_prior("prior_mean", prior.mean),
            temperature=check_temperature(prior.temperature, self._dtype),
        )

    def update(self, loader: Iterable[Any], progress_bar: bool | None = None) -> None:
        """Add more data to the posterior: ``fit(loader, override=False)``, without pairs between the two data sets.

        Afterwards choose the prior precision and calibrate again, as after ``fit``: the calibration is dropped, and the
        first prediction warns if the prior precision has not been chosen again.

        Args:
            loader: As for ``fit``; the labels must number the classes as in ``fit``.
            progress_bar: Whether to show progress bars; ``None`` shows them from the tenth second on.

        Raises:
            NotFittedError: Before ``fit``.
            InputError: See ``fit``. The posterior does not change.
            UnsupportedError: See ``fit``.
        """
        prior, later = replace(self.posterior.prior, chosen=False), copy.copy(self)
        later.fit(loader, override=False, progress_bar=progress_bar)
        self._value = replace(later.posterior, prior=prior)

    def without(
        self, train_loader: Iterable[Any], gone: Any, newton_step: bool = False, progress_bar: bool | None = None
    ) -> Self:
        """Return the posterior without some training points: that of a fit of the rest at the same weights.

        It has the prior precision, the temperature and the options of this one, which stays as it is, and holds nothing
        of the points but in its weights: the encoder keeps what it learned of them. It is not calibrated. Without a
        point, terms of other points change too (shares, denominators), so this takes the time of a fit; of batches of a
        loss that compares within batches, the rest stays together.

        Args:
            train_loader: The loader of the fit, read as ``fit`` reads it.
            gone: Positions of the points that go, whole numbers (M,), counted from 0 in the order of the loader; of a
                ``DataLoader`` that shuffles, in the order of its data set.
            newton_step: Whether the last layer moves too, in a copy of the encoder: by one Newton step towards the
                minimum of the rest, from the gradient of all terms in which the points stand. The layers below keep
                what they learned. ``rest.mean`` are the new weights, where the curvature is computed again. How far it
                is from training again: ``docs/influence.md``.
            progress_bar: Whether to show progress bars; ``None`` shows them from the tenth second on.

        Returns:
            A new posterior. Choose its prior precision and calibrate it again.

        Raises:
            NotFittedError: Before ``fit``.
            InputError: See ``fit``; a position is not in the loader, the loader has not the points of the fit, or it
                gives other ones at these positions when it is read again.
            UnsupportedError: ``newton_step`` of other weights than the last layer's, of a loss of neither pairs nor
                anchors, or with the pairs of batches or a relation.
        """
        return influence.without(self, train_loader, gone, newton_step, progress_bar)

    def part_statistics(self, loader: Iterable[Any], part: tuple[int, int], progress_bar: bool | None = None) -> State:
        """Run the first pass over a part of the data: its statistics, which all parts need.

        Save the state with ``state.save(path)``, load it with ``State.load(path)``, and merge the states of all parts
        with ``State.merged(states)``, in any order. A lost part can be computed again alone.

        Args:
            loader: Batches ``(x, labels)`` or mappings with the points of the part; it may be empty.
            part: Index of the part, from 0, and number of all parts.
            progress_bar: Whether to show a progress bar; ``None`` shows it from the tenth second on.

        Returns:
            Counts and sums by class, and ``negative_samples`` points (``"auto"``: at most 29,999). With
            ``negative_samples=None`` and a margin, or with a loss that needs every single positive: all embeddings of
            the part.

        Raises:
            InputError: A batch or ``part`` is malformed.
            UnsupportedError: The structure or an option does not support a fit in parts.
        """
        return parts.run_pass(self, loader, part, None, progress_bar)

    def part_curvature(
        self, loader: Iterable[Any], part: tuple[int, int], statistics: State, progress_bar: bool | None = None
    ) -> State:
        """Run the second pass over a part of the data: the curvature that the part adds.

        Args:
            loader: The same points as in the first pass over this part, in any order.
            part: Index of the part, from 0, and number of all parts.
            statistics: Merged statistics of ALL parts.
            progress_bar: Whether to show a progress bar; ``None`` shows it from the tenth second on.

        Returns:
            The unclamped curvature of the part; save and merge it like the statistics.

        Raises:
            InputError: The statistics lack a part, or are of other data, another encoder or other options; malformed
                batches; or a curvature that is not finite.
            UnsupportedError: The structure or an option does not support a fit in parts.
        """
        parts.check_kind("statistics", statistics, STATISTICS)
        return parts.run_pass(self, loader, part, statistics, progress_bar)

    def fit_parts(self, statistics: State, curvature: State, example: Inputs | None = None) -> None:
        """Fit the posterior from the states of both passes over all parts; no data are needed.

        Args:
            statistics: States of :meth:`part_statistics`, merged over all parts.
            curvature: States of :meth:`part_curvature`, merged over all parts.
            example: Two inputs, needed only if the encoder does not accept the made-up inputs in the states.

        Raises:
            InputError: A part is missing, the states are of other data, another encoder or other options, or an example
                is needed. The posterior does not change.
        """
        self._value = parts.fit_parts(self, statistics, curvature, example)

    def optimize_prior_precision(
        self,
        pred_type: PredType | str = PredType.GLM,
        method: PriorMethod | str = PriorMethod.AVERAGE_INFORMATION,
        n_steps: int = 100,
        lr: float = 1e-1,
        init_prior_prec: float | Tensor = 1.0,
        prior_structure: str = "scalar",
        val_loader: Iterable[Any] | None = None,
        loss: RetrievalCriterion | None = None,
        log_prior_prec_min: float = -4,
        log_prior_prec_max: float = 4,
        grid_size: int = 17,
        link_approx: object = None,
        n_samples: int = 30,
        verbose: bool = False,
        progress_bar: bool = False,
        log_prior_prec_base: float = 10.0,
        strength: float | None = None,
    ) -> None:
        """Choose the prior precision.

        Args:
            pred_type: For ``"gridsearch"``: ``"glm"`` or ``"nn"`` samples.
            method: ``"average_information"`` (default): ``strength`` times the mean diagonal of the curvature, see
                :func:`~contrastive_curvature.posterior.prior.average_information`, divided by the temperature; unless
                the object was constructed with a temperature, the temperature is also set, to ``2 L / (N + gamma)``,
                with the ``cost`` ``L`` of all N points and the effective number ``gamma`` of parameters
                (:mod:`~contrastive_curvature.posterior.prior`), so that sampled networks have at most about twice the
                loss of the trained network.
                ``"unit_information"``: the mean divided by the number of points and by the temperature, which does not
                change.
                ``"marglik"``: laplace-torch's maximisation of the marginal likelihood. ``"gridsearch"``: minimise
                ``loss`` on ``val_loader``.
            n_steps: Steps of ``"marglik"``.
            lr: Learning rate of ``"marglik"``.
            init_prior_prec: Start of ``"marglik"``.
            prior_structure: ``"scalar"``, ``"layerwise"`` or ``"diag"``.
            val_loader: Validation data of ``"gridsearch"``, batches ``(x, labels)``.
            loss: Criterion of ``"gridsearch"``, :data:`~contrastive_curvature.posterior.prior.RetrievalCriterion`; the
                default is the Brier score of 1-nearest-neighbour votes of sampled networks,
                :func:`contrastive_curvature.metrics.retrieval_brier`.
            log_prior_prec_min: Lower end of the grid, as an exponent.
            log_prior_prec_max: Upper end of the grid, as an exponent.
            grid_size: Number of values.
            link_approx: No effect; laplace-torch passes it.
            n_samples: Sampled networks of ``"gridsearch"``.
            verbose: Whether to print the result.
            progress_bar: Whether to show a progress bar.
            log_prior_prec_base: Base of the grid.
            strength: Scale of the prior for ``"average_information"``, a positive number; ``None`` for
                :data:`~contrastive_curvature.posterior.prior.STRENGTH` (``docs/defaults.md``).

        Raises:
            InputError: An option is unknown, out of range or not used by the method, rounding makes the posterior
                precision not positive definite, or ``"gridsearch"`` has no validation data.
            NotFittedError: Before ``fit``.
        """
        self.check_sampling(n_samples, None)
        linearized = _parse_pred_type(pred_type) is PredType.GLM
        method = parse_method(method, prior_structure, strength, self.prior_structures)
        if method is PriorMethod.MARGLIK:
            validate.count("n_steps", n_steps)
            validate.number("lr", lr, positive=True)
            check_prior("init_prior_prec", init_prior_prec, self._dtype, self._prior_sizes())
            # laplace-torch sets a prior at every step; a copy takes these.
            trial = copy.copy(self)
            try:
                super(ContrastiveLaplace, trial).optimize_prior_precision(
                    PredType.GLM, "marglik", n_steps, lr, init_prior_prec, prior_structure, progress_bar=progress_bar
                )
            except InputError as error:
                wanted = "a maximisation that stays among positive finite numbers"
                hint = "Use a smaller lr, or method='average_information'."
                raise InputError("lr, n_steps, init_prior_prec", wanted, f"({error})", hint) from None
            chosen = trial.posterior
        elif method is PriorMethod.GRIDSEARCH:
            grid = make_grid(log_prior_prec_min, log_prior_prec_max, grid_size, log_prior_prec_base, self._dtype)
            chosen = best_of_grid(
                self.posterior, self.read, grid, val_loader, prior_structure, loss, linearized, n_samples, progress_bar
            )
        else:
            chosen = informed(self.posterior, method, prior_structure, strength, self.on_last_layer)
        if verbose:
            tqdm.write(f"Prior precision: {chosen.prior.precision}")
        self._value = chosen

    def measure_classes(self, loader: Iterable[Any], progress_bar: bool | None = None) -> None:
        """Compute class centres from labelled inputs, which ``uncertainty`` compares embeddings with.

        ``fit`` does this with the training data. Call it for a posterior without class centres (:class:`OnlineLaplace`,
        a state of an earlier version), or if the classes that will be searched are not the training classes.

        Args:
            loader: Batches ``(x, labels)`` or mappings, with class labels; run over once.
            progress_bar: Whether to show a progress bar; ``None`` shows it from the tenth second on.

        Raises:
            NotFittedError: Before ``fit``.
            InputError: The loader is empty, the labels are not class labels, there is only one class, or there are more
                classes than :data:`~contrastive_curvature.fit.class_centres.MOST_NUMBERS` allows. The posterior does
                not change.
        """
        self.check_fitted()
        check_loader(loader)
        sums = CentreCollector()
        with evaluation_mode(self.model), torch.no_grad():
            for batch in Progress(progress_bar).over(in_fixed_order(loader, "loader"), "[classes]"):
                x, y = self.backend.read(batch)
                z = check_outputs(self.backend.encoder(x)(x), "model(x)")
                sums.add(z, check_labels(y, len(z)))
        centres = sums.centres()
        if centres is None or len(centres.labels) < 2:
            wanted = f"inputs of at least two classes, at most {MOST_NUMBERS:,} numbers of all centres"
            raise InputError("loader", wanted, "other ones")
        self.class_centres = centres

    def calibrate(
        self,
        loader: Iterable[Any],
        progress_bar: bool | None = None,
        *,
        score: str | Callable[[EmbeddingDistribution], Any] = "novelty",
        by_class: bool = False,
    ) -> None:
        """Store known inputs for comparison, so that ``la(x).p_value`` and ``la(x).is_known(alpha)`` are valid.

        For new inputs that are exchangeable with these (for example from one shuffled data set), at most a share alpha
        has a p-value of at most alpha, on average over calibration sets. This holds even if the encoder or the score is
        bad. The novelty is standardised with a sample of the training inputs that the ``fit`` of a last layer keeps.
        Without a sample (other weights, a loaded posterior, :class:`OnlineLaplace`) a third of the calibration
        inputs replaces it, and p-values compare with the other two thirds; other scores compare with all calibration
        inputs.

        Call it again after every change of the posterior. Another fit drops the calibration. After a change of the
        prior precision, the temperature, the encoder, or the class centres (if the score uses them), new predictions
        have no p-values until the next call. Earlier predictions keep their p-values.

        Args:
            loader: Batches ``(x, labels)``, whose labels are not used, or ``x`` alone; run over once. Preferably inputs
                that the encoder was not trained on, at least 1 / alpha - 1 of them for the smallest alpha you will use.
            progress_bar: Whether to show a progress bar; ``None`` shows it from the tenth second on.
            score: Score that p-values compare, higher for inputs less like the known ones: ``"novelty"``,
                ``"uncertainty"``, or a named function that takes an :class:`EmbeddingDistribution` and returns B
                numbers, each computed from one embedding alone. The function may use every attribute but ``novelty``,
                ``p_value`` and ``is_known``; a loaded posterior needs it again, see :meth:`set_score`.
            by_class: Whether to compare each input only with the calibration inputs of its predicted class (the nearest
                class centre). The share alpha then holds for every predicted class, and each class needs 1 / alpha - 1
                inputs.

        Raises:
            NotFittedError: Before ``fit``.
            InputTypeError: The loader or a batch has another type, or the function has no name.
            InputError: Fewer than two inputs, inputs that the encoder does not accept, or outputs or scores that are
                not finite. The calibration does not change.
            UnsupportedError: ``by_class`` without class centres.

        Warns:
            OptimisticPValueWarning: More than a tenth of the inputs were also in ``fit``, estimated from the sample
                that the ``fit`` of a last layer keeps; without a sample there is no warning.

        Source: Vovk, Gammerman and Shafer, Algorithmic Learning in a Random World, 2005 (4.6 for ``by_class``).
        """
        self._value = p_values.calibrated(self.posterior, self.read, loader, progress_bar, score, by_class)

    def set_score(self, score: Callable[[EmbeddingDistribution], Any]) -> None:
        """Set the score function of a loaded posterior, because a file cannot hold functions.

        Args:
            score: The function that the posterior was calibrated with, under the same name. It is checked on eight
                made-up embeddings.

        Raises:
            NotFittedError: The posterior is not calibrated, or the function returns other scores than at the
                calibration.
            InputError: The function has another name, or the calibration needs no function.
        """
        self._value = p_values.with_score(self.posterior, score)

    def __call__(
        self,
        x: Inputs,
        pred_type: PredType | str = PredType.GLM,
        joint: bool = False,
        link_approx: LinkApprox | str = LinkApprox.PROBIT,
        n_samples: int | None = None,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        fitting: bool = False,
        on_invalid: str = "error",
        **model_kwargs: Any,
    ) -> EmbeddingDistribution:
        """Return the distribution of embeddings; ``mean, covariance = la(x)`` as from a regression of laplace-torch.

        A posterior over all parameters computes it for a chunk of inputs at a time.

        Args:
            x: A batch of B inputs.
            pred_type: ``"glm"``: Gaussian over the raw outputs of the linearised network, in closed form, no samples
                (exact for a last layer). ``"nn"``: from networks with sampled weights.
            joint: With ``"glm"``, keep the covariance between inputs, (B D)^2 numbers. It needs B D P numbers for P
                weights, and is refused above 16 GiB in float32.
            link_approx: No effect, as for a regression of laplace-torch: embeddings have no link function.
            n_samples: Number of networks for ``"nn"``, by default 100. With ``"glm"`` and other weights than the last
                layer's: number of samples of the linearised network that estimate the covariance, without bias, in
                place of the closed form, which forms D Jacobian rows of P numbers for each input. ``uncertainty_error``
                is then the standard error of ``uncertainty``, and there are no p-values. No effect on a last layer, or
                with ``joint`` or ``diagonal_output``, whose closed forms take no samples.
            diagonal_output: With ``"glm"``, compute only the variances of the raw outputs.
            generator: Source of randomness.
            fitting: No effect; laplace-torch passes it.
            on_invalid: Treatment of inputs without an embedding: output or variance is NaN or infinite, or the output
                is zero. ``"error"``: raise an error that names the rows. ``"nan"``: these rows are NaN and ``is_known``
                is false; other rows do not change.
            **model_kwargs: Refused.

        Returns:
            The distribution.

        Raises:
            InputError: An option is unknown or malformed, an input has no finite output, or ``joint`` needs too much
                memory.
            NotFittedError: Before ``fit``.

        Warns:
            UserWarning: The weights of the encoder have changed since the fit.
        """
        self.check_sampling(100 if n_samples is None else n_samples, generator)
        validate.choice("link_approx", link_approx, tuple(LinkApprox))
        if model_kwargs:
            raise InputTypeError("la(x)", "no further arguments", str(sorted(model_kwargs)))
        for name, value in (("joint", joint), ("diagonal_output", diagonal_output), ("fitting", fitting)):
            validate.flag(name, value)
        if joint and diagonal_output:
            raise InputError("joint, diagonal_output", "at most one of them", "both")
        validate.choice("on_invalid", on_invalid, ("error", "nan"))
        self._advise_on_prior()
        kind = _parse_pred_type(pred_type)
        networks = None
        if kind is PredType.NN:
            networks, n_samples = 100 if n_samples is None else n_samples, None
            if networks < 2:
                hint = "A concentration is estimated from them."
                raise InputError("n_samples for pred_type='nn'", "at least 2 samples", networks, hint)
        elif self.on_last_layer or joint or diagonal_output:
            n_samples = None
        return predict.embedding(
            self.posterior,
            self.read,
            x,
            networks=networks,
            n_samples=n_samples,
            joint=joint and networks is None,
            diagonal=diagonal_output and networks is None,
            generator=generator,
            on_invalid=on_invalid,
        )

    def predict(
        self,
        data: Any,
        batch_size: int = 256,
        *,
        n_samples: int | None = None,
        generator: torch.Generator | None = None,
        on_invalid: str = "error",
        progress_bar: bool | None = None,
    ) -> EmbeddingDistribution:
        """Return the distribution of the embeddings of a whole data set: ``la(x)`` of all batches, concatenated.

        A posterior of Kronecker factors (the default) keeps a few times N D numbers for N embeddings, any other
        posterior N D^2.

        Args:
            data: A loader, or a list of batches ``(x, labels)`` or ``x``; labels are not used, and of two views only
                the first is used. Or all inputs in a tensor, a mapping of tensors, a NumPy array, a table, a list of
                vectors or a list of texts; arrays of floating-point numbers are converted to the precision of the
                encoder.
            batch_size: Number of inputs at a time; a loader has its own batches.
            n_samples: As in ``la(x)``.
            generator: As in ``la(x)``.
            on_invalid: Treatment of inputs without an embedding, as in ``la(x)``.
            progress_bar: Whether to show a progress bar; ``None`` shows it from the tenth second on.

        Returns:
            The distribution of all inputs, in order.

        Raises:
            NotFittedError: Before ``fit``.
            InputTypeError: The data or a batch has another type.
            InputError: There is no input, an option is malformed, or the encoder does not accept a batch; the error
                names the batch.
        """
        self.check_fitted()
        # Called here, so that the warning names the line of the caller.
        self._advise_on_prior()
        validate.count("batch_size", batch_size)
        run = partial(self, n_samples=n_samples, generator=generator, on_invalid=on_invalid)
        predictions = in_batches.results(run, self.model, data, "data", batch_size, progress_bar, "[predict]")
        return EmbeddingDistribution.cat(list(predictions))

    def _advise_on_prior(self) -> None:
        """Warn once about a prediction with a default prior precision."""
        prior = self.prior
        if prior.chosen or self._advised is prior:
            return
        self._advised = prior
        msg = (
            f"la(x): the prior precision is still {float(prior.precision.flatten()[0]):.3}, as before the last "
            "fit or update: kappa and uncertainty may be off by orders of magnitude. Call "
            "la.optimize_prior_precision(), or set la.prior_precision yourself."
        )
        warnings.warn(msg, DefaultPriorWarning, stacklevel=3)

    def functional_variance_fast(self, X: Inputs) -> tuple[Tensor, Tensor]:
        """Return means and variances of the raw outputs of a last layer, shape (B, D) each."""
        out = predict.gaussian(self.posterior, self.read, X, diagonal=True)
        return out.raw_mean, out.variance

    def functional_samples(
        self,
        x: Inputs,
        pred_type: PredType | str = PredType.GLM,
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        joint: bool = False,
    ) -> Tensor:
        """Draw raw outputs, before normalisation.

        Args:
            x: A batch of B inputs.
            pred_type: ``"glm"`` or ``"nn"``, as in ``la(x)``.
            n_samples: Number S of samples.
            diagonal_output: With marginal ``"glm"`` samples, ignore covariances between outputs.
            generator: Source of randomness.
            joint: ``True``: sample s has the same weights for all inputs, as retrieval metrics need. ``False`` with
                ``"glm"``: every input is drawn from its own marginal, with one forward pass and the Jacobians. ``"nn"``
                is always joint.

        Returns:
            Shape (S, B, D).

        Raises:
            InputError: An option is unknown or malformed, or an input has no finite output.
            NotFittedError: Before ``fit``.
        """
        self.check_sampling(n_samples, generator)
        linearized = _parse_pred_type(pred_type) is PredType.GLM
        validate.flag("joint", joint)
        validate.flag("diagonal_output", diagonal_output)
        self._advise_on_prior()
        if joint or not linearized:
            return predict.joint_samples(self.posterior, self.read, x, n_samples, generator, linearized=linearized)
        marginals = predict.gaussian(self.posterior, self.read, x, diagonal=diagonal_output)
        return marginals.raw_samples(n_samples, generator)

    def predictive_samples(
        self,
        x: Inputs,
        pred_type: PredType | str = PredType.GLM,
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        joint: bool = False,
    ) -> Tensor:
        """Draw embeddings on the sphere, shape (S, B, D): normalised :meth:`functional_samples`."""
        self.check_sampling(n_samples, generator)
        # Called here, so that the warning names the line of the caller.
        self._advise_on_prior()
        return predict.on_sphere(self.functional_samples(x, pred_type, n_samples, diagonal_output, generator, joint))

    def export(
        self,
        path: Path | str,
        example: Inputs | None = None,
        *,
        format: str | None = None,
        p_value: bool | None = None,
        dynamic_axes: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> tuple[str, ...]:
        """Write the encoder and its posterior as one module that needs neither this library nor laplace-torch.

        For the structures ``diag``, ``kron``, ``full`` and ``kron_lowrank`` of a last layer. The module returns
        ``mu, kappa, uncertainty, p_value`` of ``la(x)``, or only the first three if the posterior is not calibrated.

        Args:
            path: The file. ``.pt2``: a graph for ``torch.export.load``; ``.onnx``: a graph for onnxruntime and others
                (``pip install '.[onnx]'`` in a copy of the repository).
            example: Inputs as for ``la(x)``, to trace a graph; later the number of inputs may differ. The file does not
                contain them. ``None`` uses made-up inputs with the types and shapes of the first inputs of ``fit``.
            format: ``"pt2"`` or ``"onnx"``; by default the suffix of the path.
            p_value: ``True`` refuses a posterior that is not calibrated, ``False`` leaves p-values out.
            dynamic_axes: Axes besides the first whose sizes may change: ``[2, 3]``, and for a mapping of inputs
                ``{"input_ids": [1], "attention_mask": [1]}``.

        Returns:
            Names of the outputs of the module, in order.

        Raises:
            NotFittedError: Before ``fit``; before ``la.calibrate`` with ``p_value=True``; or the calibration belongs to
                another prior precision, temperature or encoder.
            UnsupportedError: Other weights or structures, an encoder that cannot be traced, or a missing package.
            InputError: The folder does not exist, the path has no known suffix, or an argument is malformed. After any
                error, an existing file of that name does not change.
        """
        # Imported here, because ``io`` imports the classes of posteriors.
        from contrastive_curvature.io.serving.export import export

        return export(self, path, example, format=format, p_value=p_value, dynamic_axes=dynamic_axes)

    def save_pretrained(self, folder: Path | str, *, overwrite: bool = False, example: Any = None) -> Path:
        """Write the posterior (or both of two towers) to a folder to keep or share, as one safetensors file.

        :func:`contrastive_curvature.load_pretrained` reads it back; the encoder is not in the folder, so pass it to
        that function. The folder always holds a complete posterior, even if the process is killed.

        Args:
            folder: The folder; missing parents are created.
            overwrite: Whether to replace a posterior that the folder already holds. Other files in it stay.
            example: One or two inputs to save instead of the made-up inputs in a last layer's state, if the encoder
                refuses the made-up inputs; for two towers a pair of inputs. The folder contains these inputs.

        Returns:
            The folder.

        Raises:
            NotFittedError: Before ``fit``.
            InputError: An option is malformed, the folder holds something already, or it cannot be written.
            UnsupportedError: The posterior is of a user's own class, or has options that are not plain values.
        """
        # Imported here, because ``io`` imports the classes of posteriors.
        from contrastive_curvature.io.pretrained.save import save_pretrained

        return save_pretrained(self, folder, overwrite=overwrite, example=example)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the posterior needs apart from the encoder: only tensors, numbers and strings.

        ``torch.load(..., weights_only=True)`` reads it back. It contains no training input; ``"data"`` holds made-up
        inputs of the same types and shapes. ``"checksum"`` covers all other entries but ``"data"``.
        """
        return state_of(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of :meth:`state_dict` into an object constructed with the same options.

        The whole state is checked first, so a refused state does not change this object. Warns if the encoder has other
        weights than the encoder of the saved posterior.

        Raises:
            InputError: The state is damaged, or belongs to another class, likelihood or options, a key is missing, or
                an entry has another type or shape.
        """
        self._value, self.enable_backprop = load_state(self, state_dict), state_dict["enable_backprop"]

    @property
    def H(self) -> Any:
        """Clamped curvature in laplace-torch's form: (P,), (P, P) or a ``KronDecomposed``; ``None`` before ``fit``.

        Of ``kron_lowrank`` it has the input factor of all F features, F^2 numbers, which nothing here computes with.
        """
        if self._value is None:
            return None
        plain = self._value.fitted.clamped.plain()
        return KronDecomposed(*plain) if isinstance(plain, EigenFactors) else plain

    @property
    def H_raw(self) -> Any:
        """The curvature before clamping: (P,), (P, P) or lists of factors; ``None`` before ``fit``."""
        return None if self._value is None else self._value.fitted.curvature.plain()

    @property
    def H_facs(self) -> HostKron:
        """Kronecker factors, unclamped, in laplace-torch's form.

        Raises:
            NotFittedError: Before ``fit``.
            UnsupportedError: The structure has no Kronecker factors.
        """
        fitted = self.posterior.fitted
        if not isinstance(fitted.curvature, Kron):
            raise UnsupportedError(f"H_facs: hessian_structure={self.hessian_structure!r} has no factors.")
        return HostKron(fitted.curvature.factors_of(fitted.clamped))

    @property
    def posterior_precision(self) -> Any:
        """Posterior precision in laplace-torch's form: (P,), (P, P), or decomposed Kronecker factors."""
        if isinstance(self.posterior.fitted.curvature, Kron):
            return self.H * self._H_factor + self.prior_precision
        return self.posterior.fitted.clamped.posterior_precision(*self.posterior.scales)

    @property
    def posterior_covariance(self) -> Tensor:
        """Covariance of the weights, shape (P, P)."""
        eye = torch.eye(self.n_weights, dtype=self._dtype, device=self._device)
        return self.posterior.covariance(eye)

    @property
    def posterior_variance(self) -> Tensor:
        """Variance of every weight, shape (P,), without a matrix (P, P) unless the structure has one."""
        return self.posterior.fitted.clamped.variances(*self.posterior.scales).to(self._dtype)

    @property
    def posterior_scale(self) -> Tensor:
        """Square root of the covariance: of ``diag`` (P,), of ``full`` the lower triangular factor (P, P).

        Raises:
            NotFittedError: Before ``fit``.
            UnsupportedError: The structure has no other square root than its eigenvectors.
        """
        if self.hessian_structure == "diag":
            return self.posterior_variance.sqrt()
        if self.hessian_structure == "full":
            eye = torch.eye(self.n_weights, dtype=torch.float64, device=self._device)
            return torch.linalg.cholesky(self.posterior.covariance(eye)).to(self._dtype)
        raise UnsupportedError(
            f"posterior_scale: {self.hessian_structure!r} has no triangular factor without a matrix (P, P). "
            "la.sample(...) draws weights, la.posterior_precision.bmm(v, exponent=-1/2) scales rows of them."
        )

    @property
    def prior_precision_diag(self) -> Tensor:
        """Prior precision of every weight, shape (P,)."""
        return self.posterior.prior_precisions

    @property
    def log_det_ratio(self) -> Tensor:
        """Log determinant of the posterior precision minus that of the prior precision."""
        return self.posterior.fitted.with_graph.clamped.log_det_ratio(*self.posterior.scales)

    @property
    def log_det_posterior_precision(self) -> Tensor:
        """Log determinant of the posterior precision."""
        return self.log_det_ratio + self.log_det_prior_precision

    @property
    def log_likelihood(self) -> Tensor:
        """Minus the loss, divided by the temperature."""
        return -self.posterior.fitted.with_graph.loss / self.temperature

    def log_marginal_likelihood(
        self, prior_precision: Tensor | None = None, sigma_noise: float | Tensor | None = None
    ) -> Tensor:
        """Return the log marginal likelihood, which can be differentiated with respect to the prior precision.

        Args:
            prior_precision: Replaces the present prior precision; ``None`` keeps it.
            sigma_noise: 1, which tools for regressions pass; embeddings have no observation noise.

        Raises:
            NotFittedError: Before ``fit``.
            InputError: The prior precision is malformed.
            UnsupportedError: ``sigma_noise`` is not 1.
        """
        if sigma_noise is not None:
            self.sigma_noise = sigma_noise
        return super().log_marginal_likelihood(prior_precision)

    @property
    def scatter(self) -> Tensor:
        """Squared distance of the weights to the prior mean, weighted with the prior precision."""
        delta = self.posterior.fitted.weights - self.prior_mean
        return (delta * self.prior_precision_diag) @ delta

    @property
    def rank(self) -> int:
        """Number of eigenvectors of the input factor that the structure ``kron_lowrank`` keeps.

        Raises:
            NotFittedError: Before ``fit``.
        """
        return int(self.posterior.fitted.clamped.rank)  # type: ignore[attr-defined]

    @property
    def n_params_subnet(self) -> int:
        """Number of chosen weights of a subnetwork."""
        return self.n_weights

    def sample(self, n_samples: int = 100, generator: torch.Generator | None = None) -> Tensor:
        """Draw weights from the posterior.

        Args:
            n_samples: Number S of samples.
            generator: Source of randomness, on the encoder's device.

        Returns:
            Shape (S, P); for a subnetwork too, all trainable weights.

        Raises:
            NotFittedError: Before ``fit``.
            InputError: An argument is malformed.
        """
        self.check_sampling(n_samples, generator)
        return self.posterior.sample(n_samples, generator)

    def square_norm(self, value: Tensor) -> Tensor:
        """Return ``(value - mean)^T P (value - mean)`` with the posterior precision ``P``.

        Args:
            value: Weights, shape (P,); for a subnetwork the chosen weights.

        Raises:
            NotFittedError: Before ``fit``.
            InputError: ``value`` is malformed.
        """
        self.check_weights(value)
        fitted = self.posterior.fitted
        return fitted.clamped.square_norm(value - fitted.weights, *self.posterior.scales)

    def log_prob(self, value: Tensor, normalized: bool = True) -> Tensor:
        """Return the log density of the posterior.

        Args:
            value: Weights, shape (P,); for a subnetwork the chosen weights.
            normalized: ``False`` leaves out the terms that do not depend on ``value``.

        Raises:
            NotFittedError: Before ``fit``.
            InputError: An argument is malformed.
        """
        validate.flag("normalized", normalized)
        norm = self.square_norm(value)
        if not normalized:
            return -norm / 2
        return -self.n_weights / 2 * math.log(2 * math.pi) + self.log_det_posterior_precision / 2 - norm / 2

    def functional_variance(self, Js: Tensor) -> Tensor:
        """Return the covariances of the linearised outputs, shape (B, D, D), from Jacobians (B, D, P).

        Raises:
            NotFittedError: Before ``fit``.
            InputError: The Jacobians are malformed.
        """
        self.check_weights(Js, "Js", ("B", "D"))
        return self.posterior.covariance(Js)

    def functional_covariance(self, Js: Tensor) -> Tensor:
        """Return the covariance of all linearised outputs, shape (B D, B D), from Jacobians (B, D, P).

        Raises:
            NotFittedError: Before ``fit``.
            InputError: The Jacobians are malformed.
        """
        self.check_weights(Js, "Js", ("B", "D"))
        return self.posterior.covariance(Js.flatten(0, 1))

    @property
    def temperature(self) -> float | Tensor:
        """Temperature of the likelihood: the curvature is divided by it; a tensor if it was set with a gradient."""
        return self.prior.temperature

    @temperature.setter
    def temperature(self, value: float | Tensor) -> None:
        self._change_prior(temperature=check_temperature(value, self._dtype))

    @ParametricLaplace.sigma_noise.setter  # type: ignore[untyped-decorator]
    def sigma_noise(self, value: float | Tensor) -> None:
        """Refuse an observation noise other than one."""
        one = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
        if not one or isinstance(value, bool) or float(value) != 1:
            raise UnsupportedError(
                "sigma_noise: embeddings have no observation noise. Use temperature=... to weaken the likelihood."
            )

    @property
    def prior_precision(self) -> Tensor:
        """Precision of the prior: one number, one for each parameter tensor, or one for each parameter; a copy."""
        return self.prior.precision.clone()

    @prior_precision.setter
    def prior_precision(self, value: float | Tensor) -> None:
        self._change_prior(precision=self._of_prior("prior_precision", value), chosen=True)

    @property
    def prior_mean(self) -> Tensor:
        """Mean of the prior: one number, or one for each parameter; a copy."""
        return self.prior.mean.clone()

    @prior_mean.setter
    def prior_mean(self, value: float | Tensor) -> None:
        self._change_prior(mean=self._of_prior("prior_mean", value))

    def _of_prior(self, name: str, value: float | Tensor) -> Tensor:
        """Return precision or mean of the prior as a new tensor, checked for the weights as far as they are known."""
        of_mean = name == "prior_mean"
        check_prior(name, value, self._dtype, self._prior_sizes(of_mean=of_mean), positive=not of_mean)
        if not isinstance(value, Tensor):
            return torch.tensor([float(value)], dtype=self._dtype, device=self._device)
        return value.to(self._device, self._dtype).reshape(-1).clone()

    @property
    def n_params(self) -> int | None:
        """Number of weights that a sample has; ``None`` before the last layer is known."""
        every = self._every_parameter
        return None if every is None else sum(p.numel() for p in every)

    @property
    def n_layers(self) -> int | None:
        """Number of parameter tensors; ``None`` before the last layer is known."""
        every = self._every_parameter
        return None if every is None else len(every)

    @property
    def _every_parameter(self) -> list[Tensor] | None:
        if self.on_last_layer and self.model.last_layer is None:
            return None
        return predict.parameters_of(self.model, self.on_last_layer)

    @property
    def n_weights(self) -> int:
        """Number of weights of the posterior."""
        return int(self.n_params) if self.subnetwork_indices is None else len(self.subnetwork_indices)  # type: ignore[arg-type]

    @property
    def prior_structures(self) -> tuple[str, ...]:
        """Allowed values of ``prior_structure``; laplace-torch has only one prior precision for a subnetwork."""
        return ("scalar",) if self.subset_of_weights == "subnetwork" else self.structure.priors

    def effective_parameters(self, prior: Tensor) -> float:
        """Return the effective number of parameters, for a prior precision at the temperature 1."""
        return self.posterior.fitted.clamped.effective_parameters(prior)

    def check_fitted(self) -> None:
        """Refuse a posterior without a curvature.

        Raises:
            NotFittedError: Before ``fit``.
        """
        _ = self.posterior

    def _check_H_init(self) -> None:
        """Call :meth:`check_fitted`; laplace-torch uses this name."""
        self.check_fitted()

    def check_sampling(self, n_samples: object, generator: object) -> None:
        """Refuse to sample before ``fit`` or with malformed arguments.

        Raises:
            NotFittedError: Before ``fit``.
            InputError: An argument is malformed.
        """
        self.check_fitted()
        validate.count("n_samples", n_samples)
        validate.generator(generator, self._device)

    def check_weights(self, value: Tensor, argument: str = "value", rows: tuple[str, ...] = ()) -> None:
        """Refuse anything but finite numbers, one for each weight, shape (P,) or (*rows, P).

        Raises:
            NotFittedError: Before ``fit``.
            InputError: ``value`` has another shape, dtype or device, or is not finite.
        """
        fitted = self.posterior.fitted
        validate.tensor(argument, value, (*rows, sum(fitted.sizes)), fitted.mean)

    def _prior_sizes(self, *, of_mean: bool = False) -> set[int] | None:
        """Return the allowed numbers of entries of the prior precision, or of the prior mean; ``None`` if unknown.

        For a last layer these numbers are unknown before the first batch.
        """
        layers = self.n_layers
        if layers is None:
            return None
        subnetwork = self.subnetwork_indices is not None
        means = ("scalar",) if subnetwork else ("scalar", "diag")
        per = {"scalar": 1, "layerwise": 1 if subnetwork else layers, "diag": self.n_weights}
        return {per[structure] for structure in (means if of_mean else self.prior_structures)}

    @property
    def _dtype(self) -> torch.dtype:
        """Dtype of the posterior: the encoder's dtype, or float32 for an encoder in half precision."""
        return torch.promote_types(super()._dtype, torch.float32)


def _parse_pred_type(value: PredType | str) -> PredType:
    """Turn ``"glm"`` or ``"nn"`` into laplace-torch's enumeration."""
    try:
        return PredType(value)
    except ValueError:
        raise InputError("pred_type", "'glm' or 'nn'", value) from None


def _copied(model: nn.Module) -> nn.Module:
    """Return a copy of the encoder; a last-layer posterior owns its copy."""
    try:
        return copy.deepcopy(model)
    except RuntimeError as error:
        if "deepcopy" not in str(error):
            raise
        raise UnsupportedError(
            "model: a module keeps a tensor of its last run together with the graph, which cannot be copied; so do "
            "torch.nn.utils.weight_norm and spectral_norm. Run it once without: with torch.no_grad(): model(x)"
        ) from error
