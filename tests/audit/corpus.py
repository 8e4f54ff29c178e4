"""A labelled corpus: every fault that machine code can show, in several kernel shapes, beside clean twins.

One CUDA source holds them all; a module is compiled for each architecture and optimisation level. A kernel's name is
`<shape>__<variant>`; `LABELS` says what must be found in it, under the strict rule (every operand is dependent).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

HEAD = r"""
#define WAIT asm volatile("griddepcontrol.wait;" ::: "memory")
#define TRIGGER asm volatile("griddepcontrol.launch_dependents;" ::: "memory")
typedef unsigned int u32;
typedef unsigned long long u64;
struct alignas(64) TensorMap { u64 opaque[16]; };
__device__ __forceinline__ float ld(const float* p) { return *(const volatile float*)p; }
__device__ __forceinline__ void st(float* p, float v) { *(volatile float*)p = v; }
__device__ __forceinline__ u32 sh(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ bool elected() {
    u32 mine;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(mine)::"memory");
    return mine;
}
__device__ __forceinline__ void init(u64* bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(sh(bar)), "r"(count) : "memory");
}
__device__ __forceinline__ void expect(u64* bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(sh(bar)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void poll(u64* bar, u32 parity) {
    u32 done;
    do {
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done) : "r"(sh(bar)), "r"(parity) : "memory");
    } while (!done);
}
__device__ __forceinline__ void bulk(void* to, const void* from, u32 bytes, u64* bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(sh(to)), "l"(from), "r"(bytes), "r"(sh(bar)) : "memory");
}
__device__ __forceinline__ void tensor(void* to, const TensorMap* map, u64* bar) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%2, %3}], [%4];" ::"r"(sh(to)), "l"(map), "r"(0), "r"(0), "r"(sh(bar)) : "memory");
}
__device__ __noinline__ float far_load(const float* p, int i) { return ld(p + i) * 3.0f + ld(p + i + 1); }
__device__ __noinline__ void far_store(float* p, int i, float v) { st(p + i, v); st(p + i + 7, v); }
__device__ __noinline__ void far_wait(float* p) { WAIT; if (p == nullptr) st(p, 1.0f); }
#define SIGNATURE const float* x, float* y, int* counter, int n, int flag, const __grid_constant__ TensorMap map
#define INDEX const int tid = threadIdx.x, warp = tid / 32, i = blockIdx.x * blockDim.x + tid; float acc = 1.0f
"""

# PRE stands before the wait, GATE is the wait, END the trigger. Each shape reads x and writes y behind the wait.
SHAPES = {
    "plain": "PRE; GATE; acc += ld(x + i); st(y + i, acc); END;",
    "loop": "PRE; GATE; for (int j = 0; j < n; ++j) acc += ld(x + i + j * 97); st(y + i, acc); END;",
    "guarded": "PRE; GATE; if (i < n) { acc += ld(x + i); st(y + i, acc); } END;",
    "early_exit": "if (i >= n) return; PRE; GATE; acc += ld(x + i); st(y + i, acc); END;",
    "persistent": """PRE; GATE;
        for (int tile = blockIdx.x; tile < n; tile += gridDim.x) {
            acc += ld(x + tile * 256 + tid); __syncthreads(); st(y + tile * 256 + tid, acc); }
        END;""",
    "shared": """__shared__ float s[1024]; PRE; GATE; s[tid] = ld(x + i); __syncthreads();
        acc += s[tid ^ 33]; st(y + i, acc); END;""",
    "reduce": """__shared__ float s[32]; PRE; GATE; acc += ld(x + i);
        for (int m = 16; m; m >>= 1) acc += __shfl_xor_sync(~0u, acc, m);
        if (tid % 32 == 0) s[warp] = acc; __syncthreads();
        if (tid == 0) { for (int k = 0; k < 8; ++k) acc += s[k]; atomicAdd(counter, 1); st(y, acc); } END;""",
    "roles": """__shared__ float s[1024]; PRE; GATE;
        if (warp < 4) { for (int j = tid; j < 1024; j += 128) s[j] = ld(x + j); }
        __syncthreads();
        if (warp >= 4) { acc += s[tid]; st(y + i, acc); } END;""",
    "copy": """__shared__ float s[1024]; PRE; GATE;
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(sh(s + tid)), "l"(x + i) : "memory");
        asm volatile("cp.async.wait_all;" ::: "memory"); __syncthreads(); acc += s[tid ^ 1]; st(y + i, acc); END;""",
    "bulk": """__shared__ alignas(128) float s[1024]; __shared__ u64 bar; if (tid == 0) init(&bar, 1); __syncthreads();
        PRE; GATE; if (tid == 0) { expect(&bar, 4096); bulk(s, x, 4096, &bar); }
        poll(&bar, 0); acc += s[tid]; st(y + i, acc); END;""",
    "tensor": """__shared__ alignas(128) float s[1024]; __shared__ u64 bar; if (tid == 0) init(&bar, 1);
        __syncthreads();
        PRE; GATE; if (warp == 0 && elected()) { expect(&bar, 4096); tensor(s, &map, &bar); }
        poll(&bar, 0); acc += s[tid]; st(y + i, acc); END;""",
    "helper": "PRE; GATE; acc += far_load(x, i); far_store(y, i, acc); END;",
    "switch": """PRE; GATE; switch (flag) { case 0: acc += ld(x + i); break; case 1: acc *= ld(x + i + 5); break;
        case 2: acc -= ld(x + 2 * i); break; case 3: acc = ld(x + 3 * i); break; default: acc = 7; }
        st(y + i, acc); END;""",
}

SOME_WARPS = frozenset({"waits-in-some-warps"})
SOME_PATHS = frozenset({"waits-on-some-paths"})
NEVER = frozenset({"never-waits"})
READ = frozenset({"reads-before-wait"})
ASYNC = frozenset({"async-before-wait"})


@dataclass(frozen=True)
class Variant:
    """What PRE, GATE and END are. fault: of the catalogue, empty where clean. rules: one of them must find it."""

    pre: str = ""
    gate: str = "WAIT"
    end: str = "TRIGGER"
    fault: str = ""
    rules: frozenset[str] = frozenset()


VARIANTS = {
    # clean
    "clean": Variant(),
    "twice": Variant(gate="WAIT; WAIT"),
    "thread": Variant(gate="if (tid == 0) WAIT; __syncthreads()"),
    "warp": Variant(gate="if (warp == 0) WAIT; __syncthreads()"),
    "last_warp": Variant(gate="if (warp == 7) { WAIT; TRIGGER; } __syncthreads()"),
    "elect": Variant(gate="if (warp == 2 && elected()) WAIT; __syncwarp(); __syncthreads()"),
    "lanes": Variant(gate="if (tid % 32 == 0) WAIT; __syncwarp()"),
    "both": Variant(gate="if (flag) { acc += 2; WAIT; } else { acc *= 3; WAIT; }"),
    "early_trigger": Variant(pre="TRIGGER", end=""),
    "in_helper": Variant(gate="far_wait(y)"),
    "shuffled": Variant(gate="if (__shfl_sync(~0u, tid / 32, 0) == 3) WAIT; __syncthreads()"),
    "named": Variant(gate='if (warp == 1) WAIT; asm volatile("bar.sync 1, 256;" ::: "memory")'),
    # faulty
    "F01": Variant(pre="acc += ld(x + i + 1)", fault="F01", rules=READ),
    "F01_one": Variant(pre="if (tid == 5) acc += ld(x + 9)", fault="F01", rules=READ),
    "F01_late": Variant(pre="acc += ld(x + i)", gate="__syncthreads(); WAIT", fault="F01", rules=READ),
    "F02": Variant(gate="", fault="F02", rules=NEVER),
    "F03": Variant(gate="", end="", fault="F03", rules=NEVER),
    "F04": Variant(gate="if (warp == 0) WAIT", fault="F04", rules=SOME_WARPS),
    "F04_thread": Variant(gate="if (tid == 0) WAIT; __syncwarp()", fault="F04", rules=SOME_WARPS),
    "F04_half": Variant(gate="if (warp >= 2 && warp < 4) WAIT", fault="F04", rules=SOME_WARPS),
    "F04_shuffled": Variant(gate="if (__shfl_sync(~0u, warp, 0) > 1) WAIT", fault="F04", rules=SOME_WARPS),
    "F05": Variant(gate="if (flag) WAIT", fault="F05", rules=SOME_PATHS),
    "F05_synced": Variant(gate="if (flag > 3) WAIT; __syncthreads()", fault="F05", rules=SOME_PATHS),
    "F05_thread": Variant(gate="if (flag) { if (tid == 0) WAIT; __syncthreads(); }", fault="F05", rules=SOME_PATHS),
    "F05_block": Variant(gate="if (blockIdx.x == 0) WAIT", fault="F05", rules=SOME_PATHS),
    "F08": Variant(pre="st(y + i + n, 0.0f)", fault="F08", rules=frozenset({"writes-before-wait"})),
    "F10": Variant(pre="if (tid == 0) atomicExch(counter, 0)", fault="F10", rules=frozenset({"updates-before-wait"})),
    "F10_red": Variant(pre="atomicAdd(counter + 1, flag)", fault="F10", rules=frozenset({"updates-before-wait"})),
    "F01_helper": Variant(pre="acc += far_load(x, i)", fault="F01", rules=READ),
    "F01_copy": Variant(
        pre='__shared__ float t[1]; asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"'
        ' ::"r"(sh(t)), "l"(x) : "memory")',
        fault="F01",
        rules=READ,
    ),
    "F13": Variant(
        pre="__shared__ alignas(128) float t[256]; __shared__ u64 early; if (tid == 0) { init(&early, 1); "
        "expect(&early, 1024); bulk(t, x, 1024, &early); }",
        fault="F13",
        rules=ASYNC,
    ),
    "F13_tensor": Variant(
        pre="__shared__ alignas(128) float t[1024]; __shared__ u64 early; if (tid == 0) { init(&early, 1); "
        "expect(&early, 4096); tensor(t, &map, &early); }",
        fault="F13",
        rules=ASYNC,
    ),
}

# Threads that left early meet no barrier: such twins would be wrong for another reason.
_NO_BARRIER = ("early_exit",)
# There the thread that waits is the one that copies, and all others are ordered behind its mbarrier.
_ORDERED = {f"{shape}__{name}" for shape in ("bulk", "tensor") for name in ("F04", "F04_thread")}
LABELS: dict[str, Variant] = {
    f"{shape}__{name}": replace(variant, fault="") if f"{shape}__{name}" in _ORDERED else variant
    for shape in SHAPES
    for name, variant in VARIANTS.items()
    if not (shape in _NO_BARRIER and ("__syncthreads" in variant.gate or "bar.sync" in variant.gate))
}


@functools.cache
def source() -> str:
    kernels = []
    for name, variant in LABELS.items():
        body = SHAPES[name.split("__")[0]]
        for mark, text in (("PRE", variant.pre), ("GATE", variant.gate), ("END", variant.end)):
            body = body.replace(mark, text)
        kernels.append(f'extern "C" __global__ void {name}(SIGNATURE) {{ INDEX; {body} }}')
    return HEAD + "\n".join(kernels)


@functools.cache
def module(arch: str, level: int = 3) -> bytes:
    """The corpus as one cubin."""
    return compiled(source(), arch, level)


def compiled(text: str, arch: str = "sm_90a", level: int = 3, **options: object) -> bytes:
    from cuda.core import Program, ProgramOptions

    chosen = ProgramOptions(arch=arch, std="c++17", ptxas_options=f"-O{level}", **options)
    return Program(text, "c++", chosen).compile("cubin").code
