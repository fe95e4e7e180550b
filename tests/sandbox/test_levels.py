"""Laws of the choice of an isolation level."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from evaljobs.sandbox.isolation.lane import ENVIRONMENT

ROOT = Path(__file__).resolve().parents[2]
PROBE = "from evaljobs.sandbox import levels; print(levels.describe())"


@pytest.mark.parametrize("variable", ["OMP_NUM_THREADS", "PYTHONHASHSEED"])
def test_a_variable_that_programs_are_given_does_not_count_as_an_escape(variable):
    """Jobs have OMP_NUM_THREADS, and so has every program: the same levels hold as in an environment without it."""

    def held(env: dict[str, str]) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", PROBE],
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            check=True,
            timeout=240,
        )
        return [report["level"] for report in json.loads(done.stdout) if report["holds"]]

    least = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8"}  # with another LANG Python sets one more variable
    assert variable in ENVIRONMENT
    assert held({**least, variable: ENVIRONMENT[variable]}) == held({**least, "HF_HUB_OFFLINE": "1"})
