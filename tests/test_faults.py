"""The catalogue: what each control must show, and how a fault is named and planted.

The expectations below are written out from the design, not computed: the model that computes them is under test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pdl_stress import Chain, KernelContract, Op, Trigger, UnsupportedVariant, UsageError, Wait, catalog, model
from pdl_stress.chain import DataEdge, Patch
from pdl_stress.faults import (
    ALL_DELAYS_US,
    DELAYS_US,
    FAULTS,
    LATE_ROWS,
    LATE_WEIGHT,
    MUST_CATCH_US,
    RELOADED,
    Control,
    Fault,
    attacked_edges,
    check_controls,
    expectations,
    one_wait_removed,
    perturbation,
    plan_controls,
    plant,
    reloaded,
    select_faults,
)

CHAINS = list(catalog.CSA2)
EARLY_TRIGGERS = ("entry", "after_wait", "before_stores")
PLANTABLE = {
    "csa2-fused-m1": {
        "F00": ["input_norm", "projection", "q_norm", "kv_norm"],
        "F01": ["input_norm", "projection", "q_norm", "kv_norm"],
        "F02": ["input_norm", "projection", "q_norm"],  # behind q_norm, which waits, kv_norm's wait is unpromised
        "F04": ["input_norm", "projection", "q_norm", "kv_norm"],
        "F05": ["input_norm", "projection", "q_norm", "kv_norm"],
        "F07": ["kv_norm"],  # the only reader of data that is two kernels old
        "F28": ["projection"],  # the only one with an operand that is declared independent
    },
    "csa2-separate-m1": {
        "F00": ["input_norm", "q_projection", "kv_projection", "q_norm", "kv_norm"],
        "F01": ["input_norm", "q_projection", "kv_projection", "q_norm", "kv_norm"],
        "F02": ["input_norm", "q_projection"],
        "F04": ["input_norm", "q_projection", "kv_projection", "q_norm", "kv_norm"],
        "F05": ["input_norm", "q_projection", "kv_projection", "q_norm", "kv_norm"],
        "F07": ["kv_projection", "q_norm", "kv_norm"],
        "F28": ["q_projection", "kv_projection"],
    },
}
PLANTABLE["csa2-separate-m4"] = PLANTABLE["csa2-separate-m8"] = PLANTABLE["csa2-separate-m1"]


def designed(control: Control, chain: Chain) -> str:
    """What the design demands of a control whose window is wide, on a shipped chain."""
    order = [step.name for step in chain.steps]
    behind = order[order.index(control.edge.reader) + 1 :] if control.edge.reader in order else []
    skipped = any(edge.writer in control.edge.between and edge.reader in behind for edge in chain.data_edges)
    variant, skips = control.variant, bool(control.edge.between)
    if variant == RELOADED:  # its own machine code, nothing taken away
        return "clean"
    match control.fault:
        case "F00":
            place, consumer = variant.removeprefix("trigger ").split(", consumer ")
            if consumer == "waits":
                return "clean"
            return "caught" if place in EARLY_TRIGGERS else "unpromised"
        case "F02":
            return "unpromised" if skips else "caught"
        case "F04":
            return "clean" if "twin" in variant else "caught"
        case "F07":
            return {
                "step between triggers at entry": "caught",
                # The reader of the twin does not wait: what comes behind it and reads what the step between wrote rests
                # on R8.
                "step between: wait, fence, trigger (twin)": "unpromised" if skipped else "clean",
                "step between: wait, trigger": "unpromised",
            }[variant]
        case "F28":
            return "clean" if "twin" in variant else "caught"
    assert control.fault in ("F01", "F05")
    return "caught"


def per_edge(edge: DataEdge) -> dict[str, int]:
    return {"F00": 10, "F01": 1, "F02": 1, "F04": 2, "F05": 1, "F07": 3 if edge.between else 0}


# --- expectations on the shipped chains ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHAINS)
def test_every_control_is_expected_to_show_what_the_design_demands(name: str) -> None:
    chain = catalog.load(name)
    controls = plan_controls(chain, None, (MUST_CATCH_US,))
    assert {c.name: c.expectation(chain).expected for c in controls} == {c.name: designed(c, chain) for c in controls}


@pytest.mark.parametrize("name", CHAINS)
def test_every_data_edge_gets_every_control_at_every_delay(name: str) -> None:
    chain = catalog.load(name)
    controls = plan_controls(chain, None, ALL_DELAYS_US)
    for delay in ALL_DELAYS_US:
        here = [control for control in controls if control.delay_us == delay]
        for edge in chain.data_edges:
            counts = {fault: sum(c.fault == fault and c.edge == edge for c in here) for fault in per_edge(edge)}
            assert counts == per_edge(edge)
        assert sum(c.fault == "F28" for c in here) == 3 * sum(bool(s.contract.independent) for s in chain.steps)
    assert len({c.name for c in controls}) == len(controls), "a control is named by fault, variant, edge and window"


@pytest.mark.parametrize("name", CHAINS)
def test_every_data_edge_has_a_control_that_must_be_caught(name: str) -> None:
    chain = catalog.load(name)
    caught = {
        (c.edge.writer, c.edge.reader)
        for c, expectation in expectations(chain, plan_controls(chain, None, DELAYS_US))
        if expectation.expected == "caught"
    }
    assert {(e.writer, e.reader) for e in chain.data_edges} <= caught


@pytest.mark.parametrize("name", CHAINS)
def test_expectations_made_together_are_those_made_one_by_one(name: str) -> None:
    chain = catalog.load(name)
    controls = plan_controls(chain, ("F00", "F07", "F28"), (0.0, 10.0))
    assert expectations(chain, controls) == [(c, c.expectation(chain)) for c in controls]


@pytest.mark.parametrize("delay", [0.0, 1.0, 2.0, 9.99])
def test_a_narrow_window_promises_nothing_for_a_broken_control(delay: float) -> None:
    chain = catalog.load("csa2-fused-m1")
    (control,) = plan_controls(chain, ("F02@q_norm",), (delay,))
    found = control.expectation(chain)
    assert found.expected == "unpromised"
    assert found.reason == f"a window of {delay:g} us is below 10 us: counted for the power curve"


def test_a_window_of_ten_microseconds_promises_and_a_narrow_one_still_wants_twins_clean() -> None:
    chain = catalog.load("csa2-fused-m1")
    (control,) = plan_controls(chain, ("F02@q_norm",), (10.0,))
    assert control.expectation(chain).expected == "caught"
    _, twin = plan_controls(chain, ("F04@q_norm",), (0.0,))
    assert twin.expectation(chain).expected == "clean"


def test_the_reason_of_an_unpromised_control_is_the_open_question() -> None:
    chain = catalog.load("csa2-fused-m1")

    def reason(fault: str, variant: str, reader: str) -> str:
        (control,) = (c for c in plan_controls(chain, (f"{fault}@{reader}",), (10.0,)) if c.variant == variant)
        return control.expectation(chain).reason

    assert reason("F00", "trigger after_stores, consumer does not wait", "q_norm").startswith("R3:")
    assert reason("F00", "trigger none, consumer does not wait", "q_norm").startswith("R5:")
    assert reason("F02", "never waits", "kv_norm").startswith("R3:")
    assert reason("F07", "step between: wait, trigger", "kv_norm").startswith("R3:")
    chain = catalog.load("csa2-separate-m1")
    assert reason("F07", "step between: wait, fence, trigger (twin)", "q_norm").startswith("R8:")


def test_a_twin_that_breaks_another_edge_is_not_must_be_clean(residual_chain: Chain) -> None:
    """F07 takes R's wait away for A's x; but R's wait also orders B's y."""
    chain = residual_chain
    found = expectations(chain, plan_controls(chain, ("F07",), (10.0,)))
    twins = [(c, e) for c, e in found if "wait" in c.variant]  # M: wait, (fence,) trigger
    assert {(c.edge.writer, c.edge.reader, e.expected) for c, e in twins} == {("A", "R", "unpromised")}
    reasons = {expectation.reason for _, expectation in twins}
    assert reasons == {"not attributable: another race is possible, stale read: R reads y before B writes it"}


def test_what_must_be_caught_is_its_readers_own_doing_and_covers_a_residual(residual_chain: Chain) -> None:
    chain = residual_chain
    controls = expectations(chain, plan_controls(chain, None, (10.0,)))
    caught = [(c, e) for c, e in controls if e.expected == "caught"]
    assert {(c.edge.writer, c.edge.reader) for c, _ in caught} == {
        ("producer", "A"),
        ("A", "B"),
        ("A", "R"),
        ("B", "R"),
    }
    for control, _ in caught:
        races = model.find_races(control.apply(chain), model.OBSERVED_SM90)
        assert {race.second.step for race in races} == {control.edge.reader}
        assert (control.edge.writer, control.edge.reader) in {race.steps for race in races}
    for control, expectation in controls:
        if expectation.expected == "clean":
            assert model.find_races(control.apply(chain), model.DOCUMENTED) == []


# --- what a control changes ----------------------------------------------------------------------------------------


def test_the_perturbation_delays_the_writer_and_opens_the_steps_between() -> None:
    edge = DataEdge("p", "c", "x", "a", ("m1", "m2"))
    opened = {"trigger": Trigger.ENTRY}
    assert perturbation(edge, 5.0) == {"p": {**opened, "delay_us": 5.0}, "m1": opened, "m2": opened}
    assert perturbation(edge, 5.0, between=False) == {"p": {**opened, "delay_us": 5.0}}


@pytest.mark.parametrize("name", CHAINS)
def test_a_control_delays_its_writer_breaks_its_reader_and_leaves_the_rest(name: str) -> None:
    chain = catalog.load(name)
    for control in plan_controls(chain, None, (2.0,)):
        edge, broken = control.edge, control.apply(chain)
        if not control.late_rows:
            assert broken[edge.writer].delay_us == 2.0
        for step in chain.steps:
            touched = step.name in (edge.writer, edge.reader, *edge.between)
            if not touched:
                assert broken[step.name].contract == step.contract, f"{control.name} changes {step.name}"
                assert broken[step.name].delay_us is None
        reader, deployed = broken[edge.reader].contract, chain[edge.reader].contract
        if (reader.wait, deployed.trigger) == (Wait.NEVER, Trigger.AFTER_WAIT):
            assert reader.trigger is Trigger.ENTRY, "with no wait, nothing is before the trigger"
        else:
            assert reader.trigger is deployed.trigger
        unbroken = "twin" in control.variant or "consumer waits" in control.variant or control.fault in ("F07", "F28")
        assert unbroken or not reader.wait.orders_dependents, control.name


def test_f28_writes_the_first_rows_of_the_weight_directly_before_its_reader() -> None:
    chain = catalog.load("csa2-separate-m4")
    broken, written, twin = plan_controls(chain, ("F28@kv_projection",), (10.0,))
    for control in (broken, written, twin):
        varied = control.apply(chain)
        names = [step.name for step in varied.steps]
        assert names[names.index("kv_projection") - 1] == LATE_WEIGHT
        late = varied[LATE_WEIGHT]
        assert late.source
        assert late.delay_us == 10.0
        ((_, view),) = late.writes()
        assert (view.buffer.name, view.box[0]) == ("wqkv", (1280, 1280 + LATE_ROWS))
        assert varied["input_norm"].contract == chain["input_norm"].contract
    for control in (broken, written):
        assert control.apply(chain)["kv_projection"].op == chain["kv_projection"].op
    late, early = (control.apply(chain)[LATE_WEIGHT].contract for control in (broken, written))
    assert (late.trigger, late.fence) == (Trigger.ENTRY, False)
    assert (early.trigger, early.fence) == (Trigger.AFTER_STORES, True), "in time, and visible (R3)"
    assert twin.apply(chain)[LATE_WEIGHT].contract == late, "the twin is repaired in the reader alone"
    assert not twin.apply(chain)["kv_projection"].contract.is_independent("weight")
    assert chain["kv_projection"].contract.is_independent("weight")


def test_f28_attacks_constants_declared_independent_and_nothing_else() -> None:
    chain = catalog.load("csa2-fused-m1")
    edges = attacked_edges(chain, FAULTS["F28"])
    assert [(e.writer, e.reader, e.buffer) for e in edges] == [(LATE_WEIGHT, "projection", "wqkv")]
    assert attacked_edges(chain, FAULTS["F02"]) == chain.data_edges


def test_controls_travel_between_processes() -> None:
    import pickle

    controls = plan_controls(catalog.load("csa2-fused-m1"), None, (2.0,))
    assert pickle.loads(pickle.dumps(controls)) == controls


# --- choosing ------------------------------------------------------------------------------------------------------


def test_faults_are_chosen_in_catalogue_order() -> None:
    assert [f.id for f in select_faults(None)] == list(FAULTS)
    assert [f.id for f in select_faults(("F28", "F02@q_norm", "F02"))] == ["F02", "F28"]
    assert select_faults(()) == []


@pytest.mark.parametrize("bad", ["F99", "f02", "", "F99@q_norm", "@q_norm"])
def test_an_unknown_fault_is_refused_with_the_known_ones(bad: str) -> None:
    with pytest.raises(UsageError, match=r"unknown fault .*the catalogue has F00, F01"):
        select_faults(("F02", bad))
    with pytest.raises(UsageError, match="unknown fault"):
        plan_controls(catalog.load("csa2-fused-m1"), (bad,), DELAYS_US)


def test_a_fault_can_be_asked_of_one_step() -> None:
    chain = catalog.load("csa2-fused-m1")
    controls = plan_controls(chain, ("F02@q_norm", "F05"), (10.0,))
    assert {(c.fault, c.edge.reader) for c in controls} == {
        ("F02", "q_norm"),
        *(("F05", edge.reader) for edge in chain.data_edges),
    }


def test_a_step_asked_for_must_be_in_one_of_the_chains() -> None:
    fused, separate = catalog.load("csa2-fused-m1"), catalog.load("csa2-separate-m1")
    check_controls([fused, separate], ("F02@q_projection", "F05"))
    check_controls([fused], None)
    with pytest.raises(UsageError, match="no chain of this run has a step 'q_projection'"):
        check_controls([fused], ("F02@q_projection",))
    with pytest.raises(UsageError, match="unknown fault 'F99'"):
        check_controls([fused], ("F99@q_norm",))


def library_chain() -> Chain:
    """Steps of a third party's library: nothing about them can be rebuilt."""
    chain = Chain("library")
    contract = KernelContract(("a",), ("o",))
    fixed = Op("library op", contract, lambda **_: None, contract)
    x, y = chain.buffer("x", (4,), "float32"), chain.buffer("y", (4,), "float32")
    chain.step("first", fixed, a=chain.input("h", (4,), "float32"), o=x)
    chain.step("second", fixed, a=x, o=y)
    return chain


def test_kernels_that_cannot_be_rebuilt_get_the_controls_that_need_no_rebuilding() -> None:
    """Their writers give way to stand-ins, their waits are removed; half a wait or a late one they cannot have."""
    chain = library_chain()
    controls = plan_controls(chain, None, (10.0,))
    assert {c.fault for c in controls} == {"F00", "F02"}
    assert {(c.edge.writer, c.edge.reader) for c in controls} == {("producer", "first"), ("first", "second")}
    for control in controls:
        broken = control.apply(chain)
        assert broken[control.edge.writer].source, "triggers early and writes late, whatever its kernel does"
        reader = broken[control.edge.reader]
        assert not reader.source, "the very kernel under test"
        assert (reader.patch == Patch(None)) is (reader.contract.wait is Wait.NEVER)
    with pytest.raises(UnsupportedVariant):
        Control("F01", "", DataEdge("first", "second", "x", "a"), 1.0, {"second": {"wait": Wait.LATE}}).apply(chain)


Library = Callable[..., Chain]


def per_library_edge(edge: DataEdge) -> dict[str, int]:
    """Nothing that needs half a wait, or a late one; and one twin, of the first control that patches machine code."""
    return {**per_edge(edge), "F00": 11, "F01": 0, "F04": 0, "F05": 0}


@pytest.mark.parametrize("name", CHAINS)
def test_every_data_edge_of_library_kernels_gets_every_control_that_they_can_have(name: str, library: Library) -> None:
    chain = library(name)
    controls = plan_controls(chain, None, DELAYS_US)
    for delay in DELAYS_US:
        here = [control for control in controls if control.delay_us == delay]
        for edge in chain.data_edges:
            counts = {fault: sum(c.fault == fault and c.edge == edge for c in here) for fault in per_edge(edge)}
            assert counts == per_library_edge(edge)
        # Late weights need no change of the reader; reading them behind its wait would be one.
        assert sum(c.fault == "F28" for c in here) == 2 * sum("projection" in s.name for s in chain.steps)
    assert len({c.name for c in controls}) == len(controls)
    assert {c.fault for c in controls} == {"F00", "F02", "F07", "F28"}


@pytest.mark.parametrize("name", CHAINS)
def test_controls_of_library_kernels_are_expected_to_show_what_the_design_demands(name: str, library: Library) -> None:
    """The same as of native ones: a stand-in and a removed wait are what a rebuilt kernel would have been."""
    chain = library(name)
    found = expectations(chain, plan_controls(chain, None, (MUST_CATCH_US,)))
    assert {c.name: e.expected for c, e in found} == {c.name: designed(c, chain) for c, _ in found}
    assert all(expectation == control.expectation(chain) for control, expectation in found)


@pytest.mark.parametrize("name", CHAINS)
def test_every_data_edge_of_library_kernels_has_a_control_that_must_be_caught(name: str, library: Library) -> None:
    native = catalog.load(name)
    chains = [library(name), *(library(name, only=(step.name,)) for step in native.steps[1:])]
    for chain in chains:
        caught = {
            (c.edge.writer, c.edge.reader, c.edge.buffer)
            for c, expectation in expectations(chain, plan_controls(chain, ("F00", "F02", "F07"), DELAYS_US))
            if expectation.expected == "caught"
        }
        assert caught == {(e.writer, e.reader, e.buffer) for e in chain.data_edges}


@pytest.mark.parametrize("name", CHAINS)
def test_a_control_of_library_kernels_leaves_the_reader_its_own_binary(name: str, library: Library) -> None:
    """What is under test is that very kernel; all else may be a stand-in."""
    chain = library(name)
    for control in plan_controls(chain, None, (2.0,)):
        edge, broken = control.edge, control.apply(chain)
        reader = broken[edge.reader]
        assert reader.op.run is chain[edge.reader].op.run
        assert not reader.source
        assert reader.delay_us is None
        assert reader.contract.trigger is chain[edge.reader].contract.trigger
        if not control.late_rows:
            assert broken[edge.writer].source
            assert broken[edge.writer].delay_us == 2.0
        for step in chain.steps:
            if step.name not in (edge.writer, edge.reader, *edge.between):
                left = broken[step.name]
                assert (left.op, left.delay_us) == (step.op, None), f"{control.name} changes {step.name}"
            elif step.name in edge.between:
                between = broken[step.name]
                assert between.patch is None
                assert between.delay_us is None
                assert between is step or between.source
        never = reader.contract.wait is Wait.NEVER
        assert reader.patch == (Patch(None) if never else Patch(()) if control.variant == RELOADED else None)
        assert [s.name for s in broken.steps if s.patch] == ([edge.reader] if reader.patch else [])


def test_a_reloaded_kernel_runs_under_the_perturbation_that_shows_a_removed_wait(library: Library) -> None:
    """The twin of F02 has to be clean where the fault would show: writer late, and every step between let by."""
    chain = library("csa2-fused-m1")
    for edge in chain.data_edges:
        (twin,) = (c for c in plan_controls(chain, ("F02",), (10.0,)) if c.edge == edge and c.variant == RELOADED)
        changes = dict(twin.changes)
        assert changes.pop(edge.reader) == {"patch": Patch(())}
        assert changes == perturbation(edge, 10.0)
        assert twin.apply(chain)[edge.reader].contract == chain[edge.reader].contract


@pytest.mark.parametrize("site", [0, 1, 2])
def test_a_control_with_one_wait_removed_says_which_and_promises_nothing(site: int, library: Library) -> None:
    chain = library("csa2-fused-m1")
    for edge in chain.data_edges:
        for delay in (0.0, 10.0):
            control = one_wait_removed(edge, delay, site)
            assert control.name == f"F02 wait {site} removed @ {edge.writer}->{edge.reader}, {delay:g} us"
            assert control.changes == {**perturbation(edge, delay), edge.reader: {"patch": Patch((site,))}}
            expectation = control.expectation(chain)
            assert expectation.expected == "unpromised"
            assert "one wait of several was removed" in expectation.reason


def test_the_patch_of_a_control_is_what_happens_to_its_readers_machine_code() -> None:
    chain = library_chain()
    edge = DataEdge("first", "second", "x", "a")
    patches = {
        Patch((1,)): {"second": {"patch": Patch((1,))}, "first": {"patch": Patch(())}},
        Patch(()): {"second": {"patch": Patch(())}},
        Patch(None): {"second": {"wait": Wait.NEVER}},  # no word of a patch: the kernel cannot be rebuilt
        None: {"first": {"patch": Patch(())}},
    }
    for patch, changes in patches.items():
        assert Control("F02", "v", edge, 1.0, changes).patch(chain) == patch
    assert Control("F02", "v", edge, 1.0).patch(chain) is None
    never = Control("F02", "v", edge, 1.0, {"second": {"wait": Wait.NEVER}})
    assert never.patch(chain.modelled()) is None, "one that can be rebuilt is rebuilt"
    with pytest.raises(UnsupportedVariant):
        Control("F02", "v", edge, 1.0, {"second": {"wait": Wait.LATE}}).patch(chain)


def test_a_removed_wait_is_expected_to_show_and_a_reloaded_kernel_to_be_clean() -> None:
    chain = library_chain()
    for edge in chain.data_edges:
        mine = [c for c in plan_controls(chain, ("F02",), (10.0,)) if c.edge == edge]
        expected = {c.variant: found.expected for c, found in expectations(chain, mine)}
        assert expected == {"never waits": "caught", RELOADED: "clean"}
        by_variant = {c.variant: c for c in mine}
        assert by_variant[RELOADED].patch(chain) == Patch(())
        single = one_wait_removed(edge, 10.0, 1)
        assert single.patch(chain) == Patch((1,))
        assert single.expectation(chain).expected == "unpromised", "other waits may still order the read"
        ((_, same),) = expectations(chain, [single])
        assert same == single.expectation(chain)


# --- twins of patched machine code -----------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [None, *[(fault,) for fault in FAULTS], ("F07@kv_norm",), ("F28", "F07", "F02")])
@pytest.mark.parametrize("name", ["csa2-fused-m1", "csa2-separate-m1"])
def test_wherever_machine_code_is_patched_the_unpatched_code_runs_too(
    name: str, ids: tuple[str, ...] | None, library: Library
) -> None:
    """Whatever the faults that were asked for: a second module has globals of its own, and so proves nothing alone."""
    native = catalog.load(name)
    for chain in (library(name), library(name, only=(native.steps[-1].name,))):
        controls = plan_controls(chain, ids, (0.0, 10.0))
        patched = {(c.edge, c.delay_us) for c in controls if c.patch(chain) not in (None, Patch(()))}
        twins = [c for c in controls if c.variant == RELOADED]
        assert len(twins) == len({(c.edge, c.delay_us) for c in twins}), "each once"
        assert {(c.edge, c.delay_us) for c in twins} == patched
        for twin in twins:
            assert twin.patch(chain) == Patch(())
            asked = {text.partition("@")[0] for text in ids or FAULTS}
            assert twin.fault in asked, "it belongs to a fault that was asked for"
            varied = twin.apply(chain)
            assert varied[twin.edge.writer].delay_us == twin.delay_us
            assert all(varied[between].contract.trigger is Trigger.ENTRY for between in twin.edge.between)
        if ids in (("F00",), ("F02",)):
            assert twins, "these patch whatever cannot be rebuilt"
        if ids in (("F01",), ("F04",), ("F05",), ("F28",)):
            assert not twins, "and these nothing"


def test_controls_that_no_stand_in_makes_possible_are_left_out(in_place: Chain) -> None:
    controls = plan_controls(in_place, ("F02",), (10.0,))
    assert [(c.edge.writer, c.edge.reader, c.variant) for c in controls] == [
        ("producer", "gemm", "never waits"),
        ("scale", "norm", "never waits"),
        ("producer", "gemm", RELOADED),
        ("scale", "norm", RELOADED),
    ], "what follows gemm changes its output, so nothing can take its place"


def test_a_twin_that_no_stand_in_makes_possible_is_left_out() -> None:
    """The fault leaves the step between as it is, its twin would have to hurry it. The verdict misses it then."""
    chain = Chain("no-twin")
    fixed = library_chain()["first"].op
    x, y, z = (chain.buffer(name, (4,), "float32") for name in "xyz")
    hidden = chain.input("h", (4,), "float32")
    chain.step("writer", fixed, a=hidden, o=x)
    chain.step("between", fixed, a=hidden, o=y)
    chain.step("reader", fixed, a=x, o=z)
    in_place = KernelContract(("x",), ("x",))
    chain.step("changes", Op("in place", in_place, lambda **_: None, in_place), x=y)
    controls = plan_controls(chain, ("F02@reader",), (10.0,))
    assert [(c.edge.between, c.variant) for c in controls] == [(("between",), "never waits")]
    with pytest.raises(UnsupportedVariant):
        reloaded(controls[0]).apply(chain)


@pytest.mark.parametrize("name", CHAINS)
def test_native_kernels_are_never_patched(name: str) -> None:
    chain = catalog.load(name)
    controls = plan_controls(chain, None, (10.0,))
    assert not any(step.patch for control in controls for step in control.apply(chain).steps)
    assert RELOADED not in {control.variant for control in controls}


# --- planting ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "fault"), [(name, fault) for name in CHAINS for fault in FAULTS])
def test_every_fault_can_be_planted_where_it_makes_sense(name: str, fault: str) -> None:
    chain = catalog.load(name)
    possible = PLANTABLE[name][fault]
    for step in chain.steps:
        if step.name in possible:
            control = plant(chain, f"{fault}@{step.name}")
            assert (control.fault, control.edge.reader, control.delay_us) == (fault, step.name, MUST_CATCH_US)
            found = model.explain(control.apply(chain), control.edge, model.OBSERVED_SM90)
            assert found is not None, "a planted fault is one that hardware can be seen to show"
            assert (found.writer, found.reader) == (control.edge.writer, step.name)
        else:
            with pytest.raises(UsageError, match=f"cannot be caught at '{step.name}' of '{name}'") as error:
                plant(chain, f"{fault}@{step.name}")
            assert str(error.value).endswith(f"steps where it can: {', '.join(sorted(possible))}.")


@pytest.mark.parametrize("text", ["", "F02", "F02@", "@q_norm", "@"])
def test_a_malformed_plant_shows_the_form(text: str) -> None:
    with pytest.raises(UsageError, match="expected FAULT@STEP, for example F02@q_norm"):
        plant(catalog.load("csa2-fused-m1"), text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("F99@q_norm", "unknown fault 'F99'"),
        ("F02@nowhere", "no step 'nowhere'; its steps are"),
        ("F02@q_norm@kv_norm", "no step 'q_norm@kv_norm'"),
    ],
)
def test_an_unknown_name_in_a_plant_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        plant(catalog.load("csa2-fused-m1"), text)


def test_what_can_be_planted_in_an_op_that_cannot_be_rebuilt() -> None:
    control = plant(library_chain(), "F02@second")
    assert (control.variant, control.apply(library_chain())["second"].patch) == ("never waits", Patch(None))
    with pytest.raises(UsageError, match="cannot be caught at 'second' of 'library'; steps where it can: none"):
        plant(library_chain(), "F04@second")


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("fault", list(FAULTS))
def test_faults_are_planted_in_library_kernels_where_native_ones_take_them(
    name: str, fault: str, library: Library
) -> None:
    chain = library(name)
    possible = PLANTABLE[name][fault] if fault in ("F00", "F02", "F07", "F28") else []
    for step in chain.steps:
        if step.name in possible:
            control = plant(chain, f"{fault}@{step.name}")
            assert model.explain(control.apply(chain), control.edge, model.OBSERVED_SM90) is not None
        else:
            with pytest.raises(UsageError, match=f"cannot be caught at '{step.name}'"):
                plant(chain, f"{fault}@{step.name}")


# --- one more fault ------------------------------------------------------------------------------------------------


def test_one_entry_is_enough_for_a_new_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(chain: Chain, edge: DataEdge, delay_us: float) -> Iterator[Control]:
        if edge.reader == "q_norm":
            changes: dict[str, dict[str, Any]] = perturbation(edge, delay_us)
            changes[edge.reader] = {"independent": (edge.operand,)}
            yield Control("X99", "reads its input early", edge, delay_us, changes)

    monkeypatch.setitem(FAULTS, "X99", Fault("X99", "an operand is declared independent by mistake", plan))
    chain = catalog.load("csa2-fused-m1")
    (control,) = plan_controls(chain, ("X99",), (10.0,))
    assert control in plan_controls(chain, None, (10.0,))
    assert control.name == "X99 reads its input early @ projection->q_norm, 10 us"
    assert control.expectation(chain).expected == "caught"
    assert plant(chain, "X99@q_norm") == control
    with pytest.raises(UsageError, match="steps where it can: q_norm"):
        plant(chain, "X99@kv_norm")
