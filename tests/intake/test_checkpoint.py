"""What a folder must hold to be evaluated, when two of them are the same, and ids of the Hub as checkpoints, against a server on this
machine that speaks the routes of the Hub.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.hub_server import CLOSED, COMMIT, serving
from support.node_memory import make_checkpoint, safetensors

from coordinator.decide.evaluation.records import checkpoint_name, is_snapshot
from coordinator.errors import OperatorError
from coordinator.intake import hub as intake
from coordinator.intake.checkpoint import CheckpointError, inspect_checkpoint
from coordinator.intake.source_keys import check_adapter
from evaljobs.contract.specs import ModelOptions
from evaljobs.staging.fingerprint import BadWeights, is_safe_name, read_header


def names(path):
    return [f.name for f in inspect_checkpoint(path, allow_bin=True).files]


CODE, TOKENIZER = {"AutoModelForCausalLM": "modeling_x.X"}, {"AutoTokenizer": ["modeling_x.X", None]}
LLAMA, GEMMA = {"architectures": ["LlamaForCausalLM"]}, {"architectures": ["Gemma3ForConditionalGeneration"]}
INDEX = ["model.safetensors.index.json", *(f"model-0000{n}-of-00002.safetensors" for n in (1, 2))]
# fmt: off
# what config.json and tokenizer_config.json hold, shards of weights, what of the folder is staged beside config and tokenizer
HELD = {
    "a single file": (LLAMA, None, 1, ["model.safetensors"]),
    "shards with their index": (LLAMA, None, 2, INDEX),
    "GPT-2's name": ({"architectures": ["GPT2LMHeadModel"]}, None, 1, ["model.safetensors"]),
    "GPT's name": ({"architectures": ["OpenAIGPTLMHeadModel"]}, None, 1, ["model.safetensors"]),
    "a text model inside a multimodal one": (GEMMA | {"text_config": {}}, None, 1, ["model.safetensors"]),
    "custom code by its auto_map alone": ({"auto_map": CODE}, None, 1, ["model.safetensors", "modeling_x.py"]),
    "a tokenizer's class, named by config.json": (LLAMA | {"auto_map": TOKENIZER}, None, 1, ["model.safetensors", "modeling_x.py"]),
    "a tokenizer's class, named by its own config": (LLAMA, {"auto_map": TOKENIZER}, 1, ["model.safetensors", "modeling_x.py", "tokenizer_config.json"]),
    "pickled weights, where they are allowed": (LLAMA, None, 0, ["pytorch_model.bin"]),
}
# fmt: on


@pytest.mark.parametrize("kind", HELD)
def test_a_checkpoint_is_its_config_tokenizer_weights_and_the_code_that_a_config_names(tmp_path, kind):
    """Models are causal by the libraries' rule. What trainers leave beside them is left out; an edit of code is seen. Links
    into a blob store count as what they lead to, and `latest -> step-1` as the folder itself."""
    config, of_tokenizer, shards, more = HELD[kind]
    folder = make_checkpoint(tmp_path / "x", shards=max(shards, 1), size=100)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_x.py").write_text("a = 1")
    if of_tokenizer:
        (folder / "tokenizer_config.json").write_text(json.dumps(of_tokenizer))
    if not shards:
        (folder / "model.safetensors").unlink()
        with zipfile.ZipFile(folder / "pytorch_model.bin", "w") as archive:
            archive.writestr("archive/data.pkl", b"x" * 1000)
    assert sorted(names(folder)) == sorted(["config.json", "tokenizer.json", *more])
    (tmp_path / "snapshot").mkdir()
    for file in folder.iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    found, snapshot = (inspect_checkpoint(place, allow_bin=True) for place in (folder, tmp_path / "snapshot"))
    assert (snapshot.files, snapshot.digest) == (found.files, found.digest)
    (tmp_path / "latest").symlink_to(folder)
    assert inspect_checkpoint(tmp_path / "latest", allow_bin=True, step=1) == inspect_checkpoint(
        folder, allow_bin=True, step=1
    )
    (folder / "modeling_x.py").write_text("a = 2")
    assert (inspect_checkpoint(folder, allow_bin=True).digest != found.digest) == ("modeling_x.py" in more)


@pytest.mark.parametrize(
    ("name", "wrapped"),
    [
        ("_orig_mod.model.norm.weight", True),
        ("module.model.norm.weight", True),
        ("model.layers.0._checkpoint_wrapped_module.mlp.weight", True),
        ("base_model.model._orig_mod.model.layers.0.q_proj.lora_A.weight", True),
        ("base_model.model.module.model.layers.0.q_proj.lora_A.weight", True),
        ("model.module.weight", False),
        ("submodule.weight", False),
    ],
)
def test_tensors_named_by_a_wrapper_of_the_model_are_refused_before_any_job(tmp_path, name, wrapped):
    """Of a checkpoint as of an adapter: every tensor of the model would be a fresh one."""
    folder = make_checkpoint(tmp_path / "x", shards=1, size=100)
    weights = folder / "model.safetensors"
    safetensors(weights, {name: b"1234"})
    (folder / "adapter_config.json").write_text("{}")
    shutil.copyfile(weights, folder / "adapter_model.safetensors")
    looks = inspect_checkpoint, lambda place: check_adapter(ModelOptions(model_args={"peft": str(place)}))
    for look in looks:
        with pytest.raises(OperatorError, match=re.escape(name)) if wrapped else contextlib.nullcontext():
            look(folder)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(["architectures", "auto_map", "text_config", "weight_map", "xxh3_128", "__metadata__"])
TENSORS = st.fixed_dictionaries({"data_offsets": ANYTHING}, optional={"dtype": ANYTHING})


@settings(max_examples=60)
@given(
    file=st.sampled_from(["config.json", "model.safetensors.index.json", "evalspan.sums.json"]),
    held=ANYTHING | st.dictionaries(KEYS, ANYTHING, max_size=3),
    header=st.none() | ANYTHING | st.dictionaries(st.text(max_size=6), TENSORS | ANYTHING, max_size=2),
)
def test_whatever_json_a_checkpoint_holds_it_is_described_or_refused_in_one_line(
    tmp_path, file, held, header
):
    """In its config, index and sums, and in the header of its weights."""
    folder = tmp_path / "any"
    shutil.rmtree(folder, ignore_errors=True)
    make_checkpoint(folder, shards=2, size=100)
    (folder / file).write_text(json.dumps(held))
    if header is not None:
        raw = json.dumps(header).encode()
        (folder / "model-00001-of-00002.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw)
    for look in (inspect_checkpoint, lambda place: inspect_checkpoint(place, convert="c {src} {dst}")):
        complaint = ""
        try:
            look(folder)
        except CheckpointError as error:
            complaint = str(error)
        assert complaint.isprintable()


@settings(max_examples=60)
@given(data=st.binary(max_size=200), name=st.text(max_size=12))
def test_any_bytes_are_a_header_that_fits_and_any_name_that_passes_stays_inside(tmp_path, data, name):
    """Or BadWeights. A safe name joins to a path below its folder, spelt as it is."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with contextlib.suppress(BadWeights):
        assert len(read_header(path).raw) <= len(data) - 8
    assert not is_safe_name(name) or os.path.normpath(f"/folder/{name}") == f"/folder/{name}"


# --- ids of the Hub ----------------------------------------------------------------------------------------------------


ASK = """
import json, sys
from coordinator.errors import EvalspanError
from coordinator.intake.hub import local_folder
found = []
for text in sys.argv[1].split():
    said = []
    try:
        folder = local_folder(
            text, said.append, allow_bin="allow_bin" in sys.argv, weights="tokenizer" not in sys.argv
        )
    except EvalspanError as error:
        folder, said = None, [str(error)]
    found.append([folder, "".join(said)])
print(json.dumps(found))
"""


@pytest.fixture
def hub(tmp_path):
    """`lab/tiny` holds what repositories hold beside a model; `lab/old` has .bin weights alone."""
    tiny, old = make_checkpoint(tmp_path / "tiny", shards=2), make_checkpoint(tmp_path / "old", shards=1)
    for name in ("README.md", "consolidated.safetensors", "onnx/model.onnx", "pytorch_model.bin"):
        (tiny / name).parent.mkdir(exist_ok=True)
        (tiny / name).write_bytes(b"x" * 999)
    (old / "model.safetensors").rename(old / "pytorch_model.bin")
    with serving({"lab/tiny": tiny, "lab/old": old, **dict.fromkeys(CLOSED, tiny)}) as made:
        yield made


def asked(hub, text, *more, folder, **env):
    """[folder, None where it was refused; what was said]; of several words a list. `folder`: the current one, and the cache's."""
    place = {"HF_HOME": str(folder / "hf"), "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
    env = {**os.environ, **place, **env}
    argv = [sys.executable, "-c", ASK, text, *more]
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, check=True, timeout=60)
    found = json.loads(done.stdout)
    return found if len(found) > 1 else found[0]


def test_a_signature_in_an_address_is_not_shown():
    said = "403 for https://cdn/x?X-Amz-Signature=abc&y=1 (Request ID: 3)"
    assert intake.SIGNED_QUERY.sub("?…", said) == "403 for https://cdn/x?… (Request ID: 3)"


CONFIG = {"config.json", "tokenizer.json", "model.safetensors.index.json"}
SHARDS = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]


@pytest.mark.parametrize("text", ["lab/tiny", "lab/tiny@step1000"])
def test_a_model_is_fetched_once_and_then_taken_from_the_cache(hub, tmp_path, text):
    """Only files that an evaluation reads; without internet the same command means the same folder. A snapshot that is not
    whole, as tokenizers leave one, is fetched; without internet the message says what it lacks."""
    folder, said = asked(hub, text, folder=tmp_path)
    place = tmp_path / "hf" / "hub"
    assert folder == str(place / "models--lab--tiny" / "snapshots" / COMMIT)
    assert said.startswith(f"{text}: fetching revision {COMMIT[:8]}, 5 files, ")
    assert said.endswith(str(place))
    assert set(hub.fetched) == CONFIG | set(SHARDS) == {p.name for p in Path(folder).iterdir()}
    again, said = asked(hub, text, folder=tmp_path, HF_HUB_OFFLINE="1")
    assert again == folder
    assert said == f"{text}: revision {COMMIT[:8]} from the Hugging Face cache, {folder}"
    if "@" not in text:
        (Path(folder) / SHARDS[1]).unlink()
        refused, said = asked(hub, text, folder=tmp_path, HF_HUB_OFFLINE="1")
        assert refused is None
        assert f"{SHARDS[1]}, which is missing" in said
        assert "`hf download lab/tiny`" in said
        whole, said = asked(hub, text, folder=tmp_path)
        assert (whole, "fetching" in said) == (folder, True)
        assert (Path(folder) / SHARDS[1]).exists()


def test_config_and_tokenizer_are_fetched_without_the_weights(hub, tmp_path):
    """Their size is said; the snapshot serves the next such command without internet. One for weights goes on, also for
    .bin weights where the settings allow them."""
    folder, said = asked(hub, "lab/tiny", "tokenizer", folder=tmp_path)
    assert f"fetching revision {COMMIT[:8]} without its weights (4 MB), 3 files, " in said
    assert set(hub.fetched) == CONFIG
    assert asked(hub, "lab/tiny", "tokenizer", folder=tmp_path, HF_HUB_OFFLINE="1")[0] == folder
    assert asked(hub, "lab/tiny", folder=tmp_path)[0] == folder
    assert SHARDS[0] in hub.fetched
    assert "fetching" in asked(hub, "lab/old", "allow_bin", folder=tmp_path)[1]
    assert "pytorch_model.bin" in hub.fetched


def test_a_folder_has_precedence_over_an_id(hub, tmp_path):
    """Also a mistyped name in an existing folder asks no server."""
    shutil.copytree(tmp_path / "tiny", tmp_path / "lab" / "tiny")
    paths = ("/no/where", "./lab/none", "runs/a/b", "one", "a--b/c")
    words = ("lab/tiny", "lab/tiny@step1000", "lab/tinny", *paths)
    here, revision, mistyped, *others = asked(hub, " ".join(words), folder=tmp_path)
    assert here == ["lab/tiny", ""]
    assert "a folder has no revisions" in revision[1]
    assert mistyped == ["lab/tinny", ""]
    assert others == [[path, ""] for path in paths]


# "--" stands for "/" in a folder's name: beside another dash it says nothing
@given(
    st.from_regex(intake.HUB_ID, fullmatch=True).filter(lambda t: "--" not in t.replace("/", "-")),
    st.booleans(),
)
def test_a_snapshot_is_named_by_its_model(text, slash):
    name = text.partition("@")[0]
    source = f"/cache/hub/models--{name.replace('/', '--')}/snapshots/{COMMIT}{'/' * slash}"
    assert is_snapshot(source)
    assert checkpoint_name(source) == name.rpartition("/")[2]
    assert checkpoint_name(f"/runs/7b/step-1000{'/' * slash}") == "step-1000"
    assert not is_snapshot("/runs/7b/snapshots/step-1000")
