"""The same log as other launchers, collectors and loggers write it: name -> a function of its lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

Lines = Sequence[str]


def each(write: Callable[[int, str], str]) -> Callable[[Lines], str]:
    """Each line written anew by its index."""
    return lambda lines: "".join(write(n, line) + "\n" for n, line in enumerate(lines))


def clock(n: int) -> str:
    return f"{n // 3600 % 24:02}:{n // 60 % 60:02}:{n % 60:02}"


def as_json(**names: str) -> Callable[[Lines], str]:
    """A JSON logger with these keys; an optional traceback's lines are messages of their own."""

    def write(n: int, line: str) -> str:
        values = {
            "time": f"2026-09-03T{clock(n)}.123Z",
            "level": "info",
            "logger": "train.loop",
            "message": line,
        }
        return json.dumps({names.get(key, key): value for key, value in values.items()} | {"pid": 4711})

    return each(write)


def wrapped(lines: Lines, width: int = 100) -> str:
    """As a terminal of this width breaks lines."""
    return "".join(
        line[at : at + width] + "\n" for line in lines for at in range(0, max(len(line), 1), width)
    )


LAUNCHERS: dict[str, Callable[[Lines], str]] = {
    "pdsh": each(lambda _, line: f"gpu-017: {line}"),
    "pdsh, by address": each(lambda _, line: f"10.8.4.17: {line}"),
    "pdsh, by domain": each(lambda _, line: f"node17.cluster.local: {line}"),
    "mpirun --tag-output": each(lambda _, line: f"[1,3]<stderr>:{line}"),
    "mpirun --timestamp-output": each(lambda n, line: f"Thu Sep  3 {clock(n)} 2026[1,0]<stdout>:{line}"),
    "srun --label": each(lambda _, line: f" 3: {line}"),
    "torchrun --tee": each(lambda _, line: f"[default0]:{line}"),
    "torchrun, rank": each(lambda _, line: f"[rank0]: {line}"),
    "compose": each(lambda _, line: f"train-1  | {line}"),
    "compose, a name without digits": each(lambda _, line: f"trainer  | {line}"),
    "stern": each(lambda _, line: f"trainer-7f9c4b-xk2lp main {line}"),
    "kubectl --prefix": each(lambda _, line: f"[pod/trainer-0/pytorch] {line}"),
    "CRI": each(lambda n, line: f"2026-09-03T{clock(n)}.123456789Z stderr F {line}"),
    "docker JSON": each(
        lambda n, line: json.dumps(
            {"log": line + "\n", "stream": "stderr", "time": f"2026-09-03T{clock(n)}.123456789Z"}
        )
    ),
    "JSON": as_json(),
    "JSON, other keys": as_json(time="@timestamp", level="severity", logger="name", message="event"),
    "JSON, short keys": as_json(time="t", level="lvl", logger="src", message="m"),
    "syslog": each(lambda n, line: f"Sep  3 {clock(n)} gpu-017 train[4711]: {line}"),
    "syslog, RFC 5424": each(
        lambda n, line: f"<13>1 2026-09-03T{clock(n)}.123Z gpu-017 train 4711 - - {line}"
    ),
    "a time": each(lambda n, line: f"Sep 03 {clock(n)} {line}"),
    "a time, ISO": each(lambda n, line: f"2026-09-03T{clock(n)}+00:00 {line}"),
    "a time in brackets": each(lambda n, line: f"[2026-09-03 {clock(n)},123] {line}"),
    "logging": each(lambda n, line: f"2026-09-03 {clock(n)},123 - train.loop - INFO - {line}"),
    "logging, errors": each(lambda n, line: f"2026-09-03 {clock(n)},123 - ERROR - {line}"),
    "logging, default": each(lambda _, line: f"INFO:train.loop:{line}"),
    "loguru": each(lambda n, line: f"2026-09-03 {clock(n)}.123 | INFO     | train.loop:step:42 - {line}"),
    "glog": each(lambda n, line: f"E0903 {clock(n)}.123456 4711 trainer.cpp:42] {line}"),
    "logfmt": each(lambda n, line: f"time=2026-09-03T{clock(n)}Z level=info msg={json.dumps(line)}"),
    "Ray": each(lambda _, line: f"(train_fn pid=4711, ip=10.8.4.17) {line}"),
    "Ray, coloured": each(lambda _, line: f"\x1b[36m(TrainWorker pid=4711)\x1b[0m {line}"),
    "pods in Slurm": each(lambda _, line: f"gpu-017: [rank3]: {line}"),
    "tab": each(lambda _, line: f"\t{line}"),
    "indented": each(lambda _, line: f"    {line}"),
    "CRLF": lambda lines: "\r\n".join(lines) + "\r\n",
    "redrawn lines": each(lambda n, line: f"loading {n}\r\x1b[Kloading {n} more\r{line}"),
    "ANSI": each(lambda _, line: f"\x1b[31m{line}\x1b[0m"),
    "wrapped": wrapped,
}
