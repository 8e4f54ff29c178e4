"""The pytest plugin of pdl-stress: the fixture ``pdl_check``. Outside of the package, so that pytest loads it for
projects that do not use it without importing anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

REQUIRE = "--pdl-require-gpu"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("pdl-stress").addoption(
        REQUIRE, action="store_true", help="fail tests that use pdl_check, instead of skipping them, where no GPU is"
    )


@pytest.fixture
def pdl_check(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Callable[..., Any]:
    """``pdl_check(fn, make_inputs, ...)``: the test fails unless the verdict is PASS; INCONCLUSIVE is no PASS.

    Arguments and the returned verdict are those of :func:`pdl_stress.check`, but the kernels run in a child process
    unless ``isolate=False``. Without an NVIDIA device the test is skipped, or fails with ``--pdl-require-gpu``.
    """

    def run(fn: Any, make_inputs: Any = None, *, isolate: bool = True, **settings: Any) -> Any:
        from pdl_stress import Outcome, check
        from pdl_stress.cuda.device import Presence, presence

        sighting = presence()
        if sighting.presence is Presence.NONE and not request.config.getoption(REQUIRE):
            pytest.skip(f"needs a GPU with PDL: {sighting.reason}")
        verdict = check(fn, make_inputs, isolate=isolate, **settings)
        record_property("pdl_stress", str(verdict.outcome))
        if verdict.outcome is not Outcome.PASS:
            pytest.fail(f"{verdict.outcome}, not PASS\n{verdict}", pytrace=False)
        return verdict

    return run
