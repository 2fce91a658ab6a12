//! Racks of this process: their network, their daemons, and complete removal.

use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv6Addr, SocketAddrV6, TcpListener, TcpStream, UdpSocket};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bluebridge_rack::network::host::GATEWAY;
use bluebridge_rack::network::{Netlink, NetworkError};
use bluebridge_rack::process::{ProcessRecord, Stopped};
use bluebridge_rack::spec::{DataPlane, Node, RackSpec, Redirects};
use bluebridge_rack::state::{StateError, StateRoot};
use bluebridge_rack::teardown::take_down_unrecorded;
use bluebridge_rack::{Cancel, DaemonFailure, Rack, RackError, Site};
use bluebridge_switch::ebpf::EbpfSwitch;
use bluebridge_switch::offload::has_transmit_offloads;
use bluebridge_testkit::{Scratch, example, own, require_root};

const SERVER: Node = Node::Server(1);
const CLIENT: Node = Node::Client(1);

fn spec(name: &str) -> RackSpec {
    RackSpec {
        name: own(name).parse().expect("a name"),
        servers: 2,
        clients: 1,
        mtu: "9000,s1=1500,c1=1280".parse().expect("sizes"),
        switch: DataPlane::Soft,
        memory: "16M".parse().expect("a size"),
        redirects: Redirects::default(),
        direct_reads: true,
    }
}

fn site(scratch: &Scratch) -> Site {
    require_root();
    Site::with_state_root(StateRoot::at(scratch.path().join("state"))).expect("root")
}

fn build(scratch: &Scratch, name: &str) -> Rack {
    Rack::build(&site(scratch), spec(name), Cancel::default()).expect("built")
}

fn namespaces(name: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir("/run/netns").map(|entries| entries.flatten().collect::<Vec<_>>());
    let paths = entries.unwrap_or_default().into_iter().map(|entry| entry.path());
    paths.filter(|path| path.to_string_lossy().contains(&format!("/bb-{}-", own(name)))).collect()
}

fn assert_nothing_left(scratch: &Scratch, name: &str) {
    assert_nothing_left_but_files(scratch, name);
    assert!(!scratch.path().join("state").join(own(name)).exists());
}

fn assert_nothing_left_but_files(scratch: &Scratch, name: &str) {
    assert_eq!(namespaces(name), Vec::<PathBuf>::new());
    let mounts = fs::read_to_string("/proc/self/mounts").expect("readable");
    assert!(!mounts.contains(&format!("bb-{}-", own(name))), "{mounts}");
    let state = scratch.path().join("state");
    assert!(!mounts.contains(&*state.to_string_lossy()), "{mounts}");
}

/// A kernel bridge instead of the switch, sufficient for traffic that is forwarded by address.
fn bridge(rack: &Rack) {
    let ports: Vec<_> = rack.layout().ports().iter().map(|port| port.interface.clone()).collect();
    let made = rack.enter(Node::Switch, || {
        let netlink = Netlink::open()?;
        netlink.add_bridge("bridge")?;
        ports.iter().try_for_each(|port| netlink.join_bridge(port, "bridge"))?;
        netlink.wait_until_running("bridge")
    });
    made.expect("entered").expect("bridged");
}

fn talk_to_controller(rack: &Rack, node: Node) -> Vec<u8> {
    let controller = rack.layout().controller();
    let listener = rack.enter(Node::Switch, || TcpListener::bind(controller));
    let listener = listener.expect("entered").expect("bound");
    let mut stream = rack
        .enter(node, || TcpStream::connect_timeout(&controller.into(), Duration::from_secs(5)))
        .expect("entered")
        .expect("connected");
    // Larger than any link, so that the ends must agree on the smaller size.
    stream.write_all(&[7; 20_000]).expect("sent");
    drop(stream);
    let mut received = Vec::new();
    let (mut accepted, _) = listener.accept().expect("accepted");
    accepted.set_read_timeout(Some(Duration::from_secs(5))).expect("set");
    accepted.read_to_end(&mut received).expect("received");
    received
}

#[test]
fn a_rack_joins_every_endpoint_to_the_controller_and_goes_without_a_trace() {
    let scratch = Scratch::new("rack-joins");
    let rack = build(&scratch, "rack-joins");
    assert_eq!(namespaces("rack-joins").len(), 4);
    bridge(&rack);
    for node in rack.spec().endpoints() {
        assert_eq!(talk_to_controller(&rack, node), [7; 20_000], "{node}");
    }
    for port in rack.layout().ports() {
        let looked = rack.enter(port.peer, || {
            let link = Netlink::open()?.link(port.peer_interface)?;
            Ok::<_, NetworkError>((link, has_transmit_offloads(port.peer_interface)?))
        });
        let (link, offloads) = looked.expect("entered").expect("looked");
        assert_eq!((link.mtu, link.mac), (port.mtu, Some(port.peer_mac)), "{port:?}");
        assert!(!offloads, "a soft switch sees packets as they are sent: {port:?}");
    }
    drop(rack);
    assert_nothing_left(&scratch, "rack-joins");
}

#[test]
fn a_pointer_crosses_the_rack() {
    let scratch = Scratch::new("rack-crosses");
    let rack = build(&scratch, "rack-crosses");
    bridge(&rack);
    // The bridge has no entries for pointers, so the gateway address belongs to the only server here.
    let server = rack.layout().port_of(SERVER).expect("a port").peer_mac;
    let neighbour =
        rack.enter(CLIENT, || Netlink::open()?.add_permanent_neighbour("eth0", GATEWAY, server));
    neighbour.expect("entered").expect("set");
    let bind = || UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 4000));
    let receiver = rack.enter(SERVER, bind).expect("entered").expect("bound");
    let sender = rack.enter(CLIENT, bind).expect("entered").expect("bound");
    receiver.set_read_timeout(Some(Duration::from_secs(5))).expect("set");
    let pointer = SocketAddrV6::new(Ipv6Addr::new(0xfdbb, 1, 9, 0, 0, 0, 1, 0), 4000, 0, 0);
    sender.send_to(b"read", pointer).expect("sent");
    let mut bytes = [0; 8];
    let (length, _) = receiver.recv_from(&mut bytes).expect("received");
    assert_eq!(&bytes[..length], b"read");
}

#[test]
fn two_racks_stand_side_by_side_and_a_name_is_given_once() {
    let scratch = Scratch::new("rack-two");
    let first = build(&scratch, "rack-two-a");
    let second = build(&scratch, "rack-two-b");
    let taken = Rack::build(&site(&scratch), spec("rack-two-a"), Cancel::default());
    let error = taken.expect_err("there is one");
    assert!(matches!(error, RackError::State(StateError::Exists(_))), "{error}");
    bridge(&second);
    drop(first);
    assert_nothing_left(&scratch, "rack-two-a");
    assert_eq!(talk_to_controller(&second, SERVER).len(), 20_000, "the other one stands");
    drop(second);
    assert_nothing_left(&scratch, "rack-two-b");
}

#[test]
fn the_namespace_of_another_program_is_left_alone() {
    let scratch = Scratch::new("rack-else");
    require_root();
    fs::create_dir_all("/run/netns").expect("made");
    let foreign = format!("/run/netns/bb-{}-s1", own("rack-else"));
    let foreign = Path::new(&foreign);
    fs::write(foreign, "mine").expect("written");
    let built = Rack::build(&site(&scratch), spec("rack-else"), Cancel::default());
    let left = fs::read_to_string(foreign);
    fs::remove_file(foreign).expect("removed");
    assert!(matches!(built.expect_err("refused"), RackError::NamespaceTaken(_)));
    assert_eq!(left.expect("there"), "mine");
    assert_nothing_left(&scratch, "rack-else");
}

#[test]
fn a_cancelled_build_leaves_nothing() {
    let scratch = Scratch::new("rack-cancel");
    let cancel = Cancel::default();
    cancel.cancel();
    let built = Rack::build(&site(&scratch), spec("rack-cancel"), cancel);
    assert!(matches!(built.expect_err("cancelled"), RackError::Cancelled));
    assert_nothing_left(&scratch, "rack-cancel");
}

fn script(scratch: &Scratch, text: &str) -> PathBuf {
    let path = scratch.path().join("daemon.sh");
    fs::write(&path, format!("#!/bin/sh\n{text}\n")).expect("written");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("executable");
    path
}

#[test]
fn daemons_run_in_their_namespaces_until_the_rack_goes() {
    let scratch = Scratch::new("rack-daemons");
    let mut rack = build(&scratch, "rack-daemons");
    rack.start_daemons(&example("ready_daemon"), Duration::from_secs(10)).expect("started");
    let daemons = rack.state().daemons.clone();
    assert_eq!(daemons.len(), 5);
    for daemon in &daemons {
        let process = daemon.process.as_ref().expect("started");
        assert!(daemon.ready && process.is_running(), "{daemon:?}");
        let own = fs::read_link(format!("/proc/{}/ns/net", process.pid)).expect("readable");
        let there = rack.enter(daemon.node, || fs::read_link("/proc/thread-self/ns/net"));
        assert_eq!(own, there.expect("entered").expect("readable"));
    }
    // A process without a record: in a namespace, without the rack's mark.
    let shell = rack.enter(CLIENT, || std::process::Command::new("sleep").arg("60").spawn());
    let mut shell = shell.expect("entered").expect("started");
    let taken = rack.take_down().expect("taken down");
    assert!(taken.daemons.iter().all(|daemon| daemon.end == Stopped::Terminated), "{taken:?}");
    assert_eq!((taken.daemons.len(), taken.namespace_count), (5, 4));
    assert_eq!(taken.others.iter().map(|it| it.pid).collect::<Vec<_>>(), [shell.id()]);
    assert!(daemons.iter().flat_map(|it| &it.process).all(|process| !process.is_running()));
    let _ = shell.wait();
    assert_nothing_left(&scratch, "rack-daemons");
}

/// How a record is lost.
#[derive(Clone, Copy, Debug)]
enum Loss {
    /// Only the first half of the file is left.
    CutShort,
    /// The file is gone.
    File,
    /// The rack's directory is gone, except for what is mounted in it.
    Directory,
}

#[test]
fn without_its_record_a_rack_is_taken_down_by_what_is_found() {
    for loss in [Loss::CutShort, Loss::File, Loss::Directory] {
        let scratch = Scratch::new("rack-lost");
        let name = spec("rack-lost").name;
        // Another rack, whose name starts with this one's: it stays.
        let longer = format!("{name}-s1").parse().expect("a name");
        let other = RackSpec { name: longer, ..spec("rack-lost") };
        let other = Rack::build(&site(&scratch), other, Cancel::default()).expect("built");
        let switch = if EbpfSwitch::is_built() { DataPlane::Ebpf } else { DataPlane::Soft };
        let lost = RackSpec { switch, ..spec("rack-lost") };
        let mut rack = Rack::build(&site(&scratch), lost, Cancel::default()).expect("built");
        rack.start_daemons(&example("ready_daemon"), Duration::from_secs(10)).expect("started");
        let daemons = rack.state().daemons.clone();
        let shell = rack.enter(CLIENT, || std::process::Command::new("sleep").arg("60").spawn());
        let mut shell = shell.expect("entered").expect("started");
        let root = StateRoot::at(scratch.path().join("state"));
        let directory = root.path().join(name.as_str());
        let file = directory.join("state.json");
        // The rack's process is gone, as after a crash: none of its daemons may run at the end of the test.
        std::mem::forget(rack);
        match loss {
            Loss::CutShort => {
                let text = fs::read_to_string(&file).expect("readable");
                fs::write(&file, &text[..text.len() / 2]).expect("written");
            }
            Loss::File => fs::remove_file(&file).expect("removed"),
            Loss::Directory => {
                let bpf = directory.join("bpf");
                let _ = bluebridge_rack::namespace::unmount(&bpf);
                fs::remove_dir_all(&directory).expect("removed");
            }
        }
        let taken = take_down_unrecorded(&root, &name, Duration::from_secs(5)).expect("taken down");
        let stopped: Vec<_> = taken.daemons.iter().map(|daemon| daemon.pid).collect();
        for daemon in &daemons {
            let process = daemon.process.as_ref().expect("started");
            assert!(
                stopped.contains(&process.pid) && !process.is_running(),
                "{loss:?}: {daemon:?}"
            );
        }
        assert_eq!(taken.others.iter().map(|it| it.pid).collect::<Vec<_>>(), [shell.id()]);
        assert_eq!((taken.unrecorded, taken.namespace_count), (true, 4), "{loss:?}");
        let is_mounted = switch == DataPlane::Ebpf && !matches!(loss, Loss::Directory);
        assert_eq!(taken.mount_count, usize::from(is_mounted), "{loss:?}");
        let _ = shell.wait();
        let again = take_down_unrecorded(&root, &name, Duration::from_secs(5)).expect("nothing");
        assert!(again.is_empty(), "{again:?}");
        let there = other.enter(CLIENT, || Netlink::open()?.link("eth0"));
        assert!(there.expect("entered").expect("there").enabled, "the other rack stands");
        drop(other);
        assert_nothing_left_but_files(&scratch, "rack-lost");
    }
}

#[test]
fn a_rack_that_is_recorded_elsewhere_is_left_alone() {
    let scratch = Scratch::new("rack-elsewhere");
    let mut rack = build(&scratch, "rack-elsewhere");
    rack.start_daemons(&example("ready_daemon"), Duration::from_secs(10)).expect("started");
    let root = StateRoot::at(scratch.path().join("another"));
    let refused = take_down_unrecorded(&root, &rack.spec().name, Duration::from_secs(5));
    let error = refused.expect_err("it is not recorded there").to_string();
    assert!(error.contains(&format!("BLUEBRIDGE_STATE={}", scratch.path().display())), "{error}");
    assert!(rack.state().daemons.iter().flat_map(|it| &it.process).all(|it| it.is_running()));
    drop(rack);
    assert_nothing_left(&scratch, "rack-elsewhere");
}

#[test]
fn a_rack_without_processes_that_is_recorded_elsewhere_is_left_alone() {
    let scratch = Scratch::new("rack-quiet");
    let rack = build(&scratch, "rack-quiet");
    let name = rack.spec().name.clone();
    let [own, other] = ["state", "another"].map(|root| StateRoot::at(scratch.path().join(root)));
    let refused = take_down_unrecorded(&other, &name, Duration::from_secs(5));
    let error = refused.expect_err("it is not recorded there").to_string();
    assert!(error.contains(&format!("BLUEBRIDGE_STATE={}", own.path().display())), "{error}");
    assert_eq!(namespaces("rack-quiet").len(), 4);
    // The other name of a directory is the same directory.
    let link = scratch.path().join("link");
    std::os::unix::fs::symlink(own.path(), &link).expect("made");
    std::mem::forget(rack);
    let taken = take_down_unrecorded(&StateRoot::at(link), &name, Duration::from_secs(5));
    assert_eq!(taken.expect("taken down").namespace_count, 4);
    fs::remove_dir_all(own.path()).expect("removed");
    assert_nothing_left(&scratch, "rack-quiet");
}

#[test]
fn a_daemon_that_ends_shows_its_last_words() {
    let scratch = Scratch::new("rack-ends");
    let mut rack = build(&scratch, "rack-ends");
    let program = script(&scratch, "echo \"$1 has no memory\" >&2; exit 3");
    let error = rack.start_daemons(&program, Duration::from_secs(10)).expect_err("it ended");
    let RackError::Daemon { name, reason: DaemonFailure::Exited(status), log_tail } = error else {
        panic!("{error}");
    };
    assert_eq!((name.as_str(), status.code()), ("switch", Some(3)));
    assert_eq!(log_tail, "switch has no memory\n");
    drop(rack);
    assert_nothing_left(&scratch, "rack-ends");
}

#[test]
fn a_daemon_that_is_late_is_given_up() {
    let scratch = Scratch::new("rack-late");
    let mut rack = build(&scratch, "rack-late");
    let pid_file = scratch.path().join("pid");
    let program = script(&scratch, &format!("echo $$ > {}; exec sleep 60", pid_file.display()));
    let error = rack.start_daemons(&program, Duration::from_secs(3)).expect_err("it is late");
    assert!(
        matches!(error, RackError::Daemon { reason: DaemonFailure::Late { doing: None, .. }, .. }),
        "{error}"
    );
    let pid = fs::read_to_string(pid_file).expect("started").trim().parse().expect("a number");
    let process = ProcessRecord::of(pid).expect("runs");
    drop(rack);
    assert!(!process.is_running());
    assert_nothing_left(&scratch, "rack-late");
}

#[test]
fn one_that_goes_on_is_waited_for_and_the_one_that_does_not_is_named() {
    let scratch = Scratch::new("rack-slow");
    let mut rack = Rack::build(
        &site(&scratch),
        RackSpec { memory: "1G".parse().expect("a size"), ..spec("rack-slow") },
        Cancel::default(),
    )
    .expect("built");
    let started = rack.start_daemons(&example("slow_daemon"), Duration::from_secs(2));
    let text = started.as_ref().expect_err("s2 never comes").to_string();
    let Err(RackError::Daemon { name, reason: DaemonFailure::Late { doing, .. }, .. }) = started
    else {
        panic!("{text}");
    };
    assert_eq!((name.as_str(), doing.as_deref()), ("memserver-s2", Some("looking for memory")));
    assert!(text.contains("but still looking for memory"), "{text}");
    let ready = rack.state().daemons.iter().map(|it| (it.name.as_str(), it.ready));
    assert!(
        ready.clone().any(|it| it == ("memserver-s1", true)),
        "{:?}",
        ready.collect::<Vec<_>>()
    );
    drop(rack);
    assert_nothing_left(&scratch, "rack-slow");
}
