"""Code that touches lm-eval's internals: running its tasks, hooks, replayed answers, batches.

Rule: prompts, tokens and scores come from lm-eval's own code. Start with `run.py`.
"""

import os


def quiet_environment(*, offline: bool) -> None:
    """Set the variables that lm-eval, datasets and transformers read when imported."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as the lm_eval command does
    os.environ.setdefault("TQDM_DISABLE", "1")  # progress bars fill job logs
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("LMEVAL_LOG_LEVEL", "WARNING")
    if offline:
        os.environ["HF_HUB_OFFLINE"] = "1"
        os.environ["HF_DATASETS_OFFLINE"] = "1"
        os.environ["HF_EVALUATE_OFFLINE"] = "1"
