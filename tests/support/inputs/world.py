"""A world of inputs in a folder: a checkpoint, adapters, tokenizers, packages, tasks, data; and what is asked of it.

Rule: a number of three digits stands in each text whose edit must move a score, so `bump` makes a new text of the same
length each time. Every task's score is made of likelihoods or of answers' digests: any other prompt is another score.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]  # of evalspan's code
ROWS = 4  # of each task's data
BIG_ROWS = 14_000  # of big.jsonl: 1.3 MiB
BLOB_BYTES, BLOB_AT = 17 << 20, 11_000_000  # a file beside a module, and the place that the module reads

HERE = "import sys\nfrom pathlib import Path\n\nsys.path.insert(0, str(Path(__file__).parent))\n"
MULTIPLE = "output_type: multiple_choice\ndoc_to_target: a\ndoc_to_choice: ['no', 'yes']\n"
NUMBER = "metric_list:\n  - {metric: number, aggregation: mean, higher_is_better: true}\n"
CHOSEN = f"include: common/base.yaml\n{MULTIPLE}process_results: !function metrics.chosen\n{NUMBER}"
JSON = "dataset_path: json\ndataset_kwargs: {{data_files: {{test: {}}}}}\n"


def _choice(task: str, data: str, text: str = 'doc_to_text: "{{q}}"', more: str = "") -> str:
    return f"# 100\ntask: {task}\n{CHOSEN}{data}{text}\n{more}"


TASKS = {
    "common/base.yaml": '# 100\ntest_split: test\ndescription: "Say 100. "\nmetadata: {version: 100}\n',
    "choose.yaml": _choice(
        "choose",
        "dataset_path: json\ndataset_kwargs: {data_files: {test: data/choose.jsonl, few: data/few.jsonl}}\nfewshot_split: few\n",
        'doc_to_text: "Question 100: {{q}}"',
    ),
    "count.yaml": "# 100\ninclude: common/base.yaml\ntask: count\ndataset_path: csv\n"
    "dataset_kwargs: {data_files: {test: data/count.csv}}\noutput_type: generate_until\n"
    'doc_to_text: "Count 100: {{q}}"\ndoc_to_target: "{{a}}"\nprocess_results: !function metrics.counted\n'
    "generation_kwargs: {until: ['Q:'], do_sample: false, max_gen_toks: 8}\n"
    "filter_list:\n  - name: first\n    filter: [{function: regex, regex_pattern: '(\\S{1,100})'}, {function: take_first}]\n"
    "metric_list:\n  - {metric: number, aggregation: mean, higher_is_better: true}\n"
    "  - {metric: spread, aggregation: !function metrics.spread, higher_is_better: true}\n",
    "mapped.yaml": _choice("mapped", JSON.format("data/mapped.jsonl"), more="process_docs: !function helper.prep\n"),
    "generated.yaml": _choice("generated", "custom_dataset: !function load.made\n"),
    "opened.yaml": _choice("opened", JSON.format("data/opened.jsonl"), "doc_to_text: !function shown.asked"),
    "packaged.yaml": "# 100\ninclude: common/base.yaml\ntask: packaged\n" + MULTIPLE + NUMBER
    + JSON.format("data/packaged.jsonl")
    + "doc_to_text: !function draftlib.asked\nprocess_results: !function gradelib.graded\n",
    "edited.yaml": _choice("edited", JSON.format("data/packaged.jsonl"), "doc_to_text: !function editlib.asked"),
    "big.yaml": _choice("big", JSON.format("data/big.jsonl"), more="process_docs: !function helper.last\n"),
    "globbed.yaml": _choice("globbed", JSON.format("'parts/*.jsonl'"), more="tag: marked\n"),
    "linked.yaml": _choice("linked", JSON.format("data/linked.jsonl")),
    "gathered.yaml": _choice("gathered", JSON.format("data/gathered.jsonl"), "doc_to_text: !function beside.asked"),
    "hubbed.yaml": _choice("hubbed", "dataset_path: org/rows\n"),
    "most.yaml": "# 100\ngroup: most\ntask: [count, mapped, generated, opened, packaged, edited, big, linked, gathered, hubbed]\n"
    "aggregate_metric_list:\n  - {metric: number, aggregation: mean, weight_by_size: true, filter_list: [none, first]}\nmetadata: {version: 100}\n",
    "other.yaml": "# 100\ntask: other\noutput_type: multiple_choice\n",
    "unused.py": "X = 100\n",
    "metrics.py": "# 100\nimport hashlib\nimport os\n" + HERE
    + "import grading\n\nOUTSIDE = Path(__file__).parents[1] / 'outside' / 'grade.txt'\nSCALE = 100\n\n\n"
    "def base():\n    accepted = int((Path(__file__).parent / 'accepted.txt').read_text()[:3])\n"
    "    return SCALE + grading.MORE + accepted + int(OUTSIDE.read_text()[:3]) + int(os.environ.get('GRADE', '0'))\n\n\n"
    "def chosen(doc, results):\n    return {'number': base() * (sum(likelihood for likelihood, _ in results) + doc['a'])}\n\n\n"
    "def counted(doc, results):\n    digest = int(hashlib.sha256(results[0].encode()).hexdigest()[:6], 16)\n"
    "    value = float(base() * (digest % 99991 + int(doc['a'])))\n    return {'number': value, 'spread': value}\n\n\n"
    "def spread(values):\n    return max(values) - min(values) + 100\n",
    "grading.py": "# 100\nMORE = 100\n",
    "accepted.txt": "100\n",
    "helper.py": "# 100\n" + HERE
    + "import deeper\n\n\ndef prep(docs):\n"
    "    kept = docs.filter(lambda row: row['n'] >= deeper.FIRST % 3)\n"
    "    return kept.map(lambda row: {**row, 'q': deeper.before(row['q'])})\n\n\n"
    "def last(docs):\n    return docs.select(range(len(docs) - 4, len(docs)))\n",
    "deeper.py": "# 100\nFIRST = 100\nBEFORE = 'Well 100, '\nFROM = 100\n\n\ndef before(text):\n    return BEFORE + text\n",
    "load.py": "# 100\n" + HERE + "import datasets\nimport deeper\n\nOUTSIDE = Path(__file__).parents[1] / 'outside' / 'rows.txt'\n\n\n"
    "def rows():\n    word = OUTSIDE.read_text().strip()\n    for number in range(4):\n"
    "        yield {'q': f'the {word} {deeper.FROM + number} breaks', 'a': number % 2}\n\n\n"
    "def made(**_):\n    return {'test': datasets.Dataset.from_generator(rows)}\n",
    "shown.py": "# 100\nimport os\nfrom pathlib import Path\n\nOUTSIDE = Path(__file__).parents[1] / 'outside'\nSTYLE = (OUTSIDE / 'style.txt').read_text().strip()\n\n\n"
    "def asked(doc):\n    return f\"{STYLE} 100 {os.environ.get('PROMPT_STYLE', 'plainly')}: {doc['q']}\"\n",
    "beside.py": "# 100\nfrom pathlib import Path\n\nHERE = Path(__file__).parent\n\n\ndef asked(doc):\n"
    "    with (HERE / 'blob.bin').open('rb') as file:\n"
    f"        file.seek({BLOB_AT})\n        word = file.read(8).decode()\n"
    "    names = ' '.join(sorted(path.stem for path in (HERE / 'extras').glob('*.txt')))\n"
    "    return f\"{names} {word} {doc['q']}\"\n",
    "extras/one.txt": "one\n",
}  # fmt: skip

PACKAGES = {  # name -> text; in site-packages, but for `editlib`, which is installed in place
    "gradelib": "def graded(doc, results):\n    return {'number': 100 * (sum(likelihood for likelihood, _ in results) + doc['a'])}\n",
    "draftlib": "def asked(doc):\n    return 'Draft 100: ' + doc['q']\n",
    "editlib": "from editlib.words import BEFORE\n\n\ndef asked(doc):\n    return BEFORE + doc['q']\n",
}


def jsonl(word: str, first: int, count: int = ROWS) -> str:
    lines = (
        {"n": i, "q": f"the {word} {first + i:05d} breaks", "a": i % 2, "note": "x100"} for i in range(count)
    )
    return "".join(json.dumps(line) + "\n" for line in lines)


@dataclass
class World:
    """The folder, and the settings that the suite and evalspan.toml say."""

    folder: Path
    suite: dict[str, Any] = field(default_factory=dict)  # but its tasks
    entries: dict[str, dict[str, Any]] = field(
        default_factory=lambda: {"choose": {"num_fewshot": 1}, "most": {}, "marked": {}}
    )
    model: str = "model"
    model_args: dict[str, Any] = field(default_factory=dict)  # a path relative to the folder begins with "./"
    trial_env: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)  # of the command itself
    exports: dict[str, str] = field(default_factory=dict)  # by the prologue
    settings: dict[str, str] = field(default_factory=dict)  # dotted key -> TOML text
    newer: bool = False  # another transformers stands before the installed one
    kept: dict[str, Any] = field(default_factory=dict)  # counters of edits

    # --- files ---------------------------------------------------------------------------------------------------

    def path(self, name: str) -> Path:
        return self.folder / name

    def write(self, name: str, text: str) -> None:
        self.path(name).parent.mkdir(parents=True, exist_ok=True)
        self.path(name).write_text(text)

    def bump(self, name: str, before: str, *, stat: bool = False) -> None:
        """Count up the digits after `before`, at its first place. `stat`: size and times stay as they are."""
        path = self.path(name)
        was, text = path.stat(), path.read_text()
        changed, count = re.subn(
            f"(?<={re.escape(before)})\\d+", lambda m: f"{int(m[0]) + 1:0{len(m[0])}d}", text, count=1
        )
        assert count, f"{name}: no number after {before!r}"
        path.write_text(changed)
        if stat:
            assert path.stat().st_size == was.st_size
            os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))

    def poke(self, name: str, at: int, content: bytes, *, stat: bool = True) -> None:
        """Write bytes at a place of a file."""
        path = self.path(name)
        was = path.stat()
        with path.open("r+b") as file:
            file.seek(at)
            file.write(content)
        if stat:
            os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))

    def count(self, name: str) -> int:
        """1, 2, … at each call."""
        self.kept[name] = self.kept.get(name, 0) + 1
        return int(self.kept[name])

    # --- what is asked -------------------------------------------------------------------------------------------

    @property
    def tasks(self) -> Path:
        return self.folder / "tasks"

    @property
    def hf_home(self) -> Path:
        return Path(self.exports.get("HF_HOME", self.folder / "hf"))

    def arguments(self) -> dict[str, Any]:
        """Model arguments with full paths."""
        return {
            key: str(self.folder / value[2:]) if isinstance(value, str) and value.startswith("./") else value
            for key, value in self.model_args.items()
        }

    def environment(self) -> dict[str, str]:
        """Of the command, as a login shell has it: no variable of this process but where programs are."""
        path = [
            *([str(self.folder / "newer")] if self.newer else ()),
            str(self.folder / "site-packages"),
            str(self.folder / "src"),
            str(ROOT),
        ]
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder / "home"),
            "LANG": "C.UTF-8",
            "PYTHONPATH": os.pathsep.join(path),
            "PYTHONDONTWRITEBYTECODE": "1",  # two edits within one second are two modules
            "OMP_NUM_THREADS": "1",
            "HF_HOME": str(self.folder / "hf"),
            **dict.fromkeys(
                ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE", "TQDM_DISABLE"), "1"
            ),
            "TOKENIZERS_PARALLELISM": "false",
            "NO_COLOR": "1",
            "COLUMNS": "200",
            **self.env,
        }

    def write_settings(self, warm: str) -> None:
        """evalspan.toml and suite.toml. `warm`: the command that stands before the interpreter's, "" for none."""
        lines = [f"{key} = {json.dumps(value)}" for key, value in self.suite.items()]
        for name, entry in self.entries.items():
            lines += ["[[task]]", f"name = {json.dumps(name)}"]
            lines += [f"{key} = {_toml(value)}" for key, value in entry.items()]
        head = ['name = "inputs"', f"include_path = [{json.dumps(str(self.tasks))}]", "batch_size = 1"]
        self.write("suite.toml", "\n".join([*head, *lines]) + "\n")
        prologue = "".join(f"export {name}={value}\n" for name, value in self.exports.items())
        prologue += f'exec {warm} "$@"\n' if warm else ""
        settings = {
            "trial.threads": "1",
            "trial.device": '"cpu"',
            "trial.memory_mb": "2000",
            "trial.model_args": _toml(self.arguments()),
            "trial.env": _toml(self.trial_env),
            "trial.prologue": json.dumps(prologue),
            "metric.bootstrap_iters": "0",
            "metric.workers": "1",
            "metric.memory_mb": "2000",
            "cluster.poll_seconds": "1.0",
            "cluster.slots": "1",
            "cluster.export": '["PROMPT_*", "GRADE"]',
            **self.settings,
        }
        sections: dict[str, list[str]] = {}
        for key, value in settings.items():
            section, _, name = key.partition(".")
            sections.setdefault(section, []).append(f"{name} = {value}")
        self.write(
            "evalspan.toml",
            "\n".join(line for name, rows in sections.items() for line in [f"[{name}]", *rows]) + "\n",
        )


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    return json.dumps(value)


# --- making it -------------------------------------------------------------------------------------------------------


def make(folder: Path) -> World:
    """A new world."""
    folder.mkdir(parents=True, exist_ok=True)
    world = World(folder=folder)
    for name, text in TASKS.items():
        world.write(f"tasks/{name}", text)
    for first, name in enumerate(("choose", "few", "mapped", "opened", "packaged", "gathered")):
        world.write(f"tasks/data/{name}.jsonl", jsonl("river", 1000 * first, 8 if name == "few" else ROWS))
    world.write(
        "tasks/data/count.csv", "q,a\n" + "".join(f"the stone {100 + i} sings,{100 + i}\n" for i in range(4))
    )
    world.write("tasks/data/big.jsonl", jsonl("hill", 0, BIG_ROWS))
    for part in ("one", "two"):
        world.write(f"tasks/parts/{part}.jsonl", jsonl(part, 100, 2))
        world.write(f"outside/{part}.jsonl", jsonl(f"road {part}", 100))
    world.path("tasks/data/linked.jsonl").symlink_to("../../outside/one.jsonl")
    for name, text in {"style": "Style 100", "rows": "river 100", "grade": "100"}.items():
        world.write(f"outside/{name}.txt", text + "\n")
    world.path("tasks/blob.bin").write_bytes(b"x" * BLOB_BYTES)
    world.path("home").mkdir()
    for name, text in PACKAGES.items():
        install(world, name, "1.0", text)
    world.write("src/editlib/words.py", "# 100\nBEFORE = 'Edited 100: '\n")
    _models(world)
    for name, source in (("models--org--adapter", "adapter"), ("models--org--tok", "tok")):
        revise(world.hf_home / "hub" / name, world.path(source))
    revise_rows(world)
    return world


def install(world: World, name: str, version: str, text: str) -> None:
    """As pip does: the package's files, and dist-info with METADATA and RECORD; `editlib` by a link to its source."""
    editable = name == "editlib"
    home = world.path("src" if editable else "site-packages") / name
    shutil.rmtree(home, ignore_errors=True) if not editable else None
    home.mkdir(parents=True, exist_ok=True)
    (home / "__init__.py").write_text(text)
    for old in world.path("site-packages").glob(f"{name}-*.dist-info"):
        shutil.rmtree(old)
    info = world.path("site-packages") / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "top_level.txt").write_text(f"{name}\n")
    (info / "INSTALLER").write_text("pip\n")
    direct = {"url": f"file://{home.parent}", "dir_info": {"editable": True}}
    if editable:
        (info / "direct_url.json").write_text(json.dumps(direct))
    files = [] if editable else [f"{name}/__init__.py,sha256={_sha(text)},{len(text)}"]
    (info / "RECORD").write_text(
        "\n".join([*files, f"{info.name}/METADATA,,", f"{info.name}/RECORD,,"]) + "\n"
    )


def _sha(text: str) -> str:
    import base64
    import hashlib

    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def _models(world: World) -> None:
    """The checkpoint, a tokenizer of its own and two adapters, by one import of torch."""
    from support.exactness import tiny_model

    corpus = [f"the river {i} breaks, the stone {i} sings, say yes or no." for i in range(200)]
    tiny_model.make(world.path("model"), corpus)
    tiny_model.make(world.path("other"), corpus, seed=8)
    other = tiny_model.make(world.path("made"), [text.upper() + text for text in corpus], vocabulary=480)
    world.path("tok").mkdir()
    for file in (*other.glob("*token*"), other / "config.json"):  # transformers looks for it on the Hub
        shutil.copy(file, world.path("tok"))
    for file in other.glob("chat_template*"):
        shutil.copy(file, world.path("tok"))
    shutil.rmtree(other)
    for name, seed in (("adapter", 1), ("adapter-2", 2)):
        make_adapter(world, name, seed)


def make_adapter(world: World, name: str, seed: int) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    lora = LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    get_peft_model(AutoModelForCausalLM.from_pretrained(world.path("model")), lora).save_pretrained(
        world.path(name)
    )


def revise(repository: Path, source: Path) -> None:
    """A further revision in the Hub's cache, to which main moves."""
    number = len(list(repository.glob("snapshots/*"))) + 1
    commit = f"{number:040x}"
    shutil.copytree(source, repository / "snapshots" / commit)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(commit)


def revise_rows(world: World) -> None:
    """A further revision of the data set org/rows, prepared as `datasets` does, to which main moves."""
    import datasets
    from datasets.splits import SplitDict, SplitInfo

    hub = world.hf_home / "hub" / "datasets--org--rows"
    number = len(list(hub.glob("snapshots/*"))) + 1
    world.write("rows.jsonl", jsonl("lake", 100 * number))
    commit = f"{number:040x}"
    (hub / "snapshots" / commit).mkdir(parents=True)
    shutil.copy(world.path("rows.jsonl"), hub / "snapshots" / commit / "test.jsonl")
    (hub / "refs").mkdir(exist_ok=True)
    (hub / "refs" / "main").write_text(commit)
    rows = datasets.Dataset.from_list(
        [json.loads(line) for line in world.path("rows.jsonl").read_text().splitlines()]
    )
    place = world.hf_home / "datasets" / "org___rows" / "default" / "0.0.0" / commit
    place.mkdir(parents=True)
    from datasets.arrow_writer import ArrowWriter

    with ArrowWriter(path=str(place / "rows-test.arrow"), features=rows.features) as writer:
        for line in rows:
            writer.write(line)
        writer.finalize()
    splits = SplitDict(dataset_name="rows")
    splits.add(SplitInfo(name="test", num_examples=len(rows), num_bytes=1, dataset_name="rows"))
    info = datasets.DatasetInfo(
        features=rows.features, builder_name="json", dataset_name="rows", config_name="default",
        version="0.0.0", splits=splits,
    )  # fmt: skip
    info.write_to_directory(str(place))


def newer_transformers(world: World) -> None:
    """`newer/`: transformers of a later version, with another constant in Llama's norm; other files are links."""
    import importlib.metadata
    import importlib.util

    found = importlib.util.find_spec("transformers")
    assert found is not None
    assert found.origin is not None
    real, place = Path(found.origin).parent, world.path("newer/transformers")
    for folder in ("", "models", "models/llama"):
        (place / folder).mkdir(parents=True)
        for file in (real / folder).iterdir():
            if str(Path(folder) / file.name) not in ("models", "models/llama", "__pycache__"):
                (place / folder / file.name).symlink_to(file)
    version = importlib.metadata.version("transformers")
    for name, old, new in (
        ("__init__.py", f'__version__ = "{version}"', '__version__ = "99.0.0"'),
        (
            "models/llama/modeling_llama.py",
            "self.variance_epsilon = eps",
            "self.variance_epsilon = eps + 0.01",
        ),
    ):
        text = (real / name).read_text()
        assert old in text, (name, old)
        (place / name).unlink()
        (place / name).write_text(text.replace(old, new))
    info = world.path("newer/transformers-99.0.0.dist-info")
    shutil.copytree(Path(str(importlib.metadata.distribution("transformers")._path)), info)  # type: ignore[attr-defined]
    text = (info / "METADATA").read_text()
    (info / "METADATA").write_text(text.replace(f"Version: {version}", "Version: 99.0.0", 1))
