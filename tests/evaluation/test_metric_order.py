"""Which metric jobs go ahead of those that wait."""

from __future__ import annotations

from support.simulated.world import World

from coordinator.evaluation import actions as do
from coordinator.evaluation import scoring


def test_jobs_of_a_metric_longer_than_an_even_share_go_first() -> None:
    """A judge's jobs follow one another: behind shorter ones they would end last. Others come in their order."""
    world = World(1).until(lambda world: world.state.scoring.outstanding)
    leaves = world.state.shards.leaves
    for name, leaf in leaves.items():
        leaf.planned = leaf.planned.model_copy(update={"metric_seconds": 100.0 if name == "t1" else 1.0})
    world.state.plan.workers = 2
    asked = [a for a in scoring.restarted(world.state, world.now) if isinstance(a, do.EnqueueMetric)]
    assert asked
    for action in asked:
        of = world.state.scoring.metrics[action.name]
        assert action.first == (of.task == "t1")
