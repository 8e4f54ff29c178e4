"""The rules of a verdict: what was not earned is INCONCLUSIVE (``docs/verdicts.md``)."""

from __future__ import annotations

from .faults import RELOADED
from .outcome import Outcome, worst
from .results import CaseResult

MIN_REPLAYS = 1000
"""Graded replays below which a clean arm says too little to pass (upper bound above 3e-3)."""


def judge_hardware(case: CaseResult) -> tuple[Outcome, list[str]]:
    """The verdict on a case that ran on a GPU, and why it is not PASS.

    PASS needs, all of them: zero mismatches in every clean arm, among them each perturbation under which a control was
    caught; every must-catch control caught with at least ``MIN_KILLS`` kills for the right reason, and one on each data
    edge; every must-be-clean control clean; every data edge exposed in some arm; all graph edges under test
    programmatic; enough replays; counters that agree.
    """
    found: list[tuple[Outcome, str]] = [(Outcome.ERROR, text) for text in case.errors]
    if case.timeline:
        found.append((Outcome.FAIL, "the contracts allow a bad schedule; see the timeline"))
    if case.blockers:
        found += [(Outcome.INCONCLUSIVE, f"nothing ran: {text}") for text in case.blockers]
        return worst([outcome for outcome, _ in found]), [text for _, text in found]
    found += _unanswered(case)
    found += [(Outcome.INCONCLUSIVE, f"{text}: no control covers that order yet") for text in case.reuses]
    found += [
        (Outcome.INCONCLUSIVE, f"no control of {step} is possible: {why}") for step, why in case.uncontrolled.items()
    ]
    found += [(Outcome.INCONCLUSIVE, text) for text in case.untested]
    found += _judge_arms(case)
    found += _judge_controls(case)
    found += _judge_edges(case)
    return worst([outcome for outcome, _ in found] or [Outcome.PASS]), [text for _, text in found]


def judge_model(case: CaseResult) -> tuple[Outcome, list[str]]:
    """The verdict on a case that only the model has seen: ORDERED needs every must-catch control refuted."""
    found: list[tuple[Outcome, str]] = [(Outcome.ERROR, text) for text in case.errors]
    if case.timeline:
        found.append((Outcome.FAIL, "the contracts allow a bad schedule; see the timeline"))
    else:
        found += _unanswered(case) + _uncovered(case, "refuted", Outcome.INCONCLUSIVE)
    return worst([outcome for outcome, _ in found] or [Outcome.ORDERED]), [text for _, text in found]


def _unanswered(case: CaseResult) -> list[tuple[Outcome, str]]:
    """What was planned and has no result: a run that was cut short, or an answer that got lost."""
    counts = zip(("arms", "controls"), case.planned, (len(case.arms), len(case.controls)), strict=True)
    return [
        (Outcome.ERROR, f"{there} of {planned} planned {what} have a result")
        for what, planned, there in counts
        if planned != there
    ]


def _judge_arms(case: CaseResult) -> list[tuple[Outcome, str]]:
    found = []
    for arm in case.arms:
        name = arm.name if arm.step is None else f"{arm.name} ({arm.step}, {arm.delay_us:g} us)"
        if arm.mismatches:
            why = arm.mismatch or arm.note or "not explained"
            found.append((Outcome.FAIL, f"{arm.mismatches} of {arm.replays} replays differ in arm «{name}»: {why}"))
        if not arm.counters_agree:
            found.append((Outcome.INCONCLUSIVE, f"device and host counts differ in arm «{name}»"))
        if arm.replays < case.requested_replays or arm.replays < MIN_REPLAYS:
            found.append(
                (Outcome.INCONCLUSIVE, f"only {arm.replays} graded replays in arm «{name}» (at least {MIN_REPLAYS})")
            )
    if not case.arms:
        found.append((Outcome.INCONCLUSIVE, "no arm ran"))
    return found


def _judge_controls(case: CaseResult) -> list[tuple[Outcome, str]]:
    found = []
    for control in case.controls:
        name = f"{control.fault} ({control.variant}) on {control.writer}->{control.reader}, {control.delay_us:g} us"
        if control.verdict == "error":
            found.append((Outcome.ERROR, f"control {name} did not finish: {control.note}"))
        elif control.expected == "caught" and control.verdict != "caught":
            cause = "" if control.cause_checked is not False else ", but also with full edges, which is another fault"
            found.append(
                (
                    Outcome.INCONCLUSIVE,
                    f"control {name} must be caught and was not: {control.kills} kills of {control.replays}{cause}",
                )
            )
        elif control.expected == "clean" and control.kills and control.variant == RELOADED:
            text = (
                f"{control.kills} of {control.replays} replays differ: its machine code cannot be exchanged like that"
            )
            found.append((Outcome.INCONCLUSIVE, f"control {name} must be clean, and {text}"))
        elif control.expected == "clean" and control.kills:
            found.append(
                (Outcome.FAIL, f"control {name} must be clean, and {control.kills} of {control.replays} replays differ")
            )
        elif control.expected == "clean" and (control.verdict != "clean" or not control.replays or control.note):
            text = f"{control.verdict or 'no verdict'} after {control.replays} replays; {control.note}".rstrip("; ")
            found.append((Outcome.INCONCLUSIVE, f"control {name} must be shown clean and was not: {text}"))
    return found + _without_twin(case) + _unperturbed(case) + _uncovered(case, "caught", Outcome.INCONCLUSIVE)


def _without_twin(case: CaseResult) -> list[tuple[Outcome, str]]:
    """Controls that were caught with patched machine code, where the unpatched code, put in the same way, was not seen
    to be clean under the same perturbation."""
    if case.planted:
        return []
    clean = {
        (c.writer, c.reader, c.buffer, c.delay_us)
        for c in case.controls
        if c.variant == RELOADED and c.replays and not c.kills and c.verdict in ("clean", "not seen") and not c.note
    }
    alone = [
        c
        for c in case.controls
        if c.patched and c.kills and c.expected == "caught" and (c.writer, c.reader, c.buffer, c.delay_us) not in clean
    ]
    why = "was caught with patched machine code; the same code unpatched was not shown to be clean there"
    return [
        (Outcome.INCONCLUSIVE, f"control {c.fault} ({c.variant}) on {c.writer}->{c.reader}, {c.delay_us:g} us, {why}")
        for c in alone
    ]


def _unperturbed(case: CaseResult) -> list[tuple[Outcome, str]]:
    """Perturbations that showed a fault and that no clean arm ran under; a writer that only the control has
    (F28's late source) must have a clean twin instead."""
    arms = {(arm.step, arm.delay_us) for arm in case.arms}
    own = {edge.writer for edge in case.data_edges}
    twins = {(c.writer, c.delay_us) for c in case.controls if c.expected == "clean"}
    told = sorted(
        {(c.writer, c.delay_us) for c in case.controls if c.kills and c.delay_us > 0 and c.expected != "clean"}
    )
    return [
        (Outcome.INCONCLUSIVE, f"no clean arm delays {writer} by {delay:g} us, where controls were caught")
        for writer, delay in told
        if (writer, delay) not in (arms if writer in own else arms | twins)
    ]


def _uncovered(case: CaseResult, wanted: str, outcome: Outcome) -> list[tuple[Outcome, str]]:
    if case.planted:
        return []
    covered = {(c.writer, c.reader, c.buffer) for c in case.controls if c.expected == "caught" and c.verdict == wanted}
    missing = [e for e in case.data_edges if (e.writer, e.reader, e.buffer) not in covered]
    need = " (it takes a window of 10 us or more)" if wanted == "caught" else ""
    found = [(outcome, f"no control was {wanted} on {e.writer}->{e.reader} through {e.buffer}{need}") for e in missing]
    if not case.data_edges:
        found.append((outcome, "the chain has no data edge, so there was nothing to test"))
    return found + [
        (outcome, f"control {c.fault} ({c.variant}) on {c.writer}->{c.reader} must be {wanted} and was not")
        for c in case.controls
        if wanted == "refuted" and c.expected == "caught" and c.verdict != wanted
    ]


def _judge_edges(case: CaseResult) -> list[tuple[Outcome, str]]:
    found = [
        (Outcome.INCONCLUSIVE, f"graph edge {e.source}->{e.target} is {e.kind}, so nothing overlapped there")
        for e in case.edges
        if e.kind != "programmatic"
    ]
    if not case.edges:
        found.append((Outcome.INCONCLUSIVE, "the graph's edges were not read"))
    if not case.planted:
        found += [
            (Outcome.INCONCLUSIVE, f"graph edge {e.source}->{e.target} overlapped in no arm")
            for e in case.edges
            if not e.overlapped_in
        ]
        how = case.exposure or "not measured"
        found += [
            (Outcome.INCONCLUSIVE, f"data edge {e.writer}->{e.reader} through {e.buffer} was never exposed ({how})")
            for e in case.data_edges
            if not e.exposed_by
        ]
    return found
