"""What a daemon of synthetic GPUs finds on disk: settings, suite, request sets, observations, checkpoints, notices.

    python -m bench.world FOLDER SETTINGS

SETTINGS is JSON: that of a portfolio (scale, sigma, seed, workers) or of drawn sets (evaluations, tasks, batches,
batch_seconds, load_seconds, trials_each, seed); `watched`: it leaves no notices, the daemon watches WATCHED;
`real`: so many of the evaluations are of a tiny model with toy tasks.
Rule: files of the real formats, made without lm-eval. A batch is one request, of a document of its own, whose text is
its true seconds; the planner sees tokens in proportion to the predicted seconds, and a history that says how long those
took. All checkpoints have one tokenizer, so they share their request sets.
"""

from __future__ import annotations

import json
import random
import shutil
import struct
import sys
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from support import toys
from support.node_memory import edit, make_checkpoint

from bench import synthetic
from bench.portfolio import Portfolio, Set
from coordinator.decide.planning.make_plan import BYTES_PER_PARAMETER
from coordinator.intake import from_settings, request_sets, work_folder
from coordinator.intake.checkpoint import inspect_checkpoint
from coordinator.intake.inbox import Notice, leave_notice
from coordinator.intake.suites import load_suite
from evaljobs.contract import paths
from evaljobs.contract.specs import BatchIndex, EntryManifest, RequestSetManifest
from evaljobs.contract.storage import write_record
from evaljobs.lmeval.batches import Batch, Piece, encode_batch
from priors.table import Observation, append_observations

ENGINE, HARDWARE = "synthetic", "a100"
WATCHED = "run"  # the folder of checkpoints that the daemon watches, where it does
TOKENS_A_SECOND = 100_000
EARLIER = 3  # checkpoints that were evaluated before, each with exactly the predicted seconds
LOAD_SECONDS, METRIC_SECONDS = 2.0, 0.2  # of a drawn evaluation's trial, and of each of its sets
EXECUTES_EVERY = 10  # a drawn set in so many has programs to execute
CONFIG = """
work_dir = "work"
[trial]
engine = "{engine}"
device = "cpu"
memory_mb = {memory}
[metric]
workers = {workers}
memory_mb = {memory}
[cluster]
kind = "slurm"
partition = "gpu"
cpu_partition = "cpu"
poll_seconds = 1.0
export = ["BENCH_*"]
[watch]
suite = "{suite}"
folders = {folders}
"""


def draw(tasks: int, batches: int, seconds: float, seed: int) -> list[Set]:
    """Sets of `batches` batches on average, each batch of about `seconds`; programs are executed in some of them."""
    dice, found = random.Random(seed), []
    for index in range(tasks):
        count = dice.randint(max(1, batches // 2), batches + batches // 2)
        mean = seconds * dice.uniform(0.5, 1.5)
        took = tuple(mean * dice.lognormvariate(0.0, 0.3) for _ in range(count))
        metric = (METRIC_SECONDS, METRIC_SECONDS, index % EXECUTES_EVERY == 0)
        found.append(Set(f"set{index:03d}", (mean,) * count, took, *metric))
    return found


def tokens_of(one: Set) -> tuple[int, ...]:
    return tuple(round(seconds * TOKENS_A_SECOND) for seconds in one.predicted)


def write_set(one: Set, folder: Path) -> None:
    """The request set of a suite's entry in its folder."""
    place, count, tokens = folder / "set", len(one.seconds), tokens_of(one)
    place.mkdir(parents=True)
    pieces = [
        Piece(kind="generate_until", index=number, document=number, context=f"{seconds:.6f}")
        for number, seconds in enumerate(one.seconds)
    ]
    batches = [Batch(kind="generate_until", text=True, settings={}, pieces=[piece]) for piece in pieces]
    lines = [encode_batch(batch) for batch in batches]
    paths.batch_file(place, 1).write_bytes(b"".join(lines))
    named = {"task": one.name, "key": one.name}
    sizes = {"batch_size": 1, "requests": (1,) * count, "generated_tokens": (0,) * count}
    sizes |= {"prefill_tokens": tokens, "documents": tuple((number,) for number in range(count))}
    offsets = tuple(accumulate(map(len, lines), initial=0))
    write_record(paths.batch_index_file(place, 1), BatchIndex(**named, offsets=offsets, **sizes))
    counts = {"documents": count, "requests": count, "prompt_tokens": sum(tokens), "generation_cap_tokens": 0}
    kind = {"output_type": "generate_until", "executes": one.executes}
    write_record(paths.request_set_manifest(place), RequestSetManifest(**named, **kind, **counts))
    shown = "shown-nothing.json"  # no file that could change
    paths.shown_file(folder, shown).write_text("{}")
    manifest = EntryManifest(entry=one.name, sets={one.name: "set"}, shown=shown)
    write_record(paths.entry_manifest(folder), manifest)


def observation(one: Set, number: int, **common: Any) -> Observation:
    """What the predicted seconds were learnt from, of one earlier checkpoint."""
    known = {"task": one.name, "key": one.name, "hardware": HARDWARE, "batch_size": 1}
    sizes = {"prefill_tokens": sum(tokens_of(one)), "generated_tokens": 0, "documents": len(one.seconds)}
    took = {"inference_seconds": sum(one.predicted), "metric_seconds": one.metric_predicted}
    return Observation(**known, **sizes, **took, at=float(number), **common)


def real_checkpoints(folder: Path, numbers: Sequence[int]) -> None:
    """Checkpoints of a tiny model, whose weights differ in their last value."""
    model = toys.toy_model(folder.parent) if numbers else folder
    for number in numbers:
        place = shutil.copytree(model, folder / f"{synthetic.REAL}{number}")
        weights = place / "model.safetensors"
        edit(weights, weights.stat().st_size - 4, struct.pack("<f", number / 2**20))


def main(root: Path, given: dict[str, Any]) -> None:
    watched, real, evaluations = (
        given.get("watched", False),
        given.get("real", 0),
        given.get("evaluations", 1),
    )
    if "sigma" in given:
        portfolio = Portfolio(**{key: given[key] for key in ("scale", "sigma", "seed")})
        sets, load, size = portfolio.sets, portfolio.instance.load_seconds, 64 << 20
        storage = portfolio.instance.storage_seconds_alone
    else:
        sets = draw(given["tasks"], given["batches"], given["batch_seconds"], given["seed"])
        load, storage, size = given.get("load_seconds", LOAD_SECONDS), 0.0, 4096 if watched else 1 << 20
    suite_file, config = root / "suite.toml", root / "evalspan.toml"
    rows = "".join(f'[[task]]\nname = "{one.name}"\n' for one in sets)
    suite_file.write_text(f'name = "synthetic"\nbatch_size = 1\n{rows}')
    (root / WATCHED).mkdir()
    engine = "hf" if real else ENGINE
    words = {"engine": engine, "suite": suite_file, "workers": given.get("workers", 1)}
    words["memory"] = 2000 if real else 500
    words["folders"] = [str(root / WATCHED)] if watched else []
    config.write_text(CONFIG.format(**words))
    told = {"load_seconds": load, "storage_seconds": storage, "trials_each": given.get("trials_each")}
    of = {
        one.name: {"seconds": one.metric_seconds, "docs": len(one.seconds)}
        | {"executes": one.executes, "alone": one.alone}
        for one in sets
    }
    settings = work_folder.load_settings(config)
    site, suite = from_settings.site_of(settings), load_suite(suite_file)
    model, version = from_settings.model_options(settings), from_settings.lm_eval_version(settings, site)
    inputs = from_settings.inputs_for(site, version)(suite, model)
    are_real = {round((number + 0.5) * evaluations / real) for number in range(real)}
    real_checkpoints(root / "checkpoints", sorted(are_real))
    for number in [number for number in range(evaluations) if number not in are_real]:
        place = root / "checkpoints" / f"step-{number}"
        checkpoint = inspect_checkpoint(make_checkpoint(place, shards=1, size=size, seed=number))
        if number == 0:
            names = request_sets.folder_names(suite, checkpoint, model, inputs)
            for one, name in zip(sets, names, strict=True):
                write_set(one, site.paths.request_sets / name)
            common = {"engine": engine, "load_seconds": load}
            common["model_parameters"] = checkpoint.bytes // BYTES_PER_PARAMETER
            learnt = [observation(one, at, **common) for at in range(EARLIER) for one in sets]
            append_observations(site.paths.observations, learnt)
        if not watched:
            about = {"step": number, "suite": str(suite_file), "noticed_at": time.time()}
            leave_notice(paths.WorkPaths(settings.work_dir), Notice(checkpoint=checkpoint.source, **about))
    (root / synthetic.GIVEN).write_text(json.dumps(told | {"metrics": of}))  # last: the folder is whole


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
