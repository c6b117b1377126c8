"""The durable record of every prompt and trajectory: `SqliteLedger` writes it, `LedgerReader` looks."""

from millrace.ledger.reader import LedgerReader
from millrace.ledger.sqlite import SqliteLedger

__all__ = ["LedgerReader", "SqliteLedger"]
