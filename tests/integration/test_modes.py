"""Exact and fast mode by the command line: differences side by side, and batches that do not fit a GPU's memory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support import sites
from support.toys import suite_text

pytestmark = pytest.mark.model
TOKENS = 600  # of a forward pass that the small GPU takes: a few rows of these tasks


def on_a_small_gpu(site: sites.Site) -> None:
    folder = Path(sites.__file__).parent / "small_gpu"
    path = os.pathsep.join(filter(None, [str(folder), site.env.get("PYTHONPATH")]))
    site.env |= {"PYTHONPATH": path, "SMALL_GPU_TOKENS": str(TOKENS)}


def write_suite(site: sites.Site, text: str = "", task: str = "") -> None:
    """Two toy tasks; `text`: more settings of the suite, `task`: of the first task."""
    head, choice, sums = suite_text(
        "modes", {"toy_choice": {"limit": 40}, "toy_sums": {"limit": 4}}, batch_size=64
    ).split("[[task]]\n")
    site.suite.write_text(f"{head}{text}\n[[task]]\n{choice}{task}\n[[task]]\n{sums}")


def evaluated(site: sites.Site, *more: str, code: int = 0) -> dict[str, Any]:
    done = site.run(site.evaluate(*more))
    logs = "\n".join(f"== {p}\n{p.read_text()[-1500:]}" for p in site.work.glob("*/logs/*.log"))
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}\n{logs}"
    return dict(json.loads(done.stdout))


def test_check_fast_sets_both_modes_side_by_side(local_site: sites.Site) -> None:
    """N documents of each task twice; likelihoods within 1e-3, the same argmax, the same generated answers."""
    write_suite(local_site)
    made = evaluated(local_site, "--check-fast", "6")
    assert list(made["evaluations"]) == ["exact", "fast"]
    assert "-fast-" in made["evaluations"]["fast"]
    choice, sums = made["tasks"]
    assert (choice["task"], choice["documents"], choice["argmax"]) == ("toy_choice", 6, 0)
    assert choice["worst"] <= 1e-3
    assert (sums["documents"], sums["answers"], sums["worst"]) == (6, 0, None)
    assert all(score["exact"] is not None and score["fast"] is not None for score in made["scores"])
    said = {
        mode: json.loads((local_site.work / name / "results.json").read_text())["evalspan"]
        for mode, name in made["evaluations"].items()
    }
    assert [(said[mode]["mode"], said[mode]["token_budget"]) for mode in said] == [
        ("exact", None),
        ("fast", 8192),
    ]
    # the same requests, and none of one mode's answers for the other
    assert said["exact"]["keys"] == said["fast"]["keys"]
    assert said["fast"]["responses_from"] == {}


def test_a_fast_budget_too_large_for_the_gpu_is_reduced_and_all_is_scored(local_site: sites.Site) -> None:
    """No document is lost; one warning says what happened, and the results name the task's own budget."""
    write_suite(local_site, 'mode = "fast"')
    on_a_small_gpu(local_site)
    found = evaluated(local_site)
    said = found["evalspan"]
    assert said["status"] == "done"
    assert said["cuts"].keys() == {"toy_choice"}
    assert found["n-samples"]["toy_choice"]["effective"] == 40
    report = json.loads((local_site.work / said["evaluation_id"] / "report.json").read_text())
    again = [line for line in report["warnings"] if "starts again with a token budget of" in line]
    assert again
    assert again[-1].split("budget of ")[1].split(":")[0] == said["cuts"]["toy_choice"].split("-")[1]


def test_an_exact_batch_too_large_for_the_gpu_says_the_size_that_works(local_site: sites.Site) -> None:
    """The other task is scored; with what the error says, the task is scored too, and nothing else is run again."""
    write_suite(local_site)
    on_a_small_gpu(local_site)
    found = evaluated(local_site, code=1)
    assert found["failed"].keys() == {"toy_choice"}
    error = found["failed"]["toy_choice"]
    assert "batch_size = 64" in error
    typed = error.split("set ")[1].split(" in [[task]]")[0]
    assert "toy_sums" in found["results"]
    write_suite(local_site, task=typed)
    found = evaluated(local_site)
    assert found["evalspan"]["cuts"] == {"toy_choice": typed.split(" = ")[1]}
    assert found["evalspan"]["responses_from"].keys() == {"toy_sums"}
