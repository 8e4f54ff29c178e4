"""What a campaign may be asked to do: every bad value is refused by name, and from good ones the jobs follow."""

from __future__ import annotations

import math
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdl_stress import UsageError, catalog, model
from pdl_stress.faults import ALL_DELAYS_US, DELAYS_US, FAULTS
from pdl_stress.jobs import ArmJob, ControlJob, ExposureJob
from pdl_stress.plan import CONTROL_REPLAYS, MOST_DELAY_US, REPLAYS, TIME_LIMIT_S, Plan, clean_jobs, control_jobs
from pdl_stress.statistics import upper_bound

NAN, INF = math.nan, math.inf


def test_the_defaults_are_what_the_documentation_says() -> None:
    plan = Plan()
    assert (plan.replays, plan.control_replays, plan.seed, plan.time_limit) == (20_000, 256, 0, 60.0)
    assert (REPLAYS, CONTROL_REPLAYS, TIME_LIMIT_S) == (20_000, 256, 60.0)
    assert plan.rules is model.DOCUMENTED
    assert (plan.faults, plan.delays_us, plan.planted) == (None, DELAYS_US, "")
    assert upper_bound(REPLAYS) == pytest.approx(1.5e-4, rel=0.01)


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        *[({"replays": n}, rf"^replays is {n}; expected 1 to \d+\.$") for n in (0, -1, 2**40 + 1)],
        *[({"control_replays": n}, rf"^control_replays is {n}; expected 1 to \d+\.$") for n in (0, -1, 2**32 + 1)],
        *[({"seed": n}, rf"^seed is {n}; expected 0 to \d+\.$") for n in (-1, 2**63)],
        *[
            ({name: value}, rf"^{name} is .*; expected a whole number\.$")
            for name in ("replays", "control_replays", "seed")
            for value in (1.0, NAN, "1000", "", None, (1,), 1j)
        ],
        *[({"rules": word}, "^unknown rule set .*; expected one of documented, observed:sm_90") for word in ("", "x")],
        *[({"rules": thing}, "^rules is .*; expected one of documented, observed:sm_90") for thing in (None, 1, ())],
        *[
            ({"faults": value}, r"^faults is .*; expected (names such as \('F00@q_norm', 'F02'\), or None|a tuple)")
            for value in ("F02", "", 2, (2,), ("F02", None), True)
        ],
        *[({"faults": (name,)}, "^unknown fault .*; the catalogue has F00") for name in ("F99", "", "f02", "@q_norm")],
        *[({"delays_us": value}, "^delays_us is empty; expected at least one window") for value in ((), [], "")],
        *[({"delays_us": value}, "^delays_us is .*; expected a tuple") for value in (None, 5, 5.0, NAN)],
        *[
            ({"delays_us": (0.0, value)}, r"^delays_us: .*; expected a number from 0 to 1000\.$")
            for value in (-1, -0.001, 1000.001, 1e9, NAN, INF, -INF, "2", None, True, (2.0,), 1j)
        ],
        ({"delays_us": "2,10"}, "^delays_us: '2'; expected a number"),
        *[
            ({"time_limit": value}, r"^time_limit: .*; expected a number from 0\.001 to 86400\.$")
            for value in (0, -1.0, 0.0009, 86_401, NAN, INF, "60", None, True)
        ],
    ],
    ids=str,
)
def test_a_bad_value_is_refused_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Plan(**fields)


ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.binary(max_size=3),
    st.lists(st.none() | st.integers() | st.floats() | st.text(max_size=3), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip


@given(
    name=st.sampled_from(["replays", "control_replays", "rules", "seed", "faults", "delays_us", "time_limit"]),
    value=ANYTHING,
)
def test_whatever_is_given_a_plan_is_sound_or_refused(name: str, value: Any) -> None:
    try:
        plan = Plan(**{name: value})
    except UsageError:
        return
    assert type(plan.replays) is type(plan.control_replays) is type(plan.seed) is int
    assert plan.replays >= 1
    assert plan.control_replays >= 1
    assert plan.seed >= 0
    assert isinstance(plan.rules, model.RuleSet)
    assert plan.faults is None or all(type(f) is str for f in plan.faults)
    assert all(type(delay) is float and 0 <= delay <= MOST_DELAY_US for delay in plan.delays_us)
    assert list(plan.delays_us) == sorted(set(plan.delays_us))
    assert plan.delays_us
    assert 0 < plan.time_limit < INF


# --- what is taken -------------------------------------------------------------------------------------------------


def test_windows_are_sorted_and_each_runs_once() -> None:
    assert Plan(delays_us=(10, 2.0, 10.0, 0, 2)).delays_us == (0.0, 2.0, 10.0)
    assert Plan(delays_us=[1000]).delays_us == (1000.0,)  # type: ignore[arg-type]
    assert all(type(delay) is float for delay in Plan(delays_us=(10, 0)).delays_us)


def test_a_rule_set_may_be_named() -> None:
    for name, rules in model.RULE_SETS.items():
        assert Plan(rules=name).rules is rules  # type: ignore[arg-type]
        assert Plan(rules=rules).rules is rules


def test_faults_may_be_a_list_and_are_kept_as_they_were_asked_for() -> None:
    assert Plan(faults=["F07", "F02@q_norm"]).faults == ("F07", "F02@q_norm")  # type: ignore[arg-type]
    assert Plan(faults=()).faults == ()
    assert Plan(faults=tuple(FAULTS)).faults == tuple(FAULTS)


def test_numbers_of_numpy_are_numbers() -> None:
    plan = Plan(replays=numpy.int64(5), delays_us=(numpy.float64(2.0),), time_limit=numpy.float64(7))  # type: ignore[arg-type]
    assert (plan.replays, type(plan.replays)) == (5, int)
    assert (plan.delays_us, plan.time_limit) == ((2.0,), 7.0)


# --- jobs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", catalog.SHIPPED)
def test_every_job_names_the_chain_that_was_judged(name: str) -> None:
    chain = catalog.load(name)
    jobs = [*clean_jobs(chain, Plan()), *control_jobs(chain, Plan()), *clean_jobs(chain, Plan(planted="F01@q_norm"))]
    assert {type(job) for job in jobs} == {ArmJob, ExposureJob, ControlJob}
    assert {(job.chain, job.fingerprint) for job in jobs} == {(name, chain.fingerprint)}


@pytest.mark.parametrize("name", catalog.SHIPPED)
def test_no_job_is_planned_twice(name: str) -> None:
    """Duplicates would make up for answers that got lost."""
    chain, plan = (
        catalog.load(name),
        Plan(delays_us=(*ALL_DELAYS_US, *ALL_DELAYS_US), faults=("F02", "F02@q_norm", "F02")),
    )
    texts = [job.describe() for job in (*clean_jobs(chain, plan), *control_jobs(chain, plan))]
    assert len(set(texts)) == len(texts)


def test_a_planted_chain_runs_its_fault_and_nothing_else() -> None:
    chain = catalog.load("csa2-fused-m1")
    plan = Plan(replays=7, planted="F02@q_norm")
    plain, serialized = clean_jobs(chain, plan)
    assert isinstance(plain, ArmJob)
    assert isinstance(serialized, ArmJob)
    assert (plain.name, plain.serialized, plain.replays) == (
        "planted F02 never waits @ projection->q_norm, 10 us",
        False,
        7,
    )
    assert (serialized.name, serialized.serialized, serialized.replays) == ("planted, serialized", True, 7)
    assert plain.planted == serialized.planted
    assert plain.planted is not None
    assert control_jobs(chain, plan) == []


def test_jobs_say_what_they_are() -> None:
    chain = catalog.load("csa2-fused-m1")
    texts = {job.describe() for job in (*clean_jobs(chain, Plan()), *control_jobs(chain, Plan()))}
    assert {
        "arm as deployed",
        "arm as deployed, weights rotated",
        "arm back to back, delayed (kv_norm, 10 us)",
        "exposure, as deployed",
        "exposure, back to back, delayed (kv_norm, 10 us)",
        "control F02 never waits @ projection->q_norm, 10 us",
    } <= texts


def test_jobs_travel_between_processes() -> None:
    import pickle

    chain = catalog.load("csa2-fused-m1")
    jobs = [*clean_jobs(chain, Plan()), *control_jobs(chain, Plan())]
    assert pickle.loads(pickle.dumps(jobs)) == jobs
