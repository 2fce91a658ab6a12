//! Converts keys, actions and notes to the structs of the maps and back.
//!
//! Values of hash maps that programs read are sealed: `switch/bpf/tables.h` explains why.

use std::{collections::BTreeSet, time::Duration};

use bluebridge_p4::declaration::{ALLOW, FORWARD, SET_DST_MAC, SET_MULTICAST_GROUP, action_of};
use bluebridge_p4::pipeline::{
    Action, Entry, Forward, Key, MacAddr, SwitchPort, Ternary, WeightedForward,
};
use zerocopy::{FromZeros as _, Immutable, IntoBytes};

use super::structs::{
    Choice, DirectoryKey, Group, GuardKey, MacKey, Member, Note, NoteKey, NotifyKey, Redirect,
    RedirectKey, Route, ScopeKey, SealedMember, SealedRoute, from_bytes,
};
use crate::{
    dataplane::{METADATA_BYTES_MAX, PORT_MAX, Table},
    draw::{GOLDEN, anycast_slots},
};

/// The version of the maps' layout; a switch pinned by another one must be removed first.
pub(super) const LAYOUT: u32 = 5;

/// The bytes of a key in its table's map.
pub(super) fn encode_key(key: &Key) -> Vec<u8> {
    match *key {
        Key::IngressGuard { port, src_scope, src_node } => {
            bytes_of(&GuardKey { scope: src_scope.into(), node: src_node.into(), port: port.0 })
        }
        Key::Redirect { .. } => bytes_of(&redirect_key(key)),
        Key::Directory { prefix, prefix_len } => {
            let [_, _, bits @ ..] = prefix.to_be_bytes();
            bytes_of(&DirectoryKey { prefix_len: prefix_len.into(), bits })
        }
        Key::Anycast { dst_scope } | Key::Multicast { dst_scope } => {
            bytes_of(&dst_scope.to_be_bytes())
        }
        Key::Notify { src_command, dst_command, src_status, priority } => {
            let ternaries = [src_command, dst_command, src_status].map(|it| [it.value, it.mask]);
            bytes_of(&NotifyKey { ternaries, unused: 0, priority })
        }
        Key::L2 { dst_mac } => bytes_of(&MacKey { mac: dst_mac.0, unused: 0 }),
        Key::PortMac { port } => bytes_of(&u32::from(port.0)),
    }
}

fn bytes_of(value: &(impl IntoBytes + Immutable)) -> Vec<u8> {
    value.as_bytes().to_vec()
}

/// The key of an entry of `redirect`; zeros for other tables.
fn redirect_key(key: &Key) -> RedirectKey {
    let Key::Redirect { dst_scope, dst_node, page } = *key else {
        return RedirectKey::new_zeroed();
    };
    RedirectKey {
        scope: dst_scope.into(),
        node: dst_node.into(),
        unused: 0,
        page: (page << 12).into(),
    }
}

/// The key of these bytes in a table's map.
pub(super) fn decode_key(table: Table, bytes: &[u8]) -> Key {
    match table {
        Table::IngressGuard => {
            let GuardKey { scope, node, port } = from_bytes(bytes);
            let (src_scope, src_node) = (scope.get(), node.get());
            Key::IngressGuard { port: SwitchPort(port), src_scope, src_node }
        }
        Table::Redirect => {
            let RedirectKey { scope, node, page, .. } = from_bytes(bytes);
            let (dst_scope, dst_node) = (scope.get(), node.get());
            Key::Redirect { dst_scope, dst_node, page: page.get() >> 12 }
        }
        Table::Directory => {
            let DirectoryKey { prefix_len, bits } = from_bytes(bytes);
            let mut prefix = [0; 16];
            prefix[2..].copy_from_slice(&bits);
            Key::Directory {
                prefix: u128::from_be_bytes(prefix),
                prefix_len: u8::try_from(prefix_len).unwrap_or(u8::MAX),
            }
        }
        Table::Anycast => Key::Anycast { dst_scope: u32::from_be_bytes(from_bytes(bytes)) },
        Table::Multicast => Key::Multicast { dst_scope: u32::from_be_bytes(from_bytes(bytes)) },
        Table::Notify => {
            let NotifyKey { ternaries, priority, .. } = from_bytes(bytes);
            let [src_command, dst_command, src_status] =
                ternaries.map(|[value, mask]| Ternary { value, mask });
            Key::Notify { src_command, dst_command, src_status, priority }
        }
        Table::L2 => {
            let MacKey { mac, .. } = from_bytes(bytes);
            Key::L2 { dst_mac: MacAddr(mac) }
        }
        Table::PortMac => {
            let port: u32 = from_bytes(bytes);
            Key::PortMac { port: SwitchPort(u16::try_from(port).unwrap_or(u16::MAX)) }
        }
    }
}

/// The seal of a struct of whole words whose own seal is 0: the sum of its words, each multiplied by
/// another power of an odd number. A mixture of the words of two values has the seal of one of them
/// only once in 2^64 cases.
fn seal<T: IntoBytes + Immutable>(value: &T) -> u64 {
    const { assert!(size_of::<T>().is_multiple_of(size_of::<u64>())) };
    let (words, _) = value.as_bytes().as_chunks();
    let mut power = GOLDEN;
    let mut seal = 0_u64;
    for word in words {
        seal = seal.wrapping_add(u64::from_ne_bytes(*word).wrapping_mul(power));
        power = power.wrapping_mul(GOLDEN);
    }
    seal
}

/// The value of an entry in its table's map, with the number of the entry and the time of the
/// writing.
pub(super) fn encode_value(key: &Key, action: &Action, index: u32, now: Duration) -> Vec<u8> {
    match Table::of(key) {
        Table::IngressGuard | Table::L2 | Table::Multicast => {
            let route = encode_route(action, index);
            let mut value = SealedRoute { key: from_bytes(&encode_key(key)), route, seal: 0 };
            value.seal = seal(&value);
            bytes_of(&value)
        }
        Table::Redirect => {
            let (key, route) = (redirect_key(key), encode_route(action, index));
            let mut value = Redirect { key, route, dead_at_ns: encode_end(action, now), seal: 0 };
            value.seal = seal(&value);
            bytes_of(&value)
        }
        // Its members are sealed one by one.
        Table::Anycast => bytes_of(&encode_choice(key, action, index)),
        // These need no seal.
        Table::Directory | Table::PortMac => bytes_of(&encode_route(action, index)),
        Table::Notify => bytes_of(&index),
    }
}

fn encode_route(action: &Action, index: u32) -> Route {
    let (to, mac) = match action {
        Action::Forward(forward) | Action::RedirectUntil { forward, .. } => {
            (forward.port.0, forward.dst_mac)
        }
        Action::SetMulticastGroup { group } => (*group, MacAddr::default()),
        Action::SetDstMac(mac) => (0, *mac),
        Action::Allow | Action::Drop | Action::CopyToController | Action::Select(_) => {
            (0, MacAddr::default())
        }
    };
    // The programs forward until the end, which follows the route.
    let declared = match action {
        Action::RedirectUntil { .. } => &FORWARD,
        _ => action_of(action),
    };
    Route { index, action: declared.number(), to, mac: mac.0, unused: 0 }
}

/// When an entry that is written now expires; 0 means no end.
fn encode_end(action: &Action, now: Duration) -> u64 {
    let Action::RedirectUntil { lease_ms, .. } = action else { return 0 };
    nanoseconds(now + Duration::from_millis(u64::from(*lease_ms))).max(1)
}

/// When an entry of `redirect` expires by the programs' clock; `None` for one that does not, and for
/// those of other tables.
pub(super) fn decode_end(table: Table, value: &[u8]) -> Option<Duration> {
    if table != Table::Redirect {
        return None;
    }
    let Redirect { dead_at_ns, .. } = from_bytes(value);
    (dead_at_ns != 0).then_some(Duration::from_nanos(dead_at_ns))
}

/// The number of the entry that a value belongs to, and its action without its time.
pub(super) fn decode_action(table: Table, value: &[u8]) -> (u32, Action) {
    let Route { index, action, to, mac, .. } = match table {
        Table::IngressGuard | Table::L2 | Table::Multicast => {
            from_bytes::<SealedRoute>(value).route
        }
        Table::Redirect => from_bytes::<Redirect>(value).route,
        Table::Directory | Table::PortMac => from_bytes(value),
        Table::Anycast => return decode_choice(&from_bytes(value)),
        Table::Notify => return (from_bytes(value), Action::CopyToController),
    };
    let forward = Forward { port: SwitchPort(to), dst_mac: MacAddr(mac) };
    let action = match action {
        number if number == ALLOW.number() => Action::Allow,
        number if number == FORWARD.number() && decode_end(table, value).is_some() => {
            Action::RedirectUntil { forward, lease_ms: 0 }
        }
        number if number == FORWARD.number() => Action::Forward(forward),
        number if number == SET_MULTICAST_GROUP.number() => Action::SetMulticastGroup { group: to },
        number if number == SET_DST_MAC.number() => Action::SetDstMac(forward.dst_mac),
        _ => Action::Drop,
    };
    (index, action)
}

fn encode_choice(key: &Key, action: &Action, index: u32) -> Choice {
    let mut choice = Choice { index, ..Choice::new_zeroed() };
    let Action::Select(members) = action else { return choice };
    choice.count = u32::try_from(members.len()).unwrap_or(0);
    choice.slots = anycast_slots(members);
    let key: ScopeKey = from_bytes(&encode_key(key));
    let places = choice.members.iter_mut().zip(&mut choice.seals).zip(&mut choice.weights);
    for (((place, place_of_seal), weight), from) in places.zip(members) {
        let member = Member { port: from.forward.port.0, mac: from.forward.dst_mac.0 };
        *place = member;
        *place_of_seal = seal(&SealedMember { key, index: index.into(), member });
        *weight = from.weight;
    }
    choice
}

fn decode_choice(choice: &Choice) -> (u32, Action) {
    let members = choice.members.iter().zip(choice.weights).map(|(member, weight)| {
        let (port, dst_mac) = (SwitchPort(member.port), MacAddr(member.mac));
        WeightedForward { forward: Forward { port, dst_mac }, weight }
    });
    (choice.index, Action::Select(members.take(choice.count as usize).collect()))
}

/// The value of a multicast group.
pub(super) fn encode_group(number: u16, ports: &BTreeSet<SwitchPort>) -> Group {
    let mut group = Group { number, ..Group::new_zeroed() };
    for port in ports {
        let (word, bit) = (usize::from(port.0 / 64), port.0 % 64);
        // A port that does not exist is refused before.
        if let Some(word) = group.ports.get_mut(word) {
            *word |= 1 << bit;
        }
    }
    group.seal = seal(&group);
    group
}

/// The ports of a multicast group.
pub(super) fn decode_group(group: &Group) -> Vec<SwitchPort> {
    let is_member = |port: &u16| {
        let word = group.ports.get(usize::from(port / 64));
        word.is_some_and(|word| word >> (port % 64) & 1 == 1)
    };
    (0..=PORT_MAX).filter(is_member).map(SwitchPort).collect()
}

/// The key of an entry's note.
pub(super) fn note_key(key: &Key) -> NoteKey {
    NoteKey { table: Table::of(key) as u8, key: from_bytes(&encode_key(key)) }
}

/// The agent's data of an entry; `None` if there is none.
pub(super) fn encode_note(entry: &Entry) -> Option<Note> {
    if entry.idle_timeout.is_none() && entry.metadata.is_empty() {
        return None;
    }
    Some(Note {
        // 0 means no timeout, so a timeout of zero is stored as the shortest one.
        idle_timeout_ns: entry.idle_timeout.map_or(0, |timeout| nanoseconds(timeout).max(1)),
        bytes: u32::try_from(entry.metadata.len()).unwrap_or(0),
        metadata: from_bytes(&entry.metadata),
        unused: 0,
    })
}

/// The idle timeout and the metadata of a note.
pub(super) fn decode_note(note: &Note) -> (Option<Duration>, Vec<u8>) {
    let idle = note.idle_timeout_ns;
    let length = (note.bytes as usize).min(METADATA_BYTES_MAX);
    let metadata = note.metadata.get(..length).unwrap_or_default().to_vec();
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
            Key::PortMac { port: SwitchPort(509) },
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
            assert_eq!(bytes.len(), size_of::<Redirect>());
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
        for ports in [vec![], vec![1, 62, 63, 64, 127, 128, PORT_MAX], (1..=128).collect()] {
            let ports: BTreeSet<_> = ports.into_iter().map(SwitchPort).collect();
            let value = encode_group(9, &ports);
            assert_eq!(decode_group(&value), ports.into_iter().collect::<Vec<_>>());
        }
    }

    #[test]
    fn notes_read_back() {
        let key = Key::Redirect { dst_scope: 1, dst_node: 2, page: 3 };
        let mut entry = Entry { key, action: Action::Allow, idle_timeout: None, metadata: vec![] };
        assert!(encode_note(&entry).is_none());
        entry.idle_timeout = Some(Duration::from_millis(1500));
        entry.metadata = vec![7; METADATA_BYTES_MAX];
        let note = encode_note(&entry).unwrap();
        assert_eq!(decode_note(&note), (entry.idle_timeout, entry.metadata));
    }
}
