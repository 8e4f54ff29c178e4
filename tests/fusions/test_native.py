"""Behaviours, sources, machine code and its cache. No GPU."""

from __future__ import annotations

import dataclasses

import pytest

from fusions.ops.native import Behaviour
from fusions.ops.native import code as native
from pdl_stress.sass.cubin import text_sections


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty disk cache and an empty memory cache."""
    monkeypatch.setenv("PDL_STRESS_CACHE", str(tmp_path))
    native._cubin.cache_clear()
    yield tmp_path
    native._cubin.cache_clear()


@pytest.fixture
def compilations(monkeypatch):
    """The names of the kernels that NVRTC really compiled."""
    names = []
    compile_ = native._compile
    monkeypatch.setattr(
        native, "_compile", lambda text, name, *rest: (names.append(name), compile_(text, name, *rest))[1]
    )
    return names


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"wait": "some"}, "wait='some' is unknown"),
        ({"wait": "all", "trigger": "late"}, "trigger='late' is unknown"),
        ({"wait": "all", "trigger": "none", "fence": True}, "fence=True needs a trigger"),
        ({"wait": "never", "trigger": "after_wait"}, "'after_wait' needs a wait"),
        ({"wait": "never", "early_weights": False}, "orders nothing"),
        ({"wait": "one_warp", "early_weights": False}, "orders nothing"),
    ],
)
def test_contradicting_behaviours_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Behaviour(**arguments)


@pytest.mark.parametrize(
    ("kernel", "behaviour", "message"),
    [
        ("gemm", Behaviour("all"), "kernel 'gemm' is unknown"),
        ("rmsnorm", Behaviour("loaders"), "no loader threads"),
        ("rmsnorm", Behaviour("all", early_weights=False), "early_weights is for tinygemm2"),
        ("layernorm", Behaviour("loaders"), "layernorm has no loader threads"),
        ("layernorm", Behaviour("all", early_weights=False), "layernorm always reads its weight after the wait"),
    ],
)
def test_behaviours_that_a_kernel_cannot_have_are_refused(kernel, behaviour, message):
    for use in (native.validate, native.source, native.cubin):
        with pytest.raises(ValueError, match=message):
            use(kernel, behaviour)


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "compute_90", "sm_90a --use_fast_math", ""])
def test_architectures_without_pdl_are_refused(arch):
    with pytest.raises(ValueError, match="sm_90 or newer"):
        native.cubin("rmsnorm", Behaviour("all"), arch)


def test_every_field_of_a_behaviour_reaches_the_source():
    base = native.source("tinygemm2", Behaviour("loaders", "after_wait"))
    changes = {"wait": "late", "trigger": "entry", "fence": True, "early_weights": False, "delay": True, "stamps": True}
    assert set(changes) == {field.name for field in dataclasses.fields(Behaviour)}
    sources = {
        native.source("tinygemm2", dataclasses.replace(Behaviour("loaders", "after_wait"), **{name: value}))
        for name, value in changes.items()
    }
    assert len(sources) == len(changes)
    assert base not in sources


def test_the_cache_keeps_machine_code_across_processes(cache, compilations):
    first = native.cubin("rmsnorm", Behaviour("all"))
    native._cubin.cache_clear()  # what a new process starts with
    assert native.cubin("rmsnorm", Behaviour("all")) == first
    assert compilations == ["rmsnorm"]
    assert [path.suffix for path in cache.iterdir()] == [".cubin"]


def test_the_memory_cache_needs_no_disk(cache, compilations):
    first = native.cubin("rmsnorm", Behaviour("all"))
    for path in cache.iterdir():
        path.unlink()
    assert native.cubin("rmsnorm", Behaviour("all")) is first
    assert compilations == ["rmsnorm"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: b"",
        lambda entry: entry[:-1],
        lambda entry: entry[: len(native._MAGIC) + 8],
        lambda entry: entry[:-9] + bytes([entry[-9] ^ 1]) + entry[-8:],
        lambda entry: b"another format" + entry,
    ],
)
def test_a_damaged_cache_entry_is_compiled_again_and_replaced(cache, compilations, damage):
    first = native.cubin("rmsnorm", Behaviour("all"))
    (path,) = cache.iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    native._cubin.cache_clear()
    assert native.cubin("rmsnorm", Behaviour("all")) == first
    assert compilations == ["rmsnorm", "rmsnorm"]
    assert path.read_bytes() == whole


def test_entries_differ_by_behaviour_architecture_and_compiler(cache, compilations, monkeypatch):
    native.cubin("rmsnorm", Behaviour("all"))
    native.cubin("rmsnorm", Behaviour("never"))
    native.cubin("rmsnorm", Behaviour("all"), "sm_100a")
    native._cubin.cache_clear()
    monkeypatch.setattr(native, "_nvrtc_version", lambda: "0.0")
    native.cubin("rmsnorm", Behaviour("all"))
    assert len(compilations) == len(list(cache.iterdir())) == 4


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("PDL_STRESS_CACHE", str(tmp_path / "file"))
    native._cubin.cache_clear()
    assert text_sections(native.cubin("rmsnorm", Behaviour("all"))).keys() == {"rmsnorm"}
    native._cubin.cache_clear()


def test_the_cache_directory_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("PDL_STRESS_CACHE", str(tmp_path / "here"))
    assert native.cache_directory() == tmp_path / "here"
    monkeypatch.delenv("PDL_STRESS_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert native.cache_directory() == tmp_path / ".cache" / "pdl-stress"
