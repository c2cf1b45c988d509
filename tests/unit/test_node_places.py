"""Ports for ranks to meet at: nobody else is given them between the choice and the start of the rank."""

import socket
from pathlib import Path

import pytest

from overnight.platform.node import places

FIRST_HANDED_OUT = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])


def listen(port: int) -> socket.socket:
    return socket.create_server(("127.0.0.1", port))


@pytest.mark.skipif(FIRST_HANDED_OUT <= places.FIRST_PORT, reason="the system hands out all ports")
def test_a_port_is_free_and_not_one_that_the_system_hands_out() -> None:
    ports = {places.free_port() for _ in range(20)}
    assert len(ports) > 1 and all(places.FIRST_PORT <= port < FIRST_HANDED_OUT for port in ports)
    listen(ports.pop()).close()


def test_ports_that_are_taken_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    first = FIRST_HANDED_OUT - 2
    monkeypatch.setattr(places, "FIRST_PORT", first)
    with listen(first):
        assert {places.free_port() for _ in range(10)} == {first + 1}
        with listen(first + 1):
            assert places.free_port() not in (first, first + 1)
