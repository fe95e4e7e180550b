"""Pictures that are drawn by hand: a node's time line, the way to an exact score, the loop of the coordinator."""

from __future__ import annotations

from pictures.svg import EDGE, WIDTH, Picture


def staging() -> str:
    """staging.md: two checkpoints in a row on one node with two GPUs."""
    picture = Picture(
        "A node's time line, from a precursor to the release of the weights",
        "A precursor with one CPU and no GPU copies step 1000 into the node's memory and then holds it. Trials on two GPUs "
        "load from memory and infer. Meanwhile a second precursor prefetches step 2000. When the last shard of step 1000 is "
        "on disk, its weights leave the memory, and trials of step 2000 start at once. CPU workers score step 1000 later on.",
    )
    left, unit = 106.0, 4.36

    def at(time: float) -> float:
        return left + time * unit

    def bar(y: float, begin: float, end: float, cls: str, text: str = "") -> None:
        picture.rect(at(begin), y, (end - begin) * unit - 1, 22, cls, corner=3)
        if text:
            picture.text((at(begin) + at(end)) / 2, y + 15.5, text, "s", anchor="middle")

    colours = (
        ("green", "step 1000"),
        ("purple", "step 2000"),
        ("orange", "load"),
        ("grey", "jobs of others"),
    )
    picture.legend(EDGE, 24, colours)
    for y, name, more in (
        (46, "precursors", "1 CPU, no GPU"),
        (102, "/dev/shm", "of the node"),
        (188, "GPU 0", ""),
        (216, "GPU 1", ""),
        (256, "CPU workers", ""),
    ):
        picture.text(EDGE, y + 16, name, "b")
        picture.text(EDGE, y + 32, more, "s soft")
    bar(46, 2, 20, "green", "copy, hash")
    bar(46, 20, 63, "green", "holds the copy by a lock")
    bar(70, 34, 52, "purple", "prefetch")
    bar(70, 52, 100, "purple", "holds the copy")
    for cls, base, begin, full, end in (("green", 134, 2, 20, 63), ("purple", 170, 34, 52, 100)):
        corners = ((begin, base), (full, base - 30), (end, base - 30), (end + 3 * (end < 100), base))
        picture.area(cls, *((at(time), y) for time, y in corners))
    picture.text(at(41), 124, "weights, once a node", "s", anchor="middle")
    picture.text(at(76), 160, "weights of the next checkpoint", "s", anchor="middle")
    for y, free, end in ((188, 16, 62), (216, 19, 59)):
        bar(y, 0, free, "grey", "other job")
        bar(y, 21, 26, "orange")
        bar(y, 26, end, "green", "trial: shard by shard")
        bar(y, end + 4, end + 9, "orange")
        bar(y, end + 9, 100, "purple", "next trial")
    bar(256, 40, 84, "green", "run programs, score")
    for time, lines in (
        (20, ("manifest written:", "trials may read")),
        (63, ("last shard on disk:", "weights released")),
    ):
        picture.line(at(time), 40, at(time), 292, "dash strong")
        picture.lines(at(time), 308, lines, "s red", anchor="middle", step=15)
    picture.arrow((at(84), 316), (at(100), 316))
    picture.text(at(92), 308, "time", "s soft", anchor="middle")
    return picture.svg(336)


def exactness() -> str:
    """exactness.md: the same batches in one process and in two trials."""
    picture = Picture(
        "The same batches reach the GPU, with and without evalspan",
        "lm-eval builds a task once, as a whole, and puts its 12 requests into three batches. One lm_eval process runs batches "
        "1, 2, 3. evalspan deals the same batches, uncut, to two trials as two shards. Each forward pass has the same tensors, "
        "so all answers are equal, and lm-eval's own code scores them.",
    )
    middle = WIDTH / 2
    picture.box(
        110,
        16,
        340,
        44,
        "lm-eval builds the task once, as a whole",
        "12 requests: prompts, few-shot examples, tokens",
    )
    picture.arrow((middle, 60), (middle, 84))
    picture.box(
        110, 84, 340, 44, "lm-eval's own batches, written to disk", "requests of like length stand together"
    )
    width, kinds = 30.0, ("blue", "green", "purple")
    order = ((7, 2, 11, 4), (1, 9, 5, 12), (3, 8, 6, 10))

    def batch(number: int, x: float, y: float) -> None:
        for place, request in enumerate(order[number]):
            picture.rect(x + place * (width + 2), y, width, 22, kinds[number], corner=3)
            picture.text(x + place * (width + 2) + width / 2, y + 15.5, str(request), "s", anchor="middle")

    step = 4 * (width + 2) + 12
    for number in range(3):
        batch(number, middle - 1.5 * step + 6 + number * step, 142)
        picture.text(middle - step + number * step, 180, f"batch {number + 1}", "s soft", anchor="middle")
    for x in (144, 416):
        picture.arrow((x, 188), (x, 212))
    picture.rect(EDGE, 212, 260, 142, "panel edge", corner=6)
    picture.text(144, 232, "lm_eval: one process", "b", anchor="middle")
    picture.rect(286, 212, 260, 142, "panel edge", corner=6)
    picture.text(416, 232, "evalspan: shards of whole batches", "b", anchor="middle")
    for number in range(3):
        batch(number, 84, 242 + 26 * number)
        batch(number, 392, (242, 268, 320)[number])
    picture.text(32, 284, "GPU 0", "s")
    picture.text(298, 268, "trial on GPU 0", "s")
    picture.text(298, 284, "shard A", "s soft")
    picture.text(298, 331, "trial on GPU 1", "s")
    picture.text(298, 346, "shard B", "s soft")
    for x in (144, 416):
        picture.arrow((x, 354), (x, 378))
    picture.box(
        EDGE,
        378,
        WIDTH - 2 * EDGE,
        44,
        "the same tensors in each forward pass: the same answers",
        "sorted back by request, whichever trial gave them",
    )
    picture.arrow((middle, 422), (middle, 446))
    picture.box(
        110,
        446,
        340,
        44,
        "lm-eval's scoring code",
        "the same filters and metrics: equal to the last digit",
        cls="green",
    )
    return picture.svg(506)


def machine() -> str:
    """machine.md: the loop, and where a crash may fall."""
    picture = Picture(
        "The coordinator's loop, and what a crash at each place does",
        "Observations become events. A pure function, step, takes the event into the state and says which jobs are intended and "
        "which actions follow. Events and intents are appended to the journal and synced to disk; only then the actions are "
        "performed. After a crash the journal is replayed, which gives the same state.",
    )
    picture.box(EDGE, 40, 160, 76, "the world", "Slurm's listing, files", "of jobs, Redis, people")
    picture.box(386, 40, 160, 76, "step: a pure function", "(state, event) →", "intents, actions", cls="blue")
    picture.box(386, 200, 160, 76, "journal.jsonl", "append, then fsync:", "it is the memory", cls="green")
    picture.box(EDGE, 200, 160, 76, "perform the actions", "sbatch, scancel, queue,", "plan, write results")
    picture.arrow((174, 78), (386, 78))
    picture.lines(
        280,
        56,
        ["observe: events, such as", "“job started”, “shards on disk”"],
        "s",
        anchor="middle",
        step=40,
    )
    picture.arrow((466, 116), (466, 200))
    picture.text(452, 162, "events and", "s", anchor="end")
    picture.text(452, 178, "intended jobs", "s", anchor="end")
    picture.arrow((386, 238), (174, 238))
    picture.text(280, 228, "actions", "s", anchor="middle")
    picture.text(280, 256, "never before the sync", "s", anchor="middle")
    picture.arrow((94, 200), (94, 116))
    picture.text(102, 162, "effects; what came of", "s")
    picture.text(102, 178, "them is an event again", "s")
    picture.arrow((498, 200), (498, 116), cls="dash")
    picture.text(504, 162, "replay", "s")
    for number, (x, y) in {"1": (466, 136), "2": (352, 238), "3": (94, 136)}.items():
        _crash(picture, x, y, number)
    top = 306.0
    picture.text(EDGE, top, "The coordinator is killed there, and started again:", "b")
    rows = [
        ("1", "nothing was written and nothing was done: the next look finds the same events"),
        ("2", "the intent is written: the job is searched for by name, not found, and submitted"),
        ("3", "the same search finds the job by its name: no second one is submitted"),
    ]
    for place, (number, text) in enumerate(rows):
        _crash(picture, EDGE + 9, top + 20 + 24 * place, number)
        picture.text(EDGE + 26, top + 24.5 + 24 * place, text, "s")
    return picture.svg(top + 88)


def _crash(picture: Picture, x: float, y: float, number: str) -> None:
    picture.rect(x - 9, y - 9, 18, 18, "red", corner=9)
    picture.text(x, y + 4.5, number, "s b bg", anchor="middle")
