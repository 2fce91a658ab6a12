//! Names, ids, tokens and arena generations of endpoints that join.

use super::*;

#[test]
fn memory_is_numbered_from_below_and_clients_from_above() {
    let (mut core, now) = core();
    assert_eq!(join(&mut core, now, &memory("m1", 1, 10)).node, 1);
    assert_eq!(join(&mut core, now, &client("c1", 2)).node, 0xfffe);
    assert_eq!(join(&mut core, now, &memory("m2", 3, 10)).node, 2);
}

#[test]
fn a_repeated_join_is_answered_alike_and_a_new_one_is_a_new_incarnation() {
    let (mut core, now) = core();
    let request = memory("m1", 1, 10);
    let first = join(&mut core, now, &request);
    assert_eq!(join(&mut core, now, &request), first);
    let second = join(&mut core, now, &again(&request));
    assert_eq!((second.node, second.incarnation), (first.node, 2));
    assert_eq!((first.generations(), second.generations()), (0..=1, 2..=3));
}

#[test]
fn only_who_shows_the_token_keeps_it() {
    let (mut core, now) = core();
    let request = memory("m1", 1, 10);
    let first = join_anew(&mut core, now, &request, 1);
    let proven = Join { previous: shown(&first, false), ..again(&request) };
    let second = join_anew(&mut core, now, &proven, 2);
    assert_eq!((second.token, second.incarnation), (first.token, 2));

    // From the same interface, while the holder is live.
    let unproven = Join { previous: None, ..again(&proven) };
    let third = join_anew(&mut core, now, &unproven, 3);
    assert_eq!((third.node, third.token, third.incarnation), (first.node, [3; 16], 3));
    let stale = MemberError::Stale { node: 1, caller: 2, current: 3 };
    assert_eq!(core.heartbeat(now, member(&second), 1), Err(stale), "it gets the reason");
    let forged = Member { token: second.token, ..member(&third) };
    assert_eq!(core.leave(now, forged), Err(MemberError::WrongToken(1)));
    let kept = Join { previous: shown(&second, true), ..again(&unproven) };
    assert!(
        refusal(&mut core, now, &kept).contains("m1 began empty since"),
        "the old token is invalid"
    );

    // From any port, once the holder is silent; a wrong token counts as none.
    let silent = now + core.silence();
    core.handle_timeout(silent);
    let wrong = Previous { token: [9; 16], ..shown(&third, false).unwrap() };
    let elsewhere = Join { previous: Some(wrong), ..memory("m1", 2, 10) };
    let fourth = join_anew(&mut core, silent, &Join { nonce: 77, ..elsewhere }, 4);
    assert_eq!((fourth.node, fourth.token, fourth.port), (first.node, [4; 16], 2));

    // And after it left.
    core.leave(silent, member(&fourth)).unwrap();
    let fifth = join_anew(&mut core, silent, &Join { nonce: 78, ..memory("m1", 1, 10) }, 5);
    assert_eq!((fifth.node, fifth.token), (first.node, [5; 16]));
}

#[test]
fn a_caller_that_joined_after_the_store_was_copied_learns_that_the_store_is_old() {
    let (mut core, now) = core();
    let old = join(&mut core, now, &client("c", 1));
    let newer = Member { incarnation: old.incarnation + 1, token: [9; 16], ..member(&old) };
    let ahead = MemberError::Ahead { node: old.node, caller: 2, current: 1 };
    assert_eq!(core.heartbeat(now, newer, 0), Err(ahead.clone()), "not that its token is wrong");
    assert_eq!(core.leave(now, newer), Err(ahead));
}

#[test]
fn a_clients_token_proves_no_contents() {
    let (mut core, now) = core();
    let first = join(&mut core, now, &client("a", 1));
    core.leave(now, member(&first)).unwrap();
    let kept = Join { previous: shown(&first, true), ..again(&memory("a", 1, 10)) };
    assert!(refusal(&mut core, now, &kept).contains("not from this rack"));
    assert_eq!(join(&mut core, now, &Join { previous: None, ..kept }).node, 1);
}

#[test]
fn kept_contents_keep_the_generation_and_need_the_token() {
    let (mut core, now) = core();
    let request = memory("m1", 1, 10);
    let first = join(&mut core, now, &request);
    let kept = Join { previous: shown(&first, true), ..again(&request) };
    let second = join(&mut core, now, &kept);
    assert_eq!((second.generations(), second.incarnation), (0..=1, 2));
    assert!(second.range_epoch > first.range_epoch);
    let mut forged = again(&kept);
    forged.previous = Some(Previous { token: [9; 16], ..forged.previous.unwrap() });
    assert!(refusal(&mut core, now, &forged).contains("another token than m1 has now"));
    let stranger = Join { name: "m9".to_owned(), ..memory("m9", 2, 10) };
    let stranger = Join { previous: shown(&first, true), ..stranger };
    assert!(refusal(&mut core, now, &stranger).contains("are those of m1 (node 1), not of m9"));
    // Without the token it does not learn whose they are.
    let guessed = Some(Previous { token: [9; 16], ..stranger.previous.unwrap() });
    for (name, previous) in
        [("m9", guessed), ("m1", shown(&first, true).map(|it| Previous { node: NodeId(77), ..it }))]
    {
        let guesser = Join { name: name.to_owned(), previous, ..stranger.clone() };
        let said = refusal(&mut core, now, &guesser);
        assert!(said.contains("not from this rack") && !said.contains("m1"), "{said}");
    }
}

#[test]
fn memory_begins_at_the_generation_of_the_store() {
    let now = Instant::now();
    let stored = Stored { first_generation: 0x1234, ..Stored::default() };
    let mut core = Core::new(CoreConfig::default(), stored, 1, now);
    core.learn_ports(SWITCH, ports(16));
    let request = memory("m1", 1, 10);
    assert_eq!(join(&mut core, now, &request).generation, 0x1234);
    assert_eq!(join(&mut core, now, &again(&request)).generation, 0x1236);
    assert_eq!(join(&mut core, now, &memory("m2", 2, 10)).generation, 0x1234);
    assert_eq!(join(&mut core, now, &client("c1", 3)).generation, 0);
}

#[test]
fn generations_are_reserved_once_and_for_good() {
    let (mut core, now) = core();
    let request = memory("m1", 1, 10);
    let first = join(&mut core, now, &request);
    drop((core.take_changes(), core.take_dirty()));
    let last = |core: &Core| core.node(first.id()).unwrap().record.last_generation;
    core.reserve(member(&first), 0).unwrap();
    core.reserve(member(&first), 1).unwrap();
    assert_eq!((last(&core), core.take_changes()), (1, vec![]));
    core.reserve(member(&first), 5).unwrap();
    let stored = core.node(first.id()).unwrap().record.clone();
    assert_eq!((last(&core), core.take_changes()), (5, vec![Change::Node(stored)]));
    assert!(core.take_dirty());
    assert_eq!(core.endpoints(SWITCH)[&first.id()].generations, (0, 5), "for redirects");
    // A repetition, also one that arrives late.
    core.reserve(member(&first), 5).unwrap();
    core.reserve(member(&first), 3).unwrap();
    assert_eq!((last(&core), core.take_changes()), (5, vec![]));
    core.reserve(member(&first), u16::MAX).unwrap();
    assert_eq!(last(&core), 5 + HEARTBEAT_GENERATIONS_MAX, "no more at once");
    // The next incarnation begins with later generations, and the previous one gets no more.
    let second = join(&mut core, now, &again(&request));
    assert_eq!(second.generations(), 70..=71);
    assert!(matches!(core.reserve(member(&first), 75), Err(MemberError::Stale { .. })));
    let c1 = join(&mut core, now, &client("c1", 3));
    core.reserve(member(&c1), 9).unwrap();
    assert_eq!(core.node(c1.id()).unwrap().record.last_generation, 0, "a client has no arena");
    // A record of a controller that reserved one for each incarnation.
    core.nodes.get_mut(&second.id()).unwrap().record.last_generation = 0;
    assert_eq!(join(&mut core, now, &again(&again(&request))).generations(), 71..=72);
}

#[test]
fn used_up_generations_make_a_new_node() {
    let (mut core, now) = core();
    let request = memory("m1", 1, 10);
    let first = join(&mut core, now, &request);
    core.nodes.get_mut(&first.id()).unwrap().record.last_generation = 0x7ffe;
    core.reserve(member(&first), u16::MAX).unwrap();
    assert_eq!(core.node(first.id()).unwrap().record.last_generation, 0x7fff);
    let second = join(&mut core, now, &again(&request));
    assert_eq!((second.node, second.generation, second.incarnation), (2, 0, 1));
    assert!(core.node(first.id()).unwrap().record.retired);
    let kept = Join { previous: shown(&second, true), ..again(&again(&request)) };
    assert_eq!(join(&mut core, now, &kept).node, 2);
}

#[test]
fn live_endpoints_keep_name_port_and_mac() {
    let (mut core, now) = core();
    join(&mut core, now, &memory("m1", 1, 10));
    join(&mut core, now, &client("c1", 2));
    assert!(refusal(&mut core, now, &client("c2", 2)).contains("port 2 is in use"));
    let same_mac = Join { mac: mac(2), ..client("c2", 3) };
    assert!(refusal(&mut core, now, &same_mac).contains("02:00:00:00:00:02 is in use"));
    assert!(refusal(&mut core, now, &again(&client("c1", 3))).contains("the name c1 is in use"));
    let silent = now + core.silence();
    core.handle_timeout(silent);
    let successor = join(&mut core, silent, &client("c2", 2));
    assert!(core.node(successor.id()).unwrap().live);
    let c1 = core.nodes().find(|node| node.record.name == "c1").unwrap();
    assert!(!c1.record.attached, "the silent endpoint made room");
}

#[test]
fn a_successor_on_the_same_interface_fences_its_predecessor() {
    let (mut core, now) = core();
    let first = join(&mut core, now, &client("c1", 2));
    let second = join(&mut core, now, &again(&client("c1", 2)));
    assert_eq!(second.node, first.node);
    let error = core.heartbeat(now, member(&first), 0).unwrap_err();
    assert_eq!(error, MemberError::Stale { node: first.node, caller: 1, current: 2 });
    assert!(core.heartbeat(now, member(&second), 0).is_ok());
    let forged = Member { token: [0; 16], ..member(&second) };
    assert_eq!(core.leave(now, forged), Err(MemberError::WrongToken(first.node)));
    let unknown = Member { node: NodeId(99), ..forged };
    assert_eq!(core.heartbeat(now, unknown, 0), Err(MemberError::Unknown(99)));
}

#[test]
fn names_of_memory_nodes_stay_theirs() {
    let (mut core, now) = core();
    let first = join(&mut core, now, &memory("a", 1, 10));
    core.leave(now, member(&first)).unwrap();
    core.leave(now, member(&first)).unwrap();
    assert!(refusal(&mut core, now, &client("a", 1)).contains("a memory node of space 1"));
    let elsewhere = Join { space: Space(2), ..memory("a", 1, 10) };
    assert!(refusal(&mut core, now, &again(&elsewhere)).contains("a memory node of space 1"));
    let client_first = join(&mut core, now, &client("b", 2));
    core.leave(now, member(&client_first)).unwrap();
    assert_eq!(join(&mut core, now, &again(&memory("b", 2, 10))).node, 2);
}

#[test]
fn client_ids_are_quarantined_before_reuse() {
    let (mut core, now) = core();
    let first = join(&mut core, now, &client("a", 1));
    core.leave(now, member(&first)).unwrap();
    let early = join(&mut core, now, &client("b", 1));
    assert_eq!(early.node, 0xfffd);
    let rested = now + core.config.client_quarantine;
    let late = core.join(rested, &client("c", 2), [9; 16]).unwrap().0;
    assert_eq!((late.node, late.incarnation), (0xfffe, 2));
    assert_ne!(late.token, first.token);
    let stale = MemberError::Stale { node: first.node, caller: 1, current: 2 };
    assert_eq!(core.heartbeat(rested, member(&first), 0), Err(stale), "the id's former holder");
    let forged = Member { incarnation: 2, ..member(&first) };
    assert_eq!(core.heartbeat(rested, forged, 0), Err(MemberError::WrongToken(first.node)));
    let back = join(&mut core, rested, &again(&client("a", 3)));
    assert_ne!(back.node, late.node, "the name went with the id");
}

#[test]
fn what_is_left_of_a_client_is_what_its_ended_incarnations_had() {
    let (mut core, now) = core();
    let request = client("c1", 1);
    let first = join(&mut core, now, &request);
    let name = Named::Name("c1");
    let incarnations = |first: u32, last: u32| {
        vec![Incarnations { node: NodeId(0xfffe), incarnations: first..=last }]
    };
    assert_eq!(core.incarnations(SPACE, name), Ok(incarnations(1, 1)));
    let there = OperatorError::StillThere("c1".to_owned());
    assert_eq!(core.ended_incarnations(SPACE, name), Err(there.clone()));
    let second = join(&mut core, now, &again(&request));
    assert_eq!((second.node, second.incarnation), (first.node, 2));
    assert_eq!(core.ended_incarnations(SPACE, name), Ok(incarnations(1, 1)), "the second is there");
    let one = |incarnation| Named::One(NodeId(0xfffe), incarnation);
    assert_eq!(core.ended_incarnations(SPACE, one(1)), Ok(incarnations(1, 1)));
    assert_eq!(core.ended_incarnations(SPACE, one(2)), Err(there));
    assert!(core.is_live(second.id(), 2) && !core.is_live(second.id(), 1));
    // A client without heartbeats counts as ended.
    core.handle_timeout(now + core.silence());
    assert_eq!(core.ended_incarnations(SPACE, name), Ok(incarnations(1, 2)));
    for unknown in ["c2", ""] {
        let error =
            core.incarnations(SPACE, Named::Name(unknown)).expect_err("no client has that name");
        assert!(matches!(error, OperatorError::NoClient { .. }), "{error}");
    }
    assert!(core.incarnations(Space(2), name).is_err(), "a client of another space");
}

#[test]
fn a_name_stands_for_all_nodes_that_the_client_had_in_the_space() {
    let (mut core, now) = core();
    let here = client("c1", 1);
    let elsewhere = Join { space: Space(SPACE.0 + 1), ..here.clone() };
    let first = join(&mut core, now, &here);
    let other = join(&mut core, now, &elsewhere);
    let last = join(&mut core, now, &here);
    assert_eq!([first.node, other.node, last.node], [0xfffe, 0xfffd, 0xfffc]);
    let one = |record: &NodeRecord| Incarnations { node: record.id(), incarnations: 1..=1 };
    let name = Named::Name("c1");
    assert_eq!(core.incarnations(SPACE, name), Ok(vec![one(&last), one(&first)]));
    assert_eq!(core.incarnations(elsewhere.space, name), Ok(vec![one(&other)]));
    // What the live one has must stay.
    assert_eq!(core.ended_incarnations(SPACE, name), Ok(vec![one(&first)]));
    core.leave(now, member(&last)).unwrap();
    assert_eq!(core.ended_incarnations(SPACE, name), Ok(vec![one(&last), one(&first)]));

    // After the quarantine a client may get its former node back, and with it the earlier incarnations.
    let (mut core, now) = super::core();
    let first = join(&mut core, now, &here);
    join(&mut core, now, &elsewhere);
    let later = now + core.config.client_quarantine;
    let back = join(&mut core, later, &here);
    assert_eq!((back.node, back.first_incarnation, back.incarnation), (first.node, 1, 2));
}

#[test]
fn a_name_stands_for_its_own_incarnations_when_its_id_was_anothers() {
    let (mut core, now) = core();
    let former = join(&mut core, now, &client("c1", 1));
    core.leave(now, member(&former)).unwrap();
    let later = now + CoreConfig::default().client_quarantine;
    let heir = join(&mut core, later, &client("c2", 1));
    assert_eq!((heir.node, heir.incarnation), (former.node, 2));
    let incarnations = core.incarnations(SPACE, Named::Name("c2")).unwrap();
    assert_eq!(incarnations, [Incarnations { node: heir.id(), incarnations: 2..=2 }]);
    assert!(core.incarnations(SPACE, Named::Name("c1")).is_err(), "it is forgotten");
    assert_eq!(core.client(heir.id(), 1), None, "that was another's");
    assert_eq!(core.client(heir.id(), 2).map(|record| record.name.as_str()), Some("c2"));
    assert_eq!(core.client(heir.id(), 3), None);
    let heir = join(&mut core, later, &again(&client("c2", 1)));
    assert_eq!((heir.incarnation, heir.first_incarnation), (3, 2));
}
