"""Hub ids as checkpoints: `ORG/MODEL` or `ORG/MODEL@REVISION` to a snapshot folder in the Hugging Face cache.

Rule: a folder takes precedence over an id, and a complete snapshot in the cache over the network, so that a repeated command
means the same weights, online or offline. Only called by commands: a notice never names a Hub id. huggingface_hub is imported
only when an id is used.
"""

from __future__ import annotations

import fnmatch
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.errors import OperatorError, RetryError
from coordinator.intake.checkpoint import SMALL_FILES, CheckpointError, inspect_checkpoint

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

HUB_ID = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?:@(\S+))?", re.ASCII)
ANSWER_SECONDS = 10.0  # longest wait for the Hub's first answer
SIGNED_QUERY = re.compile(r"(?<=\S)\?\S+")  # the query of a URL, which may contain a signature
LOG_IN = "set HF_TOKEN to a token that may read it, or `hf auth login`"
BIN_PATTERNS = ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*.bin")


def local_folder(
    text: str, say: Callable[[str], None], *, allow_bin: bool = False, weights: bool = True
) -> str:
    """Return the folder that a checkpoint argument means; anything but a Hub id is returned unchanged.

    A snapshot that is incomplete in the cache is fetched. `say` gets one line: what is used, from where. `allow_bin`: also
    accept repositories without safetensors. `weights`: False for config and tokenizer only. Raise OperatorError if the Hub
    has no such model or revision, or it is not in the cache and the Hub cannot be reached.
    """
    named = HUB_ID.fullmatch(text)
    if named is None or os.path.exists(text):  # noqa: PTH110 (False where a folder above it may not be read)
        return text
    name, revision = named.groups()
    if revision is None and os.path.exists(Path(text).parent):  # noqa: PTH110 (a folder, mistyped)
        return text
    if revision is not None and os.path.exists(name):  # noqa: PTH110 (as above)
        raise OperatorError(
            f"{text}: {name} is a folder here, and a folder has no revisions: name the folder of that revision"
        )
    try:
        snapshot, fault = _cached(name, revision, allow_bin=allow_bin, weights=weights)
    except ValueError:  # not a valid Hub name
        return text
    if snapshot is not None and not fault:
        say(f"{text}: revision {snapshot.name[:8]} from the Hugging Face cache, {snapshot}")
        return str(snapshot)
    return _fetched(name, revision, say, allow_bin=allow_bin, weights=weights, fault=fault)


def _cached(name: str, revision: str | None, *, allow_bin: bool, weights: bool) -> tuple[Path | None, str]:
    """Return the snapshot in the cache, or None, and why it cannot be evaluated ("": it can)."""
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415

    config = try_to_load_from_cache(name, "config.json", revision=revision)
    if not isinstance(config, str):
        return None, ""
    snapshot = Path(config).parent
    try:
        inspect_checkpoint(snapshot, allow_bin=allow_bin, weights=weights)
    except CheckpointError as error:
        return snapshot, str(error)
    return snapshot, ""


def _fetched(
    name: str, revision: str | None, say: Callable[[str], None], *, allow_bin: bool, weights: bool, fault: str
) -> str:
    """Download the snapshot and return its folder. `fault`: what the snapshot in the cache lacks."""
    from huggingface_hub import HfApi, constants, snapshot_download  # noqa: PLC0415
    from huggingface_hub.utils.tqdm import disable_progress_bars  # noqa: PLC0415

    text = name if revision is None else f"{name}@{revision}"
    try:
        told = HfApi().model_info(name, revision=revision, files_metadata=True, timeout=ANSWER_SECONDS)
    except Exception as error:
        raise _explained(error, text, name, revision, fault) from error
    sizes = _sizes(told)
    chosen = needed_files(sizes, allow_bin=allow_bin)
    large = [file for file in chosen if file.endswith((".safetensors", ".bin"))]
    if not large:
        why = "has no safetensors" if "config.json" in sizes else "holds no model for transformers"
        raise OperatorError(f"{text}: its repository on the Hub {why}; name a model with safetensors")
    left_out = ""
    if not weights:
        chosen = [file for file in chosen if file not in large]
        left_out = f" without its weights ({sum(map(sizes.__getitem__, large)) / 1e6:,.0f} MB)"
    total = sum(sizes[file] for file in chosen)
    say(
        f"{text}: fetching revision {str(told.sha)[:8]}{left_out}, {len(chosen)} files, {total / 1e6:,.0f} MB, "
        f"into {constants.HF_HUB_CACHE}"
    )
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        return snapshot_download(name, revision=revision, allow_patterns=[_exactly(file) for file in chosen])
    except Exception as error:  # from several libraries: a full disk, a broken connection
        for one in (error, error.__cause__):
            if (
                isinstance(one, Exception) and getattr(one, "response", None) is not None
            ):  # the Hub refused a file
                raise _explained(one, text, name, revision, fault) from error
        why = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
        raise OperatorError(
            f"{text}: {total / 1e6:,.0f} MB could not be fetched into {constants.HF_HUB_CACHE} ({SIGNED_QUERY.sub('?…', why)}): "
            "run the same command to continue; HF_HOME selects another folder"
        ) from error


def _sizes(told: ModelInfo) -> dict[str, int]:
    return {file.rfilename: file.size or 0 for file in told.siblings or ()}


def needed_files(names: Iterable[str], *, allow_bin: bool) -> list[str]:
    """Return the files of a repository that an evaluation reads, as `checkpoint.inspect_checkpoint` chooses them."""
    top = {n for n in names if "/" not in n or n.startswith("additional_chat_templates/")}
    small = {n for n in top if any(fnmatch.fnmatch(n, p) for p in (*SMALL_FILES, "*.py"))}
    if "model.safetensors" in top:
        weights = {"model.safetensors"}
    else:  # the index names the shards; other formats are left out
        weights = {n for n in top if fnmatch.fnmatch(n, "model*.safetensors*")}
    if allow_bin and not weights:
        weights = {n for n in top if any(fnmatch.fnmatch(n, p) for p in BIN_PATTERNS)}
    return sorted(small | weights)


def _exactly(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _explained(error: Exception, text: str, name: str, revision: str | None, fault: str) -> Exception:
    """Return an error with the remedy after the Hub's refusal or silence."""
    from huggingface_hub import constants, errors  # noqa: PLC0415

    hub = constants.ENDPOINT
    if isinstance(error, errors.GatedRepoError):
        return OperatorError(f"{text}: gated; accept its terms at {hub}/{name}, then {LOG_IN}")
    if isinstance(error, errors.RepositoryNotFoundError):
        return OperatorError(
            f"{text}: no such folder, and {hub} has no public model of this id (a private one needs `hf auth login`)"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return OperatorError(f"{text}: {hub}/{name} has no revision {revision}")
    response: Any = getattr(error, "response", None)
    if response is not None and response.status_code in (401, 403):
        return OperatorError(f"{text}: {hub} refuses it with status {response.status_code}: {LOG_IN}")
    if response is not None:
        return RetryError(f"{text}: {hub} answered with status {response.status_code}: try again later")
    command = ["hf", "download", name, *(["--revision", revision] if revision else [])]
    lack = f"its snapshot in the Hugging Face cache cannot be used ({fault})" if fault else ""
    lack = lack or f"it is not in the Hugging Face cache ({constants.HF_HUB_CACHE})"
    why = "HF_HUB_OFFLINE is set" if isinstance(error, errors.OfflineModeIsEnabled) else "no answer"
    return OperatorError(
        f"{text}: no such folder, {lack}, and {hub} cannot be reached ({why}): run `{shlex.join(command)}` "
        "where there is internet, with HF_HOME on storage that this machine sees"
    )
