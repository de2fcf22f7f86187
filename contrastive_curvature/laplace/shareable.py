"""Posteriors as folders to keep, and as repositories of the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Unpack

if TYPE_CHECKING:
    from contrastive_curvature.pretrained.about import PushOptions, SaveOptions

__all__ = ["Shareable"]


class Shareable:
    """What is saved and shared: the posterior of one encoder, and that of two towers."""

    def save_pretrained(self, folder: Path | str, *, overwrite: bool = False, **options: Unpack[SaveOptions]) -> Path:
        """Write the posterior, of two towers both, to a folder to keep or to share: safetensors, JSON and a model card.

        :func:`contrastive_curvature.load_pretrained` reads it back around the encoder, which is not in it. What is in
        it is complete at every moment, also if the process is killed.

        Args:
            folder: The folder; missing parents are made.
            overwrite: Whether a saved posterior that is there may be replaced.
            **options: ``match``, ``example`` and what the model card says (``fitted_on``, ``encoder_source``,
                ``license``, ``metrics``, ...), see :class:`~contrastive_curvature.pretrained.about.SaveOptions`.

        Returns:
            The folder.

        Raises:
            NotFittedError: Before ``fit``.
            InputError: An option is malformed, the folder holds something already, or it cannot be written.
            UnsupportedError: A posterior is of a class of your own, or has options that are no plain values.
        """
        # Imported when used, as it imports the classes of posteriors.
        from contrastive_curvature.pretrained.save import save_pretrained

        return save_pretrained(self, folder, overwrite=overwrite, **options)

    def push_to_hub(self, repo_id: str, **options: Unpack[PushOptions]) -> str:
        """Save and upload to the Hugging Face hub (``pip install 'contrastive-curvature[hub]'``).

        Args:
            repo_id: The repository, ``"user/name"``; it is made where there is none.
            **options: ``private``, ``token``, ``revision``, ``create_pr`` and ``commit_message``, and the options of
                :meth:`save_pretrained`, see :class:`~contrastive_curvature.pretrained.about.PushOptions`.

        Returns:
            Address of the upload.

        Raises:
            NotFittedError: Before ``fit``.
            InputError: An option is malformed, or the hub refuses the upload.
            UnsupportedError: ``huggingface_hub`` is not installed; or see :meth:`save_pretrained`.
        """
        from contrastive_curvature.pretrained.hub import push_to_hub

        return push_to_hub(self, repo_id, **options)
