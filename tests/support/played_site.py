"""A recorded Slurm site (tests/golden/sites/recorded) whose jobs are played: what a real coordinator submits, and when; no job runs.

The jobs of a round start together and do all their work at once; a round begins when nothing was submitted for some ticks.
A command of Slurm is a line of bash that sends its words to this process: so a call costs little, and what is asked is seen.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import shlex
import socketserver
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from coordinator.base import clock
from coordinator.decide.evaluation.records import Inputs
from coordinator.intake import from_settings, validate, work_folder
from coordinator.runtime import wiring
from evaljobs.contract import outcomes as out
from evaljobs.contract import specs
from evaljobs.contract.names import Cut, ShardId
from evaljobs.contract.paths import EvaluationPaths, batch_index_file, entry_manifest, request_set_manifest
from evaljobs.contract.storage import FrameWriter, write_outcome, write_record
from evaljobs.queue.redis_client import Link
from evaljobs.queue.work_queue import WorkQueue
from support.goldens import HERE

RECORDED = HERE / "sites" / "recorded"
QUIET = 2  # ticks without a new job, after which the jobs are played
TICK_SECONDS = 10.0
ROUNDS = 60
CONSTANT = ("--parsable", "--comment=", "--output=", "--open-mode=", "--no-requeue", "--nodes=1", "--ntasks=1", "--export=", "--chdir=", "--signal=")  # fmt: skip
# task -> requests, tokens of each, tokens to generate, executes programs
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

    def __init__(self, words, text):
        self.words, self.text = words, text

    def value(self, option, short=""):
        long = [w.partition("=")[2] for w in self.words if w.startswith(f"--{option}=")]
        if long:
            return long[-1]
        return self.words[self.words.index(short) + 1] if short in self.words else None

    def has(self, *words):
        return any(word in self.words for word in words)


@dataclass
class Job:
    """A submission as its text says it, and its members."""

    number: int
    arguments: list[str]
    script: list[str]
    states: dict[int, str] = field(default_factory=dict)
    reason: str = "Priority"
    node: str = ""

    def __post_init__(self):
        last = (self.option("array") or "0-0").rpartition("-")[2]
        self.states = dict.fromkeys(range(int(last) + 1), "PENDING")
        words = shlex.split(self.script[-1])
        self.purpose = words[words.index("evaljobs") + 1]
        self.words = words[words.index("evaljobs") + 2 :]
        self.gpus = int((self.option("gres") or self.option("gpus-per-node") or ":0").rpartition(":")[2])
        self.cpus = int(self.option("cpus-per-task") or 1)
        self.memory = int((self.option("mem") or "0M")[:-1])

    def option(self, name):
        found = [a.partition("=")[2] for a in self.arguments if a.startswith(f"--{name}=")]
        return found[-1] if found else None

    def in_state(self, *states):
        return [index for index, state in self.states.items() if state in states]


class PlayedSite:
    """A folder with Slurm's commands first on PATH, and the player of its jobs."""

    def __init__(self, folder, site, patch, sizes):
        self.folder, self.sizes = folder, sizes
        self.work = folder / "work"
        self.site = json.loads((RECORDED / f"{site}.json").read_text())
        self.jobs = {}
        self.rounds = [[]]  # what was submitted or cancelled between two rounds
        self.texts = {}  # purpose -> the first job's
        self.digests = {}
        self.quiet = self.played = 0
        self.sharing = 1  # trials that have not had their turn in this round
        fields = self.site["sinfo"][0].split("|")
        self.nodes = [dict(zip(fields, line.split("|"), strict=False)) for line in self.site["sinfo"][2:]]
        self.end = serve(self, folder / "bin", patch)
        patch.setattr(clock, "_start", clock._start)
        patch.setattr(os, "fsync", lambda _descriptor: None)  # no power cut comes

    # --- Slurm's side -------------------------------------------------------------------------------------------------

    def answer(self, name, call):
        try:
            lines = list(getattr(self, name)(call))
        except RefusedError as error:
            return 1, "".join(f"{line}\n" for line in error.args)
        return 0, "".join(f"{line}\n" for line in lines).replace("USER", getpass.getuser())

    def qos(self, job):
        rows = self.site.get("qos", [])
        name = job.option("qos") or next((r["DefaultQOS"] for r in self.site.get("user", ())), "")
        return next((row for row in rows if row["Name"] == name), {})

    def running(self, node=""):
        """A job for each of its members that runs."""
        return [j for j in self.jobs.values() if node in ("", j.node) for _ in j.in_state("RUNNING")]

    def sinfo(self, call):
        if call.has("--version"):
            yield "slurm 22.05.8"
            return
        names, *rows = [line.split("|") for line in self.site["sinfo"]]
        columns = [re.fullmatch(r"(\w+)(?::(\.?)(\d*)(.*))?", c, re.DOTALL) for c in (call.value("Format", "-O") or "").split(",")]  # fmt: skip
        for row in rows[call.has("--noheader", "-h") :]:
            fields = dict(zip((n.lower() for n in names), row, strict=True))
            if at := self.running(fields["nodelist"]):
                whole, total = fields["oversubscribe"] == "EXCLUSIVE", int(fields["cpus"])
                gpus, cpus = sum(j.gpus for j in at), total if whole else sum(j.cpus for j in at)
                fields |= {
                    "gresused": f"{fields['gres'].rpartition(':')[0]}:{gpus}(IDX:0-{gpus - 1})",
                    "cpusstate": f"{cpus}/{total - cpus}/0/{total}",
                    "allocmem": str(sum(j.memory for j in at)),
                    "statelong": "allocated" if whole or cpus >= total else "mixed",
                }
            yield "".join(_cell(fields, *column.groups()) for column in columns if column)

    def squeue(self, call):
        rows = [] if call.has("--noheader", "-h") else [{key: key.upper() for key in LETTERS.values()}]
        now = int(clock.now())
        for job in self.jobs.values():
            for index, state in job.states.items():
                rows.append({
                    "array": job.number, "id": job.number, "index": index if len(job.states) > 1 else "N/A", "state": state,
                    "submitted": now, "started": now if state != "PENDING" else "N/A",
                    "ends": now + 60 * int(job.option("time") or 60) if state == "RUNNING" else "N/A",
                    "node": job.node, "reason": job.reason if state == "PENDING" else "None", "comment": job.option("comment"),
                    "name": job.option("job-name"), "user": "me", "partition": job.option("partition"),
                })  # fmt: skip
        form = re.sub(r"%\.?\d*(\w)", lambda m: f"{{{LETTERS[m[1]]}}}", call.value("format", "-o") or "")
        yield from (form.format(**row) for row in rows if call.value("name") in (None, row["name"]))

    def scontrol(self, call):
        subject = next(w for w in call.words[call.words.index("show") + 1 :] if w[0] != "-")
        return list(self.site["partition all" if subject == "partition" and call.has("--all") else subject])

    def sacctmgr(self, call):
        if "qos" not in self.site:
            raise RefusedError(*NO_ACCOUNTING)
        of = {w.partition("=")[0]: w.partition("=")[2].split(",") for w in call.words if "=" in w}
        for row in self.site[call.words[call.words.index("show") + 1]]:
            if row.get("Account") in of.get("accounts", [row.get("Account")]):
                fields = {name.lower(): value for name, value in row.items()}
                yield "|".join(fields[name.lower()] for name in of["format"])

    def sbatch(self, call):
        for rule in self.site.get("refuses", ()):
            asked = any(w.startswith((rule["lacks"], "--gpus")) for w in call.words)
            if not asked and all(call.has(word) for word in rule["has"]):
                raise RefusedError(*rule["says"])
        if call.has("--test-only"):
            return []
        job = Job(101 + len(self.jobs), call.words, call.text.splitlines())
        limits = {row["Name"]: row["MaxSubmitPU"] for row in self.site.get("qos", ())}
        live = sum(len(j.in_state("PENDING", "RUNNING")) for j in (*self.jobs.values(), job))
        if (most := limits.get(call.value("qos") or "")) and live > int(most):
            raise RefusedError(*TOO_MANY)
        self.jobs[job.number] = job
        self.note(job)
        self.quiet = -1
        return [str(job.number)]

    def scancel(self, call):
        """Jobs, or members of one: NUMBER_MEMBER."""
        for word in call.words:
            number, _, member = word.partition("_")
            job = self.jobs[int(number)]
            for index in [i for i in job.in_state("PENDING", "RUNNING") if member in ("", str(i))]:
                which = f" member {index}" if len(job.states) > 1 else ""
                what = "runs" if job.states[index] == "RUNNING" else "waits"
                job.states[index] = "CANCELLED"
                self.rounds[-1].append(self.plain(f"cancel {job.option('job-name')}{which} ({what})"))
            self.quiet = -1
        return []

    def obstacle(self, job):
        """Why a pending member does not start now; "": it does, on `job.node`."""
        running, limits = self.running(), self.qos(job)
        tres = dict(
            t.split("=") for t in f"{limits.get('GrpTRES', '')},{limits.get('MaxTRESPU', '')}".split(",") if t
        )
        gpus, cpus = sum(j.gpus for j in running) + job.gpus, sum(j.cpus for j in running) + job.cpus
        if len(running) >= int(limits.get("MaxJobsPU") or len(running) + 1):
            return "QOSMaxJobsPerUserLimit"
        if cpus > int(tres.get("cpu", cpus)):
            return "QOSGrpCpuLimit"
        if job.gpus and gpus > int(tres.get("gres/gpu", gpus)):
            return "QOSMaxGRESPerUser"
        for row in self.nodes:
            name, partitions = row["NodeList"], (job.option("partition") or "gpu").split(",")
            if name != (job.option("nodelist") or name) or row["PartitionName"] not in partitions:
                continue
            at = self.running(name)
            gres = re.search(r"gpu:(?:\w+:)?(\d+)", row["Gres"])
            free = (int(gres[1]) if gres else 0, int(row["CPUs"]), int(row["Memory"]))
            asked = [(j.gpus, j.cpus, j.memory) for j in (*at, job)]
            fits = all(sum(each) <= most for each, most in zip(zip(*asked, strict=True), free, strict=True))
            whole = at and row["OverSubscribe"] == "EXCLUSIVE"
            if fits and row["StateLong"].startswith("idle") and not whole:
                job.node = name
                return ""
        return "Resources"

    # --- the player ---------------------------------------------------------------------------------------------------

    def tick(self):
        """Between two turns of the coordinator."""
        self.quiet += 1
        if self.quiet >= QUIET:
            self.play()
            self.quiet = 0
        clock.not_before(clock.now() + TICK_SECONDS)

    def play(self):
        """One round: what runs goes on, what fits starts and does its work."""
        self.played += 1
        if self.rounds[-1]:
            self.rounds.append([])
        live = [j for j in self.jobs.values() if j.in_state("PENDING", "RUNNING")]
        hosts = {j.number: len(self.specs(j)[0].trial.lanes) for j in live if j.purpose == "host"}
        self.sharing = sum(len(j.in_state("RUNNING")) * hosts.get(j.number, 1) for j in live if j.gpus)
        for job in live:
            for index in job.in_state("RUNNING"):
                self.work_on(job, index)
        for job in live:
            for index in job.in_state("PENDING"):
                job.reason = self.obstacle(job)
                if not job.reason:
                    job.states[index] = "RUNNING"
                    Path((job.option("output") or "").replace("%%", "%").replace("%a", str(index))).touch()

    def work_on(self, job, index):
        if getattr(self, job.purpose)(job, index):
            job.states[index] = "COMPLETED"
        for place in self.work.glob("*/outcomes"):
            os.utime(place, ns=(time.time_ns(), time.time_ns()))  # finer than the file system's own stamps

    def specs(self, job):
        return [specs.SPEC.validate_json(Path(word).read_bytes()) for word in job.words]

    def build(self, job, _index):
        for spec in self.specs(job):
            place, task = Path(spec.out_dir), spec.suite.tasks[spec.entry].name
            requests, tokens, generated, executes = self.sizes[task]
            cut = Cut.parse(spec.cut or str(spec.batch_size)) if spec.batch_size != "auto" else None
            shared = {"task": task, "key": f"key-{task}"}
            if cut is not None:
                each = cut.batch_size if cut.token_budget is None else max(1, cut.token_budget // tokens)
                count = -(-requests // each)
                index = specs.BatchIndex(
                    **shared, batch_size=cut.batch_size, offsets=tuple(range(count + 1)), requests=(each,) * count,
                    prefill_tokens=(tokens * each,) * count, generated_tokens=(generated * each,) * count,
                    documents=tuple(tuple(range(i * each, min(requests, (i + 1) * each))) for i in range(count)),
                )  # fmt: skip
                write_record(batch_index_file(place / task, str(cut)), index)
            manifest = specs.RequestSetManifest(
                **shared, executes=executes, documents=requests, requests=requests, prompt_tokens=requests * tokens
            )  # fmt: skip
            write_record(request_set_manifest(place / task), manifest)
            write_record(entry_manifest(place), specs.EntryManifest(entry=task, sets={task: task}))
            built = out.Built(
                name=spec.name,
                entry=spec.entry,
                batch_size=spec.batch_size,
                cut=spec.cut,
                sets={task: str(place / task)},
                seconds=1,
            )
            write_outcome(EvaluationPaths(spec.evaluation_dir), built)
        return True

    def convert(self, job, _index):
        (spec,) = self.specs(job)
        to = Path(spec.out_dir)
        to.mkdir(parents=True)
        make_checkpoint(to, 1 << 30)
        write_outcome(
            EvaluationPaths(spec.evaluation_dir), out.Converted(name=spec.name, path=str(to), seconds=1)
        )
        return True

    def stage(self, job, _index):
        (spec,) = self.specs(job)
        return self.hold(job, spec)

    def hold(self, job, spec):
        """Stage at first; clear when released, which ends the job."""
        paths = EvaluationPaths(spec.evaluation_dir)
        if paths.release_file(job.option("job-name") or "").exists():
            write_outcome(paths, out.Cleared(name=spec.name, node=job.node, freed_bytes=1, reason="released"))
            return True
        if not paths.outcome("staged", spec.name).exists():
            told = {"bytes": 1, "storage_bytes": 1, "seconds": 1.0, "path": f"/dev/shm/{spec.node}"}
            write_outcome(paths, out.Staged(name=spec.name, node=job.node, rung="shm", **told))
        return False

    def trial(self, job, index):
        (spec,) = self.specs(job)
        return self.infer(spec, spec.lanes[index], job.node)

    def host(self, job, _index):
        (spec,) = self.specs(job)
        if self.hold(job, spec.stage):
            return True
        paths = EvaluationPaths(spec.stage.evaluation_dir)
        lanes = [x for x in spec.trial.lanes if not paths.outcome("trial-ended", x.trial).exists()]
        if all([self.infer(spec.trial, lane, job.node) for lane in lanes]):  # noqa: C419 (each has its turn)
            told = out.Cleared(name=spec.name, node=job.node, freed_bytes=1, reason="its trials ended")
            write_outcome(paths, told)
            return True
        return False

    def infer(self, spec, lane, node):
        """Answer an even share of what is queued. False: more may come."""
        paths = EvaluationPaths(spec.evaluation_dir)
        queue = WorkQueue(Link(Path(spec.redis_file)), spec.evaluation_id)
        if spec.batch_size == "auto" and not paths.outcome("probed", lane.trial).exists():
            write_outcome(paths, out.Probed(name=lane.trial, batch_size=16, token_budget=8192))
            return False
        if queue.snapshot().epoch is None:
            return False
        most = -(-len(queue.unclaimed()) // max(1, self.sharing))
        self.sharing -= 1
        with FrameWriter(paths.response_file(lane.trial)) as writer:
            for _ in range(most):
                claim = queue.claim(lane.trial, lane.lane)
                if claim.kind != "shard" or claim.shard is None:
                    break
                shard = ShardId.parse(claim.shard)
                task = shard.task.partition("#")[0]
                told = {"task": task, "key": f"key-{task}", "shard": claim.shard, "trial": lane.trial}
                writer.append(out.ShardResponses(**told, started_at=1.0, seconds=1.0, responses=((0, "x"),)))
                queue.done(lane.trial, claim.shard, writer.bytes)
        if most:
            return False
        seconds = dict.fromkeys(("wait", "import", "load", "infer", "dump"), 1.0)
        ended = out.TrialEnded(
            name=lane.trial, node=node, reason="drained", shards=1, started_at=1, ended_at=2, devices="a100", gpus=spec.gpus,
            **{f"{cause}_seconds": each for cause, each in seconds.items()},
        )  # fmt: skip
        write_outcome(paths, ended)
        return True

    def worker(self, job, _index):
        """An RQ worker: all metric jobs that are asked for; it ends when it is told to."""
        told = dict(zip(job.words[::2], job.words[1::2], strict=False))
        paths = EvaluationPaths(self.work / told["--queue"])
        for place in sorted(paths.root.glob("specs/*.json")):
            spec = specs.SPEC.validate_json(place.read_bytes())
            if spec.kind == "execute" and not paths.outcome("executed", spec.name).exists():
                write_outcome(
                    paths,
                    out.Executed(
                        name=spec.name, task=spec.task, documents=len(spec.documents), programs=1, seconds=1
                    ),
                )
            elif spec.kind == "score" and not paths.outcome("scored", spec.name).exists():
                file = paths.root / f"{spec.name}.scores"
                task = spec.suite.tasks[spec.entry].name
                file.write_text(json.dumps({"results": {task: {"acc,none": 0.5}}}))
                write_outcome(
                    paths, out.Scored(name=spec.name, entry=spec.entry, result_file=str(file), seconds=1)
                )
        return Path(told["--stop-file"]).exists()

    # --- what is kept ---------------------------------------------------------------------------------------------------

    def plain(self, text):
        """Without what differs between machines, folders and runs."""
        for digest in re.findall(r"\bes-([0-9a-f]{8})-", text):
            self.digests.setdefault(digest, f"ID{len(self.digests) + 1}")
        for digest, name in self.digests.items():
            text = text.replace(digest, name)
        text = text.replace(str(self.work.resolve()), "WORK").replace(str(self.folder.resolve()), "HERE")
        text = text.replace(sys.executable, "PYTHON")
        return re.sub(r"(evalspan:\w+:|evalspan-daemon-)[0-9a-f]{8}", r"\1TOKEN", text)

    def note(self, job):
        told = [a for a in job.arguments if not a.startswith(CONSTANT)]
        self.rounds[-1].append(self.plain(f"{job.purpose}: {' '.join(told)}"))
        if job.purpose not in self.texts:
            text = {"arguments": job.arguments, "script": job.script}
            self.texts[job.purpose] = {
                key: [self.plain(line) for line in lines] for key, lines in text.items()
            }

    def found(self):
        """The sequence, sorted within a round, and the whole text of the first job of each kind."""
        counted = [dict(sorted(Counter(each).items())) for each in self.rounds if each]
        return {
            "rounds": [[f"{n} x {line}" if n > 1 else line for line, n in each.items()] for each in counted],
            "texts": self.texts,
        }


def _cell(fields, name, dot, width, suffix):
    """A cell by its part of sinfo's --Format: NAME[:[.]WIDTH][SUFFIX]."""
    text = fields[name.lower()]
    if width == "":
        return text + (suffix or "")
    size = int(width or 20)
    return f"{text:{'>' if dot else '<'}{size}}"[:size] + (suffix or "")


def serve(site, folder, patch):
    """Put commands that ask `site` first on PATH; what ends that."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            head = self._word()
            name, *words = [self._word() for _ in range(int(head) + 1)]
            code, said = site.answer(name, Call(words, self._word()))
            self.wfile.write(f"{code}\n{said}".encode())

        def _word(self):
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

    def end():
        server.shutdown()
        server.server_close()

    return end


def make_checkpoint(folder, size):
    """A folder whose weights claim so many bytes; the file has holes."""
    head = json.dumps({"w": {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]}}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + size)
    os.utime(folder / "model.safetensors", (1, 1))
    (folder / "config.json").write_text(
        '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}'
    )
    (folder / "tokenizer.json").write_text("{}")


def evaluate(site, checkpoints, suite, settings):
    """These evaluations by a real coordinator, begun together. The one place here that names the coordinator's insides."""
    known = work_folder.load_settings(
        None, site.work, {"cluster.kind": "slurm", "cluster.partition": "gpu", **settings}
    )
    coordinator = wiring.coordinator_of(known)
    coordinator.performer.at_once = 1
    coordinator.calls._patience = None

    def inputs(spec, _model):
        return Inputs(lm_eval="0", entries=(specs.Sources(files="f"),) * len(spec.tasks))

    records = []
    for place in checkpoints:
        record = from_settings.evaluation_record(
            known, str(place), str(suite), inputs, options=from_settings.run_options(known)
        )
        records.append(
            wiring.cluster_with_site(record, wiring.site_hosting(known, coordinator.cluster), known)
        )
        validate.check_cluster(coordinator.cluster, records[-1])
    with coordinator.in_charge():
        for record in records:
            coordinator.evaluations.accept_or_wait(record)
        while not coordinator.evaluations.running or any(
            r.state.ended_at is None for r in coordinator.evaluations.running.values()
        ):
            coordinator.tick()
            site.tick()
            assert site.played <= ROUNDS, (coordinator.evaluations.trouble, site.rounds)
        entries = [e for r in coordinator.evaluations.running.values() for e in r.state.entries]
        assert all(e.status == "scored" for e in entries), [(e.name, e.error) for e in entries]
    coordinator.evaluations.close()
