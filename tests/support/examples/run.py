"""Run a page's examples as a reader would: commands in one shell, code in one interpreter, files where they stand.

Rule: the page's folder is empty but for what is given, and is HOME; a page that ends leaves no process.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from dev_cluster.procs import poll

from support.examples.pages import Entry

BLOCK_SECONDS = 480  # limit of one block
SHOWN_SECONDS = 60  # for a block in the background to print what it shows
END_SECONDS = 60  # for a block in the background to end after SIGINT, and for what it started to be gone
OUTPUT_LINES = 60  # of a failed block's output in the message

# Reads `NUMBER STATUS` of blocks: runs the file of that number, answers with its status. A block that must fail runs in a
# shell of its own, since it would end this one. File descriptor 9 is the answer's; no block gets it.
SHELL = r"""
set -E; exec 8<&0 9>&1 </dev/null
trap 'printf "%s %s %s" "$LINENO" "$?" "$BASH_COMMAND" > "$EXAMPLES/failed"' ERR
while read -r number exits <&8; do
  set -e; code=0
  if [ "$exits" = 0 ]; then
    source "$EXAMPLES/$number" </dev/null >"$EXAMPLES/$number.out" 2>&1 8<&- 9>&-
  else
    set +e
    ( set -e; source "$EXAMPLES/$number" ) </dev/null >"$EXAMPLES/$number.out" 2>&1 8<&- 9>&-
    code=$?
  fi
  export -p > "$EXAMPLES/environment"; pwd > "$EXAMPLES/place"
  echo "$code" >&9
done
"""

PYTHON = r"""
import os, sys, traceback
sys.path.insert(0, "")
answers, names = os.dup(1), {"__name__": "__main__"}
for request in open(0, closefd=False):
    number, line, page = request.rstrip("\n").split(" ", 2)
    out = os.open(f"{os.environ['EXAMPLES']}/{number}.out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(out, 1), os.dup2(out, 2), os.close(out)
    code = 0
    try:
        text = open(f"{os.environ['EXAMPLES']}/{number}").read()
        exec(compile("\n" * (int(line) - 1) + text, page, "exec"), names)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush(), sys.stderr.flush()
    os.write(answers, b"%d\n" % code)
"""


class ExampleError(Exception):
    """A block did something else than its page says."""


@dataclass(kw_only=True)
class Place:
    """Where a page runs: its folder, the environment, and how a command line is started there (as another user, say)."""

    folder: Path
    env: dict[str, str]
    argv: Callable[[Sequence[str]], list[str]] = list
    written: Callable[[Path], None] = lambda _path: None  # called for each file that the runner writes
    ended: Callable[[], None] = lambda: None  # called before processes are looked for


@dataclass
class Page:
    """A page that runs."""

    entry: Entry
    place: Place
    words: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self):
        self.words = {**self.words, **self.entry.words}
        self.work = self.place.folder / ".examples"  # blocks and their output
        self.work.mkdir()
        self.place.written(self.work)
        self.env = {**self.place.env, **self.entry.env, "EXAMPLES": str(self.work)}
        self.outputs = []
        self.behind = []
        self.interpreters = {}  # each runs blocks one after the other

    def run(self, blocks):
        """Each block in order. ExampleError: the first that does something else than the page says."""
        try:
            for number, block in enumerate(blocks):
                self._take(number, block)
            for block, process, out in self.behind:
                self._end_behind(block, process, out)
        finally:
            left = self._end()
        if left:
            raise ExampleError("processes are left:\n" + "\n".join(left))

    def _take(self, number, block):
        file, out = self.work / str(number), self.work / f"{number}.out"
        text = self._said(block.text)
        if block.title:
            target = self.place.folder / self._said(block.title)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text((target.read_text() + "\n" if block.added else "") + text)
            for path in (target, *target.parents):
                if path == self.place.folder:
                    break
                self.place.written(path)
            return
        file.write_text(text)
        out.touch()
        for path in (file, out):
            self.place.written(path)
        self.outputs.append(out)
        if block.background:
            self._start_behind(block, file, out)
            return
        (self.work / "failed").unlink(missing_ok=True)
        request = (
            f"{number} {block.exits}"
            if block.language == "sh"
            else f"{number} {block.line} {block.page.name}"
        )
        status = self._status(block.language, request)
        if status != block.exits:
            raise ExampleError(self._failure(block, status, out))
        self._check(block, out)

    def _check(self, block, out):
        for text in map(self._said, block.shows):
            if not _shows(out, text):
                raise ExampleError(f"{block.place}: the output does not show {text!r}\n{_tail(out)}")
        shown = [_heads(line) for line in out.read_text(errors="replace").splitlines()]
        for head, rule in pairwise(self._said(block.sample).splitlines()):
            if rule.strip(" ─") == "" != rule and _heads(head) not in shown:
                raise ExampleError(
                    f"{block.place}: no table has the sample's columns, {head!r}\n{_tail(out)}"
                )

    def _status(self, language, request):
        """A block's status; None: the interpreter did not answer in time."""
        if language not in self.interpreters:
            bash = ["bash", "--noprofile", "--norc", "-c", SHELL]
            line = [sys.executable, "-c", PYTHON] if language == "python" else bash
            self.interpreters[language] = self._popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        process = self.interpreters[language]
        process.stdin.write(f"{request}\n".encode())
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], BLOCK_SECONDS)
        answer = process.stdout.readline() if ready else b""
        if ready and not answer.strip():  # it ended with the block
            with suppress(subprocess.TimeoutExpired):
                return process.wait(timeout=5)
        return int(answer) if answer.strip() else None

    def _failure(self, block, status, out):
        """Page, line of the page, command, status and output."""
        line, command = block.line, block.text.strip()
        with suppress(OSError):
            offset, code, command = (self.work / "failed").read_text().split(" ", 2)
            line, status = block.line + int(offset) - 1, int(code)
        ending = f"did not end within {BLOCK_SECONDS} s" if status is None else f"ended with status {status}"
        wanted = f" instead of {block.exits}" if block.exits else ""
        name = block.place.rpartition(":")[0]
        return f"{name}:{line}: `{command}` {ending}{wanted}\n{_tail(out)}"

    def _said(self, text):
        """The text with the words in capitals replaced."""
        words = dict(self.words)
        for word, pattern in self.entry.found.items():
            if re.search(rf"\b{word}\b", text):
                found = re.findall(pattern, "\n".join(map(_read, self.outputs)), re.MULTILINE)
                if not found:
                    raise ExampleError(f"no output so far shows {pattern!r}, from which {word} is read")
                words[word] = found[-1]
        if not words:
            return text
        return re.sub(rf"\b({'|'.join(map(re.escape, words))})\b", lambda found: words[found[1]], text)

    def _popen(self, line, **streams):
        return subprocess.Popen(
            self.place.argv(line), env=self.env, cwd=self.place.folder, start_new_session=True, **streams
        )

    def _start_behind(self, block, file, out):
        """As in another terminal, with the shell's folder and environment."""
        start = f'[ ! -e "$EXAMPLES/place" ] || {{ source "$EXAMPLES/environment"; cd "$(cat "$EXAMPLES/place")"; }}; set -e; source {file}'
        with out.open("wb") as stream:
            line = ["bash", "--noprofile", "--norc", "-c", start]
            process = self._popen(line, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT)
        self.behind.append((block, process, out))
        for text in map(self._said, block.shows):
            poll(lambda text=text: _shows(out, text) or process.poll() is not None, deadline_s=SHOWN_SECONDS)
        self._check(block, out)

    def _end_behind(self, block, process, out):
        if process.poll() not in {None, 0}:
            raise ExampleError(
                f"{block.place}: in the background `{block.text.strip()}` ended with status {process.returncode}\n{_tail(out)}"
            )
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            raise ExampleError(f"{block.place}: it does not end by SIGINT\n{_tail(out)}") from None

    def _end(self):
        """End all that the page started; lines of what had to be ended by force."""
        processes = [*self.interpreters.values(), *(process for _, process, _ in self.behind)]
        for process in self.interpreters.values():
            process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)
            process.stdout.close()
        for process in (process for process in processes if process.poll() is None):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.place.ended()
        poll(lambda: not _processes(self.place.folder), deadline_s=END_SECONDS)
        left = _processes(self.place.folder)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return [f"{pid} {line}" for pid, line in left.items()]


def _processes(folder):
    """Processes that name the folder in their command line or environment, or are in it, with their command lines."""
    found, name = {}, os.fsencode(folder)
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        with suppress(OSError):
            line = (process / "cmdline").read_bytes()  # empty: ended, or of the kernel
            place = os.fsencode((process / "cwd").readlink())
            if line and name in line + (process / "environ").read_bytes() + place:
                found[int(process.name)] = line.replace(b"\0", b" ").decode(errors="replace")
    return found


def _heads(line):
    """Words of a table's heading, without numbers: a run in small has other steps."""
    return [word for word in line.split() if not word.isdigit()]


def _shows(out, text):
    """Whether the text is in the output; lines may be broken elsewhere, by the width of a terminal."""
    return " ".join(text.split()) in " ".join(_read(out).split())


def _read(out):
    return out.read_text(errors="replace")


def _tail(out):
    return "\n".join(_read(out).splitlines()[-OUTPUT_LINES:])
