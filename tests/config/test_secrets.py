"""Laws of secrets: a token in settings or suites is refused, is not repeated, and what a library says of one is struck out."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.config.loading import load
from evaljobs import log_lines
from evaljobs.errors import JobError, one_line
from evaljobs.secret_values import HIDDEN, hidden, in_command, in_text, places, scrubbed

TOKEN = "hf_" + "aB3" * 11
SECRETS = [
    TOKEN,
    "sk-proj-" + "aB3-_" * 8,
    "ghp_" + "a1B2" * 9,
    "AKIA" + "ABCD" * 4,
    "https://me:hunter22@host/x",
    "eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.c2ln",
]


def test_words_that_only_sound_like_secrets_are_settings(tmp_path: Path) -> None:
    """Tokens of a model, names of files and variables, values that are fetched, Redis with its own file of mode 0600."""
    file = tmp_path / "evalspan.toml"
    file.write_text(
        """[trial]
model_args = { token = true, use_auth_token = "True", think_end_token = "</think>", eos_token = "<eos>" }
env = { HF_TOKEN_PATH = "/t", TOKENIZERS_PARALLELISM = "false", NCCL_DEBUG = "INFO" }
prologue = '''
export HF_TOKEN=$(cat ~/.token) KEY="$OTHER" A_TOKEN=`cat f` B_KEY=
module load cuda/12.4'''
[judge]
url = "https://api.openai.com:443/v1"
api_key_env = "OPENAI_API_KEY"
api_key_file = "judge.key"
[redis]
url = "rediss://me:hunter22@redis.site:6380/0"
password_file = "redis.password"
"""
    )
    assert "think_end_token" in load(file, {}).trial.model_args


@given(st.text(), st.sampled_from(SECRETS), st.text())
def test_what_looks_like_a_secret_is_found_and_struck_out_wherever_it_stands(
    before: str, secret: str, after: str
) -> None:
    text = f"{before} {secret} {after}"
    assert in_text(text)
    assert in_command(text)
    value = secret.partition("://me:")[2].partition("@")[0] or secret
    assert value not in scrubbed(f" {secret} ", {})
    assert list(places({"a": [text]})) == [("a", 0)]
    assert hidden({"a": [text], "token": "x", "n": 1}) == {"a": [HIDDEN], "token": HIDDEN, "n": 1}


@given(
    st.recursive(
        st.none() | st.integers() | st.sampled_from(["a b", "</s>"]),
        lambda x: st.lists(x) | st.dictionaries(st.sampled_from("ab"), x),
    )
)
def test_what_holds_no_secret_is_left_as_it_is(data: Any) -> None:
    assert list(places(data)) == []
    assert hidden(data) == data


def test_logs_and_outcomes_of_a_job_show_no_value_of_a_secret_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where a library's error quotes it, and in a traceback."""
    monkeypatch.setenv("SITE_TOKEN", "hunter2222")
    error = JobError(f"401 for https://me:pw1234567@hub with hunter2222 and {TOKEN}")
    assert one_line(error) == f"401 for https://{HIDDEN}@hub with {HIDDEN} and {HIDDEN}"
    handler = logging.StreamHandler()
    handler.setFormatter(log_lines.ScrubbedFormatter("%(message)s"))
    try:
        raise error
    except JobError:
        logger = logging.getLogger("of a test")
        logger.addHandler(handler)
        logger.exception("asked with %s", "hunter2222")
        logger.removeHandler(handler)
    shown = capsys.readouterr().err
    assert f"asked with {HIDDEN}" in shown
    assert "Traceback" in shown
    assert not any(secret in shown for secret in ("hunter2222", TOKEN, "pw1234567"))
