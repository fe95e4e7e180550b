"""Decides whether an ended training is restarted, and whether its loss spikes. Pure. Called by `supervision`.

Rule: a failure that a restart cannot fix, such as an error of the user's program, ends the supervision. One without a known
reason is retried once, and as long as checkpoints are written in between; a kill from outside is not a failure of the
program.
"""

from __future__ import annotations

import math
import signal
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from coordinator.base.signals import SIGNAL_EXIT_BASE
from coordinator.site.diagnosis.diagnose import Diagnosis

KILL_EXIT_CODES = (SIGNAL_EXIT_BASE + 9, SIGNAL_EXIT_BASE + 15)  # SIGKILL, SIGTERM
# reasons that are kills themselves, by a person or for memory
KILL_REASONS = ("Cancelled", "OOMKilled", "DataloaderKilled")
INFRASTRUCTURE = ("node", "gpu", "network")  # owners of failures after which nodes are checked
MOST_PAUSE = 600.0  # seconds between two attempts, at most
LOSS_WINDOW = 200  # losses with which a new one is compared ...
MIN_LOSSES = 30  # ... and the fewest
SPIKE_SCORE = 8.0  # robust z-score above which a loss is unusual
SPIKE_LENGTH = 3  # consecutive unusual losses that make a spike: a single one is a batch


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How an attempt ended. `code`: as in a shell; `hung`: killed because it hung; `silent`: seconds without a sign of life;
    `progress`: it left a complete checkpoint of a higher step.
    """

    code: int
    cause: Diagnosis
    progress: bool
    hung: bool = False
    silent: float = 0.0

    @property
    def failed(self) -> bool:
        return self.hung or self.code != 0

    @property
    def killed_from_outside(self) -> bool:
        """Whether a signal ended it and a log shows at most an error that was survived until then."""
        survived = self.cause.owner == "user" and self.cause.reason not in KILL_REASONS
        return (
            self.code in KILL_EXIT_CODES and not self.hung and survived and self.cause.line_number is not None
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Decision after an attempt. `why`: reason, owner and line; with advice if it is not restarted. `check`: check nodes
    first.
    """

    restart: bool
    why: str
    check: bool = False


def decide_restart(end: End, left: int, unknown_before: bool) -> Decision:
    """Decide about a restart. `left`: remaining restarts; `unknown_before`: the previous attempt ended without a known reason
    or progress.
    """
    cause, why = end.cause, end_in_words(end)
    if not end.failed:
        return Decision(restart=False, why="training has ended")
    if cause.reason is not None and not cause.recoverable and not end.killed_from_outside:
        return Decision(restart=False, why=f"{why}; a restart will not help: {cause.advice}")
    if is_unknown(end) and unknown_before:
        return Decision(restart=False, why=f"{why}, twice without a new checkpoint: read its log")
    if left <= 0:
        return Decision(restart=False, why=f"{why}; no restart is left (--max-restarts)")
    return Decision(restart=True, why=why, check=cause.owner in INFRASTRUCTURE or end.hung)


def is_unknown(end: End) -> bool:
    return end.cause.reason is None and not end.progress and end.code not in KILL_EXIT_CODES


def end_in_words(end: End) -> str:
    how = f"no output and no heartbeat for {end.silent:.0f} s" if end.hung else f"exit code {end.code}"
    if not end.hung and SIGNAL_EXIT_BASE < end.code <= SIGNAL_EXIT_BASE + signal.NSIG:
        how = f"ended by signal {end.code - SIGNAL_EXIT_BASE}"
    cause = end.cause
    if end.killed_from_outside:
        return f"killed from outside, {how}"
    name = f"{cause.reason} (owner: {cause.owner})" if cause.reason else "reason not known"
    return f"{name}, {how}{f': {cause.line}' if cause.line else ''}"


def restart_pause(first: float, idle: int) -> float:
    """Return the seconds before the next attempt. `idle`: consecutive restarts without a new checkpoint."""
    return min(MOST_PAUSE, first * 2.0 ** min(idle, 20))


@dataclass(slots=True)
class Losses:
    """The usual losses of a training, and the number of consecutive unusual ones. The robust z-score of a loss is its
    distance to their median in standard deviations, estimated by the median absolute deviation.
    """

    _usual: deque[float] = field(default_factory=lambda: deque(maxlen=LOSS_WINDOW))
    _row: int = 0
    _told: bool = False

    def add(self, loss: float) -> str:
        """Add a loss and describe a spike, once: LASTS large losses in a row, or a loss that is not a number. Otherwise ""."""
        middle = median(self._usual) if len(self._usual) >= MIN_LOSSES else math.inf
        spread = 1.4826 * median(abs(one - middle) for one in self._usual) if middle < math.inf else 1.0
        score = (loss - middle) / max(spread, 1e-3 * abs(middle), 1e-9) if middle < math.inf else 0.0
        if math.isfinite(loss) and score <= SPIKE_SCORE:
            self._usual.append(loss)
            self._row, self._told = 0, False
            return ""
        self._row += 1
        if self._row >= LOSS_WINDOW:  # it is the usual loss now
            self._usual.clear()
        if self._told or (math.isfinite(loss) and self._row < SPIKE_LENGTH):
            return ""
        self._told = True
        usual = (
            f", robust z-score {score:.1f} against a median of {middle:.4g}" if math.isfinite(loss) else ""
        )
        return f"the loss is {loss:.4g}{usual}"
