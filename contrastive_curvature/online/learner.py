"""Online Laplace: Monte-Carlo EM over the weights of an encoder while it is trained (paper, Eq. 4-5 and 79-80)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from contrastive_curvature.errors import DivergenceError, InputError, InputTypeError, expected
from contrastive_curvature.ggn.dataset import DatasetCurvature
from contrastive_curvature.ggn.finite import is_finite
from contrastive_curvature.hessian.blocks import UnrepresentableError
from contrastive_curvature.hessian.sphere import check_outputs, normalize
from contrastive_curvature.laplace import ContrastiveLaplace
from contrastive_curvature.laplace.backends.base import ContrastiveBackend
from contrastive_curvature.laplace.options import given_options
from contrastive_curvature.network.encoder import evaluation_mode
from contrastive_curvature.network.inputs import Inputs, input_length
from contrastive_curvature.online.discount import DiscountedCurvature
from contrastive_curvature.online.options import (
    CLASSES,
    check_numbers,
    check_options,
    check_probe,
    describe_callable,
    describe_options,
)
from contrastive_curvature.online.posterior import OnlinePosterior
from contrastive_curvature.online.sampled import AllParameters, LastLayer, SampledEncoder
from contrastive_curvature.options import Normalization

__all__ = ["Miner", "OnlineLaplace"]

Miner = Callable[[Tensor, Tensor], tuple[Tensor, ...]]
"""``miner(embeddings (N, D) of unit norm, labels (N,))`` returns index tuples ``(a, p, n)`` or ``(a1, p, a2, n)``, as
the miners of pytorch-metric-learning do."""


class OnlineLaplace(nn.Module):
    """An encoder whose weight posterior is learned with it; call it once per training step, in any loop.

    ::

        online = OnlineLaplace(encoder, probe=images[:8], n_data=len(train))
        for x, labels in loader:
            loss = online(x, labels)
            optimizer.zero_grad(); loss.backward(); optimizer.step()
        la = online.laplace()              # a fitted laplace object
        out = la(x)                        # out.mu, out.kappa, out.uncertainty

    Each call samples weights from the present posterior ``q_t = N(theta_t, P_t^-1)``, returns the mean of their losses,
    whose gradient with respect to ``theta`` is the expected gradient of Eq. 79, and adds the mean of their curvatures,
    clamped, to a discounted sum (Eq. 80): ``R_{t+1} = (1 - alpha) R_t + E_q[H_t]``. A discounted count of points
    ``w_{t+1} = (1 - alpha) w_t + B`` brings the sum to the size of the data set, ``H = (N / w) R``, so that the
    posterior is as strong as the post-hoc one, however long the memory is; and as for Adam there is no bias from the
    start, where the memory is empty.

    :meth:`laplace` gives ``P = H / T + prior`` with the rule of ``la.optimize_prior_precision()``: ``T`` is the mean
    loss of a point, and the prior a tenth of the mean diagonal of ``H / T``. While training, the prior is that mean,
    and ``q_t`` has the precision of the sum and not of the mean, as in Eq. 80: ``T`` is divided by the discounted
    number of steps, which grows towards ``1 / alpha``, so the noise becomes small. (At the temperature of the final
    posterior the noise is as large as the weights, and the encoder retrieves worse: ``docs/online.md``.) The first
    step, which has no curvature to make a prior of, is deterministic.

    It is a ``torch.nn.Module`` with the encoder as ``encoder`` and the posterior as buffers, so an optimiser, Lightning
    or Accelerate treats it as any model. Where ``torch.distributed`` runs, the curvatures of all processes are added,
    so that they share one posterior; pairs are formed within the batch of each. In evaluation mode a call returns the
    loss of the mean weights and leaves the posterior as it is.

    Args:
        encoder: Any module that maps a batch to (N, D); an l2-normalisation module at its end is looked through.
        probe: A batch of inputs to analyse the encoder with; two points or more.
        n_data: Number N of training points.
        loss: ``loss(z, labels)`` of what the encoder puts out, or, with a ``miner``, ``loss(z, labels, indices)``, as
            the losses of pytorch-metric-learning. By default the contrastive loss (Eq. 1), positives and negatives
            averaged each.
        miner: Pairs of the loss. By default all positives and the negatives inside the margin.
        curvature_miner: Pairs of the curvature. By default all pairs of the batch, by the options of the curvature.
        memory_factor: ``alpha`` in [0, 1): what of the past is forgotten at each step. The paper's 0.0001; a released
            ``hessian_memory_factor`` of 0.999 is 0.001 here.
        n_samples: Sampled networks a step.
        subset_of_weights: ``"last_layer"`` or ``"all"``.
        hessian_structure: ``"diag"``; ``"full"`` and ``"kron"`` invert or decompose matrices at every step.
        prior_precision: A positive number, of ``q_t`` and of the final posterior; ``None`` for the rule above.
        temperature: A positive number, the constant ``T`` of both; ``None`` for the rule above.
        sampling_temperature: How many times the temperature of the final posterior that of ``q_t`` is; 1 samples from
            the final posterior's width, 0 trains deterministically and only keeps track of the curvature. ``None`` for
            the rule above (with ``temperature``: 1).
        backend: As in ``laplace.Laplace``; by default the fastest one that is exact for the encoder.
        backend_kwargs: ``distance``, ``pd_fix``, ``margin``, ``negative_weight``, ``normalization``, ``relation``,
            ``kfac_approx``: see the backend. The margin and the relation also hold for the default loss.

    Raises:
        InputError: An option is unknown or out of range.
        InputTypeError: Something is not of the kind it should be.
        UnsupportedError: The combination has no correct answer.
    """

    discounted: DiscountedCurvature
    options: Tensor

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
            raise InputTypeError(expected("encoder", "a torch.nn.Module", f"a {type(encoder).__name__}"))
        check_options(memory_factor, n_samples, n_data, subset_of_weights, hessian_structure)
        check_numbers(prior_precision=prior_precision, temperature=temperature)
        zero = isinstance(sampling_temperature, (int, float)) and sampling_temperature == 0
        if isinstance(sampling_temperature, bool) or not zero:
            check_numbers(sampling_temperature=sampling_temperature)
        check_probe(probe)
        for name, function in (("loss", loss), ("miner", miner), ("curvature_miner", curvature_miner)):
            if function is not None and not callable(function):
                raise InputTypeError(expected(name, "a callable", f"a {type(function).__name__}"))
        self.n_data, self.n_samples = n_data, n_samples
        # A step has the pairs of its batch and no others.
        options = {"pairs": "batch", **given_options(backend_kwargs)}
        if options["pairs"] != "batch":
            hint = "A step knows no other pairs; la.fit(loader) after training takes all pairs of the data set."
            raise InputError(expected("backend_kwargs: pairs", "'batch' or nothing", repr(options["pairs"]), hint))
        if options.get("mc_samples") is not None:
            hint = "A step has few points, and an interrupted training could not go on with the same samples."
            raise InputError(expected("backend_kwargs: mc_samples", "nothing in training", options["mc_samples"], hint))
        self.encoder = encoder
        self._posterior = OnlinePosterior(
            encoder,
            probe,
            n_data,
            CLASSES[subset_of_weights, hessian_structure],
            {"backend": backend, "backend_kwargs": options},
            prior_precision,
            temperature,
            sampling_temperature,
        )
        curved = self._posterior.backend
        if curved.relation is not None and curvature_miner is not None:
            came = "both"
            raise InputError(expected("curvature_miner, backend_kwargs: relation", "one of them", came))
        self._loss, self._miner, self._curvature_miner = loss, miner, curvature_miner
        # Trained on means over the pairs, as metric learning usually does.
        self._own_loss = curved.loss.replaced(normalization=Normalization.TYPE, negative_weight=0.5)
        kind = LastLayer if subset_of_weights == "last_layer" else AllParameters
        self._sampled: SampledEncoder = kind(curved, self._posterior.probe, n_data, self._posterior.structure)
        self.discounted = DiscountedCurvature(self._curvature_of_nothing(), memory_factor)
        own: dict[str, Any] = {"memory_factor": memory_factor, "n_samples": n_samples, "n_data": n_data}
        own |= {"subset_of_weights": subset_of_weights, "hessian_structure": hessian_structure}
        functions = {"loss": loss, "miner": miner, "curvature_miner": curvature_miner, "relation": curved.relation}
        own |= {name: describe_callable(function) for name, function in functions.items()}
        said = describe_options({**self._posterior.options(), **own})
        # As text in a buffer: a saved state says which options it belongs to, in every format that can hold tensors.
        self.register_buffer("options", torch.tensor(list(said.encode()), dtype=torch.uint8))
        self.register_load_state_dict_pre_hook(  # type: ignore[no-untyped-call]
            lambda module, state, prefix, *_: module.check_state(state, prefix)
        )

    def forward(self, x: Inputs, labels: Tensor) -> Tensor:
        """One step: the expected loss of a batch, with its graph; in training mode the posterior takes in the batch.

        Args:
            x: A batch of B inputs.
            labels: Class labels (B,), or targets of the relation.

        Returns:
            The loss, one number.

        Raises:
            InputError: The batch is malformed.
            DivergenceError: An output, a curvature or a posterior is not finite, or a precision is not positive.
        """
        exactly = torch.autocast(next(self.encoder.parameters()).device.type, enabled=False)
        noise: list[Tensor | None] = [None]
        if self.training:
            with exactly:
                noise = self._posterior.draw(self.discounted, self.n_samples)
        losses: list[Tensor] = []
        terms: list[DatasetCurvature] = []
        for z, context in self._sampled.outputs(x, noise):
            raw = z.detach()
            if not bool(raw.isfinite().all()):
                msg = "the outputs of the encoder are not finite."
                raise self._diverged(msg)
            raw = check_outputs(raw, "encoder(x)")
            losses.append(self._loss_of(z, labels))
            if self.training:
                pairs = None if self._curvature_miner is None else self._curvature_miner(normalize(raw)[0], labels)
                try:
                    terms.append(self._sampled.curvature(x, raw, context, labels, pairs))
                except UnrepresentableError as error:
                    msg = f"the curvature is not finite ({error})"
                    raise self._diverged(msg) from error
        if self.training:
            self._check_finite(losses, terms)
            with exactly:
                self.discounted.add(terms)
        return torch.stack(losses).mean()

    def laplace(self) -> ContrastiveLaplace:
        """The posterior as a fitted laplace object around the encoder, as it is now.

        Predictions, samples, the marginal likelihood and saving are those of a post-hoc one. It holds the encoder, not
        a copy of it: take it when training is over. ``la.fit(loader)`` replaces the discounted curvature by that of the
        final weights.

        Raises:
            InputError: No step has been taken, or no curvature came.
        """
        if not bool(self.discounted.positive):
            came = f"{int(self.discounted.steps)} steps, and no positive curvature"
            hint = "With pairs in every batch, use pd_fix='positive' or a smaller negative_weight or margin."
            raise InputError(
                expected("laplace()", "at least one training step on a batch with positive pairs", came, hint)
            )
        return self._posterior.fitted(self.discounted)

    def check_state(self, state: Mapping[str, Any], prefix: str = "") -> None:
        """Check a saved state before any of it is loaded, as ``load_state_dict`` does.

        Args:
            state: A ``state_dict``, of this module or one around it.
            prefix: What stands before the names of this module.

        Raises:
            InputError: It is of other options, or its curvature is none that steps can have left.
        """
        if f"{prefix}options" in state:
            _refuse_other_options(self, state[f"{prefix}options"], f"state_dict[{f'{prefix}options'!r}]")
        self.discounted.check_state(state, f"{prefix}discounted.")

    def _loss_of(self, z: Tensor, labels: Tensor) -> Tensor:
        normalization = self._sampled.encoder.normalization
        # A loss of the user's is given what the encoder gives, normalised if it ends in a normalisation.
        own = z if normalization is None or self._loss is None else normalization(z)
        if self._loss is not None and self._miner is None:
            return self._loss(own, labels)
        raw = check_outputs(z.detach(), "encoder(x)")
        if self._miner is None:
            backend = self._posterior.backend
            pairs: tuple[Tensor, ...] = backend.loss.mine(raw, labels, backend.relation)
        else:
            pairs = self._miner(normalize(raw)[0], labels)
        return self._own_loss(z, pairs=pairs) if self._loss is None else self._loss(own, labels, pairs)

    def _curvature_of_nothing(self) -> Any:
        """The curvature of no pairs, which has its shape."""
        probe, none = self._posterior.probe, torch.zeros(0, dtype=torch.int64)
        with torch.no_grad(), evaluation_mode(self.encoder):
            (z, context), *_ = self._sampled.outputs(probe, [None])
            labels = torch.zeros(input_length(probe), dtype=torch.int64, device=z.device)
            return self._sampled.curvature(probe, z, context, labels, (none,) * 4).curvature

    def _check_finite(self, losses: list[Tensor], terms: list[DatasetCurvature]) -> None:
        fine = {
            "loss": torch.stack([loss.detach().isfinite().all() for loss in losses]).all(),
            "curvature": torch.stack([_is_finite(term) for term in terms]).all(),
        }
        # Read together: each reading waits for the device.
        for name, finite in zip(fine, torch.stack(list(fine.values())).tolist(), strict=True):
            if not finite:
                msg = f"the {name} is not finite."
                raise self._diverged(msg)

    def _diverged(self, why: str) -> DivergenceError:
        return DivergenceError(why, int(self.discounted.steps) + 1)


def _is_finite(term: DatasetCurvature) -> Tensor:
    return is_finite(term.curvature) & term.cost.isfinite().all() & term.loss.isfinite().all()


def _refuse_other_options(module: OnlineLaplace, saved: Any, name: str) -> None:
    try:
        was = dict(line.split("=", 1) for line in _text(saved).split("\n"))
    except (AttributeError, TypeError, ValueError):
        came = f"a tensor of {saved.dtype}" if isinstance(saved, Tensor) else f"a {type(saved).__name__}"
        raise InputError(expected(name, "the options of an OnlineLaplace as text in bytes", came)) from None
    now = dict(line.split("=", 1) for line in _text(module.options).split("\n"))
    differ = sorted(name for name in was | now if was.get(name) != now.get(name))
    if differ:
        wanted, came = (", ".join(f"{name}={given.get(name)}" for name in differ) for given in (now, was))
        raise InputError(expected("state_dict", f"one of an OnlineLaplace with {wanted}", came))


def _text(tensor: Tensor) -> str:
    return bytes(tensor.tolist()).decode()
