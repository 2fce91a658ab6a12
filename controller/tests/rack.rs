//! The controller, the switch's agent and endpoints together, in one process over loopback.

mod drivers;
mod support;

use std::time::Duration;

use bluebridge_controller::core::{ControllerPort, NotifyRule, Place, SwitchId};
use bluebridge_controller::driver::DriverError;
use bluebridge_controller::redirect::RedirectPolicy;
use bluebridge_controller::{Config, ControllerError};
use bluebridge_northbound::proto::{NodeState, SwitchState};
use bluebridge_northbound::{
    Attachment, Connection, Membership, MembershipError, Options, Previous, Registration,
};
use bluebridge_p4::pipeline::{Action, Key, MacAddr, SwitchPort, Ternary};
use bluebridge_testkit::{Scratch, until};
use bluebridge_wire::{NodeId, Space};
use support::{Agent, Running, client, memory};

const SCOPE: u32 = Space(1).scope();

fn way(node: NodeId) -> Key {
    let prefix = u128::from(SCOPE) << 80 | u128::from(node.0) << 64;
    Key::Directory { prefix, prefix_len: 48 }
}

fn join(controller: &Running, registration: Registration) -> Membership {
    Membership::join(&controller.uri(), registration).unwrap()
}

fn patience(join_deadline: Duration) -> Options {
    Options { join_deadline, ..Options::default() }
}

#[test]
fn a_joined_endpoint_has_its_entries_and_leaves_none() {
    let agent = Agent::start(4);
    let controller = Running::start(&agent, None);
    let home = join(&controller, memory("m1", 1));
    let user = join(&controller, client("c1", 2));
    assert!(home.assignment().installed && user.assignment().installed);
    assert_eq!((home.assignment().node, user.assignment().node), (NodeId(1), NodeId(0xfffe)));
    assert_eq!(user.snapshot().memory_nodes.len(), 1);
    let tables = agent.entries();
    for (node, port) in [(home.assignment().node, 1), (user.assignment().node, 2)] {
        assert!(matches!(&tables[&way(node)], Action::Forward(to) if to.port.0 == port));
        let guard = tables.keys().any(|key| {
            matches!(key, Key::IngressGuard { port: at, src_node, src_scope: SCOPE }
                if at.0 == port && *src_node == node.0)
        });
        assert!(guard, "{node}");
    }
    assert!(tables.contains_key(&Key::Anycast { dst_scope: SCOPE }));
    assert!(tables.contains_key(&Key::Multicast { dst_scope: SCOPE }));
    let status = controller.status();
    let switch = status.switches[0].clone();
    assert_eq!(switch.state(), SwitchState::InSync);
    assert_eq!(switch.ports.len(), 4);
    assert_eq!((switch.refused_update_count, switch.repaired_count), (0, 0));
    assert!(status.entries.iter().all(|entry| entry.desired && entry.installed));
    assert_eq!(status.entries.len() as u64, switch.desired_entry_count);
    home.leave().unwrap();
    user.leave().unwrap();
    let only_rules = || agent.entries().values().all(|action| *action == Action::CopyToController);
    until("the tables are empty but for what is copied", only_rules);
}

#[test]
fn anycast_follows_free_memory_and_silence() {
    let agent = Agent::start(4);
    let controller = Running::start(&agent, None);
    let full = join(&controller, memory("m1", 1));
    let silent = join(&controller, memory("m2", 2));
    let user = join(&controller, client("c1", 3));
    let anycast = Key::Anycast { dst_scope: SCOPE };
    let ports = || match agent.entries().get(&anycast) {
        Some(Action::Select(members)) => members.iter().map(|m| m.forward.port.0).collect(),
        _ => Vec::new(),
    };
    until("the table chooses both nodes", || ports() == [1, 2]);
    full.report_free_pages(0);
    until("the full node is not chosen", || ports() == [2]);
    let node = silent.assignment().node;
    silent.abandon();
    until("the silent node is not chosen", || ports().is_empty());
    assert!(agent.entries().contains_key(&way(node)), "data traffic needs no heartbeat");
    until("the client is notified", || {
        user.snapshot().memory_nodes.iter().any(|known| known.node == node && !known.live)
    });
    full.report_free_pages(900);
    until("the node with memory is back", || ports() == [1]);
}

#[test]
fn a_killed_controller_restarts_and_assigns_nothing_again() {
    let agent = Agent::start(4);
    let folder = Scratch::new("killed");
    let controller = Running::start(&agent, Some(&folder));
    let home = join(&controller, memory("m1", 1));
    let user = join(&controller, client("c1", 2));
    let installed = agent.entries();
    let pushes = controller.switch().pipeline_push_count;
    assert_eq!(pushes, 1);
    let address = controller.kill();
    // An endpoint that has not noticed would count as reconnected.
    for membership in [&home, &user] {
        until("the endpoints notice", || membership.snapshot().connection == Connection::Lost);
    }
    assert_eq!(agent.entries(), installed);

    let watching = agent.watch_entries();
    let controller = Running::start_at(&agent, Some(&folder), address);
    for membership in [&home, &user] {
        until("the endpoints are back", || {
            membership.snapshot().connection == Connection::Connected
                && membership.snapshot().installed
        });
    }
    let goals = [&home, &user].map(|membership| (membership, membership.heartbeat_count() + 4));
    for (membership, goal) in goals {
        until("four more heartbeats", || membership.heartbeat_count() >= goal);
    }
    let goal = watching.readings() + 5;
    until("five more readings of the tables", || watching.readings() >= goal);
    assert_eq!(watching.end(), 0, "the tables never changed");
    let switch = controller.switch();
    assert_eq!((switch.pipeline_push_count, switch.update_count), (0, 0));
    let status = controller.status();
    let of = |name: &str| status.nodes.iter().find(|node| node.name == name).unwrap().clone();
    assert_eq!((of("m1").incarnation, of("c1").incarnation), (1, 1));
    assert_eq!((of("m1").state(), of("c1").state()), (NodeState::Live, NodeState::Live));
    let third = join(&controller, memory("m2", 3));
    assert_eq!(third.assignment().node, NodeId(2));
}

#[test]
fn a_restarted_agent_without_tables_serves_again() {
    let mut agent = Agent::start(4);
    let controller = Running::start(&agent, None);
    let _home = join(&controller, memory("m1", 1));
    let _user = join(&controller, client("c1", 2));
    let installed = agent.entries();
    let groups = agent.groups();
    // The timing is tested in virtual time, by the tests of the loop over the switch.
    for _ in 0..3 {
        agent.stop();
        agent.restart_empty();
        until("the tables are back", || agent.entries() == installed && agent.groups() == groups);
    }
    assert_eq!(controller.switch().pipeline_push_count, 4);
}

#[test]
fn a_lost_switch_delays_no_join_at_another_one() {
    let mut agents = [Agent::start(4), Agent::start(4)];
    let controller = Running::start_with(Running::config_of_line(&agents));
    let at = |switch: &str, who: Registration| {
        let mut mac = who.mac;
        mac[1] = switch.bytes().last().unwrap();
        Registration { switch: switch.to_owned(), mac, ..who }
    };
    let home = join(&controller, at("t0", memory("m1", 1)));
    let user = join(&controller, at("t1", client("c1", 2)));
    let node = |membership: &Membership| membership.assignment().node;
    assert!(home.assignment().installed && user.assignment().installed);
    assert_eq!((node(&home), node(&user)), (NodeId(1), NodeId(0x1fff)));
    let block = |node: u16| Key::Directory {
        prefix: u128::from(SCOPE) << 80 | u128::from(node) << 64,
        prefix_len: 36,
    };
    let [first, second] = [agents[0].entries(), agents[1].entries()];
    assert!(matches!(&first[&block(0x1000)], Action::Forward(to) if to.port.0 == 3));
    assert!(matches!(&second[&block(0)], Action::Forward(to) if to.port.0 == 4));

    agents[1].stop();
    let states = || {
        let switches = controller.status().switches;
        switches.iter().map(|it| (it.name.clone(), it.state())).collect::<Vec<_>>()
    };
    let lost =
        [("t0".to_owned(), SwitchState::InSync), ("t1".to_owned(), SwitchState::Disconnected)];
    until("the loss is seen", || states() == lost);
    let other = join(&controller, at("t0", client("c2", 2)));
    assert!(other.assignment().installed, "its own switch has its entries");
    let cut_off = join(&controller, at("t1", client("c3", 1)));
    assert!(!cut_off.assignment().installed, "its own switch is lost");
    agents[1].restart_empty();
    until("it has all entries", || {
        agents[1].entries().contains_key(&way(node(&cut_off)))
            && agents[1]
                .entries()
                .keys()
                .filter(|key| matches!(key, Key::IngressGuard { .. }))
                .count()
                == 4
    });
    assert_eq!(agents[0].entries().keys().filter(|key| **key == block(0x1000)).count(), 1);
}

#[test]
fn a_restarted_agent_with_its_tables_gets_no_updates() {
    let mut agent = Agent::start(4);
    let controller = Running::start(&agent, None);
    let _home = join(&controller, memory("m1", 1));
    let before = controller.switch();
    let installed = agent.entries();
    agent.stop();
    agent.restart_with_tables();
    until("the controller is back", || {
        let switch = controller.switch();
        switch.connect_count > before.connect_count && switch.state() == SwitchState::InSync
    });
    let after = controller.switch();
    assert_eq!(after.update_count, before.update_count);
    assert_eq!(after.pipeline_push_count, before.pipeline_push_count);
    assert_eq!(agent.entries(), installed);
}

#[test]
fn an_older_controller_is_fenced_and_ends() {
    let agent = Agent::start(4);
    let older = Running::start(&agent, None);
    let _home = join(&older, memory("m1", 1));
    let newer = Running::start_with(Config { force: true, ..Running::config(&agent) });
    let end = older.end();
    let fenced = matches!(end, Err(ControllerError::Switch(DriverError::Fenced { .. })));
    assert!(fenced, "{end:?}");
    let home = join(&newer, memory("m2", 2));
    assert!(home.assignment().installed);
}

#[test]
fn a_controller_with_an_empty_store_does_not_take_a_full_switch() {
    let agent = Agent::start(4);
    let right = Running::start(&agent, None);
    let _home = join(&right, memory("m1", 1));
    let installed = agent.entries();
    let end = Running::start(&agent, None).end();
    let in_use = DriverError::InUse { endpoints: 1 };
    assert!(matches!(&end, Err(ControllerError::Switch(error)) if *error == in_use), "{end:?}");
    assert_eq!(agent.entries(), installed);
    let user = join(&right, client("c1", 2));
    assert!(user.assignment().installed, "the right one is the primary as before");
    assert_eq!(right.switch().connect_count, 1);
}

#[test]
fn a_fenced_controller_returns_with_force_and_stays() {
    let agent = Agent::start(4);
    let (folder, other_folder) = (Scratch::new("right"), Scratch::new("intruder"));
    let config = |folder: &Scratch, listen, force| Config {
        listen,
        store: Some(folder.file("controller.redb")),
        force,
        ..Running::config(&agent)
    };
    let anywhere = Running::config(&agent).listen;
    let right = Running::start(&agent, Some(&folder));
    let uri = right.uri();
    let address = uri.trim_start_matches("http://").parse().unwrap();
    let home = join(&right, memory("m1", 1));
    let installed = agent.entries();

    // A mistake, with --force.
    let intruder = Running::start_with(config(&other_folder, anywhere, true));
    let end = right.end();
    let fenced = matches!(end, Err(ControllerError::Switch(DriverError::Fenced { .. })));
    assert!(fenced, "{end:?}");
    until("the intruder has emptied the tables", || !agent.entries().contains_key(&way(NodeId(1))));
    drop(join(&intruder, memory("other", 2)));

    // A supervisor that restarts the right one changes nothing, even after the intruder ended.
    let refused = || {
        matches!(
            Running::try_start(config(&folder, address, false)),
            Err(ControllerError::WasFenced { .. })
        )
    };
    assert!(refused());
    intruder.kill();
    assert!(refused());

    // Only an operator's decision changes something, and no endpoint has to join again.
    let right = Running::start_with(config(&folder, address, true));
    until("the tables are back", || agent.entries() == installed);
    until("the server is connected", || home.snapshot().connection == Connection::Connected);
    assert_eq!(home.assignment().incarnation, right.status().nodes[0].incarnation);

    // The decision is not permanent, but its effect is stored: later starts win without it.
    right.kill();
    let right = Running::start_with(config(&folder, address, false));
    let intruder = Running::start_with(config(&other_folder, anywhere, false)).end();
    let fenced = matches!(intruder, Err(ControllerError::Switch(DriverError::Fenced { .. })));
    assert!(fenced, "{intruder:?}");
    let again = Running::try_start(config(&other_folder, anywhere, false));
    assert!(matches!(again, Err(ControllerError::WasFenced { .. })), "the intruder stays away");
    until("the right one has the switch", || agent.entries() == installed);
    drop(right);
}

#[test]
fn an_empty_store_expels_no_endpoint_before_the_switch_is_reached() {
    let mut agent = Agent::start(4);
    let (folder, empty) = (Scratch::new("known"), Scratch::new("empty"));
    let right = Running::start(&agent, Some(&folder));
    let home = join(&right, memory("m1", 1));
    let user = join(&right, client("c1", 2));
    let address = right.kill();
    agent.stop();
    let wrong = Running::start_at(&agent, Some(&empty), address);
    until("heartbeats were refused", || wrong.status().refused_call_count >= 6);
    let states = [&home, &user].map(|membership| membership.snapshot().connection);
    assert_eq!(states, [Connection::Lost; 2]);
    wrong.kill();

    agent.restart_with_tables();
    let _right = Running::start_at(&agent, Some(&folder), address);
    for membership in [&home, &user] {
        until("it is back", || membership.snapshot().connection == Connection::Connected);
    }
}

#[test]
fn a_controller_with_another_store_or_an_old_copy_expels_no_memory_server() {
    let mut agent = Agent::start(4);
    let (folder, other) = (Scratch::new("own"), Scratch::new("other"));
    let old = Scratch::new("old-copy");
    let right = Running::start(&agent, Some(&folder));
    let first = join(&right, memory("m1", 1));
    let address = right.kill();
    std::fs::copy(folder.file("controller.redb"), old.file("controller.redb")).unwrap();
    let right = Running::start_at(&agent, Some(&folder), address);
    first.abandon();
    let home = join(&right, memory("m1", 1));
    assert_eq!(home.assignment().incarnation, 2);
    let mut last = right.kill();

    for store in [&other, &old] {
        agent.stop();
        agent.restart_empty();
        let wrong = Running::start_at(&agent, Some(store), last);
        until("it has the switch", || wrong.switch().state() == SwitchState::InSync);
        let goal = wrong.status().refused_call_count + 3;
        until("heartbeats were refused", || wrong.status().refused_call_count >= goal);
        assert_eq!(home.snapshot().connection, Connection::Lost);
        last = wrong.kill();
    }

    let config = Config {
        listen: last,
        store: Some(folder.file("controller.redb")),
        force: true,
        ..Running::config(&agent)
    };
    let _right = Running::start_with(config);
    until("the server is back", || home.snapshot().connection == Connection::Connected);
}

#[test]
fn joins_wait_for_the_switch_and_say_so_if_it_stays_away() {
    let mut agent = Agent::start(2);
    agent.stop();
    let controller = Running::start(&agent, None);
    let refused =
        Membership::join_with(&controller.uri(), client("c1", 1), patience(Duration::from_secs(2)));
    let error = refused.unwrap_err();
    assert!(matches!(error, MembershipError::Unreachable { .. }), "{error}");
    assert!(error.to_string().contains("the switch was not reached"), "{error}");
    let uri = controller.uri();
    let before = controller.status().refused_call_count;
    let joining = std::thread::spawn(move || Membership::join(&uri, client("c1", 1)));
    until("the join was refused for now", || controller.status().refused_call_count > before);
    agent.restart_empty();
    assert!(joining.join().unwrap().unwrap().assignment().installed);
}

#[test]
fn refused_joins_name_who_is_at_fault() {
    let agent = Agent::start(4);
    let controller = Running::start(&agent, None);
    let _holder = join(&controller, client("c1", 1));
    let try_for = |registration, ms| {
        let options = patience(Duration::from_millis(ms));
        Membership::join_with(&controller.uri(), registration, options).unwrap_err()
    };
    let error = try_for(client("c2", 1), 2000);
    assert!(matches!(&error, MembershipError::Taken(text) if text.contains("port 1")), "{error}");
    let error = try_for(client("c2", 9), 5000);
    assert!(matches!(&error, MembershipError::Invalid(text) if text.contains("port 9")), "{error}");
    let named =
        Registration { attachment: Attachment::Interface("sw3".to_owned()), ..client("c3", 3) };
    assert!(join(&controller, named).assignment().installed);
    let error = Membership::join("no uri", client("c4", 4)).unwrap_err();
    assert!(matches!(error, MembershipError::InvalidUri { .. }), "{error}");
    let refused = Membership::join_with(
        "http://127.0.0.1:9",
        client("c4", 4),
        patience(Duration::from_millis(200)),
    );
    assert!(matches!(refused, Err(MembershipError::Unreachable { .. })));
}

#[test]
fn the_controllers_own_address_is_reserved_and_forwarded_to_its_port() {
    let agent = Agent::start(4);
    let mut config = Running::config(&agent);
    let own = ControllerPort {
        place: Place { switch: SwitchId(0), port: SwitchPort(4) },
        mac: MacAddr([2, 0, 0, 0, 0, 4]),
    };
    config.core.own_port = Some(own);
    let controller = Running::start_with(config);
    let thief = Registration { mac: own.mac.0, ..client("thief", 1) };
    let options = patience(Duration::from_secs(5));
    let error = Membership::join_with(&controller.uri(), thief, options).unwrap_err();
    let words = "02:00:00:00:00:04 is reserved for the controller";
    assert!(matches!(&error, MembershipError::Invalid(text) if text.contains(words)), "{error}");
    let honest = join(&controller, client("c1", 1));
    assert!(honest.assignment().installed);
    let way = &agent.entries()[&Key::L2 { dst_mac: own.mac }];
    assert!(matches!(way, Action::Forward(to) if to.port == own.place.port), "{way:?}");
}

#[test]
fn a_silent_predecessor_is_replaced() {
    let agent = Agent::start(4);
    let controller = Running::start(&agent, None);
    join(&controller, client("c1", 1)).abandon();
    let successor = join(&controller, client("c2", 1));
    assert_eq!(successor.assignment().node, NodeId(0xfffd));
}

#[test]
fn a_returning_memory_node_keeps_its_generation_only_with_its_contents() {
    let agent = Agent::start(4);
    let controller = Running::start(&agent, None);
    let first = join(&controller, memory("m1", 1));
    let given = *first.assignment();
    first.abandon();
    let previous = |contents| Some(Previous { node: given.node, token: given.token, contents });
    let with_contents = previous(Some(given.generation));
    let kept = join(&controller, Registration { previous: with_contents, ..memory("m1", 1) });
    assert_eq!(kept.assignment().generation, given.generation);
    assert_eq!(kept.assignment().incarnation, given.incarnation + 1);
    let lost = join(&controller, Registration { previous: previous(None), ..memory("m1", 1) });
    assert_eq!(kept.assignment().last_generation, given.last_generation);
    let after = given.last_generation.next().expect("few joins");
    assert_eq!(lost.assignment().generation, after, "after all that were reserved");
    assert_eq!(lost.assignment().node, given.node);
    until("the predecessor is notified", || kept.snapshot().connection == Connection::Expelled);
    // The token still is the node's, but its contents are others since.
    let outdated = Registration { previous: with_contents, ..memory("m1", 1) };
    let refusal =
        Membership::join(&controller.uri(), outdated).expect_err("the contents are outdated");
    assert!(refusal.to_string().contains("outdated"), "{refusal}");
    assert!(matches!(refusal, MembershipError::NotPrevious(_)), "{refusal:?}");
    assert_eq!(lost.snapshot().connection, Connection::Connected, "its place is not taken");
}

#[test]
fn watchers_see_a_snapshot_and_every_change() {
    use bluebridge_northbound::proto::watch_response::Event;
    let agent = Agent::start(4);
    let controller = Running::start(&agent, None);
    let home = join(&controller, memory("m1", 1));
    let mut watch = controller.watch();
    let Some(Event::Snapshot(list)) = watch.next() else { panic!("no snapshot") };
    assert_eq!(list.nodes.len(), 1);
    home.leave().unwrap();
    // On a busy machine it may have been silent before.
    let gone = loop {
        let Some(Event::Node(node)) = watch.next() else { panic!("no change") };
        if !matches!(node.state(), NodeState::Live | NodeState::Silent) {
            break node;
        }
    };
    assert_eq!((gone.name.as_str(), gone.state()), ("m1", NodeState::Gone));
}

#[test]
fn watchers_are_bounded_and_leave_room_when_they_end() {
    let agent = Agent::start(1);
    let controller = Running::start(&agent, None);
    let mut watches: Vec<_> = (0..64).map(|_| controller.watch()).collect();
    let refused = controller.try_watch().err().unwrap();
    assert_eq!(refused.code(), tonic::Code::ResourceExhausted, "{refused}");
    assert!(refused.message().contains("64 watchers"), "{refused}");
    drop(watches.pop());
    until("a watcher's place is free", || controller.try_watch().is_ok());
    assert!(watches[0].next().is_some(), "the earlier ones continue");
}

#[test]
fn tables_that_others_wiped_or_extended_are_repaired() {
    let agent = Agent::start(4);
    let controller = Running::start(&agent, None);
    let _home = join(&controller, memory("m1", 1));
    let _user = join(&controller, client("c1", 2));
    let installed = agent.entries();
    let groups = agent.groups();
    let whole = || agent.entries() == installed && agent.groups() == groups;
    agent.meddle(controller.election_id());
    until("the tables are repaired", whole);
    agent.push(controller.election_id());
    // Before that, the tables may be filled under the foreign pipeline.
    until("the pipeline is ours again", || controller.switch().pipeline_push_count == 2);
    until("the tables are complete", whole);
}

#[test]
fn the_switch_copies_only_by_rule() {
    let agent = Agent::start(2);
    let rule = NotifyRule { src_status: Ternary { value: 2, mask: 0xff }, ..NotifyRule::default() };
    let mut config = Running::config(&agent);
    config.core.notify = vec![rule];
    let controller = Running::start_with(config);
    until("the rule is there", || {
        agent.entries().values().any(|action| *action == Action::CopyToController)
    });
    until("the switch is in sync", || controller.switch().state() == SwitchState::InSync);
    assert!(!agent.clone_sessions().is_empty());
    drop(controller);
    let mut config = Running::config(&agent);
    config.core.redirects = RedirectPolicy::Off;
    let _without = Running::start_with(config);
    until("the rule is gone", || agent.entries().is_empty() && agent.clone_sessions().is_empty());
}
