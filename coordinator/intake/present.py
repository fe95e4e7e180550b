"""Says which of the inputs that a build or a score showed have changed since.

Rule: rows are read again where they were made: by this process, or inside the container of the trials. Called by
`intake.request_sets`, `runtime.present_inputs` and `runtime.reuse`.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping

from coordinator.base.run_command import run_command
from coordinator.evaluation.job_specs import Site
from evaljobs.lmeval.shown_inputs import digest_of
from evaljobs.lmeval.source_files import Digests

CONTAINER_SECONDS = 60.0  # longest wait for the digests that a container tells


class Present:
    """The digests of rows now. It lives for one look: each path is read once."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._digests = Digests(site.paths.digests)
        self._inside: dict[str, str] = {}  # path in the container of the trials -> digest

    @property
    def reads_builds(self) -> bool:
        """Are rows of a build cheap to read here? Else the build job itself looks."""
        return not self._site.container

    def changed(self, rows: Mapping[str, str], *, of_build: bool = False) -> list[str]:
        """Paths whose digest is another now, sorted. CommandError where a container does not answer."""
        now = self.digests(rows, of_build=of_build)
        return sorted(path for path, digest in rows.items() if now[path] != digest)

    def digests(self, paths: Iterable[str], *, of_build: bool = False) -> dict[str, str]:
        paths = list(paths)
        if not of_build or self.reads_builds:
            found = {path: digest_of(path, self._digests) for path in paths}
            self._digests.keep()
            return found
        if unknown := sorted(set(paths) - self._inside.keys()):
            self._inside |= self._asked(unknown)
        return {path: self._inside[path] for path in paths}

    def _asked(self, paths: list[str]) -> dict[str, str]:
        with tempfile.NamedTemporaryFile("w", suffix=".json", dir=self._site.work_dir) as file:
            file.write(json.dumps(paths))
            file.flush()
            told = run_command(
                [*self._site.trial_command, "-m", "evaljobs", "changed", file.name],
                seconds=CONTAINER_SECONDS,
                env={**os.environ, **self._site.trial_env},
            )
        digests: dict[str, str] = json.loads(told.strip().splitlines()[-1])
        return digests
