"""Laws of what is shipped: wheel and sdist, usable in an empty environment, from any folder, without a clone."""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("coordinator", "evaljobs", "priors")
WRAPPERS = ("evalspan-daemon.sbatch", "evaluate.sbatch", "train-with-eval.sbatch")
BUILD = "import hatchling.build as b, sys; print(getattr(b, sys.argv[1])(sys.argv[2]))"


def _build(kind: str, source: Path, out: Path) -> Path:
    """What the very backend builds that pip calls (installed with the dev extra: no network)."""
    done = subprocess.run(
        [sys.executable, "-c", BUILD, kind, out],
        cwd=source,
        check=True,
        capture_output=True,
        text=True,
        timeout=240,
    )
    return out / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return _build("build_wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The unpacked sdist."""
    out = tmp_path_factory.mktemp("sdist")
    with tarfile.open(_build("build_sdist", ROOT, out)) as archive:
        archive.extractall(out, filter="data")
    return next(path for path in out.iterdir() if path.is_dir())


def _tracked(*places: str) -> set[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--", *places], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return {line for line in listed.stdout.splitlines() if (ROOT / line).is_file()}


def _contents(wheel: Path) -> dict[str, bytes]:
    """Files of a wheel by name, but those that describe the wheel itself."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}


def test_the_wheel_holds_exactly_the_packages_and_their_data(wheel):
    """Every tracked file of the three packages is in it; beside them are the wrappers and the container recipes."""
    names = set(zipfile.ZipFile(wheel).namelist())
    shipped = {name for name in _contents(wheel) if ".data/data/share/evalspan/" not in name}
    assert {name.split("/")[0] for name in shipped} == {*PACKAGES, "evalspan.py"}
    if (ROOT / ".git").exists():
        assert _tracked(*PACKAGES) <= shipped
    assert not [name for name in shipped if "__pycache__" in name or name.endswith(".pyc")]
    assert "evaljobs/suites/quickstart/NOTICE" in shipped
    assert "evaljobs/suites/quickstart/data/mmlu.jsonl" in shipped
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_sdist_is_a_clone_and_builds_the_same_wheel(source, wheel, tmp_path):
    """Scripts, tests and pages come with it; nothing that git ignores does."""
    held = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    if (ROOT / ".git").exists():
        assert {name for name in _tracked() if not name.startswith(".ci/")} <= held
    assert not [name for name in held if ".venv/" in name or "__pycache__" in name or ".models/" in name]
    assert os.access(source / "scripts" / "quickstart", os.X_OK)
    assert _contents(_build("build_wheel", source, tmp_path)) == _contents(wheel)


def _environment(folder: Path, wheel: Path) -> Path:
    """Python of a new environment in which pip installed the wheel without any dependency."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, wheel], check=True, timeout=240, env={**os.environ, "PIP_CONFIG_FILE": os.devnull})
    return python


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory):
    return _environment(tmp_path_factory.mktemp("bare") / "venv", wheel)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Python of a new environment with the wheel in it; all other packages are those of this environment."""
    python = _environment(tmp_path_factory.mktemp("elsewhere") / "venv", wheel)
    # Behind the wheel's own files, and without the .pth files that would bring this checkout back in.
    others = [path for path in sys.path if Path(path).name in {"site-packages", "dist-packages"}]
    site = next(python.parents[1].glob("lib/python*/site-packages"))
    (site / "dependencies.pth").write_text("".join(f"{path}\n" for path in others))
    return python


def _run(cwd: Path, *argv: str | Path, code: int = 0) -> str:
    """What a command prints; on stderr, where it is to end with another exit code than 0."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("EVALSPAN_", "PYTHONPATH"))}
    done = subprocess.run(
        argv,
        cwd=cwd,
        env={**clean, "HOME": str(cwd), "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return (done.stderr if code else done.stdout).strip()


def test_the_wheel_works_from_another_folder(installed, tmp_path):
    """Installed, imported from elsewhere: code and suites come from the wheel, not from a checkout."""
    code = (
        "import coordinator.config.schema, coordinator.intake.suites, evaljobs.contract.specs, priors\n"
        "suite = coordinator.intake.suites.load_suite('quickstart')\n"
        "print(coordinator.__file__, evaljobs.__file__, priors.__file__, suite.include_path[0], sep='\\n')"
    )
    places = _run(tmp_path, installed, "-c", code).splitlines()
    assert len(places) == 4
    assert all(place.startswith(str(installed.parents[1])) for place in places), places


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("-h",), "daemon"),
        (("init", "--cluster", "local"), "evalspan.toml"),
        (("status",), "there is no work folder"),
        (("plan", "--suite", "core", "--json"), "makespan"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_the_installed_command_runs_in_an_empty_folder(installed, tmp_path, arguments, said):
    assert said in _run(tmp_path, installed.parent / "evalspan", *arguments)


def test_a_base_installation_refuses_to_evaluate_before_anything_runs(
    bare, installed, tiny_model_dir, tmp_path
):
    """`pip install evalspan` brings no torch: the refusal names the interpreter and what to install."""
    python = tmp_path / "venv" / "bin" / "python"
    shutil.copytree(bare.parents[1], tmp_path / "venv", symlinks=True)
    site = next((tmp_path / "venv").glob("lib/python*/site-packages"))
    for folder in (Path(path) for path in sys.path if Path(path).name in {"site-packages", "dist-packages"}):
        for entry in folder.iterdir():
            if (
                not entry.name.startswith("torch")
                and entry.suffix != ".pth"
                and not (site / entry.name).exists()
            ):
                (site / entry.name).symlink_to(entry)
    call = [python, "-m", "coordinator", "eval", tiny_model_dir, "--suite", "quickstart"]
    assert "has no torch: `pip install 'evalspan[hf]'`" in _run(tmp_path, *call, code=2)
    foreign = _run(tmp_path, "env", f"EVALSPAN_TRIAL_PYTHON={python}", installed, *call[1:], code=2)
    assert "the trial interpreter has no lm_eval or no torch" in foreign
    assert not list(tmp_path.glob("evalspan-work/*-quickstart-*"))


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_wrappers_lie_in_the_environment(installed, name):
    """`share/evalspan` of the environment, as in the clone: an installation by pip or uv has no scripts folder."""
    assert filecmp.cmp(installed.parents[1] / "share/evalspan" / name, ROOT / "scripts" / name, shallow=False)


NOTIFY = "hook.notify('ckpt/step-5', 5, suite='core', work_dir='work')"


@pytest.mark.parametrize("way", ["pip install --no-deps", "a copy of hook.py"])
def test_training_needs_the_standard_library_alone(bare, tmp_path, way):
    """The hook announces from an environment that has no other package, and from a copy of its one file."""
    (tmp_path / "work").mkdir()  # the hook makes no work folder
    code = f"from coordinator import hook; {NOTIFY}"
    if way == "a copy of hook.py":
        shutil.copyfile(ROOT / "coordinator" / "hook.py", tmp_path / "evalspan_hook.py")
        code = f"import sys; sys.path.insert(0, '.'); import evalspan_hook as hook; {NOTIFY}"
    _run(tmp_path, bare, "-I", "-c", code)
    (notice,) = (tmp_path / "work" / "inbox").glob("*.json")
    read = json.loads(notice.read_text())
    assert read["checkpoint"] == str(tmp_path / "ckpt/step-5")
    assert (read["step"], read["suite"]) == (5, "core")


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
    lines = _run(tmp_path, installed, "-c", code).splitlines()
    assert [line.split()[0] for line in lines if line.startswith("quickstart_")] == [
        "quickstart_mmlu",
        "quickstart_hellaswag",
        "quickstart_gsm8k",
        "quickstart_humaneval",
    ]
    assert [line.split()[2] for line in lines if line.startswith("quickstart_")] == ["160", "128", "16", "24"]
