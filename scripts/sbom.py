"""scripts/sbom.py FOLDER: writes sbom.json (CycloneDX 1.6) and licences.csv there, of what an installation runs.

That is requirements/run.txt and torch.txt, with their hashes. Licences are what the installed packages declare; one that
is not installed here, such as those of torch's CUDA build, says so.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

LOCK = Path(__file__).resolve().parents[1] / "requirements"
PACKAGE = re.compile(r"^([\w.-]+)==([\w.+]+)(.*(?:\n .*)*)", re.MULTILINE)
NOT_HERE = "not installed where this list was made: its own metadata says"


def licence_of(name: str) -> str:
    """What a package's metadata declares; "" where it declares nothing."""
    try:
        found = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return NOT_HERE
    classifiers = [
        line.rsplit(" :: ", 1)[-1]
        for line in found.get_all("Classifier", [])
        if line.startswith("License :: ") and line != "License :: OSI Approved"
    ]
    text = (found["License"] or "").strip().partition("\n")[0]
    return str(found["License-Expression"] or "; ".join(classifiers) or text)


def component(name: str, version: str, kind: str = "library") -> dict[str, Any]:
    purl = f"pkg:pypi/{name}@{version}"
    licences = [{"license": {"name": licence_of(name)}}]
    return {
        "type": kind,
        "bom-ref": purl,
        "name": name,
        "version": version,
        "purl": purl,
        "licenses": licences,
    }


def bill_of_materials() -> dict[str, Any]:
    """The lock as a CycloneDX document. Its hashes are of all files of a version, for every system and Python."""
    found = {}
    for part in ("run", "torch"):
        for name, version, rest in PACKAGE.findall((LOCK / f"{part}.txt").read_text()):
            hashes = [{"alg": "SHA-256", "content": one} for one in re.findall(r"sha256:(\w+)", rest)]
            found[name, version] = component(name, version) | {"hashes": hashes}
    root = component("evalspan", metadata.version("evalspan"), "application")
    components = [found[key] for key in sorted(found)]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": root},
        "components": components,
        "dependencies": [{"ref": root["bom-ref"], "dependsOn": [c["bom-ref"] for c in components]}],
    }


def main() -> None:
    folder = Path(sys.argv[1])
    bill = bill_of_materials()
    (folder / "sbom.json").write_text(json.dumps(bill, indent=1) + "\n")
    with (folder / "licences.csv").open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(("package", "version", "licence"))
        for one in bill["components"]:
            rows.writerow((one["name"], one["version"], one["licenses"][0]["license"]["name"]))


if __name__ == "__main__":
    main()
