//! A host with kernel sockets in the fabric: two namespaces connected by one link, without a switch.

use std::io::ErrorKind;
use std::net::{Ipv6Addr, SocketAddrV6, UdpSocket};
use std::os::fd::AsFd;
use std::process::Command;
use std::time::Duration;

use bluebridge_p4::pipeline::MacAddr;
use bluebridge_rack::namespace::{self, NetworkNamespace};
use bluebridge_rack::network::host::{FABRIC, GATEWAY, HostFabric, HostPart};
use bluebridge_rack::network::watch::{InterfaceWatch, Need, Wanted};
use bluebridge_rack::network::{
    Ipv6Setting, LinkEnd, Netlink, NetworkError, set_interface_setting,
};
use bluebridge_testkit::{Scratch, ip, require_root, until};
use bluebridge_wire::Space;
use ipnet::Ipv6Net;

const PORT: u16 = 4000;

fn with_gateway(gateway_mac: MacAddr) -> HostFabric {
    HostFabric { gateway_mac, ..HostFabric::new("eth0") }
}

struct Pair {
    near: NetworkNamespace,
    far: NetworkNamespace,
    _scratch: Scratch,
}

impl Pair {
    fn new(name: &str) -> Self {
        require_root();
        let scratch = Scratch::new(name);
        let pair = Self {
            near: NetworkNamespace::create(&scratch.path().join("near")).expect("made"),
            far: NetworkNamespace::create(&scratch.path().join("far")).expect("made"),
            _scratch: scratch,
        };
        let ends = [(&pair.near, NEAR, 2001), (&pair.far, FAR, 2002)];
        let [near, far] = ends.map(|(namespace, mac, index)| LinkEnd {
            name: "eth0",
            index,
            mac,
            namespace: namespace.as_fd(),
        });
        let link = pair.near.enter(|| Netlink::open()?.add_veth(near, far, 9000));
        link.expect("entered").expect("linked");
        pair
    }

    fn up(&self) {
        // Without a switch, the peer itself acts as the gateway.
        for (namespace, peer) in [(&self.near, FAR), (&self.far, NEAR)] {
            let host = with_gateway(peer);
            let up = namespace.enter(|| host.up(&Netlink::open()?)).expect("entered");
            assert!(up.expect("up").rule_added);
        }
        for namespace in [&self.near, &self.far] {
            let running = namespace.enter(|| Netlink::open()?.wait_until_running("eth0"));
            running.expect("entered").expect("running");
        }
        for (namespace, address) in [(&self.near, 1), (&self.far, 2)] {
            let address = Ipv6Addr::new(0xfdbb, 7, address, 0, 0x8000, 0, 0, 1);
            let given = namespace.enter(|| Netlink::open()?.add_address("lo", address.into()));
            given.expect("entered").expect("given");
        }
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        for namespace in [&self.near, &self.far] {
            let _ = namespace::delete(namespace.path());
        }
    }
}

const NEAR: MacAddr = MacAddr([0x02, 0xbb, 0xff, 0, 0, 1]);
const FAR: MacAddr = MacAddr([0x02, 0xbb, 0xff, 0, 0, 2]);

fn socket() -> UdpSocket {
    let socket = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, PORT)).expect("bound");
    socket.set_read_timeout(Some(Duration::from_secs(5))).expect("set");
    socket
}

/// A pointer of some home node; no interface has its address.
fn pointer(number: u16) -> SocketAddrV6 {
    let address = Ipv6Addr::new(0xfdbb, 7, number % 97, 0, 0, 0, number, 0);
    SocketAddrV6::new(address, PORT, 0, 0)
}

#[test]
fn a_host_receives_every_pointer_and_has_one_neighbour() {
    let pair = Pair::new("rack-host-pointers");
    pair.up();
    let receiver = pair.far.enter(socket).expect("entered");
    let sender = pair.near.enter(socket).expect("entered");
    for number in 0..3000_u16 {
        sender.send_to(&number.to_be_bytes(), pointer(number)).expect("sent");
        let mut bytes = [0; 8];
        let received = receiver.recv_from(&mut bytes);
        let (length, _) = received.unwrap_or_else(|error| panic!("pointer {number}: {error}"));
        assert_eq!(&bytes[..length], number.to_be_bytes());
    }
    let neighbours = pair.near.enter(|| Netlink::open()?.neighbours());
    let neighbours = neighbours.expect("entered").expect("listed");
    // The kernel also lists its own entries for multicast groups, which are never resolved.
    let unicast: Vec<_> = neighbours.iter().filter(|it| !it.address.is_multicast()).collect();
    assert_eq!(unicast.len(), 1, "{unicast:?}");
    assert!(unicast[0].permanent && unicast[0].address == GATEWAY, "{unicast:?}");
}

#[test]
fn a_host_that_is_down_neither_sends_nor_receives_pointers() {
    let pair = Pair::new("rack-host-down");
    pair.up();
    let receiver = pair.far.enter(socket).expect("entered");
    let sender = pair.near.enter(socket).expect("entered");
    let host = with_gateway(NEAR);
    let down = |namespace: &NetworkNamespace| {
        let removal = namespace.enter(|| host.down(&Netlink::open()?)).expect("entered");
        removal.expect("down").was_up
    };

    sender.send_to(b"up", pointer(1)).expect("sent");
    receiver.recv_from(&mut [0; 8]).expect("received while up");
    assert!(down(&pair.far));
    sender.send_to(b"down", pointer(1)).expect("sent");
    receiver.set_read_timeout(Some(Duration::from_millis(500))).expect("set");
    let refused = receiver.recv_from(&mut [0; 8]).expect_err("nothing comes");
    assert_eq!(refused.kind(), ErrorKind::WouldBlock);

    assert!(down(&pair.near));
    let refused = sender.send_to(b"nowhere", pointer(1)).expect_err("no route");
    assert_eq!(refused.kind(), ErrorKind::NetworkUnreachable);
    assert!(!down(&pair.near), "nothing was left");
}

#[test]
fn setting_up_twice_changes_nothing() {
    let pair = Pair::new("rack-host-twice");
    pair.up();
    let again = pair.near.enter(|| {
        let netlink = Netlink::open()?;
        let report = HostFabric::new("eth0").up(&netlink)?;
        Ok::<_, NetworkError>((report, netlink.arrival_interfaces()?))
    });
    let (report, interfaces) = again.expect("entered").expect("up");
    assert!(!report.rule_added);
    assert_eq!(interfaces, ["eth0"]);
}

#[test]
fn a_host_may_use_the_fabric_through_two_interfaces() {
    let pair = Pair::new("rack-host-two");
    pair.up();
    let namespaces = [&pair.near, &pair.far].map(AsFd::as_fd);
    let [near, far] = [(namespaces[0], 2003), (namespaces[1], 2004)].map(|(namespace, index)| {
        let mac = MacAddr([0x02, 0xbb, 0xff, 0, 1, if index == 2003 { 1 } else { 2 }]);
        LinkEnd { name: "eth1", index, mac, namespace }
    });
    let link = pair.near.enter(|| Netlink::open()?.add_veth(near, far, 9000));
    link.expect("entered").expect("linked");
    let checked = pair.near.enter(|| {
        let netlink = Netlink::open()?;
        HostFabric::new("eth1").up(&netlink)?;
        let first = with_gateway(FAR);
        let missing = first.missing(&netlink)?;
        for interface in ["eth0", "eth1"] {
            HostFabric::new(interface).check(&netlink, Space(7))?;
        }
        HostFabric::new("eth1").down(&netlink)?;
        first.check(&netlink, Space(7))?;
        Ok::<_, NetworkError>(missing)
    });
    assert_eq!(checked.expect("entered").expect("both are up"), []);
}

/// The settings of a namespace that setting up a host changes.
fn settings(pair: &Pair) -> impl PartialEq + std::fmt::Debug + use<> {
    let settings = pair.near.enter(|| {
        let netlink = Netlink::open()?;
        let enabled = ["eth0", "lo"].map(|name| netlink.link(name).map(|link| link.enabled).ok());
        let missing = with_gateway(FAR);
        let gateway = netlink.neighbours()?.into_iter().find(|it| it.address == GATEWAY);
        let missing = missing.missing(&netlink)?;
        Ok::<_, NetworkError>((enabled, missing, gateway.and_then(|it| it.mac)))
    });
    settings.expect("entered").expect("looked at")
}

#[test]
fn a_host_that_cannot_be_set_up_is_left_as_it_was() {
    let pair = Pair::new("rack-host-undo");
    let before = settings(&pair);
    // The neighbour and the route are set first; the local route is then refused.
    let disabled = Ipv6Setting::DisableIpv6;
    let refused = pair.near.enter(|| {
        set_interface_setting("lo", disabled, 1)?;
        let refused = HostFabric::new("eth0").up(&Netlink::open()?);
        set_interface_setting("lo", disabled, 0)?;
        Ok::<_, NetworkError>(refused)
    });
    let error = refused.expect("entered").expect("set").expect_err("no route without IPv6");
    assert!(error.to_string().contains("deliver fdbb::/16 locally"), "{error}");
    assert_eq!(settings(&pair), before);

    // Former settings stay, including the Ethernet address of another gateway.
    let kept = pair.near.enter(|| {
        let netlink = Netlink::open()?;
        netlink.set_up("eth0")?;
        netlink.add_permanent_neighbour("eth0", GATEWAY, FAR)?;
        set_interface_setting("lo", disabled, 1)?;
        let refused = HostFabric::new("eth0").up(&netlink).is_err();
        let gateway = netlink.neighbours()?.into_iter().find(|it| it.address == GATEWAY);
        Ok::<_, NetworkError>((
            refused,
            gateway.and_then(|it| it.mac),
            netlink.link("eth0")?.enabled,
        ))
    });
    assert_eq!(kept.expect("entered").expect("set"), (true, Some(FAR), true));
}

#[test]
fn a_host_that_is_not_set_up_is_an_error_that_names_the_command() {
    let pair = Pair::new("rack-host-check");
    let space = Space(7);
    let check = || {
        let host = HostFabric::new("eth0");
        pair.near.enter(|| host.check(&Netlink::open()?, space)).expect("entered")
    };
    let error = check().expect_err("it is down").to_string();
    assert!(error.contains("have no route"), "{error}");
    assert!(error.contains("`bluebridge host up --interface eth0`"), "{error}");
    pair.up();
    check().expect("it is set up");
    let change = |change: fn(&Netlink) -> Result<(), NetworkError>| {
        pair.near.enter(|| change(&Netlink::open()?)).expect("entered").expect("changed");
    };
    change(|netlink| netlink.delete_arrival_rule("eth0").map(drop));
    let error = check().expect_err("it cannot receive").to_string();
    assert!(error.contains("are not delivered"), "{error}");
    change(|netlink| HostFabric::new("eth0").restore(netlink).map(drop));
    check().expect("it is set up again");
    // A default route leads to another network.
    change(|netlink| {
        netlink.delete_gateway_route(FABRIC, GATEWAY, "eth0")?;
        netlink.add_gateway_route(Ipv6Net::default(), GATEWAY, "eth0")
    });
    let error = check().expect_err("there is only a default route").to_string();
    assert!(error.contains("have no route"), "{error}");
}

#[test]
fn a_watched_interface_that_goes_down_and_up_sends_and_receives_again() {
    let pair = Pair::new("rack-host-watch");
    pair.up();
    let own: Ipv6Net = "fd00:7::1/64".parse().expect("an address");
    let wanted = Wanted {
        interface: "eth0".to_owned(),
        fabric: Some(with_gateway(FAR)),
        addresses: vec![own],
    };
    let opened = pair.near.enter(|| InterfaceWatch::open(wanted)).expect("entered");
    let mut watch = opened.expect("opened");
    assert_eq!(watch.look().expect("looked"), [Need::Address(own.addr())]);
    let receiver = pair.far.enter(socket).expect("entered");
    let sender = pair.near.enter(socket).expect("entered");
    let arrives = |from: &UdpSocket, to: &UdpSocket| {
        from.send_to(b"there", pointer(1)).expect("sent");
        to.recv_from(&mut [0; 8]).expect("received");
    };
    arrives(&sender, &receiver);
    let set = |change: fn(&Netlink) -> Result<(), NetworkError>| {
        pair.near.enter(|| change(&Netlink::open()?)).expect("entered").expect("set");
    };

    set(|netlink| netlink.set_down("eth0"));
    assert_eq!(watch.wait(Duration::from_secs(5)).expect("looked"), [], "down is left down");
    assert!(sender.send_to(b"lost", pointer(1)).is_err(), "the kernel removed the route");
    set(|netlink| netlink.set_up("eth0"));
    let mut restored = Vec::new();
    until("all that was lost is restored", || {
        restored.extend(watch.wait(Duration::from_secs(5)).expect("looked"));
        restored.len() >= 3
    });
    let lost = [HostPart::Neighbour, HostPart::Route].map(Need::Part);
    assert_eq!(restored, [&[Need::Address(own.addr())][..], &lost].concat());
    let running = pair.near.enter(|| Netlink::open()?.wait_until_running("eth0"));
    running.expect("entered").expect("running");
    arrives(&sender, &receiver);
    arrives(&receiver, &sender);

    // Removed single entries are detected as well.
    pair.near.enter(|| ip("-6 route del fd00:7::/64 dev eth0")).expect("entered");
    until("the link's route is there again", || {
        watch.wait(Duration::from_secs(5)).expect("looked") == [Need::Link(own.trunc())]
    });
    set(|netlink| netlink.delete_neighbour("eth0", GATEWAY).map(drop));
    until("the neighbour is entered again", || {
        watch.wait(Duration::from_secs(5)).expect("looked") == [Need::Part(HostPart::Neighbour)]
    });
}

#[test]
fn an_interface_that_is_not_there_is_named() {
    let pair = Pair::new("rack-host-missing");
    for (interface, said) in [("eth9", "no interface named eth9"), ("../lo", "not an interface")] {
        let up = pair.near.enter(|| HostFabric::new(interface).up(&Netlink::open()?));
        let error = up.expect("entered").expect_err("refused").to_string();
        assert!(error.contains(said), "{error}");
    }
}

#[test]
fn a_guarded_host_gets_rdma_packets_only_for_addresses_that_it_has() {
    let pair = Pair::new("rack-host-rdma");
    pair.up();
    let guarded = with_gateway(FAR).guarding_rdma(true);
    let near = |change: &(dyn Fn(&Netlink) -> Result<bool, NetworkError> + Sync)| {
        let changed = pair.near.enter(|| change(&Netlink::open()?)).expect("entered");
        changed.expect("changed")
    };
    let lacks = |part| near(&|netlink| Ok(guarded.missing(netlink)?.contains(&part)));
    assert!(lacks(HostPart::RdmaGuard) && !lacks(HostPart::ArrivalRule));
    assert!(near(&|netlink| guarded.up(netlink).map(|report| !report.rule_added)), "it was up");
    assert!(!lacks(HostPart::RdmaGuard));
    near(&|netlink| guarded.check(netlink, Space(7)).map(|()| true));

    let socket_at = |port| {
        let socket = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, port)).expect("bound");
        socket.set_read_timeout(Some(Duration::from_secs(5))).expect("set");
        socket
    };
    let rdma = pair.near.enter(|| socket_at(4791)).expect("entered");
    let other = pair.near.enter(|| socket_at(4792)).expect("entered");
    let sender = pair.far.enter(socket).expect("entered");
    let own = Ipv6Addr::new(0xfdbb, 7, 1, 0, 0x8000, 0, 0, 1);
    let arrives = |at: &UdpSocket, to: Ipv6Addr, bytes: usize| {
        let port = at.local_addr().expect("bound").port();
        sender.send_to(&vec![7; bytes], (to, port)).expect("sent");
        // It arrives after the other, if that does.
        sender.send_to(b"own", (own, port)).expect("sent");
        let receive = || at.recv_from(&mut vec![0; 20_000]).expect("received").0;
        let first = receive();
        first == bytes && receive() == b"own".len()
    };
    // Of 20,000 bytes each fragment arrives for itself, and only the first has a port.
    let pointer = *pointer(1).ip();
    let of_another = Ipv6Addr::new(0xfdbb, 7, 1, 0, 0x8000, 0, 0, 2);
    for bytes in [64, 20_000] {
        for to in [pointer, of_another] {
            assert!(!arrives(&rdma, to, bytes), "{bytes} bytes to {to}");
        }
        assert!(arrives(&rdma, own, bytes), "{bytes} bytes to its own address");
    }
    assert!(arrives(&other, pointer, 64), "another port");
    assert!(near(&|netlink| guarded.down(netlink).map(|removal| removal.was_up)));
    assert!(!near(&|netlink| netlink.delete_rdma_guard("eth0")), "nothing is left");
    assert!(near(&|netlink| with_gateway(FAR).up(netlink).map(|report| report.rule_added)));
    assert!(arrives(&rdma, pointer, 64), "without the guard");
    assert!(arrives(&rdma, pointer, 20_000), "without the guard, in fragments");
}

#[test]
fn rules_of_another_program_are_not_taken_for_the_guard_and_stay() {
    let pair = Pair::new("rack-host-rules");
    pair.up();
    let guarded = with_gateway(FAR).guarding_rdma(true);
    // Each has the priority and the interface of one of the guard's, and differs in one thing.
    let others = [
        "pref 1865 iif eth0 to fdbb::/16 ipproto udp dport 1-4789 lookup 187",
        "pref 1866 iif eth0 to fdbb::/32 ipproto udp dport 4792-65534 lookup 187",
        "pref 1867 iif eth0 to fdbb::/16 ipproto sctp lookup 187",
        "pref 1868 iif eth0 to fdbb::/16 ipproto ipv6-icmp lookup 188",
        "pref 1869 iif eth0 to fdbb::/16 ipproto tcp blackhole",
        "pref 1870 iif eth0 to fdbb:8::/32 lookup 187",
    ];
    let listed = || {
        let list = || Command::new("ip").args(["-6", "rule", "list"]).output().expect("listed");
        let output = pair.near.enter(list).expect("entered");
        String::from_utf8(output.stdout).expect("text")
    };
    let near = |change: &(dyn Fn(&Netlink) -> Result<bool, NetworkError> + Sync)| {
        pair.near.enter(|| change(&Netlink::open()?)).expect("entered")
    };
    near(&|netlink| guarded.down(netlink).map(|_| true)).expect("down");
    let without = listed();
    for other in others {
        pair.near.enter(|| ip(&format!("-6 rule add {other}"))).expect("entered");
    }
    let before = listed();
    let missing = |part| near(&|netlink| Ok(guarded.missing(netlink)?.contains(&part)));
    assert!(missing(HostPart::RdmaGuard).expect("listed"));
    assert!(missing(HostPart::ArrivalRule).expect("listed"));
    assert!(!near(&|netlink| guarded.down(netlink).map(|it| it.was_up)).expect("down"));
    assert_eq!(listed(), before, "nothing of the fabric was there");
    assert!(near(&|netlink| guarded.up(netlink).map(|it| it.rule_added)).expect("up"));
    assert!(!missing(HostPart::RdmaGuard).expect("listed"));
    assert_eq!(listed().lines().count(), before.lines().count() + 6);
    assert!(!near(&|netlink| guarded.up(netlink).map(|it| it.rule_added)).expect("up again"));
    // One that is missing is made again.
    pair.near.enter(|| ip("-6 rule del pref 1867 iif eth0 ipproto tcp")).expect("entered");
    assert!(missing(HostPart::RdmaGuard).expect("listed"));
    near(&|netlink| guarded.restore(netlink).map(|_| true)).expect("restored");
    assert!(near(&|netlink| guarded.down(netlink).map(|it| it.was_up)).expect("down"));
    assert_eq!(listed(), before);

    // Without what it has more, the kernel would remove this one in the place of the guard's, and takes it for that.
    let more = "pref 1869 iif eth0 from fd00::/8 to fdbb::/16 blackhole";
    pair.near.enter(|| ip(&format!("-6 rule add {more} table main"))).expect("entered");
    let before = listed();
    let error = near(&|netlink| guarded.up(netlink).map(|it| it.rule_added));
    let error = error.expect_err("there is another rule").to_string();
    assert!(error.contains("1869"), "{error}");
    assert_eq!(listed(), before);
    let (all, system) = (before.lines().count(), without.lines().count());
    assert_eq!(all, system + others.len() + 1, "only the other program's rules are there");
}
