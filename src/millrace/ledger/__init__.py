"""The durable record of every prompt and trajectory: `SqliteLedger` writes it, `reading` looks at it."""

from millrace.ledger.sqlite import SqliteLedger

__all__ = ["SqliteLedger"]
