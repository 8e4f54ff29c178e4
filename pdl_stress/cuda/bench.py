"""One chain on one GPU: captured with several replays a graph, run, counted.

A graph is ``unroll`` replays. An ordinary replay is *source, steps, boundary*: the boundary kernel grades the replay
that just ended and poisons memory for the next, so a replay costs one launch beside the chain's own. The boundary's
edges are full on both sides. A *back-to-back* graph has no boundary between its replays: their edges are programmatic,
outputs go to a ring, and everything is graded at the end.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..buffers import Role
from ..chain import PRODUCER, Chain, Step
from ..errors import DeviceError
from ..sass.finder import CodeFinder
from . import graphs
from .captured import Captured
from .kernels import BLOCK, COUNTERS, NEVER, Harness, Neighbour
from .memory import WORD, Memory, launch
from .redirect import redirect
from .surgery import Surgeon
from .waiting import finish

UNROLL = 16
SYNC_EVERY = 128
"""Graph launches between two host synchronizations: rare, since a harness that synchronizes often can be blind."""


@dataclass(frozen=True)
class Counts:
    """What a run of a captured chain counted.

    Args:
        replays: graded replays, as the device counted them.
        mismatches: replays with at least one differing bit.
        agree: whether the device's counts of replays and of compared words equal the host's.
        seconds: wall time, from the first launch to the last synchronization.
        first_bad: number of the first bad replay, or ``None``.
        snapshot: arena bytes of that replay (CPU tensor), or ``None``.
    """

    replays: int
    mismatches: int
    agree: bool
    seconds: float
    first_bad: int | None = None
    snapshot: Any = None


class Bench:
    """Runs variants of one chain. Everything is on one non-default stream of the current device."""

    def __init__(self, chain: Chain, *, seed: int = 0, unroll: int = UNROLL, time_limit: float = 60.0) -> None:
        import torch

        self.chain, self.unroll, self.time_limit = chain, unroll, time_limit
        index = torch.cuda.current_device()
        self.stream = torch.cuda.Stream()
        self.handle: int = self.stream.cuda_stream
        self.harness = Harness(self.stream, index)
        self.finder = CodeFinder()
        self.finder.add(self.harness.module)
        self._asked = False
        self.surgeon = Surgeon(self.finder)
        self._neighbours: dict[str, Neighbour] = {}
        self.memory = Memory(chain, self.stream, seed, unroll=unroll, time_limit=time_limit)
        device = self.stream.device
        self.counters = torch.zeros(len(COUNTERS), dtype=torch.int64, device=device)
        self.last_bad = torch.zeros(unroll, dtype=torch.int64, device=device)
        self.snapshot = torch.zeros(self.memory.words * WORD, dtype=torch.uint8, device=device)
        self.marks = torch.zeros(self.memory.words + 1, dtype=torch.int32, device=device)

    # -- capture -----------------------------------------------------------------------------------------------------

    def capture(
        self,
        chain: Chain,
        *,
        unroll: int | None = None,
        rotated: bool = False,
        back_to_back: bool = False,
        neighbour: str = "",
        stamps: Any = None,
    ) -> Captured:
        """Captures several replays of ``chain`` (this bench's chain, or a variant of it) in one graph.

        Args:
            unroll: replays, if not the bench's own number; not for rotated or back-to-back graphs.
            rotated: rotate weight sets so that weights come from memory, not from the L2.
            back_to_back: see the module.
            neighbour: what runs beside each replay, if anything (:data:`pdl_stress.jobs.NEIGHBOURS`).
            stamps: int64 CUDA tensor ``[unroll, steps, 4]`` to stamp into, or ``None``.
        """
        import torch

        self.memory.reference(rotated)
        self._ask_for_code()
        captured = Captured(None, None, chain, unroll or self.unroll, rotated, back_to_back, self._late_rows(chain))
        beside = self._neighbour(neighbour) if neighbour else None
        with torch.cuda.stream(self.stream):
            self._warm_up(captured, stamps)
            graph = captured.owner = torch.cuda.CUDAGraph(keep_graph=True)
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for replay in range(captured.unroll):
                    if beside:
                        self._fork(beside)
                    self._replay(captured, replay, stamps)
                    if beside:
                        self.stream.wait_stream(beside.stream)
                    if not back_to_back:
                        self._boundary(captured)
                if back_to_back:
                    self._boundary_of_ring(captured)
            except BaseException:
                with suppress(RuntimeError):  # the capture is spoilt, and ending it says so; the cause matters more
                    graph.capture_end()
                raise
            graph.capture_end()
        captured.raw = graph.raw_cuda_graph()
        self._join(captured)
        self._redirect(captured)
        self._patch(captured)
        return captured

    def _ask_for_code(self) -> None:
        """What the ops hold of machine code. Asked after their first launch: a run-time compiler has none before."""
        if not self._asked:
            self._asked = True
            for step in self.chain.steps:
                for code in step.op.code() if step.op.code else ():
                    self.finder.add(code)

    def _neighbour(self, what: str) -> Neighbour:
        """Made once, and launched once: a kernel must not be loaded while a stream is capturing."""
        import torch

        if what not in self._neighbours:
            index = self.stream.device.index
            self._neighbours[what] = Neighbour(what, self.harness, torch.cuda.Stream(), index)
            self._neighbours[what].launch()
            torch.cuda.synchronize()
        return self._neighbours[what]

    def _fork(self, beside: Neighbour) -> None:
        """Lets the neighbour start with the replay: its own branch of the graph, from the last boundary to the next."""
        beside.stream.wait_stream(self.stream)
        beside.launch()

    def _redirect(self, captured: Captured) -> None:
        """Leads the results of ops that return new tensors to the chain's buffers."""
        for replay in sorted({replay for replay, _ in captured.returned}):
            here = captured.nodes_of(replay)
            for step in captured.chain.steps:
                pairs = captured.returned.get((replay, step.name), [])
                if pairs:
                    redirect(here[step.name], {a.data_ptr(): b.data_ptr() for a, b in pairs})

    def _patch(self, captured: Captured) -> None:
        """Changes the machine code of the steps that ask for it, in every replay."""
        steps = [step for step in captured.chain.steps if step.patch is not None]
        for replay in range(captured.unroll) if steps else ():
            here = captured.nodes_of(replay)
            for step in steps:
                assert step.patch is not None
                lines = self.surgeon.operate(here[step.name], step.patch)
                captured.patched[f"{step.op.name} ({step.name}), {step.patch}"] = "; ".join(lines)

    def _warm_up(self, captured: Captured, stamps: Any) -> None:
        """Loads every kernel and every table of the variant: nothing may be loaded while a stream is capturing."""
        import torch

        for index, step in enumerate(captured.chain.steps):
            row = None if stamps is None else stamps[0, index]
            if step.source:
                for slot in range(captured.unroll if captured.back_to_back else 1):
                    self._source(captured, step, slot, row, pdl=False)
            else:
                launch(step, self.memory.operands(step), pdl=step.pdl, stamps=row)
        self.finish()
        torch.cuda.synchronize()  # what an op does on a stream of its own

    def _replay(self, captured: Captured, replay: int, stamps: Any) -> None:
        sets = self.memory.weight_sets(captured.rotated)
        slot = replay if captured.back_to_back else None
        for index, step in enumerate(captured.chain.steps):
            row = None if stamps is None else stamps[replay, index]
            # Poison must be in place before the first step starts: its edge from the boundary is full.
            pdl = step.pdl and (index > 0 or (captured.back_to_back and replay > 0))
            if step.source:
                self._source(captured, step, replay if captured.back_to_back else 0, row, pdl=pdl)
            else:
                operands = self.memory.operands(step, replay % sets, slot)
                returned = launch(step, operands, pdl=pdl, stamps=row)
                if returned:  # kept: were its memory given to a later step, both results would have one address
                    captured.returned[replay, step.name] = [
                        (tensor, operands[name]) for name, tensor in returned.items()
                    ]
            captured.last[replay, step.name] = graphs.current_node(self.handle)

    def _source(self, captured: Captured, step: Step, offset: int, stamps: Any, *, pdl: bool) -> None:
        memory, late = self.memory, captured.late
        truth, stride, pool = memory.reference(captured.rotated).data_ptr(), memory.words, memory.pool
        out, table = memory.arena.data_ptr(), 0
        if step.name == PRODUCER:
            words = memory.input_words
        elif _writes_constants(step):
            truth, out, words, stride, pool = late["truth"].data_ptr(), late["rows"].data_ptr(), late["words"], 0, 1
        else:  # a stand-in: what its step would have computed is in the reference
            places = memory.scatter_table(step, offset if captured.back_to_back else None)
            table, words = places.data_ptr(), len(places)
        self.harness.source(
            truth, out, words, table=table, stride=stride, pool=pool, counters=self.counters.data_ptr(), offset=offset,
            trigger=step.contract.trigger, fence=step.contract.fence, delay_us=step.delay_us or 0.0,
            stamps=0 if stamps is None else stamps.data_ptr(), pdl=pdl,
        )  # fmt: skip

    def _late_rows(self, chain: Chain) -> dict[str, Any]:
        """The rows of a constant that a late source step writes, and a copy of their truth."""
        for step in chain.steps:
            if _writes_constants(step):
                (view,) = (view for _, view in step.writes())
                rows = self.memory.constants[0][view.buffer.name][view.slices]
                size = rows.numel() * rows.element_size()
                if not rows.is_contiguous() or size % WORD:
                    raise DeviceError(f"late rows {view} are not contiguous whole words of {WORD} bytes.")
                return {"rows": rows, "truth": rows.clone(), "words": size // WORD}
        return {}

    def _boundary(self, captured: Captured, *, grade: bool = True) -> None:
        """Grades and poisons (inside a capture), or only poisons (outside of one)."""
        memory, late = self.memory, captured.late
        self.harness.boundary(
            memory.arena.data_ptr(), memory.words, count=1, first_row=0, advance=1,
            extra=late["rows"].data_ptr() if late else 0, extra_words=late["words"] if late else 0,
            grade=grade, reference=memory.reference(captured.rotated).data_ptr(), poison=memory.poison.data_ptr(),
            snapshot=self.snapshot.data_ptr(), marks=self.marks.data_ptr(), **self._shared(),
        )  # fmt: skip
        if grade:
            captured.boundaries.add(int(graphs.current_node(self.handle)))

    def _boundary_of_ring(self, captured: Captured, *, grade: bool = True) -> None:
        """Grades the outputs of every generation, then what the last one left in the shared buffers."""
        memory = self.memory
        start = memory.output_start
        for rows, offset, words, count, first_row, advance in (
            (memory.ring, start, memory.words - start, self.unroll, 0, 0),
            (memory.arena, 0, start, 1, self.unroll - 1, self.unroll),
        ):
            if not words:  # the last step works in place: there are no buffers that only it writes
                continue
            self.harness.boundary(
                rows.data_ptr(), words, count=count, first_row=first_row, advance=advance, grade=grade,
                reference=memory.reference(captured.rotated).data_ptr() + offset * WORD,
                poison=memory.poison.data_ptr() + offset * WORD,
                snapshot=self.snapshot.data_ptr() + offset * WORD,
                marks=self.marks.data_ptr() + offset * self.marks.element_size(), **self._shared(),
            )  # fmt: skip
            if grade:
                captured.boundaries.add(int(graphs.current_node(self.handle)))

    def _shared(self) -> dict[str, Any]:
        return {
            "stride": self.memory.words,
            "pool": self.memory.pool,
            "counters": self.counters.data_ptr(),
            "last_bad": self.last_bad.data_ptr(),
        }

    def _join(self, captured: Captured) -> None:
        """Grading must come after every step, also behind one that never waits and so may complete first (R8)."""
        steps = captured.chain.steps
        joined = [
            before.name for before, step in pairwise(steps) if step.pdl and not step.contract.wait.holds_completion
        ]
        if not joined:
            return
        final = {int(e.source): e.target for e in graphs.edges(captured.raw) if int(e.target) in captured.boundaries}
        for replay in range(captured.unroll):
            boundary = final.get(int(captured.last[replay, steps[-1].name]))
            for name in joined if boundary is not None else ():
                graphs.add_full(captured.raw, captured.last[replay, name], boundary)

    # -- run ---------------------------------------------------------------------------------------------------------

    def run(self, captured: Captured, replays: int) -> Counts:
        """Runs at least ``replays`` graded replays (whole graphs).

        Raises:
            TimeLimit: the GPU is not done after the time limit.
            DeviceError: a CUDA error.
        """
        import torch

        launches = -(-replays // captured.unroll)
        with torch.cuda.stream(self.stream), graphs.Executable(captured.raw) as executable:
            self.prime(captured)
            started = time.perf_counter()
            for index in range(launches):
                executable.launch(self.handle)
                if index % SYNC_EVERY == SYNC_EVERY - 1:
                    self.finish()
            self.finish()
            seconds = time.perf_counter() - started
        return self._read(captured, launches, seconds)

    def prime(self, captured: Captured) -> None:
        """Resets all counters and poisons memory, as the boundary of a replay before the first would."""
        import torch

        self.counters.zero_()
        self.counters[COUNTERS.index("first_bad")] = -1
        self.last_bad.fill_(-1)
        self.marks.zero_()
        if captured.back_to_back:
            self._boundary_of_ring(captured, grade=False)
        self._boundary(captured, grade=False)
        torch.cuda.synchronize()

    def finish(self) -> None:
        """Waits for the stream; the time limit is for what was enqueued since the last call. Raises TimeLimit."""
        finish(self.stream, self.time_limit)

    def _read(self, captured: Captured, launches: int, seconds: float) -> Counts:
        values = dict(zip(COUNTERS, (int(v) % 2**64 for v in self.counters.tolist()), strict=True))
        unroll = captured.unroll
        host_replays = launches * unroll
        start, words = self.memory.output_start, self.memory.words
        per_launch = unroll * (words - start) + start if captured.back_to_back else unroll * words
        agree = values["replay"] == host_replays and values["words"] == launches * per_launch and not values["ticket"]
        first_bad = None if values["first_bad"] == NEVER else values["first_bad"]
        if (first_bad is None) != (values["bad"] == 0):
            agree = False
        if captured.late:
            captured.late["rows"].copy_(captured.late["truth"])
        snapshot = None if first_bad is None else self._snapshot(captured, first_bad)
        return Counts(values["replay"], values["bad"], agree, seconds, first_bad, snapshot)

    def _snapshot(self, captured: Captured, replay: int) -> Any:
        """The arena of a bad replay: what differed as it was seen, all else from the reference."""
        memory = self.memory
        result = memory.reference(captured.rotated)[replay % memory.pool].clone()
        parts = [(0, memory.words)]
        if captured.back_to_back:
            parts = [(0, memory.output_start), (memory.output_start, memory.words)]
        marks = self.marks.tolist()
        for begin, end in parts:
            for block, word in enumerate(range(begin, end, BLOCK)):
                if marks[begin + block]:
                    bytes_ = slice(word * WORD, min(word + BLOCK, end) * WORD)
                    result[bytes_] = self.snapshot[bytes_]
        return result.cpu()


def _writes_constants(step: Step) -> bool:
    """True for the source of late weights."""
    return step.source and any(view.buffer.role is Role.CONSTANT for _, view in step.writes())
