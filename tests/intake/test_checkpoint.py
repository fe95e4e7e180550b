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
from support.node_memory import make_checkpoint, safetensors

from coordinator.intake.checkpoint import CheckpointError, inspect, inspect_raw
from evaljobs.staging.fingerprint import BadWeights, is_safe_name, read_header

NESTED = (500_000).to_bytes(8, "little") + b'{"a":' * 100_000
ENDLESS = (30).to_bytes(8, "little") + b'{"a": {"data_offsets":[0,1e999]}}'[:30]


def names(path: Path) -> list[str]:
    return [f.name for f in inspect(path, allow_bin=True).files]


def test_sharded_and_single_file(tmp_path: Path) -> None:
    """Config, tokenizer and weights, with the index where there are shards; nothing that trainers leave beside them."""
    sharded = names(make_checkpoint(tmp_path / "a", shards=2))
    assert sharded == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    assert names(make_checkpoint(tmp_path / "b", shards=1)) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_a_hub_snapshot_of_links_is_resolved(tmp_path: Path) -> None:
    """A snapshot folder whose files are links into a blob store: sizes and times are the blobs'."""
    blobs = make_checkpoint(tmp_path / "blobs")
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(Path("../..") / "blobs" / file.name)
    assert inspect(snapshot).files == inspect(blobs).files
    assert inspect(snapshot).digest == inspect(blobs).digest


def test_the_folder_may_be_a_link(tmp_path: Path) -> None:
    """`latest -> step-1`: the source is the folder itself, which does not move on."""
    folder = make_checkpoint(tmp_path / "step-1")
    (tmp_path / "latest").symlink_to(folder)
    assert inspect(tmp_path / "latest", step=1) == inspect(folder, step=1)


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (shutil.rmtree, "no such folder"),
        (lambda d: (d / "config.json").unlink(), "no config.json"),
        (lambda d: (d / "config.json").write_text("{"), "half-written"),
        (
            lambda d: (d / "config.json").write_text('{"architectures": ["BertForMaskedLM"]}'),
            "BertForMaskedLM",
        ),
        (lambda d: (d / "config.json").write_text("{}"), "no causal language model"),
        (lambda d: (d / "config.json").write_text('{"architectures": 5}'), "no list of names"),
        (lambda d: (d / "config.json").write_text('{"auto_map": 5}'), "auto_map no table"),
        (lambda d: (d / "config.json").write_text('{"a":' * 100_000), "no valid JSON"),
        (lambda d: (d / "config.json").write_text('{"architectures": ["a\\nb"]}'), r"name a\?b"),
        (lambda d: (d / "model.safetensors").write_bytes(NESTED), "no header"),
        (lambda d: (d / "model.safetensors").write_bytes(ENDLESS), "no header"),
        (lambda d: (d / "tokenizer.json").unlink(), "no tokenizer"),
        (
            lambda d: (d / "model-00002-of-00003.safetensors").unlink(),
            "model-00002-of-00003.safetensors, which is not there",
        ),
        (lambda d: os.truncate(d / "model-00002-of-00003.safetensors", 5000), "the file has 5000"),
        (lambda d: os.truncate(d / "model-00002-of-00003.safetensors", 4), "half-written"),
        (lambda d: safetensors(d / "model-00002-of-00003.safetensors", {"other": b"x"}), "lacks t1"),
        (lambda d: (d / "model.safetensors.index.json").unlink(), "incomplete"),
        (
            lambda d: (d / "model.safetensors.index.json").write_text('{"weight_map": {"t": "../x"}}'),
            "no file of this",
        ),
    ],
)
def test_what_cannot_be_loaded_is_refused_in_one_line(tmp_path: Path, break_it, says: str) -> None:
    """Each fault has its own one-line message, which names the place."""
    folder = make_checkpoint(tmp_path / "step-1")
    break_it(folder)
    with pytest.raises(CheckpointError, match=says) as error:
        inspect(folder)
    assert "\n" not in str(error.value)
    assert "step-1" in str(error.value)


@pytest.mark.parametrize(
    "architecture",
    ["LlamaForCausalLM", "GPT2LMHeadModel", "OPTForCausalLM", "MambaForCausalLM", "OpenAIGPTLMHeadModel"],
)
def test_causal_models_are_accepted_by_rule(tmp_path: Path, architecture: str) -> None:
    """Names by the libraries' rule, custom code by its auto_map, text models inside multimodal ones."""
    folder = make_checkpoint(tmp_path / "x")
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    assert inspect(folder)
    (folder / "config.json").write_text(json.dumps({"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}))
    (folder / "modeling_x.py").write_text("")
    assert "modeling_x.py" in names(folder)
    (folder / "config.json").write_text(
        json.dumps({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {}})
    )
    assert inspect(folder)


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


def test_a_place_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    """Links in a circle, a name that no file can have, one that is too long."""
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    for place in (tmp_path / "a", "/x\0y", tmp_path / ("x" * 300)):
        for look in (inspect, lambda place: inspect_raw(place, convert="c {src} {dst}")):
            with pytest.raises(CheckpointError):
                look(place)


def test_a_file_and_the_folder_above_checkpoints_say_what_to_name(tmp_path: Path) -> None:
    for step in (200, 100, 1000):
        make_checkpoint(tmp_path / f"step-{step}")
    with pytest.raises(CheckpointError, match="it holds step-100, step-200, step-1000: name one of them"):
        inspect(tmp_path)
    with pytest.raises(CheckpointError, match="is a file, not a folder"):
        inspect(tmp_path / "step-100" / "config.json")


def test_a_file_whose_name_is_no_text_is_refused(tmp_path: Path) -> None:
    """A tokenizer's, here, in bytes that are no UTF-8: nothing could name it to a job."""
    folder = make_checkpoint(tmp_path / "x", shards=1, size=100)
    (folder / os.fsdecode(b"tokenizer-\xff.json")).write_text("{}")
    with pytest.raises(CheckpointError, match="no text"):
        inspect(folder)


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
    """The most alike first, and how many more; none where there is none."""
    for name in ("step-100", "step-2000", "logs", "step-1001", "other"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    (tmp_path / "runs" / "step-100x").touch()
    with pytest.raises(
        CheckpointError,
        match=r"no such folder \(beside it: step-100, step-1001, step-2000 and 2 more\); name",
    ):
        inspect(tmp_path / "runs" / "step-1002")
    with pytest.raises(CheckpointError, match="no such folder; name a checkpoint"):
        inspect(tmp_path / "none" / "step-1002")
