"""Laws of what is shipped: wheel and sdist, usable in an empty environment, from any folder, without a clone; of `import evalspan` and
`evalspan --version` there; and of the help of scripts.
"""

import filecmp
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from support.goldens import deep

import evalspan

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("coordinator", "evaljobs", "priors")
WRAPPERS = ("evalspan-daemon.sbatch", "evaluate.sbatch", "train-with-eval.sbatch")
BUILD = "import hatchling.build as b, sys; print(getattr(b, sys.argv[1])(sys.argv[2]))"
VERSION = "from coordinator.base.version import version_text; print(version_text())"
NOTIFY = "hook.notify('ckpt/step-5', 5, suite='core', work_dir='work')"


def _said(cwd, *argv, code=0, **env):
    """What a command prints; on stderr, where it is to end with another exit code than 0."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("EVALSPAN_", "PYTHONPATH"))}
    env = {**clean, "HOME": str(cwd), "COLUMNS": "100", **env}
    done = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == code, done.stderr
    return (done.stderr if code else done.stdout).strip()


def _build(kind, source, out):
    """What the very backend builds that pip calls (installed with the dev extra: no network)."""
    return out / _said(source, sys.executable, "-c", BUILD, kind, out).split()[-1]


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


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory):
    """Python of a new environment in which pip installed the wheel without any dependency."""
    folder = tmp_path_factory.mktemp("bare") / "venv"
    venv.create(folder, with_pip=False)
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin/python", "install", "--quiet", "--no-deps"]
    _said(folder, *pip, "--no-index", wheel, PIP_CONFIG_FILE=os.devnull)
    return folder / "bin" / "python"


def _site(python):
    return next(python.parents[1].glob("lib/python*/site-packages"))


def _others():
    """Folders of this environment's packages."""
    return [path for path in sys.path if Path(path).name in {"site-packages", "dist-packages"}]


@pytest.fixture(scope="module")
def installed(bare, tmp_path_factory):
    """Python of an environment with the wheel in it; all other packages are those of this environment, behind the wheel's
    own files, and without the .pth files that would bring this checkout back in.
    """
    folder = tmp_path_factory.mktemp("elsewhere") / "venv"
    shutil.copytree(bare.parents[1], folder, symlinks=True)
    script = folder / "bin" / "evalspan"
    script.write_text(script.read_text().replace(str(bare), str(folder / "bin" / "python")))
    (_site(folder / "bin/python") / "dependencies.pth").write_text("".join(f"{p}\n" for p in _others()))
    return folder / "bin" / "python"


def _tracked(*places):
    """Files of the clone; none where this is no clone."""
    if not (ROOT / ".git").exists():
        return set()
    return {
        line for line in _said(ROOT, "git", "ls-files", "--", *places).splitlines() if (ROOT / line).is_file()
    }


def _contents(wheel):
    """Files of a wheel by name, but those that describe the wheel itself."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}


def test_the_wheel_holds_exactly_the_packages_and_their_data(wheel, installed):
    """Every tracked file of the three packages is in it; beside them are the container recipes, and the wrappers, in
    `share/evalspan` of the environment: an installation by pip or uv has no scripts folder.
    """
    shipped = {name for name in _contents(wheel) if ".data/data/share/evalspan/" not in name}
    assert {name.split("/")[0] for name in shipped} == {*PACKAGES, "evalspan.py"}
    assert {*_tracked(*PACKAGES), "evaljobs/suites/quickstart/NOTICE"} <= shipped
    assert "evaljobs/suites/quickstart/data/mmlu.jsonl" in shipped
    assert not [name for name in shipped if "__pycache__" in name or name.endswith(".pyc")]
    assert any(name.endswith("licenses/LICENSE") for name in zipfile.ZipFile(wheel).namelist())
    for name in WRAPPERS:
        share = installed.parents[1] / "share/evalspan" / name
        assert filecmp.cmp(share, ROOT / "scripts" / name, shallow=False)


def test_the_sdist_is_a_clone_and_builds_the_same_wheel(source, wheel, tmp_path):
    """Scripts, tests and pages come with it; nothing that git ignores does. Clone, wheel and the sdist's wheel say the same
    commit, also of a dirty clone, and no file of it is left in the clone.
    """
    held = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    assert {name for name in _tracked() if not name.startswith(".ci/")} <= held
    assert not [name for name in held if ".venv/" in name or "__pycache__" in name or ".models/" in name]
    assert os.access(source / "scripts" / "quickstart", os.X_OK)
    again = _contents(_build("build_wheel", source, tmp_path))
    assert again == _contents(wheel)
    assert not (ROOT / "coordinator" / "commit.txt").exists()
    if (ROOT / ".git").exists():
        commit = _said(ROOT, "git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
        assert again["coordinator/commit.txt"].decode().strip() == commit
        assert _said(tmp_path, sys.executable, "-c", VERSION, PYTHONPATH=str(ROOT)).endswith(
            f"(commit {commit})"
        )


def test_without_a_clone_the_version_is_what_the_wheel_says(wheel, bare, tmp_path):
    """And a copy without either names its code by content: journals tell versions apart by this text."""
    shutil.unpack_archive(wheel, tmp_path, "zip")
    say = [bare, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {VERSION}"]
    assert _said(tmp_path, *say).startswith("evalspan 0.")
    commit = tmp_path / "coordinator" / "commit.txt"
    if commit.exists():
        assert f"(commit {commit.read_text().strip()})" in _said(tmp_path, *say)
        commit.unlink()
    unnamed = _said(tmp_path, *say)
    assert re.search(r"\(code [0-9a-f]{12}\)$", unnamed)
    (tmp_path / "coordinator" / "__init__.py").open("a").write("\n")
    assert _said(tmp_path, *say) not in ("", unnamed)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("-h",), "daemon"),
        (("init", "--cluster", "local"), "evalspan.toml"),
        (("status",), "does not exist (from"),
        (("plan", "--suite", "core", "--json"), "makespan"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_the_installed_command_runs_in_an_empty_folder(installed, tmp_path, arguments, said):
    assert said in _said(tmp_path, installed.parent / "evalspan", *arguments)


def test_a_base_installation_refuses_to_evaluate_before_anything_runs(
    bare, installed, tiny_model_dir, tmp_path
):
    """`pip install evalspan` brings no torch: the refusal names the interpreter and what to install."""
    python = tmp_path / "venv" / "bin" / "python"
    shutil.copytree(bare.parents[1], tmp_path / "venv", symlinks=True)
    for entry in (entry for folder in _others() for entry in Path(folder).iterdir()):
        own = _site(python) / entry.name
        if not entry.name.startswith("torch") and entry.suffix != ".pth" and not own.exists():
            own.symlink_to(entry)
    call = [python, "-m", "coordinator", "eval", tiny_model_dir, "--suite", "quickstart"]
    assert "has no torch: `pip install 'evalspan[hf]'`" in _said(tmp_path, *call, code=2)
    foreign = _said(tmp_path, installed, *call[1:], code=2, EVALSPAN_TRIAL_PYTHON=str(python))
    assert "the trial interpreter has no lm_eval or no torch" in foreign
    assert not list(tmp_path.glob("evalspan-work/*-quickstart-*"))


@pytest.mark.parametrize("way", ["pip install --no-deps", "a copy of hook.py"])
def test_training_needs_the_standard_library_alone(bare, tmp_path, way):
    """The hook announces from an environment that has no other package, and from a copy of its one file."""
    (tmp_path / "work").mkdir()  # the hook makes no work folder
    code = f"from coordinator import hook; {NOTIFY}"
    if way == "a copy of hook.py":
        shutil.copyfile(ROOT / "coordinator" / "hook.py", tmp_path / "evalspan_hook.py")
        code = f"import sys; sys.path.insert(0, '.'); import evalspan_hook as hook; {NOTIFY}"
    _said(tmp_path, bare, "-I", "-c", code)
    (notice,) = (tmp_path / "work" / "inbox").glob("*.json")
    read = json.loads(notice.read_text())
    assert read["checkpoint"] == str(tmp_path / "ckpt/step-5")
    assert (read["step"], read["suite"]) == (5, "core")


def test_the_facade_needs_the_standard_library_alone(bare, tmp_path):
    """The hook's names work, pathlib and typing are not imported; a name of the coordinator says in one line what to install."""
    body = (
        "import sys; before = set(sys.modules); import evalspan\n"
        "new = {m.partition('.')[0] for m in set(sys.modules) - before}\n"
        "assert new - {'evalspan', 'coordinator'} <= sys.stdlib_module_names, new\n"
        "assert not {'pathlib', 'typing'} & set(sys.modules) - before and not evalspan.pinned('/nowhere')\n"
        "try: evalspan.evaluate\n"
        "except ImportError as error: print(error)\n"
    )
    said = _said(tmp_path, bare, "-I", "-c", body)
    assert re.fullmatch(r"evalspan\.evaluate needs the package .*`pip install evalspan`.*", said)


def test_every_name_of_the_facade_is_there_and_no_other(tmp_path):
    """Also under `from evalspan import …` and for tab completion. `python -m evalspan` is the command, for an interpreter whose
    scripts are not on the path.
    """
    assert set(dir(evalspan)) == set(evalspan.__all__)
    for name in evalspan.__all__:
        assert getattr(evalspan, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'evalutae'"):
        _ = evalspan.evalutae
    command = [sys.executable, "-m", "evalspan", "--version"]
    assert _said(tmp_path, *command, PYTHONPATH=str(ROOT)).startswith("evalspan ")


@deep
@pytest.mark.model
def test_quickstart_tasks_load_offline_wherever_they_are(installed, tmp_path):
    """lm-eval reads the installed YAMLs from any folder, with no network and no cache, and executes nothing; code and suites
    come from the wheel, not from a checkout.
    """
    code = (
        "import evaluate\n"
        "def refuse(*args, **kwargs): raise SystemExit('a metric was loaded while reading tasks')\n"
        "evaluate.load = refuse\n"
        "import coordinator, evaljobs, priors\n"
        "from evaljobs.lmeval import hooks\n"
        "hooks.install_seam()\n"  # HumanEval's own module loads code_eval, which is ours then
        "from coordinator.intake.suites import load_suite\n"
        "from lm_eval.tasks import TaskManager\n"
        "suite = load_suite('quickstart')\n"
        "for place in (coordinator.__file__, evaljobs.__file__, priors.__file__, suite.include_path[0]):\n"
        "    print('place', place)\n"
        "manager = TaskManager(include_path=list(suite.include_path), include_defaults=False)\n"
        "for task in manager.load([t.name for t in suite.tasks])['tasks'].values():\n"
        "    task.build_all_requests(limit=2)\n"
        "    print('requests', len(task.instances))\n"
    )
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": "/nonexistent/hf"}
    lines = [line.split() for line in _said(tmp_path, installed, "-c", code, **offline).splitlines()]
    places = [line[1] for line in lines if line[0] == "place"]
    assert len(places) == 4
    assert all(place.startswith(str(installed.parents[1])) for place in places), places
    assert len([line for line in lines if line[0] == "requests" and int(line[1]) > 0]) == 4


# --- the help of scripts -----------------------------------------------------------------------------------------------


REPOSITORY = Path(__file__).resolve().parents[2]
INSTALLING = [
    script.name
    for script in sorted((REPOSITORY / "scripts").iterdir())
    if script.is_file() and script.name[0] != "_" and b"/_env.sh" in script.read_bytes()
]


@pytest.mark.parametrize("script", [*INSTALLING, "fetch_smollm2.py"])
def test_help_comes_before_anything_is_installed(tmp_path, script):
    """From a fresh clone: exit code 0, the script's own name in its text, and no new file."""
    clone = tmp_path / "clone"
    for folder in ("scripts", "coordinator"):
        shutil.copytree(REPOSITORY / folder, clone / folder, ignore=shutil.ignore_patterns("__pycache__"))
    before = sorted(clone.rglob("*"))
    program = ["python3", "-B"] if script.endswith(".py") else ["env", "PYTHONDONTWRITEBYTECODE=1", "bash"]
    for option in ("-h", "--help"):
        argv = [*program, str(clone / "scripts" / script), option]
        done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        assert script.replace("-", "_") in done.stdout.replace("-", "_")
    assert sorted(clone.rglob("*")) == before
