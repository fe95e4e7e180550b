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


def test_sharded_and_single_file(tmp_path: Path) -> None:
    """Config, tokenizer and weights, with the index where there are shards; nothing that trainers leave beside them."""
    single = ["config.json", "model.safetensors", "tokenizer.json"]
    assert names(make_checkpoint(tmp_path / "b", shards=1)) == single
    sharded = ["config.json", "model.safetensors.index.json", "tokenizer.json"]
    sharded += [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert names(make_checkpoint(tmp_path / "a", shards=2)) == sorted(sharded)


def test_links_are_resolved(tmp_path: Path) -> None:
    """A snapshot folder of links into a blob store: sizes and times are the blobs'. `latest -> step-1`: the folder itself."""
    blobs = make_checkpoint(tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for file in blobs.iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    snapshot = inspect(tmp_path / "snapshot")
    assert (snapshot.files, snapshot.digest) == (inspect(blobs).files, inspect(blobs).digest)
    (tmp_path / "latest").symlink_to(blobs)
    assert inspect(tmp_path / "latest", step=1) == inspect(blobs, step=1)


CAUSAL = [
    *({"architectures": [name]} for name in ("LlamaForCausalLM", "GPT2LMHeadModel", "OpenAIGPTLMHeadModel")),
    {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {}},
    {"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}},
]


@pytest.mark.parametrize("config", CAUSAL, ids=str)
def test_causal_models_are_accepted_by_rule(tmp_path: Path, config: dict[str, object]) -> None:
    """Names by the libraries' rule, custom code by its auto_map, text models inside multimodal ones."""
    folder = make_checkpoint(tmp_path / "x")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_x.py").write_text("")
    assert ("modeling_x.py" in names(folder)) == ("auto_map" in config)


@pytest.mark.parametrize("config", ["config.json", "tokenizer_config.json"])
def test_python_files_count_where_either_config_names_code(tmp_path: Path, config: str) -> None:
    """A tokenizer's class alone may lie in the checkpoint: its file is staged, and an edit of it is seen."""
    folder = make_checkpoint(tmp_path / "x")
    (folder / "tokenization_x.py").write_text("a = 1")
    assert "tokenization_x.py" not in names(folder)
    held = {"architectures": ["LlamaForCausalLM"], "auto_map": {"AutoTokenizer": ["tokenization_x.X", None]}}
    (folder / config).write_text(json.dumps(held))
    assert "tokenization_x.py" in names(folder)
    digest = inspect(folder).digest
    (folder / "tokenization_x.py").write_text("a = 2")
    assert inspect(folder).digest != digest


def test_bin_weights_only_where_allowed(tmp_path: Path) -> None:
    """pytorch_model.bin runs code when loaded: refused unless allowed; a truncated one is always refused."""
    folder = make_checkpoint(tmp_path / "x", shards=1)
    (folder / "model.safetensors").unlink()
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w") as archive:
        archive.writestr("archive/data.pkl", b"x" * 1000)
    with pytest.raises(CheckpointError, match="run code"):
        inspect(folder)
    assert "pytorch_model.bin" in names(folder)
    os.truncate(folder / "pytorch_model.bin", 500)
    with pytest.raises(CheckpointError, match="truncated"):
        inspect(folder, allow_bin=True)


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
@given(data=st.binary(max_size=200))
def test_no_file_makes_the_header_reader_fail_otherwise(tmp_path: Path, data: bytes) -> None:
    """Any bytes are a header that fits, or BadWeights."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with contextlib.suppress(BadWeights):
        assert len(read_header(path).raw) <= len(data) - 8


@given(st.text(max_size=12))
def test_safe_names_stay_inside(name: str) -> None:
    """A name that passes joins to a path below its folder, spelt as it is."""
    if is_safe_name(name):
        joined = Path(os.path.normpath(f"/folder/{name}"))
        assert str(joined) == f"/folder/{name}"


def test_a_missing_checkpoint_names_the_folders_beside_it(tmp_path: Path) -> None:
    """The most alike first, and how many more."""
    for name in ("step-100", "step-2000", "logs", "step-1001", "other"):
        (tmp_path / name).mkdir()
    with pytest.raises(CheckpointError, match=r"beside it: step-100, step-1001, step-2000 and 2 more"):
        inspect(tmp_path / "step-1002")
