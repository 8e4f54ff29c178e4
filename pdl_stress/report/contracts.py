"""Measured contracts: as tables, and as declarations to start from."""

from __future__ import annotations

import keyword
import re

from rich.markup import escape
from rich.table import Table

from ..results import CaseResult, ContractResult, OperandResult

BEFORE, AFTER = "before the wait", "after the wait"


def contracts_table(case: CaseResult) -> Table:
    """What each kernel that is launched to overlap touches, and when."""
    table = Table(title=escape(f"{case.chain}: measured contracts"), title_justify="left", title_style="bold")
    for column in ("kernel", "buffer", "", "measured", "declared", "still stored after the trigger"):
        table.add_column(column, overflow="fold")
    for contract in case.contracts:
        for number, operand in enumerate(contract.operands):
            origin = f" of {operand.writer}" if operand.writer else ""
            colour = "yellow" if operand.measured == BEFORE else "green" if operand.measured == AFTER else "dim"
            table.add_row(
                "" if number else escape(contract.step),
                escape(operand.buffer + origin),
                operand.access,
                f"[{colour}]{escape(operand.measured)}[/]",
                _declared(operand),
                "" if operand.lag_us is None else f"{operand.lag_us:.1f} us",
            )
        table.add_section()
    return table


def _declared(operand: OperandResult) -> str:
    if not operand.declared:
        return "-"
    wrong = operand.declared == "dependent" and operand.measured == BEFORE
    return f"[bold red]{operand.declared}: no[/]" if wrong else operand.declared


def agreement_table(case: CaseResult) -> Table:
    """One row per kernel: do the ways of checking it agree?"""
    table = Table(title=escape(f"{case.chain}: do the checks agree?"), title_justify="left", title_style="bold")
    for column in ("kernel", "declared", "modelled", "audited", "probed", "broken twins", "stressed"):
        table.add_column(column, overflow="fold")
    for contract in case.contracts:
        table.add_row(*map(escape, agreement(case, contract)))
    return table


def agreement(case: CaseResult, contract: ContractResult) -> tuple[str, ...]:
    """The cells of one row: kernel, declared, modelled, audited, probed, broken twins, stressed."""
    step = contract.step
    declared = [o for o in contract.operands if o.declared]
    against = [o.buffer for o in declared if o.declared == "dependent" and o.measured == BEFORE]
    early = sorted({o.buffer for o in contract.operands if o.measured == BEFORE})
    twins = [c for c in case.controls if c.reader == step and c.expected == "caught"]
    caught = sum(c.verdict == "caught" for c in twins)
    arms = [arm for arm in case.arms if arm.name.endswith(f" {step}")]
    bad = sum(arm.mismatches > 0 for arm in arms)
    return (
        step,
        "no contract" if not declared else f"broken: {', '.join(against)}" if against else "holds",
        contract.modelled or "-",
        contract.audited or "-",
        f"early: {', '.join(early)}" if early else "all after the wait",
        f"{caught} of {len(twins)} caught" if twins else "none",
        f"{bad} of {len(arms)} arms differ" if bad else f"{len(arms)} arms clean" if arms else "not under test",
    )


def declarations(case: CaseResult) -> str:
    """The measured contracts as Python source, to start a declaration from."""
    lines = ["from pdl_stress import op", ""]
    for contract in case.contracts:
        found = {word: _listed(contract, word) for word in ("read", "written")}
        early = list(dict.fromkeys(_name(o.buffer) for o in contract.operands if o.measured == BEFORE))
        operands = list(dict.fromkeys((*found["read"], *found["written"])))
        parts = [f"reads={_tuple(found['read'])}", f"writes={_tuple(found['written'])}"]
        if early:
            parts.append(f"independent={_tuple(early)}")
        name = _name(contract.step)
        lines += [
            "", f"@op({', '.join(parts)})", f"def {name}({', '.join(operands)}, *, pdl):",
            f"    ...  # launch {contract.step}, with the PDL attribute if pdl", "",
        ]  # fmt: skip
    return "\n".join(lines)


def _listed(contract: ContractResult, access: str) -> list[str]:
    return list(dict.fromkeys(_name(o.buffer) for o in contract.operands if o.access == access))


def _tuple(names: list[str]) -> str:
    return "(" + "".join(f'"{name}", ' for name in names).rstrip() + ")"


def _name(text: str) -> str:
    """A Python name like ``text``."""
    name = re.sub(r"\W+", "_", text).strip("_") or "buffer"
    if name[0].isdigit():
        return f"_{name}"
    return f"{name}_" if keyword.iskeyword(name) else name
