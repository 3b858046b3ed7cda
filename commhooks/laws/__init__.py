"""The laws that every compressor obeys, and `check`, which tries them on one.

docs/guide/compressors.md shows how to use it; `commhooks check` does the same in a terminal.
"""

from commhooks.laws.checking import LAWS, Finding, as_used, check, findings
from commhooks.laws.claims import Claims
from commhooks.laws.law import Law
from commhooks.laws.workers import BrokenLawError

__all__ = ["BrokenLawError", "Claims", "Finding", "LAWS", "Law", "as_used", "check", "findings"]
