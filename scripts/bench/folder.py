"""What a daemon of synthetic GPUs finds on disk: settings, suite, request sets, observations, checkpoints, notices.

    python -m bench.folder FOLDER SETTINGS

SETTINGS is JSON: that of a portfolio (scale, sigma, seed, workers) or of drawn sets (evaluations, tasks, batches,
batch_seconds, trials_each, nodes_each, poll, seed); `announced` false: it leaves no notices; `watched`: the daemon watches WATCHED,
and its Redis is of this host alone; `kilobytes`: of a checkpoint. Rule: files of the real formats, made without lm-eval. A batch is one request, of a
document of its own, whose text is its true seconds; the planner sees tokens in proportion to the predicted seconds, and a
history that says how long those took. All checkpoints have one tokenizer, so they share their request sets.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.portfolio import INSTANCE, Portfolio, Set
from bench.staging import make_checkpoint
from coordinator.intake import from_settings, request_sets, work_folder
from coordinator.intake.checkpoint import inspect
from coordinator.intake.inbox import Notice, leave
from coordinator.intake.suites import load_suite
from coordinator.planning.make_plan import BYTES_PER_PARAMETER
from evaljobs.contract.paths import (
    WorkPaths,
    batch_file,
    batch_index_file,
    entry_manifest,
    request_set_manifest,
    shown_file,
)
from evaljobs.contract.specs import BatchIndex, EntryManifest, Record, RequestSetManifest
from evaljobs.contract.storage import write_atomic
from evaljobs.lmeval.batches import Batch, Piece, encode_batch
from priors.table import Observation, append

ENGINE = "synthetic"
HARDWARE = "a100"
WATCHED = "run"  # the folder of checkpoints that the daemon watches, where it does
TOKENS_A_SECOND = 100_000
EARLIER = 3  # checkpoints that were evaluated before, each with exactly the predicted seconds
LOAD_SECONDS = 2.0  # of a drawn evaluation's trial
METRIC_SECONDS = 0.2
EXECUTES_EVERY = 10  # a drawn set in so many has programs to execute
CONFIG = """
work_dir = "work"
backlog = {backlog}
[trial]
engine = "{engine}"
device = "cpu"
memory_mb = 500
model_args = {{ load_seconds = {load} }}
[metric]
workers = {workers}
memory_mb = 500
[cluster]
kind = "slurm"
partition = "gpu"
cpu_partition = "cpu"
poll_seconds = {poll}
export = ["BENCH_*"]
[watch]
suite = "{suite}"
folders = {folders}
[redis]
{redis}
[borrow]
{borrow}
"""


def draw(tasks: int, batches: int, seconds: float, seed: int) -> list[Set]:
    """Sets of `batches` batches on average, each batch of about `seconds`; programs are executed in some of them."""
    dice = random.Random(seed)

    def drawn(index: int) -> Set:
        count = dice.randint(max(1, batches // 2), batches + batches // 2)
        mean = seconds * dice.uniform(0.5, 1.5)
        return Set(
            name=f"set{index:03d}",
            predicted=(mean,) * count,
            seconds=tuple(mean * dice.lognormvariate(0.0, 0.3) for _ in range(count)),
            metric_predicted=METRIC_SECONDS,
            metric_seconds=METRIC_SECONDS,
            executes=index % EXECUTES_EVERY == 0,
            alone=False,
        )

    return [drawn(index) for index in range(tasks)]


def write_set(one: Set, folder: Path) -> None:
    """The request set of a suite's entry in its folder."""
    place = folder / "set"
    place.mkdir(parents=True)
    lines = [encode_batch(_batch(number, seconds)) for number, seconds in enumerate(one.seconds)]
    offsets = [0]
    for line in lines:
        offsets.append(offsets[-1] + len(line))
    batch_file(place, 1).write_bytes(b"".join(lines))
    index = BatchIndex(
        task=one.name,
        key=one.name,
        batch_size=1,
        offsets=tuple(offsets),
        requests=(1,) * len(lines),
        prefill_tokens=tuple(round(seconds * TOKENS_A_SECOND) for seconds in one.predicted),
        generated_tokens=(0,) * len(lines),
        documents=tuple((number,) for number in range(len(lines))),
    )
    manifest = RequestSetManifest(
        task=one.name,
        key=one.name,
        output_type="generate_until",
        executes=one.executes,
        documents=len(lines),
        requests=len(lines),
        prompt_tokens=sum(index.prefill_tokens),
        generation_cap_tokens=0,
    )
    _write(batch_index_file(place, 1), index)
    _write(request_set_manifest(place), manifest)
    shown = "shown-nothing.json"  # no file that could change
    shown_file(folder, shown).write_text("{}")
    _write(entry_manifest(folder), EntryManifest(entry=one.name, sets={one.name: "set"}, shown=shown))


def _batch(number: int, seconds: float) -> Batch:
    piece = Piece(kind="generate_until", index=number, document=number, context=f"{seconds:.6f}")
    return Batch(kind="generate_until", text=True, settings={}, pieces=[piece])


def _write(path: Path, record: Record) -> None:
    write_atomic(path, record.model_dump_json().encode())


def write_history(sets: Sequence[Set], parameters: int, observations: Path, load_seconds: float) -> None:
    """What the predicted seconds were learnt from."""
    made = [
        Observation(
            task=one.name,
            key=one.name,
            model_parameters=parameters,
            hardware=HARDWARE,
            engine=ENGINE,
            batch_size=1,
            prefill_tokens=sum(round(seconds * TOKENS_A_SECOND) for seconds in one.predicted),
            generated_tokens=0,
            documents=len(one.seconds),
            inference_seconds=sum(one.predicted),
            metric_seconds=one.metric_predicted,
            load_seconds=load_seconds,
            at=float(number),
        )
        for number in range(EARLIER)
        for one in sets
    ]
    append(observations, made)


def main(root: Path, given: dict[str, Any]) -> None:
    if "sigma" in given:
        portfolio = Portfolio(INSTANCE.read_text(), **{key: given[key] for key in ("scale", "sigma", "seed")})
        sets, load = portfolio.sets, portfolio.instance.load_seconds
        storage, megabytes = portfolio.instance.storage_seconds_alone, 64
    else:
        sets = draw(given["tasks"], given["batches"], given["batch_seconds"], given["seed"])
        load, storage, megabytes = LOAD_SECONDS, 0.0, 1
    suite_file, config = root / "suite.toml", root / "evalspan.toml"
    rows = "".join(f'[[task]]\nname = "{one.name}"\n' for one in sets)
    suite_file.write_text(f'name = "synthetic"\nbatch_size = 1\n{rows}')
    borrow = f"max_nodes = {given['nodes_each']}" if "nodes_each" in given else ""
    words = {"engine": ENGINE, "load": load, "borrow": borrow, "suite": suite_file}
    words |= {"folders": [], "backlog": '"all"', "redis": ""}
    if given.get("watched", False):
        (root / WATCHED).mkdir()
        words |= {
            "folders": [str(root / WATCHED)],
            "backlog": "{ keep_every = 1 }",
            "redis": 'bind = "127.0.0.1"',
        }
    config.write_text(CONFIG.format(workers=given.get("workers", 1), poll=given.get("poll", 1.0), **words))
    metrics = {
        s.name: {
            "seconds": s.metric_seconds,
            "docs": len(s.seconds),
            "executes": s.executes,
            "alone": s.alone,
        }
        for s in sets
    }
    (root / "bench.json").write_text(
        json.dumps({"storage_seconds": storage, "metrics": metrics, "trials_each": given.get("trials_each")})
    )
    settings = work_folder.load(config)
    site, suite = from_settings.site_of(settings), load_suite(suite_file)
    model, version = from_settings.model_options(settings), from_settings.lm_eval_version(settings, site)
    paths, inputs = site.paths, from_settings.inputs_for(site, version)(suite, model)
    first = root / "checkpoints" / "step-0"
    size = given.get("kilobytes", megabytes << 10) << 10
    checkpoint = make_checkpoint(first, size)
    for index, one in enumerate(sets):
        name = request_sets.folder_name(suite, index, checkpoint, model, inputs)
        write_set(one, paths.request_sets / name)
    write_history(sets, checkpoint.bytes // BYTES_PER_PARAMETER, paths.observations, load)
    for number in range(given.get("evaluations", 1)):
        place = first.with_name(f"step-{number}")
        if number:
            make_checkpoint(place, size)
        if not given.get("announced", True):
            continue
        source = inspect(place).source
        notice = Notice(checkpoint=source, step=number, suite=str(suite_file), noticed_at=time.time())
        leave(WorkPaths(settings.work_dir), notice)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
