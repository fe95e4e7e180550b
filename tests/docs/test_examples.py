"""Laws of the examples: what a page tells a reader to type is run, and does what the page says; and of what runs them.

CONTRIBUTING.md, "Change the documentation", has the conventions; examples.toml says where each page runs.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from dev_cluster.api import Cluster
from support import sites
from support.examples.pages import ROOT, Entry, blocks, pages, table
from support.examples.run import ExampleError, Page, Place

import evalspan
from evaljobs.contract.paths import WorkPaths

from .given import Given, environment

TABLE = table()
PAGES = pages()
EVERY_PAGE = "EVERY_PAGE" in os.environ  # and each as it stands
NEWCOMERS = ("README.md", "tutorial.md", "site/first-cluster.md")  # what a plain run of the tests types


@pytest.fixture(scope="session")
def given(tmp_path_factory: pytest.TempPathFactory) -> Given:
    return Given(tmp_path_factory.mktemp("given"))


@pytest.fixture(scope="session")
def site() -> Iterator[Cluster]:
    """An ordinary site for all pages that need a Slurm."""
    with sites.cluster(nodes=2, gpus=2, cpu_nodes=1, cpus=8) as made:
        yield made


def _on(name: str) -> object:
    marks = [pytest.mark.slurm] if TABLE[name].on == "slurm" else []
    return pytest.param(name, marks=marks, id=name)


@pytest.mark.timeout(
    1800
)  # the tutorial trains a model and evaluates three checkpoints, five where it runs as it stands
@pytest.mark.parametrize("name", [_on(name) for name in TABLE])
def test_the_examples_of_a_page_do_what_it_says(name, given, tmp_path, request):
    """Each block in the page's order; see `support.examples.run`. A plain run has the newcomers' pages alone, in small: a
    shorter training in the tutorial, few documents."""
    entry = TABLE[name]
    if name not in NEWCOMERS and not EVERY_PAGE:
        pytest.skip("no page of a newcomer: scripts/check --deep runs it")
    for module in entry.needs:
        pytest.importorskip(module)
    if entry.on == "slurm":
        place = _user(request.getfixturevalue("site"), name)
    else:
        (folder := tmp_path / "home").mkdir()
        place = Place(folder=folder, env=environment(folder))
    words = given.put(entry.given, place.folder) | ({} if EVERY_PAGE else entry.small)
    for path in place.folder.rglob("*"):
        place.written(path)
    Page(entry, place, words).run([block for block in blocks(PAGES[name]) if block.run_here])


def _user(cluster: Cluster, name: str) -> Place:
    """A folder of the ordinary user's, who types there. Jobs have no GPU in truth, and little memory."""
    folder = Path(cluster.user_dir) / name.replace("/", "-").removesuffix(".md")
    folder.mkdir()
    owner = Path(cluster.user_dir).stat()

    def written(path: Path) -> None:
        os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)

    written(folder)
    env = environment(folder) | cluster.user_env | {"HOME": str(folder)}
    env |= {"EVALSPAN_TRIAL_DEVICE": "cpu", "EVALSPAN_TRIAL_MEMORY_MB": "2000", "EVALSPAN_TRIAL_THREADS": "1"}
    env |= {
        "EVALSPAN_METRIC_MEMORY_MB": "2000",
        "EVALSPAN_METRIC_WORKERS": "1",
        "EVALSPAN_CLUSTER_POLL_SECONDS": "1",
    }
    return Place(
        folder=folder,
        env=env,
        argv=lambda line: cluster.user_argv(line, cwd=folder),
        written=written,
        ended=lambda: cluster.run_as_user(["scancel", "--user", cluster.user]) and None,
    )


@pytest.mark.parametrize("name", PAGES)
def test_every_example_is_run_or_says_why_not(name):
    """A page's blocks have languages. Those that a reader types run here, in the test that is named, or not, with a reason; a
    page of the table has some to run.
    """
    found = list(blocks(PAGES[name]))
    assert [b.place for b in found if b.run_by and not (ROOT / b.run_by).is_file()] == []
    left = [block.place for block in found if block.run_here]
    assert bool(left) == (name in TABLE), f"{left}: not marked, and the page is not in examples.toml"


def test_the_table_of_pages_is_in_order_and_has_those_of_a_newcomer():
    assert list(TABLE) == sorted(TABLE)
    assert set(NEWCOMERS) <= TABLE.keys() <= PAGES.keys()


# --- the files that an evaluation leaves ---------------------------------------------------------------------------------


def commented() -> list[str]:
    """What the code's comments "File PATTERN: …" name."""
    code = [file for room in ("coordinator", "evaljobs", "priors") for file in (ROOT / room).rglob("*.py")]
    return [name for file in code for name in re.findall(r"# File (\S+): ", file.read_text())]


def listed_files() -> list[str]:
    """The same as regular expressions of a path below `work`, or of a full one."""
    parts = [re.split(r"([A-Z]+(?:_[A-Z]+)*|…)", name.replace("WORK_DIR", "work")) for name in commented()]
    return [
        "".join({"…": ".+"}.get(x, "[^/]+" if x.isupper() else re.escape(x)) for x in each) for each in parts
    ]


def test_each_path_of_a_work_folder_has_a_comment() -> None:
    """A file that two processes agree on has a comment that says what it holds; of a folder, a file in it has one."""
    work = WorkPaths(Path("work"))
    places = [str(place) for place in [*vars(work).values(), *vars(work.evaluation("ID")).values()]]
    known = listed_files()
    starts = [name.replace("WORK_DIR", "work") for name in commented()]
    lost = [place for place in places if not any(re.fullmatch(each, place) for each in known)]
    assert [place for place in lost if not any(start.startswith(f"{place}/") for start in starts)] == []


@pytest.mark.model
def test_each_file_of_a_real_evaluation_has_a_comment(given, tmp_path: Path) -> None:
    """Also those that a command leaves and a running daemon would have taken."""
    given.put(("series",), tmp_path)
    work = (tmp_path / "evalspan-work").rename(tmp_path / "work")
    for archive in work.glob("*/files.zip"):
        with zipfile.ZipFile(archive) as files:
            files.extractall(archive.parent)
    evalspan.submit(tmp_path / "runs/7b/step-300", "quickstart", limit=1, work_dir=work)
    evalspan.notify(tmp_path / "runs/7b/step-300", 1, work_dir=work)
    assert evalspan.flush()
    names = [file.relative_to(tmp_path).as_posix() for file in work.rglob("*") if not file.is_dir()]
    known = listed_files()
    assert len({each for each in known for name in names if re.fullmatch(each, name)}) > 20
    assert [name for name in names if not any(re.fullmatch(each, name) for each in known)] == []


# --- what runs the examples: what it refuses, what it says of a block that fails, what it leaves -----------------------


def run(tmp_path: Path, text: str, **row) -> Path:
    (page := tmp_path / "page.md").write_text(text)
    (folder := tmp_path / "home").mkdir()
    found = [block for block in blocks(page) if block.run_here]
    Page(Entry(**row), Place(folder=folder, env=environment(folder))).run(found)
    return folder


GOOD = """
```sh
cd ..; cd home; export SAID=hello
```

```text title="inner/file.txt"
WORD
```

<!-- example: added to the file -->
```text title="inner/file.txt"
two
```

```python
import os
n = len(open("inner/file.txt").read().split())
```

<!-- example: shows "2 words" -->
```python
print(n, "words", flush=True); os.system("true")
```

<!-- example: exits 3; shows "hello one" -->
```sh
echo $SAID $(head -1 inner/file.txt)
(exit 3)
echo not reached
```

<!-- example: in the background; shows "ready hello" -->
```sh
trap 'touch ended; exit 0' INT; echo ready $SAID
while :; do sleep 0.1; done
```

<!-- example: shows "it is ready" -->
```sh
echo it is FOUND
```

<!-- example: not run: no reason -->
```sh
exit 9
```
"""


def test_blocks_run_in_order_with_one_shell_and_one_interpreter(tmp_path):
    folder = run(tmp_path, GOOD, words={"WORD": "one"}, found={"FOUND": r"^(ready) hello"})
    assert (folder / "inner" / "file.txt").read_text() == "one\n\ntwo\n"
    assert (folder / "ended").exists()


SH = "```sh\n{}\n```\n"
# fmt: off
FAILS = {
    "# T\n\n```sh\ntrue\nls \\\n  /nowhere\ntrue\n```\n": r"page\.md:[56]: `ls /nowhere` ended with status 2\n.*nowhere",
    SH.format("false | true\nexit 4"): r"page\.md:2: `false \| true\nexit 4` ended with status 4",
    '<!-- example: shows "yes" -->\n' + SH.format("echo no"): r"page\.md:3: the output does not show 'yes'\nno",
    SH.format("echo score  value") + "```text\nscore  value  verdict\n──────\n```\n": r"page\.md:2: no table has the sample's columns, 'score  value  verdict'",
    "<!-- example: exits 2 -->\n" + SH.format("true"): r"page\.md:3: `true` ended with status 0 instead of 2",
    "```python\nn = 1\nn.none\n```\n": r'ended with status 1\n(.*\n)*  File "page.md", line 3',
    "<!-- example: in the background -->\n" + SH.format("false") + SH.format("wait; sleep 1"): "in the background `false` ended with status 1",
    SH.format("setsid sleep 1000 &"): r"processes are left:\n\d+ sleep 1000",
}
REFUSED = ("```\nls\n```\n", "```bash\nls\n```\n", "text\n\n    indented\n", "<!-- example: shown -->\n" + SH, "<!-- example: exits 2 -->\n\ntext\n\n" + SH)
# fmt: on


@pytest.mark.parametrize("text", FAILS)
def test_a_failing_block_is_named_by_page_line_command_status_and_output(tmp_path, text, monkeypatch):
    """Also one that leaves a process, which is ended."""
    monkeypatch.setattr("support.examples.run.END_SECONDS", 1)
    with pytest.raises(ExampleError, match=FAILS[text]):
        run(tmp_path, text)


@pytest.mark.parametrize("text", REFUSED)
def test_a_block_without_language_or_with_an_unknown_mark_is_refused(tmp_path, text):
    (page := tmp_path / "page.md").write_text(text)
    with pytest.raises(ValueError, match=r"page\.md:\d"):
        list(blocks(page))
