//! A client that creates and deletes without end does not exhaust a server, whatever is restarted
//! meanwhile, and no earlier pointer is ever accepted again.

use std::time::{Duration, Instant};

use bluebridge::{Error, Placement, Region, Status};
use bluebridge_northbound::proto;
use bluebridge_rack::spec::DataPlane;
use bluebridge_tests::rack::endpoint::{Endpoint, UdpClient, await_used};
use bluebridge_tests::rack::{RackOptions, TestRack};

/// Pages of the server, as [`MEMORY`] says: few, so that their colours are used up soon.
const PAGES: u64 = 64;
const MEMORY: &str = "256K";

const PAGE_BYTES: u64 = 4096;

/// Tags of a generation.
const TAGS: u64 = 255;

/// Creates and deletes `count` times; returns every hundredth region.
fn churn(client: &mut UdpClient, place: Placement, pages: u64, count: u64) -> Vec<Region> {
    let mut old = Vec::new();
    for number in 0..count {
        let region = client
            .create_at(pages * PAGE_BYTES, place)
            .unwrap_or_else(|error| panic!("CREATE {number} of {pages} pages: {error}"));
        client.delete(region).unwrap_or_else(|error| panic!("DELETE {number}: {error}"));
        if number % 100 == 0 {
            old.push(region);
        }
    }
    old
}

fn refuse(client: &mut UdpClient, old: &[Region], right: &[Status]) {
    let mut byte = [0];
    for region in old {
        let results = [
            client.read(region.base(), &mut byte),
            client.write(region.base(), b"x"),
            client.delete(*region).map(drop),
        ];
        for result in results {
            let error = result.expect_err("what it pointed to is gone");
            let is_right =
                matches!(&error, Error::Refused { status, .. } if right.contains(status));
            assert!(is_right, "{region:?}: {error:?}");
        }
    }
}

/// The generations that are reserved for the server, as the controller has stored them.
fn generations(rack: &TestRack) -> (u32, u32) {
    let status = rack.controller_status();
    let is_server = |node: &&proto::Node| node.name == "s1";
    let node = status.nodes.iter().find(is_server).expect("it joined");
    (node.arena_generation, node.last_arena_generation)
}

/// Waits until the server has the generations that it requested: it requests more at once when it needs
/// them, and with every heartbeat, so nothing is missing when several heartbeats reserve no more.
fn await_reserved(rack: &TestRack) {
    let deadline = Instant::now() + Duration::from_secs(30);
    let mut reserved = generations(rack).1;
    loop {
        std::thread::sleep(Duration::from_secs(3));
        let now = generations(rack).1;
        if now == reserved {
            return;
        }
        assert!(Instant::now() < deadline, "the server requests generations without end");
        reserved = now;
    }
}

#[test]
fn one_client_without_a_quota_does_not_empty_a_server() {
    let freed = [Status::StaleTag, Status::NotAllocated];
    let options = RackOptions {
        servers: 1,
        clients: 1,
        memory: MEMORY,
        ..RackOptions::new(DataPlane::Ebpf, "9000")
    };
    let mut rack = TestRack::up("colours", &options);
    let endpoint = Endpoint::join(&rack, 1);
    let server = endpoint.server(1);
    let place = Placement::Node(server);
    let mut client = endpoint.client(&rack, 1);
    let (first, last) = generations(&rack);

    // Single pages: as often as all pages together have colours in a generation. All pages at once: twice as
    // often as one page has colours.
    let kept = client.create_at(PAGE_BYTES, place).expect("there is room");
    client.write(kept.base(), b"kept").expect("it is ours");
    let began = Instant::now();
    let mut old = churn(&mut client, place, 1, TAGS * PAGES);
    old.extend(churn(&mut client, place, PAGES - 1, 2 * TAGS));
    println!("{} CREATE and DELETE in {:?}", TAGS * (PAGES + 2), began.elapsed());
    let (same, now) = generations(&rack);
    assert!(same == first && now > last, "{first} to {now}, {last} before");
    refuse(&mut client, &old, &freed);
    let mut bytes = [0; 4];
    client.read(kept.base(), &mut bytes).expect("it is ours");
    assert_eq!(&bytes, b"kept");
    let usage = client.stat(server).expect("it answers");
    assert_eq!(
        (usage.used_pages, usage.quota_pages),
        (1, PAGES),
        "its only space may use all of it"
    );

    // Without a controller it continues with what it has. Its last request may still be in flight.
    await_reserved(&rack);
    rack.kill("controller");
    old.extend(churn(&mut client, place, 1, TAGS));
    rack.start("controller");
    rack.await_heartbeats(2);
    assert!(generations(&rack).1 >= now, "what was reserved is stored");
    old.extend(churn(&mut client, place, PAGES - 1, TAGS));
    let (_, now) = generations(&rack);

    // The next life begins with a later generation, and refuses every earlier pointer.
    rack.kill("memserver-s1");
    rack.start("memserver-s1");
    rack.await_heartbeats(2);
    let (next, _) = generations(&rack);
    assert!(next > now, "{next} is reserved for another life, which had up to {now}");
    old.push(kept);
    let lost = [Status::StaleGeneration];
    refuse(&mut client, &old, &lost);
    let young = churn(&mut client, place, 1, TAGS * PAGES);
    refuse(&mut client, &young, &freed);
    refuse(&mut client, &old, &lost);
    let all = client.create_at(PAGES * PAGE_BYTES, place).expect("no page was lost");
    client.delete(all).expect("it is ours");
    await_used(&mut client, &endpoint.memory_nodes(), 0);
}

#[test]
fn a_server_that_runs_out_of_colours_waits_for_its_controller() {
    let options = RackOptions {
        servers: 1,
        clients: 1,
        memory: MEMORY,
        ..RackOptions::new(DataPlane::Soft, "9000")
    };
    let mut rack = TestRack::up("colours-away", &options);
    let endpoint = Endpoint::join(&rack, 1);
    let server = endpoint.server(1);
    let place = Placement::Node(server);
    let mut client = endpoint.client(&rack, 1);
    rack.kill("controller");
    // The client first has to wait, and gets an error when no generations are reserved.
    let (count, error) = (0..)
        .find_map(|count| {
            let region = match client.create_at(PAGES * PAGE_BYTES, place) {
                Ok(region) => region,
                Err(error) => return Some((count, error)),
            };
            client.delete(region).expect("it is ours");
            None
        })
        .expect("it ends");
    let is_told = matches!(error, Error::Refused { status: Status::OutOfMemory, .. });
    assert!(is_told, "after {count}: {error:?}");
    let usage = client.stat(server).expect("it answers");
    assert_eq!((usage.retired_pages, usage.free_pages), (PAGES, 0));
    rack.start("controller");
    let began = Instant::now();
    while client.stat(server).expect("it answers").retired_pages > 0 {
        assert!(began.elapsed() < Duration::from_secs(20), "none are reserved");
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(churn(&mut client, place, PAGES, 3 * TAGS));
    assert_eq!(client.stat(server).expect("it answers").retired_pages, 0);
}
