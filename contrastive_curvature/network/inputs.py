"""A batch of inputs: a tensor, a mapping of tensors, or texts, which the encoder's tokenizer turns into a mapping."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Number
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from contrastive_curvature import validate, waiting
from contrastive_curvature.errors import InputError, InputTypeError

Inputs = Tensor | Mapping[str, Any]
"""A batch: a tensor whose first axis is the batch, or a mapping whose tensors all have that first axis."""


_MOST = 2**61


def in_memory(data: Any, argument: str = "x") -> Any:
    """Return inputs of all kinds as a tensor, a mapping, an array of numbers or a list of texts.

    Arrays of texts become lists; tables, columns and lists of vectors become arrays or tensors. Other objects, such as
    loaders, are returned unchanged.
    """
    if isinstance(data, (Tensor, Mapping, str)) or is_texts(data):
        return data
    vectors = isinstance(data, list) and bool(data) and _is_vector(data[0])
    if not vectors and not hasattr(data, "__array__"):
        return data
    validate.unmasked(argument, data)
    try:
        if vectors and isinstance(data[0], Tensor):
            return torch.stack(data)
        array = np.asarray(data)
        if array.dtype.kind not in "OUT":
            return array
        listed = array.tolist()
        # Not texts: a column of vectors.
        return listed if is_texts(listed) or not listed else np.array(listed)
    except (ValueError, TypeError, RuntimeError) as error:
        raise InputError(argument, "vectors of numbers, all of one length", str(error).splitlines()[0]) from None


def _is_vector(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and isinstance(value[0], Number)
    return isinstance(value, (Tensor, np.ndarray)) and value.ndim == 1


def as_tensor(rows: NDArray[Any], encoder: nn.Module | None, argument: str = "x") -> Tensor:
    """Return an array as a tensor; floating-point numbers in the precision of the encoder, or float32 without one.

    Raises:
        InputTypeError: The array does not hold real numbers.
        InputError: A number is too large for the precision.
    """
    # NumPy knows bfloat16 and smaller numbers of the package ml_dtypes by their size alone.
    of_ml_dtypes = rows.dtype.kind == "V" and rows.dtype.type is not np.void
    if rows.dtype.kind not in "biuf" and not of_ml_dtypes:
        raise InputTypeError(argument, "an array of real numbers", f"one of {rows.dtype}")
    wide = np.float32 if of_ml_dtypes else np.float64 if rows.dtype == np.longdouble else rows.dtype.newbyteorder("=")
    # A copy, for torch takes no negative strides and no foreign byte order.
    x = torch.from_numpy(np.array(rows, dtype=wide, order="C"))
    if not x.is_floating_point():
        return x
    weights = () if encoder is None else encoder.parameters()
    dtype = next((weight.dtype for weight in weights if weight.is_floating_point()), torch.float32)
    cast = x.to(dtype)
    if bool((lost := x.isfinite() & ~cast.isfinite()).any()):
        raise InputError(argument, f"numbers within the range of {dtype}", f"{float(x[lost][0]):.3g}")
    return cast


def check_inputs(x: object, argument: str = "x") -> Inputs:
    """Return a batch; refuse an object that cannot be a batch of dense inputs with at least one point."""
    wanted = "a tensor or a mapping of tensors, one point a row"
    if not isinstance(x, (Tensor, Mapping)):
        raise InputTypeError(argument, wanted, f"a {type(x).__name__}")
    for value in x.values() if isinstance(x, Mapping) else [x]:
        if isinstance(value, Tensor) and value.layout != torch.strided:
            hint = "Sparse tensors cannot be sliced by rows. Call .to_dense() on it."
            raise InputTypeError(argument, "dense tensors", f"layout {value.layout}", hint)
    if not input_length(x):
        got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else "a mapping without tensors, or without points"
        raise InputError(argument, "a batch of at least one point", got)
    return x


def input_length(x: Inputs) -> int:
    """Return the number of points in a batch."""
    if isinstance(x, Mapping):
        return next((value.shape[0] for value in x.values() if isinstance(value, Tensor) and value.ndim), 0)
    return x.shape[0] if x.ndim else 0


def move_inputs(x: Inputs, device: torch.device) -> Inputs:
    """Move a batch to a device."""
    return map_tensors(x, lambda t: waiting.sent(t, device))


def map_tensors(x: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """Apply ``change`` to every tensor of a batch; other entries of a mapping stay unchanged."""
    if isinstance(x, Mapping):
        return {k: change(v) if isinstance(v, Tensor) else v for k, v in x.items()}
    return change(x)


def slice_inputs(x: Inputs, rows: slice | Tensor) -> Inputs:
    """Return the points of a batch in some rows; entries of a mapping without a batch axis stay whole."""
    if not isinstance(x, Mapping):
        return x[rows]
    n = input_length(x)
    return {k: v[rows] if isinstance(v, Tensor) and v.ndim and v.shape[0] == n else v for k, v in x.items()}


def few_points(x: Inputs, count: int = 5) -> Inputs:
    """Return ``count`` points of a batch, repeated if there are fewer; 5 is a rare length of other axes."""
    return slice_inputs(x, torch.arange(count, device="cpu") % input_length(x))


def made_up_inputs(x: Inputs, n: int = 2) -> Inputs:
    """Make up to n points with a batch's dtypes and shapes, for files that must not hold the user's data.

    Real numbers lie between 0 and 1, and integers between 0 and the largest of these points, so that they are valid
    tokens. A tensor of zeros and ones, such as a mask, becomes all ones, or all zeros if it has no one. From the
    mapping's other entries, only single values stay.
    """
    few, draw = slice_inputs(x, slice(0, n)), torch.Generator().manual_seed(0)

    def like(value: Tensor) -> Tensor:
        if not value.ndim:
            return value.clone()
        if bool(((value == 0) | (value == 1)).all()):
            return torch.full_like(value, bool(value.any()))
        if value.is_floating_point() or value.is_complex():
            return torch.rand(value.shape, generator=draw, dtype=torch.float64, device="cpu").to(value)
        whole = value.long()
        # torch draws integers only from ranges of fewer than 2^63 numbers.
        ends = max(-_MOST, min(0, int(whole.min()))), min(_MOST, int(whole.max())) + 1
        return torch.randint(ends[0], max(1, ends[1]), value.shape, generator=draw, device="cpu").to(value)

    if isinstance(few, Mapping):
        few = {key: value for key, value in few.items() if isinstance(value, (Tensor, str, int, float, type(None)))}
    return map_tensors(few, like)


@contextmanager
def asks_for_example(example: object) -> Iterator[None]:
    """Name the argument ``example`` in errors on :func:`made_up_inputs`, if the user passed no example."""
    try:
        yield
    except Exception as error:  # encoders' errors on wrong inputs have no common base class
        if example is not None:
            raise
        reason = (str(error) or type(error).__name__).splitlines()[0]
        hint = "Pass example=, two inputs that may be in the file."
        got = f"none, and made-up ones fail: {reason}"
        raise InputError("example", "inputs that the encoder takes", got, hint) from error


def same_tokens(parts: Sequence[Inputs]) -> list[Inputs]:
    """Pad batches of tokens, mappings with an ``attention_mask`` (N, T), to one length; keep others unchanged.

    The padding goes to the side where the masks already have zeros: the side matters for an encoder that takes its
    embedding from the first or the last token.
    """
    masks = [part.get("attention_mask") if isinstance(part, Mapping) else None for part in parts]
    tokens = [mask for mask in masks if isinstance(mask, Tensor) and mask.ndim == 2]
    longest = max((mask.shape[1] for mask in tokens), default=0)
    if len(tokens) < len(parts) or all(mask.shape[1] == longest for mask in tokens):
        return list(parts)
    sides = [_padded_side(mask) for mask in tokens]
    known = {side for side in sides if side is not None}
    padded: list[Inputs] = []
    for part, mask, side in zip(parts, tokens, sides, strict=True):
        missing = longest - mask.shape[1]
        if missing and side is None and len(known) != 1:
            hint = "Pad all batches to one length, as tokenizer(texts, padding='max_length', max_length=...) does."
            got = f"batches of {mask.shape[1]} and {longest} tokens whose masks do not show on which side to pad"
            raise InputError("train_loader", "batches of one number of tokens", got, hint)
        side = side or next(iter(known), "right")
        padded.append(_padded(part, mask.shape, (missing, 0) if side == "left" else (0, missing)))
    return padded


def _padded(x: Inputs, shape: torch.Size, pad: tuple[int, int]) -> Inputs:
    """Pad the entries with the mask's shape, which are the tokens, their types and their positions."""
    return map_tensors(x, lambda t: nn.functional.pad(t, pad) if t.shape == shape else t)


def _padded_side(mask: Tensor) -> str | None:
    """Return the side of a mask (N, T) that has zeros, ``"left"`` or ``"right"``; ``None`` if both or no sides do."""
    in_front, behind = bool((mask[:, :1] == 0).any()), bool((mask[:, -1:] == 0).any())
    return None if in_front == behind else "left" if in_front else "right"


def is_texts(x: Any) -> bool:
    """Return whether this is a batch of texts: a list or tuple of at least one string."""
    return isinstance(x, (list, tuple)) and bool(x) and all(isinstance(text, str) for text in x)


def tokenized(model: Any, x: Any, argument: str = "x") -> Any:
    """Turn texts into inputs of the encoder, on its device; return other objects unchanged.

    The encoder's first module with a method ``preprocess`` or ``tokenize``, such as a sentence-transformers model,
    turns texts into a mapping.
    """
    if isinstance(x, str):
        raise InputTypeError(argument, "a list of texts", "one text", "Pass [text].")
    if not is_texts(x):
        return x
    owners = model.modules() if isinstance(model, nn.Module) else ()
    known = [(owner, name) for owner in owners for name in ("preprocess", "tokenize") if hasattr(type(owner), name)]
    if not known:
        hint = "This encoder has no method 'tokenize': turn texts into a mapping of tensors before, one text a row."
        wanted = "a tensor or a mapping of tensors, one point a row"
        raise InputTypeError(argument, wanted, f"a {type(x).__name__} of texts", hint)
    owner, name = known[0]
    # The default prompt, which ``encode`` of sentence-transformers puts before every text.
    prompts = getattr(owner, "prompts", None)
    prompt = prompts.get(getattr(owner, "default_prompt_name", None)) if isinstance(prompts, Mapping) else None
    out = getattr(owner, name)(list(x), **({} if prompt is None else {"prompt": prompt}))
    if not isinstance(out, Mapping) or input_length(out) != len(x):
        got = f"a {type(out).__name__}" + (f" of {input_length(out)} points" if isinstance(out, Mapping) else "")
        wanted = f"a mapping of tensors with {len(x)} points from {type(owner).__name__}.{name}"
        raise InputError(argument, wanted, got)
    device = next((p.device for p in model.parameters()), None)
    return dict(out) if device is None else move_inputs(out, device)
