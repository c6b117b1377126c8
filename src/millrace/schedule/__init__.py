"""When groups start, where, under which weights, and what is trained next: five pure decisions."""

from millrace.schedule.presets import build
from millrace.schedule.schedule import Schedule
from millrace.schedule.view import GroupView, QueuedView, RefreshOrder, RepackOrder, ReplicaView, View

__all__ = [
    "GroupView",
    "QueuedView",
    "RefreshOrder",
    "RepackOrder",
    "ReplicaView",
    "Schedule",
    "View",
    "build",
]
