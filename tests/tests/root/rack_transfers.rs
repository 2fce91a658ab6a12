//! Transfers of every size over links of every size.

use std::time::Duration;

use bluebridge::{Placement, Region};
use bluebridge_rack::spec::DataPlane;
use bluebridge_tests::rack::endpoint::{Endpoint, UdpClient, await_used};
use bluebridge_tests::rack::{RackOptions, TestRack, stamp};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// Sizes just below, at and above a byte, a word, a page, a train and a mebibyte.
const SIZES: [usize; 14] = [
    1,
    2,
    63,
    64,
    65,
    4095,
    4096,
    4097,
    32 * KIB - 1,
    32 * KIB,
    32 * KIB + 1,
    MIB - 1,
    MIB,
    MIB + 1,
];

/// Where in a region a transfer begins: aligned, inside of a page, at a page's last byte, and so that the
/// first train is short.
const STARTS: [u64; 4] = [0, 13, 4095, 28_683];

const LARGEST: usize = 64 * MIB;

/// Time for a transfer of [`LARGEST`], which is hundreds of thousands of packets, on a busy machine.
const LARGEST_DEADLINE: Duration = Duration::from_secs(60);

/// Writes at `start`, reads the same range and a byte more on both sides.
fn transfer(client: &mut UdpClient, region: Region, start: u64, size: usize) {
    let mut data = vec![0; size];
    stamp::fill(&mut data, start ^ (size as u64) << 20);
    let edge = |client: &mut UdpClient, at: u64| {
        let mut byte = [0];
        client.read(region.at(at).expect("inside"), &mut byte).expect("read");
        byte
    };
    let (before, after) = (start.checked_sub(1), start + size as u64);
    let edges = (before.map(|at| edge(client, at)), edge(client, after));
    let pointer = region.at(start).expect("inside");
    let what = |error| panic!("{size} bytes at {start}: {error}");
    client.write(pointer, &data).unwrap_or_else(what);
    let mut found = vec![0; size];
    client.read(pointer, &mut found).unwrap_or_else(what);
    let wrong = data.iter().zip(&found).position(|(data, found)| data != found);
    assert_eq!(wrong, None, "the first wrong byte of {size} at {start}");
    let now = (before.map(|at| edge(client, at)), edge(client, after));
    assert_eq!(now, edges, "the bytes around {size} at {start}");
}

fn sizes(rack: &TestRack, endpoint: &Endpoint, server: u16, largest: bool) {
    let mut client = endpoint.client(rack, u64::from(server));
    let place = Placement::Node(endpoint.server(server));
    let region = client.create_at(2 * MIB as u64, place).expect("created");
    for size in SIZES {
        for start in STARTS {
            transfer(&mut client, region, start, size);
        }
    }
    client.delete(region).expect("deleted");
    if largest {
        client.set_deadline(LARGEST_DEADLINE);
        let region = client.create_at((LARGEST + 4096) as u64, place).expect("created");
        transfer(&mut client, region, 0, LARGEST);
        transfer(&mut client, region, 1, LARGEST);
        client.delete(region).expect("deleted");
    }
    // The memory of an ALLOC_WRITE has the written bytes, and zeros after them.
    for size in SIZES {
        let mut data = vec![0; size];
        stamp::fill(&mut data, size as u64);
        let region = client.alloc_write_at(&data, place).expect("allocated");
        let mut found = vec![0; size.next_multiple_of(4096)];
        client.read(region.base(), &mut found).expect("read");
        let (head, tail) = found.split_at(size);
        assert!(*head == data && tail.iter().all(|byte| *byte == 0), "{size} bytes at once");
        client.delete(region).expect("deleted");
    }
}

fn run(name: &str, switch: DataPlane, mtu: &'static str) {
    let rack = TestRack::up(name, &RackOptions::new(switch, mtu));
    for client in [1, 2] {
        let endpoint = Endpoint::join(&rack, client);
        for server in [1, 2] {
            sizes(&rack, &endpoint, server, client == server);
        }
        await_used(&mut endpoint.client(&rack, 9), &endpoint.memory_nodes(), 0);
    }
    assert_eq!(rack.fragment_count(), 0, "nothing is fragmented");
    let ports = rack.switch_ports().ports;
    assert!(ports.iter().all(|port| port.tx.unwrap_or_default().packets > 0), "{ports:?}");
}

#[test]
fn at_mtu_9000_on_the_ebpf_switch() {
    run("size-e9000", DataPlane::Ebpf, "9000");
}

#[test]
fn at_mtu_1500_on_the_ebpf_switch() {
    run("size-e1500", DataPlane::Ebpf, "1500");
}

#[test]
fn at_mtu_1280_on_the_ebpf_switch() {
    run("size-e1280", DataPlane::Ebpf, "1280");
}

#[test]
fn at_mixed_mtus_on_the_ebpf_switch() {
    run("size-emixed", DataPlane::Ebpf, "9000,s2=1500,c2=1280");
}

#[test]
fn at_mtu_9000_on_the_soft_switch() {
    run("size-s9000", DataPlane::Soft, "9000");
}

#[test]
fn at_mixed_mtus_on_the_soft_switch() {
    run("size-smixed", DataPlane::Soft, "9000,s1=1280,c2=1500");
}
