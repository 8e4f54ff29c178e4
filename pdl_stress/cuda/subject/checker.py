"""Checks a callable: captures it, finds what its kernels touch, probes each, breaks each, replays it all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...audit.single import in_words
from ...chain import Patch
from ...errors import PdlStressError
from ...faults import RELOADED
from ...modelling import OVERWRITTEN, READ, WRITTEN_TWICE, Node, Order, unpromised
from ...region import Region
from ...results import (
    ArmResult,
    CaseResult,
    ContractResult,
    ControlResult,
    DataEdgeResult,
    EdgeResult,
    Mismatch,
    OperandResult,
)
from ...sass.finder import CodeFinder
from ...statistics import MIN_KILLS, upper_bound
from ...subjects import CheckPlan, Subject
from .. import graphs
from ..census import architecture, describe
from ..compiled import compiled_here
from ..kernels import COUNTERS
from ..surgery import Surgeon
from . import memory
from .capturing import POOL, NotCheckable, capture
from .describe import first_wrong
from .observe import GIVEN, PRODUCER, Group, Observer
from .probe import LATE, REREAD, REWRITE, Counts, Prober, Runner
from .trial import Trial

PILOT = 64
"""Replays that show whether a kernel touches something early. Behind an early-release stand-in every one does."""

FAULT_OF = {LATE: "F02", REWRITE: "F09", REREAD: "F08"}
ORDER_OF = {LATE: READ, REWRITE: WRITTEN_TWICE, REREAD: OVERWRITTEN}
REMOVED = "all waits removed"


@dataclass(frozen=True, eq=False)
class Hazard:
    """An order that a kernel must keep to what may still be in flight when it starts.

    Args:
        what: ``late``: it reads what ``other`` writes; ``rewrite``: it writes what ``other`` writes; ``reread``: it
            writes what ``other`` reads.
        other: index of the earlier node.
    """

    what: str
    other: int
    buffer: str
    region: Region

    @property
    def title(self) -> str:
        return self.buffer if self.what == LATE else f"{self.buffer}, {ORDER_OF[self.what]}"


class Checker:
    """One check, on the current device.

    Args:
        keep: takes the case after each stage, so that nothing finished is lost.
    """

    def __init__(self, subject: Subject, plan: CheckPlan, keep: Callable[[CaseResult], None]) -> None:
        self.subject, self.plan, self._keep = subject, plan, keep
        self._faults: list[tuple[int, Hazard]] = []
        self._orders: list[Order] = []
        self._audited: dict[str, str] = {}
        self.case = CaseResult(
            subject.name, "as captured", [], "cuda", requested_replays=plan.replays, pool=POOL,
            exposure="an early-release stand-in in front of the reader, whose waits were removed",
        )  # fmt: skip

    def check(self) -> CaseResult:
        """Raises UsageError for a request that cannot be carried out. What else goes wrong is in the result."""
        import torch

        plan = self.plan
        device = torch.cuda.current_device()
        stream, own = torch.cuda.Stream(), memory.OwnMemory()
        with own.use():
            counters = torch.zeros(len(COUNTERS), dtype=torch.int64, device="cuda")
        torch.cuda.synchronize()
        finder = CodeFinder()
        try:
            self.shot = capture(
                self.subject.fn, self.subject.make_inputs, self.subject.independent, stream=stream, own=own,
                counters=counters, seed=plan.seed, time_limit=plan.time_limit,
            )  # fmt: skip
            for code in (*compiled_here(), *(self.subject.code() if self.subject.code else ())):
                finder.add(code)
            self._census(finder)
            blocks = memory.blocks(device, self.shot.graph.pool(), own.id)
            observer = Observer(self.shot, stream, own, counters, device, plan.time_limit)
            self.seen = observer.observe(blocks)
        except NotCheckable as error:
            self.case.blockers.append(str(error))
            return self.case
        runner = Runner(stream, own, counters, device, plan.time_limit)
        self.prober = Prober(self.shot, self.seen, observer, runner, Surgeon(finder))
        self.trial = Trial(self.shot, self.seen, observer, runner)
        with torch.cuda.stream(stream):
            self._compare_with_eager(observer)
        self.examine()
        observer.close()
        return self.case

    def examine(self) -> None:
        """Probes, broken twins, model, arms: everything that needs only what was observed, ``prober`` and ``trial``."""
        self._keep(self.case)
        delays = dict[int, float]()
        for index in self._overlapping():
            self._probe(index, delays)
            self._keep(self.case)
        self.case.sass.update(self.prober.patched)
        self._model()
        self._arms(delays)

    # -- what is there -------------------------------------------------------------------------------------------------

    def _census(self, finder: CodeFinder) -> None:
        """Raises NotCheckable where nothing is launched to overlap."""
        shot, case = self.shot, self.case
        for index in range(1, len(shot.order)):
            early = shot.kinds[index] == graphs.PROGRAMMATIC
            node = describe(shot.order[index], [shot.kinds[index]], finder if early else None, shot.labels[index])
            case.nodes.append(node)
            if early and node.waits is not None:
                found = finder.find(node.symbol, architecture())
                self._audited[node.step] = in_words(found.code, node.symbol)
        case.kernels = list(dict.fromkeys(node.name for node in case.nodes if node.kind == "kernel"))
        if not self._overlapping():
            raise NotCheckable(
                "no kernel is launched with the PDL attribute, so none can start early and there is nothing to test "
                f"(captured: {', '.join(shot.labels[1:6])}{', ...' if len(case.nodes) > 5 else ''})"
            )

    def _overlapping(self) -> list[int]:
        return [i for i, kind in enumerate(self.shot.kinds) if kind == graphs.PROGRAMMATIC]

    def _in_flight(self, index: int) -> list[int]:
        """The nodes that may not be complete when ``index`` starts: back to the last full edge."""
        found = []
        while index > 0 and self.shot.kinds[index] == graphs.PROGRAMMATIC:
            index -= 1
            found.append(index)
        return found

    def _compare_with_eager(self, observer: Observer) -> None:
        """The reference is the captured kernels, run one by one; what people believe in is an eager run."""
        shot, everything = self.shot, memory.table(self.seen.whole)
        for generation, eager in enumerate(shot.eager):
            observer.put(everything, self.seen.before, generation)
            for index in range(1, len(shot.order)):
                observer.run(index)
            observer.finish()
            for name, tensor in {**shot.inputs, **shot.outputs}.items():
                if name in eager and not _same_bits(tensor, eager[name]):
                    self.case.untested.append(
                        f"{name} differs between an eager run and the captured kernels run one by one: what was "
                        "captured is not what runs without a graph"
                    )
                    return

    # -- probes --------------------------------------------------------------------------------------------------------

    def _hazards(self, index: int) -> list[Hazard]:
        seen, flying = self.seen, self._in_flight(index)
        found = [Hazard(LATE, g.owner, g.buffer, g.region) for g in seen.reads[index] if g.owner in flying]
        left = seen.writes[index]
        for other in flying:  # nearest first: what a nearer one writes is between this node and the older ones
            if other != PRODUCER:
                both = Region.union(g.region for g in seen.reads[other]) & left
                found += [Hazard(REREAD, other, g.buffer, g.region) for g in seen.names.split(other, both)]
            both = seen.writes[other] & left
            found += [Hazard(REWRITE, other, g.buffer, g.region) for g in seen.names.split(other, both)]
            left = left - both
        return found

    def _probe(self, index: int, delays: dict[int, float]) -> None:
        shot, case = self.shot, self.case
        label, node = shot.labels[index], case.nodes[index - 1]
        contract = ContractResult(label, audited=self._audited.get(label, ""), waits=node.waits, triggers=node.triggers)
        case.contracts.append(contract)
        hazards = self._hazards(index)
        edge = EdgeResult(shot.labels[index - 1], label, graphs.PROGRAMMATIC)
        if hazards:
            case.edges.append(edge)
        early, windows = dict[Hazard, bool](), dict[Hazard, float]()
        for hazard in hazards:
            early[hazard] = self._is_early(index, hazard)
            data_edge = self._data_edge(index, hazard)
            if not early[hazard]:
                delay = windows[hazard] = self._control(index, hazard, data_edge, edge)
                delays[hazard.other] = max(delays.get(hazard.other, 0.0), delay)
                self._clean_probe(index, hazard, delay)
        self._together(index, {hazard: delay for hazard, delay in windows.items() if hazard.what == LATE})
        self._measure(index, contract, early)
        self._orders += [Order(ORDER_OF[h.what], h.other, index, h.title, early[h]) for h in hazards]

    def _data_edge(self, index: int, hazard: Hazard) -> DataEdgeResult:
        found = DataEdgeResult(self.shot.labels[hazard.other], self.shot.labels[index], hazard.title)
        self.case.data_edges.append(found)
        return found

    def _is_early(self, index: int, hazard: Hazard) -> bool:
        """Whether the kernel, as it is, does not keep this order; then an arm that fails is recorded."""
        replays = self.plan.replays
        for delay in self.plan.delays_us:
            pilot = self.prober.probe(index, hazard.what, hazard.region, delay, PILOT)
            if not pilot.mismatches:
                continue
            counts = self.prober.probe(index, hazard.what, hazard.region, delay, replays)
            if not counts.mismatches:  # seldom, but seen: what was seen once stands
                counts = pilot
            twin = self.prober.probe(index, hazard.what, hazard.region, delay, PILOT, serialized=True)
            self._faults.append((index, hazard))
            if hazard.what == LATE and hazard.other != index - 1 and not twin.mismatches:
                whole = self.trial.run(replays, late=hazard.other, delay_us=delay, until=index)
                if not whole.mismatches:
                    self.case.untested.append(
                        f"{self.shot.labels[index]} reads {hazard.buffer} of {self.shot.labels[hazard.other]} before "
                        "its wait; only the kernels between them, which trigger late, keep it right, and nothing "
                        "promises that (F07)"
                    )
                    return True
            self._arm(index, hazard, delay, counts, twin)
            return True
        return False

    def _arm(self, index: int, hazard: Hazard, delay: float, counts: Counts, twin: Counts | None = None) -> None:
        labels = self.shot.labels
        name = {LATE: "late before", REWRITE: "rewritten before", REREAD: "read before"}[hazard.what]
        arm = ArmResult(
            f"{hazard.buffer} {name} {labels[index]}", counts.replays, counts.mismatches,
            upper_bound(counts.replays) if not counts.mismatches and counts.replays else None, delay,
            labels[hazard.other], counts.seconds, counts.agree,
        )  # fmt: skip
        if counts.mismatches:
            over = hazard.region if hazard.what == REREAD else self.seen.whole
            wrong = first_wrong(self.shot, self.seen, over, counts, index)
            writer, reader = labels[hazard.other], labels[index]
            if hazard.what == REREAD:
                writer, reader = reader, writer
            arm.mismatch = Mismatch(
                writer, reader, hazard.buffer, wrong.buffer, wrong.element, wrong.got, wrong.expected,
                "what was there before", 0, [f"{labels[index - 1]}->{labels[index]}"],
                twin is not None and twin.mismatches > 0, ORDER_OF[hazard.what],
            )  # fmt: skip
        self.case.arms.append(arm)

    def _clean_probe(self, index: int, hazard: Hazard, delay: float) -> None:
        counts = self.prober.probe(index, hazard.what, hazard.region, delay, self.plan.replays)
        self._arm(index, hazard, delay, counts)

    def _together(self, index: int, windows: dict[Hazard, float]) -> None:
        """All that it reads late at once: a kernel may read one buffer only if another looks right."""
        if len(windows) < 2:
            return
        region = Region.union(hazard.region for hazard in windows)
        other, delay = next(iter(windows)).other, max(windows.values())
        counts = self.prober.probe(index, LATE, region, delay, self.plan.replays)
        self._arm(index, Hazard(LATE, other, "all that it reads", region), delay, counts)

    # -- controls ------------------------------------------------------------------------------------------------------

    def _control(self, index: int, hazard: Hazard, data_edge: DataEdgeResult, edge: EdgeResult) -> float:
        """Removes the kernel's waits, and widens the window until that is seen; returns the window, microseconds."""
        label, plan = self.shot.labels[index], self.plan
        counts, delay = Counts(0, 0, False, 0.0), plan.delays_us[0]
        for delay in plan.delays_us:
            try:
                counts = self.prober.probe(
                    index, hazard.what, hazard.region, delay, plan.control_replays, patch=Patch(None)
                )
            except PdlStressError as error:
                self.case.uncontrolled.setdefault(label, f"{error}; give its machine code with code=...")
                return delay
            if counts.mismatches >= MIN_KILLS:
                break
        twin = self.prober.probe(
            index, hazard.what, hazard.region, delay, plan.control_replays, patch=Patch(None), serialized=True
        )
        result = self._new_control(index, hazard, delay, REMOVED, "caught")
        result.replays, result.kills, result.patched = counts.replays, counts.mismatches, str(Patch(None))
        result.cause_checked = twin.mismatches == 0 and twin.agree
        good = counts.mismatches >= MIN_KILLS and result.cause_checked and counts.agree
        result.verdict = "caught" if good else "missed"
        reloaded = self._new_control(index, hazard, delay, RELOADED, "clean")
        again = self.prober.probe(index, hazard.what, hazard.region, delay, plan.control_replays, patch=Patch(()))
        reloaded.replays, reloaded.kills, reloaded.patched = again.replays, again.mismatches, str(Patch(()))
        reloaded.verdict = "dirty" if again.mismatches else "clean"
        reloaded.note = "" if again.agree else "device and host counts differ"
        self.case.controls += [result, reloaded]
        if good:
            shown = f"control {result.fault}, {delay:g} us"
            data_edge.exposed_by.append(shown)
            edge.overlapped_in.append(shown)
        return delay

    def _new_control(self, index: int, hazard: Hazard, delay: float, variant: str, expected: str) -> ControlResult:
        labels = self.shot.labels
        reason = (
            "without its waits it may touch this before its time"
            if expected == "caught"
            else "only loaded again: its waits stay"
        )
        return ControlResult(
            FAULT_OF[hazard.what], variant, labels[index], labels[hazard.other], labels[index], hazard.title, delay,
            expected, reason,
        )  # fmt: skip

    # -- the measured contract -----------------------------------------------------------------------------------------

    def _measure(self, index: int, contract: ContractResult, early: dict[Hazard, bool]) -> None:
        shot, seen, delay = self.shot, self.seen, self.plan.delays_us[0]
        declared = self.subject.declared
        known = {(h.other, h.buffer): bad for h, bad in early.items() if h.what == LATE}
        for group in seen.reads[index]:
            key = (group.owner, group.buffer)
            if key in known:
                before = known[key]
            elif group.owner == GIVEN:
                before = self.prober.probe(index, LATE, group.region, delay, PILOT).mismatches > 0
            else:
                contract.operands.append(
                    OperandResult(group.buffer, "read", "complete before it starts", self._owner(group))
                )
                continue
            contract.operands.append(
                OperandResult(group.buffer, "read", _when(before), self._owner(group), declared=declared(group.buffer))
            )
        for group in seen.names.split(index, seen.writes[index]):
            dirty = any(
                self.prober.probe(index, what, group.region, delay, PILOT).mismatches for what in (REWRITE, REREAD)
            )
            lag = None
            if shot.kinds[index + 1 : index + 2] == [graphs.PROGRAMMATIC] or index + 1 == len(shot.order):
                lag = self.prober.lag_us(index, group.region)
            contract.operands.append(
                OperandResult(group.buffer, "written", _when(dirty), "", lag, declared(group.buffer))
            )

    def _owner(self, group: Group) -> str:
        return "" if group.owner in (PRODUCER, GIVEN) else self.shot.labels[group.owner]

    def _model(self) -> None:
        """Asks the rules about all measured orders together. What they do not promise and no probe has shown to be
        broken cannot pass: it is right on this GPU, and by luck."""
        shot, case = self.shot, self.case
        nodes = [
            Node(label, kind == graphs.PROGRAMMATIC, found.waits != 0)
            for label, kind, found in zip(shot.labels[1:], shot.kinds[1:], case.nodes, strict=True)
        ]
        broken = unpromised(nodes, self._orders)
        for contract in case.contracts:
            mine = [order for order in broken if shot.labels[order.later] == contract.step]
            names = ", ".join(f"{order.buffer} ({shot.labels[order.earlier]})" for order in mine)
            contract.modelled = f"not promised: {names}" if mine else "ordered"
            lucky = [order for order in mine if not order.early]
            if lucky:
                case.untested.append(
                    f"{contract.step} waits, but not for {shot.labels[lucky[0].earlier]}: a kernel between them never "
                    f"waits, and nothing promises {lucky[0].buffer} then (R8)"
                )
        case.model = "ordered under «documented»" if not broken else f"{len(broken)} orders that nothing promises"

    # -- the whole -----------------------------------------------------------------------------------------------------

    def _arms(self, delays: dict[int, float]) -> None:
        replays, case, labels = self.plan.replays, self.case, self.shot.labels
        plain = self.trial.run(replays)
        self._whole("as deployed", None, None, plain)
        if plain.seconds:
            case.replays_per_second = plain.replays / plain.seconds
        self._whole("serialized", None, None, self.trial.run(replays, serialized=True))
        for writer, delay in sorted(delays.items()):
            counts = self.trial.run(replays, late=writer, delay_us=delay)
            self._whole("early release", labels[writer], delay, counts, late=writer)

    def _whole(self, name: str, step: str | None, delay: float | None, counts: Counts, late: int = PRODUCER) -> None:
        labels = self.shot.labels
        arm = ArmResult(
            name, counts.replays, counts.mismatches,
            upper_bound(counts.replays) if not counts.mismatches and counts.replays else None, delay, step,
            counts.seconds, counts.agree,
        )  # fmt: skip
        if counts.mismatches:
            wrong = first_wrong(self.shot, self.seen, self.seen.whole, counts)
            cured = []
            for index in self._overlapping():
                again = self.trial.run(PILOT * 4, late=late, delay_us=delay or 0.0, full_behind=index - 1)
                if not again.mismatches:
                    cured.append(f"{labels[index - 1]}->{labels[index]}")
            twin = self.trial.run(PILOT * 4, late=late, delay_us=delay or 0.0, serialized=True)
            writer, reader, buffer, order = self._culprit(wrong.owner, step)
            arm.mismatch = Mismatch(
                writer, reader, buffer, wrong.buffer, wrong.element, wrong.got, wrong.expected, "what was there before",
                0, cured, twin.mismatches > 0, order,
            )  # fmt: skip
        self.case.arms.append(arm)

    def _culprit(self, owner: int, late: str | None) -> tuple[str, str, str, str]:
        """Writer, reader, buffer and order of what went wrong, where ``owner`` wrote the first wrong byte: the fault
        that its probe showed, else its own reads."""
        labels = self.shot.labels
        for index, hazard in self._faults:
            if hazard.what == REREAD and hazard.other == owner:
                return labels[index], labels[owner], hazard.buffer, ORDER_OF[REREAD]
        for index, hazard in self._faults:
            if index == owner and hazard.what != REREAD:
                return labels[hazard.other], labels[index], hazard.buffer, ORDER_OF[hazard.what]
        reads = [g for g in self.seen.reads[owner] if g.owner >= 0] if owner else []
        mine = next((g for g in reads if late in (None, labels[g.owner])), None)
        return (labels[mine.owner] if mine else late or ""), labels[owner], (mine.buffer if mine else ""), "read"


def _when(before: bool) -> str:
    return "before the wait" if before else "after the wait"


def _same_bits(one: Any, two: Any) -> bool:
    import torch

    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), two.contiguous().view(torch.uint8)) if one.numel() else True
