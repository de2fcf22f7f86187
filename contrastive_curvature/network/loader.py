"""Parses the batches of a loader, and checks models and loaders before a run."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from numbers import Number
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError
from contrastive_curvature.network.inputs import (
    Inputs,
    check_inputs,
    input_length,
    is_texts,
    move_inputs,
    same_tokens,
    slice_inputs,
    tokenized,
)
from contrastive_curvature.network.two_towers import TwoTowers

_FORMS = "batches (x, labels), (view, view), ((view, view), labels), (view, view, labels) or mappings"


class Views(NamedTuple):
    """A batch of B inputs, each seen once or twice.

    Args:
        first: The inputs, or their first views.
        second: Second views, or ``None``.
        targets: Labels, or targets of a relation, shape (B, ...); ``None`` without any.
        unusable: Description of the object after two views if it is not a tensor of targets with one entry per point;
            ``None`` otherwise.
    """

    first: Inputs
    second: Inputs | None
    targets: Tensor | None
    unusable: str | None = None

    @property
    def graded(self) -> bool:
        """Whether the targets are one number for each pair, such as a grade of similarity, and so no labels."""
        return self.targets is not None and self.targets.ndim == 1 and self.targets.is_floating_point()


def read_views(
    model: nn.Module | tuple[nn.Module, nn.Module],
    batch: Any,
    label_key: str = "labels",
    argument: str = "train_loader",
    *,
    related: bool = False,
    labelled: bool = True,
) -> Views:
    """Parse a batch of a loader, tokenise its texts, and move its inputs to the encoder's device; targets stay.

    Args:
        model: The encoder; or two encoders ``(encoder_a, encoder_b)``, for which a pair always means two views.
        batch: ``(x, labels)``; ``(view, view)``; ``((view, view), labels)``, with labels of any kind, since they need
            not be used; ``(view, view, labels)``; or a mapping that holds the labels too.
        label_key: Key of the labels in a mapping.
        argument: Name of the loader for the error message.
        related: Whether a pair of tensors is always inputs and targets, for any shapes.
        labelled: Whether a batch of one view needs labels.
    """
    encoders = model if isinstance(model, tuple) else (model, model)
    device, inputs = next(encoders[0].parameters()).device, f"{argument}: inputs of a batch"

    def moved(encoder: nn.Module, x: Any) -> Inputs:
        return move_inputs(check_inputs(tokenized(encoder, x, inputs), inputs), device)

    def target(y: Any) -> Tensor | None:
        if y is None and not labelled:
            return None
        if not isinstance(y, Tensor):
            hint = (
                f"Known are {_FORMS}. Names of classes become numbers, once for the whole data set, by "
                "torch.as_tensor(numpy.unique(names, return_inverse=True)[1])."
            )
            raise InputTypeError(argument, "labels as a tensor", f"a {type(y).__name__}", hint)
        return y

    if isinstance(batch, Mapping):
        if labelled and label_key not in batch:
            wanted, hint = f"mappings with the labels under {label_key!r}", "Name the key with dict_key_y=..."
            raise InputTypeError(argument, wanted, f"the keys {sorted(batch)}", hint)
        return Views(moved(encoders[0], batch), None, target(batch.get(label_key)))
    if is_texts(batch):
        hint = "Yield (texts, labels), or two lists (texts, texts) of pairs."
        raise InputTypeError(argument, "batches (x, labels)", "texts without labels", hint)
    count = len(batch) if isinstance(batch, (tuple, list)) else 0
    viewed = count in (2, 3) and (isinstance(model, tuple) or _has_views(batch, related))
    if count == 2 and not viewed:
        return Views(moved(encoders[0], batch[0]), None, target(batch[1]))
    if not viewed:
        got = f"a {type(batch).__name__}" + (f" of {count}" if isinstance(batch, (tuple, list)) else "")
        hint = "Of three entries, a second one with one number a point is no second view."
        raise InputTypeError(argument, _FORMS, got, hint)
    # Data sets of views often contain an unused object in place of the labels.
    nested = count == 2 and _several(batch[0])
    first, second, y = (*batch[0], batch[1]) if nested else (*batch, None)[:3]
    unusable = f"a {type(y).__name__}" if nested and y is not None and not (isinstance(y, Tensor) and y.ndim) else None
    if count == 3 and _alike(first, y):
        hint = (
            "Views are compared two by two: yield two of them, or the third beside other two in a further batch. "
            "Of triplets (a, p, n) yield (torch.cat([a, p, n]), labels), with every point's class, or the pairs (a, p)."
        )
        raise InputError(argument, "two views of every input", "three", hint)
    if not isinstance(model, tuple) and is_texts(first) and is_texts(second):
        # Tokenised together, so that both views have one length.
        both = tokenized(encoders[0], [*first, *second], inputs)
        first, second = slice_inputs(both, slice(len(first))), slice_inputs(both, slice(len(first), None))
    first, second = moved(encoders[0], first), moved(encoders[1], second)
    lengths = input_length(first), input_length(second)
    if lengths[0] != lengths[1] and (y is None or unusable):
        raise InputError(argument, "as many second views as first ones", f"{lengths[0]} and {lengths[1]}")
    return Views(first, second, None if y is None or unusable else target(y), unusable)


def _has_views(batch: Any, related: bool) -> bool:
    """Return whether two or three entries are two views of every input, and not one view and its labels."""
    first, second = batch[:2]
    if len(batch) == 3:
        # (x, labels, index) has no second view.
        return not (isinstance(second, Tensor) and second.ndim < 2)
    if _several(first):
        return len(first) == 2
    # Labels have one axis; a second view has the shape and dtype of the first.
    pair_of_texts = is_texts(first) and is_texts(second)
    return pair_of_texts or isinstance(second, Mapping) or (_alike(first, second) and not related)


def _several(x: Any) -> bool:
    """Return whether this is a tuple or list, but not a batch of texts."""
    return isinstance(x, (tuple, list)) and not is_texts(x)


def inputs_alone(batch: Any, argument: str = "loader") -> Any:
    """Return the inputs of a batch ``(x, labels)``, ``(x,)`` or ``x``; labels are ignored."""
    several = _several(batch)
    if several and len(batch) in (1, 2):
        return batch[0]
    if several or not isinstance(batch, (Tensor, Mapping, tuple, list)):
        shown = f"a {type(batch).__name__}" + (f" of {len(batch)}" if several else "")
        raise InputTypeError(argument, "batches (x, labels), or of inputs alone", shown)
    return batch


def _alike(first: Any, second: Any) -> bool:
    """Return whether two objects are tensors of one shape and dtype, like two views."""
    tensors = isinstance(first, Tensor) and isinstance(second, Tensor)
    return tensors and second.ndim > 1 and second.shape == first.shape and second.dtype == first.dtype


def joined_inputs(first: Inputs, second: Inputs, argument: str = "train_loader") -> Inputs:
    """Join two batches of B inputs each, for one encoder."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        if first.shape[1:] != second.shape[1:] or first.dtype != second.dtype:
            shapes = f"{tuple(first.shape)} of {first.dtype} and {tuple(second.shape)} of {second.dtype}"
            hint = "One encoder sees both views in one batch: pad or crop them to one shape."
            raise InputError(argument, "two views of one shape and type", shapes, hint)
        return torch.cat([first, second])
    if not isinstance(first, Mapping) or not isinstance(second, Mapping) or first.keys() != second.keys():
        keys = [sorted(view) if isinstance(view, Mapping) else "a tensor" for view in (first, second)]
        hint = "One encoder sees both views in one batch. Inputs of two kinds need contrastive_curvature.TwoTowers."
        raise InputError(argument, "two views of one kind", f"{keys[0]} and {keys[1]}", hint)
    first, second = (dict(part) for part in same_tokens([first, second]))
    n = input_length(first)
    for name, value in first.items():
        if isinstance(value, Tensor) and value.ndim and value.shape[0] == n:
            first[name] = joined_inputs(value, second[name], f"{argument}: {name!r}")
    return first


def check_loader(loader: Any, argument: str = "train_loader", *, once: bool = False, shares: bool = False) -> None:
    """Refuse arrays, tables, data sets (a point would be read as a batch) and loaders of a part of the data.

    Args:
        loader: The user's object.
        argument: Name of the argument.
        once: Whether the loader is read only once, so that an iterator suffices.
        shares: Whether the loader may give each of several processes a part of the data. If a process needs all data, a
            part would give a wrong result, and another one in each process.
    """
    wanted = "batches (x, labels)" if once else "something that can be iterated several times"
    iterator = isinstance(loader, Iterator) and not once
    runs = hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")
    points = isinstance(loader, Dataset) and not isinstance(loader, IterableDataset)
    # NumPy's numbers also have an index operator.
    other = isinstance(loader, (str, bytes, Mapping, type, Number)) or hasattr(loader, "__array__")
    if iterator or points or other or not runs:
        hint = "Pass a DataLoader or a list of batches, as DataLoader(TensorDataset(x, labels), batch_size=256)."
        got = f"{'the iterator' if iterator else 'a'} {type(loader).__name__}"
        raise InputTypeError(argument, wanted, got, hint)
    for part in [] if shares else loader_parts(loader):
        # Samplers of torch and Lightning have num_replicas; Accelerate's shards have num_processes, but so may a user's
        # data set.
        shards = isinstance(part, (Sampler, IterableDataset)) or type(part).__module__.startswith("accelerate")
        names = ("num_replicas", "num_processes") if shards else ("num_replicas",)
        counts = [count for name in names if isinstance(count := getattr(part, name, None), int)]
        if max(counts, default=1) > 1:
            raise UnsupportedError(
                f"{argument}: {type(part).__name__} gives each of {max(counts)} processes a part of the data, and this "
                "takes all of it. docs/large_data.md#several-processes-torchrun has a fit of such parts. Or pass a "
                "loader over the whole data set, in one process that gives the others its state_dict()."
            )


def check_not_empty(count: int, argument: str = "train_loader") -> None:
    """Refuse a loader without a batch or without a point."""
    if not count:
        raise InputError(argument, "at least one batch", "an empty loader")


def first_batch(loader: Iterable[Any], argument: str = "train_loader") -> Any:
    """Return the first batch of a loader."""
    batches = list(islice(loader, 1))
    check_not_empty(len(batches), argument)
    return batches[0]


def loader_parts(loader: Any) -> list[Any]:
    """Return a loader and its parts: samplers, data sets, and wrapped loaders under any name."""
    parts: list[Any] = [loader]
    for part in parts:
        named = [getattr(part, name, None) for name in ("sampler", "batch_sampler", "dataset")]
        wrapped = [v for v in getattr(part, "__dict__", {}).values() if isinstance(v, (DataLoader, Sampler))]
        for inner in (*named, *wrapped):
            # Bounded, because a property may make a new object at every access.
            if inner is not None and len(parts) < _MOST_PARTS and all(inner is not known for known in parts):
                parts.append(inner)
    return parts


_MOST_PARTS = 32


def uncoordinated_workers(loader: Any) -> int:
    """Return the number of workers that read one ``IterableDataset``; each yields all data unless it splits."""
    streams = [part for part in loader_parts(loader) if isinstance(getattr(part, "dataset", None), IterableDataset)]
    return max((part.num_workers for part in streams if isinstance(part, DataLoader)), default=0)


def in_fixed_order(loader: Any, argument: str = "train_loader", *, mixed: bool = False, positions: bool = False) -> Any:
    """Return a loader with the same batches in every pass; warn if it does not give every point of its data set once.

    This is the rule for the order of a loader, for fits, calibrations, class centres, ``la.without`` and
    ``cc.influence`` alike:

    - A ``DataLoader`` that shuffles is read in the order of its data set, and whole: ``drop_last`` leaves out other
      points in every epoch, and none of the data set.
    - Where a loss compares points within their batch (``mixed``), this order would put points of one class together
      if the data set is sorted. There a ``DataLoader`` that shuffles is read in one random order, always the same, and
      ``drop_last`` counts, because a smaller batch compares otherwise. Points still have their positions in the data
      set: the batches have them as ``numbers`` (see :class:`~contrastive_curvature.fit.share.Share`).
    - A sampler of another kind is asked for its batches once. A caller that has to find the points of an earlier
      reading again (``positions``) asks twice, and refuses a sampler that then answers otherwise.
    - Any other loader is returned as it is; its readings are compared where they have to agree.

    Args:
        loader: The user's loader.
        argument: Its name.
        mixed: Whether the loss compares points within their batch.
        positions: Whether the caller has to find the points of an earlier reading again.

    Raises:
        InputError: With ``positions``, a sampler that gives other batches in the next reading.
    """
    if not reads_by_index(loader):
        return loader
    batches: Any = loader.batch_sampler
    sampler: Any = loader.sampler if batches is None else getattr(batches, "sampler", None)
    if isinstance(sampler, DistributedSampler):
        # Share reads it, padding included.
        return loader
    order = _order(sampler, loader.dataset) if type(batches) in (BatchSampler, type(None)) else None
    if order is None:
        source = loader.sampler if batches is None else batches
        drawn = list(source)
        if positions and list(source) != drawn:
            hint = "Its sampler draws others each time. Fit and pass a DataLoader without it; shuffle=True is fine."
            raise InputError(argument, "the same batches in every reading", "others in the second one", hint)
        times = Counter(drawn if batches is None else chain.from_iterable(drawn)).values()
        if hasattr(loader.dataset, "__len__"):
            _tell_of_points(argument, len(times), sum(count > 1 for count in times), len(loader.dataset))
        return _with_order(loader, drawn, None if batches is None else drawn)
    last = len(order) % batches.batch_size if batches is not None and batches.drop_last else 0
    sequential = type(sampler) is SequentialSampler
    if sequential or mixed:
        _tell_of_points(argument, len(order) - last, 0, len(order))
    if sequential:
        return loader
    if batches is None or not mixed:
        return _with_order(loader, order, batches and BatchSampler(order, batches.batch_size, drop_last=False))
    places = torch.randperm(len(order), generator=torch.Generator().manual_seed(0), device="cpu")[: len(order) - last]
    order = [order[k] for k in places.tolist()]
    ordered = _with_order(loader, order, BatchSampler(order, batches.batch_size, drop_last=False))
    if positions:
        ordered.numbers = places
    return ordered


def reads_by_index(loader: Any) -> bool:
    """Return whether a loader is a ``DataLoader`` whose order is that of its sampler, and not of other code."""
    plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    return plain and not isinstance(loader.dataset, IterableDataset)


def _order(sampler: Any, dataset: Any) -> Any:
    """Return the indices of a sampler that gives each once, in the order of the data set; ``None`` for another one."""
    if type(sampler) is SubsetRandomSampler:
        return sampler.indices
    whole = type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(dataset)
    return range(len(dataset)) if whole or type(sampler) is SequentialSampler else None


def _with_order(loader: DataLoader[Any], sampler: Any, batches: Any) -> Any:
    # A loader refuses another sampler after its construction, so the attributes are set directly.
    ordered = copy.copy(loader)
    vars(ordered).update(sampler=sampler, batch_sampler=batches, _iterator=None)
    return ordered


def _tell_of_points(argument: str, read: int, again: int, n: int) -> None:
    """Warn unless all n points of a data set are read, and none of them again."""
    if read == n and not again:
        return
    twice = f", {again} of them more than once" if again else ""
    msg = (
        f"{argument}: {read} of the {n} points of its data set are read{twice}, as its sampler or drop_last has it, "
        "and the result is that of these readings. DataLoader(dataset, batch_size=...) gives every point once."
    )
    warnings.warn(msg, UserWarning, stacklevel=3)


def check_model(model: object, *, half: bool = False) -> None:
    """Refuse an object that cannot be an encoder, and half precision unless ``half`` allows it."""
    if not isinstance(model, nn.Module):
        raise InputTypeError("model", "a torch.nn.Module", f"a {type(model).__name__}")
    check_one_encoder(model)
    if isinstance(model, torch.jit.ScriptModule):
        hint = "Its layers cannot be looked into: pass the module that it was scripted from."
        raise InputTypeError("model", "a plain torch.nn.Module", "a ScriptModule", hint)
    parameters = [p for p in model.parameters() if p.is_floating_point()]
    if not parameters:
        hint = "Quantised (int8) layers have none: fit the encoder as it was before it was quantised."
        raise InputError("model", "an encoder with parameters of a floating-point type", "one without", hint)
    halves = {p.dtype for p in parameters} & {torch.float16, torch.bfloat16}
    if halves and not half:
        hint = (
            "A curvature needs more digits than half precision has. Call model.float() first (train under "
            "torch.autocast where that is too slow), or take laplace.Laplace with subset_of_weights='last_layer' and "
            "hessian_structure='kron_lowrank', 'kron', 'full' or 'diag', which computes in float32."
        )
        raise InputError("model", "float32 or float64 parameters", f"{halves.pop()}", hint)


def check_one_encoder(model: nn.Module) -> None:
    """Refuse two towers in place of one encoder, and an encoder on an unusable device."""
    if hasattr(model, "get_image_features") and hasattr(model, "get_text_features"):
        got = f"a {type(model).__name__}, which holds one of images and one of texts"
        hint = "Pass one, such as CLIPVisionModelWithProjection, or contrastive_curvature.TwoTowers of both."
        raise InputTypeError("model", "one encoder", got, hint)
    if isinstance(model, TwoTowers):
        hint = "laplace.Laplace(..., likelihood='contrastive') takes both; here pass encoder_a or encoder_b."
        raise InputTypeError("model", "one encoder", "a TwoTowers", hint)
    for parameter in model.parameters():
        validate.device("model: parameters", parameter)
