"""The base of all contrastive Laplace classes: options, predictions, the prior, saving; :mod:`.fitting` has the fit.

laplace-torch's classes keep the posterior precision, sampling and the marginal likelihood; this class stands in front
of them and replaces what assumes a sum over points or a softmax.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from laplace.utils.enums import Likelihood, LinkApprox, PredType
from torch import Tensor, nn
from tqdm import tqdm

from contrastive_curvature import validate
from contrastive_curvature.embedding.distribution import EmbeddingDistribution
from contrastive_curvature.embedding.match_probability import MatchProbability
from contrastive_curvature.embedding.spread import Dense, Diagonal
from contrastive_curvature.errors import InputError, InputTypeError, expected
from contrastive_curvature.fit.class_centres import ClassCentres
from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.laplace import batches, calibration, prediction
from contrastive_curvature.laplace.advice import DefaultPriorWarning
from contrastive_curvature.laplace.backends.base import ContrastiveBackend, ContrastiveGGN
from contrastive_curvature.laplace.fitting import FittedPosterior
from contrastive_curvature.laplace.options import CONTRASTIVE, arguments_by_name, check_options
from contrastive_curvature.laplace.posterior import check_prior
from contrastive_curvature.laplace.prior import (
    PriorMethod,
    RetrievalCriterion,
    make_grid,
    parse_method,
    search_grid,
    set_information,
)
from contrastive_curvature.laplace.state import (
    KNOWN_BACKENDS,
    check_settings,
    check_shapes,
    check_state,
    loaded_calibration,
    loaded_classes,
    owned,
    refuse,
    saved_calibration,
    saved_classes,
    sealed,
)
from contrastive_curvature.network.call import refuse_compiled
from contrastive_curvature.network.digest import weight_norms
from contrastive_curvature.network.encoder import at_least_float32, evaluation_mode
from contrastive_curvature.network.inputs import Inputs, input_length
from contrastive_curvature.network.loader import check_model
from contrastive_curvature.network.module import ModulePullback
from contrastive_curvature.options import Structure

_AS_SAVED = ("mean", "loss", "cost", "n_data", "n_outputs", "typical_norm", "curvature_error", "enable_backprop")
"""Attributes that a state holds as they are."""


class ContrastiveLaplace(FittedPosterior):
    """A laplace-torch class for the posterior of a contrastive encoder.

    Args:
        model: The encoder. Where it ends in an l2-normalisation module, the raw outputs are what that takes in.
        likelihood: ``"contrastive"``.
        *args: As in laplace-torch's class.
        backend: ``ContrastiveGGN``, ``BackPackContrastiveGGN``, ``CurvlinopsContrastiveGGN``,
            ``StochManContrastiveGGN`` or a :class:`~contrastive_curvature.ContrastiveBackend` of your own. The default,
            ``ContrastiveGGN``, is exact for every encoder and needs no other package.
        backend_kwargs: ``loss``, ``distance``, ``pd_fix``, ``margin``, ``negative_weight``, ``normalization``,
            ``pairs``, ``positives``, ``relation``, ``negative_samples``, ``rank``, ``mc_samples``: see the backend.
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
        check_model(model, half=self.keeps_features)
        if not self.keeps_features:
            refuse_compiled(model)
        named = arguments_by_name(type(self), args, kwargs)
        backend, backend_kwargs = named.pop("backend", backend), named.pop("backend_kwargs", backend_kwargs)
        self.curvature_options, self._own_options = check_options(
            self.structure, backend, backend_kwargs, named, self.takes_rank
        )
        self.cost: Tensor | float = 0.0
        self.typical_norm: float | None = None
        self.H_raw: Any = None
        self.curvature_error: float | None = None
        self.known = calibration.KnownInputs()
        self.stamp: calibration.Stamp | None = None
        self.chooses_backend = backend is None
        self._classes: ClassCentres | None = None
        self._advised_on_prior = False
        self._temperature_given = "temperature" in named
        # laplace-torch knows no contrastive likelihood: of those it knows, regression adds the least of its own.
        super().__init__(
            model,
            Likelihood.REGRESSION,
            backend=backend or ContrastiveGGN,
            backend_kwargs={**self._own_options, "options": self.curvature_options},
            **named,
        )
        # laplace-torch's last-layer classes set these behind their checks.
        for name in ("prior_precision", "prior_mean"):
            if name in named:
                setattr(self, name, named[name])
        self._prior_chosen = "prior_precision" in named
        self.likelihood = CONTRASTIVE

    @classmethod
    def around(cls, encoder: nn.Module, probe: Inputs, **arguments: Any) -> Self:
        """Return a posterior that holds an encoder which goes on training, in its mode, and no curvature yet."""
        training = [(module, module.training) for module in encoder.modules()]
        try:
            la = cls(encoder, **arguments)
            la._hold(encoder)
            la.shares_encoder = True
            with evaluation_mode(la.model):
                la.look_at(probe)
        finally:
            for module, mode in training:
                module.training = mode
        return la

    @property
    def _dtype(self) -> torch.dtype:
        """Of the posterior: that of the encoder, and float32 for one in half precision."""
        return torch.promote_types(super()._dtype, torch.float32)

    def update(self, loader: Iterable[Any], progress_bar: bool | None = None) -> None:
        """Add further data to the posterior: ``fit(loader, override=False)``, without pairs of the two data sets.

        Choose the prior precision and calibrate again afterwards, as after ``fit``: the calibration is dropped, and the
        first prediction warns where the prior precision is still that of before.

        Args:
            loader: As for ``fit``; classes have the numbers that they had there.
            progress_bar: Whether to show progress bars; ``None`` shows them from the tenth second on.

        Raises:
            NotFittedError: Before ``fit``.
            InputError: See ``fit``. The posterior is as it was.
            UnsupportedError: See ``fit``, or the structure cannot add up: ``gp``, ``lowrank``.
        """
        self.check_fitted()
        self.fit(loader, override=False, progress_bar=progress_bar)
        self._prior_chosen = self._advised_on_prior = False

    def calibrate(
        self,
        loader: Iterable[Any],
        progress_bar: bool | None = None,
        *,
        score: str | Callable[[EmbeddingDistribution], Any] = "novelty",
        by_class: bool = False,
    ) -> None:
        """Take known inputs to compare others with: afterwards ``la(x).p_value`` and ``la(x).is_known(alpha)`` hold.

        On new inputs that are exchangeable with these, as from one shuffled data set, at most a share alpha has a
        p-value of at most alpha, on average over calibration sets, however bad the encoder and the score. The novelty
        is standardised with a sample of the training inputs that a last layer's ``fit`` keeps. Without a sample (other
        weights than the last layer's, ``gp``, a loaded posterior, :class:`OnlineLaplace`) a third of the calibration
        inputs takes its place, and two thirds count; with another score all do.

        Call it after everything that changes the posterior: another fit drops the calibration, and with another prior
        precision, temperature or encoder, or other class centres where the score takes them into account, p-values are
        refused until it is called again.

        Args:
            loader: Batches ``(x, labels)``, whose labels are not used, or ``x`` alone; run over once. Best inputs that
                the encoder was not trained on, n >= 1 / alpha - 1 of them for the smallest alpha you will use.
            progress_bar: Whether to show a progress bar; ``None`` shows it from the tenth second on.
            score: What p-values are of, higher for inputs less like the known ones: ``"novelty"``, ``"uncertainty"``,
                or a function with a name that takes an :class:`EmbeddingDistribution` and returns B numbers, each from
                its own embedding alone. It can ask for all but ``novelty``, ``p_value`` and ``is_known``; a loaded
                posterior needs it again, see :meth:`set_score`.
            by_class: Compare each input with the calibration inputs of its predicted class (of the nearest class
                centre). The share alpha then holds for every predicted class, and each needs 1 / alpha - 1 inputs.

        Raises:
            NotFittedError: Before ``fit``.
            InputTypeError: The loader or a batch has another type, or the function has no name.
            InputError: Fewer than two inputs, inputs that the encoder does not take, or outputs or scores that are not
                finite. The calibration is as it was.
            UnsupportedError: ``by_class`` without class centres.

        Warns:
            OptimisticPValueWarning: More than a tenth of the inputs are among those of ``fit``, as far as the sample
                that a last layer's ``fit`` keeps can tell; without one there is no such warning.

        Source: Vovk, Gammerman and Shafer, Algorithmic Learning in a Random World, 2005 (4.6 for ``by_class``).
        """
        calibration.calibrate(self, loader, progress_bar, score, by_class)

    def set_score(self, score: Callable[[EmbeddingDistribution], Any]) -> None:
        """Give a loaded posterior the function that it was calibrated with, which no file holds.

        Args:
            score: The function, under the same name. It is tried on eight made-up embeddings.

        Raises:
            NotFittedError: The posterior is not calibrated, or the function gives other scores than at the calibration.
            InputError: It has another name, or the calibration needs none.
        """
        calibration.set_score(self, score)

    def export(
        self,
        path: Path | str,
        example: Inputs | None = None,
        *,
        format: str | None = None,
        p_value: bool | None = None,
        dynamic_axes: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
        match: MatchProbability | None = None,
    ) -> tuple[str, ...]:
        """Write the encoder and its posterior as one module that needs neither this library nor laplace-torch.

        The structures ``diag``, ``kron``, ``full`` and ``kron_lowrank`` of a last layer. What is written gives
        ``mu, kappa, uncertainty, p_value`` of ``la(x)``, or the first three of a posterior that is not calibrated.

        Args:
            path: The file. ``.pt2``: a graph for ``torch.export.load``; ``.onnx``: a graph for onnxruntime and others
                (``pip install '.[onnx]'`` in a copy of the repository); ``.npz`` or ``.safetensors``: arrays for the
                scorer :mod:`contrastive_curvature.io.serving.numpy_scorer`, which needs numpy only and takes the
                features of the last layer.
            example: Inputs as ``la(x)`` takes them, to trace a graph with; its number of points may be another later.
                It is not in the file. ``None`` takes made-up inputs of the types and shapes of the first ones of
                ``fit``; a scorer needs none.
            format: ``"pt2"``, ``"onnx"``, ``"npz"`` or ``"safetensors"``, where the path does not say it.
            p_value: ``True`` refuses a posterior that is not calibrated, ``False`` leaves p-values out.
            dynamic_axes: Axes besides the first whose sizes may change: ``[2, 3]``, and for a mapping of inputs
                ``{"input_ids": [1], "attention_mask": [1]}``.
            match: Fitted to predictions of this posterior, for ``scorer.same`` and ``scorer.right`` of the scorer; a
                graph, which scores one input, holds none.

        Returns:
            Names of what is returned for an input, in order.

        Raises:
            NotFittedError: Before ``fit``; before ``la.calibrate``, where ``p_value``; the calibration is of another
                prior precision, temperature or encoder; or ``match`` is not fitted.
            UnsupportedError: Other weights or structures, an encoder that cannot be traced, or a missing package.
            InputError: The folder does not exist, the name says no format, or an argument is malformed. A file of that
                name is as it was, as after every other error.
        """
        # Imported when used, as it imports the classes of posteriors.
        from contrastive_curvature.io.serving.export import export

        return export(self, path, example, format=format, p_value=p_value, dynamic_axes=dynamic_axes, match=match)

    def save_pretrained(self, folder: Path | str, *, overwrite: bool = False, **options: Any) -> Path:
        """Write the posterior, of two towers both, to a folder to keep or to share: safetensors, JSON and a model card.

        :func:`contrastive_curvature.load_pretrained` reads it back around the encoder, which is not in it. What is in
        it is complete at every moment, also if the process is killed.

        Args:
            folder: The folder; missing parents are made.
            overwrite: Whether a saved posterior that is there may be replaced.
            **options: ``match``, ``example`` and what the model card says (``fitted_on``, ``encoder_source``,
                ``license``, ``metrics``, ...), see :class:`~contrastive_curvature.io.pretrained.SaveOptions`.

        Returns:
            The folder.

        Raises:
            NotFittedError: Before ``fit``.
            InputError: An option is malformed, the folder holds something already, or it cannot be written.
            UnsupportedError: A posterior is of a class of your own, or has options that are no plain values.
        """
        # Imported when used, as it imports the classes of posteriors.
        from contrastive_curvature.io.pretrained.save import save_pretrained

        return save_pretrained(self, folder, overwrite=overwrite, **options)

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Save and upload to the Hugging Face hub.

        Args:
            repo_id: The repository, ``"user/name"``; it is made where there is none.
            **options: ``private``, ``token``, ``revision``, ``create_pr`` and ``commit_message``, and the options of
                :meth:`save_pretrained`, see :class:`~contrastive_curvature.io.pretrained.PushOptions`.

        Returns:
            Address of the upload.

        Raises:
            NotFittedError: Before ``fit``.
            InputError: An option is malformed, or the hub refuses the upload.
            UnsupportedError: See :meth:`save_pretrained`.
        """
        from contrastive_curvature.io.pretrained.hub import push_to_hub

        return push_to_hub(self, repo_id, **options)

    def state_dict(self) -> dict[str, Any]:
        """Everything the posterior needs besides the encoder: tensors, numbers and strings only.

        ``torch.load(..., weights_only=True)`` reads it back. No training input is in it, except for ``gp``, which is
        made of them; ``"data"`` holds made-up inputs of the same types and shapes. ``"checksum"`` is one of all other
        entries but ``"data"``.
        """
        self.check_fitted()
        return sealed(self._state())

    def _state(self) -> dict[str, Any]:
        """Return the state without its checksum."""
        state: dict[str, Any] = owned(
            {
                **super().state_dict(),
                "contrastive": self.plain_options(),
                "H_raw": self.H_raw,
                "cost": self.cost,
                "temperature_given": self._temperature_given,
                "backend": type(self.backend).__name__,
                "encoder_norms": weight_norms(self.model),
                "calibration": saved_calibration(self.known.calibration, self.keeps_features),
                "typical_norm": self.typical_norm,
                "class_centres": saved_classes(self._classes),
                "curvature_error": self.curvature_error,
                "prior_chosen": self._prior_chosen,
            }
        )
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave, into an object constructed with the same options.

        Everything in it is checked first, so that a state that is refused leaves this object as it was. Warns where the
        encoder has other weights than the one it was saved from.

        Raises:
            InputError: It is damaged, or belongs to another class, likelihood or options, a key is missing, or
                something in it has another type or shape.
        """
        check_state(state_dict, type(self).__name__, CONTRASTIVE, self.plain_options())
        with self.unchanged_on_error():
            self._prepare_to_load(state_dict)
            like = at_least_float32(next(self.model.parameters()).detach())
            self._load(state_dict, like)

    def _load(self, state: dict[str, Any], like: Tensor) -> None:
        """Take a state whose keys and options are checked; laplace-torch's own method assigns while it checks."""
        if self.enable_backprop != state["enable_backprop"]:
            msg = "enable_backprop: the state was saved with another value, which now holds."
            warnings.warn(msg, UserWarning, stacklevel=3)
        own = ContrastiveGGN if self.chooses_backend else self._backend_cls
        if state["backend"] not in (*KNOWN_BACKENDS, own.__name__):
            hint = "Where it is a backend of your own, construct this object with backend=... of it."
            refuse("backend", f"one of {', '.join(KNOWN_BACKENDS)}", repr(state["backend"]), hint)
        self._renew_backend()
        check_settings(state, like, self.n_params, self._prior_mean_sizes() or set(), self._prior_sizes() or set())
        clamped, raw = self.form.shapes(self.posterior_parameters(), self.n_weights, state)
        check_shapes("H", state["H"], like, clamped)
        check_shapes("H_raw", state["H_raw"], like, raw)
        for name in _AS_SAVED:
            setattr(self, name, state[name])
        self.prior_mean, self.prior_precision = state["prior_mean"], state["prior_precision"]
        self.temperature, self._temperature_given = state["temperature"], state["temperature_given"]
        self._prior_chosen = state["prior_chosen"]
        self.model.output_size = self.n_outputs
        self._hold_curvature(*self.form.loaded(state))
        width = self.model.last_layer.in_features if self.keeps_features else None
        self.known = self.known.anew(loaded_calibration(state["calibration"], width, self.n_outputs, like))
        self._classes = loaded_classes(state["class_centres"], self.n_outputs, like)
        now, saved = weight_norms(self.model), state["encoder_norms"].to(like.device)
        # The tolerance is for other precisions. The encoder's own weights may be loaded after this, so it is no error.
        if saved.shape != now.shape or not torch.allclose(now, saved.to(now), rtol=1e-3, atol=1e-12):
            msg = (
                "The encoder has other weights than the one whose posterior is loaded, so predictions will be wrong. "
                "Load the encoder's state_dict first: laplace-torch keeps it apart from the posterior's."
            )
            warnings.warn(msg, UserWarning, stacklevel=3)

    def plain_options(self) -> dict[str, Any]:
        """Return the options of the curvature as strings and numbers; of a relation only whether there is one."""
        return {**self.curvature_options.plain(), **self._own_options}

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

        With all parameters it is computed for a chunk of inputs at a time.

        Args:
            x: A batch of B inputs.
            pred_type: ``"glm"``: Gaussian over the raw outputs of the linearised network, in closed form, no samples
                (exact for a last layer). ``"nn"``: from networks with sampled weights.
            joint: With ``"glm"``, keep the covariance between inputs, (B D)^2 numbers. It needs B D P numbers for P
                weights, and is refused above 16 GiB in float32.
            link_approx: Must be left alone: a sphere has no link function.
            n_samples: Number of networks for ``"nn"``.
            diagonal_output: With ``"glm"``, compute only the variances of the raw outputs.
            generator: Source of randomness for ``"nn"``.
            fitting: Of no effect; laplace-torch passes it.
            on_invalid: What happens where an input has no embedding, because its output or its variance is NaN or
                infinite, or its output is zero. ``"error"``: an error that names the rows. ``"nan"``: these rows are
                NaN and ``is_known`` is false; other rows do not change.
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
        self._advise_on_prior()
        kind = prediction.parse_pred_type(pred_type)
        if kind is PredType.NN and n_samples < 2:
            hint = "A concentration is estimated from them."
            raise InputError(expected("n_samples for pred_type='nn'", "at least 2 samples", n_samples, hint))

        def finished(found: EmbeddingDistribution, features: Tensor | None) -> EmbeddingDistribution:
            if kind is PredType.GLM and not joint and not diagonal_output:
                found = calibration.judged(self, found, features)
            return found.relative_to(self.typical_norm, self.class_centres)

        def predict(rows: Inputs) -> EmbeddingDistribution:
            if kind is PredType.NN:
                samples = self._joint_samples(rows, n_samples, generator, False)
                return finished(EmbeddingDistribution.from_samples(samples), None)
            if joint or diagonal_output:
                return finished(self._gaussian(rows, joint, diagonal_output), None)
            return finished(*self.observe(rows))

        def nothing() -> EmbeddingDistribution:
            mean = torch.empty(0, self.n_outputs, dtype=self.mean.dtype, device=self._device)
            if kind is PredType.NN:
                none = EmbeddingDistribution.from_samples(mean.expand(n_samples, -1, -1))
            elif joint:
                none = prediction.joint_distribution(mean, mean.new_empty(0, 0))
            elif diagonal_output:
                none = EmbeddingDistribution.trusted(mean, Diagonal(mean))
            else:
                none = EmbeddingDistribution.trusted(mean, Dense(mean.new_empty(0, self.n_outputs, self.n_outputs)))
            return finished(none, mean.new_empty(0, self.model.last_layer.in_features) if self.keeps_features else None)

        if on_invalid == "error":
            return predict(x)
        return prediction.with_nan_rows(predict, x, generator, nothing)

    def predict(
        self,
        data: Any,
        batch_size: int = 256,
        *,
        on_invalid: str = "error",
        progress_bar: bool | None = None,
    ) -> EmbeddingDistribution:
        """Distribution of the embeddings of a whole data set: ``la(x)`` of each batch, put together.

        A posterior of Kronecker factors (the default) keeps a few times N D numbers for N embeddings, any other
        N D^2.

        Args:
            data: A loader, or a list of batches ``(x, labels)`` or ``x``: labels are not used, of two views the first
                is taken. Or a tensor, a mapping of tensors, a NumPy array or a list of texts with all inputs; a NumPy
                array of floating-point numbers is converted to the precision of the encoder.
            batch_size: Inputs at once; those of a loader come as it yields them.
            on_invalid: What happens where an input has no embedding, as in ``la(x)``.
            progress_bar: Whether to show a progress bar; ``None`` shows it from the tenth second on.

        Returns:
            The distribution of all inputs, in order.

        Raises:
            NotFittedError: Before ``fit``.
            InputTypeError: The data or a batch has another type.
            InputError: There is no input, an option is malformed, or the encoder does not take a batch, which the
                error names.
        """
        self.check_fitted()
        # Here, so that the warning names the line of the caller.
        self._advise_on_prior()
        return batches.predict(self, data, batch_size, on_invalid, progress_bar)

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
        self._advise_on_prior()
        if joint or not linearized:
            return self._joint_samples(x, n_samples, generator, linearized)
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
        self._advise_on_prior()
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
                :func:`~contrastive_curvature.laplace.prior.average_information`; unless the object was constructed with
                a temperature, that is set too, to ``2 L / (N + gamma)``, with ``L`` the ``cost`` of all N points and
                the effective number ``gamma`` of parameters
                (:mod:`~contrastive_curvature.laplace.prior`), so that sampled networks have
                at most about twice the loss of the trained one. ``"unit_information"``: the mean divided by the number
                of points, the temperature left alone. ``"marglik"``: laplace-torch's maximisation of the marginal
                likelihood. ``"gridsearch"``: minimise ``loss`` on ``val_loader``.
            n_steps: Steps of ``"marglik"``.
            lr: Learning rate of ``"marglik"``.
            init_prior_prec: Start of ``"marglik"``.
            prior_structure: ``"scalar"``, ``"layerwise"`` or ``"diag"``.
            val_loader: Validation data of ``"gridsearch"``, batches ``(x, labels)``.
            loss: Criterion of ``"gridsearch"``, :data:`~contrastive_curvature.laplace.prior.RetrievalCriterion`; the
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
        method = parse_method(method, prior_structure, strength, self.prior_structures)
        if method is PriorMethod.MARGLIK:
            validate.count("n_steps", n_steps)
            validate.number("lr", lr, positive=True)
            check_prior("init_prior_prec", init_prior_prec, self._dtype, self._prior_sizes())
            before = self.prior_precision
            try:
                super().optimize_prior_precision(
                    PredType.GLM, "marglik", n_steps, lr, init_prior_prec, prior_structure, progress_bar=progress_bar
                )
            except BaseException as error:
                self.prior_precision = before
                if not isinstance(error, InputError):
                    raise
                wanted = "a maximisation that stays among positive finite numbers"
                hint = "Use a smaller lr, or method='average_information'."
                raise InputError(expected("lr, n_steps, init_prior_prec", wanted, f"({error})", hint)) from None
        elif method is PriorMethod.GRIDSEARCH:
            grid = make_grid(log_prior_prec_min, log_prior_prec_max, grid_size, log_prior_prec_base, self._dtype)
            search_grid(self, grid, val_loader, prior_structure, loss, linearized, n_samples, progress_bar)
        else:
            set_information(self, method, prior_structure, strength, self._temperature_given)
        if verbose:
            tqdm.write(f"Prior precision: {self.prior_precision}")

    def sampled_weights(self, n_samples: int, generator: torch.Generator | None) -> Iterator[Tensor]:
        """Sampled weights in chunks of bounded size, each (S, P)."""
        step = max(1, 2**26 // self.mean.numel())
        for start in range(0, n_samples, step):
            yield self.sample(min(step, n_samples - start), generator)

    def _joint_samples(self, x: Inputs, n_samples: int, generator: torch.Generator | None, linearized: bool) -> Tensor:
        """Return raw outputs (S, B, D) of S encoders with sampled weights."""
        moved = prediction.moved_inputs(self.model, x, self._device)
        context = self.sampling_context(moved)
        weights = self.sampled_weights(n_samples, generator)
        samples = torch.cat([self.outputs_at(context, theta, linearized) for theta in weights])
        prediction.check_outputs(moved, samples, self.n_outputs, sampled=True)
        return samples

    def _advise_on_prior(self) -> None:
        """Warn once of a prediction with a prior precision that nobody chose."""
        if self._prior_chosen or self._advised_on_prior:
            return
        self._advised_on_prior = True
        msg = (
            f"la(x): the prior precision is still {float(self.prior_precision.flatten()[0]):.3}, as before the last "
            "fit or update: kappa and uncertainty may be off by orders of magnitude. Call "
            "la.optimize_prior_precision(), or set la.prior_precision yourself."
        )
        warnings.warn(msg, DefaultPriorWarning, stacklevel=3)

    def observe(self, x: Any) -> tuple[EmbeddingDistribution, Tensor | None]:
        """Return the distribution of B embeddings, and their features (B, F), where they are known."""
        return self._gaussian(x, False, False), None

    def _gaussian(self, x: Any, joint: bool, diagonal: bool) -> EmbeddingDistribution:
        """Return the Gaussian over raw outputs of the linearised encoder."""
        x = prediction.moved_inputs(self.model, x, self._device)
        if joint:
            prediction.check_joint_size(input_length(x), self.n_outputs, self.n_weights)
        if self.enable_backprop:
            # The graph leads through every Jacobian, so all of them have to be kept.
            jacobians, z = self.backend.jacobians(x, enable_backprop=True)
            prediction.check_outputs(x, z, self.n_outputs)
            if joint:
                return prediction.joint_distribution(z, self.functional_covariance(jacobians))
            return prediction.distribution(z, Dense(self.functional_variance(jacobians)), diagonal)
        with evaluation_mode(self.model):
            with torch.no_grad():
                pullback = self.backend.pullback(x)
                z, context = pullback.forward(x)
            prediction.check_outputs(x, z, self.n_outputs)
            if joint:
                jacobians = prediction.jacobians_of_all(pullback, context, z)
                return prediction.joint_distribution(z, self.functional_covariance(jacobians))
            of_weights = self.posterior_variance if self.structure is Structure.DIAG else None
            if of_weights is not None and of_weights.requires_grad:
                of_weights = None
            spread = prediction.marginal_spread(pullback, context, z, self.functional_variance, of_weights, diagonal)
        return EmbeddingDistribution.trusted(z, Diagonal(spread) if diagonal else Dense(spread))

    def sampling_context(self, x: Inputs) -> Any:
        """What :meth:`outputs_at` needs of a batch, computed once for all samples."""
        return x

    def outputs_at(self, context: Any, theta: Tensor, linearized: bool) -> Tensor:
        """Raw outputs (S, B, D) at given weights (S, P), of the encoder or of its linearisation."""
        with evaluation_mode(self.model), torch.set_grad_enabled(self.enable_backprop):
            pullback = ModulePullback(self.backend.encoder(context))
            if linearized:
                moved = [pullback.jvp(context, sample - self.mean) for sample in theta]
                return torch.stack([z + shift for z, shift in moved])
            return torch.stack([pullback.outputs_at(context, sample) for sample in theta])

    def _prepare_to_load(self, state: Mapping[str, Any]) -> None:
        """Find out what must be known before a state can be checked; nothing where all parameters are."""
