"""Laws of the plan that shows closed folders to the user (pure)."""

from __future__ import annotations

from pathlib import Path

from dev_cluster.site_view import Exposure, ViewPlan, closed_ancestor, plan_view
from hypothesis import given
from hypothesis import strategies as st

names = st.sampled_from(["a", "b", "c"])
paths = st.lists(names, min_size=1, max_size=4).map(lambda parts: Path("/", *parts))


def visible(path: Path, plan: ViewPlan, closed: set[Path]) -> bool:
    """Whether everybody sees `path` once the plan is carried out, told by walking the mounts."""
    shown = [bind for bind in plan.binds if path.is_relative_to(bind.target)]
    if shown:
        nearest = max(shown, key=lambda bind: len(bind.target.parts))
        inner = path.relative_to(nearest.target).parts
        between = [nearest.source.joinpath(*inner[: i + 1]) for i in range(len(inner))]
        entered = between if nearest.by_entry else [nearest.source, *between]
        return not any(folder in closed for folder in entered)
    if any(path.is_relative_to(mask) for mask in plan.masks):
        return False
    return not any(folder in closed for folder in [*path.parents, path])


@given(wanted=st.sets(paths, max_size=4), closed=st.sets(paths, max_size=5))
def test_every_wanted_path_becomes_visible(wanted: set[Path], closed: set[Path]) -> None:
    """Whatever folders are closed above or at them, all wanted paths are seen."""
    plan = plan_view([Exposure(source=p, target=p) for p in wanted], lambda p: p not in closed)
    assert all(visible(path, plan, closed) for path in wanted)


@given(wanted=st.sets(paths, max_size=4), closed=st.sets(paths, max_size=5))
def test_only_closed_folders_are_covered(wanted: set[Path], closed: set[Path]) -> None:
    """No folder is covered but a closed one at or above a wanted path; where none is closed there is no mount at all."""
    plan = plan_view([Exposure(source=p, target=p) for p in wanted], lambda p: p not in closed)
    for mask in plan.masks:
        assert mask in closed
        assert any(path.is_relative_to(mask) for path in wanted)
    if all(closed_ancestor(path, lambda p: p not in closed) is None for path in wanted):
        assert plan == ViewPlan(masks=(), binds=())
