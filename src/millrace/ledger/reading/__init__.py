"""What a run has recorded, for commands and pages. A run itself never reads it."""

from millrace.ledger.reading.reader import LedgerReader

__all__ = ["LedgerReader"]
