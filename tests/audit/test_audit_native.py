"""The native kernels: the audit sees in each variant's machine code what its behaviour says. No GPU."""

from __future__ import annotations

import pytest

from fusions.ops.native import Behaviour
from fusions.ops.native import code as native
from pdl_stress.audit import Question, Severity, scan
from pdl_stress.catalog import audited
from pdl_stress.contract import Trigger, Wait

RULE_OF = {
    "one_warp": "waits-in-some-warps",
    "branch": "waits-on-some-paths",
    "late": "reads-before-wait",
    "never": "never-waits",
}


def audit_variant(tmp_path, kernel, behaviour, arch, **question):
    path = tmp_path / "code.cubin"
    path.write_bytes(native.cubin(kernel, behaviour, arch))
    (found,) = scan([path], Question(**question)).kernels
    return found


def test_the_deployed_kernels_honour_their_contracts_on_every_architecture(tmp_path):
    report = scan(audited.write_cubins(tmp_path), Question(audited.CONTRACTS))
    assert not report.errors
    assert len(report.kernels) == len(native.KERNELS) * len(audited.ARCHITECTURES)
    wrong = [finding for finding in report.findings() if finding.severity is not Severity.NOTE]
    assert not wrong


def test_the_contract_of_the_machine_code_is_the_declared_one(tmp_path):
    """Derived without knowing it, in every field: who waits, where the trigger sits, what is touched early."""
    for kernel in scan(audited.write_cubins(tmp_path), Question()).kernels:
        declared = audited.CONTRACTS[kernel.name]
        derived, names = kernel.derived.contract, declared.names

        def named(operands, names=names, ignored=declared.ignored):
            return {names[int(operand[1:])] for operand in operands} - ignored

        wanted = declared.contract
        assert named(derived.reads) == set(wanted.reads)
        assert named(derived.writes) == set(wanted.writes)
        assert named(derived.independent) == set(wanted.independent)
        assert (derived.wait, derived.trigger, derived.fence) == (wanted.wait, wanted.trigger, wanted.fence)


@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_120a", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kernel", native.KERNELS)
@pytest.mark.parametrize("wait", native.WAITS)
def test_every_broken_wait_is_found_and_every_whole_one_is_clean(tmp_path, kernel, wait, arch):
    if wait == "loaders" and kernel != "tinygemm2":
        pytest.skip("the norms have no loaders")
    declared = audited.CONTRACTS[kernel]
    contract = declared.contract.but(trigger=Trigger.AFTER_STORES, wait=Wait.ALL)
    known = {kernel: type(declared)(contract, declared.names, declared.ignored)}
    found = audit_variant(tmp_path, kernel, Behaviour(wait, "after_stores"), arch, contracts=known)
    errors = {finding.rule for finding in found.findings if finding.severity is Severity.ERROR}
    if wait not in RULE_OF:
        assert not errors
        assert not found.undecided
        return
    rules = {RULE_OF[wait]}
    if (kernel, wait) == ("tinygemm2", "late"):
        rules = {"async-before-wait"}  # x is loaded by tensor copies
    assert rules <= errors
    dependent = {finding.subject for finding in found.findings if finding.rule in rules}
    assert wait == "never" or "input" in dependent
    assert not dependent & declared.ignored


@pytest.mark.parametrize("trigger", [t for t in native.TRIGGERS if t != "none"])
@pytest.mark.parametrize("kernel", native.KERNELS)
def test_a_trigger_in_another_place_is_a_mismatch(tmp_path, kernel, trigger):
    declared = audited.CONTRACTS[kernel]
    behaviour = Behaviour(native.DEPLOYED[kernel].wait, trigger)
    found = audit_variant(tmp_path, kernel, behaviour, "sm_90a", contracts=audited.CONTRACTS)
    errors = {finding.subject for finding in found.findings if finding.severity is Severity.ERROR}
    assert errors == (set() if trigger == declared.contract.trigger else {"trigger"})


def test_weights_that_a_contract_does_not_declare_independent_are_found(tmp_path):
    declared = audited.CONTRACTS["tinygemm2"]
    strict = {"tinygemm2": type(declared)(declared.contract.but(independent=()), declared.names, declared.ignored)}
    found = audit_variant(tmp_path, "tinygemm2", native.DEPLOYED["tinygemm2"], "sm_90a", contracts=strict)
    assert {f.subject for f in found.findings if f.severity is Severity.ERROR} == {"weight"}
    late = Behaviour("loaders", "after_wait", early_weights=False)
    found = audit_variant(tmp_path, "tinygemm2", late, "sm_90a", contracts=strict)
    assert not [f for f in found.findings if f.severity is Severity.ERROR]


def test_a_wait_that_is_patched_out_is_found(tmp_path):
    """The mutants that the stress runs use are found by the audit too: every single wait site of tinygemm2."""
    from pdl_stress.sass import remove_waits

    behaviour = Behaviour("loaders", "after_stores", early_weights=False)
    code = native.cubin("tinygemm2", behaviour, "sm_90a")
    declared = audited.CONTRACTS["tinygemm2"]
    contract = declared.contract.but(
        independent=(), trigger=Trigger.AFTER_STORES, reads=(*declared.contract.reads, "bias")
    )
    known = {"tinygemm2": type(declared)(contract, declared.names)}
    path = tmp_path / "code.cubin"
    subjects = set()
    for site in (0, 1, 2):
        path.write_bytes(remove_waits(code, "tinygemm2", (site,)).code)
        (found,) = scan([path], Question(known)).kernels
        errors = {finding.subject for finding in found.findings if finding.severity is Severity.ERROR}
        assert len(errors) == 1
        subjects |= errors
    assert subjects == {"input", "weight", "bias"}
