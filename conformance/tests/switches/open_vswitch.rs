//! The packet vectors on Open vSwitch, programmed through OpenFlow.

use bluebridge_conformance::{Hosts, Outputs, PORTS, Tables, Target, driven::Driven};
use bluebridge_controller::driver::{OpenFlowAddress, OpenFlowConnector};
use bluebridge_p4::pipeline::SwitchPort;
use bluebridge_rack::open_vswitch::OpenVswitch;
use bluebridge_testkit::{Scratch, ip};

/// Where the switch listens, in the test's own namespace.
const LISTEN: &str = "127.0.0.1:6653";

struct Ovs {
    driven: Driven,
    hosts: Hosts,
    switch: OpenVswitch,
    _directory: Scratch,
}

impl Ovs {
    fn new() -> Self {
        ip("link set lo up");
        let hosts = Hosts::new();
        let directory = Scratch::new("ovs");
        let listen = LISTEN.parse().expect("an address");
        let names: Vec<(u16, String)> = PORTS.map(|port| (port, format!("s{port}"))).collect();
        let ports = names.iter().map(|(port, name)| (*port, name.as_str()));
        let switch = OpenVswitch::start(directory.path(), listen, ports)
            .unwrap_or_else(|error| panic!("{error}"));
        let mut connector = OpenFlowConnector::new(OpenFlowAddress::Connect(listen));
        let driven = Driven::connect(&mut connector).unwrap_or_else(|error| panic!("{error}"));
        Self { driven, hosts, switch, _directory: directory }
    }
}

impl Target for Ovs {
    fn tables(&mut self) -> &mut dyn Tables {
        &mut self.driven
    }

    fn send(&mut self, port: SwitchPort, frame: &[u8], expected: usize) -> Outputs {
        self.hosts.send(port, frame).expect("the link takes it");
        self.hosts.gather(expected)
    }

    fn packet_ins(&mut self, expected: usize) -> Result<Outputs, String> {
        self.driven.packet_ins(expected)
    }

    fn settle(&mut self) {
        // Its cache follows changes of flows some milliseconds later, and counts are added up then.
        self.switch.settle().unwrap_or_else(|error| panic!("{error}"));
    }

    fn limit(&self, vector: &str) -> Option<&'static str> {
        match vector {
            "anycast_weighted" => Some("it has a hash of its own"),
            "cross_space_counted" => Some("its guard checks source and destination with one flow"),
            "notify_no_session" => Some("its copies need no session"),
            "redirect_until" => Some("OpenFlow counts time in seconds"),
            "malformed_version" => Some("it does not look at the version"),
            "multicast_counted" => Some("its buckets are not counted"),
            "next_header" => Some("it looks behind extension headers; endpoints drop them"),
            _ => None,
        }
    }
}

mod root {
    use bluebridge_conformance::run_all;
    use bluebridge_testkit::namespace::in_thread;

    use super::*;

    #[test]
    fn vectors_hold_for_open_vswitch() {
        in_thread(|| {
            let mut ovs = Ovs::new();
            run_all("ovs", &mut ovs);
        });
    }
}
