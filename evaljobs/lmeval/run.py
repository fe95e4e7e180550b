"""lm-eval's own run of one suite entry, with a stub or replaying model in place of the real one.

Rule: the same call builds request sets and computes scores, with the arguments of the `lm_eval`
command (0.4.13). So both draw the same prompts. Tasks are loaded inside that call, after its seeds.
Imports no torch. Called from `requests.build` and `scoring.score`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evaljobs.contract.specs import ModelOptions, SuiteSpec, TaskEntry
from evaljobs.errors import JobError, OperatorError, one_line
from evaljobs.lmeval import hooks, present_data, source_files, task_errors, task_paths
from evaljobs.lmeval.catalogue import folder_index, own_tasks, unknown_tasks
from evaljobs.lmeval.task_yaml import reachable_names

DEFAULT_SEEDS = (0, 1234, 1234, 1234)  # python, numpy, torch, few-shot: lm_eval/_cli/run.py --seed
HUB_SECONDS = 10.0  # longest wait for the Hub's first answer
NO_HUB = "EVALSPAN_NO_HUB"  # variable of a build: why the Hub cannot be asked


def look_for_hub() -> None:
    """Switch the Hub's libraries to offline mode if the Hub does not answer, since each would retry for two minutes.

    Data sets at other addresses are still fetched. Called before these libraries are imported.
    """
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        return
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        asked = urllib.request.Request(endpoint, method="HEAD")  # noqa: S310 (the user's own setting)
        urllib.request.urlopen(asked, timeout=HUB_SECONDS).close()  # noqa: S310
    except urllib.error.HTTPError:
        return  # it answered
    except OSError as error:
        reason = getattr(error, "reason", error)
        if not isinstance(reason, OSError) or isinstance(reason, ssl.SSLError):
            return  # certificates and proxies are configured differently for requests
        os.environ["HF_HUB_OFFLINE"] = "1"
        os.environ["HF_DATASETS_OFFLINE"] = "0"
        os.environ[NO_HUB] = f"{endpoint} does not answer: {reason.strerror or reason}"


class RequestsBuiltError(Exception):
    """Not a fault: lm-eval has built all requests and calls the model for the first time."""


@dataclass(slots=True)
class Tasks:
    """A task manager that keeps its loaded tasks, which `simple_evaluate` does not return."""

    manager: Any
    loaded: dict[str, Any] = field(default_factory=dict)
    on_load: Callable[[str, Any], None] | None = None  # called with each loaded leaf task

    @property
    def task_index(self) -> Any:
        return self.manager.task_index

    def load(self, names: Any) -> dict[str, Any]:
        try:
            with task_paths.relative_to_yaml():
                self.loaded = self.manager.load(names)
        except JobError:
            raise
        except Exception as error:
            raise _explained(error, names) from error
        if self.on_load is not None:
            for name, task in self.loaded["tasks"].items():
                self.on_load(name, task)
        return self.loaded


def _explained(error: Exception, names: Any) -> Exception:
    """Return the error for a task that does not load, with what to do about it."""
    named = names if isinstance(names, str) else ", ".join(map(str, names))
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    if any(task_paths.not_cached_reason(cause) for cause in causes):
        if os.environ.get("HF_DATASETS_OFFLINE") != "1":
            return OperatorError(
                f"the data set of task {named} could not be fetched ({os.environ.get(NO_HUB) or one_line(error)}): "
                "run the same command on a machine with internet"
            )
        return OperatorError(
            f"the data set of task {named} is not on this machine ({one_line(error)}): "
            "run `evalspan prepare --suite …` on a login node"
        )
    if type(error).__name__ == "DatasetGenerationError":  # its own message is always the same
        return OperatorError(
            f"the data set of task {named} cannot be read: {one_line(error.__cause__ or error)}"
        )
    filename, cache = getattr(error, "filename", None), str(source_files.datasets_cache(os.environ))
    if filename and (cache.startswith(str(filename)) or str(filename).startswith(cache)):
        return OperatorError(
            f"{cache} cannot be written ({one_line(error)}): set HF_HOME to a folder that jobs can write"
        )
    if isinstance(error, FileNotFoundError | ImportError | SyntaxError):
        beside = isinstance(error, ModuleNotFoundError)
        hint = (
            " (lm-eval puts no task's folder on sys.path: its module must, or the package must be installed)"
        )
        return OperatorError(f"task {named} does not load: {one_line(error)}{hint if beside else ''}")
    return error


@functools.lru_cache(maxsize=8)
def _manager(include_path: tuple[str, ...], metadata: str, cache: Path | None, *, own: bool) -> Any:
    from lm_eval.tasks import manager  # noqa: PLC0415

    shipped = _shipped(cache) if own else {}
    index: Any = manager.TaskIndex

    class WithShipped(index):  # type: ignore[misc]
        @staticmethod
        def build(paths: Iterable[Path]) -> dict[str, Any]:
            return {**shipped, **index.build(paths)}

    manager.TaskIndex = WithShipped
    try:
        with task_paths.relative_to_yaml():
            return manager.TaskManager(
                include_path=list(include_path) or None,
                include_defaults=False,
                metadata=json.loads(metadata),
            )
    finally:
        manager.TaskIndex = index


@functools.lru_cache(maxsize=1)
def _shipped(cache: Path | None) -> dict[str, Any]:
    """Return lm-eval's index of its own tasks from the work folder's cache: lm-eval's would read 14,000 files (12 s of CPU)."""
    from lm_eval.tasks._index import Entry, Kind  # noqa: PLC0415

    kinds = {"group": Kind.GROUP, "tag": Kind.TAG, "python": Kind.PY_TASK}
    return {
        name: Entry(
            name=name,
            kind=kinds.get(one.kind, Kind.TASK),
            yaml_path=Path(one.yaml) if one.yaml else None,
            tags=set(one.members) if one.kind == "tag" else set(),
        )
        for name, one in own_tasks(cache).items()
    }


def task_manager(
    include_path: Sequence[str],
    name: str,
    metadata: dict[str, Any] | None = None,
    cache: Path | None = None,
) -> Any:
    """Return a manager whose index has `name`, and lm-eval's own tasks only if needed.

    `cache`: the work folder's; without it, or if it has none, lm-eval's task files are read.
    """
    text = json.dumps(metadata or {}, sort_keys=True, default=str)
    index = folder_index(tuple(include_path))
    return _manager(tuple(include_path), text, cache, own=not reachable_names(index, [name]) <= index.keys())


def run_entry(
    lm: Any, suite: SuiteSpec, entry: TaskEntry, tasks: Tasks, *, bootstrap_iters: int = 0, seed_torch: bool
) -> dict[str, Any]:
    """Return lm-eval's results of one suite entry, with `samples`. Sets `tasks.loaded`, even if `lm` raises.

    `seed_torch=False` keeps torch out of the process; no task draws prompts from torch.
    """
    import lm_eval.evaluator  # noqa: PLC0415

    _compile_templates_once()
    python, numpy, torch, fewshot = DEFAULT_SEEDS if suite.seed is None else (suite.seed,) * 4
    multiturn = suite.fewshot_as_multiturn
    if multiturn is None:  # EvaluatorConfig._validate_arguments
        multiturn = bool(suite.apply_chat_template)
    with present_data.prepare_afresh(), _without_environment_report(), task_errors.locate_errors():
        results = lm_eval.evaluator.simple_evaluate(
            model=lm,
            task_manager=tasks,
            bootstrap_iters=bootstrap_iters,
            log_samples=True,
            confirm_run_unsafe_code=True,  # programs only run in the sandbox, through the seam
            tasks=[entry.name],
            num_fewshot=entry.num_fewshot,
            limit=entry.limit,
            samples={task: list(numbers) for task, numbers in (entry.samples or {}).items()} or None,
            gen_kwargs=dict(entry.gen_kwargs) if entry.gen_kwargs else None,
            system_instruction=suite.system_instruction,
            apply_chat_template=suite.apply_chat_template,
            fewshot_as_multiturn=multiturn,
            random_seed=python,
            numpy_random_seed=numpy,
            torch_random_seed=torch if seed_torch else None,
            fewshot_random_seed=fewshot,
        )
    assert results is not None, "lm-eval gave no results: this process is not its rank 0"
    return dict(results)


@functools.cache
def _compile_templates_once() -> None:
    """Patch lm-eval in this process: it compiles a task's template for each document, two fifths of the time of a score."""
    import lm_eval.utils  # noqa: PLC0415

    lm_eval.utils.env.from_string = functools.lru_cache(maxsize=64)(lm_eval.utils.env.from_string)


def entry_tasks(
    suite: SuiteSpec, entry: TaskEntry, *, model: ModelOptions, model_dir: str, cache: Path | None
) -> Tasks:
    """Return the unloaded tasks of an entry. Raise OperatorError if lm-eval defines none. `cache`: as in `task_manager`."""
    hooks.install_seam()
    # as in the command: RULER reads its tokenizer there
    metadata = {"pretrained": model_dir, **model.model_args, **(entry.metadata or {})}
    manager = task_manager(suite.include_path, entry.name, metadata, cache)
    missing = {} if Path(entry.name).is_file() else unknown_tasks([entry.name], manager.all_tasks)
    if missing:
        near = f" (nearest: {', '.join(missing[entry.name])})" if missing[entry.name] else ""
        raise OperatorError(f"suite {suite.name}: lm-eval knows no task {entry.name!r}{near}")
    return Tasks(manager)


@contextlib.contextmanager
def _without_environment_report() -> Iterator[None]:
    """Skip lm-eval's description of this machine, which imports torch and did not run inference."""
    import lm_eval.evaluator  # noqa: PLC0415

    module: Any = lm_eval.evaluator
    before = module.add_env_info, module.get_git_commit_hash
    module.add_env_info = module.get_git_commit_hash = lambda *_storage: None
    try:
        yield
    finally:
        module.add_env_info, module.get_git_commit_hash = before
