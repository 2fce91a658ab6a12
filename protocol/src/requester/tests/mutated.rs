//! A server with arbitrary replies: nothing panics, and every operation ends once, in time.

use core::time::Duration;
use std::collections::BTreeMap;

use bluebridge_wire::{Command, Flags, Status, tlv};
use proptest::prelude::*;

use super::super::{Operation, Server};
use super::bench::{Bench, CLIENT, HOME, OTHER, PIECE, Reply, SERVER, Sent, pattern, pointer};

/// The fields of a reply that do not depend on the request.
#[derive(Clone, Debug)]
struct ReplyFields {
    status: Status,
    from_other: bool,
    offset: u16,
    data_bytes: usize,
    version: u64,
    detail: u32,
    node: u16,
    credit: u16,
    wrong_number: bool,
    new_incarnation: bool,
    pages: usize,
    pass_us: u64,
    flags: u16,
    epoch: u64,
}

fn reply_fields() -> impl Strategy<Value = ReplyFields> {
    let status = prop_oneof![
        3 => Just(Status::Ok),
        4 => prop::sample::select(Status::ALL),
    ];
    let offset = prop_oneof![Just(0), Just(PIECE), Just(4096), Just(4096 + PIECE), any::<u16>()];
    let data_bytes =
        prop_oneof![Just(0), Just(8), Just(usize::from(PIECE)), Just(64), 0_usize..5000];
    let node = prop_oneof![Just(0), Just(CLIENT.0), Just(HOME.0), Just(OTHER.0), any::<u16>()];
    let place = (status, any::<bool>(), offset, data_bytes, 0_u64..4, any::<u32>(), node);
    let rest =
        (0_u16..80, prop::bool::weighted(0.1), prop::bool::weighted(0.1), 0_usize..9, 0_u64..9000);
    // Any of the flags, rarely with the attempt of another request.
    let lease = (prop_oneof![4 => 0_u16..128, 1 => any::<u16>()], 0_u64..3);
    (place, rest, lease).prop_map(|(place, rest, (flags, epoch))| {
        let (status, from_other, offset, data_bytes, version, detail, node) = place;
        let (credit, wrong_number, new_incarnation, pages, pass_us) = rest;
        ReplyFields {
            status,
            from_other,
            offset,
            data_bytes,
            version,
            detail,
            node,
            credit,
            wrong_number,
            new_incarnation,
            pages,
            pass_us,
            flags,
            epoch,
        }
    })
}

fn reply(sent: &Sent, fields: &ReplyFields, session: u64) -> Reply {
    let mut reply = Reply::to(sent, fields.status).with_data(&vec![1; fields.data_bytes]);
    if fields.status == Status::Partial {
        reply.options = vec![0; tlv::emitted_bytes(fields.pages)];
        let statuses = [Status::Ok, Status::Moved, Status::Busy, Status::StaleTag, Status::Ok];
        let statuses: Vec<_> = (0..fields.pages).map(|at| statuses[(at + 3) % 5]).collect();
        tlv::emit_page_statuses(&mut reply.options, &statuses);
    }
    let opens = sent.command == Command::Open;
    let creates = matches!(sent.command, Command::Create | Command::AllocWrite);
    let reply = reply.with(|header| {
        header.offset = fields.offset;
        header.page_version = fields.version;
        header.detail = if opens { 2 } else { fields.detail };
        header.node = fields.node;
        header.credit = fields.credit;
        header.flags = Flags::from_bits(header.flags.bits() ^ (fields.flags & !(0b11 << 8)));
        (header.lease_epoch, header.lease_remaining_ms) = (fields.epoch, fields.credit);
        header.sequence = header.sequence.wrapping_add(u64::from(fields.wrong_number));
        header.incarnation += u32::from(fields.new_incarnation);
        if opens {
            header.session = session;
            header.length = u32::from(PIECE);
        }
        if creates {
            header.target = pointer(u64::from(fields.offset)).to_ipv6();
        }
    });
    let node = if fields.from_other { OTHER } else { sent.node };
    reply.by_node(if node.is_unicast() { node } else { HOME })
}

fn operation(kind: u8, offset: u64, length: u32) -> Operation {
    let pointer = pointer(offset);
    let anywhere = (kind & 0x10 == 0).then_some(SERVER);
    let epoch = 1;
    match kind % 16 {
        0 => Operation::AllocWrite { server: anywhere, length },
        1 => Operation::Close { server: SERVER },
        2 => Operation::CompareSwap { pointer, expected: 1, new: 2 },
        3 => Operation::Create { server: anywhere, pages: length },
        4 => Operation::Delete { pointer, pages: 0 },
        5 => Operation::FetchAdd { pointer, addend: 1 },
        6 => Operation::Ping { server: Server { node: OTHER, shard: 3 }, length: length % 65 },
        7 => Operation::Stat { server: SERVER },
        8 => Operation::Write { pointer, length },
        9 => Operation::Zero { pointer, length },
        10 => Operation::Update { pointer, length, lease_ms: 100, wait: kind & 0x20 == 0 },
        11 => Operation::Commit { pointer, length, epoch },
        12 => Operation::Abort { pointer, length, epoch },
        13 => Operation::Renew { pointer, length, epoch, lease_ms: 0 },
        14 => Operation::ReadStale { pointer, length },
        _ => Operation::Read { pointer, length },
    }
}

proptest! {
    #[test]
    fn every_operation_ends_once_with_arbitrary_replies(
        operations in prop::collection::vec((any::<u8>(), 0_u64..20_000, 1_u32..12_000), 1..20),
        reply_fields in prop::collection::vec(reply_fields(), 1..200),
    ) {
        let mut bench = Bench::with(|config| config.server_count = 3);
        let deadline = bench.now + Duration::from_secs(5);
        let mut started = BTreeMap::new();
        let mut ended = Vec::new();
        let mut session = 1;
        let mut recent: Vec<Sent> = Vec::new();
        let mut operations = operations.into_iter();
        for (at, fields) in reply_fields.iter().enumerate() {
            if let Some((kind, offset, length)) = operations.next() {
                let token = at as u64;
                bench.memory.0.insert(token, pattern(length as usize));
                if bench.try_start(operation(kind, offset, length), token).is_ok() {
                    started.insert(token, length as usize);
                }
            }
            recent.extend(bench.sent());
            let keep = recent.len().saturating_sub(40);
            recent.drain(..keep);
            let pick = usize::try_from(fields.detail).expect("fits");
            if let Some(sent) = recent.get(pick % recent.len().max(1)) {
                session += 1;
                let reply = reply(sent, fields, session);
                bench.reply(&reply);
            }
            bench.pass(Duration::from_micros(fields.pass_us));
            while let Some(completion) = bench.requester.poll_completion() {
                ended.push(completion.token);
            }
        }
        for _ in 0..100_000 {
            bench.sent();
            while let Some(completion) = bench.requester.poll_completion() {
                ended.push(completion.token);
            }
            if bench.requester.operation_count() == 0 {
                break;
            }
            bench.pass_to_timer();
        }
        ended.sort_unstable();
        prop_assert_eq!(&ended, &started.keys().copied().collect::<Vec<_>>());
        prop_assert!(bench.now <= deadline + Duration::from_secs(5), "{:?}", bench.now);
        for (token, length) in started {
            prop_assert_eq!(bench.memory.0[&token].len(), length, "no buffer changes its length");
        }
        bench.end();
    }
}
