"""What every test gets: quiet threads, an event loop that may not be blocked, a tiny model, GPU tests only with one."""

from __future__ import annotations

import gc
import logging
import os
import resource
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Before torch or a server process is started: the suite shares a few cores, and results must not depend on how many.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # a test with two threads does not take other tests' time
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from support import forks
from support.blocking import DETECTOR, BlockingDetector
from support.chromium import launched
from support.seeds import choose_seed, session_seed, torch_seed
from support.server import Server
from support.tiny import tiny_model

if TYPE_CHECKING:
    from playwright.sync_api import Browser

SHARING = ("tests/examples/", "tests/server/doors/", "tests/server/engine/ranks/")
"""Folders with servers of a session or a package, which each process that has one of their files starts anew."""

SHORT_S = 0.5
"""Processor seconds, of its own and of processes that it waits for, that a test of ``make test`` may take."""

DETECTOR.install()
forks.install()
choose_seed()


@pytest.fixture(scope="session")
def blocking_detector() -> BlockingDetector:
    return DETECTOR


@pytest.fixture(scope="session")
def seed() -> int:
    return session_seed()


def pytest_report_header() -> str:
    return f"GRADWIRE_SEED={session_seed()}"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Let what a test or its fixtures draw from torch's generator not depend on the tests before it."""
    if "torch" in sys.modules:  # a test that imports torch first finds the same state
        torch = sys.modules["torch"]
        seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed  # 1 us, not 1 ms
        seed(torch_seed())
    leave_out_of_garbage()


def _cpu_s() -> float:
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    began = _cpu_s()
    try:
        return (yield)
    finally:
        item.user_properties.append(("cpu_s", _cpu_s() - began))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Name the tests that ``make test`` should leave to ``make test-all``."""
    if "not long" not in config.option.markexpr:
        return
    reports = (each for each in terminalreporter.stats.get("passed", ()) if each.when == "call")
    taken = {report.nodeid: dict(report.user_properties)["cpu_s"] for report in reports}
    if above := sorted((cpu_s, test) for test, cpu_s in taken.items() if cpu_s > SHORT_S):
        terminalreporter.section(f"over {SHORT_S} CPU seconds: mark them long, or make them shorter")
        for cpu_s, test in above:
            terminalreporter.line(f"{cpu_s:5.1f} s  {test}")


_frozen_modules = 0


def leave_out_of_garbage() -> None:
    """Keep what has been imported out of the search for garbage, which an engine makes whenever memory runs out."""
    global _frozen_modules
    if len(sys.modules) > _frozen_modules + 200:
        gc.collect()
        gc.freeze()
        _frozen_modules = len(sys.modules)


@pytest.fixture(autouse=True)
def unchanged_environment() -> Iterator[None]:
    """What the code under test, or a library, sets in the environment ends with the test."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def responsive_loop(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails an async test in which a callback held an event loop of this process for longer than the detector's limit.

    A test without a loop may wait; its threads' loops, and Playwright's, run what it calls.
    """
    with DETECTOR.reports() as reports:
        yield
    node = request.node
    if reports and node.get_closest_marker("asyncio") and not node.get_closest_marker("holds_loop"):
        pytest.fail("the event loop was blocked by\n" + "\n".join(reports))


@pytest.fixture(autouse=True)
def kept_log_levels() -> Iterator[None]:
    """Fails a test that leaves our loggers less talkative than before, which later tests would not see through.

    It also fails one that leaves a handler of :mod:`gradwire_server.observability.logs`, as its stream may be the
    test's own.
    """
    before, handlers = _log_levels(), logging.root.handlers[:]
    yield
    ours = [each for each in logging.root.handlers if type(each.formatter).__module__.startswith("gradwire")]
    if left := [each for each in ours if each not in handlers]:
        logging.root.handlers[:] = handlers
        pytest.fail(f"the test left handlers of the root logger: {left}")
    after = _log_levels()
    if after != before:
        logging.disable(logging.NOTSET)
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
        pytest.fail(f"the test left log levels changed: {before} before, {after} after")


def _log_levels() -> dict[str, int]:
    """Level of each of our packages' loggers, and of the root's, below which ``logging.disable`` silences all."""
    levels = {name: logging.getLogger(name).level for name in ("gradwire", "gradwire_server", "gradwire_feedback")}
    return {"root": max(logging.root.level, logging.root.manager.disable), **levels}


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of some ten thousand parameters with a character tokenizer, as a Hugging Face folder."""
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def server(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server process that holds the tiny model, for all tests that neither end it nor count its runs."""
    running = Server(tiny_model_path, tmp_path_factory.mktemp("state")).start()
    yield running
    assert running.end() == 0


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launched() as browser:
        yield browser


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each file to one process, and a folder whose files share servers as a whole to one."""
    from xdist.scheduler import LoadFileScheduling

    class Folders(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
        def _split_scope(self, nodeid: str) -> str:
            file = str(super()._split_scope(nodeid))
            return next((folder for folder in SHARING if file.startswith(folder)), file)

    return Folders(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep what is imported out of the search for garbage: now, a fifth of the time, and when memory has run out.

    The tests as pytest rewrites them are kept as bytecode also where the environment forbids Python to write it: each
    process that runs tests would spend half of the collection on rewriting all of them.
    """
    gc.disable()
    forbidden, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    try:
        return (yield)
    finally:
        sys.dont_write_bytecode = forbidden
        leave_out_of_garbage()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
