"""What the driver takes a node's clock to be."""

import pytest

from hopsgpu.backends.agent_registration import clock_offset
from hopsgpu.control.channel import Message
from hopsgpu.control.events import Event


@pytest.mark.parametrize(
    ("sent", "offset"),
    [
        pytest.param(100.0, 0.0, id="at the connection"),
        pytest.param(100.7, 0.0, id="the arrival was delayed"),
        pytest.param(101.0, 0.0, id="at the arrival"),
        pytest.param(99.0, 2.0, id="slow"),
        pytest.param(161.0, -60.0, id="fast"),
    ],
)
def test_a_clock_that_can_be_right_is_taken_to_be_right(sent: float, offset: float) -> None:
    arrival = Event(0, Message("hello", {}, b""), opened=100.0, at=101.0)
    assert clock_offset(sent, arrival) == offset


def test_without_the_time_of_the_connection_the_arrival_counts() -> None:
    assert clock_offset(100.0, Event(0, Message("hello", {}, b""), at=101.0)) == 1.0
