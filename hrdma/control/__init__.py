"""The control plane: ranks meet, know who is alive, agree, and find out whose calls do not match."""

from __future__ import annotations

from hrdma.control.meeting import meet
from hrdma.control.member import ControlPlane, Member

__all__ = ["ControlPlane", "Member", "meet"]
