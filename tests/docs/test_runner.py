"""Laws of the runner of examples: what it refuses on a page, what it says of a block that fails, what it leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.examples.pages import Entry, blocks
from support.examples.run import ExampleError, Page, Place

from .given import environment


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


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "# T\n\n```sh\ntrue\nls \\\n  /nowhere\ntrue\n```\n",
            r"page\.md:[56]: `ls /nowhere` ended with status 2\n.*nowhere",
        ),
        ("```sh\nfalse | true\nexit 4\n```\n", r"page\.md:2: `false \| true\nexit 4` ended with status 4"),
        (
            '<!-- example: shows "yes" -->\n```sh\necho no\n```\n',
            r"page\.md:3: the output does not show 'yes'\nno",
        ),
        (
            "<!-- example: exits 2 -->\n```sh\ntrue\n```\n",
            r"page\.md:3: `true` ended with status 0 instead of 2",
        ),
        ("```python\nn = 1\nn.none\n```\n", r'ended with status 1\n(.*\n)*  File "page.md", line 3'),
        (
            "<!-- example: in the background -->\n```sh\nfalse\n```\n\n```sh\nwait; sleep 1\n```\n",
            "in the background `false` ended with status 1",
        ),
    ],
)
def test_a_failing_block_is_named_by_page_line_command_status_and_output(tmp_path, text, says):
    with pytest.raises(ExampleError, match=says):
        run(tmp_path, text)


def test_a_page_that_leaves_a_process_fails_and_the_process_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("support.examples.run.END_SECONDS", 1)
    with pytest.raises(ExampleError, match=r"processes are left:\n\d+ sleep 1000"):
        run(tmp_path, "```sh\nsetsid sleep 1000 &\n```\n")


@pytest.mark.parametrize(
    "text",
    [
        "```\nls\n```\n",
        "```bash\nls\n```\n",
        "text\n\n    indented\n",
        "<!-- example: shown -->\n```sh\nls\n```\n",
        "<!-- example: exits 2 -->\n\ntext\n\n```sh\nls\n```\n",
    ],
)
def test_a_block_without_language_or_with_an_unknown_mark_is_refused(tmp_path, text):
    (page := tmp_path / "page.md").write_text(text)
    with pytest.raises(ValueError, match=r"page\.md:\d"):
        list(blocks(page))
