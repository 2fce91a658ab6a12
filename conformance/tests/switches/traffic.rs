//! Real UDP and TCP between the sockets of two hosts, each in its own namespace.

use std::{
    io::{Read as _, Write as _},
    net::{Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    path::Path,
    process::Command,
    sync::mpsc::{Sender, channel},
    thread::{self, JoinHandle},
    time::Duration,
};

use bluebridge_p4::pipeline::{
    Action, DropReason, Entry, Forward, Impairment, Key, MacAddr, SwitchPort,
};
use bluebridge_testkit::{
    ip,
    namespace::{enter, in_thread},
};

use bluebridge_switch::{
    dataplane::{DataPlane, Table},
    ebpf::{EbpfSwitch, PortMode},
    offload::{disable_transmit_checksums, enable_receive_offload},
    soft::Switch,
};

use crate::embedded::Pinned;

const SCOPE: u32 = 0xfdbb_0001;
const PORT: u16 = 0xfdbb;
/// Where the kernel keeps switches by name.
const PINS: &str = "/sys/fs/bpf/bluebridge";
const TIMEOUT: Duration = Duration::from_secs(20);

type Job = Box<dyn FnOnce() + Send>;

/// A thread in its own network namespace, with one end of a link.
pub(super) struct Host {
    number: u16,
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

impl Host {
    /// Host `number` at the other end of the new interface `sNUMBER` of this namespace.
    pub(super) fn new(number: u16) -> Self {
        let (jobs, queue) = channel::<Job>();
        let (entered, ready) = channel();
        let thread = thread::spawn(move || {
            enter();
            entered.send(rustix::thread::gettid()).expect("the test waits for it");
            queue.into_iter().for_each(|job| job());
        });
        let namespace = ready.recv().expect("the host's thread starts");
        let n = number;
        ip(&format!("link add s{n} mtu 9000 type veth peer name h{n} mtu 9000"));
        ip(&format!("link set h{n} netns {} up", namespace.as_raw_nonzero()));
        ip(&format!("link set s{n} up"));
        let host = Self { number, jobs: Some(jobs), thread: Some(thread) };
        host.run(move || {
            for interface in ["lo", &format!("h{n}")] {
                std::fs::write(format!("/proc/sys/net/ipv6/conf/{interface}/disable_ipv6"), "0")
                    .expect("IPv6 can be switched on");
            }
            ip("link set lo up");
            ip(&format!("link set h{n} addrgenmode none address {}", mac(n)));
            ip(&format!("addr add 10.77.0.{n}/24 dev h{n}"));
            ip(&format!("addr add {}/128 dev h{n} nodad", endpoint(n)));
            ip(&format!("neigh add fe80::fe lladdr 02:00:00:00:00:fe dev h{n} nud permanent"));
            ip(&format!("route add fdbb::/16 via fe80::fe dev h{n} onlink"));
            ip(&format!("-6 rule add iif h{n} to fdbb::/16 lookup 100"));
            ip("route add local fdbb::/16 dev lo table 100");
        });
        host
    }

    /// Runs a function in the host's namespace and waits for it.
    pub(super) fn run<T: Send + 'static>(&self, job: impl FnOnce() -> T + Send + 'static) -> T {
        self.start(job).join().expect("the host's job does not panic")
    }

    /// Runs a function in a thread of the host's namespace.
    pub(super) fn start<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> JoinHandle<T> {
        let (started, handle) = channel();
        let spawn: Job = Box::new(move || {
            started.send(thread::spawn(job)).expect("the test waits for it");
        });
        self.jobs.as_ref().expect("the host runs").send(spawn).expect("the host's thread lives");
        handle.recv().expect("the host's thread lives")
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn mac(number: u16) -> MacAddr {
    let [_, low] = number.to_be_bytes();
    MacAddr([2, 0, 0, 0, 0, low])
}

/// The own address of a host's endpoint.
pub(super) fn endpoint(number: u16) -> Ipv6Addr {
    Ipv6Addr::new(0xfdbb, 1, number, 0, 0x8000, 0, 0, 1)
}

/// A READ of the page at 0x1000 of a host.
pub(super) fn pointer(number: u16) -> Ipv6Addr {
    Ipv6Addr::new(0xfdbb, 1, number, 0x0607, 0, 0, 0, 0x1000)
}

/// Programs a plane for two hosts: guard, directory, and l2 with a flood group.
pub(super) fn program(plane: &mut dyn DataPlane) {
    let entry = |key, action| Entry { key, action, idle_timeout: None, metadata: vec![9] };
    for number in 1..=2 {
        let port = SwitchPort(number);
        let forward = Action::Forward(Forward { port, dst_mac: mac(number) });
        let prefix = (u128::from(SCOPE) << 80) | (u128::from(number) << 64);
        let guard = Key::IngressGuard { port, src_scope: SCOPE, src_node: number };
        for (key, action) in [
            (guard, Action::Allow),
            (Key::Directory { prefix, prefix_len: 48 }, forward.clone()),
            (Key::L2 { dst_mac: mac(number) }, forward),
        ] {
            plane.insert(&entry(key, action)).expect("the tables have room");
        }
    }
    plane.set_group(1, &[SwitchPort(1), SwitchPort(2)]).expect("the ports are there");
    plane.set_flood_group(Some(1)).expect("the group is there");
}

/// Bytes that differ by position.
fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|i| i.wrapping_mul(31).to_le_bytes()[0] ^ i.to_le_bytes()[1]).collect()
}

/// Sends datagrams, single and as trains, from host 1 to a pointer of host 2 and back.
fn exchange_datagrams(one: &Host, two: &Host) {
    let (ready, is_ready) = channel();
    let server = two.start(move || {
        let socket = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, PORT)).expect("the port is free");
        let replies = UdpSocket::bind((endpoint(2), PORT + 1)).expect("the address is there");
        socket.set_read_timeout(Some(TIMEOUT)).expect("timeouts can be set");
        ready.send(()).expect("the test waits for it");
        let mut buffer = vec![0; 65_536];
        loop {
            let (length, from) = socket.recv_from(&mut buffer).expect("a datagram comes");
            if length == 1 {
                return;
            }
            replies.send_to(&buffer[..length], from).expect("the response is sent");
        }
    });
    is_ready.recv().expect("the server starts");
    one.run(|| {
        let socket = UdpSocket::bind((endpoint(1), 0)).expect("the address is there");
        socket.set_read_timeout(Some(TIMEOUT)).expect("timeouts can be set");
        let to = SocketAddr::from((pointer(2), PORT));
        let mut buffer = vec![0; 65_536];
        for length in [2, 64, 1300, 4096, 8900] {
            let sent = pattern(length);
            socket.send_to(&sent, to).expect("the datagram leaves");
            let (received, from) = socket.recv_from(&mut buffer).expect("the response arrives");
            assert_eq!(buffer[..received], sent, "{length} bytes arrive complete");
            assert_eq!(from.ip(), endpoint(2));
        }
        // One train of eight pieces arrives back as eight datagrams.
        let sent = pattern(8 * 4000);
        segment(&socket, 4000);
        socket.send_to(&sent, to).expect("the train leaves");
        for piece in sent.chunks(4000) {
            let received = socket.recv(&mut buffer).expect("a piece arrives");
            assert_eq!(buffer[..received], *piece);
        }
        socket.send_to(&[0], to).expect("the datagram leaves");
    });
    server.join().expect("the server saw everything");
}

/// Reduces the MTU of a host's link.
fn shrink(host: &Host) {
    let n = host.number;
    ip(&format!("link set s{n} mtu 1500"));
    host.run(move || ip(&format!("link set h{n} mtu 1500")));
}

/// Sends a train that is too large for the smaller link of host 2, one that fits, and TCP.
fn exchange_across_sizes(one: &Host, two: &Host, plane: &mut dyn DataPlane) {
    program(plane);
    let (ready, is_ready) = channel();
    let server = two.start(move || {
        let socket = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, PORT)).expect("the port is free");
        socket.set_read_timeout(Some(TIMEOUT)).expect("timeouts can be set");
        ready.send(()).expect("the test waits for it");
        let mut buffer = vec![0; 65_536];
        [(); 8].map(|()| socket.recv(&mut buffer).expect("a datagram comes"))
    });
    is_ready.recv().expect("the server starts");
    one.run(|| {
        let socket = UdpSocket::bind((endpoint(1), 0)).expect("the address is there");
        for piece in [4000u16, 1500 - 48 + 1, 1500 - 48] {
            segment(&socket, i32::from(piece));
            let train = pattern(8 * usize::from(piece));
            socket.send_to(&train, (pointer(2), PORT)).expect("the train leaves");
        }
    });
    assert_eq!(server.join().expect("the server saw everything"), [1500 - 48; 8]);
    let drops = |plane: &mut dyn DataPlane| {
        plane.drops().expect("the plane responds").of(DropReason::Egress)
    };
    assert_eq!(drops(plane), 2, "both of the trains with longer pieces");
    stream(one, two);
    assert_eq!(drops(plane), 2, "TCP keeps to the smaller link");
}

fn segment(socket: &UdpSocket, piece: i32) {
    use std::os::fd::AsRawFd as _;
    // SAFETY: the pointer and the length describe `piece`, which outlives the call.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_UDP,
            libc::UDP_SEGMENT,
            std::ptr::from_ref(&piece).cast(),
            4,
        )
    };
    assert_eq!(result, 0, "UDP_SEGMENT: {}", std::io::Error::last_os_error());
}

/// Sends 8 MiB over TCP from host 1 to host 2, which it finds by ARP: everything through `l2`.
fn stream(one: &Host, two: &Host) {
    const BYTES: usize = 8 << 20;
    let (ready, is_ready) = channel();
    let server = two.start(move || {
        let listener = TcpListener::bind("10.77.0.2:7000").expect("the port is free");
        ready.send(()).expect("the test waits for it");
        let (mut connection, _) = listener.accept().expect("a client connects");
        connection.set_read_timeout(Some(TIMEOUT)).expect("timeouts can be set");
        let mut received = Vec::new();
        connection.read_to_end(&mut received).expect("the stream arrives complete");
        received
    });
    is_ready.recv().expect("the server starts");
    one.run(|| {
        let to = SocketAddr::from(([10, 77, 0, 2], 7000));
        let mut connection = TcpStream::connect_timeout(&to, TIMEOUT).expect("TCP connects");
        connection.set_write_timeout(Some(TIMEOUT)).expect("timeouts can be set");
        connection.write_all(&pattern(BYTES)).expect("the stream leaves");
    });
    assert!(server.join().expect("the server ends") == pattern(BYTES), "8 MiB arrive unchanged");
}

/// Sets a host's offloads so that it can send to an XDP switch and receive from it.
fn settle_for_xdp(host: &Host) {
    let interface = format!("h{}", host.number);
    host.run(move || {
        disable_transmit_checksums(&interface).expect("a veth can switch this off");
        enable_receive_offload(&interface).expect("a veth has GRO");
    });
}

/// The id of the XDP program of an interface.
fn xdp_program(interface: &str) -> String {
    let out = Command::new("ip").args(["-d", "link", "show", interface]).output();
    let said = String::from_utf8(out.expect("ip is there").stdout).expect("ip writes text");
    let mut words = said.split_whitespace().skip_while(|word| *word != "prog/xdp");
    words.nth(2).unwrap_or_else(|| panic!("{interface} has no XDP program: {said}")).to_owned()
}

fn ebpf_carries_traffic(name: &'static str, mode: Option<PortMode>) {
    in_thread(move || {
        let (one, two) = (Host::new(1), Host::new(2));
        let mut pinned = Pinned::open(name);
        for host in [&one, &two] {
            let number = host.number;
            let interface = format!("s{number}");
            let added = pinned.switch.add_port_with(SwitchPort(number), &interface, mode);
            added.expect("the programs attach");
            if mode == Some(PortMode::Xdp) {
                settle_for_xdp(host);
            }
        }
        program(&mut pinned.switch);
        exchange_datagrams(&one, &two);
        stream(&one, &two);
    });
}

fn soft_carries_traffic() {
    let (one, two) = (Host::new(1), Host::new(2));
    let mut switch = Switch::start(Duration::from_micros(20)).expect("the switch starts");
    switch.add_port(SwitchPort(1), "s1").expect("the socket opens");
    switch.add_port(SwitchPort(2), "s2").expect("the socket opens");
    program(&mut switch);
    exchange_datagrams(&one, &two);
    stream(&one, &two);
    // An impaired port splits trains; with `tx off` the kernel fills in the checksums of the pieces,
    // and the receiver checks them.
    let rare = Impairment { corrupt: 1e-9, ..Impairment::default() };
    for number in 1..=2 {
        switch.set_impairment(SwitchPort(number), rare).expect("the port is there");
        disable_transmit_checksums(&format!("s{number}")).expect("a veth can switch this off");
    }
    exchange_datagrams(&one, &two);
    let ports = switch.ports().expect("the thread responds");
    assert!(ports.iter().all(|port| port.rx.packets > 0 && port.tx.packets > 0), "{ports:?}");
}

fn outlive() {
    let (one, two) = (Host::new(1), Host::new(2));
    let mut pinned = Pinned::open("outlive");
    for number in 1..=2 {
        pinned.switch.add_port(SwitchPort(number), &format!("s{number}")).expect("it attaches");
    }
    program(&mut pinned.switch);
    exchange_datagrams(&one, &two);
    let tables = |switch: &mut EbpfSwitch| {
        Table::ALL.map(|table| switch.entries(table).expect("the maps can be read"))
    };
    let names = |switch: &mut EbpfSwitch| -> Vec<_> {
        let ports = switch.ports().expect("the maps can be read");
        ports.into_iter().map(|port| (port.port, port.name, port.mac, port.mtu)).collect()
    };
    let (before, ports) = (tables(&mut pinned.switch), names(&mut pinned.switch));
    // A second agent opens the switch that the first one left, finds everything and changes nothing.
    pinned.switch = EbpfSwitch::open(&pinned.name).expect("the pinned switch opens");
    assert_eq!(tables(&mut pinned.switch), before);
    assert_eq!(names(&mut pinned.switch), ports);
    assert_eq!(pinned.switch.groups().expect("the maps can be read").len(), 1);
    assert_eq!(pinned.switch.flood_group().expect("the maps can be read"), Some(1));
    exchange_datagrams(&one, &two);
    // Removed completely, also when removed twice.
    EbpfSwitch::remove(&pinned.name).expect("it can be removed");
    EbpfSwitch::remove(&pinned.name).expect("it can be removed again");
    assert!(!Path::new(PINS).join(&pinned.name).exists());
    one.run(|| {
        let socket = UdpSocket::bind((endpoint(1), 0)).expect("the address is there");
        socket.send_to(b"lost", (pointer(2), PORT)).expect("the datagram leaves");
    });
    let links =
        Command::new("ip").args(["-d", "link", "show", "s1"]).output().expect("ip is there");
    assert!(!String::from_utf8_lossy(&links.stdout).contains("prog/"), "no program is left");
}

mod root {
    use super::*;

    #[test]
    fn a_switch_that_is_opened_again_renews_its_programs_and_links() {
        in_thread(|| {
            let (one, two) = (Host::new(1), Host::new(2));
            let mut pinned = Pinned::open("renew");
            for host in [&one, &two] {
                let n = host.number;
                let mode = Some(PortMode::Xdp);
                let added = pinned.switch.add_port_with(SwitchPort(n), &format!("s{n}"), mode);
                added.expect("the programs attach");
                settle_for_xdp(host);
            }
            program(&mut pinned.switch);
            let programs = || ["s1", "s2"].map(xdp_program);
            let before = programs();
            pinned.switch = EbpfSwitch::open(&pinned.name).expect("the pinned switch opens");
            let after = programs();
            assert!(before.iter().all(|program| !after.contains(program)), "{before:?} {after:?}");
            exchange_datagrams(&one, &two);
            // By now the programs have the link's new MTU.
            let drops = |switch: &mut EbpfSwitch| {
                switch.drops().expect("the maps can be read").of(DropReason::Egress)
            };
            let none = drops(&mut pinned.switch);
            shrink(&two);
            pinned.switch = EbpfSwitch::open(&pinned.name).expect("the pinned switch opens");
            one.run(|| {
                let socket = UdpSocket::bind((endpoint(1), 0)).expect("the address is there");
                for bytes in [1500 - 48, 1500 - 48 + 1] {
                    let sent = socket.send_to(&pattern(bytes), (pointer(2), PORT));
                    sent.expect("the datagram leaves");
                }
            });
            assert_eq!(drops(&mut pinned.switch), none + 1);
        });
    }

    #[test]
    fn datagrams_and_streams_pass_the_ebpf_switch_to_the_peer() {
        ebpf_carries_traffic("traffic-peer", Some(PortMode::Peer));
    }

    #[test]
    fn datagrams_and_streams_pass_the_ebpf_switch_by_redirect() {
        ebpf_carries_traffic("traffic-redirect", Some(PortMode::Redirect));
    }

    #[test]
    fn datagrams_and_streams_pass_the_xdp_switch() {
        ebpf_carries_traffic("traffic-xdp", Some(PortMode::Xdp));
    }

    #[test]
    fn trains_leave_the_ebpf_switch_only_if_their_pieces_fit_the_link() {
        for mode in [PortMode::Peer, PortMode::Redirect] {
            in_thread(move || {
                let (one, two) = (Host::new(1), Host::new(2));
                shrink(&two);
                let mut pinned = Pinned::open("sizes");
                for number in 1..=2 {
                    let interface = format!("s{number}");
                    let added =
                        pinned.switch.add_port_with(SwitchPort(number), &interface, Some(mode));
                    added.expect("the programs attach");
                }
                exchange_across_sizes(&one, &two, &mut pinned.switch);
            });
        }
    }

    #[test]
    fn trains_leave_the_soft_switch_only_if_their_pieces_fit_the_link() {
        in_thread(|| {
            let (one, two) = (Host::new(1), Host::new(2));
            shrink(&two);
            let mut switch = Switch::start(Duration::ZERO).expect("the switch starts");
            for number in 1..=2 {
                switch.add_port(SwitchPort(number), &format!("s{number}")).expect("it opens");
            }
            exchange_across_sizes(&one, &two, &mut switch);
        });
    }

    #[test]
    fn datagrams_and_streams_pass_the_soft_switch() {
        in_thread(soft_carries_traffic);
    }

    #[test]
    fn a_switch_makes_the_directory_of_its_pins() {
        in_thread(|| {
            // It mounts the file system if necessary, and removes what it created.
            let mounted = Pinned::open("made");
            let directory = Path::new(PINS).join(&mounted.name).join("in/here");
            let directory = directory.as_path();
            for _ in 0..2 {
                EbpfSwitch::open_in(directory).expect("it opens, and opens again");
                assert!(EbpfSwitch::is_pinned_in(directory));
            }
            let others = directory.join("others");
            std::fs::create_dir(&others).expect("a directory");
            EbpfSwitch::remove_in(directory).expect("it can be removed");
            let left: Vec<_> = std::fs::read_dir(directory)
                .expect("readable")
                .flatten()
                .map(|it| it.path())
                .collect();
            assert_eq!(left, [others.as_path()]);
            std::fs::remove_dir(&others).expect("empty");
            drop(EbpfSwitch::open_in(directory).expect("it opens"));
            EbpfSwitch::remove_in(directory).expect("it can be removed");
            assert!(!directory.exists(), "nothing of a switch is left");
            EbpfSwitch::remove_in(directory).expect_err("there is none");
        });
    }

    #[test]
    fn the_switch_outlives_the_agent_and_is_read_back() {
        in_thread(outlive);
    }
}

mod netns {
    use bluebridge_testkit::namespace::in_user_child;

    use super::*;

    #[test]
    fn the_soft_switch_needs_no_root() {
        in_user_child(|| in_thread(soft_carries_traffic));
    }
}
