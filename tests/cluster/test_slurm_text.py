"""Laws of reading Slurm: what cannot be read is no news, what is not known is unknown, and no job is guessed at.

What a real Slurm printed is read in `test_recorded.py`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_cluster import fake_node
from support.slurm_options import slurm_options

from coordinator.cluster import ClusterError, LimitError, NodeState, RefusedError
from coordinator.cluster.node_choice import gpus_in_words, none_usable, unusable
from coordinator.cluster.slurm_limits import failure, setting_of
from coordinator.cluster.slurm_parse import (
    FIELD_END,
    RECORD_END,
    nodes_of,
    not_cancelled,
    own_words,
    parse_gres,
    parse_queue,
    parse_sinfo,
)

QUEUE_HEAD = ("ARRAY_JOB_ID", "ARRAY_TASK_ID", "STATE", "SUBMIT_TIME", "START_TIME", "END_TIME", "NODELIST", "REASON", "COMMENT", "NAME")  # fmt: skip
NODE_HEAD = ("NODELIST", "PARTITION", "AVAIL", "STATE", "GRES", "GRES_USED", "REASON", "CPUS(A/I/O/T)", "MEMORY", "ALLOCMEM", "ACTIVE_FEATURES")  # fmt: skip


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
        "reason": "none",
        "features": "(null)",
    } | more
    resources = (row["gres"], row["used"], row["reason"], row["cpus"], "512000", "12000", row["features"])
    return (name, partition, row["avail"], state, *resources)


def nodes(*rows: tuple[str, ...], **options: object) -> list[NodeState]:
    return nodes_of(parse_sinfo(table(NODE_HEAD, *rows)), slurm_options(**options))  # type: ignore[arg-type]


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


@pytest.mark.parametrize(
    ("state", "reason", "phase"),
    [
        ("HIBERNATING", "None", "unknown"),  # a word that Slurm may learn tomorrow
        (
            "REVOKED",
            "None",
            "unknown",
        ),  # in a federation it started elsewhere; submitted again, it would run twice
        ("COMPLETING", "OutOfMemory", "ended"),  # told while the node still cleans up
        *(
            (state, "None", "ended")
            for state in ("COMPLETING", "COMPLETED", "FAILED", "TIMEOUT", "NODE_FAIL")
        ),
        *((state, "None", "ended") for state in ("PREEMPTED", "OUT_OF_MEMORY", "CANCELLED")),
    ],
)
def test_a_job_has_ended_in_states_known_to_be_ends_alone(state: str, reason: str, phase: str) -> None:
    (job,) = parse_queue(queue(("1", "N/A", state, "1", "1", "9", "n1", reason, "t", "a")), "t")
    killed = "OUT_OF_MEMORY" if reason == "OutOfMemory" else state
    assert (job.phase, job.state) == (phase, killed)


def test_a_node_that_the_precursors_partition_lacks_is_not_offered() -> None:
    """Nothing could be staged there. On a preemptible node the precursor goes to that partition."""
    rows = (node("n1", "gpu*"), node("n1", "shared"), node("n2", "gpu*"), node("n3", "spare"))
    found = nodes(*rows, borrow={"best_effort": "spare"}, slurm={"precursor": {"partition": "shared"}})
    assert [n.excluded for n in found] == ["", "[slurm.precursor] partition", ""]


def test_a_node_that_only_a_preempting_partition_gives_is_best_effort() -> None:
    """Its GPUs are ours, but last; one that the certain partition gives as well is no such node, unless it is down there."""
    rows = (
        *(node("n1", "gpu*"), node("n1", "spare"), node("n2", "spare")),
        *(node("n3", "gpu*", avail="down"), node("n3", "spare"), node("n4", "spare", state="down*")),
    )
    found = nodes(*rows, borrow={"best_effort": "spare"})
    assert [(n.name, n.best_effort) for n in found] == [
        ("n1", False),
        ("n2", True),
        ("n3", True),
        ("n4", False),
    ]
    assert [n.name for n in nodes(*rows)] == ["n1", "n3"]


GOOD = "idle mixed allocated planned mixed- completing"
BAD = "idle* down* drained draining drng@ idle~ mixed# maint idle$ reserved fail unheard-of"


@pytest.mark.parametrize(
    ("options", "good", "bad"),
    [
        ({}, GOOD, BAD),
        (
            {"nodes": {"wake": True}},
            f"{GOOD} idle~ mixed#",
            "idle% down~ idle*",
        ),  # boots, or is powered down; not while it goes down
        ({"reservation": "ours"}, f"{GOOD} reserved", "maint idle*"),
    ],
)
def test_only_states_known_to_be_good_are_usable(options: dict[str, object], good: str, bad: str) -> None:
    """In a partition that is up."""
    for state in (*good.split(), *bad.split()):
        (found,) = nodes(node("n1", "gpu*", state), **options)
        assert (found.usable, found.state) == (state in good.split(), state)
        (found,) = nodes(node("n1", "gpu*", state, avail="down"), **options)
        assert not found.usable


@pytest.mark.parametrize("text", ["", table(NODE_HEAD, node("n1", "gpu*", cpus="many"))])
def test_a_node_that_cannot_be_read_is_no_news(text: str) -> None:
    with pytest.raises(ClusterError):
        parse_sinfo(text)


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


POLICY = "Job violates accounting/QOS policy (job submit limit, ...)"


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        # of one node perhaps: its memory, CPUs, GPUs, or that it is gone
        ("Requested node configuration is not available", "node"),
        ("Invalid node name specified", "node"),
        ("Requested nodes not in this partition", "node"),
        ("Invalid generic resource (gres) specification", "node"),
        ("Memory required by task is not available", "node"),
        ("CPU count specification invalid", "node"),
        ("Invalid GRES specification (with and without type identification)", "node"),
        # everywhere and for good
        ("Access denied to requested reservation", "all"),
        ("User's group not permitted to use this partition", "all"),
        ("Invalid account or account/partition combination specified", "all"),
        ("Invalid qos specification", "all"),
        ("invalid partition specified: nope", "all"),
        ("Requested time limit is invalid (missing or exceeds some limit)", "all"),
        (f"QOSMaxWallDurationPerJobLimit\nsbatch: error: {POLICY}", "all"),  # a limit on one job alone
        ("lua: no GPU, no job\nsbatch: error: Unspecified error", "all"),
        # an admin, time or the end of other jobs ends it: not taken for sure
        ("Required partition not available (inactive or drain)", "limit"),
        ("Partition in DOWN state", "limit"),
        ("Requested reservation not usable now", "limit"),
        ("Requested account has breached requested QOS usage threshold", "limit"),
        ("System submissions disabled", "limit"),
        (POLICY, "limit"),
        (f"QOSMaxSubmitJobPerUserLimit\nsbatch: error: {POLICY}", "limit"),
        # whether the job was taken is unknown
        ("Unable to contact slurm controller (connect failure)", "away"),
        ("Socket timed out on send/recv operation", "away"),
        ("a word that Slurm may learn tomorrow", "away"),
    ],
)
def test_a_failed_submission_is_told_by_what_ends_it(words: str, kind: str) -> None:
    error = failure(own_words(f"sbatch: error: {words}\n"))
    kinds = {RefusedError: "all", LimitError: "limit", ClusterError: "away"}
    assert ("node" if isinstance(error, RefusedError) and error.of_node else kinds[type(error)]) == kind


def test_a_commands_errors_are_one_line_without_its_name() -> None:
    assert own_words("sbatch: error: a\nsbatch: error: a\nb\n") == "a; b"


def test_a_refusal_of_account_or_qos_names_the_setting_and_how_to_list_them() -> None:
    """By Slurm's own words; other refusals name no setting."""
    for field in ("account", "qos"):
        words = setting_of(f"Invalid {field} specification")
        assert f"[cluster] or [slurm.ROLE] {field}" in words
        assert "sacctmgr" in words
    assert setting_of("Requested node configuration is not available") == ""


def test_cancelling_complains_of_living_jobs_alone() -> None:
    gone = "scancel: error: Kill job error on job id 9: Invalid job id specified\n"
    away = (
        "scancel: error: Kill job error on job id 8: Unable to contact slurm controller (connect failure)\n"
    )
    assert not not_cancelled(gone)
    assert "connect failure" in not_cancelled(gone + away)


def test_nodes_that_take_no_job_are_named_with_state_and_reason() -> None:
    """And GPUs that are used are counted on the others alone."""
    drained = [
        replace(fake_node(n), usable=False, state="drained", reason="new driver") for n in ("n1", "n2")
    ]
    found = [*drained, replace(fake_node("n3", gpus=8), gpus_free=5)]
    assert unusable(found) == "n1, n2 are drained (new driver)"
    assert gpus_in_words(found, 2) == "3 of 8 GPUs are used, 2 of them by evalspan; " + unusable(found)
    assert gpus_in_words(drained, 0) == unusable(drained)
    assert gpus_in_words([], 0) == unusable([]) == none_usable(found) == none_usable([]) == ""
    assert unusable(drained) in none_usable(drained)
