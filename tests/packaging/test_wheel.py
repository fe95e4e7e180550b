"""Laws of what is shipped: the three packages with their data and nothing else, usable from anywhere."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("coordinator", "evaljobs", "priors")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built by the very backend that pip calls (installed with the dev extra: no network)."""
    out = tmp_path_factory.mktemp("wheel")
    code = f"from hatchling.build import build_wheel; print(build_wheel({str(out)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True, timeout=240
    )
    return out / done.stdout.split()[-1]


def _tracked() -> set[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--", *PACKAGES], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return {line for line in listed.stdout.splitlines() if (ROOT / line).is_file()}


def test_the_wheel_holds_exactly_the_packages_and_their_data(wheel):
    """Every tracked file of the three packages is in it; nothing else is, but the wheel's own metadata."""
    names = set(zipfile.ZipFile(wheel).namelist())
    shipped = {name for name in names if ".dist-info/" not in name}
    assert {name.split("/")[0] for name in shipped} == {*PACKAGES, "evalspan.py"}
    if (ROOT / ".git").exists():
        assert _tracked() <= shipped
    assert not [name for name in shipped if "__pycache__" in name or name.endswith(".pyc")]
    assert "evaljobs/suites/quickstart/NOTICE" in shipped
    assert "evaljobs/suites/quickstart/data/mmlu.jsonl" in shipped
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Python of a new environment with the wheel in it; all other packages are those of this environment."""
    folder = tmp_path_factory.mktemp("elsewhere") / "venv"
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    site = Path(
        subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
    )
    zipfile.ZipFile(wheel).extractall(site)
    # Behind the wheel's own files, and without the .pth files that would bring this checkout back in.
    ours = {Path(sysconfig.get_path(part)) for part in ("purelib", "platlib")}
    (site / "dependencies.pth").write_text("".join(f"{path}\n" for path in sorted(ours)))
    return python


def _run(python: Path, cwd: Path, code: str) -> str:
    done = subprocess.run(
        [python, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_wheel_works_from_another_folder(installed, tmp_path):
    """Installed, imported from elsewhere: code and suites come from the wheel, not from a checkout."""
    code = (
        "import coordinator.config.schema, coordinator.intake.suites, evaljobs.contract.specs, priors\n"
        "suite = coordinator.intake.suites.load_suite('quickstart')\n"
        "print(coordinator.__file__, evaljobs.__file__, priors.__file__, suite.include_path[0], sep='\\n')"
    )
    places = _run(installed, tmp_path, code).splitlines()
    assert len(places) == 4
    assert all(place.startswith(str(installed.parents[1])) for place in places), places


@pytest.mark.model
def test_quickstart_tasks_load_offline_wherever_they_are(installed, tmp_path):
    """lm-eval reads the installed YAMLs from any folder, with no network and no cache, and executes nothing."""
    code = (
        "import os\n"
        "os.environ.update(HF_HUB_OFFLINE='1', HF_HOME='/nonexistent/hf')\n"
        "import evaluate\n"
        "def refuse(*args, **kwargs): raise SystemExit('a metric was loaded while reading tasks')\n"
        "evaluate.load = refuse\n"
        "from coordinator.intake.suites import load_suite\n"
        "from lm_eval.tasks import TaskManager\n"
        "suite = load_suite('quickstart')\n"
        "manager = TaskManager(include_path=list(suite.include_path), include_defaults=False)\n"
        "tasks = manager.load([t.name for t in suite.tasks])['tasks']\n"
        "for entry in suite.tasks:\n"
        "    task = tasks[entry.name]\n"
        "    task.build_all_requests(limit=entry.limit)\n"
        "    print(entry.name, len(task.eval_docs), len(task.instances))\n"
    )
    lines = _run(installed, tmp_path, code).splitlines()
    assert [line.split()[0] for line in lines if line.startswith("quickstart_")] == [
        "quickstart_mmlu",
        "quickstart_hellaswag",
        "quickstart_gsm8k",
        "quickstart_humaneval",
    ]
    assert [line.split()[2] for line in lines if line.startswith("quickstart_")] == ["160", "128", "16", "24"]
