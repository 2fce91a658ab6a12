//! Tests that run themselves again inside namespaces.

use std::{
    fs,
    net::{Ipv6Addr, UdpSocket},
    time::Duration,
};

use bluebridge_testkit::{ip, namespace};

/// The interfaces of this namespace.
fn interfaces() -> Vec<String> {
    let table = fs::read_to_string("/proc/thread-self/net/dev").expect("readable");
    let names = table.lines().filter_map(|line| line.split_once(':'));
    names.map(|(name, _)| name.trim().to_owned()).collect()
}

/// The name of this thread's network namespace.
fn own() -> String {
    let link = fs::read_link("/proc/thread-self/ns/net").expect("readable");
    link.to_string_lossy().into_owned()
}

#[test]
fn a_child_has_a_namespace_to_itself() {
    let before = interfaces();
    let mut is_inside = false;
    namespace::in_child(|| {
        is_inside = true;
        assert_eq!(interfaces(), ["lo"]);
        ip("link add testkit0 type veth peer name testkit1");
        assert_eq!(interfaces().len(), 3);
    });
    if !is_inside {
        assert_eq!(interfaces(), before, "nothing changes outside");
    }
}

#[test]
fn the_fabric_is_local_where_it_is_asked_for() {
    namespace::in_local_fabric(1400, || {
        let socket = UdpSocket::bind("[::]:0").expect("bound");
        socket.set_read_timeout(Some(Duration::from_secs(5))).expect("set");
        let port = socket.local_addr().expect("bound").port();
        let anywhere: Ipv6Addr = "fdbb:7:7:7::7".parse().expect("an address");
        socket.send_to(b"here", (anywhere, port)).expect("there is a route");
        assert_eq!(socket.recv(&mut [0; 8]).expect("it comes back"), 4);
    });
}

#[test]
fn in_a_user_namespace_there_are_threads_with_namespaces_too() {
    namespace::in_user_child(|| {
        let map = fs::read_to_string("/proc/self/uid_map").expect("readable");
        assert_eq!(map.split_whitespace().last(), Some("1"), "only one user is there: {map}");
        let outside = own();
        namespace::in_thread(move || {
            assert_ne!(own(), outside);
            ip("link add testkit0 type veth peer name testkit1");
        });
        assert_eq!(interfaces(), ["lo"]);
    });
}

#[test]
#[should_panic(expected = "failed inside a network namespace")]
fn what_fails_inside_fails_outside() {
    namespace::in_child(|| panic!("on purpose"));
}
