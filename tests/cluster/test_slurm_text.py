"""Laws of reading Slurm: what cannot be read is no news, what is not known is unknown, and no job is guessed at."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.slurm_options import slurm_options

from coordinator.cluster import ClusterError, Job, LimitError, RefusedError
from coordinator.cluster.sbatch_text import SlurmOptions, within_limits
from coordinator.cluster.slurm_accounts import cluster_of, default_walls, parse_walls
from coordinator.cluster.slurm_parse import (
    FIELD_END,
    PHASES,
    RECORD_END,
    failure,
    not_cancelled,
    own_words,
    parse_gres,
    parse_limits,
    parse_nodes,
    parse_queue,
    parse_reservations,
    refused,
    setting_of,
)
from coordinator.cluster.slurm_reasons import gpus_in_words, none_usable, unusable
from coordinator.cluster.slurm_rules import parse_partitions, partition_qos
from coordinator.config.schema import RoleConfig

QUEUE_HEAD = (
    "ARRAY_JOB_ID",
    "ARRAY_TASK_ID",
    "STATE",
    "SUBMIT_TIME",
    "START_TIME",
    "END_TIME",
    "NODELIST",
    "REASON",
    "COMMENT",
    "NAME",
)
NODE_HEAD = (
    "NODELIST",
    "PARTITION",
    "AVAIL",
    "TIMELIMIT",
    "STATE",
    "GRES",
    "GRES_USED",
    "REASON",
    "CPUS(A/I/O/T)",
    "MEMORY",
    "ALLOCMEM",
    "ACTIVE_FEATURES",
)


def table(*rows: tuple[str, ...]) -> str:
    return "".join(FIELD_END.join(row) + RECORD_END + "\n" for row in rows)


def queue(*rows: tuple[str, ...]) -> str:
    return table(QUEUE_HEAD, *rows)


def node(name: str, partition: str, state: str = "idle", **more: str) -> tuple[str, ...]:
    row = {
        "avail": "up",
        "gres": "gpu:a100:8(S:0-1)",
        "used": "gpu:a100:3(IDX:0,2,5)",
        "cpus": "16/48/0/64",
        "time": "infinite",
        "reason": "none",
        "features": "(null)",
    } | more
    resources = (row["gres"], row["used"], row["reason"], row["cpus"], "512000", "12000", row["features"])
    return (name, partition, row["avail"], row["time"], state, *resources)


def test_members_are_read_with_their_times_and_nodes() -> None:
    text = queue(
        ("12", "3", "RUNNING", "1700000000", "1700000060", "1700003660", "n1", "None", "t/ev", "es-a"),
        ("13", "N/A", "PENDING", "2023-11-14T22:13:20", "1700009999", "N/A", "", "Priority", "t", "es-b"),
    )
    a, b = parse_queue(text, "t")
    assert (a.job_id, a.index, a.phase, a.node, a.submitted_at, a.started_at, a.reason) == (
        "12", 3, "running", "n1", 1.7e9, 1.7e9 + 60, "",
    )  # fmt: skip
    assert (b.job_id, b.index, b.phase, b.node, b.started_at, b.reason) == (
        "13",
        0,
        "pending",
        None,
        None,
        "Priority",
    )
    assert b.submitted_at is not None
    assert (a.ends_at, b.ends_at) == (1.7e9 + 3660, None)


def test_other_jobs_of_the_user_are_not_ours_whatever_they_are_called() -> None:
    """Names and comments with line breaks and separators of other tools do not disturb the listing."""
    text = queue(
        ("1", "N/A", "RUNNING", "1", "1", "9", "n1", "None", "(null)", "a\nb|c\td"),
        ("2", "N/A", "RUNNING", "1", "1", "9", "n1", "None", "t2/ev\n", "es-x"),
        ("3", "N/A", "RUNNING", "1", "1", "9", "n1", "None", "t", "es-y"),
    )
    assert [j.job_id for j in parse_queue(text, "t")] == ["3"]


@given(st.text(max_size=200))
def test_garbage_is_no_news(text: str) -> None:
    """No text but a whole answer is read as "no jobs"."""
    with pytest.raises(ClusterError):
        parse_queue(text, "t")


@given(st.integers(min_value=0, max_value=200))
def test_an_answer_that_is_cut_off_is_never_read_as_fewer_fields(cut: int) -> None:
    """It is no news, unless the cut is between two records."""
    row = ("12", "3", "RUNNING", "1700000000", "1700000060", "1700003660", "n1", "None", "t/ev", "es-a")
    whole = queue(row, row)
    text = whole[: min(cut, len(whole))]
    if text.rstrip("\n").endswith(RECORD_END):
        assert all(j.name == "es-a" for j in parse_queue(text, "t"))
    else:
        with pytest.raises(ClusterError):
            parse_queue(text, "t")


def test_no_answer_and_no_jobs_are_two_things() -> None:
    assert parse_queue(queue(), "t") == []
    assert parse_queue("CLUSTER: c1\n" + queue(), "t") == []
    with pytest.raises(ClusterError):
        parse_queue("", "t")


def test_a_state_outside_the_table_is_unknown() -> None:
    """And every way to end that Slurm has is an end."""
    (job,) = parse_queue(queue(("1", "N/A", "HIBERNATING", "1", "1", "9", "n1", "None", "t", "a")), "t")
    assert (job.phase, job.state) == ("unknown", "HIBERNATING")
    for word in (
        "COMPLETING",
        "COMPLETED",
        "FAILED",
        "TIMEOUT",
        "NODE_FAIL",
        "PREEMPTED",
        "OUT_OF_MEMORY",
        "CANCELLED",
    ):
        assert PHASES[word] == "ended"


def test_a_job_that_a_sibling_cluster_runs_has_not_ended() -> None:
    """REVOKED: in a federation the job started elsewhere; submitted again, it would run twice."""
    (job,) = parse_queue(queue(("1", "N/A", "REVOKED", "1", "1", "N/A", "", "None", "t", "a")), "t")
    assert job.phase == "unknown"


def test_the_kernels_kill_is_seen_while_the_node_still_cleans_up() -> None:
    row = ("1", "N/A", "COMPLETING", "1", "1", "9", "n1", "OutOfMemory", "t", "a")
    (job,) = parse_queue(queue(row), "t")
    assert (job.phase, job.state) == ("ended", "OUT_OF_MEMORY")


def test_a_node_of_several_partitions_is_one_node() -> None:
    text = table(NODE_HEAD, node("n1", "spare"), node("n1", "gpu*"), node("n2", "other"))
    (n1,) = parse_nodes(text, slurm_options())
    assert (n1.name, n1.usable, n1.gpus, n1.gpus_free, n1.gpu_type) == ("n1", True, 8, 5, "a100")
    assert (n1.cpus, n1.cpus_free, n1.memory_mb, n1.memory_free_mb) == (64, 48, 512000, 500000)
    assert n1.partitions == ("spare", "gpu")


def test_only_nodes_and_gpus_of_our_partitions_are_ours() -> None:
    text = table(NODE_HEAD, node("n1", "gpu*"), node("n2", "big"), node("c1", "cpu"), node("x", "other"))
    nodes = parse_nodes(text, slurm_options(partition="big,more", cpu_partition="cpu"))
    assert [(n.name, n.gpus, n.gpus_free) for n in nodes] == [("c1", 0, 0), ("n2", 8, 5)]


def test_the_partitions_of_roles_decide_whose_nodes_are_listed() -> None:
    """Trials' nodes have GPUs to offer; those of builds and metric workers count as nodes without."""
    text = table(NODE_HEAD, node("n1", "gpu*"), node("n2", "big"), node("c1", "cpu"), node("c2", "long"))
    roles = {
        "trial": RoleConfig(partition="big"),
        "metric": RoleConfig(partition="cpu"),
        "build": RoleConfig(partition="long"),
    }
    nodes = parse_nodes(text, slurm_options(partition="gpu", slurm=roles))
    assert [(n.name, n.gpus) for n in nodes] == [("c1", 0), ("c2", 0), ("n2", 8)]


def test_a_node_that_the_precursors_partition_lacks_is_not_offered() -> None:
    """Nothing could be staged there. On a preemptible node the precursor goes to that partition."""
    rows = (node("n1", "gpu*"), node("n1", "shared"), node("n2", "gpu*"), node("n3", "spare"))
    options = slurm_options(
        borrow={"best_effort": "spare"}, slurm={"precursor": RoleConfig(partition="shared")}
    )
    nodes = parse_nodes(table(NODE_HEAD, *rows), options)
    assert [n.excluded for n in nodes] == ["", "[slurm.precursor] partition", ""]


def test_a_node_has_the_features_that_are_active() -> None:
    rows = (node("n1", "gpu*", features="rack1,nvlink"), node("n2", "gpu*"))
    nodes = parse_nodes(table(NODE_HEAD, *rows), slurm_options(nodes={"features": ("nvlink",)}))
    assert [(n.features, n.usable, n.excluded) for n in nodes] == [
        (("rack1", "nvlink"), True, ""),
        ((), False, "[nodes] features"),
    ]


def test_a_node_that_only_a_preempting_partition_gives_is_best_effort() -> None:
    """Its GPUs are ours, but last; one that the certain partition gives as well is no such node, unless it is down there."""
    text = table(
        NODE_HEAD,
        *(node("n1", "gpu*"), node("n1", "spare"), node("n2", "spare")),
        *(node("n3", "gpu*", avail="down"), node("n3", "spare"), node("n4", "spare", state="down*")),
    )
    nodes = parse_nodes(text, slurm_options(borrow={"best_effort": "spare"}))
    assert [(n.name, n.best_effort) for n in nodes] == [
        ("n1", False),
        ("n2", True),
        ("n3", True),
        ("n4", False),
    ]
    assert [n.name for n in parse_nodes(text, slurm_options())] == ["n1", "n3"]


@pytest.mark.parametrize(
    ("state", "usable"),
    [
        ("idle", True), ("mixed", True), ("allocated", True), ("planned", True), ("mixed-", True), ("completing", True),
        ("idle*", False), ("down*", False), ("drained", False), ("draining", False), ("drng@", False), ("idle~", False),
        ("mixed#", False), ("maint", False), ("idle$", False), ("reserved", False), ("fail", False), ("unheard-of", False),
    ],
)  # fmt: skip
def test_only_states_known_to_be_good_are_usable(state: str, usable: bool) -> None:
    (n1,) = parse_nodes(table(NODE_HEAD, node("n1", "gpu*", state)), slurm_options())
    assert (n1.usable, n1.state) == (usable, state)


@pytest.mark.parametrize(
    ("state", "usable"), [("idle~", True), ("mixed#", True), ("idle%", False), ("down~", False)]
)
def test_a_node_without_power_is_usable_where_jobs_may_wake_it(state: str, usable: bool) -> None:
    """While it boots, too; not while it goes down."""
    (n1,) = parse_nodes(table(NODE_HEAD, node("n1", "gpu*", state)), slurm_options(nodes={"wake": True}))
    assert n1.usable is usable


def test_a_reserved_node_is_usable_by_who_has_the_reservation() -> None:
    rows = table(NODE_HEAD, node("n1", "gpu*", "reserved"), node("n2", "gpu*", avail="down"))
    n1, n2 = parse_nodes(rows, slurm_options(reservation="ours"))
    assert (n1.usable, n2.usable) == (True, False)


@pytest.mark.parametrize("field", ["cpus"])
def test_a_node_that_cannot_be_read_is_no_news(field: str) -> None:
    with pytest.raises(ClusterError):
        parse_nodes(table(NODE_HEAD, node("n1", "gpu*", **{field: "many"})), slurm_options())
    with pytest.raises(ClusterError):
        parse_nodes("", slurm_options())


@pytest.mark.parametrize(
    ("text", "count", "kind"),
    [
        ("(null)", 0, ""), ("gpu:8", 8, ""), ("gpu:a100:8(S:0-1)", 8, "a100"), ("gpu:a100:2(IDX:0,7),nvme:4", 2, "a100"),
        ("gpu:a100:4,gpu:h100:4", 8, "a100+h100"), ("shard:80,gpu:0", 0, ""), ("gpu", 1, ""), ("gpu:1g.5gb:7", 7, "1g.5gb"),
        ("gpu:1g.10gb:7(S:0)", 7, "1g.10gb"), ("gpu:a100:2,gpu:1g.5gb:7", 9, "a100+1g.5gb"), ("gpu:1K", 1024, ""),
    ],
)  # fmt: skip
def test_gpus_are_counted_over_all_types(text: str, count: int, kind: str) -> None:
    assert parse_gres(text) == (count, kind)


def test_a_refusal_of_account_or_qos_names_the_setting_and_how_to_list_them() -> None:
    """By Slurm's own words; other refusals name no setting."""
    account = setting_of("allocation failure: Invalid account or account/partition combination specified")
    assert account.startswith("--account, [cluster] or [slurm.ROLE] account; `sacctmgr ")
    assert setting_of("Invalid qos specification").startswith(
        "--qos, [cluster] or [slurm.ROLE] qos; `sacctmgr "
    )
    assert setting_of("Requested node configuration is not available") == ""


def test_a_refusal_is_told_from_a_controller_that_is_away() -> None:
    """A limit that may pass is not a refusal."""
    failed = "sbatch: error: Batch job submission failed: "
    assert refused(own_words(f"{failed}Invalid partition name specified\n"))
    assert refused(own_words(f"sbatch: error: lua: no GPU, no job\n{failed}Unspecified error\n"))
    assert not refused(own_words(f"{failed}Unable to contact slurm controller (connect failure)\n"))
    assert not refused(own_words(f"{failed}Socket timed out on send/recv operation\n"))
    limit = failure(own_words(f"{failed}Job violates accounting/QOS policy (job submit limit, …)\n"))
    assert type(limit) is LimitError
    assert own_words("sbatch: error: a\nsbatch: error: a\nb\n") == "a; b"


@pytest.mark.parametrize(
    ("words", "of_node"),
    [
        ("Requested node configuration is not available", True),
        ("Invalid node name specified", True),
        ("Requested nodes not in this partition", True),
        ("Invalid generic resource (gres) specification", True),
        ("Memory required by task is not available", True),
        ("CPU count specification invalid", True),
        ("Invalid GRES specification (with and without type identification)", True),
        ("Access denied to requested reservation", False),
        ("User's group not permitted to use this partition", False),
        ("Invalid account or account/partition combination specified", False),
        ("Invalid qos specification", False),
        ("invalid partition specified: nope", False),
        ("Requested time limit is invalid (missing or exceeds some limit)", False),
    ],
)
def test_what_one_node_may_be_the_reason_for_is_told_from_what_is_refused_everywhere(
    words: str, of_node: bool
) -> None:
    error = failure(words)
    assert isinstance(error, RefusedError)
    assert error.of_node is of_node


@pytest.mark.parametrize(
    "words",
    [
        "Required partition not available (inactive or drain)",
        "Partition in DOWN state",
        "Requested reservation not usable now",
        "Requested account has breached requested QOS usage threshold",
        "System submissions disabled",
    ],
)
def test_a_refusal_that_an_admin_or_time_ends_is_waited_out(words: str) -> None:
    """Slurm has not taken the job, so it is in no doubt; and it counts against no node."""
    assert type(failure(words)) is LimitError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1:00:00", 3600), ("30:00", 1800), ("2-00:00:00", 172_800), ("infinite", None), ("n/a", None)],
)
def test_the_time_limit_of_a_partition_is_read(text: str, seconds: int | None) -> None:
    """The default partition's stands under None as well; one without a limit is left out."""
    rows = table(NODE_HEAD, node("n1", "gpu*", time=text), node("n1", "spare", time="10:00"))
    known = {} if seconds is None else {"gpu": seconds, None: seconds}
    assert parse_limits(rows) == known | {"spare": 600}


WALLS = """\
Current Association Manager state
Association Records
ClusterName=c Account=root UserName= Partition= Priority=0 ID=1 DefAssoc=No MaxJobs= MaxWallPJ= MaxTRESPJ=
ClusterName=c Account=lab UserName= Partition= Priority=0 ID=2 DefAssoc=No MaxJobs= MaxWallPJ=10 MaxTRESPJ=
ClusterName=c Account=lab UserName=me(1001) Partition= Priority=0 ID=3 DefAssoc=Yes MaxJobs= MaxWallPJ=45 MaxTRESPJ=
ClusterName=c Account=lab UserName=me(1001) Partition=debug Priority=0 ID=4 DefAssoc=No MaxJobs= MaxWallPJ=5 MaxTRESPJ=
QOS Records
QOS=normal(1) UsageRaw=0.0 GrpWall=N(0.00) MaxWallPJ= MaxTRESPJ= Account Limits=No Accounts
QOS=short(2) UsageRaw=0.0 GrpWall=N(0.00) MaxWallPJ=30 MaxTRESPJ= Account Limits=No Accounts
"""

PARTITIONS = """\
PartitionName=gpu AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL Default=NO QoS=N/A MaxTime=UNLIMITED
PartitionName=quick AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL Default=YES QoS=short MaxTime=UNLIMITED
"""


def test_the_qos_of_a_partition_is_read() -> None:
    """The default partition's stands under None as well; `N/A` is none."""
    assert partition_qos(parse_partitions(PARTITIONS)) == {"quick": "short", None: "short"}


def test_max_wall_is_read_of_accounts_and_qualities_of_service() -> None:
    """Accounts without the user, and associations with one partition alone, do not count."""
    assert parse_walls(WALLS) == {("account", "lab"): 2700, ("account", ""): 2700, ("qos", "short"): 1800}


# default account, account, partition, default QOS
DEFAULTS = "lab|lab||normal\nlab|other||short\nlab|lab|debug|short\n"


def test_the_default_qos_of_an_account_is_read() -> None:
    """An association with one partition alone does not count."""
    walls = {("qos", "short"): 1800, ("qos", "normal"): 7200}
    assert default_walls(DEFAULTS, walls) == {
        ("default qos", "lab"): 7200,
        ("default qos", ""): 7200,
        ("default qos", "other"): 1800,
    }
    assert cluster_of(WALLS) == "c"


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        (slurm_options(), 1800),  # the default partition's QOS
        (slurm_options(partition="gpu"), 2700),
        (slurm_options(qos="short"), 1800),
        (slurm_options(qos="normal", account="other", partition="gpu"), 3600),
        (slurm_options(account="lab", partition="tiny"), 60),
        (slurm_options(account="other", partition="gpu"), 1800),  # its default QOS
        (slurm_options(account="other", qos="normal", partition="gpu"), 3600),
        (slurm_options(account="third", partition="gpu"), 3600),
        (slurm_options(account="other", partition="gpu,quick"), 1800),
    ],
)
def test_no_job_asks_for_more_time_than_partition_account_and_qos_allow(
    options: SlurmOptions, seconds: int
) -> None:
    job = Job(name="j", argv=("true",), log="/dev/null", time_limit_seconds=3600)
    walls = parse_walls(WALLS)
    walls |= default_walls(DEFAULTS, walls)
    cut = within_limits(job, options, {"tiny": 60}, walls, partition_qos(parse_partitions(PARTITIONS)))
    assert cut.time_limit_seconds == seconds


def test_a_limit_on_one_job_alone_is_a_refusal_and_any_other_is_met_again() -> None:
    """Slurm has the same sentence for both, and its reason before it."""
    policy = "Batch job submission failed: Job violates accounting/QOS policy (job submit limit, ...)"
    never = failure(f"QOSMaxWallDurationPerJobLimit; {policy}")
    assert type(never) is RefusedError
    assert "set another [cluster] qos" in str(never)
    assert type(failure(f"QOSMaxSubmitJobPerUserLimit; {policy}")) is LimitError
    assert type(failure(policy)) is LimitError


def test_cancelling_complains_of_living_jobs_alone() -> None:
    gone = "scancel: error: Kill job error on job id 9: Invalid job id specified\n"
    away = (
        "scancel: error: Kill job error on job id 8: Unable to contact slurm controller (connect failure)\n"
    )
    assert not not_cancelled(gone)
    assert "connect failure" in not_cancelled(gone + away)


def test_nodes_that_take_no_job_are_named_with_state_and_reason() -> None:
    """And GPUs that are used are counted on the others alone."""
    rows = [node(n, "gpu*", "drained", reason="new driver") for n in ("n1", "n2")]
    nodes = parse_nodes(table(NODE_HEAD, *rows, node("n3", "gpu*")), slurm_options())
    assert unusable(nodes) == "n1, n2 are drained (new driver)"
    assert gpus_in_words(nodes, 2) == "3 of 8 GPUs are used, 2 of them by evalspan; " + unusable(nodes)
    assert gpus_in_words(nodes[:2], 0) == unusable(nodes)
    assert gpus_in_words([], 0) == unusable([]) == ""
    assert none_usable(nodes) == none_usable([]) == ""
    assert none_usable(nodes[:2]) == f"no node with GPUs can be used now: {unusable(nodes)}"


RESERVATIONS = """\
ReservationName=fix StartTime=1795356710 EndTime=1795362110 Nodes=n[1-2] NodeCnt=2 Flags=MAINT TRES=cpu=8 Users=root Groups=(null) Accounts=(null) State=ACTIVE
ReservationName=later StartTime=2026-11-24T17:19:48 EndTime=2026-11-24T19:19:48 Nodes=n2 Flags= Users=-root Groups=(null) Accounts=lab,other State=INACTIVE
"""


def test_reservations_are_read_with_their_nodes_holders_and_times() -> None:
    """One that has not begun is not active."""
    fix, later = parse_reservations(RESERVATIONS)
    assert str(fix).startswith("reservation fix of n[1-2] until 2026-11-2")
    assert (fix.active, fix.users, fix.accounts) == (True, ("root",), ())
    assert (later.active, later.users, later.accounts) == (False, ("-root",), ("lab", "other"))
    assert later.until == "2026-11-24 19:19"
    assert parse_reservations("No reservations in the system\n") == []
