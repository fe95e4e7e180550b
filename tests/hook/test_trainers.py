"""Laws of the hook in real trainers: announced checkpoints are whole, durable and kept."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dev_cluster.testing import wait_until

from coordinator import hook
from coordinator.intake import checkpoint
from coordinator.intake.inbox import Inbox, Notice
from evaljobs.contract.paths import WorkPaths

pytestmark = pytest.mark.model


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No grace and no memory of other tests; launchers' variables away."""
    monkeypatch.setattr(hook, "_announced", {})
    monkeypatch.setattr(hook, "PIN_GRACE_SECONDS", 0.0)
    monkeypatch.setattr(hook, "_warned", set())
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    return


def announced(work: Path) -> list[Notice]:
    assert hook.flush(60)
    return [file.notice for file in Inbox(WorkPaths(work)).look()]


def _trainer(model_dir: Path, output: Path, callback: Any, **more: Any) -> Any:
    import torch
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        Trainer,
        TrainingArguments,
        default_data_collator,
    )

    model = AutoModelForCausalLM.from_pretrained(model_dir)
    rows = [{"input_ids": torch.arange(3, 11), "labels": torch.arange(3, 11)} for _ in range(16)]
    arguments = TrainingArguments(
        output_dir=str(output),
        max_steps=4,
        save_steps=1,
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=10,
        **more,
    )
    return Trainer(
        model=model,
        args=arguments,
        train_dataset=rows,
        callbacks=[callback],
        data_collator=default_data_collator,
        processing_class=AutoTokenizer.from_pretrained(model_dir),
    )


def test_transformers_announces_whole_checkpoints_and_spares_pinned_ones(tmp_path, tiny_model_dir):
    """Four saves are announced with their steps; with keep=1 a pinned one outlives rotation."""
    work, output = tmp_path / "work", tmp_path / "run"
    work.mkdir()
    callback: Any = hook.transformers_callback("core", work, keep=1)
    seen = []

    class Daemon(type(callback).__mro__[1]):  # type: ignore[misc] (transformers.TrainerCallback)
        """Looks at each checkpoint when it was announced; pins the second as a daemon would."""

        def on_save(self, _args: Any, state: Any, _control: Any, **_more: Any) -> None:
            folder = output / f"checkpoint-{state.global_step}"
            seen.append(checkpoint.inspect(folder, step=state.global_step).step)
            if state.global_step == 2:
                (folder / f"{hook.PIN_PREFIX}x").touch()

    trainer = _trainer(tiny_model_dir, output, callback)
    trainer.add_callback(Daemon())
    trainer.train()
    assert [(n.step, n.checkpoint) for n in announced(work)] == [
        (step, str(output / f"checkpoint-{step}")) for step in (1, 2, 3, 4)
    ]
    assert seen == [1, 2, 3, 4]
    assert {p.name for p in output.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}


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

    def export(folder: str) -> Path:
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

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1
    )
    try:
        saving: Any = dcp.async_save({"model": model.state_dict()}, checkpoint_id=saved)
        hook.on_dcp_saved(saving, str(saved), 5, "core", export=export, work_dir=work, rank=0)
        assert announced(work) == [], "the save has not ended, or is not exported"
        gate.set()
        getattr(saving, "upload_completion", saving).result(60)
        wait_until(lambda: (work / "inbox").exists() and bool(announced(work)))
    finally:
        torch.distributed.destroy_process_group()
    (notice,) = announced(work)
    assert (notice.step, notice.suite) == (5, "core")
    checkpoint.inspect(notice.checkpoint)
    weights = load_file(Path(notice.checkpoint) / "model.safetensors")
    expected = model.state_dict()
    assert all(torch.equal(expected[name], value) for name, value in weights.items())


def test_a_dcp_save_that_failed_is_not_announced(tmp_path, capsys, monkeypatch):
    """One warning; training goes on."""
    from concurrent.futures import Future

    monkeypatch.setattr(hook, "_warned", set())
    saving: Future[None] = Future()
    hook.on_dcp_saved(saving, "/c", 1, work_dir=tmp_path)
    saving.set_exception(OSError("disk full"))
    assert announced(tmp_path) == []
    assert "disk full" in capsys.readouterr().err
    hook.on_dcp_saved(
        None, "/c", 1, work_dir=tmp_path
    )  # what has no future cannot be followed, and does not raise


def test_lightning_announces_what_its_export_wrote(tmp_path):
    """Each checkpoint of ModelCheckpoint once, with weights of that very step."""
    lightning = pytest.importorskip("lightning")
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, _index: int) -> Any:
            return self.layer(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def export(module: Any, step: int) -> Path:
        (saved,) = (tmp_path / "run").glob(f"*step={step}.ckpt")
        expected = torch.load(saved, weights_only=False)["state_dict"]["layer.weight"]
        assert torch.equal(module.layer.weight, expected), "the export sees the weights that were saved"
        return saved.with_suffix("")

    saver = ModelCheckpoint(dirpath=tmp_path / "run", every_n_train_steps=2, save_top_k=-1)
    callback = hook.lightning_callback(export, "core", tmp_path)
    trainer = lightning.Trainer(
        max_steps=6,
        accelerator="cpu",
        devices=1,
        callbacks=[saver, callback],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = torch.utils.data.DataLoader(torch.randn(32, 4), batch_size=4)
    trainer.fit(Module(), loader)
    assert [n.step for n in announced(tmp_path)] == [2, 4, 6]
