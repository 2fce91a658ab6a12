use bluebridge_wire::{ArenaGeneration, NodeId};
use proptest::prelude::*;

use super::*;
use crate::registration::Token;

fn node(id: u16, live: bool, free_pages: u64) -> MemoryNode {
    MemoryNode {
        node: NodeId(id),
        name: format!("m{id}"),
        live,
        generation: ArenaGeneration::new(0).unwrap(),
        shard_count: 1,
        capacity_pages: 1000,
        free_pages,
    }
}

#[test]
fn names_are_plain() {
    assert!(is_name("host-1.rack_2") && is_name(&"n".repeat(64)));
    for bad in ["", "a b", "a/b", "ä", "a\n", &"n".repeat(65)] {
        assert!(!is_name(bad), "{bad}");
    }
}

#[test]
fn placement_prefers_the_freer_of_two_and_forgets_no_node() {
    let nodes = [node(1, true, 10), node(2, true, 1000), node(3, true, 20)];
    let mut drawn = [0_u32; 4];
    for first in 0..3_u64 {
        for second in 0..2_u64 {
            drawn[usize::from(place(&nodes, first << 32 | second).unwrap().node.0)] += 1;
        }
    }
    assert_eq!(drawn, [0, 0, 4, 2], "of every pair the freer");
    assert_eq!(place(&[], 7), None);
    assert_eq!(place(&[node(1, false, 9), node(2, true, 0)], 7), None);
    assert_eq!(place(&[node(1, true, 9)], u64::MAX).unwrap().node, NodeId(1));
}

proptest! {
    #[test]
    fn placement_only_chooses_nodes_that_can_serve(
        nodes in prop::collection::vec((1..9_u16, any::<bool>(), 0..3_u64), 0..9),
        random in any::<u64>(),
    ) {
        let nodes: Vec<MemoryNode> =
            nodes.into_iter().map(|(id, live, free)| node(id, live, free)).collect();
        match place(&nodes, random) {
            Some(node) => prop_assert!(node.live && node.free_pages > 0),
            None => prop_assert!(nodes.iter().all(|node| !node.live || node.free_pages == 0)),
        }
    }
}

fn answer() -> proto::JoinResponse {
    proto::JoinResponse {
        node: 7,
        space: 1,
        incarnation: 2,
        arena_generation: 3,
        range_epoch: 4,
        piece_bytes: 4096,
        heartbeat_interval_ms: 1000,
        token: vec![5; 16],
        installed: true,
        memory_nodes: None,
        notices_wanted: true,
        last_arena_generation: 9,
    }
}

#[test]
fn answers_of_another_version_are_refused() {
    let good = Assignment::parse(&answer()).unwrap();
    assert_eq!((good.node, good.incarnation, good.token), (NodeId(7), 2, Token([5; 16])));
    assert_eq!((good.generation.number(), good.last_generation.number()), (3, 9));
    // A controller of before reserves one generation and says nothing of more.
    let before = proto::JoinResponse { last_arena_generation: 0, ..answer() };
    assert_eq!(Assignment::parse(&before).unwrap().last_generation.number(), 3);
    let bad = [
        proto::JoinResponse { node: 0, ..answer() },
        proto::JoinResponse { node: 0xffff, ..answer() },
        proto::JoinResponse { node: 0x1_0007, ..answer() },
        proto::JoinResponse { space: 0x1_0000, ..answer() },
        proto::JoinResponse { incarnation: 0, ..answer() },
        proto::JoinResponse { arena_generation: 0x8000, ..answer() },
        proto::JoinResponse { last_arena_generation: 0x8000, ..answer() },
        proto::JoinResponse { piece_bytes: 0, ..answer() },
        proto::JoinResponse { heartbeat_interval_ms: 0, ..answer() },
        proto::JoinResponse { token: vec![5; 15], ..answer() },
    ];
    for answer in bad {
        let refused = Assignment::parse(&answer);
        assert!(matches!(refused, Err(MembershipError::BadAnswer(_))), "{answer:?}");
    }
}

#[test]
fn tokens_are_not_printed() {
    assert_eq!(format!("{:?}", Token([0xab; 16])), "Token(..)");
}

#[test]
fn a_controller_that_is_away_expels_nobody() {
    use crate::error::MembershipError;
    let (uri, reason) = (String::from("http://[::1]:1"), String::from("gone"));
    for error in [
        MembershipError::Closed { uri: uri.clone(), reason: reason.clone() },
        MembershipError::Unreachable { uri: uri.clone(), reason: reason.clone() },
        MembershipError::Untrusted { uri, reason: reason.clone() },
        MembershipError::Controller(reason.clone()),
    ] {
        assert!(error.is_of_the_controller(), "{error}");
    }
    assert!(!MembershipError::Expelled(reason).is_of_the_controller());
}
