"""Random kernels against an interpreter of their source: no early store is missed, no late one is blamed. No GPU."""

from __future__ import annotations

from collections import Counter

import pytest

from pdl_stress.audit import Severity
from tests.audit import corpus, programs


def check(audit, arch, seeds, level=3):
    """Compares the audit's answers with the interpreter's, store by store."""
    made = {f"k{seed}": programs.program(seed) for seed in seeds}
    text = corpus.HEAD + "".join(programs.kernel(name, one) for name, one in made.items())
    report = audit(corpus.compiled(text, arch, level), strict=True)
    assert not report.errors
    assert {kernel.name for kernel in report.kernels} == made.keys()
    counts, wrong = Counter(), []
    for kernel in report.kernels:
        one = made[kernel.name]
        errors = " ".join(finding.subject for finding in kernel.findings if finding.severity is Severity.ERROR)
        unknown = " ".join(finding.message for finding in kernel.findings if finding.severity is Severity.UNKNOWN)
        never = any(finding.rule == "never-waits" for finding in kernel.findings)
        for store in range(programs.STORES):
            name = f"parameter {store}"
            early, blamed, open_ = store in one.early, name in errors or never, name in unknown
            if store not in one.made:
                continue
            answer = "early" if blamed else "unknown" if open_ else "late"
            counts["early" if early else "late", answer] += 1
            if (early and answer == "late") or (not early and answer == "early"):
                wrong.append(
                    f"{kernel.name}: store {store} is {'early' if early else 'late'}, said {answer}\n{one.source}"
                )
    assert not wrong, f"{len(wrong)} wrong, the first:\n{wrong[0]}"
    return counts


def test_random_kernels_are_judged_as_their_source_says(audit):
    counts = check(audit, "sm_90a", range(300))
    assert counts["early", "early"] >= 150
    assert counts["late", "late"] >= 150
    total = sum(counts.values())
    assert counts["early", "unknown"] + counts["late", "unknown"] <= 0.05 * total, "mostly decided"


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "level"), [("sm_90a", 1), ("sm_100a", 3), ("sm_107a", 3), ("sm_120a", 3)])
def test_more_random_kernels_are_judged_as_their_source_says(audit, arch, level):
    check(audit, arch, range(1000, 1400), level)
