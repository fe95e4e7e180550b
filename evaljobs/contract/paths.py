"""Every name on disk that more than one process must agree on: paths of a work folder, shard names.

Rule: a file that one process writes and another reads has its path here and nowhere else.
It does not know: what is in the files.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path


def shard_id(task: str, first_batch: int, end_batch: int) -> str:
    """Name of a shard: batches first..end-1 of a task's request set."""
    return f"{task}|{first_batch}|{end_batch}"


def parse_shard(shard: str) -> tuple[str, int, int]:
    """Inverse of `shard_id`; ValueError where it is none."""
    task, first, end = shard.rsplit("|", 2)
    return task, int(first), int(end)


def slug(text: str) -> str:
    """A file-name-safe form of `text` that stays readable; different texts stay different."""
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
        """Its existence tells the holder `job` to clear its node's memory and end."""
        return self.release / slug(job)


class WorkPaths:
    """Every path of a work folder that is not one evaluation's."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.lock = self.root / "daemon.lock"
        self.lease = self.root / "daemon.lease"
        self.redis = self.root / "redis"
        self.redis_address = self.redis / "address.json"
        self.request_sets = self.root / "request_sets"
        self.converted = self.root / "converted"
        self.priors = self.root / "priors"
        self.observations = self.priors / "observations.jsonl"
        self.cache = self.root / "cache"
        self.judgements = self.cache / "judgements"
        self.digests = self.cache / "digests.json"
        self.spool = self.root / "spool"
        self.submissions = self.root / "submissions"
        self.nodes = self.root / "nodes.json"
        self.pending = self.root / "pending.json"
        self.watched = self.root / "watched.json"

    def evaluation(self, evaluation_id: str) -> EvaluationPaths:
        return EvaluationPaths(self.root / evaluation_id)


def shipped_index(cache: Path, lm_eval_version: str) -> Path:
    """lm-eval's own tasks: {"folder": of their YAML files, "tasks": {name: [kind, YAML file or "", names that a tag holds]}}."""
    return cache / f"lm_eval-{lm_eval_version}-index.json"


def request_set_manifest(folder: str | Path) -> Path:
    return Path(folder) / "manifest.json"


def entry_manifest(folder: str | Path) -> Path:
    """`BuildSpec.out_dir`'s own manifest: present means that every leaf of the entry has its request set."""
    return Path(folder) / "entry.json"


def batch_file(folder: str | Path, batch_size: int) -> Path:
    return Path(folder) / f"batches-{batch_size}.jsonl"


def batch_index_file(folder: str | Path, batch_size: int) -> Path:
    """Written after the batch file: an index present means that its batches are whole."""
    return Path(folder) / f"batches-{batch_size}.index.json"
