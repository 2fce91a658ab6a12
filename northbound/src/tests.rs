use bluebridge_wire::NodeId;

use super::*;
use crate::registration::Token;

#[test]
fn names_are_plain() {
    assert!(is_name("host-1.rack_2") && is_name(&"n".repeat(64)));
    for bad in ["", "a b", "a/b", "ä", "a\n", &"n".repeat(65)] {
        assert!(!is_name(bad), "{bad}");
    }
}

fn response() -> proto::JoinResponse {
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
        earlier: Vec::new(),
    }
}

#[test]
fn responses_of_another_version_are_refused() {
    let good = Assignment::parse(&response()).unwrap();
    assert_eq!((good.node, good.incarnation, good.token), (NodeId(7), 2, Token([5; 16])));
    assert_eq!((good.generation.number(), good.last_generation.number()), (3, 9));
    // An earlier controller reserves one generation and does not report the last one.
    let before = proto::JoinResponse { last_arena_generation: 0, ..response() };
    assert_eq!(Assignment::parse(&before).unwrap().last_generation.number(), 3);
    let bad = [
        proto::JoinResponse { node: 0, ..response() },
        proto::JoinResponse { node: 0xffff, ..response() },
        proto::JoinResponse { node: 0x1_0007, ..response() },
        proto::JoinResponse { space: 0x1_0000, ..response() },
        proto::JoinResponse { incarnation: 0, ..response() },
        proto::JoinResponse { arena_generation: 0x8000, ..response() },
        proto::JoinResponse { last_arena_generation: 0x8000, ..response() },
        proto::JoinResponse { piece_bytes: 0, ..response() },
        proto::JoinResponse { heartbeat_interval_ms: 0, ..response() },
        proto::JoinResponse { token: vec![5; 15], ..response() },
    ];
    for response in bad {
        let refused = Assignment::parse(&response);
        assert!(matches!(refused, Err(MembershipError::BadResponse(_))), "{response:?}");
    }
}

#[test]
fn tokens_are_not_printed() {
    assert_eq!(format!("{:?}", Token([0xab; 16])), "Token(..)");
}

#[test]
fn an_unreachable_controller_expels_no_endpoint() {
    use crate::error::MembershipError;
    let (uri, reason) = (String::from("http://[::1]:1"), String::from("gone"));
    for error in [
        MembershipError::Closed { uri: uri.clone(), reason: reason.clone(), source: None },
        MembershipError::Unreachable { uri: uri.clone(), reason: reason.clone(), source: None },
        MembershipError::OpenFiles { uri: uri.clone(), reason: reason.clone(), source: None },
        MembershipError::Untrusted { uri, reason: reason.clone(), source: None },
        MembershipError::Controller(reason.clone()),
    ] {
        assert!(error.is_of_the_controller(), "{error}");
    }
    assert!(!MembershipError::Expelled(reason).is_of_the_controller());
}
