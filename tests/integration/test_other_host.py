"""Trials on another host than Redis: a network namespace of its own, reached by address and password only."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from dev_cluster.testing import wait_until

pytestmark = pytest.mark.model


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def other_host() -> Iterator[tuple[str, str]]:
    """(namespace, our address towards it): two hosts on a wire."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    tag = uuid.uuid4().hex[:6]
    name, net = f"es-{tag}", f"10.{int(tag[:2], 16)}.{int(tag[2:4], 16)}"
    ip("netns", "add", name)
    try:
        ip("link", "add", f"a{tag}", "type", "veth", "peer", "name", f"b{tag}", "netns", name)
        ip("addr", "add", f"{net}.1/24", "dev", f"a{tag}")
        ip("link", "set", f"a{tag}", "up")
        ip("-n", name, "addr", "add", f"{net}.2/24", "dev", f"b{tag}")
        ip("-n", name, "link", "set", f"b{tag}", "up")
        ip("-n", name, "link", "set", "lo", "up")
        yield name, f"{net}.1"
    finally:
        ip("netns", "del", name)


def test_trials_on_another_host_find_redis_by_its_address_file(
    local_site: Any, other_host: tuple[str, str], expected: dict[str, dict[str, Any]]
) -> None:
    """Builds, holder and trials run in another network namespace, with code copied for an interpreter of their own."""
    namespace, address = other_host
    local_site.env["EVALSPAN_TRIAL_CONTAINER"] = f"ip netns exec {namespace}"
    local_site.env["EVALSPAN_REDIS_BIND"] = address
    suite = local_site.suite.read_text().split("[[task]]")
    local_site.suite.write_text("[[task]]".join(suite[:2]))
    process = local_site.start(local_site.evaluate())
    place = local_site.work / "redis" / "address.json"
    wait_until(lambda: place.exists() or process.poll() is not None, "an address is published")
    published = json.loads(place.read_text())
    assert (published["host"], bool(published["password"])) == (address, True)
    assert place.stat().st_mode & 0o077 == 0
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert json.loads(out)["results"] == {"toy_choice": expected["toy_choice"]}
