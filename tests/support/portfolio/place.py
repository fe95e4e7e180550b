"""Writes drawn rows as data sets that `datasets` has prepared: `HF_HOME/datasets/OWNER___NAME/CONFIG/0.0.0/HASH`.

Rule: lm-eval itself says which data sets and configurations a task reads: its tasks are loaded once with a
`datasets.load_dataset` that draws, writes and returns what it is asked for.
"""

import hashlib
import json
import tempfile
from pathlib import Path
from unittest import mock

from support.portfolio.rows import drawn


def place(tasks, hf_home):
    """The rows of these tasks, groups and tags, below `hf_home`; (path, configuration) -> rows of each data set written."""
    import datasets
    from lm_eval.tasks import TaskManager

    from evaljobs.lmeval import hooks

    hooks.install_seam()  # code_eval of the Hub
    made = {}

    def load(path, name=None, *_, split=None, **__):
        key = (path, name or "default")
        if key not in made:
            made[key] = _prepared(*key, drawn(path, name), hf_home).as_dataset()
        return made[key][split] if split else made[key]

    datasets.disable_progress_bars()
    datasets.disable_caching()  # a task that shuffles in `map` would find today's order in each later run
    with mock.patch("datasets.load_dataset", load):
        TaskManager().load(list(tasks))
    return {key: sum(len(split) for split in each.values()) for key, each in made.items()}


def _prepared(path, config, rows, hf_home):
    from datasets.naming import camelcase_to_snakecase
    from datasets.packaged_modules.json.json import Json

    owner, _, name = path.rpartition("/")
    short, digest = camelcase_to_snakecase(name), hashlib.sha256(f"{path} {config}".encode()).hexdigest()[:40]
    with tempfile.TemporaryDirectory() as folder:
        files = {}
        for split, each in rows.items():
            files[split] = [f"{folder}/{split}.jsonl"]
            Path(*files[split]).write_text("\n".join(json.dumps(row) for row in each))
        made = Json(dataset_name=short, config_name=config, data_files=files, cache_dir=folder)
        made.download_and_prepare(
            str(hf_home / "datasets" / f"{owner}___{short}" / config / "0.0.0" / digest)
        )
    return made
