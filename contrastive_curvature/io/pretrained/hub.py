"""The Hugging Face hub: download and upload of saved posteriors.

``huggingface_hub.ModelHubMixin`` does not fit: it makes an object from its class and its constructor's arguments, while
here the class stands in the folder and the encoder comes from the user.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from pydantic import StrictBool

from contrastive_curvature import validate
from contrastive_curvature.artifact import folder_path
from contrastive_curvature.errors import InputError
from contrastive_curvature.io.pretrained.folder import CARD, FILE
from contrastive_curvature.io.pretrained.save import LIBRARY, SaveOptions, is_repository, parsed, write_posterior

_HINT = "Check the name, the network and the token (hf auth login)."
_SECONDS = 10
"""After which a hub that does not answer is given up; the hub's own download waits for minutes."""


class PushOptions(SaveOptions):
    """Options of ``push_to_hub``, besides those of :class:`SaveOptions`.

    Attributes:
        private: Whether a new repository is private; None for the default of the account.
        token: Of the hub; None takes the one of ``hf auth login``.
        revision: Branch to upload to; None for the main one.
        create_pr: Whether to open a pull request instead.
        commit_message: Of the upload.
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
    """Return the folder of a saved posterior on this machine, downloaded where it is one of the hub.

    Args:
        source: A folder, or a repository as ``"user/name"``.
        revision: Branch, tag or commit of the repository.
        token: Of the hub.
        cache_dir: Where the hub's files are kept.
        local_files_only: Whether only files that were downloaded before are used.

    Raises:
        InputTypeError: ``source`` is no path.
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
    except Exception as error:  # the hub's errors have no common base: of HTTP, of its cache, of names
        where = "no answer from the hub" if silence else "not on the hub"
        received = f"{source!r}: no folder of that name here, and {where} ({_reason(silence or error)})"
        raise InputError("source", "a folder, or a repository that you may read", received, _HINT) from error
    return Path(snapshot)


def push_to_hub(la: Any, repo_id: str, **options: Any) -> str:
    """Do what :meth:`.ContrastiveLaplace.push_to_hub` says."""
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
            received = f"{repo_id!r}, which the hub refuses ({_reason(error)})"
            raise InputError("repo_id", "a repository you may write to", received, _HINT) from error
    return str(commit.pr_url or commit.commit_url)


def _silence(source: str, revision: str | None, token: str | bool | None) -> Exception | None:
    """Return the error of a hub that does not answer in time; None where it answers."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    try:
        huggingface_hub.HfApi(token=token, library_name=LIBRARY).repo_info(source, revision=revision, timeout=_SECONDS)
    except HfHubHTTPError:
        return None
    except Exception as error:  # of one HTTP client or another
        return error
    return None


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
