"""The scoped TF32 switch: what it sets, and that everything is back afterwards, whatever a process had set before.

A process that has mixed torch's two switches stays mixed. So every history runs in a process of its own, forked from
one that has imported torch and nothing else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fusions import tf32 as module
from fusions.tf32 import is_on, tf32

ROOT = Path(__file__).parents[2]

HISTORIES = {
    "untouched": "pass",
    "legacy on": "matmul.allow_tf32 = True",
    "legacy off": "matmul.allow_tf32 = False",
    "level high": "torch.set_float32_matmul_precision('high')",
    "level medium": "torch.set_float32_matmul_precision('medium')",
    "level highest": "torch.set_float32_matmul_precision('highest')",
    "new on": "matmul.fp32_precision = 'tf32'",
    "new off": "matmul.fp32_precision = 'ieee'",
    "inherited on": "torch.backends.fp32_precision = 'tf32'",
    "inherited off": "torch.backends.fp32_precision = 'ieee'",
    "legacy on, new off": "matmul.allow_tf32 = True; matmul.fp32_precision = 'ieee'",
    "level high, new off": "torch.set_float32_matmul_precision('high'); matmul.fp32_precision = 'ieee'",
    "level medium, legacy off": "torch.set_float32_matmul_precision('medium'); matmul.allow_tf32 = False",
    "new on, legacy off": "matmul.fp32_precision = 'tf32'; matmul.allow_tf32 = False",
}
STARTS_ON = {"legacy on", "level high", "level medium", "new on", "inherited on"}
MIXED = {"new on", "inherited on", "legacy on, new off", "level high, new off"}

PROGRAM = """
import json, os, sys
import torch
from fusions.tf32 import is_on, tf32

matmul = torch.backends.cuda.matmul

def settings():
    found = {}
    for name, read in {
        "legacy": lambda: matmul.allow_tf32,
        "new": lambda: matmul.fp32_precision,
        "level": torch.get_float32_matmul_precision,
        "root": lambda: torch.backends.fp32_precision,
        "cpu": lambda: torch.backends.mkldnn.matmul.fp32_precision,
    }.items():
        try:
            found[name] = read()
        except RuntimeError:
            found[name] = "raises"
    return found

def run(enabled):
    found = {"before": settings()}
    with tf32(enabled):
        found["inside"] = settings()
        with tf32(not enabled):
            found["nested"] = settings()
            with tf32(enabled):
                found["innermost"] = settings()
        found["inside again"] = settings()
    found["after"] = settings()
    try:
        with tf32(enabled):
            raise KeyError
    except KeyError:
        found["after an exception"] = settings()
    torch.backends.fp32_precision = "tf32"
    found["root on"] = is_on()
    return found

results = {}
for name, history in json.loads(sys.argv[1]).items():
    for enabled in (True, False):
        reads, writes = os.pipe()
        if not os.fork():
            exec(history)
            os.write(writes, json.dumps(run(enabled)).encode())
            os._exit(0)
        os.close(writes)
        with os.fdopen(reads) as pipe:
            results[f"{name} {enabled}"] = json.loads(pipe.read())
        os.wait()
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def runs():
    """What each history led to, by its name and the value that the scope was asked for."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM, json.dumps(HISTORIES)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(params=[(name, enabled) for name in HISTORIES for enabled in (True, False)], ids=str)
def history(request, runs):
    name, enabled = request.param
    return name, enabled, runs[f"{name} {enabled}"]


def test_the_histories_are_what_they_are_called(runs):
    """Else the other tests would not see what they are about."""
    for name in HISTORIES:
        before = runs[f"{name} True"]["before"]
        assert (before["new"] == "tf32") == (name in STARTS_ON), name
        assert (before["legacy"] == "raises") == (name in MIXED), name


def test_inside_it_is_what_was_asked_for(history):
    _, enabled, found = history
    on, off = ("tf32", False), (("ieee", "none"), True)
    for where, wants_on in (("inside", enabled), ("nested", not enabled), ("innermost", enabled)):
        precision = found[where]["new"]
        assert (precision == on[0]) if wants_on else (precision in off[0]), where
    assert found["inside again"] == found["inside"]


def test_everything_is_back_afterwards(history):
    _, _, found = history
    assert found["after"] == found["before"]
    assert found["after an exception"] == found["before"]


def test_other_threads_can_read_the_older_switch_meanwhile(history):
    """Where they could before; but for ``medium``, which would not be restored."""
    name, enabled, found = history
    if found["before"]["legacy"] != "raises" and (name, enabled) != ("level medium", False):
        assert found["inside"]["legacy"] is enabled


def test_what_was_inherited_is_inherited_again(runs):
    for enabled in (True, False):
        assert runs[f"untouched {enabled}"]["root on"] is True
        assert runs[f"legacy off {enabled}"]["root on"] is False


def test_it_runs_on_a_torch_that_has_the_older_switch_only(monkeypatch):
    """Stands for torch 2.8."""
    level = {False: "highest", True: "high"}
    matmul, calls = SimpleNamespace(allow_tf32=False), []

    def set_level(value):
        calls.append(value)
        matmul.allow_tf32 = value != "highest"

    monkeypatch.setattr(torch.backends.cuda, "matmul", matmul)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: level[matmul.allow_tf32])
    monkeypatch.setattr(torch, "set_float32_matmul_precision", set_level)
    with tf32():
        assert matmul.allow_tf32 is True
        assert is_on()
    assert matmul.allow_tf32 is False
    assert calls == ["highest"]
    level[True], matmul.allow_tf32 = "medium", True
    with tf32(False):
        assert matmul.allow_tf32 is False
    assert matmul.allow_tf32 is True
    assert calls == ["highest", "medium"]


def test_a_scope_that_changes_nothing_writes_nothing(monkeypatch):
    class Frozen:
        allow_tf32, fp32_precision = True, "tf32"

        def __setattr__(self, name, value):
            raise AssertionError(name)

    monkeypatch.setattr(torch.backends.cuda, "matmul", Frozen())
    with tf32():
        pass


def test_scopes_of_threads_exclude_each_other():
    before, inside, seen = is_on(), threading.Event(), []

    def other():
        inside.set()
        with tf32(False):
            seen.append(is_on())

    thread = threading.Thread(target=other)
    with tf32():
        thread.start()
        assert inside.wait(10)
        thread.join(0.1)
        assert thread.is_alive()
        assert seen == []
        assert is_on()
    thread.join(10)
    assert seen == [False]
    assert is_on() == before


def test_a_failing_switch_leaves_the_lock_free(monkeypatch):
    def fail(enabled):
        raise RuntimeError("no")

    with monkeypatch.context() as patch:
        patch.setattr(module, "_switch", fail)
        with pytest.raises(RuntimeError, match="no"), tf32():
            pass

    def other():
        with tf32():
            pass

    thread = threading.Thread(target=other)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
