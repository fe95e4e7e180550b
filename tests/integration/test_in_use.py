"""Evaluations in use: both modes and batches that fit no GPU, what people remove meanwhile, and what `status` and `watch` say."""

import json
import os
import re
import shlex
import shutil
import signal
from pathlib import Path

import pytest
from cli.terminal import Terminal
from dev_cluster.testing import wait_until
from support import sites
from support.completions_server import completions_server
from support.toys import cluster_tasks, suite_text
from support.trials import on_a_small_gpu

pytestmark = pytest.mark.model
TOKENS = 600  # of a forward pass that the small GPU takes: a few rows of these tasks


def write_suite(site, **more):
    """Two toy tasks; `more`: settings of the first."""
    tasks = {"toy_choice": {"limit": 40, **more}, "toy_sums": {"limit": 4}}
    site.suite.write_text(suite_text("modes", tasks, batch_size=64))


def evaluated(site, *more, code=0):
    done = site.run(site.evaluate(*more))
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}\n{site.logs()}"
    return dict(json.loads(done.stdout))


def test_check_fast_sets_both_modes_side_by_side(warm_site):
    """N documents of each task twice; likelihoods within 1e-3, the same argmax, the same generated answers."""
    write_suite(warm_site)
    made = evaluated(warm_site, "--check-fast", "6")
    assert list(made["evaluations"]) == ["exact", "fast"]
    assert "-fast-" in made["evaluations"]["fast"]
    choice, sums = made["tasks"]
    assert (choice["task"], choice["documents"], choice["argmax"]) == ("toy_choice", 6, 0)
    assert choice["worst"] <= 1e-3
    assert (sums["documents"], sums["answers"], sums["worst"]) == (6, 0, None)
    assert all(score["exact"] is not None and score["fast"] is not None for score in made["scores"])
    said = {
        mode: json.loads((warm_site.work / name / "results.json").read_text())["evalspan"]
        for mode, name in made["evaluations"].items()
    }
    assert [(said[mode]["mode"], said[mode]["token_budget"]) for mode in said] == [
        ("exact", None),
        ("fast", 8192),
    ]
    # the same requests, and none of one mode's answers for the other
    assert said["exact"]["keys"] == said["fast"]["keys"]
    assert said["fast"]["responses_from"] == {}


def test_an_exact_batch_too_large_for_the_gpu_says_the_size_that_works(warm_site):
    """The other task is scored; with what the error says, the task is scored too, and nothing else is run again."""
    write_suite(warm_site)
    warm_site.env |= on_a_small_gpu(TOKENS, warm_site.env)
    found = evaluated(warm_site, code=1)
    assert found["failed"].keys() == {"toy_choice"}
    error = found["failed"]["toy_choice"]
    assert "batch_size = 64" in error
    fits = error.split("set batch_size = ")[1].split(" in [[task]]")[0]
    assert "toy_sums" in found["results"]
    write_suite(warm_site, batch_size=fits)
    found = evaluated(warm_site)
    assert found["evalspan"]["cuts"] == {"toy_choice": fits}
    assert found["evalspan"]["responses_from"].keys() == {"toy_sums"}


# --- what people remove meanwhile ------------------------------------------------------------------------------------


@pytest.fixture
def site(tmp_path, toy_model, warm):
    made = sites.local(tmp_path, toy_model, "--slots", "2", entries=sites.WATCHED)
    made.env["EVALSPAN_TRIAL_PROLOGUE"] = warm
    yield made
    made.end_workers()


def paused(site):
    """An evaluation one of whose trials stands still after its first shard."""
    site.pause_a_trial(after=1)
    process = site.start(site.evaluate("--shards-per-task", "3"))
    wait_until(lambda: site.paused() is not None or process.poll() is not None)
    return process


def go_on(site):
    pid = site.paused()
    os.kill(pid, signal.SIGCONT)


def remove_while_written(folder):
    """Files that the running evaluation writes meanwhile go with it."""

    def removed():
        shutil.rmtree(folder, ignore_errors=True)
        return not folder.exists()

    wait_until(removed)


def test_request_sets_removed_below_an_open_evaluation_are_built_again(site, watched):
    process = paused(site)
    shutil.rmtree(site.work / "request_sets")
    go_on(site)
    _, said = process.communicate(timeout=240)
    assert process.returncode == 0, said
    assert site.results()["results"] == watched


def test_a_work_folder_removed_below_an_evaluation_ends_it_in_one_line(site):
    """Exit code 3; nothing of it lives on, and the same command evaluates in a new folder."""
    process = paused(site)
    trial = site.paused()
    remove_while_written(site.work)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 3, said
    assert said.splitlines()[-1].startswith(f"evalspan: the work folder {site.work} was removed")
    assert "Traceback" not in said
    wait_until(lambda: not Path(f"/proc/{trial}").exists())
    again = site.run(site.evaluate("--limit", "2"))
    assert again.returncode == 0, again.stderr


# --- what `status` and `watch` say -----------------------------------------------------------------------------------

REASON = re.compile(r"pending for .*: .*\((Resources|Priority)\)")


@pytest.mark.slurm
def test_status_says_why_slurm_keeps_jobs_pending(slurm_site):
    """Also where only the command line of `eval` named the cluster: stage, reason in words, Slurm's own word."""
    cluster = slurm_site.cluster
    for partition, nodes in (("gpu", 2), ("cpu", 1)):
        more = [f"--partition={partition}", f"--nodes={nodes}", "--exclusive", "--wrap=sleep 600"]
        cluster.run_as_user(["sbatch", "--output=/dev/null", *more])
    running = slurm_site.start(slurm_site.evaluate())
    try:

        def waits():
            told = json.loads(slurm_site.run(slurm_site.command("status", "--json")).stdout)["evaluations"]
            return any(row["stage"] == "waits" and REASON.search(str(row["waits_for"])) for row in told)

        wait_until(waits, "a job is pending, with its reason")
        shown = slurm_site.run(slurm_site.command("status")).stdout
        assert REASON.search(" ".join(shown.split())), shown
        assert "daemon: not running; evalspan eval, pid" in shown
    finally:
        cluster.run_as_user(["scancel", "--user", cluster.user])
        running.send_signal(signal.SIGINT)
        running.communicate(timeout=120)


@pytest.mark.slurm
def test_a_cpu_job_evaluates_what_a_server_serves(slurm_site, toy_model, expected):
    """With --cluster local inside it, as docs/evaluating/endpoint.md says: no other job is submitted, and no GPU is held."""
    cluster, out = slurm_site.cluster, slurm_site.folder / "out.json"
    tasks = ["--tasks", "toy_choice", "--include_path", str(cluster_tasks(cluster)), "--batch_size", "8"]
    with completions_server(toy_model) as (address, _):
        served = ["--cluster", "local", "--model", "local-completions", "--model_args"]
        served += [f"base_url={address},model=tiny", "--work-dir", str(slurm_site.work), "--json"]
        line = [str(cluster.python), "-m", "coordinator", "eval", str(slurm_site.model), *tasks, *served]
        batch = ["sbatch", "--wait", "--partition=cpu", "--mem=4000", f"--output={out}", f"--error={out}.err"]
        done = slurm_site.run(cluster.user_argv([*batch, "--wrap", shlex.join(line)]), timeout=400)
    assert done.returncode == 0, Path(f"{out}.err").read_text() + slurm_site.logs()
    found = json.loads(out.read_text())["results"]["toy_choice"]
    assert found["acc,none"] == expected["toy_choice"]["acc,none"]
    jobs = cluster.run_as_user(["squeue", "--noheader", "--states=all", "--format=%j"], check=True).stdout
    assert f"es-{slurm_site.root().name.rpartition('-')[2]}" not in jobs


def test_watch_stays_up_with_the_last_scores_and_ends_in_a_pipe(site):
    """In a pipe once nothing runs, with the scores in the last line but one; at a terminal until Ctrl-C."""
    daemon = site.start(site.command("daemon"))
    try:
        wait_until(lambda: json.loads(site.run(site.command("status", "--json")).stdout)["daemon"])
        asked = ["submit", str(site.model), "--suite", str(site.suite)]
        name = site.run(site.command(*asked)).stdout.strip()
        wait_until((site.work / name / "journal.jsonl").exists)
        piped = site.run(site.command("watch"))
        assert piped.returncode == 0
        *_, ended, last = piped.stdout.splitlines()
        assert re.search(rf"{name}: ended, 2/2 scored: toy_\w+ \w+ \d", ended), piped.stdout
        assert last.startswith("nothing is running")
        watch = Terminal(site.folder, "watch")
        watch.until(lambda: "daemon: running" in watch.said, "the screen")
        watch.said = ""
        watch.type("\x03")
        assert watch.ends() == 0
        assert name in watch.said
        assert "toy_choice acc" in watch.said
    finally:
        daemon.send_signal(signal.SIGTERM)
        daemon.communicate(timeout=120)
    stopped = site.run(site.command("watch"))
    assert "no evaluation is running" in stopped.stdout
