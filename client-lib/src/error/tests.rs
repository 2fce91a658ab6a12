use std::collections::BTreeSet;

use bluebridge_protocol::requester::Failure;
use bluebridge_wire::{
    ArenaGeneration, LeaseEnd, Location, NodeId, Pointer, PointerError, Region, Space, Status, Tag,
};

use super::{Error, Fault, cause};

const NODE: NodeId = NodeId(9);

fn pointer() -> Pointer {
    let location = Location::new(ArenaGeneration::default(), 0x1010).expect("48 bits");
    Pointer { space: Space(1), node: NODE, tag: Tag(3), location }
}

fn all() -> Vec<Error> {
    let mut errors = vec![
        Error::Busy { pointer: pointer(), owner: NODE, remaining_ms: 4 },
        Error::Carrier { cause: cause("gone") },
        Error::Length,
        Error::NoMemoryNode,
        Error::OutcomeUnknown { node: NODE, pointer: None, responding: true },
        Error::TimedOut { node: NODE },
        Error::TooManyHops { node: NODE },
        Error::TooManyServers,
        Error::Unreachable { node: NODE },
        Error::Violation { node: NODE },
        Error::WrongNode { node: NODE },
        Error::WrongSpace,
        Error::LeaseLost { pointer: pointer(), how: LeaseEnd::LeasedAgain, owner: Some(NODE) },
        Error::PartlyCommitted {
            pointer: pointer(),
            committed_bytes: 7,
            cause: Box::new(Error::TimedOut { node: NODE }),
        },
        Error::SharedPage { pointer: pointer() },
        Error::TooManyLeases,
        Error::Pointer(PointerError::OutOfRegion),
        Error::TooManyOperations,
        Error::PastEnd { pointer: pointer() },
        Error::Expelled { reason: "another came".into(), outcome_unknown: true },
        Error::Drained { node: NODE },
    ];
    errors.extend(Status::ALL.iter().map(|&status| Error::Refused {
        status,
        node: NODE,
        pointer: Some(pointer()),
    }));
    errors
}

#[test]
fn every_error_has_a_code_and_a_text_of_its_own() {
    let errors = all();
    let codes: BTreeSet<_> = errors.iter().map(Error::code).collect();
    let texts: BTreeSet<_> = errors.iter().map(Error::to_string).collect();
    assert_eq!(codes.len(), errors.len());
    assert_eq!(texts.len(), errors.len());
    assert!(!codes.contains(&0), "0 is success");
}

#[test]
fn texts_are_single_lines_without_runs_of_spaces() {
    for error in all() {
        let text = error.to_string();
        let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(text, words);
    }
}

#[test]
fn a_node_that_the_switch_chose_has_no_number() {
    for error in [
        Error::OutcomeUnknown { node: NodeId::ANY, pointer: None, responding: false },
        Error::TimedOut { node: NodeId::ANY },
        Error::Unreachable { node: NodeId::ANY },
    ] {
        let text = error.to_string();
        assert!(text.starts_with("the memory node that the switch chose"), "{text}");
    }
}

#[test]
fn a_pointer_can_be_copied_out_of_the_text() {
    let location = Location::new(ArenaGeneration::default(), 0).expect("48 bits");
    let pointer = Pointer { location, ..pointer() };
    assert!(pointer.to_string().ends_with("::"));
    for error in [
        Error::Busy { pointer, owner: NODE, remaining_ms: 4 },
        Error::Refused { status: Status::StaleTag, node: NODE, pointer: Some(pointer) },
    ] {
        let text = error.to_string();
        let at = text.find(&pointer.to_string()).expect("it is named");
        let behind = text[at + pointer.to_string().len()..].chars().next();
        assert!(matches!(behind, Some(' ' | ')')), "{text}");
    }
}

#[test]
fn a_full_server_is_not_said_to_need_freed_memory_alone() {
    let refused = |status| Error::Refused { status, node: NODE, pointer: None }.to_string();
    // Freeing helps neither with an allocation that is larger than a shard nor with retired pages.
    let full = refused(Status::OutOfMemory);
    assert!(full.contains("less at once or on another node") && full.contains("retired"), "{full}");
    let full = refused(Status::QuotaExceeded);
    assert!(full.contains("only the latter helps if the space's pages are retired"), "{full}");
}

#[test]
fn a_drained_server_is_not_said_to_be_full() {
    let error = Error::of_failure(Failure::Drained { node: NODE }, None, None);
    assert!(error.is_of_full_server(), "another server is tried");
    let text = error.to_string();
    let expected =
        "node 9 is drained by an operator and allocates nothing; allocate on another node";
    assert_eq!((text.as_str(), error.fault()), (expected, Fault::Server));
}

#[test]
fn the_fault_is_named() {
    let refused = |status| Error::Refused { status, node: NODE, pointer: None }.fault();
    assert_eq!(refused(Status::StaleTag), Fault::You);
    assert_eq!(refused(Status::StaleGeneration), Fault::Server, "it lost the contents");
    assert_eq!(refused(Status::OutOfMemory), Fault::Server);
    assert_eq!(refused(Status::NoAuthority), Fault::Controller);
    assert_eq!(refused(Status::WrongNode), Fault::Network);
    assert_eq!(Error::Unreachable { node: NODE }.fault(), Fault::Network);
    assert_eq!(Error::TimedOut { node: NODE }.fault(), Fault::Server);
    assert!(
        Error::OutcomeUnknown { node: NODE, pointer: None, responding: true }.is_outcome_unknown()
    );
}

#[test]
fn what_another_library_reported_is_kept() {
    let failed = std::io::Error::from(std::io::ErrorKind::NetworkDown);
    let error = Error::Carrier { cause: std::sync::Arc::new(failed) };
    let source = std::error::Error::source(&error).expect("the carrier's own error");
    let source = source.downcast_ref::<std::sync::Arc<dyn std::error::Error + Send + Sync>>();
    let io = source.and_then(|cause| cause.downcast_ref::<std::io::Error>());
    assert_eq!(io.map(std::io::Error::kind), Some(std::io::ErrorKind::NetworkDown));
}

#[test]
fn a_failed_delivery_and_its_remedy_are_said_once() {
    use bluebridge_transport::{ReceiveError, TransmitError};
    use std::{io, net::Ipv6Addr, sync::Arc};
    let destination = Ipv6Addr::LOCALHOST;
    let refused = || io::Error::from(io::ErrorKind::NetworkUnreachable);
    let causes: [super::Cause; 5] = [
        Arc::new(TransmitError::Unreachable { destination, error: refused() }),
        Arc::new(TransmitError::TooLarge { payload_bytes: 9000, limit_bytes: Some(1400) }),
        Arc::new(TransmitError::Refused {
            source_address: destination,
            destination,
            error: refused(),
        }),
        Arc::new(TransmitError::Socket(refused())),
        Arc::new(ReceiveError::Socket(refused())),
    ];
    for cause in causes {
        let text = Error::Carrier { cause }.to_string();
        assert_eq!(text.matches("; ").count(), 1, "one remedy: {text}");
        assert!(text.matches("the carrier failed").count() <= 1, "{text}");
    }
}

#[test]
fn pointer_arithmetic_and_calls_share_an_error() {
    fn beyond(region: Region) -> Result<Pointer, Error> {
        Ok(region.at(4096)?)
    }
    let region = Region::new(pointer(), 4096).expect("inside of the arena");
    let error = beyond(region).expect_err("it is one byte too far");
    assert!(matches!(error, Error::Pointer(PointerError::OutOfRegion)), "{error}");
    assert_eq!(error.fault(), Fault::You);
}

#[test]
fn a_refusal_carries_pointer_and_node() {
    let failure = Failure::Refused { status: Status::StaleTag, node: NODE };
    let error = Error::of_failure(failure, Some(pointer()), None);
    let text = error.to_string();
    assert!(text.contains("fdbb:1:9:3::1010") && text.contains("node 9"), "{text}");
    let pages = [Status::Ok, Status::Ok, Status::StaleGeneration];
    let Error::Refused { status, pointer: Some(at), .. } = Error::of_pages(&pages, Some(pointer()))
    else {
        panic!("a page was refused");
    };
    assert_eq!((status, at.location.offset()), (Status::StaleGeneration, 0x3000));
}
