"""Laws of `coordinator.site.diagnosis`: the failure that began it, within bounded memory, and never a wrong reason."""

import csv
import json
import pickle
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.site.diagnosis.diagnose import diagnose, diagnose_text
from coordinator.site.diagnosis.log import _TELLS
from coordinator.site.diagnosis.reader import MOST_LINE, line_blocks
from coordinator.site.diagnosis.rules import Owner, find_rule, rule_table

NAMES = """\
NVLinkError CUDAError NodeFailure ECCError NetworkError ConnectionError S3StorageError NCCLTimeoutError NCCLRemoteError
DataloaderKilled AttributeError OutOfMemoryError RuntimeError AssertionError ValueError ZeroDivisionError ModelLoadingError
DatasetLoadingError FileNotFoundError OSError TypeError NameError PermissionError ImportError KeyError SyntaxError ArgumentError
CalledProcessError IndexError OOMKilled Preempted TimeLimit DiskFull QuotaExceeded Cancelled Healthy"""
LABELLED = list(csv.DictReader(Path(__file__).with_name("labelled.csv").open()))
STEPS = "".join(f"step {n} loss {2 - n / 100:.3f}\n" for n in range(40))
ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered\n"
TIMEOUT = "[rank{}]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum={}, OpType=ALLREDUCE)\n"
LIMIT = "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***\n"
KILLED = "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 ***\n"

REQUEUED = LIMIT.replace("TIME LIMIT", "JOB REQUEUE")
BANNER = "Loading module cuda on this node\ntorchrun on 2 nodes of 8 GPUs\nmodel of 1.1 B parameters in all its layers\n"


def raised(error, *, rank="", file="train.py", text="    f()"):
    return "".join(
        f"{rank}{line}\n"
        for line in ("Traceback (most recent call last):", f'  File "{file}", line 3, in f', text, error)
    )


@pytest.mark.parametrize("rule", rule_table().rules, ids=lambda rule: rule.example[:40])
def test_each_rule_finds_its_example(rule):
    assert find_rule(rule.example) is rule
    assert any(told in rule.example.encode().lower() for told in _TELLS)
    assert rule.source
    assert rule.owner in get_args(Owner)


def test_reasons_have_the_names_of_the_paper():
    assert sorted(rule_table().reasons) == sorted(NAMES.split())


@pytest.mark.parametrize("half", "123")
def test_nine_of_ten_labelled_templates_get_their_reason_and_nineteen_of_twenty_their_owner(half):
    """Of templates whose misses became rules: docs/decisions.md and docs/benchmarks.md have what was right before."""
    rows = [row for row in LABELLED if row["half"] == half]
    said = [diagnose_text(row["text"].replace("\\n", "\n")) for row in rows]
    right = sum((one.reason or "") == row["reason"] for one, row in zip(said, rows, strict=True))
    owners = sum(one.owner == row["owner"] for one, row in zip(said, rows, strict=True))
    assert right >= 0.9 * len(rows)
    assert owners >= 0.95 * len(rows)


def test_what_was_right_of_the_third_part_at_first_stays_on_record():
    """`first`: the verdict before any rule knew the row, where it was wrong. The third part was measured once, before its
    misses became rules: no threshold was met, so none is asserted of that figure."""
    rows = [row for row in LABELLED if row["half"] == "3"]
    missed = [(row, *row["first"].split("/")) for row in rows if row["first"]]
    reasons = sum(reason != row["reason"] for row, reason, _ in missed)
    owners = sum(owner != row["owner"] for row, _, owner in missed)
    assert (len(rows), len(rows) - reasons, len(rows) - owners) == (149, 109, 117)


USERS = [row["text"].replace("\\n", "\n") for row in LABELLED if row["owner"] == "user"]
# what peers, launchers and Slurm say of a rank that died, and of a node that only lost its job
NOISE = {
    "watchdogs": TIMEOUT.format(1, 9) + TIMEOUT.format(2, 9),
    "lost peers": "[rank2]: torch.distributed.DistBackendError: NCCL error, unhandled cuda error\n"
    "n2:71:90 [0] NCCL WARN Cuda failure 'driver shutting down'\nncclRemoteError: A call failed possibly due to a network error\n",
    "the launcher": "srun: error: n1: task 3: Exited with exit code 1\nE0000 failed (exitcode: -6) local_rank: 3 (pid: 71)\n",
    "Slurm": KILLED + "slurmstepd: error: container_p_join: open failed for /var/tmp/7/.ns: No such file or directory\n",
    "an Xid of the program": "NVRM: Xid (PCI:0000:cb:00): 31, pid=12, name=python, Ch 00000008\nNVRM: Xid (PCI:0000:cb:00): 43, pid=12\n",
}  # fmt: skip


@pytest.mark.parametrize("noise", ["", *NOISE])
def test_an_error_of_a_user_is_never_charged_to_a_node_or_gpu(noise):
    """Whatever others say of it, before or behind."""
    assert len(USERS) >= 50
    said = NOISE.get(noise, "")
    for text in USERS:
        for log in {text, f"{said}{text}", f"{text}\n{said}"}:
            assert diagnose_text(log).owner not in {"node", "gpu", "site"}, log


@given(
    st.sampled_from([ValueError, KeyError, RuntimeError, AssertionError, OSError, TypeError]),
    st.text(st.characters(codec="ascii", categories=["L", "N", "P", "Zs"]), max_size=80),
    st.sampled_from(["", "node n3: ", "rank 3 on gpu 5: ", "cannot use the GPU: ", "CUDA device 9: "]),
)
def test_what_a_program_raises_blames_no_node_and_no_gpu(kind, words, place):
    """Words that name a node or a GPU are no evidence against it."""
    assert diagnose_text(raised(f"{kind.__name__}: {place}{words}")).owner not in {"node", "gpu"}


BEGAN = {
    "a CUDA error before the timeouts of other ranks": (
        STEPS + TIMEOUT.format(1, 9) * 5 + raised(ECC.strip(), rank="[rank3]: ") + TIMEOUT.format(2, 9), "", "ECCError", 49),
    "an exception before the lost connections that it caused": (
        "[rank1]: RuntimeError: [/gloo/tcp/pair.cc:534] Connection closed by peer [n1]:1\n" + raised("KeyError: 'a'", rank="[rank0]: "),
        "", "KeyError", 5),
    "an oom kill, not the loader that it killed": (
        raised("RuntimeError: DataLoader worker (pid 12) is killed by signal: Killed.")
        + "slurmstepd: error: Detected 1 oom_kill event in StepId=7.batch.\n", "", "OOMKilled", 5),
    "a time limit after an error that the program survived": (
        STEPS + raised("ValueError: bad sample") + STEPS + LIMIT, "", "TimeLimit", 85),
    "an error after which nothing went on until the time limit": (STEPS + raised("ValueError: x") + LIMIT, "", "ValueError", 44),
    "a preemption, not what its signal caused": (
        LIMIT.replace("TIME LIMIT", "PREEMPTION") + raised("RuntimeError: aborted"), "", "Preempted", 1),
    "an error of one task, after which srun killed the step": (raised("IndexError: 3") + KILLED, "CANCELLED", "IndexError", 4),
    "the cause of a chain": (
        raised("KeyError: 'a'") + "\nThe above exception was the direct cause of the following exception:\n\n"
        + raised("RuntimeError: it failed"), "", "KeyError", 4),
    "what was raised while another exception was handled": (
        raised("KeyError: 'a'") + "\nDuring handling of the above exception, another exception occurred:\n\n"
        + raised("ValueError: no model a"), "", "ValueError", 11),
    "no exception that was ignored": (
        "Exception ignored in: <function f>\n" + raised("OSError: closed") + raised("TypeError: x"), "", "TypeError", 9),
    "no words of a line of code": (raised("ValueError: x", text='    raise RuntimeError("CUDA out of memory")'), "", "ValueError", 4),
    "no retry": ("WARNING Connection reset by peer, retrying\n" + raised("TypeError: x"), "", "TypeError", 5),
    "no warning of torch about a store that is not there yet": (
        "[W socket.cpp:601] [c10d] The client socket has failed to connect to [n1]:29500 (errno: 111 - Connection refused).\n"
        "E0000 cuda_driver.cc:274] failed call to cuInit: CUDA_ERROR_NO_DEVICE: no device\n" + raised("KeyError: 'a'"),
        "", "KeyError", 6),
    "the last Xid of many": ("NVRM: Xid (PCI:0000:1a:00): 45, pid=8\n" * 3 + "NVRM: Xid (PCI:0000:1a:00): 48, pid=8\n", "", "ECCError", 4),
    "under ANSI codes and progress bars": ("\x1b[31m 5%|##\r 9%|####\x1b[0mRuntimeError: CUDA out of memory.\r\n", "", "OutOfMemoryError", 1),
    "an exception whose name ends like another's": (
        raised("jinja2.exceptions.TemplateAssertionError: No filter named 'x'."), "", "ValueError", 4),
    "in binary bytes": ("\x00\x01\xff" * 9 + "\nKeyError: 'a'\n", "", "KeyError", 2),
    "Slurm's word for a node": (STEPS, "NODE_FAIL", "NodeFailure", None),
    "Slurm's word for memory, of a step": (STEPS, "OUT_OF_MEMORY", "OOMKilled", None),
    "Slurm's word for a person": (STEPS, "CANCELLED by 1001", "Cancelled", None),
    "nothing where the job was completed": (raised("ValueError: caught"), "COMPLETED", "Healthy", None),
    "nothing in a healthy log": (STEPS + "saved; 0 errors\n", "", "Healthy", None),
    "no health where an exception has a name that no rule knows": (raised("zipfile.BadZipFile: no zip file"), "", None, 4),
    "no preemption of a request, and no memory that nvidia-smi names": (
        STEPS + "Sequence group 0 is preempted by RECOMPUTE\n| Volatile Uncorr. ECC |\ncollective timeout: 1800 s\n", "", "Healthy", None),
    "Slurm's word of a person's scancel": ("scancel: Terminating job 7\n", "", "Cancelled", 1),
    "no warning of a driver, and no library that NCCL can do without": (
        "cuda/__init__.py:138: UserWarning: The NVIDIA driver on your system is too old\n"
        "NCCL INFO NET/Plugin: libnccl-net.so: cannot open shared object file\n" + raised("socket.timeout: timed out"),
        "", "ConnectionError", 6),
    "no health where a traceback has no end": ("ERROR x.py:2] f: Traceback (most recent call last):\n", "", None, 1),
    "no error before progress that began while another rank's traceback was open": (
        raised("ValueError: bad sample", rank="[rank1]: ").rstrip("\n").replace("\n", "\n[rank0]: step 0 loss 1.0\n") + "\n" + STEPS + LIMIT,
        "", "TimeLimit", 48),
    "a time limit, though lines of progress came behind it": (STEPS + LIMIT + STEPS[:100], "", "TimeLimit", 41),
    "what a run that ended well had survived": (
        STEPS + "NVRM: Xid (PCI:0000:1a:00): 63, pid=8, Row remapper\n" + "Training completed.\n", "", "Healthy", None),
    "the last attempt after a requeue": (
        STEPS + raised("KeyError: 'a'") + REQUEUED + STEPS + raised("OSError: [Errno 28] No space left"), "", "DiskFull", 89),
    "the last attempt, whose beginning is the first one's": (
        BANNER + "NVRM: Xid (PCI:0000:1a:00): 79, pid=8\n" + BANNER + raised("TypeError: x"), "", "TypeError", 11),
    "a person's Ctrl-C, not what other threads raise of it": (
        STEPS + raised("KeyboardInterrupt") + raised("BrokenPipeError: [Errno 32] Broken pipe") + TIMEOUT.format(1, 9), "", "Cancelled", 44),
    "a person's scancel behind a bar, not what the container says of it": (
        "Generating train split: 0 examples [00:00, ? examples/s]" + KILLED.replace("STEP 7.0", "JOB 7")
        + "slurmstepd: error: container_p_join: open failed for /var/tmp/7/.ns: No such file or directory\n", "", "Cancelled", 1),
    "what a worker raised, not what carries it": (
        raised("KeyError: Caught KeyError in DataLoader worker process 0.") + "Original " + raised("KeyError: 'labels'"), "", "KeyError", 8),
    "the same exception that was raised again while it was handled": (
        raised("EOFError: Ran out of input") + "\nDuring handling of the above exception, another exception occurred:\n\n"
        + raised("EOFError: Ran out of input"), "", "ModelLoadingError", 4),
    "a data set where data are read": (
        raised("EOFError: Ran out of input", file="/torch/utils/data/_utils/fetch.py"), "", "DatasetLoadingError", 4),
    "no values of a configuration behind a logger's word": (
        STEPS + "config_cb None None {'a': 1, 'b': 'No space left on device', 'c': 'ncclRemoteError'}\n" + STEPS[:100], "", "Healthy", None),
    "no request that was answered 429": (
        'INFO: HTTP Request: POST https://x/v1 "HTTP/1.1 429 Too Many Requests"\n' + raised("NameError: name 'f'"), "", "NameError", 5),
    "what a Trainer that ended had survived": (
        raised("PermissionError: [Errno 1] cache") + "{'train_runtime': 8.1, 'train_loss': 2.2}\n", "", "Healthy", None),
    "a requeue that nothing followed": (STEPS + REQUEUED + "srun: error: n1: task 2: Terminated\n", "", "Preempted", 41),
    "no watchdog before a death that no rule knows": (
        STEPS + raised("frob.LatticeBroken: at 3", rank="[rank3]: ") + TIMEOUT.format(1, 9) * 3, "", None, 44),
    "no lost peer before a process that was killed": (
        STEPS + "train.sh: line 4: 4711 Killed    python train.py\n" + TIMEOUT.format(1, 9) * 3, "", None, 41),
    "no cause that the launcher's sum names behind a watchdog": (
        STEPS + TIMEOUT.format(1, 9) + raised("torch.distributed.elastic.multiprocessing.errors.ChildFailedError: "), "",
        "NCCLTimeoutError", 41),
    "nothing known": (STEPS + "Segmentation fault (core dumped)\n", "FAILED", None, 41),
}  # fmt: skip


@pytest.mark.parametrize("name", BEGAN)
def test_the_failure_that_began_it_is_named(name):
    text, state, reason, number = BEGAN[name]
    found = diagnose({"log": [text.encode("latin-1")]}, state=state).diagnosis
    assert (found.reason, found.line_number) == (reason, number)


def test_earlier_attempts_are_listed():
    text = STEPS + raised("KeyError: 'a'") + REQUEUED + STEPS + raised("TypeError: x")
    found = diagnose({"log": [text.encode()]})
    assert (found.diagnosis.reason, [one.reason for one in found.earlier]) == ("TypeError", ["Preempted"])


def test_of_equal_failures_in_logs_of_several_ranks_the_earliest_by_time_counts():
    later, first = (
        f"2026-01-01 10:00:{second} rank failed\n" + raised(f"ValueError: {second}") for second in (30, 10)
    )
    assert diagnose({"rank0": [later.encode()], "rank1": [first.encode()]}).diagnosis.line == "ValueError: 10"


@pytest.mark.parametrize("file", ["/etc/passwd", str(Path(__file__).parents[2] / "README.md")])
def test_a_file_that_is_no_log_is_said_to_be_none(file):
    found = diagnose_text(Path(file).read_text())
    assert found.reason is None
    assert "no log of a job" in found.advice


def test_typical_ends_of_trainings_and_evaluations_get_reason_and_owner():
    """Written in the formats of Python's packages, launchers, Slurm and the kernel."""
    rows = list(csv.DictReader(Path(__file__).with_name("typical.csv").open()))
    said = [diagnose_text(row["text"], state="" if row["reason"] == "Healthy" else "FAILED") for row in rows]
    wrong = [
        (row, one)
        for row, one in zip(rows, said, strict=True)
        if (one.reason or "", one.owner) != (row["reason"], row["owner"])
    ]
    assert len(rows) > 150
    assert wrong == []


def test_evalspan_owns_what_its_own_code_raises():
    ours = "/site-packages/evaljobs/trial/trial.py"
    assert diagnose_text(raised("KeyError: 3", file=ours)).owner == "evalspan"
    assert (
        diagnose_text(raised("KeyError: 3", file="/site-packages/evaljobs/suites/x/utils.py")).owner == "user"
    )
    assert diagnose_text(raised("frob.LatticeBroken: at 3")).owner == "user"


def test_an_unknown_failure_has_its_five_most_telling_lines():
    text = (
        STEPS + "".join(f"fatal: part {name} failed\n" for name in "uvwxyz") + "frobnicator crashed: error\n"
    )
    found = diagnose({"log": [text.encode()]}, state="FAILED")
    assert found.diagnosis.reason is None
    assert found.diagnosis.owner == "none"
    assert [line for _, _, line in found.telling][-1] == "frobnicator crashed: error"
    assert len(found.telling) == 5


def test_a_line_without_end_is_bounded():
    """Of any number of bytes only MOST_LINE are kept, the end of the line among them."""
    chunks = [b"x" * (1 << 20)] * 40 + [b" OSError: [Errno 28] No space left on device"]
    assert all(len(block) <= 3 * (1 << 20) for block, _ in line_blocks(iter(chunks)))
    *_, (last, _) = line_blocks(iter(chunks))
    assert len(last) <= MOST_LINE + (1 << 20)
    assert diagnose({"log": iter(chunks)}).diagnosis.reason == "DiskFull"


def test_the_earliest_error_file_of_elastic_counts():
    def file(at, said):
        more = {"py_callstack": raised(said), "timestamp": str(at)}
        return [json.dumps({"message": {"message": said, "extraInfo": more}}).encode()]

    logs = {"rank1.json": file(200, "ValueError: later"), "rank0.json": file(100, "TypeError: first")}
    assert diagnose(logs).diagnosis.reason == "TypeError"


def dump(rank, *calls):
    entries = [
        {"process_group": ("0", "default_pg"), "collective_seq_id": n, "is_p2p": False, "profiling_name": name, "state": state,
         "time_created_ns": n}
        for n, (name, state) in enumerate(calls, 1)
    ]  # fmt: skip
    return [pickle.dumps({"version": "2.5", "entries": entries, "rank": rank})]


DONE, WAITS = ("nccl:all_reduce", "completed"), ("nccl:all_reduce", "scheduled")


@pytest.mark.parametrize(
    ("third", "owner", "line"),
    [
        ((DONE,), "network", "ranks [2] never joined nccl:all_reduce number 2"),
        ((DONE, WAITS), "network", "did not complete on ranks [0, 1, 2]"),
        ((DONE, ("nccl:broadcast", "scheduled")), "user", "ranks called different collectives"),
    ],
)
def test_flight_recorder_dumps_name_the_rank_that_is_missing(third, owner, line):
    found = diagnose(
        {"t_0": dump(0, DONE, WAITS), "t_1": dump(1, DONE, WAITS), "t_2": dump(2, *third)}
    ).diagnosis
    assert (found.reason, found.owner) == ("NCCLTimeoutError", owner)
    assert line in found.line


def test_a_dump_runs_no_code_of_its_own(tmp_path):
    class Hostile:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    assert diagnose({"t_0": [pickle.dumps(Hostile())]}).diagnosis.reason in (None, "Healthy")
    assert not (tmp_path / "ran").exists()


def test_a_log_that_says_that_weights_are_random_is_not_healthy():
    """Of an evaluation that ended by itself; a training that made steps from there has survived it."""
    notes = "LlamaForCausalLM LOAD REPORT from: /ckpt\n| Key | Status |\n- MISSING:\tthose params were newly initialized because missing from the checkpoint.\n"
    assert diagnose_text(notes + "INFO trial ended: drained after 3 shards\n").reason == "ModelLoadingError"
    assert diagnose_text(notes + STEPS).reason == "Healthy"
