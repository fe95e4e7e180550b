"""Simulate a policy on a planning instance whose run times differ from the predicted ones.

    scripts/simulate --instance instance.json --policy per-dataset --sigma 0.3

`evalspan plan --suite core --save-instance instance.json` writes an instance.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from simulation.policies import POLICIES, simulate_instance

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="scripts/simulate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--instance", type=Path, required=True, help="a planning instance (JSON)")
    policy = "round-robin: of cached tokens; paper: the same, tokens made in each trial"
    parser.add_argument("--policy", choices=POLICIES, required=True, help=policy)
    parser.add_argument("--sigma", type=float, default=0.3, help="spread of the log prediction error (0.3)")
    parser.add_argument("--seeds", type=int, default=50, help="how many draws (50)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    try:
        text = options.instance.read_text(encoding="utf-8")
        made = simulate_instance(text, options.policy, options.sigma, options.seeds)
    except (OSError, ValueError) as error:
        parser.error(f"{options.instance}: {error}")
    makespan, bound = made["makespan_seconds"], made["lower_bound_seconds"]
    told = f"{options.policy}: makespan {makespan['median']:.1f} s (p95 {makespan['p95']:.1f}), "
    told += f"lower bound {bound:.1f} s, GPUs busy {100 * made['gpu_busy_fraction']:.1f} %"
    print(json.dumps(made, indent=1) if options.json else told)
