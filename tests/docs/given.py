"""What lies in a page's folder before its examples run, by name; and what its words in capitals then stand for.

Rule: each kind is made once a session, in a folder of its own, and copied for a page. A work folder holds full paths, in
text files alone: the copy's are rewritten.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from support import toys
from support.examples.pages import ROOT

STEPS = (100, 300)
LIMIT = "2"


class Given:
    """The kinds, each made when a page first asks for it, below `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._said: dict[str, dict[str, str]] = {}

    def put(self, kinds: tuple[str, ...], place: Path) -> dict[str, str]:
        """Copy each kind into the folder `place`; give the words that they say."""
        for kind in kinds:
            made = self._folder / kind
            if kind not in self._said:
                made.mkdir(parents=True)
                self._said[kind] = KINDS[kind](made)
            copy(made, place)
        return {word: text for kind in kinds for word, text in self._said[kind].items()}


def copy(source: Path, target: Path) -> None:
    """Copy a folder's content with its times, by which checkpoints are known; paths below `source` become the copy's."""
    shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
    before, after = os.fsencode(source), os.fsencode(target)
    for file in target.rglob("*"):
        if (
            file.is_file()
            and not file.is_symlink()
            and file.suffix != ".safetensors"
            and before in (content := file.read_bytes())
        ):
            stat = file.stat()
            file.write_bytes(content.replace(before, after))
            os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def checkpoint(folder: Path) -> dict[str, str]:
    """`ckpt`: a tiny Llama with its tokenizer."""
    toys.toy_model(folder).rename(folder / "ckpt")
    return {"CHECKPOINT": "ckpt"}


def evaluated(folder: Path) -> dict[str, str]:
    """`ckpt`, and its evaluation of quickstart with two documents a task, in evalspan-work; ID is its name."""
    said = checkpoint(folder)
    evaluate(folder, "ckpt")
    return {**said, "ID": _ids(folder)[0]}


def series(folder: Path) -> dict[str, str]:
    """`runs/7b`: a training run of two checkpoints, each evaluated as `evaluated` is; ID is the last one's."""
    for number, step in enumerate(STEPS):
        (folder / "runs" / "7b").mkdir(parents=True, exist_ok=True)
        toys.toy_model(folder, seed=7 + number).rename(folder / "runs" / "7b" / f"step-{step}")
        evaluate(folder, f"runs/7b/step-{step}")
    first, *_, last = _ids(folder)
    return {"RUN_FOLDER": "runs/7b", "CHECKPOINT": "runs/7b/step-300", "FIRST_ID": first, "ID": last}


def clone(folder: Path) -> dict[str, str]:
    """`scripts`, `coordinator` and `tests` as in a clone, and `evalspan`, the clone itself, to be read."""
    for name in ("scripts", "coordinator", "tests"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "evalspan").symlink_to(ROOT)
    return {}


def adapter(folder: Path) -> dict[str, str]:
    """`adapter`: a LoRA adapter of the tiny Llama of `checkpoint`."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    model = toys.toy_model(folder)
    base = AutoModelForCausalLM.from_pretrained(model)
    lora = LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    get_peft_model(base, lora).save_pretrained(folder / "adapter")
    shutil.rmtree(model)
    return {"ADAPTER": "adapter"}


def evaluate(folder: Path, checkpoint: str) -> None:
    """A real evaluation; an AssertionError shows what it printed."""
    program = Path(sys.executable).parent / "evalspan"
    done = subprocess.run(
        [program, "eval", checkpoint, "--suite", "quickstart", "--limit", LIMIT],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def environment(home: Path) -> dict[str, str]:
    """A reader's environment: evalspan on PATH, no network for Hugging Face, no colours."""
    kept = {name: os.environ[name] for name in ("LANG", "TZ", "PIP_INDEX_URL") if name in os.environ}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
    return {
        "LANG": "C.UTF-8",
        **kept,
        **offline,
        "HOME": str(home),
        "PATH": path,
        "NO_COLOR": "1",
        "COLUMNS": "120",
    }


def _ids(folder: Path) -> list[str]:
    found = (folder / "evalspan-work").glob("*/evaluation.json")
    return [file.parent.name for file in sorted(found, key=lambda file: file.stat().st_mtime)]


def suite(folder: Path) -> dict[str, str]:
    """`suites/mine.toml`: two documents of a toy task."""
    (folder / "suites").mkdir()
    (folder / "suites" / "mine.toml").write_text(toys.suite_text("mine", {"toy_choice": {"limit": 2}}))
    return {}


def megatron(folder: Path) -> dict[str, str]:
    """`checkpoints/iter_0000500`: the tiny Llama under Megatron Core's names and shapes, as its format `torch_dist` keeps
    them, beside an optimizer's state; `hf-assets`: config and tokenizer.
    """
    import torch
    import torch.distributed.checkpoint as dcp
    from transformers import AutoModelForCausalLM

    assets = folder / "hf-assets"
    toys.toy_model(folder).rename(assets)
    model = AutoModelForCausalLM.from_pretrained(assets)
    (assets / "model.safetensors").unlink()
    found, count = model.state_dict(), model.config.num_hidden_layers
    groups, size = model.config.num_key_value_heads, model.config.head_dim

    def layers(name: str) -> torch.Tensor:
        return torch.stack([found[f"model.layers.{i}.{name}.weight"] for i in range(count)])

    def heads(name: str) -> torch.Tensor:
        return layers(f"self_attn.{name}_proj").view(count, groups, -1, size, model.config.hidden_size)

    qkv = torch.cat([heads(name) for name in "qkv"], dim=2).view(count, -1, model.config.hidden_size)
    attention, mlp = "decoder.layers.self_attention", "decoder.layers.mlp"
    padding = torch.zeros(40, model.config.hidden_size)
    state = {
        "embedding.word_embeddings.weight": torch.cat([found["model.embed_tokens.weight"], padding]),
        "output_layer.weight": torch.cat([found["lm_head.weight"], padding]),
        "decoder.final_layernorm.weight": found["model.norm.weight"],
        f"{attention}.linear_qkv.layer_norm_weight": layers("input_layernorm"),
        f"{attention}.linear_qkv.weight": qkv,
        f"{attention}.linear_proj.weight": layers("self_attn.o_proj"),
        f"{mlp}.linear_fc1.layer_norm_weight": layers("post_attention_layernorm"),
        f"{mlp}.linear_fc1.weight": torch.cat([layers("mlp.gate_proj"), layers("mlp.up_proj")], dim=1),
        f"{mlp}.linear_fc2.weight": layers("mlp.down_proj"),
        "optimizer.state.exp_avg.decoder.final_layernorm.weight": torch.zeros(4),
    }
    dcp.save(state, checkpoint_id=folder / "checkpoints" / "iter_0000500", no_dist=True)
    return {}


KINDS: dict[str, Callable[[Path], dict[str, str]]] = {
    "adapter": adapter,
    "checkpoint": checkpoint,
    "clone": clone,
    "evaluated": evaluated,
    "megatron": megatron,
    "series": series,
    "suite": suite,
}
