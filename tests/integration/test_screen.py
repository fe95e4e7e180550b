"""Screen mode from end to end: a copy of the reference is not worse, another model is, and most documents are never asked."""

import json
import os
import random
import shutil
import signal
import sys
from pathlib import Path

import pytest
from dev_cluster.testing import wait_until
from support.commands import typed
from support.exactness.tasks.rows import NOUNS, sentence
from support.sites import EXPORTED, Site
from support.toys import config_text
from support.toys import toy_model as tiny

import evalspan
from coordinator.errors import OperatorError
from coordinator.runtime.journal import read_events, replayed_state
from evaljobs.contract.paths import EvaluationPaths

pytestmark = pytest.mark.model
COUNT = 800
YAML = """task: nouns
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_target: label
doc_to_choice: endings
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


def write_rows(folder, labels):
    rng = random.Random(3)
    rows = [
        {
            "context": sentence(rng) + " The",
            "endings": [f" {noun}" for noun in rng.sample(NOUNS, 4)],
            "label": label,
        }
        for label in labels
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def suite(folder, name, more=""):
    task = '[[task]]\nname = "nouns"\n'
    (folder / f"{name}.toml").write_text(
        f'name = "{name}"\ninclude_path = ["."]\nbatch_size = 16\n{more}\n{task}'
    )
    return str(folder / f"{name}.toml")


@pytest.fixture(scope="module")
def training(tmp_path_factory, toy_model):
    """Checkpoints 1 (the reference, right everywhere), 2 (a copy of it) and 3 (other weights), and the suites of them."""
    folder = tmp_path_factory.mktemp("screen")
    (folder / "evalspan.toml").write_text(f'work_dir = "{folder}/work"\n{config_text()}')
    (folder / "nouns.yaml").write_text(YAML.format(rows=folder / "rows.jsonl"))
    for step, model in {1: toy_model, 2: toy_model, 3: tiny(folder, seed=8)}.items():
        shutil.copytree(model, folder / "run" / f"step-{step}")
    write_rows(folder, [0] * COUNT)
    asked = {"config": folder / "evalspan.toml", "slots": 1}
    first = evalspan.evaluate(folder / "run/step-1", suite(folder, "labels"), **asked)
    (samples,) = EvaluationPaths(first.folder).samples.glob("*.jsonl")
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    best = {
        one["doc_id"]: max(range(4), key=lambda i, o=one: float(o["filtered_resps"][i][0])) for one in lines
    }
    write_rows(folder, [best[i] for i in range(COUNT)])
    return folder, asked


@pytest.fixture(scope="module")
def screened(training):
    """Results of a screen of step 2 and of one of step 3, and the full evaluation that is their reference."""
    folder, asked = training
    screen = suite(folder, "quick", 'mode = "screen"\n[screen]\nmax_drop = 0.05')
    for step in (2, 3):  # the only full evaluation is of other labels
        with pytest.raises(OperatorError, match="was asked nouns before its files or data changed"):
            evalspan.evaluate(folder / f"run/step-{step}", screen, **asked)
    full = evalspan.evaluate(folder / "run/step-1", suite(folder, "full"), **asked)
    assert full.scores[0].value == 1.0
    return {step: run_screen(folder, step, screen) for step in (2, 3)}, full


def run_screen(folder, step, screen):
    place = folder / f"site-{step}"
    place.mkdir()
    env = {
        **os.environ,
        "EVALSPAN_CONFIG": str(folder / "evalspan.toml"),
        "EVALSPAN_CLUSTER_EXPORT": EXPORTED,
    }
    program = str(Path(sys.executable).parent / "evalspan")
    site = Site(
        lambda a: [program, *a], env, place, folder / f"run/step-{step}", Path(screen), ["--slots", "1"]
    )
    site.work = folder / "work"
    process = site.start(site.evaluate())
    if step == 3:  # the coordinator is killed during a look, and its one trial with it

        def looks():
            found = site.work.glob(f"step-{step}-quick-screen-*/journal.jsonl")
            return any(e["kind"] == "metric-enqueued" for file in found for e in site.events(file.parent))

        wait_until(lambda: process.poll() is not None or looks(), "a look is under way", 300)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        process = site.start(site.evaluate())
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return json.loads(out)["evalspan"]


def test_a_screen_stops_once_its_question_is_answered(training, screened):
    """Each look is at more whole blocks than the one before, also where the coordinator was killed during one; the estimate is of the
    last one's documents, and the interval holds the full score.
    """
    folder, asked = training
    found, _ = screened
    same, other = (found[step]["screen"]["tasks"][0] for step in (2, 3))
    assert (same["kind"], same["verdict"], other["verdict"]) == ("screen", "not worse", "worse")
    assert same["estimate"] == 1.0
    whole = evalspan.evaluate(folder / "run/step-3", suite(folder, "full"), **asked)
    assert other["low"] <= whole.scores[0].value <= other["high"]
    for step, one in ((2, same), (3, other)):
        events = list(read_events(EvaluationPaths(folder / "work" / found[step]["evaluation_id"]).journal))
        dumped = {shard for e in events if e.kind == "shards-dumped" for shard, _ in e.shards}
        planned = {shard for e in events if e.kind == "planned" for leaf in e.leaves for shard in leaf.shards}
        looks = [e.blocks for e in events if e.kind == "metric-enqueued"]
        assert looks == sorted(set(looks))
        assert one["asked"] == looks[-1] * COUNT / 20
        assert looks[-1] <= len(dumped) <= len(planned) == 20
        assert dumped <= planned
        assert replayed_state(iter(events)).entries[0].screened.asked == one["asked"]


def test_a_screen_is_mixed_with_no_full_score(training, screened, monkeypatch):
    """Not in a comparison, a gate or a curve, and never a reference."""
    folder, asked = training
    found, full = screened
    monkeypatch.chdir(folder)
    name = found[3]["evaluation_id"]
    assert "is a screen evaluation" in str(typed("compare", full.evaluation_id, name, code=1).exception)
    (folder / "p.toml").write_text('[[rule]]\ntask = "nouns"\nmax_drop = 0.1\n')
    assert "is a screen evaluation" in str(typed("gate", name, "--policy", "p.toml", code=1).exception)
    assert "is a screen evaluation" in str(
        typed("export", name, "--to", "lm-eval", "--out", "out", code=1).exception
    )
    assert "is a screen evaluation" in str(typed("rescore", name, code=1).exception)
    rows = evalspan.series(folder / "run", config="evalspan.toml", mixed=True)
    assert all(row["value"] is None for row in rows if row["evaluation_id"] == name)
    shown = typed("report", name).output
    assert f"(screen, {found[3]['screen']['tasks'][0]['asked']} of 800)" in shown
    assert "(screen, " in typed("report", "--series", "run", "--suite", "quick").output
    itself = suite(folder, "itself", f'mode = "screen"\n[screen]\nreference = "{name}"')
    with pytest.raises(OperatorError, match=f"{name} is a screen evaluation itself"):
        evalspan.evaluate(folder / "run/step-2", itself, **asked)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ('mode = "screen"\n[screen]\nreference = "nothing-1"', "there is no evaluation nothing-1"),
        ('mode = "screen"\n[screen]\nreference = "77"', "no checkpoint of step 77"),
        ('mode = "screen"\nseed = 5', "with another seed"),
        ("[screen]\nmax_drop = 0.1", r'\[screen\] is of mode = "screen"'),
        ('mode = "screen"\n[screen]\nmax_drop = 0', "max_drop"),
        ('mode = "screen"\ntoken_budget = 9', "only mode"),
    ],
)
@pytest.mark.usefixtures("screened")
def test_a_screen_that_cannot_be_answered_is_refused_in_one_line(training, more, says):
    folder, asked = training
    with pytest.raises(OperatorError, match=says) as refused:
        evalspan.evaluate(folder / "run/step-2", suite(folder, "bad", more), **asked)
    assert "\n" not in str(refused.value)
