"""Laws of the model, on random chains: it agrees with played schedules, with brute force, and with common sense."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from pdl_stress import Chain, KernelContract, Op, Trigger, Wait, model
from pdl_stress.buffers import Buffer, Role, covered
from pdl_stress.model import DOCUMENTED, OBSERVED_SM90, Race, RuleSet, find_races
from pdl_stress.model.events import Cell, Kind, Structure, build
from pdl_stress.model.order import races_of, without
from pdl_stress.model.schedule import INITIAL, POISON, play, random_picker, sequential_versions, starving_picker

RANDOM_SCHEDULES = 25
SIZE = 4

Span = tuple[str, int, int]
"""Part of a buffer: name, start, stop."""


@dataclass(frozen=True)
class Spec:
    """A step as plain data, so that a law can change one thing and build the chain again."""

    reads: tuple[Span, ...]
    writes: tuple[Span, ...]
    in_place: tuple[Span, ...] = ()
    independent: frozenset[str] = frozenset()
    wait: Wait = Wait.ALL
    trigger: Trigger = Trigger.AFTER_STORES
    fence: bool = False
    ctas: int = 2
    pdl: bool = True

    def operands(self) -> dict[str, Span]:
        named = [("r", self.reads), ("w", self.writes), ("io", self.in_place)]
        return {f"{prefix}{number}": span for prefix, spans in named for number, span in enumerate(spans)}


def chain_of(specs: Iterable[Spec]) -> Chain:
    chain = Chain("random")
    buffers: dict[str, Buffer] = {
        "h": chain.input("h", (SIZE,), "float32"),
        "c": chain.constant("c", (SIZE,), "float32"),
    }
    buffers.update({name: chain.buffer(name, (SIZE,), "float32") for name in ("x", "y", "z")})
    for number, spec in enumerate(specs):
        operands = spec.operands()
        contract = KernelContract(
            reads=tuple(name for name in operands if name[0] in "ri"),
            writes=tuple(name for name in operands if name[0] in "wi"),
            independent=tuple(sorted(spec.independent & set(operands))),
            wait=spec.wait,
            trigger=spec.trigger,
            fence=spec.fence,
        )
        op = Op("op", contract, _no_kernel, contract, waits=frozenset(Wait), ctas=lambda shapes, n=spec.ctas: n)  # type: ignore[misc]
        views: dict[str, Any] = {name: buffers[buffer][start:stop] for name, (buffer, start, stop) in operands.items()}
        chain.step(f"s{number}", op, pdl=spec.pdl, **views)
    return chain


def _no_kernel(**_: Any) -> None:
    raise AssertionError("no kernel runs on the model")


SPANS = st.sampled_from([(0, SIZE), (0, 2), (2, SIZE), (1, 3)])


@st.composite
def specs(draw: st.DrawFn, least: int = 2, most: int = 5, *, tiny: bool = False) -> tuple[Spec, ...]:
    """Steps over an input, a constant and three buffers. A step writes no buffer that it also reads, unless in place:
    what a kernel does to itself is not the model's subject. ``tiny``: one CTA, no input (hence no source step)."""
    made: list[Spec] = []
    written: list[Span] = []

    def readable(name: str) -> list[Span]:
        spans = [(name, start, stop) for start, stop in ((0, SIZE), (0, 2), (2, SIZE), (1, 3))]
        if name in ("h", "c"):
            return spans
        boxes = [((start, stop),) for buffer, start, stop in written if buffer == name]
        return [span for span in spans if covered((span[1:],), boxes)]

    for _ in range(draw(st.integers(least, most))):
        targets = draw(st.lists(st.sampled_from("xyz"), min_size=1, max_size=1 if tiny else 2, unique=True))
        sources = [n for n in ("c", "x", "y", "z") if n not in targets and readable(n)] + ([] if tiny else ["h"])
        read_from = draw(st.lists(st.sampled_from(sources), max_size=2, unique=True))
        reads = tuple(draw(st.sampled_from(readable(name))) for name in read_from)
        in_place: list[Span] = []
        writes: list[Span] = []
        for name in targets:
            span = (name, *draw(SPANS))
            can_update = any(span == r for r in readable(name))
            (in_place if can_update and draw(st.booleans()) else writes).append(span)
        spec = Spec(
            reads,
            tuple(writes),
            tuple(in_place),
            wait=draw(st.sampled_from(list(Wait))),
            trigger=draw(st.sampled_from(list(Trigger))),
            fence=draw(st.booleans()),
            ctas=1 if tiny else draw(st.sampled_from([1, 2, 3])),
            pdl=draw(st.integers(0, 4)) > 0,
        )
        independent = draw(st.sets(st.sampled_from(sorted(spec.operands()))))
        made.append(replace(spec, independent=frozenset(independent if draw(st.booleans()) else ())))
        written += [*writes, *in_place]
    return tuple(made)


RULES = st.sampled_from([DOCUMENTED, OBSERVED_SM90])
LAW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def keys(races: Iterable[Race]) -> set[tuple[int, int, str, str]]:
    return {(race.first.position, race.second.position, race.buffer, race.kind) for race in races}


def found(steps: Iterable[Spec], rules: RuleSet, replays: int = 1) -> set[tuple[int, int, str, str]]:
    return keys(find_races(chain_of(steps), rules, replays))


# --- the exact order agrees with schedules -------------------------------------------------------------------------


@LAW
@given(steps=specs(), rules=RULES, replays=st.sampled_from([1, 2]), seed=st.integers(0, 2**30))
def test_no_race_no_anomaly_in_any_random_schedule(
    steps: tuple[Spec, ...], rules: RuleSet, replays: int, seed: int
) -> None:
    structure = build(chain_of(steps), rules, replays)
    if not races_of(structure):
        for number in range(RANDOM_SCHEDULES):
            assert play(structure, random_picker(structure, seed + number)).anomalies == ()


@LAW
@given(steps=specs(), rules=RULES, seed=st.integers(0, 2**30))
def test_repaired_chains_play_clean(steps: tuple[Spec, ...], rules: RuleSet, seed: int) -> None:
    """As above, on chains that are ordered by construction: random ones are mostly racy."""
    ordered = [replace(s, wait=Wait.ALL, independent=frozenset()) for s in steps]
    structure = build(chain_of(ordered), rules, 2)
    for number in range(RANDOM_SCHEDULES):
        assert play(structure, random_picker(structure, seed + number)).anomalies == ()


@LAW
@given(steps=specs(), rules=RULES, replays=st.sampled_from([1, 2]))
def test_the_starving_schedule_shows_each_race(steps: tuple[Spec, ...], rules: RuleSet, replays: int) -> None:
    structure = build(chain_of(steps), rules, replays)
    for race in races_of(structure):
        played = play(structure, starving_picker(structure, race))
        first, second = played.order.index(race.first.index), played.order.index(race.second.index)
        assert second < first, "the schedule must take the two accesses the wrong way round"
        assert set(played.order[:first]) == without(structure, race.first.index), "all that can happen before it does"
        if _must_show(structure, race, played.order):
            where = {
                "stale read": (race.second.step, Kind.READ, second),
                "read after overwrite": (race.first.step, Kind.READ, first),
                "lost write": (race.second.step, Kind.WRITE, len(played.order)),
            }[race.kind]
            assert where in {(a.step, a.kind, a.at) for a in played.anomalies}


def _must_show(structure: Structure, race: Race, order: tuple[int, ...]) -> bool:
    """False where a third write hides the swap: the two accesses are then a race, and not one that this schedule shows.

    A stale read shows if ``first`` is what the reader should have found, a lost write if ``second`` should have been
    the last, a read after an overwrite if what it should have found did not come back in between.
    """
    for cell in race.first.cells & race.second.cells:
        writers = [e for e in structure.accesses if e.kind is Kind.WRITE and cell in e.cells]
        own = {race.first.position, race.second.position}
        if any(e.position in own and e.index not in (race.first.index, race.second.index) for e in writers):
            continue
        if race.kind == "stale read":
            if not any(race.first.position < e.position < race.second.position for e in writers):
                return True
        elif race.kind == "lost write":
            if not any(e.position > race.second.position for e in writers):
                return True
        else:
            before = [e for e in writers if e.position < race.first.position]
            if all(order.index(e.index) < order.index(race.second.index) for e in before):
                return True
    return False


@LAW
@given(steps=specs(), rules=RULES, replays=st.sampled_from([1, 2]))
def test_judge_never_contradicts_itself(steps: tuple[Spec, ...], rules: RuleSet, replays: int) -> None:
    judgement = model.judge(chain_of(steps), rules, replays=replays, schedules=3)
    assert judgement.ordered is (judgement.counterexample is None) is (not judgement.races)
    if judgement.counterexample:
        timeline = judgement.counterexample.timeline
        if not find_races(chain_of(steps), OBSERVED_SM90, replays):
            # Nothing happens in the wrong order: what is missing is a promise, and it is named.
            assert timeline[0].startswith("No visibility is promised: ")
            assert timeline[1].startswith("R")
            return
        assert len([line for line in timeline if "<-- too late" in line]) == 1
        assert len([line for line in timeline if "<-- before" in line]) == 1


@settings(LAW, max_examples=60)
@given(steps=specs())
def test_every_control_like_question_has_an_answer(steps: tuple[Spec, ...]) -> None:
    """Clean only if nothing at all can go wrong; caught only if the edge can, and nothing but its reader does."""
    chain = chain_of(steps)
    documented, observed = find_races(chain, DOCUMENTED), find_races(chain, OBSERVED_SM90)
    for edge in chain.data_edges:
        expectation = model.expect(chain, edge)
        if expectation.expected == "caught":
            assert model.explain(chain, edge, OBSERVED_SM90) is not None
        causes = {(race.second.step, race.kind) == (edge.reader, "stale read") for race in observed}
        of_the_edge = any((race.steps, race.buffer) == ((edge.writer, edge.reader), edge.buffer) for race in observed)
        if not documented:
            assert expectation.expected == "clean"
        elif causes == {True} and of_the_edge:
            assert expectation.expected == "caught"
        else:
            assert expectation.expected == "unpromised"
            assert expectation.reason.startswith("not attributable: " if causes else "R")
        assert expectation.reason


# --- monotonicity --------------------------------------------------------------------------------------------------


@LAW
@given(steps=specs(), replays=st.sampled_from([1, 2]), flags=st.tuples(*[st.booleans()] * 3), extra=st.integers(0, 2))
def test_more_permissive_rules_never_add_a_race(
    steps: tuple[Spec, ...], replays: int, flags: tuple[bool, bool, bool], extra: int
) -> None:
    strict = RuleSet("strict", *flags)
    permissive = RuleSet("permissive", *(flag or place == extra for place, flag in enumerate(flags)))
    assert found(steps, permissive, replays) <= found(steps, strict, replays)
    assert found(steps, OBSERVED_SM90, replays) <= found(steps, permissive, replays)
    assert found(steps, strict, replays) <= found(steps, DOCUMENTED, replays)


def change_one(draw: st.DrawFn, steps: tuple[Spec, ...], **fields: Any) -> tuple[Spec, ...]:
    at = draw(st.integers(0, len(steps) - 1))
    return (*steps[:at], replace(steps[at], **fields), *steps[at + 1 :])


@st.composite
def before_and_after(
    draw: st.DrawFn, before: dict[str, Any], after: Callable[[st.DrawFn], dict[str, Any]]
) -> tuple[tuple[Spec, ...], tuple[Spec, ...]]:
    steps = draw(specs())
    at = draw(st.integers(0, len(steps) - 1))
    first = replace(steps[at], **before)
    return (
        (*steps[:at], first, *steps[at + 1 :]),
        (*steps[:at], replace(first, **after(draw)), *steps[at + 1 :]),
    )


@LAW
@given(pair=before_and_after({"fence": False}, lambda draw: {"fence": True}), rules=RULES, n=st.sampled_from([1, 2]))
def test_a_fence_never_adds_a_race(pair: tuple[tuple[Spec, ...], ...], rules: RuleSet, n: int) -> None:
    without_fence, with_fence = pair
    assert found(with_fence, rules, n) <= found(without_fence, rules, n)


@LAW
@given(
    pair=before_and_after({}, lambda draw: {"wait": draw(st.sampled_from([Wait.ALL, Wait.LOADERS, Wait.BARRIER]))}),
    rules=RULES,
    n=st.sampled_from([1, 2]),
)
def test_repairing_a_wait_never_adds_a_race(pair: tuple[tuple[Spec, ...], ...], rules: RuleSet, n: int) -> None:
    broken, repaired = pair
    assert found(repaired, rules, n) <= found(broken, rules, n)


@LAW
@given(pair=before_and_after({}, lambda draw: {"pdl": False}), rules=RULES, n=st.sampled_from([1, 2]))
def test_a_full_edge_never_adds_a_race(pair: tuple[tuple[Spec, ...], ...], rules: RuleSet, n: int) -> None:
    programmatic, full = pair
    assert found(full, rules, n) <= found(programmatic, rules, n)


@LAW
@given(pair=before_and_after({}, lambda draw: {"independent": frozenset()}), rules=RULES, n=st.sampled_from([1, 2]))
def test_touching_less_before_the_wait_never_adds_a_race(
    pair: tuple[tuple[Spec, ...], ...], rules: RuleSet, n: int
) -> None:
    early, late = pair
    assert found(late, rules, n) <= found(early, rules, n)


PLACES = [Trigger.ENTRY, Trigger.AFTER_WAIT, Trigger.BEFORE_STORES, Trigger.AFTER_STORES]


@LAW
@given(
    steps=specs(),
    at=st.integers(0, 4),
    places=st.tuples(st.sampled_from(PLACES), st.sampled_from(PLACES)),
    rules=RULES,
    n=st.sampled_from([1, 2]),
)
def test_an_earlier_trigger_never_removes_a_race(
    steps: tuple[Spec, ...], at: int, places: tuple[Trigger, Trigger], rules: RuleSet, n: int
) -> None:
    early, late = sorted(places, key=PLACES.index)
    step = steps[at % len(steps)]
    # If one warp waits and triggers, the others may reach their stores, and a trigger there, long before.
    assume(step.wait is not Wait.ONE_WARP or early is Trigger.ENTRY)

    def placed(trigger: Trigger) -> list[Spec]:
        return [replace(s, trigger=trigger) if s is step else s for s in steps]

    assert found(placed(late), rules, n) <= found(placed(early), rules, n)


@LAW
@given(steps=specs(), at=st.integers(0, 4), place=st.sampled_from(PLACES), n=st.sampled_from([1, 2]))
def test_without_a_trigger_the_exit_releases_last(steps: tuple[Spec, ...], at: int, place: Trigger, n: int) -> None:
    """On hardware as observed. Documented, an exit promises less than a fenced trigger (R5)."""
    step = steps[at % len(steps)]

    def placed(trigger: Trigger) -> list[Spec]:
        return [replace(s, trigger=trigger) if s is step else s for s in steps]

    assert found(placed(Trigger.NONE), OBSERVED_SM90, n) <= found(placed(place), OBSERVED_SM90, n)


@LAW
@given(steps=specs(), rules=RULES)
def test_back_to_back_races_include_those_of_one_replay(steps: tuple[Spec, ...], rules: RuleSet) -> None:
    assert found(steps, rules, 1) <= found(steps, rules, 2)


# --- what is always ordered ----------------------------------------------------------------------------------------


@LAW
@given(steps=specs(), rules=RULES, n=st.sampled_from([1, 2, 3]))
def test_full_edges_order_everything(steps: tuple[Spec, ...], rules: RuleSet, n: int) -> None:
    assert found([replace(s, pdl=False) for s in steps], rules, n) == set()


@LAW
@given(
    steps=specs(),
    rules=RULES,
    n=st.sampled_from([1, 2, 3]),
    waits=st.lists(st.sampled_from([Wait.ALL, Wait.LOADERS, Wait.BARRIER]), min_size=5, max_size=5),
)
def test_waits_order_everything_wherever_triggers_sit(
    steps: tuple[Spec, ...], rules: RuleSet, n: int, waits: list[Wait]
) -> None:
    """R1 and R2. Constants may be read before the wait: nobody writes them."""
    waiting = [
        replace(
            step,
            wait=wait,
            independent=frozenset(name for name, span in step.operands().items() if span[0] == "c"),
        )
        for step, wait in zip(steps, waits, strict=False)
    ]
    assert found(waiting, rules, n) == set()


@LAW
@given(steps=specs(), rules=RULES)
def test_the_three_right_waits_are_one_to_the_model(steps: tuple[Spec, ...], rules: RuleSet) -> None:
    answers = [
        found([replace(s, wait=wait) if s.wait.orders_dependents else s for s in steps], rules)
        for wait in (Wait.ALL, Wait.LOADERS, Wait.BARRIER)
    ]
    assert answers[0] == answers[1] == answers[2]


@LAW
@given(steps=specs(), rules=RULES)
def test_races_name_accesses_of_two_steps_to_one_cell(steps: tuple[Spec, ...], rules: RuleSet) -> None:
    chain = chain_of(steps)
    roles = {buffer.name: buffer.role for buffer in chain.buffers.values()}
    for race in find_races(chain, rules):
        assert race.first.position < race.second.position
        assert race.first.cells & race.second.cells
        assert Kind.WRITE in (race.first.kind, race.second.kind)
        assert roles[race.buffer] is not Role.CONSTANT


# --- brute force ---------------------------------------------------------------------------------------------------


def reachable(structure: Structure) -> set[int]:
    """All sets of events that some schedule reaches, as bit masks: every linear extension, with common parts shared."""
    events = structure.events
    seen = {0}
    pending = [0]
    while pending:
        done = pending.pop()
        for event in events:
            bit = 1 << event.index
            if not done & bit and all(any(done >> m & 1 for m in group) for group in event.needs):
                after = done | bit
                if after not in seen:
                    seen.add(after)
                    pending.append(after)
    return seen


def any_schedule_goes_wrong(structure: Structure) -> bool:
    """Plays every linear extension with memory; equal (done, memory) pairs are played on once."""
    events = structure.events
    expected = sequential_versions(structure)
    last: dict[Cell, int] = {}
    for event in structure.accesses:
        if event.kind is Kind.WRITE:
            last.update({cell: max(event.position, last.get(cell, event.position)) for cell in event.cells})
    cells = sorted(last)
    place = {cell: number for number, cell in enumerate(cells)}
    start = (0, tuple(POISON if cell in structure.poisoned else INITIAL for cell in cells))
    seen, pending = {start}, [start]
    while pending:
        done, memory = pending.pop()
        if done == (1 << len(events)) - 1 and any(memory[place[cell]] != last[cell] for cell in cells):
            return True
        for event in events:
            bit = 1 << event.index
            if done & bit or not all(any(done >> m & 1 for m in group) for group in event.needs):
                continue
            after = memory
            if event.kind is Kind.READ:
                for cell, version in expected[event.index].items():
                    if cell in place and memory[place[cell]] not in (version, event.position):
                        return True
            elif event.kind is Kind.WRITE:
                after = tuple(
                    event.position if cell in event.cells else v for cell, v in zip(cells, memory, strict=True)
                )
            state = (done | bit, after)
            if state not in seen:
                seen.add(state)
                pending.append(state)
    return False


BRUTE = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@BRUTE
@given(steps=specs(2, 2, tiny=True), rules=RULES)
def test_the_closure_is_what_brute_force_reaches(steps: tuple[Spec, ...], rules: RuleSet) -> None:
    structure = build(chain_of(steps), rules)
    masks = reachable(structure)
    for event in structure.events:
        before = [mask for mask in masks if not mask >> event.index & 1]
        possible = {other.index for other in structure.events if any(mask >> other.index & 1 for mask in before)}
        assert without(structure, event.index) == possible


def fixed_point(structure: Structure, excluded: int) -> set[int]:
    """What can happen without ``excluded``, asked of all events again and again until nothing is added."""
    done: set[int] = set()
    while True:
        more = {
            event.index
            for event in structure.events
            if event.index not in done
            and event.index != excluded
            and all(any(member in done for member in group) for group in event.needs)
        }
        if not more:
            return done
        done |= more


@settings(LAW, max_examples=30)
@given(steps=specs(), rules=RULES, n=st.sampled_from([1, 2]), at=st.integers(0))
def test_the_closure_is_the_fixed_point_of_its_definition(
    steps: tuple[Spec, ...], rules: RuleSet, n: int, at: int
) -> None:
    """On whole chains, where all schedules are too many to list."""
    structure = build(chain_of(steps), rules, n)
    excluded = at % len(structure.events)
    assert without(structure, excluded) == fixed_point(structure, excluded)


@LAW
@given(steps=specs(), rules=RULES, n=st.sampled_from([1, 2]))
def test_a_structure_lists_what_an_event_needs_before_it(steps: tuple[Spec, ...], rules: RuleSet, n: int) -> None:
    for index, event in enumerate(build(chain_of(steps), rules, n).events):
        assert event.index == index
        assert all(group for group in event.needs), "an empty group could never be met"
        assert all(member < index for group in event.needs for member in group)


@LAW
@given(steps=specs(), rules=RULES, n=st.sampled_from([1, 2]))
def test_one_cta_of_a_grid_speaks_for_all(steps: tuple[Spec, ...], rules: RuleSet, n: int) -> None:
    """``races_of`` asks only the first CTA of each grid what can overtake it."""
    structure = build(chain_of(steps), rules, n)
    races: set[tuple[int, int, str, str]] = set()
    for first in structure.accesses:
        possible = without(structure, first.index)
        races |= keys(
            Race(first, second)
            for second in structure.accesses
            if second.position > first.position
            and Kind.WRITE in (first.kind, second.kind)
            and first.cells & second.cells
            and second.index in possible
        )
    assert keys(races_of(structure)) == races


@BRUTE
@given(steps=specs(2, 2, tiny=True), rules=RULES)
def test_a_race_is_a_schedule_that_goes_wrong(steps: tuple[Spec, ...], rules: RuleSet) -> None:
    """With two steps no third write can hide a swap, so both directions hold."""
    structure = build(chain_of(steps), rules)
    assert bool(races_of(structure)) is any_schedule_goes_wrong(structure)


@settings(BRUTE, max_examples=20)
@given(steps=specs(3, 3, tiny=True), rules=RULES)
def test_ordered_means_that_no_schedule_of_three_steps_goes_wrong(steps: tuple[Spec, ...], rules: RuleSet) -> None:
    structure = build(chain_of(steps), rules)
    assume(not races_of(structure))
    assert not any_schedule_goes_wrong(structure)


def test_the_strategy_makes_what_the_laws_are_about() -> None:
    """Laws over chains that are all ordered, or all racy in the same way, would prove little."""
    kinds: set[str] = set()
    ordered = racy = 0

    @settings(max_examples=200, deadline=None, database=None, derandomize=True)
    @given(steps=specs())
    def count(steps: tuple[Spec, ...]) -> None:
        nonlocal ordered, racy
        races = find_races(chain_of(steps), DOCUMENTED)
        kinds.update(race.kind for race in races)
        ordered += not races
        racy += bool(races)

    count()
    assert kinds == {"stale read", "read after overwrite", "lost write"}
    assert ordered >= 20
    assert racy >= 20
