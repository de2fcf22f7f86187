"""The Hugging Face hub: download and upload of saved posteriors.

``huggingface_hub.ModelHubMixin`` is not suitable: it makes an object from its class and constructor arguments, while
here the folder names the class and the user passes the encoder.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from pydantic import StrictBool

from contrastive_curvature import validate
from contrastive_curvature.artifact import folder_path
from contrastive_curvature.errors import InputError
from contrastive_curvature.io.pretrained.save import (
    CARD,
    FILE,
    LIBRARY,
    SaveOptions,
    is_repository,
    parsed,
    write_posterior,
)

_HINT = "Check the name, the network and the token (hf auth login)."
_SECONDS = 10
"""After which a hub that does not answer is given up; the hub's own download waits for minutes."""


class PushOptions(SaveOptions):
    """Options of ``push_to_hub``, in addition to :class:`SaveOptions`.

    Attributes:
        private: Whether a new repository is private; None for the default of the account.
        token: Token of the hub; with None, the token of ``hf auth login``.
        revision: Branch for the upload; None for the main branch.
        create_pr: Whether to open a pull request instead.
        commit_message: Message of the upload's commit.
    """

    private: StrictBool | None = None
    token: str | StrictBool | None = None
    revision: str | None = None
    create_pr: StrictBool = False
    commit_message: str | None = None


def local_folder(
    source: object,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: Path | str | None = None,
    local_files_only: bool = False,
) -> Path:
    """Return the local folder of a saved posterior, downloaded if it is a repository of the hub.

    Args:
        source: A folder, or a repository as ``"user/name"``.
        revision: Branch, tag or commit of the repository.
        token: Token of the hub.
        cache_dir: Folder for the hub's files.
        local_files_only: Whether to use only files that were downloaded before.

    Raises:
        InputTypeError: ``source`` is not a path.
        InputError: There is neither such a folder nor such a repository.
    """
    validate.flag("local_files_only", local_files_only)
    folder = folder_path("source", source)
    if folder.is_dir():
        return folder
    if not isinstance(source, str) or not is_repository(source):
        hint = "Name the folder that la.save_pretrained(folder) wrote, or a repository of the hub as 'user/name'."
        raise InputError("source", "a folder that exists", str(source), hint)
    import huggingface_hub

    silence = None if local_files_only else _silence(source, revision, token)
    try:
        snapshot = huggingface_hub.snapshot_download(
            source,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only or silence is not None,
            library_name=LIBRARY,
            allow_patterns=[FILE, CARD],
        )
    except Exception as error:  # the hub's errors (HTTP, cache, names) have no common base class
        where = "no answer from the hub" if silence else "not on the hub"
        got = f"{source!r}: no folder of that name here, and {where} ({_reason(silence or error)})"
        raise InputError("source", "a folder, or a repository that you may read", got, _HINT) from error
    return Path(snapshot)


def push_to_hub(la: Any, repo_id: str, **options: Any) -> str:
    """See :meth:`.ContrastiveLaplace.push_to_hub`."""
    import huggingface_hub

    push = parsed(PushOptions, {**options, "repo_id": repo_id})
    with tempfile.TemporaryDirectory() as above:
        folder = write_posterior(la, Path(above) / "posterior", push, overwrite=False)
        try:
            api = huggingface_hub.HfApi(token=push.token, library_name=LIBRARY)
            api.create_repo(repo_id, private=push.private, exist_ok=True)
            commit = api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                revision=push.revision,
                create_pr=push.create_pr,
                commit_message=push.commit_message or "Upload a posterior with contrastive-curvature",
                allow_patterns=[FILE, CARD],
            )
        except Exception as error:  # the hub's errors have no common base
            got = f"{repo_id!r}, which the hub refuses ({_reason(error)})"
            raise InputError("repo_id", "a repository you may write to", got, _HINT) from error
    return str(commit.pr_url or commit.commit_url)


def _silence(source: str, revision: str | None, token: str | bool | None) -> Exception | None:
    """Return the error if the hub does not answer in time; None if it answers."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    try:
        huggingface_hub.HfApi(token=token, library_name=LIBRARY).repo_info(source, revision=revision, timeout=_SECONDS)
    except HfHubHTTPError:
        return None
    except Exception as error:  # from one of several HTTP clients
        return error
    return None


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
