"""Makes `datasets` return current data: what it has prepared before counts only if the content is unchanged.

Rule: `datasets` finds prepared data by a fingerprint that covers less than what the data are derived from. Here a local file
counts by its content instead of its mtime. A result of `map`, `filter` or a generator is recomputed, since its fingerprint
does not cover the modules that the function imports. Data sets of the Hub come from the user's own cache. Called from `run`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from evaljobs.lmeval.source_files import Digests

PREFIX = "evalspan-data-"  # of the folder with a build's results, below the temporary folder
LEFT_SECONDS = 86400.0  # after which such a folder belongs to a build that was killed


@contextlib.contextmanager
def prepare_afresh() -> Iterator[None]:
    """Make `datasets` return current data within the context. Its results are in a folder that is removed at the end.

    So a second `map` of the same data finds the first one's result, as in a process of lm_eval with an empty cache: GPQA
    shuffles its answers in one, and lm-eval calls it for each split.
    """
    import datasets  # noqa: PLC0415
    from datasets import fingerprint  # noqa: PLC0415

    _count_by_content()
    generate = datasets.Dataset.from_generator
    cached = datasets.Dataset._get_cache_file_path  # noqa: SLF001
    before = fingerprint._TEMP_DIR_FOR_TEMP_CACHE_FILES  # noqa: SLF001 (there is no public name for it)
    _sweep()
    # not left to the end of the process: a metric worker's child ends at once
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as folder:

        def place(self: Any, made: str) -> str:
            kept = datasets.is_caching_enabled() and self.cache_files
            return f"{folder}/cache-{made if kept else fingerprint.generate_random_fingerprint()}.arrow"

        def anew(*arguments: Any, **more: Any) -> Any:
            return generate(*arguments, **{**more, "cache_dir": tempfile.mkdtemp(dir=folder)})

        datasets.Dataset.from_generator = staticmethod(anew)
        datasets.Dataset._get_cache_file_path = place  # noqa: SLF001
        fingerprint._TEMP_DIR_FOR_TEMP_CACHE_FILES = SimpleNamespace(name=folder)  # noqa: SLF001
        try:
            yield
        finally:
            datasets.Dataset.from_generator = staticmethod(generate)
            datasets.Dataset._get_cache_file_path = cached  # noqa: SLF001
            fingerprint._TEMP_DIR_FOR_TEMP_CACHE_FILES = before  # noqa: SLF001


def _sweep() -> None:
    """Remove leftovers of killed builds of this user."""
    for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            found = left.lstat()
            if found.st_uid == os.getuid() and time.time() - found.st_mtime > LEFT_SECONDS:
                shutil.rmtree(left, ignore_errors=True)


@functools.cache
def _count_by_content() -> None:
    """Patch `datasets` in this process, once: a local file counts by its content."""
    from datasets import data_files  # noqa: PLC0415

    origin = data_files._get_single_origin_metadata  # noqa: SLF001 (there is no public name for it)

    def by_content(data_file: str, *arguments: Any, **more: Any) -> Any:
        place = Path(data_file.removeprefix("file://"))
        return (Digests().of(place),) if place.is_file() else origin(data_file, *arguments, **more)

    data_files._get_single_origin_metadata = by_content  # noqa: SLF001
