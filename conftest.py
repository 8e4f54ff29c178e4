"""pytest set-up for the whole project: tests marked ``gpu`` are skipped, with the reason, where they cannot run.

The machine is looked at only when a ``gpu`` test was collected: ``pytest -m 'not gpu'`` and a run of CPU tests never
load the driver. ``--require-gpu`` is for a gate: there, a missing or broken device is an error, not a row of skips.
"""

from __future__ import annotations

import pytest

_REQUIRE_GPU = "--require-gpu"
_SLOW = "--slow"
_UNFIT = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        _REQUIRE_GPU,
        action="store_true",
        help="fail at once, instead of skipping, if tests marked gpu cannot run on this machine",
    )
    parser.addoption(_SLOW, action="store_true", help="run the tests marked slow too: whole corpora of kernels")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("slow") is not None and not item.config.getoption(_SLOW):
        pytest.skip(f"slow: run it with {_SLOW}")


# trylast: after -m and -k have deselected, so that a gpu test that will not run does not wake the driver.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not gpu_items:
        if config.getoption(_REQUIRE_GPU):
            raise pytest.UsageError(
                f"{_REQUIRE_GPU}: no test marked gpu was collected; add -m gpu, or check the paths given"
            )
        return
    reason = _why_no_gpu_test()
    if reason is None:
        return
    if config.getoption(_REQUIRE_GPU):
        raise pytest.UsageError(f"{_REQUIRE_GPU}: {reason}")
    config.stash[_UNFIT] = reason
    skip = pytest.mark.skip(reason=f"needs a GPU with PDL: {reason}")
    for item in gpu_items:
        item.add_marker(skip)


def pytest_report_collectionfinish(config: pytest.Config) -> str | None:
    """One line about skipped GPU tests; none where all of them run or none was asked for."""
    reason = config.stash.get(_UNFIT, None)
    return None if reason is None else f"gpu tests skipped: {reason}"


def _why_no_gpu_test() -> str | None:
    """Say what keeps ``gpu`` tests from running here, or None."""
    # Imported here, not above: see the module's first lines.
    from pdl_stress.cuda import device

    presence, reason = device.presence()
    return None if presence is device.Presence.USABLE else reason
