"""Engines of other projects behind `rollout.protocol.Engine`. `rollout.engines` names each."""
