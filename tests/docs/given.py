"""What lies in a page's folder before its examples run, by name; and what its words in capitals then stand for.

Rule: each kind is made once a session, in a folder of its own, and copied for a page. A work folder holds full paths, in
text files alone: the copy's are rewritten.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from support import toys
from support.examples.pages import ROOT

STEPS = (100, 200, 300)
LIMIT = "2"


class Given:
    """The kinds, each made when a page first asks for it, below `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made = cache(self._make)

    def put(self, kinds: tuple[str, ...], place: Path) -> dict[str, str]:
        """Copy each kind into the folder `place`; give the words that they say."""
        words: dict[str, str] = {}
        for kind in kinds:
            made, said = self._made(kind)
            copy(made, place)
            words |= said
        return words

    def _make(self, kind: str) -> tuple[Path, Mapping[str, str]]:
        folder = self._folder / kind
        folder.mkdir(parents=True)
        return folder, KINDS[kind](folder)


def copy(source: Path, target: Path) -> None:
    """Copy a folder's content with its times, by which checkpoints are known; paths below `source` become the copy's."""
    shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
    before, after = os.fsencode(source), os.fsencode(target)
    for file in target.rglob("*"):
        if (
            file.is_file()
            and not file.is_symlink()
            and file.suffix != ".safetensors"
            and before in (content := file.read_bytes())
        ):
            stat = file.stat()
            file.write_bytes(content.replace(before, after))
            os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def checkpoint(folder: Path) -> dict[str, str]:
    """`ckpt`: a tiny Llama with its tokenizer."""
    toys.toy_model(folder).rename(folder / "ckpt")
    return {"CHECKPOINT": "ckpt"}


def evaluated(folder: Path) -> dict[str, str]:
    """`ckpt`, and its evaluation of quickstart with two documents a task, in evalspan-work; ID is its name."""
    said = checkpoint(folder)
    evaluate(folder, "ckpt")
    return {**said, "ID": _ids(folder)[0]}


def series(folder: Path) -> dict[str, str]:
    """`runs/7b`: a training run of three checkpoints, each evaluated as `evaluated` is; ID is the last one's."""
    for number, step in enumerate(STEPS):
        (folder / "runs" / "7b").mkdir(parents=True, exist_ok=True)
        toys.toy_model(folder, seed=7 + number).rename(folder / "runs" / "7b" / f"step-{step}")
        evaluate(folder, f"runs/7b/step-{step}")
    first, *_, last = _ids(folder)
    return {"RUN_FOLDER": "runs/7b", "CHECKPOINT": "runs/7b/step-300", "FIRST_ID": first, "ID": last}


def clone(folder: Path) -> dict[str, str]:
    """`scripts`, `coordinator` and `tests` as in a clone, to be read."""
    for name in ("scripts", "coordinator", "tests"):
        (folder / name).symlink_to(ROOT / name)
    return {}


def evaluate(folder: Path, checkpoint: str) -> None:
    """A real evaluation; an AssertionError shows what it printed."""
    program = Path(sys.executable).parent / "evalspan"
    done = subprocess.run(
        [program, "eval", checkpoint, "--suite", "quickstart", "--limit", LIMIT],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def environment(home: Path) -> dict[str, str]:
    """A reader's environment: evalspan on PATH, no network for Hugging Face, no colours."""
    kept = {name: os.environ[name] for name in ("LANG", "TZ", "PIP_INDEX_URL") if name in os.environ}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
    return {
        "LANG": "C.UTF-8",
        **kept,
        **offline,
        "HOME": str(home),
        "PATH": path,
        "NO_COLOR": "1",
        "COLUMNS": "120",
    }


def _ids(folder: Path) -> list[str]:
    found = (folder / "evalspan-work").glob("*/evaluation.json")
    return [file.parent.name for file in sorted(found, key=lambda file: file.stat().st_mtime)]


KINDS: dict[str, Callable[[Path], dict[str, str]]] = {
    "checkpoint": checkpoint,
    "evaluated": evaluated,
    "series": series,
    "clone": clone,
}
