use tokio::sync::mpsc::{Receiver, channel};

use super::*;

type Inbox = Receiver<Result<v1::StreamMessageResponse, Status>>;

fn open(arbitration: &mut Arbitration) -> (StreamId, Inbox) {
    let (outbox, inbox) = channel(STREAM_QUEUE);
    (arbitration.open(outbox, oneshot::channel().0).unwrap(), inbox)
}

fn bid(election_id: Option<u64>) -> v1::MasterArbitrationUpdate {
    v1::MasterArbitrationUpdate {
        device_id: 1,
        election_id: election_id.map(|low| v1::Uint128 { high: 0, low }),
        ..v1::MasterArbitrationUpdate::default()
    }
}

fn role(name: &str, election_id: u64) -> v1::MasterArbitrationUpdate {
    let role = v1::Role { name: name.to_owned(), ..v1::Role::default() };
    v1::MasterArbitrationUpdate { role: Some(role), ..bid(Some(election_id)) }
}

/// All notifications that a client received: the highest election id and the code.
fn notifications(inbox: &mut Inbox) -> Vec<(Option<u64>, Code)> {
    let mut notifications = Vec::new();
    while let Ok(message) = inbox.try_recv() {
        let Some(Update::Arbitration(update)) = message.unwrap().update else {
            panic!("only arbitration was expected");
        };
        assert_eq!(update.device_id, 1);
        let code = Code::from(update.status.unwrap().code);
        notifications.push((update.election_id.map(|id| id.low), code));
    }
    notifications
}

fn may_write(arbitration: &Arbitration, role: &str, low: u64) -> Result<(), Code> {
    let id = v1::Uint128 { high: 0, low };
    arbitration.check_primary(1, role, Some(&id)).map_err(|refusal| refusal.code())
}

#[test]
fn highest_id_is_primary_and_all_clients_are_notified() {
    let mut arbitration = Arbitration::new(1);
    let (low, mut low_inbox) = open(&mut arbitration);
    let (high, mut high_inbox) = open(&mut arbitration);
    arbitration.arbitrate(low, &bid(Some(5))).unwrap();
    assert_eq!(notifications(&mut low_inbox), [(Some(5), Code::Ok)]);
    assert_eq!(may_write(&arbitration, "", 5), Ok(()));
    arbitration.arbitrate(high, &bid(Some(9))).unwrap();
    assert_eq!(notifications(&mut low_inbox), [(Some(9), Code::AlreadyExists)]);
    assert_eq!(notifications(&mut high_inbox), [(Some(9), Code::Ok)]);
    assert_eq!(may_write(&arbitration, "", 5), Err(Code::PermissionDenied));
    assert_eq!(may_write(&arbitration, "", 9), Ok(()));
}

#[test]
fn highest_id_ever_seen_must_be_exceeded() {
    let mut arbitration = Arbitration::new(1);
    let (first, _first_inbox) = open(&mut arbitration);
    let (second, mut second_inbox) = open(&mut arbitration);
    arbitration.arbitrate(first, &bid(Some(9))).unwrap();
    arbitration.arbitrate(second, &bid(Some(5))).unwrap();
    arbitration.close(first);
    let expected = [(Some(9), Code::AlreadyExists), (Some(9), Code::NotFound)];
    assert_eq!(notifications(&mut second_inbox), expected);
    assert_eq!(may_write(&arbitration, "", 5), Err(Code::PermissionDenied));
    assert_eq!(may_write(&arbitration, "", 9), Err(Code::PermissionDenied));
    arbitration.arbitrate(second, &bid(Some(8))).unwrap();
    assert_eq!(notifications(&mut second_inbox), [(Some(9), Code::NotFound)]);
    arbitration.arbitrate(second, &bid(Some(9))).unwrap();
    assert_eq!(notifications(&mut second_inbox), [(Some(9), Code::Ok)]);
}

#[test]
fn primary_that_lowers_its_id_leaves_none() {
    let mut arbitration = Arbitration::new(1);
    let (first, mut first_inbox) = open(&mut arbitration);
    let (second, mut second_inbox) = open(&mut arbitration);
    arbitration.arbitrate(first, &bid(Some(9))).unwrap();
    arbitration.arbitrate(second, &bid(None)).unwrap();
    arbitration.arbitrate(first, &bid(Some(3))).unwrap();
    assert_eq!(notifications(&mut first_inbox), [(Some(9), Code::Ok), (Some(9), Code::NotFound)]);
    let expected = [(Some(9), Code::AlreadyExists), (Some(9), Code::NotFound)];
    assert_eq!(notifications(&mut second_inbox), expected);
    assert!(!arbitration.has_primary());
}

#[test]
fn client_without_an_id_is_never_primary() {
    let mut arbitration = Arbitration::new(1);
    let (only, mut inbox) = open(&mut arbitration);
    arbitration.arbitrate(only, &bid(None)).unwrap();
    assert_eq!(notifications(&mut inbox), [(None, Code::NotFound)]);
    let refusal = arbitration.check_primary(1, "", None).unwrap_err();
    assert_eq!(refusal.code(), Code::PermissionDenied);
}

#[test]
fn zero_is_an_id() {
    let mut arbitration = Arbitration::new(1);
    let (only, mut inbox) = open(&mut arbitration);
    arbitration.arbitrate(only, &bid(Some(0))).unwrap();
    assert_eq!(notifications(&mut inbox), [(Some(0), Code::Ok)]);
}

#[test]
fn bids_that_break_the_rules_are_refused() {
    let mut arbitration = Arbitration::new(1);
    let (first, _first_inbox) = open(&mut arbitration);
    let (second, _second_inbox) = open(&mut arbitration);
    let code = |result: Result<(), Refusal>| result.unwrap_err().code();
    let other = v1::MasterArbitrationUpdate { device_id: 2, ..bid(Some(1)) };
    assert_eq!(code(arbitration.arbitrate(first, &other)), Code::NotFound);
    arbitration.arbitrate(first, &bid(Some(9))).unwrap();
    assert_eq!(code(arbitration.arbitrate(first, &other)), Code::FailedPrecondition);
    assert_eq!(code(arbitration.arbitrate(first, &role("a", 9))), Code::FailedPrecondition);
    assert_eq!(code(arbitration.arbitrate(second, &bid(Some(9)))), Code::InvalidArgument);
    let mut configured = role("a", 1);
    configured.role.as_mut().unwrap().config = Some(prost_types::Any::default());
    assert_eq!(code(arbitration.arbitrate(second, &configured)), Code::InvalidArgument);
    // A client may bid again with its own id.
    arbitration.arbitrate(first, &bid(Some(9))).unwrap();
}

#[test]
fn roles_have_primaries_of_their_own() {
    let mut arbitration = Arbitration::new(1);
    let (first, _first_inbox) = open(&mut arbitration);
    let (second, _second_inbox) = open(&mut arbitration);
    arbitration.arbitrate(first, &bid(Some(9))).unwrap();
    assert_eq!(may_write(&arbitration, "a", 9), Err(Code::NotFound));
    arbitration.arbitrate(second, &role("a", 9)).unwrap();
    assert_eq!(may_write(&arbitration, "a", 9), Ok(()));
    assert_eq!(may_write(&arbitration, "", 9), Ok(()));
    arbitration.close(second);
    assert_eq!(may_write(&arbitration, "a", 9), Err(Code::PermissionDenied));
    assert_eq!(may_write(&arbitration, "", 9), Ok(()));
}

#[test]
fn client_that_does_not_read_loses_packets_then_its_stream() {
    let mut arbitration = Arbitration::new(1);
    let (slow, mut inbox) = open(&mut arbitration);
    arbitration.arbitrate(slow, &bid(Some(1))).unwrap();
    let packet = Update::Packet(v1::PacketIn::default());
    let sent = (0..2 * STREAM_QUEUE).filter(|_| arbitration.send_to_primaries(&packet)).count();
    assert_eq!(sent, STREAM_QUEUE - STREAM_QUEUE_RESERVED - 1);
    for _ in 0..=STREAM_QUEUE_RESERVED {
        assert!(arbitration.is_open(slow));
        arbitration.arbitrate(slow, &bid(Some(1))).unwrap();
    }
    assert!(!arbitration.is_open(slow));
    assert!(!arbitration.has_primary());
    while inbox.try_recv().is_ok() {}
    assert!(inbox.is_closed());
}

#[test]
fn streams_and_roles_are_bounded() {
    let mut arbitration = Arbitration::new(1);
    let mut inboxes = Vec::new();
    for number in 0..STREAMS_MAX {
        let (stream, inbox) = open(&mut arbitration);
        inboxes.push(inbox);
        let result = arbitration.arbitrate(stream, &role(&format!("role {number}"), 1));
        // The default role exists from the start.
        assert_eq!(result.is_ok(), number < ROLES_MAX - 1, "{number}");
    }
    let refusal = arbitration.open(channel(1).0, oneshot::channel().0).unwrap_err();
    assert_eq!(refusal.code(), Code::ResourceExhausted);
}
