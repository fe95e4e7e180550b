"""`python -m bench.node -m evaljobs VERB …`: evaljobs' own verbs, with the synthetic engine and metrics in them.

Rule: nothing but the engine's three functions and the metric module is replaced; staging, claims, heartbeats, dumps and
RQ are the real ones. A precursor holds its node's link for the seconds that one reader takes, then stages for real.
"""

from __future__ import annotations

import sys
import time

from bench import synthetic

verb = sys.argv[3]
if verb == "trial":
    from evaljobs.trial import engine

    engine.load = synthetic.load
    engine.seed_batch = synthetic.seed_batch
    engine.run_batch = synthetic.run_batch
elif verb == "worker" and "metrics" in synthetic.given():
    sys.modules["evaljobs.scoring.score"] = synthetic
elif verb == "stage":
    time.sleep(synthetic.given().get("storage_seconds", 0.0))

from evaljobs.__main__ import main  # noqa: E402

sys.exit(main(sys.argv[3:]))
