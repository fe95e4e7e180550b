"""A suite with all inputs of its scores, and edits of it with the work that each calls for."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from coordinator.evaluation.job_specs import Site
from coordinator.evaluation.records import evaluation_id
from coordinator.intake.checkpoint import inspect
from coordinator.intake.request_sets import folder_name
from coordinator.intake.source_keys import inputs_of
from evaljobs.contract.paths import request_set_manifest
from evaljobs.contract.specs import BuildSpec, ModelOptions, RequestSetManifest, SuiteSpec, TaskEntry
from evaljobs.contract.storage import read_record
from evaljobs.requests import build

Work = Literal["nothing", "rebuild", "score", "gpu"]
ORDER: tuple[Work, ...] = ("nothing", "rebuild", "score", "gpu")

FILES = {
    "group.yaml": "group: both\ntask: [choose, count]\naggregate_metric_list:\n"
    "  - {metric: acc, aggregation: mean, weight_by_size: true}\nmetadata: {version: 1.0}\n",
    "common/base.yaml": "# shared by both\ntest_split: test\nfewshot_split: few\nmetadata: {version: 1.0}\n",
    "choose.yaml": "# which ending\ninclude: common/base.yaml\ntask: choose\ncustom_dataset: !function load.rows\n"
    "dataset_kwargs: {data_files: {test: data/choose.jsonl, few: data/few.jsonl}}\n"
    "output_type: multiple_choice\ndoc_to_text: !function prompt.asked\ndoc_to_target: a\n"
    "doc_to_choice: ['no', 'yes']\nmetric_list:\n"
    "  - {metric: acc, aggregation: mean, higher_is_better: true}\n",
    "count.yaml": "include: common/base.yaml\ntask: count\ncustom_dataset: !function load.rows\n"
    "dataset_kwargs: {data_files: {test: data/count.jsonl, few: data/few.jsonl}}\n"
    'output_type: generate_until\ndoc_to_text: "Q: {{q}}"\ndoc_to_target: "{{a}}"\n'
    "process_results: !function metrics.graded\nrepeats: 1\n"
    "generation_kwargs: {until: ['Q:'], do_sample: false, max_gen_toks: 4}\n"
    "metric_list:\n  - {metric: acc, aggregation: mean, higher_is_better: true}\n"
    "filter_list:\n  - name: first\n    filter: [{function: regex, regex_pattern: '([a-z]+)'}, {function: take_first}]\n",
    "load.py": "import json\nfrom pathlib import Path\n\nimport datasets\n\n\n"
    "def rows(*, data_files, **_):\n    here = Path(__file__).parent\n"
    "    return {s: datasets.Dataset.from_list([json.loads(l) for l in (here / f).read_text().splitlines()])\n"
    "            for s, f in data_files.items()}\n",
    "prompt.py": "import sys\nfrom pathlib import Path\n\nsys.path.insert(0, str(Path(__file__).parent))\n"
    "import wording\n\n\ndef asked(doc):\n    return wording.BEFORE + doc['q']\n",
    "wording.py": "BEFORE = ''\n",
    "metrics.py": "from pathlib import Path\n\nACCEPTED = (Path(__file__).parent / 'accepted.txt').read_text().split()\n\n\n"
    "def graded(doc, results):\n    return {'acc': float(results[0] in (str(doc['a']), *ACCEPTED))}\n",
    "accepted.txt": "one two\n",
    "other.yaml": "task: other\ncustom_dataset: !function load.rows\noutput_type: multiple_choice\n",
    "unused.py": "X = 1\n",
}


def rows(first: int) -> str:
    lines = ({"q": f"the river {i} breaks", "a": i % 2, "note": "x"} for i in range(first, first + 6))
    return "".join(json.dumps(line) + "\n" for line in lines)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is submitted, beside the files."""

    suite: SuiteSpec
    model: ModelOptions = field(default_factory=ModelOptions)


def write_suite(folder: Path) -> Asked:
    for name, text in {
        **FILES,
        "data/choose.jsonl": rows(0),
        "data/count.jsonl": rows(10),
        "data/few.jsonl": rows(20),
    }.items():
        place = folder / "tasks" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    entry = TaskEntry(name="both", num_fewshot=1, limit=5)
    return Asked(
        suite=SuiteSpec(name="s", include_path=(str(folder / "tasks"),), batch_size=4, tasks=(entry,))
    )


@dataclass(frozen=True, kw_only=True)
class Edit:
    name: str
    work: Work
    file: str = ""
    old: str = ""
    new: str = ""
    more: Callable[[Path], None] | None = None
    asked: Callable[[Asked], Asked] | None = None

    def apply(self, folder: Path, asked: Asked) -> Asked:
        tasks = folder / "tasks"
        if self.old:
            text = (tasks / self.file).read_text()
            assert self.old in text, f"{self.name}: an earlier edit took its place"
            (tasks / self.file).write_text(text.replace(self.old, self.new))
        if self.more is not None:
            self.more(tasks)
        return self.asked(asked) if self.asked is not None else asked


def entry(**changes: Any) -> Callable[[Asked], Asked]:
    return lambda a: replace(
        a, suite=a.suite.model_copy(update={"tasks": (a.suite.tasks[0].model_copy(update=changes),)})
    )


def suite(**changes: Any) -> Callable[[Asked], Asked]:
    return lambda a: replace(a, suite=a.suite.model_copy(update=changes))


def model(**changes: Any) -> Callable[[Asked], Asked]:
    return lambda a: replace(a, model=a.model.model_copy(update=changes))


def touched(name: str) -> Callable[[Path], None]:
    return lambda tasks: os.utime(tasks / name, ns=(1, 1))


def written(name: str, text: str) -> Callable[[Path], None]:
    return lambda tasks: (tasks / name).write_text(text) and None


def appended(name: str, text: str) -> Callable[[Path], None]:
    return lambda tasks: (tasks / name).write_text((tasks / name).read_text() + text) and None


ROW = json.dumps({"q": "the stone sings", "a": 1, "note": "x"}) + "\n"
EDITS = (
    Edit(name="touch YAML", work="nothing", more=touched("choose.yaml")),
    Edit(name="touch data", work="nothing", more=touched("data/choose.jsonl")),
    Edit(name="touch a module", work="nothing", more=touched("prompt.py")),
    Edit(name="write the same bytes", work="nothing", more=written("wording.py", FILES["wording.py"])),
    Edit(name="another task", work="nothing", more=written("new.yaml", "task: new\noutput_type: multiple_choice\n")),
    Edit(name="edit another task", work="nothing", file="other.yaml", old="multiple_choice", new="generate_until"),
    Edit(name="edit a module that nothing imports", work="nothing", file="unused.py", old="X = 1", new="X = 2"),
    Edit(name="comment", work="rebuild", file="choose.yaml", old="# which ending", new="# which ending follows"),
    Edit(name="blank lines", work="rebuild", more=appended("count.yaml", "\n\n")),
    Edit(name="comment of an included YAML", work="rebuild", file="common/base.yaml", old="# shared", new="# used"),
    Edit(name="comment of the group", work="rebuild", more=appended("group.yaml", "# both kinds\n")),
    Edit(name="quotes", work="rebuild", file="count.yaml", old='"{{a}}"', new="'{{a}}'"),
    Edit(name="order of keys", work="rebuild", file="common/base.yaml", old="test_split: test\nfewshot_split: few\n", new="fewshot_split: few\ntest_split: test\n"),
    Edit(name="comment of a module", work="rebuild", more=appended("metrics.py", "# graded strictly\n")),
    Edit(name="comment of an imported module", work="rebuild", more=appended("wording.py", "# nothing before\n")),
    Edit(name="whitespace between columns", work="rebuild", file="data/choose.jsonl", old='", "a"', new='",   "a"'),
    Edit(name="a row beyond the limit", work="rebuild", more=appended("data/choose.jsonl", ROW)),
    Edit(name="description of an included task split", work="rebuild", file="common/base.yaml", old="test_split: test", new="test_split: 'test'"),
    Edit(name="rotate the answers", work="score", more=lambda t: (t / "data/choose.jsonl").write_text(rows(0).replace('"a": 1', '"a": 9').replace('"a": 0', '"a": 1').replace('"a": 9', '"a": 0')) and None),
    Edit(name="one gold answer", work="score", file="data/count.jsonl", old='10 breaks", "a": 0', new='10 breaks", "a": 1'),
    Edit(name="a column that no prompt shows", work="score", file="data/count.jsonl", old='"x"', new='"y"'),
    Edit(name="metric", work="score", file="choose.yaml", old="metric: acc", new="metric: acc_norm"),
    Edit(name="second metric", work="score", more=appended("choose.yaml", "  - {metric: acc_norm, aggregation: mean, higher_is_better: true}\n")),
    Edit(name="direction", work="score", file="choose.yaml", old="higher_is_better: true", new="higher_is_better: false"),
    Edit(name="aggregation", work="score", file="count.yaml", old="aggregation: mean", new="aggregation: median"),
    Edit(name="filter's pattern", work="score", file="count.yaml", old="[a-z]+", new="[a-z]"),
    Edit(name="another filter", work="score", more=appended("count.yaml", "  - name: raw\n    filter: [{function: take_first}]\n")),
    Edit(name="scorer", work="score", file="metrics.py", old="float(", new="2 * float("),
    Edit(name="file that the scorer reads", work="score", more=written("accepted.txt", "one\n")),
    Edit(name="version of a task", work="score", more=appended("choose.yaml", "metadata: {version: 2.0}\n")),
    Edit(name="version in an included YAML", work="score", file="common/base.yaml", old="1.0", new="1.1"),
    Edit(name="weights of the group", work="score", file="group.yaml", old="weight_by_size: true", new="weight_by_size: false"),
    Edit(name="prompt of a YAML", work="gpu", file="count.yaml", old="Q: {{q}}", new="Question: {{q}}"),
    Edit(name="whitespace in a prompt", work="gpu", file="count.yaml", old="Q: {{q}}", new="Q:  {{q}}"),
    Edit(name="prompt of a module", work="gpu", file="prompt.py", old="+ doc['q']", new="+ doc['q'] + ' and'"),
    Edit(name="module that a module imports", work="gpu", file="wording.py", old="''", new="'Well, '"),
    Edit(name="loader", work="gpu", file="load.py", old="json.loads(l) for", new="{**json.loads(l), 'q': 'a b'} for"),
    Edit(name="description", work="gpu", more=appended("common/base.yaml", "description: 'Choose. '\n")),
    Edit(name="choices", work="gpu", file="choose.yaml", old="'yes'", new="'yes, it is'"),
    Edit(name="data row", work="gpu", file="data/choose.jsonl", old="river 0 breaks", new="river 0 sings"),
    Edit(name="order of rows", work="gpu", more=lambda t: (t / "data/count.jsonl").write_text("".join(reversed(rows(10).splitlines(keepends=True)))) and None),
    Edit(name="row of the few-shot data", work="gpu", more=lambda t: (t / "data/few.jsonl").write_text(rows(30)) and None),
    Edit(name="delimiter of few-shot examples", work="gpu", more=appended("common/base.yaml", "fewshot_delimiter: ' | '\n")),
    Edit(name="stop strings", work="gpu", file="count.yaml", old="['Q:']", new="['Q:', 'A:']"),
    Edit(name="longest answer", work="gpu", file="count.yaml", old="max_gen_toks: 4", new="max_gen_toks: 5"),
    Edit(name="repeats", work="gpu", file="count.yaml", old="repeats: 1", new="repeats: 2"),
    Edit(name="number of few-shot examples", work="gpu", asked=entry(num_fewshot=0)),
    Edit(name="limit", work="gpu", asked=entry(limit=4)),
    Edit(name="generation settings of the suite", work="gpu", asked=entry(gen_kwargs={"max_gen_toks": 3})),
    Edit(name="system instruction", work="gpu", asked=suite(system_instruction="Be brief.")),
    Edit(name="batch size", work="gpu", asked=suite(batch_size=2)),
    Edit(name="engine's argument", work="gpu", asked=model(model_args={"dtype": "float64"})),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Keys:
    """The identity, and what a build of it finds (None: not built)."""

    evaluation: str
    folder: str
    engine: str
    leaves: dict[str, tuple[str, str]]


def keys_now(folder: Path, asked: Asked, model_dir: Path, known: Keys | None = None) -> Keys:
    """Keys as `evalspan eval` finds them; builds only if `known` has another identity."""
    for module in [m for m in sys.modules if m == "wording" or m.startswith("/")]:
        del sys.modules[module]  # each of an evaluation's processes imports them anew
    path = list(sys.path)
    site = Site(work_dir=str(folder / "work"), trial_command=(sys.executable,), worker_command=())
    inputs = inputs_of(asked.suite, asked.model, site, "0", lambda _suite, _site: None)
    checkpoint = inspect(model_dir, allow_bin=False, step=None)
    identity = evaluation_id(checkpoint, asked.suite, asked.model, None, inputs)
    name = folder_name(asked.suite, 0, checkpoint, asked.model, inputs)
    leaves: dict[str, tuple[str, str]] = {}
    if known is None or known.evaluation != identity:
        spec = BuildSpec(
            name="build",
            evaluation_dir=None,
            suite=asked.suite,
            entry=0,
            batch_size=asked.suite.batch_size,
            model_dir=str(model_dir),
            model=asked.model,
            out_dir=str(site.paths.request_sets / name),
            source=inputs.entries[0].files,
        )
        for task, place in build.build(spec).sets.items():
            manifest = read_record(request_set_manifest(place), RequestSetManifest)
            leaves[task] = (manifest.key, manifest.score_key)
    sys.path[:] = path
    return Keys(
        evaluation=identity, folder=name, engine=f"{asked.model} {asked.suite.batch_size}", leaves=leaves
    )


def decided(before: Keys, after: Keys) -> Work:
    """The work that the keys require."""
    if after.evaluation == before.evaluation:
        return "nothing"
    asked = {task: key for task, (key, _) in after.leaves.items()}
    if after.engine != before.engine or asked != {task: key for task, (key, _) in before.leaves.items()}:
        return "gpu"
    return "rebuild" if after.leaves == before.leaves else "score"
