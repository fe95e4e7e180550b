"""Settings of some public sites by their documentation: the table `sites.toml`. Called by `evalspan init --site`."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from coordinator.errors import OperatorError
from coordinator.site.config.toml import did_you_mean
from evaljobs.contract.specs import Record

TABLE = Path(__file__).with_name("sites.toml")


class SitePreset(Record):
    """A site as its documentation describes it."""

    title: str
    source: str  # the documentation
    read: str  # day, as YYYY-MM-DD
    account: bool  # are jobs charged to an account that the user names?
    notes: tuple[str, ...]  # what a user must know that is no setting
    settings: dict[str, Any]  # setting ("cluster.partition") -> value; the others are for `doctor` to find


def site_presets() -> dict[str, SitePreset]:
    """Return the presets by name."""
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return {name: SitePreset.model_validate(one) for name, one in table.items()}


def site_preset(name: str) -> SitePreset:
    """Return the preset of this name. OperatorError where there is none."""
    known = site_presets()
    if name not in known:
        names = ", ".join(known)
        raise OperatorError(f"--site {name}: {did_you_mean(name, list(known))}; there are presets of {names}")
    return known[name]
