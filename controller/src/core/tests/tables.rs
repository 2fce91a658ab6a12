//! The tables that follow from the members.

use super::*;

/// [`GROUP_PORTS_MAX`], as a port's number.
fn most() -> u16 {
    u16::try_from(GROUP_PORTS_MAX).unwrap()
}

#[test]
fn a_space_has_no_more_endpoints_than_a_group_has_ports() {
    assert_eq!(GROUP_PORTS_MAX, bluebridge_switch::dataplane::GROUP_PORTS_MAX);
    let (mut core, now) = core();
    core.learn_ports(SWITCH, ports(most() + 2));
    for port in 1..=most() {
        join(&mut core, now, &client(&format!("c{port}"), port));
    }
    let one_more = client("more", most() + 1);
    let text = refusal(&mut core, now, &one_more);
    assert!(text.contains(&format!("space 1 has {GROUP_PORTS_MAX} endpoints")), "{text}");
    let desired = core.desired(SWITCH).groups;
    let of_spaces = desired.iter().filter(|(id, _)| **id != FLOOD_GROUP);
    assert_eq!(of_spaces.map(|(_, ports)| ports.len()).collect::<Vec<_>>(), [GROUP_PORTS_MAX]);
    let again = join(&mut core, now, &again(&client("c64", 64)));
    assert_eq!(again.incarnation, 2, "an existing endpoint needs no room");
    join(&mut core, now, &Join { space: Space(2), ..client("other", most() + 2) });
    core.leave(now, member(&again)).unwrap();
    join(&mut core, now, &one_more);
}

#[test]
fn a_switch_that_does_not_list_its_ports_is_flooded_through_a_group_at_most() {
    let now = Instant::now();
    let elsewhere = Place { switch: SWITCH, port: SwitchPort(300) };
    let config = CoreConfig { ports: vec![elsewhere], ..CoreConfig::default() };
    let mut core = Core::new(config, Stored::default(), 1, now);
    core.learn_ports(SWITCH, Ports::Unlisted);
    for port in 1..most() {
        let space = Space(1 + port % 2);
        join(&mut core, now, &Join { space, ..client(&format!("c{port}"), port) });
    }
    let text = refusal(&mut core, now, &client("more", most()));
    assert!(text.contains("no ports in the flood group"), "{text}");
    join(&mut core, now, &again(&client("c2", 2)));
    join(&mut core, now, &Join { space: Space(3), ..client("uplink", 300) });
    assert_eq!(core.desired(SWITCH).groups[&FLOOD_GROUP].len(), GROUP_PORTS_MAX);
}

#[test]
fn notices_go_to_endpoints_that_ask_for_them_and_need_no_group_otherwise() {
    let (mut core, now) = core();
    let quiet = |join: Join| Join { notices: false, ..join };
    let key = Key::Multicast { dst_scope: SPACE.scope() };
    join(&mut core, now, &quiet(memory("m1", 1, 10)));
    join(&mut core, now, &quiet(client("c1", 2)));
    assert!(!core.notices_wanted(SPACE));
    let groups = |core: &Core| core.desired(SWITCH).groups.into_keys().collect::<Vec<_>>();
    assert!(!core.desired(SWITCH).entries.contains_key(&key));
    assert_eq!(groups(&core), [FLOOD_GROUP]);
    let c2 = join(&mut core, now, &client("c2", 3));
    join(&mut core, now, &client("c3", 4));
    join(&mut core, now, &Join { space: Space(2), ..client("d1", 5) });
    assert!(core.notices_wanted(SPACE));
    let desired = core.desired(SWITCH);
    let Some(Action::SetMulticastGroup { group }) = desired.entries[&key].action else { panic!() };
    assert_eq!(desired.groups[&group], BTreeSet::from([SwitchPort(3), SwitchPort(4)]));
    core.leave(now, member(&c2)).unwrap();
    // Joining again without `notices` ends them.
    join(&mut core, now, &quiet(again(&client("c3", 4))));
    assert!(!core.notices_wanted(SPACE) && core.notices_wanted(Space(2)));
    assert!(!core.desired(SWITCH).entries.contains_key(&key));
}

#[test]
fn small_changes_of_free_memory_rewrite_nothing() {
    let (mut core, now) = core();
    let record = join(&mut core, now, &memory("m", 1, 100_000));
    let (_, _, _) = (core.take_dirty(), core.take_changes(), core.take_altered());
    for free in (90_000..100_000).rev().step_by(100) {
        core.heartbeat(now, member(&record), free).unwrap();
    }
    assert!(!core.take_dirty());
    assert!(core.take_changes().is_empty());
    core.heartbeat(now, member(&record), 10).unwrap();
    assert!(core.take_dirty());
    assert_eq!(core.take_altered().len(), 1);
}

#[test]
fn a_memory_server_that_joins_has_all_its_pages_free() {
    let (mut core, now) = core();
    // Not a power of two, which is what a level stands for.
    let record = join(&mut core, now, &memory("s1", 1, 768));
    let free = core.nodes().find(|node| node.record.id() == record.id()).unwrap().free_pages;
    assert_eq!(free, Some(768));
}

#[test]
fn clients_are_notified_of_memory_servers_and_of_large_changes_of_free_memory() {
    let (mut core, now) = core();
    let record = join(&mut core, now, &memory("m", 1, 1000));
    join(&mut core, now, &client("c", 2));
    join(&mut core, now, &Join { space: Space(2), ..memory("other", 3, 1000) });
    let listed: Vec<_> = core.memory_nodes(SPACE).map(|node| node.record.id()).collect();
    assert_eq!(listed, [record.id()]);
    core.heartbeat(now, member(&record), 1000).unwrap();
    let _ = core.take_dirty();
    let notified = |core: &mut Core, free| {
        let before = core.nodes_version();
        core.heartbeat(now, member(&record), free).unwrap();
        assert!(core.nodes_version() <= before + 1);
        core.nodes_version() > before
    };
    // An eighth of 1000 is 125. None of these changes the weight.
    let small = [900, 875, 874, 980, 984, 800].map(|free| notified(&mut core, free));
    assert_eq!(small, [false, false, true, false, true, true]);
    assert!(!core.take_dirty());
    let large = [1, 1, 0, 0, 1].map(|free| notified(&mut core, free));
    assert_eq!(large, [true, false, true, false, true]);
    core.leave(now, member(&record)).unwrap();
    assert_eq!(core.memory_nodes(SPACE).count(), 0);
}

#[test]
fn a_restart_changes_no_table() {
    let (mut core, now) = core();
    let mut stored = Disk::default();
    for (name, port) in [("m1", 1), ("m2", 2)] {
        let record = join(&mut core, now, &memory(name, port, 1 << 20));
        core.heartbeat(now, member(&record), u64::from(port) << 12).unwrap();
    }
    join(&mut core, now, &Join { space: Space(9), ..client("c1", 3) });
    stored.write(core.take_changes());
    let mut restarted = Core::new(CoreConfig::default(), stored.load(), 2, now);
    restarted.learn_ports(SWITCH, ports(16));
    assert_eq!(restarted.desired(SWITCH), core.desired(SWITCH));
}

#[test]
fn spaces_without_endpoints_give_their_groups_back() {
    let (mut core, now) = core();
    for space in 0..2000 {
        let record = join(
            &mut core,
            now,
            &Join { space: Space(space), nonce: u64::from(space) + 1, ..client("c", 1) },
        );
        core.leave(now, member(&record)).unwrap();
    }
    assert_eq!(core.spaces.len(), usize::from(GROUPS_MAX - FLOOD_GROUP));
    let groups: BTreeSet<u16> = core.spaces.values().copied().collect();
    assert_eq!(groups.len(), core.spaces.len());
}

#[test]
fn notify_rules_bring_their_clone_session() {
    let now = Instant::now();
    let rule =
        NotifyRule { src_command: Ternary { value: 0x80, mask: 0x80 }, ..NotifyRule::default() };
    let off = CoreConfig { redirects: RedirectPolicy::Off, ..CoreConfig::default() };
    let config = CoreConfig { notify: vec![rule], ..off.clone() };
    let tables = Core::new(config, Stored::default(), 1, now).desired(SWITCH);
    assert!(tables.notify_session);
    assert_eq!(tables.entries[&rule.key()], Body::new(Action::CopyToController));
    assert!(!Core::new(off, Stored::default(), 1, now).desired(SWITCH).notify_session);
}

#[test]
fn entries_groups_and_settings_are_counted() {
    let now = Instant::now();
    let off = CoreConfig { redirects: RedirectPolicy::Off, ..CoreConfig::default() };
    let mut core = Core::new(off, Stored::default(), 1, now);
    assert_eq!(core.desired(SWITCH).count(), 0);
    core.learn_ports(SWITCH, ports(2));
    assert_eq!(core.desired(SWITCH).count(), 2, "the flood's group, and its choice");
    join(&mut core, now, &client("c", 1));
    assert_eq!(core.desired(SWITCH).count(), 2 + 6, "five tables and the group of notices");
    let contended = Core::new(CoreConfig::default(), Stored::default(), 1, now).desired(SWITCH);
    assert_eq!(contended.count(), 2, "what is copied, and the session that copies");
}

#[test]
fn what_is_copied_follows_from_the_policy() {
    let rules = |redirects| {
        let config = CoreConfig { redirects, ..CoreConfig::default() };
        let tables = Core::new(config, Stored::default(), 1, Instant::now()).desired(SWITCH);
        assert_eq!(tables.notify_session, redirects != RedirectPolicy::Off);
        let ternaries = tables.entries.into_keys().map(|key| match key {
            Key::Notify { src_command: c, src_status: s, .. } => (c.value, c.mask, s.value, s.mask),
            other => panic!("{other:?}"),
        });
        ternaries.collect::<Vec<_>>()
    };
    let contended = (0xc0, 0xc0, 0, 0);
    assert_eq!(rules(RedirectPolicy::Off), []);
    assert_eq!(rules(RedirectPolicy::Contended), [contended]);
    // UPDATE, COMMIT, ABORT and RENEW, with the contended bit or without it, if they are OK.
    let mut always = rules(RedirectPolicy::Always);
    always.retain(|rule| *rule != contended);
    assert_eq!(always, [0x88, 0x89, 0x8a, 0x8b].map(|command| (command, 0xbf, 0, 0xff)));
}
