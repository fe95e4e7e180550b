"""Slurm's commands, answered from a recorded site and a queue that its player keeps; `support.site_recording` records.

A command is a line of bash that sends its words to this process: so a call costs little, and what is asked is seen.
"""

from __future__ import annotations

import getpass
import os
import re
import socketserver
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# The words and standard input of a call go to a socket, each ended by a NUL; back come its exit code and what it prints.
CLIENT = r"""#!/bin/bash
[ -t 0 ] || IFS= read -rd '' text
exec 3<>/dev/tcp/127.0.0.1/{port}
printf '%s\0' $# "${{0##*/}}" "$@" "$text" >&3
IFS= read -r code <&3
IFS= read -rd '' said <&3
if [ "$code" = 0 ]; then printf %s "$said"; else printf %s "$said" >&2; fi
exit "$code"
"""
LETTERS = {"F": "array", "A": "array", "i": "id", "K": "index", "T": "state", "V": "submitted", "S": "started",
           "e": "ends", "N": "node", "r": "reason", "R": "reason", "k": "comment", "j": "name", "u": "user", "P": "partition"}  # fmt: skip
NO_ACCOUNTING = ["You are not running a supported accounting_storage plugin", "Only 'accounting_storage/slurmdbd' is supported."]  # fmt: skip
TOO_MANY = ["sbatch: error: QOSMaxSubmitJobPerUserLimit", "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"]  # fmt: skip


class RefusedError(Exception):
    """The lines that a command prints on standard error."""


class Call:
    """One command line."""

    def __init__(self, words: list[str], text: str) -> None:
        self.words, self.text = words, text

    def value(self, option: str, short: str = "") -> str | None:
        long = [w.partition("=")[2] for w in self.words if w.startswith(f"--{option}=")]
        if long:
            return long[-1]
        return self.words[self.words.index(short) + 1] if short in self.words else None

    def has(self, *words: str) -> bool:
        return any(word in self.words for word in words)


class RecordedSlurm:
    """`site`: a recording. `members`: rows of squeue. `used`: node -> GPUs, CPUs, memory in use, and whether all of it is."""

    def __init__(
        self,
        site: dict[str, Any],
        submit: Callable[[list[str], list[str]], int],
        cancel: Callable[[str], None],
    ) -> None:
        self.site, self.submit, self.cancel = site, submit, cancel
        self.members: list[dict[str, Any]] = []
        self.used: dict[str, tuple[int, int, int, bool]] = {}

    def answer(self, name: str, call: Call) -> tuple[int, str]:
        try:
            lines = list(getattr(self, name)(call))
        except RefusedError as error:
            return 1, "".join(f"{line}\n" for line in error.args)
        return 0, "".join(f"{line}\n" for line in lines).replace("USER", getpass.getuser())

    def sinfo(self, call: Call) -> Iterator[str]:
        if call.has("--version"):
            yield "slurm 22.05.8"
            return
        names, *rows = [line.split("|") for line in self.site["sinfo"]]
        columns = [re.fullmatch(r"(\w+)(?::(\.?)(\d*)(.*))?", c, re.DOTALL) for c in (call.value("Format", "-O") or "").split(",")]  # fmt: skip
        for row in rows[call.has("--noheader", "-h") :]:
            fields = dict(zip((n.lower() for n in names), row, strict=True))
            if used := self.used.get(fields["nodelist"]):
                gpus, cpus, memory, whole = used
                total = int(fields["cpus"])
                fields |= {
                    "gresused": f"{fields['gres'].rpartition(':')[0]}:{gpus}(IDX:0-{gpus - 1})",
                    "cpusstate": f"{cpus}/{total - cpus}/0/{total}",
                    "allocmem": str(memory),
                    "statelong": "allocated" if whole or cpus >= total else "mixed",
                }
            yield "".join(_cell(fields, *column.groups()) for column in columns if column)

    def squeue(self, call: Call) -> Iterator[str]:
        header = [] if call.has("--noheader", "-h") else [{key: key.upper() for key in LETTERS.values()}]
        for row in [*header, *(r for r in self.members if call.value("name") in (None, r["name"]))]:
            yield re.sub(r"%\.?\d*(\w)", lambda m: str(row[LETTERS[m[1]]]), call.value("format", "-o") or "")  # noqa: B023

    def scontrol(self, call: Call) -> list[str]:
        subject = next(w for w in call.words[call.words.index("show") + 1 :] if w[0] != "-")
        return list(self.site["partition all" if subject == "partition" and call.has("--all") else subject])

    def sacctmgr(self, call: Call) -> Iterator[str]:
        if "qos" not in self.site:
            raise RefusedError(*NO_ACCOUNTING)
        rows = self.site[call.words[call.words.index("show") + 1]]
        of = {w.partition("=")[0]: w.partition("=")[2].split(",") for w in call.words if "=" in w}
        for row in rows:
            if row.get("Account") in of.get("accounts", [row.get("Account")]):
                fields = {name.lower(): value for name, value in row.items()}
                yield "|".join(fields[name.lower()] for name in of["format"])

    def sbatch(self, call: Call) -> list[str]:
        for rule in self.site.get("refuses", ()):
            asked = any(w.startswith((rule["lacks"], "--gpus")) for w in call.words)
            if not asked and all(call.has(word) for word in rule["has"]):
                raise RefusedError(*rule["says"])
        if call.has("--test-only"):
            return []
        count = 1 + int((call.value("array") or "0-0").rpartition("-")[2])
        limits = {row["Name"]: row["MaxSubmitPU"] for row in self.site.get("qos", ())}
        live = sum(row["state"] in ("PENDING", "RUNNING") for row in self.members)
        if (most := limits.get(call.value("qos") or "")) and live + count > int(most):
            raise RefusedError(*TOO_MANY)
        return [str(self.submit(call.words, call.text.splitlines()))]

    def scancel(self, call: Call) -> list[str]:
        for word in call.words:
            self.cancel(word)
        return []


def _cell(fields: dict[str, str], name: str, dot: str | None, width: str | None, suffix: str | None) -> str:
    """A cell by its part of sinfo's --Format: NAME[:[.]WIDTH][SUFFIX]."""
    text = fields[name.lower()]
    if width == "":
        return text + (suffix or "")
    size = int(width or 20)
    return f"{text:{'>' if dot else '<'}{size}}"[:size] + (suffix or "")


def serve(slurm: RecordedSlurm, folder: Path, patch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Put commands that ask `slurm` first on PATH; what ends that."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            head = self._word()
            name, *words = [self._word() for _ in range(int(head) + 1)]
            code, said = slurm.answer(name, Call(words, self._word()))
            self.wfile.write(f"{code}\n{said}".encode())

        def _word(self) -> str:
            read = b""
            while not read.endswith(b"\0"):
                read += self.rfile.read(1)
            return read[:-1].decode()

    server = socketserver.TCPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    folder.mkdir()
    for name in ("sbatch", "squeue", "sinfo", "scontrol", "sacctmgr", "scancel"):
        (folder / name).write_text(CLIENT.format(port=server.server_address[1]))
        (folder / name).chmod(0o755)
    patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def end() -> None:
        server.shutdown()
        server.server_close()

    return end
