//! How keys and values lie in the maps; `switch/bpf/tables.h` has the same in C.
//!
//! Keys are bytes as they are in a packet (big endian), values are in the host's order. What a hash map
//! holds for the programs is sealed: `tables.h` says why.

use std::{collections::BTreeSet, time::Duration};

use bluebridge_p4::declaration::{ALLOW, FORWARD, SET_DST_MAC, SET_MULTICAST_GROUP, action_of};
use bluebridge_p4::pipeline::{
    Action, Entry, Forward, Key, MacAddr, SwitchPort, Ternary, WeightedForward,
};

use crate::{
    dataplane::{ANYCAST_SLOTS, GROUP_PORTS_MAX, METADATA_BYTES_MAX, Table},
    draw::{GOLDEN, anycast_slots},
};

/// The version of the maps' layout; a switch pinned by another one must be removed first.
pub(super) const LAYOUT: u32 = 4;

/// Bytes of a `struct route`.
pub(super) const ROUTE_BYTES: usize = 16;
/// Bytes of a `struct sealed_route`.
pub(super) const SEALED_ROUTE_BYTES: usize = WORD_BYTES + ROUTE_BYTES + WORD_BYTES;
/// Bytes of a `struct redirect`.
pub(super) const REDIRECT_BYTES: usize = REDIRECT_KEY_BYTES + ROUTE_BYTES + 2 * WORD_BYTES;
/// Bytes of a `struct choice`.
pub(super) const CHOICE_BYTES: usize = 8 + ANYCAST_SLOTS * (1 + 8 + 8 + 2);
/// Bytes of a `struct group`.
pub(super) const GROUP_BYTES: usize = 4 + 2 * GROUP_PORTS_MAX + 4 + WORD_BYTES;
/// Bytes of the key of `notes`: the table and the longest key.
pub(super) const NOTE_KEY_BYTES: usize = 20;
/// Bytes of a `struct note`.
pub(super) const NOTE_BYTES: usize = 8 + 4 + METADATA_BYTES_MAX + 4;

const WORD_BYTES: usize = 8;
const REDIRECT_KEY_BYTES: usize = 16;
/// Where the end of an entry is behind its `struct route`.
const DEAD_AT: usize = ROUTE_BYTES;

/// Reads numbers off the front of a value; beyond its end they are 0.
pub(super) struct Reader<'a>(pub(super) &'a [u8]);

impl Reader<'_> {
    pub(super) fn take<const N: usize>(&mut self) -> [u8; N] {
        let (head, rest) = self.0.split_first_chunk().unwrap_or((&[0; N], &[]));
        self.0 = rest;
        *head
    }

    pub(super) fn u16(&mut self) -> u16 {
        u16::from_ne_bytes(self.take())
    }

    pub(super) fn u32(&mut self) -> u32 {
        u32::from_ne_bytes(self.take())
    }

    pub(super) fn u64(&mut self) -> u64 {
        u64::from_ne_bytes(self.take())
    }
}

/// The bytes of a key in its table's map; a directory key starts with its prefix length.
pub(super) fn encode_key(key: &Key) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(NOTE_KEY_BYTES);
    match *key {
        Key::IngressGuard { port, src_scope, src_node } => {
            bytes.extend(src_scope.to_be_bytes());
            bytes.extend(src_node.to_be_bytes());
            bytes.extend(port.0.to_ne_bytes());
        }
        Key::Redirect { dst_scope, dst_node, page } => {
            bytes.extend(dst_scope.to_be_bytes());
            bytes.extend(dst_node.to_be_bytes());
            bytes.extend([0; 2]);
            bytes.extend((page << 12).to_be_bytes());
        }
        Key::Directory { prefix, prefix_len } => {
            bytes.extend(u32::from(prefix_len).to_ne_bytes());
            bytes.extend(&prefix.to_be_bytes()[2..]);
        }
        Key::Anycast { dst_scope } | Key::Multicast { dst_scope } => {
            bytes.extend(dst_scope.to_be_bytes());
        }
        Key::Notify { src_command, dst_command, src_status, priority } => {
            for ternary in [src_command, dst_command, src_status] {
                bytes.extend([ternary.value, ternary.mask]);
            }
            bytes.extend([0; 2]);
            bytes.extend(priority.to_ne_bytes());
        }
        Key::L2 { dst_mac } => {
            bytes.extend(dst_mac.0);
            bytes.extend([0; 2]);
        }
        Key::PortMac { port } => bytes.extend(u32::from(port.0).to_ne_bytes()),
    }
    bytes
}

/// The key that these bytes are in a table's map.
pub(super) fn decode_key(table: Table, bytes: &[u8]) -> Key {
    let mut r = Reader(bytes);
    match table {
        Table::IngressGuard => Key::IngressGuard {
            src_scope: u32::from_be_bytes(r.take()),
            src_node: u16::from_be_bytes(r.take()),
            port: SwitchPort(r.u16()),
        },
        Table::Redirect => {
            let dst_scope = u32::from_be_bytes(r.take());
            let dst_node = u16::from_be_bytes(r.take());
            r.take::<2>();
            Key::Redirect { dst_scope, dst_node, page: u64::from_be_bytes(r.take()) >> 12 }
        }
        Table::Directory => {
            let prefix_len = r.take::<4>();
            let mut prefix = [0; 16];
            prefix[2..].copy_from_slice(&r.take::<14>());
            Key::Directory {
                prefix: u128::from_be_bytes(prefix),
                prefix_len: u8::try_from(u32::from_ne_bytes(prefix_len)).unwrap_or(u8::MAX),
            }
        }
        Table::Anycast => Key::Anycast { dst_scope: u32::from_be_bytes(r.take()) },
        Table::Multicast => Key::Multicast { dst_scope: u32::from_be_bytes(r.take()) },
        Table::Notify => {
            let mut ternary = || {
                let [value, mask] = r.take();
                Ternary { value, mask }
            };
            let (src_command, dst_command, src_status) = (ternary(), ternary(), ternary());
            r.take::<2>();
            let priority = i32::from_ne_bytes(r.take());
            Key::Notify { src_command, dst_command, src_status, priority }
        }
        Table::L2 => Key::L2 { dst_mac: MacAddr(r.take()) },
        Table::PortMac => {
            Key::PortMac { port: SwitchPort(u16::try_from(r.u32()).unwrap_or(u16::MAX)) }
        }
    }
}

/// The seal of words of 8 bytes: their sum, each times another power of an odd number. What is mixed
/// of the words of two values does not have the seal of either, but once in 2^64 times.
fn seal(bytes: &[u8]) -> u64 {
    let mut power = GOLDEN;
    let mut seal = 0_u64;
    for word in bytes.chunks(WORD_BYTES) {
        seal = seal.wrapping_add(Reader(word).u64().wrapping_mul(power));
        power = power.wrapping_mul(GOLDEN);
    }
    seal
}

fn with_seal(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes.extend(seal(&bytes).to_ne_bytes());
    bytes
}

/// The bytes of a key at the front of a sealed value: whole words.
fn sealed_key(key: &Key) -> Vec<u8> {
    let mut bytes = encode_key(key);
    bytes.resize(bytes.len().next_multiple_of(WORD_BYTES), 0);
    bytes
}

/// The value of an entry in its table's map, with the number of the entry and the time at which it is
/// written.
pub(super) fn encode_value(key: &Key, action: &Action, index: u32, now: Duration) -> Vec<u8> {
    let body = encode_action(key, action, index, now);
    match Table::of(key) {
        Table::IngressGuard | Table::L2 | Table::Multicast | Table::Redirect => {
            let mut bytes = sealed_key(key);
            bytes.extend(body);
            with_seal(bytes)
        }
        // The members of a choice are sealed one by one; the others do not need it.
        Table::Anycast | Table::Directory | Table::Notify | Table::PortMac => body,
    }
}

/// A value without the key at its front.
fn body(table: Table, value: &[u8]) -> &[u8] {
    let key_bytes = match table {
        Table::IngressGuard | Table::L2 | Table::Multicast => WORD_BYTES,
        Table::Redirect => REDIRECT_KEY_BYTES,
        Table::Anycast | Table::Directory | Table::Notify | Table::PortMac => 0,
    };
    value.get(key_bytes..).unwrap_or_default()
}

fn encode_action(key: &Key, action: &Action, index: u32, now: Duration) -> Vec<u8> {
    let route = |to: u16, mac: MacAddr| {
        let mut bytes = index.to_ne_bytes().to_vec();
        // The programs forward until the end that is behind the route.
        let declared = match action {
            Action::RedirectUntil { .. } => &FORWARD,
            _ => action_of(action),
        };
        bytes.extend(declared.number().to_ne_bytes());
        bytes.extend(to.to_ne_bytes());
        bytes.extend(mac.0);
        bytes.extend([0; 2]);
        bytes
    };
    let nobody = MacAddr::default();
    let mut bytes = match action {
        Action::Allow | Action::Drop => route(0, nobody),
        Action::Forward(forward) | Action::RedirectUntil { forward, .. } => {
            route(forward.port.0, forward.dst_mac)
        }
        Action::SetMulticastGroup { group } => route(*group, nobody),
        Action::CopyToController => index.to_ne_bytes().to_vec(),
        Action::Select(members) => encode_choice(key, members, index),
        Action::SetDstMac(mac) => route(0, *mac),
    };
    if let Action::RedirectUntil { lease_ms, .. } = action {
        debug_assert_eq!(bytes.len(), DEAD_AT);
        // 0 stands for no end.
        let dead_at = nanoseconds(now + Duration::from_millis(u64::from(*lease_ms))).max(1);
        bytes.extend(dead_at.to_ne_bytes());
    }
    if matches!(key, Key::Redirect { .. }) {
        // Without an end.
        bytes.resize(DEAD_AT + WORD_BYTES, 0);
    }
    bytes
}

/// When an entry of `redirect` ends by the programs' clock; `None` for one that does not, and for
/// those of other tables.
pub(super) fn decode_end(table: Table, value: &[u8]) -> Option<Duration> {
    let mut r = Reader(body(table, value).get(DEAD_AT..).filter(|_| table == Table::Redirect)?);
    Some(r.u64()).filter(|&dead_at| dead_at != 0).map(Duration::from_nanos)
}

/// The number of the entry that a value belongs to, and its action, of whose time nothing is said.
pub(super) fn decode_action(table: Table, value: &[u8]) -> (u32, Action) {
    let mut r = Reader(body(table, value));
    let index = r.u32();
    match table {
        Table::Notify => return (index, Action::CopyToController),
        Table::Anycast => return (index, decode_choice(r)),
        _ => {}
    }
    let (kind, to, mac) = (r.u16(), r.u16(), MacAddr(r.take()));
    let forward = Forward { port: SwitchPort(to), dst_mac: mac };
    let action = match kind {
        kind if kind == ALLOW.number() => Action::Allow,
        kind if kind == FORWARD.number() && decode_end(table, value).is_some() => {
            Action::RedirectUntil { forward, lease_ms: 0 }
        }
        kind if kind == FORWARD.number() => Action::Forward(forward),
        kind if kind == SET_MULTICAST_GROUP.number() => Action::SetMulticastGroup { group: to },
        kind if kind == SET_DST_MAC.number() => Action::SetDstMac(mac),
        _ => Action::Drop,
    };
    (index, action)
}

fn encode_choice(key: &Key, members: &[WeightedForward], index: u32) -> Vec<u8> {
    let count = u32::try_from(members.len()).unwrap_or(0);
    let mut bytes = index.to_ne_bytes().to_vec();
    bytes.extend(count.to_ne_bytes());
    bytes.extend(anycast_slots(members));
    let mut seals = Vec::with_capacity(ANYCAST_SLOTS * WORD_BYTES);
    for member in members {
        let mut sealed = sealed_key(key);
        sealed.extend(u64::from(index).to_ne_bytes());
        sealed.extend(member.forward.port.0.to_ne_bytes());
        sealed.extend(member.forward.dst_mac.0);
        seals.extend(seal(&sealed).to_ne_bytes());
        bytes.extend(sealed.iter().skip(sealed.len() - WORD_BYTES));
    }
    bytes.resize(8 + ANYCAST_SLOTS * 9, 0);
    bytes.extend(seals);
    bytes.resize(8 + ANYCAST_SLOTS * 17, 0);
    for member in members {
        bytes.extend(member.weight.to_ne_bytes());
    }
    bytes.resize(CHOICE_BYTES, 0);
    bytes
}

fn decode_choice(mut r: Reader<'_>) -> Action {
    let count = r.u32() as usize;
    r.take::<ANYCAST_SLOTS>();
    let mut weights = Reader(r.0.get(ANYCAST_SLOTS * 16..).unwrap_or_default());
    let member = |_| WeightedForward {
        forward: Forward { port: SwitchPort(r.u16()), dst_mac: MacAddr(r.take()) },
        weight: weights.u16(),
    };
    Action::Select((0..count.min(ANYCAST_SLOTS)).map(member).collect())
}

/// The value of a multicast group.
pub(super) fn encode_group(number: u16, ports: &BTreeSet<SwitchPort>) -> Vec<u8> {
    let count = u16::try_from(ports.len()).unwrap_or(0);
    let mut bytes = number.to_ne_bytes().to_vec();
    bytes.extend(count.to_ne_bytes());
    bytes.extend(ports.iter().flat_map(|port| port.0.to_ne_bytes()));
    bytes.resize(GROUP_BYTES - WORD_BYTES, 0);
    with_seal(bytes)
}

/// The ports of a multicast group.
pub(super) fn decode_group(value: &[u8]) -> Vec<SwitchPort> {
    let mut r = Reader(value);
    r.take::<2>();
    let count = usize::from(r.u16()).min(GROUP_PORTS_MAX);
    (0..count).map(|_| SwitchPort(r.u16())).collect()
}

/// The key of an entry's note.
pub(super) fn note_key(key: &Key) -> [u8; NOTE_KEY_BYTES] {
    let mut note = [0; NOTE_KEY_BYTES];
    let bytes = encode_key(key);
    note[0] = Table::of(key) as u8;
    for (to, from) in note[1..].iter_mut().zip(bytes) {
        *to = from;
    }
    note
}

/// What only the agent needs of an entry; `None` if there is nothing to note.
pub(super) fn encode_note(entry: &Entry) -> Option<[u8; NOTE_BYTES]> {
    if entry.idle_timeout.is_none() && entry.metadata.is_empty() {
        return None;
    }
    // 0 stands for no timeout, so a timeout of no time at all is kept as the shortest one.
    let idle = entry.idle_timeout.map_or(0, |timeout| nanoseconds(timeout).max(1));
    let mut note = [0; NOTE_BYTES];
    note[..8].copy_from_slice(&idle.to_ne_bytes());
    let length = u32::try_from(entry.metadata.len()).unwrap_or(0);
    note[8..12].copy_from_slice(&length.to_ne_bytes());
    for (to, from) in note[12..].iter_mut().zip(&entry.metadata) {
        *to = *from;
    }
    Some(note)
}

/// The idle timeout and the metadata of a note.
pub(super) fn decode_note(note: &[u8]) -> (Option<Duration>, Vec<u8>) {
    let mut r = Reader(note);
    let idle = r.u64();
    let length = (r.u32() as usize).min(METADATA_BYTES_MAX);
    let metadata = r.0.get(..length).unwrap_or_default().to_vec();
    ((idle != 0).then_some(Duration::from_nanos(idle)), metadata)
}

pub(super) fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const REDIRECT: Key = Key::Redirect { dst_scope: 0xfdbb_0001, dst_node: 9, page: 5 };

    #[test]
    fn every_key_reads_back() {
        let t = |value, mask| Ternary { value, mask };
        let keys = [
            Key::IngressGuard { port: SwitchPort(7), src_scope: 0xfdbb_0001, src_node: 0x0203 },
            Key::Redirect { dst_scope: 0xfdbb_0001, dst_node: 9, page: 0x7_1234_5678_9abc },
            Key::Directory { prefix: 0xfdbb_0001_0203_u128 << 64, prefix_len: 48 },
            Key::Anycast { dst_scope: 0xfdbb_ffff },
            Key::Notify {
                src_command: t(0x88, 0xff),
                dst_command: t(0, 0),
                src_status: t(1, 3),
                priority: 77,
            },
            Key::L2 { dst_mac: MacAddr([2, 0, 0, 0, 0, 9]) },
            Key::PortMac { port: SwitchPort(1023) },
            Key::Multicast { dst_scope: 0xfdbb_0001 },
        ];
        for key in keys {
            let table = Table::of(&key);
            assert_eq!(decode_key(table, &encode_key(&key)), key);
        }
    }

    #[test]
    fn every_action_reads_back() {
        let forward = Forward { port: SwitchPort(3), dst_mac: MacAddr([1, 2, 3, 4, 5, 6]) };
        let members = (1..=256).map(|weight| WeightedForward { forward, weight }).collect();
        let guard = Key::IngressGuard { port: SwitchPort(7), src_scope: 0xfdbb_0001, src_node: 3 };
        let plain = Ternary::default();
        let notify =
            Key::Notify { src_command: plain, dst_command: plain, src_status: plain, priority: 1 };
        let actions = [
            (guard, Action::Allow),
            (Key::Directory { prefix: 0, prefix_len: 0 }, Action::Drop),
            (REDIRECT, Action::Forward(forward)),
            (REDIRECT, Action::RedirectUntil { forward, lease_ms: 0 }),
            (Key::Multicast { dst_scope: 9 }, Action::SetMulticastGroup { group: 0xffff }),
            (notify, Action::CopyToController),
            (Key::Anycast { dst_scope: 9 }, Action::Select(members)),
            (Key::PortMac { port: SwitchPort(1) }, Action::SetDstMac(forward.dst_mac)),
        ];
        for (key, action) in actions {
            let value = encode_value(&key, &action, 41, Duration::from_secs(3));
            assert_eq!(decode_action(Table::of(&key), &value), (41, action));
        }
    }

    #[test]
    fn an_end_reads_back_as_the_moment_that_it_is() {
        let forward = Forward { port: SwitchPort(3), dst_mac: MacAddr([1, 2, 3, 4, 5, 6]) };
        let end = |action, now| {
            let bytes = encode_value(&REDIRECT, &action, 41, now);
            assert_eq!(bytes.len(), REDIRECT_BYTES);
            decode_end(Table::Redirect, &bytes)
        };
        let now = Duration::from_millis(3000);
        let until = |lease_ms| Action::RedirectUntil { forward, lease_ms };
        assert_eq!(end(until(65_535), now), Some(Duration::from_millis(68_535)));
        assert_eq!(end(until(0), now), Some(now));
        assert!(end(until(0), Duration::ZERO).is_some(), "an end at the clock's start is one");
        assert_eq!(end(Action::Forward(forward), now), None);
        let bytes = encode_value(&REDIRECT, &until(7), 41, now);
        assert_eq!(decode_end(Table::Directory, &bytes), None);
    }

    #[test]
    fn a_group_reads_back() {
        let ports: BTreeSet<_> = (1..=64).map(SwitchPort).collect();
        let value = encode_group(9, &ports);
        assert_eq!(value.len(), GROUP_BYTES);
        assert_eq!(decode_group(&value), ports.into_iter().collect::<Vec<_>>());
    }

    #[test]
    fn notes_read_back() {
        let key = Key::Redirect { dst_scope: 1, dst_node: 2, page: 3 };
        let mut entry = Entry { key, action: Action::Allow, idle_timeout: None, metadata: vec![] };
        assert_eq!(encode_note(&entry), None);
        entry.idle_timeout = Some(Duration::from_millis(1500));
        entry.metadata = vec![7; METADATA_BYTES_MAX];
        let note = encode_note(&entry).unwrap();
        assert_eq!(decode_note(&note), (entry.idle_timeout, entry.metadata));
    }
}
