"""The durable record of every prompt and trajectory: `SqliteLedger` writes the record, `reading` reads it."""

from millrace.ledger.sqlite import SqliteLedger

__all__ = ["SqliteLedger"]
