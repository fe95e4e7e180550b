"""Laws of reading: no launcher's prefix and no block that is no message changes why a job failed."""

import csv
from collections.abc import Iterable
from pathlib import Path

import pytest
from diagnosis.launchers import LAUNCHERS

from coordinator.site.diagnosis.diagnose import Diagnosis, diagnose

ROWS = list(csv.DictReader(Path(__file__).with_name("labelled.csv").open()))
BANNER = """\
Loading module cuda/12.4
torchrun on 2 nodes of 8 GPUs
seed 17, bf16, ZeRO stage 2
model: 1.1 B parameters in 22 layers
resuming from /ckpt/step-1000
"""
STEPS = "".join(f"step {n} loss {2 - n / 100:.3f}\n" for n in range(12))
LOGS = [(BANNER + STEPS + row["text"].replace("\\n", "\n")).split("\n") for row in ROWS]
FRAMES = 'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n    main()\n  File "train.py", line 5, in main\n    step()\n'
TRACED = [
    (BANNER + STEPS + FRAMES + row["text"].replace("\\n", "\n")).split("\n")
    for row in ROWS
    if row["text"].split(":")[0].endswith("Error")
]


def diagnosed(text: str, state: str = "") -> Diagnosis:
    return diagnose({"log": [text.encode()]}, state=state).diagnosis


def answer(text: str, state: str = "") -> tuple[str | None, str, str]:
    found = diagnosed(text, state)
    return found.reason, found.owner, found.line.strip()


@pytest.fixture(scope="module")
def answers() -> list[tuple[str | None, str, str]]:
    return [answer("\n".join(log) + "\n") for log in LOGS + TRACED]


def third(kind: object, kinds: Iterable[object]) -> slice:
    """Which logs a case takes: all of them are taken in three cases."""
    return slice(list(kinds).index(kind) % 3, None, 3)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_prefix_changes_no_answer(launcher: str, answers: list[tuple[str | None, str, str]]) -> None:
    """Reason, owner and the quoted message of each labelled log, behind any launcher's, collector's or logger's prefix."""
    mine = third(launcher, LAUNCHERS)
    given = [answer(LAUNCHERS[launcher](log)) for log in (LOGS + TRACED)[mine]]
    if (
        launcher == "wrapped"
    ):  # a log with one line as long as the terminal was wide does not show that it was broken there
        same = sum(one[:2] == other[:2] for one, other in zip(given, answers[mine], strict=True))
        assert same >= 0.95 * len(given)
    else:
        assert given == answers[mine]


SAYS_NOTHING = {
    "an environment": "NCCL_DEBUG=WARN\nTRAP_SIGNALS=SIGBUS SIGSEGV OutOfMemoryError\nexport ON_ERROR='CUDA error: out of memory'\n"
    'declare -x LAST="No space left on device"\nHOSTNAME=gpu-017\nKILL_ON="OOMKilled: CUDA error, Xid 79"\n',
    "arguments": "  on_error ............................ CUDA error: uncorrectable ECC error\n  lr .................... 0.001\n"
    "+ python train.py --on-error 'ValueError: retry' --lr 1e-3\nNamespace(lr=0.1, errors='CUDA out of memory')\n"
    "args: --watch 'No space left on device'\n",
    "a configuration": "trainer:\n  policy: retry on CUDA error\n  storage: fail on No space left on device\n  lr: 1e-3\n  nccl: ncclRemoteError\n",
    "a configuration as JSON": '{\n  "on_error": "CUDA error: out of memory",\n  "retry": ["Disk quota exceeded", "KeyError: 1"],\n  "lr": 0.1\n}\n',
    "a configuration as TOML": 'on_error = "RuntimeError: CUDA error: unspecified launch failure"\nretries = 3\n',
    "packages": "Package      Version\n------------ -------\noom-killer   1.2.3\nerror-xid    79.0.1\ncudaErrorUnknown==1.0\n",
    "code": '    raise RuntimeError("CUDA out of memory")\nfor line in log:\n    if "DUE TO TIME LIMIT" in line:\n'
    '        logger.error("No space left on device")\n',
    "samples": 'sample 3: how do I mend RuntimeError: CUDA error: an illegal memory access?\nprompt: "OSError: [Errno 28] No space left"\n'
    "generated: KeyError: 'a' means that the key is missing\n",
    "a text that was generated": f"Generated text:\nRun nvidia-smi. NVRM: Xid (PCI:0000:1a:00): 79, pid=8\n{FRAMES}KeyError: 'a'\n\n",
    "a quoted log": "> slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***\n> KeyError: 'a'\n",
    "a fenced log": f"```\n{FRAMES}OSError: [Errno 28] No space left on device\n```\n",
    "a log between marks": f"--- begin of the last log ---\n{FRAMES}torch.OutOfMemoryError: CUDA out of memory\n--- end of the last log ---\n",
    "values with names": "callback None {'on_error': 1, 'retry': 'Disk quota exceeded', 'last': 'CUDA error: out of memory'}\n",
    "a table": "| GPU  Name    | Volatile Uncorr. ECC error |\n|   0  H100    | CUDA error: out of memory  |\n",
}


@pytest.mark.parametrize("block", SAYS_NOTHING)
def test_what_is_no_message_changes_no_answer(block: str, answers: list[tuple[str | None, str, str]]) -> None:
    """Put in front, between the banner and the steps, before the failure, or behind all."""
    mine, lines = third(block, SAYS_NOTHING), SAYS_NOTHING[block].rstrip("\n").split("\n")
    for at in (0, 5, 17, None):
        logs = [[*log[:at], *lines, *log[at:]] if at is not None else [*log, *lines] for log in LOGS[mine]]
        given = [answer("\n".join(log) + "\n") for log in logs]
        assert [
            (log, one)
            for log, one, other in zip(logs, given, answers[: len(LOGS)][mine], strict=True)
            if one != other
        ] == []
