//! The packet vectors on BMv2, programmed through P4Runtime with the compiled P4 program.
//!
//! BMv2 is in no package registry, so this test runs only where an operator has built it: `BLUEBRIDGE_BMV2` names
//! its `simple_switch_grpc` (docs/switches.md).

use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use bluebridge_conformance::{Hosts, Outputs, PORTS, Tables, Target, driven::Driven};
use bluebridge_controller::driver::P4RuntimeConnector;
use bluebridge_p4::{
    pipeline::{CPU_PORT, SwitchPort},
    program::BMV2_CONFIG,
};
use bluebridge_testkit::{ip, until};

/// The program.
const VARIABLE: &str = "BLUEBRIDGE_BMV2";

/// Where the switch listens, in the test's own namespace.
const LISTEN: &str = "127.0.0.1:9559";

pub(super) struct Bmv2 {
    driven: Driven,
    hosts: Hosts,
    process: Child,
}

impl Bmv2 {
    pub(super) fn new() -> Self {
        let program = std::env::var_os(VARIABLE).unwrap_or_else(|| panic!("set {VARIABLE}"));
        ip("link set lo up");
        let hosts = Hosts::new();
        let mut command = Command::new(program);
        command.args(["--no-p4", "--device-id", "1", "-L", "off"]);
        for port in PORTS {
            command.args(["-i", &format!("{port}@s{port}")]);
        }
        command.args(["--", "--cpu-port", &CPU_PORT.0.to_string(), "--grpc-server-addr", LISTEN]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let process = command.spawn().expect("BMv2 starts");
        until("BMv2 listens", || TcpStream::connect(LISTEN).is_ok());
        let uri = format!("http://{LISTEN}");
        let mut connector = P4RuntimeConnector::with_device_config(&uri, 1, BMV2_CONFIG.to_vec());
        let driven = Driven::connect(&mut connector).unwrap_or_else(|error| panic!("{error}"));
        Self { driven, hosts, process }
    }
}

impl Drop for Bmv2 {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
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

    fn limit(&self, vector: &str) -> Option<&'static str> {
        match vector {
            "anycast_weighted" => Some("it has a hash of its own"),
            "redirect_until" => Some("v1model has no clock for entries"),
            _ => None,
        }
    }
}
