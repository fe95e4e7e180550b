"""Laws of the hook in real trainers: announced checkpoints are whole, durable and kept."""

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
from dev_cluster.testing import wait_until

from coordinator import hook
from coordinator.intake import checkpoint
from coordinator.intake.inbox import Inbox, gather_values
from coordinator.intake.suites import load_suite
from evaljobs.contract.paths import WorkPaths

pytestmark = pytest.mark.model


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    """No grace and no memory of other tests; launchers' variables away."""
    monkeypatch.setattr(hook, "_announced", {})
    monkeypatch.setattr(hook, "PIN_GRACE_SECONDS", 0.0)
    monkeypatch.setattr(hook, "_warned", set())
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


def announced(work):
    assert hook.flush(60)
    return [file.notice for file in Inbox(WorkPaths(work)).look()]


def test_transformers_announces_whole_checkpoints_and_spares_pinned_ones(
    tmp_path, tiny_model_dir, monkeypatch
):
    """Four saves are announced with their steps and values of the weights that were saved; with keep=1 a pinned one outlives
    rotation. A supervision sees each step and its loss."""
    import torch
    import transformers as hf

    from evaljobs.trial.trained_values import compare_parts, read_parts, stored_tensors

    work, output, seen = tmp_path / "work", tmp_path / "run", []
    work.mkdir()
    monkeypatch.setenv(hook.HEARTBEATS_VARIABLE, str(tmp_path / "beats"))
    monkeypatch.setattr(hook, "BEAT_SECONDS", 0.0)

    class Daemon(hf.TrainerCallback):
        """Looks at each checkpoint when it was announced; pins the second as a daemon would."""

        def on_save(self, _args, state, _control, **_more):
            folder = output / f"checkpoint-{state.global_step}"
            seen.append(checkpoint.inspect_checkpoint(folder, step=state.global_step).step)
            if state.global_step == 2:
                (folder / f"{hook.PIN_PREFIX}x").touch()

    rows = [{"input_ids": torch.arange(3, 11), "labels": torch.arange(3, 11)} for _ in range(16)]
    settings = {"max_steps": 4, "save_steps": 1, "logging_steps": 1, "per_device_train_batch_size": 2}
    settings |= {"report_to": []}
    hf.Trainer(
        model=hf.AutoModelForCausalLM.from_pretrained(tiny_model_dir),
        args=hf.TrainingArguments(output_dir=str(output), use_cpu=True, disable_tqdm=True, **settings),
        train_dataset=rows,
        callbacks=[hook.transformers_callback("core", work, keep=1, fingerprint=True), Daemon()],
        data_collator=hf.default_data_collator,
        processing_class=hf.AutoTokenizer.from_pretrained(tiny_model_dir),
    ).train()
    saved = [(step, str(output / f"checkpoint-{step}")) for step in (1, 2, 3, 4)]
    assert [(n.step, n.checkpoint) for n in announced(work)] == saved
    assert seen == [1, 2, 3, 4]
    wait_until(lambda: len((tmp_path / "beats").read_text().splitlines()) >= 8, "heartbeats")
    beats = [json.loads(line) for line in (tmp_path / "beats").read_text().splitlines()]
    assert [beat["step"] for beat in beats if beat["loss"] is not None] == [1, 2, 3, 4]
    assert {p.name for p in output.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}
    for file in Inbox(WorkPaths(work)).look():
        step = file.notice.step
        gather_values([file], paths := WorkPaths(work).evaluation(f"id-{step}"))
        parts = list(read_parts(paths.trained_values.read_bytes()))
        for other in (2, 4):
            files = stored_tensors(output / f"checkpoint-{other}")
            assert bool(compare_parts(parts, files, files)[0]) == (other != step)


def test_dcp_is_announced_when_it_is_durable(tmp_path, tiny_model_dir):
    """No notice before async_save has ended; then the exported folder has the same weights."""
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    work, saved = tmp_path / "work", tmp_path / "step-5"
    work.mkdir()
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    gate = threading.Event()

    def export(folder):
        assert (Path(folder) / ".metadata").exists(), "DCP writes it last"
        assert gate.wait(60)
        other = AutoModelForCausalLM.from_config(model.config)
        state = {"model": other.state_dict()}
        dcp.load(state, checkpoint_id=folder, no_dist=True)
        other.load_state_dict(state["model"])
        target = Path(f"{folder}-hf")
        other.save_pretrained(target)
        AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(target)
        return target

    place = f"file://{tmp_path / 'rendezvous'}"
    torch.distributed.init_process_group("gloo", init_method=place, rank=0, world_size=1)
    try:
        saving = dcp.async_save({"model": model.state_dict()}, checkpoint_id=saved)
        hook.on_dcp_saved(saving, str(saved), 5, "core", export=export, work_dir=work, rank=0)
        assert announced(work) == [], "the save has not ended, or is not exported"
        gate.set()
        getattr(saving, "upload_completion", saving).result(60)
        wait_until(lambda: (work / "inbox").exists() and bool(announced(work)))
    finally:
        torch.distributed.destroy_process_group()
    (notice,) = announced(work)
    assert (notice.step, notice.suite) == (5, "core")
    checkpoint.inspect_checkpoint(notice.checkpoint)
    weights = load_file(Path(notice.checkpoint) / "model.safetensors")
    expected = model.state_dict()
    assert all(torch.equal(expected[name], value) for name, value in weights.items())


SHARDED = """
import sys
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch import nn
from coordinator import hook

rank, work, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
whole = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
whole["columns"] = torch.randn(4, 9)
model.register_parameter("columns", nn.Parameter(distribute_tensor(whole["columns"], mesh, [Shard(1)])))
if rank == 0:
    save_file(whole, f"{folder}/model.safetensors")
assert hook.notify(folder, 7, "core", work_dir=work, rank=rank, fingerprint=model) == (rank == 0)
assert hook.flush(60)
dist.barrier()
"""


def test_each_rank_leaves_the_values_of_its_shards_and_together_they_are_of_all(tmp_path):
    """FSDP in uneven rows, a DTensor in columns. Rank 0's notice comes when the values of both are there."""
    from evaljobs.trial.trained_values import compare_parts, read_parts, stored_tensors

    work, folder = tmp_path / "work", tmp_path / "c"
    for each in (work, folder):
        each.mkdir()
    env = {**os.environ, "PYTHONPATH": str(Path(hook.__file__).parents[1])}
    ranks = [
        subprocess.Popen([sys.executable, "-c", SHARDED, str(rank), str(work), str(folder)], env=env)
        for rank in range(2)
    ]
    assert [each.wait(120) for each in ranks] == [0, 0]
    paths = WorkPaths(work).evaluation("id")
    gather_values(Inbox(WorkPaths(work)).look(), paths)
    parts = list(read_parts(paths.trained_values.read_bytes()))
    files = stored_tensors(folder)
    assert compare_parts(parts, files, files) == ({}, set(files))
    for name in files:
        for place in range(files[name].numel()):
            wrong = files[name].clone()
            wrong.view(-1)[place] += 1
            assert set(compare_parts(parts, {**files, name: wrong}, files)[0]) == {name}


def test_a_dcp_save_that_failed_is_not_announced(tmp_path, capsys):
    """One warning; training goes on. What has no future cannot be followed, and does not raise."""
    saving = Future()
    hook.on_dcp_saved(saving, "/c", 1, work_dir=tmp_path)
    saving.set_exception(OSError("disk full"))
    hook.on_dcp_saved(None, "/c", 1, work_dir=tmp_path)
    assert announced(tmp_path) == []
    assert "disk full" in capsys.readouterr().err


def test_lightning_announces_what_its_export_wrote(tmp_path):
    """Each checkpoint of ModelCheckpoint once, with weights of that very step, and values of the model that `fingerprint` finds."""
    lightning = pytest.importorskip("lightning")
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch, _index):
            return self.layer(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def export(module, step):
        (saved,) = (tmp_path / "run").glob(f"*step={step}.ckpt")
        expected = torch.load(saved, weights_only=False)["state_dict"]["layer.weight"]
        assert torch.equal(module.layer.weight, expected), "the export sees the weights that were saved"
        return saved.with_suffix("")

    saver = ModelCheckpoint(dirpath=tmp_path / "run", every_n_train_steps=2, save_top_k=-1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    callbacks = [
        saver,
        hook.lightning_callback(export, "core", tmp_path, fingerprint=lambda module: module.layer),
        hook.lightning_callback(export, "code", tmp_path, fingerprint=lambda module: module.missing),
    ]
    trainer = lightning.Trainer(max_steps=6, accelerator="cpu", devices=1, callbacks=callbacks, **quiet)
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(32, 4), batch_size=4))
    notices = announced(tmp_path)
    assert [(n.step, n.suite, bool(n.trained_values)) for n in notices] == [
        (step, suite, suite == "core") for step in (2, 4, 6) for suite in ("core", "code")
    ]
    for notice in notices[::2]:
        values = json.loads((tmp_path / "inbox" / f"trained-{notice.trained_values}-0.values").read_text())
        names = [row["names"] for group in values["groups"] for row in group["rows"]]
        assert names == [["weight"], ["bias"]]


# --- the demo's training ----------------------------------------------------------------------------------------------


def test_the_demos_suite_is_one_and_its_sums_are_held_out(tmp_path, monkeypatch):
    """It loads; each choice list holds the right answer once; training has none of the sums. Another folder is left alone."""
    import demo_training as demo

    suite = load_suite(str(demo.write_suite(tmp_path / "demo")))
    assert [t.name for t in suite.tasks] == ["addition", "addition_choice"]
    trained = {f"{a:02d}+{b:02d}=" for a, b in demo.sums()[0]}
    files = sorted((tmp_path / "demo" / "tasks").glob("*.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert len(rows) == demo.GENERATED + demo.CHOICES
    for row in rows:
        assert row["question"] not in trained
        answer = f"{sum(map(int, row['question'].rstrip('=').split('+'))):03d}"
        given = row["choices"][row["label"]] if "choices" in row else row["answer"]
        assert given == answer
        assert row.get("choices", [answer]).count(answer) == 1
    (tmp_path / "work").mkdir()
    monkeypatch.setattr("sys.argv", ["demo-training", "--folder", str(tmp_path)])
    with pytest.raises(SystemExit) as refused:
        demo.main()
    assert refused.value.code == 2
    assert (tmp_path / "work").exists()
