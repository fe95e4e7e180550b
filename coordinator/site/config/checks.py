"""Checks of single settings: times, ages, hostlists, GPU requests, addresses, commands. Pure.

Rule: each returns its argument, or raises a ValueError that says what to write instead. Fields of `schema.py` refer to them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

GPU_REQUEST = "--gres=gpu:{n}"  # default arguments that request a job's GPUs
HOSTLIST_ENTRY = re.compile(
    r"(?:[^\[\],\s]|\[[^\[\]\s]*\])+"
)  # of a hostlist; commas in brackets are part of it
_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)
_TIME = re.compile(r"(?:(\d+)-)?(\d{1,2}):(\d\d):(\d\d)")


def seconds_of(time_limit: str) -> int:
    """Return the seconds of Slurm's `[days-]hours:minutes:seconds`. Raise ValueError for any other text."""
    match = _TIME.fullmatch(time_limit)
    if match is None:
        raise ValueError('a time such as "4:00:00" or "2-00:00:00" (days-hours:minutes:seconds)')
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def check_time(text: str) -> str:
    if seconds_of(text) == 0:
        raise ValueError("a time longer than 0:00:00")
    return text


def check_conversion(command: str) -> str:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"a command line ({error})") from error
    if not any("{src}" in w for w in words) or not any("{dst}" in w for w in words):
        raise ValueError('a command with {src} and {dst} in it, such as "python convert.py {src} {dst}"')
    return command


def check_model_args(model_args: dict[str, Any]) -> dict[str, Any]:
    for key in ("pretrained", "revision", "subfolder"):
        if key in model_args:
            raise ValueError(
                f"a table without {key!r} (given by the checkpoint: ORG/MODEL@REVISION or a folder)"
            )
    return model_args


_AGE = re.compile(r"(\d+)([hdw])")


def age_seconds(text: str) -> int:
    """Return the seconds of "12h", "30d" or "8w". Raise ValueError for any other text."""
    match = _AGE.fullmatch(text)
    if match is None:
        raise ValueError('an age such as "12h", "30d" or "8w"')
    return int(match.group(1)) * {"h": 3600, "d": 86_400, "w": 604_800}[match.group(2)]


def check_age(text: str) -> str:
    age_seconds(text)
    return text


def check_hostlist(text: str) -> str:
    """Return `text`. Raise ValueError unless it is a Slurm hostlist, such as "gpu[01-04,7],n1"."""
    if ",".join(HOSTLIST_ENTRY.findall(text)) != text or not text:
        raise ValueError(f'Slurm hostlists such as "gpu[01-04],n7" (not {text!r})')
    for ranges in re.findall(r"\[(.*?)\]", text):
        for part in ranges.split(","):
            match = _RANGE.fullmatch(part)
            if match is None or int(match[2] or match[1]) < int(match[1]):
                raise ValueError(f'Slurm hostlists with ranges such as "gpu[01-04,7]" (not {text!r})')
    return text


RESERVED: Mapping[str, str] = {
    "evalspan finds its jobs by it": "comment job-name J clusters M",
    "evalspan reads its jobs' logs": "output o error e",
    "evalspan numbers the members of its jobs": "array a",
    "evalspan repeats a lost job itself": "requeue",
    "the script is evalspan's": "wrap",
    "sbatch would not print the job's id": "quiet Q",
    "sbatch would end with the job": "wait W",
    "nothing would be submitted": "test-only help h usage version V",
    "[cluster] partition names it": "partition p",
    "[nodes] names such nodes": "nodelist w nodefile F exclude x",
    "[cluster] export and [trial] env give jobs variables": "export export-file",
}
"""Reason -> options of sbatch, long and short, that no setting may add."""


def check_extra_args(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return `words`. Raise ValueError for an option in RESERVED, even if abbreviated as sbatch allows."""
    for word in words:
        name = word.removeprefix("--").partition("=")[0] if word.startswith("--") else ""
        letter = re.match(r"-[HsuvO]*(\w)", word)  # after letters that take no value
        for why, options in RESERVED.items():
            for long, short in re.findall(r"([\w-]{2,})(?: (\w)\b)?", options):
                if (name and long.startswith(name)) or (letter and letter[1] == short):
                    raise ValueError(f"options of sbatch other than --{long} ({why})")
    return words


def check_gpu_request(template: str) -> str:
    """Return `template`. Raise ValueError unless it makes arguments that request {n} GPUs, optionally of a {type}."""
    try:
        words = shlex.split(template)
    except ValueError:  # an unclosed quote
        words = []
    check_extra_args(tuple(words))
    other = re.search(r"[{}]", template.replace("{n}", "").replace("{type}", ""))
    if not words or not words[0].startswith("-") or "{n}" not in template or other:
        raise ValueError(
            'arguments of sbatch with {n} and at most {type}, such as "--gres=gpu:{type}:{n}" or "--gpus-per-node={n}"'
        )
    return template


def check_address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError('an address such as "127.0.0.1:9464"')
    return text


def check_web_address(text: str) -> str:
    if not re.match(r"https?://[^/\s]+", text):
        raise ValueError("an address that begins with https:// or http://")
    return text
