"""What all tests share: a real model, and drawn examples that are the same in every run, without a clock asserted.

`pytest --hypothesis-profile=explore` draws others each time.
"""

import signal

import pytest
from hypothesis import HealthCheck, settings
from support import sites, toys
from xdist.scheduler import LoadScopeScheduling

pytest_plugins = ["support.fixtures"]


# A temporary folder serves all examples of a test: each names its own files in it.
UNTIMED = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
}
settings.register_profile("fixed", derandomize=True, max_examples=40, **UNTIMED)
settings.register_profile("explore", **UNTIMED)
settings.register_profile("deep", max_examples=1000, **UNTIMED)  # `scripts/check --deep`
settings.load_profile("fixed")

# A shell starts what runs in its background with SIGINT ignored, and programs that tests start would inherit that: none
# of them would end by Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "Question: What is 2 + 3? Answer: 5. Q: How many eggs are left? A: Let's think step by step.",
    "def add(a, b):\n    return a + b\n\n\ndef total(numbers):\n    return sum(numbers)\n",
]


# Side by side (`scripts/test`), a file's tests run in one process, and so do all tests of a row here: whole systems, each of
# which keeps a core busy, run one after the other. The rows take about as long as each other.
SYSTEMS = {
    "sites": (
        "tests/chaos", "tests/odd_sites", "tests/doctor", "tests/slurm_cluster", "tests/cluster", "tests/cli", "tests/packaging",
        "tests/runtime/test_service.py", "tests/integration/test_inputs.py", "tests/integration/test_rescore.py",
    ),
    "evaluations": ("tests/integration",),
}  # fmt: skip
# The longest files besides: they begin first, so that none of them is left for the end.
LONGEST = (
    "tests/golden/refusals", "tests/docs/test_examples.py", "tests/simulation/test_simulation.py",
    "tests/evaluation/test_scenarios.py", "tests/planning/test_planner_laws.py", "tests/sandbox", "tests/scoring",
    "tests/lmeval", "tests/requests", "tests/exactness", "tests/judges",
)  # fmt: skip


def process_of(nodeid):
    """Tests with the same answer run in one process."""
    place = nodeid.split("::", maxsplit=1)[0]
    return next((name for name, places in SYSTEMS.items() if place.startswith(places)), place)


class BySystem(LoadScopeScheduling):
    def _split_scope(self, nodeid):
        return process_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return BySystem(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_modifyitems(items):
    def rank(item):
        if process_of(item.nodeid) in SYSTEMS:
            return -1
        return next((n for n, place in enumerate(LONGEST) if item.nodeid.startswith(place)), len(LONGEST))

    items.sort(key=rank)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    """Captured output without lone surrogates (of file names that are no UTF-8): xdist cannot send them to its controller."""
    report = yield
    report.sections = [
        (name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections
    ]
    return report


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory):
    """A checkpoint of a 2-layer Llama with random float32 weights and a tokenizer with chat template; seconds."""
    from support.exactness.tiny_model import make

    return make(tmp_path_factory.mktemp("tiny") / "tiny-llama", CORPUS * 20)


@pytest.fixture(scope="session")
def toy_model(tmp_path_factory):
    """The tiny model of the toy evaluations."""
    return toys.toy_model(tmp_path_factory.mktemp("toys"))


@pytest.fixture(scope="session")
def expected(toy_model):
    """lm-eval's own results of each toy task, one run a task."""
    return toys.expected(toy_model, sites.TOYS)
