"""What all contrastive Laplace classes share: options, fitting over all pairs of a data set, predictions, the prior.

laplace-torch's classes keep the posterior precision, sampling, the marginal likelihood and the prior; this class stands
in front of them and replaces what assumes a sum over points or a softmax.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from laplace.utils.enums import Likelihood, LinkApprox, PredType
from torch import Tensor, nn
from tqdm import tqdm

from contrastive_curvature import validate
from contrastive_curvature.embedding.distribution import EmbeddingDistribution
from contrastive_curvature.errors import InputError, InputTypeError, expected
from contrastive_curvature.fit.class_centres import ClassCentres
from contrastive_curvature.fit.loop import DatasetCurvature
from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.laplace import calibration, fitting, prediction, sampling, saving, tuning
from contrastive_curvature.laplace.advice import LabelRange, advise_on_labels, advise_on_prior
from contrastive_curvature.laplace.backends.base import ContrastiveBackend, ContrastiveGGN
from contrastive_curvature.laplace.forms import CurvatureForm
from contrastive_curvature.laplace.invalid import no_rows, with_nan_rows
from contrastive_curvature.laplace.options import CONTRASTIVE, arguments_by_name, check_arguments, check_options
from contrastive_curvature.laplace.parts import PartwiseFit
from contrastive_curvature.laplace.posterior import CheckedPosterior
from contrastive_curvature.laplace.prior import PriorMethod
from contrastive_curvature.laplace.shareable import Shareable
from contrastive_curvature.laplace.state_values import owned
from contrastive_curvature.network.call import refuse_compiled
from contrastive_curvature.network.inputs import Inputs
from contrastive_curvature.network.loader import check_loader, check_model
from contrastive_curvature.options import Structure

if TYPE_CHECKING:
    pass

__all__ = ["ContrastiveLaplace"]

_log = logging.getLogger("contrastive_curvature")

_NO_HALF = (
    "In half precision a kernel between points loses the digits that a curvature needs. Call model.float() first; or "
    "take hessian_structure='kron_lowrank', 'kron', 'full' or 'diag', which compute in float32 with the encoder as it "
    "is."
)


class ContrastiveLaplace(PartwiseFit, Shareable, CheckedPosterior):
    """A laplace-torch class for the posterior of a contrastive encoder.

    Args:
        model: The encoder. Where it ends in an l2-normalisation module, the raw outputs are what that takes in.
        likelihood: ``"contrastive"``.
        *args: As in laplace-torch's class.
        backend: ``ContrastiveGGN``, ``BackPackContrastiveGGN``, ``CurvlinopsContrastiveGGN``,
            ``StochManContrastiveGGN`` or a :class:`~contrastive_curvature.ContrastiveBackend` of your own. The default,
            ``ContrastiveGGN``, is exact for every encoder and needs no other package.
        backend_kwargs: ``loss``, ``distance``, ``pd_fix``, ``margin``, ``negative_weight``, ``normalization``,
            ``pairs``, ``candidates``, ``negatives_per_anchor``, ``positives``, ``relation``, ``negative_samples``,
            ``rank``, ``kfac_approx``, ``mc_samples``: see the backend.
        **kwargs: As in laplace-torch's class (``prior_precision``, ``prior_mean``, ``temperature``, ...).

    Attributes:
        cost: What the loss over the data is above the least that it can be, never negative: ``SupConLoss`` minus the
            entropy of its targets, the contrastive loss with each repelling pair counted from the margin, or from the
            largest distance, 2, without one. All other losses as they are.
        typical_norm: Mean norm of the raw outputs of the training inputs, which ``uncertainty`` compares norms with;
            ``None`` before ``fit``, and after loading a state that was saved without it.
        class_centres: Centres of the classes of training, which ``uncertainty`` takes into account; ``None`` where the
            targets are no class labels, there are too many classes, or the fit has not seen them. Set it to ``None``
            for an ``uncertainty`` of the posterior and the norm alone.
        curvature_error: Relative standard error of the diagonal of the last fit's curvature, where a sample stands for
            all negatives (``backend_kwargs=dict(negative_samples=...)``); ``None`` where all pairs were counted, and
            for fixes with cross terms, ``lowrank`` and ``gp``, where it is not measured.

    Raises:
        InputError: An option is unknown or out of range.
        UnsupportedError: The combination has no correct answer.
    """

    structure: ClassVar[Structure]
    form: ClassVar[CurvatureForm]
    takes_rank: ClassVar[bool] = False
    sketches_inputs: ClassVar[bool] = False
    keeps_features: ClassVar[bool] = False

    H: Any
    _backend: ContrastiveBackend | None

    def __init__(
        self,
        model: nn.Module,
        likelihood: str = CONTRASTIVE,
        *args: Any,
        backend: type[ContrastiveBackend] | None = None,
        backend_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if likelihood != CONTRASTIVE:
            raise InputError(expected("likelihood", repr(CONTRASTIVE), likelihood))
        if type(self)._key[0] == "last_layer":
            check_model(model, half=self.keeps_features, instead=_NO_HALF)
        else:
            check_model(model)
        if not self.keeps_features:
            refuse_compiled(model)
        kwargs = arguments_by_name(type(self), args, kwargs)
        backend, backend_kwargs = kwargs.pop("backend", backend), kwargs.pop("backend_kwargs", backend_kwargs)
        check_arguments(kwargs, torch.promote_types(next(model.parameters()).dtype, torch.float32))
        self._temperature_given = "temperature" in kwargs
        self.cost: Tensor | float = 0.0
        self._curvature_options, self._own_options = check_options(
            self.structure, backend, backend_kwargs, kwargs, self.takes_rank
        )
        self.typical_norm: float | None = None
        self._classes: ClassCentres | None = None
        self.H_raw: Any = None
        self.curvature_error: float | None = None
        self._known = calibration.KnownInputs()
        self._chooses_backend = backend is None
        # laplace-torch knows no contrastive likelihood: of those it knows, regression adds the least of its own.
        super().__init__(
            model,
            Likelihood.REGRESSION,
            backend=backend or ContrastiveGGN,
            backend_kwargs={**self._own_options, "options": self._curvature_options},
            **kwargs,
        )
        self._advised_on_prior = False
        self._labels = LabelRange()
        self._prior_chosen = "prior_precision" in kwargs
        self.likelihood = CONTRASTIVE

    @property
    def _dtype(self) -> torch.dtype:
        """Of the posterior: that of the encoder, and float32 for one in half precision."""
        return torch.promote_types(super()._dtype, torch.float32)

    @property
    def backend(self) -> ContrastiveBackend:
        """The curvature backend, constructed at first use."""
        if self._backend is None:
            self._backend = fitting.construct_backend(self)
        return self._backend

    @property
    def class_centres(self) -> ClassCentres | None:
        """Centres of the classes of training; ``None`` where there are no labels, one class, or too many classes."""
        return self._classes if self._classes is not None and len(self._classes.labels) > 1 else None

    @class_centres.setter
    def class_centres(self, centres: ClassCentres | None) -> None:
        self._classes = centres

    def fit(self, train_loader: Iterable[Any], override: bool = True, progress_bar: bool | None = None) -> None:
        """Fit the posterior over all pairs of the data set (or inside its batches, with ``pairs="batch"``).

        In an initialised ``torch.distributed`` process group (``torchrun``) every process gives its share of the data,
        as a ``DistributedSampler`` does, and all get the same posterior, that of all the data.

        Args:
            train_loader: Batches ``(x, labels)`` or mappings; iterated several times, and may shuffle in between.
            override: ``False`` adds to an earlier fit, as a further data set: pairs between the two are not formed.
            progress_bar: Whether to show progress bars; ``None`` shows them from the tenth second on. A fit that will
                take more than a minute says so before it starts, whatever this is.

        Raises:
            InputError: No data, one point, no positive pair, malformed batches, other data in the second pass, or a
                curvature that is not finite; or the processes have different encoders or options, or shares of the
                data that overlap or leave points out.
            UnsupportedError: The encoder's raw outputs cannot be reached, the structure has no answer for the fix, or
                the loader gives every process its own part of the data, and this is the only process.
            ProcessError: The fit failed in another process, or that process has gone or does not fit. The posteriors of
                all processes are as they were.
        """
        with fitting.in_all_processes(self, override=override is not False):
            # First, as the labels of la.fit(x, labels) would be taken for override.
            check_loader(train_loader)
            validate.flag("override", override)
            if progress_bar is not None:
                validate.flag("progress_bar", progress_bar)
            fitting.begin(self, train_loader)
            self.backend.labels_seen = seen = LabelRange()
            result = self.backend.fit(train_loader, self.structure, progress_bar)
            everything = seen.joined(self._labels) if self.n_data and not override else seen
            self._take(result, override=override)
            # A share of the data may well have one class.
            alone = fitting.is_alone(self)
            self._labels = everything if alone else LabelRange()
        if alone:
            advise_on_labels(seen, everything)

    def _take(self, result: DatasetCurvature, *, override: bool) -> None:
        """Take the curvature of a fit, with all that a fit leaves besides it."""
        earlier = 0 if override else self.n_data
        classes = fitting.merged_classes(self._classes, result.classes) if earlier else result.classes
        # Everything that can fail runs before the first assignment, so that a failed fit leaves the last one whole.
        self.form.absorb(self, result, earlier)
        loss, cost = (self.loss, float(self.cost)) if earlier else (0.0, 0.0)
        sample = calibration.training_sample(self, result.features, earlier)
        n, norm = result.n + earlier, None if result.typical_norm is None else float(result.typical_norm)
        if earlier and norm is not None:
            norm = None if self.typical_norm is None else (earlier * self.typical_norm + result.n * norm) / n
        fitting.remember(self, result.loss + loss, float(result.cost) + cost, n, norm, classes)
        self._known = replace(self._known, sample=sample)
        self.curvature_error = result.error
        if result.error is not None:
            _log.info("the sampled negatives leave a relative standard error of %.2g in the curvature", result.error)

    def set_curvature(self, result: DatasetCurvature) -> None:
        """Take a curvature that was computed elsewhere, at the encoder's present weights, in place of ``fit``.

        Args:
            result: Unclamped curvature, loss, cost and number of points, in the form that the structure has. The
                backend has analysed the encoder before.
        """
        self.form.absorb(self, result, 0)
        fitting.remember(self, result.loss, float(result.cost), result.n, result.typical_norm, result.classes)
        self._labels = LabelRange()
        self.curvature_error = result.error

    def measure_classes(self, loader: Iterable[Any], progress_bar: bool | None = None) -> None:
        """Take the centres of the classes of labelled inputs, which ``uncertainty`` compares embeddings with.

        ``fit`` does this with the training data. Call it for a posterior that has none (:class:`OnlineLaplace`, ``gp``,
        a state of an earlier version), or for the classes that will be searched where they are not those of training.

        Args:
            loader: Batches ``(x, labels)`` or mappings, with class labels; run over once.
            progress_bar: Whether to show a progress bar; ``None`` shows it from the tenth second on.

        Raises:
            NotFittedError: Before ``fit``.
            InputError: The loader is empty, the labels are no class labels, there is one class only, or there are more
                classes than :data:`~contrastive_curvature.fit.class_centres.MOST_NUMBERS` allows. Nothing has changed.
        """
        self.check_fitted()
        if progress_bar is not None:
            validate.flag("progress_bar", progress_bar)
        self.class_centres = fitting.measured_classes(self, loader, progress_bar)

    def calibrate(self, loader: Iterable[Any], progress_bar: bool | None = None) -> None:
        """Take known inputs to compare others with: afterwards ``la(x).p_value`` and ``la(x).is_known(alpha)`` hold.

        On new inputs that are exchangeable with these, as from one shuffled data set, at most a share alpha has a
        p-value of at most alpha, on average over calibration sets; the encoder and the posterior may be arbitrarily
        bad. To stay exact, the statistic is standardised with other inputs than it is compared with: with a sample of
        the training inputs that a last layer's ``fit`` keeps, so that all n calibration inputs count. Where there is
        none (other weights than the last layer's, ``gp``, a loaded posterior, :class:`OnlineLaplace`) it takes a third
        of the calibration inputs, always the same for the same n, and two thirds count.

        Call it after everything that changes the posterior: another fit drops the calibration, and with another prior
        precision, temperature or encoder p-values are refused until it is called again. :meth:`state_dict` saves it.

        Args:
            loader: Batches ``(x, labels)``, whose labels are not used, or ``x`` alone; run over once. Best inputs that
                the encoder was not trained on, n >= 1 / alpha - 1 of them for the smallest alpha you will use.
            progress_bar: Whether to show a progress bar; ``None`` shows it from the tenth second on.

        Raises:
            NotFittedError: Before ``fit``.
            InputTypeError: The loader or a batch has another type.
            InputError: Fewer than two inputs, inputs that the encoder does not take, or outputs that are not finite.
                The calibration is as it was.

        Warns:
            OptimisticPValueWarning: More than a tenth of the inputs are among those of ``fit``, as far as the sample
                that a last layer's ``fit`` keeps can tell; without one there is no such warning.

        Source: Vovk, Gammerman and Shafer, Algorithmic Learning in a Random World, 2005.
        """
        calibration.calibrate(self, loader, progress_bar)

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

        The structures ``diag``, ``kron``, ``full`` and ``kron_lowrank`` of a last layer. What is written gives
        ``mu, kappa, uncertainty, p_value`` of ``la(x)``, or the first three of a posterior that is not calibrated.

        Args:
            path: The file. ``.pt2``: a graph for ``torch.export.load``; ``.onnx``: a graph for onnxruntime and others
                (``pip install 'contrastive-curvature[onnx]'``); ``.npz`` or ``.safetensors``: arrays for the scorer
                :mod:`contrastive_curvature.serving.numpy_scorer`, which needs numpy only and takes the features of the
                last layer.
            example: Inputs as ``la(x)`` takes them, to trace a graph with; its number of points may be another later.
                It is not in the file. ``None`` takes made-up inputs of the types and shapes of the first ones of
                ``fit``; a scorer needs none.
            format: ``"pt2"``, ``"onnx"``, ``"npz"`` or ``"safetensors"``, where the path does not say it.
            p_value: ``True`` refuses a posterior that is not calibrated, ``False`` leaves p-values out.
            dynamic_axes: Axes besides the first whose sizes may change: ``[2, 3]``, and for a mapping of inputs
                ``{"input_ids": [1], "attention_mask": [1]}``.

        Returns:
            Names of what is returned for an input, in order.

        Raises:
            NotFittedError: Before ``fit``; before ``la.calibrate``, where ``p_value``; or the calibration is of another
                prior precision, temperature or encoder.
            UnsupportedError: Other weights or structures, an encoder that cannot be traced, or a missing package.
            InputError: The folder does not exist, the name says no format, or an argument is malformed. A file of that
                name is as it was, as after every other error.
        """
        # Imported when used, as it imports the classes of posteriors.
        from contrastive_curvature.serving.export import export

        return export(self, path, example, format=format, p_value=p_value, dynamic_axes=dynamic_axes)

    def state_dict(self) -> dict[str, Any]:
        """Everything the posterior needs besides the encoder: tensors, numbers and strings only.

        ``torch.load(..., weights_only=True)`` reads it back. No training input is in it, except for ``gp``, which is
        made of them; ``"data"`` holds made-up inputs of the same types and shapes.
        """
        self.check_fitted()
        state: dict[str, Any] = owned({**super().state_dict(), **saving.saved_parts(self)})
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave, into an object constructed with the same options.

        Everything in it is checked first, so that a state that is refused leaves this object as it was. Warns where the
        encoder has other weights than the one it was saved from.

        Raises:
            InputError: It belongs to another class, likelihood or options, a key is missing, or something in it has
                another type or shape or cannot be right, as a negative curvature.
        """
        saving.load_state(self, state_dict, CONTRASTIVE)

    def plain_options(self) -> dict[str, Any]:
        """Return the options of the curvature as strings and numbers; of a relation only whether there is one."""
        return {**self._curvature_options.plain(), **self._own_options}

    def __call__(
        self,
        x: Inputs,
        pred_type: PredType | str = PredType.GLM,
        joint: bool = False,
        link_approx: LinkApprox | str | None = None,
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        fitting: bool = False,
        on_invalid: str = "error",
        **model_kwargs: Any,
    ) -> EmbeddingDistribution:
        """Distribution of embeddings; ``mu, kappa = la(x)``.

        With all parameters it is computed for a chunk of inputs at a time. A prediction that will take more than a
        minute says so with a :class:`~contrastive_curvature.progress.LongRunWarning` after its first input.

        Args:
            x: A batch of B inputs.
            pred_type: ``"glm"``: Gaussian over the raw outputs of the linearised network, in closed form, no samples
                (exact for a last layer). ``"nn"``: from networks with sampled weights.
            joint: With ``"glm"``, keep the covariance between inputs, (B D)^2 numbers. It needs the Jacobians of all
                inputs at once, B D P numbers for P weights, and is refused above
                :data:`~contrastive_curvature.laplace.prediction.JOINT_ELEMENTS` numbers, 16 GiB in float32.
            link_approx: Must be left alone: a sphere has no link function.
            n_samples: Number of networks for ``"nn"``.
            diagonal_output: With ``"glm"``, compute only the variances of the raw outputs.
            generator: Source of randomness for ``"nn"``.
            fitting: Of no effect; laplace-torch passes it.
            on_invalid: What happens where an input has no embedding, because its output or its variance is NaN or
                infinite. ``"error"``: an error that names the rows. ``"nan"``: these rows are NaN, ``is_known`` is
                false, and so with outputs of zeros, which have no direction; all other rows are what they are in a
                batch without these.
            **model_kwargs: Refused.

        Returns:
            The distribution.

        Raises:
            InputError: An option is unknown or malformed, an input has no finite output, or ``joint`` needs too much.
            NotFittedError: Before ``fit``.
        """
        self.check_sampling(n_samples, generator)
        prediction.refuse_link(link_approx)
        if model_kwargs:
            raise InputTypeError(expected("la(x)", "no further arguments", str(sorted(model_kwargs))))
        for name, value in (("joint", joint), ("diagonal_output", diagonal_output), ("fitting", fitting)):
            validate.flag(name, value)
        if joint and diagonal_output:
            raise InputError(expected("joint, diagonal_output", "at most one of them", "both"))
        validate.choice("on_invalid", on_invalid, ("error", "nan"))
        advise_on_prior(self)
        kind = prediction.parse_pred_type(pred_type)
        if on_invalid == "nan":
            self.check_fitted()

            def predict(rows: Inputs) -> EmbeddingDistribution:
                return self(rows, kind, joint, link_approx, n_samples, diagonal_output, generator)

            def nothing() -> EmbeddingDistribution:
                return no_rows(self, n_samples if kind is PredType.NN else None, joint, diagonal_output)

            return with_nan_rows(self, predict, x, generator, nothing)
        if kind is PredType.NN:
            if n_samples < 2:
                hint = "A concentration is estimated from them."
                raise InputError(expected("n_samples for pred_type='nn'", "at least 2 samples", n_samples, hint))
            samples = sampling.joint_samples(self, x, n_samples, generator, linearized=False)
            return EmbeddingDistribution.from_samples(samples).relative_to(self.typical_norm, self.class_centres)
        if joint or diagonal_output:
            return self._gaussian(x, joint, diagonal_output).relative_to(self.typical_norm, self.class_centres)
        return calibration.predict(self, x).relative_to(self.typical_norm, self.class_centres)

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
            pred_type: ``"glm"`` or ``"nn"``, as in calling.
            n_samples: Number S of samples.
            diagonal_output: With marginal ``"glm"`` samples, ignore covariances between outputs.
            generator: Source of randomness.
            joint: ``True``: sample s has the same weights for all inputs, as retrieval metrics need. ``False``
                with ``"glm"``: every input from its own marginal, from one forward pass and the Jacobians. ``"nn"`` is
                always joint.

        Returns:
            Shape (S, B, D).

        Raises:
            InputError: An option is unknown or malformed, or an input has no finite output.
            NotFittedError: Before ``fit``.
        """
        self.check_sampling(n_samples, generator)
        linearized = prediction.parse_pred_type(pred_type) is PredType.GLM
        validate.flag("joint", joint)
        validate.flag("diagonal_output", diagonal_output)
        advise_on_prior(self)
        if joint or not linearized:
            return sampling.joint_samples(self, x, n_samples, generator, linearized)
        return self._gaussian(x, False, diagonal_output).raw_samples(n_samples, generator)

    def predictive_samples(
        self,
        x: Inputs,
        pred_type: PredType | str = PredType.GLM,
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        joint: bool = False,
    ) -> Tensor:
        """Draw embeddings on the sphere: :meth:`functional_samples`, normalised. Shape (S, B, D)."""
        self.check_sampling(n_samples, generator)
        # Here, so that the warning names the line of the caller.
        advise_on_prior(self)
        raw = self.functional_samples(x, pred_type, n_samples, diagonal_output, generator, joint)
        return normalize(raw.flatten(0, 1))[0].view_as(raw)

    def optimize_prior_precision(
        self,
        pred_type: PredType | str = PredType.GLM,
        method: PriorMethod | str = PriorMethod.AVERAGE_INFORMATION,
        n_steps: int = 100,
        lr: float = 1e-1,
        init_prior_prec: float | Tensor = 1.0,
        prior_structure: str = "scalar",
        val_loader: Iterable[Any] | None = None,
        loss: tuning.RetrievalCriterion | None = None,
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
                :func:`~contrastive_curvature.laplace.prior.average_information`; unless the object was constructed with
                a temperature, that is set too, to ``2 L / (N + gamma)``, with ``L`` the ``cost`` of all N points and
                the effective number ``gamma`` of parameters
                (:mod:`~contrastive_curvature.laplace.effective`), so that sampled networks have
                at most about twice the loss of the trained one. ``"unit_information"``: the mean divided by the number
                of points, the temperature left alone. ``"marglik"``: laplace-torch's maximisation of the marginal
                likelihood. ``"gridsearch"``: minimise ``loss`` on ``val_loader``.
            n_steps: Steps of ``"marglik"``.
            lr: Learning rate of ``"marglik"``.
            init_prior_prec: Start of ``"marglik"``.
            prior_structure: ``"scalar"``, ``"layerwise"`` or ``"diag"``.
            val_loader: Validation data of ``"gridsearch"``, batches ``(x, labels)``.
            loss: Criterion of ``"gridsearch"``, :data:`~contrastive_curvature.laplace.tuning.RetrievalCriterion`; the
                default is the Brier score of 1-nearest-neighbour votes of sampled networks,
                :func:`contrastive_curvature.metrics.retrieval_brier`.
            log_prior_prec_min: Lower end of the grid, as an exponent.
            log_prior_prec_max: Upper end of the grid, as an exponent.
            grid_size: Number of values.
            link_approx: Of no effect; laplace-torch passes it.
            n_samples: Sampled networks of ``"gridsearch"``.
            verbose: Whether to print the result.
            progress_bar: Whether to show a progress bar.
            log_prior_prec_base: Base of the grid.
            strength: Scale of the prior for ``"average_information"``, a positive number; ``None`` for
                :data:`~contrastive_curvature.laplace.prior.STRENGTH` (``docs/defaults.md``).

        Raises:
            InputError: An option is unknown, out of range or of no use to the method, the posterior precision is not
                positive definite by rounding, or ``"gridsearch"`` has no validation data.
            NotFittedError: Before ``fit``.
        """
        self.check_sampling(n_samples, None)
        linearized = prediction.parse_pred_type(pred_type) is PredType.GLM
        validate.flag("verbose", verbose)
        validate.flag("progress_bar", progress_bar)
        method = tuning.check_method(self, method, prior_structure, strength)
        if method is PriorMethod.MARGLIK:
            optimize = super().optimize_prior_precision
            tuning.maximise_marginal_likelihood(
                self, optimize, n_steps, lr, init_prior_prec, prior_structure, progress_bar
            )
        elif method is PriorMethod.GRIDSEARCH:
            grid = tuning.make_grid(log_prior_prec_min, log_prior_prec_max, grid_size, log_prior_prec_base, self._dtype)
            tuning.search_grid(self, grid, val_loader, prior_structure, loss, linearized, n_samples, progress_bar)
        else:
            tuning.set_information(self, method, prior_structure, strength)
        if verbose:
            tqdm.write(f"Prior precision: {self.prior_precision}")

    def _glm_predictive_distribution(
        self, X: Inputs, joint: bool = False, diagonal_output: bool = False
    ) -> tuple[Tensor, Tensor]:
        """laplace-torch's own form of the Gaussian: means and covariances of the raw outputs."""
        out = self._gaussian(X, joint, diagonal_output)
        if joint:
            return out.raw_mean.flatten(), out.joint_covariance
        return out.raw_mean, out.variance if diagonal_output else out.covariance

    def _gaussian(self, x: Inputs, joint: bool, diagonal: bool) -> EmbeddingDistribution:
        return prediction.gaussian(self, x, joint, diagonal)

    def _sampling_context(self, x: Inputs) -> Any:
        """What :meth:`_outputs_at` needs of a batch, computed once for all samples."""
        return x

    def _outputs_at(self, context: Any, theta: Tensor, linearized: bool) -> Tensor:
        """Raw outputs (S, B, D) at given weights (S, P)."""
        return sampling.outputs_at(self, context, theta, linearized)

    def _analyse(self, probe: Inputs) -> None:
        """What must be known of the encoder before the backend exists; nothing where all parameters are."""

    def _prepare_to_load(self, state: Mapping[str, Any]) -> None:
        """What must be known before a state can be checked; nothing where all parameters are."""

    def _hold(self, encoder: nn.Module) -> None:
        """Use this encoder; nothing where laplace-torch has not copied it."""

    def _posterior_parameters(self) -> list[Tensor]:
        """The parameters whose entries are the posterior's mean, in order."""
        return list(self.params)

    def _parameter_sizes(self) -> list[int]:
        """Numbers of entries of the parts that a layerwise prior tells apart."""
        return [p.numel() for p in self._posterior_parameters()]

    def _encoder_dim(self) -> int:
        return self.backend.encoder({}).dim
