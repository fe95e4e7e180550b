"""Laws of what an installation consists of: the lock with hashes, the licences and the bill of materials drawn from it, and a
wheel and sdist that are the same bytes wherever they are built.
"""

import csv
import json
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import sbom
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("build", "run", "dev", "torch")
BUILD = "import hatchling.build as b, sys; print(getattr(b, sys.argv[1])(sys.argv[2]))"


def _locked(*parts):
    """Name -> its versions and their hashes, in these parts of the lock."""
    found = {}
    for part in parts:
        text = (ROOT / "requirements" / f"{part}.txt").read_text()
        for name, version, rest in sbom.PACKAGE.findall(text):
            found.setdefault(name, {})[version] = re.findall(r"sha256:([0-9a-f]{64})\b", rest)
    return found


def _name(requirement):
    return re.sub(r"[-_.]+", "-", requirement.name).lower()


def test_the_lock_holds_each_requirement_at_a_version_that_its_range_allows():
    """Of the base, `hf` and `web` in what runs; of the other extras that tests install in all of it. Else: scripts/lock."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for parts, texts in (
        (("run", "torch"), [*project["dependencies"], *extras["hf"], *extras["web"]]),
        (("run", "torch", "dev"), [*extras["dev"], *extras["docs"], *extras["nvml"]]),
    ):
        locked = _locked(*parts)
        for requirement in map(Requirement, texts):
            versions = locked[_name(requirement)]
            assert all(requirement.specifier.contains(version) for version in versions), requirement


def test_every_package_of_the_lock_has_hashes_and_no_part_contradicts_another():
    for name, versions in _locked(*PARTS).items():
        assert all(versions.values()), f"{name} has no hash"
        alone = [_locked(part)[name].keys() for part in PARTS if name in _locked(part)]
        assert all(one == versions.keys() for one in alone), name


def test_the_environment_of_tests_is_the_lock():
    """What was not installed from it, such as a newer release, would make tests pass here alone. torch may be the site's."""
    for name, versions in _locked("run", "dev").items():
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # of another system or Python
        assert installed in versions, name


def test_the_bill_of_materials_and_the_licences_are_those_of_the_lock(tmp_path):
    done = subprocess.run([sys.executable, ROOT / "scripts" / "sbom.py", tmp_path], check=False)
    assert done.returncode == 0
    locked = {(name, version) for name, versions in _locked("run", "torch").items() for version in versions}
    bill = json.loads((tmp_path / "sbom.json").read_text())
    assert {(one["name"], one["version"]) for one in bill["components"]} == locked
    assert all(one["hashes"] for one in bill["components"])
    rows = list(csv.DictReader((tmp_path / "licences.csv").open()))
    assert {(row["package"], row["version"]) for row in rows} == locked
    assert not [row["package"] for row in rows if not row["licence"]]


@pytest.mark.parametrize("kind", ["build_wheel", "build_sdist"])
def test_two_builds_are_equal_to_the_byte(tmp_path, kind):
    """Whatever the umask, the locale and the time zone of who builds."""
    built = []
    for mask, extra in ((0o022, {"TZ": "UTC"}), (0o077, {"TZ": "Asia/Tokyo", "LC_ALL": "C"})):
        out = tmp_path / f"{mask:o}"
        env = {**os.environ, "SOURCE_DATE_EPOCH": "1790000000", **extra}
        command = [sys.executable, "-c", BUILD, kind, out]
        done = subprocess.run(
            command, cwd=ROOT, env=env, umask=mask, capture_output=True, text=True, check=True
        )
        built.append((out / done.stdout.split()[-1]).read_bytes())
    assert built[0] == built[1]
