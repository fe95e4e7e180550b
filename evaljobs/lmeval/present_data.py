"""Makes `datasets` give the data of now: what it has prepared before counts only where the content is the same.

Rule: `datasets` finds prepared data by a fingerprint that sees less than the data are made of. A local file counts
by its content here, in place of its mtime. A result of `map`, `filter` or a generator is made anew, since its
fingerprint does not see the modules that the function imports. Data sets of the Hub come from the user's own cache.
Called from `run`.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

from evaljobs.lmeval.source_files import Digests


@functools.cache
def install() -> None:
    """Change `datasets` in this process, once."""
    import datasets  # noqa: PLC0415
    from datasets import data_files  # noqa: PLC0415

    datasets.disable_caching()
    origin = data_files._get_single_origin_metadata  # noqa: SLF001 (there is no public name for it)
    generate = datasets.Dataset.from_generator

    def by_content(data_file: str, *arguments: Any, **more: Any) -> Any:
        place = Path(data_file.removeprefix("file://"))
        return (Digests().of(place),) if place.is_file() else origin(data_file, *arguments, **more)

    def anew(*arguments: Any, **more: Any) -> Any:
        folder = tempfile.TemporaryDirectory(prefix="evalspan-data-")  # removed with the process
        _folders.append(folder)
        return generate(*arguments, **{**more, "cache_dir": folder.name})

    data_files._get_single_origin_metadata = by_content  # noqa: SLF001
    datasets.Dataset.from_generator = staticmethod(anew)


_folders: list[tempfile.TemporaryDirectory[str]] = []
