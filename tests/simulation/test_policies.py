"""Policies on a planning instance: no one beats the bound, and a run is a function of its seeds."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation.policies import POLICIES, quantile, simulate_instance
from support.problems import instance_text, instances

from coordinator.planning.instance import plan_instance

ROOT = Path(__file__).parents[2]


@settings(max_examples=60)
@given(instances(), st.sampled_from(POLICIES), st.sampled_from([0.0, 0.3, None]))
def test_no_policy_beats_the_bound(instance, policy, sigma):
    """The bound is never beaten, by any policy, at any spread; GPUs are never busier than held."""
    got = simulate_instance(instance, policy, sigma, 3)
    assert got["makespan_seconds"]["median"] >= got["lower_bound_seconds"] * (1 - 1e-9)
    assert got["makespan_seconds"]["p95"] >= got["makespan_seconds"]["median"]
    assert got["ratio"]["median"] >= 1 - 1e-9
    assert 0.0 <= got["gpu_busy_fraction"] <= 1.0 + 1e-9


def test_without_error_the_run_ends_as_planned():
    """At sigma 0 the simulated makespan is not above the planned one, and the bounds are equal."""
    planned = plan_instance(instance_text())
    run = simulate_instance(instance_text(), "evalspan", 0.0, 1)
    assert run["makespan_seconds"]["median"] <= planned["planned_makespan_seconds"] * 1.001
    assert run["lower_bound_seconds"] == pytest.approx(planned["lower_bound_seconds"])


def test_a_simulation_is_a_function_of_its_seeds():
    """The same seeds give the same figures."""
    for policy in POLICIES:
        assert simulate_instance(instance_text(), policy, 0.6, 3) == simulate_instance(
            instance_text(), policy, 0.6, 3
        )


def test_evalspan_is_no_slower_than_any_baseline_here():
    """On an instance with a long tail and a large set, every baseline takes longer."""
    ours = simulate_instance(instance_text(), "evalspan", 0.3, 5)["makespan_seconds"]["median"]
    for policy in POLICIES[:-1]:
        assert simulate_instance(instance_text(), policy, 0.3, 5)["makespan_seconds"]["median"] > ours


def test_a_full_node_always_reading_is_never_faster():
    """The pessimistic reading of contention is at least as slow as shared reads."""
    overlap = simulate_instance(instance_text(), "per-dataset", 0.0, 1)
    full = simulate_instance(instance_text(), "per-dataset", 0.0, 1, contention="full-node")
    assert full["makespan_seconds"]["median"] >= overlap["makespan_seconds"]["median"]


@pytest.mark.parametrize(
    ("policy", "sigma", "seeds"),
    [("fifo", 0.3, 1), ("paper", -1.0, 1), ("paper", 300.0, 1), ("paper", 0.3, 0)],
)
def test_what_cannot_be_simulated_is_refused(policy, sigma, seeds):
    """Unknown policies, spreads below 0 and no seed: ValueError."""
    with pytest.raises(ValueError):
        simulate_instance(instance_text(), policy, sigma, seeds)


def test_a_quantile_is_one_of_the_values():
    """p95 of 20 values is the 19th, of one value that one."""
    assert quantile(list(range(1, 21)), 0.95) == 19
    assert quantile([7.0], 0.95) == 7.0


def test_the_command_prints_what_the_function_returns(tmp_path):
    """`scripts/simulate --json`; what is no instance is refused in one line."""
    instance = tmp_path / "i.json"
    instance.write_text(instance_text())
    words = [ROOT / "scripts" / "simulate", "--instance", instance, "--policy", "paper", "--sigma", "0.3"]
    done = subprocess.run([*words, "--seeds", "3", "--json"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == simulate_instance(instance_text(), "paper", 0.3, 3)
    instance.write_text("{}")
    refused = subprocess.run(words, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert f"error: {instance}: schema_version: Field required" in refused.stderr
