"""What a campaign may be asked to do: every bad value is refused by name, and from good ones the jobs follow."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdl_stress import Chain, KernelContract, Op, UsageError, Wait, catalog, model
from pdl_stress.chain import Patch
from pdl_stress.faults import ALL_DELAYS_US, DELAYS_US, FAULTS, RELOADED, Control
from pdl_stress.jobs import ArmJob, CensusJob, ControlJob, ExposureJob, Job
from pdl_stress.plan import (
    CONTROL_REPLAYS,
    MOST_DELAY_US,
    REPLAYS,
    TIME_LIMIT_S,
    Plan,
    clean_jobs,
    control_jobs,
    exposure_jobs,
    uncontrolled,
    untested,
)
from pdl_stress.results import NodeResult
from pdl_stress.statistics import upper_bound

NAN, INF = math.nan, math.inf

pytestmark = pytest.mark.usefixtures("remembered_model")


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


def all_jobs(chain: Chain, plan: Plan) -> list[Job]:
    return [*clean_jobs(chain, plan), *exposure_jobs(chain, plan), *control_jobs(chain, plan)]


@pytest.mark.parametrize("name", catalog.CSA2)
def test_every_job_names_the_chain_that_was_judged(name: str) -> None:
    chain = catalog.load(name)
    jobs = [*all_jobs(chain, Plan()), *all_jobs(chain, Plan(planted="F01@q_norm"))]
    assert {type(job) for job in jobs} == {CensusJob, ArmJob, ExposureJob, ControlJob}
    assert {(job.chain, job.fingerprint) for job in jobs} == {(name, chain.fingerprint)}


@pytest.mark.parametrize("name", catalog.CSA2)
def test_no_job_is_planned_twice(name: str) -> None:
    """Duplicates would make up for answers that got lost."""
    chain, plan = (
        catalog.load(name),
        Plan(delays_us=(*ALL_DELAYS_US, *ALL_DELAYS_US), faults=("F02", "F02@q_norm", "F02")),
    )
    texts = [job.describe() for job in all_jobs(chain, plan)]
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
    assert control_jobs(chain, plan) == exposure_jobs(chain, plan) == []


def test_jobs_say_what_they_are() -> None:
    chain = catalog.load("csa2-fused-m1")
    texts = {job.describe() for job in all_jobs(chain, Plan())}
    assert {
        "census of the graph",
        "arm as deployed",
        "arm as deployed, weights rotated",
        "arm back to back, delayed (kv_norm, 10 us)",
        "exposure, as deployed",
        "exposure, back to back, delayed (kv_norm, 10 us)",
        "control F02 never waits @ projection->q_norm, 10 us",
    } <= texts


Library = Callable[..., Chain]


def test_jobs_travel_between_processes(library: Library) -> None:
    chain = catalog.load("csa2-fused-m1")
    fixed = library("csa2-separate-m1")
    jobs = [
        *all_jobs(chain, Plan()),
        *all_jobs(chain, Plan(planted="F02@q_norm")),
        *all_jobs(fixed, Plan()),
        *control_jobs(fixed, Plan(), found_in(fixed, 3)),
    ]
    assert any(job.control.patch(fixed) for job in jobs if isinstance(job, ControlJob) and job.chain == fixed.name)
    assert pickle.loads(pickle.dumps(jobs)) == jobs


# --- chains of kernels that cannot be rebuilt ------------------------------------------------------------------------

FUSED = "csa2-fused-m1"
NAMES = list(catalog.CSA2)


def node(
    step: str, waits: int | None, code: str = "lib.so", kind: str = "kernel", incoming: str = "programmatic"
) -> NodeResult:
    return NodeResult(
        kind, f"kernel of {step}" if kind == "kernel" else "", step=step, waits=waits, code=code, incoming=[incoming]
    )


def test_a_plain_kernel_behind_one_that_waits_needs_no_machine_code(library: Any) -> None:
    """Its edge is full, so it is ordered, and nothing of it could be removed."""
    chain = library("csa2-fused-m1")
    nodes = [*found_in(chain), node("projection", None, "not looked for", incoming="full")]
    assert uncontrolled(chain, nodes) == {}
    assert untested(chain, nodes) == []
    assert control_jobs(chain, Plan(), nodes) == control_jobs(chain, Plan(), found_in(chain))


def found_in(chain: Chain, waits: int | None = 1, **other: int | None) -> list[NodeResult]:
    """A census: one kernel a step with so many waits; ``other``: per step."""
    return [node(step.name, other.get(step.name, waits)) for step in chain.steps]


def controls_of(jobs: Sequence[Job]) -> list[Control]:
    return [job.control for job in jobs if isinstance(job, ControlJob)]


def patched(chain: Chain, control: Control) -> list[str]:
    """The steps whose machine code the control changes."""
    return [step.name for step in control.apply(chain).steps if step.patch is not None]


def test_the_census_comes_first_and_no_clean_job_is_an_exposure(library: Library) -> None:
    """A broken census must stop its case before anything is graded."""
    for chain in (catalog.load(FUSED), library(FUSED)):
        first, *rest = clean_jobs(chain, Plan())
        assert first == CensusJob(FUSED, chain.fingerprint)
        assert {type(job) for job in rest} == {ArmJob}


@pytest.mark.parametrize("name", NAMES)
def test_exposure_needs_the_profiler_once_one_kernel_cannot_be_stamped(name: str, library: Library) -> None:
    def profiled(chain: Chain) -> set[bool]:
        return {job.profiled for job in exposure_jobs(chain, Plan()) if isinstance(job, ExposureJob)}

    assert profiled(catalog.load(name)) == {False}
    assert profiled(library(name)) == {True}
    assert profiled(library(name, only=("q_norm",))) == {True}, "also where it is never delayed itself"


def test_exposure_jobs_say_who_is_late_and_how(library: Library) -> None:
    chain = library(FUSED, only=("projection", "kv_norm"))
    jobs = [job for job in exposure_jobs(chain, Plan()) if isinstance(job, ExposureJob)]
    assert [(job.name, job.back_to_back) for job in jobs] == [
        ("as deployed", False),
        ("delayed (producer, 10 us)", False),
        ("delayed (input_norm, 10 us)", False),
        ("early release (projection, 10 us)", False),
        ("delayed (q_norm, 10 us)", False),
        ("back to back, early release (kv_norm, 10 us)", True),
    ]
    assert jobs[0].changes == {}
    for job in jobs[1:]:
        late = [step for step in chain.varied(job.changes).steps if step.delay_us]
        assert [step.name for step in late] == [job.name.partition("(")[2].partition(",")[0]]
        assert late[0].delay_us == 10.0
        assert late[0].contract.trigger == "entry"


@pytest.mark.parametrize("name", NAMES)
def test_a_census_that_finds_one_wait_a_kernel_changes_no_control(name: str, library: Library) -> None:
    chain = library(name)
    assert uncontrolled(chain, found_in(chain)) == {}
    assert control_jobs(chain, Plan(), found_in(chain)) == control_jobs(chain, Plan())


@pytest.mark.parametrize(("name", "waits"), [(FUSED, None), (FUSED, 0), (FUSED, 3), ("csa2-separate-m4", 2)])
def test_a_census_says_nothing_about_kernels_that_are_rebuilt(name: str, waits: int | None) -> None:
    chain = catalog.load(name)
    nodes = found_in(chain, waits)
    assert uncontrolled(chain, nodes) == {}
    assert uncontrolled(chain, []) == {}
    assert control_jobs(chain, Plan(), nodes) == control_jobs(chain, Plan())
    assert not any(patched(chain, control) for control in controls_of(control_jobs(chain, Plan(), nodes)))


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        ([node("q_norm", None, "no library holds it")], "no library holds it"),
        ([node("q_norm", 1, incoming="full")], "kernel of q_norm is not launched to overlap what comes before it"),
        ([node("q_norm", 0)], "the machine code of kernel of q_norm (lib.so) holds no wait"),
        ([node("q_norm", None, kind="memset")], "it launches no kernel"),
        ([], "it launches no kernel"),
        (
            [node("q_norm", 0), node("q_norm", None, "stripped")],
            "stripped",
        ),
        (
            [node("q_norm", 1), node("q_norm", None, "stripped")],  # its other waits would stay
            "stripped",
        ),
    ],
    ids=[
        "no code",
        "full edges",
        "no wait",
        "no kernel",
        "nothing",
        "two kernels, one without code",
        "only one of two known",
    ],
)
def test_controls_that_need_waits_removed_are_not_planned_where_that_cannot_be(
    nodes: list[NodeResult], why: str, library: Library
) -> None:
    chain = library(FUSED)
    census = [*(n for n in found_in(chain) if n.step != "q_norm"), *nodes]
    assert uncontrolled(chain, census) == {"q_norm": why}
    before, after = controls_of(control_jobs(chain, Plan())), controls_of(control_jobs(chain, Plan(), census))
    lost = [control for control in before if control not in after]
    assert lost
    assert all("q_norm" in patched(chain, control) for control in lost)
    assert {control.fault for control in lost} == {"F00", "F02"}
    assert after == [control for control in before if control not in lost], "and all others are, in order"
    assert not any("q_norm" in patched(chain, control) for control in after)
    assert any(control.edge.reader == "q_norm" for control in after), "that its wait orders can be shown all the same"


def test_every_step_that_cannot_be_controlled_is_named(library: Library) -> None:
    chain = library(FUSED)
    assert list(uncontrolled(chain, found_in(chain, None))) == ["input_norm", "projection", "q_norm", "kv_norm"]
    assert not any(patched(chain, c) for c in controls_of(control_jobs(chain, Plan(), found_in(chain, None))))
    mixed = library(FUSED, only=("projection",))
    assert list(uncontrolled(mixed, found_in(mixed, None))) == ["projection"]


def test_a_step_that_reads_no_other_steps_output_has_no_wait_to_control() -> None:
    contract = KernelContract(("a",), ("o",))
    fixed = Op("library", contract, lambda **_: None, contract)
    chain = Chain("free")
    x, y = chain.buffer("x", (4,), "float32"), chain.buffer("y", (4,), "float32")
    chain.step("reads", fixed, a=chain.input("h", (4,), "float32"), o=x)
    chain.step("free", fixed, a=chain.constant("w", (4,), "float32"), o=y)
    assert list(uncontrolled(chain, found_in(chain, None))) == ["reads"]


# --- what no arm and no control could show ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("waits", [1, 3, None])
def test_a_census_of_one_kernel_a_step_leaves_nothing_untested(name: str, waits: int | None, library: Library) -> None:
    """Where no machine code was found nothing is known of its waits: ``uncontrolled`` speaks of that."""
    for chain in (catalog.load(name), library(name)):
        assert untested(chain, found_in(chain, waits)) == []


MEMSET = node("q_norm", None, kind="memset")
FULL = {"incoming": "full"}
NO_WAIT = (
    "q_norm: the contract says that it waits (all), and the machine code of kernel of q_norm (lib.so) holds no wait"
)
SEVERAL = (
    "q_norm launches several nodes that overlap ({}): what they hand to each other is not under test; make each a step"
)
TWO = SEVERAL.format("kernel of q_norm, kernel of q_norm")


@pytest.mark.parametrize(
    ("nodes", "found"),
    [
        ([], ["q_norm launches no kernel"]),
        ([MEMSET], ["q_norm launches no kernel"]),
        ([node("q_norm", 0)], [NO_WAIT]),
        ([node("q_norm", 0, **FULL)], []),
        ([node("q_norm", 1), node("q_norm", 0)], [NO_WAIT, TWO]),
        ([node("q_norm", 1), node("q_norm", 1)], [TWO]),
        ([node("q_norm", 1), node("q_norm", None)], [TWO]),
        ([node("q_norm", 1, **FULL), node("q_norm", 1)], [TWO]),
        ([node("q_norm", 1), node("q_norm", 0, **FULL)], []),
        ([MEMSET, node("q_norm", 1, **FULL)], []),
        ([MEMSET, node("q_norm", 1)], [SEVERAL.format("memset, kernel of q_norm")]),
        ([node("q_norm", 1), MEMSET, node("q_norm", 0, **FULL)], []),
    ],
    ids=[
        "nothing",
        "no kernel",
        "a kernel that never waits",
        "one that need not, behind a full edge",
        "a second kernel that never waits",
        "two that wait",
        "a second kernel without code",
        "the second alone overlaps",
        "a second kernel behind a full edge",
        "a memset, then a kernel behind it",
        "a memset that a kernel overlaps",
        "a memset between",
    ],
)
def test_what_the_census_shows_and_nothing_tests_is_said(
    nodes: list[NodeResult], found: list[str], library: Library
) -> None:
    for chain in (catalog.load(FUSED), library(FUSED)):
        census = [*(n for n in found_in(chain) if n.step != "q_norm"), *nodes]
        assert untested(chain, census) == found


def test_a_step_that_is_said_to_have_no_pdl_must_have_none() -> None:
    chain = catalog.load(FUSED)
    chain._steps = [replace(step, pdl=step.name != "projection") for step in chain._steps]
    full, early = (found_in(chain), found_in(chain))
    for node in full:
        if node.step == "projection":
            node.incoming = ["full"]
    assert untested(chain, full) == []
    assert untested(chain, early) == [
        "projection is declared with pdl=False, and kernel of projection is launched to overlap what comes before it; "
        "declare it with pdl=True, and with a contract that says how it waits"
    ]


@pytest.mark.parametrize(
    ("waits", "said"),
    [(1, ""), (2, ""), (0, "holds no wait"), (None, "was not read")],
    ids=["one wait", "two waits", "never waits", "no code"],
)
def test_behind_the_first_kernel_of_a_step_without_pdl_others_may_overlap_if_they_wait(
    waits: int | None, said: str
) -> None:
    chain = catalog.load("qkv-a-m1")
    rest = [node for node in found_in(chain) if node.step != "projection"]
    nodes = [node("projection", None, **FULL), node("projection", waits)]
    found = untested(chain, [*rest, *nodes])
    assert len(found) == bool(said)
    for text in found:
        assert text.startswith("projection: kernel of projection is launched to overlap the kernels before it")
        assert said in text
    assert len(untested(chain, [*rest, *reversed(nodes)])) == 1, "the first one comes behind another step"


def test_an_empty_census_shows_no_kernel_of_any_step() -> None:
    chain = catalog.load(FUSED)
    assert untested(chain, []) == [f"{step.name} launches no kernel" for step in chain.steps]


@pytest.mark.parametrize("wait", list(Wait))
def test_only_a_kernel_that_says_it_waits_must_hold_a_wait(wait: Wait) -> None:
    """The steps behind it rely on its completion, whatever it reads itself."""
    chain = catalog.load(FUSED).modelled().varied({"q_norm": {"wait": wait}})
    texts = untested(chain, found_in(chain, q_norm=0))
    if wait in (Wait.NEVER, Wait.BRANCH):
        assert texts == []
    else:
        assert texts == [NO_WAIT.replace("(all)", f"({wait})")]


# --- in which order --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_patched_kernels_run_last_and_among_them_the_unchanged_ones_first(name: str, library: Library) -> None:
    native = catalog.load(name)
    for chain in (library(name), library(name, only=(native.steps[1].name, native.steps[-1].name))):
        for nodes in (None, found_in(chain, 3)):
            jobs = control_jobs(chain, Plan(), nodes)
            order = [(job.patched != "", job.patched not in ("", "loaded again")) for job in jobs]
            assert order == sorted(order)
            assert len(set(order)) == 3
            for job in jobs:
                patch = job.control.patch(chain)
                assert job.patched == ("" if patch is None else str(patch))
                assert (job.control.variant == RELOADED) is (job.patched == "loaded again")
            by_control = {job.control.name: job for job in jobs}
            asked = controls_of(control_jobs(chain, Plan(faults=("F02",)), nodes))
            assert {control.name for control in asked if control.variant != RELOADED} <= set(by_control)
            words = {job.patched for job in jobs}
            assert {"", "loaded again", "all waits removed"} <= words
            assert ("wait 2 removed" in words) is (nodes is not None)


@pytest.mark.parametrize("faults", [("F00",), ("F02",), ("F07",), ("F00@kv_norm",), ("F07", "F28")])
def test_every_patch_that_must_be_caught_has_its_unpatched_twin_in_the_same_window(
    faults: tuple[str, ...], library: Library
) -> None:
    """Of whatever faults were asked for: also F00 or F07 alone."""
    chain = library("csa2-separate-m1")
    jobs = control_jobs(chain, Plan(faults=faults, delays_us=(2.0, 10.0)), found_in(chain))
    twins = {(j.control.edge, j.control.delay_us) for j in jobs if j.patched == "loaded again"}
    caught = {(j.control.edge, j.control.delay_us) for j in jobs if j.patched and j.expected == "caught"}
    assert caught
    assert caught <= twins
    assert {j.expected for j in jobs if j.patched == "loaded again"} == {"clean"}


# --- chains that rely on a fence before a trigger --------------------------------------------------------------------


def fence_chain(*, fixed: bool) -> Chain:
    """writer fences and triggers behind its stores (R3), so reader need not wait: ordered by the documented rules."""
    chain = Chain("fence")
    waits = frozenset() if fixed else frozenset(Wait)

    def kernel(**contract: Any) -> Op:
        made = KernelContract(("a",), ("o",), **contract)
        return Op("kernel", made, lambda **_: None, made, waits=waits)

    x, y = chain.buffer("x", (4,), "float32"), chain.buffer("y", (4,), "float32")
    chain.step("writer", kernel(fence=True), a=chain.input("h", (4,), "float32"), o=x)
    chain.step("reader", kernel(independent=("a",)), a=x, o=y)
    return chain


@pytest.mark.parametrize("fixed", [False, True])
def test_a_chain_that_relies_on_a_fence_has_no_arm_that_breaks_it(fixed: bool) -> None:
    """Its writer, told to trigger early, would race, and rightly so: a mismatch there is no fault of the chain."""
    chain = fence_chain(fixed=fixed)
    assert model.find_races(chain, model.DOCUMENTED, 2) == []
    jobs = [job for job in clean_jobs(chain, Plan()) if isinstance(job, ArmJob)]
    assert {job.step for job in jobs} == {None, "producer", "reader"}
    for job in jobs:
        assert model.find_races(job.variant(chain), model.DOCUMENTED, 2) == []
    watched = [job for job in exposure_jobs(chain, Plan()) if isinstance(job, ExposureJob)]
    for exposure in watched:
        assert model.find_races(chain.varied(exposure.changes), model.DOCUMENTED, 2) == []
    assert not any("writer" in exposure.changes for exposure in watched)


def test_a_chain_that_races_as_it_is_keeps_its_arms() -> None:
    """What is wrong with it must be seen."""
    chain = fence_chain(fixed=False).varied({"writer": {"fence": False}})
    assert model.find_races(chain, model.DOCUMENTED)
    assert {job.step for job in clean_jobs(chain, Plan()) if isinstance(job, ArmJob)} >= {"writer"}


def test_a_kernel_that_goes_wrong_under_the_perturbation_is_no_twin() -> None:
    """Loaded again with its waits kept it would be caught all the same, since it does not need them."""
    chain = fence_chain(fixed=True)
    jobs = control_jobs(chain, Plan(delays_us=(10.0,)), found_in(chain))
    assert {(j.control.edge.reader, j.expected) for j in jobs if j.control.variant == RELOADED} == {("writer", "clean")}
    assert any(j.patched and j.expected == "caught" and j.control.edge.reader == "reader" for j in jobs)


# --- exposure where readers have arms of their own --------------------------------------------------------------------


def test_a_common_arm_that_exposes_nothing_is_not_watched(library: Library) -> None:
    """In csa2-separate every reader of q_projection lies behind a stand-in; of input_norm only one does."""
    chain = library("csa2-separate-m1")
    arms = [(job.name, job.step) for job in clean_jobs(chain, Plan(delays_us=(2.0,))) if isinstance(job, ArmJob)]
    watched = [job.name for job in exposure_jobs(chain, Plan()) if isinstance(job, ExposureJob)]
    assert [name for name, step in arms if step == "q_projection"] == ["early release", "early release, read by q_norm"]
    assert [name for name in watched if "(q_projection," in name] == [
        "early release, read by q_norm (q_projection, 10 us)"
    ]
    assert [name for name, step in arms if step == "input_norm"] == [
        "early release",
        "early release, read by kv_projection",
    ]
    assert [name for name in watched if "(input_norm," in name] == [
        "early release (input_norm, 10 us)",
        "early release, read by kv_projection (input_norm, 10 us)",
    ]
    assert [name for name in watched if "(q_norm," in name] == ["early release (q_norm, 10 us)"], "for its overlap"


@pytest.mark.parametrize("name", NAMES)
def test_every_data_edge_is_whole_in_some_watched_arm(name: str, library: Library) -> None:
    native = catalog.load(name)
    for chain in (native, library(name), library(name, only=(native.steps[2].name,))):
        whole = set()
        for job in exposure_jobs(chain, Plan()):
            assert isinstance(job, ExposureJob)
            varied = chain.varied(job.changes)
            late = {step.name for step in varied.steps if step.delay_us}
            whole |= {
                (e.writer, e.reader, e.buffer)
                for e in varied.data_edges
                if e.writer in late and all(varied[between].contract.trigger == "entry" for between in e.between)
            }
        assert whole == {(e.writer, e.reader, e.buffer) for e in chain.data_edges}


# --- several waits in one kernel -------------------------------------------------------------------------------------


def single(chain: Chain, control: Control) -> bool:
    patch = control.patch(chain)
    return patch is not None and bool(patch.remove)


def sites(chain: Chain, control: Control) -> tuple[int, ...] | None:
    patch = control.patch(chain)
    assert patch is not None
    return patch.remove


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_each_of_several_waits_is_removed_alone_on_each_edge_and_window(
    name: str, count: int, library: Library
) -> None:
    chain = library(name)
    reader = chain.steps[-1].name
    jobs = control_jobs(chain, Plan(), found_in(chain, **{reader: count}))
    found = [control for control in controls_of(jobs) if single(chain, control)]
    edges = [edge for edge in chain.data_edges if edge.reader == reader]
    assert edges
    several = range(count) if count > 1 else ()  # of one wait it would be the control that removes all
    assert sorted((c.edge.writer, sites(chain, c) or (), c.delay_us) for c in found) == sorted(
        (edge.writer, (site,), delay) for edge in edges for site in several for delay in DELAYS_US
    )
    for control in found:
        assert (control.fault, patched(chain, control)) == ("F02", [reader])
        assert control.apply(chain)[control.edge.writer].delay_us == control.delay_us
    assert {job.expected for job in jobs if single(chain, job.control)} <= {"unpromised"}
    texts = [job.describe() for job in jobs]
    assert len(set(texts)) == len(texts)


def test_waits_are_counted_over_all_kernels_of_a_step(library: Library) -> None:
    chain = library(FUSED)
    census = [*found_in(chain), node("q_norm", 2), node("q_norm", None, kind="memcpy")]
    found = [control for control in controls_of(control_jobs(chain, Plan(), census)) if single(chain, control)]
    assert {(c.edge.reader, sites(chain, c)) for c in found} == {("q_norm", (site,)) for site in (0, 1, 2)}


@pytest.mark.parametrize(
    ("faults", "readers"),
    [
        (None, {"q_norm", "kv_norm"}),
        (("F02",), {"q_norm", "kv_norm"}),
        (("F02@q_norm",), {"q_norm"}),
        (("F02@q_norm", "F07"), {"q_norm"}),
        (("F02@projection",), set()),
        (("F00", "F07"), set()),
        ((), set()),
    ],
)
def test_only_chosen_faults_are_planned_after_the_census_too(
    faults: tuple[str, ...] | None, readers: set[str], library: Library
) -> None:
    chain = library(FUSED)
    plan = Plan(faults=faults)
    jobs = control_jobs(chain, plan, found_in(chain, q_norm=3, kv_norm=2))
    assert {control.edge.reader for control in controls_of(jobs) if single(chain, control)} == readers
    assert [job for job in jobs if not single(chain, job.control)] == control_jobs(chain, plan)


def test_single_waits_run_in_the_windows_asked_for(library: Library) -> None:
    chain = library(FUSED)
    jobs = control_jobs(chain, Plan(delays_us=(3.0, 7.0)), found_in(chain, q_norm=2))
    assert [(sites(chain, c), c.delay_us) for c in controls_of(jobs) if single(chain, c)] == [
        ((site,), delay) for site in (0, 1) for delay in (3.0, 7.0)
    ]


def test_a_kernel_of_which_one_part_has_no_code_keeps_all_its_waits(library: Library) -> None:
    """Two waits were found, and the code of its other kernel was not: nothing of the step can be taken away."""
    chain = library(FUSED)
    census = [*found_in(chain, q_norm=2), node("q_norm", None, "stripped")]
    assert not any(
        patched(chain, c) for c in controls_of(control_jobs(chain, Plan(), census)) if c.edge.reader == "q_norm"
    )


def test_single_waits_are_removed_only_where_the_perturbation_is_possible(in_place: Chain) -> None:
    """gemm has no stand-in, since scale changes its output: its edge keeps its waits, and nothing breaks off."""
    jobs = control_jobs(in_place, Plan(), found_in(in_place, 2))
    found = {c.edge.writer for c in controls_of(jobs) if single(in_place, c)}
    assert found == {"producer", "scale"}
    assert {edge.writer for edge in in_place.data_edges} == {"producer", "gemm", "scale"}


def test_a_chain_that_is_partly_native_has_patched_controls_for_the_rest_only(library: Library) -> None:
    chain = library(FUSED, only=("q_norm",))
    jobs = control_jobs(chain, Plan(), found_in(chain, 2))
    changed = {step for control in controls_of(jobs) for step in patched(chain, control)}
    assert changed == {"q_norm"}
    assert {c.edge.reader for c in controls_of(jobs) if c.variant == RELOADED} == {"q_norm"}
    assert {c.edge.reader for c in controls_of(jobs) if single(chain, c)} == {"q_norm"}


def test_a_planted_chain_of_a_library_runs_its_fault_and_nothing_else(library: Library) -> None:
    chain = library(FUSED)
    plan = Plan(planted="F02@q_norm")
    plain, serialized = clean_jobs(chain, plan)
    assert isinstance(plain, ArmJob)
    assert plain.variant(chain)["q_norm"].patch == Patch(None)
    assert isinstance(serialized, ArmJob)
    assert serialized.serialized
    assert control_jobs(chain, plan, found_in(chain, 3)) == exposure_jobs(chain, plan) == []
