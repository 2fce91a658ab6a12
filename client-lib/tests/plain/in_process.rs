//! The client against real memory nodes, over the carrier between threads.

use std::time::Duration;

use bluebridge::{
    Client, CreateRequest, DeleteRequest, EndpointConfig, Error, Event, Fault, MemoryNode, NodeId,
    Placement, Pointer, ReadRequest, Status, WriteRequest,
};
use bluebridge_testkit::{until, within};
use bluebridge_transport::memory::MemoryTransport;

use crate::rack::{LocalRack, SPACE};

const NODES: [NodeId; 3] = [NodeId(1), NodeId(2), NodeId(3)];

fn client_with(
    rack: &LocalRack,
    node: u16,
    change: impl FnOnce(&mut EndpointConfig),
) -> Client<MemoryTransport> {
    let mut config = EndpointConfig::new(SPACE, NodeId(node), 1);
    config.memory_nodes = NODES.map(|node| MemoryNode { node, shard_count: 1 }).to_vec();
    config.piece_bytes = Some(1400);
    change(&mut config);
    Client::open(config, rack.attach(NodeId(node)))
}

fn client(rack: &LocalRack) -> Client<MemoryTransport> {
    client_with(rack, 1000, |_| {})
}

fn pattern(length: usize, seed: usize) -> Vec<u8> {
    (0..length).map(|at| u8::try_from((at * 31 + at / 251 + seed) % 256).expect("a byte")).collect()
}

#[test]
fn ranges_of_any_length_and_alignment_keep_their_bytes() {
    let rack = LocalRack::start(&NODES, 96 << 20);
    let mut client = client(&rack);
    for (offset, length) in [
        (0, 1),
        (0, 4096),
        (4095, 2),
        (1, 4096),
        (32_767, 2),
        (100, 32_768),
        (5, 100_000),
        (0, 1 << 20),
        (4097, 3_333_333),
    ] {
        let region = client.create(offset + length as u64).expect("there is room");
        let pointer = region.at(offset).expect("inside");
        let data = pattern(length, length);
        client.write(pointer, &data).expect("it is ours");
        let mut back = vec![0; length];
        client.read(pointer, &mut back).expect("it is ours");
        assert!(back == data, "{length} bytes at {offset}");
        let (from, to) = (length / 3, length / 3 * 2);
        let middle = region.at(offset + from as u64).expect("inside");
        if to > from {
            client.zero(middle, (to - from) as u64).expect("it is ours");
            client.read(pointer, &mut back).expect("it is ours");
            assert!(back[from..to].iter().all(|byte| *byte == 0));
            assert!(back[..from] == data[..from] && back[to..] == data[to..]);
        }
        client.delete(region).expect("it is ours");
    }
    let usage = client.stat(NodeId(1)).expect("it responds");
    assert_eq!(usage.used_pages, 0, "nothing is left");
    client.close().expect("the carrier works");
}

#[test]
fn sixty_four_mebibytes_come_and_go() {
    let rack = LocalRack::start(&NODES[..1], 80 << 20);
    let mut client = client_with(&rack, 1000, |config| {
        config.piece_bytes = Some(4096);
        config.placement = Placement::Node(NODES[0]);
        config.deadline = Duration::from_secs(60);
    });
    let data = pattern(64 << 20, 5);
    let region = client.alloc_write(&data).expect("there is room");
    let mut back = vec![0; data.len()];
    client.read(region.base(), &mut back).expect("it is ours");
    assert!(back == data);
    client.delete(region).expect("it is ours");
}

#[test]
fn a_node_that_is_gone_does_not_keep_a_placement_waiting() {
    let rack = LocalRack::start(&NODES[..1], 1 << 20);
    let mut client = client_with(&rack, 1000, |config| {
        config.memory_nodes.truncate(2);
        config.deadline = Duration::from_secs(60);
    });
    let begun = std::time::Instant::now();
    let region = client.create(1).expect("one of the two is there");
    assert_eq!(region.base().node, NODES[0]);
    assert!(begun.elapsed() < Duration::from_secs(10), "it waited for the other");
}

/// Adjacent allocations on one node, followed by free pages.
#[test]
fn a_range_past_the_end_of_its_allocation_has_an_error_of_its_own() {
    let rack = LocalRack::start(&NODES[..1], 1 << 20);
    let mut client = client(&rack);
    let create = |client: &mut Client<_>, bytes| {
        client.create_at(bytes, Placement::Node(NODES[0])).expect("there is room")
    };
    let line = 32_768;
    let regions = [1, 2, 21, 8].map(|pages| create(&mut client, pages * 4096));
    let ends = regions.map(|region| region.base().location.offset() + region.length_bytes());
    assert_eq!(ends.map(|end| end % line == 0), [false, false, true, true], "at lines' ends too");
    for (at, region) in regions.iter().enumerate() {
        let length = region.length_bytes();
        let end = region.base().checked_add(length).expect("inside of the arena");
        // From a byte in the first page, in the last page, and one line before the end.
        let starts = [0, 5, length - 1, length.saturating_sub(line)];
        for (start, beyond) in starts.into_iter().flat_map(|at| [(at, 1), (at, 3 * line)]) {
            let pointer = region.at(start).expect("inside");
            let bytes = usize::try_from(length - start + beyond).expect("small");
            for (what, result) in [
                ("read", client.read(pointer, &mut vec![0; bytes])),
                ("read_stale", client.read_stale(pointer, &mut vec![0; bytes]).map(drop)),
                ("write", client.write(pointer, &vec![0; bytes])),
                ("zero", client.zero(pointer, bytes as u64)),
            ] {
                let error = result.expect_err("it goes past the end");
                let is_past_end = matches!(error, Error::PastEnd { pointer } if pointer == end);
                assert!(is_past_end, "{what} of {bytes} bytes at {start} of region {at}: {error}");
                assert_eq!(error.fault(), Fault::You);
            }
        }
        // A range that begins past the end may also have been freed.
        let error = client.read(end, &mut [0; 8]).expect_err("it is another allocation's, or free");
        assert!(matches!(error, Error::Refused { pointer: Some(at), .. } if at == end), "{error}");
        assert!(error.to_string().contains("past the end"), "{error}");
    }
    for region in regions {
        client.delete(region).expect("it is ours");
        let error = client.read(region.base(), &mut [0; 8192]).expect_err("it is gone");
        let freed =
            matches!(error, Error::Refused { pointer: Some(at), .. } if at == region.base());
        assert!(freed, "{error}");
    }
}

#[test]
fn many_creations_end_though_one_names_an_impossible_node() {
    within("the creations end", create_on_impossible_nodes);
}

fn create_on_impossible_nodes() {
    let rack = LocalRack::start(&NODES, 1 << 20);
    let mut client = client(&rack);
    for node in [NodeId::ANY, NodeId::ALL] {
        let mut creates =
            [NODES[0], node, NODES[1]].map(|node| CreateRequest::new(4096, Placement::Node(node)));
        client.create_many(&mut creates).expect("the carrier works");
        for (create, on) in [(&creates[0], NODES[0]), (&creates[2], NODES[1])] {
            assert_eq!(create.result.as_ref().expect("there is room").base().node, on);
        }
        let error = creates[1].result.as_ref().expect_err("no memory is there");
        assert!(matches!(error, Error::WrongNode { node: wrong } if *wrong == node), "{error}");
        let error = client.create_at(4096, Placement::Node(node)).expect_err("no memory is there");
        assert!(matches!(error, Error::WrongNode { node: wrong } if wrong == node), "{error}");
    }
}

#[test]
fn many_ranges_on_many_nodes_end_one_by_one() {
    let rack = LocalRack::start(&NODES, 16 << 20);
    let mut client = client(&rack);
    let pages: Vec<_> = (0..300)
        .map(|at| client.create_at(4096, Placement::Node(NODES[at % 3])).expect("there is room"))
        .collect();
    assert!(pages.iter().enumerate().all(|(at, page)| page.base().node == NODES[at % 3]));
    let data: Vec<_> = (0..pages.len()).map(|at| pattern(4096, at)).collect();
    let mut writes: Vec<_> =
        pages.iter().zip(&data).map(|(page, data)| WriteRequest::new(page.base(), data)).collect();
    client.write_many(&mut writes).expect("the carrier works");
    assert!(writes.iter().all(|write| write.result.is_ok()));
    client.delete(pages[7]).expect("it is ours");
    let mut buffers = vec![vec![0; 4096]; pages.len()];
    let mut reads: Vec<_> = pages
        .iter()
        .zip(&mut buffers)
        .map(|(page, buffer)| ReadRequest::new(page.base(), buffer))
        .collect();
    client.read_many(&mut reads).expect("the carrier works");
    for (at, read) in reads.iter().enumerate() {
        match &read.result {
            Ok(()) => assert!(at != 7 && *read.buffer == data[at], "{at}"),
            Err(Error::Refused { status, node, pointer }) => {
                assert_eq!((at, *node, *pointer), (7, NODES[1], Some(pages[7].base())));
                assert!(matches!(status, Status::NotAllocated | Status::StaleTag), "{status}");
            }
            Err(error) => panic!("{at}: {error}"),
        }
    }
}

#[test]
fn allocations_go_to_the_chosen_node() {
    let rack = LocalRack::start(&NODES, 4 << 20);
    let mut client = client(&rack);
    let anywhere = client.create_at(1, Placement::Anywhere).expect("there is room");
    assert_eq!(anywhere.base().node, NODES[0], "where the switch leads");
    assert_eq!(anywhere.length_bytes(), 4096);
    let written = client.alloc_write_at(&pattern(9000, 3), Placement::Anywhere);
    let written = written.expect("there is room");
    let mut back = vec![1; 12_288];
    client.read(written.base(), &mut back).expect("it is ours");
    assert_eq!(back[..9000], pattern(9000, 3));
    assert!(back[9000..].iter().all(|byte| *byte == 0), "the rest is zero");
    assert_eq!(client.counters().of(Event::Confirm), 2);

    // The fullest of three nodes is never the one of two with more free memory.
    client.create_at(3 << 20, Placement::Node(NODES[1])).expect("there is room");
    for _ in 0..30 {
        let region = client.create_at(4096, Placement::TwoChoices).expect("there is room");
        assert_ne!(region.base().node, NODES[1]);
    }
    let nowhere = client.create_at(64 << 20, Placement::TwoChoices).expect_err("it is too large");
    assert!(matches!(nowhere, Error::Refused { status: Status::OutOfMemory, .. }), "{nowhere}");
    assert_eq!(nowhere.fault(), Fault::Server);
    let mut lost = client_with(&rack, 1001, |config| config.memory_nodes.clear());
    let error = lost.create_at(1, Placement::TwoChoices).expect_err("no node is known");
    assert!(matches!(error, Error::NoMemoryNode), "{error}");
}

#[test]
fn atomics_of_two_clients_count_every_add() {
    let rack = LocalRack::start(&NODES[..1], 1 << 20);
    let mut first = client_with(&rack, 1000, |config| config.memory_nodes.truncate(1));
    let mut second = client_with(&rack, 1001, |_| {});
    let region = first.create(4096).expect("there is room");
    let counter = region.at(64).expect("inside");
    let adder = std::thread::spawn(move || {
        for _ in 0..1000 {
            second.fetch_add(counter, 1).expect("it is allocated");
        }
    });
    for _ in 0..1000 {
        first.fetch_add(counter, 1).expect("it is allocated");
    }
    adder.join().expect("it counts");
    assert_eq!(first.compare_swap(counter, 1, 7).expect("it is allocated"), 2000);
    assert_eq!(first.compare_swap(counter, 2000, 7).expect("it is allocated"), 2000);
    let mut bytes = [0; 8];
    first.read(counter, &mut bytes).expect("it is allocated");
    assert_eq!(u64::from_le_bytes(bytes), 7);
    assert!(!first.ping(NODES[0]).expect("it lives").is_zero());
}

#[test]
fn a_wrong_call_gets_an_error_and_changes_nothing() {
    let rack = LocalRack::start(&NODES, 1 << 20);
    let mut client = client(&rack);
    let region = client.alloc_write(&pattern(4096, 1)).expect("there is room");
    let base = region.base();
    let refused = |error: Error| match error {
        Error::Refused { status, .. } => status,
        error => panic!("{error}"),
    };
    let mut byte = [0];
    assert!(matches!(client.read(base, &mut []), Err(Error::Length)));
    assert!(matches!(client.create(0), Err(Error::Length)));
    assert!(matches!(client.alloc_write(&[]), Err(Error::Length)));
    let unaligned = base.checked_add(4).expect("inside");
    assert_eq!(refused(client.fetch_add(unaligned, 1).expect_err("4")), Status::Unaligned);
    let far = base.checked_add(1 << 30).expect("inside of the arena's range");
    assert_eq!(refused(client.read(far, &mut byte).expect_err("far")), Status::OutOfRange);
    let foreign = Pointer { space: bluebridge::Space(2), ..base };
    assert!(matches!(client.read(foreign, &mut byte), Err(Error::WrongSpace)));
    let nowhere = Pointer { node: NodeId(0xffff), ..base };
    assert!(matches!(client.read(nowhere, &mut byte), Err(Error::WrongNode { .. })));
    client.set_deadline(Duration::from_millis(300));
    let silent = Pointer { node: NodeId(77), ..base };
    let error = client.write(silent, &byte).expect_err("there is no such node");
    assert!(matches!(error, Error::Unreachable { node: NodeId(77) }), "{error}");
    assert_eq!(error.fault(), Fault::Network);
    client.set_deadline(Duration::from_secs(5));

    let mut back = vec![0; 4096];
    client.read(base, &mut back).expect("it is ours");
    assert!(back == pattern(4096, 1));
    assert_eq!(client.delete_pointer(base).expect("it is ours"), 1);
    for error in [
        client.delete(region).expect_err("twice"),
        client.read(base, &mut byte).expect_err("after"),
        client.write(base, &byte).expect_err("after"),
    ] {
        let status = refused(error.clone());
        assert!(matches!(status, Status::NotAllocated | Status::StaleTag), "{error}");
        assert_eq!(error.fault(), Fault::You);
    }
}

#[test]
fn a_read_of_a_page_waits_asleep() {
    let rack = LocalRack::start(&NODES[..1], 1 << 20);
    let mut client = client_with(&rack, 1000, |config| {
        config.spin = Some(Duration::ZERO);
        config.memory_nodes.truncate(1);
    });
    client.set_deadline(Duration::from_millis(400));
    let silent = Pointer { node: NodeId(77), ..client.create(1).expect("there is room").base() };
    let cpu = || {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).expect("nanos"))
    };
    let before = cpu();
    client.read(silent, &mut [0]).expect_err("there is no such node");
    assert!(cpu() - before < Duration::from_millis(40), "it slept for most of 400 ms");
}

#[test]
fn many_allocations_on_many_nodes_are_made_and_freed_one_by_one() {
    within("the calls end", create_and_free_many);
}

fn create_and_free_many() {
    let rack = LocalRack::start(&NODES, 4 << 20);
    let mut client = client(&rack);
    let placements = [Placement::Anywhere, Placement::Node(NodeId(2)), Placement::TwoChoices];
    let data: Vec<_> = (0..300).map(|seed| pattern(seed * 31 % 9000, seed)).collect();
    let mut creations: Vec<_> = data
        .iter()
        .enumerate()
        .map(|(at, data)| match placements[at % 3] {
            placement if at % 2 == 0 => CreateRequest::new(1 + at as u64 * 20, placement),
            placement => CreateRequest::holding(data, placement),
        })
        .collect();
    creations.push(CreateRequest::new(0, Placement::Anywhere));
    creations.push(CreateRequest::new(1 << 40, Placement::Node(NodeId(1))));
    client.create_many(&mut creations).expect("the carrier works");
    let mut deletions = Vec::new();
    for (at, creation) in creations.iter().enumerate() {
        let is_empty = at < data.len() && at % 2 == 1 && data[at].is_empty();
        if is_empty || at == data.len() {
            assert!(matches!(creation.result, Err(Error::Length)), "{at}");
            continue;
        }
        if at > data.len() {
            let refused = matches!(creation.result, Err(Error::Refused { .. }));
            assert!(refused, "{:?}", creation.result);
            continue;
        }
        let region = creation.result.clone().expect("there is room");
        if at % 2 == 1 {
            let mut back = vec![0; data[at].len()];
            client.read(region.base(), &mut back).expect("it is ours");
            assert!(back == data[at], "{at}");
        }
        if at % 3 == 1 {
            assert_eq!(region.base().node, NodeId(2));
        }
        deletions.push(DeleteRequest::new(region));
    }
    let again = deletions.first().map(|first| DeleteRequest::new(first.region));
    client.delete_many(&mut deletions).expect("the carrier works");
    assert!(deletions.iter().all(|deletion| deletion.result.is_ok()), "each is freed once");
    let mut again: Vec<_> = again.into_iter().collect();
    client.delete_many(&mut again).expect("the carrier works");
    assert!(again.iter().all(|deletion| deletion.result.is_err()), "and not twice");
    // A CREATE that was sent again may have reached a second node: it frees what nobody confirmed.
    for node in NODES {
        until("all pages are free", || client.stat(node).expect("it responds").used_pages == 0);
    }
}
