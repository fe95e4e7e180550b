"""Attacks of a checkpoint on the daemon that looks at it and on the jobs that load it. Its folder may be another user's."""

import contextlib
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
from support.daemons import SUITE, announce, daemon, small, taken
from support.node_memory import make_checkpoint, safetensors
from support.trials import OPTIONS, Evaluation
from support.with_root import USER, as_user

from coordinator.intake.checkpoint import CheckpointError, inspect_checkpoint
from coordinator.site.config.schema import Config, WatchConfig
from evaljobs.trial.engines import loading

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="not root: cannot become another user")


def refused(folder):
    with pytest.raises(CheckpointError) as caught:
        inspect_checkpoint(folder)
    assert str(caught.value).isprintable()
    return str(caught.value)


def giant(name):
    """A tebibyte that takes no room on disk would take the daemon's memory."""

    def edit(folder):
        (folder / name).touch()
        os.truncate(folder / name, 1 << 40)

    return edit


def many_headers(folder):
    """Each file's header may be as long as the format allows; the tensors of all files together are bounded."""
    for number in (1, 2, 3):
        name = f"model-{number:05}-of-00003.safetensors"
        safetensors(folder / name, {f"t{number - 1}": b"x"} | {f"{number}-{n}": b"" for n in range(40)})


def index_of(name):
    """An index that names a file; the folder above has one by the name of a neighbour's."""

    def edit(folder):
        shutil.copy(folder / "model-00001-of-00003.safetensors", folder.parent / "x.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"t0": name}}))

    return edit


def config_with(**named):
    """transformers takes a kernel's repository from the config, and runs what it fetches."""
    text = json.dumps({"architectures": ["LlamaForCausalLM"], **named})
    return lambda folder: (folder / "config.json").write_text(text)


OUTSIDE = (
    "../x.safetensors",
    "/etc/passwd",
    "a/../../x",
    "./x",
    "a//b",
    "..",
    ".",
    "",
    "a\0b",
    5,
    None,
    ["x"],
    "x/",
)
IMPLEMENTATIONS = ("attn_implementation", "_attn_implementation", "experts_implementation")
HUB = "org/kernel@main"
# what is done to a checkpoint's folder, and words of its refusal
HOSTILE = {
    **{f"a giant {name}": (giant(name), name) for name in ("config.json", "model.safetensors.index.json",
        "evalspan.sums.json")},
    "many headers": (many_headers, "more than 100 tensors"),
    **{f"an index with {name!r}": (index_of(name), "which is not a file of this folder") for name in OUTSIDE},
    **{f"a config with {key}": (config_with(**{key: HUB}), "org/kernel") for key in IMPLEMENTATIONS},
    **{f"a config with {key} inside": (config_with(text_config={key: HUB}), "org/kernel") for key in IMPLEMENTATIONS},
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_folder_is_refused_unread(what, tmp_path, monkeypatch):
    """It fills no memory, names no file outside of it and no code of the hub."""
    monkeypatch.setattr("evaljobs.staging.fingerprint.MOST_TENSORS", 100)
    edit, words = HOSTILE[what]
    folder = make_checkpoint(tmp_path / "run" / "step-1", size=100)
    edit(folder)
    assert words in refused(folder)


NAMES = ("config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json", "evalspan.sums.json")  # fmt: skip
KINDS = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "circle": lambda path: path.symlink_to(path),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_file_is_not_waited_for(name, kind, tmp_path):
    """A pipe without a writer, a device without an end: the folder is refused, or is a checkpoint without that file."""
    folder = make_checkpoint(tmp_path / "step-1", size=100)
    (folder / name).unlink(missing_ok=True)
    KINDS[kind](folder / name)
    with contextlib.suppress(CheckpointError):
        assert name not in {file.name for file in inspect_checkpoint(folder).files}


@pytest.mark.parametrize("name", ["step-1\x1b[2J", "step\n1", "step\x9b31m", "step\x7f", "\x07"], ids=repr)
def test_a_folder_whose_name_commands_a_terminal_is_refused(name, tmp_path):
    """It would stand in `status`, in logs and in Slurm's lists."""
    assert "control character" in refused(small(tmp_path / name))
    assert "control character" in refused(small(tmp_path / name / "step-2"))


def owned(folder, uid):
    for path in (folder, *folder.rglob("*")):
        os.lchown(path, uid, uid)
    return folder


@as_root
@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer.json", "additional_chat_templates"])
def test_a_link_of_another_user_lends_out_no_private_file(name, shared):
    """The daemon's user could read it, the checkpoint's could not: it would stand in prompts, samples and at a judge's."""
    folder = small(shared / "step-1")
    private = shared / "home"
    secret = private / "secret.jinja"
    secret.write_text("AKIA-secret")
    secret.chmod(0o600)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(private if "/" not in name and "." not in name else secret)
    owned(folder, USER + 1)
    owned(private, USER)

    def look():
        assert "another user" in refused(folder)

    def look_at_his_own():
        inspect_checkpoint(folder)

    as_user(look)
    owned(folder, USER)
    as_user(look_at_his_own)  # as in the Hugging Face cache


# --- code ------------------------------------------------------------------------------------------------------------


PICKLES = ("pytorch_model.bin", "adapter_model.bin", "training_args.bin", "optimizer.pt", "vocab.pkl", "model.pt")  # fmt: skip


class _Runs:
    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def with_code(model, folder):
    """A copy of the model that offers code wherever libraries look for it, and the file that any of it makes."""
    shutil.copytree(model, folder)
    marker = folder.parent / "ran"
    named = ("modeling_x", "configuration_x", "tokenization_x")
    for module in (*named, "__init__", "sitecustomize", "torch", "json"):
        (folder / f"{module}.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass X: pass\n")
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {
        "AutoConfig": "configuration_x.X",
        "AutoModelForCausalLM": "modeling_x.X",
        "AutoTokenizer": ["tokenization_x.X", "tokenization_x.X"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer["auto_map"] = {"AutoTokenizer": ["tokenization_x.X", "tokenization_x.X"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    evil = pickle.dumps(_Runs(f"touch {marker}"))
    for name in PICKLES:
        (folder / name).write_bytes(evil)
    return folder, marker


def test_a_checkpoint_runs_no_code_while_requests_are_built_and_it_is_loaded(
    shared_work, model_dir, tmp_path
):
    """Modules beside its config, named by auto_map or as the libraries' own; pickles beside its safetensors."""
    folder, marker = with_code(model_dir, tmp_path / "evil")
    assert not {f.name for f in inspect_checkpoint(folder).files} & {*PICKLES[:3]}
    Evaluation(shared_work, folder, "code-of-a-checkpoint")
    loading.load_engine(str(folder), OPTIONS, 2).close()
    assert not marker.exists()


@pytest.mark.parametrize(
    "template",
    [
        "{{ cycler.__init__.__globals__.os.system('touch MARKER') }}",
        "{% include '/etc/passwd' %}",
        "{% for i in range(10 ** 12) %}x{% endfor %}",
    ],
)
def test_a_chat_template_is_no_program(template, shared_work, model_dir, tmp_path):
    """Rendered in jinja's sandbox: what leaves it ends the build with an error, and nothing ran."""
    folder = tmp_path / "templated"
    shutil.copytree(model_dir, folder)
    (folder / "chat_template.jinja").write_text(template.replace("MARKER", str(tmp_path / "ran")))
    name = f"template-{tmp_path.name}"
    with pytest.raises(Exception) as failed:
        Evaluation(shared_work, folder, name, apply_chat_template=True)
    assert "root:" not in str(failed.value)
    assert not (tmp_path / "ran").exists()


def test_a_daemon_takes_the_next_checkpoint_after_each_hostile_one(tmp_path, every_tick):
    run = tmp_path / "run"
    ears = daemon(tmp_path / "work", Config(watch=WatchConfig(roots=(run,), suite=SUITE)))
    for number, name in enumerate(NAMES):
        giant(name)(make_checkpoint(run / f"step-{number}", size=100))
        announce(ears, run / f"step-{number}")
    announce(ears, small(run / "step-99"))
    ears.tick()
    assert "step-99" in taken(ears)
