"""`evalspan eval` from end to end, whole and with things killed in the middle: always lm-eval's own scores."""

import contextlib
import gzip
import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import uuid
from grp import getgrgid
from pathlib import Path

import pytest
from chaos_lib.site import SiteRedis
from dev_cluster.testing import unfinished, wait_until
from support import hub_server
from support.exactness.pipeline import Case, lm_eval_run
from support.served import server_pid
from support.sites import running
from support.toys import make_readable

from evaljobs.contract.paths import WorkPaths
from evaljobs.staging.store import HELD_LOCK, home_name, is_locked

pytestmark = pytest.mark.model


def wait(law, process=None, seconds=240):
    """Until `law` holds; fails where the process ends first or time is up."""
    ended = process.poll if process else lambda: None
    wait_until(lambda: ended() is not None or law(), "what a running evaluation does", seconds)
    assert ended() is None or law(), process and process.communicate()


def scores(results):
    return dict(results["results"])


def finish(site, process):
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, f"{out}\n{err}\n{site.logs()}"
    return json.loads(out)


def modes(work, *beside):
    """The modes of all folders, and of all files but locks, in a work folder but for the folders `beside`."""
    found = [work, *(p for p in work.rglob("*") if p.relative_to(work).parts[0] not in beside)]
    found = [p for p in found if p.suffix != ".lock"]
    wrong = {(stat.filemode(p.stat().st_mode)): str(p) for p in found if not p.is_symlink()}
    return {f"{mode} {wrong[mode]}" if mode[5] == "w" or mode[-3:] != "---" else mode for mode in wrong}


@pytest.mark.usefixtures("open_umask")
def test_local_scores_are_lm_evals_and_nothing_is_left(local_site, expected):
    """Split over slots, finished out of order: the same digits; node memory, jobs and Redis are gone afterwards. Whatever
    the umask, other users see nothing of the work folder.
    """
    done = local_site.run(local_site.evaluate("--shards-per-task", "3"))
    assert done.returncode == 0, f"{done.stderr}\n{local_site.logs()}"
    results = json.loads(done.stdout)
    assert scores(results) == expected
    assert results == local_site.results()
    assert local_site.counted_once()
    assert not (local_site.work / "redis" / "address.json").exists(), "the embedded Redis is stopped"
    digest = json.loads((local_site.root() / "evaluation.json").read_text())["checkpoint"]["digest"]
    assert not Path(f"/dev/shm/evalspan-{os.getuid()}", digest).exists(), "what others stage is theirs"
    # a second run of the same is the same evaluation: no job, the same answer
    again = local_site.run(local_site.evaluate())
    assert json.loads(again.stdout) == results
    report = local_site.run(local_site.command("report", local_site.root().name, "--json"))
    told = json.loads(report.stdout)
    assert told["status"] == "done"
    assert told["makespan_seconds"] >= told["lower_bound_seconds"] > 0
    assert sum(g["shards"] for g in told["gpus"]) == len(told["shards"])
    (staged,) = (json.loads(p.read_text()) for p in local_site.work.glob("*/outcomes/*.staged.json"))
    assert told["staged_bytes"] == staged["bytes"] > 0
    assert modes(local_site.work) == {"drwx------", "-rw-------"}


@contextlib.contextmanager
def other_host():
    """A network namespace and our address towards it: two hosts on a wire."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    tag = uuid.uuid4().hex[:6]
    name, net = f"es-{tag}", f"10.{int(tag[:2], 16)}.{int(tag[2:4], 16)}"

    def ip(words):
        subprocess.run(["ip", *words.split()], check=True, capture_output=True)

    ip(f"netns add {name}")
    try:
        ip(f"link add a{tag} type veth peer name b{tag} netns {name}")
        ip(f"addr add {net}.1/24 dev a{tag}")
        ip(f"link set a{tag} up")
        ip(f"-n {name} addr add {net}.2/24 dev b{tag}")
        ip(f"-n {name} link set b{tag} up")
        ip(f"-n {name} link set lo up")
        yield name, f"{net}.1"
    finally:
        ip(f"netns del {name}")


@pytest.mark.usefixtures("open_umask")
def test_the_round_robin_policy_and_jobs_on_another_host_give_lm_evals_scores(local_site, expected):
    """[plan] policy = "round-robin": large tasks in a piece a lane, each shard run by a trial of the lane that the plan gave it
    to. Builds, holder and trials run in another network namespace, with code copied for an interpreter of their own, and find
    Redis by its address file and password.
    """
    with other_host() as (namespace, address):
        local_site.env |= {
            "EVALSPAN_PLAN_POLICY": "round-robin",
            "EVALSPAN_SHARED_GROUP": getgrgid(os.getegid()).gr_name,
            "EVALSPAN_TRIAL_CONTAINER": f"ip netns exec {namespace}",
            "EVALSPAN_REDIS_BIND": address,
        }
        local_site.env.pop("PYTHONDONTWRITEBYTECODE", None)  # its folders are seen below
        process = local_site.start(local_site.evaluate())
        place = local_site.work / "redis" / "address.json"
        wait(place.exists, process)
        published = json.loads(place.read_text())
        assert (published["host"], bool(published["password"])) == (address, True)
        assert place.stat().st_mode & 0o077 == 0
        assert scores(finish(local_site, process)) == expected
    assert local_site.counted_once()
    closed = ("redis", "inbox")
    assert modes(local_site.work, *closed) == {"drwxr-s---", "-rw-r-----"}, (
        "its group reads, and writes nothing"
    )
    events = local_site.events()
    (plan,) = (e for e in events if e["kind"] == "planned")
    lane_of = {shard: lane["lane"] for lane in plan["lanes"] for shard, _, _ in lane["shards"]}
    assert len(set(lane_of.values())) == 2, "dealt to both slots"
    ranks = sorted(rank for lane in plan["lanes"] for _, rank, _ in lane["shards"])
    assert ranks == list(range(len(lane_of))), "one queue, dealt in its order"
    lane_of_trial = {
        lane["trial"]: lane["lane"]
        for place in local_site.root().glob("specs/*-trial-*.json")
        for lane in json.loads(place.read_text())["lanes"]
    }
    counted = [s for e in events if e["kind"] == "shards-dumped" for s in e["shards"]]
    assert {
        shard: lane_of_trial[frame["file"].removesuffix(".frames")] for shard, frame in counted
    } == lane_of


DOCS = Path(__file__).parents[2] / "docs" / "evaluating" / "own-tasks.md"
EXAMPLE = re.compile(r"""^```\w+ title="mine/([\w./]+)"\n(.*?)^```$""", re.MULTILINE | re.DOTALL)


@pytest.fixture
def suite(tmp_path):
    """The example of docs/evaluating/own-tasks.md, in a folder with a space and an umlaut."""
    folder = tmp_path / "meine Süite"
    files = dict(EXAMPLE.findall(DOCS.read_text()))
    assert files.keys() >= {"mine.toml", "tasks/capitals.yaml", "tasks/prompts.py", "tasks/data/test.jsonl"}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder / "mine.toml"


@pytest.fixture
def own(suite, toy_model, monkeypatch):
    """lm-eval's own results of it, from the folder in which its rule finds the data."""
    monkeypatch.chdir(suite.parent / "tasks")
    return scores(
        lm_eval_run(toy_model, Case(task="capitals", include_path=str(suite.parent / "tasks")), 4).results
    )


def test_a_hub_id_and_a_suite_of_ones_own_score_from_any_folder(warm_site, suite, own):
    """lm-eval's own digits, of the data beside the suite: another folder's data of the same name are not read. The evaluation
    has the model's name, and no step of a commit's hash; what was fetched is found again without the server.
    """
    site = warm_site
    decoy = site.folder / "elsewhere" / "data"
    decoy.mkdir(parents=True)
    (decoy / "test.jsonl").write_text('{"question": "no", "choices": ["a", "b", "c"], "answer": 0}\n')
    model, site.model = site.model, Path("lab/tiny-llama")
    site.suite, site.work = Path("../meine Süite/mine.toml"), site.folder / "Läufe 7b"
    cwd = f"cd {shlex.quote(str(decoy.parent))}; "
    with hub_server.serving({"lab/tiny-llama": model}) as hub:
        site.env |= {"HF_HOME": str(site.folder / "hf"), "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
        command = ["sh", "-c", cwd + shlex.join(site.evaluate())]
        done = site.run(command)
    assert done.returncode == 0, f"{done.stderr}\n{site.logs()}"
    assert "Fetching" not in done.stderr, "progress bars are a terminal's"
    assert f"lab/tiny-llama: fetching revision {hub_server.COMMIT[:8]}, " in done.stderr
    assert scores(site.results()) == own
    record = json.loads((site.root() / "evaluation.json").read_text())
    assert record["evaluation_id"].startswith("tiny-llama-")
    assert record["checkpoint"]["step"] is None
    assert site.run(command).returncode == 0, "the server is gone: the cache has it"
    assert len(list(site.work.glob("*/evaluation.json"))) == 1


def test_a_metric_that_kills_its_worker_and_one_that_hangs_cost_two_items(warm_site):
    """Each try of the score loses its worker to one item, and another hangs: both are named, the rest has a score, the exit
    code says that something lacks; once that is mended a retry scores all without a GPU."""
    site = warm_site
    site.suite.write_text(
        site.suite.read_text().partition("[[task]]")[0] + '[[task]]\nname = "toy_hostile"\n'
    )
    config = site.folder / "evalspan.toml"
    config.write_text(config.read_text().replace("[metric]", "[metric]\nitem_seconds = 1.0"))
    site.env["HOSTILE"] = "worker"
    done = site.run(site.evaluate())
    assert done.returncode == 1, f"{done.stderr}\n{site.logs()}"
    value = json.loads(done.stdout)["results"]["toy_hostile"]["letters,none"]
    told = json.loads((site.root() / "report.json").read_text())
    assert (told["status"], told["entries"][0]["unscored"]) == ("done", 2)
    assert list(site.results()["unscored"]["toy_hostile"]) == ["toy_hostile 2", "toy_hostile 5"]
    assert any("item 2 failed" in w and "processes died" in w for w in told["warnings"])
    assert any("item 5 failed" in w and "longer than 1 s" in w for w in told["warnings"])
    shown = site.run(site.command("report", site.root().name)).stdout
    assert "PARTLY toy_hostile: 2 items are left out of all means" in shown
    del site.env["HOSTILE"]
    again = site.run(site.command("retry", site.root().name))
    assert again.returncode == 0, again.stderr
    assert json.loads((site.root() / "report.json").read_text())["entries"][0]["unscored"] == 0
    assert site.results()["results"]["toy_hostile"]["letters,none"] != value
    assert "unscored" not in site.results()
    assert site.counted_once()


def test_no_secret_stands_in_a_file_of_the_work_folder(warm_site, request):
    """After a run that had secrets in each place where one can stand: variables of evalspan and its jobs, a password in an
    address, files that the prologue or evalspan reads. The site's Redis' password is for jobs in `redis/address.json` alone.
    """
    site = warm_site

    def keep(name, text):
        kept = site.folder / name
        kept.write_text(text)
        kept.chmod(0o600)
        return str(kept)

    kept = keep("token", "of-the-file-5f1c")
    redis = SiteRedis("--requirepass", "of-the-redis-8a0b")
    request.addfinalizer(redis.kill)
    site.env |= {
        "HF_TOKEN": "hf_ofthevariable7d2e",
        "WANDB_API_KEY": "of-the-tracker-9b3a",
        "OPENAI_API_KEY": "sk-ofthejudge4c8f",
        "HTTPS_PROXY": "http://someone:of-the-proxy-2e6d@127.0.0.1:9",
        "EVALSPAN_CLUSTER_EXPORT": '["HF_TOKEN", "OPENAI_API_KEY", "WANDB_API_KEY", "HTTPS_PROXY"]',
        "EVALSPAN_REDIS_URL": f"redis://127.0.0.1:{redis.port}/0",
        "EVALSPAN_REDIS_PASSWORD_FILE": keep("redis.password", "of-the-redis-8a0b"),
        "EVALSPAN_NOTIFY_WEBHOOK_FILE": keep("webhook", "https://hooks.site/services/of-the-webhook-6c3d"),
        "EVALSPAN_TRIAL_PROLOGUE": f"export OWN_TOKEN=$(cat {kept})\n{site.env['EVALSPAN_TRIAL_PROLOGUE']}",
    }
    done = site.run(site.evaluate())
    assert done.returncode == 0, f"{done.stderr}\n{site.logs()}"
    secrets = [b"of-the-file", b"ofthevariable", b"of-the-tracker", b"ofthejudge", b"of-the-proxy"]
    secrets += [b"of-the-webhook"]
    files = [path for path in site.work.rglob("*") if path.is_file()]
    assert len(files) > 20
    for path in files:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content += gzip.decompress(content)
        assert not [secret for secret in secrets if secret in content], path
        assert (b"of-the-redis" in content) == (path == site.work / "redis" / "address.json"), path
        assert b"of-the" not in os.fsencode(path)


def left_behind(site):
    """Processes that name the site's folder, and precursors' leases on its staged weights."""
    found = [" ".join(words) for pid, words, _ in running(site.folder) if pid != os.getpid()]
    for spec in site.work.glob("*/specs/*-stage-*.json"):
        home = Path("/dev/shm") / home_name(os.getuid())
        digest = json.loads(spec.read_text())["checkpoint"]["digest"]
        lock = home / digest / HELD_LOCK
        found += [str(lock)] if is_locked(lock) else []
    return found


def test_killed_it_leaves_nothing_on_this_machine_and_run_again_it_resumes(local_site, expected):
    """SIGKILL of the coordinator in mid-inference: within 10 s no job, no Redis and no staged weights are left. The next one
    runs what is left, and no more, though a trial dies by SIGKILL and Redis comes back empty. One that is started before that
    is refused in one line.
    """
    # one slot: beside a trial that stands still, another would end all
    site, command = local_site, local_site.evaluate("--shards-per-task", "4", "--slots", "1")
    site.pause_a_trial(after=2)
    first = site.start(command)
    wait(lambda: site.paused() and site.dumped() >= 2, first)
    refused = site.run(command)
    assert refused.returncode == 2
    assert re.fullmatch(r"evalspan: .* is in use by evalspan eval, .*\n", refused.stderr)
    assert any("valkey" in left for left in left_behind(site))
    assert any("/dev/shm" in left for left in left_behind(site))
    first.send_signal(signal.SIGKILL)
    first.communicate()
    wait(lambda: not left_behind(site), seconds=10)
    (site.folder / "paused").unlink()
    site.env["PAUSE_AFTER"] = "0"  # little may be left
    second = site.start(command)
    wait(site.paused, second)
    os.kill(site.paused(), signal.SIGKILL)
    os.kill(server_pid(WorkPaths(site.work)), signal.SIGKILL)
    assert scores(finish(site, second)) == expected
    assert site.counted_once()


def test_an_upgrade_in_mid_evaluation_loses_nothing_and_changes_no_digit(local_site, expected):
    """SIGKILL in mid-inference; what is left becomes a journal of the format before, in which a field had another name. The
    version after it, whose `UPCASTS` knows that, runs what is left and no more.
    """
    site = local_site
    site.pause_a_trial(after=2)
    options = ["--shards-per-task", "4", "--slots", "1"]
    first = site.start(site.evaluate(*options))
    wait(lambda: site.paused() and site.dumped() >= 2, first)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    wait(lambda: not left_behind(site), seconds=10)
    events = site.events()
    events[0]["journal_format"] -= 1
    lines = [json.dumps({"when" if key == "at" else key: e[key] for key in e}) for e in events]
    (site.root() / "journal.jsonl").write_text("\n".join(lines) + "\n")
    upgraded = (
        "from coordinator.decide.evaluation.records import JOURNAL_FORMAT; from coordinator.runtime import upcasts\n"
        "named = lambda e: {'at' if key == 'when' else key: e[key] for key in e}\n"
        "upcasts.UPCASTS = {**upcasts.UPCASTS, JOURNAL_FORMAT - 1: named}\n"
        "from coordinator.__main__ import main; main()\n"
    )
    (site.folder / "paused").unlink()
    _program, *words = site.evaluate(*options)
    site.env["PAUSE_AFTER"] = "1000"
    assert scores(finish(site, site.start([sys.executable, "-c", upgraded, *words]))) == expected
    assert site.counted_once()


@pytest.mark.slurm
def test_slurm_scores_are_lm_evals_and_nothing_is_left(slurm_site, suite, expected, own):
    """The same evaluation, with a task of the user's own beside the others, as Slurm jobs of an ordinary user: precursor, trials,
    workers; then no job, no file. The site's accounting shows no trial that did its work as cancelled.
    """
    site, cluster = slurm_site, slurm_site.cluster
    tasks = site.folder / suite.parent.name / "tasks"
    shutil.copytree(suite.parent / "tasks", tasks)
    make_readable([tasks.parent, tasks, *tasks.rglob("*")])
    text = site.suite.read_text().replace("include_path = [", f'include_path = ["{tasks}", ')
    site.suite.write_text(f'{text}[[task]]\nname = "capitals"\nbatch_size = 4\n')
    process = site.start(site.evaluate("--shards-per-task", "3"))
    seen = set()

    def look():
        listed = cluster.run_as_user(["squeue", "--noheader", "--format=%j"]).stdout.split()
        seen.update(name.split("-")[2] for name in listed if name.startswith("es-"))
        return process.poll() is not None

    wait(look)
    results = finish(site, process)
    assert scores(results) == expected | own
    assert {"build", "stage", "trial", "metric"} <= seen
    assert site.counted_once()
    assert unfinished(cluster) == []
    assert modes(site.work) == {"drwx------", "-rw-------"}, "Slurm's logs, too"
    argv = ["squeue", "--noheader", "--array", "--states=all", "--format=%j %T"]
    words = (line.split() for line in cluster.run_as_user(argv).stdout.splitlines())
    assert {state for name, state in words if "-trial-" in name} == {"COMPLETED"}, (
        "by themselves, with exit code 0"
    )
    for node in cluster.gpu_nodes:
        srun = ["srun", "--partition=gpu", f"--nodelist={node}", "--mem=100", "sh", "-c"]
        left = cluster.run_as_user([*srun, "find /dev/shm/evalspan-* -type f"])
        assert ".safetensors" not in left.stdout


def stopped_trial(site):
    """The host's pid of the trial that stands still on a node."""
    return next((pid for pid, words, state in running(site.work) if state == "T" and "trial" in words), None)


@pytest.mark.slurm
def test_a_trial_goes_on_while_the_coordinator_and_its_redis_are_gone(slurm_site, expected):
    """It dumps every shard without them; the next coordinator finds the records and runs nothing again."""
    site = slurm_site
    site.pause_a_trial(after=1)
    options = ["--shards-per-task", "3", "--slots", "1"]
    first = site.start(site.evaluate(*options))
    wait(lambda: stopped_trial(site), first)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    os.kill(stopped_trial(site) or 0, signal.SIGCONT)
    planned = sum(
        len(leaf["shards"]) for e in site.events() if e["kind"] == "planned" for leaf in e["leaves"]
    )
    wait(lambda: site.dumped() == planned)
    assert scores(finish(site, site.start(site.evaluate(*options)))) == expected
    assert site.dumped() == planned
    assert site.counted_once()
    ended = [json.loads(file.read_text()) for file in site.work.glob("*/outcomes/*.trial-ended.json")]
    assert [(e["reason"], e["shards"]) for e in ended] == [("drained", planned)]
