"""Captures a callable once, with an early-release producer of its inputs in front; says clearly why if it cannot."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ...errors import PdlStressError, UsageError
from ...region import Region
from .. import graphs, nodes
from ..waiting import finish
from . import kernels, memory

POOL = 4
"""Generations of inputs."""


class NotCheckable(PdlStressError):
    """What was captured cannot be checked; the text says why and what to do. The verdict is INCONCLUSIVE."""


@dataclass
class Inputs:
    """What ``make_inputs`` gave: arguments for the callable, and the tensors among them by name."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: dict[str, Any]

    def layout(self) -> dict[str, Any]:
        return {
            name: (tuple(t.shape), str(t.dtype), tuple(t.stride()), str(t.device)) for name, t in self.tensors.items()
        }


@dataclass
class Shot:
    """A captured callable.

    Args:
        graph: torch's graph object, which keeps the memory. ``raw``: its ``cudaGraph_t``.
        order: its nodes in stream order; the first is the producer of the inputs.
        kinds: per node, the kind of the edge to it: ``programmatic``, ``full``, or empty for the first.
        labels: a short name per node, unique.
        inputs: of generation 0, which the graph reads. ``outputs``: what the callable returned.
        truth: packed content of the inputs, a row per generation, over the region ``given``.
        late: the inputs that the producer writes; the others are written before the replay.
    """

    graph: Any
    raw: Any
    order: list[Any]
    kinds: list[str]
    labels: list[str]
    inputs: dict[str, Any]
    outputs: dict[str, Any]
    given: Region
    late: Region
    truth: Any
    eager: list[dict[str, Any]]
    producer: kernels.Launch


def prepare(make_inputs: Callable[[], Any], fn: Callable[..., Any], seed: int) -> Inputs:
    """One generation of inputs, drawn from torch's generators under ``seed``.

    Raises:
        UsageError: no CUDA tensor among them.
    """
    import torch

    with torch.random.fork_rng():  # the caller's generators go on as if nothing had been
        torch.manual_seed(seed)
        made = make_inputs()
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(made, dict):
        kwargs = dict(made)
    elif isinstance(made, list | tuple):
        args = tuple(made)
    else:
        args = (made,)
    names = _names(fn, len(args))
    tensors: dict[str, Any] = {}
    for name, value in (*zip(names, args, strict=True), *kwargs.items()):
        for path, tensor in _tensors(name, value):
            if not tensor.is_cuda:
                raise UsageError(f"make_inputs: {path} is on {tensor.device}; expected tensors on the GPU.")
            tensors[path] = tensor
    if not tensors:
        raise UsageError("make_inputs gave no tensor; expected a tensor, a tuple of arguments or a dict of them.")
    return Inputs(args, kwargs, tensors)


def capture(
    fn: Callable[..., Any],
    make_inputs: Callable[[], Any],
    independent: Iterable[str],
    *,
    stream: Any,
    own: memory.OwnMemory,
    counters: Any,
    seed: int,
    time_limit: float,
) -> Shot:
    """Runs ``fn`` eagerly, then captures it behind a producer of its inputs.

    Raises:
        UsageError: inputs that are none, or change their shape; a name in ``independent`` that no input has.
        NotCheckable: it cannot be captured, captures nothing, or is more than one chain of nodes.
        TimeLimit: it does not end.
    """
    import torch

    device = stream.device.index
    first = prepare(make_inputs, fn, seed)
    generations = [first, *(prepare(make_inputs, fn, seed + g) for g in range(1, POOL))]
    for other in generations[1:]:
        if other.layout() != first.layout():
            raise UsageError(
                f"make_inputs gave {first.layout()}, then {other.layout()}; expected the same shapes, dtypes and "
                "strides each time, with other values."
            )
    chosen = _independent(independent, first.tensors)
    regions = {name: memory.extent(tensor) for name, tensor in first.tensors.items()}
    given = Region.union(regions.values())
    late = given - Region.union(regions[name] for name in chosen)
    if not late:
        raise UsageError("every input is independent, so nothing could be late; leave out those that a kernel writes.")
    run = lambda: fn(*first.args, **first.kwargs)  # noqa: E731
    with torch.cuda.stream(stream):
        with own.use():
            truth, where = memory.rows(POOL, given), memory.table(given)
            for g, made in enumerate(generations):
                for name, tensor in first.tensors.items():
                    tensor.copy_(made.tensors[name])
                kernels.copy(device, where, truth, counters, offset=g, gather=True).run(stream.cuda_stream)
        del generations
        _refuse_equal(truth[:, memory.selection(late, given)])
        eager = [_eagerly(run, first, where, truth, g, stream, counters, own, time_limit) for g in (1, 0)][::-1]
        for _ in range(2):
            _call(run, "runs")
        finish(stream, time_limit)
        with own.use():
            producer = kernels.copy(device, memory.table(late, given), truth, counters, early=True)
        graph, returned = _capture(run, producer, stream)
        finish(stream, time_limit)
    raw = graph.raw_cuda_graph()
    order, kinds = _chain(raw)
    return Shot(
        graph,
        raw,
        order,
        kinds,
        _labels(order),
        first.tensors,
        dict(_tensors("out", returned)),
        given,
        late,
        truth,
        eager,
        producer,
    )


def _eagerly(
    run: Callable[[], Any], inputs: Inputs, where: Any, truth: Any, generation: int, stream: Any, counters: Any,
    own: memory.OwnMemory, time_limit: float,
) -> dict[str, Any]:  # fmt: skip
    """What an eager run with a synchronization after each torch op returns and leaves in its inputs."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Synchronized(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            finish(stream, time_limit)
            return result

    kernels.copy(stream.device.index, where, truth, counters, offset=generation).run(stream.cuda_stream)
    with Synchronized():  # type: ignore[no-untyped-call]
        returned = _call(run, "runs")
    finish(stream, time_limit)
    with own.use():
        found = {**inputs.tensors, **dict(_tensors("out", returned))}
        return {name: tensor.detach().clone() for name, tensor in found.items()}


def _call(run: Callable[[], Any], what: str) -> Any:
    try:
        return run()
    except PdlStressError:
        raise
    except Exception as error:
        raise NotCheckable(
            f"the callable raises when it {what}: {type(error).__name__}: {_first_line(error)}"
        ) from error


def _capture(run: Callable[[], Any], producer: kernels.Launch, stream: Any) -> tuple[Any, Any]:
    import torch

    graph, pool = torch.cuda.CUDAGraph(keep_graph=True), torch.cuda.graph_pool_handle()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        producer.run(stream.cuda_stream)
        returned = run()
    except Exception as error:
        _abandon(graph, pool, stream)
        raise NotCheckable(
            f"it cannot be captured in a CUDA graph: {type(error).__name__}: {_first_line(error)}. Inside, nothing may "
            "synchronize, read a result on the host, or allocate outside of torch."
        ) from error
    try:
        graph.capture_end()
    except RuntimeError as error:
        _abandon(graph, pool, stream)
        raise NotCheckable(
            f"its capture failed: {_first_line(error)}. Work on other streams must be joined before it returns, and "
            "nothing may synchronize."
        ) from error
    return graph, returned


def _abandon(graph: Any, pool: Any, stream: Any) -> None:
    """Ends a capture that is spoilt. torch's own end raises before it tells the allocator, which would then take every
    later allocation for one of the capture."""
    import torch

    with suppress(RuntimeError):
        graph.capture_end()
    end = getattr(torch._C, "_cuda_endAllocateToPool", None)
    if end is not None:
        with suppress(RuntimeError):
            end(stream.device.index, pool)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]


def _chain(raw: Any) -> tuple[list[Any], list[str]]:
    """The nodes in stream order, and the kinds of the edges to them. Raises NotCheckable for anything but a chain."""
    found = nodes.nodes(raw)
    others = [nodes.kind(node) for node in found]
    for kind in ("child graph", "conditional", "host", "allocation", "free"):
        if kind in others:
            raise NotCheckable(f"it captures a {kind} node, which cannot be checked yet; leave it out of the callable.")
    if len(found) < 2:
        raise NotCheckable("it captures nothing: it must launch its kernels on torch's current stream.")
    edges = graphs.edges(raw)
    after: dict[int, Any] = {}
    for edge in edges:
        if int(edge.source) in after:
            raise NotCheckable("it uses several streams; check what each of them runs on its own.")
        after[int(edge.source)] = edge
    targets = Counter(int(edge.target) for edge in edges)
    if len(edges) != len(found) - 1 or any(count > 1 for count in targets.values()):
        raise NotCheckable("it uses several streams; check what each of them runs on its own.")
    at = next(node for node in found if int(node) not in targets)
    order, kinds = [at], [""]
    while int(at) in after:
        edge = after[int(at)]
        at = edge.target
        order.append(at)
        kinds.append(edge.kind)
    return order, kinds


def _labels(order: list[Any]) -> list[str]:
    """Short names: the kernels' own, without namespaces and template arguments; numbered where several share one."""
    names = ["producer"]
    for node in order[1:]:
        kernel = nodes.kernel_of(node)
        names.append(short_name(nodes.demangled(kernel.symbol)) if kernel else nodes.kind(node))
    several = {name for name, count in Counter(names).items() if count > 1}
    seen: Counter[str] = Counter()
    labels = []
    for name in names:
        seen[name] += 1
        labels.append(f"{name}.{seen[name]}" if name in several else name)
    return labels


def short_name(name: str) -> str:
    """``rmsnorm_kernel`` of ``void lib::(anonymous namespace)::rmsnorm_kernel<8, float>``."""
    flat, depth = "", 0
    for letter in name.replace("(anonymous namespace)::", ""):
        depth += letter == "<"
        flat += letter if not depth else ""
        depth -= letter == ">"
    found = re.findall(r"[A-Za-z_]\w*", flat.split("(")[0])
    return found[-1] if found else name


def _names(fn: Callable[..., Any], count: int) -> list[str]:
    """Names of the first positional parameters; ``arg0`` and so on where there are none."""
    try:
        parameters = [
            p.name for p in inspect.signature(fn).parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]  # fmt: skip
    except (TypeError, ValueError):
        parameters = []
    return [parameters[i] if i < len(parameters) else f"arg{i}" for i in range(count)]


def _tensors(name: str, value: Any) -> Iterable[tuple[str, Any]]:
    """The tensors in a value, with their paths: ``x``, ``pages[0]``, ``state.k``."""
    import torch

    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(f"{name}.{key}", item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _tensors(f"{name}[{index}]", item)


def _independent(names: Iterable[str], tensors: dict[str, Any]) -> set[str]:
    chosen = set()
    for name in names:
        mine = {path for path in tensors if path == name or path.startswith((f"{name}.", f"{name}["))}
        if not mine:
            raise UsageError(f"independent: no input is called {name!r}; the inputs are {', '.join(tensors)}.")
        chosen |= mine
    return chosen


def _refuse_equal(truth: Any) -> None:
    if bool((truth == truth[:1]).all()):
        raise UsageError(
            "make_inputs gives the same values each time, but for inputs that are independent; draw them from torch's "
            "generator (torch.randn, ...), which is seeded anew each time, so that stale data can be told from right "
            "data."
        )
