"""Paths in a task's YAML: each is relative to the YAML that has it, none to the current folder.

    !function, include      a file beside the YAML; for !function also an installed module
    dataset_path            a folder beside the YAML, else a hub id
    data_files, data_dir    of json, csv, …: beside the YAML
                            of a local folder or a hub id: inside that data set
                            of a custom_dataset: beside the YAML if there, else the function's argument

Rule: configs stay as written, so requests and results do not depend on where a suite lies. Inside
`relative_to_yaml` lm-eval's YAML loader marks each path with its YAML, and `data_source` makes full paths
when a task loads its data. Called from `run` and `catalogue`.
"""

from __future__ import annotations

import contextlib
import glob
import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evaljobs.contract.paths import expand_home
from evaljobs.errors import OperatorError
from evaljobs.lmeval.task_yaml import Function, YamlText, iterate_texts, map_data_files, mark_data_paths

HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)
HUB_PREFIX = "hf://datasets/"
MAKE_LOADER = "_make_loader"  # lm-eval's: folder of a YAML -> the class that reads it
# loaders of files, by their names in `datasets`: such a dataset_path names no data set of the Hub
LOADERS = frozenset(
    (
        "arrow", "audiofolder", "cache", "conll", "csv", "eval", "fasta", "fastq", "genbank", "harbor",
        "hdf5", "iceberg", "imagefolder", "json", "lance", "meshfolder", "mmcif", "niftifolder",
        "pandas", "parquet", "pdb", "pdffolder", "text", "tsfile", "videofolder", "vortex",
        "webdataset", "xml",
    )
)  # fmt: skip
NOT_CACHED = ("ConnectionError", "OfflineModeIsEnabled", "LocalEntryNotFoundError", "DatasetNotFoundError")
REMOTE_MARKS = ("://", "::")  # URLs, and chains of them as fsspec writes them


@dataclass(frozen=True, kw_only=True)
class Source:
    """Origin of a task's data: `datasets.load_dataset` arguments valid in any current folder."""

    path: str | None = None
    keywords: Mapping[str, Any] = field(default_factory=dict)
    hub: str = ""  # the hub id, if the data come from the hub
    files: tuple[str, ...] = ()  # local files, file patterns and folders
    trouble: str = ""  # why the data cannot be loaded; "" if they can


@contextlib.contextmanager
def relative_to_yaml() -> Iterator[None]:
    """Make lm-eval read YAMLs and load data by this module's rule within the context. Not thread-safe."""
    from lm_eval.api.task import ConfigurableTask  # noqa: PLC0415
    from lm_eval.tasks import _yaml_loader  # noqa: PLC0415

    make, download = getattr(_yaml_loader, MAKE_LOADER), ConfigurableTask.download

    def load(task: Any, keywords: Any = None, **more: Any) -> None:
        _download(download, task, keywords, **more)

    def make_marking(folder: Path, *, resolve_funcs: bool) -> type[Any]:
        made: type[Any] = make(folder, resolve_funcs=resolve_funcs)
        return _marking(made) if resolve_funcs else made  # lm-eval's index needs no marks

    setattr(_yaml_loader, MAKE_LOADER, make_marking)
    ConfigurableTask.download = load
    try:
        yield
    finally:
        setattr(_yaml_loader, MAKE_LOADER, make)
        ConfigurableTask.download = download


def _marking(base: Any) -> type[Any]:
    """Return lm-eval's loader class for the YAMLs of a folder, which marks each path with its YAML."""

    class Loader(base):  # type: ignore[misc]
        def __init__(self, stream: Any) -> None:
            super().__init__(stream)
            self.file = Path(stream.name)

        def get_single_data(self) -> Any:
            config = super().get_single_data()
            return mark_data_paths(config, self.file) if isinstance(config, dict) else config

    return Loader


def data_source(config: Mapping[str, Any]) -> Source:
    """Return the data of a task with this config. Reads folders, opens no file."""
    path = config.get("dataset_path")
    keywords = config.get("dataset_kwargs") or {}
    if config.get("custom_dataset") is not None:
        return _local(path, keywords, required=False)
    if not isinstance(path, str) or any(mark in path for mark in REMOTE_MARKS):
        return Source(path=path, keywords=keywords)
    if path in LOADERS:
        return _local(path, keywords, required=True)
    return _folder_or_hub(path, keywords)


def _folder_or_hub(path: str, keywords: Mapping[str, Any]) -> Source:
    place = full_path(path)
    if place.exists():
        return Source(path=str(place), keywords=keywords, files=_inside(place, keywords) or (str(place),))
    if HUB_ID.fullmatch(path):
        # `datasets` would prefer a folder of that name in the current folder to the hub
        taken = Path(path).exists()
        return Source(path=f"{HUB_PREFIX}{path}" if taken else str(path), keywords=keywords, hub=str(path))
    return Source(path=path, keywords=keywords, trouble=_missing(path, "dataset_path", place))


def _inside(folder: Path, keywords: Mapping[str, Any]) -> tuple[str, ...]:
    """Return full paths of the data_files in a folder."""
    found: list[str] = []

    def add(text: str) -> str:
        found.append(os.path.normpath(folder / text))
        return text

    map_data_files(keywords.get("data_files"), add)
    return tuple(found)


def full_path(text: str) -> Path:
    """Return the full path of a marked path; unmarked text is unchanged."""
    file = getattr(text, "yaml", None)
    return Path(text) if file is None else Path(os.path.normpath(file.parent / expand_home(text)))


def _missing(text: str, key: str, place: Path | str) -> str:
    return f"{getattr(text, 'yaml', 'its config')}: {key}: no such file or folder: {place}"


def missing_file_message(config: Mapping[str, Any]) -> str:
    """Return a part of a message: the folder that a dataset_path may mean; "" for lm-eval's tasks."""
    path = config.get("dataset_path")
    if not isinstance(path, YamlText) or "/lm_eval/tasks/" in str(path.yaml):
        return ""
    return f" (nor is there a folder {full_path(path)})"


def _local(path: str | None, keywords: Mapping[str, Any], *, required: bool) -> Source:
    """Return data in local files. `required`: they must exist; data_files are in data_dir if set."""
    files: list[str] = []
    troubles: list[str] = []

    def full(text: str, key: str) -> str:
        if any(mark in text for mark in REMOTE_MARKS):
            return str(text)
        place = str(full_path(text))
        there = _is_there(place, folder=key == "data_dir" or not required)
        if there or required:
            files.append(place)
        if required and not there:
            troubles.append(_missing(text, f"dataset_kwargs {key}", place))
        elif required and Path(place).is_file() and not Path(place).stat().st_size:
            troubles.append(f"{place} ({key} of its dataset_kwargs) has no rows")
        return place if there else str(text)

    found = dict(keywords)
    inside = required and bool(found.get("data_dir"))
    if (
        required and not inside and not found.get("data_files")
    ):  # `datasets` would take the files of the current folder
        troubles.append(f"{getattr(path, 'yaml', 'its config')}: dataset_kwargs: no data_files for {path}")
    if "data_dir" in found:
        found["data_dir"] = map_data_files(found["data_dir"], lambda text: full(text, "data_dir"))
    if "data_files" in found:
        found["data_files"] = map_data_files(
            found["data_files"], lambda text: str(text) if inside else full(text, "data_files")
        )
    within = _inside(Path(files[0]), found) if inside and files else ()
    trouble = troubles[0] if troubles else ""
    return Source(path=path, keywords=found, files=within or tuple(files), trouble=trouble)


def _is_there(pattern: str, *, folder: bool) -> bool:
    if Path(pattern).is_file() or (folder and Path(pattern).is_dir()):
        return True
    return any(Path(match).is_file() for match in glob.iglob(pattern, recursive=True))  # noqa: PTH207


def _download(original: Callable[..., Any], task: Any, keywords: Any, **more: Any) -> None:
    """Load a task's data with full paths, replacing lm-eval's method. Raise OperatorError for missing ones."""
    config = vars(task.config)
    custom = config.get("custom_dataset") is not None
    written, path = config.get("dataset_kwargs"), task.DATASET_PATH
    named = written if custom else keywords
    found = data_source({**config, "dataset_path": path, "dataset_kwargs": named})
    if found.trouble:
        raise OperatorError(f"task {task.config.task}: {found.trouble}")
    full = dict(found.keywords)
    task.DATASET_PATH = found.path
    if custom and written is not None:
        task.config.dataset_kwargs = full
    try:
        original(task, full, **more)
    finally:
        task.config.dataset_kwargs, task.DATASET_PATH = written, path
        for key in set(named or ()) - set(full):
            del named[key]  # lm-eval drops trust_remote_code from the config itself


def not_cached_reason(error: BaseException) -> bool:
    """Return whether `datasets` or the hub reports that a data set is not on this machine."""
    return (
        isinstance(error, ConnectionError)
        or type(error).__name__ in NOT_CACHED
        or "Couldn't find cache" in str(error)
    )


def missing_function(config: Mapping[str, Any]) -> str:
    """Return an error about a `!function` of a config whose module is missing; "" if there is none."""
    for keys, value in iterate_texts(config):
        if not isinstance(value, Function) or not value.module or value.file.is_file():
            continue
        if not _installed(value.module):
            return f"{value.yaml}: {' '.join(keys)}: no file {value.file}"
    return ""


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module.partition(".")[0]) is not None
    except (ImportError, ValueError):
        return False
