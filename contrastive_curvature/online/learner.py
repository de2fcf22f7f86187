"""Online Laplace: Monte-Carlo EM over the weights of an encoder during training (paper, Eq. 4-5 and 79-80)."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from contrastive_curvature import validate
from contrastive_curvature.errors import DivergenceError, InputError, InputTypeError, UnsupportedError
from contrastive_curvature.fit.loop import DatasetCurvature
from contrastive_curvature.fit.readers import as_batch
from contrastive_curvature.hessian.blocks import UnrepresentableError
from contrastive_curvature.hessian.sphere import check_outputs, normalize
from contrastive_curvature.laplace import ContrastiveLaplace
from contrastive_curvature.laplace.arguments import given_options
from contrastive_curvature.laplace.backends.backend import ContrastiveBackend
from contrastive_curvature.losses.base import PairLoss
from contrastive_curvature.losses.cosine import CosineLoss
from contrastive_curvature.network.inputs import Inputs, check_inputs, input_length, tokenized
from contrastive_curvature.network.loader import read_views
from contrastive_curvature.online.discount import DiscountedCurvature
from contrastive_curvature.online.sampled import AllParameters, LastLayer, SampledEncoder
from contrastive_curvature.online.sampling_posterior import OnlinePosterior
from contrastive_curvature.options import Normalization
from contrastive_curvature.pairs import Pairs
from contrastive_curvature.structures import STRUCTURES, structure_of
from contrastive_curvature.structures.finite import all_finite

Miner = Callable[[Tensor, Tensor], tuple[Tensor, ...]]
"""``miner(embeddings (N, D) of unit norm, labels (N,))`` returns index tuples ``(a, p, n)`` or ``(a1, p, a2, n)``, as
the miners of pytorch-metric-learning do."""


class OnlineLaplace(nn.Module):
    """Trains an encoder together with its weight posterior; call it once per training step, in any loop.

    ::

        online = OnlineLaplace(encoder, probe=images[:8], n_data=len(train))
        for x, labels in loader:
            loss = online(x, labels)
            optimizer.zero_grad(); loss.backward(); optimizer.step()
        la = online.laplace()              # a fitted laplace object
        out = la(x)                        # out.mu, out.kappa, out.uncertainty

    Each call samples weights from the present posterior and returns the mean loss of the sampled networks (Eq. 79). It
    also adds their mean clamped curvature to a discounted sum (Eq. 80), ``R_{t+1} = (1 - alpha) R_t + H_t``, which
    :meth:`laplace` rescales to the size of the data set (``docs/recipes/training.md``). The first step is
    deterministic.

    The object is a ``torch.nn.Module`` that contains the encoder as ``encoder`` and the posterior as buffers, so
    optimisers, Lightning and Accelerate treat it as any model. If ``torch.distributed`` runs, the curvatures of all
    processes are added; pairs are formed within the batch of each process. In evaluation mode, a call returns the loss
    of the mean weights and does not update the posterior.

    Args:
        encoder: Any module that maps a batch to (N, D). It may end in an l2-normalisation module.
        probe: A batch of two inputs or more, for the analysis of the encoder.
        n_data: Number N of training points.
        loss: ``loss(z, labels)`` of the outputs ``z`` of the encoder or, with a ``miner``,
            ``loss(z, labels, indices)``, like the losses of pytorch-metric-learning. By default the loss of the
            curvature.
        miner: Selects the pairs of the loss. By default all positive pairs, and the negative pairs inside the margin.
        curvature_miner: Selects the pairs of the curvature. By default all pairs of the batch.
        memory_factor: ``alpha`` in [0, 1), the fraction of the sum that each step forgets. The paper uses 0.0001;
            ``hessian_memory_factor=0.999`` of the released code is 0.001 here.
        n_samples: Number of sampled networks per step.
        subset_of_weights: ``"last_layer"`` or ``"all"``.
        hessian_structure: ``"diag"``, ``"full"``, ``"kron"``, or for the last layer ``"kron_lowrank"``; all but
            ``"diag"`` decompose matrices at every step.
        prior_precision: A positive number for both posteriors (during and after training). ``None``: during training
            the mean diagonal of the precision, afterwards the rule of ``la.optimize_prior_precision()``.
        temperature: A positive number for both posteriors. ``None``: during training the mean loss of a point divided
            by the discounted number of steps, afterwards the rule of ``la.optimize_prior_precision()``.
        sampling_temperature: Temperature of the sampled weights in units of ``temperature`` or, without it, of the mean
            loss of a point; 0 trains deterministically and only accumulates the curvature.
        backend: The class that computes curvatures, as in ``laplace.Laplace``; by default ``ContrastiveGGN``.
        backend_kwargs: Options of the curvature, as in ``laplace.Laplace``. With two views of every input see
            :meth:`join`.

    Raises:
        InputError: An option is unknown or out of range.
        InputTypeError: An argument has a wrong type.
        UnsupportedError: The combination of options is not supported.
    """

    discounted: DiscountedCurvature

    def __init__(
        self,
        encoder: nn.Module,
        *,
        probe: Inputs,
        n_data: int,
        loss: Callable[..., Tensor] | None = None,
        miner: Miner | None = None,
        curvature_miner: Miner | None = None,
        memory_factor: float = 1e-4,
        n_samples: int = 1,
        subset_of_weights: str = "last_layer",
        hessian_structure: str = "diag",
        prior_precision: float | None = None,
        temperature: float | None = None,
        sampling_temperature: float | None = None,
        backend: type[ContrastiveBackend] | None = None,
        backend_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(encoder, nn.Module):
            raise InputTypeError("encoder", "a torch.nn.Module", f"a {type(encoder).__name__}")
        _check_options(memory_factor, n_samples, n_data, subset_of_weights, hessian_structure)
        numbers = {
            "prior_precision": prior_precision,
            "temperature": temperature,
            "sampling_temperature": sampling_temperature,
        }
        for name, value in numbers.items():
            if value is not None:
                validate.number(name, value, positive=name != "sampling_temperature")
        functions = {"loss": loss, "miner": miner, "curvature_miner": curvature_miner}
        for name, function in functions.items():
            if function is not None and not callable(function):
                raise InputTypeError(name, "a callable", f"a {type(function).__name__}")
        probe = check_inputs(tokenized(encoder, probe, "probe"), "probe")
        if input_length(probe) < 2:
            raise InputError("probe", "a batch of two inputs or more", f"{input_length(probe)} of them")
        self.encoder, self.n_data, self.n_samples = encoder, n_data, n_samples
        self._posterior = OnlinePosterior(
            encoder,
            probe,
            n_data,
            subset_of_weights,
            hessian_structure,
            {"backend": backend, "backend_kwargs": _batch_options(backend_kwargs)},
            **numbers,
        )
        la = self._posterior.sampling
        relation = la.backend.options.relation
        if relation is not None and curvature_miner is not None:
            raise InputError("curvature_miner, backend_kwargs: relation", "one of them", "both")
        self._loss, self._miner, self._curvature_miner = loss, miner, curvature_miner
        # The loss is a mean over pairs of each type, as usual in metric learning.
        self._own_loss: CosineLoss = la.backend.loss
        if self._own_loss.compares == "pairs":
            self._own_loss = self._own_loss.replaced(normalization=Normalization.TYPE, negative_weight=0.5)
        kind = LastLayer if subset_of_weights == "last_layer" else AllParameters
        self._sampled: SampledEncoder = kind(la.backend, self._posterior.probe, n_data, la.structure)
        self.discounted = DiscountedCurvature(self._sampled.empty(self._posterior.probe), memory_factor)
        options = la.plain_options()
        # The loss of the curvature may differ from the loss of the training.
        options["curvature_loss"] = options.pop("loss", None)
        options |= {name: described(function) for name, function in {**functions, "relation": relation}.items()}
        options |= {**numbers, "memory_factor": memory_factor, "n_samples": n_samples, "n_data": n_data}
        options |= {"subset_of_weights": subset_of_weights, "hessian_structure": hessian_structure}
        self.options = {name: str(value) for name, value in options.items()}

    def join(self, batch: Any, dict_key_y: str = "labels") -> tuple[Inputs, Tensor]:
        """Convert a batch of a loader into the arguments of a call, for a loss of anchors.

        Args:
            batch: ``(x, labels)``, ``(view, view)``, ``((view, view), labels)``, ``(view, view, labels)`` or a mapping.
            dict_key_y: Key of the labels in a mapping.

        Returns:
            The inputs on the encoder's device, first views before second views; and the labels of both (without labels,
            the numbers of the inputs).

        Raises:
            InputError: The batch is malformed.
        """
        loss, options = self._posterior.sampling.backend.loss, self._posterior.sampling.backend.options
        views = read_views(self.encoder, batch, dict_key_y, related=options.relation is not None)
        joined = as_batch(views, loss, options.relation, options.positives)
        return joined.x, joined.labels

    def forward(self, x: Inputs, labels: Tensor | None = None, *, pairs: Pairs | None = None) -> Tensor:
        """Compute the expected loss of a batch, with its graph; in training mode also update the posterior.

        Args:
            x: A batch of B inputs.
            labels: Class labels (B,), or targets of the relation.
            pairs: Instead of labels, pairs in a form that the loss accepts.

        Returns:
            The loss, a tensor with one number.

        Raises:
            InputError: The batch is malformed.
            DivergenceError: An output, a loss or a curvature is not finite, or the posterior precision is not positive.
        """
        x = tokenized(self.encoder, x)
        if labels is None and pairs is None:
            hint = "For two views of every input, x and labels come from learner.join(batch)."
            raise InputError("labels", "class labels, or pairs=...", "neither", hint)
        full_precision = torch.autocast(next(self.encoder.parameters()).device.type, enabled=False)
        noise: list[Tensor | None] = [None]
        if self.training:
            with full_precision:
                noise = self._posterior.draw(self.discounted, self.n_samples)
        losses: list[Tensor] = []
        terms: list[DatasetCurvature] = []
        for z, context in self._sampled.outputs(x, noise):
            if not bool(z.isfinite().all()):
                raise self._diverged("the outputs of the encoder are not finite.")
            raw = check_outputs(z.detach(), "encoder(x)")
            losses.append(self._loss_of(z, raw, labels, pairs))
            if self.training:
                mined = _mined(self._curvature_miner, raw, labels, pairs)
                try:
                    terms.append(self._sampled.curvature(x, raw, context, labels, mined))
                except UnrepresentableError as error:
                    raise self._diverged(f"the curvature is not finite ({error})") from error
        if self.training:
            self._check_finite(losses, terms)
            with full_precision:
                self.discounted.add(terms)
        return torch.stack(losses).mean()

    def laplace(self) -> ContrastiveLaplace:
        """Return the present posterior as a fitted Laplace object around the encoder.

        Predictions, samples, the marginal likelihood and saving work as after a post-hoc fit. The object refers to the
        encoder and does not copy it, so call this method after training. ``la.fit(loader)`` replaces the discounted
        curvature by the curvature at the final weights.

        Raises:
            InputError: No call in training mode has happened yet, or no step had a positive curvature.
        """
        if not bool(self.discounted.positive):
            got = f"{int(self.discounted.steps)} steps, and no positive curvature"
            hint = "With pairs in every batch, use pd_fix='positive' or a smaller negative_weight or margin."
            raise InputError("laplace()", "at least one training step on a batch with positive pairs", got, hint)
        return self._posterior.fitted(self.discounted)

    def get_extra_state(self) -> Tensor:
        """Return the options for ``state_dict``: text in a tensor, because some file formats store only tensors."""
        return torch.tensor(list(json.dumps(self.options, sort_keys=True).encode()), dtype=torch.uint8, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """Refuse a state saved with other options; ``load_state_dict`` calls this before it loads the rest.

        Raises:
            InputError: An option differs.
        """
        was, now = json.loads(bytes(state.tolist())), self.options
        differ = sorted(name for name in was | now if was.get(name) != now.get(name))
        if differ:
            wanted, got = (", ".join(f"{name}={options.get(name)}" for name in differ) for options in (now, was))
            raise InputError("state_dict", f"one of an OnlineLaplace with {wanted}", got)

    def _loss_of(self, z: Tensor, raw: Tensor, labels: Tensor | None, pairs: Any) -> Tensor:
        """Return the loss of a batch; ``raw`` holds its checked outputs ``z`` without a graph."""
        own, relation = self._own_loss, self._posterior.sampling.backend.options.relation
        pairs = _mined(self._miner, raw, labels, pairs)
        if self._loss is not None:
            # The user's loss gets the outputs of the whole encoder, including a normalisation at its end.
            embeddings = self._sampled.encoder.embeddings(z)
            return self._loss(embeddings, labels) if pairs is None else self._loss(embeddings, labels, pairs)
        of_pairs = own.compares == "pairs"
        if of_pairs and pairs is None:
            targets: Any = labels
            pairs = cast("PairLoss", own).mine(raw, targets, relation)
        if of_pairs or self._miner is not None:
            return own.forward(z, pairs=pairs)
        return own.forward(z, labels, pairs=relation if pairs is None else pairs)

    def _check_finite(self, losses: list[Tensor], terms: list[DatasetCurvature]) -> None:
        every = {
            "loss": [loss.detach().isfinite().all() for loss in losses],
            "curvature": [all_finite([*term.curvature.tensors(), term.cost, term.loss]) for term in terms],
        }
        # Transferred together, because each transfer waits for the device.
        finite = torch.stack([torch.stack(each).all() for each in every.values()]).tolist()
        for name, one in zip(every, finite, strict=True):
            if not one:
                raise self._diverged(f"the {name} is not finite.")

    def _diverged(self, reason: str) -> DivergenceError:
        return DivergenceError(reason, int(self.discounted.steps) + 1)


def _mined(miner: Miner | None, raw: Tensor, labels: Any, pairs: Any) -> Any:
    """Return the pairs that a miner selects; without a miner, ``pairs``."""
    return pairs if miner is None else miner(normalize(raw)[0], labels)


def _check_options(
    memory_factor: float, n_samples: object, n_data: int, subset_of_weights: object, hessian_structure: object
) -> None:
    """Check the options of the posterior and of its discounted sum.

    Raises:
        InputError: An option is unknown or out of range.
        UnsupportedError: The structure has no discounted sum.
    """
    if validate.number("memory_factor", memory_factor) >= 1:
        hint = "It is the fraction that a step forgets; hessian_memory_factor=0.999 of the released code is 0.001 here."
        raise InputError("memory_factor", "a number in [0, 1)", memory_factor, hint)
    validate.count("n_samples", n_samples)
    if validate.count("n_data", n_data) < 2:
        raise InputError("n_data", "a whole number of at least 2", n_data)
    if subset_of_weights == "subnetwork":
        raise UnsupportedError(
            "subset_of_weights='subnetwork': training adds up curvatures of 'last_layer' or 'all'. After training, "
            "Laplace(online.encoder, likelihood='contrastive', ...) fits a subnetwork."
        )
    validate.choice("subset_of_weights", subset_of_weights, ("last_layer", "all"))
    known = tuple(name for name, kind in STRUCTURES.items() if subset_of_weights in kind.weights)
    structure_of(hessian_structure, "hessian_structure", known)


def _batch_options(backend_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the options of the curvature; a training step sees only the pairs and points of its batch.

    Raises:
        InputError: An option needs pairs or points outside the batch.
    """
    options = given_options(backend_kwargs)
    if getattr(options.get("loss"), "compares", "pairs") == "pairs":
        options = {"pairs": "batch", **options}
    later = "A training step sees no others; la.fit(loader) after training takes those of the data set."
    samples = "A step has few points, and an interrupted training could not go on with the same samples."
    for name, only, hint in (("pairs", "batch", later), ("mc_samples", None, samples)):
        if options.get(name) not in (None, only):
            wanted = "nothing in training" if only is None else f"{only!r} or nothing"
            raise InputError(f"backend_kwargs: {name}", wanted, repr(options[name]), hint)
    return options


def described(value: object) -> str:
    """Describe a setting in one line, to compare it with a saved state.

    A function is described by its name, without global variables and closures. An object or a module is described by
    its type and by those constructor arguments that it stores under the same name.
    """
    # Without addresses in memory, which the next run of a program does not have.
    text = " ".join(re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value)).split())
    kind = type(value)
    if kind.__repr__ not in (object.__repr__, nn.Module.__repr__):
        return text
    arguments = {name: getattr(value, name, None) for name in inspect.signature(kind.__init__).parameters}
    stored = {name: argument for name, argument in arguments.items() if isinstance(argument, (str, bool, int, float))}
    return f"{text} with {stored}"
