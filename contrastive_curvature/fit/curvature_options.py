"""The options of a curvature: one record, parsed once at the entry point."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError
from contrastive_curvature.fit.mc_samples import check_mc_samples
from contrastive_curvature.losses.choice import OF_THE_LOSS, choose_loss
from contrastive_curvature.losses.cosine import CosineLoss, plain_option
from contrastive_curvature.pairs import RelationFunction
from contrastive_curvature.structures import Structure

_OF_ANY_LOSS = ("distance", "pd_fix")


@dataclass(frozen=True)
class CurvatureOptions:
    """All options of ``backend_kwargs``, parsed by :meth:`parse`.

    ``distance``, ``pd_fix``, ``margin``, ``negative_weight`` and ``normalization`` are attributes of :attr:`loss`. See
    :class:`~contrastive_curvature.ContrastiveBackend` for the meaning of each option.
    """

    loss: CosineLoss
    given_loss: bool
    """Whether the user gave the loss as an object."""
    pairs: str = "dataset"
    positives: str | None = None
    relation: RelationFunction | None = None
    rank: int | None = None
    mc_samples: int | None = None
    negative_samples: int | str | None = "auto"

    @staticmethod
    def defaults() -> dict[str, Any]:
        """Return all names that :meth:`parse` accepts, with their defaults; some defaults depend on the loss."""
        rest = {field.name: field.default for field in fields(CurvatureOptions) if field.name != "given_loss"}
        contrastive = choose_loss()
        of_the_loss = {name: getattr(contrastive, name) for name in (*_OF_ANY_LOSS, *OF_THE_LOSS)}
        return {**of_the_loss, **rest, "loss": None}

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> CurvatureOptions:
        """Parse options by name, and refuse unsupported combinations.

        Args:
            given: Names and values; other options keep their defaults.

        Raises:
            InputError: An option is out of range, or conflicts with another one.
            InputTypeError: A name is unknown, or a value has the wrong type.
            UnsupportedError: The loss, its fix or the data do not support an option.
        """
        known = cls.defaults()
        unknown = sorted(set(given) - set(known), key=str)
        if unknown:
            raise InputTypeError("options of a curvature", f"names among {sorted(known)}", str(unknown))
        of_the_loss = {name: given[name] for name in ("loss", *_OF_ANY_LOSS, *OF_THE_LOSS) if name in given}
        rest = {name: value for name, value in given.items() if name not in of_the_loss}
        options = cls(choose_loss(**of_the_loss), given.get("loss") is not None, **rest)
        options._check_data()
        options._check_positives("pairs" in given)
        options._check_negative_samples()
        check_mc_samples(options.mc_samples, options.loss.coupled, None)
        return options

    @property
    def over_dataset(self) -> bool:
        """Return whether a fit uses all pairs of the data set, not only pairs inside batches."""
        return self.loss.compares == "pairs" and self.pairs == "dataset"

    def check_structure(self, structure: type[Structure]) -> None:
        """Refuse options that a structure does not support."""
        loss = self.loss if structure.couples else self.loss.uncoupled()
        if isinstance(self.negative_samples, int) and loss.coupled and not loss.from_sums:
            raise UnsupportedError(
                f"negative_samples with pd_fix={str(loss.pd_fix)!r}: the cross terms of {type(loss).__name__} go "
                "through all pairs of points. Use pd_fix='psd_parts', 'psd' or 'ggn_fixed', which couple no points, or "
                "negative_samples=None."
            )
        check_mc_samples(self.mc_samples, self.loss.coupled, structure)

    def named(self) -> dict[str, Any]:
        """Return the options by the names that :meth:`parse` accepts."""
        out = {name: getattr(self, name) for name in self.defaults() if hasattr(self, name)}
        out |= {name: getattr(self.loss, name) for name in _OF_ANY_LOSS}
        if not self.given_loss:
            del out["loss"]
            out |= {name: getattr(self.loss, name) for name in OF_THE_LOSS}
        if self.loss.compares != "pairs":
            del out["pairs"]
        return out

    def plain(self) -> dict[str, Any]:
        """Return the options as strings and numbers, for saved states; for a relation only whether it is set."""
        plain = {"pairs": self.pairs, **self.named()}
        plain = {name: plain_option(value) for name, value in plain.items()}
        if self.given_loss:
            # On one line, because the states of OnlineLaplace keep one option per line.
            plain["loss"] = self.loss.description
        # Defaults are left out, so that states stay comparable when an option is added.
        for name in ("mc_samples", "positives"):
            if plain[name] is None:
                del plain[name]
        if self.negative_samples == "auto":
            del plain["negative_samples"]
        return {**plain, "relation": self.relation is not None}

    def _check_data(self) -> None:
        if not isinstance(self.pairs, str) or self.pairs not in ("dataset", "batch"):
            hint = "Class labels come from the loader; for another relation pass relation=callable."
            raise InputError("pairs", "'dataset' or 'batch'", self.pairs, hint)
        if self.relation is not None and not callable(self.relation):
            wanted = "a callable (targets_a, targets_b) -> (positives, negatives)"
            raise InputTypeError("relation", wanted, f"a {type(self.relation).__name__}")
        if self.rank is not None:
            validate.count("rank", self.rank)

    def _check_positives(self, pairs_given: bool) -> None:
        """Check that ``positives``, ``pairs`` and ``relation`` fit the loss."""
        loss, name = self.loss, type(self.loss).__name__
        if loss.compares == "pairs":
            if self.positives is not None:
                hint = f"{name} is a sum over pairs. Leave it out."
                raise InputError("positives", "nothing with a loss of pairs", self.positives, hint)
            return
        if pairs_given:
            hint = f"{name} compares an anchor with the candidates of its batch. Leave it out."
            raise InputError("pairs", "nothing with a loss of anchors", self.pairs, hint)
        by_views = self.positives == "views"
        if self.relation is not None and (loss.compares == "proxies" or by_views):
            reason = "with positives='views'" if by_views else f"with {name}, which has no relation of points"
            raise InputError("relation", f"nothing {reason}", "a callable", "Leave one of them out.")
        if self.positives is not None:
            validate.choice("positives", self.positives, ("labels", "views"))

    def _check_negative_samples(self) -> None:
        number = self.negative_samples
        if number is None or (isinstance(number, str) and number == "auto"):
            return
        if isinstance(number, bool) or not isinstance(number, int) or number < 2:
            raise InputError("negative_samples", "None, 'auto' or a whole number from 2 on", number)
        if self.loss.compares != "pairs":
            hint = "It compares points within their batch. Leave it out."
            raise InputError("negative_samples", f"nothing with {type(self.loss).__name__}", number, hint)
        if self.pairs == "batch":
            hint = "A batch has few negatives. Use pairs='dataset', or leave it out."
            raise InputError("negative_samples", "nothing with pairs='batch'", number, hint)
        if self.relation is not None:
            hint = (
                "Which points are positives shows only when all pairs are looked at. Use class labels, or leave it out."
            )
            raise InputError("negative_samples", "nothing with relation", number, hint)
