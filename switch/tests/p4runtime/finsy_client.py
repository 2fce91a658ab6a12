"""Drives the switch agent with finsy: every table, counters, packets, timeouts, arbitration.

Usage: finsy_client.py ADDRESS P4INFO DEVICE_CONFIG. The switch has a cable between its
ports 1 and 2, and a port 3.
"""

import asyncio
import contextlib
import sys
from pathlib import Path
from typing import Any

import finsy as fy
from finsy.proto import p4r

SCOPE = 0xFDBB0001
FORWARD_1 = fy.Action("forward", port=1, dst_mac="02:00:00:00:00:01")
FORWARD_2 = fy.Action("forward", port=2, dst_mac="02:00:00:00:00:02")
FORWARD_3 = fy.Action("forward", port=3, dst_mac="02:00:00:00:00:03")
DEADLINE = 10.0


def guard(node: int = 7, port: int = 2, **kwargs: Any) -> fy.P4TableEntry:
    match = fy.Match(port=port, src_scope=SCOPE, src_node=node)
    return fy.P4TableEntry("ingress_guard", match=match, **kwargs)


def redirect(page: int, **kwargs: Any) -> fy.P4TableEntry:
    match = fy.Match(dst_scope=SCOPE, dst_node=9, page=page)
    return fy.P4TableEntry("redirect", match=match, **kwargs)


def entries() -> list[fy.P4TableEntry]:
    """One entry and more for each table."""
    location = (SCOPE << 80) | (9 << 64)
    return [
        guard(action=fy.Action("allow"), metadata=b"guard"),
        guard(8, action=fy.Action("drop")),
        redirect(5, action=FORWARD_1),
        fy.P4TableEntry(
            "directory", match=fy.Match(prefix=f"{location}/48"), action=FORWARD_1
        ),
        fy.P4TableEntry(
            "directory",
            match=fy.Match(prefix=f"{location | 0x1000}/112"),
            action=fy.Action("drop"),
        ),
        fy.P4TableEntry(
            "anycast",
            match=fy.Match(dst_scope=SCOPE),
            action=fy.P4IndirectAction([(3, FORWARD_1), (1, FORWARD_2)]),
        ),
        fy.P4TableEntry(
            "notify",
            match=fy.Match(dst_command="0x07/&0x3f"),
            priority=3,
            action=fy.Action("copy_to_controller"),
        ),
        fy.P4TableEntry(
            "l2", match=fy.Match(dst_mac="02:00:00:00:00:02"), action=FORWARD_2
        ),
        fy.P4TableEntry(
            "l2",
            match=fy.Match(dst_mac="ff:ff:ff:ff:ff:ff"),
            action=fy.Action("set_multicast_group", group=5),
        ),
        fy.P4TableEntry(
            "port_mac",
            match=fy.Match(port=2),
            action=fy.Action("set_dst_mac", dst_mac="02:00:00:00:00:02"),
        ),
        fy.P4TableEntry(
            "multicast",
            match=fy.Match(dst_scope=SCOPE),
            action=fy.Action("set_multicast_group", group=5),
        ),
    ]


def fabric_frame(src_node: int, dst_node: int, command: int, hops: int = 64) -> bytes:
    """A fabric request as it enters the switch: Ethernet, IPv6, UDP, 40 bytes."""
    scope = SCOPE.to_bytes(4, "big")
    src = scope + src_node.to_bytes(2, "big") + bytes(2) + (1 << 63).to_bytes(8, "big")
    page = (0x5000).to_bytes(8, "big")
    dst = scope + dst_node.to_bytes(2, "big") + bytes([command, 0]) + page
    data = bytes(range(40))
    length = 8 + len(data)
    udp = (4000).to_bytes(2, "big") * 2 + length.to_bytes(2, "big") + b"\0\0" + data
    ip = bytes([0x60, 0, 0, 0]) + length.to_bytes(2, "big") + bytes([17, hops])
    macs = bytes.fromhex("0200000000fe0200000000ff")
    return macs + b"\x86\xdd" + ip + src + dst + udp


def canonical(entry: fy.P4TableEntry, switch: fy.Switch) -> str:
    return str(entry.encode(switch.p4info).table_entry)


async def refused(write: Any) -> fy.P4ClientError:
    try:
        await write
    except fy.P4ClientError as error:
        return error
    raise AssertionError("the switch took what it must refuse")


async def check_tables(switch: fy.Switch) -> None:
    group = fy.P4MulticastGroupEntry(5, replicas=(1, 2, (3, 7)))
    session = fy.P4CloneSessionEntry(99, replicas=[510])
    await switch.insert([group, session])
    wanted = entries()
    await switch.insert(wanted)
    found = {canonical(e, switch) async for e in switch.read([fy.P4TableEntry()])}
    assert found == {canonical(e, switch) for e in wanted}, found
    groups = [e async for e in switch.read([fy.P4MulticastGroupEntry()])]
    assert [e.encode(switch.p4info) for e in groups] == [group.encode(switch.p4info)]
    sessions = [e async for e in switch.read([fy.P4CloneSessionEntry()])]
    assert len(sessions) == 1, sessions
    for entry in wanted:
        single = fy.P4TableEntry(
            entry.table_id, match=entry.match, priority=entry.priority
        )
        back = [canonical(e, switch) async for e in switch.read([single])]
        assert back == [canonical(entry, switch)], back
    await switch.modify([redirect(5, action=FORWARD_3)])
    changed = [e async for e in switch.read([redirect(5)])]
    wanted_now = canonical(redirect(5, action=FORWARD_3), switch)
    assert [canonical(e, switch) for e in changed] == [wanted_now], changed
    assert not [e async for e in switch.read([redirect(6)])]


async def check_default(switch: fy.Switch) -> None:
    flood = fy.P4TableEntry(
        "l2", is_default_action=True, action=fy.Action("set_multicast_group", group=5)
    )
    query = fy.P4TableEntry("l2", is_default_action=True)
    await switch.modify([flood])
    read = [e async for e in switch.read([query])]
    assert canonical(read[0], switch) == canonical(flood, switch), read
    await switch.modify([query])
    read = [e async for e in switch.read([query])]
    assert read[0].action == fy.Action("drop"), read
    constant = fy.P4TableEntry(
        "directory", is_default_action=True, action=fy.Action("drop")
    )
    error = await refused(switch.modify([constant]))
    assert error.details[0].canonical_code == fy.GRPCStatusCode.PERMISSION_DENIED


async def check_errors(switch: fy.Switch) -> None:
    """Every update of a batch has its own error, in the order of the batch."""
    batch = [
        redirect(5, action=FORWARD_1),
        redirect(6, action=FORWARD_1),
        redirect(7, action=fy.Action("forward", port=400, dst_mac="02:00:00:00:00:01")),
    ]
    error = await refused(switch.insert(batch))
    assert error.code == fy.GRPCStatusCode.UNKNOWN, error
    codes = {index: e.canonical_code for index, e in error.details.items()}
    assert codes == {
        0: fy.GRPCStatusCode.ALREADY_EXISTS,
        2: fy.GRPCStatusCode.INVALID_ARGUMENT,
    }, codes
    assert [e async for e in switch.read([redirect(6)])], "the rest is done"
    await switch.delete([redirect(6)])
    error = await refused(switch.delete([redirect(6)]))
    assert error.details[0].canonical_code == fy.GRPCStatusCode.NOT_FOUND, error
    many = [redirect(5, action=FORWARD_1) for _ in range(400)]
    error = await refused(switch.insert(many))
    assert error.code == fy.GRPCStatusCode.UNKNOWN, error
    assert "400 of 400 updates failed" in error.message, error.message


async def packets_in(switch: fy.Switch, count: int) -> list[fy.P4PacketIn]:
    packets: list[fy.P4PacketIn] = []
    async with asyncio.timeout(DEADLINE):
        async for packet in switch.read_packets():
            packets.append(packet)
            if len(packets) == count:
                return packets
    raise AssertionError("the stream of packets ended")


async def check_packets(switch: fy.Switch) -> None:
    """A frame sent by port 1 comes in by port 2, is copied, counted and forwarded."""
    frame = fabric_frame(7, 9, 0x07)
    waiting = asyncio.create_task(packets_in(switch, 2))
    await asyncio.sleep(0.1)
    await switch.write([fy.P4PacketOut(frame, egress_port=1, pad=0)] * 2)
    for packet in await waiting:
        assert packet.metadata["ingress_port"] == 2, packet
        assert packet.payload == frame[:94], packet
    # Refused by the guard: another source node.
    await switch.write([fy.P4PacketOut(fabric_frame(6, 9, 0x07), egress_port=1, pad=0)])
    await switch.write([fy.P4PacketOut(fabric_frame(8, 9, 0x07), egress_port=1, pad=0)])

    async def count(entry: fy.P4TableEntry) -> int:
        async for found in switch.read([entry]):
            assert isinstance(found, fy.P4TableEntry) and found.counter_data
            assert (
                found.counter_data.byte_count == found.counter_data.packet_count * 102
            )
            return found.counter_data.packet_count
        raise AssertionError("no such entry")

    data = fy.P4CounterData()
    async with asyncio.timeout(DEADLINE):
        while await count(redirect(5, counter_data=data)) != 2:
            await asyncio.sleep(0.05)
        while await drops(switch, 3) != 1:
            await asyncio.sleep(0.05)
    assert await count(guard(counter_data=data)) == 2
    direct = fy.P4DirectCounterEntry(
        "redirect_counter",
        table_entry=redirect(5),
        data=fy.P4CounterData(packet_count=40, byte_count=4080),
    )
    await switch.modify([direct])
    assert await count(redirect(5, counter_data=data)) == 40
    counters = [
        c async for c in switch.read([fy.P4DirectCounterEntry("redirect_counter")])
    ]
    assert len(counters) == 1 and counters[0].data.packet_count == 40, counters
    await switch.modify(
        [fy.P4CounterEntry("drops", index=3, data=fy.P4CounterData(packet_count=0))]
    )
    assert await drops(switch, 3) == 0


async def drops(switch: fy.Switch, reason: int) -> int:
    async for found in switch.read([fy.P4CounterEntry("drops", index=reason)]):
        assert isinstance(found, fy.P4CounterEntry) and found.data
        return found.data.packet_count
    raise AssertionError("no such counter")


async def check_stream_errors(switch: fy.Switch) -> None:
    errors: asyncio.Queue[p4r.StreamError] = asyncio.Queue()
    switch.ee.add_listener(
        fy.SwitchEvent.STREAM_ERROR, lambda _, e: errors.put_nowait(e.error)
    )
    bad = p4r.PacketOut(payload=bytes(60))
    bad.metadata.add(metadata_id=7, value=b"\x01")
    unknown_port = fy.P4PacketOut(bytes(60), egress_port=400, pad=0)
    await switch.write([p4r.StreamMessageRequest(packet=bad), unknown_port])
    for expected in ("no field 7", "no port 400"):
        error = await asyncio.wait_for(errors.get(), DEADLINE)
        assert error.canonical_code == fy.GRPCStatusCode.INVALID_ARGUMENT.value, error
        assert expected in error.message, error
        assert error.WhichOneof("details") == "packet_out", error


async def check_idle(switch: fy.Switch) -> None:
    entry = redirect(77, action=FORWARD_1, idle_timeout_ns=300_000_000, metadata=b"m")
    await switch.insert([entry])
    times: list[float] = []
    async with asyncio.timeout(DEADLINE):
        async for notification in switch.read_idle_timeouts():
            assert len(notification.table_entry) == 1, notification
            idle = notification.table_entry[0]
            assert idle.match and idle.match["page"] == 77, notification
            assert idle.metadata == b"m", notification
            times.append(asyncio.get_running_loop().time())
            if len(times) == 2:
                break
    assert 0.25 < times[1] - times[0] < 1.5, "told again after another timeout"
    query = redirect(77, time_since_last_hit=0)
    async for found in switch.read([query]):
        assert isinstance(found, fy.P4TableEntry)
        assert found.time_since_last_hit and found.time_since_last_hit > 3e8, found
    await switch.delete([entry])


async def check_profile(switch: fy.Switch) -> None:
    """Members and groups instead of choices in one piece."""

    def member(number: int, action: fy.Action) -> fy.P4ActionProfileMember:
        return fy.P4ActionProfileMember(
            "anycast_selector", member_id=number, action=action
        )

    group = fy.P4ActionProfileGroup(
        "anycast_selector",
        group_id=4,
        max_size=8,
        members=[fy.P4Member(1, weight=2), fy.P4Member(2, weight=1)],
    )
    one_shot = entries()[5]
    by_group = fy.P4TableEntry(
        "anycast", match=one_shot.match, action=fy.P4IndirectAction(group_id=4)
    )
    await switch.delete([one_shot])
    await switch.insert([member(1, FORWARD_1), member(2, FORWARD_2)])
    await switch.insert([group])
    await switch.insert([by_group])
    back = [canonical(e, switch) async for e in switch.read([by_group])]
    assert back == [canonical(by_group, switch)], back
    groups = [
        g async for g in switch.read([fy.P4ActionProfileGroup("anycast_selector")])
    ]
    assert [g.encode(switch.p4info) for g in groups] == [group.encode(switch.p4info)]
    other = fy.P4TableEntry(
        "anycast", match=fy.Match(dst_scope=1), action=one_shot.action
    )
    error = await refused(switch.insert([other]))
    code = error.details[0].canonical_code
    assert code == fy.GRPCStatusCode.INVALID_ARGUMENT, error
    error = await refused(switch.delete([group]))
    code = error.details[0].canonical_code
    assert code == fy.GRPCStatusCode.FAILED_PRECONDITION, error
    await switch.delete([by_group])
    await switch.delete([group])
    await switch.delete([member(1, FORWARD_1), member(2, FORWARD_2)])


async def check_arbitration(switch: fy.Switch, options: fy.SwitchOptions) -> None:
    """A second client: backup with a lower id, then primary when the first is gone."""
    backup = fy.Switch("backup", switch.address, options(initial_election_id=5))
    async with backup:
        assert not backup.is_primary and switch.is_primary
        error = await refused(backup.write([+redirect(9, action=FORWARD_1)]))
        assert error.code == fy.GRPCStatusCode.PERMISSION_DENIED, error
        assert [e async for e in backup.read([fy.P4TableEntry()])], "backups may read"
    higher = fy.Switch("higher", switch.address, options(initial_election_id=50))
    async with higher:
        assert higher.is_primary
        async with asyncio.timeout(DEADLINE):
            while switch.is_primary:
                await asyncio.sleep(0.02)
        error = await refused(switch.write([+redirect(9, action=FORWARD_1)]))
        assert error.code == fy.GRPCStatusCode.PERMISSION_DENIED, error


async def check_large(switch: fy.Switch) -> None:
    """Answers larger than what a client takes in one message arrive in several."""
    pages = 16_000
    for start in range(0, pages, 1000):
        await switch.insert(
            [redirect(100_000 + start + i, action=FORWARD_1) for i in range(1000)]
        )
    found = [e async for e in switch.read([fy.P4TableEntry("redirect")])]
    assert len(found) == pages + 1, len(found)
    full = [redirect(200_000 + i, action=FORWARD_1) for i in range(400)]
    error = await refused(switch.insert(full))
    assert error.code == fy.GRPCStatusCode.UNKNOWN, error
    assert "17 of 400 updates failed" in error.message, error.message


async def main(address: str, p4info: Path, p4blob: Path) -> None:
    options = fy.SwitchOptions(
        p4info=p4info, p4blob=p4blob, p4force=True, fail_fast=True
    )
    switch = fy.Switch("first", address, options)
    async with switch:
        assert switch.is_primary
        assert switch.p4runtime_version == fy.P4RuntimeVersion(1, 4, 0, "")
        for check in (
            check_tables,
            check_default,
            check_errors,
            check_packets,
            check_stream_errors,
            check_idle,
            check_profile,
            check_large,
        ):
            print(check.__name__, flush=True)
            await check(switch)
        await switch.delete_all()
        left = [e async for e in switch.read([fy.P4TableEntry()])]
        assert not left, left
        print("check_arbitration", flush=True)
        await switch.insert([redirect(5, action=FORWARD_1)])
        await check_arbitration(switch, options(p4force=False))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])))
        print("done")
