"""Engines behind `rollout.protocol.Engine`: Millrace's own and those of other projects.
`rollout.engine_kinds` names each engine."""
