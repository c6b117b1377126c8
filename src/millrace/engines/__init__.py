"""Engines of other projects behind `rollout.protocol.Engine`. `rollout.engine_kinds` names each."""
