"""Laws of reading Slurm: recorded answers and words mean what stands beside them, and what cannot be read is no news.

`recorded/NAME.txt` is what a real Slurm 22.05 printed, NAME.json what it means;
`recorded/words.json` has single words and lines of Slurm 22.05 to 25.11, each with its meaning.
"""

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.slurm_options import slurm_options

from coordinator.site.cluster import ClusterError, Job, LimitError, RefusedError
from coordinator.site.cluster import slurm_accounts as accounts
from coordinator.site.cluster import slurm_parse as text
from coordinator.site.cluster import slurm_rules as rules
from coordinator.site.cluster.daemon_job import daemon_job, own_options
from coordinator.site.cluster.local import parse_gpus
from coordinator.site.cluster.node_choice import describe_unusable, gpus_in_words, none_usable
from coordinator.site.cluster.pyslurm_queries import state_long
from coordinator.site.cluster.slurm_limits import setting_of, submission_error

RECORDED = Path(__file__).parent / "recorded"
WORDS = json.loads((RECORDED / "words.json").read_text())


def said(name):
    return (RECORDED / f"{name}.txt").read_text()


def plain(found):
    """As JSON has it."""
    return json.loads(json.dumps(found, default=asdict))


# --- whole answers -------------------------------------------------------------------------------------------------------

SITES = {
    "of the default partition": slurm_options(),
    "with CPU nodes": slurm_options(partition="gpu", cpu_partition="cpu"),
    "with a feature": slurm_options(nodes={"features": ("rack1",)}),
    "that may be preempted": slurm_options(partition="none", borrow={"best_effort": "spare"}),
    "of roles": slurm_options(
        partition="spare", slurm={"precursor": {"partition": "gpu"}, "metric": {"partition": "cpu"}}
    ),
}


def listed_nodes():
    rows = text.parse_sinfo(said("sinfo"))
    return {name: text.nodes_of(rows, options) for name, options in SITES.items()}


def in_words():
    """What is said of listed nodes, of those that take no job, and where the cluster has none."""
    every = listed_nodes() | {"that take no job": [n for n in text_nodes() if not n.usable], "none": []}
    return {name: [describe_unusable(n), gpus_in_words(n, 2), none_usable(n)] for name, n in every.items()}


def text_nodes():
    return listed_nodes()["with CPU nodes"]


def recorded_limits():
    accounting = accounts.Accounting(
        associations=accounts.parse_rows(said("user"), accounts.USER_FORMAT),
        accounts={r["account"]: r for r in accounts.parse_rows(said("accounts"), accounts.ACCOUNT_FORMAT)},
        qos={r["name"]: r for r in accounts.parse_rows(said("qos"), accounts.QOS_FORMAT)},
    )
    return {
        "own": accounting.own_accounts,
        "of the default QOS": accounting.limits(None, None, ["gpu"]),
        "of a QOS": accounting.limits("research", "few-gpus", ["gpu"]),
        "of a partition's QOS": accounting.limits(None, "few-jobs", ["gpu"], ["few-gpus"]),
        "of another account": accounting.limits("root", None, ["gpu"]),
    }


ANSWERS = {
    "squeue": lambda: text.parse_queue(said("squeue"), "t"),
    "squeue_all": lambda: [job.name for job in text.parse_queue(said("squeue"), None)],
    "sinfo": listed_nodes,
    "sinfo_in_words": in_words,
    "partitions": lambda: rules.parse_partitions(said("partitions")),
    "reservations": lambda: text.parse_reservations(said("reservations")),
    "limits": recorded_limits,
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_recorded_answer_is_read_as_the_records_beside_it(name):
    """Jobs of others and of other work folders are not ours, an array is its members, a node of several partitions is one."""
    assert plain(ANSWERS[name]()) == json.loads((RECORDED / f"{name}.json").read_text())


def parse_jobs(answer):
    return text.parse_queue(answer, None)


@given(st.sampled_from([("squeue", parse_jobs), ("sinfo", text.parse_sinfo)]), st.data())
def test_an_answer_that_is_cut_off_is_never_read_as_fewer_fields(command, data):
    """No text but a whole answer is news: neither garbage nor nothing is "no jobs", nor what breaks off in a record."""
    name, parse = command
    whole = said(name)
    ends = [i + 1 for i, c in enumerate(whole) if c == text.RECORD_END]
    cut = data.draw(st.integers(0, len(whole)) | st.sampled_from(ends))
    if whole[:cut].rstrip("\n").endswith(text.RECORD_END):
        assert (
            plain(parse("CLUSTER: c1\n" + whole[:cut]))
            == plain(parse(whole))[: ends.index(len(whole[:cut].rstrip("\n")))]
        )
    else:
        with pytest.raises(ClusterError):
            parse(whole[:cut])
    with pytest.raises(ClusterError):
        parse(data.draw(st.text(max_size=200)))


def test_a_record_that_cannot_be_read_is_no_news():
    """A node's CPUs, a job's id."""
    with pytest.raises(ClusterError, match="cannot be read"):
        text.parse_sinfo(said("sinfo").replace("/8", "/many"))
    with pytest.raises(ClusterError, match="cannot be read"):
        parse_jobs(re.sub(r"(?m)^\d+", "x", said("squeue")))


# --- single words and lines ----------------------------------------------------------------------------------------------


def node(*partitions, **options):
    """A node in these partitions, each NAME[/AVAILABLE[/STATE]], as the settings see it; None: it is not listed."""
    rows = [text.NODE_FIELDS]
    for words in partitions:
        name, up, state = (*words.split("/"), "", "")[:3]
        resources = (
            "gpu:a100:8(S:0-1)", "gpu:a100:3(IDX:0,2,5)", "none", "16/48/0/64", "512000", "12000", "(null)",
        )  # fmt: skip
        rows.append(("n1", name, up or "up", state or "idle", *resources))
    table = "".join(text.FIELD_END.join(row) + text.RECORD_END for row in rows)
    return next(iter(text.nodes_of(text.parse_sinfo(table), slurm_options(**options))), None)


NODE_SETTINGS = {"any": {}, "wake": {"nodes": {"wake": True}}, "reservation": {"reservation": "ours"}}


def usable(state):
    """In a partition that is up; in one that is down no state is usable."""
    found = {
        name: (node(f"gpu*/up/{state}", **o), node(f"gpu*/down/{state}", **o))
        for name, o in NODE_SETTINGS.items()
    }
    assert all(up and down and up.state == state and not down.usable for up, down in found.values())
    return [name for name, (up, _) in found.items() if up and up.usable]


def of_partitions(words):
    """Nothing could be staged on a node without the precursors' partition; a preemptible one is theirs, too."""
    borrow = {"best_effort": "spare"}
    found = node(*words.split(), borrow=borrow)
    excluded = node(*words.split(), borrow=borrow, slurm={"precursor": {"partition": "shared"}})
    assert found
    assert excluded
    return {
        "listed without [borrow]": node(*words.split()) is not None,
        "certain": found.usable and not found.best_effort,
        "best effort": found.best_effort,
        "excluded": excluded.excluded,
    }


def phase(words):
    state, _, reason = words.partition(" ")
    job = text.job_state(state=state, node="n1", reason=reason, job_id="1", name="a", index=0)
    return [job.phase, job.state]


def ends(words):
    error = submission_error(text.own_words(f"sbatch: error: {words}\n"))
    kinds = {RefusedError: "all", LimitError: "limit", ClusterError: "away"}
    return "node" if isinstance(error, RefusedError) and error.of_node else kinds[type(error)]


# default account, account, partition, default QOS, QOS, MaxJobs, MaxSubmit, MaxTRES, MaxTRESPerNode, GrpTRES, GrpJobs, GrpSubmit, MaxWall
OWN = """\
lab|lab||normal|normal,short|40||cpu=4||cpu=8,mem=20G|||45:00
lab|lab|debug|short|short|2|||||||
lab|other||short|short,big||||||||
"""
WALLS = {"normal": "", "short": "00:30:00", "long": "1-00:00:00"}
ACCOUNTING = accounts.Accounting(
    associations=accounts.parse_rows(OWN, accounts.USER_FORMAT),
    qos={name: {"name": name, "maxwall": wall} for name, wall in WALLS.items()},
)
RULES = rules.SiteRules(
    config={},
    partitions=rules.parse_partitions(
        "PartitionName=all Default=YES QoS=short\nPartitionName=gpu MaxTime=UNLIMITED QoS=N/A\n"
        "PartitionName=tiny MaxTime=00:01:00 QoS=N/A\nPartitionName=quick QoS=short\n"
    ),
)


def seconds_asked(words):
    """A role's own settings are for its jobs alone: the daemon's line asks for what [cluster] allows."""
    role = {"build": {"partition": "tiny", "account": "x", "qos": "y"}}
    options = slurm_options(**dict(word.split("=") for word in words.split()), slurm=role)
    job = Job(name="j", argv=("true",), log="/dev/null", time_limit_seconds=3600)
    seconds = rules.within_limits(job, options, RULES, ACCOUNTING).time_limit_seconds
    daemon = rules.within_limits(daemon_job(options), own_options(options), RULES, ACCOUNTING)
    assert min(3600, daemon.time_limit_seconds) == seconds
    return seconds


def limits(words):
    """An association with a partition holds there alone; Slurm refuses jobs of an account without the user."""
    account, qos, partition = words.split()
    found = ACCOUNTING.limits(account, qos, [partition])
    return sorted(f"{limit.name} {limit.what} {limit.most}" for limit in found if limit.what != "wall")


def refuses(words):
    (partition,) = rules.parse_partitions(f"PartitionName=gpu AllowGroups=ALL {words} QoS=N/A State=UP\n")
    return partition.refuses("lab", "normal")


def lacks(words):
    """Hidden partitions exist and are not listed."""
    shown = "PartitionName=gpu Default=YES\nPartitionName=own Hidden=YES\nPartitionName=cpu\n"
    site = rules.SiteRules(config={}, partitions=rules.parse_partitions(shown))
    return rules.unknown_partition(site, {"--partition": words, "cpu_partition": None})


def preemptible(words):
    """Jobs of these end for those of a higher tier; not without such a tier, nor under other preemption."""
    config, _, down = words.partition(", gpu ")
    lines = [f"PartitionName=gpu PriorityTier=10 PreemptMode=REQUEUE State={down.upper() or 'UP'}"]
    for name, mode in (("spare", "REQUEUE"), ("kept", "OFF"), ("paused", "SUSPEND")):
        lines.append(f"PartitionName={name} PriorityTier=1 PreemptMode={mode} State=UP")
    found = rules.SiteRules(
        config=rules.parse_config(config), partitions=rules.parse_partitions("\n".join(lines))
    )
    return sorted(found.preemptible)


DEVICES = {
    "plain": "GPU 0: NVIDIA A (UUID: GPU-aa)\nGPU 1: NVIDIA B (UUID: GPU-bb)\n",
    "slices": "GPU 0: NVIDIA A (UUID: GPU-aa)\n  MIG 1g.5gb      Device  0: (UUID: MIG-1)\n"
    "  MIG 3g.20gb     Device  1: (UUID: MIG-2)\nGPU 1: NVIDIA A (UUID: GPU-bb)\n",
}


def own_gpus(words):
    """A process sees one slice (MIG) at most, which stands in its GPU's place and is named by its UUID."""
    devices, _, visible = words.partition(" ")
    return parse_gpus(DEVICES[devices], "" if visible == "none" else visible or None)


READERS = {
    "GPUs of a Gres": text.parse_gres,
    "seconds of a time limit": text.seconds_of,
    "amounts of TRES": accounts.parse_tres,
    "phase and state of a job": phase,
    "settings under which a node's state is usable": usable,
    "a node of these partitions": of_partitions,
    "what ends a failed submission": ends,
    "a command's errors in one line": text.own_words,
    "a refusal's setting": setting_of,
    "errors of scancel about living jobs": text.not_cancelled,
    "a node's state as pyslurm has it": state_long,
    "why a partition refuses account lab and QOS normal": refuses,
    "the plug-in of a private /dev/shm": lambda words: rules.private_memory(rules.parse_config(words)),
    "a partition that the cluster lacks": lacks,
    "partitions that give way": preemptible,
    "seconds that an hour's job and the daemon's line ask for": seconds_asked,
    "limits on account, QOS and partition": limits,
    "QOS of an account": lambda words: ACCOUNTING.qos_of(words or None),
    "GPUs of this machine that CUDA_VISIBLE_DEVICES leaves": own_gpus,
}


@pytest.mark.parametrize("name", WORDS)
def test_slurms_words_mean_what_stands_beside_them(name):
    """An unknown state has not ended and is not usable; only what Slurm is known to refuse for good ends an evaluation."""
    assert {words: plain(READERS[name](words)) for words in WORDS[name]} == WORDS[name]


@given(st.text())
def test_any_text_is_read_without_harm(words):
    """Garbage names no partition that asks for a host, and never raises."""
    rules.parse_partitions(words)
    rules.parse_config(words)
    text.seconds_of(words)
