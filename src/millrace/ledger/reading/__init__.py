"""Queries of a run's records, for commands and pages. A run itself never uses them."""

from millrace.ledger.reading.reader import LedgerReader

__all__ = ["LedgerReader"]
