"""Kernels of other libraries behind the shipped chains: op sets, their contracts, and ``--ops`` as a user meets it."""

from __future__ import annotations

import json
import pickle
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from fusions import libraries
from pdl_stress import Chain, Trigger, UsageError, Wait, catalog, cli
from pdl_stress.catalog import ops
from pdl_stress.catalog.ops import NATIVE, OP_SETS, OpSet, op_set
from pdl_stress.cuda import toolchain
from pdl_stress.cuda.device import Presence, Sighting
from pdl_stress.cuda.findings import Finding, Status

ROOT = Path(__file__).resolve().parent.parent
MIX = "rmsnorm=native,tinygemm2=flashinfer"

# -- op sets -----------------------------------------------------------------------------------------------------------


def test_the_sets_and_their_names() -> None:
    assert {name: (chosen.rmsnorm.name, chosen.tinygemm2.name) for name, chosen in OP_SETS.items()} == {
        "native": ("native rmsnorm", "native tinygemm2"),
        "flashinfer": ("FlashInfer rmsnorm", "FlashInfer tinygemm2"),
        "flashinfer-reference": ("FlashInfer rmsnorm (reference)", "FlashInfer tinygemm2 (reference)"),
        "trtllm": ("TensorRT-LLM rmsnorm", "TensorRT-LLM tinygemm2"),
    }
    assert OpSet(ops.rmsnorm, ops.tinygemm2) == NATIVE == op_set("native") == op_set("auto")
    for name, chosen in OP_SETS.items():
        assert op_set(name) is chosen or op_set(name) == chosen


@pytest.mark.parametrize("name", ["flashinfer", "flashinfer-reference", "trtllm"])
def test_what_the_contracts_of_the_libraries_say(name: str) -> None:
    norm, gemm = OP_SETS[name].rmsnorm, OP_SETS[name].tinygemm2
    for op in (norm, gemm):
        assert not op.rebuildable
        assert op.contract == op.deployed
        assert op.kernels == (op.name,)
        assert (op.contract.reads, op.contract.writes) == (("input", "weight"), ("out",))
        assert op.returns == (("out",) if name == "trtllm" else ())
    assert (norm.contract.wait, norm.contract.trigger) == (Wait.ALL, Trigger.AFTER_STORES)
    assert norm.contract.independent == (), "the gain is read after the wait"
    assert (gemm.contract.wait, gemm.contract.trigger) == (Wait.LOADERS, Trigger.AFTER_WAIT)
    assert gemm.contract.independent == ("weight",)


def test_a_mix_takes_each_op_from_its_own_set() -> None:
    mixed = op_set(MIX)
    assert (mixed.rmsnorm, mixed.tinygemm2) == (NATIVE.rmsnorm, OP_SETS["flashinfer"].tinygemm2)
    assert op_set("tinygemm2=flashinfer") == mixed, "an op that is not named is native"
    assert op_set(" tinygemm2 = flashinfer , rmsnorm = auto ") == mixed
    mixed = op_set("rmsnorm=trtllm,tinygemm2=flashinfer-reference")
    assert (mixed.rmsnorm.name, mixed.tinygemm2.name) == ("TensorRT-LLM rmsnorm", "FlashInfer tinygemm2 (reference)")


BAD_SPECS = [
    ("fast", "unknown ops 'fast'; expected auto, native, flashinfer, flashinfer-reference, trtllm, or a mix such as"),
    ("", "unknown ops ''"),
    ("Native", "unknown ops 'Native'"),
    ("native,flashinfer", "unknown ops 'native,flashinfer'"),
    ("rmsnorm=fast", "unknown ops 'fast' in 'rmsnorm=fast'; expected auto, native"),
    ("rmsnorm=", "unknown ops '' in 'rmsnorm='"),
    ("norm=native", "unknown op 'norm' in ops 'norm=native'"),
    ("rmsnorm=native,", "unknown op '' in ops 'rmsnorm=native,'"),
    ("rmsnorm=native,rmsnorm=flashinfer", "op 'rmsnorm' is chosen twice"),
]


@pytest.mark.parametrize(("spec", "words"), BAD_SPECS, ids=[repr(spec) for spec, _ in BAD_SPECS])
def test_a_bad_spec_is_a_usage_error_that_lists_the_choices(spec: str, words: str) -> None:
    for call in (op_set, ops.refusal):
        with pytest.raises(UsageError) as refused:
            call(spec)
        assert words in str(refused.value)


# -- what they run -----------------------------------------------------------------------------------------------------


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[tuple[str, dict[str, Any]]]]:
    """Puts a made-up adapter in place of one, and tells what it was called with."""

    def install(name: str) -> list[tuple[str, dict[str, Any]]]:
        calls: list[tuple[str, dict[str, Any]]] = []

        def function(op: str) -> Callable[..., str]:
            def call(x: Any, weight: Any, **keywords: Any) -> str:
                calls.append((op, {"x": x, "weight": weight, **keywords}))
                return f"new {op}"

            return call

        module = types.SimpleNamespace(rmsnorm=function("rmsnorm"), tinygemm2=function("tinygemm2"))
        package = __import__("fusions.ops", fromlist=["ops"])
        monkeypatch.setattr(package, name, module, raising=False)
        return calls

    return install


@pytest.mark.parametrize(("name", "kernel"), [("flashinfer", "library"), ("flashinfer-reference", "reference")])
def test_flashinfer_ops_call_the_adapter(adapter: Any, name: str, kernel: str) -> None:
    calls = adapter("flashinfer")
    chosen = OP_SETS[name]
    chosen.rmsnorm.run(input="i", weight="w", out="o", pdl=False, eps=0.5)
    chosen.tinygemm2.run(input="i", weight="w", out="o", pdl=True)
    assert calls == [
        ("rmsnorm", {"x": "i", "weight": "w", "out": "o", "eps": 0.5, "pdl": False, "kernel": kernel}),
        ("tinygemm2", {"x": "i", "weight": "w", "out": "o", "pdl": True, "kernel": kernel}),
    ]


def test_tensorrt_llm_ops_call_the_adapter_and_return_what_it_does(adapter: Any) -> None:
    calls = adapter("trtllm")
    chosen = OP_SETS["trtllm"]
    assert chosen.rmsnorm.run(input="i", weight="w", pdl=True, eps=0.5) == "new rmsnorm"
    assert chosen.tinygemm2.run(input="i", weight="w", pdl=True) == "new tinygemm2"
    assert calls == [("rmsnorm", {"x": "i", "weight": "w", "eps": 0.5}), ("tinygemm2", {"x": "i", "weight": "w"})]


def test_a_tensorrt_llm_op_cannot_be_told_to_do_without_pdl(adapter: Any) -> None:
    """The model would judge a full edge, and the graph would have a programmatic one."""
    calls = adapter("trtllm")
    for op in (OP_SETS["trtllm"].rmsnorm, OP_SETS["trtllm"].tinygemm2):
        with pytest.raises(UsageError, match="a step with pdl=False; the op has no such choice"):
            op.run(input="i", weight="w", pdl=False)
    assert calls == []


def test_choosing_ops_and_building_chains_loads_no_library() -> None:
    code = (
        "import sys; from pdl_stress import catalog; from pdl_stress.catalog import ops;"
        "[catalog.load(n, o) for n in catalog.SHIPPED for o in ops.OP_SETS]; [ops.refusal(o) for o in ops.OP_SETS];"
        "bad = [m for m in ('torch', 'cuda.bindings', 'flashinfer', 'tensorrt_llm', 'fusions.ops')"
        " if m in sys.modules]; print(bad); sys.exit(bool(bad))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# -- chains ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", catalog.CSA2)
def test_a_chain_is_the_same_but_for_its_ops(name: str) -> None:
    native, mixed = catalog.load(name), catalog.load(name, MIX)
    assert catalog.load(name, "auto").fingerprint == native.fingerprint != mixed.fingerprint
    assert (mixed.name, mixed.title) == (native.name, native.title)
    assert [(s.name, dict(s.params)) for s in mixed.steps] == [(s.name, dict(s.params)) for s in native.steps]
    assert [str(edge) for edge in mixed.data_edges] == [str(edge) for edge in native.data_edges]
    used = {step.op.name for step in mixed.steps if not step.source}
    wide, narrow = "FlashInfer tinygemm2 (wide)", "FlashInfer tinygemm2"
    assert used == {"native rmsnorm", wide} | ({narrow} if "separate" in name else set())
    for step in mixed.steps:
        if "projection" in step.name:
            columns = step.operands["out"].shape[1]
            assert step.op.name == (wide if columns > 512 else narrow)
            early = step.contract.is_independent("weight")
            assert early is (columns <= 512), "the wgmma program waits before it reads weights"
    for step in mixed.steps:
        assert step.source or ("projection" in step.name) == ("tinygemm2" in step.op.name)


def test_a_loader_can_be_sent_to_a_child_process() -> None:
    loader = catalog.Loader("flashinfer")
    there = pickle.loads(pickle.dumps(loader))
    for name in catalog.CSA2:
        assert there(name).fingerprint == catalog.load(name, "flashinfer").fingerprint
    assert catalog.Loader()("csa2-fused-m1").fingerprint == catalog.load("csa2-fused-m1").fingerprint


def theirs() -> Chain:
    chain = Chain("theirs")
    x, gain = chain.buffer("x", (1, 512), "bfloat16"), chain.constant("gain", (512,), "bfloat16")
    chain.step("norm", ops.rmsnorm, input=chain.input("hidden", (1, 512), "bfloat16"), weight=gain, out=x)
    return chain


@pytest.fixture
def third_party(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    entry = types.SimpleNamespace(name="theirs", value="their_package:theirs", load=lambda: theirs)
    monkeypatch.setattr(catalog, "entry_points", lambda group: [entry])
    catalog.names.cache_clear()
    yield
    monkeypatch.undo()
    catalog.names.cache_clear()


def test_a_chain_of_another_package_brings_its_own_ops(third_party: None) -> None:
    for same in ("native", "auto", "rmsnorm=native"):
        assert catalog.load("theirs", same).name == "theirs"
    with pytest.raises(UsageError, match=r"chain 'theirs' brings its own ops.*leave --ops out, or name shipped chains"):
        catalog.load("theirs", "flashinfer")
    with pytest.raises(UsageError, match="unknown ops 'fast'"):
        catalog.load("theirs", "fast")


# -- the command line --------------------------------------------------------------------------------------------------

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Cli:
    """Runs ``pdl-stress ARGUMENTS`` in this process, in an empty folder: exit code, what it printed, and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli.console, "width", 118)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pdl-stress", *arguments])
        handler = signal.getsignal(signal.SIGINT)
        try:
            with pytest.raises(SystemExit) as ended:
                cli.main()
        finally:
            signal.signal(signal.SIGINT, handler)
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        assert isinstance(ended.value.code, int)
        return ended.value.code, out, err

    return call


def stored(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


@pytest.mark.parametrize(
    ("spec", "used"),
    [
        ("flashinfer", "FlashInfer rmsnorm, FlashInfer tinygemm2 (wide)"),
        ("flashinfer-reference", "FlashInfer rmsnorm (reference), FlashInfer tinygemm2 (reference)"),
        ("trtllm", "TensorRT-LLM rmsnorm, TensorRT-LLM tinygemm2"),
        (MIX, "native rmsnorm, FlashInfer tinygemm2 (wide)"),
        ("rmsnorm=flashinfer,tinygemm2=trtllm", "FlashInfer rmsnorm, TensorRT-LLM tinygemm2"),
        ("auto", "native"),
    ],
)
def test_every_choice_is_ordered_by_its_contracts(run: Cli, tmp_path: Path, spec: str, used: str) -> None:
    """No library is installed for this: no kernel runs."""
    code, out, err = run("run", *catalog.CSA2, "--machine", "model", "--ops", spec, "--out", "here")
    assert (code, err) == (0, "")
    assert "verdict: ORDERED" in out
    found = stored(tmp_path / "here")
    assert f"--ops {spec}" in found["command"]
    assert [case["chain"] for case in found["cases"]] == list(catalog.CSA2)
    for case in found["cases"]:
        narrow = ", FlashInfer tinygemm2" if "(wide)" in used and "separate" in case["chain"] else ""
        assert (case["verdict"], case["ops"], case["reasons"]) == ("ORDERED", used + narrow, [])
        assert {(c["expected"], c["verdict"]) for c in case["controls"]} == {
            ("caught", "refuted"),
            ("clean", "ordered"),
            ("unpromised", "allowed"),
        }


@pytest.mark.parametrize("spec", ["flashinfer", "trtllm", MIX])
def test_a_fault_can_be_planted_in_them_on_the_model(run: Cli, spec: str) -> None:
    code, out, _ = run("run", "csa2-fused-m1", "--machine", "model", "--ops", spec, "--plant", "F02@q_norm")
    assert code == 1
    assert "before projection writes it" in out


@pytest.mark.parametrize(("spec", "words"), BAD_SPECS, ids=[repr(spec) for spec, _ in BAD_SPECS])
def test_a_bad_choice_runs_nothing(run: Cli, tmp_path: Path, spec: str, words: str) -> None:
    code, out, err = run("run", "--machine", "model", "--ops", spec)
    assert (code, out) == (2, "")
    assert words in " ".join(err.split())
    assert list(tmp_path.iterdir()) == []


def test_chains_of_other_packages_are_left_out_or_refused(run: Cli, tmp_path: Path, third_party: None) -> None:
    quick = ("--machine", "model", "--controls", "F01,F04")
    assert run("run", *quick, "--ops", "flashinfer", "--out", "here")[0] == 0
    assert [case["chain"] for case in stored(tmp_path / "here")["cases"]] == list(catalog.SHIPPED)
    assert run("run", *quick, "--out", "all")[0] == 0
    assert [case["chain"] for case in stored(tmp_path / "all")["cases"]] == [*catalog.SHIPPED, "theirs"]
    code, _, err = run("run", "theirs", *quick, "--ops", "flashinfer", "--out", "no")
    assert code == 2
    assert "chain 'theirs' brings its own ops" in err


def test_the_choices_are_in_help_and_list(run: Cli) -> None:
    code, out, _ = run("run", "--help")
    text = " ".join(out.replace("│", " ").split())
    assert code == 0
    assert "auto (native), native, flashinfer, flashinfer-reference, trtllm, or a mix" in text
    code, out, _ = run("list")
    assert code == 0
    assert "ops: native, flashinfer, flashinfer-reference, trtllm, or a mix by op" in out


# -- a library that is absent or refused -------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A usable GPU, as far as anything asks, and libraries of these versions; None: not installed."""

    def make(**versions: str | None) -> None:
        def look(distribution: str) -> str:
            for library in ops.LIBRARIES.values():
                if library.distribution == distribution and versions.get(library.extra):
                    return str(versions[library.extra])
            raise metadata.PackageNotFoundError(distribution)

        for name, library in ops.LIBRARIES.items():
            monkeypatch.setitem(sys.modules, library.module, None)  # type: ignore[arg-type]
            if versions.get(name):
                monkeypatch.setitem(sys.modules, library.module, types.ModuleType(library.module))
        monkeypatch.setattr(metadata, "version", look)
        monkeypatch.setattr("pdl_stress.cuda.device.presence", lambda *_: Sighting(Presence.USABLE, ""))
        monkeypatch.setattr(cli, "run_on_model", lambda *_: pytest.fail("the model must not stand in"))
        monkeypatch.setattr("pdl_stress.cuda.worker.Worker", lambda *_, **__: pytest.fail("it ran"))
        monkeypatch.delenv(libraries.ALLOW_KNOWN_BAD, raising=False)

    return make


@pytest.mark.parametrize("wanted", ["cuda", "auto"])
@pytest.mark.parametrize(
    ("spec", "versions", "words"),
    [
        ("flashinfer", {}, "ops flashinfer: FlashInfer is not installed; pip install 'pdl-stress[flashinfer]'"),
        ("flashinfer-reference", {}, "ops flashinfer-reference: FlashInfer is not installed"),
        (MIX, {}, "ops flashinfer: FlashInfer is not installed"),
        ("flashinfer", {"flashinfer": "0.6.13"}, "flashinfer-python 0.6.13 is older than 0.6.14"),
        ("trtllm", {}, "ops trtllm: TensorRT-LLM is not installed; pip install 'pdl-stress[trtllm]'"),
        ("trtllm", {"trtllm": "1.2.1"}, "tensorrt-llm 1.2.1 is known bad: for K > 1024"),
        ("tinygemm2=trtllm", {"trtllm": "1.3.0rc18"}, "known bad"),
    ],
)
def test_a_library_that_is_absent_or_refused_is_an_error_before_anything_runs(
    run: Cli, tmp_path: Path, machine: Any, wanted: str, spec: str, versions: dict[str, str], words: str
) -> None:
    machine(**versions)
    code, out, err = run("run", "--machine", wanted, "--ops", spec, "--out", "here")
    assert code == 3
    assert "verdict: ERROR" in out
    assert "nothing ran: " in err
    assert words in " ".join(err.split())
    found = stored(tmp_path / "here")
    assert (found["verdict"], found["cases"], found["environment"]["machine"]) == ("ERROR", [], "cuda")
    assert words in found["errors"][0]


@pytest.mark.parametrize(
    ("spec", "versions", "allow"),
    [
        ("native", {}, ""),
        ("flashinfer", {"flashinfer": "0.7.4"}, ""),
        ("trtllm", {"trtllm": "1.3.0"}, ""),
        ("trtllm", {"trtllm": "1.2.1"}, "1"),
        ("rmsnorm=trtllm", {"trtllm": "1.2.1"}, ""),
    ],
)
def test_a_library_with_nothing_against_it_runs_with_its_ops(
    run: Cli, machine: Any, monkeypatch: pytest.MonkeyPatch, spec: str, versions: dict[str, str], allow: str
) -> None:
    machine(**versions)
    monkeypatch.setenv(libraries.ALLOW_KNOWN_BAD, allow)
    loaders = []

    class NoWorker:
        def __init__(self, load: Any, **_: Any) -> None:
            loaders.append(load)

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr("pdl_stress.cuda.worker.Worker", NoWorker)
    monkeypatch.setattr(cli, "run_on_gpu", lambda chains, *_: [])
    run("run", "--machine", "cuda", "--ops", spec, "--out", "here")
    assert loaders == [catalog.Loader(spec)]


# -- doctor ------------------------------------------------------------------------------------------------------------


def found(name: str, device_problem: str | None = None) -> Finding:
    (finding,) = (f for f in toolchain.ops(device_problem) if f.name == f"ops: {name}")
    return finding


@pytest.fixture
def nvcc(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    def make(present: bool) -> None:
        monkeypatch.setattr(toolchain, "find_tool", lambda name: name if present else None)

    return make


def test_doctor_on_libraries_that_are_not_installed(machine: Any, nvcc: Any) -> None:
    machine()
    nvcc(True)
    for name in ("flashinfer", "trtllm"):
        assert (found(name).status, found(name).value) == (Status.ABSENT, "not installed")
        assert found(name).advice == f"pip install 'pdl-stress[{name}]'"


def test_doctor_on_libraries_that_are_fine(machine: Any, nvcc: Any) -> None:
    machine(flashinfer="0.7.4", trtllm="1.3.0")
    nvcc(True)
    assert found("flashinfer") == Finding("ops: flashinfer", Status.OK, "flashinfer-python 0.7.4")
    assert found("trtllm") == Finding("ops: trtllm", Status.OK, "tensorrt-llm 1.3.0")
    assert found("trtllm", "no GPU").status is Status.ABSENT
    assert "needs a GPU with PDL: no GPU" in found("flashinfer", "no GPU").value


def test_doctor_on_libraries_that_are_refused(machine: Any, nvcc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(flashinfer="0.6.13", trtllm="1.2.1")
    nvcc(True)
    assert found("flashinfer").status is found("trtllm").status is Status.ABSENT
    assert "0.6.13 is older than 0.6.14" in found("flashinfer").value
    assert "pip install -U" in found("flashinfer").advice
    assert "1.2.1 is known bad" in found("trtllm").value
    assert "FUSIONS_ALLOW_KNOWN_BAD=1" in found("trtllm").advice
    monkeypatch.setenv(libraries.ALLOW_KNOWN_BAD, "1")
    assert found("trtllm").status is Status.NOTE, "it runs, and doctor still says what it is"
    assert "1.2.1 is known bad" in found("trtllm").value


def test_doctor_says_that_flashinfer_has_nothing_to_build_its_kernels_with(
    machine: Any, nvcc: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(flashinfer="0.7.4", trtllm="1.3.0")
    nvcc(False)
    assert found("flashinfer").status is Status.ABSENT
    assert "flashinfer-python 0.7.4, and no nvcc to build its kernels with" in found("flashinfer").value
    assert "CUDA_HOME" in found("flashinfer").advice
    assert found("trtllm").status is Status.OK, "its kernels come built"
    monkeypatch.setattr(toolchain, "version_of", lambda name: "0.7.4")
    assert found("flashinfer").status is Status.OK, "flashinfer-jit-cache brings them built"
