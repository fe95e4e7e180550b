"""Computes each suite entry's source key from its task and data files, before any build.

Rule: a key depends on file contents alone, so `eval`, `submit` and the daemon compute the same one.
Of lm-eval's own tasks its version counts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coordinator.errors import OperatorError
from coordinator.evaluation.job_specs import Site
from coordinator.evaluation.records import Inputs
from coordinator.intake.checkpoint import wrapped_name
from coordinator.intake.hub import HUB_ID
from evaljobs import secret_values
from evaljobs.contract.names import HF_ENGINES, PLACES
from evaljobs.contract.paths import task_catalogue
from evaljobs.contract.specs import ModelOptions, Sources, SuiteSpec
from evaljobs.lmeval import shown_inputs, source_files
from evaljobs.lmeval.catalogue import kept
from evaljobs.staging.fingerprint import BadWeights, folder_identity, read_header

# Model arguments that name a folder which a run fills.
MADE_BY_RUNS = ("download_dir", "cache_dir", "offload_folder")
# Variables that say where something lies, or how much is printed: what lies there counts.
NO_INPUT = re.compile(
    r"HF_|HUGGINGFACE_|TRANSFORMERS_(CACHE|VERBOSITY|OFFLINE)|XDG_|TQDM_|(HOME|TMPDIR|PATH|PYTHONSAFEPATH)$"
)


def inputs_of(suite: SuiteSpec, model: ModelOptions, site: Site, lm_eval: str) -> Inputs:
    """Reads and hashes files."""
    digests = source_files.Digests(site.paths.digests)
    names = [task.name for task in suite.tasks]
    named = [source_files.named_by(suite.include_path, name, digests) for name in names]
    foreign = not all(files.yamls for files in named)
    shipped = (kept(task_catalogue(site.paths.cache, lm_eval)) if foreign else None) or {}
    found = Inputs(
        lm_eval=lm_eval,
        entries=tuple(Sources(files=files.key()) for files in named),
        model=_named_by(model, {**os.environ, **site.trial_env}),
        env=_digests_of(site.worker_env),
        command=hashlib.sha256(site.command.encode()).hexdigest()[:16] if site.command else "",
        single=tuple(
            name
            for name, files in zip(names, named, strict=True)
            if (
                source_files.is_one_task(suite.include_path, name, digests)
                if files.yamls
                else name in shipped and not shipped[name].members
            )
        ),
    )
    digests.keep()
    return found


def _named_by(model: ModelOptions, env: Mapping[str, str]) -> str:
    """What model arguments name, as of `Inputs.model`; "" where they name nothing."""
    named = {
        key: _identity(key, value)
        for key, value in model.model_args.items()
        if isinstance(value, str)
        and value.startswith("/")
        and key not in MADE_BY_RUNS
        and os.path.exists(value)  # noqa: PTH110 (also unreadable)
    }
    for key, name in source_files.hub_models(model).items():
        (revision,) = shown_inputs.revision_rows([name], "models", env).values()
        named[key] = f"{name} {revision}"
    return json.dumps(sorted(named.items())) if named else ""


def _digests_of(env: Mapping[str, str]) -> dict[str, str]:
    """Variable -> digest of its value; without secrets, which are no inputs, and without places."""
    return {
        name: hashlib.sha256(value.encode()).hexdigest()[:16]
        for name, value in sorted(env.items())
        if not NO_INPUT.match(name)
        and not secret_values.names_variable(name)
        and not secret_values.in_text(value)
    }


def _identity(key: str, place: str) -> str:
    try:
        return folder_identity(place)
    except (OSError, BadWeights) as error:
        raise OperatorError(f"{key} in [trial] model_args: {place} cannot be read: {error}") from error


def with_full_paths(model_args: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Model arguments with each local file or folder by its full path; other values as they are.

    `folder`: relative paths start there. A word without a slash is a path only under a key of PLACES, so a folder
    named `float32` is no dtype.
    """

    def full(key: str, value: Any) -> Any:
        if not isinstance(value, str) or not ("/" in value or key in PLACES):
            return value
        place = os.path.abspath(folder / os.path.expanduser(value))  # noqa: PTH100, PTH111 (links stay; any ~)
        return place if value and os.path.exists(place) else value  # noqa: PTH110 (also unreadable)

    return {key: full(key, value) for key, value in model_args.items()}


def _wrapped_adapter(place: Path) -> str:
    with contextlib.suppress(FileNotFoundError, BadWeights):
        why = wrapped_name(read_header(place / "adapter_model.safetensors").tensors)
        return why and f"{place}: {why}"
    return ""  # a loader says what is wrong with it


def check_adapter(model: ModelOptions) -> None:
    """OperatorError where `peft` is to be a folder, and none with an adapter lies there. Ids of the Hub are not looked up."""
    named = model.model_args.get("peft")
    if model.engine not in HF_ENGINES or not isinstance(named, str) or not named:
        return
    place = Path(os.path.abspath(Path(named).expanduser()))  # noqa: PTH100 (links stay)
    if place.is_dir() and (place / "adapter_config.json").is_file():
        if not (why := _wrapped_adapter(place)):
            return
    elif place.exists():
        why = f"{place} has no adapter_config.json: name the folder that peft's save_pretrained wrote"
    elif HUB_ID.fullmatch(named):
        return
    else:
        why = f"there is no folder {place}"
    raise OperatorError(f"peft in [trial] model_args: {why}")
