"""What the bench's jobs run in the place of `python`: evaljobs' own verbs, with the synthetic engine and metrics in them.

Rule: nothing but the engine's four functions and the metric module is replaced; staging, claims, heartbeats, dumps, RQ
are the real ones. A precursor holds its node's link for the seconds that one reader takes, then stages for real.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

verb = sys.argv[3]  # node.py -m evaljobs VERB …
if verb == "trial":
    from bench_slurm_lib import synthetic
    from evaljobs.trial import engine

    engine.load, engine.seed_batch, engine.run_batch = (
        synthetic.load,
        synthetic.seed_batch,
        synthetic.run_batch,
    )
elif verb == "worker":
    from bench_slurm_lib import synthetic

    sys.modules["evaljobs.scoring.score"] = synthetic
elif verb == "stage":
    time.sleep(float(os.environ["BENCH_STORAGE_SECONDS"]))

from evaljobs.__main__ import main  # noqa: E402

sys.exit(main(sys.argv[3:]))
