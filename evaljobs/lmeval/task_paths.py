"""Paths in a task's YAML: each is relative to the YAML that has it, none to the current folder.

    !function, include      a file beside the YAML; for !function also an installed module
    dataset_path            a folder beside the YAML, else a hub id
    data_files, data_dir    of json, csv, …: beside the YAML
                            of a local folder or a hub id: inside that data set
                            of a custom_dataset: beside the YAML if there, else the function's argument

Rule: configs stay as written, so requests and results do not depend on where a suite lies. Inside
`relative_to_yaml` lm-eval's YAML loader marks each path with its YAML, and `source` makes full paths
when a task loads its data. Called from `run` and `task_index`.
"""

from __future__ import annotations

import ast
import contextlib
import glob
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evaljobs.errors import OperatorError
from evaljobs.lmeval.task_yaml import Function, YamlText, mapped, marked, texts

HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)
HUB_PREFIX = "hf://datasets/"
MAKE_LOADER = "_make_loader"  # lm-eval's: folder of a YAML -> the class that reads it
BLANKS = re.compile(r"\s*(?=\S)")
CHECKED_BYTES = 100 << 20  # bytes of a data file that are parsed before a submission
REMOTE = ("://", "::")  # URLs, and chains of them as fsspec writes them


@dataclass(frozen=True, kw_only=True)
class Source:
    """Origin of a task's data: `datasets.load_dataset` arguments for any current folder."""

    path: str | None = None
    keywords: Mapping[str, Any] = field(default_factory=dict)
    hub: str = ""  # the hub id, if the data come from the hub
    files: tuple[str, ...] = ()  # local files, file patterns and folders
    trouble: str = ""  # why the data cannot be loaded; "" where they can


@contextlib.contextmanager
def relative_to_yaml() -> Iterator[None]:
    """Inside the block lm-eval reads YAMLs and loads data by this module's rule. Not thread-safe."""
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
    """lm-eval's loader class for the YAMLs of a folder, which marks each path with its YAML."""
    construct = base.yaml_constructors["!function"]

    class Loader(base):  # type: ignore[misc]
        def __init__(self, stream: Any) -> None:
            super().__init__(stream)
            self.file = Path(stream.name)

        def get_single_data(self) -> Any:
            config = super().get_single_data()
            return marked(config, self.file) if isinstance(config, dict) else config

    def function(loader: Any, node: Any) -> Any:
        with _without_current_folder():
            return construct(loader, node)

    Loader.add_constructor("!function", function)
    return Loader


@contextlib.contextmanager
def _without_current_folder() -> Iterator[None]:
    """Take the current folder, which `python -m` adds, off sys.path."""
    before = sys.path
    sys.path = [place for place in before if place not in ("", str(Path.cwd()))]
    try:
        yield
    finally:
        sys.path = before


def source(config: Mapping[str, Any], loaders: Container[str] | None = None) -> Source:
    """The data of a task with this config. Reads folders, opens no file.

    `loaders`: names of the loaders of local files, such as json; None: those of the installed `datasets`.
    """
    if loaders is None:
        from datasets import packaged_modules  # noqa: PLC0415

        loaders = packaged_modules._PACKAGED_DATASETS_MODULES  # noqa: SLF001 (there is no public name for it)
    path = config.get("dataset_path")
    keywords = config.get("dataset_kwargs") or {}
    if config.get("custom_dataset") is not None:
        return _local(path, keywords, required=False)
    if not isinstance(path, str) or any(mark in path for mark in REMOTE):
        return Source(path=path, keywords=keywords)
    if path in loaders:
        return _local(path, keywords, required=True)
    return _folder_or_hub(path, keywords)


def _folder_or_hub(path: str, keywords: Mapping[str, Any]) -> Source:
    place = full_path(path)
    if place.exists():
        return Source(path=str(place), keywords=keywords, files=(str(place),))
    if HUB_ID.fullmatch(path):
        # `datasets` would prefer a folder of that name in the current folder to the hub
        taken = Path(path).exists()
        return Source(path=f"{HUB_PREFIX}{path}" if taken else str(path), keywords=keywords, hub=str(path))
    return Source(path=path, keywords=keywords, trouble=_missing(path, "dataset_path", place))


def full_path(text: str) -> Path:
    """Full path of a marked path; unmarked text stays as it is."""
    file = getattr(text, "yaml", None)
    return Path(text) if file is None else Path(os.path.normpath(file.parent / Path(text).expanduser()))


def _missing(text: str, key: str, place: Path | str) -> str:
    return f"{getattr(text, 'yaml', 'its config')}: {key}: no such file or folder: {place}"


def nor_beside(config: Mapping[str, Any]) -> str:
    """Part of a message: the folder that a dataset_path may mean; "" for lm-eval's tasks."""
    path = config.get("dataset_path")
    if not isinstance(path, YamlText) or "/lm_eval/tasks/" in str(path.yaml):
        return ""
    return f" (and there is no folder {full_path(path)})"


def _local(path: str | None, keywords: Mapping[str, Any], *, required: bool) -> Source:
    """Data in local files. `required`: they must exist; data_files lie in data_dir if set."""
    files: list[str] = []
    troubles: list[str] = []

    def full(text: str, key: str) -> str:
        if any(mark in text for mark in REMOTE):
            return str(text)
        place = str(full_path(text))
        if _is_there(place, folder=key == "data_dir" or not required):
            files.append(place)
            return place
        if required:
            troubles.append(_missing(text, f"dataset_kwargs {key}", full_path(text)))
        return str(text)

    found = dict(keywords)
    inside = required and bool(found.get("data_dir"))
    if (
        required and not inside and not found.get("data_files")
    ):  # `datasets` would take the files of the current folder
        troubles.append(f"{getattr(path, 'yaml', 'its config')}: dataset_kwargs: no data_files for {path}")
    if "data_dir" in found:
        found["data_dir"] = mapped(found["data_dir"], lambda text: full(text, "data_dir"))
    if "data_files" in found:
        found["data_files"] = mapped(
            found["data_files"], lambda text: str(text) if inside else full(text, "data_files")
        )
    return Source(path=path, keywords=found, files=tuple(files), trouble=troubles[0] if troubles else "")


def _is_there(pattern: str, *, folder: bool) -> bool:
    if Path(pattern).is_file() or (folder and Path(pattern).is_dir()):
        return True
    return any(Path(match).is_file() for match in glob.iglob(pattern, recursive=True))  # noqa: PTH207


def _download(original: Callable[..., Any], task: Any, keywords: Any, **more: Any) -> None:
    """lm-eval's loading of a task's data with full paths; OperatorError for missing ones."""
    config = vars(task.config)
    custom = config.get("custom_dataset") is not None
    written, path = config.get("dataset_kwargs"), task.DATASET_PATH
    named = written if custom else keywords
    found = source({**config, "dataset_path": path, "dataset_kwargs": named})
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


def bad_module(config: Mapping[str, Any]) -> str:
    """The message for a `!function` whose module beside the YAML is no Python, or imports what is not there; else ""."""
    for _keys, value in texts(config):
        if isinstance(value, Function) and value.module and value.file.is_file():
            try:
                code = value.file.read_bytes()
                tree = ast.parse(code)
            except SyntaxError as error:
                return f"{value.file}, line {error.lineno}: {error.msg}"
            except (OSError, ValueError) as error:
                return f"{value.file}: {error}"
            if b"sys.path" not in code and (why := _missing_import(tree, value.file)):
                return why
    return ""


def _missing_import(tree: ast.Module, file: Path) -> str:
    """The message for an import at a module's top level that its jobs cannot do; "" where there is none."""
    for node in tree.body:
        named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            named = [str(node.module)]
        for top in (name.partition(".")[0] for name in named):
            if not _installed(top):
                beside = (file.parent / f"{top}.py").is_file() or (file.parent / top).is_dir()
                todo = "install it in the trials' interpreter"
                if beside:
                    todo = f"lm-eval puts no task's folder on sys.path: put {file.parent} there before that line, or install it"
                return f"{file}, line {node.lineno}: no module {top}: {todo}"
    return ""


def bad_data(source: Source) -> str:
    """The message for a file of the `json` loader that is no JSON; "" where there is none. Reads the first CHECKED_BYTES."""
    if source.path != "json" or "encoding" in source.keywords:
        return ""
    for text in source.files:
        for name in sorted(glob.glob(text, recursive=True)) or [text]:  # noqa: PTH207
            file = Path(name)
            if file.suffix in (".json", ".jsonl") and file.is_file():
                with contextlib.suppress(OSError, RecursionError):
                    if why := _bad_line(file):
                        return f"{file}, {why}"
    return ""


def _bad_line(file: Path) -> str:
    """The first line that is no JSON, unless values go over several lines, as in a file of one list."""
    with file.open("rb") as opened:
        for number, line in enumerate(opened, 1):
            if opened.tell() > CHECKED_BYTES:
                return ""
            try:
                json.loads(_decoded(line).strip() or "0")
            except ValueError as error:
                said = f"line {number}: {getattr(error, 'msg', error)}"
                break
        else:
            return ""
    whole = _decoded(file.read_bytes()) if file.stat().st_size <= CHECKED_BYTES else "0"
    try:
        decoder, at = json.JSONDecoder(), 0
        while found := BLANKS.match(whole, at):
            at = decoder.raw_decode(whole, found.end())[1]
    except json.JSONDecodeError as error:
        return said if file.suffix == ".jsonl" or number > 1 else f"line {error.lineno}: {error.msg}"
    return ""


def _decoded(data: bytes) -> str:
    return data.decode("utf-8-sig", errors="replace").replace("\t", " ")


def missing_function(config: Mapping[str, Any]) -> str:
    """The message for a `!function` of a config whose module is missing; "" where there is none."""
    for keys, value in texts(config):
        if not isinstance(value, Function) or not value.module or value.file.is_file():
            continue
        if not _installed(value.module):
            return f"{value.yaml}: {' '.join(keys)}: no file {value.file}"
    return ""


def _installed(module: str) -> bool:
    with _without_current_folder():
        try:
            return importlib.util.find_spec(module.partition(".")[0]) is not None
        except (ImportError, ValueError):
            return False
