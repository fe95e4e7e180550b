"""scripts/try-engines: does vLLM give lm_eval's answers through evalspan, and is nothing left however it ends?

Runs a toy model (or MODEL_DIR) with vLLM on this machine's CPU: toy tasks of each kind of request by `lm_eval --model
vllm` and by `evalspan eval`, at a batch size of 2 and at "auto", and every answer is compared. Then a trial is ended in
five ways, in one process and over two by tensor parallelism; processes and bytes of shared memory that are left are
counted. Exit status 1 where a row is not well. About ten minutes on two cores.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from support.exactness import tiny_model
from support.exactness.tasks import rows

from bench.harness import ROOT, Options, RunError, command, option, say
from evaljobs.staging import segments

TASKS = ROOT / "tests" / "support" / "exactness" / "tasks"
KINDS = {"toy_choice": "likelihood", "toy_sums": "generation", "toy_pages": "rolling"}
SAMPLED = "toy_sampled"
TOLERANCE = 1e-3  # of a request's log-likelihood
WAYS = ("SIGTERM of the trial", "SIGKILL of the trial", "Ctrl-C of eval", "SIGKILL of eval", "SIGKILL of all")
GO_ON = WAYS[:2]  # the evaluation goes on with another trial
ANSWER_TOKENS = 200  # of the task that is ended, so that it takes a while
ENDS_WITHIN = 40.0  # seconds: 15 between SIGTERM and SIGKILL of a local job, and a margin
CHANGES = {"EVALSPAN_WORK_DIR": None, "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if CHANGES.get(name, "") is not None}
    return kept | {name: value for name, value in CHANGES.items() if value is not None}


def settings(options: Options, *, processes: int) -> str:
    """evalspan.toml of one slot. `processes`: of tensor parallelism."""
    arguments = 'dtype = "float32", max_model_len = 256, enforce_eager = true'
    variables = 'VLLM_CPU_KVCACHE_SPACE = "1"'
    if processes > 1:
        arguments += f", tensor_parallel_size = {processes}"
        variables += f', VLLM_CPU_OMP_THREADS_BIND = "{"|".join(str(n) for n in range(processes))}"'
    return f"""[trial]
engine = "vllm"
python = "{options.python}"
env = {{ {variables} }}
model_args = {{ {arguments} }}
[metric]
bootstrap_iters = 10
[cluster]
kind = "local"
slots = 1
poll_seconds = 1.0
"""


def suite(name: str, tasks: Mapping[str, int], batch_size: int | str, tokens: int = 0) -> str:
    lines = [
        f'name = "{name}"',
        f"include_path = {json.dumps([str(TASKS)])}",
        f"batch_size = {json.dumps(batch_size)}",
    ]
    for task, limit in tasks.items():
        lines += ["[[task]]", f'name = "{task}"', f"limit = {limit}"]
        lines += [f'gen_kwargs = {{ max_gen_toks = {tokens}, until = ["never"] }}'] if tokens else []
    return "\n".join(lines) + "\n"


def evalspan(options: Options, name: str) -> list[str]:
    """The command for a suite in the current folder."""
    return [sys.executable, "-m", "coordinator", "eval", str(options.model_dir), "--suite", f"{name}.toml"]


def prepared(options: Options, folder: Path, text: str, name: str, *, processes: int = 1) -> Path:
    folder.mkdir()
    (folder / "evalspan.toml").write_text(settings(options, processes=processes))
    (folder / f"{name}.toml").write_text(text)
    return folder


# --- the same answers ------------------------------------------------------------------------------------------------


def answers_of(lines: Iterator[dict[str, Any]]) -> dict[int, list[Any]]:
    """Document -> the model's answers, from lm-eval's sample lines."""
    found: dict[int, list[Any]] = {}
    for line in lines:
        found.setdefault(int(line["doc_id"]), []).append(line["resps"])
    return found


def samples(places: list[Path]) -> dict[int, list[Any]]:
    if len(places) != 1:
        raise RunError(f"one file of samples was expected, not {len(places)}")
    return answers_of(json.loads(line) for line in places[0].read_text().splitlines())


def by_lm_eval(options: Options, folder: Path) -> dict[str, dict[int, list[Any]]]:
    """One process of `lm_eval --model vllm`."""
    arguments = f"pretrained={options.model_dir},dtype=float32,max_model_len=256,enforce_eager=True"
    argv = [
        options.python,
        "-m",
        "lm_eval",
        "--model",
        "vllm",
        "--model_args",
        arguments,
        "--batch_size",
        "auto",
    ]
    argv += ["--tasks", ",".join(KINDS), "--include_path", str(TASKS), "--limit", str(options.limit)]
    argv += ["--log_samples", "--output_path", str(folder / "theirs")]
    run(argv, folder, "lm_eval")
    return {task: samples(list((folder / "theirs").rglob(f"samples_{task}_*.jsonl"))) for task in KINDS}


def by_evalspan(
    options: Options, folder: Path, batch_size: int | str, kinds: Sequence[str]
) -> tuple[dict[str, dict[int, list[Any]]], int]:
    """The answers, and the number of shards."""
    tasks = dict.fromkeys(kinds, options.limit)
    name = f"batch-{batch_size}-{len(kinds)}"
    place = prepared(options, folder / name, suite(name, tasks, batch_size), name)
    run(evalspan(options, name), place, name)
    (work,) = (path.parent for path in (place / "evalspan-work").glob("*/results.json"))
    shards = max(int(n) for n in re.findall(r"/(\d+) shards", (place / f"{name}.log").read_text()))
    return {task: samples(list(work.glob(f"samples/samples_{task}_*.jsonl"))) for task in tasks}, shards


def run(argv: list[str], folder: Path, name: str) -> None:
    log = folder / f"{name}.log"
    with log.open("wb") as out:
        code = subprocess.run(
            argv, cwd=folder, env=environment(), stdout=out, stderr=out, check=False
        ).returncode
    if code:
        raise RunError(f"{name} ended with {code}: {log.read_text()[-2000:]}")


def compared(kind: str, ours: dict[int, list[Any]], theirs: dict[int, list[Any]]) -> dict[str, Any]:
    """The worst distance of a log-likelihood, and how many answers are not the same."""
    if ours.keys() != theirs.keys():
        raise RunError(f"{kind}: other documents were answered")
    pairs = [
        (a, b) for document in ours for a, b in zip(flat(ours[document]), flat(theirs[document]), strict=True)
    ]
    numbers = [abs(float(a) - float(b)) for a, b in pairs if number(a) and number(b)]
    other = sum(a != b for a, b in pairs if not (number(a) and number(b)))
    worst = max(numbers, default=0.0)
    return {
        "answers": len(pairs),
        "worst_distance": worst,
        "other_answers": other,
        "well": worst <= TOLERANCE and not other,
    }


def flat(value: Any) -> list[Any]:
    if isinstance(value, list):
        return [one for inner in value for one in flat(inner)]
    return [value]


def number(value: Any) -> bool:
    with contextlib.suppress(ValueError, TypeError):
        return isinstance(float(value), float) and str(value) not in ("True", "False")
    return False


def matrix(options: Options, folder: Path) -> list[dict[str, Any]]:
    theirs = by_lm_eval(options, folder)
    table, sampled = [], []
    for batch_size in (2, "auto"):
        ours, shards = by_evalspan(options, folder, batch_size, (*KINDS, SAMPLED))
        sampled.append(ours[SAMPLED])
        for task, kind in KINDS.items():
            row = {
                "what": kind,
                "batch_size": batch_size,
                "shards": shards,
                **compared(kind, ours[task], theirs[task]),
            }
            table.append(row)
            say(json.dumps(row))
    again, _ = by_evalspan(options, folder, 2, (SAMPLED,))
    table.append({"what": "draws, in two runs", **compared("draws", sampled[0], again[SAMPLED])})
    say(json.dumps(table[-1]))
    return table


# --- five ways to end it -----------------------------------------------------------------------------------------------


def ended(options: Options, folder: Path, way: str, processes: int) -> dict[str, Any]:
    """End a trial in inference this way, and count what is left of it."""
    before = {place.name for place in segments.FOLDER.iterdir()}
    name = f"{processes}-{WAYS.index(way)}"
    tokens = suite(name, {"toy_sums": options.limit}, 2, ANSWER_TOKENS)
    place = prepared(options, folder / name, tokens, name, processes=processes)
    log = place / "eval.log"
    with log.open("wb") as out:
        coordinator = subprocess.Popen(
            evalspan(options, name),
            cwd=place,
            env=environment(),
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        trial = in_inference(coordinator, place, log)
        family = segments.family(trial)
        row: dict[str, Any] = {"way": way, "processes": len(family)}
        mapped = segments.mapped(family)
        jobs = [pid for pid in segments.family(coordinator.pid) if pid != coordinator.pid]
        end(way, coordinator.pid, trial, jobs)
        started = time.monotonic()
        while any(alive(pid) for pid in family) and time.monotonic() - started < ENDS_WITHIN:
            time.sleep(0.1)
        row["seconds"] = time.monotonic() - started
        row["processes_left"] = sum(alive(pid) for pid in family)
        if way in GO_ON:
            row["exit_code"] = coordinator.wait(600)
    finally:
        if coordinator.poll() is None:
            coordinator.send_signal(signal.SIGINT)
            coordinator.wait(120)
    segments.sweep()  # as the next precursor does
    names = mapped | {p.name for p in segments.FOLDER.iterdir() if p.name.startswith(segments.PREFIX)}
    left = [segments.FOLDER / n for n in names - before if (segments.FOLDER / n).exists()]
    row["bytes_left"] = sum(p.stat().st_size for p in left)
    row["well"] = not row["processes_left"] and not row["bytes_left"] and not row.get("exit_code")
    say(json.dumps(row))
    return row


def in_inference(coordinator: subprocess.Popen[bytes], folder: Path, log: Path) -> int:
    """The process of the evaluation's trial, once it infers."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and coordinator.poll() is None:
        if "inference" in log.read_text():
            for place in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    words = (place / "cmdline").read_bytes().split(b"\0")
                    if words[1:4] == [b"-m", b"evaljobs", b"trial"] and str(folder).encode() in words[4]:
                        return int(place.name)
        time.sleep(0.1)
    raise RunError(f"no trial infers: {log.read_text()[-2000:]}")


def end(way: str, coordinator: int, trial: int, jobs: list[int]) -> None:
    match way:
        case "SIGTERM of the trial":
            os.kill(trial, signal.SIGTERM)
        case "SIGKILL of the trial":
            os.kill(trial, signal.SIGKILL)
        case "Ctrl-C of eval":
            os.kill(coordinator, signal.SIGINT)
        case "SIGKILL of eval":
            os.kill(coordinator, signal.SIGKILL)
        case _:  # as at the death of a node: none has the time to clean up
            for pid in (coordinator, *jobs):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def measure(options: Options) -> tuple[dict[str, Any], bool]:
    with tempfile.TemporaryDirectory(prefix="evalspan-engines-", ignore_cleanup_errors=True) as made:
        folder = Path(made)
        if options.model_dir is None:
            options.model_dir = tiny_model.make(folder / "toy", rows.corpus(), hidden_size=256)
        found: dict[str, Any] = {"answers": [] if options.only == "ends" else matrix(options, folder)}
        found["ends"] = [
            ended(options, folder, way, processes)
            for processes in (1, 2)
            for way in WAYS
            if options.only != "answers" and way in (options.ways or WAYS)
        ]
    return found, all(row["well"] for table in found.values() for row in table)


OPTIONS = (
    option("--python", text="the interpreter that has vLLM", type=str),
    option("--model-dir", text="default: a toy model with random weights", type=Path),
    option("--limit", 12, "documents per task"),
    option("--only", text="answers or ends", type=str, choices=("answers", "ends")),
    option("--ways", text="ways to end a trial; default: all", type=str, nargs="*", choices=WAYS),
)
if __name__ == "__main__":
    sys.exit(command("try-engines", __doc__, measure, *OPTIONS))
