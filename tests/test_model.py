"""The rules of PDL (R1 to R9) as litmus tests on the model, and what the model tells of a race.

Every litmus test asks one question: may the reader overtake the writer? *Never*: the documentation orders them.
*Unpromised*: it does not, but hardware was seen to. *May*: under both rule sets. Three answers for three columns of the
table of rules; what hardware does is counted elsewhere.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest

from pdl_stress import Chain, KernelContract, Op, Trigger, Wait, model
from pdl_stress.chain import PRODUCER, DataEdge
from pdl_stress.model import DOCUMENTED, OBSERVED_SM90, RULE_SETS, RuleSet, find_races
from pdl_stress.model.events import Kind, build
from pdl_stress.model.schedule import play, random_picker

NEVER, UNPROMISED, MAY = "never", "unpromised", "may"


def kernel(
    reads: tuple[str, ...] = (), writes: tuple[str, ...] = (), *, ctas: int = 2, independent: Any = (), **contract: Any
) -> Op:
    contract_ = KernelContract(reads, writes, tuple(independent), **contract)

    def run(**_: Any) -> None:
        raise AssertionError("no kernel runs on the model")

    return Op("kernel", contract_, run, contract_, waits=frozenset(Wait), ctas=lambda shapes: ctas)


class Litmus:
    """A chain in the making: P writes x, C reads x, anything may stand between. No source step, so nothing is added."""

    def __init__(self) -> None:
        self.chain = Chain("litmus")
        self.free = self.chain.constant("free", (4,), "int32")
        self.x = self.chain.buffer("x", (4,), "int32")
        self.y = self.chain.buffer("y", (4,), "int32")
        self.z = self.chain.buffer("z", (4,), "int32")

    def producer(self, *, pdl: bool = True, ctas: int = 2, **contract: Any) -> Litmus:
        self.chain.step("P", kernel(("a",), ("o",), ctas=ctas, **contract), pdl=pdl, a=self.free, o=self.x)
        return self

    def middle(self, *, pdl: bool = True, **contract: Any) -> Litmus:
        """Does not touch x."""
        self.chain.step("M", kernel(("a",), ("o",), **contract), pdl=pdl, a=self.free, o=self.z)
        return self

    def consumer(self, *, pdl: bool = True, ctas: int = 2, **contract: Any) -> Litmus:
        self.chain.step("C", kernel(("a",), ("o",), ctas=ctas, **contract), pdl=pdl, a=self.x, o=self.y)
        return self

    def overtakes(self, rules: RuleSet) -> bool:
        return any(
            race.steps == ("P", "C") and race.buffer == "x" and race.kind == "stale read"
            for race in find_races(self.chain, rules)
        )

    @property
    def answer(self) -> str:
        documented, observed = self.overtakes(DOCUMENTED), self.overtakes(OBSERVED_SM90)
        assert documented or not observed, "hardware cannot be allowed what the documentation forbids"
        return MAY if observed else UNPROMISED if documented else NEVER


# --- R1, R2: the wait ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trigger", Trigger)
@pytest.mark.parametrize("wait", [Wait.ALL, Wait.LOADERS, Wait.BARRIER])
def test_r1_a_wait_covers_the_whole_prerequisite_wherever_it_triggers(trigger: Trigger, wait: Wait) -> None:
    assert Litmus().producer(trigger=trigger).consumer(wait=wait).answer == NEVER


def test_r2_a_trigger_before_the_stores_is_safe_only_behind_a_wait() -> None:
    assert Litmus().producer(trigger=Trigger.BEFORE_STORES).consumer().answer == NEVER
    assert Litmus().producer(trigger=Trigger.BEFORE_STORES).consumer(wait=Wait.NEVER).answer == MAY


def test_r1_what_is_read_before_the_wait_is_not_covered_by_it() -> None:
    assert Litmus().producer(trigger=Trigger.ENTRY).consumer(independent=("a",)).answer == MAY
    assert Litmus().producer(trigger=Trigger.ENTRY).consumer(wait=Wait.LATE).answer == MAY


# --- R3: the trigger and the fence (F12) ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trigger", "fence", "answer"),
    [
        (Trigger.ENTRY, False, MAY),
        (Trigger.ENTRY, True, MAY),
        (Trigger.AFTER_WAIT, True, MAY),
        (Trigger.BEFORE_STORES, True, MAY),
        (Trigger.AFTER_STORES, False, UNPROMISED),
        (Trigger.AFTER_STORES, True, NEVER),
    ],
)
def test_r3_only_a_fence_before_the_trigger_publishes_what_came_before_it(
    trigger: Trigger, fence: bool, answer: str
) -> None:
    assert Litmus().producer(trigger=trigger, fence=fence).consumer(wait=Wait.NEVER).answer == answer


def test_r3_stores_of_an_independent_operand_come_before_a_trigger_after_the_stores_too() -> None:
    def litmus(trigger: Trigger) -> Litmus:
        it = Litmus()
        op = kernel(("a",), ("o", "extra"), independent=("o",), trigger=trigger, fence=True)
        it.chain.step("P", op, a=it.free, o=it.x, extra=it.z)
        return it.consumer(wait=Wait.NEVER)

    assert litmus(Trigger.AFTER_STORES).answer == NEVER
    assert litmus(Trigger.ENTRY).answer == MAY


# --- R4: every CTA -------------------------------------------------------------------------------------------------


def test_r4_the_next_grid_starts_when_every_cta_has_triggered() -> None:
    """One CTA alone releases nobody: with all others held back, no event of the dependent can happen."""
    chain = Litmus().producer(trigger=Trigger.ENTRY, ctas=2).consumer(wait=Wait.NEVER).chain
    structure = build(chain, OBSERVED_SM90)
    triggers = [e for e in structure.events if e.step == "P" and e.kind is Kind.TRIGGER]
    assert [e.cta for e in triggers] == [0, 1]
    starts = [e for e in structure.events if e.step == "C" and e.kind is Kind.START]
    exits = {e.cta: e.index for e in structure.events if e.step == "P" and e.kind is Kind.EXIT}
    for start in starts:
        assert set(start.needs) == {(e.index, exits[e.cta]) for e in triggers}, "each CTA, by its trigger or its exit"


def test_r4_one_trigger_of_a_cta_counts_for_its_other_threads() -> None:
    """F11: a warp that triggers at entry releases the dependent although the storing threads of the CTA have not."""
    assert Litmus().producer(trigger=Trigger.ENTRY, ctas=1).consumer(wait=Wait.NEVER).answer == MAY


@pytest.mark.parametrize("ctas", [1, 2, 100])
def test_r4_holds_for_any_number_of_ctas(ctas: int) -> None:
    fenced = Litmus().producer(trigger=Trigger.AFTER_STORES, fence=True, ctas=ctas)
    assert fenced.consumer(wait=Wait.NEVER, ctas=ctas).answer == NEVER
    early = Litmus().producer(trigger=Trigger.ENTRY, ctas=ctas)
    assert early.consumer(wait=Wait.NEVER, ctas=ctas).answer == MAY


# --- R5: no trigger ------------------------------------------------------------------------------------------------


def test_r5_release_at_exit_promises_nothing_to_a_kernel_that_does_not_wait() -> None:
    assert Litmus().producer(trigger=Trigger.NONE).consumer(wait=Wait.NEVER).answer == UNPROMISED
    assert Litmus().producer(trigger=Trigger.NONE, fence=True).consumer(wait=Wait.NEVER).answer == UNPROMISED
    assert Litmus().producer(trigger=Trigger.NONE).consumer().answer == NEVER


# --- R6: the wait blocks the executing thread (F04) ----------------------------------------------------------------


def test_r6_a_wait_of_one_warp_needs_a_barrier_behind_it() -> None:
    early: dict[str, Any] = {"trigger": Trigger.ENTRY}
    assert Litmus().producer(**early).consumer(wait=Wait.ONE_WARP).answer == MAY
    assert Litmus().producer(**early).consumer(wait=Wait.BARRIER).answer == NEVER
    assert Litmus().producer(**early).consumer(wait=Wait.LOADERS).answer == NEVER
    assert Litmus().producer(**early).consumer(wait=Wait.BRANCH).answer == MAY


# --- R7: without the attribute -------------------------------------------------------------------------------------


@pytest.mark.parametrize("trigger", Trigger)
def test_r7_a_kernel_without_the_attribute_has_a_full_dependency(trigger: Trigger) -> None:
    assert Litmus().producer(trigger=trigger).consumer(pdl=False, wait=Wait.NEVER).answer == NEVER


@pytest.mark.parametrize("rules", RULE_SETS.values(), ids=list(RULE_SETS))
def test_r7_a_first_kernel_starts_at_once(rules: RuleSet) -> None:
    structure = build(Litmus().producer().chain, rules)
    assert all(e.needs == () for e in structure.events if e.kind is Kind.START)


# --- R8: transitivity (F06) ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("wait", [Wait.NEVER, Wait.BRANCH])
def test_r8_a_wait_behind_a_kernel_that_never_waits_is_unpromised(wait: Wait) -> None:
    it = Litmus().producer(trigger=Trigger.ENTRY).middle(wait=wait, trigger=Trigger.ENTRY).consumer()
    assert it.answer == UNPROMISED


@pytest.mark.parametrize("wait", [Wait.ALL, Wait.LOADERS, Wait.BARRIER, Wait.ONE_WARP, Wait.LATE])
def test_r8_is_not_needed_where_the_middle_kernel_completes_behind_its_prerequisite(wait: Wait) -> None:
    it = Litmus().producer(trigger=Trigger.ENTRY).middle(wait=wait, trigger=Trigger.ENTRY).consumer()
    assert it.answer == NEVER


def test_r8_speaks_of_full_edges_as_well() -> None:
    it = Litmus().producer(trigger=Trigger.ENTRY).middle(wait=Wait.NEVER, trigger=Trigger.ENTRY)
    assert it.consumer(pdl=False).answer == UNPROMISED


def test_r8_alone_explains_why_such_a_chain_is_unpromised() -> None:
    it = Litmus().producer(trigger=Trigger.ENTRY).middle(wait=Wait.NEVER, trigger=Trigger.ENTRY).consumer()
    assert not it.overtakes(replace(DOCUMENTED, name="r8", transitive=True))
    found = model.expect(it.chain, DataEdge("P", "C", "x", "a", ("M",)))
    assert found.expected == "unpromised"
    assert found.reason.startswith("R8:")
    assert "R3" not in found.reason
    assert "R5" not in found.reason


# --- R9: edges between replays -------------------------------------------------------------------------------------


def racy_across_replays(*, pdl: bool) -> Chain:
    """F22: the last kernel bumps a state that the first kernel of the next replay reads without waiting."""
    chain = Chain("state")
    hidden, state = chain.input("h", (4,), "int32"), chain.buffer("state", (4,), "int32")
    y = chain.buffer("y", (4,), "int32")
    chain.step("init", kernel(("a",), ("o",)), pdl=pdl, a=hidden, o=state)
    chain.step("use", kernel(("a",), ("o",), trigger=Trigger.ENTRY), pdl=pdl, a=state, o=y)
    return chain.varied({"init": {"independent": ("o",)}, PRODUCER: {"trigger": Trigger.ENTRY}})


def test_r9_a_race_between_replays_shows_only_back_to_back() -> None:
    chain = racy_across_replays(pdl=True)
    assert find_races(chain, OBSERVED_SM90, replays=1) == []
    (race, *_) = find_races(chain, OBSERVED_SM90, replays=2)
    assert (race.steps, race.kind, race.first.replay, race.second.replay) == (
        ("use", "init"),
        "read after overwrite",
        0,
        1,
    )
    assert find_races(racy_across_replays(pdl=False), OBSERVED_SM90, replays=2) == []


def test_outputs_go_to_a_ring_so_replays_do_not_overwrite_each_other() -> None:
    chain = Chain("ring")
    chain.step("s", kernel(("a",), ("o",), trigger=Trigger.ENTRY, wait=Wait.NEVER, independent=("o",)),
               a=chain.input("h", (4,), "float32"), o=chain.buffer("out", (4,), "float32"))  # fmt: skip
    races = find_races(chain, DOCUMENTED, replays=2)
    assert {race.buffer for race in races} == {"h"}


# --- F07: data two kernels old -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("between", "answer"),
    [
        ({"trigger": Trigger.ENTRY}, MAY),
        ({"trigger": Trigger.ENTRY, "fence": True}, MAY),
        ({"trigger": Trigger.AFTER_WAIT, "fence": True}, NEVER),
        ({"trigger": Trigger.AFTER_WAIT}, UNPROMISED),
        ({"trigger": Trigger.AFTER_STORES}, UNPROMISED),
        ({"trigger": Trigger.NONE}, UNPROMISED),
        ({"trigger": Trigger.AFTER_WAIT, "fence": True, "wait": Wait.NEVER}, MAY),
    ],
)
def test_f07_skipping_the_wait_rests_on_when_the_step_between_triggers(between: dict[str, Any], answer: str) -> None:
    assert Litmus().producer(trigger=Trigger.ENTRY).middle(**between).consumer(wait=Wait.NEVER).answer == answer


@pytest.mark.parametrize("producer", [{"trigger": Trigger.AFTER_STORES, "fence": True}, {"pdl": False}])
@pytest.mark.parametrize(
    ("between", "answer"),
    [
        ({"trigger": Trigger.AFTER_WAIT}, UNPROMISED),
        ({"trigger": Trigger.AFTER_STORES}, UNPROMISED),
        ({"trigger": Trigger.NONE}, UNPROMISED),
        ({"trigger": Trigger.AFTER_WAIT, "fence": True}, NEVER),
        ({"trigger": Trigger.AFTER_STORES, "fence": True}, NEVER),
    ],
)
def test_f07_a_fence_of_the_producer_does_not_stand_in_for_one_of_the_step_between(
    producer: dict[str, Any], between: dict[str, Any], answer: str
) -> None:
    """Visibility is handed on from grid to grid; where one of them releases without it, nothing is handed on."""
    assert Litmus().producer(**producer).middle(**between).consumer(wait=Wait.NEVER).answer == answer


@pytest.mark.parametrize(
    ("contract", "documented"),
    [
        ({"trigger": Trigger.ENTRY}, 0),
        ({"trigger": Trigger.AFTER_STORES}, 0),
        ({"trigger": Trigger.NONE}, 0),
        ({"trigger": Trigger.NONE, "fence": True}, 0),
        ({"trigger": Trigger.ENTRY, "fence": True}, 2),
        ({"trigger": Trigger.AFTER_STORES, "fence": True}, 2),
    ],
)
def test_r3_a_release_without_visibility_contributes_no_need(contract: dict[str, Any], documented: int) -> None:
    for rules, groups in ((DOCUMENTED, documented), (OBSERVED_SM90, 2)):
        structure = build(Litmus().producer(ctas=2, **contract).consumer(wait=Wait.NEVER).chain, rules)
        starts = [event for event in structure.events if event.step == "C" and event.kind is Kind.START]
        assert [len(start.needs) for start in starts] == [groups, groups]


# --- what is found, and how it is told -----------------------------------------------------------------------------


def war() -> Chain:
    """F08: C overwrites before its wait what P still reads."""
    chain = Chain("war")
    hidden = chain.input("h", (4,), "float32")
    x, y = chain.buffer("x", (4,), "float32"), chain.buffer("y", (4,), "float32")
    chain.step("init", kernel(("a",), ("o",)), a=hidden, o=x)
    chain.step("P", kernel(("a",), ("o",), trigger=Trigger.ENTRY), a=x, o=y)
    chain.step("C", kernel(("a",), ("o",), independent=("o",)), a=hidden, o=x)
    return chain


def test_f08_and_f09_write_after_read_and_write_after_write_are_races_too() -> None:
    observed = {(race.steps, race.kind) for race in find_races(war(), OBSERVED_SM90)}
    assert observed == {(("P", "C"), "read after overwrite")}, "init has triggered after its stores before P began"
    assert (("init", "C"), "lost write") in {(race.steps, race.kind) for race in find_races(war(), DOCUMENTED)}
    both_early = war().varied({"init": {"trigger": Trigger.ENTRY}})
    assert (("init", "C"), "lost write") in {(race.steps, race.kind) for race in find_races(both_early, OBSERVED_SM90)}
    repaired = war().varied({"C": {"independent": ()}})
    assert find_races(repaired, DOCUMENTED) == []


@pytest.mark.parametrize(("wait", "races"), [(Wait.LATE, False), (Wait.NEVER, True), (Wait.ONE_WARP, True)])
def test_f01_a_late_wait_still_orders_the_stores_behind_it(wait: Wait, races: bool) -> None:
    chain = war().varied({"C": {"independent": (), "wait": wait}})
    steps = {race.steps for race in find_races(chain, OBSERVED_SM90) if race.buffer == "x"}
    assert (("P", "C") in steps) is races


def test_two_reads_never_race() -> None:
    chain = Litmus().producer().consumer(wait=Wait.NEVER).middle(wait=Wait.NEVER).chain
    assert all(Kind.WRITE in (r.first.kind, r.second.kind) for r in find_races(chain, DOCUMENTED))
    assert "free" not in {race.buffer for race in find_races(chain, DOCUMENTED)}


def test_views_that_share_nothing_do_not_race() -> None:
    chain = Chain("halves")
    free, x, y = (
        chain.constant("free", (4,), "float32"),
        chain.buffer("x", (4,), "float32"),
        chain.buffer("y", (4,), "float32"),
    )
    early: dict[str, Any] = {"trigger": Trigger.ENTRY, "wait": Wait.NEVER}
    chain.step("left", kernel(("a",), ("o",), **early), a=free, o=x[:2])
    chain.step("right", kernel(("a",), ("o",), **early), a=free, o=x[2:])
    chain.step("reads_right", kernel(("a",), ("o",), **early), a=x[2:], o=y)
    assert {race.steps for race in find_races(chain, OBSERVED_SM90)} == {("right", "reads_right")}


def test_an_operand_updated_in_place_is_ordered_and_plays_clean() -> None:
    """Two CTAs of one grid touching a buffer in place are that kernel's own affair."""
    chain = Chain("in-place")
    hidden, x = chain.input("h", (4,), "float32"), chain.buffer("x", (4,), "float32")
    chain.step("fill", kernel(("a",), ("o",)), a=hidden, o=x)
    chain.step("add", kernel(("a", "io"), ("io",)), a=hidden, io=x)
    judgement = model.judge(chain)
    assert judgement.ordered
    assert judgement.schedules_with_anomaly == 0
    broken = chain.varied({"add": {"wait": Wait.NEVER}, "fill": {"trigger": Trigger.ENTRY}})
    found = model.explain(broken, DataEdge("fill", "add", "x", "io"), OBSERVED_SM90)
    assert found is not None
    assert (found.kind, found.held) == ("stale read", "poison")


@pytest.mark.parametrize("wait", Wait)
def test_random_schedules_see_what_the_exact_order_says(wait: Wait) -> None:
    chain = Litmus().producer(trigger=Trigger.ENTRY).consumer(wait=wait).chain
    judgement = model.judge(chain, OBSERVED_SM90)
    assert judgement.ordered is wait.orders_dependents
    assert bool(judgement.schedules_with_anomaly) is not judgement.ordered, "100 schedules, half of them starve P"


def test_a_seed_makes_schedules_reproducible() -> None:
    structure = build(war(), DOCUMENTED)
    orders = [play(structure, random_picker(structure, seed)).order for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == list(range(len(structure.events)))


@pytest.mark.parametrize(
    ("ctas", "held"), [(1, "poison"), (2, "poison")], ids=["one CTA", "two CTAs, both held back by the same trigger"]
)
def test_a_counterexample_says_who_read_what_too_early(ctas: int, held: str) -> None:
    chain = Litmus().producer(trigger=Trigger.ENTRY, ctas=1).consumer(wait=Wait.NEVER, ctas=ctas).chain
    found = model.judge(chain, OBSERVED_SM90).counterexample
    assert found is not None
    assert (found.writer, found.reader, found.buffer, found.kind, found.held) == ("P", "C", "x", "stale read", held)
    text = str(found)
    assert "C CTA 0" in text
    assert "reads x, which holds poison   <-- before P writes it" in text
    assert text.rstrip().endswith("writes x   <-- too late")
    assert [int(line.split()[0]) for line in found.timeline] == list(range(1, len(found.timeline) + 1))


def test_a_counterexample_prefers_a_schedule_that_hardware_can_follow() -> None:
    """Under the documented rules a grid may take effect before it can start: true, and a poor explanation."""
    chain = Litmus().producer(trigger=Trigger.ENTRY).consumer(wait=Wait.NEVER).chain
    found = model.judge(chain, DOCUMENTED).counterexample
    assert found is not None
    assert found.rules == "observed:sm_90"
    unpromised = Litmus().producer(trigger=Trigger.NONE).consumer(wait=Wait.NEVER).chain
    found = model.judge(unpromised, DOCUMENTED).counterexample
    assert found is not None
    assert found.rules == "documented"


def test_a_stale_generation_is_told_from_poison() -> None:
    """The ring of replays: the second replay's reader finds what the first replay left."""
    chain = Chain("generations")
    hidden, y = chain.input("h", (4,), "float32"), chain.buffer("y", (4,), "float32")
    x = chain.buffer("x", (4,), "float32")
    chain.step("P", kernel(("a",), ("o",), ctas=1), a=hidden, o=x)
    chain.step("C", kernel(("a",), ("o",), ctas=1), a=x, o=y)
    broken = chain.varied({"P": {"trigger": Trigger.ENTRY}, "C": {"wait": Wait.NEVER}})
    structure = build(broken, OBSERVED_SM90, replays=2)
    held = {
        anomaly.held
        for seed in range(100)
        for anomaly in play(structure, random_picker(structure, seed)).anomalies
        if anomaly.step == "C"
    }
    assert held == {"poison", "an earlier generation"}


def test_half_written_memory_is_called_mixed() -> None:
    """One CTA of P has stored, the other has not."""
    chain = Litmus().producer(trigger=Trigger.BEFORE_STORES, ctas=2).consumer(wait=Wait.NEVER, ctas=1).chain
    structure = build(chain, OBSERVED_SM90)
    seen = {
        anomaly.held
        for seed in range(200)
        for anomaly in play(structure, random_picker(structure, seed)).anomalies
        if anomaly.step == "C"
    }
    assert seen == {"poison", "mixed"}


# --- judge, explain, expect ----------------------------------------------------------------------------------------


def edge(between: tuple[str, ...] = ()) -> DataEdge:
    return DataEdge("P", "C", "x", "a", between)


def test_explain_speaks_of_one_edge_only() -> None:
    chain = Litmus().producer(trigger=Trigger.ENTRY).consumer(wait=Wait.NEVER).chain
    found = model.explain(chain, edge(), OBSERVED_SM90)
    assert found is not None
    assert (found.writer, found.reader) == ("P", "C")
    assert model.explain(chain, DataEdge("P", "M", "x", "a"), OBSERVED_SM90) is None
    assert model.explain(chain, DataEdge("P", "C", "y", "a"), OBSERVED_SM90) is None


@pytest.mark.parametrize(
    ("producer", "consumer", "expected", "words"),
    [
        ({"trigger": Trigger.ENTRY}, {}, "clean", "documented rules order P before C"),
        ({"trigger": Trigger.ENTRY}, {"wait": Wait.NEVER}, "caught", "under every rule set"),
        ({"trigger": Trigger.AFTER_STORES}, {"wait": Wait.NEVER}, "unpromised", "R3:"),
        ({"trigger": Trigger.NONE}, {"wait": Wait.NEVER}, "unpromised", "R5:"),
    ],
)
def test_expect_gives_the_open_question_that_decides(
    producer: dict[str, Any], consumer: dict[str, Any], expected: str, words: str
) -> None:
    found = model.expect(Litmus().producer(**producer).consumer(**consumer).chain, edge())
    assert found.expected == expected
    assert words in found.reason


def test_expect_looks_at_the_whole_chain() -> None:
    """A kill counts replays whose result differs, whatever raced in them."""

    def chain(**last: Any) -> Chain:
        it = Litmus().producer(trigger=Trigger.ENTRY).consumer()
        it.chain.step("R", kernel(("a",), ("o",), **last), a=it.y, o=it.z)
        return it.chain

    assert model.expect(chain(), edge()).expected == "clean"
    with_another = chain(wait=Wait.NEVER).varied({"C": {"trigger": Trigger.ENTRY}})
    found = model.expect(with_another, edge())
    assert (found.expected, found.reason) == (
        "unpromised",
        "not attributable: another race is possible, stale read: R reads y before C writes it",
    )
    both = with_another.varied({"C": {"wait": Wait.NEVER}})
    assert {race.steps for race in find_races(both, OBSERVED_SM90)} >= {("P", "C"), ("C", "R")}
    assert model.expect(both, edge()).reason.startswith("not attributable: ")
    documented_only = model.expect(chain(wait=Wait.NEVER), edge())
    assert documented_only.expected == "unpromised", "P -> C is ordered, but C -> R is so on hardware only"
    assert documented_only.reason.startswith("R3:")


def test_a_read_after_overwrite_on_the_edge_is_another_cause() -> None:
    """The race of the control's edge is its stale read and nothing else."""
    chain = war().varied({"P": {"trigger": Trigger.ENTRY}, "C": {"wait": Wait.NEVER}})
    observed = find_races(chain, OBSERVED_SM90)
    assert {race.kind for race in observed if race.steps == ("P", "C")} == {"read after overwrite"}
    assert model.expect(chain, DataEdge("P", "C", "x", "a")).expected == "unpromised"


def test_the_rule_sets_differ_in_the_open_questions_only() -> None:
    assert RuleSet("documented", transitive=False, trigger_orders=False, exit_orders=False) == DOCUMENTED
    assert RuleSet("observed:sm_90", transitive=True, trigger_orders=True, exit_orders=True) == OBSERVED_SM90
    assert set(model.rules.OPEN_QUESTIONS) == {"transitive", "trigger_orders", "exit_orders"}


def test_a_model_that_contradicts_itself_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judging by the exact order alone would hide a defect in it; the schedules are there to notice."""
    module = sys.modules["pdl_stress.model.judge"]  # the package's attribute of that name is the function
    monkeypatch.setattr(module, "races_of", lambda structure: [])
    chain = Litmus().producer(trigger=Trigger.ENTRY).consumer(wait=Wait.NEVER).chain
    with pytest.raises(RuntimeError, match="schedules went wrong although every access is ordered"):
        model.judge(chain)
