"""Pages of the largest sizes that are promised, in a real Chromium: bytes, first view, clicks, and what must not happen.

    scripts/bench_pages [--shots FOLDER] [--axe axe.min.js] [--page FILE …]

Needs Chromium and `pip install playwright`. `--page`: also these pages. For each page, in light and dark, 1280 and 400
pixels wide: requests, console errors, sideways scrolling, and with --axe serious violations of axe-core, must be none;
so must faults of a walk by keyboard and of a print, in dark.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

from bench.harness import Options, command, option
from coordinator.page import html, samples

TRAININGS, CHECKPOINTS, TASKS, SHARDS, SAMPLES = 25, 20, 60, 7000, 30_000
NODES, GPUS = 32, 8
HOSTILE = '<img src=x onerror="alert(1)"></script><script>alert(2)</script>\x1b[31m\u202e'
CLICKS = {
    "training": {
        "a cell": "document.querySelector('td.heat').click()",
        "another training": "pick('#heatmap select', 3)",
        "a training less": "document.querySelector('.legend input').click()",
        "find a task": "type('#curves input[type=search]', '_1')",
        "sort": "document.querySelector('#cost th:nth-child(6) button').click()",
    },
    "evaluation": {
        "only wrong samples": "pick('#samples .tools label:nth-child(2) select', 'wrong')",
        "find text": "type('#samples input', 'people')",
        "a sample": "document.querySelector('.sample summary').click()",
        "sort": "document.querySelector('#scores th:nth-child(3) button').click()",
    },
}
TIMED = """() => {
  const pick = (where, value) => { const s = document.querySelector(where); s.value = value; s.dispatchEvent(new Event('change')); };
  const type = (where, value) => { const s = document.querySelector(where); s.value = value; s.dispatchEvent(new Event('input')); };
  const began = performance.now();
  CODE;
  document.body.offsetHeight;
  return Math.round(performance.now() - began);
}"""
FOCUSED = """() => {
  const at = document.activeElement, box = at.getBoundingClientRect(), look = getComputedStyle(at);
  if (at === document.body) return null;
  at.dataset.reached = '';
  const seen = look.outlineStyle !== 'none' && box.height > 0 && box.bottom > 0 && box.top < innerHeight;
  return { name: `${at.tagName} ${(at.getAttribute('aria-label') ?? at.textContent).slice(0, 40)}`, seen };
}"""
UNREACHED = """() => [...document.querySelectorAll('a[href], button, select, input, summary, [tabindex]')]
  .filter((e) => e.checkVisibility({ contentVisibilityAuto: true }) && !e.closest('details:not([open]) > :not(summary)') && e.dataset.reached === undefined)
  .map((e) => `${e.tagName} ${e.textContent.slice(0, 40)}`)"""
PAPER_FAULTS = """() => {
  const faults = new Set(), words = [...document.querySelectorAll('main th, main td.heat')].filter((e) => e.checkVisibility());
  if (getComputedStyle(document.body).backgroundColor !== 'rgb(255, 255, 255)') faults.add('the paper is dark');
  for (const e of words) if (!e.innerText.trim() && e.textContent.trim()) faults.add(`${e.textContent} is missing`);
  for (const e of document.querySelectorAll('.bars th')) if (e.clientWidth < 60) faults.add(`${e.textContent} is ${e.clientWidth} pixels wide`);
  for (const e of document.querySelectorAll('main tr, main canvas')) if (e.checkVisibility() && e.getBoundingClientRect().right > innerWidth) faults.add(`cut off: ${e.textContent.slice(0, 40)}`);
  return [...faults].slice(0, 5);
}"""
PAPER_WIDTH = 718  # pixels of A4 within a browser's margins
MOST_STOPS = 1500  # of the Tab key: 1,200 cells of a table of 60 tasks and 20 checkpoints
SAMPLES_MS = 1500  # until the first task's samples are there
BETWEEN_MS = 300  # between two clicks


def training_page(dice: random.Random) -> str:
    steps = [1000 * (i + 1) for i in range(CHECKPOINTS)]
    return html.page(
        "trainings",
        {
            "kind": "training",
            "price": 2.1,
            "trainings": [
                {
                    "name": f"run-{t:02d}", "folder": f"/runs/{t}", "suite": "core", "superseded": 0,
                    "points": [[f"step-{s}-core-{t:02d}{s:06d}", str(s), s, "done", "exact", 1.7e9 + s, 600.0, 4800.0, 2.8] for s in steps],
                    "curves": [_curve(dice, t, k) for k in range(TASKS)],
                }
                for t in range(TRAININGS)
            ],
        },
    )  # fmt: skip


def _curve(dice: random.Random, training: int, task: int) -> dict[str, Any]:
    values = [
        round(0.3 + 0.4 * (1 - 2.7 ** (-i / 8)) + dice.gauss(0, 0.01) + training * 0.002, 6)
        for i in range(CHECKPOINTS)
    ]
    return {
        "task": f"benchmark_{task:02d}", "measure": "acc", "up": True, "at": list(range(CHECKPOINTS)), "value": values,
        "stderr": [0.012] * CHECKPOINTS, "marks": ["!" if dice.random() < 0.02 else "" for _ in values], "documents": [1000] * CHECKPOINTS,
    }  # fmt: skip


def evaluation_page(dice: random.Random, name: str = "evaluation", text: str = "") -> str:
    """`text`: stands for names, errors and answers."""
    tasks = [f"benchmark_{k:02d}{text}" for k in range(TASKS)]
    index, blocks = samples.blocks_of({task: _samples(dice, text) for task in tasks})
    about = {
        "id": f"step-1000-core-1a2b3c4d{text}", "checkpoint": f"/runs/7b/step-1000{text}", "step": 1000, "suite": "core", "mode": "exact",
        "token_budget": None, "status": "done", "accepted_at": 1.7e9, "makespan": 610.0, "predicted": 580.0, "bound": 570.0, "ratio": 1.07,
        "paused": 0.0, "waited": 0.0, "limited": 0.0, "policy": "evalspan", "gpu_seconds": 150_000.0, "busy": 0.9, "cost": 88.0,
        "staged_bytes": 14 * 10**9 * NODES, "storage_bytes": 14 * 10**9 * NODES, "tokens": None, "judge": None, "reused": {},
    }  # fmt: skip
    data = {
        "kind": "evaluation", "about": about, "stages": {"inference": 550.0, "staging": 30.0},
        "warnings": [text] if text else [], "entries": [[task, "scored", "", 0] for task in tasks], "unscored": {},
        "scores": [[task, "acc", 0.5, 0.01, True, 1000, 5, "1.0"] for task in tasks],
        "causes": {"infer": 140_000.0, "imports": 3000.0, "load": 4000.0, "warm": 500.0, "dump": 500.0, "wait": 1000.0, "other": 1000.0},
        "lanes": [[f"es-trial-n{n:02d}.{g}", f"node{n:02d}", 1, "NVIDIA A100", 20.0, 590.0, 40.0, 27, "drained"] for n in range(NODES) for g in range(GPUS)],
        "shards": _shards(dice, tasks), "jobs": [["score", task, 400.0 + i, 2.0, i % 8] for i, task in enumerate(tasks)],
        "nodes": [[f"node{n:02d}", "shm", "NVIDIA A100", 14 * 10**9, 14 * 10**9, 30.0, None, ""] for n in range(NODES)],
        "standing": [[f"node{n:02d}", "withdrawn" if n == 7 else "ready", text or "drained" if n == 7 else "", None] for n in range(NODES)],
        "notes": [[60.0, "node07", f"withdrawn: {text or 'drained'}", True]], "logs": [["job", text or "line"]], "samples": index,
    }  # fmt: skip
    return html.page(name, data, blocks)


def _shards(dice: random.Random, tasks: list[str]) -> dict[str, list[Any]]:
    each = SHARDS // (NODES * GPUS)
    rows = [
        (lane, 60.0 + i * 540 / each, dice.lognormvariate(2.8, 0.3))
        for lane in range(NODES * GPUS)
        for i in range(each)
    ]
    return {
        "tasks": tasks, "task": [dice.randrange(len(tasks)) for _ in rows], "name": ["0|16" for _ in rows], "lane": [r[0] for r in rows],
        "begin": [round(r[1], 3) for r in rows], "seconds": [round(min(r[2], 540 / each), 3) for r in rows], "predicted": [18.0 for _ in rows],
    }  # fmt: skip


def _samples(dice: random.Random, text: str) -> Iterator[str]:
    words = [
        "the",
        "people",
        "of",
        "a",
        "town",
        "say",
        "that",
        "rain",
        "comes",
        "when",
        "wind",
        "turns",
        "to",
        "the",
        "north",
        "and",
        "knows",
        "why",
        "it",
        "does",
        "so",
    ]
    for i in range(SAMPLES // TASKS):
        prompt = text + " ".join(dice.choices(words, k=150))
        answer = text + " ".join(dice.choices(words, k=80)) + ("A" * 1_000_000 if text and i == 0 else "")
        yield json.dumps(
            {"doc_id": i, "arguments": {"gen_args_0": {"arg_0": prompt, "arg_1": {}}}, "resps": [[answer]], "filtered_resps": [answer],
             "target": prompt[:80], "metrics": ["acc"], "acc": float(dice.random() < 0.6), "filter": "none", "doc_hash": "ab"}
        )  # fmt: skip


def looked_at(browser: Browser, file: Path, shots: Path | None, axe: str) -> dict[str, Any]:
    """What a person and a machine see of one page."""
    faults: list[str] = []
    first: list[float] = []
    for theme in ("light", "dark"):
        for width in (1280, 400):
            context = browser.new_context(
                viewport={"width": width, "height": 900}, color_scheme=theme, bypass_csp=bool(axe)
            )  # type: ignore[arg-type]
            page = context.new_page()
            _listen(page, faults)
            page.goto(file.as_uri())
            page.wait_for_timeout(800)
            first.append(page.evaluate("performance.getEntriesByType('paint')[0].startTime"))
            if page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"):
                faults.append(f"scrolls sideways at {width}")
            if axe:
                page.evaluate(axe)
                found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
                faults += [f"axe: {v['id']}" for v in found if v["impact"] in ("serious", "critical")]
            if theme == "dark":
                faults += by_keyboard(page) + on_paper(page)
                page.emulate_media(media="screen")
            if shots is not None:
                page.screenshot(path=shots / f"{file.stem}-{theme}-{width}.png")
            context.close()
    return {
        "bytes": file.stat().st_size,
        "first_view_ms": sorted(map(round, first)),
        "faults": sorted(set(faults)),
    }


def by_keyboard(page: Page) -> list[str]:
    """Faults of a walk with the Tab key: stops that are not seen, actions that it does not reach."""
    page.wait_for_timeout(SAMPLES_MS)
    found = []
    for _ in range(MOST_STOPS):
        page.keyboard.press("Tab")
        stop = page.evaluate(FOCUSED)
        if stop is None:
            return found + [f"no Tab reaches {name}" for name in page.evaluate(UNREACHED)]
        found += [f"focus is not seen at {stop['name']}"] * (not stop["seen"])
    return [*found, "Tab never leaves the page"]


def on_paper(page: Page) -> list[str]:
    """Faults of a print from this browser: dark paper, headings that are missing, text a letter wide, rows beyond the edge."""
    size = page.viewport_size
    page.set_viewport_size({"width": PAPER_WIDTH, "height": 1000})
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    found: list[str] = page.evaluate(PAPER_FAULTS)
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    if size is not None:
        page.set_viewport_size(size)
    return [f"on paper: {fault}" for fault in found]


def _listen(page: Page, faults: list[str]) -> None:
    page.on("console", lambda m: faults.append(f"console: {m.text}") if m.type == "error" else None)
    page.on("pageerror", lambda error: faults.append(f"error: {error}"))
    page.on("dialog", lambda dialog: (faults.append("a dialog was opened"), dialog.dismiss()))
    page.on(
        "request",
        lambda r: (
            None if r.url.startswith(("file:", "data:", "blob:")) else faults.append(f"request: {r.url}")
        ),
    )


def clicks(browser: Browser, file: Path) -> dict[str, int]:
    """Milliseconds until the page has changed after each click."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(file.as_uri())
    kind = page.evaluate("DATA.kind")
    if kind == "evaluation":
        page.evaluate("document.querySelector('#part-samples').scrollIntoView()")
    page.wait_for_timeout(2500)
    found: dict[str, int] = {}
    for name, code in CLICKS.get(kind, {}).items():
        found[name] = page.evaluate(TIMED.replace("CODE", code))
        page.wait_for_timeout(BETWEEN_MS)
    page.close()
    return found


def measure(options: Options) -> tuple[dict[str, Any], bool]:
    dice, axe = random.Random(0), options.axe.read_text() if options.axe else ""
    made = {
        "training": training_page(dice),
        "evaluation": evaluation_page(dice),
        "hostile": evaluation_page(dice, HOSTILE, HOSTILE),
    }
    out: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as play:
        files = [Path(folder) / f"{name}.html" for name in made]
        for file, text in zip(files, made.values(), strict=True):
            file.write_text(text)
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for file in (*files, *options.page):
            out[file.stem] = looked_at(browser, file, options.shots, axe)
            if file in files:
                out[file.stem]["click_ms"] = clicks(browser, file)
        browser.close()
    return out, not any(page["faults"] for page in out.values())


if __name__ == "__main__":
    raise SystemExit(
        command(
            "bench_pages",
            __doc__,
            measure,
            option("--shots", None, "folder for screenshots", type=Path),
            option("--axe", None, "axe.min.js of npm's axe-core", type=Path),
            option("--page", (), "further pages", type=Path, nargs="*"),
        )
    )
