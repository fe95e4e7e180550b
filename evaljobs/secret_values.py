"""Detection of secrets, by name or by appearance. Pure.

Rule: no record, log or command line contains a secret. Settings and suites with one are refused (`coordinator.site.config.toml`);
texts of libraries that go into logs and outcomes pass through `scrub_text` first. A name alone is not a secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

Location = tuple[str | int, ...]

HIDDEN_TEXT: Final = "[secret]"
MIN_SECRET_LENGTH: Final = 8  # characters: shorter values may be ordinary words of a log
# Names of variables: HF_TOKEN, AWS_SECRET_ACCESS_KEY, WANDB_API_KEY, MYSQL_PWD.
_VARIABLE = re.compile(
    r"(^|_)(SECRET|PASSWORD|PASSWD|PASSPHRASE|APIKEY|CREDENTIALS?|JWT)(_|$)|(^|_)(KEY|TOKEN|PASS)$|_PWD$",
    re.IGNORECASE,
)
# Names of arguments. Most tokens of a model are words (eos_token), so these say whose token it is.
_ARGUMENT = re.compile(
    r"^(token|pass|pwd|key)$|(^|_)(auth|access|api|bearer|hf|hub|hf_hub|github|wandb|private|refresh|session)_?(token|key)$"
    r"|(^|_)(secret|password|passwd|passphrase|credentials?)(_(key|value))?$|(^|_)apikey$",
    re.IGNORECASE,
)
_LOOKS = re.compile(
    r"""(?<![A-Za-z0-9_-])(?:
      hf_[A-Za-z0-9]{20,}
    | sk-(?=[A-Za-z0-9_-]*[0-9])[A-Za-z0-9_-]{20,}
    | github_pat_[A-Za-z0-9_]{20,} | gh[oprsu]_[A-Za-z0-9]{30,} | glpat-[A-Za-z0-9_-]{20,}
    | AKIA[0-9A-Z]{16}(?![0-9A-Z]) | AIza[A-Za-z0-9_-]{35} | xox[abeprs]-[A-Za-z0-9-]{10,} | nvapi-[A-Za-z0-9_-]{20,}
    | eyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]+
    | services/T[A-Z0-9]+/B[A-Z0-9]+/[A-Za-z0-9]+(?![A-Za-z0-9])
    | -----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY-----
    )""",
    re.VERBOSE,
)
_IN_URL = re.compile(r"(?<=://)[^\s/:@'\"]*:[^\s/@'\"]+(?=@)")  # user:password of a URL
# A shell's NAME=VALUE with a literal value: no $VARIABLE, no $(command), no `command`.
_ASSIGNED = re.compile(r"""(?<![\w$])([A-Za-z_]\w*)=(?!["']?[$`]|""|''|[\s;,&|]|$)""")


def names_variable(name: str) -> bool:
    """Return whether a variable of this name holds a secret."""
    return _VARIABLE.search(name) is not None


def in_text(text: str) -> bool:
    """Return whether a text contains something like a token, a private key, or a URL with a password."""
    return _LOOKS.search(text) is not None or _IN_URL.search(text) is not None


def in_command(text: str) -> bool:
    """Return `in_text`, or whether a shell line assigns a literal value to a variable with a secret's name."""
    return in_text(text) or any(names_variable(found[1]) for found in _ASSIGNED.finditer(text))


def secret_locations(data: Any, *, variables: bool = False) -> Iterator[Location]:
    """Yield the locations of secrets in nested mappings and lists. `variables`: the keys are names of variables."""
    if isinstance(data, str):
        if in_text(data):
            yield ()
    elif isinstance(data, Mapping):
        for key, value in data.items():
            named = names_variable(str(key)) if variables else _ARGUMENT.search(str(key)) is not None
            if named and _says_something(value):
                yield (str(key),)
            else:
                yield from ((str(key), *rest) for rest in secret_locations(value, variables=variables))
    elif isinstance(data, Sequence) and not isinstance(data, bytes):
        for index, value in enumerate(data):
            yield from ((index, *rest) for rest in secret_locations(value, variables=variables))


def _says_something(value: Any) -> bool:
    return isinstance(value, str) and value.lower() not in ("", "true", "false", "none", "auto")


def hide_secrets(data: Any) -> Any:
    """Return nested mappings and lists with HIDDEN in place of each secret."""
    if isinstance(data, str):
        return HIDDEN_TEXT if in_text(data) else data
    if isinstance(data, Mapping):
        secret = {place[0] for place in secret_locations(data) if len(place) == 1}
        return {
            key: HIDDEN_TEXT if str(key) in secret else hide_secrets(value) for key, value in data.items()
        }
    if isinstance(data, list | tuple):
        return type(data)(hide_secrets(value) for value in data)
    return data


def scrub_text(text: str, environ: Mapping[str, str]) -> str:
    """Return a text without anything that looks like a secret, and without the values of variables named like one."""
    for name, value in environ.items():
        if len(value) >= MIN_SECRET_LENGTH and names_variable(name):
            text = text.replace(value, HIDDEN_TEXT)
    return _IN_URL.sub(HIDDEN_TEXT, _LOOKS.sub(HIDDEN_TEXT, text))
