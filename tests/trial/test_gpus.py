"""A trial runs on the GPUs that its job asked for, or fails at once and names the node."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evaljobs.errors import OperatorError
from evaljobs.trial.engines.loading import UnfitError, check_gpus


def library(seen: int, *, cuda: str | None = "12.9", hip: str | None = None) -> Any:
    """What torch says of its build and of the node's GPUs."""
    counts = SimpleNamespace(is_available=lambda: seen > 0, device_count=lambda: seen)
    version = SimpleNamespace(cuda=cuda, hip=hip)
    return SimpleNamespace(version=version, cuda=counts, __version__="2")


@pytest.mark.parametrize("device", [None, "cuda"])
def test_a_trial_that_sees_fewer_gpus_than_it_asked_for_names_its_node(
    device: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would run on the CPU, hours instead of minutes, or out of memory."""
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "3")
    with pytest.raises(
        UnfitError, match=rf"{socket.gethostname()}: torch sees 0 of the 1 GPUs .*ROCR_VISIBLE_DEVICES=3"
    ):
        check_gpus(library(0), device, 1)
    with pytest.raises(UnfitError, match="sees 2 of the 4"):
        check_gpus(library(2, cuda=None, hip="6"), device, 4)
    check_gpus(library(4), device, 4)
    check_gpus(library(8), device, 1)


def test_trials_that_asked_for_none_or_chose_another_device_are_not_held_to_it() -> None:
    check_gpus(library(0), None, 0)
    check_gpus(library(0), "cpu", 2)
    check_gpus(library(0), "xpu", 2)


@pytest.mark.skipif(
    torch.version.cuda is not None or torch.version.hip is not None, reason="torch has a GPU build"
)
def test_a_torch_without_gpu_support_is_for_the_operator_to_mend() -> None:
    """No node would do."""
    with pytest.raises(OperatorError, match=r"point \[trial\] python"):
        check_gpus(torch, None, 1)
