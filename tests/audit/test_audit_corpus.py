"""The labelled corpus: every faulty kernel is found by its rule, no clean one raises an alarm. No GPU."""

from __future__ import annotations

from collections import Counter

import pytest

from pdl_stress.audit import Severity
from tests.audit import corpus

CLEAN = [name for name, variant in corpus.LABELS.items() if not variant.fault]
FAULTY = [name for name, variant in corpus.LABELS.items() if variant.fault]


def check(audit, arch, level):
    """Audits one module of the corpus, and gives the counts. Every kernel must be accounted for."""
    report = audit(corpus.module(arch, level), strict=True)
    assert not report.errors
    kernels = {kernel.name: kernel for kernel in report.kernels}
    assert kernels.keys() == corpus.LABELS.keys()
    counts, wrong = Counter(), []
    for name, variant in corpus.LABELS.items():
        found = [finding for finding in kernels[name].findings if finding.severity is not Severity.NOTE]
        alarms = {finding.rule for finding in found if finding.severity is not Severity.UNKNOWN}
        if not variant.fault:
            what = "false alarm" if alarms else "clean, unknown" if found else "clean"
        elif alarms & variant.rules:
            what = "found"
        else:
            what = "found by another rule" if alarms else "unknown" if found else "missed in silence"
        counts[what] += 1
        if what in ("false alarm", "missed in silence", "found by another rule"):
            wrong.append(f"{name}: {what}: {sorted(alarms)}")
    assert not wrong
    return counts


def test_the_corpus_holds_every_fault_in_every_shape():
    faults = {variant.fault for variant in corpus.VARIANTS.values()} - {""}
    assert faults == {"F01", "F02", "F03", "F04", "F05", "F08", "F10", "F13"}
    assert len(corpus.SHAPES) >= 10
    assert len(CLEAN) >= 100
    assert len(FAULTY) >= 200
    for shape in corpus.SHAPES:
        own = {corpus.LABELS[name].fault for name in corpus.LABELS if name.startswith(f"{shape}__")}
        assert own >= faults - {"F04", "F05"}


@pytest.mark.parametrize(("arch", "level"), [("sm_90a", 3), ("sm_100a", 3)])
def test_no_false_alarm_and_nothing_missed(audit, arch, level):
    counts = check(audit, arch, level)
    assert counts["found"] >= 0.95 * len(FAULTY)
    assert counts["clean"] >= 0.95 * len(CLEAN)


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 3])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a", "sm_107a", "sm_120a"])
def test_no_false_alarm_and_nothing_missed_anywhere(audit, arch, level):
    counts = check(audit, arch, level)
    assert counts["found"] >= 0.95 * len(FAULTY)
    assert counts["clean"] >= 0.95 * len(CLEAN)
