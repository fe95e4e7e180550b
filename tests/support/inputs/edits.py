"""The table: which input changes which key. Each row is an edit of one input of a world, each time to another value.

Rule: `changes` names the keys that must become others, `may` those that may; all others must stay. `tasks`: whose keys.
A GPU may answer again for `tasks` where "request" or "weights" is among them, and for no other task.

    found     known only to a build or a scoring; the id of what is asked again depends on what earlier ones showed
    id        the evaluation's id
    set       the name of a request set
    request   the request digest, or the engine's versions beside it
    score     the score key
    weights   the checkpoint's or the adapter's weights
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.inputs.world import (
    BLOB_AT,
    PACKAGES,
    World,
    install,
    jsonl,
    make_adapter,
    newer_transformers,
    revise,
    revise_rows,
)

MOST = ("count", "mapped", "generated", "opened", "packaged", "edited", "big", "linked", "gathered", "hubbed")
ALL = ("choose", *MOST, "globbed", "tagged")
METRICS = tuple(task for task in ALL if task != "packaged")  # scored by metrics.py
Do = Callable[[World], object]


@dataclass(frozen=True)
class Edit:
    name: str
    do: Do
    changes: str = ""
    tasks: tuple[str, ...] = ()
    may: str = ""

    @property
    def found(self) -> bool:
        return "found" in self.changes.split()

    @property
    def gpu(self) -> tuple[str, ...]:
        """Tasks that a GPU may answer again."""
        return self.tasks if {"request", "weights"} & {*self.changes.split()} else ()


COMMENT, SCORE, REQUEST = "id", "id score", "id set request"
FOUND_COMMENT, FOUND_SCORE, FOUND_REQUEST = (f"found {keys}" for keys in (COMMENT, SCORE, REQUEST))
# A comment may stand in the name of a set, and a changed prompt may be a changed score.
ROWS: list[Edit] = []


def row(name: str, changes: str, tasks: str | tuple[str, ...], do: Do, may: str | None = None) -> None:
    if may is None:
        may = "score" if "request" in changes else "set" if changes else ""
    named = tuple(tasks.split()) if isinstance(tasks, str) else tasks
    assert name not in {edit.name for edit in ROWS}, name
    ROWS.append(Edit(name, do, changes, named, may))


def bump(file: str, before: str, *, stat: bool = False) -> Do:
    return lambda w: w.bump(file, before, stat=stat)


def touch(name: str) -> Do:
    return lambda w: os.utime(w.path(name))


def touch_below(name: str) -> Do:
    return lambda w: [os.utime(file) for file in w.path(name).iterdir()]


def append(name: str, text: str) -> Do:
    def do(w: World) -> None:
        with w.path(name).open("a") as file:
            file.write(text)

    return do


def setting(kind: str, key: str, *values: Any) -> Do:
    """The next of these values, of a dictionary of the world; None: away."""

    def do(w: World) -> None:
        held = getattr(w, kind)
        value = values[w.count(f"{kind} {key}") % len(values)]
        held.pop(key, None) if value is None else held.update({key: value})

    return do


def of_entry(entry: str, key: str, *values: Any) -> Do:
    def do(w: World) -> None:
        value = values[w.count(f"{entry} {key}") % len(values)]
        w.entries[entry].pop(key, None) if value is None else w.entries[entry].update({key: value})

    return do


def same_bytes(name: str) -> Do:
    return lambda w: w.path(name).write_bytes(w.path(name).read_bytes())


def swap(name: str, one: str, other: str) -> Do:
    def do(w: World) -> None:
        text = w.path(name).read_text()
        assert one in text or other in text, name
        w.path(name).write_text(text.replace(one, other, 1) if one in text else text.replace(other, one, 1))

    return do


def _kept(path: Path, content: bytes, *, stat: bool) -> None:
    was = path.stat()
    path.write_bytes(content)
    if stat:
        assert path.stat().st_size == was.st_size, path
        os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))


def _move_link(w: World) -> None:
    link = w.path("tasks/data/linked.jsonl")
    other = "two" if link.readlink().name == "one.jsonl" else "one"
    link.unlink()
    link.symlink_to(f"../../outside/{other}.jsonl")


def _adapter(w: World) -> Path:
    named = str(w.model_args.setdefault("peft", "./adapter"))
    if not named.startswith("./"):
        w.model_args["peft"] = named = "./adapter"
    return w.folder / named


def _tensors(path: Path) -> tuple[Path, dict[str, Any]]:
    from safetensors.torch import load_file

    return path, load_file(path)


def _retrain(w: World, *, stat: bool) -> None:
    place = _adapter(w)
    make_adapter(w, "trained", 10 + w.count("trained"))
    _kept(
        place / "adapter_model.safetensors",
        w.path("trained/adapter_model.safetensors").read_bytes(),
        stat=stat,
    )


def _alpha(w: World) -> None:
    path = _adapter(w) / "adapter_config.json"
    path.write_text(_replaced(path, '"lora_alpha": ', f"{8 + w.count('alpha')}"))


def _replaced(path: Path, before: str, value: str) -> str:
    text, count = re.subn(f"(?<={re.escape(before)})[^,\n]+", value, path.read_text(), count=1)
    assert count, (path, before)
    return text


def _copy_adapter(w: World) -> None:
    """Names the copy where an adapter of a folder is named."""
    named = str(w.model_args.get("peft", ""))
    name = f"copied-adapter-{w.count('copied adapter')}"
    shutil.copytree(w.folder / (named if named.startswith("./") else "adapter"), w.path(name))
    if named.startswith("./"):
        w.model_args["peft"] = f"./{name}"


def _revise_adapter(w: World) -> None:
    w.model_args["peft"] = "org/adapter"
    make_adapter(w, "trained", 100 + w.count("hub adapter"))
    revise(w.hf_home / "hub" / "models--org--adapter", w.path("trained"))


def _retoken(path: Path, number: int, *, stat: bool = False) -> None:
    """Swap the ids of words with one letter and of those with another."""
    text = path.read_text()
    table = json.loads(text)
    vocabulary = table["model"]["vocab"]
    letters = "theraivbks"
    one, other = letters[number % 10], letters[(number + 1 + number // 10) % 10]
    for word in list(vocabulary):
        pair = word.replace(one, "\0").replace(other, one).replace("\0", other)
        if pair in vocabulary and word < pair:
            vocabulary[word], vocabulary[pair] = vocabulary[pair], vocabulary[word]
    changed = json.dumps(table, indent=2, ensure_ascii=False)
    if stat:
        changed = changed.ljust(len(text))
    _kept(path, changed.encode(), stat=stat and len(changed.encode()) == path.stat().st_size)


def _revise_tokenizer(w: World) -> None:
    w.model_args["tokenizer"] = "org/tok"
    shutil.copytree(w.path("tok"), w.path("newtok"), dirs_exist_ok=True)
    _retoken(w.path("newtok/tokenizer.json"), 20 + w.count("hub tok"))
    revise(w.hf_home / "hub" / "models--org--tok", w.path("newtok"))


def _noise(w: World, *, stat: bool) -> None:
    from safetensors.torch import save

    path, tensors = _tensors(w.path(w.model) / "model.safetensors")
    scale = 1 + 0.01 * w.count("noise")
    _kept(path, save({k: v * scale for k, v in tensors.items()}, {"format": "pt"}), stat=stat)


def _reverse(w: World) -> None:
    from safetensors.torch import save

    path, tensors = _tensors(w.path(w.model) / "model.safetensors")
    name = sorted(k for k in tensors if "q_proj" in k or "up_proj" in k)[w.count("reversed") % 4]
    tensors[name] = tensors[name].flip(0).contiguous()
    was = path.stat()
    path.write_bytes(save(tensors, {"format": "pt"}))
    assert path.stat().st_size == was.st_size
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))


def _copy_model(w: World) -> None:
    name = f"model-{w.count('copied model')}"
    shutil.copytree(w.path(w.model), w.path(name))
    w.model = name


def _config(w: World, *, stat: bool) -> None:
    path = w.path(f"{w.model}/config.json")
    if stat:
        w.bump(f"{w.model}/config.json", '"rope_theta": ', stat=True)
    else:
        path.write_text(_replaced(path, '"rope_theta": ', f"{20000 + 1000 * w.count('rope')}.0"))


def _penalty(w: World) -> None:
    path = w.path(f"{w.model}/generation_config.json")
    table = json.loads(path.read_text())
    table["repetition_penalty"] = 1.1 + 0.3 * w.count("penalty")
    path.write_text(json.dumps(table))


def _move_hub(w: World) -> None:
    number = w.count("hub")
    new = w.folder / f"hf-{number}"
    shutil.copytree(w.hf_home / "hub", new / "hub", symlinks=True)
    shutil.copytree(w.hf_home / "datasets" / "org___rows", new / "datasets" / "org___rows")
    w.exports["HF_HOME"] = str(new)


def _token(w: World) -> None:
    w.write("token", f"hf_{w.count('token')}")
    w.path("token").chmod(0o600)
    w.exports["HF_TOKEN"] = f"$(cat {w.path('token')})"


def _upgrade(w: World) -> None:
    if not w.path("newer").exists():
        newer_transformers(w)
    w.newer = not w.newer


# fmt: off
# --- what changes nothing --------------------------------------------------------------------------------------------

row("the same bytes of a module written again", "", "", same_bytes("tasks/deeper.py"))
row("YAML touched", "", "", touch("tasks/choose.yaml"))
row("data touched", "", "", touch("tasks/data/choose.jsonl"))
row("module touched", "", "", touch("tasks/helper.py"))
row("outside file touched", "", "", touch("outside/style.txt"))
row("large file touched", "", "", touch("tasks/blob.bin"), may="id set")
row("another task's YAML edited", "", "", bump("tasks/other.yaml", "# "))
row("another task added", "", "", lambda w: w.write(f"tasks/new{w.count('new')}.yaml", "task: new\noutput_type: multiple_choice\n"))
row("Hub's progress bars in [trial] env", "", "", setting("trial_env", "HF_HUB_DISABLE_PROGRESS_BARS", "1", "0"))
row("Hub's token by the prologue", "", "", _token, may="id set")
row("Hub's token in the environment", "", "", lambda w: w.env.update(HF_TOKEN=f"hf_{w.count('other token')}"))
row("Hub's endpoint in the environment", "", "", lambda w: w.env.update(HF_ENDPOINT=f"http://127.0.0.1:{w.count('port')}"))
row("weights not staged", "", "", setting("settings", "stage.enabled", "true", "false"))
row("weights staged again", "", "", setting("settings", "stage.enabled", "true", "false"))

# --- what is built or scored again, without another digit ------------------------------------------------------------

row("module edited that no other imports", "", "", bump("tasks/unused.py", "X = "), may="id set")
row("comment of a YAML", COMMENT, "choose", bump("tasks/choose.yaml", "# "))
row("comment of an included YAML", COMMENT, ALL, bump("tasks/common/base.yaml", "# "))
row("comment of a group", COMMENT, MOST, bump("tasks/most.yaml", "# "))
row("comment of a module", COMMENT, MOST, bump("tasks/helper.py", "# "))
row("comment of an imported module", COMMENT, MOST, bump("tasks/deeper.py", "# "))
row("comment of a scorer", COMMENT, ALL, bump("tasks/metrics.py", "# "))
row("comment of an editable package", FOUND_COMMENT, "edited", bump("src/editlib/words.py", "# "), may="set score")
row("blank lines of a YAML", COMMENT, "count", append("tasks/count.yaml", "\n"))
row("variable that nothing reads in [trial] env", COMMENT, ALL, lambda w: w.trial_env.update(UNUSED=str(w.count("unused"))), may="set score")
row("a column that no prompt shows", SCORE, "choose", bump("tasks/data/choose.jsonl", '"note": "x'))
row("row of the data before those that are asked", COMMENT, "big", bump("tasks/data/big.jsonl", "the hill "), may="set")

# --- prompts ---------------------------------------------------------------------------------------------------------

row("prompt of a YAML", REQUEST, "choose", bump("tasks/choose.yaml", "Question "))
row("prompt of a YAML, size and mtime kept", REQUEST, "count", bump("tasks/count.yaml", "Count ", stat=True))
row("description of an included YAML", REQUEST, ALL, bump("tasks/common/base.yaml", "Say "))
row("prompt of a module", REQUEST, "opened", bump("tasks/shown.py", "STYLE} "))
row("module imported by process_docs' map", REQUEST, "mapped", bump("tasks/deeper.py", "Well "))
row("module imported by process_docs' map, size and mtime kept", REQUEST, "mapped", bump("tasks/deeper.py", "Well ", stat=True))
row("module imported by process_docs' filter", REQUEST, "mapped", bump("tasks/deeper.py", "FIRST = "))
row("module imported by a generator of rows", REQUEST, "generated", bump("tasks/deeper.py", "FROM = "))
row("file outside read by a generator of rows", FOUND_REQUEST, "generated", bump("outside/rows.txt", "river "))
row("file outside read by a module", FOUND_REQUEST, "opened", bump("outside/style.txt", "Style "))
row("file outside read by a module, size and mtime kept", FOUND_REQUEST, "opened", bump("outside/style.txt", "Style ", stat=True))
row("variable in [trial] env read by a module", REQUEST, "opened", lambda w: w.trial_env.update(PROMPT_STYLE=f"style {w.count('style')}"))
row("variable by the prologue read by a module", FOUND_REQUEST, "opened", lambda w: w.exports.update(PROMPT_STYLE=f"style-{w.count('style')}"))
row("far place of a large file read by a module, size and mtime kept", FOUND_REQUEST, "gathered", lambda w: w.poke("tasks/blob.bin", BLOB_AT, b"%08d" % w.count("blob")))
row("file that appears in a folder listed by a module", REQUEST, "gathered", lambda w: w.write(f"tasks/extras/x{w.count('extra')}.txt", "x\n"))
row("package of a prompt 1.0 -> 2.0", FOUND_REQUEST, "packaged", lambda w: install(w, "draftlib", f"{1 + (n := w.count('draft'))}.0", PACKAGES["draftlib"].replace("100", f"{100 + n}")))
row("package of a prompt installed again, version kept", FOUND_REQUEST, "packaged", lambda w: install(w, "draftlib", "1.0", PACKAGES["draftlib"].replace("100", f"{500 + w.count('draft again')}")))
row("editable package", FOUND_REQUEST, "edited", bump("src/editlib/words.py", "Edited "))
row("editable package, size and mtime kept", FOUND_REQUEST, "edited", bump("src/editlib/words.py", "Edited ", stat=True))

# --- data ------------------------------------------------------------------------------------------------------------

row("row of the data", REQUEST, "choose", bump("tasks/data/choose.jsonl", "river "))
row("row of the data, size and mtime kept", REQUEST, "choose", bump("tasks/data/choose.jsonl", "river ", stat=True))
row("the same data touched afterwards", "", "", touch("tasks/data/choose.jsonl"))
row("row of the few-shot data", REQUEST, "choose", lambda w: w.write("tasks/data/few.jsonl", jsonl("few", 100 * w.count("few"), 8)))
row("row of a CSV file", REQUEST, "count", bump("tasks/data/count.csv", "stone "))
row("row of a CSV file, size and mtime kept", REQUEST, "count", bump("tasks/data/count.csv", "stone ", stat=True))
row("data behind map, size and mtime kept", REQUEST, "mapped", lambda w: [w.bump("tasks/data/mapped.jsonl", f'{i:d}, "q": "the river ', stat=True) for i in range(4)])
row("last row of a file over 1 MiB", REQUEST, "big", lambda w: w.poke("tasks/data/big.jsonl", w.path("tasks/data/big.jsonl").stat().st_size - 40, b"b%03dks" % w.count("big"), stat=False))
row("last row of a file over 1 MiB, size and mtime kept", REQUEST, "big", lambda w: w.poke("tasks/data/big.jsonl", w.path("tasks/data/big.jsonl").stat().st_size - 40, b"c%03dks" % w.count("big")))
row("file of a glob", REQUEST, "globbed", bump("tasks/parts/two.jsonl", "two "))
row("file that a glob finds anew", REQUEST, "globbed", lambda w: w.write(f"tasks/parts/x{(n := w.count('part'))}.jsonl", jsonl("part", 100 * n, 1)))
row("file that a glob finds no more", REQUEST, "globbed", lambda w: max(w.path("tasks/parts").glob("[ox]*.jsonl")).unlink())
row("link moved", REQUEST, "linked tagged", _move_link)
row("file behind a link", REQUEST, "linked tagged", lambda w: w.write(f"outside/{w.path('tasks/data/linked.jsonl').readlink().name}", jsonl("lane", 100 * w.count("lane"))))
row("data set of the Hub: main moves", REQUEST, "hubbed", revise_rows)
row("order of rows", REQUEST, "opened", lambda w: w.path("tasks/data/opened.jsonl").write_text("".join(w.path("tasks/data/opened.jsonl").read_text().splitlines(keepends=True)[k] for k in (1, 2, 3, 0))))

# --- scoring ---------------------------------------------------------------------------------------------------------

row("gold answer", SCORE, "count", bump("tasks/data/count.csv", "sings,"))
row("gold answer, size and mtime kept", SCORE, "count", bump("tasks/data/count.csv", "sings,", stat=True))
row("scorer", SCORE, METRICS, bump("tasks/metrics.py", "SCALE = "))
row("scorer, size and mtime kept", SCORE, METRICS, bump("tasks/metrics.py", "SCALE = ", stat=True))
row("module that a scorer imports", SCORE, METRICS, bump("tasks/grading.py", "MORE = "))
row("file beside that a scorer reads", SCORE, METRICS, bump("tasks/accepted.txt", ""))
row("file outside that a scorer reads", FOUND_SCORE, METRICS, bump("outside/grade.txt", ""))
row("file outside that a scorer reads, size and mtime kept", FOUND_SCORE, METRICS, bump("outside/grade.txt", "", stat=True))
row("variable in [trial] env that a scorer reads", SCORE, METRICS, lambda w: w.trial_env.update(GRADE=str(w.count("grade"))))
row("regex of a filter", SCORE, "count", swap("tasks/count.yaml", "{1,100}", "{1,2}"))
row("a further filter", SCORE, "count", swap("tasks/count.yaml", "filter_list:\n", "filter_list:\n  - name: raw\n    filter: [{function: take_first}]\n"))
row("aggregation", SCORE, "choose", swap("tasks/choose.yaml", "aggregation: mean", "aggregation: median"))
row("aggregation by a module", SCORE, "count", bump("tasks/metrics.py", "min(values) + "), may="set score")
row("direction of a metric", SCORE, "choose", swap("tasks/choose.yaml", "higher_is_better: true", "higher_is_better: false"))
row("version of a task", SCORE, ALL, bump("tasks/common/base.yaml", "version: "))
row("weights of a group", SCORE, MOST, swap("tasks/most.yaml", "weight_by_size: true", "weight_by_size: false"))
row("package of a scorer 1.0 -> 2.0", FOUND_SCORE, "packaged", lambda w: install(w, "gradelib", f"{1 + (n := w.count('grade lib'))}.0", PACKAGES["gradelib"].replace("100", f"{100 + n}")))
row("package of a scorer installed again, version kept", FOUND_SCORE, "packaged", lambda w: install(w, "gradelib", "1.0", PACKAGES["gradelib"].replace("100", f"{500 + w.count('grade again')}")))

# --- the suite -------------------------------------------------------------------------------------------------------

row("a further task of a tag", REQUEST, "tagged", lambda w: w.write(f"tasks/tagged{(n := w.count('tagged'))}.yaml", w.path("tasks/linked.yaml").read_text().replace("task: linked", f"task: tagged{n}\ntag: marked")))
row("limit", REQUEST, "choose", of_entry("choose", "limit", 4, 3, 2))
row("number of few-shot examples", REQUEST, "choose", of_entry("choose", "num_fewshot", 1, 2, 3))
row("seed", REQUEST, "choose", lambda w: w.suite.update(seed=w.count("seed")), may="set score")
row("generation settings", REQUEST, "count", of_entry("most", "gen_kwargs", None, {"max_gen_toks": 6}, {"max_gen_toks": 7}), may="set score")
row("longest answer in a YAML", REQUEST, "count", swap("tasks/count.yaml", "max_gen_toks: 8", "max_gen_toks: 9"))
row("stop strings", REQUEST, "count", swap("tasks/count.yaml", "['Q:']", "['Q:', 'a']"))
row("system instruction", REQUEST, ALL, lambda w: w.suite.update(system_instruction=f"Be brief {w.count('system')}."))
row("chat template on or off", REQUEST, ALL, setting("suite", "apply_chat_template", False, True))

# --- model arguments, adapters, tokenizers ---------------------------------------------------------------------------

row("dtype", REQUEST, ALL, setting("model_args", "dtype", None, "float64"))
row("begin token", REQUEST, ALL, setting("model_args", "add_bos_token", None, True))
row("longest prompt", REQUEST, ALL, setting("model_args", "max_length", None, 200, 190))
row("an adapter", "id weights", ALL, setting("model_args", "peft", "./adapter"), may="request set")
row("adapter trained again into its folder", "id weights", ALL, lambda w: _retrain(w, stat=False), may="request")
row("adapter trained again into its folder, size and mtime kept", "id weights", ALL, lambda w: _retrain(w, stat=True), may="request")
row("adapter's config", "id weights", ALL, _alpha, may="request")
row("adapter touched", "id weights", ALL, touch_below("adapter"), may="request set")
row("adapter copied to another folder", "", "", _copy_adapter, may="id set")
row("adapter of the Hub", "id weights", ALL, setting("model_args", "peft", "org/adapter"), may="request set")
row("adapter of the Hub: main moves", "id weights", ALL, _revise_adapter, may="request")
row("no adapter", "id weights", ALL, lambda w: w.model_args.pop("peft", None), may="request set")
row("another tokenizer", REQUEST, ALL, setting("model_args", "tokenizer", "./tok"))
row("file of the other tokenizer", REQUEST, ALL, lambda w: _retoken(w.path("tok/tokenizer.json"), w.count("tok")))
row("file of the other tokenizer, size and mtime kept", REQUEST, ALL, lambda w: _retoken(w.path("tok/tokenizer.json"), w.count("tok"), stat=True))
row("other tokenizer touched", "", "", touch("tok/tokenizer.json"))
row("tokenizer of the Hub", REQUEST, ALL, setting("model_args", "tokenizer", "org/tok"))
row("tokenizer of the Hub: main moves", REQUEST, ALL, _revise_tokenizer)
row("no other tokenizer", REQUEST, ALL, lambda w: w.model_args.pop("tokenizer", None))

# --- the checkpoint --------------------------------------------------------------------------------------------------

row("weights overwritten", "id weights", ALL, lambda w: _noise(w, stat=False))
row("one tensor reversed, size and mtime kept", "id weights", ALL, _reverse)
row("checkpoint touched", "", "", touch_below("model"), may="id")
row("checkpoint copied", "", "", _copy_model, may="id")
row("config.json", REQUEST, ALL, lambda w: _config(w, stat=False))
row("config.json, size and mtime kept", REQUEST, ALL, lambda w: _config(w, stat=True))
row("generation_config.json", REQUEST, ALL, _penalty)
row("tokenizer.json", REQUEST, ALL, lambda w: _retoken(w.path(f"{w.model}/tokenizer.json"), w.count("own tok")))
row("tokenizer.json, size and mtime kept", REQUEST, ALL, lambda w: _retoken(w.path(f"{w.model}/tokenizer.json"), w.count("own tok"), stat=True))

# --- the Hub's cache and versions ------------------------------------------------------------------------------------

row("HF_HOME by the prologue, the same content", "", "", _move_hub, may="id set")
row("data set in the prologue's HF_HOME: main moves", FOUND_REQUEST, "hubbed", revise_rows)
row("another version of transformers", "found id set request", ALL, _upgrade)
# fmt: on

EDITS: tuple[Edit, ...] = tuple(ROWS)
