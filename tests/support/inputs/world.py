"""A world of inputs in a folder: a checkpoint, adapters, tokenizers, packages, tasks, data; and what is asked of it.

Rule: a number of three digits stands in each text whose edit must move a score, so `bump` makes a new text of the same
length each time. Every task's score is made of likelihoods or of answers' digests: any other prompt is another score.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
from collections import Counter
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


def _choice(task, data, text='doc_to_text: "{{q}}"', more=""):
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
    "probed.yaml": _choice("probed", JSON.format("data/probed.jsonl"), more="process_docs: !function probes.prep\n"),
    "most.yaml": "# 100\ngroup: most\ntask: [count, mapped, generated, opened, packaged, edited, big, linked, gathered, hubbed, probed]\n"
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
    # each look is that of a child which `map` forks
    "probes.py": "# 100\nimport os\nfrom pathlib import Path\n\nimport numpy\n\nOUTSIDE = Path(__file__).parents[1] / 'outside'\n\n\n"
    "def late():\n    try:\n        return (OUTSIDE / 'late.txt').read_text().strip()\n    except FileNotFoundError:\n        return 'early'\n\n\n"
    "def before(row):\n    forked = (OUTSIDE / 'forked.txt').read_text().strip()\n"
    "    number = int(numpy.memmap(OUTSIDE / 'numbers.bin', dtype='uint8')[0])\n"
    "    names = ' '.join(sorted(os.listdir(OUTSIDE / 'prompts')))\n"
    "    return {**row, 'q': f\"{names} {number} {late()} {forked}: {row['q']}\"}\n\n\n"
    "def prep(docs):\n    return docs.map(before, num_proc=2)\n",
}  # fmt: skip

PACKAGES = {  # name -> text; in site-packages, but for `editlib`, which is installed in place
    "gradelib": "def graded(doc, results):\n    return {'number': 100 * (sum(likelihood for likelihood, _ in results) + doc['a'])}\n",
    "draftlib": "def asked(doc):\n    return 'Draft 100: ' + doc['q']\n",
    "editlib": "from editlib.words import BEFORE\n\n\ndef asked(doc):\n    return BEFORE + doc['q']\n",
}


def jsonl(word, first, count=ROWS):
    line = '{{"n": {0}, "q": "the {1} {2:05d} breaks", "a": {3}, "note": "x100"}}\n'
    return "".join(line.format(i, word, first + i, i % 2) for i in range(count))


def kept(path, content):
    """Another content of the same size, with the times of the old one."""
    was = path.stat()
    path.write_bytes(content)
    assert path.stat().st_size == was.st_size, path
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))


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
    counts: Counter[str] = field(default_factory=Counter)  # of edits

    # --- files ---------------------------------------------------------------------------------------------------

    def path(self, name):
        return self.folder / name

    def write(self, name, text):
        self.path(name).parent.mkdir(parents=True, exist_ok=True)
        self.path(name).write_text(text)

    def bump(self, name, before, *, stat=False):
        """Count up the digits after `before`, at its first place. `stat`: size and times stay as they are."""
        path = self.path(name)
        changed, count = re.subn(
            f"(?<={re.escape(before)})\\d+",
            lambda m: f"{int(m[0]) + 1:0{len(m[0])}d}",
            path.read_text(),
            count=1,
        )
        assert count, f"{name}: no number after {before!r}"
        kept(path, changed.encode()) if stat else path.write_text(changed)

    def poke(self, name, at, content):
        """Write bytes at a place of a file; its times stay as they are."""
        whole = bytearray(self.path(name).read_bytes())
        whole[at : at + len(content)] = content
        kept(self.path(name), whole)

    def count(self, name):
        """1, 2, … at each call."""
        self.counts[name] += 1
        return self.counts[name]

    # --- what is asked -------------------------------------------------------------------------------------------

    @property
    def tasks(self):
        return self.folder / "tasks"

    @property
    def hf_home(self):
        return Path(self.exports.get("HF_HOME", self.folder / "hf"))

    def arguments(self):
        """Model arguments with full paths."""
        return {
            key: str(self.folder / value[2:]) if str(value).startswith("./") else value
            for key, value in self.model_args.items()
        }

    def environment(self):
        """Of the command, as a login shell has it: no variable of this process but where programs are."""
        path = [*(["newer"] if self.newer else ()), "site-packages", "src"]
        ones = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE", "TQDM_DISABLE", "NO_COLOR")
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder / "home"),
            "LANG": "C.UTF-8",
            "PYTHONPATH": os.pathsep.join([*(str(self.folder / place) for place in path), str(ROOT)]),
            "PYTHONDONTWRITEBYTECODE": "1",  # two edits within one second are two modules
            "OMP_NUM_THREADS": "1",
            "HF_HOME": str(self.folder / "hf"),
            "TOKENIZERS_PARALLELISM": "false",
            "COLUMNS": "200",
            **dict.fromkeys(ones, "1"),
            **self.env,
        }

    def write_settings(self, warm):
        """evalspan.toml and suite.toml. `warm`: the command that stands before the interpreter's, "" for none."""
        suite = {"name": "inputs", "include_path": [str(self.tasks)], "batch_size": 1, **self.suite}
        lines = [f"{key} = {_toml(value)}" for key, value in suite.items()]
        for name, entry in self.entries.items():
            lines += [
                "[[task]]",
                *(f"{key} = {_toml(value)}" for key, value in {"name": name, **entry}.items()),
            ]
        self.write("suite.toml", "\n".join(lines) + "\n")
        prologue = "".join(f"export {name}={value}\n" for name, value in self.exports.items())
        prologue += f'exec {warm} "$@"\n' if warm else ""
        trial = {"threads": 1, "device": "cpu", "memory_mb": 2000, "prologue": prologue}
        trial |= {"model_args": self.arguments(), "env": self.trial_env}
        metric = {"bootstrap_iters": 0, "workers": 1, "memory_mb": 2000}
        cluster = {"poll_seconds": 1.0, "slots": 1, "export": ["PROMPT_*", "GRADE"]}
        tables = {"trial": trial, "metric": metric, "cluster": cluster}
        lines = [f"{table}.{key} = {_toml(v)}" for table, rows in tables.items() for key, v in rows.items()]
        lines += [f"{key} = {value}" for key, value in self.settings.items()]
        self.write("evalspan.toml", "\n".join(lines) + "\n")


def _toml(value):
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    return json.dumps(value)


# --- making it -------------------------------------------------------------------------------------------------------


def make(folder):
    """A new world."""
    folder.mkdir(parents=True, exist_ok=True)
    world = World(folder=folder)
    for name, text in TASKS.items():
        world.write(f"tasks/{name}", text)
    for first, name in enumerate(("choose", "few", "mapped", "opened", "packaged", "gathered", "probed")):
        world.write(f"tasks/data/{name}.jsonl", jsonl("river", 1000 * first, 8 if name == "few" else ROWS))
    rows = "".join(f"the stone {100 + i} sings,{100 + i}\n" for i in range(4))
    world.write("tasks/data/count.csv", f"q,a\n{rows}")
    world.write("tasks/data/big.jsonl", jsonl("hill", 0, BIG_ROWS))
    for part in ("one", "two"):
        world.write(f"tasks/parts/{part}.jsonl", jsonl(part, 100, 2))
        world.write(f"outside/{part}.jsonl", jsonl(f"road {part}", 100))
    world.path("tasks/data/linked.jsonl").symlink_to("../../outside/one.jsonl")
    for name, text in {
        "style": "Style 100",
        "rows": "river 100",
        "grade": "100",
        "forked": "Fork 100",
    }.items():
        world.write(f"outside/{name}.txt", text + "\n")
    world.write("outside/prompts/one.yaml", "one\n")
    world.path("outside/numbers.bin").write_bytes(b"\0" * 8)
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


def install(world, name, version, text):
    """As pip does: the package's files, and dist-info with METADATA and RECORD; `editlib` by a link to its source."""
    editable = name == "editlib"
    world.write(f"{'src' if editable else 'site-packages'}/{name}/__init__.py", text)
    for old in world.path("site-packages").glob(f"{name}-*.dist-info"):
        shutil.rmtree(old)
    info = f"{name}-{version}.dist-info"
    digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
    own = "" if editable else f"{name}/__init__.py,sha256={digest},{len(text)}\n"
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        "top_level.txt": f"{name}\n",
        "INSTALLER": "pip\n",
        "RECORD": f"{own}{info}/METADATA,,\n{info}/RECORD,,\n",
    }
    if editable:
        direct = {"url": f"file://{world.path('src')}", "dir_info": {"editable": True}}
        files["direct_url.json"] = json.dumps(direct)
    for file, content in files.items():
        world.write(f"site-packages/{info}/{file}", content)


def _models(world):
    """The checkpoint, a tokenizer of its own and an adapter, by one import of torch."""
    from support.exactness import tiny_model

    corpus = [f"the river {i} breaks, the stone {i} sings, say yes or no." for i in range(200)]
    tiny_model.make(world.path("model"), corpus)
    tiny_model.make(world.path("tok"), [text.upper() + text for text in corpus], vocabulary=480)
    for file in world.path("tok").glob(
        "*.safetensors"
    ):  # config.json stays: transformers looks for it on the Hub
        file.unlink()
    make_adapter(world, "adapter", 1)


def make_adapter(world, name, seed):
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(world.path("model"))
    lora = LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    get_peft_model(model, lora).save_pretrained(world.path(name))


def _move_main(repository):
    """The folder, not made yet, of a further revision in the Hub's cache, to which main moves."""
    commit = f"{len(list(repository.glob('snapshots/*'))) + 1:040x}"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text(commit)
    return repository / "snapshots" / commit


def revise(repository, source):
    shutil.copytree(source, _move_main(repository))


def revise_rows(world):
    """A further revision of the data set org/rows, prepared as `datasets` does, to which main moves."""
    from datasets.packaged_modules.json.json import Json

    snapshot = _move_main(world.hf_home / "hub" / "datasets--org--rows")
    snapshot.mkdir(parents=True)
    (snapshot / "test.jsonl").write_text(jsonl("lake", 100 * int(snapshot.name, 16)))
    made = Json(
        dataset_name="rows",
        data_files={"test": [str(snapshot / "test.jsonl")]},
        cache_dir=str(world.path("made")),
    )
    place = world.hf_home / "datasets" / "org___rows" / "default" / "0.0.0" / snapshot.name
    made.download_and_prepare(str(place))


def newer_transformers(world):
    """`newer/`: transformers of a later version, with another constant in Llama's norm; other files are links."""
    found = importlib.metadata.distribution("transformers")
    real, place = Path(str(found.locate_file("transformers"))), world.path("newer/transformers")
    edited = {
        "__init__.py": (f'__version__ = "{found.version}"', '__version__ = "99.0.0"'),
        "models/llama/modeling_llama.py": (
            "self.variance_epsilon = eps",
            "self.variance_epsilon = eps + 0.01",
        ),
    }
    for folder in ("", "models", "models/llama"):
        (place / folder).mkdir(parents=True)
        for file in (real / folder).iterdir():
            name = str(file.relative_to(real))
            if name in edited:
                text, (old, new) = file.read_text(), edited[name]
                assert old in text, (name, old)
                (place / name).write_text(text.replace(old, new))
            elif name not in ("models", "models/llama", "__pycache__"):
                (place / name).symlink_to(file)
    metadata = found.read_text("METADATA") or ""
    info = world.path("newer/transformers-99.0.0.dist-info")
    shutil.copytree(Path(str(found.locate_file(f"transformers-{found.version}.dist-info"))), info)
    (info / "METADATA").write_text(metadata.replace(f"Version: {found.version}", "Version: 99.0.0", 1))
