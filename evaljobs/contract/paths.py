"""Paths of a work folder: every name on disk on which two processes must agree.

Rule: a file that one process writes and another reads has its path here and nowhere else. Used by
the coordinator and by all jobs.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path


def slug(text: str) -> str:
    """`text` as a readable file name; different texts give different names."""
    safe = re.sub(r"[^A-Za-z0-9_.-]", "-", text)[:80].strip(".") or "x"
    if safe == text:
        return safe
    return f"{safe}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


class EvaluationPaths:
    """Every path of one evaluation, below `DIR/<evaluation id>`."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.evaluation = self.root / "evaluation.json"
        self.journal = self.root / "journal.jsonl"
        self.specs = self.root / "specs"
        self.logs = self.root / "logs"
        self.outcomes = self.root / "outcomes"
        self.responses = self.root / "responses"
        self.verdicts = self.root / "verdicts"
        self.judgements = self.root / "judgements"
        self.scores = self.root / "scores"
        self.samples = self.root / "samples"
        self.release = self.root / "release"
        self.request_sets = self.root / "request_sets.json"
        self.results = self.root / "results.json"
        self.report = self.root / "report.json"
        self.status = self.root / "status.json"
        self.places = self.root / "places.json"  # of copies of the checkpoint; without any it is not there
        self.ended = self.root / "ended.json"  # of earlier versions: read where there is no status.json

    def folders(self) -> tuple[Path, ...]:
        return (
            self.specs,
            self.logs,
            self.outcomes,
            self.responses,
            self.verdicts,
            self.scores,
            self.samples,
            self.release,
        )

    def spec(self, job: str) -> Path:
        return self.specs / f"{slug(job)}.json"

    def log(self, job: str) -> Path:
        return self.logs / f"{slug(job)}.log"

    def outcome(self, kind: str, name: str) -> Path:
        return self.outcomes / f"{slug(name)}.{kind}.json"

    def response_file(self, trial: str) -> Path:
        return self.responses / f"{slug(trial)}.frames"

    def release_file(self, job: str) -> Path:
        """The file that makes the precursor `job` clear its node's memory and end."""
        return self.release / slug(job)


class WorkPaths:
    """Paths of a work folder that are shared by its evaluations."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.lock = self.root / "daemon.lock"
        self.lease = self.root / "daemon.lease"
        self.redis = self.root / "redis"
        self.redis_address = self.redis / "address.json"
        self.notice_key = self.redis / "notice.key"  # where Redis is the site's; the hook reads it, too
        self.request_sets = self.root / "request_sets"
        self.converted = self.root / "converted"
        self.priors = self.root / "priors"
        self.observations = self.priors / "observations.jsonl"
        self.cache = self.root / "cache"
        self.judgements = self.cache / "judgements"
        self.digests = self.cache / "digests.json"
        self.gpu_names = self.cache / "gpu_names.json"
        self.spool = self.root / "spool"
        self.submissions = self.root / "submissions"
        self.nodes = self.root / "nodes.json"
        self.pending = self.root / "pending.json"
        self.users = self.root / "users.json"  # what users of a shared work folder have used
        self.watched = self.root / "watched.json"
        self.news = self.root / "news.json"  # ends that `[notify]` is still to send

    def evaluation(self, evaluation_id: str) -> EvaluationPaths:
        return EvaluationPaths(self.root / evaluation_id)


def shipped_index(cache: Path, lm_eval_version: str) -> Path:
    """The list of lm-eval's own tasks.

    {"folder": of their YAML files, "tasks": {name: [kind, YAML file or "", names that a tag
    holds]}}.
    """
    return cache / f"lm_eval-{lm_eval_version}-index.json"


def task_catalogue(cache: Path, lm_eval_version: str) -> Path:
    """What lm-eval's own tasks hold, for `evalspan ls`: {name: fields of `catalogue.Described`}. "-2": of this meaning of `files`."""
    return cache / f"lm_eval-{lm_eval_version}-2-catalogue.json"


def request_set_manifest(folder: str | Path) -> Path:
    return Path(folder) / "manifest.json"


def entry_manifest(folder: str | Path) -> Path:
    """The manifest of `BuildSpec.out_dir`: it exists once every leaf has its request set."""
    return Path(folder) / "entry.json"


def batch_file(folder: str | Path, cut: str | int) -> Path:
    """The batches of a request set in one cut (`names.ShardId`), or of one batch size."""
    return Path(folder) / f"batches-{cut}.jsonl"


def batch_index_file(folder: str | Path, cut: str | int) -> Path:
    """The index of a batch file, written after it: where the index exists, the batches are whole."""
    return Path(folder) / f"batches-{cut}.index.json"
