"""Shared by all tests: a skip that is not listed here by name, with its reason, is a failure."""

from collections.abc import Generator

import pytest

# node id → why the test cannot run on some machine
LISTED_SKIPS: dict[str, str] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and item.nodeid not in LISTED_SKIPS:
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, but it is not in LISTED_SKIPS with a reason"
    return report
