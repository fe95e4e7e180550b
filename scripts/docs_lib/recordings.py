"""Terminals of a first hour, drawn to docs/pictures: `python -m docs_lib.recordings [eval] [slurm] [python]`.

Rule: what is drawn was printed by the commands that are drawn, on this machine; ids, times and seconds are those of the
recording. `eval` runs scripts/quickstart, `slurm` a development cluster (as root), `python` an interpreter.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dev_cluster.api import dev_cluster
from dev_cluster.testing import wait_until
from docs_lib.text import ROOT
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text
from support.toys import make_readable

PICTURES = ROOT / "docs" / "pictures"
MODEL = ROOT / ".models" / "SmolLM2-135M-Instruct"  # which scripts/quickstart fetches
COLUMNS = 98
# rich's own loads its font from another host, and names its maker
FORMAT = re.sub(r"@font-face \{\{.*?\}\}|<!--.*?-->", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace(
    "Fira Code", "ui-monospace, DejaVu Sans Mono"
)
# a cluster of this machine has neither GPUs nor much memory
SMALL = {
    "EVALSPAN_TRIAL_DEVICE": "cpu",
    "EVALSPAN_TRIAL_MEMORY_MB": "3000",
    "EVALSPAN_TRIAL_THREADS": "1",
    "EVALSPAN_METRIC_MEMORY_MB": "2000",
    "EVALSPAN_CLUSTER_POLL_SECONDS": "1",
}
SESSION = """
found = evalspan.evaluate("SmolLM2-135M-Instruct", tasks=["quickstart_mmlu", "quickstart_hellaswag"], limit=8)
found.status, found.failed
evalspan.dataframe(found)[["task", "metric", "value", "stderr"]]
""".strip()
# Shows each line of SESSION as an interpreter does, with what it prints.
INTERPRETER = """
import code, sys, traceback, pandas, evalspan
pandas.set_option("display.width", 98)
interpreter = code.InteractiveInterpreter({"evalspan": evalspan})
interpreter.showtraceback = lambda: sys.exit(traceback.format_exc())
print(">>> import evalspan")
for line in sys.argv[1].splitlines():
    print(">>>", line)
    interpreter.runsource(line)
"""


def draw(name: str, title: str, text: str) -> None:
    """Write docs/pictures/NAME.svg. Lines that a reader types are bold."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    for line in text.splitlines():
        style = "bold" if line.startswith(("$ ", ">>> ")) else ""
        column = re.match(r"\S+\s{2,}|", line)
        indent = " " * (column.end() if column else 0)
        for part in textwrap.wrap(line, COLUMNS, subsequent_indent=indent) or [""]:
            console.print(Text(part, style=style))
    svg = console.export_svg(title=title, unique_id=name, code_format=FORMAT)
    (PICTURES / f"{name}.svg").write_text("\n".join(map(str.rstrip, svg.splitlines())) + "\n")


def printed(argv: list[str], *, cwd: Path, env: dict[str, str], errors: bool = True) -> str:
    """Return what a command prints; `errors`: on standard error, too. A command that fails ends the recording."""
    done = subprocess.run(
        argv,
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if errors else subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{' '.join(argv)} ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr or ''}")
    return done.stdout


def environment() -> dict[str, str]:
    """The environment of a reader who has no settings of their own."""
    kept = {
        key: value for key, value in os.environ.items() if not key.startswith(("EVALSPAN_", "PYTHONPATH"))
    }
    path = f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}"
    return {**kept, "PATH": path, "COLUMNS": str(COLUMNS), "NO_COLOR": "1", "HF_HUB_OFFLINE": "1"}


def record_eval(folder: Path) -> str:
    """The end of the quickstart: the makespan and the scores."""
    said = printed(["scripts/quickstart", "--work-dir", str(folder)], cwd=ROOT, env=environment())
    scores = said[said.index("\nmakespan ") : said.index("\nResults: ")]
    return f"$ scripts/quickstart\n…{scores}"


def record_python(folder: Path) -> str:
    """An evaluation from Python, and its scores as a dataframe."""
    (folder / MODEL.name).symlink_to(MODEL)
    return printed([sys.executable, "-c", INTERPRETER, SESSION], cwd=folder, env=environment(), errors=False)


@contextmanager
def running(argv: list[str], *, env: dict[str, str]) -> Iterator[None]:
    process = subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def record_slurm(_folder: Path) -> str:
    """A daemon, a submission and `watch`, typed by the ordinary user of a development cluster."""
    with dev_cluster(nodes=1, gpus=2, cpu_nodes=1, cpus=8) as cluster:
        folder = Path(cluster.user_dir) / "recorded"
        cluster.run_as_user(["mkdir", str(folder)], check=True)
        shutil.copytree(MODEL, folder / MODEL.name, copy_function=shutil.copyfile)
        make_readable([folder / MODEL.name, *(folder / MODEL.name).iterdir()])
        env = {**environment(), **cluster.user_env, **SMALL, "HOME": str(folder)}

        def argv(line: str) -> list[str]:
            words = line.replace("evalspan", f"{cluster.python} -m coordinator", 1)
            return list(cluster.user_argv(["sh", "-c", words], cwd=folder))

        def typed(line: str) -> str:
            said = printed(argv(line), cwd=ROOT, env=env)
            return f"$ {line}\n{said.replace(str(folder), '~')}"

        shown = [typed("sinfo"), typed("evalspan init > init.txt"), "$ evalspan daemon > daemon.log 2>&1 &\n"]
        with running(argv("exec evalspan daemon > daemon.log 2>&1"), env=env):
            shown.append(
                typed(f"evalspan submit {MODEL.name} --tasks quickstart_mmlu,quickstart_hellaswag --limit 4")
            )
            wait_until(lambda: [*folder.glob("evalspan-work/*/journal.jsonl")], "the daemon takes it up")
            shown.append(typed("evalspan watch"))
        return "".join(shown)


RECORDINGS: dict[str, tuple[str, Callable[[Path], str]]] = {
    "eval": ("first hour on a laptop", record_eval),
    "slurm": ("first hour on a cluster", record_slurm),
    "python": ("first hour in Python", record_python),
}


def main() -> None:
    if not (MODEL / "config.json").exists():
        sys.exit(f"{MODEL} is missing: run scripts/quickstart once, which fetches it")
    for name in sys.argv[1:] or RECORDINGS:
        title, record = RECORDINGS[name]
        with tempfile.TemporaryDirectory() as folder:
            text = record(Path(folder))
        print(text, flush=True)
        draw(name, title, text)


if __name__ == "__main__":
    main()
