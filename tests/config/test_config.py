"""Laws of the settings: precedence, refusals, and the file that `init` writes as the reference."""

import re
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.cluster import NodeState
from coordinator.cluster.daemon_job import slurm_time
from coordinator.cluster.site_probe import SiteProbe, probe_of
from coordinator.config import checks, loading, schema, template
from coordinator.errors import OperatorError
from coordinator.intake import from_settings
from coordinator.runtime import wiring


@pytest.fixture
def toml(tmp_path):
    def write(text):
        path = tmp_path / "evalspan.toml"
        path.write_text(text)
        return path

    return write


def test_no_setting_means_the_defaults(tmp_path, monkeypatch):
    """Without file, variables and options the settings are the defaults, with absolute paths."""
    monkeypatch.chdir(tmp_path)
    assert loading.load(None, {}) == schema.Config(work_dir=tmp_path / "evalspan-work")


def test_command_line_over_environment_over_file(toml):
    """The command line wins over the environment, and that over the file; None sets nothing."""
    path = toml('[cluster]\nkind = "slurm"\npartition = "file"\naccount = "file"\nqos = "file"\n')
    environ = {
        "EVALSPAN_CLUSTER_KIND": "slurm",
        "EVALSPAN_CLUSTER_ACCOUNT": "env",
        "EVALSPAN_CLUSTER_QOS": "env",
    }
    got = loading.load(path, environ, {"cluster.qos": "option", "cluster.account": None}).cluster
    assert (got.partition, got.account, got.qos) == ("file", "env", "option")


def test_search_order(tmp_path, monkeypatch):
    """--config, $EVALSPAN_CONFIG, ./evalspan.toml, ~/.config/evalspan.toml: first found."""
    home, here = tmp_path / "home", tmp_path / "here"
    (home / ".config").mkdir(parents=True)
    here.mkdir()
    monkeypatch.chdir(here)
    environ = {"HOME": str(home)}
    assert loading.find(None, environ) is None
    (home / ".config" / "evalspan.toml").touch()
    assert loading.find(None, environ) == home / ".config" / "evalspan.toml"
    (here / "evalspan.toml").touch()
    assert loading.find(None, environ) == here / "evalspan.toml"
    (tmp_path / "env.toml").touch()
    environ["EVALSPAN_CONFIG"] = str(tmp_path / "env.toml")
    assert loading.find(None, environ) == tmp_path / "env.toml"
    (tmp_path / "named.toml").touch()
    assert loading.find(tmp_path / "named.toml", environ) == tmp_path / "named.toml"
    with pytest.raises(OperatorError, match="--config names"):
        loading.find(tmp_path / "none.toml", environ)


def test_paths_in_a_file_are_relative_to_the_file(toml, monkeypatch, tmp_path):
    """A config works from any folder; paths on the command line are relative to the current one."""
    other = tmp_path / "other"
    other.mkdir()
    path = toml('work_dir = "w"\n[watch]\nfolders = ["a", "/b", "~/c"]\n[redis]\npassword_file = "p"\n')
    monkeypatch.chdir(other)
    got = loading.load(path, {})
    assert got.work_dir == tmp_path / "w"
    assert got.watch.folders == (tmp_path / "a", Path("/b"), Path.home() / "c")
    assert got.redis.password_file == tmp_path / "p"
    for written, meant in (("./x.toml", str(tmp_path / "x.toml")), ("core", "core")):
        assert loading.load(toml(f'[watch]\nsuite = "{written}"\n'), {}).watch.suite == meant
    path = toml('work_dir = "w"\n')
    assert loading.load(path, {}, {"work_dir": Path("x")}).work_dir == other / "x"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[trial]\n\ngpu_per_trial = 2\n", "line 3: [trial] has no key 'gpu_per_trial'; did you mean 'gpus_"),
        ("[trail]\n", "line 1: the file has no key 'trail'; did you mean 'trial'?"),
        ('[trial]\ncpus = "2"\n', "line 2: 'cpus' of [trial] should be a valid integer, not \"2\""),
        ('[cluster]\nkind = "pbs"\n', "should be 'local' or 'slurm', not \"pbs\""),
        ('[trial]\ntime_limit = "4h"\n', 'should be a time such as "4:00:00"'),
        ('[plan]\npolicy = "lpt"\n', "should be 'evalspan' or 'round-robin', not \"lpt\""),
        ("[trial]\ngpus_per_trial = 0\n", "line 2: 'gpus_per_trial' of [trial] should be greater than"),
        (
            '[trial]\nmodel_args = { revision = "a" }\n',
            "line 2: 'model_args' of [trial] should be a table without",
        ),
        ("[stage]\nroots = []\n", "line 2: 'roots' of [stage]"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(toml, text, says):
    """One line: file, line, key, and what to write instead."""
    with pytest.raises(OperatorError) as caught:
        loading.load(toml(text), {})
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(toml(text)))


def test_a_wrong_variable_or_option_is_named():
    """The message names the variable or option, not the file."""
    with pytest.raises(OperatorError, match=r"^\$EVALSPAN_CLUSTER_NICE: "):
        loading.load(None, {"EVALSPAN_CLUSTER_NICE": "many"})
    with pytest.raises(OperatorError, match=r"^\$EVALSPAN_STAGE_LINGER_SECONDS: "):
        loading.load(None, {"EVALSPAN_STAGE_LINGER_SECONDS": "5", "EVALSPAN_LONG": "1"})
    with pytest.raises(
        OperatorError, match=r"^\$EVALSPAN_TRIAL_MODEL_ARGS: 'model_args' of .* should be a table"
    ):
        loading.load(None, {"EVALSPAN_TRIAL_MODEL_ARGS": "dtype=float32"}, {"trial.model_args.x": 1})
    with pytest.raises(OperatorError, match=r"^--slots: "):
        loading.load(None, {}, {"cluster.slots": 0})


@pytest.mark.parametrize(
    ("text", "variables", "options"),
    [
        ("", {}, {"cluster.partition": "gpu"}),
        ("", {"EVALSPAN_CLUSTER_QOS": "low"}, {}),
        ('[cluster]\naccount = "mine"\n', {}, {}),
        ('[slurm.trial]\naccount = "mine"\n', {}, {}),
        ("", {"EVALSPAN_SLURM_GPU_REQUEST": "--gpus-per-node={n}"}, {}),
        ('[nodes]\nexclude = ["n1"]\n', {}, {}),
    ],
)
def test_a_setting_of_slurm_alone_means_slurm(toml, text, variables, options):
    """Where no setting chooses the cluster: a partition, account or QOS is never ignored."""
    assert loading.load(toml(text), variables, options).cluster.kind == "slurm"


@pytest.mark.parametrize(
    ("text", "options", "names"),
    [
        ("", {"cluster.kind": "local", "cluster.qos": "low"}, "--qos: "),
        ('[cluster]\nkind = "local"\n', {"cluster.account": "mine"}, "--account: "),
    ],
)
def test_an_option_of_slurm_is_refused_where_jobs_would_run_here(toml, text, options, names):
    """The line names the option, and what to type."""
    with pytest.raises(OperatorError, match=r"--cluster slurm, or set kind") as refused:
        loading.load(toml(text), {}, options)
    assert names in str(refused.value)


def test_a_variable_of_slurm_is_refused_where_the_file_says_local(toml):
    """It is younger than the file; `--cluster local` is younger than both."""
    path, variables = toml('[cluster]\nkind = "local"\n'), {"EVALSPAN_CLUSTER_PARTITION": "gpu"}
    with pytest.raises(OperatorError, match=r"^\$EVALSPAN_CLUSTER_PARTITION: "):
        loading.load(path, variables)
    assert loading.load(path, variables, {"cluster.kind": "local"}).cluster.kind == "local"


def test_a_variable_reaches_the_setting_of_a_role_or_is_refused(toml):
    """EVALSPAN_SLURM_TRIAL_QOS is [slurm.trial] qos; a misspelt one is named."""
    variables = {"EVALSPAN_SLURM_TRIAL_QOS": "high", "EVALSPAN_SLURM_METRIC_EXTRA_ARGS": '["--spread-job"]'}
    got = loading.load(toml('[slurm.trial]\nqos = "low"\naccount = "a"\n'), variables).slurm
    assert (got.trial.qos, got.trial.account, got.metric.extra_args) == ("high", "a", ("--spread-job",))
    for wrong in ("EVALSPAN_SLURM_TRIAL_QUOS", "EVALSPAN_SLURM_GPU_REQUESTS", "EVALSPAN_SLURM_TRIAL"):
        with pytest.raises(OperatorError, match=rf"\${wrong}: "):
            loading.load(None, {wrong: "x"})


def test_an_option_holds_for_every_role_that_the_file_sets(toml):
    """--account and --qos for all, --partition for jobs on nodes with GPUs: no typed option is ignored."""
    roles = ("precursor", "trial", "metric", "build")
    text = "".join(f'[slurm.{r}]\naccount = "a"\nqos = "q"\npartition = "p"\n' for r in roles)
    typed = {"cluster.account": "b", "cluster.qos": "r", "cluster.partition": "g"}
    got = loading.load(toml(text), {}, typed)
    assert all((getattr(got.slurm, r).account, getattr(got.slurm, r).qos) == (None, None) for r in roles)
    assert [getattr(got.slurm, r).partition for r in roles] == [None, None, "p", "p"]
    assert (got.cluster.account, got.cluster.qos, got.cluster.partition) == ("b", "r", "g")
    assert loading.load(toml(text), {}).slurm.trial == schema.RoleConfig(account="a", qos="q", partition="p")


@pytest.mark.parametrize(
    "request_",
    ["--gres=gpu", "gpu:{n}", "", "--gres='gpu:{n}", "--gres=gpu:{kind}:{n}", "--gres=gpu:{n", "{n}"],
)
def test_a_gpu_request_that_cannot_ask_for_a_number_of_gpus_is_refused_when_loaded(toml, request_):
    with pytest.raises(
        OperatorError, match=r"line 2: 'gpu_request' of \[slurm\] should be arguments of sbatch"
    ):
        loading.load(toml(f'[slurm]\ngpu_request = "{request_}"\n'), {})


@pytest.mark.parametrize("hosts", ["", "n1,", "n[1", "n[3-1]", "n[a]", "n1 n2", "n[]"])
def test_what_is_no_hostlist_is_refused_when_loaded(toml, hosts):
    with pytest.raises(OperatorError, match=r"line 2: 'exclude' of \[nodes\] should be Slurm hostlists"):
        loading.load(toml(f'[nodes]\nexclude = ["{hosts}"]\n'), {})


def test_a_model_argument_may_be_none(toml):
    """As an option it replaces the file's; another option of None is one that was not given."""
    path = toml('[trial]\nmodel_args = { dtype = "float32", x = 1 }\n')
    got = loading.load(path, {}, {"trial.model_args.dtype": None, "trial.device": None})
    assert got.trial.model_args == {"dtype": None, "x": 1}


def test_a_file_for_slurm_is_taken_with_cluster_local(toml):
    """Its settings of Slurm wait for the next run there."""
    path = toml('[cluster]\nkind = "slurm"\npartition = "gpu"\nnice = 5\n')
    assert loading.load(path, {}, {"cluster.kind": "local"}).cluster.kind == "local"
    assert loading.load(path, {"EVALSPAN_CLUSTER_KIND": "local"}).cluster.kind == "local"


def test_variables_hold_text_or_toml():
    """An account "123" stays text; lists, numbers and truth values are written as in TOML."""
    got = loading.load(
        None,
        {
            "EVALSPAN_CLUSTER_KIND": "slurm",
            "EVALSPAN_CLUSTER_ACCOUNT": "123",
            "EVALSPAN_STAGE_ROOTS": '["/a", "/b"]',
            "EVALSPAN_CLUSTER_NICE": "7",
            "EVALSPAN_CHECKPOINT_ALLOW_BIN": "true",
            "EVALSPAN_TRIAL_MODEL_ARGS": '{ dtype = "float32" }',
            "EVALSPAN_INDEX": "3",  # of jobs, no setting
        },
    )
    assert got.cluster.account == "123"
    assert got.stage.roots == ("/a", "/b")
    assert got.cluster.nice == 7
    assert got.checkpoint.allow_bin is True
    assert got.trial.model_args == {"dtype": "float32"}


@pytest.mark.parametrize(("text", "seconds"), [("4:00:00", 14400), ("2-01:00:30", 176430), ("0:00:01", 1)])
def test_time_limits_are_slurms(text, seconds):
    """Slurm's own way to write a time."""
    assert checks.seconds_of(text) == seconds


@pytest.mark.parametrize(
    ("text", "policy", "steals"),
    [
        ("", "evalspan", True),
        ('[plan]\npolicy = "round-robin"\n', "round-robin", False),
        ('[plan]\npolicy = "round-robin"\nsteal = true\n', "round-robin", True),
        ("[plan]\nsteal = false\n", "evalspan", False),
    ],
)
def test_trials_steal_under_evalspans_own_policy_unless_told_otherwise(toml, text, policy, steals):
    """[plan] reaches the options of every evaluation."""
    options = from_settings.run_options(loading.load(toml(text), {}))
    assert (options.plan_policy, options.steal) == (policy, steals)


@pytest.mark.parametrize(
    ("trial", "refused"),
    [
        ("gpus_per_trial = 2", ""),
        ("gpus_per_trial = 2\nmodel_args = { parallelize = false }", "engine 'hf' with parallelize = false would load the model on one GPU"),
        ('gpus_per_trial = 2\nmodel_args = { tp_plan = "auto" }', "tp_plan, outside of torchrun, would load the model on one GPU"),
        ('gpus_per_trial = 4\nengine = "vllm"', ""),  # by tensor parallelism, which the trial sets
        ('gpus_per_trial = 4\nengine = "sglang"', "set model_args = { tp_size = 4 }"),
        ("gpus_per_trial = 2\nmodel_args = { parallelize = true }", ""),
        ('gpus_per_trial = 2\nmodel_args = { device_map = "auto" }', ""),
        ('gpus_per_trial = 2\nengine = "an-engine-of-yours"', ""),
        ('gpus_per_trial = 2\ndevice = "cpu"', ""),
        ("gpus_per_trial = 1", ""),
    ],
)  # fmt: skip
def test_no_trial_holds_gpus_that_its_engine_leaves_idle(toml, trial, refused):
    settings = loading.load(toml(f'[cluster]\nkind = "slurm"\n[trial]\n{trial}\n'), {})
    if not refused:
        from_settings.check_device(settings)
        return
    with pytest.raises(OperatorError) as caught:
        from_settings.check_device(settings)
    assert refused in str(caught.value)


def test_the_written_file_changes_nothing(toml):
    """As written for a local site it equals the defaults, with the current folder as work."""
    path = toml(template.default_text("", {}))
    assert loading.load(path, {}) == schema.Config(work_dir=Path.cwd() / "evalspan-work")


def test_the_written_file_is_the_whole_reference(toml):
    """With all comments taken off it is valid, names every setting and has the defaults."""
    text = template.default_text("", {})
    bare = re.sub(r"(?m)^# (?=[a-z_]+ = )", "", text)
    got = loading.load(toml(bare), {})
    written = set(re.findall(r"(?m)^([a-z_]+) = ", bare))
    assert written == {where[-1] for where, _ in loading._settings()}
    example = re.compile(r"example")
    defaults = schema.Config()
    section = None
    for line in text.splitlines():
        if line.startswith("["):
            section = line.partition("]")[0].strip("[")
        found = re.match(r"# ([a-z_]+) = ", line)
        if found and section and not example.search(line) and found[1] not in ("partition", "cpu_partition"):
            key = attrgetter(f"{section}.{found[1]}")
            assert key(got) == key(defaults), line


def _node(name, gpus, *partitions):
    return NodeState(
        name=name, usable=True, state="idle", gpus=gpus, gpus_free=gpus, cpus=8, cpus_free=8,
        memory_mb=1, memory_free_mb=1, gpu_type="a100" if gpus else "", partitions=partitions,
    )  # fmt: skip


def test_init_sets_what_the_probe_found(toml):
    """The partition with most GPUs, and one without any for CPU work."""
    nodes = [_node("n1", 8, "gpu", "all"), _node("n2", 8, "gpu"), _node("c1", 0, "cpu")]
    probe = probe_of(nodes)
    got = loading.load(toml(template.default_text(probe.summary, probe.chosen())), {}).cluster
    assert (got.kind, got.partition, got.cpu_partition) == ("slurm", "gpu", "cpu")
    assert probe.summary == "2 nodes with 8 a100"
    assert probe.choice == "gpu (16 GPUs); others: all (8 GPUs), cpu (0 GPUs)"
    bare = probe_of([_node("c1", 0, "cpu")])
    assert (bare.partition, bare.cpu_partition) == (None, None)


def test_init_writes_the_request_for_gpus_that_the_site_takes(toml):
    probe = SiteProbe(kind="slurm", gpu_request="--gres=gpu:{type}:{n}")
    assert (
        loading.load(toml(template.default_text(probe.summary, probe.chosen())), {}).slurm.gpu_request
        == "--gres=gpu:{type}:{n}"
    )


def test_init_takes_a_preemptible_partition_only_where_no_other_has_gpus(toml):
    """More GPUs do not make up for jobs that end at any time; the line and the file say which may be preempted."""
    nodes = [_node("n1", 8, "gpu", "spare"), _node("n2", 8, "spare")]
    probe = probe_of(nodes, {"spare"})
    assert probe.choice == "gpu (8 GPUs); others: spare (16 GPUs, jobs may be preempted)"
    text = template.default_text(probe.summary, probe.chosen())
    assert probe.choice in text
    assert loading.load(toml(text), {}).cluster.partition == "gpu"
    alone = probe_of([_node("n1", 8, "spare")], {"spare"})
    assert alone.choice == "spare (8 GPUs, jobs may be preempted); others: none"


def test_init_takes_a_partition_that_refuses_this_users_jobs_only_where_no_other_has_gpus():
    """One of another group, say; the line says which refuse, in Slurm's words. CPU work stays beside the trials then.

    Where all refuse (an account is demanded), the reason is no partition's, and both are chosen as if none did.
    """
    nodes = [_node("n1", 8, "gpu", "theirs"), _node("n2", 8, "theirs"), _node("c1", 0, "cpu")]
    probe = probe_of(nodes, refusing={"theirs": "no", "cpu": "not you"})
    assert (
        probe.choice
        == "gpu (8 GPUs); others: theirs (16 GPUs, refuses your jobs: no), cpu (0 GPUs, refuses your jobs: not you)"
    )
    assert (probe.partition, probe.cpu_partition) == ("gpu", None)
    every = probe_of(nodes, refusing=dict.fromkeys(("gpu", "theirs", "cpu"), "no account"))
    assert (every.partition, every.cpu_partition) == ("theirs", "cpu")


def test_init_keeps_within_the_partitions_limits(toml):
    """A trial's time limit fits MaxTime; where the site has none, the default stands. An account is written."""
    nodes = [_node("n1", 8, "gpu"), _node("c1", 0, "cpu")]
    short = probe_of(nodes, max_seconds={"gpu": 7200, "cpu": 2 * 86_400})
    assert (
        loading.load(toml(template.default_text(short.summary, short.chosen())), {}).trial.time_limit
        == "2:00:00"
    )
    assert '# time_limit = "4:00:00"' in template.default_text("", probe_of(nodes).chosen())
    named = replace(short, account="proj", qos="long")
    got = loading.load(toml(template.default_text(named.summary, named.chosen())), {}).cluster
    assert (got.account, got.qos) == ("proj", "long")


@given(st.integers(1, 99 * 86_400))
def test_a_time_limit_is_written_as_it_is_read(seconds):
    assert checks.seconds_of(slurm_time(seconds)) == seconds


def test_a_lease_is_renewed_six_times_in_its_time(toml, tmp_path, monkeypatch):
    """A short one as well, so that a holder never takes a living coordinator for dead."""
    monkeypatch.setenv("EVALSPAN_WORK_DIR", str(tmp_path / "w"))
    short = toml("[stage]\nlease_seconds = 6\n")
    assert wiring.coordinator_of(from_settings.load(short)).pace.lease == 1.0
    assert wiring.coordinator_of(from_settings.load(toml(""))).pace.lease == 30.0


def test_the_work_folders_origin_is_what_load_takes_it_from(toml, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain, named = toml(""), {"EVALSPAN_WORK_DIR": "/w"}
    assert loading.work_folder_from(None, named, Path("/x")) == "--work-dir"
    assert loading.work_folder_from(plain, named, None) == "$EVALSPAN_WORK_DIR"
    assert loading.work_folder_from(plain, {}, None) == "the default, below the current folder"
    file = toml('work_dir = "/w"\n')
    assert loading.work_folder_from(file, {}, None) == str(file)


def test_a_list_in_a_variable_is_shown_as_it_is_written():
    with pytest.raises(OperatorError, match=r"should be a list, not \"n1,n2\": write \[\"n1\", \"n2\"\]"):
        loading.load(None, {"EVALSPAN_NODES_EXCLUDE": "n1,n2"})


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("trial.nope", "^settings 'trial.nope': .trial. has no key 'nope'"),
        ("trial.memory_mb", "^settings 'trial.memory_mb': "),
        ("cluster.kind", "^--cluster: "),
    ],
)
def test_a_wrong_value_is_named_as_it_was_given(key, said):
    """By its option where the command line has one, else by its key in `settings` of a call."""
    with pytest.raises(OperatorError, match=said):
        loading.load(None, {}, {key: "x"})


@pytest.mark.parametrize(
    ("trial", "hung", "memory_mb"),
    [
        ("", 900.0, 0),
        ('engine = "vllm"', 1800.0, 4096),
        ('engine = "vllm"\ngpus_per_trial = 4', 1800.0, 16384),
        ('engine = "vllm"\nhung_seconds = 60\nmemory_mb = 9000', 60.0, 0),
    ],
)
def test_limits_of_trials_follow_their_engine_unless_they_are_set(toml, trial, hung, memory_mb):
    """An engine with processes and compiled code of its own gets the memory and the time that it needs to load."""
    settings = loading.load(toml(f"[trial]\n{trial}\n"), {})
    options = from_settings.run_options(settings)
    assert from_settings.hung_seconds(settings) == hung
    assert options.engine_memory_mb == memory_mb
