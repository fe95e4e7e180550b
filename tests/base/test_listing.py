"""A folder is listed again only where it may have changed, and no entry is missed by that."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.base.listing import ANYWAY_SECONDS, SETTLED_SECONDS, Listing

STAMP = 1_700_000_000


def names(listing: Listing, now: float) -> list[str] | None:
    with listing.news(now) as entries:
        return None if entries is None else sorted(e.name for e in entries)


def test_a_folder_that_stands_still_is_not_listed_again(tmp_path: Path) -> None:
    """Once its stamp has stood for longer than the coarsest stamps of file systems; now and then it is listed anyway."""
    (tmp_path / "a").touch()
    listing = Listing(tmp_path)
    assert names(listing, 0.0) == ["a"]
    assert names(listing, SETTLED_SECONDS / 2) == ["a"]
    assert names(listing, SETTLED_SECONDS) == ["a"]
    assert names(listing, SETTLED_SECONDS + 1) is None
    assert names(listing, SETTLED_SECONDS + ANYWAY_SECONDS) == ["a"]


@settings(deadline=None, max_examples=25)
@given(st.lists(st.tuples(st.floats(0.0, 3.0), st.booleans()), min_size=1, max_size=8))
def test_a_new_entry_is_found_however_coarse_the_stamps_are(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[float, bool]]
) -> None:
    """Stamps in whole SETTLED_SECONDS: at the latest look after that time, all that is there is known."""
    folder = tmp_path_factory.mktemp("f")
    listing, now, known = Listing(folder), 0.0, list[str]()
    for number, (seconds, makes) in enumerate(steps):
        now += seconds
        if makes:
            (folder / str(number)).touch()
        coarse = STAMP + now // SETTLED_SECONDS * SETTLED_SECONDS
        os.utime(folder, (coarse, coarse))
        known = names(listing, now) or known
    known = names(listing, now + SETTLED_SECONDS) or known
    assert known == sorted(e.name for e in folder.iterdir())


def test_a_listing_that_was_cut_short_is_no_listing(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    listing = Listing(tmp_path)

    def cut_short(now: float) -> None:
        with listing.news(now) as entries:
            assert entries is not None
            raise OSError("storage is away")

    for now in (0.0, 9.0):
        with pytest.raises(OSError, match="away"):
            cut_short(now)
    assert names(listing, 10.0) == ["a"]
