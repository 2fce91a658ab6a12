use std::collections::BTreeSet;

use bluebridge_switch::dataplane::GROUP_PORTS_MAX;
use bluebridge_testkit::Scratch;
use proptest::prelude::*;

use crate::daemon::{CONTROLLER, HOSTS, SWITCH, stages};
use crate::layout::Layout;
use crate::network::host::GATEWAY_MAC;
use crate::spec::{
    ByteSize, DataPlane, LinkMtus, MAX_ENDPOINTS, Node, RackName, RackSpec, Redirects, SpecError,
};
use crate::state::{Phase, RackState, StateError, StateRoot};

pub(crate) fn spec(name: &str, servers: u16, clients: u16) -> RackSpec {
    RackSpec {
        name: name.parse().expect("a name"),
        servers,
        clients,
        mtu: LinkMtus::default(),
        switch: DataPlane::Soft,
        memory: ByteSize(256 << 20),
        redirects: Redirects::default(),
        direct_reads: true,
    }
}

/// Where records are kept, and the directory that it is in.
fn scratch() -> (StateRoot, Scratch) {
    let scratch = Scratch::new("state");
    (StateRoot::at(scratch.file("root")), scratch)
}

#[test]
fn names_that_would_leave_their_directory_are_refused() {
    for bad in ["", "..", ".", "a/b", "-x", "A", "a b", "a\n", &"x".repeat(33)] {
        assert_eq!(bad.parse::<RackName>(), Err(SpecError::Name(bad.to_owned())));
    }
    assert!("rack-2".parse::<RackName>().is_ok());
}

#[test]
fn nodes_have_one_spelling() {
    for bad in ["", "s", "s0", "s01", "s+1", "c65536", "x1", "Switch", "é1"] {
        assert_eq!(bad.parse::<Node>(), Err(SpecError::Node(bad.to_owned())));
    }
    assert_eq!("switch".parse(), Ok(Node::Switch));
    assert_eq!("c12".parse(), Ok(Node::Client(12)));
}

#[test]
fn link_sizes_are_set_for_all_and_for_some() {
    let mtus: LinkMtus = "s1=1500,c2=1280".parse().expect("sizes");
    let of = |node: &str| mtus.of(node.parse().expect("a node"));
    assert_eq!([of("s1"), of("c2"), of("s2")], [1500, 1280, 9000]);
    let mtus: LinkMtus = "1500,s1=9000".parse().expect("sizes");
    assert_eq!(mtus.to_string(), "1500,s1=9000");
    for bad in ["", "1279", "9001", "s1=", "s1=64", ",", "9000,"] {
        assert!(matches!(bad.parse::<LinkMtus>(), Err(SpecError::Mtu(_))), "{bad}");
    }
}

#[test]
fn a_size_for_an_endpoint_that_is_not_there_is_refused() {
    let mut small = spec("r", 1, 1);
    small.mtu = "s2=1500".parse().expect("sizes");
    assert_eq!(small.check(), Err(SpecError::MtuOfUnknownNode(Node::Server(2))));
    small.mtu = "switch=1500".parse().expect("sizes");
    assert_eq!(small.check(), Err(SpecError::MtuOfUnknownNode(Node::Switch)));
    assert_eq!(usize::from(MAX_ENDPOINTS) + 1, GROUP_PORTS_MAX, "the flood is one group");
    assert_eq!(spec("r", 63, 64).check(), Ok(()));
    assert_eq!(spec("r", 64, 64).check(), Err(SpecError::Endpoints(128)));
    assert_eq!(spec("r", 65535, 65535).check(), Err(SpecError::Endpoints(131_070)));
}

#[test]
fn byte_sizes_are_exact() {
    let size = |text: &str| text.parse::<ByteSize>();
    assert_eq!(size("256M"), Ok(ByteSize(256 << 20)));
    assert_eq!(size("4096"), Ok(ByteSize(4096)));
    assert_eq!(size("1g"), Ok(ByteSize(1 << 30)));
    for bad in ["", "M", "-1", "+1", "1.5G", "16777216T", "1 M", "1MM"] {
        assert_eq!(size(bad), Err(SpecError::ByteSize(bad.to_owned())));
    }
}

proptest! {
    #[test]
    fn byte_sizes_read_back(bytes: u64) {
        prop_assert_eq!(ByteSize(bytes).to_string().parse(), Ok(ByteSize(bytes)));
    }
}

#[test]
fn every_port_has_addresses_of_its_own() {
    let layout = Layout::of(&spec("rack", 100, 150));
    let ports = layout.ports();
    assert_eq!(ports.len(), 251);
    let mut macs: BTreeSet<_> =
        ports.iter().flat_map(|port| [port.mac.0, port.peer_mac.0]).collect();
    macs.insert(GATEWAY_MAC.0);
    assert_eq!(macs.len(), 2 * 251 + 1);
    let addresses: BTreeSet<_> = ports.iter().map(|port| port.control_address).collect();
    assert_eq!(addresses.len(), 251);
    let port = layout.port_of(Node::Client(1)).expect("a port");
    assert_eq!((port.number, port.interface.as_str()), (101, "p101"));
    let controller = layout.port_of(Node::Switch).expect("a port");
    assert_eq!(controller.control_address, *layout.controller().ip());
    assert_ne!(layout.controller(), Layout::of(&spec("other", 1, 1)).controller());
}

#[test]
fn daemons_start_from_the_switch_to_the_servers() {
    let spec = spec("rack", 2, 1);
    let layout = Layout::of(&spec);
    let stages = stages(&RackState::new(spec), &layout, "/state".as_ref());
    let names: Vec<Vec<&str>> =
        stages.iter().map(|stage| stage.iter().map(|it| it.name.as_str()).collect()).collect();
    let last = vec!["memserver-s1", "memserver-s2", HOSTS];
    assert_eq!(names, [vec![SWITCH], vec![CONTROLLER], last]);
    let ports = stages[0][0].arguments.iter().filter(|it| *it == "--port").count();
    assert_eq!(ports, 4, "three endpoints and the controller");
}

#[test]
fn a_record_is_locked_written_whole_and_removed() {
    let (root, _scratch) = scratch();
    let spec = spec("one", 1, 1);
    let directory = root.create(&spec.name).expect("made");
    assert!(directory.read().expect("readable").is_none());
    assert!(matches!(root.lock(&spec.name), Err(StateError::Busy(_))));
    assert!(matches!(root.create(&spec.name), Err(StateError::Exists(_))));
    let mut state = RackState::new(spec.clone());
    directory.write(&state).expect("written");
    state.phase = Phase::Up;
    directory.write(&state).expect("written again");
    assert_eq!(root.read(&spec.name).expect("readable"), state);
    assert_eq!(root.names().expect("listed"), std::slice::from_ref(&spec.name));
    directory.remove().expect("removed");
    drop(directory);
    assert!(matches!(root.lock(&spec.name), Err(StateError::Unknown(_))));
    assert!(matches!(root.read(&spec.name), Err(StateError::Unknown(_))));
    assert!(!root.path().exists(), "the last one takes the directory along");
}

#[test]
fn records_that_others_may_write_are_not_trusted() {
    use std::os::unix::fs::PermissionsExt;
    let (root, _scratch) = scratch();
    let name: RackName = "one".parse().expect("a name");
    drop(root.create(&name).expect("made"));
    let open = std::fs::Permissions::from_mode(0o777);
    std::fs::set_permissions(root.path(), open).expect("opened");
    assert!(matches!(root.read(&name), Err(StateError::NotPrivate(_))));
    assert!(matches!(root.lock(&name), Err(StateError::NotPrivate(_))));
}

#[test]
fn the_only_rack_that_is_up_is_meant_unless_one_is_named() {
    let (root, _scratch) = scratch();
    assert!(matches!(root.choose(None), Err(StateError::None)));
    let record = |name: &str, phase| {
        let state = RackState { phase, ..RackState::new(spec(name, 1, 1)) };
        let directory = root.create(&state.spec.name).expect("made");
        directory.write(&state).expect("written");
        directory
    };
    let chosen = |named: Option<&str>| {
        let named = named.map(|name| name.parse().expect("a name"));
        root.choose(named.as_ref()).map(|name| name.to_string())
    };
    let _dead = record("dead", Phase::Building);
    assert_eq!(chosen(None).expect("the only one"), "dead");
    let _one = record("one", Phase::Up);
    assert_eq!(chosen(None).expect("the only one that is up"), "one");
    let _two = record("two", Phase::Up);
    let error = chosen(None).expect_err("either could be meant");
    assert!(error.to_string().contains("(one, two): select one with --rack"), "{error}");
    assert_eq!(chosen(Some("three")).expect("named"), "three");
}

#[test]
fn a_record_that_was_cut_short_names_the_command_that_helps() {
    let (root, _scratch) = scratch();
    let state = RackState::new(spec("one", 1, 1));
    let directory = root.create(&state.spec.name).expect("made");
    directory.write(&state).expect("written");
    let file = directory.path().join("state.json");
    let text = std::fs::read_to_string(&file).expect("readable");
    std::fs::write(&file, &text[..text.len() / 2]).expect("written");
    let error = root.read(&state.spec.name).expect_err("damaged");
    assert!(error.to_string().contains("`bluebridge rack down --rack one`"), "{error}");
    directory.remove().expect("removed");
}

#[test]
fn a_data_plane_that_cannot_be_had_is_refused_with_what_to_do() {
    use crate::rack::check_switch;
    let words = |is_rootless, has_ebpf| {
        let refused = check_switch(DataPlane::Ebpf, is_rootless, has_ebpf);
        refused.map_err(|error| error.to_string())
    };
    assert_eq!(words(false, true), Ok(()));
    assert!(words(true, true).is_err_and(|words| words.contains("needs root")));
    let not_built = words(false, false).expect_err("it was not built");
    assert!(
        not_built.contains("install clang") && not_built.contains("--switch soft"),
        "{not_built}"
    );
    for (switch, name) in [(DataPlane::Bmv2, "BMv2"), (DataPlane::Ovs, "Open vSwitch")] {
        let refused = check_switch(switch, true, true).expect_err("it needs root").to_string();
        assert_eq!(refused, format!("{name} needs root; use --switch soft"));
    }
    check_switch(DataPlane::Soft, true, false).expect("it needs nothing");
}
