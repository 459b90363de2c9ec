"""What is logged waits for nobody, and nobody waits for it."""

from __future__ import annotations

import logging

import pytest

from hrdma.control.member import ControlPlane
from hrdma.log import logger


@pytest.mark.parametrize("left", [False, True])
def test_who_waits_for_a_lost_rank_is_told_before_the_log_is_written(left):
    """A log may go to a disk that stalls."""
    order: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            order.append(record.getMessage())

    plane = ControlPlane.__new__(ControlPlane)
    plane.left, plane.lost, plane._leaving, plane._early = set(), {}, False, []
    plane._membership = None  # whoever waits for an agreement as well
    plane._on_lost = lambda rank, reason: order.append(f"lost {rank}: {reason}")
    plane._on_left = lambda rank, reason: order.append(f"left {rank}: {reason}")
    handler, level = Handler(), logger.level
    logger.addHandler(handler)
    logger.setLevel(10)
    try:
        plane.lost_rank(2, "it hung up", left)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert order == [f"{'left' if left else 'lost'} 2: it hung up", "control: it hung up"]
