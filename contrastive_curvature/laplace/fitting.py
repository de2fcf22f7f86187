"""The steps of a fit around the curvature: the backend that computes it, and what a posterior keeps besides it."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from contrastive_curvature.errors import InputError, UnsupportedError, expected
from contrastive_curvature.fit.class_centres import MOST_NUMBERS, ClassCentres, ClassSums
from contrastive_curvature.hessian.sphere import check_outputs
from contrastive_curvature.laplace.backends.base import ContrastiveBackend, ContrastiveGGN
from contrastive_curvature.laplace.options import CONTRASTIVE
from contrastive_curvature.laplace.state import unchanged_on_error
from contrastive_curvature.network.encoder import evaluation_mode, flatten_parameters
from contrastive_curvature.network.inputs import Inputs, slice_inputs, tokenized_batch
from contrastive_curvature.network.loader import check_loader, check_whole, read_views
from contrastive_curvature.pairs.relation import check_labels
from contrastive_curvature.parts.exchange import ProcessGroup, check_agreed, present_exchange
from contrastive_curvature.progress import Progress

__all__ = [
    "begin",
    "construct_backend",
    "first_inputs",
    "in_all_processes",
    "is_alone",
    "look_at",
    "measured_classes",
    "merged_classes",
    "posterior_around",
    "remember",
    "renew_backend",
    "shared_inputs",
]

_log = logging.getLogger("contrastive_curvature")


def construct_backend(la: Any) -> ContrastiveBackend:
    """The backend of the class that a posterior has, around its encoder."""
    backend = la._backend_cls(
        la.model, CONTRASTIVE, dict_key_x=la.dict_key_x, dict_key_y=la.dict_key_y, **la._backend_kwargs
    )
    backend.sketches_inputs = la.sketches_inputs
    return backend


def begin(la: Any, loader: Iterable[Any]) -> None:
    """Look at the first batch: what has to be known before the backend exists; and construct the backend.

    Args:
        la: The posterior.
        loader: Batches ``(x, labels)`` or mappings; of a process of several, perhaps none.

    Raises:
        InputError: The loader is empty or malformed, or the embeddings have one dimension.
        UnsupportedError: It gives every process a part of the data, and this is the only one; or the encoder's raw
            outputs cannot be reached.
        ProcessError: Another process has failed.
    """
    exchange = _exchange_of(la)

    def first() -> Inputs | None:
        check_loader(loader)
        if exchange is None:
            check_whole(loader)
        return first_inputs(la, loader)

    probe = first() if exchange is None else shared_inputs(exchange, first, la._device)
    if probe is None:
        raise InputError(expected("train_loader", "at least one batch", "an empty loader"))
    look_at(la, probe)


@contextmanager
def in_all_processes(la: Any, *, override: bool) -> Iterator[None]:
    """What is done inside succeeds in all processes of a fit, or fails in all of them and leaves the posteriors alone.

    Args:
        la: The posterior.
        override: Whether its earlier fit, if any, is replaced.

    Raises:
        InputError: The processes have different posteriors.
        UnsupportedError: The encoder exchanges something in its forward pass.
        ProcessError: Another process has failed, or gone.
    """
    exchange = _exchange_of(la)
    if exchange is None:
        yield
        return
    with unchanged_on_error(la), exchange.together():
        _check_unwrapped(la.model)
        earlier = "replaced" if override or not la.n_data else f"{la.n_data} points with loss {float(la.loss)!r}"
        check_agreed(exchange, {"posterior": type(la).__name__, "earlier fit": earlier})
        yield


def _check_unwrapped(model: nn.Module) -> None:
    """Refuse wrappers that exchange buffers or parameters at every forward pass: shares may differ in length.

    Raises:
        UnsupportedError: There is such a wrapper.
    """
    for module in model.modules():
        name = type(module).__name__
        if name in _WRAPPERS and type(module).__module__.startswith("torch."):
            msg = (
                f"model: {name} exchanges buffers or parameters at every forward pass, and the processes of a fit may "
                "have different numbers of batches, so that they would wait for each other. Pass the encoder inside, "
                "which for DistributedDataParallel is its .module."
            )
            raise UnsupportedError(msg)


_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel")


def is_alone(la: Any) -> bool:
    """Whether a fit runs in one process, which has all the data."""
    return _exchange_of(la) is None


def _exchange_of(la: Any) -> ProcessGroup | None:
    return present_exchange() if la.fits_in_parts else None


def first_inputs(la: Any, loader: Iterable[Any]) -> Inputs | None:
    """A few inputs of the first batch; ``None`` of an empty loader."""
    for batch in loader:
        # Of two views both are inputs of the encoder.
        x = read_views(tokenized_batch(la.model, batch), la._device, la.dict_key_y).first
        return slice_inputs(x, slice(0, 8))
    return None


def shared_inputs(exchange: ProcessGroup, make: Callable[[], Inputs | None], device: torch.device) -> Inputs | None:
    """Those of this process, or of the first one that has any.

    Args:
        exchange: The processes.
        make: Gives those of this one.
        device: Where to bring them.
    """
    from safetensors.torch import load, save

    mine: list[Inputs | None] = []

    def content() -> bytes:
        mine.append(make())
        x = mine[0]
        if x is None:
            return b""
        tensors = {"": x} if isinstance(x, Tensor) else {k: v for k, v in x.items() if isinstance(v, Tensor)}
        return save({f"x/{k}": v.detach().cpu().contiguous().clone() for k, v in tensors.items()})

    every = exchange.gather(content)
    if mine[0] is not None:
        return mine[0]
    for other in every:
        if other:
            found = {k.removeprefix("x/"): v.to(device) for k, v in load(other).items()}
            return found[""] if set(found) == {""} else found
    return None


def look_at(la: Any, probe: Inputs) -> None:
    """What has to be known before the backend exists; and construct the backend.

    Args:
        la: The posterior.
        probe: A few inputs.

    Raises:
        InputError: The embeddings have one dimension.
        UnsupportedError: The encoder's raw outputs cannot be reached.
    """
    la.model.eval()
    la._analyse(probe)
    renew_backend(la)
    _check_dim(la, probe)


def _check_dim(la: Any, probe: Inputs) -> None:
    """Refuse embeddings of one dimension.

    Raises:
        InputError: The encoder has one output.
    """
    dim = la.backend.encoder(probe).dim
    if dim < 2:
        hint = "The direction of one number is its sign, which no small change of the weights moves."
        raise InputError(expected("model", "embeddings of D >= 2 dimensions", f"D = {dim}", hint))


def renew_backend(la: Any) -> None:
    """Construct the default backend anew, unless the user named one: the encoder may not be that of the last fit."""
    if not la._chooses_backend:
        return
    indices = la.backend.subnetwork_indices
    la._backend_cls, la._backend = ContrastiveGGN, None
    # laplace-torch's subnetwork classes tell the backend their indices, nobody else.
    la.backend.subnetwork_indices = indices
    _log.info("curvature by ContrastiveGGN: the default, exact for every encoder (backend=... takes another)")


def merged_classes(earlier: ClassCentres | None, new: ClassCentres | None) -> ClassCentres | None:
    """Centres of the classes of two fits together; ``None`` where one of them has none."""
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


def measured_classes(la: Any, loader: Iterable[Any], progress_bar: bool | None) -> ClassCentres:
    """See :meth:`contrastive_curvature.laplace.base.ContrastiveLaplace.measure_classes`."""
    check_loader(loader)
    check_whole(loader)
    sums, encoder = ClassSums(), None
    with evaluation_mode(la.model), torch.no_grad():
        for batch in Progress(progress_bar).over(loader, "[classes]"):
            x, y = la.backend.read(batch)
            encoder = la.backend.encoder(x) if encoder is None else encoder
            z = check_outputs(encoder(x), "model(x)")
            sums.add(z, check_labels(y, len(z)))
    if encoder is None:
        raise InputError(expected("loader", "at least one batch", "an empty loader"))
    centres = sums.centres()
    if centres is None or len(centres.labels) < 2:
        wanted = f"inputs of at least two classes, at most {MOST_NUMBERS:,} numbers of all centres"
        raise InputError(expected("loader", wanted, "other ones"))
    return centres


def remember(
    la: Any,
    loss: Tensor,
    cost: float,
    n_data: int,
    typical_norm: Tensor | float | None,
    class_centres: ClassCentres | None = None,
) -> None:
    """Set what every fit leaves besides the curvature.

    Args:
        la: The posterior.
        loss: Sum of the pair losses.
        cost: The sum shifted so that it is not negative.
        n_data: Number of points.
        typical_norm: Mean norm of their raw outputs, where it is known.
        class_centres: Centres of their classes, where they have been measured.
    """
    la.loss, la.cost, la.n_data = loss.detach(), cost, n_data
    norm = 0.0 if typical_norm is None else float(typical_norm)
    la.typical_norm = norm if math.isfinite(norm) and norm > 0 else None
    la._classes = class_centres
    mean = flatten_parameters(la._posterior_parameters())
    la.mean = mean if la.enable_backprop else mean.detach()
    la.n_outputs = la._encoder_dim()
    la.model.output_size = la.n_outputs
    la._posterior_scale = None
    la._known = la._known.anew()


def posterior_around(kind: type[Any], encoder: nn.Module, probe: Inputs, **arguments: Any) -> Any:
    """A posterior around an encoder that goes on training: it holds the encoder itself, and no curvature yet.

    ``laplace.Laplace`` copies the encoder for a last layer and puts it in evaluation mode; here it stays as it is. The
    posterior is ready for :meth:`~contrastive_curvature.laplace.base.ContrastiveLaplace.set_curvature`.

    Args:
        kind: A subclass of :class:`~contrastive_curvature.laplace.base.ContrastiveLaplace`.
        encoder: The encoder.
        probe: A batch to analyse it with.
        **arguments: Further arguments of ``kind``.

    Returns:
        An object of ``kind``.

    Raises:
        InputError: An argument is malformed.
        UnsupportedError: The combination has no correct answer.
    """
    training = [(module, module.training) for module in encoder.modules()]
    try:
        la = kind(encoder, **arguments)
        la._hold(encoder)
        with evaluation_mode(la.model):
            la._analyse(probe)
            renew_backend(la)
            _check_dim(la, probe)
    finally:
        for module, mode in training:
            module.training = mode
    return la
