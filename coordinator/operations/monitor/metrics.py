"""Prometheus metrics of a daemon on `[metrics] listen`; a thread answers scrapes from values that the loop handed over.

Rule: the loop only calls `note`, at most every NOTE_SECONDS. Names and units follow Prometheus' conventions: base units,
`_total` for counters, labels with few values. Counters start at 0 with each daemon.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Gauge,
    Histogram,
    Info,
    disable_created_metrics,
    start_http_server,
)
from prometheus_client import Counter as Counted

from coordinator.base.version import version_text
from coordinator.decide.evaluation.state import Phase
from coordinator.errors import OperatorError
from coordinator.results.report.usage import CAUSES
from coordinator.runtime.summary import Summary

if TYPE_CHECKING:
    from coordinator.runtime.loop import Coordinator

NOTE_SECONDS = 5.0  # between two looks at the evaluations
SILENT_SECONDS = 90.0  # without a turn of the loop, after which nothing is shown as running
PHASES = (*(phase.name.lower() for phase in Phase if phase is not Phase.ENDED), "parked", "pending")
NODES = ("offered", "staging", "ready", "back-off", "withdrawn")
JOBS = ("build", "convert", "stage", "trial", "host", "metric")
LABELS = {"infer": "inference", "imports": "import", "warm": "warm-up"}  # labels of causes, if different
# name -> (help text, its label or "")
GAUGES = {
    "evaluations": ("Evaluations by phase; pending: not yet accepted; stopped: the loop hangs", "phase"),
    "shards": ("Shards of open evaluations; quarantined: failed too often", "state"),
    "nodes": ("Nodes of open evaluations", "status"),
    "jobs": ("Jobs in the cluster's queue or running", "purpose"),
    "metric_jobs": ("CPU jobs of metrics without an outcome", ""),
    "oldest_evaluation_seconds": ("Age of the oldest open evaluation", ""),
    "cluster_call_late_seconds": ("Age of the cluster's oldest unanswered call; 0: none is late", ""),
    "trouble": ("1 while the loop reports a problem with storage, site or Redis", ""),
    "redis_up": ("1 where Redis answers", ""),
    "redis_memory_bytes": ("Memory that Redis uses", ""),
}
COUNTERS = {
    "cluster_calls": ("Calls to the cluster by kind, such as a submission", "call"),
    "evaluations_ended": ("Evaluations that have ended; status: done, failed or cancelled", "status"),
    "gpu_seconds": ("GPU seconds of ended evaluations", "cause"),
    "staged_bytes": ("Bytes of weights staged in nodes' memory, of ended evaluations", ""),
}
# name -> (help text, upper bounds of its buckets)
HISTOGRAMS = {
    "loop_seconds": (
        "Duration of a turn of the loop in seconds",
        (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
    ),
    "checkpoint_seconds": (
        "Seconds from a checkpoint's announcement to its last score, waits included; not of cancelled ones",
        (60, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 86400),
    ),
    "makespan_seconds": (
        "Seconds from acceptance to the last score",
        (60, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800),
    ),
}


class Metrics:
    """The metrics of one daemon. Raise OperatorError if `listen`, "HOST:PORT", is unavailable."""

    def __init__(self, listen: str, memory: Callable[[], float | None]) -> None:
        """Start serving. `memory`: bytes that Redis uses, queried in the thread of a scrape; None: it did not answer."""
        # no creation time with each counter
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = shown = CollectorRegistry()
        self._noted_at = 0.0
        self._phases: Mapping[str, int] = {}
        self._gauges = {
            name: Gauge(f"evalspan_{name}", what, label.split(), registry=shown)
            for name, (what, label) in GAUGES.items()
        }
        self._counters = {
            name: Counted(f"evalspan_{name}", what, label.split(), registry=shown)
            for name, (what, label) in COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(f"evalspan_{name}", what, buckets=buckets, registry=shown)
            for name, (what, buckets) in HISTOGRAMS.items()
        }
        Info("evalspan_build", "Version and commit of the daemon", registry=shown).info(
            {"version": version_text()}
        )
        for phase in (*PHASES, "stopped"):
            self._gauges["evaluations"].labels(phase).set_function(partial(self._phase, phase))
        self._gauges["redis_up"].set_function(lambda: memory() is not None)
        self._gauges["redis_memory_bytes"].set_function(lambda: memory() or float("nan"))
        for cause in CAUSES:
            self._counters["gpu_seconds"].labels(LABELS.get(cause, cause))
        host, _, port = listen.rpartition(":")
        try:
            self._server, self._thread = start_http_server(int(port), host, shown)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise OperatorError(f"[metrics] listen = {listen!r} is not available: {why}") from error
        self.port: int = self._server.server_port

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def turn(self, seconds: float) -> None:
        self._histograms["loop_seconds"].observe(seconds)

    def note(self, coordinator: Coordinator, pending: int, now: float) -> None:
        """Hand over the current state. `pending`: checkpoints not yet accepted; `now`: unix seconds."""
        if time.monotonic() - self._noted_at < NOTE_SECONDS:
            return
        self._noted_at = time.monotonic()
        open_ones = [s for s in coordinator.evaluations.summaries() if s.ended_at is None]
        self._show(open_ones, {"parked": len(coordinator.evaluations.parked), "pending": pending}, now)
        late = coordinator.calls.late()
        self._gauges["cluster_call_late_seconds"].set(0.0 if late is None else late[1])
        self._gauges["trouble"].set(bool(coordinator.evaluations.trouble))
        for call, count in coordinator.calls.take_counts().items():
            self._counters["cluster_calls"].labels(call).inc(count)

    def ended(
        self, ends: Iterable[Summary], announced_at: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        """Count ended evaluations, and their costs as far as known. `announced_at`: id -> unix seconds."""
        for summary in ends:
            begun = announced_at.get(summary.evaluation_id)
            if begun is not None and summary.ended_at is not None and not summary.cancelled:
                self._histograms["checkpoint_seconds"].observe(max(0.0, summary.ended_at - begun))
            self._counters["evaluations_ended"].labels(summary.result).inc()
            for cause, seconds in summary.causes.items():
                self._counters["gpu_seconds"].labels(LABELS.get(cause, cause)).inc(seconds)
            self._counters["staged_bytes"].inc(summary.staged_bytes)
            if summary.makespan_seconds is not None:
                self._histograms["makespan_seconds"].observe(summary.makespan_seconds)

    def _phase(self, phase: str) -> int:
        """Return the number of evaluations in a phase; stopped if the loop has shown no sign of life for SILENT_SECONDS."""
        halted = "stopped" if time.monotonic() - self._noted_at > SILENT_SECONDS else ""
        shown = {name: name if name in ("parked", "pending") else halted or name for name in self._phases}
        return sum(count for name, count in self._phases.items() if shown[name] == phase)

    def _show(self, summaries: Sequence[Summary], more: Mapping[str, int], now: float) -> None:
        """Set the gauges. `more`: phases that no summary has -> evaluations and checkpoints."""
        self._phases = Counter(s.phase for s in summaries) | Counter(more)
        quarantined = sum(s.shards_quarantined for s in summaries)
        done = sum(s.shards_done for s in summaries) - quarantined
        todo = sum(s.shards for s in summaries) - done - quarantined
        for name, values in {
            "shards": {"quarantined": quarantined, "done": done, "to do": todo},
            "nodes": {label: sum(s.nodes_by_status.get(label, 0) for s in summaries) for label in NODES},
            "jobs": {label: sum(s.jobs.get(label, 0) for s in summaries) for label in JOBS},
        }.items():
            for label, value in values.items():
                self._gauges[name].labels(label).set(value)
        self._gauges["metric_jobs"].set(sum(sum(s.metric_jobs_open.values()) for s in summaries))
        oldest = max((now - s.accepted_at for s in summaries), default=0.0)
        self._gauges["oldest_evaluation_seconds"].set(oldest)
