"""Asks an OpenAI-compatible endpoint, before anything is submitted, whether it serves the model and what it can answer.

Called by `coordinator.api.checking`. The requests of an evaluation are made by its trials (`evaljobs.trial.engines.endpoint`).
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from coordinator.base.words import one_line
from coordinator.errors import OperatorError

SECONDS = 60.0  # for an answer: a server may compile at its first request
NO_LIKELIHOODS = "its answers are likelihoods, and the endpoint gives no log-probabilities of a prompt (echo with logprobs)"


def gives_likelihoods(model_args: Mapping[str, Any]) -> bool:
    """Return whether the endpoint gives log-probabilities of a prompt. OperatorError where it does not answer at all."""
    for name in ("base_url", "model"):
        if not model_args.get(name):
            raise OperatorError(
                f"an endpoint needs {name} in [trial] model_args: the server's address with /v1/completions, and the model's "
                "name there"
            )
    body = {"model": model_args["model"], "prompt": "One and two", "max_tokens": 1, "temperature": 0}
    try:
        answer = _asked(model_args, {**body, "echo": True, "logprobs": 1})
        found = answer["choices"][0]["logprobs"]["token_logprobs"]
        return len(found) > 2 and all(isinstance(value, float | int) for value in found[1:])
    except urllib.error.HTTPError as error:
        if error.code not in (400, 422, 501):
            raise OperatorError(_complaint(model_args, error)) from error
    except (OSError, ValueError) as error:
        raise OperatorError(_complaint(model_args, error)) from error
    except (KeyError, TypeError, IndexError):
        return False
    try:
        _asked(model_args, body)
    except (OSError, ValueError) as error:
        raise OperatorError(_complaint(model_args, error)) from error
    return False


def _asked(model_args: Mapping[str, Any], body: Mapping[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    address = str(model_args["base_url"])
    if not address.startswith(("http://", "https://")):
        raise OperatorError(f"base_url {address}: an address that begins with http:// or https://")
    request = urllib.request.Request(address, json.dumps(body).encode(), headers)  # noqa: S310 (checked above)
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:  # noqa: S310
        return json.load(answer)


def _complaint(model_args: Mapping[str, Any], error: Exception) -> str:
    said = ""
    if isinstance(error, urllib.error.HTTPError):
        said = f": {one_line(error.read(1000).decode(errors='replace'), 300)}"
    address, model = model_args["base_url"], model_args["model"]
    return (
        f"the endpoint {address} does not complete a prompt by the model {model!r}: {one_line(error)}{said}"
    )
