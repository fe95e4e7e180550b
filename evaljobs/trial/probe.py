"""What a node offers, asked by a small job on it: `python -m evaljobs.trial.probe --out FILE …`. The node's side of `doctor`.

Rule: measured where a trial or worker would run, in its interpreter; the answer is a file in the work folder, so that it
arriving at all proves that the folder is shared. What cannot be told is null or words; a probe leaves nothing behind.
It does not know: other nodes, and what the answers mean.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evaljobs.contract.storage import write_atomic
from evaljobs.errors import one_line
from evaljobs.staging import node_probe
from evaljobs.staging.owned_files import Refused

PACKAGES = ("lm_eval", "torch", "transformers", "vllm", "sglang", "redis", "rq")
REDIS_SECONDS = 5.0


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str | None]:
    """The installed version of each package, without importing it; None where there is none."""
    found: dict[str, str | None] = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def engine_trouble(engine: str) -> str:
    """Why this interpreter cannot import lm-eval's class of an engine, or the hf class that builds the requests of every
    engine; empty where it can. Takes as long as importing them.
    """
    from evaljobs.trial.engine import import_engine  # noqa: PLC0415 (torch and lm-eval: only where asked for)

    try:
        import_engine(engine)
        importlib.import_module("lm_eval.models.huggingface")
    except Exception as error:  # noqa: BLE001 (whatever a library raises while it is imported is the answer)
        return one_line(error)
    return ""


def sandbox_levels() -> list[dict[str, Any]]:
    """Each level, best first, with whether it holds here and why not."""
    from evaljobs.sandbox import probe_levels  # noqa: PLC0415 (a second's work: only where asked for)

    return [{"level": str(r.level), "holds": r.holds, "reason": r.reason} for r in probe_levels()]


def redis_trouble(file: Path) -> str:
    """Why Redis does not answer from here; empty where it does."""
    try:
        from evaljobs.queue import redis_client  # noqa: PLC0415 (an interpreter may lack redis: that is an answer)
    except ImportError as error:
        return f"this interpreter cannot talk to Redis: {error}"
    try:
        address = redis_client.read(file)
        with (
            redis_client.explained(address.where),
            redis_client.client(address, seconds=REDIS_SECONDS) as client,
        ):
            client.ping()
    except redis_client.QueueUnavailable as error:
        return str(error)
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the record of this node to --out."""
    parser = argparse.ArgumentParser(prog="python -m evaljobs.trial.probe", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--root", action="append", default=[], help="folders to stage into, in order")
    parser.add_argument("--sample-mb", type=int, default=node_probe.SAMPLE_MB)
    parser.add_argument("--redis-file", type=Path)
    parser.add_argument("--sandbox", action="store_true", help="try the sandbox's levels")
    parser.add_argument("--leave", metavar="NONCE", help="leave a nonce on the first root for another job")
    parser.add_argument("--look", metavar="NONCE", help="only look for a nonce of another job")
    chosen = parser.parse_args(argv)
    record: dict[str, Any]
    if chosen.look:
        record = {"nonce_seen": _nonce(chosen.root, chosen.look, leave=False)}
    else:
        record = node_probe.probe_node(chosen.root, sample_mb=chosen.sample_mb)
        record["versions"] = versions()
        record["redis_trouble"] = None if chosen.redis_file is None else redis_trouble(chosen.redis_file)
        record["sandbox"] = sandbox_levels() if chosen.sandbox else None
        record["nonce_left"] = bool(chosen.leave) and _nonce(chosen.root, chosen.leave, leave=True)
    write_atomic(chosen.out, json.dumps(record).encode())
    return 0


def _nonce(roots: Sequence[str], name: str, *, leave: bool) -> bool | None:
    """None where the root cannot be used."""
    try:
        return node_probe.nonce(roots[0], name, leave=leave) if roots else None
    except (Refused, OSError, TimeoutError):
        return None


if __name__ == "__main__":
    sys.exit(main())
