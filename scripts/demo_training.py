"""Train a tiny Llama to add two-digit numbers with the hook on; a daemon evaluates each checkpoint meanwhile.

Everything is made here from a seed: model, character tokenizer, suite (one generated, one multiple-choice task over sums
that training never sees). Only the hook ties training to evalspan; `evalspan report --series` draws the curve at the end.
Training runs below `evalspan supervise`: kill it, and it goes on from its newest checkpoint with the same losses.
With --suite each checkpoint gets the scores of another suite, too; with --settings the daemon works on another cluster.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from coordinator import hook

MARK = ".demo-training"  # in folders that this script may empty
CHARACTERS = "0123456789+=;"
HELD_OUT = 200  # sums that only the suite holds
GENERATED, CHOICES = 100, 100
BATCH, WIDTH, LAYERS, RATE = 128, 64, 4, 4e-3
HERE = '[cluster]\nkind = "local"\nslots = 1\n'

SUITE = Path(__file__).with_name("demo_suite")  # suite file, tasks and what loads their rows


def sums() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """All pairs of two-digit numbers: those to train on, and those held out."""
    pairs = [(a, b) for a in range(100) for b in range(100)]
    random.Random(0).shuffle(pairs)
    return pairs[HELD_OUT:], pairs[:HELD_OUT]


def write_suite(folder: Path) -> Path:
    """Suite file, tasks and rows; the suite file's path."""
    rng = random.Random(1)
    _, held_out = sums()
    shutil.copytree(SUITE, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))

    def write(name: str, rows: list[dict[str, Any]]) -> None:
        (folder / "tasks" / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    generated = held_out[:GENERATED]
    rows = [{"question": f"{a:02d}+{b:02d}=", "answer": f"{a + b:03d}"} for a, b in generated]
    write("addition.jsonl", rows)
    lists = []
    for a, b in held_out[GENERATED : GENERATED + CHOICES]:
        near = [f"{(a + b + off) % 199:03d}" for off in (1, -1, 10)]
        label = rng.randrange(4)
        near.insert(label, f"{a + b:03d}")
        lists.append({"question": f"{a:02d}+{b:02d}=", "choices": near, "label": label})
    write("addition_choice.jsonl", lists)
    return folder / "addition.toml"


def make_tokenizer() -> Any:
    """A token per character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    words = {c: i for i, c in enumerate([*CHARACTERS, "<unk>"])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))  # noqa: S106 (no password)
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), ";") | {"unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def save(model: Any, tokenizer: Any, folder: Path, optimizer: Any = None) -> None:
    """A Hugging Face folder that is there whole or not at all; with an optimizer: with what training needs to go on."""
    import torch  # noqa: PLC0415

    partial = folder.with_name(f".{folder.name}.partial")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    if optimizer is not None:
        state = {"optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}
        torch.save(state, partial / "training.pt")
    partial.replace(folder)


def make_model(size: int, folder: str) -> Any:
    """A model of `size` tokens: new, or the one in `folder`."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    if folder:
        return LlamaForCausalLM.from_pretrained(folder)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size,
            hidden_size=WIDTH,
            intermediate_size=4 * WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=2048,
            bos_token_id=CHARACTERS.index(";"),
            eos_token_id=CHARACTERS.index(";"),
        )
    )


def saves(chosen: argparse.Namespace) -> range:
    """Steps before which there is a checkpoint."""
    return range(0, chosen.steps + 1, max(1, chosen.steps // chosen.checkpoints))


def train(folder: Path, chosen: argparse.Namespace) -> None:
    """The steps from the checkpoint in $EVALSPAN_RESUME_FROM on, or all; each checkpoint is announced for each suite."""
    import torch  # noqa: PLC0415
    from transformers.utils import logging  # noqa: PLC0415

    logging.disable_progress_bar()
    torch.set_num_threads(1)  # the other core is the trials'
    torch.manual_seed(0)
    tokenizer, begin = make_tokenizer(), os.environ.get("EVALSPAN_RESUME_FROM", "")
    ids = tokenizer([f"{a:02d}+{b:02d}={a + b:03d};" for a, b in sums()[0]], return_tensors="pt")["input_ids"]
    model = make_model(len(tokenizer), begin)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1, betas=(0.9, 0.98))
    first, began = int(begin.rpartition("-")[2] or 0), time.monotonic()
    if begin:
        state = torch.load(Path(begin) / "training.pt")
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
    count = sum(p.numel() for p in model.parameters())
    say(
        f"training {count / 1e6:.2f} M parameters on {len(ids)} sums from step {first} on, {HELD_OUT} others are held out"
    )
    with (folder / "losses.csv").open("a", buffering=1) as losses:
        for step in range(first, chosen.steps + 1):
            if step in saves(chosen):
                if step > first or not begin:
                    earlier = len([one for one in saves(chosen) if first <= one < step])
                    time.sleep(max(0.0, began + earlier * chosen.every - time.monotonic()))
                    save(model, tokenizer, folder / "runs" / f"step-{step}", optimizer)
                announce(folder, step, chosen)
                say(f"step {step}: saved and announced, {time.monotonic() - began:.0f} s in")
            for group in optimizer.param_groups:
                group["lr"] = RATE * min(1, (step + 1) / 50) * (1 - 0.9 * step / (chosen.steps + 1))
            batch = ids[torch.randint(len(ids), (BATCH,))]
            labels = batch.clone()
            labels[:, :6] = -100  # the question is given
            loss = model(input_ids=batch, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.write(f"{step},{loss.item()!r}\n")
            hook.heartbeat(step, loss.item())
    say(f"training took {time.monotonic() - began:.0f} s, last loss {loss.item():.3f}")


def announce(folder: Path, step: int, chosen: argparse.Namespace) -> None:
    """For each suite. What was announced before is evaluated once."""
    for suite in ["addition", *([chosen.suite] if chosen.suite else [])]:
        hook.notify(folder / "runs" / f"step-{step}", step, suite=Path(suite).stem, work_dir=folder / "work")


def say(text: str) -> None:
    print(f"==> {text}", flush=True)


def command(*arguments: str) -> list[str]:
    return [str(Path(sys.executable).with_name("evalspan")), *arguments]


def rows_of(runs: Path, config: Path) -> list[dict[str, Any]]:
    """What `evalspan report --series` tells, a row a score; none before the first evaluation is accepted."""
    import evalspan  # noqa: PLC0415 (needs the packages of .venv; --help does not)

    with contextlib.suppress(evalspan.OperatorError):
        return evalspan.series(runs, config=config)
    return []


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("demo-training"), help="where everything goes")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--checkpoints", type=int, default=6, help="besides the one before the first step")
    parser.add_argument("--every", type=float, default=0.0, help="seconds between two checkpoints at least")
    parser.add_argument(
        "--suite", default="", help="another suite for each checkpoint: a shipped one or a file"
    )
    parser.add_argument(
        "--settings", type=Path, help="the daemon's evalspan.toml, without work_dir and [watch]"
    )
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for evaluations after training")
    parser.add_argument("--train", action="store_true", help="the training alone: what supervise runs")
    chosen = parser.parse_args()
    folder = chosen.folder.absolute()
    if not chosen.train and folder.exists() and any(folder.iterdir()) and not (folder / MARK).exists():
        parser.error(f"{folder} is not empty and no demo made it: choose another --folder")
    return chosen


def main() -> int:
    chosen = arguments()
    folder: Path = chosen.folder.absolute()
    if chosen.train:
        train(folder, chosen)
        return 0
    for part in ("runs", "work", "suite"):  # what an earlier demo made here
        shutil.rmtree(folder / part, ignore_errors=True)
    runs, work, config = folder / "runs", folder / "work", folder / "evalspan.toml"
    runs.mkdir(parents=True)
    (folder / MARK).touch()
    (folder / "losses.csv").unlink(missing_ok=True)
    suite = write_suite(folder / "suite")
    suites = [str(suite), *([chosen.suite] if chosen.suite else [])]
    settings = HERE if chosen.settings is None else chosen.settings.read_text()
    config.write_text(f'work_dir = "{work}"\n\n{settings}\n[watch]\nsuites = {json.dumps(suites)}\n')
    began, rows = time.monotonic(), list[dict[str, Any]]()
    with (folder / "daemon.log").open("wb") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        running = subprocess.Popen(
            command("daemon", "--config", str(config)), stdout=log, stderr=log, env=environment
        )
        say(f"daemon started, its log is {folder / 'daemon.log'}")
        try:
            training = [sys.executable, __file__, "--train", *sys.argv[1:]]
            options = ("--config", str(config), "--checkpoints", str(runs), "--pause", "1")
            if subprocess.run([*command("supervise"), *options, "--", *training], check=False).returncode:
                return 1
            count = len(saves(chosen))
            deadline = time.monotonic() + chosen.timeout
            while running.poll() is None and time.monotonic() < deadline:
                rows = rows_of(runs, config)
                ended = {(row["step"], row["suite"]) for row in rows if row["status"] != "open"}
                if len(ended) == count * len(suites):
                    break
                time.sleep(1.0)
        finally:
            running.send_signal(signal.SIGTERM)
            running.wait(60)
    subprocess.run(command("report", "--series", str(runs), "--config", str(config)), check=False)
    export = f"evalspan export --series {runs} --config {config} --to csv -o ."
    say(f"all in {time.monotonic() - began:.0f} s; export: {export}")
    values: dict[str, list[float]] = {}
    for row in (row for row in rows if row["value"] is not None and row["suite"] == suite.stem):
        values.setdefault(f"{row['task']} {row['metric']}", []).append(row["value"])
    for name, each in values.items():
        say(f"{name}: {each[0]:.2f} -> {each[-1]:.2f}")
    if chosen.suite:
        others = {row["step"] for row in rows if row["suite"] != suite.stem and row["status"] == "done"}
        say(f"{chosen.suite}: scores of {len(others)} of {count} checkpoints")
        if len(others) < count:
            return 1
    return 0 if values and all(len(v) == count and v[-1] > v[0] for v in values.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
