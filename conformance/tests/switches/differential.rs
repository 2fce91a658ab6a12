//! Random frames and tables: both data planes must do the same, frame by frame.

use bluebridge_p4::pipeline::{
    Action, DropReason, Entry, Forward, Key, MacAddr, SwitchPort, Ternary, WeightedForward,
};

use bluebridge_switch::dataplane::{CloneSession, DataPlane, Drops, PacketIn, Table};

use bluebridge_conformance::{Outputs, timeless};
use rand::{Rng as _, SeedableRng as _, rngs::SmallRng};

use crate::embedded::{EbpfTestRun, Embedded, SoftPipeline};

const FRAMES: usize = 700;
const SEED: u64 = 0x5eed_0001;

/// Draws from small sets, so that frames and entries match often.
struct Dice(SmallRng);

impl Dice {
    fn below(&mut self, end: u64) -> u64 {
        self.0.random_range(0..end)
    }

    fn one_of<T: Copy>(&mut self, set: &[T]) -> T {
        let at = self.below(set.len() as u64);
        set[usize::try_from(at).unwrap_or(0)]
    }

    fn port(&mut self) -> SwitchPort {
        SwitchPort(self.one_of(&[1, 2, 3, 4]))
    }

    fn scope(&mut self) -> u32 {
        self.one_of(&[0xfdbb_0001, 0xfdbb_0001, 0xfdbb_0002, 0xfe80_0000])
    }

    fn node(&mut self) -> u16 {
        self.one_of(&[0, 1, 2, 3, 2, 3, 0xffff])
    }

    fn location(&mut self) -> u64 {
        let base = self.one_of(&[0, 0x5000, 0x6000, 1 << 48, 1 << 63, (1 << 63) | 0x5000]);
        base | self.one_of(&[0, 1, 0xfff, 0x4000_0000])
    }

    fn byte(&mut self) -> u8 {
        let codes = [0, 3, 4, 6, 8, 24, 25, 0x43, 0x46, 0x58, 0x83, 0x86, 0x98, 0xc6, 0x3f, 0xff];
        self.one_of(&codes)
    }

    fn mac(&mut self) -> MacAddr {
        self.one_of(&[[2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 9], [0xff; 6]].map(MacAddr))
    }

    fn forward(&mut self) -> Forward {
        let port = self.port();
        let [_, low] = port.0.to_be_bytes();
        Forward { port, dst_mac: MacAddr([2, 0, 0, 0, 1, low]) }
    }

    fn key(&mut self, table: Table) -> Key {
        match table {
            Table::IngressGuard => Key::IngressGuard {
                port: self.port(),
                src_scope: self.scope(),
                src_node: self.node(),
            },
            Table::Redirect => Key::Redirect {
                dst_scope: self.scope(),
                dst_node: self.node(),
                page: self.location() >> 12,
            },
            Table::Directory => {
                let prefix_len = self.one_of(&[33, 48, 48, 49, 63, 64, 82, 100, 111, 112]);
                let bits = (u128::from(self.scope()) << 80)
                    | (u128::from(self.node()) << 64)
                    | u128::from(self.location());
                let prefix = bits & bluebridge_switch::dataplane::location_mask(prefix_len);
                Key::Directory { prefix, prefix_len }
            }
            Table::Anycast => Key::Anycast { dst_scope: self.scope() },
            Table::Notify => {
                let mut ternary = || {
                    let mask = self.one_of(&[0, 0, 0x80, 0xbf, 0xff]);
                    Ternary { value: self.byte() & mask, mask }
                };
                let (src_command, dst_command, src_status) = (ternary(), ternary(), ternary());
                let priority = self.one_of(&[1, 2, 3]);
                Key::Notify { src_command, dst_command, src_status, priority }
            }
            Table::L2 => Key::L2 { dst_mac: self.mac() },
            Table::PortMac => Key::PortMac { port: self.port() },
            Table::Multicast => Key::Multicast { dst_scope: self.scope() },
        }
    }

    fn entry(&mut self) -> Entry {
        let table = self.one_of(&Table::ALL);
        let action = match table {
            Table::IngressGuard => self.one_of(&[true, true, true, false]).then_some(Action::Allow),
            Table::Directory if self.below(8) == 0 => None,
            Table::Notify => Some(Action::CopyToController),
            Table::PortMac => Some(Action::SetDstMac(self.forward().dst_mac)),
            Table::Multicast => Some(Action::SetMulticastGroup { group: 1 }),
            Table::L2 if self.below(2) == 0 => Some(Action::SetMulticastGroup { group: 2 }),
            Table::Anycast => {
                let weight = |dice: &mut Self| WeightedForward {
                    forward: dice.forward(),
                    weight: dice.one_of(&[1, 2, 50]),
                };
                Some(Action::Select((0..3).map(|_| weight(self)).collect()))
            }
            Table::Redirect if self.below(2) == 0 => {
                // Either expired at once or not within the test.
                let lease_ms = self.one_of(&[0, 60_000]);
                Some(Action::RedirectUntil { forward: self.forward(), lease_ms })
            }
            _ => Some(Action::Forward(self.forward())),
        };
        let action = action.unwrap_or(Action::Drop);
        Entry { key: self.key(table), action, idle_timeout: None, metadata: Vec::new() }
    }

    fn address(&mut self) -> Vec<u8> {
        let mut bytes = self.scope().to_be_bytes().to_vec();
        bytes.extend(self.node().to_be_bytes());
        bytes.extend([self.byte(), self.byte()]);
        bytes.extend(self.location().to_be_bytes());
        bytes
    }

    fn frame(&mut self) -> Vec<u8> {
        let mut frame = self.mac().0.to_vec();
        frame.extend([2, 0, 0, 0, 0, 7]);
        let ethertypes =
            [0x86dd, 0x86dd, 0x86dd, 0x86dd, 0x86dd, 0x86dd, 0x0800, 0x8100, 0x88a8u16];
        frame.extend(self.one_of(&ethertypes).to_be_bytes());
        frame.push(self.one_of(&[0x60, 0x60, 0x60, 0x60, 0x60, 0x6f, 0x40]));
        frame.extend([0; 3]);
        frame.extend(self.one_of(&[0, 40, 40, 40, 39, 41, 0xffffu16]).to_be_bytes());
        let next_headers = [17, 17, 17, 17, 17, 17, 17, 6, 58, 0, 44, 43, 60];
        frame.extend([self.one_of(&next_headers), self.one_of(&[64, 64, 64, 255, 2, 1, 0])]);
        frame.extend(self.address());
        frame.extend(self.address());
        frame.resize(94, 0xa5);
        let length = self.one_of(&[94, 94, 94, 94, 95, 200, 93, 60, 54]);
        frame.resize(length, 0);
        frame
    }
}

/// Fills the tables; conflicting entries are omitted in the same way on every plane.
fn fill(plane: &mut dyn DataPlane, dice: &mut Dice) -> usize {
    plane.clear(None).unwrap();
    plane.set_group(1, &[1, 2, 3].map(SwitchPort)).unwrap();
    plane.set_group(2, &[2, 4].map(SwitchPort)).unwrap();
    plane.set_clone_session(Some(CloneSession::default())).unwrap();
    (0..150).filter(|_| plane.insert(&dice.entry()).is_ok()).count()
}

/// The result of one frame on a plane, in a fixed order.
#[derive(Debug, PartialEq)]
struct Done {
    left: Outputs,
    events: Vec<PacketIn>,
    drops: Drops,
}

fn send(target: &mut dyn Embedded, port: SwitchPort, frame: &[u8], expected: usize) -> Done {
    let mut left = target.send(port, frame, expected);
    left.sort();
    let plane = target.plane();
    let mut events = Vec::new();
    plane.poll(64, &mut events).unwrap();
    Done { left, events, drops: plane.drops().unwrap() }
}

fn counters(plane: &mut dyn DataPlane) -> Vec<(Entry, bluebridge_p4::pipeline::Counter)> {
    let entries = Table::ALL.into_iter().flat_map(|table| plane.entries(table).unwrap());
    entries.map(|installed| (timeless(&installed.entry), installed.counter)).collect()
}

fn differ(seed: u64, ebpf: &mut EbpfTestRun) -> Drops {
    let mut soft = SoftPipeline::new();
    let dice = || Dice(SmallRng::seed_from_u64(seed));
    let (mut a, mut b) = (dice(), dice());
    let inserted = fill(soft.plane(), &mut a);
    assert_eq!(fill(ebpf.plane(), &mut b), inserted);
    assert!(inserted > 50, "only {inserted} entries");
    for number in 0..FRAMES {
        let (port, frame) = (a.port(), a.frame());
        let by_soft = send(&mut soft, port, &frame, 0);
        let by_ebpf = send(ebpf, port, &frame, by_soft.left.len());
        assert_eq!(
            by_ebpf, by_soft,
            "seed {seed:#x}, frame {number} by port {}: {frame:02x?}",
            port.0
        );
    }
    assert_eq!(counters(ebpf.plane()), counters(soft.plane()), "seed {seed:#x}");
    soft.plane().drops().unwrap()
}

mod root {
    use bluebridge_testkit::namespace::in_thread;

    use super::*;

    #[test]
    fn both_planes_do_the_same_with_random_frames_and_tables() {
        in_thread(|| {
            let mut ebpf = EbpfTestRun::new("differ");
            let mut total = Drops::default().0;
            for seed in SEED..SEED + 3 {
                for (total, drops) in total.iter_mut().zip(differ(seed, &mut ebpf).0) {
                    *total += drops;
                }
            }
            for reason in DropReason::ALL {
                // Nothing is impaired, and every port accepts every frame.
                let is_met = !matches!(reason, DropReason::Impairment | DropReason::Egress);
                assert_eq!(total[reason as usize] > 0, is_met, "{}: {total:?}", reason.name());
            }
        });
    }
}
