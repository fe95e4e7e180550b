"""Laws of which checkpoint of a training is complete, for each kind that a saver writes."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from transformers import TrainingArguments

from coordinator.operations.supervise.checkpoints import newest_complete

WEIGHTS = {"w": torch.zeros(64)}
RANKS = range(4)


def _sharded(folder: Path, step: int) -> Iterator[Path]:
    """Hugging Face shards, then their index."""
    shards = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    for name in shards:
        save_file(WEIGHTS, folder / name)
        yield folder / name
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict(zip("abc", shards, strict=True))})
    )
    yield folder / "model.safetensors.index.json"
    (folder / "config.json").write_text("{}")
    yield folder / "config.json"


def _trainer(folder: Path, step: int) -> Iterator[Path]:
    """Trainer with four ranks: trainer_state.json last."""
    yield from _sharded(folder, step)
    names = (
        "training_args.bin",
        "optimizer.pt",
        "scheduler.pt",
        *(f"rng_state_{rank}.pth" for rank in RANKS),
    )
    for name in names:
        torch.save(TrainingArguments(report_to=[]) if "args" in name else WEIGHTS, folder / name)
        yield folder / name
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    yield folder / "trainer_state.json"


def _dcp(folder: Path, step: int) -> Iterator[Path]:
    """torch's own saver, several files, in two folders as torchtitan's and others' have them."""
    for name in ("model", "optim"):
        writer = dcp.FileSystemWriter(folder / name, single_file_per_rank=False)
        dcp.save({"a": torch.zeros(9), "b": torch.ones(9)}, storage_writer=writer, no_dist=True)
        yield from sorted((folder / name).iterdir(), key=lambda f: f.name == ".metadata")


def _deepspeed(folder: Path, step: int, *, zero: int) -> Iterator[Path]:
    """ZeRO of stage 1 or 3 with four ranks; `latest` last."""
    head = {"dp_world_size": 4, "mp_world_size": 1, "module": WEIGHTS}
    models = ["mp_rank_00_model_states.pt"]
    if zero == 3:
        models = [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in RANKS]
    for name in (*models, *(f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in RANKS)):
        torch.save(head, folder / name)
        yield folder / name
    (folder.parent / "latest").write_text(folder.name)
    yield folder.parent / "latest"


def _megatron(folder: Path, step: int) -> Iterator[Path]:
    """Two tensor by two pipeline ranks; the tracker last."""
    args = argparse.Namespace(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    for tensor, pipeline in ((0, 0), (1, 0), (0, 1), (1, 1)):
        rank = folder / f"mp_rank_{tensor:02d}_{pipeline:03d}"
        rank.mkdir()
        for name in ("model_optim_rng.pt", "distrib_optim.pt"):
            torch.save({"args": args, "model": WEIGHTS}, rank / name)
            yield rank / name
    (folder.parent / "latest_checkpointed_iteration.txt").write_text(str(step))
    yield folder.parent / "latest_checkpointed_iteration.txt"


def _rank_files(folder: Path, step: int) -> Iterator[Path]:
    for rank in RANKS:
        torch.save(WEIGHTS, folder / f"rank{rank}-step{step}.pt")
        yield folder / f"rank{rank}-step{step}.pt"


KINDS: dict[str, tuple[str, Callable[[Path, int], Iterator[Path]]]] = {
    "Hugging Face shards": ("step-{}", _sharded),
    "Trainer": ("checkpoint-{}", _trainer),
    "DCP": ("step-{}", _dcp),
    "DeepSpeed, ZeRO 1": ("global_step{}", lambda folder, step: _deepspeed(folder, step, zero=1)),
    "DeepSpeed, ZeRO 3": ("global_step{}", lambda folder, step: _deepspeed(folder, step, zero=3)),
    "Megatron": ("iter_{:07d}", _megatron),
    "rank files": ("step_{}", _rank_files),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_save_that_was_killed_at_any_moment_is_never_chosen(kind: str, tmp_path: Path) -> None:
    """Killed within and behind each file that its saver writes: the checkpoint before counts, and the reason is said. Once all
    is written, the new one counts; later again, without any one of its files, the one before."""
    name, save = KINDS[kind]
    place = tmp_path / "runs"
    for step in (100, 200):
        (place / name.format(step)).mkdir(parents=True)
        list(save(place / name.format(step), step))
    before = place / name.format(200)
    assert newest_complete(str(place)) == (before, [])
    trackers = {f: f.read_bytes() for f in place.iterdir() if f.is_file()}
    newest = place / name.format(300)
    newest.mkdir()
    written = {f: f.read_bytes() for f in save(newest, 300)}
    assert newest_complete(str(place)) == (newest, [])
    moments = 0
    shutil.rmtree(newest)
    for file, text in trackers.items():
        file.write_bytes(text)
    for file, text in written.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        for size in (0, len(text) // 2, len(text) - 1) if file not in trackers else (0,):
            file.write_bytes(text[:size])
            found, left = newest_complete(str(place))
            assert found == before, f"{file.name} cut to {size} of {len(text)} bytes"
            assert len(left) == 1
            moments += 1
        file.write_bytes(text)
        done = newest_complete(str(place))[0]
        assert done == (newest if file == [*written][-1] else before), f"behind {file.name}"
    for file in (f for f in written if f not in trackers):
        file.unlink()
        assert newest_complete(str(place))[0] == before, f"without {file.name}"
        file.write_bytes(written[file])
    assert moments > 10


def test_fewer_ranks_that_the_save_itself_states_are_complete(tmp_path: Path) -> None:
    """A training that goes on with fewer ranks: what its table of contents lists counts, and not the ranks of before."""
    for step, ranks in ((100, 4), (200, 2)):
        folder = tmp_path / f"global_step{step}"
        folder.mkdir()
        head = {"dp_world_size": ranks, "mp_world_size": 1}
        for name in (
            "mp_rank_00_model_states.pt",
            *(f"zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in range(ranks)),
        ):
            torch.save(head, folder / name)
    assert newest_complete(str(tmp_path)) == (tmp_path / "global_step200", [])


class _Shell:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        import os

        return os.system, ("touch hit",)


def test_no_code_of_a_pickle_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "global_step100"
    folder.mkdir(parents=True)
    torch.save({"dp_world_size": 1, "mp_world_size": 1, "a": _Shell()}, folder / "mp_rank_00_model_states.pt")
    assert newest_complete(str(folder.parent)) == (folder, [])
    assert not (tmp_path / "hit").exists()


def test_names_in_the_making_do_not_count_and_a_glob_chooses(tmp_path: Path) -> None:
    assert newest_complete(str(tmp_path / "none")) == (None, [])
    for name in ("step-100", "step-200", "step-300.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "notes-400.txt").touch()
    assert newest_complete(str(tmp_path)) == (tmp_path / "step-200", [])
    assert newest_complete(f"{tmp_path}/step-1*") == (tmp_path / "step-100", [])
