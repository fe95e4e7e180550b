"""Computes each suite entry's source key from its task and data files, before any build.

Rule: a key depends on file contents alone, so `eval`, `submit` and the daemon compute the same one.
lm-eval runs only where the suite uses its tasks and the cache has no index of them for this
version.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from coordinator.errors import EvalspanError, OperatorError
from coordinator.evaluation.job_specs import Site
from coordinator.evaluation.records import Inputs
from coordinator.intake.hub import HUB_ID
from evaljobs import secret_values
from evaljobs.contract.names import HF_ENGINES, PLACES
from evaljobs.contract.paths import shipped_index
from evaljobs.contract.specs import ModelOptions, Sources, SuiteSpec
from evaljobs.lmeval import shown_inputs, source_files
from evaljobs.staging.fingerprint import BadWeights, folder_identity

# Model arguments that name a folder which a run fills.
MADE_BY_RUNS = ("download_dir", "cache_dir", "offload_folder")
# Variables that say where something lies, or how much is printed: what lies there counts.
NO_INPUT = re.compile(
    r"HF_|HUGGINGFACE_|TRANSFORMERS_(CACHE|VERBOSITY|OFFLINE)|XDG_|TQDM_|(HOME|TMPDIR|PATH|PYTHONSAFEPATH)$"
)


def inputs_of(
    suite: SuiteSpec,
    model: ModelOptions,
    site: Site,
    lm_eval: str,
    index_tasks: Callable[[SuiteSpec, Site], object],
) -> Inputs:
    """Reads and hashes files. `index_tasks`: has lm-eval write the index of its own tasks."""
    digests = source_files.Digests(site.paths.digests)
    own = source_files.local_names(suite.include_path, digests)
    names = [task.name for task in suite.tasks]
    index = shipped_index(site.paths.cache, lm_eval)
    foreign = any(name not in own and not Path(name).is_file() for name in names)
    if foreign and not index.exists():
        with suppress(
            EvalspanError
        ):  # the key then holds lm-eval's version for its tasks; a build reports what is wrong
            index_tasks(suite, site)
    lookup = _lookup(index) if foreign else source_files.no_shipped
    env = {**os.environ, **site.trial_env}
    entries = []
    for name in names:
        files, installed = source_files.entry_files(suite.include_path, name, digests, lookup, env)
        entries.append(Sources(files=files, installed=installed))
    found = Inputs(
        lm_eval=lm_eval,
        entries=tuple(entries),
        model=_named_by(model, env),
        env=_digests_of(site.worker_env),
        command=hashlib.sha256(site.command.encode()).hexdigest()[:16] if site.command else "",
        single=tuple(n for n in names if source_files.is_one_task(suite.include_path, n, digests, lookup)),
    )
    digests.keep()
    return found


def _lookup(index: Path) -> source_files.Lookup:
    try:
        known = json.loads(index.read_bytes())
    except (OSError, ValueError):
        return source_files.no_shipped  # the key holds lm-eval's version for its tasks

    def shipped(name: str) -> source_files.Shipped | None:
        if name not in known["tasks"]:
            return None
        _kind, yaml, members = known["tasks"][name]
        return source_files.Shipped(
            Path(known["folder"]) / yaml if yaml else None, () if yaml else tuple(members)
        )

    return shipped


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


def check_adapter(model: ModelOptions) -> None:
    """OperatorError where `peft` is to be a folder, and none with an adapter lies there. Ids of the Hub are not looked up."""
    named = model.model_args.get("peft")
    if model.engine not in HF_ENGINES or not isinstance(named, str) or not named:
        return
    place = Path(os.path.abspath(Path(named).expanduser()))  # noqa: PTH100 (links stay)
    if place.is_dir() and (place / "adapter_config.json").is_file():
        return
    if place.exists():
        why = f"{place} has no adapter_config.json: name the folder that peft's save_pretrained wrote"
    elif HUB_ID.fullmatch(named):
        return
    else:
        why = f"there is no folder {place}"
    raise OperatorError(f"peft in [trial] model_args: {why}")
