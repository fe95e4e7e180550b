"""The table: which input changes which key. Each row is an edit of one input of a world, each time to another value.

Rule: `changes` names the keys that must become others, `may` those that may; all others must stay. `tasks`: whose keys.
A GPU may answer again for `tasks` where "request" or "weights" is among them, and for no other task. Edits of the files
that YAMLs name are not rows: `tests/intake/test_inputs.py` edits each of them.

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
import shutil
from collections.abc import Callable
from dataclasses import dataclass

from support.inputs.world import (
    BLOB_AT,
    PACKAGES,
    World,
    install,
    jsonl,
    kept,
    make_adapter,
    newer_transformers,
    revise,
    revise_rows,
)

MOST = (
    "count",
    "mapped",
    "generated",
    "opened",
    "packaged",
    "edited",
    "big",
    "linked",
    "gathered",
    "hubbed",
    "probed",
)
ALL = ("choose", *MOST, "globbed", "tagged")
METRICS = tuple(task for task in ALL if task != "packaged")  # scored by metrics.py
BIG = "tasks/data/big.jsonl"
Do = Callable[[World], object]


@dataclass(frozen=True)
class Edit:
    name: str
    do: Do
    changes: str = ""
    tasks: tuple[str, ...] = ()
    may: str = ""

    @property
    def found(self):
        return "found" in self.changes.split()

    @property
    def gpu(self):
        """Tasks that a GPU may answer again."""
        return self.tasks if {"request", "weights"} & {*self.changes.split()} else ()


COMMENT, SCORE, REQUEST = "id", "id score", "id set request"
FOUND_SCORE, FOUND_REQUEST = (f"found {keys}" for keys in (SCORE, REQUEST))
# A comment may stand in the name of a set, and a changed prompt may be a changed score.
EDITS = []


def row(name, changes, tasks, do, may=None):
    if may is None:
        may = "score" if "request" in changes else "set" if changes else ""
    named = tuple(tasks.split()) if isinstance(tasks, str) else tasks
    EDITS.append(Edit(name, do, changes, named, may))


def bump(file, before, *, stat=False):
    return lambda w: w.bump(file, before, stat=stat)


def touch(name):
    return lambda w: [os.utime(place) for place in (w.path(name), *w.path(name).glob("*"))]


def setting(kind, key, *values, entry=""):
    """The next of these values, of a dictionary of the world; None: away."""

    def do(w):
        held = w.entries[entry] if entry else getattr(w, kind)
        value = values[w.count(f"{kind} {entry} {key}") % len(values)]
        held.pop(key, None) if value is None else held.update({key: value})

    return do


def _move_link(w):
    link = w.path("tasks/data/linked.jsonl")
    other = "two" if link.readlink().name == "one.jsonl" else "one"
    link.unlink()
    link.symlink_to(f"../../outside/{other}.jsonl")


def _reinstall(package, version, first):
    """With another text; `version` "": the next one."""

    def do(w):
        n = w.count(package)
        install(w, package, version or f"{n + 1}.0", PACKAGES[package].replace("100", f"{first + n}"))

    return do


def _retrain(w):
    w.model_args["peft"] = "./adapter"
    make_adapter(w, "trained", 10 + w.count("trained"))
    kept(
        w.path("adapter/adapter_model.safetensors"), w.path("trained/adapter_model.safetensors").read_bytes()
    )


def _copy_adapter(w):
    name = f"copied-adapter-{w.count('copied adapter')}"
    shutil.copytree(w.path("adapter"), w.path(name))
    w.model_args["peft"] = f"./{name}"


def _revise_adapter(w):
    w.model_args["peft"] = "org/adapter"
    make_adapter(w, "trained", 100 + w.count("hub adapter"))
    revise(w.hf_home / "hub" / "models--org--adapter", w.path("trained"))


def _revise_tokenizer(w):
    """Its next revision swaps the ids of words with one letter and of those with another."""
    w.model_args["tokenizer"] = "org/tok"
    shutil.copytree(w.path("tok"), w.path("newtok"), dirs_exist_ok=True)
    table = json.loads(w.path("newtok/tokenizer.json").read_text())
    vocabulary, (one, other) = table["model"]["vocab"], "theraivbks"[w.count("hub tok") % 9 :][:2]
    for word in list(vocabulary):
        pair = word.replace(one, "\0").replace(other, one).replace("\0", other)
        if pair in vocabulary and word < pair:
            vocabulary[word], vocabulary[pair] = vocabulary[pair], vocabulary[word]
    w.write("newtok/tokenizer.json", json.dumps(table))
    revise(w.hf_home / "hub" / "models--org--tok", w.path("newtok"))


def _filter(w):
    """The score bears the filter's name."""
    text = w.path("tasks/choose.yaml").read_text().partition("filter_list")[0]
    filters = f"[{{name: f{w.count('filter')}, filter: [{{function: take_first}}]}}]"
    w.write("tasks/choose.yaml", f"{text}filter_list: {filters}\n")


def _reverse(w):
    from safetensors.torch import load_file, save

    path = w.path(w.model) / "model.safetensors"
    tensors = load_file(path)
    name = sorted(k for k in tensors if "q_proj" in k or "up_proj" in k)[w.count("reversed") % 4]
    tensors[name] = tensors[name].flip(0).contiguous()
    kept(path, save(tensors, {"format": "pt"}))


def _copy_model(w):
    name = f"model-{w.count('copied model')}"
    shutil.copytree(w.path(w.model), w.path(name))
    w.model = name


def _move_hub(w):
    new = w.folder / f"hf-{w.count('hub')}"
    for part in ("hub", "datasets/org___rows"):
        shutil.copytree(w.hf_home / part, new / part, symlinks=True)
    w.exports["HF_HOME"] = str(new)


def _token(w):
    w.write("token", f"hf_{w.count('token')}")
    w.path("token").chmod(0o600)
    w.exports["HF_TOKEN"] = f"$(cat {w.path('token')})"


def _upgrade(w):
    if not w.path("newer").exists():
        newer_transformers(w)
    w.newer = not w.newer


# fmt: off
# --- what changes nothing --------------------------------------------------------------------------------------------

row("data touched", "", "", touch("tasks/data"))
row("file outside touched", "", "", touch("outside"))
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
row("comment of an included YAML", COMMENT, ALL, bump("tasks/common/base.yaml", "# "))
row("comment of an imported module", "found id", MOST, bump("tasks/deeper.py", "# "))
row("variable that nothing reads in [trial] env", COMMENT, ALL, lambda w: w.trial_env.update(UNUSED=str(w.count("unused"))), may="set score")

# --- prompts ---------------------------------------------------------------------------------------------------------

row("prompt of a YAML, size and mtime kept", REQUEST, "count", bump("tasks/count.yaml", "Count ", stat=True))
row("module imported by process_docs' map, size and mtime kept", FOUND_REQUEST, "mapped", bump("tasks/deeper.py", "Well ", stat=True))
row("file outside read by a generator of rows", FOUND_REQUEST, "generated", bump("outside/rows.txt", "river "))
row("file outside read by a module, size and mtime kept", FOUND_REQUEST, "opened", bump("outside/style.txt", "Style ", stat=True))
row("variable in [trial] env read by a module", REQUEST, "opened", lambda w: w.trial_env.update(PROMPT_STYLE=f"style {w.count('style')}"))
row("far place of a large file read by a module, size and mtime kept", FOUND_REQUEST, "gathered", lambda w: w.poke("tasks/blob.bin", BLOB_AT, b"%08d" % w.count("blob")))
row("file that appears in a folder listed by a module", FOUND_REQUEST, "gathered", lambda w: w.write(f"tasks/extras/x{w.count('extra')}.txt", "x\n"))
row("file read by a forked child of a map", FOUND_REQUEST, "probed", bump("outside/forked.txt", "Fork ", stat=True))
row("file opened for reading and writing", FOUND_REQUEST, "probed", lambda w: w.poke("outside/numbers.bin", 0, bytes([w.count("numbers")])))
row("missing file that a module tried to open", FOUND_REQUEST, "probed", lambda w: w.write("outside/late.txt", f"late {w.count('late')}\n"))
row("YAML that appears in a listed folder", FOUND_REQUEST, "probed", lambda w: w.write(f"outside/prompts/x{w.count('prompt')}.yaml", ""))
row("hidden file that appears in a listed folder", FOUND_REQUEST, "probed", lambda w: w.write(f"outside/prompts/.x{w.count('hidden')}", ""))
row("package of a prompt installed again, version kept", FOUND_REQUEST, "packaged", _reinstall("draftlib", "1.0", 500))
row("editable package", FOUND_REQUEST, "edited", bump("src/editlib/words.py", "Edited "))

# --- data ------------------------------------------------------------------------------------------------------------

row("row of the data, size and mtime kept", REQUEST, "choose", bump("tasks/data/choose.jsonl", "river ", stat=True))
row("the same data touched afterwards", "", "", touch("tasks/data/choose.jsonl"))
row("last row of a file over 1 MiB, size and mtime kept", REQUEST, "big", lambda w: w.poke(BIG, w.path(BIG).stat().st_size - 40, b"c%03dks" % w.count("big")))
row("file that a glob finds anew", REQUEST, "globbed", lambda w: w.write(f"tasks/parts/x{(n := w.count('part'))}.jsonl", jsonl("part", 100 * n, 1)))
row("file that a glob finds no more", REQUEST, "globbed", lambda w: max(w.path("tasks/parts").glob("[ox]*.jsonl")).unlink())
row("link moved", REQUEST, "linked tagged", _move_link)
row("file behind a link", REQUEST, "linked tagged", lambda w: w.write(f"outside/{w.path('tasks/data/linked.jsonl').readlink().name}", jsonl("lane", 100 * w.count("lane"))))
row("data set of the Hub: main moves", FOUND_REQUEST, "hubbed", revise_rows)

# --- scoring ---------------------------------------------------------------------------------------------------------

row("gold answer, size and mtime kept", SCORE, "count", bump("tasks/data/count.csv", "sings,", stat=True))
row("file outside that a scorer reads, size and mtime kept", FOUND_SCORE, METRICS, bump("outside/grade.txt", "", stat=True))
row("variable in [trial] env that a scorer reads", SCORE, METRICS, lambda w: w.trial_env.update(GRADE=str(w.count("grade"))))
row("aggregation by a module", SCORE, "count", bump("tasks/metrics.py", "min(values) + "), may="set score")
row("filter of a YAML", SCORE, "choose", _filter)
row("package of a scorer 1.0 -> 2.0", FOUND_SCORE, "packaged", _reinstall("gradelib", "", 100))

# --- the suite -------------------------------------------------------------------------------------------------------

row("a further task of a tag", REQUEST, "tagged", lambda w: w.write(f"tasks/tagged{(n := w.count('tagged'))}.yaml", w.path("tasks/linked.yaml").read_text().replace("task: linked", f"task: tagged{n}\ntag: marked")))
row("limit", REQUEST, "choose", setting("entries", "limit", 4, 3, 2, entry="choose"))
row("number of few-shot examples", REQUEST, "choose", setting("entries", "num_fewshot", 1, 2, 3, entry="choose"))
row("seed", REQUEST, "choose", lambda w: w.suite.update(seed=w.count("seed")), may="set score")
row("generation settings", REQUEST, "count", setting("entries", "gen_kwargs", None, {"max_gen_toks": 6}, {"max_gen_toks": 7}, entry="most"), may="set score")
row("system instruction", REQUEST, ALL, lambda w: w.suite.update(system_instruction=f"Be brief {w.count('system')}."))
row("chat template on or off", REQUEST, ALL, setting("suite", "apply_chat_template", False, True))

# --- model arguments, adapters, tokenizers ---------------------------------------------------------------------------

row("dtype", REQUEST, ALL, setting("model_args", "dtype", None, "float64"))
row("begin token", REQUEST, ALL, setting("model_args", "add_bos_token", None, True))
row("longest prompt", REQUEST, ALL, setting("model_args", "max_length", None, 200, 190))
row("an adapter", "id weights", ALL, setting("model_args", "peft", "./adapter"), may="request set")
row("adapter trained again into its folder, size and mtime kept", "id weights", ALL, _retrain, may="request")
row("adapter's config", "id weights", ALL, bump("adapter/adapter_config.json", '"lora_alpha": '), may="request")
row("adapter touched", "id weights", ALL, touch("adapter"), may="request set")
row("adapter copied to another folder", "", "", _copy_adapter, may="id set")
row("adapter of the Hub", "id weights", ALL, setting("model_args", "peft", "org/adapter"), may="request set")
row("adapter of the Hub: main moves", "id weights", ALL, _revise_adapter, may="request")
row("no adapter", "id weights", ALL, lambda w: w.model_args.pop("peft", None), may="request set")
row("another tokenizer", REQUEST, ALL, setting("model_args", "tokenizer", "./tok"))
row("file of the other tokenizer, size and mtime kept", REQUEST, ALL, bump("tok/tokenizer.json", '"id": ', stat=True))
row("other tokenizer touched", "", "", touch("tok/tokenizer.json"))
row("tokenizer of the Hub", REQUEST, ALL, setting("model_args", "tokenizer", "org/tok"))
row("tokenizer of the Hub: main moves", REQUEST, ALL, _revise_tokenizer)
row("no other tokenizer", REQUEST, ALL, lambda w: w.model_args.pop("tokenizer", None))

# --- the checkpoint --------------------------------------------------------------------------------------------------

row("one tensor reversed, size and mtime kept", "id weights", ALL, _reverse)
row("checkpoint touched", "", "", touch("model"), may="id")
row("config.json, size and mtime kept", REQUEST, ALL, bump("model/config.json", '"rope_theta": ', stat=True))
row("generation_config.json", REQUEST, ALL, bump("model/generation_config.json", '_token_id": '))
row("tokenizer.json, size and mtime kept", REQUEST, ALL, bump("model/tokenizer.json", '"id": ', stat=True))
row("checkpoint copied", "", "", _copy_model, may="id")

# --- the Hub's cache and versions ------------------------------------------------------------------------------------

row("HF_HOME by the prologue, the same content", "", "", _move_hub, may="id set")
row("data set in the prologue's HF_HOME: main moves", FOUND_REQUEST, "hubbed", revise_rows)
row("another version of transformers", "found id set request", ALL, _upgrade)
# fmt: on
