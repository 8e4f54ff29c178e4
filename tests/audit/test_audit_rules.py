"""Each rule: code that breaks it is found, and its twin is not. No GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pdl_stress.audit import RULES, Declared, Severity
from pdl_stress.contract import KernelContract, Trigger, Wait

ROOT = Path(__file__).parent.parent.parent
BODY = 'extern "C" __global__ void k(const float* x, float* y, int* c, int n, int flag, float** p) {{ {} }}'
SAXPY = "st(y + threadIdx.x, ld(x + threadIdx.x));"
CONTRACT = KernelContract(("x",), ("y",), (), Wait.ALL, Trigger.AFTER_STORES)
NAMES = {0: "x", 1: "y", 2: "c", 5: "p"}


def declared(**changes):
    return {"k": Declared(CONTRACT.but(**changes), NAMES)}


# rule: (code that breaks it, the twin that does not, what is said about both)
CASES = {
    "reads-before-wait": (
        "float a = ld(x); WAIT; st(y, a); TRIGGER;", "WAIT; float a = ld(x); st(y, a); TRIGGER;", {}
    ),
    "hoisted-read": (
        "float a = 0; for (int i = 0; i < n; ++i) { WAIT; a += __ldg(x) * i; } st(y, a);",
        "WAIT; float a = ld(x); st(y, a); TRIGGER;", {}
    ),
    "writes-before-wait": ("st(y, 1); WAIT; TRIGGER;", "WAIT; st(y, 1); TRIGGER;", {}),
    "updates-before-wait": ("atomicAdd(c, 1); WAIT; TRIGGER;", "WAIT; atomicAdd(c, 1); TRIGGER;", {}),
    "async-before-wait": (
        "__shared__ alignas(128) float s[64]; __shared__ u64 b; init(&b, 1); bulk(s, x, 256, &b); WAIT;",
        "__shared__ alignas(128) float s[64]; __shared__ u64 b; init(&b, 1); WAIT; bulk(s, x, 256, &b);",
        {},
    ),
    "waits-on-some-paths": (f"if (flag) WAIT; {SAXPY}", f"if (flag) WAIT; else WAIT; {SAXPY}", {}),
    "waits-in-some-warps": (
        f"if (threadIdx.x >= 32) WAIT; {SAXPY}", f"if (threadIdx.x >= 32) WAIT; __syncthreads(); {SAXPY}", {}
    ),
    "never-waits": (SAXPY, f"WAIT; {SAXPY}", {"strict": False, "contracts": declared(trigger=Trigger.NONE)}),
    "attribute-without-wait": (SAXPY, f"WAIT; {SAXPY}", {"strict": False, "launches": {"k": True}}),
    "contract-mismatch": (
        f"WAIT; TRIGGER; {SAXPY}", f"WAIT; {SAXPY} TRIGGER;", {"strict": False, "contracts": declared()}
    ),
    "trigger-without-wait": (f"{SAXPY} TRIGGER;", f"WAIT; {SAXPY} TRIGGER;", {"strict": False}),
    "undecided": (
        f"for (int i = 0; i < n; ++i) if (ld(x + i) > 0) WAIT; {SAXPY}",
        f"WAIT; for (int i = 0; i < n; ++i) if (ld(x + i) > 0) WAIT; {SAXPY}",
        {},
    ),
    "exits-without-waiting": (f"if (n) return; WAIT; {SAXPY}", f"WAIT; if (n) return; {SAXPY}", {}),
    "wait-without-trigger": (f"WAIT; {SAXPY}", f"WAIT; {SAXPY} TRIGGER;", {}),
    "trigger-before-own-wait": (f"TRIGGER; WAIT; {SAXPY}", f"WAIT; TRIGGER; {SAXPY}", {}),
    "stores-after-trigger": (f"WAIT; TRIGGER; {SAXPY}", f"WAIT; {SAXPY} TRIGGER;", {}),
    "trigger-late": (f"WAIT; {SAXPY} TRIGGER;", f"WAIT; TRIGGER; {SAXPY}", {}),
    "non-coherent-after-wait": (
        "WAIT; if (c[0]) TRIGGER; st(y, __ldg(x + c[1]));", "WAIT; if (c[0]) TRIGGER; st(y, ld(x + c[1]));", {}
    ),
    "no-pdl-code": (SAXPY, f"WAIT; {SAXPY}", {"strict": False, "explained": "k"}),
}  # fmt: skip


def test_every_rule_has_a_case_and_there_are_enough():
    assert CASES.keys() == RULES.keys()
    assert len(RULES) >= 12


@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow)])
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_finds_what_breaks_it_and_not_its_twin(audit_source, rule, arch):
    broken, whole, question = CASES[rule]
    found = [f for f in audit_source(BODY.format(broken), arch, **question).findings if f.rule == rule]
    assert found
    assert {finding.severity for finding in found} == {RULES[rule].severity}
    assert all(finding.kernel == "k" and finding.message for finding in found)
    assert rule not in {finding.rule for finding in audit_source(BODY.format(whole), arch, **question).findings}


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
def test_a_rule_says_what_it_is(rule):
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", rule.id)
    assert rule.title[0].islower()
    assert rule.text.endswith(".")
    assert rule.example
    assert rule.fault == "-" or all(re.fullmatch(r"F\d\d", fault) for fault in rule.fault.split(", "))


def test_the_documentation_lists_every_rule():
    text = (ROOT / "docs/audit.md").read_text(encoding="utf-8")
    for rule in RULES.values():
        assert f"| `{rule.id}` | {rule.severity.word} | {rule.fault} |" in text, rule.id


# --- severity and contracts -------------------------------------------------------------------------------------------

EARLY = BODY.format("float a = ld(x); WAIT; st(y, a + ld(x + 1)); TRIGGER;")


def severities(kernel, rule):
    return [finding.severity for finding in kernel.findings if finding.rule == rule]


def test_an_undeclared_kernel_is_for_review_and_a_declared_one_in_error(audit_source):
    assert severities(audit_source(EARLY, strict=False), "reads-before-wait") == [Severity.REVIEW]
    assert severities(audit_source(EARLY, strict=True), "reads-before-wait") == [Severity.ERROR]
    assert severities(audit_source(EARLY, strict=False, contracts=declared()), "reads-before-wait") == [Severity.ERROR]


def test_an_independent_operand_may_be_touched_early(audit_source):
    kernel = audit_source(EARLY, strict=False, contracts=declared(independent=("x",)))
    assert {finding.severity for finding in kernel.findings} <= {Severity.NOTE}


def test_a_finding_names_the_operand_by_the_contract(audit_source):
    (finding,) = (f for f in audit_source(EARLY, strict=False, contracts=declared()).findings if f.severity == 0)
    assert finding.subject == "x"
    assert finding.message == "x may be read before the wait"
    assert audit_source(EARLY).findings[0].subject == "parameter 0"


def test_pointers_are_followed_through_arrays_of_pointers(audit_source):
    load = "float* q = *(float* const volatile*)(p + blockIdx.x);"
    kernel = audit_source(BODY.format(f"{load} st(q + 3, 1.0f); WAIT; TRIGGER;"))
    assert {(finding.rule, finding.subject) for finding in kernel.findings if finding.severity is Severity.ERROR} == {
        ("reads-before-wait", "parameter 5"),
        ("writes-before-wait", "memory that parameter 5 points to indirectly"),
    }


@pytest.mark.parametrize(
    ("body", "changes", "message"),
    [
        (f"WAIT; {SAXPY} TRIGGER;", {"wait": Wait.NEVER}, "it waits, and its contract says never"),
        (f"WAIT; {SAXPY} TRIGGER;", {"trigger": Trigger.NONE}, "it triggers after_stores, and its contract says none"),
        (f"WAIT; {SAXPY} TRIGGER;", {"fence": True}, "its contract says that a fence stands before the trigger"),
        (f"WAIT; {SAXPY} TRIGGER;", {"reads": ("c",)}, "it reads x, which its contract does not say"),
        (f"WAIT; {SAXPY} TRIGGER;", {"writes": ("c",)}, "it writes y, which its contract does not say"),
        (f"TRIGGER; WAIT; {SAXPY}", {}, "it triggers entry, and its contract says after_stores"),
    ],
)
def test_each_difference_from_the_contract_is_told(audit_source, body, changes, message):
    kernel = audit_source(BODY.format(body), strict=False, contracts=declared(**changes))
    errors = [finding.message for finding in kernel.findings if finding.severity is Severity.ERROR]
    assert len(errors) == 1
    assert message in errors[0]


def test_a_fence_that_is_there_is_seen(audit_source):
    body = BODY.format(f"WAIT; {SAXPY} __threadfence(); TRIGGER;")
    kernel = audit_source(body, strict=False, contracts=declared(fence=True))
    assert {finding.severity for finding in kernel.findings} <= {Severity.NOTE}


def test_fingerprints_hold_no_offset(audit_source):
    longer = EARLY.replace("float a = ld(x);", "float a = ld(x) + ld(x + 77) * n;")
    one, two = (audit_source(text).findings for text in (EARLY, longer))
    assert one[0].sites != two[0].sites
    assert one[0].fingerprint == two[0].fingerprint
    assert audit_source(EARLY, "sm_100a").findings[0].fingerprint != one[0].fingerprint
