//! A rehearsed attack repeated with real packets: through the soft and the eBPF switch, in network
//! namespaces, at a memory server that is a process of its own.

use std::{
    collections::HashMap,
    env, fs,
    fs::File,
    io::{Read as _, Write as _},
    net::Ipv6Addr,
    os::fd::AsFd as _,
    process::{Child, Command, Stdio},
    time::Duration,
};

use bluebridge::{Client, EndpointConfig, NodeId, Placement, Region, Space};
use bluebridge_memserver::{Claim, ServerConfig, run};
use bluebridge_p4::pipeline::{Action, DropReason, Entry, Forward, Key, MacAddr, SwitchPort};
use bluebridge_switch::{dataplane::DataPlane, ebpf::EbpfSwitch, soft::Switch};
use bluebridge_testkit::{ip, namespace::in_thread, require_ebpf};
use bluebridge_tests::hostile::{
    GENERATION, Recorded, VICTIM, World,
    forge::{FRAME_HEAD_BYTES, fix_udp_checksum},
    usual_limits,
};
use bluebridge_transport::{
    Transport as _, Wait,
    udp::{UdpConfig, UdpTransport},
};
use bluebridge_wire::{Datagram, UDP_PORT, seal};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// Hostile packets of the rehearsal; a third of them go to the server that exists here.
const PACKETS: u64 = 160_000;
const SEED: u64 = 0x0dd_ba11;
/// Set in the child that is the memory server.
const SERVE: &str = "BLUEBRIDGE_HOSTILE_SERVE";
const SERVER_PORT: u16 = 5;
const ATTACKERS: [(u16, u16, u16); 4] = [(2, 1, 1001), (3, 1, 1004), (3, 1, 1009), (4, 2, 1002)];
/// How often an OPEN is sent; a real server may be full where the rehearsal's was not.
const OPEN_TRIES: usize = 2;
/// The most by which the server may grow: far below what it would need to store the whole attack.
const GROWTH_KIB_MAX: u64 = 64 * 1024;

/// Namespaces and links, removed when dropped.
struct Namespaces(&'static str);

impl Namespaces {
    fn new(tag: &'static str) -> Self {
        let this = Self(tag);
        this.remove();
        for part in ["sw", "srv", "atk", "vic"] {
            ip(&format!("netns add {}", this.name(part)));
            this.within(part, "link set lo up");
        }
        for (port, part) in [(1, "vic"), (2, "atk"), (3, "atk"), (4, "atk"), (SERVER_PORT, "srv")] {
            this.link(port, part);
        }
        this
    }

    fn name(&self, part: &str) -> String {
        // Of this process alone: the machine has one list of namespaces.
        format!("hostile-{}-{}-{part}", self.0, std::process::id())
    }

    fn within(&self, part: &str, arguments: &str) {
        ip(&format!("-n {} {arguments}", self.name(part)));
    }

    /// A link between switch port and host, and the host's routes (docs/architecture.md).
    fn link(&self, port: u16, part: &str) {
        let (switch, host) = (self.name("sw"), self.name(part));
        let (here, there) = (format!("p{port}"), format!("e{port}"));
        let mac = mac(port);
        ip(&format!(
            "link add {here} netns {switch} mtu 9000 type veth peer name {there} netns {host} \
             mtu 9000 address {mac}"
        ));
        self.within("sw", &format!("link set {here} up"));
        self.within(part, &format!("link set {there} up"));
        if port == SERVER_PORT || port <= 2 {
            let gateway = "fe80::bb";
            let neighbour = format!("neigh add {gateway} lladdr 02:bb:00:00:00:00 dev {there}");
            self.within(part, &format!("-6 {neighbour} nud permanent"));
            self.within(part, &format!("-6 route add fdbb::/16 via {gateway} dev {there}"));
            self.within(part, "-6 route add local fdbb::/16 dev lo table 100");
        }
        self.within(part, &format!("-6 rule add iif {there} to fdbb::/16 lookup 100 pref 1"));
    }

    /// Moves the calling thread into the namespace.
    fn enter(&self, part: &str) {
        let file = File::open(format!("/run/netns/{}", self.name(part))).expect("it was made");
        move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))
            .expect("root may enter");
    }

    fn remove(&self) {
        for part in ["sw", "srv", "atk", "vic"] {
            let name = self.name(part);
            if fs::exists(format!("/run/netns/{name}")).unwrap_or(false) {
                ip(&format!("netns del {name}"));
            }
        }
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        self.remove();
    }
}

const fn mac(port: u16) -> MacAddr {
    let [_, low] = port.to_be_bytes();
    MacAddr([2, 0xbb, 0, 0, 1, low])
}

/// The memory server's process.
struct Served(Child);

impl Served {
    fn start(namespaces: &Namespaces) -> Self {
        let child = Command::new("ip")
            .args(["netns", "exec", &namespaces.name("srv")])
            .arg(env::current_exe().expect("this program has a path"))
            .args(["--exact", "hostile_rack::the_server_of_the_rack", "--nocapture"])
            .env(SERVE, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        Self(child.expect("the server starts"))
    }

    /// Resident memory in KiB. `ip netns exec` becomes the program it runs.
    fn resident_kib(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.0.id())).expect("it runs");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let words = line.and_then(|line| line.split_whitespace().next());
        words.expect("a size").parse().expect("a number")
    }

    /// Ends it and gives its counts.
    fn stop(mut self) -> HashMap<String, u64> {
        drop(self.0.stdin.take());
        let mut text = String::new();
        let out = self.0.stdout.as_mut().expect("it is piped");
        out.read_to_string(&mut text).expect("it prints");
        let ended = self.0.wait().expect("it ends");
        assert!(ended.success(), "the memory server failed: {ended}\n{text}");
        let count = |line: &str| {
            let (name, count) = line.strip_prefix("count ")?.rsplit_once(' ')?;
            Some((name.to_owned(), count.parse().ok()?))
        };
        text.lines().filter_map(count).collect()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The memory server, when this program is started as one.
#[test]
fn the_server_of_the_rack() {
    if env::var_os(SERVE).is_none() {
        return;
    }
    let config = ServerConfig {
        generation: GENERATION,
        spaces: vec![Space(1), Space(2), VICTIM.0],
        claim: Claim::OnDemand,
        quotas: vec![(Space(1), 900), (Space(2), 64)],
        limits: usual_limits(),
        ..ServerConfig::new(Space(1), NodeId(1), 1, 8 << 20, 0x5eed)
    };
    let carrier = UdpTransport::open(&UdpConfig { port: UDP_PORT, ..UdpConfig::default() });
    let server = run(&config, vec![carrier.expect("the socket opens")]).expect("it starts");
    let mut rest = Vec::new();
    std::io::stdin().read_to_end(&mut rest).expect("the parent closes it");
    assert!(!server.is_failed());
    let totals = server.stop().expect("no shard failed").remove(0);
    let mut out = std::io::stdout().lock();
    let mut print = |name: String, count: u64| {
        writeln!(out, "\ncount {name} {count}").expect("the parent reads");
    };
    totals.events.iter().for_each(|(event, count)| print(event.name().into(), *count));
    totals.replies.iter().for_each(|(status, count)| print(format!("{status:?}"), *count));
    print("sessions".into(), totals.session_count);
}

fn program(switch: &mut dyn DataPlane) {
    for port in [1, 2, 3, 4, SERVER_PORT] {
        switch.add_port(SwitchPort(port), &format!("p{port}")).expect("the link is there");
    }
    let scope = |space: u16| 0xfdbb_0000 | u32::from(space);
    let mut insert = |key, action| {
        let entry = Entry { key, action, idle_timeout: None, metadata: Vec::new() };
        switch.insert(&entry).expect("a good entry");
    };
    let clients = ATTACKERS.into_iter().chain([(1, VICTIM.0.0, VICTIM.1.0)]);
    let servers = [1, 2, VICTIM.0.0].map(|space| (SERVER_PORT, space, 1));
    for (port, space, node) in clients.chain(servers) {
        let (src_scope, port) = (scope(space), SwitchPort(port));
        insert(Key::IngressGuard { port, src_scope, src_node: node }, Action::Allow);
        let prefix = (u128::from(scope(space)) << 80) | (u128::from(node) << 64);
        let forward = Forward { port, dst_mac: mac(port.0) };
        insert(Key::Directory { prefix, prefix_len: 48 }, Action::Forward(forward));
    }
}

/// Repeats the rehearsal: sessions get the ids that the real server assigned.
struct Attack {
    injector: Switch,
    replies: UdpTransport,
    sessions: HashMap<u64, u64>,
    sent: u64,
}

impl Attack {
    fn repeat(&mut self, recorded: &Recorded) {
        let mut frame = recorded.frame.clone();
        self.adopt_session(&mut frame);
        // Two of the rehearsal's three servers do not exist here.
        let is_here = frame.get(42..44) == Some(&[0, 1]);
        if let Some(id) = recorded.opened.filter(|_| is_here) {
            while self.replies.receive(Wait::NONE).expect("the socket works") > 0 {}
            for _ in 0..OPEN_TRIES {
                self.send(recorded.port, &frame);
                if let Some(real) = self.opened() {
                    self.sessions.insert(id, real);
                    return;
                }
            }
            return;
        }
        self.send(recorded.port, &frame);
        // Responses are read and discarded, so that the socket stays empty.
        if self.sent.is_multiple_of(64) {
            while self.replies.receive(Wait::NONE).expect("the socket works") > 0 {}
        }
    }

    fn send(&mut self, port: SwitchPort, frame: &[u8]) {
        // A link takes no frame without a whole Ethernet header.
        if self.injector.packet_out(port, frame).is_ok() {
            self.sent += 1;
        }
    }

    fn opened(&mut self) -> Option<u64> {
        let deadline = self.replies.now() + Duration::from_millis(10);
        while self.replies.now() < deadline {
            let count = self.replies.receive(Wait::until(deadline)).expect("the socket works");
            for index in 0..count {
                let incoming = self.replies.incoming(index);
                let parsed =
                    Datagram::parse(incoming.source, incoming.destination, incoming.payload);
                let reply = parsed.expect("the server's replies are well formed");
                let is_open = reply.command().command() == Some(bluebridge_wire::Command::Open);
                if is_open && reply.from.tag == 0 {
                    return Some(reply.header.session);
                }
            }
        }
        None
    }

    fn adopt_session(&self, frame: &mut [u8]) {
        let address = |frame: &[u8], at: usize| {
            let bytes: Option<&[u8; 16]> = frame.get(at..).and_then(|bytes| bytes.first_chunk());
            bytes.map(|bytes| Ipv6Addr::from(*bytes))
        };
        let (Some(source), Some(destination)) = (address(frame, 22), address(frame, 38)) else {
            return;
        };
        let Some(payload) = frame.get_mut(FRAME_HEAD_BYTES..) else { return };
        let Ok(datagram) = Datagram::parse(source, destination, payload) else { return };
        let Some(real) = self.sessions.get(&datagram.header.session) else { return };
        payload[32..40].copy_from_slice(&real.to_be_bytes());
        seal(source, destination, payload, &[]);
        fix_udp_checksum(frame);
    }
}

fn victim() -> Client<UdpTransport> {
    let mut config = EndpointConfig::new(VICTIM.0, VICTIM.1, 5);
    config.placement = Placement::Node(NodeId(1));
    let carrier = UdpTransport::open(&UdpConfig { port: 4001, ..UdpConfig::default() });
    Client::open(config, carrier.expect("the socket opens"))
}

fn victim_data(number: usize) -> Vec<u8> {
    (0..20_000).map(|at: usize| at.wrapping_mul(number + 1).to_le_bytes()[0]).collect()
}

fn survive(tag: &'static str, open: impl FnOnce() -> Box<dyn DataPlane>) {
    let recording = World::rehearse(SEED, PACKETS);
    let namespaces = Namespaces::new(tag);
    namespaces.enter("sw");
    let mut switch = open();
    program(switch.as_mut());
    let served = Served::start(&namespaces);
    namespaces.enter("vic");
    let mut client = victim();
    let regions: Vec<Region> =
        (0..8).map(|n| client.alloc_write(&victim_data(n)).expect("there is room")).collect();
    let before_kib = served.resident_kib();
    namespaces.enter("atk");
    let mut injector = Switch::start(Duration::ZERO).expect("packet sockets open");
    for port in [2, 3, 4] {
        injector.add_port(SwitchPort(port), &format!("e{port}")).expect("the link is there");
    }
    let carrier = UdpTransport::open(&UdpConfig { port: 4000, ..UdpConfig::default() });
    let replies = carrier.expect("the socket opens");
    let mut attack = Attack { injector, replies, sessions: HashMap::new(), sent: 0 };
    for recorded in &recording {
        attack.repeat(recorded);
    }
    namespaces.enter("vic");
    let growth = served.resident_kib().saturating_sub(before_kib);
    // At once, and with sessions and pages from before.
    for (number, region) in regions.iter().enumerate() {
        let mut back = vec![0; 20_000];
        client.read(region.base(), &mut back).expect("it is ours");
        assert!(back == victim_data(number), "the victim's data was changed");
        client.delete(*region).expect("it is ours");
    }
    let usage = client.stat(NodeId(1)).expect("it answers");
    client.close().expect("the carrier works");
    let drops = switch.drops().expect("they can be read");
    let counts = served.stop();
    let mut sorted: Vec<_> = counts.iter().filter(|(_, count)| **count > 0).collect();
    sorted.sort();
    println!("{tag}: {} packets sent, {growth} KiB grown, {usage:?}\n{sorted:?}", attack.sent);
    for reason in DropReason::ALL {
        println!("drop {:<20} {:>9}", reason.name(), drops.of(reason));
    }
    assert!(attack.sent > 100_000, "{}", attack.sent);
    assert!(growth < GROWTH_KIB_MAX, "the server grew by {growth} KiB");
    assert!(counts["received"] > 20_000, "most of what the server got is well formed");
    assert!(usage.session_count <= u64::from(usual_limits().session_count));
    for reason in ["Ok", "Malformed", "NoSession", "StaleTag", "WrongSpace", "UnknownCommand"] {
        assert!(counts[reason] > 0, "never a status: {reason}");
    }
    for reason in [
        DropReason::Tagged,
        DropReason::ForeignDestination,
        DropReason::HopLimit,
        DropReason::Guard,
        DropReason::NoRoute,
        DropReason::Malformed,
        DropReason::NextHeader,
    ] {
        assert!(drops.of(reason) > 0, "nothing was dropped as {}", reason.name());
    }
}

#[test]
fn a_rack_with_the_soft_switch_survives() {
    // The switch's threads change their namespace.
    in_thread(|| {
        survive("soft", || Box::new(Switch::start(Duration::ZERO).expect("it starts")));
    });
}

#[test]
fn a_rack_with_the_ebpf_switch_survives() {
    struct Pinned(String);
    impl Drop for Pinned {
        fn drop(&mut self) {
            if let Err(error) = EbpfSwitch::remove(&self.0) {
                eprintln!("{} was not removed: {error}", self.0);
            }
        }
    }
    require_ebpf(EbpfSwitch::is_built());
    in_thread(|| {
        let pinned = Pinned(format!("hostile-rack-{}", std::process::id()));
        EbpfSwitch::remove(&pinned.0).expect("what an earlier run left can be removed");
        survive("ebpf", || Box::new(EbpfSwitch::open(&pinned.0).expect("it opens")));
    });
}
