//! The packet vectors on BMv2, programmed through P4Runtime with the compiled P4 program.
//!
//! BMv2 is in no package registry, so this test runs only where an operator has built it: `BLUEBRIDGE_BMV2` names
//! its `simple_switch_grpc` (docs/switches.md).

use std::time::Duration;

use bluebridge_conformance::{Hosts, Limit, Outputs, PORTS, Tables, Target, driven::Driven};
use bluebridge_controller::driver::P4RuntimeConnector;
use bluebridge_p4::{pipeline::SwitchPort, program::BMV2_CONFIG};
use bluebridge_rack::bmv2;
use bluebridge_testkit::ip;

/// Where the switch listens, in the test's own namespace.
const LISTEN: &str = "127.0.0.1:9559";

/// P4Runtime's number for it.
const DEVICE_ID: u64 = 1;

pub(super) struct Bmv2 {
    driven: Driven,
    hosts: Hosts,
    _process: bmv2::Bmv2,
}

impl Bmv2 {
    pub(super) fn new() -> Self {
        let program = bmv2::Bmv2::program().unwrap_or_else(|error| panic!("{error}"));
        ip("link set lo up");
        let hosts = Hosts::new();
        let names: Vec<(u16, String)> = PORTS.map(|port| (port, format!("s{port}"))).collect();
        let ports = names.iter().map(|(port, name)| (*port, name.as_str()));
        let listen = LISTEN.parse().expect("an address");
        let process = bmv2::Bmv2::start(&program, listen, DEVICE_ID, ports)
            .unwrap_or_else(|error| panic!("{error}"));
        let uri = format!("http://{LISTEN}");
        let config = BMV2_CONFIG.to_vec();
        let mut connector = P4RuntimeConnector::with_device_config(&uri, DEVICE_ID, config);
        let driven = Driven::connect(&mut connector).unwrap_or_else(|error| panic!("{error}"));
        Self { driven, hosts, _process: process }
    }
}

impl Target for Bmv2 {
    fn tables(&mut self) -> &mut dyn Tables {
        &mut self.driven
    }

    fn send(&mut self, port: SwitchPort, frame: &[u8], expected: usize) -> Outputs {
        self.hosts.send(port, frame).expect("the link takes it");
        if expected == 0 {
            // It takes up to some milliseconds to forward a frame.
            std::thread::sleep(Duration::from_millis(10));
        }
        self.hosts.gather(expected)
    }

    fn packet_ins(&mut self, expected: usize) -> Result<Outputs, String> {
        self.driven.packet_ins(expected)
    }

    fn limit(&self, vector: &str) -> Option<Limit> {
        match vector {
            "anycast_weighted" => Some(Limit::OTHER_CHOICE),
            "redirect_until" => {
                Some(Limit::new("v1model has no clock for entries", &[Limit::STILL_REDIRECTED]))
            }
            _ => None,
        }
    }
}
