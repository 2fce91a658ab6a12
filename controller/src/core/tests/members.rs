//! Silence, removal and the events of members.

use super::*;

#[test]
fn silence_takes_the_anycast_share_but_not_the_directory() {
    let (mut core, now) = core();
    let first = join(&mut core, now, &memory("m1", 1, 1000));
    let second = join(&mut core, now, &memory("m2", 2, 1000));
    let anycast = Key::Anycast { dst_scope: SPACE.scope() };
    assert_eq!(core.anycast_members(SWITCH, SPACE), [(first.id(), 16), (second.id(), 16)]);
    let later = core.poll_timeout().unwrap();
    core.heartbeat(later, member(&second), 1000).unwrap();
    core.handle_timeout(later);
    let tables = core.desired(SWITCH);
    let forward = Forward { port: SwitchPort(2), dst_mac: mac(2) };
    let only = vec![WeightedForward { forward, weight: 16 }];
    assert_eq!(tables.entries[&anycast], Body::new(Action::Select(only)));
    assert!(tables.entries.contains_key(&desired::node_prefix(SPACE, first.id())));
    core.handle_timeout(later + core.config.client_expiry * 2);
    assert!(core.desired(SWITCH).entries.contains_key(&desired::node_prefix(SPACE, first.id())));
    assert!(!core.desired(SWITCH).entries.contains_key(&anycast));
    core.heartbeat(later, member(&first), 0).unwrap();
    assert!(!core.desired(SWITCH).entries.contains_key(&anycast), "a full node gets no CREATE");
}

#[test]
fn silent_clients_are_removed_and_memory_nodes_are_not() {
    let (mut core, now) = core();
    let lost = join(&mut core, now, &client("c", 1));
    join(&mut core, now, &memory("m", 2, 10));
    let mut last = now;
    while let Some(due) = core.poll_timeout() {
        assert!(due > last, "the next deadline is later");
        last = due;
        core.handle_timeout(due);
    }
    assert_eq!(last, now + core.config.client_expiry);
    let attached: Vec<&str> = core
        .nodes()
        .filter(|node| node.record.attached)
        .map(|node| node.record.name.as_str())
        .collect();
    assert_eq!(attached, ["m"]);
    assert_eq!(core.heartbeat(last, member(&lost), 0), Err(MemberError::Gone(lost.node)));
}

#[test]
fn each_change_of_an_endpoint_is_one_event() {
    use MemberChange::{GivenUp, Joined, Left, Replaced, Returned, Silent};
    let (mut core, now) = core();
    let changes = |core: &mut Core| -> Vec<(String, MemberChange)> {
        core.take_events().into_iter().map(|event| (event.name, event.change)).collect()
    };
    let event = |name: &str, change| (name.to_owned(), change);
    let m1 = join(&mut core, now, &memory("m1", 1, 10));
    join(&mut core, now, &memory("m1", 1, 10));
    join(&mut core, now, &client("c1", 2));
    assert_eq!(changes(&mut core), [event("m1", Joined), event("c1", Joined)], "not a repetition");
    core.heartbeat(now, member(&m1), 10).unwrap();
    assert_eq!(changes(&mut core), []);
    let silent = now + core.silence();
    core.handle_timeout(silent);
    core.handle_timeout(silent);
    assert_eq!(changes(&mut core), [event("m1", Silent), event("c1", Silent)]);
    core.heartbeat(silent, member(&m1), 10).unwrap();
    core.heartbeat(silent, member(&m1), 10).unwrap();
    assert_eq!(changes(&mut core), [event("m1", Returned)]);
    join(&mut core, silent, &client("c2", 2));
    assert_eq!(changes(&mut core), [event("c1", Replaced), event("c2", Joined)]);
    core.leave(silent, member(&m1)).unwrap();
    core.leave(silent, member(&m1)).unwrap();
    assert_eq!(changes(&mut core), [event("m1", Left)]);
    core.handle_timeout(silent + core.silence());
    core.handle_timeout(silent + core.config.client_expiry);
    assert_eq!(changes(&mut core), [event("c2", Silent), event("c2", GivenUp)]);
}

#[test]
fn a_pause_of_the_controller_is_no_silence_of_the_members() {
    let (mut core, now) = core();
    let user = join(&mut core, now, &client("c", 1));
    join(&mut core, now, &memory("m", 2, 10));
    let stalled = core.config.client_expiry * 2;
    let resumed = now + stalled;
    core.excuse_silence(resumed, stalled);
    core.handle_timeout(resumed);
    assert!(core.nodes().all(|node| node.live && node.record.attached));
    core.heartbeat(resumed, member(&user), 0).unwrap();
    // From then on it counts again.
    core.handle_timeout(resumed + core.silence());
    assert!(core.nodes().all(|node| !node.live));
}
