"""A makespan report on narrow and wide terminals."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from support.trainings import leave

from coordinator.report.measurements import Report
from coordinator.report.render import show


@pytest.fixture
def paths(tmp_path):
    return leave(tmp_path, 1, 0.5)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_report_fits_any_width_and_shows_the_cost(paths, width):
    """No line is too wide."""
    report = Report.model_validate_json(paths.report.read_bytes())
    out = io.StringIO()
    show(Console(file=out, width=width, color_system=None), report, None, 2.0, verbose=True)
    text = out.getvalue()
    assert "2.0000" in text, "an hour at 2"
    assert max(map(len, text.splitlines())) <= width


def test_the_report_names_a_node_whole(paths):
    """Names of 60 characters that differ at their end."""
    nodes = {f"gpu-node-of-the-very-long-named-cluster-in-building-12-n{i:04d}": "shm" for i in (1, 2)}
    report = Report.model_validate_json(paths.report.read_bytes()).model_copy(update={"nodes": nodes})
    out = io.StringIO()
    show(Console(file=out, width=80, color_system=None), report, None, 2.0, verbose=True)
    text = "".join(out.getvalue().split())
    assert all(node in text for node in nodes), text
