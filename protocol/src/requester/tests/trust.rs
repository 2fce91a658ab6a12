use bluebridge_wire::{Command, NodeId, Space, Status, address::Fields};

use super::super::{Counters, Event, Output};
use super::bench::{Bench, OTHER, Reply};

pub(super) fn foreign_datagrams_are_ignored() -> Counters {
    let mut bench = Bench::open();
    bench.read(0, 4, 1);
    let request = bench.sent_one();
    let good = Reply::piece(&request, 0, 1, &[1, 2, 3, 4]);
    let other_destination = |change: fn(&mut Fields)| {
        let mut reply = good.clone();
        let mut fields = Fields::unpack(reply.to).expect("a fabric address");
        change(&mut fields);
        reply.to = fields.to_ipv6();
        reply
    };
    let other = |change: fn(&mut Reply)| {
        let mut reply = good.clone();
        change(&mut reply);
        reply
    };
    let untrusted = [
        other_destination(|to| to.space = Space(8)),
        other_destination(|to| to.node = NodeId(999)),
        other_destination(|to| to.location ^= 1 << 16),
        other_destination(|to| to.location ^= 1 << 50),
        other_destination(|to| to.location |= 0x0fff),
        other_destination(|to| to.location |= 0xffff),
        other(|reply| reply.from.space = Space(8)),
        other(|reply| reply.from.node = OTHER),
        other(|reply| reply.from.command = Command::Write),
        other(|reply| reply.header.incarnation += 1),
    ];
    for (at, reply) in untrusted.iter().enumerate() {
        bench.reply(reply);
        assert_eq!(bench.count(Event::ReplyUntrusted), at as u64 + 1, "{at}");
    }
    let stale = [
        other(|reply| reply.header.session += 1),
        other(|reply| reply.header.session = 0),
        other(|reply| reply.header.sequence += 1),
        other(|reply| reply.header.sequence -= 1),
        other(|reply| reply.header.sequence += 512),
        other(|reply| reply.from.command = Command::Open),
    ];
    for (at, reply) in stale.iter().enumerate() {
        bench.reply(reply);
        assert_eq!(bench.count(Event::ReplyStale), at as u64 + 1, "{at}");
    }
    bench.completed_nothing();
    assert_eq!(bench.memory.0[&1], [0; 4]);
    assert_eq!(bench.requester.counters().of_status(Status::Ok), 2, "OPEN and PING alone");
    bench.reply(&good);
    assert_eq!(bench.completed().result, Ok(Output::Done));
    bench.end()
}
