"""Every rule of a verdict: start from a result that passes, break one thing, and the verdict must say so."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdl_stress.faults import RELOADED
from pdl_stress.outcome import USAGE_EXIT_CODE, Outcome, worst
from pdl_stress.results import ArmResult, CaseResult, ControlResult, DataEdgeResult, EdgeResult, Mismatch
from pdl_stress.statistics import upper_bound
from pdl_stress.verdict import MIN_REPLAYS, judge_hardware, judge_model

FAIL, ERROR, INCONCLUSIVE, ORDERED, PASS = Outcome
REPLAYS = 20_000


def control(expected: str, verdict: str, **fields: object) -> ControlResult:
    made = ControlResult(
        "F02", "never waits", "c", "p", "c", "x", 10.0, expected, "the rules", 256, 0, None, verdict
    )  # fmt: skip
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def passing() -> CaseResult:
    """p -> c through x, and c -> d through y, as a run on a GPU leaves it when all is well."""
    arms = [ArmResult(name, REPLAYS, 0, upper_bound(REPLAYS)) for name in ("as deployed", "serialized", "back to back")]
    arms += [ArmResult("delayed", REPLAYS, 0, upper_bound(REPLAYS), 10.0, step) for step in ("p", "c", "d")]
    case = CaseResult("chain", "native", ["k"], "cuda", arms=arms, pool=256, requested_replays=REPLAYS)
    case.edges = [EdgeResult(a, b, "programmatic", 1.0, ["as deployed"]) for a, b in (("p", "c"), ("c", "d"))]
    case.exposure = "time stamps, 128 replays"
    case.data_edges = [
        DataEdgeResult("p", "c", "x", ["delayed (p, 10 us)"]),
        DataEdgeResult("c", "d", "y", ["delayed (c, 10 us)"]),
    ]
    case.controls = [
        control("caught", "caught", kills=256, cause_checked=True),
        control("caught", "caught", kills=18, cause_checked=True, writer="c", reader="d", step="d", buffer="y"),
        control("clean", "clean", fault="F04", variant="twin"),
        control("unpromised", "not seen", delay_us=0.0),
    ]
    return planned(case)


def planned(case: CaseResult) -> CaseResult:
    """The case as if what it holds is what was planned."""
    case.planned = (len(case.arms), len(case.controls))
    return case


def passing_on_model() -> CaseResult:
    case = CaseResult("chain", "native", ["k"], "model")
    case.data_edges = [DataEdgeResult("p", "c", "x")]
    case.controls = [
        control("caught", "refuted", replays=0),
        control("clean", "ordered", replays=0),
        control("unpromised", "allowed", replays=0),
    ]
    return planned(case)


def mismatch() -> Mismatch:
    return Mismatch("p", "c", "x", "y", [0, 7], "nan", "0.5", "poison", 12, ["p->c"], False)


# --- outcomes ------------------------------------------------------------------------------------------------------


def test_exit_codes() -> None:
    assert {str(o): o.exit_code for o in Outcome} == {
        "PASS": 0,
        "ORDERED": 0,
        "FAIL": 1,
        "ERROR": 3,
        "INCONCLUSIVE": 4,
    }
    assert USAGE_EXIT_CODE == 2


@given(outcomes=st.lists(st.sampled_from(Outcome)))
def test_the_worst_outcome_wins(outcomes: list[Outcome]) -> None:
    order = [FAIL, ERROR, INCONCLUSIVE, ORDERED, PASS]
    assert worst(outcomes) is next((o for o in order if o in outcomes), INCONCLUSIVE)
    assert worst(iter(outcomes)) is worst(outcomes)


def test_nothing_shown_is_inconclusive() -> None:
    assert worst([]) is INCONCLUSIVE


# --- hardware ------------------------------------------------------------------------------------------------------


def test_the_starting_point_passes() -> None:
    assert judge_hardware(passing()) == (PASS, [])


Break = Callable[[CaseResult], object]


def planned_anew(case: CaseResult, damage: Callable[[], object]) -> None:
    damage()
    planned(case)


BROKEN: dict[str, tuple[Break, Outcome, str]] = {
    "one mismatch": (
        lambda c: vars(c.arms[0]).update(mismatches=1, mismatch=mismatch()),
        FAIL,
        "1 of 20000 replays differ in arm «as deployed»: c read x before p had written it (it held poison)",
    ),
    "one mismatch in a billion": (
        lambda c: vars(c.arms[2]).update(replays=10**9, mismatches=1),
        FAIL,
        "1 of 1000000000 replays differ in arm «back to back»: not explained",
    ),
    "a mismatch whose explanation failed": (
        lambda c: vars(c.arms[2]).update(mismatches=1, note="not explained: RuntimeError: no memory"),
        FAIL,
        "1 of 20000 replays differ in arm «back to back»: not explained: RuntimeError: no memory",
    ),
    "a mismatch under a perturbation": (
        lambda c: vars(c.arms[4]).update(mismatches=20_000),
        FAIL,
        "20000 of 20000 replays differ in arm «delayed (c, 10 us)»",
    ),
    "a mismatch with full edges": (
        lambda c: vars(c.arms[1]).update(mismatches=3),
        FAIL,
        "3 of 20000 replays differ in arm «serialized»",
    ),
    "the model found a bad schedule": (
        lambda c: c.timeline.append("1  c  reads x"),
        FAIL,
        "the contracts allow a bad schedule",
    ),
    "a twin that kills": (
        lambda c: vars(c.controls[2]).update(kills=1, verdict="dirty"),
        FAIL,
        "control F04 (twin) on p->c, 10 us must be clean, and 1 of 256 replays differ",
    ),
    "an arm that crashed": (lambda c: c.errors.append("arm serialized: a hang"), ERROR, "arm serialized: a hang"),
    "a control that crashed": (
        lambda c: vars(c.controls[3]).update(verdict="error", note="the worker died"),
        ERROR,
        "on p->c, 0 us did not finish: the worker died",
    ),
    "an arm whose counters differ": (
        lambda c: vars(c.arms[3]).update(counters_agree=False),
        INCONCLUSIVE,
        "device and host counts differ in arm «delayed (p, 10 us)»",
    ),
    "one replay too few": (
        lambda c: vars(c.arms[1]).update(replays=REPLAYS - 1),
        INCONCLUSIVE,
        "only 19999 graded replays in arm «serialized»",
    ),
    "an arm that graded nothing": (
        lambda c: vars(c.arms[1]).update(replays=0),
        INCONCLUSIVE,
        "only 0 graded replays in arm «serialized»",
    ),
    "no arm": (lambda c: planned_anew(c, c.arms.clear), INCONCLUSIVE, "no arm ran"),
    "an arm that got lost": (lambda c: c.arms.pop(), ERROR, "5 of 6 planned arms have a result"),
    "all arms lost": (lambda c: c.arms.clear(), ERROR, "0 of 6 planned arms have a result"),
    "an arm too many": (lambda c: c.arms.append(c.arms[0]), ERROR, "7 of 6 planned arms have a result"),
    "an unpromised control that got lost": (
        lambda c: c.controls.pop(),
        ERROR,
        "3 of 4 planned controls have a result",
    ),
    "a buffer that is written again": (
        lambda c: c.reuses.append("d writes x, which c reads"),
        INCONCLUSIVE,
        "d writes x, which c reads: no control covers that order yet",
    ),
    "a step whose waits cannot be removed": (
        lambda c: c.uncontrolled.update(d="no machine code of k: stripped"),
        INCONCLUSIVE,
        "no control of d is possible: no machine code of k: stripped",
    ),
    "a step that the census shows to be untested": (
        lambda c: c.untested.append("d launches no kernel"),
        INCONCLUSIVE,
        "d launches no kernel",
    ),
    "machine code patched and caught, never run unpatched": (
        lambda c: vars(c.controls[0]).update(patched="all waits removed"),
        INCONCLUSIVE,
        "control F02 (never waits) on p->c, 10 us, was caught with patched machine code; the same code unpatched",
    ),
    "a kernel that cannot be exchanged for itself": (
        lambda c: vars(c.controls[2]).update(fault="F02", variant=RELOADED, kills=256, verdict="dirty"),
        INCONCLUSIVE,
        f"control F02 ({RELOADED}) on p->c, 10 us must be clean, and 256 of 256 replays differ: its machine code",
    ),
    "a must-catch control missed": (
        lambda c: vars(c.controls[0]).update(verdict="missed", kills=17),
        INCONCLUSIVE,
        "control F02 (never waits) on p->c, 10 us must be caught and was not: 17 kills of 256",
    ),
    "a kill for another reason": (
        lambda c: vars(c.controls[0]).update(verdict="missed", cause_checked=False),
        INCONCLUSIVE,
        "256 kills of 256, but also with full edges, which is another fault",
    ),
    "a data edge without a caught control": (
        lambda c: planned_anew(c, lambda: c.controls.pop(1)),
        INCONCLUSIVE,
        "no control was caught on c->d through y",
    ),
    "only an unpromised kill on a data edge": (
        lambda c: vars(c.controls[1]).update(expected="unpromised", verdict="seen"),
        INCONCLUSIVE,
        "no control was caught on c->d through y",
    ),
    "no controls": (
        lambda c: planned_anew(c, c.controls.clear),
        INCONCLUSIVE,
        "no control was caught on p->c through x",
    ),
    "a twin that did not run": (
        lambda c: vars(c.controls[2]).update(replays=0),
        INCONCLUSIVE,
        "control F04 (twin) on p->c, 10 us must be shown clean and was not: clean after 0 replays",
    ),
    "a twin whose counters differ": (
        lambda c: vars(c.controls[2]).update(note="device and host counts differ"),
        INCONCLUSIVE,
        "must be shown clean and was not: clean after 256 replays; device and host counts differ",
    ),
    "a twin without a verdict": (
        lambda c: vars(c.controls[2]).update(verdict=""),
        INCONCLUSIVE,
        "must be shown clean and was not: no verdict after 256 replays",
    ),
    "no clean arm under the perturbation of a catch": (
        lambda c: planned_anew(c, lambda: c.arms.pop(3)),
        INCONCLUSIVE,
        "no clean arm delays p by 10 us, where controls were caught",
    ),
    "a clean arm under another window only": (
        lambda c: vars(c.arms[3]).update(delay_us=2.0),
        INCONCLUSIVE,
        "no clean arm delays p by 10 us",
    ),
    "a full graph edge": (
        lambda c: vars(c.edges[0]).update(kind="full"),
        INCONCLUSIVE,
        "graph edge p->c is full, so nothing overlapped there",
    ),
    "an edge that was full in some replays": (
        lambda c: vars(c.edges[1]).update(kind="full/programmatic"),
        INCONCLUSIVE,
        "graph edge c->d is full/programmatic",
    ),
    "edges not read": (lambda c: c.edges.clear(), INCONCLUSIVE, "the graph's edges were not read"),
    "an edge that never overlapped": (
        lambda c: vars(c.edges[1]).update(overlap=0.0, overlapped_in=[]),
        INCONCLUSIVE,
        "graph edge c->d overlapped in no arm",
    ),
    "an edge whose overlap was not measured": (
        lambda c: vars(c.edges[1]).update(overlap=None, overlapped_in=[]),
        INCONCLUSIVE,
        "graph edge c->d overlapped in no arm",
    ),
    "a data edge never exposed": (
        lambda c: c.data_edges[1].exposed_by.clear(),
        INCONCLUSIVE,
        "data edge c->d through y was never exposed (time stamps, 128 replays)",
    ),
    "no data edge": (
        lambda c: planned_anew(c, lambda: vars(c).update(data_edges=[], controls=[])),
        INCONCLUSIVE,
        "the chain has no data edge, so there was nothing to test",
    ),
    "a debugger attached": (
        lambda c: vars(c).update(arms=[], controls=[], blockers=["CUDA_LAUNCH_BLOCKING: 1. Unset it."]),
        INCONCLUSIVE,
        "nothing ran: CUDA_LAUNCH_BLOCKING: 1. Unset it.",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_one_broken_thing_costs_the_pass_and_is_named(what: str) -> None:
    damage, outcome, words = BROKEN[what]
    case = passing()
    damage(case)
    got, reasons = judge_hardware(case)
    assert got is outcome
    assert any(words in reason for reason in reasons), reasons


def test_several_broken_things_are_all_named_and_the_worst_decides() -> None:
    case = passing()
    chosen = ["an arm whose counters differ", "a control that crashed", "a full graph edge"]
    for what in chosen:
        BROKEN[what][0](case)
    outcome, reasons = judge_hardware(case)
    assert outcome is ERROR
    for what in chosen:
        assert any(BROKEN[what][2] in reason for reason in reasons)
    BROKEN["one mismatch"][0](case)
    assert judge_hardware(case)[0] is FAIL


@pytest.mark.parametrize(("replays", "requested"), [(MIN_REPLAYS - 1, 1), (1, 1)])
def test_asking_for_few_replays_does_not_buy_a_pass(replays: int, requested: int) -> None:
    case = passing()
    case.requested_replays = requested
    for arm in case.arms:
        arm.replays = replays
    assert judge_hardware(case)[0] is INCONCLUSIVE
    for arm in case.arms:
        arm.replays = MIN_REPLAYS
    assert judge_hardware(case)[0] is PASS


def test_unpromised_controls_have_no_say() -> None:
    for verdict, kills in (("seen", 256), ("not seen", 0), ("seen", 1)):
        case = passing()
        vars(case.controls[3]).update(verdict=verdict, kills=kills, cause_checked=None)
        assert judge_hardware(case) == (PASS, [])


def test_late_weights_need_a_clean_twin_instead_of_an_arm() -> None:
    """F28 delays a source that only the control has, so no clean arm can delay it."""
    case = passing()
    late = {"fault": "F28", "writer": "late_weight", "reader": "c", "buffer": "w"}
    case.controls.append(control("caught", "caught", kills=256, cause_checked=True, **late))
    outcome, reasons = judge_hardware(planned(case))
    assert outcome is INCONCLUSIVE
    assert reasons == ["no clean arm delays late_weight by 10 us, where controls were caught"]
    case.controls.append(control("clean", "clean", variant="twin", **late))
    assert judge_hardware(planned(case)) == (PASS, [])


def test_a_perturbation_that_showed_an_unpromised_fault_needs_its_clean_arm_too() -> None:
    case = passing()
    vars(case.controls[3]).update(delay_us=2.0, verdict="seen", kills=40)
    assert judge_hardware(case) == (INCONCLUSIVE, ["no clean arm delays p by 2 us, where controls were caught"])
    case.arms.append(ArmResult("delayed", REPLAYS, 0, upper_bound(REPLAYS), 2.0, "p"))
    assert judge_hardware(planned(case)) == (PASS, [])


def test_an_edge_whose_overlap_was_never_measured_is_not_shown_to_overlap() -> None:
    """``overlap`` is None where nothing could be measured: that is no evidence either."""
    case = passing()
    vars(case.edges[0]).update(overlap=None, overlapped_in=[])
    assert judge_hardware(case) == (INCONCLUSIVE, ["graph edge p->c overlapped in no arm"])


def test_how_exposure_was_measured_stands_in_the_reason() -> None:
    """The reader must learn whether the edge cannot be exposed or the profiler failed."""
    for method, shown in (
        ("time stamps, 128 replays", "time stamps, 128 replays"),
        ("the profiler gave no valid records: it recorded no kernel",) * 2,
        ("", "not measured"),
    ):
        case = passing()
        case.exposure = method
        case.data_edges[1].exposed_by.clear()
        assert judge_hardware(case) == (INCONCLUSIVE, [f"data edge c->d through y was never exposed ({shown})"])


@pytest.mark.parametrize("kills", [1, 256])
def test_only_the_kernel_that_was_loaded_again_may_differ_without_a_fail(kills: int) -> None:
    """Any other twin that kills shows a fault; this one shows that its kernel cannot be exchanged for itself."""
    for variant, outcome in ((RELOADED, INCONCLUSIVE), ("twin", FAIL), ("loaded again", FAIL)):
        case = passing()
        vars(case.controls[2]).update(variant=variant, fault="F02", kills=kills, verdict="dirty")
        got, (reason,) = judge_hardware(case)
        assert got is outcome
        assert ("its machine code cannot be exchanged like that" in reason) is (outcome is INCONCLUSIVE)
        assert f"{kills} of 256 replays differ" in reason


def test_a_reloaded_kernel_that_did_not_run_is_no_twin_either() -> None:
    case = passing()
    vars(case.controls[2]).update(variant=RELOADED, replays=0)
    outcome, (reason,) = judge_hardware(case)
    assert outcome is INCONCLUSIVE
    assert "must be shown clean and was not: clean after 0 replays" in reason


def test_a_clean_reloaded_kernel_and_an_unpromised_single_wait_cost_nothing() -> None:
    case = passing()
    case.controls.append(control("clean", "clean", variant=RELOADED))
    case.controls.append(control("unpromised", "seen", variant="wait 1 removed", kills=256, cause_checked=True))
    case.controls.append(control("unpromised", "not seen", variant="wait 0 removed"))
    assert judge_hardware(planned(case)) == (PASS, [])


def patched_case(**twin: object) -> CaseResult:
    """p->c was caught with patched machine code, and its twin ran; ``twin``: what is different about it."""
    case = passing()
    case.controls[0].patched = "all waits removed"
    made = {"expected": "clean", "verdict": "clean", "variant": RELOADED, "patched": "loaded again", **twin}
    case.controls.append(control(**made))  # type: ignore[arg-type]
    return planned(case)


ALONE = (
    "control F02 (never waits) on p->c, 10 us, was caught with patched machine code; "
    "the same code unpatched was not shown to be clean there"
)


def test_a_caught_patch_passes_with_its_clean_twin_of_whatever_fault() -> None:
    assert judge_hardware(patched_case()) == (PASS, [])
    assert judge_hardware(patched_case(fault="F00")) == (PASS, [])
    assert judge_hardware(patched_case(expected="unpromised", verdict="not seen")) == (PASS, [])


@pytest.mark.parametrize(
    "twin",
    [
        {"kills": 1, "verdict": "dirty"},
        {"kills": 1},
        {"expected": "unpromised", "kills": 1, "verdict": "seen"},
        {"replays": 0},
        {"verdict": ""},
        {"verdict": "error", "replays": 0, "note": "the worker died"},
        {"verdict": "error"},
        {"note": "device and host counts differ"},
        {"variant": "twin"},
        {"delay_us": 2.0},
        {"writer": "c"},
        {"reader": "d"},
        {"buffer": "y"},
    ],
    ids=lambda twin: ", ".join(f"{name} {value}" for name, value in twin.items()) or "as it should be",
)
def test_a_caught_patch_without_its_clean_twin_shows_nothing(twin: dict[str, object]) -> None:
    """Another window, edge or buffer is another perturbation, and a twin that did not end clean is none."""
    outcome, reasons = judge_hardware(patched_case(**twin))
    assert outcome in (INCONCLUSIVE, ERROR)
    assert (outcome is ERROR) is (twin.get("verdict") == "error")
    assert ALONE in reasons


def test_each_patched_control_that_was_caught_needs_its_twin() -> None:
    case = patched_case()
    case.controls[1].patched = "all waits removed"
    assert judge_hardware(case) == (INCONCLUSIVE, [ALONE.replace("p->c", "c->d")])
    case.controls.append(control("clean", "clean", variant=RELOADED, writer="c", reader="d", buffer="y"))
    assert judge_hardware(planned(case)) == (PASS, [])


def test_only_what_must_be_caught_rests_on_a_twin() -> None:
    """Neither what promises nothing, nor a rebuilt kernel, nor what a planted fault shows."""
    case = patched_case()
    case.controls.append(control("unpromised", "seen", patched="wait 0 removed", kills=256, writer="c", reader="d"))
    case.controls.append(control("unpromised", "not seen", patched="all waits removed", delay_us=2.0))
    assert judge_hardware(planned(case)) == (PASS, [])
    case.planted = "F02 never waits @ p->c, 10 us"
    case.controls.pop(4)
    assert judge_hardware(planned(case)) == (PASS, [])


def test_everything_untested_is_named() -> None:
    case = passing()
    case.untested = ["c launches no kernel", "d launches several nodes that overlap (a, b)"]
    assert judge_hardware(case) == (INCONCLUSIVE, case.untested)
    case.errors = ["arm serialized: a hang"]
    assert judge_hardware(case) == (ERROR, [*case.errors, *case.untested])


def test_every_step_without_a_control_is_named() -> None:
    case = passing()
    case.uncontrolled = {"c": "no machine code of k: stripped", "d": "it launches no kernel"}
    assert judge_hardware(case) == (
        INCONCLUSIVE,
        [
            "no control of c is possible: no machine code of k: stripped",
            "no control of d is possible: it launches no kernel",
        ],
    )


def test_an_edge_may_overlap_in_a_perturbed_arm_only() -> None:
    case = passing()
    vars(case.edges[0]).update(overlap=0.0, overlapped_in=["delayed (p, 10 us)"])
    assert judge_hardware(case) == (PASS, [])


def test_a_planted_chain_is_not_asked_for_controls_or_exposure() -> None:
    case = passing()
    case.planted = "F02 never waits @ p->c, 10 us"
    case.controls.clear()
    for edge in case.edges:
        edge.overlapped_in.clear()
    for data_edge in case.data_edges:
        data_edge.exposed_by.clear()
    case.arms = case.arms[:1]
    vars(case.arms[0]).update(mismatches=20_000, mismatch=mismatch())
    case.timeline = ["1  c  reads x"]
    outcome, reasons = judge_hardware(planned(case))
    assert outcome is FAIL
    assert not any("control" in reason or "exposed" in reason for reason in reasons)


def test_what_the_model_proved_is_not_lost_behind_a_blocker() -> None:
    case = passing()
    case.blockers, case.timeline = ["a profiler"], ["1  c  reads x"]
    assert judge_hardware(case)[0] is FAIL


def test_a_mismatch_stands_although_the_run_was_cut_short() -> None:
    case = passing()
    del case.arms[1:]
    case.controls.clear()
    vars(case.arms[0]).update(mismatches=1, mismatch=mismatch())
    outcome, reasons = judge_hardware(case)
    assert outcome is FAIL
    assert "1 of 6 planned arms have a result" in reasons


def test_judging_changes_nothing() -> None:
    case = passing()
    before = copy.deepcopy(case)
    judge_hardware(case)
    judge_model(case)
    assert case == before


# --- model ---------------------------------------------------------------------------------------------------------


def test_the_starting_point_is_ordered() -> None:
    assert judge_model(passing_on_model()) == (ORDERED, [])


BROKEN_ON_MODEL: dict[str, tuple[Break, Outcome, str]] = {
    "a counterexample": (lambda c: c.timeline.append("1  c  reads x"), FAIL, "the contracts allow a bad schedule"),
    "an error": (lambda c: c.errors.append("it broke"), ERROR, "it broke"),
    "a control that got lost": (lambda c: c.controls.pop(), ERROR, "2 of 3 planned controls have a result"),
    "a must-catch control not refuted": (
        lambda c: planned_anew(c, lambda: c.controls.append(control("caught", "missed", variant="another"))),
        INCONCLUSIVE,
        "control F02 (another) on p->c must be refuted and was not",
    ),
    "no control on a data edge": (
        lambda c: planned_anew(c, c.controls.clear),
        INCONCLUSIVE,
        "no control was refuted on p->c",
    ),
    "controls on another buffer only": (
        lambda c: vars(c.controls[0]).update(buffer="y"),
        INCONCLUSIVE,
        "no control was refuted on p->c through x",
    ),
    "kills instead of an order": (
        lambda c: vars(c.controls[0]).update(verdict="caught"),
        INCONCLUSIVE,
        "no control was refuted on p->c",
    ),
    "no data edge": (
        lambda c: c.data_edges.clear(),
        INCONCLUSIVE,
        "the chain has no data edge",
    ),
}


@pytest.mark.parametrize("what", BROKEN_ON_MODEL)
def test_one_broken_thing_costs_the_order_and_is_named(what: str) -> None:
    damage, outcome, words = BROKEN_ON_MODEL[what]
    case = passing_on_model()
    damage(case)
    got, reasons = judge_model(case)
    assert got is outcome
    assert any(words in reason for reason in reasons), reasons


def test_the_model_never_passes_and_hardware_is_never_merely_ordered() -> None:
    assert judge_model(passing())[0] is not PASS
    assert judge_hardware(passing_on_model())[0] is INCONCLUSIVE


# --- words of a mismatch -------------------------------------------------------------------------------------------


def test_a_mismatch_names_the_data_edge_the_element_and_the_cure() -> None:
    assert str(mismatch()) == (
        "c read x before p had written it (it held poison); y[0, 7] is nan, expected 0.5; serializing p->c removes it."
    )
    uncured = mismatch()
    uncured.cured_by = []
    assert "serializing no single graph edge removes it" in str(uncured)


def test_a_mismatch_with_full_edges_too_is_not_blamed_on_pdl() -> None:
    found = mismatch()
    found.also_serialized = True
    assert str(found) == "y[0, 7] is nan, expected 0.5; it differs with full edges too: not a PDL ordering fault."
