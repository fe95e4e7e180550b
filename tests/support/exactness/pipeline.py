"""One suite entry through our whole node side, and through lm-eval, in this process."""

from __future__ import annotations

import itertools
import json
import math
import random
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evaljobs.contract.names import ShardId
from evaljobs.contract.outcomes import Executed, ShardResponses
from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.specs import BuildSpec, ExecuteSpec, ModelOptions, ScoreSpec, SuiteSpec, TaskEntry
from evaljobs.contract.storage import FrameWriter
from evaljobs.lmeval.batches import RequestsHead
from evaljobs.requests import build
from evaljobs.scoring import score as metric
from evaljobs.trial.engines import loading
from evaljobs.trial.shard_runner import RequestSet, run_shard

TASKS = Path(__file__).parent / "tasks"
BOOTSTRAP = 100
OPTIONS = ModelOptions(device="cpu", threads=1)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is evaluated; settings are a suite's and its entry's."""

    task: str
    entry: dict[str, Any] = field(default_factory=dict)
    suite: dict[str, Any] = field(default_factory=dict)
    include_path: str = str(TASKS)
    model_args: dict[str, Any] = field(default_factory=dict)
    bootstrap: int = BOOTSTRAP

    def suite_spec(self, batch_size):
        return SuiteSpec(
            name="exactness",
            include_path=(self.include_path,),
            batch_size=batch_size,
            tasks=(TaskEntry(name=self.task, **self.entry),),
            **self.suite,
        )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Everything that must be equal."""

    results: dict[str, Any]
    samples: dict[str, list[Any]]


COMPARED = ("results", "groups", "group_subtasks", "configs", "versions", "n-shot", "higher_is_better", "n-samples")  # fmt: skip


def plain(value):
    """A value as a reader of the JSON files sees it."""
    from lm_eval.utils import handle_non_serializable

    return json.loads(json.dumps(value, default=handle_non_serializable))


def lm_eval_run(model_dir, case, batch_size, threads=1):
    """lm-eval's own run with its own model class, arguments as its command would pass them."""
    import torch
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import handle_non_serializable

    from evaljobs.lmeval import hooks

    hooks.install_seam()
    torch.set_num_threads(threads)
    chat = case.suite.get("apply_chat_template", False)
    seed = case.suite.get("seed")
    seeds = (0, 1234, 1234, 1234) if seed is None else (seed,) * 4
    model_args = {"pretrained": str(model_dir), **case.model_args}
    with hooks.SEAM.answering(reference_code_eval):
        results = simple_evaluate(
            model="hf",
            model_args=model_args,
            tasks=[case.task],
            batch_size=batch_size,
            device="cpu",
            num_fewshot=case.entry.get("num_fewshot"),
            limit=case.entry.get("limit"),
            samples=case.entry.get("samples"),
            gen_kwargs=case.entry.get("gen_kwargs"),
            bootstrap_iters=case.bootstrap,
            system_instruction=case.suite.get("system_instruction"),
            apply_chat_template=chat,
            fewshot_as_multiturn=case.suite.get("fewshot_as_multiturn", bool(chat)),
            random_seed=seeds[0],
            numpy_random_seed=seeds[1],
            torch_random_seed=seeds[2],
            fewshot_random_seed=seeds[3],
            confirm_run_unsafe_code=True,
            task_manager=TaskManager(
                include_path=case.include_path,
                include_defaults=False,
                metadata=model_args | case.entry.get("metadata", {}),
            ),
            log_samples=True,
        )
    samples = {
        task: [json.loads(json.dumps(metric._sample(s), default=handle_non_serializable)) for s in lines]
        for task, lines in results["samples"].items()
    }
    found = plain({p: results[p] for p in COMPARED if p in results})
    found["configs"] = metric.reproducible_configs(results["configs"])  # functions without their addresses
    return Outcome(results=found, samples=samples)


def our_run(model_dir, case, batch_size, n_shards, folder, **how):
    """Request sets, shards in a random order over three response files, score."""
    spec = answered(model_dir, case.suite_spec(batch_size), folder, n_shards, case.model_args, **how)
    scored = metric.score_entry(spec.model_copy(update={"bootstrap_iters": case.bootstrap}))
    score = json.loads(Path(scored.result_file).read_text())
    samples = {
        task: [json.loads(line) for line in place.read_text().splitlines()]
        for task in spec.request_sets
        for place in EvaluationPaths(folder).samples.glob(f"samples_{task}_*.jsonl")
    }
    return Outcome(results={p: score[p] for p in COMPARED if p in score}, samples=samples)


def dumped(model_dir, case, folder, batch_size=4, n_shards=4):
    """All of a case but its score."""
    return answered(model_dir, case.suite_spec(batch_size), folder, n_shards, case.model_args)


def executed(spec, task, documents):
    """The outcome of an `execute` job of some documents of what is to be scored."""
    fields = ("evaluation_dir", "suite", "model_dir", "model", "judge", "allow_unsafe")
    known = {name: getattr(spec, name) for name in fields} | {"task": task, "documents": documents}
    known |= {"request_set": spec.request_sets[task], "frames": spec.frames[task]}
    outcome = metric.perform_metric_job(ExecuteSpec(name=f"execute-{documents[0]}", entry=0, **known))
    assert isinstance(outcome, Executed), outcome
    return outcome


def build_spec(model_dir, suite, out, **changes):
    """The build of a suite's first entry for `hf` on this machine's CPU."""
    fields = {"name": "build", "evaluation_dir": None, "suite": suite, "entry": 0, "batch_size": 2}
    fields |= {"model_dir": str(model_dir), "model": OPTIONS, "out_dir": str(out)}
    return BuildSpec(**(fields | changes))


def score_spec(folder, task, **changes):
    """The score of a task without request set and answers."""
    suite = SuiteSpec(name="s", tasks=(TaskEntry(name=task),))
    fields = {"name": "score", "evaluation_dir": str(folder), "suite": suite, "entry": 0, "model": OPTIONS}
    return ScoreSpec(**(fields | {"request_sets": {}, "frames": {}, "model_dir": "/nowhere"} | changes))


def requests_head(**changes):
    """The head of a request set of one likelihood."""
    fields = {"task": "t", "requests": 1, "digests": {"loglikelihood": "d"}, "order": {}, "settings": []}
    fields |= {"max_gen_tokens": [], "text": False, "grouped": False, "max_length": 8}
    return RequestsHead(**(fields | changes))


def shard_record(*responses, **changes):
    """A shard's record with these answers."""
    fields = {"task": "t", "key": "k", "shard": "t|0|1", "trial": "x", "started_at": 0.0, "seconds": 1.0}
    return ShardResponses(**(fields | {"responses": responses} | changes))


def answered(
    model_dir, suite, folder, n_shards, model_args, *, sets=None, engine=None, threads=1, judge=None, cut=""
):
    """A suite's only entry, built and inferred: what its score is made of.

    `engine`: a loaded one; `sets`: their folder; `cut`: of fast mode, "" for the suite's batch size.
    """
    options = ModelOptions(model_args=dict(model_args), device="cpu", threads=threads)
    size = suite.batch_size
    where = {"evaluation_dir": str(folder), "model": options, "batch_size": size}
    built = build.build_request_sets(build_spec(model_dir, suite, sets or folder / "sets", **where)).sets
    engine = engine or loading.load_engine(str(model_dir), options, size)
    for place in built.values() if cut else ():
        build.add_batches(Path(place), cut)
    frames = run_shards(engine, built, cut or str(size), n_shards, EvaluationPaths(folder))
    scoring = {"bootstrap_iters": 10, "allow_unsafe": True, "judge": judge, "evaluation_dir": str(folder)}
    common = {"suite": suite, "entry": 0, "model_dir": str(model_dir), "model": options}
    return ScoreSpec(name="score", request_sets=built, frames=frames, **scoring, **common)


def run_shards(engine, sets, cut, n_shards, paths):
    """Cut every leaf into n shards, run all in a random order, spread over three trials."""
    work = []
    for task, place in sets.items():
        requests_of = RequestSet(place, cut)
        count = len(requests_of.index.requests)
        cuts = [count * i // n_shards for i in range(n_shards + 1)]  # places between batches
        shards = [ShardId(task, a, b, cut) for a, b in itertools.pairwise(cuts) if a < b]
        work += [(task, requests_of, str(shard)) for shard in shards]
    random.Random(n_shards).shuffle(work)
    frames = dict.fromkeys(sets, ())
    for number, (task, requests_of, shard) in enumerate(work):
        trial = f"trial{number % 3}"
        with FrameWriter(paths.response_file(trial)) as writer:
            record = run_shard(engine, requests_of, shard, trial=trial, seed=1234)
            frames[task] += (writer.append(record),)
    return frames


def reference_code_eval(*, references, predictions, k, **_rest):
    """pass@k with every program run by a plain interpreter, written independently."""
    rates = {f"pass@{n}": [] for n in k}
    for test, candidates in zip(references, predictions, strict=True):
        passed = sum(_passes(f"{candidate}\n{test}") for candidate in candidates)
        total = len(candidates)
        for n in k:
            rates[f"pass@{n}"].append(1.0 - math.comb(total - passed, n) / math.comb(total, n))
    return {name: sum(values) / len(values) for name, values in rates.items()}, {}


_PASSES = {}


def _passes(program):
    if "\0" in program:  # no argument can hold it; as a program it is a SyntaxError
        return False
    if program not in _PASSES:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", program], capture_output=True, timeout=60, check=False
        )
        _PASSES[program] = done.returncode == 0
    return _PASSES[program]
