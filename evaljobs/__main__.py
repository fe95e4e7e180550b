"""`python -m evaljobs VERB …`: the jobs on nodes.

Rule: a verb reads one spec, does its work and writes an outcome; the exit status says whether it
failed. Each verb imports the modules that it needs, since a precursor must not load torch.
"""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from evaljobs import garbage, log_lines
from evaljobs.contract.specs import SPEC
from evaljobs.errors import one_line

log = logging.getLogger("evaljobs")

# verbs of one spec: the module whose `main` takes it and returns the exit status
OF_A_SPEC = {
    "build": "evaljobs.requests.build",
    "convert": "evaljobs.requests.convert",
    "stage": "evaljobs.staging.precursor",
    "trial": "evaljobs.trial.trial",
    "host": "evaljobs.trial.hosted_trials",
    "execute": "evaljobs.scoring.score",
    "score": "evaljobs.scoring.score",
}
# verbs that parse their own arguments: (module, function of the arguments)
PASSED_ON = {
    "worker": ("evaljobs.scoring.worker", "main"),
    "sandbox": ("evaljobs.sandbox.__main__", "main"),
    "clean": ("evaljobs.staging.store", "clean_main"),
    "probe": ("evaljobs.staging.node_probe", "main"),
    "catalogue": ("evaljobs.lmeval.catalogue", "describe_own"),
    "changed": ("evaljobs.lmeval.shown_inputs", "main"),
    "tasks": ("evaljobs.lmeval.catalogue", "print_resolved_names"),
    "node-check": ("evaljobs.node_check", "main"),
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    log_lines.begin_logging("%(asctime)s %(levelname)s %(name)s: %(message)s")
    for chatty in ("lm_eval", "httpx", "filelock"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    verb, *rest = arguments or [""]
    if verb in PASSED_ON:
        module, function = PASSED_ON[verb]
        return int(getattr(importlib.import_module(module), function)(rest))
    if verb in OF_A_SPEC and rest:
        return max(run_verb(Path(path), verb) for path in rest)
    said = f"usage: python -m evaljobs {{{','.join(OF_A_SPEC)}}} SPEC ..., or {{{','.join(PASSED_ON)}}} ...\n"
    (sys.stdout if verb in ("-h", "--help") else sys.stderr).write(said)
    return 0 if verb in ("-h", "--help") else 2


def run_verb(path: Path, verb: str) -> int:
    """Run one spec, whose kind must be the verb, and return the exit status."""
    try:
        spec = SPEC.validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        log.error("%s is not a readable spec: %s", path, one_line(error))  # noqa: TRY400 (one line)
        return 2
    if spec.kind != verb:
        log.error("%s is a %s spec, not a %s spec", path, spec.kind, verb)
        return 2
    return int(importlib.import_module(OF_A_SPEC[verb]).main(spec))


def exit_process(status: int) -> NoReturn:
    """Exit this process without freeing its imports. Freeing torch and transformers takes 1 to 6 seconds, during which a
    trial would hold its GPU, and a build would slow the trials that follow it. Exit handlers run first, since an engine shuts
    down its own processes there.
    """
    atexit._run_exitfuncs()  # noqa: SLF001 (there is no public name for it)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    garbage.collect_rarely()
    exit_process(main())
