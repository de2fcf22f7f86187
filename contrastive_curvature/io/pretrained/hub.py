"""The Hugging Face hub: download and upload of saved posteriors, where ``huggingface_hub`` is installed."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError, expected
from contrastive_curvature.io.pretrained.about import REPOSITORY, checked_repository
from contrastive_curvature.io.pretrained.layout import CARD, CONFIG, LIBRARY

__all__ = ["local_folder", "push_to_hub"]

_NUMBERS = "posterior-*.safetensors"
_SECONDS = 10


def local_folder(
    source: object,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: Path | str | None = None,
    local_files_only: bool = False,
) -> Path:
    """The folder of a saved posterior on this machine, downloaded where it is one of the hub.

    Args:
        source: A folder, or a repository as ``"user/name"``.
        revision: Branch, tag or commit of the repository.
        token: Of the hub.
        cache_dir: Where the hub's files are kept.
        local_files_only: Whether only files that were downloaded before are used.

    Raises:
        InputTypeError: ``source`` is no path.
        InputError: There is neither such a folder nor such a repository.
        UnsupportedError: ``huggingface_hub`` is not installed.
    """
    if not isinstance(source, (str, Path)):
        raise InputTypeError(expected("source", "a path of a folder, or 'user/name'", f"a {type(source).__name__}"))
    validate.flag("local_files_only", local_files_only)
    try:
        path = Path(source).expanduser()
        present, is_folder = path.exists(), path.is_dir()
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(expected("source", "a path of a folder, or 'user/name'", str(error))) from error
    if is_folder:
        return path
    if present:
        hint = "Name the folder that it is in."
        raise InputError(expected("source", "a folder", f"{path}, which is a file", hint))
    if isinstance(source, Path) or not REPOSITORY.fullmatch(source) or source.startswith("."):
        hint = "Name the folder that la.save_pretrained(folder) wrote, or a repository of the hub as 'user/name'."
        raise InputError(expected("source", "a folder that exists", str(source), hint))
    hub = _hub(f"{source!r} is no folder here, and to download it from the hub")
    silent = None if local_files_only else _silence(hub, source, revision, token)
    try:
        found = hub.snapshot_download(
            source,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only or silent is not None,
            library_name=LIBRARY,
            allow_patterns=[CONFIG, CARD, _NUMBERS],
        )
    except Exception as error:  # the hub's errors have no common base: of HTTP, of its cache, of names
        came = f"{source!r}: no folder of that name here, and {'no answer from' if silent else 'not on'} the hub"
        raise _refused(silent or error, "source", came) from error
    return Path(found)


def _silence(hub: Any, source: str, revision: str | None, token: str | bool | None) -> Exception | None:
    """What was raised where the hub does not answer within :data:`_SECONDS`; its own download waits much longer."""
    try:
        hub.HfApi(token=token, library_name=LIBRARY).repo_info(source, revision=revision, timeout=_SECONDS)
    except hub.errors.HfHubHTTPError:
        return None
    except Exception as error:  # of one HTTP client or another
        return error
    return None


def push_to_hub(
    la: Any,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    **options: Any,
) -> str:
    """Save a posterior and upload it to the Hugging Face hub; the repository is made where there is none.

    Args:
        la: A fitted posterior, or one of two towers.
        repo_id: The repository, ``"user/name"``.
        private: Whether a new repository is private; None for the default of the account.
        token: Of the hub; None takes the one of ``hf auth login``.
        revision: Branch to upload to; None for the main one.
        create_pr: Whether to open a pull request instead.
        commit_message: Of the upload.
        **options: ``match``, ``example`` and what the model card says, as of ``save_pretrained``.

    Returns:
        Address of the upload.

    Raises:
        InputError: An option is malformed, or the hub refuses the upload.
        UnsupportedError: ``huggingface_hub`` is not installed; see ``save_pretrained`` for others.
    """
    from contrastive_curvature.io.pretrained.save import save_pretrained

    checked_repository(repo_id)
    validate.flag("create_pr", create_pr)
    hub = _hub("push_to_hub")
    with tempfile.TemporaryDirectory() as place:
        folder = save_pretrained(la, Path(place) / "posterior", repo_id=repo_id, **options)
        try:
            api = hub.HfApi(token=token, library_name=LIBRARY)
            api.create_repo(repo_id, private=private, exist_ok=True)
            made = api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                revision=revision,
                create_pr=create_pr,
                commit_message=commit_message or "Upload a posterior with contrastive-curvature",
                # Numbers of an earlier upload have another name.
                delete_patterns=_NUMBERS,
            )
        except Exception as error:  # the hub's errors have no common base
            raise _refused(error, "repo_id", f"{repo_id!r}, which the hub refuses") from error
    return str(getattr(made, "pr_url", None) or getattr(made, "commit_url", None) or made)


def _hub(what: str) -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        msg = f"{what}: it needs huggingface_hub: pip install 'contrastive-curvature[hub]'"
        raise UnsupportedError(msg) from error
    return huggingface_hub


def _refused(error: Exception, argument: str, came: str) -> InputError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    hint = "Check the name, the network and the token (hf auth login)."
    wanted = "a folder, or a repository that you may read" if argument == "source" else "a repository you may write to"
    return InputError(expected(argument, wanted, f"{came} ({type(error).__name__}: {reason})", hint))
