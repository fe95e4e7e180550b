"""What a folder must hold to be evaluated, and when two of them are the same."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.node_memory import make_checkpoint

from coordinator.intake.checkpoint import CheckpointError, inspect, inspect_raw
from evaljobs.staging.fingerprint import BadWeights, is_safe_name, read_header


def names(path: Path) -> list[str]:
    return [f.name for f in inspect(path, allow_bin=True).files]


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
def test_a_checkpoint_is_its_config_tokenizer_weights_and_the_code_that_a_config_names(
    tmp_path: Path, kind: str
) -> None:
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
    found, snapshot = (inspect(place, allow_bin=True) for place in (folder, tmp_path / "snapshot"))
    assert (snapshot.files, snapshot.digest) == (found.files, found.digest)
    (tmp_path / "latest").symlink_to(folder)
    assert inspect(tmp_path / "latest", allow_bin=True, step=1) == inspect(folder, allow_bin=True, step=1)
    (folder / "modeling_x.py").write_text("a = 2")
    assert (inspect(folder, allow_bin=True).digest != found.digest) == ("modeling_x.py" in more)


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
    tmp_path: Path, file: str, held: object, header: object
) -> None:
    """In its config, index and sums, and in the header of its weights."""
    folder = tmp_path / "any"
    shutil.rmtree(folder, ignore_errors=True)
    make_checkpoint(folder, shards=2, size=100)
    (folder / file).write_text(json.dumps(held))
    if header is not None:
        raw = json.dumps(header).encode()
        (folder / "model-00001-of-00002.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw)
    for look in (inspect, lambda place: inspect_raw(place, convert="c {src} {dst}")):
        complaint = ""
        try:
            look(folder)
        except CheckpointError as error:
            complaint = str(error)
        assert complaint.isprintable()


@settings(max_examples=60)
@given(data=st.binary(max_size=200), name=st.text(max_size=12))
def test_any_bytes_are_a_header_that_fits_and_any_name_that_passes_stays_inside(
    tmp_path: Path, data: bytes, name: str
) -> None:
    """Or BadWeights. A safe name joins to a path below its folder, spelt as it is."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with contextlib.suppress(BadWeights):
        assert len(read_header(path).raw) <= len(data) - 8
    assert not is_safe_name(name) or os.path.normpath(f"/folder/{name}") == f"/folder/{name}"


def test_a_missing_checkpoint_names_the_folders_beside_it(tmp_path: Path) -> None:
    """The most alike first, and how many more."""
    for name in ("step-100", "step-2000", "logs", "step-1001", "other"):
        (tmp_path / name).mkdir()
    with pytest.raises(CheckpointError, match=r"beside it: step-100, step-1001, step-2000 and 2 more"):
        inspect(tmp_path / "step-1002")
