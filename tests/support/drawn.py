"""How many examples a property draws: few in a plain run, ten times as many in `scripts/check --deep`."""

from hypothesis import settings

DEEP = 1000  # examples of that profile (tests/conftest.py)


def some(count):
    """At most so many examples in a plain run."""
    return settings(max_examples=10 * count if settings().max_examples == DEEP else count)
