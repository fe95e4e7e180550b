"""The toy evaluation: a tiny model, toy tasks, lm-eval's own results of them, and an ordinary user's folder on a cluster."""

import shutil
from pathlib import Path

TASKS = Path(__file__).parent / "exactness" / "tasks"
BOOTSTRAP = 100
CONFIG = f"""
[trial]
threads = 1
device = "cpu"
memory_mb = 2000
{{trial}}
[metric]
bootstrap_iters = {BOOTSTRAP}
workers = 1
memory_mb = 2000
[cluster]
poll_seconds = 1.0
"""


def toy_model(folder, seed=7):
    """A checkpoint of a tiny Llama with a tokenizer, the same for the same code; other weights for another seed."""
    from support.exactness import tiny_model
    from support.exactness.tasks import rows

    return tiny_model.make(folder / f"tiny-{seed}", rows.corpus(), seed=seed)


def config_text(trial=""):
    """Settings of a toy evaluation; more may follow, for `[cluster]`. `trial`: lines of `[trial]`."""
    return CONFIG.format(trial=trial)


def suite_text(name, entries, tasks=TASKS, batch_size=8):
    """A suite file of toy tasks: task → its settings."""
    lines = [f'name = "{name}"', f'include_path = ["{tasks}"]', f"batch_size = {batch_size}"]
    for task, settings in entries.items():
        lines += ["[[task]]", f'name = "{task}"', *(f"{key} = {value}" for key, value in settings.items())]
    return "\n".join(lines) + "\n"


def expected(model, entries):
    """lm-eval's own results of each task, one run a task."""
    from evaljobs.lmeval import quiet_environment
    from support.exactness.pipeline import Case, lm_eval_run

    quiet_environment(offline=True)
    cases = {
        name: Case(task=name, entry=dict(entry), include_path=str(TASKS), bootstrap=BOOTSTRAP)
        for name, entry in entries.items()
    }
    return {name: lm_eval_run(model, case, 8).results["results"][name] for name, case in cases.items()}


def cluster_tasks(cluster):
    """The toy tasks as the user and the nodes see them."""
    return Path(cluster.repo) / "tests" / "support" / "exactness" / "tasks"


def furnish(cluster, name, model, texts):
    """The ordinary user's folder on a cluster, with a copy of the model in `tiny` and these files."""
    folder = Path(cluster.user_dir) / name
    cluster.run_as_user(["mkdir", "-p", str(folder / "bin"), str(folder / "tiny")], check=True)
    for file in model.iterdir():  # the user cannot read root's temporary folders
        shutil.copyfile(file, folder / "tiny" / file.name)
    for file_name, text in texts.items():
        (folder / file_name).write_text(text)
    make_readable([folder / name for name in texts] + list((folder / "tiny").iterdir()))
    return folder


def make_readable(paths):
    """What root wrote, for all to read."""
    for path in paths:
        path.chmod(0o755 if path.is_dir() else 0o644)
