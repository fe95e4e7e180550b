"""Paths of a work folder: every name on disk on which two processes must agree.

Rule: a file that one process writes and another reads has its path here and nowhere else. Used by
the coordinator and by all jobs. A comment "File PATTERN: what | who writes it | when it goes" stands
where a file has its name, here or elsewhere; a test holds that each has one. Words in
capitals in a pattern stand for any name, "…" for everything below a folder.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path


def expand_home(path: str | Path) -> Path:
    """Return a path with `~` expanded; one of an unknown user, or where there is no home, stays as it is."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 (Path.expanduser raises there)


def slug(text: str) -> str:
    """Return `text` as a readable file name; different texts give different names."""
    safe = re.sub(r"[^A-Za-z0-9_.-]", "-", text)[:80].strip(".") or "x"
    if safe == text:
        return safe
    return f"{safe}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


class EvaluationPaths:
    """Paths of one evaluation, below `DIR/<evaluation id>`."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        # File WORK_DIR/ID/evaluation.json: checkpoint, suite and options, as they were accepted | the coordinator | kept
        self.evaluation = self.root / "evaluation.json"
        # File WORK_DIR/ID/journal.jsonl: each event as a line, and all that a restart needs | the coordinator | kept
        self.journal = self.root / "journal.jsonl"
        # File WORK_DIR/ID/specs/JOB.json: what a job was asked to do | the coordinator | archived; `prune --keep responses`
        self.specs = self.root / "specs"
        # File WORK_DIR/ID/logs/JOB.log: output of a job (`evalspan logs ID JOB`) | the job | archived; `prune --keep responses`
        self.logs = self.root / "logs"
        # File WORK_DIR/ID/outcomes/JOB.KIND.json: what a job reported | the job | archived; `prune --keep responses`
        self.outcomes = self.root / "outcomes"
        # File WORK_DIR/ID/responses/TRIAL.frames: answers of the model, shard by shard | a trial | archived;
        # `prune --keep scores`
        self.responses = self.root / "responses"
        # File WORK_DIR/ID/verdicts/TASK@JOB.jsonl: verdicts of programs or of the judge | a metric worker | archived;
        # `prune --keep scores`
        self.verdicts = self.root / "verdicts"
        # File WORK_DIR/ID/judgements/HASH.json: a request to the judge with its answer and cost | a metric worker | archived;
        # `prune --keep scores`
        self.judgements = self.root / "judgements"
        # File WORK_DIR/ID/scores/ENTRY-TASK.json: scores of an entry in lm-eval's shape | a metric worker | archived, kept
        # File WORK_DIR/ID/scores/ENTRY-ENTRY.parquet: of each document of an entry its metric values and what its likelihoods say
        # | a metric worker | merged into documents.parquet at the end
        self.scores = self.root / "scores"
        # File WORK_DIR/ID/samples/samples_TASK_ENTRY.jsonl: each document with prompt, answer and score | a metric worker |
        # archived; `prune --keep scores`
        self.samples = self.root / "samples"
        # File WORK_DIR/ID/release/JOB: empty; tells a precursor or the workers to end | the coordinator | archived;
        # `prune --keep responses`
        self.release = self.root / "release"
        # File WORK_DIR/ID/request_sets.json: where the request sets are, for a trial that started before them | the
        # coordinator | kept
        self.request_sets = self.root / "request_sets.json"
        # File WORK_DIR/ID/trained_values.jsonl: values of tensors in training's memory, which trials compare with the weights
        # | the coordinator, of what `notify(fingerprint=model)` left | kept
        self.trained_values = self.root / "trained_values.jsonl"
        # File WORK_DIR/ID/results.json: scores of all tasks in lm-eval's shape | the coordinator | kept
        self.results = self.root / "results.json"
        # File WORK_DIR/ID/report.json: makespan, GPU seconds by cause, stages | the coordinator | kept
        self.report = self.root / "report.json"
        # File WORK_DIR/ID/status.json: summary, all that is shown of the evaluation: how far it is, what it waits for, why it
        # is parked, scores and costs | the coordinator | kept
        self.status = self.root / "status.json"
        # File WORK_DIR/ID/ended.json: what it came to: scores, costs and failures, which every view shows | the coordinator, or
        # the first view | kept
        self.ended = self.root / "ended.json"
        # File WORK_DIR/ID/documents.parquet: of each document of all tasks its metric values and what its likelihoods say |
        # the coordinator, or the first comparison | kept
        self.documents = self.root / "documents.parquet"
        # File WORK_DIR/ID/paired.jsonl: differences of the scores to earlier checkpoints, a line each | the first process that
        # compares them | may be removed
        self.paired = self.root / "paired.jsonl"
        # File WORK_DIR/ID/places.json: further folders of the checkpoint: a copy with the same name, content and times is the
        # same evaluation, and is in the series of each folder where it was announced; without any it is not there | the
        # coordinator or `submit` | kept
        self.places = self.root / "places.json"

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

    def columns(self, entry: int, of: int | None = None) -> Path:
        """Documents of an entry. `of`: its number in that file, where it is another evaluation's."""
        return self.scores / f"{entry:03d}-{entry if of is None else of:03d}.parquet"

    def response_file(self, trial: str) -> Path:
        return self.responses / f"{slug(trial)}.frames"

    def release_file(self, job: str) -> Path:
        """Return the file that makes the precursor `job` clear its node's memory and exit."""
        return self.release / slug(job)


class WorkPaths:
    """Paths of a work folder that are shared by its evaluations."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        # File WORK_DIR/daemon.lock: locked (flock) by the one coordinator, whose host, process and token it has | the coordinator |
        # stays
        self.lock = self.root / "daemon.lock"
        # File WORK_DIR/daemon.lease: its mtime shows jobs that a coordinator lives | the coordinator | stays
        self.lease = self.root / "daemon.lease"
        self.redis = self.root / "redis"
        # File WORK_DIR/redis/address.json: address and password of Redis, mode 0600 | the coordinator | written anew at each
        # start
        self.redis_address = self.redis / "address.json"
        self.request_sets = self.root / "request_sets"
        # File WORK_DIR/converted/DIGEST/…: Hugging Face folder of a checkpoint in training's own format | a conversion |
        # when no evaluation needs it
        self.converted = self.root / "converted"
        self.priors = self.root / "priors"
        # File WORK_DIR/priors/observations.jsonl: run times that estimates learn from: of each task and kind of hardware the
        # newest 20 | the coordinator | stays
        self.observations = self.priors / "observations.jsonl"
        self.cache = self.root / "cache"
        # File WORK_DIR/cache/judgements/XX/HASH.json: the judge's answers by content, hard links | a metric worker | by hand
        self.judgements = self.cache / "judgements"
        # File WORK_DIR/cache/digests.json: digests of files that suites are made of, by their times | the coordinator |
        # may be removed
        self.digests = self.cache / "digests.json"
        # File WORK_DIR/cache/samples.txt: evaluations by their checkpoints' samples, so that those of a copy are found | the
        # coordinator | may be removed
        self.samples = self.cache / "samples.txt"
        # File WORK_DIR/cache/trainings/NAME.json: verdicts, drops and means of a training, which all views print | a process
        # beside the coordinator, or the first view after an end | may be removed
        self.trainings = self.cache / "trainings"
        # File WORK_DIR/cache/gpu_names.json: names of GPUs of nodes whose Gres says no type | the coordinator | may be removed
        self.gpu_names = self.cache / "gpu_names.json"
        # File WORK_DIR/cache/environments/HASH.json: what trials of an interpreter read of its files, which precursors read
        # ahead | a trial | may be removed
        self.environments = self.cache / "environments"
        # File WORK_DIR/inbox/TIME-HOST-PID-N.json: a checkpoint to evaluate, or a command | the training, `submit`, `cancel`,
        # `retry`, `release`, the coordinator for a watched folder | once the coordinator has dealt with it
        # File WORK_DIR/inbox/refused/NAME.json: one that was refused, a hundred at most | the coordinator | after a week
        self.inbox = self.root / "inbox"
        # File WORK_DIR/nodes.json: cordoned nodes with the end of each cordon | the coordinator | stays
        # File WORK_DIR/nodes.lock: locked (flock) by each process that changes nodes.json | the coordinator, `check-nodes` | stays
        self.nodes = self.root / "nodes.json"
        # File WORK_DIR/rules.toml: rules of `diagnose` that a person accepted | a person | stays
        self.rules = self.root / "rules.toml"
        # File WORK_DIR/pending.json: pending checkpoints with their reasons | the coordinator | stays
        self.pending = self.root / "pending.json"
        # File WORK_DIR/watched.json: checkpoints of watched folders that were taken, while they are there | the coordinator |
        # stays
        self.watched = self.root / "watched.json"
        # File WORK_DIR/news.json: evaluations whose end `[notify]` is still to send | the daemon | stays
        self.news = self.root / "news.json"
        self.supervised = self.root / "supervised"

    def evaluation(self, evaluation_id: str) -> EvaluationPaths:
        return EvaluationPaths(self.root / evaluation_id)


def task_catalogue(cache: Path, lm_eval_version: str) -> Path:
    """Return the file that describes lm-eval's own tasks: {name: fields of `catalogue.Described`}. "-2": its version."""
    # File WORK_DIR/cache/lm_eval-VERSION-N-catalogue.json: what lm-eval's tasks hold | any command | may be removed
    return cache / f"lm_eval-{lm_eval_version}-2-catalogue.json"


def request_set_manifest(folder: str | Path) -> Path:
    # File WORK_DIR/request_sets/ENTRY/TASK/manifest.json: key and counts of a leaf task's requests, written last | a build |
    # `prune`
    # File WORK_DIR/request_sets/ENTRY/TASK/requests: prompts and tokens of a leaf task | a build | `prune`
    return Path(folder) / "manifest.json"


def entry_manifest(folder: str | Path) -> Path:
    """Return the manifest of `BuildSpec.out_dir`: it exists once every leaf has its request set."""
    # File WORK_DIR/request_sets/ENTRY/entry.json: leaf tasks of a suite's entry, written last | a build | `prune`
    return Path(folder) / "entry.json"


def shown_file(folder: str | Path, name: str) -> Path:
    """Return the file with the inputs that a build used (`evaljobs.lmeval.shown_inputs`). `folder`: `BuildSpec.out_dir`."""
    # File WORK_DIR/request_sets/ENTRY/shown-DIGEST.json: files and packages that a build used | a build | `prune`
    return Path(folder) / name


def batch_file(folder: str | Path, cut: str | int) -> Path:
    """Return the file with the batches of a request set in one cut (`names.ShardId`), or of one batch size."""
    # File WORK_DIR/request_sets/ENTRY/TASK/batches-CUT.jsonl: batches of these requests in one size | a build | `prune`
    return Path(folder) / f"batches-{cut}.jsonl"


def batch_index_file(folder: str | Path, cut: str | int) -> Path:
    """Return the index of a batch file, written after it: once it exists, the batches are complete."""
    # File WORK_DIR/request_sets/ENTRY/TASK/batches-CUT.index.json: where each batch is, and its tokens | a build | `prune`
    return Path(folder) / f"batches-{cut}.index.json"
