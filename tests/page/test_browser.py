"""Pages in a real browser: what a reader clicks, types and sees; and no text of a model or a task runs there."""

import json

import pytest
from support.browser import browsing, unavailable
from support.commands import typed
from support.serving import serving
from support.simulated.parts import Faults, record
from support.simulated.world import World
from support.trainings import leave

from coordinator.base.words import format_seconds
from coordinator.decide.evaluation.records import ScreenScore
from coordinator.results.report.render import format_bytes
from coordinator.results.report.scores import first_of_each, groups_of, scores_of, top_scores
from coordinator.results.report.stored_documents import sample_lines
from coordinator.runtime.journal import line_of
from coordinator.runtime.summary import (
    Summary,
    fields_of_record,
    read_evaluation,
    write_summary,
)
from evaljobs.contract.columns import columns_of, pack_columns
from evaljobs.contract.paths import EvaluationPaths, slug

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())

HOSTILE = '<img src=x onerror="document.title=1"></script><script>document.title=2</script>\u202e'
TASKS = [f"t{i:02d}" for i in range(40)]
DOWN, RIGHT, ENTER = "\ue015", "\ue014", "\ue007"
TRAINING = "/training?folder=%2Fruns%2Fa&suite=mini"


def _results(right):
    """Forty tasks in two groups, and one with a hostile name; of the first, `right` of fifty documents are right."""
    tasks = {t: {"acc,none": right / 50 if t == TASKS[0] else 0.5, "acc_stderr,none": 0.1} for t in TASKS}
    groups = {"evens": TASKS[::2], "odds": TASKS[1::2]}
    means = {g: {"mean,none": sum(tasks[t]["acc,none"] for t in m) / 20} for g, m in groups.items()}
    return {
        "results": {**tasks, **means, HOSTILE: {"acc,none": 0.5}},
        "groups": means,
        "group_subtasks": groups,
        "n-samples": {t: {"effective": 50} for t in TASKS[:2]},
    }


def _checkpoint(work, step, right):
    paths, results = leave(work, step, 0.5), _results(right)
    paths.results.write_text(json.dumps(results))
    parts = {}
    for number, task in enumerate(TASKS[:2]):
        lines = (
            {"doc_id": i, "doc_hash": f"h{i}", "target": "one two", "resps": [[f"one {'two' if ok else HOSTILE} three"]],
             "arguments": {"gen_args_0": {"arg_0": f"{HOSTILE} {i}?"}}, "metrics": ["acc"], "acc": float(ok), "filter": "none"}
            for i in range(50) for ok in [i < right if number == 0 else i < 25]
        )  # fmt: skip
        file = paths.samples / f"samples_{slug(task)}_000.jsonl"
        file.write_text("\n".join(map(json.dumps, lines)))
        parts[0, task] = columns_of(sample_lines(file))
    paths.documents.write_bytes(pack_columns(parts))
    paths.journal.write_text("x")
    known = read_evaluation(paths)
    scores = first_of_each(top_scores(scores_of(results), groups_of(results)))
    about = fields_of_record(known) | {
        "written_at": 1.0,
        "ended_at": 1.7e9 + step,
        "journal_bytes": 1,
        "scores": scores,
        "entries": 1,
    }
    write_summary(paths, Summary(**about, scored=1, gpu_seconds=60.0))
    return paths


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Eight checkpoints; the last one has lost thirty answers, and one more has stopped."""
    folder = tmp_path_factory.mktemp("browser") / "work"
    folder.mkdir(mode=0o700)
    for step in range(1, 9):
        _checkpoint(folder, step, 45 if step < 8 else 15)
    world = World(0, Faults(), record(60))
    world.run_to_scores()
    stopped = EvaluationPaths(folder / "stopped")
    stopped.root.mkdir()
    stopped.journal.write_bytes(b"".join(map(line_of, world.journal[: len(world.journal) // 2])))
    stopped.root.rename(folder / world.state.evaluation_id)
    return folder


@pytest.fixture(scope="module")
def served(work):
    with serving("--work-dir", str(work)) as found:
        yield found


@pytest.fixture(scope="module")
def browser(served):
    with browsing() as found:
        found.open(f"http://{served.host}:{served.port}/?token={served.token}")
        yield found


@pytest.fixture
def page(browser, served):
    """No page may complain, load from elsewhere, or run what a model said."""
    home = f"http://{served.host}:{served.port}"
    browser.home = home
    browser.open(home)
    yield browser
    assert browser.complaints() == []
    assert browser.run("document.title.length > 1")
    assert (
        browser.run(
            "performance.getEntriesByType('resource').filter((r) => !r.name.startsWith(location.origin)).length"
        )
        == 0
    )


def _id(work, step):
    return next(p.name for p in work.glob(f"step-{step}-*"))


def test_the_first_page_shows_trainings_then_evaluations_that_a_filter_keeps_in_the_address(page):
    page.until("document.querySelector('.card')")
    card = page.text("#trainings")
    assert "step 8" in card
    assert "stopped since" in card
    assert "evalspan daemon" in card
    assert "worse: t00/acc" in card
    assert page.run("document.querySelectorAll('#evaluations tbody tr').length") == 9
    page.run(
        "(() => { const s = document.querySelector('#evaluations select'); s.value = 'stopped'; s.dispatchEvent(new Event('change')); })()"
    )
    assert page.run("document.querySelectorAll('#evaluations tbody tr').length") == 1
    page.driver.refresh()
    page.until("document.querySelectorAll('#evaluations tbody tr').length === 1")


def test_two_boxes_lead_to_what_flipped_and_a_task_to_its_samples(page, work):
    for step in (7, 8):
        page.click(f'[aria-label="compare {_id(work, step)}"]')
    page.click("#evaluations .button")
    page.until("document.querySelector('#changes tbody')")
    assert "Alone, 1 score is worse and 0 better." in page.text(".head")
    first = page.text("#changes tbody tr").split()
    assert first[:5] == ["t00", "acc", "+0", "\u221230", "\u221230"]
    page.click("#changes tbody a")
    page.until("document.querySelectorAll('.sample').length === 30")
    page.press("body", "n")
    page.press("body", "n")
    page.until("document.querySelector('.sample[open] mark')")
    assert "#16" in page.text(".sample[open]")
    assert (
        page.run(
            "[...document.querySelectorAll('.sample[open] mark')].map((m) => m.textContent.trim()).at(0)"
        )
        == "two"
    )
    assert "task=t00" in page.driver.current_url
    assert "sample=16" in page.driver.current_url
    page.press("body", "p")
    page.until("document.querySelector('.sample[open]').innerText.includes('#15')")


def test_the_heatmap_is_one_stop_of_the_tabulator_where_keys_choose_and_open(page, work):
    page.open(page.home + TRAINING)
    page.run(
        "renew({ data: JSON.parse(document.getElementById('data').textContent), blocks: {} })"
    )  # newer data
    page.until("document.querySelector('.heat-box td')")
    assert page.run("document.querySelectorAll('.heat-box [tabindex], .heat-box a').length") == 0
    rows = page.run("document.querySelectorAll('.heatmap tbody tr').length")
    page.press(".heat-box", DOWN, DOWN, DOWN, ENTER)  # all tasks, the one in no group, a group
    assert page.run("document.querySelectorAll('.heatmap tbody tr').length") > rows
    assert page.run("document.querySelectorAll('.heatmap tbody tr').length") < 40
    page.press(".heat-box", *[DOWN] * 4)
    assert page.run(
        "document.querySelector('.heatmap .chosen').getBoundingClientRect().bottom <= document.querySelector('.detail').getBoundingClientRect().top + 1 || document.querySelector('.detail').getBoundingClientRect().bottom <= document.querySelector('.heatmap .chosen').getBoundingClientRect().top + 1"
    )
    assert " at 8: " in page.text(".detail")
    page.press(".heat-box", ENTER)
    page.until(f"location.pathname.endsWith('{_id(work, 8)}')")
    assert "over 2 of 41 tasks, worse: t00/acc)" in page.until("document.querySelector('.head')?.innerText")
    page.press("body", "e")  # the earlier checkpoint
    page.until(f"location.pathname.endsWith('{_id(work, 7)}')")


def test_one_cursor_stands_over_all_charts_and_opens_an_evaluation(page, work):
    page.open(page.home + TRAINING + "#smooth=0.6&steps=log")
    page.until("document.querySelectorAll('.plot .u-over').length === 4")
    page.press("#curves .grid", RIGHT, "\ue012")  # to the last one, then the one before
    said = page.until(
        "(([...all]) => all.every((r) => r.innerText.startsWith('at 7')) && all.length)(document.querySelectorAll('.readout'))"
    )
    assert said == 4  # of what fell, and the means
    page.press("#curves .grid", ENTER)
    page.until(f"location.pathname.endsWith('{_id(work, 7)}')")


def test_a_dead_coordinator_is_seen_in_the_head_with_what_to_type(page):
    page.click(".card .stopped a")
    page.until("document.querySelector('.head.stopped')")
    assert "stopped since" in page.text(".head")
    assert "evalspan daemon" in page.text(".head")


def test_a_page_says_durations_and_sizes_as_the_terminal_does(page):
    for value in (0.04, 0.96, 99.4, 99.96, 100, 3599.9, 3600, 90061.5):
        assert page.run(f"seconds({value})") == format_seconds(value)
    for count in (0, 999, 1000, 1_234_567, 5_000_000_000, 2_345_000_000_000):
        assert page.run(f"bytes({count})") == format_bytes(count)


@pytest.mark.parametrize(
    "words", [["report", "ID8"], ["report", "--series", "/runs/a"], ["compare", "ID7", "ID8"]], ids=" ".join
)
def test_a_page_as_a_file_runs_nothing_of_a_model_and_complains_of_nothing(browser, work, tmp_path, words):
    ids = {"ID7": _id(work, 7), "ID8": _id(work, 8)}
    file = tmp_path / "p.html"
    typed(*(ids.get(w, w) for w in words), "--work-dir", work, "--html", file)
    browser.open(f"file://{file}")
    browser.until("document.querySelector('main section') && document.body.innerText.includes('onerror')")
    assert browser.run("document.querySelectorAll('main img, main script').length") == 0
    assert browser.run("document.title.length > 1")
    assert browser.run("performance.getEntriesByType('resource').length") == 0
    assert browser.complaints() == []


@pytest.mark.parametrize("width", [1280, 390])
def test_a_screens_table_says_what_report_says_and_fits_a_phone(browser, tmp_path, width):
    """Estimate, documents and verdict of each task are in view, whatever the answer; the question is above them."""
    shown = [
        ScreenScore(task=f"t_{verdict[:3]}", verdict=verdict, metric="acc,none", asked=asked, documents=8000, reference=0.6981,
                    estimate=0.6, low=0.58, high=0.61)
        for verdict, asked in (("worse", 400), ("not worse", 1200), ("open", 8000))
    ]  # fmt: skip
    about = {
        "reference": "step-1-full-00000001",
        "max_drop": 0.02,
        "tasks": [one.model_dump() for one in shown],
    }
    (tmp_path / "work").mkdir(mode=0o700)
    paths = _checkpoint(tmp_path / "work", 2, 45)
    paths.results.write_text(json.dumps({"results": {}, "evalspan": {"screen": about}}))
    file = tmp_path / "p.html"
    words = ["report", paths.root.name, "--work-dir", paths.root.parent]
    typed(*words, "--html", file)
    said = typed(*words).output
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        browser.open(file.as_uri())
        browser.until("document.querySelectorAll('#scores tbody tr').length == 3")
        text = browser.text("#scores")
        ends = browser.run(
            "Math.max(...[...document.querySelectorAll('#scores td')].map((c) => c.getBoundingClientRect().right))"
        )
    finally:
        browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert ends <= width
    assert "lower by more than 0.02 than that of step-1-full-00000001" in text
    for one, verdict in zip(
        shown, ("worse by 0.02", "not worse by 0.02", "open: lower, perhaps by chance"), strict=True
    ):
        for part in (one.task, "0.6000 ± 0.0200", f"{one.asked:,} of 8,000", verdict):
            assert part in text.replace("\u200b", "")
            assert part in said
