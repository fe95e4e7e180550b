"""Says which of the inputs that a build or a score showed have changed since.

Rule: rows are read again where they were made: by this process, or by the interpreter of [trial] python or container,
which has other packages or files. Called by `intake.request_sets`, `runtime.present_inputs` and `runtime.reuse`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack

from coordinator.base.run_command import CommandError, run_command
from coordinator.errors import RetryError
from coordinator.evaluation.job_specs import Site
from evaljobs.lmeval.shown_inputs import digest_of
from evaljobs.lmeval.source_files import Digests

ANSWER_SECONDS = 60.0  # longest wait for the digests that the trials' interpreter tells


class Present:
    """The digests of rows now. It lives for one look: each path is read once."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._digests = Digests(site.paths.digests)
        self._inside: dict[str, str] = {}  # path, as the trials' interpreter sees it -> digest
        named = site.worker_env.get("PYTHONPATH", "")
        self._search = [*filter(None, named.split(os.pathsep)), *sys.path]

    @property
    def reads_builds(self) -> bool:
        """Are rows of a build cheap to read here? Else the build job itself looks."""
        return not self._site.foreign

    def changed(self, rows: Mapping[str, str], *, of_build: bool = False) -> list[str]:
        """Paths whose digest is another now, sorted. RetryError where the trials' interpreter does not answer."""
        now = self.digests(rows, of_build=of_build)
        return sorted(path for path, digest in rows.items() if now[path] != digest)

    def digests(self, paths: Iterable[str], *, of_build: bool = False) -> dict[str, str]:
        paths = list(paths)
        if not of_build or self.reads_builds:
            found = {path: digest_of(path, self._digests, self._search) for path in paths}
            self._digests.keep()
            return found
        if unknown := sorted(set(paths) - self._inside.keys()):
            self._inside |= self._asked(unknown)
        return {path: self._inside[path] for path in paths}

    def _asked(self, paths: list[str]) -> dict[str, str]:
        try:
            told = evaljobs_says(self._site, "changed", given=[json.dumps(paths)], seconds=ANSWER_SECONDS)
        except CommandError as error:
            why = f"the interpreter of the trials did not say what has changed: {error}"
            raise RetryError(why) from error
        digests: dict[str, str] = json.loads(told.strip().splitlines()[-1])
        return digests


def evaljobs_says(site: Site, *words: str, given: Sequence[str] = (), seconds: float | None = None) -> str:
    """Output of `python -m evaljobs WORDS` by the trials' interpreter. `given`: in files that are the last words. CommandError."""
    with ExitStack() as stack:
        for text in given:
            file = stack.enter_context(tempfile.NamedTemporaryFile("w", suffix=".json", dir=site.work_dir))
            file.write(text)
            file.flush()
            words = (*words, file.name)
        argv = [*site.trial_command, "-m", "evaljobs", *words]
        return run_command(argv, seconds=seconds, env={**os.environ, **site.trial_env})
