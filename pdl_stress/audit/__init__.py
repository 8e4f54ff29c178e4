"""Does the machine code honour its PDL contract? A static check of SASS; CPU only, no driver, no torch.

`scan` audits files; `pdl-stress audit` is its command. What the audit cannot see is in docs/audit.md.
"""

from __future__ import annotations

from pdl_stress.audit.declared import Declared
from pdl_stress.audit.findings import Finding, Severity
from pdl_stress.audit.rules import RULES
from pdl_stress.audit.scan import Audited, Question, Report, scan

__all__ = ["RULES", "Audited", "Declared", "Finding", "Question", "Report", "Severity", "scan"]
