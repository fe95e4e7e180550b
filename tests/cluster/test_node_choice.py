"""Laws of the nodes that the settings leave, of the request for GPUs, and of the options of each role."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_cluster import fake_node

from coordinator.cluster import Job, NodeState, RefusedError
from coordinator.cluster.node_choice import choose, in_hostlist, none_left, place
from coordinator.cluster.sbatch_text import (
    gpu_arguments,
)
from coordinator.config.checks import GPU_REQUEST, check_gpu_request, check_hostlist
from coordinator.config.schema import Config, NodesConfig, SlurmConfig

NUMBERS = st.integers(0, 120)


@st.composite
def entries(draw: st.DrawFn) -> tuple[str, set[str]]:
    """An entry of a hostlist, and the names that it stands for by Slurm's rules."""
    text, names = "", {""}
    for _ in range(draw(st.integers(1, 2))):
        word = draw(st.sampled_from(["n", "gpu-", "rack1n", "a.b"]))
        text, names = text + word, {name + word for name in names}
        if draw(st.booleans()):
            first, more = draw(NUMBERS), draw(st.integers(0, 12))
            written = str(first).zfill(draw(st.integers(1, 4)))
            numbers = [str(n).zfill(len(written)) for n in range(first, first + more + 1)]
            text += f"[{written}-{first + more}]" if more else f"[{written}]"
            names = {name + number for name in names for number in numbers}
    return text, names


@given(st.lists(entries(), min_size=1, max_size=3), st.data())
def test_a_hostlist_names_exactly_the_nodes_that_it_stands_for(
    drawn: list[tuple[str, set[str]]], data: st.DataObject
) -> None:
    text = check_hostlist(",".join(entry for entry, _ in drawn))
    named = set().union(*(names for _, names in drawn))
    assert all(in_hostlist(name, text) for name in named)
    near = data.draw(st.sampled_from(sorted(named)))
    other = data.draw(st.sampled_from([near + "0", near[:-1], "0" + near, re.sub(r"\d", "7", near, count=1)]))
    assert in_hostlist(other, text) == (other in named)


def test_a_hostlist_of_a_billion_nodes_costs_nothing() -> None:
    assert in_hostlist("n999999999", "n[0-999999999]")


@st.composite
def fleets(draw: st.DrawFn) -> list[NodeState]:
    kinds = st.sampled_from(["", "a100", "H100", "a100+h100"])
    features = st.lists(st.sampled_from(["nvlink", "big"]), unique=True).map(tuple)
    return [
        replace(fake_node(f"n{i}", gpus=draw(st.sampled_from([0, 4, 8]))), gpu_type=draw(kinds), features=draw(features))
        for i in range(draw(st.integers(1, 5)))
    ]  # fmt: skip


CHOICES = st.builds(
    NodesConfig,
    include=st.sampled_from([(), ("n[0-2]",), ("n0", "n4")]),
    exclude=st.sampled_from([(), ("n[1-3]",), ("n0,n9",)]),
    gpu_types=st.sampled_from([(), ("a100",), ("A100", "h100")]),
    features=st.sampled_from([(), ("nvlink",), ("nvlink", "big")]),
)


@given(fleets(), CHOICES, st.sampled_from([GPU_REQUEST, "--gres=gpu:{type}:{n}"]))
def test_a_job_that_names_no_node_avoids_exactly_the_nodes_that_are_not_offered(
    fleet: list[NodeState], choice: NodesConfig, request_: str
) -> None:
    """One decision for offers and submissions. CPU nodes are subject to `exclude` alone."""
    nodes = [choose(n, Config(nodes=choice, slurm=SlurmConfig(gpu_request=request_))) for n in fleet]
    job = Job(name="a", argv=("x",), log="/l")
    excluded = {n.name for n in nodes if n.excluded}
    assert set(place(job, nodes).exclude) == excluded
    assert set(place(replace(job, exclude=("n0",)), nodes).exclude) == {"n0", *excluded}
    assert place(replace(job, node="n0"), nodes).exclude == ()
    for node in nodes:
        assert node.usable is not bool(node.excluded)
        named = choice.exclude and any(in_hostlist(node.name, hosts) for hosts in choice.exclude)
        if not node.gpus:
            assert bool(node.excluded) == bool(named)
        elif not node.excluded:
            assert not named
            assert not choice.include or any(in_hostlist(node.name, hosts) for hosts in choice.include)
            assert not choice.gpu_types or node.gpu_type
            assert set(choice.features) <= set(node.features)
            assert "{type}" not in request_ or node.gpu_type in ("a100", "H100")


@given(fleets(), CHOICES)
def test_settings_that_leave_no_node_are_named_in_one_line_and_only_then(
    fleet: list[NodeState], choice: NodesConfig
) -> None:
    nodes = [choose(n, Config(nodes=choice)) for n in fleet]
    said = none_left(nodes)
    with_gpus = [n for n in nodes if n.gpus]
    assert bool(said) == bool(with_gpus and all(n.excluded for n in with_gpus))
    assert "\n" not in said
    for node in with_gpus if said else ():
        assert node.excluded in said


def test_the_line_says_what_the_nodes_have() -> None:
    node = replace(fake_node("n1"), gpu_type="a100", features=("nvlink",))
    untyped = replace(fake_node("n2"), gpu_type="")
    typed = [choose(n, Config(nodes=NodesConfig(gpu_types=("h100",)))) for n in (node, untyped)]
    assert none_left(typed) == (
        "[nodes] gpu_types leaves no node with GPUs; the cluster has n1 (a100, nvlink), n2 (a Gres without type)"
    )
    assert "[slurm] gpu_request" in none_left(
        [choose(untyped, Config(slurm=SlurmConfig(gpu_request="--gres=gpu:{type}:{n}")))]
    )


@given(
    n=st.integers(1, 16),
    kind=st.sampled_from(["a100", "nvidia_a100_1g.5gb"]),
    words=st.lists(
        st.sampled_from(["--gres=gpu:{n}", "--gres=gpu:{type}:{n}", "-G {n}", "--constraint='a b'"]),
        min_size=1,
        max_size=3,
    ).filter(lambda words: any("{n}" in w for w in words)),
)
def test_a_gpu_request_becomes_arguments_word_by_word(n: int, kind: str, words: list[str]) -> None:
    """Every {n} and {type} is filled in; quotation marks are a shell's."""
    template = check_gpu_request(" ".join(words))
    job = Job(name="a", argv=("x",), log="/l", gpus=n, gpu_type=kind)
    said = gpu_arguments(job, template)
    assert not any(mark in word for word in said for mark in "{}'")
    filled = " ".join(words).replace("{n}", str(n)).replace("{type}", kind).replace("'", "")
    assert " ".join(said) == filled
    assert gpu_arguments(replace(job, gpus=0), template) == []


def test_a_type_that_no_listing_names_is_the_nodes_refusal() -> None:
    """Never "--gres=gpu::2"."""
    with pytest.raises(RefusedError, match=r"\[slurm\] gpu_request .* Gres of n1 has none") as caught:
        gpu_arguments(Job(name="a", argv=("x",), log="/l", gpus=2, node="n1"), "--gres=gpu:{type}:{n}")
    assert caught.value.of_node
