"""The model's answers: ordered or a counterexample, and what a control is expected to show."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations, groupby

from ..chain import Chain, DataEdge
from .events import Kind, Structure, build
from .order import Race, races_of
from .rules import DOCUMENTED, OBSERVED_SM90, OPEN_QUESTIONS, RuleSet
from .schedule import Play, play, random_picker, starving_picker

SCHEDULES = 100
"""Random schedules played beside the exact decision: an independent check of it, not a statistic."""


@dataclass(frozen=True)
class Counterexample:
    """A schedule that the rules allow and that differs from the sequential run."""

    writer: str
    reader: str
    buffer: str
    kind: str
    held: str
    rules: str
    timeline: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.timeline)


@dataclass(frozen=True)
class Judgement:
    """What the model says of a chain. ``counterexample`` is ``None`` if and only if every schedule is ordered."""

    ordered: bool
    rules: str
    races: tuple[Race, ...]
    counterexample: Counterexample | None
    schedules: int
    schedules_with_anomaly: int


@dataclass(frozen=True)
class Expectation:
    """What a control must show, decided before it runs: ``caught``, ``clean`` or ``unpromised``, with the reason."""

    expected: str
    reason: str


class ModelError(RuntimeError):
    """The model contradicts itself (exact order and played schedules differ): a defect of pdl_stress. Report it."""


def judge(
    chain: Chain, rules: RuleSet = DOCUMENTED, *, replays: int = 1, seed: int = 0, schedules: int = SCHEDULES
) -> Judgement:
    """Decides whether ``chain`` is ordered under ``rules``.

    The exact answer comes from the event structure; ``schedules`` random schedules are played as a check of it.

    Raises:
        ModelError: the two disagree.
    """
    structure = build(chain, rules, replays)
    races = races_of(structure)
    bad = sum(bool(play(structure, random_picker(structure, seed + i)).anomalies) for i in range(schedules))
    if bad and not races:
        raise ModelError(f"chain {chain.name!r}: {bad} schedules went wrong although every access is ordered.")
    counterexample = _most_physical(chain, replays, structure, races) if races else None
    return Judgement(not races, rules.name, tuple(races), counterexample, schedules, bad)


def explain(chain: Chain, edge: DataEdge, rules: RuleSet) -> Counterexample | None:
    """A counterexample for one data edge, or ``None`` if it is ordered."""
    structure = build(chain, rules)
    race = _race_of(races_of(structure), edge)
    return _most_physical(chain, 1, structure, [race]) if race else None


def expect(chain: Chain, edge: DataEdge) -> Expectation:
    """What a (faulty or repaired) chain must show on ``edge``, from the rules alone.

    ``clean``: the documentation orders every access. ``caught``: even the most permissive rule set lets the reader
    overtake the writer, and no other step can go wrong, so that a kill is the reader's. ``unpromised``: anything else;
    the documentation allows a bad outcome, but hardware was seen to be stricter, or the kill could be another step's.

    A reader that does not wait may be early on several operands at once, where a residual joins a branch. Such a kill
    is its own all the same; that *this* edge was under test is shown by its exposure.
    """
    documented = races_of(build(chain, DOCUMENTED))
    if not documented:
        return Expectation("clean", f"documented rules order {edge.writer} before {edge.reader}, and all else")
    observed = races_of(build(chain, OBSERVED_SM90))
    others = [race for race in observed if race.second.step != edge.reader or race.second.kind is not Kind.READ]
    if others or (observed and _race_of(observed, edge) is None):
        return Expectation("unpromised", f"not attributable: another race is possible, {(others or observed)[0]}")
    if observed:
        reason = f"{edge.reader} may read {edge.buffer} before {edge.writer} writes it under every rule set"
        return Expectation("caught", reason)
    return Expectation("unpromised", "; ".join(OPEN_QUESTIONS[name] for name in _open_questions(chain)))


def _open_questions(chain: Chain, replays: int = 1) -> tuple[str, ...]:
    """The smallest set of open questions whose permissive answers order the chain."""
    for size in range(1, len(OPEN_QUESTIONS) + 1):
        for names in combinations(OPEN_QUESTIONS, size):
            rules = replace(DOCUMENTED, name="+".join(names), **dict.fromkeys(names, True))
            if not races_of(build(chain, rules, replays)):
                return names
    raise ModelError(f"chain {chain.name!r}: no open question explains why it is ordered on hardware.")


def _is_of(race: Race, edge: DataEdge) -> bool:
    return race.steps == (edge.writer, edge.reader) and race.buffer == edge.buffer and race.second.kind is Kind.READ


def _race_of(races: list[Race], edge: DataEdge) -> Race | None:
    return next((race for race in races if _is_of(race, edge)), None)


def _most_physical(chain: Chain, replays: int, structure: Structure, races: list[Race]) -> Counterexample:
    """A counterexample of the first race that hardware can be seen to run into; else of the first one.

    Where only a promise of visibility is missing, no schedule shows the race: the accesses happen in order, and the
    later one may still see old memory. That is said, not drawn.
    """
    if structure.rules == OBSERVED_SM90:
        return _counterexample(structure, races[0])
    physical = build(chain, OBSERVED_SM90, replays)
    wanted = {(race.steps, race.buffer, race.kind) for race in races}
    for other in races_of(physical):
        if (other.steps, other.buffer, other.kind) in wanted:
            return _counterexample(physical, other)
    race = races[0]
    questions = "; ".join(OPEN_QUESTIONS[name] for name in _open_questions(chain, replays))
    first, second = race.first, race.second
    late = f"{second.view} as it was before {first.step} {first.kind} it"
    text = f"No visibility is promised: {second.step} may find {late}."
    return Counterexample(
        race.first.step, race.second.step, race.buffer, race.kind, "poison", structure.rules.name, (text, questions)
    )


def _counterexample(structure: Structure, race: Race) -> Counterexample:
    played = play(structure, starving_picker(structure, race))
    place = played.order.index(race.second.index)
    if place > played.order.index(race.first.index):
        raise ModelError(f"the schedule for «{race}» does not show it.")
    held = next(
        (
            a.held
            for a in played.anomalies
            if a.step == race.second.step and a.kind is race.second.kind and a.at == place
        ),
        "overwritten",
    )
    return Counterexample(
        race.first.step,
        race.second.step,
        race.buffer,
        race.kind,
        held,
        structure.rules.name,
        _timeline(structure, played, race, held),
    )


def _timeline(structure: Structure, played: Play, race: Race, held: str) -> tuple[str, ...]:
    """The schedule up to the late access, neighbouring events of a grid joined to one line."""
    events = structure.events
    several = len({event.replay for event in events}) > 1
    shown = [events[i] for i in played.order[: played.order.index(race.first.index) + 1]]
    last = next(i for i, event in enumerate(shown) if event.index == race.second.index)
    shown = [*shown[: last + 1], race.first]
    lines: list[list[str]] = []
    for (_, kind, operand), group in groupby(shown, key=lambda e: (e.position, e.kind, str(e.view or ""))):
        batch = list(group)
        event = batch[0]
        who = event.step + (f" (replay {event.replay})" if several else "")
        ctas = "" if event.cta < 0 else f" CTA {','.join(str(e.cta) for e in batch)}"
        text = f"{kind} {operand}".rstrip()
        if any(e.index == race.second.index for e in batch):
            text += f", which holds {held}" if race.second.kind is Kind.READ else ""
            text += f"   <-- before {race.first.step} {race.first.kind} it"
        if any(e.index == race.first.index for e in batch):
            text += "   <-- too late"
        if lines and lines[-1][0] == who + ctas:
            lines[-1][1] += f", {text}"
        else:
            lines.append([who + ctas, text])
    width = max(len(who) for who, _ in lines)
    return tuple(f"{number:3d}  {who:<{width}}  {text}" for number, (who, text) in enumerate(lines, 1))
