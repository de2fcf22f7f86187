"""What can be refused of two towers before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError, expected
from contrastive_curvature.laplace.base import ContrastiveLaplace
from contrastive_curvature.laplace.options import CONTRASTIVE
from contrastive_curvature.losses.cosine import CosineLoss
from contrastive_curvature.losses.rows import RowLoss
from contrastive_curvature.two_towers import TwoTowers

__all__ = ["check_loss", "check_towers", "check_vectors", "refuse_shared_parameters"]

_STRUCTURES = ("diag", "kron", "kron_lowrank", "full")


def check_towers(model: object, likelihood: object, weights: object, structure: object) -> None:
    """Refuse what two towers have no posterior for.

    Raises:
        InputError: An argument is unknown or malformed.
        UnsupportedError: Two towers have no such posterior.
    """
    if not isinstance(model, TwoTowers):
        raise InputTypeError(expected("model", "a TwoTowers(encoder_a, encoder_b)", f"a {type(model).__name__}"))
    if likelihood != CONTRASTIVE:
        raise InputError(expected("likelihood", repr(CONTRASTIVE), likelihood))
    if weights == "subnetwork":
        msg = (
            "subset_of_weights='subnetwork': its indices count the weights of one encoder. Use 'last_layer' or 'all' "
            "for two towers."
        )
        raise UnsupportedError(msg)
    if structure not in _STRUCTURES:
        known = ", ".join(repr(name) for name in _STRUCTURES[:-1])
        msg = (
            f"hessian_structure={structure!r}: two towers are fitted in one pass over pairs, and this structure needs "
            f"the data set of one encoder. Use {known} or 'full'."
        )
        raise UnsupportedError(msg)
    places = [_place(encoder) for encoder in (model.encoder_a, model.encoder_b)]
    if None not in places and places[0] != places[1]:
        hint = "The outputs of both are compared: move and convert them to one device and dtype."
        raise InputError(expected("encoder_b", f"{places[0]}, as encoder_a", f"{places[1]}", hint))


def check_loss(la: ContrastiveLaplace) -> CosineLoss:
    """The loss of both towers, from the options of a posterior of one.

    Raises:
        InputError: There is no loss.
        UnsupportedError: The loss is of one tower, or an option of the data has no version for two.
    """
    options = la._curvature_options
    loss = options.loss
    if not options.given_loss:
        hint = (
            "CLIP and dual encoders of queries and documents were trained with InfoNCELoss(temperature=...), SigLIP "
            "with SigLIPLoss(scale=..., bias=...); use the trained temperature, or scale and bias."
        )
        wanted = "backend_kwargs=dict(loss=...) with the loss that the towers were trained with"
        raise InputError(expected("backend_kwargs: loss", wanted, "none", hint))
    if not isinstance(loss, RowLoss) and not loss.graded:
        msg = (
            f"loss: {type(loss).__name__} compares points of one tower. For two towers use a loss of anchors and their "
            "candidates, such as InfoNCELoss, SupConLoss or SigLIPLoss, or of graded pairs, CoSENTLoss."
        )
        raise UnsupportedError(msg)
    if options.candidates == "dataset":
        msg = (
            "candidates='dataset': two towers are fitted in one pass, with the candidates of each batch. Leave it out, "
            "and take batches as large as in training."
        )
        raise UnsupportedError(msg)
    if options.relation is not None:
        msg = (
            "relation: inputs of two towers belong together pair by pair, or by their labels. Leave it out, and yield "
            "(a, b) or (a, b, labels)."
        )
        raise UnsupportedError(msg)
    return loss


def refuse_shared_parameters(model: TwoTowers, last_layers: Sequence[str] | None) -> None:
    """Refuse towers of which some parameters, but not all, are the same, where these are in both posteriors.

    Args:
        model: Both encoders.
        last_layers: Names of the layers whose parameters the posteriors have; ``None`` for all parameters.

    Raises:
        UnsupportedError: Both posteriors would have the same parameter.
    """
    if model.shared:
        return
    of_a, of_b = model.encoder_a, model.encoder_b
    if last_layers is not None:
        of_a, of_b = of_a.get_submodule(last_layers[0]), of_b.get_submodule(last_layers[1])
    second = {id(p) for p in of_b.parameters() if p.requires_grad}
    common = [name for name, p in of_a.named_parameters() if p.requires_grad and id(p) in second]
    if common:
        shown = ", ".join(repr(name) for name in common[:3]) + (" and others" if len(common) > 3 else "")
        msg = (
            f"encoder_a, encoder_b: two modules that share the parameters {shown}. Each tower has a posterior of its "
            "own, and a shared parameter would have two. Pass one module as both encoders, or, where only earlier "
            "layers are shared, use subset_of_weights='last_layer'."
        )
        raise UnsupportedError(msg)


def check_vectors(posteriors: Sequence[ContrastiveLaplace], vectors: Sequence[object]) -> list[Tensor]:
    """Vectors over the parameters of fitted posteriors.

    Raises:
        NotFittedError: Before ``fit``.
        InputError: A vector is malformed, or there is one too many or too few.
    """
    for la in posteriors:
        la.check_fitted()
    if len(vectors) != len(posteriors):
        wanted, came = ("nothing: both towers are one module", "a vector")
        if len(posteriors) == 2:
            wanted, came = "a vector over the parameters of the second tower", "none"
        raise InputError(expected("v_b", wanted, came))
    out: list[Tensor] = []
    for name, la, v in zip(("v_a", "v_b"), posteriors, vectors, strict=False):
        like = la.mean
        if not isinstance(v, Tensor) or v.dtype != like.dtype or v.device != like.device:
            came = f"{v.dtype} on {v.device}" if isinstance(v, Tensor) else f"a {type(v).__name__}"
            raise InputTypeError(expected(name, f"a tensor of {like.dtype} on {like.device}", came))
        if v.shape != like.shape:
            raise InputError(expected(name, f"shape {tuple(like.shape)}", f"shape {tuple(v.shape)}"))
        if not bool(v.isfinite().all()):
            raise InputError(expected(name, "finite numbers", "NaN or infinity"))
        out.append(v)
    return out


def _place(encoder: nn.Module) -> str | None:
    """Dtype and device of an encoder."""
    like = next(encoder.parameters(), None)
    return None if like is None else f"{like.dtype} on {like.device}"
