"""docs/reference/metrics.md: metrics as a daemon's registry has them, alert rules as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Iterator

import yaml
from docs_lib.reference.text import ROOT, code, first_upper, page, plain, table
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from coordinator.monitor.metrics import Metrics

INTRO = """Metrics that a daemon with `[metrics] listen` has for Prometheus, and the alert rules that are shipped. The
setting: [`[metrics]`](settings.md#metrics)."""
RULES = ROOT / "scripts" / "monitoring" / "alerts.yml"
UNITS = ("seconds", "bytes")
PER_KIND = {"counter": "_total", "info": "_info"}


def metrics_page() -> str:
    made = Metrics("127.0.0.1:0", lambda: 0.0)
    try:
        made._show([], {}, 0.0)  # noqa: SLF001 (so that each label has its values)
        rows = sorted(_rows(made))
    finally:
        made.close()
    return page(
        "Metrics",
        INTRO,
        "## Metrics of a daemon",
        table(["metric", "type", "labels", "unit", "meaning"], rows),
        "A histogram has `_bucket`, `_sum` and `_count`. Counters begin at 0 with each daemon.",
        "## Alert rules",
        "`scripts/monitoring/alerts.yml`; in an installation `share/evalspan/monitoring/alerts.yml`.",
        table(["alert", "condition", "for", "what it says"], _alerts()),
    )


def _rows(made: Metrics) -> Iterator[list[str]]:
    for collector in dict.fromkeys(made.registry._collector_to_names):  # noqa: SLF001 (it has no public list)
        for family in collector.collect():
            name = family.name + PER_KIND.get(family.type, "")
            unit = next((unit for unit in UNITS if family.name.endswith(unit)), "")
            yield [
                code(name),
                family.type,
                _labels(collector),
                unit,
                plain(first_upper(family.documentation)),
            ]


def _labels(collector: Collector) -> str:
    """Each label, with its values where they are known before anything has happened."""
    if not isinstance(collector, MetricWrapperBase):
        return ""
    said = []
    for label in collector._labelnames:  # noqa: SLF001 (as above)
        samples = [each for family in collector.collect() for each in family.samples]
        values = dict.fromkeys(each.labels[label] for each in samples if label in each.labels)
        said.append(code(label) + (f": {', '.join(values)}" if values else ""))
    return "; ".join(said)


def _alerts() -> Iterator[list[str]]:
    for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]:
        for rule in group["rules"]:
            said = rule["annotations"]["summary"]
            yield [code(rule["alert"]), code(rule["expr"]), rule.get("for", "at once"), plain(said)]
