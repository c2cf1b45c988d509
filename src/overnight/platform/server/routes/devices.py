"""Devices and nodes, for people: what there is, and taking a device out or back with a reason."""

from datetime import datetime
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request
from fastapi.responses import Response

from overnight.core.enums import DeviceState, Role
from overnight.core.errors import BadInputError
from overnight.core.models.api import Device, Page
from overnight.platform.server.web import Caller, House, Reason, answer, answer_items, right, takes
from overnight.store import devices, nodes

if TYPE_CHECKING:
    from overnight.store.engine import Connection

router = APIRouter(tags=["devices"], dependencies=[right(Role.VIEWER)])

ACTIONS = {
    "quarantine": (DeviceState.QUARANTINED, "Takes a device out at once; what runs on it counts as interrupted."),
    "release": (DeviceState.HEALTHY, "Gives a device back to the scheduler."),
    "drain": (DeviceState.DRAINING, "Lets what runs on a device go on, and starts nothing new on it."),
}


@router.get("/devices", response_model=Page)
async def list_devices(house: House) -> Response:
    """All devices by node and index, with what the platform thinks of each and who holds it."""
    return answer_items(await house.read(devices.list_))


@router.get("/nodes", response_model=Page)
async def list_nodes(house: House) -> Response:
    """All machines whose daemons have said hello."""
    return answer_items(await house.read(nodes.list_))


def _action(name: str, state: DeviceState, text: str) -> None:
    async def change(device_id: str, request: Request, house: House, caller: Caller) -> Response:
        reason = (await house.bodies.read(request, Reason)).reason.strip()
        if not reason:
            raise BadInputError(f"a reason is needed to {name} a device", hint='Send {"reason": "…"}.')
        now: datetime = house.clock.now()

        def write(conn: "Connection") -> Device:
            devices.set_state(conn, device_id=device_id, state=state, cause=reason, now=now, actor=caller.name)
            return devices.get(conn, device_id)

        return answer(await house.store.awrite(write))

    router.add_api_route(
        f"/devices/{{device_id:path}}/{name}",
        change,
        methods=["POST"],
        name=name,
        description=text,
        response_model=Device,
        openapi_extra=takes(Reason),
        dependencies=[right(Role.OPERATOR)],
    )


for _name, (_state, _text) in ACTIONS.items():
    _action(_name, _state, _text)
