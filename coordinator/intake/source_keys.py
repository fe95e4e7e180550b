"""Source keys of suite entries, from their task and data files before any build; and which inputs of a build or score have
changed since.

Rule: a key depends only on file contents, so `eval`, `submit` and the daemon compute the same one. lm-eval's own tasks count
by its version. Recorded inputs are read again in the same place: by this process, or by the interpreter of [trial] python or
container, which has other packages or files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from coordinator.base.run_command import CommandError, run_command
from coordinator.decide.evaluation.job_specs import Site
from coordinator.decide.evaluation.records import Inputs
from coordinator.errors import OperatorError, RetryError
from coordinator.intake.checkpoint import wrapped_name
from coordinator.intake.hub import HUB_ID
from evaljobs import secret_values
from evaljobs.contract.names import HF_ENGINES, PLACES
from evaljobs.contract.paths import expand_home, task_catalogue
from evaljobs.contract.specs import ModelOptions, Sources, SuiteSpec
from evaljobs.lmeval import shown_inputs, source_files
from evaljobs.lmeval.catalogue import cached_descriptions
from evaljobs.staging.fingerprint import BadWeights, folder_identity, read_header

ANSWER_SECONDS = 60.0  # longest wait for digests from the trials' interpreter
# Model arguments that name a folder filled by a run.
MADE_BY_RUNS = ("download_dir", "cache_dir", "offload_folder")
# Variables that give a location, or the amount of output: only the contents of the location count.
NO_INPUT = re.compile(
    r"HF_|HUGGINGFACE_|TRANSFORMERS_(CACHE|VERBOSITY|OFFLINE)|XDG_|TQDM_|(HOME|TMPDIR|PATH|PYTHONSAFEPATH)$"
)


def inputs_of(suite: SuiteSpec, model: ModelOptions, site: Site, lm_eval: str) -> Inputs:
    """Read and hash files. Raise OperatorError if `peft` names no adapter."""
    check_adapter(model)
    digests = source_files.Digests(site.paths.digests)
    names = [task.name for task in suite.tasks]
    named = [source_files.files_named_by(suite.include_path, name, digests) for name in names]
    foreign = not all(files.yamls for files in named)
    shipped = (cached_descriptions(task_catalogue(site.paths.cache, lm_eval)) if foreign else None) or {}
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
    """Return what model arguments name, as in `Inputs.model`; "" if nothing."""
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
    """Return variable -> digest of its value; without secrets, which are not inputs, and without locations."""
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
    """Return model arguments with each local file or folder as a full path; other values are unchanged.

    `folder`: base of relative paths. A word without a slash is a path only under a key of PLACES, so a folder named `float32`
    is not taken for a dtype.
    """

    def full(key: str, value: Any) -> Any:
        if not isinstance(value, str) or not ("/" in value or key in PLACES):
            return value
        place = os.path.abspath(folder / expand_home(value))  # noqa: PTH100 (links stay)
        return place if value and os.path.exists(place) else value  # noqa: PTH110 (also unreadable)

    return {key: full(key, value) for key, value in model_args.items()}


def _wrapped_adapter(place: Path) -> str:
    with contextlib.suppress(FileNotFoundError, BadWeights):
        why = wrapped_name(read_header(place / "adapter_model.safetensors").tensors)
        return why and f"{place}: {why}"
    return ""  # a loader reports what is wrong with it


def check_adapter(model: ModelOptions) -> None:
    """Raise OperatorError if `peft` should be a folder but contains no adapter. Ids of the Hub are not looked up."""
    named = model.model_args.get("peft")
    if model.engine not in HF_ENGINES or not isinstance(named, str) or not named:
        return
    place = Path(os.path.abspath(expand_home(named)))  # noqa: PTH100 (links stay)
    if place.is_dir() and (place / "adapter_config.json").is_file():
        if not (why := _wrapped_adapter(place)):
            return
    elif place.exists():
        why = f"{place} has no adapter_config.json: name the folder that peft's save_pretrained wrote"
    elif HUB_ID.fullmatch(named):
        return
    else:
        why = f"the folder {place} does not exist"
    raise OperatorError(f"peft in [trial] model_args: {why}")


# --- what has changed since ---------------------------------------------------------------------------------------


class Present:
    """Digests of recorded rows now. Used for one look: each path is read once."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._digests = source_files.Digests(site.paths.digests)
        self._inside: dict[str, str] = {}  # path as seen by the trials' interpreter -> digest
        named = site.worker_env.get("PYTHONPATH", "")
        self._search = [*filter(None, named.split(os.pathsep)), *sys.path]

    @property
    def reads_builds(self) -> bool:
        """Whether rows of a build are cheap to read here. Otherwise the build job checks them itself."""
        return not self._site.foreign

    def changed(self, rows: Mapping[str, str], *, of_build: bool = False) -> list[str]:
        """Return the paths whose digest has changed, sorted. Raise RetryError if the trials' interpreter does not answer."""
        now = self.digests(rows, of_build=of_build)
        return sorted(path for path, digest in rows.items() if now[path] != digest)

    def digests(self, paths: Iterable[str], *, of_build: bool = False) -> dict[str, str]:
        paths = list(paths)
        if not of_build or self.reads_builds:
            found = {path: shown_inputs.digest_of(path, self._digests, self._search) for path in paths}
            self._digests.keep()
            return found
        if unknown := sorted(set(paths) - self._inside.keys()):
            self._inside |= self._asked(unknown)
        return {path: self._inside[path] for path in paths}

    def _asked(self, paths: list[str]) -> dict[str, str]:
        try:
            told = evaljobs_says(self._site, "changed", given=[json.dumps(paths)], seconds=ANSWER_SECONDS)
        except CommandError as error:
            why = f"the trials' interpreter did not report what has changed: {error}"
            raise RetryError(why) from error
        digests: dict[str, str] = json.loads(told.strip().splitlines()[-1])
        return digests


def evaljobs_says(site: Site, *words: str, given: Sequence[str] = (), seconds: float | None = None) -> str:
    """Return the output of `python -m evaljobs WORDS` from the trials' interpreter. `given`: contents of files passed as the
    last words. Raise CommandError.
    """
    with ExitStack() as stack:
        for text in given:
            file = stack.enter_context(tempfile.NamedTemporaryFile("w", suffix=".json", dir=site.work_dir))
            file.write(text)
            file.flush()
            words = (*words, file.name)
        argv = [*site.trial_command, "-m", "evaljobs", *words]
        return run_command(argv, seconds=seconds, env={**os.environ, **site.trial_env})
