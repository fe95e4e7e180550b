"""Laws of the settings: where they come from, how they are refused, and what follows from several of them."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coordinator.cluster.daemon_job import slurm_time
from coordinator.config import checks, loading, schema
from coordinator.config import toml as toml_reader
from coordinator.errors import OperatorError
from coordinator.intake import from_settings, work_folder
from coordinator.runtime import wiring

Write = Callable[[str], Path]
ROLES = ("precursor", "trial", "metric", "build")


@pytest.fixture
def toml(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        (tmp_path / "evalspan.toml").write_text(text)
        return tmp_path / "evalspan.toml"

    return write


def test_no_setting_means_the_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without file, variables and options; with an absolute work folder."""
    monkeypatch.chdir(tmp_path)
    assert loading.load(None, {}) == schema.Config(work_dir=tmp_path / "evalspan-work")


def test_command_line_over_environment_over_file(toml: Write) -> None:
    """An option of None sets nothing. A value that is replaced is not looked at."""
    path = toml('[cluster]\nkind = "slurm"\npartition = "file"\naccount = "file"\nqos = 4\n')
    environ = {"EVALSPAN_CLUSTER_ACCOUNT": "env", "EVALSPAN_CLUSTER_QOS": "env"}
    got = loading.load(path, environ, {"cluster.qos": "option", "cluster.account": None}).cluster
    assert (got.partition, got.account, got.qos) == ("file", "env", "option")


def test_the_first_file_of_the_search_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--config, $EVALSPAN_CONFIG, ./evalspan.toml, ~/.config/evalspan.toml; one that is named is there."""
    home, here = tmp_path / "home", tmp_path / "here"
    (home / ".config").mkdir(parents=True)
    here.mkdir()
    monkeypatch.chdir(here)
    environ = {"HOME": str(home)}
    assert loading.find(None, environ) is None
    for place in (home / ".config" / "evalspan.toml", here / "evalspan.toml"):
        place.touch()
        assert loading.find(None, environ) == place
    environ["EVALSPAN_CONFIG"] = str(home / ".config" / "evalspan.toml")
    assert loading.find(None, environ) == home / ".config" / "evalspan.toml"
    assert loading.find(here / "evalspan.toml", environ) == here / "evalspan.toml"
    with pytest.raises(OperatorError, match="--config"):
        loading.find(tmp_path / "none.toml", environ)


def test_paths_in_a_file_are_relative_to_the_file(
    toml: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A file works from any folder; paths of variables and options are relative to the current one."""
    monkeypatch.chdir(tmp_path.parent)
    path = toml('work_dir = "w"\n[watch]\nfolders = ["a", "/b", "~/c"]\n[redis]\npassword_file = "p"\n')
    got = loading.load(path, {"EVALSPAN_WATCH_ROOTS": '["r"]'})
    assert (got.work_dir, got.redis.password_file) == (tmp_path / "w", tmp_path / "p")
    assert got.watch.folders == (tmp_path / "a", Path("/b"), Path.home() / "c")
    assert got.watch.roots == (tmp_path.parent / "r",)
    assert loading.load(path, {}, {"work_dir": Path("x")}).work_dir == tmp_path.parent / "x"
    for written, meant in (("./x.toml", str(tmp_path / "x.toml")), ("core", "core")):
        assert loading.load(toml(f'[watch]\nsuite = "{written}"\n'), {}).watch.suite == meant


@pytest.mark.parametrize(
    ("text", "variables", "options", "says"),
    [
        ("plan = 1\n", {"EVALSPAN_PLAN_STEAL": "true"}, {}, "{file}, line 1: 'plan' of the file should be a table"),
        ("", {"EVALSPAN_STAGE_LINGER_SECONDS": "5", "EVALSPAN_LONG": "1"}, {}, "$EVALSPAN_STAGE_LINGER_SECONDS: "),
        ("", {"EVALSPAN_SLURM_TRIAL_QUOS": "x"}, {}, "$EVALSPAN_SLURM_TRIAL_QUOS: "),
        ("", {"EVALSPAN_SLURM_TRIAL": "x"}, {}, "$EVALSPAN_SLURM_TRIAL: "),
        ("", {"EVALSPAN_TRIAL_MODEL_ARGS": "dtype=float32"}, {"trial.model_args.x": 1}, "$EVALSPAN_TRIAL_MODEL_ARGS: 'model_args' of [trial]"),
        ("", {}, {"cluster.slots": 0}, "--slots: "),
        ("", {}, {"trial.memory_mb": "x"}, "settings 'trial.memory_mb': "),
        ("", {}, {"trial.nope": 1}, "settings 'trial.nope': [trial] has no key 'nope'"),
        ("", {}, {"cluster.kind": "local", "cluster.qos": "low"}, "--qos: "),
        ('[cluster]\nkind = "local"\n', {}, {"cluster.account": "mine"}, "--account: "),
        ('[cluster]\nkind = "local"\n', {"EVALSPAN_CLUSTER_PARTITION": "gpu"}, {}, "$EVALSPAN_CLUSTER_PARTITION: "),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_in_one_line_by_what_gave_it(
    toml: Write, text: str, variables: Mapping[str, str], options: Mapping[str, Any], says: str
) -> None:
    """File and line, variable, option, or key of `settings=`; a setting of Slurm is not ignored where jobs run here."""
    file = toml(text)
    with pytest.raises(OperatorError) as caught:
        loading.load(file, variables, options)
    assert str(caught.value).startswith(says.format(file=file))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "variables", "options", "kind"),
    [
        ("", {}, {"cluster.partition": "gpu"}, "slurm"),
        ("", {"EVALSPAN_CLUSTER_QOS": "low"}, {}, "slurm"),
        ('[cluster]\naccount = "mine"\n', {}, {}, "slurm"),
        ('[slurm.trial]\naccount = "mine"\n', {}, {}, "slurm"),
        ("", {"EVALSPAN_SLURM_GPU_REQUEST": "--gpus-per-node={n}"}, {}, "slurm"),
        ('[nodes]\nexclude = ["n1"]\n', {}, {}, "slurm"),
        ('[cluster]\nkind = "slurm"\nnice = 5\n', {}, {"cluster.kind": "local"}, "local"),
        ('[cluster]\nkind = "slurm"\nnice = 5\n', {"EVALSPAN_CLUSTER_KIND": "local"}, {}, "local"),
        ('[cluster]\nkind = "local"\n', {"EVALSPAN_CLUSTER_QOS": "low"}, {"cluster.kind": "local"}, "local"),
    ],
)  # fmt: skip
def test_a_setting_of_slurm_means_slurm_unless_a_younger_one_says_local(
    toml: Write, text: str, variables: Mapping[str, str], options: Mapping[str, Any], kind: str
) -> None:
    """A partition, account or QOS is never ignored; a file for Slurm is taken with `--cluster local`."""
    assert loading.load(toml(text), variables, options).cluster.kind == kind


def test_an_option_holds_for_every_role_that_the_file_sets(toml: Write) -> None:
    """--account and --qos for all, --partition for jobs on nodes with GPUs: no typed option is ignored."""
    text = "".join(f'[slurm.{r}]\naccount = "a"\nqos = "q"\npartition = "p"\n' for r in ROLES)
    typed = {"cluster.account": "b", "cluster.qos": "r", "cluster.partition": "g"}
    got = loading.load(toml(text), {}, typed)
    assert all((getattr(got.slurm, r).account, getattr(got.slurm, r).qos) == (None, None) for r in ROLES)
    assert [getattr(got.slurm, r).partition for r in ROLES] == [None, None, "p", "p"]
    assert (got.cluster.account, got.cluster.qos, got.cluster.partition) == ("b", "r", "g")
    assert loading.load(toml(text), {}).slurm.trial == schema.RoleConfig(account="a", qos="q", partition="p")


def test_a_model_argument_may_be_none(toml: Write) -> None:
    """As an option it replaces the file's; another option of None is one that was not given."""
    path = toml('[trial]\nmodel_args = { dtype = "float32", x = 1 }\n')
    got = loading.load(path, {}, {"trial.model_args.dtype": None, "trial.device": None})
    assert got.trial.model_args == {"dtype": None, "x": 1}


def test_variables_hold_text_or_toml(toml: Write) -> None:
    """An account "123" stays text; lists, numbers, tables and truth values are written as in TOML; roles have theirs."""
    got = loading.load(
        toml('[slurm.trial]\nqos = "low"\naccount = "a"\n'),
        {
            "EVALSPAN_CLUSTER_ACCOUNT": "123",
            "EVALSPAN_STAGE_ROOTS": '["/a", "/b"]',
            "EVALSPAN_CLUSTER_NICE": "7",
            "EVALSPAN_CHECKPOINT_ALLOW_BIN": "true",
            "EVALSPAN_TRIAL_MODEL_ARGS": '{ dtype = "float32" }',
            "EVALSPAN_SLURM_TRIAL_QOS": "high",
            "EVALSPAN_INDEX": "3",  # of jobs, no setting
        },
    )
    assert (got.cluster.account, got.stage.roots, got.cluster.nice) == ("123", ("/a", "/b"), 7)
    assert (got.checkpoint.allow_bin, got.trial.model_args) == (True, {"dtype": "float32"})
    assert (got.slurm.trial.qos, got.slurm.trial.account) == ("high", "a")


@given(st.integers(1, 99 * 86_400))
@example(4 * 3600)
def test_a_time_limit_is_read_as_slurm_writes_it(seconds: int) -> None:
    assert checks.seconds_of(slurm_time(seconds)) == seconds
    assert checks.seconds_of("2-01:00:30") == 176_430


@pytest.mark.parametrize(
    ("text", "policy", "steals"),
    [
        ("", "evalspan", True),
        ('[plan]\npolicy = "round-robin"\n', "round-robin", False),
        ('[plan]\npolicy = "round-robin"\nsteal = true\n', "round-robin", True),
        ("[plan]\nsteal = false\n", "evalspan", False),
    ],
)
def test_trials_steal_under_evalspans_own_policy_unless_told_otherwise(
    toml: Write, text: str, policy: str, steals: bool
) -> None:
    """[plan] reaches the options of every evaluation."""
    options = from_settings.run_options(loading.load(toml(text), {}))
    assert (options.plan_policy, options.steal) == (policy, steals)


@pytest.mark.parametrize(
    "trial",
    [
        "gpus_per_trial = 2",
        'gpus_per_trial = 4\nengine = "vllm"',  # by tensor parallelism, which the trial sets
        "gpus_per_trial = 2\nmodel_args = { parallelize = true }",
        'gpus_per_trial = 2\nmodel_args = { device_map = "auto" }',
        'gpus_per_trial = 2\nengine = "an-engine-of-yours"',
        'gpus_per_trial = 2\ndevice = "cpu"',
        'gpus_per_trial = 2\nengine = "sglang"\nmodel_args = { tp_size = 2 }',
    ],
)
def test_trials_of_several_gpus_are_refused_only_where_their_engine_leaves_some_idle(
    toml: Write, trial: str
) -> None:
    from_settings.check_device(loading.load(toml(f'[cluster]\nkind = "slurm"\n[trial]\n{trial}\n'), {}))


@pytest.mark.parametrize(
    ("trial", "hung", "memory_mb"),
    [
        ("", 900.0, 0),
        ('engine = "vllm"', 1800.0, 4096),
        ('engine = "vllm"\ngpus_per_trial = 4', 1800.0, 16384),
        ('engine = "vllm"\nhung_seconds = 60\nmemory_mb = 9000', 60.0, 0),
    ],
)
def test_limits_of_trials_follow_their_engine_unless_they_are_set(
    toml: Write, trial: str, hung: float, memory_mb: int
) -> None:
    """An engine with processes and compiled code of its own gets the memory and the time that it needs to load."""
    settings = loading.load(toml(f"[trial]\n{trial}\n"), {})
    assert from_settings.hung_seconds(settings) == hung
    assert from_settings.run_options(settings).engine_memory_mb == memory_mb


def test_a_lease_is_renewed_six_times_in_its_time(toml: Write, tmp_path: Path) -> None:
    """A short one as well, so that a holder never takes a living coordinator for dead."""
    for text, seconds in (("[stage]\nlease_seconds = 6\n", 1.0), ("", 30.0)):
        settings = work_folder.load(toml(text), tmp_path / "w")
        assert wiring.coordinator_of(settings).pace.lease == seconds


def test_what_sets_a_setting_is_what_load_takes_it_from(toml: Write) -> None:
    file, named = toml('work_dir = "/w"\n'), {"EVALSPAN_WORK_DIR": "/x"}
    assert loading.source_of(file, named, "work_dir") == "$EVALSPAN_WORK_DIR"
    assert loading.source_of(file, {}, "work_dir") == f"{file}, line 1"
    assert loading.source_of(file, named, "trial", "cpus") == ""


# --- lines of a TOML file ------------------------------------------------------------------------------------------


KEY = st.text(alphabet="abcdefgh_-", min_size=1, max_size=6)
VALUE = st.sampled_from(
    [
        "1",
        '"text"',
        '"a # b ] ["',
        '"quote \\" [x]"',
        "'lit # ] \\'",
        "[1, 2]",
        '[\n  "a", # ]\n  "b",\n]',
        '"""\n[not.a.table]\nkey = 1\n"""',
        "'''\n]]\n'''",
        "{ a = 1, b = [1] }",
        "true",
        '""',
    ]
)
COMMENT = st.sampled_from(["", '  # a comment [x] = "y" \''])
BLANK = st.sampled_from(["", "# [no.table]\n", "\n\n"])


@given(st.lists(st.tuples(KEY, st.lists(st.tuples(BLANK, KEY, VALUE, COMMENT), max_size=4)), max_size=4))
def test_every_key_is_found_on_its_line(tables):
    """For any file that TOML takes, the line found for a key is the one that it was written on."""
    text, expected, seen = "", {}, set()
    for table, entries in tables:
        if table in seen:
            continue
        seen.add(table)
        text += f"[{table}]\n"
        keys = set()
        for blank, key, value, comment in entries:
            if key in keys:
                continue
            keys.add(key)
            text += blank
            expected[(table, key)] = text.count("\n") + 1
            text += f"{key} = {value}{comment}\n"
    tomllib.loads(text)
    assert {where: toml_reader.line_of(text, where) for where in expected} == expected


def test_arrays_of_tables_quotes_and_dots_are_counted():
    """Elements of an array of tables are numbered; quoted and dotted keys are split as in TOML."""
    text = (
        '[[task]]\nname = "a"\n[task.gen_kwargs]\nx = 1\n[[task]]\n"na.me" = 1\ny.z = 2\n[a."b.c"]\nd = 1\n'
    )
    expected = {
        ("task", 0, "name"): 2,
        ("task", 0, "gen_kwargs", "x"): 4,
        ("task", 1): 5,
        ("task", 1, "na.me"): 6,
        ("task", 1, "y", "z"): 7,
        ("a", "b.c", "d"): 9,
        ("task", 2): None,
    }
    assert {where: toml_reader.line_of(text, where) for where in expected} == expected


def test_whole_numbers_are_fine_where_a_fraction_is_wanted(toml: Write) -> None:
    """`poll_seconds = 20` is 20.0, although TOML has two kinds of number."""
    assert loading.load(toml("[cluster]\npoll_seconds = 20\n"), {}).cluster.poll_seconds == 20.0
