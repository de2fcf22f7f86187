"""From data to a posterior: one fit, a fit in parts, and what they leave besides the curvature."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from laplace.utils import Kron
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError, expected
from contrastive_curvature.fit.class_centres import MOST_NUMBERS, CentreCollector, ClassCentres
from contrastive_curvature.fit.exchange import ProcessGroup, check_agreed, present_exchange
from contrastive_curvature.fit.loop import DatasetCurvature
from contrastive_curvature.fit.state import CURVATURE, STATISTICS, State
from contrastive_curvature.hessian.sphere import check_outputs
from contrastive_curvature.laplace.advice import LabelRange, advise_on_labels
from contrastive_curvature.laplace.backends.base import ContrastiveBackend, ContrastiveGGN
from contrastive_curvature.laplace.calibration import KnownInputs, TrainingSample
from contrastive_curvature.laplace.forms import CurvatureForm
from contrastive_curvature.laplace.options import CONTRASTIVE
from contrastive_curvature.laplace.posterior import CheckedPosterior
from contrastive_curvature.laplace.prediction import moved_inputs
from contrastive_curvature.laplace.prior import NOTHING_POSITIVE
from contrastive_curvature.network.digest import encoder_fingerprint, same_encoder
from contrastive_curvature.network.encoder import evaluation_mode, flatten_parameters
from contrastive_curvature.network.inputs import (
    Inputs,
    asks_for_example,
    input_length,
    made_up_inputs,
    move_inputs,
    slice_inputs,
    tokenized_batch,
)
from contrastive_curvature.network.loader import check_loader, loader_parts, read_views
from contrastive_curvature.options import Structure
from contrastive_curvature.pairs.relation import check_labels
from contrastive_curvature.pairs.rows import Rows
from contrastive_curvature.progress import Progress

_log = logging.getLogger("contrastive_curvature")

_PROBES = 2
_SHARED = "shared/"
"""Inputs in a state, so that a process without data can look at the encoder."""

_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel")


class FittedPosterior(CheckedPosterior):
    """A posterior that is fitted to data; :class:`.ContrastiveLaplace` adds what it is used for.

    Attributes:
        structure: Of the curvature; ``None`` where it has no matrix of parameters.
        form: What ``H`` is, and how two of them add.
        takes_rank: Whether it has the option ``rank``.
        keeps_features: Whether the fit keeps a sample of the features.
        shares_encoder: Whether others may train the encoder that it holds.
        fits_in_parts: Whether curvatures of parts of the data add up.
        known: Known inputs that p-values compare with.
        chooses_backend: Whether the user named no backend.
    """

    structure: ClassVar[Structure]
    form: CurvatureForm
    takes_rank: ClassVar[bool] = False
    keeps_features: ClassVar[bool] = False
    shares_encoder: bool = True
    fits_in_parts: ClassVar[bool] = True

    H: Any
    H_raw: Any
    known: KnownInputs
    chooses_backend: bool
    cost: Tensor | float
    typical_norm: float | None
    curvature_error: float | None
    _backend: ContrastiveBackend | None
    _classes: ClassCentres | None

    @property
    def backend(self) -> ContrastiveBackend:
        """The curvature backend, constructed at first use."""
        if self._backend is None:
            keys = {"dict_key_x": self.dict_key_x, "dict_key_y": self.dict_key_y}
            self._backend = self._backend_cls(self.model, CONTRASTIVE, **keys, **self._backend_kwargs)
            self._backend.sketches_inputs = self.takes_rank and self.structure is Structure.KRON
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
            progress_bar: Whether to show progress bars; ``None`` shows them from the tenth second on. A fit that forms
                very many pairs says so before it does, whatever this is.

        Raises:
            InputError: No data, one point, no positive pair, malformed batches, other data in the second pass, or a
                curvature that is not finite; or the processes have different encoders or options, or shares of the
                data that overlap or leave points out.
            UnsupportedError: The encoder's raw outputs cannot be reached, the structure has no answer for the fix, or
                the loader gives every process its own part of the data, and this is the only process.
            ProcessError: The fit failed in another process, or that process has gone or does not fit. The posteriors of
                all processes are as they were.
        """
        exchange = present_exchange() if self.fits_in_parts else None
        with self._in_all_processes(exchange, override=override is not False):
            self._begin(train_loader, override, progress_bar, exchange)
            self.backend.labels_seen = LabelRange()
            result = self.backend.fit(train_loader, self.structure, progress_bar)
            adds = bool(self.n_data) and not override
            self.set_curvature(result, override=override)
        # A share of the data may well have one class.
        if exchange is None:
            advise_on_labels(self.backend.labels_seen, adds)

    def _begin(
        self, loader: Iterable[Any], override: object, progress_bar: object, exchange: ProcessGroup | None = None
    ) -> None:
        """Check the arguments of ``fit``, look at the first batch, and construct the backend."""
        # First, as the labels of la.fit(x, labels) would be taken for override.
        check_loader(loader, shares=exchange is not None)
        validate.flag("override", override)
        if progress_bar is not None:
            validate.flag("progress_bar", progress_bar)
        probe = self._first_inputs(loader)
        if exchange is not None:
            probe = _shared_inputs(exchange, probe, self._device)
        if probe is None:
            raise InputError(expected("train_loader", "at least one batch", "an empty loader"))
        self.look_at(probe)

    @contextmanager
    def _in_all_processes(self, exchange: ProcessGroup | None, *, override: bool) -> Iterator[None]:
        """Succeed in all processes of a fit, or fail in all of them and leave the posteriors alone."""
        if exchange is None:
            yield
            return
        with self.unchanged_on_error(), exchange.together():
            _check_unwrapped(self.model)
            earlier = f"{self.n_data} points with loss {float(self.loss)!r}" if self.n_data and not override else ""
            check_agreed(exchange, {"posterior": type(self).__name__, "earlier fit": earlier or "replaced"})
            yield

    def look_at(self, probe: Inputs) -> None:
        """Analyse the encoder with a few inputs, and construct the backend.

        Raises:
            InputError: The embeddings have one dimension.
            UnsupportedError: The encoder's raw outputs cannot be reached.
        """
        self.model.eval()
        self._analyse(probe)
        self._renew_backend()
        dim = self.backend.encoder(probe).dim
        if dim < 2:
            hint = "The direction of one number is its sign, which no small change of the weights moves."
            raise InputError(expected("model", "embeddings of D >= 2 dimensions", f"D = {dim}", hint))

    def _renew_backend(self) -> None:
        """Construct the backend anew, unless the user named one: the encoder may not be that of the last fit."""
        if not self.chooses_backend:
            return
        # laplace-torch's subnetwork classes tell the backend their indices, nobody else.
        indices = self.backend.subnetwork_indices
        self._backend_cls, self._backend = ContrastiveGGN, None
        self.backend.subnetwork_indices = indices
        _log.info("curvature by ContrastiveGGN: the default, exact for every encoder (backend=... takes another)")

    def set_curvature(self, result: DatasetCurvature, *, override: bool = True) -> None:
        """Take a curvature at the encoder's present weights, with all that a fit leaves besides it.

        Args:
            result: Unclamped curvature, loss, cost and number of points, in the form that the structure has. The
                backend has analysed the encoder before.
            override: ``False`` adds it to an earlier one.
        """
        earlier = 0 if override else self.n_data
        raw = self.form.merged(self.H_raw, earlier, result) if earlier else result.curvature
        clamped = self.form.clamped(raw)
        diagonal = self.form.diagonal(clamped)
        if not bool(diagonal.any()):
            msg = f"The clamped curvature is zero everywhere: the posterior is the prior. {NOTHING_POSITIVE}"
            warnings.warn(msg, UserWarning, stacklevel=3)
        self._advise(result.features, diagonal)
        classes = _merged_classes(self._classes, result.classes) if earlier else result.classes
        n, loss, cost = result.n, result.loss.detach(), float(result.cost)
        norm = math.nan if result.typical_norm is None else float(result.typical_norm)
        if earlier:
            n, loss, cost = n + earlier, loss + self.loss, cost + float(self.cost)
            norm = math.nan if self.typical_norm is None else (earlier * self.typical_norm + result.n * norm) / n
        sample = self._training_sample(result.features, earlier)
        # Everything that can fail has run, so that a failed fit leaves the last one whole.
        self._hold_curvature(raw, clamped)
        self.loss, self.cost, self.n_data = loss, cost, n
        self.typical_norm = norm if math.isfinite(norm) and norm > 0 else None
        self._classes = classes
        mean = flatten_parameters(self.posterior_parameters())
        self.mean = mean if self.enable_backprop else mean.detach()
        self.n_outputs = self.model.output_size = self._encoder_dim()
        self.known = replace(self.known.anew(), sample=sample)
        self.curvature_error = result.error
        if result.error is not None:
            _log.info("the sampled negatives leave a relative standard error of %.2g in the curvature", result.error)

    def _hold_curvature(self, raw: Any, clamped: Any) -> None:
        self.H_raw, self.H = raw if self.fits_in_parts else None, clamped
        if hasattr(self, "H_facs"):
            # laplace-torch's classes of Kronecker factors keep these too.
            self.H_facs = Kron(raw)
        self._posterior_scale = None

    def _advise(self, features: Rows | None, diagonal: Tensor) -> None:
        """Warn of what is legal and rarely meant in a new curvature; nothing here."""

    def _training_sample(self, features: Rows | None, earlier: int) -> TrainingSample | None:
        """Return the sample of training inputs after a fit; ``None`` where there is none of all the data."""
        # Of an encoder that is one linear layer, a fit of all weights draws features too, which its statistic has not.
        if features is None or not len(features) or not self.keeps_features:
            return None
        encoder = encoder_fingerprint(self.model)
        if earlier:
            before = self.known.sample
            if before is None or not same_encoder(before.encoder, encoder):
                return None
            features = before.features.merged(features)
        layer = self.model.last_layer
        with torch.no_grad():
            outputs = torch.nn.functional.linear(
                features.columns["features"].to(layer.weight), layer.weight, layer.bias
            )
        return TrainingSample(features, outputs, encoder)

    def _first_inputs(self, loader: Iterable[Any]) -> Inputs | None:
        """Return a few inputs of the first batch; ``None`` of an empty loader."""
        for batch in loader:
            # Of two views both are inputs of the encoder.
            x = read_views(tokenized_batch(self.model, batch), self._device, self.dict_key_y).first
            return slice_inputs(x, slice(0, 8))
        return None

    def part_statistics(self, loader: Iterable[Any], part: tuple[int, int], progress_bar: bool | None = None) -> State:
        """First pass over a part of the data: what all other parts have to know of it.

        Save it with ``state.save(path)``, load it with ``State.load(path)``, and merge those of all parts with
        ``State.merged(states)``, in any order. A part that was lost is computed again alone.

        Args:
            loader: Batches ``(x, labels)`` or mappings with the points of the part; perhaps none.
            part: Index of the part, from 0, and number of all parts.
            progress_bar: Whether to show a progress bar; ``None`` shows it from the tenth second on.

        Returns:
            Numbers and sums of the classes, and ``negative_samples`` points (``"auto"``: 29,999 at most); with
            ``negative_samples=None`` and a margin, or with a loss whose positives have to be known one by one, all
            embeddings of the part.

        Raises:
            InputError: Malformed batches, or ``part`` is no such pair.
            UnsupportedError: The structure or an option has no fit in parts.
        """
        return self._pass(loader, part, None, progress_bar)

    def part_curvature(
        self, loader: Iterable[Any], part: tuple[int, int], statistics: State, progress_bar: bool | None = None
    ) -> State:
        """Second pass over a part of the data: what it adds to the curvature.

        Args:
            loader: The same points as in the first pass over this part, in any order.
            part: Index of the part, from 0, and number of all parts.
            statistics: Of ALL parts, merged.
            progress_bar: Whether to show a progress bar; ``None`` shows it from the tenth second on.

        Returns:
            The unclamped curvature of the part, to be saved and merged like the statistics.

        Raises:
            InputError: The statistics lack a part, or are of other data, another encoder or other options; malformed
                batches; or a curvature that is not finite.
            UnsupportedError: The structure or an option has no fit in parts.
        """
        _check_kind("statistics", statistics, STATISTICS)
        statistics.check_complete()
        return self._pass(loader, part, statistics, progress_bar)

    def fit_parts(self, statistics: State, curvature: State, example: Inputs | None = None) -> None:
        """Fit the posterior from what the two passes over all parts gave; no data are needed.

        Args:
            statistics: Of :meth:`part_statistics`, merged over all parts.
            curvature: Of :meth:`part_curvature`, merged over all parts.
            example: Two inputs, where the encoder does not take the made-up ones that are in the states.

        Raises:
            InputError: A part is missing, the states are of other data, another encoder or other options, or an example
                is needed. The posterior is as it was.
        """
        self._check_parts()
        _check_kind("statistics", statistics, STATISTICS)
        _check_kind("curvature", curvature, CURVATURE)
        for state in (statistics, curvature):
            state.check_complete()
        found = _probe_of(statistics)
        if found is None:
            raise InputError(expected("statistics", "at least one point", "none in any part"))
        probe = moved_inputs(self.model, found if example is None else example, self._device)
        with asks_for_example(example):
            self.look_at(probe)
        self.set_curvature(self.backend.fit_of_parts(self.structure, statistics, curvature, probe))

    def _pass(
        self, loader: Iterable[Any], part: tuple[int, int], statistics: State | None, progress_bar: bool | None
    ) -> State:
        self._check_parts()
        check_loader(loader, "loader", shares=True)
        _check_part(part, statistics)
        _check_sampler(loader, part)
        if progress_bar is not None:
            validate.flag("progress_bar", progress_bar)
        probe = self._first_inputs(loader)
        if probe is None:
            self._renew_backend()
            return self.backend.fit_part(None, self.structure, part, statistics, progress_bar)
        self.look_at(probe)
        state = self.backend.fit_part(loader, self.structure, part, statistics, progress_bar)
        return replace(state, probe=_kept_probe(made_up_inputs(probe, _PROBES), part[0]))

    def _check_parts(self) -> None:
        if not self.fits_in_parts:
            msg = (
                f"{type(self).__name__}: this structure does not add up over parts of the data. Use "
                "hessian_structure='diag', 'kron', 'kron_lowrank' or 'full', or fit in one process."
            )
            raise UnsupportedError(msg)

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
        check_loader(loader)
        sums = CentreCollector()
        with evaluation_mode(self.model), torch.no_grad():
            for batch in Progress(progress_bar).over(loader, "[classes]"):
                x, y = self.backend.read(batch)
                z = check_outputs(self.backend.encoder(x)(x), "model(x)")
                sums.add(z, check_labels(y, len(z)))
        centres = sums.centres()
        if centres is None or len(centres.labels) < 2:
            wanted = f"inputs of at least two classes, at most {MOST_NUMBERS:,} numbers of all centres"
            raise InputError(expected("loader", wanted, "other ones"))
        self.class_centres = centres

    def curvature_diagonal(self) -> Tensor:
        """Diagonal of the clamped curvature, without the likelihood factor, shape (P,)."""
        return self.form.diagonal(self.H)

    def effective_parameters(self, prior: Tensor) -> float:
        """Effective number of parameters, for a prior precision at the temperature 1."""
        return self.form.effective_parameters(self.H, prior, self.parameter_sizes())

    def posterior_parameters(self) -> list[Tensor]:
        """The parameters whose entries are the posterior's mean, in order."""
        return list(self.params)

    def parameter_sizes(self) -> list[int]:
        """Numbers of entries of the parts that a layerwise prior tells apart."""
        return [p.numel() for p in self.posterior_parameters()]

    @contextmanager
    def unchanged_on_error(self) -> Iterator[None]:
        """Put the attributes of this object, and of the module that it wraps, back when something fails inside."""
        before = [(thing, dict(thing.__dict__)) for thing in (self, self.model)]
        try:
            yield
        except BaseException:
            for thing, attributes in before:
                thing.__dict__.clear()
                thing.__dict__.update(attributes)
            raise

    def _analyse(self, probe: Inputs) -> None:
        """Find out what must be known of the encoder before the backend exists; nothing where all parameters are."""

    def _hold(self, encoder: nn.Module) -> None:
        """Use this encoder; nothing where laplace-torch has not copied it."""

    def _encoder_dim(self) -> int:
        return self.backend.encoder({}).dim


def _shared_inputs(exchange: ProcessGroup, mine: Inputs | None, device: torch.device) -> Inputs | None:
    """Return the inputs of this process, or of the first one that has any."""
    # Copied, or a few rows would go with their whole batch.
    few = None if mine is None else move_inputs(mine, torch.device("cpu"))
    if isinstance(few, Tensor):
        few = few.clone()
    elif few is not None:
        few = {name: part.clone() if isinstance(part, Tensor) else part for name, part in few.items()}
    first = next((x for x in exchange.gather(few) if x is not None), None)
    return mine if mine is not None or first is None else move_inputs(first, device)


def _merged_classes(earlier: ClassCentres | None, new: ClassCentres | None) -> ClassCentres | None:
    """Return the class centres of two fits together; ``None`` where one of them has none."""
    if earlier is None or new is None:
        return None
    found = earlier.merged(new)
    if found is None or earlier.sample is None:
        why = (
            "there are too many classes, so uncertainty goes without their centres"
            if found is None
            else "this posterior was loaded, so what is typical for its classes follows from the new inputs alone; "
            "la.measure_classes(loader) over all of them makes it exact"
        )
        warnings.warn(f"override=False: {why}.", UserWarning, stacklevel=4)
    return found


def _check_unwrapped(model: nn.Module) -> None:
    """Refuse wrappers that exchange buffers or parameters at every forward pass: shares may differ in length."""
    for module in model.modules():
        name = type(module).__name__
        if name in _WRAPPERS and type(module).__module__.startswith("torch."):
            msg = (
                f"model: {name} exchanges buffers or parameters at every forward pass, and the processes of a fit may "
                "have different numbers of batches, so that they would wait for each other. Pass the encoder inside, "
                "which for DistributedDataParallel is its .module."
            )
            raise UnsupportedError(msg)


def _check_kind(argument: str, state: object, kind: str) -> None:
    if not isinstance(state, State):
        hint = "State.load(path) reads a file, State.merged(states) merges several."
        raise InputTypeError(expected(argument, "a merged State", f"a {type(state).__name__}", hint))
    if state.kind != kind:
        raise InputError(expected(argument, f"a state of kind {kind!r}", f"{state.kind!r}"))


def _check_part(part: Any, statistics: State | None) -> None:
    whole = isinstance(part, (tuple, list)) and len(part) == 2 and all(type(k) is int for k in part)
    if not whole or not 0 <= part[0] < part[1]:
        raise InputError(expected("part", "an index from 0 and the number of all parts, as (0, 8)", part))
    if statistics is not None and statistics.count != part[1]:
        wanted = f"one of {statistics.count} parts, as in the statistics"
        raise InputError(expected("part", wanted, f"one of {part[1]}"))


def _check_sampler(loader: Any, part: tuple[int, int]) -> None:
    """Refuse a sampler that gives another part of the data than this one is called."""
    for sampler in loader_parts(loader):
        if isinstance(sampler, DistributedSampler) and (sampler.rank, sampler.num_replicas) != part:
            came = f"rank {sampler.rank} of {sampler.num_replicas} in its DistributedSampler"
            raise InputError(expected("loader", f"part {part[0]} of {part[1]}, as part= says", came))


def _kept_probe(x: Inputs, index: int) -> Rows:
    """Return inputs as rows of the state of a part; what belongs to all points together is in each of them."""
    columns = {"": x} if isinstance(x, Tensor) else {k: v for k, v in x.items() if isinstance(v, Tensor)}
    kept, count = {}, input_length(x)
    for name, part in columns.items():
        if part.ndim and len(part) == count:
            kept[f"x/{name}"] = part
        else:
            kept[f"{_SHARED}{name}"] = part.expand(count, *part.shape)
    return Rows(_PROBES, _PROBES * index + torch.arange(count), kept)


def _probe_of(state: State) -> Inputs | None:
    if state.probe is None:
        return None
    found = {
        name.removeprefix(_SHARED).removeprefix("x/"): part[0] if name.startswith(_SHARED) else part
        for name, part in state.probe.columns.items()
    }
    return found[""] if set(found) == {""} else found
