"""Laws of the settings: where they come from, how they are refused, what follows from several of them, and that none is a secret."""

import logging
import tomllib
from operator import attrgetter
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coordinator.errors import OperatorError
from coordinator.intake import from_settings, work_folder
from coordinator.runtime import wiring
from coordinator.site.cluster.daemon_job import slurm_time
from coordinator.site.config import checks, loading, schema
from coordinator.site.config import toml as toml_reader
from evaljobs import log_lines
from evaljobs.errors import JobError, one_line
from evaljobs.secret_values import (
    HIDDEN_TEXT,
    hide_secrets,
    in_command,
    in_text,
    scrub_text,
    secret_locations,
)

ROLES = ("precursor", "trial", "metric", "build")


@pytest.fixture
def toml(tmp_path):
    def write(text):
        (tmp_path / "evalspan.toml").write_text(text)
        return tmp_path / "evalspan.toml"

    return write


def test_no_setting_means_the_defaults(tmp_path, monkeypatch):
    """Without file, variables and options; with an absolute work folder."""
    monkeypatch.chdir(tmp_path)
    assert loading.load_config(None, {}) == schema.Config(work_dir=tmp_path / "evalspan-work")


def test_the_first_file_of_the_search_counts(tmp_path, monkeypatch):
    """--config, $EVALSPAN_CONFIG, ./evalspan.toml, ~/.config/evalspan.toml; one that is named is there."""
    home, here = tmp_path / "home", tmp_path / "here"
    (home / ".config").mkdir(parents=True)
    here.mkdir()
    monkeypatch.chdir(here)
    environ = {"HOME": str(home)}
    assert loading.find_config_file(None, environ) is None
    for place in (home / ".config" / "evalspan.toml", here / "evalspan.toml"):
        place.touch()
        assert loading.find_config_file(None, environ) == place
    environ["EVALSPAN_CONFIG"] = str(home / ".config" / "evalspan.toml")
    assert loading.find_config_file(None, environ) == home / ".config" / "evalspan.toml"
    assert loading.find_config_file(here / "evalspan.toml", environ) == here / "evalspan.toml"
    with pytest.raises(OperatorError, match="--config"):
        loading.find_config_file(tmp_path / "none.toml", environ)


def test_paths_in_a_file_are_relative_to_the_file(toml, monkeypatch, tmp_path):
    """A file works from any folder; paths of variables and options are relative to the current one."""
    monkeypatch.chdir(tmp_path.parent)
    path = toml('work_dir = "w"\n[watch]\nfolders = ["a", "/b", "~/c"]\n[redis]\npassword_file = "p"\n')
    got = loading.load_config(path, {"EVALSPAN_WATCH_ROOTS": '["r"]'})
    assert (got.work_dir, got.redis.password_file) == (tmp_path / "w", tmp_path / "p")
    assert got.watch.folders == (tmp_path / "a", Path("/b"), Path.home() / "c")
    assert got.watch.roots == (tmp_path.parent / "r",)
    for place in ("x", "~nobody-here/x"):  # no user of that name: a folder that is not there
        assert loading.load_config(path, {}, {"work_dir": Path(place)}).work_dir == tmp_path.parent / place
    for written, meant in (("./x.toml", str(tmp_path / "x.toml")), ("core", "core")):
        assert loading.load_config(toml(f'[watch]\nsuite = "{written}"\n'), {}).watch.suite == meant


def test_a_wrong_key_of_a_call_is_named():
    """As of `settings=`. Wrong files, variables and options are in the table of refusals."""
    for options, says in (({"trial.memory_mb": "x"}, "trial.memory_mb"), ({"trial.nope": 1}, "trial.nope")):
        with pytest.raises(OperatorError, match=f"^settings '{says}': "):
            loading.load_config(None, {}, options)


LOCAL, SLURM = '[cluster]\nkind = "local"\n', '[cluster]\nkind = "slurm"\n'
OF_ROLES = "".join(f'[slurm.{r}]\naccount = "a"\nqos = "q"\npartition = "p"\n' for r in ROLES)
KIND = "cluster.kind"
# fmt: off
# text of the file, variables without EVALSPAN_, options -> settings. A setting of Slurm means Slurm, unless a younger one says local.
MEANT = {
    "an option goes before a variable, which goes before the file; what is replaced is not looked at": (
        SLURM + 'partition = "file"\naccount = "file"\nqos = 4\n', {"CLUSTER_ACCOUNT": "env", "CLUSTER_QOS": "env"},
        {"cluster.qos": "option", "cluster.account": None}, {"cluster.partition": "file", "cluster.account": "env", "cluster.qos": "option"}),
    "the file's roles": (OF_ROLES, {}, {}, {"slurm.trial": schema.RoleConfig(account="a", qos="q", partition="p")}),
    "--account and --qos hold for every role": (
        OF_ROLES, {}, {"cluster.account": "b", "cluster.qos": "r"},
        {"cluster.account": "b", "cluster.qos": "r", **{f"slurm.{r}": schema.RoleConfig(partition="p") for r in ROLES}}),
    "--partition holds for jobs on nodes with GPUs": (
        OF_ROLES, {}, {"cluster.partition": "g"},
        {"cluster.partition": "g"} | {f"slurm.{r}.partition": None if r in ("precursor", "trial") else "p" for r in ROLES}),
    "a model argument may be None; another option of None was not given": (
        '[trial]\nmodel_args = { dtype = "float32", x = 1 }\n', {}, {"trial.model_args.dtype": None, "trial.device": None},
        {"trial.model_args": {"dtype": None, "x": 1}, "trial.device": schema.TrialConfig().device}),
    "text of a variable stays text": ("", {"CLUSTER_ACCOUNT": "123"}, {}, {"cluster.account": "123"}),
    "lists, numbers, tables and truth values of variables are written as in TOML": (
        "", {"STAGE_ROOTS": '["/a", "/b"]', "CLUSTER_NICE": "7", "CHECKPOINT_ALLOW_BIN": "true", "TRIAL_MODEL_ARGS": '{ dtype = "float32" }'}, {},
        {"stage.roots": ("/a", "/b"), "cluster.nice": 7, "checkpoint.allow_bin": True, "trial.model_args": {"dtype": "float32"}}),
    "a variable of a role": (
        '[slurm.trial]\nqos = "low"\naccount = "a"\n', {"SLURM_TRIAL_QOS": "high"}, {}, {"slurm.trial.qos": "high", "slurm.trial.account": "a"}),
    "a variable of jobs is no setting": ("", {"INDEX": "3"}, {}, {}),
    "a whole number for a fraction": ("[cluster]\npoll_seconds = 20\n", {}, {}, {"cluster.poll_seconds": 20.0}),
    "an option of Slurm": ("", {}, {"cluster.partition": "gpu"}, {KIND: "slurm"}),
    "a variable of Slurm": ("", {"CLUSTER_QOS": "low"}, {}, {KIND: "slurm"}),
    "a line of Slurm": ('[cluster]\naccount = "mine"\n', {}, {}, {KIND: "slurm"}),
    "a line of a role": ('[slurm.trial]\naccount = "mine"\n', {}, {}, {KIND: "slurm"}),
    "a variable of [slurm]": ("", {"SLURM_GPU_REQUEST": "--gpus-per-node={n}"}, {}, {KIND: "slurm"}),
    "a line of [nodes]": ('[nodes]\nexclude = ["n1"]\n', {}, {}, {KIND: "slurm"}),
    "a file of Slurm with --cluster local": (SLURM + "nice = 5\n", {}, {KIND: "local"}, {KIND: "local"}),
    "a file of Slurm with a variable for local": (SLURM + "nice = 5\n", {"CLUSTER_KIND": "local"}, {}, {KIND: "local"}),
    "a variable of Slurm with --cluster local": (LOCAL, {"CLUSTER_QOS": "low"}, {KIND: "local"}, {KIND: "local"}),
}


@pytest.mark.parametrize("case", MEANT)
def test_the_settings_in_force_are_those_of_the_youngest_place_that_names_them(toml, case):
    """No typed option is ignored."""
    text, variables, options, meant = MEANT[case]
    got = loading.load_config(toml(text), {f"EVALSPAN_{name}": value for name, value in variables.items()}, options)
    assert {name: attrgetter(name)(got) for name in meant} == meant


TWO = "gpus_per_trial = 2\n"
# text of the file -> what follows for evaluations and the daemon
FOLLOWS = {
    "": {"plan.steals": True, "hung": 900.0, "engine_memory_mb": 0, "lease": 30.0},
    '[plan]\npolicy = "round-robin"\n': {"plan.steals": False},
    '[plan]\npolicy = "round-robin"\nsteal = true\n': {"plan.steals": True},
    "[plan]\nsteal = false\n": {"plan.steals": False},
    '[trial]\nengine = "vllm"\n': {"hung": 1800.0, "engine_memory_mb": 4096},
    '[trial]\nengine = "vllm"\ngpus_per_trial = 4\n': {"hung": 1800.0, "engine_memory_mb": 16384},  # by tensor parallelism
    '[trial]\nengine = "vllm"\nhung_seconds = 60\nmemory_mb = 9000\n': {"hung": 60.0, "engine_memory_mb": 0},
    "[stage]\nlease_seconds = 6\n": {"lease": 1.0},
    # trials of several GPUs are refused only where their engine leaves some idle
    f"{SLURM}[trial]\n{TWO}": {},
    f"{SLURM}[trial]\n{TWO}model_args = {{ parallelize = true }}": {},
    f'{SLURM}[trial]\n{TWO}model_args = {{ device_map = "auto" }}': {},
    f'{SLURM}[trial]\n{TWO}engine = "an-engine-of-yours"': {},
    f'{SLURM}[trial]\n{TWO}device = "cpu"': {},
    f'{SLURM}[trial]\n{TWO}engine = "sglang"\nmodel_args = {{ tp_size = 2 }}': {},
}
# fmt: on


@pytest.mark.parametrize("text", FOLLOWS)
def test_what_follows_from_settings_reaches_evaluations_and_the_daemon(toml, tmp_path, text):
    """Trials steal under evalspan's own policy; an engine of its own gets memory and time to load; a lease is renewed six times
    in its time, a short one as well, so that no holder takes a living coordinator for dead; own settings of these count."""
    settings = work_folder.load_settings(toml(text), tmp_path / "w")
    from_settings.check_device(settings)
    options = from_settings.run_options(settings)
    found = {"plan.steals": options.plan.steals, "engine_memory_mb": options.engine_memory_mb}
    found |= {"hung": from_settings.hung_seconds(settings)}
    if "lease" in FOLLOWS[text]:
        found |= {"lease": wiring.coordinator_of(settings).pace.lease}
    assert {name: found[name] for name in FOLLOWS[text]} == FOLLOWS[text]


@given(st.integers(1, 99 * 86_400))
@example(4 * 3600)
def test_a_time_limit_is_read_as_slurm_writes_it(seconds):
    assert checks.seconds_of(slurm_time(seconds)) == seconds
    assert checks.seconds_of("2-01:00:30") == 176_430


def test_what_sets_a_setting_is_what_load_takes_it_from(toml):
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


# --- secrets -----------------------------------------------------------------------------------------------------------

TOKEN = "hf_" + "aB3" * 11
SECRETS = [
    TOKEN,
    "sk-proj-" + "aB3-_" * 8,
    "ghp_" + "a1B2" * 9,
    "AKIA" + "ABCD" * 4,
    "https://me:hunter22@host/x",
    "eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.c2ln",
]


def test_words_that_only_sound_like_secrets_are_settings(toml):
    """Tokens of a model, names of files and variables, values that are fetched, Redis with its own file of mode 0600."""
    file = toml(
        """[trial]
model_args = { token = true, use_auth_token = "True", think_end_token = "</think>", eos_token = "<eos>" }
env = { HF_TOKEN_PATH = "/t", TOKENIZERS_PARALLELISM = "false", NCCL_DEBUG = "INFO" }
prologue = '''
export HF_TOKEN=$(cat ~/.token) KEY="$OTHER" A_TOKEN=`cat f` B_KEY=
module load cuda/12.4'''
[judge]
url = "https://api.openai.com:443/v1"
api_key_env = "OPENAI_API_KEY"
api_key_file = "judge.key"
[redis]
url = "rediss://me:hunter22@redis.site:6380/0"
password_file = "redis.password"
"""
    )
    assert "think_end_token" in loading.load_config(file, {}).trial.model_args


@given(st.text(), st.sampled_from(SECRETS), st.text())
def test_what_looks_like_a_secret_is_found_and_struck_out_wherever_it_stands(before, secret, after):
    text = f"{before} {secret} {after}"
    assert in_text(text)
    assert in_command(text)
    value = secret.partition("://me:")[2].partition("@")[0] or secret
    assert value not in scrub_text(f" {secret} ", {})
    assert list(secret_locations({"a": [text]})) == [("a", 0)]
    assert hide_secrets({"a": [text], "token": "x", "n": 1}) == {
        "a": [HIDDEN_TEXT],
        "token": HIDDEN_TEXT,
        "n": 1,
    }


@settings(max_examples=40)
@given(
    st.recursive(
        st.none() | st.integers() | st.sampled_from(["a b", "</s>"]),
        lambda x: st.lists(x) | st.dictionaries(st.sampled_from("ab"), x),
    )
)
def test_what_holds_no_secret_is_left_as_it_is(data):
    assert list(secret_locations(data)) == []
    assert hide_secrets(data) == data


def test_logs_and_outcomes_of_a_job_show_no_value_of_a_secret_variable(monkeypatch, capsys):
    """Also where a library's error quotes it, and in a traceback."""
    monkeypatch.setenv("SITE_TOKEN", "hunter2222")
    error = JobError(f"401 for https://me:pw1234567@hub with hunter2222 and {TOKEN}")
    assert one_line(error) == f"401 for https://{HIDDEN_TEXT}@hub with {HIDDEN_TEXT} and {HIDDEN_TEXT}"
    handler = logging.StreamHandler()
    handler.setFormatter(log_lines.ScrubbedFormatter("%(message)s"))
    try:
        raise error
    except JobError:
        logger = logging.getLogger("of a test")
        logger.addHandler(handler)
        logger.exception("asked with %s", "hunter2222")
        logger.removeHandler(handler)
    shown = capsys.readouterr().err
    assert f"asked with {HIDDEN_TEXT}" in shown
    assert "Traceback" in shown
    assert not any(secret in shown for secret in ("hunter2222", TOKEN, "pw1234567"))
