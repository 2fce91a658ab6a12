"""Drives the switch agent with p4runtime-shell: tables, counters, packets, timeouts, arbitration.

Usage: shell_client.py ADDRESS P4INFO DEVICE_CONFIG. The switch has a cable between its ports 1
and 2, and a port 3.
"""

import os
import sys
import time
import traceback
from typing import Any, Callable

import grpc
import p4runtime_sh.shell as sh
from google.rpc import status_pb2
from p4.v1 import p4runtime_pb2
from p4runtime_sh.p4runtime import P4RuntimeWriteException

SCOPE = "0xfdbb0001"
DEADLINE = 10.0


def entry(table: str, action: str | None = None, **match: str) -> Any:
    made = sh.TableEntry(table)(action=action) if action else sh.TableEntry(table)
    for field, value in match.items():
        made.match[field] = value
    return made


def forward(made: Any, port: int) -> Any:
    made.action["port"] = str(port)
    made.action["dst_mac"] = f"02:00:00:00:00:0{port}"
    return made


def redirect(page: int, port: int = 3) -> Any:
    made = entry("redirect", "forward", dst_scope=SCOPE, dst_node="9", page=str(page))
    return forward(made, port)


def group_entry(table: str, **match: str) -> Any:
    made = entry(table, "set_multicast_group", **match)
    made.action["group"] = "5"
    return made


def tables() -> list[Any]:
    """One entry for each table."""
    guard = entry(
        "ingress_guard", "allow", port="2", src_scope=SCOPE, src_node="0x0007"
    )
    directory = entry("directory", "forward", prefix=f"{0xFDBB00010009 << 64}/48")
    notify = entry("notify", "copy_to_controller", dst_command="0x07&&&0x3f")
    notify.priority = 2
    port_mac = entry("port_mac", "set_dst_mac", port="2")
    port_mac.action["dst_mac"] = "02:00:00:00:00:02"
    return [
        guard,
        redirect(5),
        forward(directory, 1),
        notify,
        forward(entry("l2", "forward", dst_mac="02:00:00:00:00:02"), 2),
        port_mac,
        group_entry("multicast", dst_scope=SCOPE),
    ]


def bare(made: Any) -> Any:
    """A query for an entry: reading with an action would filter by it, and clears it."""
    query = sh.TableEntry(made.name)
    query.match = made.match
    query.priority = made.priority
    return query


def canonical(message: Any) -> Any:
    """A table entry with the shortest byte strings: this client may write longer ones."""
    short = type(message).FromString(message.SerializeToString())
    for field in short.match:
        match = getattr(field, field.WhichOneof("field_match_type"))
        for name in ("value", "mask"):
            if getattr(match, name, b""):
                setattr(match, name, getattr(match, name).lstrip(b"\0") or b"\0")
    for param in short.action.action.params:
        param.value = param.value.lstrip(b"\0") or b"\0"
    return short


def read_back(made: Any) -> None:
    """The switch has the entry, and its message is the one that was written."""
    back = [read.msg() for read in bare(made).read()]
    assert back == [canonical(made.msg())], (back, made.msg())


def refused(write: Callable[[], Any]) -> list[int]:
    """The canonical codes of a batch that the switch must refuse."""
    try:
        write()
    except P4RuntimeWriteException as error:
        return [detail.canonical_code for _, detail in error.errors]
    raise AssertionError("the switch took what it must refuse")


def until(what: str, done: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not done():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def messages(stream: Any, count: int) -> list[Any]:
    """At least so many messages of a stream, however slow the machine is."""
    received: list[Any] = []

    def enough() -> bool:
        received.extend(stream.sniff(timeout=0.2))
        return len(received) >= count

    until(f"{count} messages arrive", enough)
    return received


def check_tables() -> None:
    group = sh.MulticastGroupEntry(5)
    group.add(1, 1).add(2, 1).add(3, 1).insert()
    assert [g.msg() for g in sh.MulticastGroupEntry(5).read()] == [group.msg()]
    session = sh.CloneSessionEntry(99)
    session.add(510, 1).insert()
    assert len(list(sh.CloneSessionEntry(99).read())) == 1
    wanted = tables()
    for made in wanted:
        made.insert()
    for made in wanted:
        read_back(made)
    everything = list(sh.TableEntry("redirect").read())
    assert len(everything) == 1, everything
    moved = redirect(5, 1)
    moved.modify()
    read_back(moved)
    redirect(5).modify()


def check_anycast() -> None:
    one_shot = sh.TableEntry("anycast")
    one_shot.match["dst_scope"] = SCOPE
    choice = sh.Oneshot("anycast")
    for port, weight in ((1, 3), (2, 1)):
        choice.add(
            forward(sh.TableEntry("redirect")(action="forward"), port).action, weight
        )
    one_shot.oneshot = choice
    one_shot.insert()
    back = [read.msg() for read in bare(one_shot).read()]
    assert len(back) == 1 and len(back[0].action.ListFields()) == 1, back
    weights = [
        action.weight
        for action in back[0].action.action_profile_action_set.action_profile_actions
    ]
    assert weights == [3, 1], back
    one_shot.delete()
    for member_id in (1, 2):
        member = sh.ActionProfileMember("anycast_selector")(
            member_id=member_id, action="forward"
        )
        forward(member, member_id).insert()
    group = sh.ActionProfileGroup("anycast_selector")(group_id=1)
    group.max_size = 4
    group.add(1, 2).add(2, 1).insert()
    by_group = sh.TableEntry("anycast")(group_id=1)
    by_group.match["dst_scope"] = SCOPE
    by_group.insert()
    read_back(by_group)
    in_use = refused(
        lambda: sh.ActionProfileGroup("anycast_selector")(group_id=1).delete()
    )
    assert in_use == [grpc.StatusCode.FAILED_PRECONDITION.value[0]], in_use
    by_group.delete()
    sh.ActionProfileGroup("anycast_selector")(group_id=1).delete()
    for member_id in (1, 2):
        sh.ActionProfileMember("anycast_selector")(member_id=member_id).delete()


def update_codes(error: grpc.RpcError) -> list[int]:
    """The codes of every update; the shell's own iterator hangs on those that were done."""
    status = status_pb2.Status()
    for key, value in error.trailing_metadata():
        if key == "grpc-status-details-bin":
            status.ParseFromString(value)
    codes = []
    for detail in status.details:
        update = p4runtime_pb2.Error()
        assert detail.Unpack(update), detail
        codes.append(update.canonical_code)
    return codes


def check_errors() -> None:
    exists = refused(redirect(5).insert)
    assert exists == [grpc.StatusCode.ALREADY_EXISTS.value[0]], exists
    absent = refused(redirect(6).delete)
    assert absent == [grpc.StatusCode.NOT_FOUND.value[0]], absent
    no_port = refused(redirect(6, 9).insert)
    assert no_port == [grpc.StatusCode.INVALID_ARGUMENT.value[0]], no_port
    request = p4runtime_pb2.WriteRequest(device_id=1)
    request.election_id.high = 1
    for page in (b"\x05", b"\x06", b"\x10" + bytes(6)):
        update = request.updates.add(type=p4runtime_pb2.Update.INSERT)
        update.entity.table_entry.CopyFrom(redirect(5).msg())
        update.entity.table_entry.match[2].exact.value = page
    try:
        sh.client.stub.Write(request)
        raise AssertionError("the switch took what it must refuse")
    except grpc.RpcError as error:
        assert error.code() == grpc.StatusCode.UNKNOWN, error
        codes = update_codes(error)
    assert codes == [
        grpc.StatusCode.ALREADY_EXISTS.value[0],
        grpc.StatusCode.OK.value[0],
        grpc.StatusCode.INVALID_ARGUMENT.value[0],
    ], codes
    redirect(6).delete()


def fabric_frame() -> bytes:
    """A request of node 7 to node 9, page 5, command 7."""
    scope = bytes.fromhex("fdbb0001")
    src = scope + bytes.fromhex("0007 0000 8000000000000000")
    dst = scope + bytes.fromhex("0009 0700 0000000000005000")
    udp = bytes.fromhex("0fa00fa000300000") + bytes(range(40))
    ip = bytes.fromhex("60000000 0030 11 40") + src + dst
    return bytes.fromhex("0200000000fe 0200000000ff 86dd") + ip + udp


def check_packets() -> None:
    packets = sh.PacketIn()
    for _ in range(2):
        sh.PacketOut(fabric_frame(), egress_port="1", pad="0").send()
    received = messages(packets, 2)
    received.extend(packets.sniff(timeout=0.3))
    assert len(received) == 2, received
    for message in received:
        assert message.packet.payload == fabric_frame()[:94], message
        assert message.packet.metadata[0].value == b"\x02", message
    counted = sh.DirectCounterEntry("redirect_counter")
    for field, value in (("dst_scope", SCOPE), ("dst_node", "9"), ("page", "5")):
        counted.table_entry.match[field] = value
    until(
        "the redirect entry counts",
        lambda: [c.packet_count for c in counted.read()] == [2],
    )
    assert [c.byte_count for c in counted.read()] == [204]
    drops = list(sh.CounterEntry("drops").read())
    assert [c.index for c in drops] == list(range(12)), drops


def check_idle() -> None:
    notifications = sh.IdleTimeoutNotification()
    timed = redirect(77)
    timed.idle_timeout_ns = 200_000_000
    timed.insert()
    # It is repeated while the entry is idle.
    for message in messages(notifications, 2):
        (idle,) = message.idle_timeout_notification.table_entry
        assert idle.match[2].exact.value == b"\x4d", idle
    timed.delete()


def check_arbitration(address: str) -> None:
    """A second client with a lower id is backup; one with the same id is refused."""
    first = sh.client
    lower = sh.P4RuntimeClient(1, address, (0, 5), None)
    request = p4runtime_pb2.WriteRequest(device_id=1)
    request.election_id.low = 5
    try:
        lower.stub.Write(request)
        raise AssertionError("a backup wrote")
    except grpc.RpcError as error:
        assert error.code() == grpc.StatusCode.PERMISSION_DENIED, error
    lower.tear_down()
    channel = grpc.insecure_channel(address)
    asked = p4runtime_pb2.StreamMessageRequest()
    asked.arbitration.device_id = 1
    asked.arbitration.election_id.high = 1
    stream = first.stub.StreamChannel(iter([asked]))
    try:
        next(stream)
        raise AssertionError("two clients have one election id")
    except grpc.RpcError as error:
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, error
    channel.close()


def main(address: str, p4info: str, device_config: str) -> None:
    sh.setup(
        device_id=1,
        grpc_addr=address,
        election_id=(1, 0),
        config=sh.FwdPipeConfig(p4info, device_config),
        verbose=False,
    )
    try:
        for check in (
            check_tables,
            check_anycast,
            check_errors,
            check_packets,
            check_idle,
        ):
            print(check.__name__, flush=True)
            check()
        print("check_arbitration", flush=True)
        check_arbitration(address)
        for made in tables():
            made.delete()
        left = list(sh.TableEntry("redirect").read())
        assert not left, left
        sh.teardown()
        print("done", flush=True)
        status = 0
    except BaseException:
        traceback.print_exc()
        status = 1
    # The shell's listeners for packets and notifications never end by themselves.
    os._exit(status)


if __name__ == "__main__":
    main(*sys.argv[1:4])
