"""The laws that every compressor obeys, and `check`, which tries them on one.

docs/guide/compressors.md shows how to use it; `commhooks check` does the same in a terminal.
"""

from commhooks.testing.checking import LAWS, Finding, as_used, check, findings
from commhooks.testing.claims import Claims
from commhooks.testing.law import Law
from commhooks.testing.workers import BrokenLawError

__all__ = ["BrokenLawError", "Claims", "Finding", "LAWS", "Law", "as_used", "check", "findings"]
