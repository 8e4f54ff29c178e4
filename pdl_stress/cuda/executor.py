"""Carries out jobs on the current GPU, with one bench for each chain."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from ..chain import Chain
from ..errors import PdlStressError
from ..jobs import (
    ArmAnswer,
    ArmJob,
    CensusAnswer,
    CensusJob,
    ControlAnswer,
    ControlJob,
    ExposureAnswer,
    ExposureJob,
    Job,
)
from ..op import Op
from ..results import ArmResult, ControlResult, EdgeResult
from ..statistics import MIN_KILLS, upper_bound
from . import exposure, nodes
from .bench import Bench
from .captured import Captured
from .census import describe
from .diagnose import diagnose

CONTROL_UNROLL = 8
"""Replays in a control's graph: hundreds of controls are captured, so capturing dominates their cost."""

BENCHES = 4
"""Benches that are kept. A campaign comes back to a chain in each of its phases; a bench is its weights a few times."""


class Executor:
    """Runs jobs in this process.

    Args:
        load: gives the chain of a name.
        seed: of inputs and weights.
        time_limit: seconds after which a run of one captured graph counts as hung.
    """

    def __init__(self, load: Callable[[str], Chain], *, seed: int = 0, time_limit: float = 60.0) -> None:
        self._load, self._seed, self._time_limit = load, seed, time_limit
        self._benches: dict[tuple[str, str], Bench] = {}
        self._verified: dict[tuple[Op, bool], str] = {}

    def execute(self, job: Job) -> CensusAnswer | ArmAnswer | ExposureAnswer | ControlAnswer:
        """Carries out one job.

        Raises:
            PdlStressError: the chain, an op or the device failed; or the chain here is not the one that was judged.
        """
        bench = self._bench_of(job)
        if isinstance(job, CensusJob):
            return self._census(bench)
        if isinstance(job, ArmJob):
            return self._arm(bench, job)
        if isinstance(job, ExposureJob):
            measure = exposure.profiled if job.profiled else exposure.stamped
            found = measure(bench, bench.chain.varied(job.changes), back_to_back=job.back_to_back)
            return ExposureAnswer(found.overlap, found.exposed, found.method)
        return self._control(bench, job)

    def _census(self, bench: Bench) -> CensusAnswer:
        """Of the second replay of a graph: the first one has nothing before it.

        Machine code is looked for where it matters, behind programmatic edges: a kernel with full ones may be torch's
        own, in a library of a gigabyte.
        """
        captured = bench.capture(bench.chain, unroll=2)
        into = nodes.incoming(captured.raw)
        described = []
        for step, found in captured.nodes_of(1).items():
            for node in found:
                kinds = [edge.kind for edge in into.get(int(node), [])]
                described.append(describe(node, kinds, bench.finder if "programmatic" in kinds else None, step))
        return CensusAnswer(described)

    def _bench_of(self, job: Job) -> Bench:
        judged = (job.chain, job.fingerprint)
        bench = self._benches.pop(judged, None)
        if bench is None:
            while len(self._benches) >= BENCHES:
                self._benches.pop(next(iter(self._benches)))  # frees its memory before the new one takes any
            chain = self._load(job.chain)
            if (chain.name, chain.fingerprint) != judged:
                raise PdlStressError(
                    f"the chain {chain.name!r} that was built where it should run is not the one that was judged. "
                    "A spawned process shares no globals: make its function depend on nothing but its code."
                )
            bench = Bench(chain, seed=self._seed, time_limit=self._time_limit)
        self._benches[judged] = bench  # the one used last is the last to go
        return bench

    def _arm(self, bench: Bench, job: ArmJob) -> ArmAnswer:
        chain = job.variant(bench.chain)
        sass = self._verify(chain)

        def capture() -> Captured:
            captured = bench.capture(chain, rotated=job.rotated, back_to_back=job.back_to_back, neighbour=job.neighbour)
            if job.serialized:
                captured.serialize()
            return captured

        captured = capture()
        counts = bench.run(captured, job.replays)
        arm = ArmResult(
            job.name,
            counts.replays,
            counts.mismatches,
            None if counts.mismatches or not counts.replays else upper_bound(counts.replays),
            job.delay_us,
            job.step,
            counts.seconds,
            counts.agree,
            note=bench.memory.weights_note() if job.rotated else "",
        )
        if counts.first_bad is not None:
            try:
                arm.mismatch = diagnose(bench, capture, counts)
            except Exception as error:  # what was counted stands, whatever happens to its explanation
                arm.note = f"not explained: {type(error).__name__}: {error}"
        return ArmAnswer(arm, _edges(captured), bench.memory.pool, sass | captured.patched)

    def _control(self, bench: Bench, job: ControlJob) -> ControlAnswer:
        control = job.control
        chain = control.apply(bench.chain)
        sass = self._verify(chain)
        captured = bench.capture(chain, unroll=CONTROL_UNROLL)
        counts = bench.run(captured, job.replays)
        cause_checked = None
        if counts.mismatches:
            serialized = bench.capture(chain, unroll=CONTROL_UNROLL)
            serialized.serialize()
            twin = bench.run(serialized, job.replays)
            cause_checked = twin.mismatches == 0 and twin.agree
        kills = counts.mismatches
        if job.expected == "caught":
            verdict = "caught" if kills >= MIN_KILLS and cause_checked and counts.agree else "missed"
        elif job.expected == "clean":
            verdict = "dirty" if kills else "clean"
        else:
            verdict = "seen" if kills else "not seen"
        edge = control.edge
        result = ControlResult(
            control.fault, control.variant, edge.reader, edge.writer, edge.reader, edge.buffer, control.delay_us,
            job.expected, job.reason, counts.replays, kills, cause_checked, verdict,
            "" if counts.agree else "device and host counts differ", job.patched,
        )  # fmt: skip
        return ControlAnswer(result, sass | captured.patched)

    @cached_property
    def _arch(self) -> str:
        import torch

        major, minor = torch.cuda.get_device_capability()
        return f"sm_{major}{minor}a"

    def _verify(self, chain: Chain) -> dict[str, str]:
        """Checks the machine code of every step that is not as deployed: the very binary that runs, each once."""
        found = {}
        for step in chain.steps:
            delayed = step.delay_us is not None
            if step.op.verify is None or (step.contract == step.op.deployed and not delayed):
                continue
            key = (step.op, delayed)
            if key not in self._verified:
                try:
                    self._verified[key] = step.op.verify(step.contract, self._arch, delayed)
                except Exception as error:
                    raise PdlStressError(f"the machine code of {step.op.name} ({step.contract}): {error}") from error
            found[f"{step.op.name}, {step.contract}{', delay point' if delayed else ''}"] = self._verified[key]
        return found


def _edges(captured: Captured) -> list[EdgeResult]:
    """The kinds of the graph edges under test, as captured; several kinds in different replays are joined by '/'."""
    pairs = list(captured.chain.edges)
    if captured.back_to_back:
        steps = captured.chain.steps
        pairs.append((steps[-1].name, steps[0].name))
    found = []
    for source, target in pairs:
        kinds = sorted({edge.kind for edge in captured.after(source)}) or ["missing"]
        found.append(EdgeResult(source, target, "/".join(kinds)))
    return found
