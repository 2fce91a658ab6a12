//! The contract of [`DataPlane`], tested on every data plane.

use std::{
    net::Ipv6Addr,
    time::{Duration, Instant},
};

use bluebridge_p4::pipeline::{
    Action, Counter, Entry, Forward, Impairment, Key, MacAddr, PACKET_IN_BYTES, SwitchPort,
    Ternary, WeightedForward,
};
use bluebridge_testkit::{UdpFrame, ip};
use bluebridge_wire::UDP_PORT;

use bluebridge_switch::dataplane::{
    CloneSession, DataPlane, EVENTS_MAX, GROUP_PORTS_MAX, ImpairmentError, PortError, Table,
    TableError,
};

use crate::embedded::{EbpfLinks, EbpfTestRun, Embedded, Pinned, SoftLinks, SoftPipeline};

const SCOPE: u32 = 0xfdbb_0001;

/// Timeout for expected events.
const PATIENCE: Duration = Duration::from_secs(20);

fn entry(key: Key, action: Action) -> Entry {
    Entry { key, action, idle_timeout: None, metadata: Vec::new() }
}

fn forward(port: u16) -> Action {
    Action::Forward(Forward { port: SwitchPort(port), dst_mac: MacAddr([2, 0, 0, 0, 0, 9]) })
}

fn redirect(page: u64) -> Key {
    Key::Redirect { dst_scope: SCOPE, dst_node: 2, page }
}

const GUARD: Key = Key::IngressGuard { port: SwitchPort(1), src_scope: SCOPE, src_node: 1 };

/// A datagram from node 1 to a page of node 2, 94 bytes.
fn read_of(page: u64) -> Vec<u8> {
    UdpFrame {
        source_mac: [2, 0, 0, 0, 0, 1],
        destination_mac: [2, 0, 0, 0, 0, 0xfe],
        source: Ipv6Addr::new(0xfdbb, 1, 1, 0, 0x8000, 0, 0, 1),
        destination: Ipv6Addr::from_bits(0xfdbb_0001_0002_0607 << 64 | u128::from(page << 12)),
        source_port: 0x8000,
        destination_port: UDP_PORT,
        payload: &[0xa5; 32],
    }
    .bytes()
}

fn every_promise(target: &mut dyn Embedded) {
    promises_of_tables(target.plane());
    promises_of_groups(target.plane());
    promises_of_counters(target);
    promises_of_time(target);
    promises_of_packet_ins(target);
    promises_of_ports(target);
    promises_of_clear(target.plane());
}

fn promises_of_tables(plane: &mut dyn DataPlane) {
    plane.clear(Some(7)).unwrap();
    let mut away = entry(redirect(5), forward(2));
    away.idle_timeout = Some(Duration::from_secs(100));
    away.metadata = vec![1, 2, 3];
    plane.insert(&away).unwrap();
    assert!(matches!(plane.insert(&away), Err(TableError::Exists(Table::Redirect))));
    let read = plane.entry(&away.key).unwrap();
    assert_eq!((read.entry, read.counter), (away.clone(), Counter::default()));
    assert!(read.since_hit.unwrap() < Duration::from_secs(50));
    away.action = forward(3);
    away.idle_timeout = None;
    away.metadata.clear();
    plane.modify(&away).unwrap();
    assert_eq!(plane.entry(&away.key).unwrap().entry, away);
    plane.delete(&away.key).unwrap();
    assert!(matches!(plane.delete(&away.key), Err(TableError::NotFound(Table::Redirect))));
    assert!(matches!(plane.modify(&away), Err(TableError::NotFound(_))));
    assert!(matches!(plane.entry(&away.key), Err(TableError::NotFound(_))));
    refusals(plane);
    // Entries are listed in the order of their keys.
    for page in [9, 3, 6] {
        plane.insert(&entry(redirect(page), forward(1))).unwrap();
    }
    let keys: Vec<_> = plane.entries(Table::Redirect).unwrap();
    let keys: Vec<_> = keys.into_iter().map(|read| read.entry.key).collect();
    assert_eq!(keys, [3, 6, 9].map(redirect));
}

fn refusals(plane: &mut dyn DataPlane) {
    let mut refused = |entry: Entry| plane.insert(&entry).expect_err("it must be refused");
    let unsupported = refused(entry(GUARD, forward(1)));
    assert!(matches!(unsupported, TableError::UnsupportedAction(Table::IngressGuard)));
    let unknown = refused(entry(redirect(1), forward(77)));
    assert!(matches!(unknown, TableError::UnknownPort(SwitchPort(77))));
    let multicast = Key::Multicast { dst_scope: SCOPE };
    let unknown = refused(entry(multicast, Action::SetMulticastGroup { group: 9 }));
    assert!(matches!(unknown, TableError::UnknownGroup(9)));
    let mut idle = entry(GUARD, Action::Allow);
    idle.idle_timeout = Some(Duration::from_secs(1));
    assert!(matches!(refused(idle), TableError::Unsupported { .. }));
    let mut long = entry(GUARD, Action::Allow);
    long.metadata = vec![0; 33];
    let untidy = Ternary { value: 2, mask: 1 };
    let plain = Ternary::default();
    let notify = |dst_command, priority| Key::Notify {
        src_command: plain,
        dst_command,
        src_status: plain,
        priority,
    };
    let weightless = WeightedForward {
        forward: Forward { port: SwitchPort(1), dst_mac: MacAddr::default() },
        weight: 0,
    };
    let anycast = Key::Anycast { dst_scope: SCOPE };
    for invalid in [
        long,
        entry(redirect(1 << 52), forward(1)),
        entry(Key::Directory { prefix: 0, prefix_len: 113 }, forward(1)),
        entry(Key::Directory { prefix: 1, prefix_len: 111 }, forward(1)),
        entry(notify(untidy, 1), Action::CopyToController),
        entry(notify(plain, 0), Action::CopyToController),
        entry(anycast, Action::Select(Vec::new())),
        entry(anycast, Action::Select(vec![weightless])),
    ] {
        let error = refused(invalid.clone());
        assert!(matches!(error, TableError::Invalid { .. }), "{invalid:?}: {error}");
    }
    // None of these was inserted.
    for table in Table::ALL {
        assert_eq!(plane.entries(table).unwrap(), []);
    }
    let full = |priority| entry(notify(plain, priority), Action::CopyToController);
    for priority in 1..=64 {
        plane.insert(&full(priority)).unwrap();
    }
    assert!(matches!(plane.insert(&full(65)), Err(TableError::Full(Table::Notify))));
    for priority in 1..=64 {
        plane.delete(&full(priority).key).unwrap();
    }
}

fn until(port: u16, lease_ms: u16) -> Action {
    let forward = Forward { port: SwitchPort(port), dst_mac: MacAddr([2, 0, 0, 0, 0, 9]) };
    Action::RedirectUntil { forward, lease_ms }
}

/// The remaining milliseconds of an entry.
fn time_left(plane: &mut dyn DataPlane, key: &Key) -> u16 {
    match plane.entry(key).unwrap().entry.action {
        Action::RedirectUntil { lease_ms, .. } => lease_ms,
        other => panic!("{other:?}"),
    }
}

fn promises_of_time(target: &mut dyn Embedded) {
    let plane = target.plane();
    plane.clear(None).unwrap();
    let misplaced = entry(Key::L2 { dst_mac: MacAddr([2; 6]) }, until(2, 9));
    let refused = plane.insert(&misplaced);
    assert!(matches!(refused, Err(TableError::UnsupportedAction(Table::L2))));
    let refused = plane.insert(&entry(redirect(5), until(77, 9)));
    assert!(matches!(refused, Err(TableError::UnknownPort(SwitchPort(77)))));
    plane.insert(&entry(GUARD, Action::Allow)).unwrap();
    let prefix = (u128::from(SCOPE) << 80) | (2 << 64);
    plane.insert(&entry(Key::Directory { prefix, prefix_len: 48 }, forward(2))).unwrap();
    let goes_to =
        |target: &mut dyn Embedded, page| target.send(SwitchPort(1), &read_of(page), 1)[0].0.0;
    let away = entry(redirect(5), until(3, 60_000));
    target.plane().insert(&away).unwrap();
    target.plane().insert(&entry(redirect(6), until(4, 20))).unwrap();
    std::thread::sleep(Duration::from_millis(30));
    assert_eq!([goes_to(target, 5), goes_to(target, 6)], [3, 2], "one is expired, one is not");
    let plane = target.plane();
    let left = time_left(plane, &away.key);
    assert!((20_000..=59_971).contains(&left), "{left} ms are left of 60000 after 30");
    assert_eq!(time_left(plane, &redirect(6)), 0);
    let dead = plane.entry(&redirect(6)).unwrap();
    assert_eq!(dead.counter, Counter::default(), "an expired entry matches nothing");
    assert!(matches!(plane.insert(&dead.entry), Err(TableError::Exists(_))), "it is still there");
    // A rewritten entry is valid again, and a valid one can end.
    plane.modify(&entry(redirect(6), until(4, 60_000))).unwrap();
    plane.modify(&entry(redirect(5), until(3, 0))).unwrap();
    assert_eq!([goes_to(target, 5), goes_to(target, 6)], [2, 4]);
    let plane = target.plane();
    plane.modify(&entry(redirect(5), forward(3))).unwrap();
    assert_eq!(plane.entry(&redirect(5)).unwrap().entry.action, forward(3));
    plane.delete(&redirect(6)).unwrap();
    assert_eq!([goes_to(target, 5), goes_to(target, 6)], [3, 2]);
}

fn promises_of_groups(plane: &mut dyn DataPlane) {
    plane.clear(None).unwrap();
    let ports = [SwitchPort(3), SwitchPort(1), SwitchPort(3)];
    plane.set_group(0xffff, &ports).unwrap();
    assert_eq!(plane.groups().unwrap(), [(0xffff, vec![SwitchPort(1), SwitchPort(3)])]);
    let error = plane.set_group(0, &ports).unwrap_err();
    assert!(matches!(error, TableError::InvalidGroup { group: 0, .. }));
    let error = plane.set_group(1, &[SwitchPort(70)]).unwrap_err();
    assert!(matches!(error, TableError::UnknownPort(SwitchPort(70))));
    let many: Vec<_> = (1..).map(SwitchPort).take(GROUP_PORTS_MAX + 1).collect();
    assert!(matches!(plane.set_group(1, &many), Err(TableError::InvalidGroup { .. })));
    assert!(matches!(plane.set_flood_group(Some(2)), Err(TableError::UnknownGroup(2))));
    plane.set_flood_group(Some(0xffff)).unwrap();
    assert_eq!(plane.flood_group().unwrap(), Some(0xffff));
    plane.delete_group(0xffff).unwrap();
    assert!(matches!(plane.delete_group(0xffff), Err(TableError::UnknownGroup(0xffff))));
}

fn promises_of_counters(target: &mut dyn Embedded) {
    let plane = target.plane();
    plane.clear(None).unwrap();
    plane.insert(&entry(GUARD, Action::Allow)).unwrap();
    let mut away = entry(redirect(5), forward(2));
    away.idle_timeout = Some(Duration::from_millis(30));
    plane.insert(&away).unwrap();
    target.send(SwitchPort(1), &read_of(5), 1);
    let plane = target.plane();
    let hit = Counter { packets: 1, bytes: 94 };
    assert_eq!(plane.entry(&away.key).unwrap().counter, hit);
    away.action = forward(3);
    plane.modify(&away).unwrap();
    assert_eq!(plane.entry(&away.key).unwrap().counter, hit, "a modified entry keeps its counts");
    let set = Counter { packets: 1 << 40, bytes: u64::MAX - 100 };
    plane.set_counter(&away.key, set).unwrap();
    target.send(SwitchPort(1), &read_of(5), 1);
    let counted = Counter { packets: set.packets + 1, bytes: set.bytes + 94 };
    assert_eq!(target.plane().entry(&away.key).unwrap().counter, counted);
    std::thread::sleep(Duration::from_millis(40));
    // A plane without a clock gets the time from the test.
    target.send(SwitchPort(1), &read_of(6), 0);
    let plane = target.plane();
    let expired: Vec<_> = plane.expired().unwrap().into_iter().map(|e| e.entry.key).collect();
    assert_eq!(expired, [away.key]);
    // On a busy machine more time than the timeout may pass between a hit and the query.
    let start = Instant::now();
    loop {
        target.send(SwitchPort(1), &read_of(5), 1);
        let expired = target.plane().expired().unwrap();
        if expired.is_empty() {
            break;
        }
        assert!(start.elapsed() < PATIENCE, "expired right after a hit: {expired:?}");
    }
    let plane = target.plane();
    plane.delete(&away.key).unwrap();
    plane.insert(&away).unwrap();
    let fresh = plane.entry(&away.key).unwrap().counter;
    assert_eq!(fresh, Counter::default(), "a new entry starts at 0");
}

fn promises_of_packet_ins(target: &mut dyn Embedded) {
    let plane = target.plane();
    plane.clear(None).unwrap();
    plane.insert(&entry(GUARD, Action::Allow)).unwrap();
    let any = Ternary::default();
    let key =
        Key::Notify { src_command: any, dst_command: any, src_status: any, priority: i32::MAX };
    plane.insert(&entry(key, Action::CopyToController)).unwrap();
    plane.set_clone_session(Some(CloneSession { packet_bytes: 54 })).unwrap();
    assert_eq!(plane.clone_session().unwrap(), Some(CloneSession { packet_bytes: 54 }));
    target.send(SwitchPort(1), &read_of(1), 0);
    let mut events = Vec::new();
    target.plane().poll(8, &mut events).unwrap();
    assert_eq!(events.len(), 1);
    assert_eq!(events[0].frame, read_of(1)[..54]);
    target.plane().set_clone_session(Some(CloneSession { packet_bytes: 9999 })).unwrap();
    let session = target.plane().clone_session().unwrap();
    assert_eq!(session, Some(CloneSession { packet_bytes: PACKET_IN_BYTES }));
    target.send(SwitchPort(1), &read_of(1), 0);
    target.send(SwitchPort(1), &read_of(2), 0);
    events.clear();
    target.plane().poll(1, &mut events).unwrap();
    assert_eq!(events.len(), 1, "no more than requested");
    target.plane().poll(8, &mut events).unwrap();
    assert_eq!(events[1].frame, read_of(2));
}

fn promises_of_ports(target: &mut dyn Embedded) {
    let plane = target.plane();
    let ports = plane.ports().unwrap();
    let names: Vec<_> = ports.iter().map(|port| port.name.as_str()).collect();
    assert_eq!(names, ["s1", "s2", "s3", "s4"]);
    assert!(ports.iter().all(|port| port.mtu == 9000), "{ports:?}");
    plane.add_port(SwitchPort(1), "s1").unwrap();
    let in_use = plane.add_port(SwitchPort(1), "s2").unwrap_err();
    assert!(matches!(in_use, PortError::Invalid { .. }), "{in_use}");
    for number in [0, 510, 1024, u16::MAX] {
        let invalid = plane.add_port(SwitchPort(number), "s1").unwrap_err();
        assert!(matches!(invalid, PortError::Invalid { .. }), "{invalid}");
    }
    let error = plane.packet_out(SwitchPort(9), &read_of(1)).unwrap_err();
    assert!(matches!(error, PortError::Unknown(SwitchPort(9))));
    for length in [0, 13, 9015] {
        let error = plane.packet_out(SwitchPort(2), &vec![0; length]).unwrap_err();
        assert!(matches!(error, PortError::FrameSize(is) if is == length));
    }
    let off = Impairment::default();
    let error = plane.set_impairment(SwitchPort(9), off).unwrap_err();
    assert!(matches!(error, ImpairmentError::UnknownPort(SwitchPort(9))));
    for share in [-0.1, 1.1, f64::NAN] {
        let error = plane.set_impairment(SwitchPort(2), Impairment { loss: share, ..off });
        assert!(matches!(error, Err(ImpairmentError::OutOfRange("loss"))));
    }
}

fn promises_of_clear(plane: &mut dyn DataPlane) {
    plane.clear(Some(u64::MAX)).unwrap();
    assert_eq!(plane.pipeline_cookie().unwrap(), Some(u64::MAX));
    for table in Table::ALL {
        assert_eq!(plane.entries(table).unwrap(), []);
    }
    assert_eq!(plane.groups().unwrap(), []);
    assert_eq!(plane.clone_session().unwrap(), None);
    assert_eq!(plane.flood_group().unwrap(), None);
    assert_eq!(plane.drops().unwrap().0.iter().sum::<u64>(), 0);
    assert_eq!(plane.ports().unwrap().len(), 4);
}

/// Which of 400 numbered frames leave, and how often, through a port that loses and duplicates.
fn impaired(target: &mut dyn Embedded) -> Vec<u64> {
    let plane = target.plane();
    plane.clear(None).unwrap();
    plane.insert(&entry(GUARD, Action::Allow)).unwrap();
    let prefix = (u128::from(SCOPE) << 80) | (2 << 64);
    plane.insert(&entry(Key::Directory { prefix, prefix_len: 48 }, forward(2))).unwrap();
    let impairment =
        Impairment { seed: 42, loss: 0.2, duplicate: 0.2, corrupt: 0.1, ..Impairment::default() };
    plane.set_impairment(SwitchPort(2), impairment).unwrap();
    let mut left = Vec::new();
    for page in 0..400 {
        let sent = read_of(page);
        for (port, frame) in target.send(SwitchPort(1), &sent, 0) {
            assert_eq!((port, frame.len()), (SwitchPort(2), sent.len()));
            let flipped: u32 =
                frame.iter().zip(&sent).skip(22).map(|(a, b)| (a ^ b).count_ones()).sum();
            assert!(flipped <= 1, "one bit at most");
            left.push(page);
        }
    }
    let plane = target.plane();
    let counters = plane.ports().unwrap()[1].impaired;
    let lost = plane.drops().unwrap().of(bluebridge_p4::pipeline::DropReason::Impairment);
    assert_eq!(counters.lost, lost);
    assert!((40..=120).contains(&lost), "{lost} of 400 lost at 20 %");
    assert!((40..=120).contains(&counters.duplicated), "{counters:?}");
    assert!((15..=70).contains(&counters.corrupted), "{counters:?}");
    assert_eq!(left.len() as u64, 400 - lost + counters.duplicated);
    plane.set_impairment(SwitchPort(2), Impairment::default()).unwrap();
    assert_eq!(target.send(SwitchPort(1), &read_of(1), 1).len(), 1);
    left
}

#[test]
fn the_soft_pipeline_keeps_every_promise() {
    every_promise(&mut SoftPipeline::new());
}

fn takes_the_new_interface(target: &mut dyn Embedded) {
    ip("link del s4");
    ip("link add s4 type veth peer name new4");
    ip("link set s4 up");
    ip("link set new4 up");
    let plane = target.plane();
    plane.clear(None).unwrap();
    plane.add_port(SwitchPort(4), "s4").unwrap();
    plane.insert(&entry(GUARD, Action::Allow)).unwrap();
    let prefix = (u128::from(SCOPE) << 80) | (2 << 64);
    plane.insert(&entry(Key::Directory { prefix, prefix_len: 48 }, forward(4))).unwrap();
    target.inject(SwitchPort(1), &read_of(1));
    let start = Instant::now();
    while target.plane().ports().unwrap()[3].tx.packets == 0 {
        assert!(start.elapsed() < PATIENCE, "nothing leaves by the new interface");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(target.plane().drops().unwrap().0.iter().sum::<u64>(), 0);
    target.plane().remove_port(SwitchPort(4)).unwrap();
    let gone = target.plane().remove_port(SwitchPort(4)).unwrap_err();
    assert!(matches!(gone, PortError::Unknown(SwitchPort(4))));
}

fn packet_outs_and_losses(target: &mut dyn Embedded) {
    let plane = target.plane();
    plane.clear(None).unwrap();
    plane.packet_out(SwitchPort(3), &read_of(7)).unwrap();
    // With empty tables nothing is forwarded: only the packet-out arrives.
    let left = target.send(SwitchPort(1), &read_of(8), 1);
    assert_eq!(left, [(SwitchPort(3), read_of(7))]);
    let plane = target.plane();
    plane.insert(&entry(GUARD, Action::Allow)).unwrap();
    let any = Ternary::default();
    let key = Key::Notify { src_command: any, dst_command: any, src_status: any, priority: 1 };
    plane.insert(&entry(key, Action::CopyToController)).unwrap();
    plane.set_clone_session(Some(CloneSession::default())).unwrap();
    let before = plane.events_lost().unwrap();
    let received = |plane: &mut dyn DataPlane| plane.ports().unwrap()[0].rx.packets;
    let sent = EVENTS_MAX + 1500;
    let all = received(plane) + sent as u64;
    for page in 0..sent as u64 {
        target.inject(SwitchPort(1), &read_of(page));
    }
    // The last frames may still be on the link.
    let start = Instant::now();
    while received(target.plane()) < all && start.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(1));
    }
    let plane = target.plane();
    let mut events = Vec::new();
    plane.poll(usize::MAX, &mut events).unwrap();
    let lost = plane.events_lost().unwrap() - before;
    assert!(lost > 0 && events.len() >= EVENTS_MAX - 64, "{} kept, {lost} lost", events.len());
    assert_eq!(events.len() as u64 + lost, sent as u64);
}

mod root {
    use bluebridge_testkit::{ip, namespace::in_thread};

    use super::*;

    #[test]
    fn the_soft_switch_keeps_every_promise() {
        in_thread(|| every_promise(&mut SoftLinks::new()));
    }

    #[test]
    fn the_ebpf_switch_keeps_every_promise() {
        in_thread(|| every_promise(&mut EbpfLinks::new("promises", None)));
    }

    /// The ports are far apart, up to the greatest number.
    #[test]
    fn the_ebpf_switch_floods_through_a_full_group_except_to_the_sender() {
        in_thread(|| {
            let mut pinned = Pinned::open("crowd");
            let ports: Vec<_> = (1..=509).step_by(4).map(SwitchPort).collect();
            assert_eq!(ports.len(), GROUP_PORTS_MAX);
            for SwitchPort(port) in ports.iter().copied() {
                ip(&format!("link add s{port} up type veth peer name h{port}"));
                ip(&format!("link set h{port} up"));
                let added = pinned.switch.add_port(SwitchPort(port), &format!("s{port}"));
                added.expect("it attaches");
            }
            pinned.switch.set_group(7, &ports).unwrap();
            pinned.switch.set_flood_group(Some(7)).unwrap();
            let mut frame = vec![0xff; 6];
            frame.extend([2, 0, 0, 0, 0, 1, 0x08, 0x06]);
            frame.resize(60, 0);
            let sender = ports[64];
            pinned.switch.test_run(sender, &frame, 1).expect("it runs");
            let sent = pinned.switch.ports().expect("the maps can be read");
            let sent: Vec<_> = sent.iter().map(|it| (it.port, it.tx.packets)).collect();
            let once: Vec<_> =
                ports.iter().map(|port| (*port, u64::from(*port != sender))).collect();
            assert_eq!(sent, once);
        });
    }

    #[test]
    fn both_planes_impair_the_same_frames_with_the_same_seed() {
        let soft = impaired(&mut SoftPipeline::new());
        in_thread(move || {
            assert_eq!(impaired(&mut EbpfTestRun::new("impaired")), soft);
        });
    }

    #[test]
    fn the_ebpf_switch_says_what_it_cannot_impair() {
        in_thread(|| {
            let mut target = EbpfLinks::new("cannot", None);
            let late = Impairment { delay: Duration::from_millis(1), ..Impairment::default() };
            let reordered = Impairment { reorder: 0.5, ..Impairment::default() };
            for (impairment, what) in [(late, "delay"), (reordered, "reorder")] {
                let error = target.plane().set_impairment(SwitchPort(1), impairment).unwrap_err();
                assert!(matches!(error, ImpairmentError::Unsupported(is) if is == what));
            }
        });
    }

    #[test]
    fn packet_outs_leave_over_links_and_lost_packet_ins_are_counted() {
        in_thread(|| {
            packet_outs_and_losses(&mut SoftLinks::new());
        });
        in_thread(|| {
            packet_outs_and_losses(&mut EbpfLinks::new("outs", None));
        });
    }

    #[test]
    fn a_port_whose_interface_was_made_anew_takes_the_new_one() {
        in_thread(|| takes_the_new_interface(&mut SoftLinks::new()));
        in_thread(|| takes_the_new_interface(&mut EbpfLinks::new("anew", None)));
    }
}
