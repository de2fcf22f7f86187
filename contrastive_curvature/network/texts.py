"""Lists of texts as inputs: tokenised by the encoder's own tokenizer before anything else sees them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from contrastive_curvature.errors import InputError, InputTypeError, expected
from contrastive_curvature.network.inputs import input_length, slice_inputs

__all__ = ["is_texts", "tokenized", "tokenized_batch"]


def is_texts(x: Any) -> bool:
    """Whether this is a batch of texts: a list or tuple of strings, with one at least."""
    return isinstance(x, (list, tuple)) and bool(x) and all(isinstance(text, str) for text in x)


def tokenized(model: Any, x: Any, argument: str = "x") -> Any:
    """Texts as what the encoder takes in; anything else as it is.

    Args:
        model: The encoder. The first of its modules that has a method ``preprocess`` or ``tokenize``, as
            sentence-transformers' models have, turns texts into a mapping.
        x: A batch.
        argument: Name for the error message.

    Raises:
        InputTypeError: Texts, and the encoder has no tokenizer; or one text that is in no list.
        InputError: Its tokenizer does not return a mapping with as many points.
    """
    if isinstance(x, str):
        raise InputTypeError(expected(argument, "a list of texts", "one text", "Pass [text]."))
    if not is_texts(x):
        return x
    owner, method = _tokenizer_of(model)
    if method is None:
        hint = "This encoder has no method 'tokenize': turn texts into a mapping of tensors before, one text a row."
        wanted = "a tensor or a mapping of tensors, one point a row"
        raise InputTypeError(expected(argument, wanted, f"a {type(x).__name__} of texts", hint))
    prompt = _prompt_of(owner)
    out = method(list(x)) if prompt is None else method(list(x), prompt=prompt)
    if not isinstance(out, Mapping) or input_length(out) != len(x):
        came = f"a {type(out).__name__}" + (f" of {input_length(out)} points" if isinstance(out, Mapping) else "")
        wanted = f"a mapping of tensors with {len(x)} points from {type(owner).__name__}.{method.__name__}"
        raise InputError(expected(argument, wanted, came))
    return dict(out)


def tokenized_batch(model: Any, batch: Any, argument: str = "train_loader") -> Any:
    """What a loader yields, with mappings in the place of texts.

    Args:
        model: The encoder; or those of two views, ``(encoder_a, encoder_b)``.
        batch: Any form that :func:`~contrastive_curvature.network.views.read_views` knows.
        argument: Name of the loader for the error message.

    Raises:
        InputTypeError: Texts, and the encoder has no tokenizer.
    """
    if not isinstance(batch, (tuple, list)) or not batch:
        return batch
    if is_texts(batch):
        hint = "Yield (texts, labels), or two lists (texts, texts) of pairs."
        raise InputTypeError(expected(argument, "batches (x, labels)", "texts without labels", hint))
    first = batch[0]
    if not is_texts(first) and isinstance(first, (tuple, list)):
        return (_views(model, first, argument), *batch[1:]) if len(first) == 2 else batch
    # Beside a tensor or a mapping, texts are labels, which is for the reader of the batch to say.
    if len(batch) > 1 and (isinstance(model, tuple) or (is_texts(first) and is_texts(batch[1]))):
        return (*_views(model, batch[:2], argument), *batch[2:])
    return (tokenized(model, first, f"{argument}: inputs of a batch"), *batch[1:])


def _views(model: Any, views: Any, argument: str) -> tuple[Any, Any]:
    """Two views, tokenised together where one encoder sees both, so that they have one length."""
    first, second = views
    argument = f"{argument}: inputs of a batch"
    if isinstance(model, tuple):
        return tokenized(model[0], first, argument), tokenized(model[1], second, argument)
    if not is_texts(first) or not is_texts(second):
        return tokenized(model, first, argument), tokenized(model, second, argument)
    both = tokenized(model, [*first, *second], argument)
    cut = len(first)
    return slice_inputs(both, slice(0, cut)), slice_inputs(both, slice(cut, None))


def _tokenizer_of(model: Any) -> tuple[Any, Any]:
    """The module that can tokenise, and its method."""
    for module in model.modules() if isinstance(model, nn.Module) else ():
        for name in ("preprocess", "tokenize"):
            method = getattr(type(module), name, None)
            if callable(method):
                return module, getattr(module, name)
    return None, None


def _prompt_of(owner: Any) -> str | None:
    """The text that sentence-transformers' ``encode`` puts before every other by default."""
    prompts, name = getattr(owner, "prompts", None), getattr(owner, "default_prompt_name", None)
    return prompts.get(name) if isinstance(prompts, Mapping) and isinstance(name, str) else None
