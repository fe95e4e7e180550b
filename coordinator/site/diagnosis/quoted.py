"""What stands in a log and is no message of it: environments, arguments, configurations, tables, code, samples, quoted logs.

Pure. Rule: a word of failure there says nothing. Called from: `log`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

CONTEXT_BYTES = 4096  # bytes before and behind a line in which its block may begin and end
_TOLD = r"(?:error|err|fatal|exception|message|msg|reason|cause|state|status|exit\w*|what|warning|critical)"
_TEXT = r"(?:prompt|completion|continuation|generat(?:ed|ion)(?: text)?|question|answer|sample|example|prediction|hypothesis|reference|document)s?"
# Lines that say nothing, whatever stands around them.
_LINE = re.compile(
    rf"""^(?!\W*train_runtime)\s*(?:
      (?:export\s|declare\s-\w+\s|setenv\s)?[A-Z_][A-Z0-9_]{{2,}}(?:=|:\s(?=\S+$))           # a variable of the environment
    | (?:(?:[A-Za-z]\w*)?(?:Config|Arg(?:ument)?s|Namespace|Settings|environ)|(?:[\w ]{{0,20}}\b(?i:config\w*|args|arguments|environ\w*|hparams|overrides|settings|flags|cmd|command(?:\ line)?)))\s?[:=(]
    | \{{\s?['"](?!{_TOLD}['"])\w+['"]:
    | (?!['"]?{_TOLD}\b)(?:['"][\w.-]+['"]\s?:\s?\S.*,?|[\w.-]+\s?\.{{3,}}\s?\S*|[\w.-]+\s\.{{4,}}\s.*|[a-z_][\w.-]*\s=\s\S.*|[a-z_][\w.-]*=[^\s=]\S*)$     # a setting
    | (?:\+\s|\$\s)?(?:\S*/)?(?:python[\d.]*|torchrun|srun|sbatch|mpirun|mpiexec|deepspeed|accelerate|exec|singularity|apptainer)\s(?!.*:\serror:\s)-?[\w./$-]+\s.*--?\w
    | (?:[\w.]{{1,30}}\s?[:=]\s?)?[\[({{]['"].*[\])}}],?$ | -\s[\w.\ ]{{1,40}}$                                              # a list
    | \++\s\S | --?[a-z][\w-]*[=\s]
    | [\w.\[\]-]+\s*(?:==|\s@\s|\s(?=v?\d+\.\d))\s?v?\S+(?:\s+(?:pypi|conda\S*|/\S*|<?\w+>?))?$                               # a package
    | \|.*\|$ | >+\s | (?P<q>['"]).*(?P=q)[,;]?$ | >>>\s | \d+\s?\|\s                                                         # a table, a quotation
    | File\s"[^"]+",\sline\s\d | raise\s[\w.]+(?:\(|$) | (?:assert|except|elif|if|for|while|with|def|class)\b.*(?::|\))$ | (?:return|print|log(?:ger|ging)?\.\w+|self\.\w+)\b\s?[(\w].*\)$
    | (?:import|from)\s[\w.]+(?:\simport\s.*)?$ | (?:\#|//)\s?
    | \W*(?:\w+\s)?(?i:{_TEXT})\W{{0,3}}(?:\d+\W{{0,2}})?(?:[:=>|]|text\b)
    )""",
    re.VERBOSE,
)
_DUMP = re.compile(rf"""(?<=.)\{{\s?['"](?!(?:{_TOLD})['"])\w+['"]: """)
_SETTING = re.compile(
    rf"^\s*(?:- )?(?!{_TOLD}\b)([a-z_][a-z\d_./-]*)\s?[:=](?:\s+(?!error\b|fatal\b|\*)(?!.*: )\S.{{0,60}})?$"
)
_RAISED = re.compile(r"(?:[A-Za-z_]\w*\.)*\w*(?:Error|Exception|Interrupt|Warning)\b")
_MARK = re.compile(
    rb"(?im)```|\"\"\"|\bbegin\b|\bstart of\b|\b" + _TEXT.encode() + rb"(?: \w+)?(?:\W{0,2}\d+)?\W{0,12}$"
)
_FENCE = re.compile(r'^\W*(?:```|""")')
_BEGIN = re.compile(r"(?i)^\W{0,12}(?:begin|start of)\b")
_END = re.compile(r"(?i)^\W{0,12}end\b")
_LABEL = re.compile(rf"(?i)^\W*(?:\w+ )?{_TEXT}(?: \w+)?(?: ?\W?\d+\W?)?\W*$")
_GOES_ON = re.compile(r"(?i)^\W*(?:step|epoch|iter\w*)\b|^\s*$")

Read = Callable[[bytes], str]  # a line -> its message


def says_nothing(text: str) -> bool:
    """Return whether a line is no message by itself."""
    return _LINE.match(text) is not None and _RAISED.match(text) is None


def before_dump(text: str) -> str:
    """What a line says in front of a configuration, or of other values with names, that it holds."""
    found = _DUMP.search(text)
    return text[: found.start()] if found else text


def is_quoted(text: str, before: bytes, after: bytes, read: Read) -> bool:
    """Return whether a line stands in a block that is no message. `before`, `after`: the lines around it."""
    own = _SETTING.match(text)
    if own is not None:
        near = [read(raw) for raw in (*before.split(b"\n")[-3:], *after.split(b"\n", 3)[:3]) if raw]
        keys = {own[1], *(found[1] for line in near if (found := _SETTING.match(line)))}
        if len(keys) > 3:
            return True
    if (mark := _MARK.search(before)) is None:
        return False
    lines = [read(raw) for raw in before[before.rfind(b"\n", 0, mark.start()) + 1 :].split(b"\n")]
    behind = [read(raw) for raw in after.split(b"\n")]
    fences = sum(_FENCE.match(line) is not None for line in lines)
    if fences % 2 and any(_FENCE.match(line) for line in behind):
        return True
    began = max((n for n, line in enumerate(lines) if _BEGIN.match(line)), default=-1)
    if began >= 0 and not any(_END.match(line) for line in lines[began:]) and any(map(_END.match, behind)):
        return True
    return _is_sample(lines)


def _is_sample(before: Sequence[str]) -> bool:
    """Return whether the line behind these belongs to a text that a heading alone on its line began."""
    for line in reversed(before):
        if _GOES_ON.match(line) or _END.match(line):
            return False
        if _LABEL.match(line):
            return True
    return False
