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

mod root {
    use bluebridge_controller::driver::SwitchConnector as _;
    use bluebridge_controller::store::ElectionId;
    use bluebridge_p4::p4info;
    use bluebridge_testkit::namespace::in_thread;

    use super::*;

    /// BMv2 crashes at the push, and gives no reason.
    #[test]
    #[ignore = "BMv2 must be built first, see docs/switches.md"]
    fn bmv2_that_gets_another_number_or_program_says_what_to_check() {
        for (config, device_id) in
            [(BMV2_CONFIG.to_vec(), DEVICE_ID + 6), (p4info::DEVICE_CONFIG.to_vec(), DEVICE_ID)]
        {
            in_thread(move || {
                ip("link set lo up");
                let program = bmv2::Bmv2::program().unwrap_or_else(|error| panic!("{error}"));
                let listen = LISTEN.parse().expect("an address");
                let start = || bmv2::Bmv2::start(&program, listen, DEVICE_ID, []);
                let mut process = start().unwrap_or_else(|error| panic!("{error}"));
                let second = start().expect_err("both could have the address");
                assert!(matches!(second, bmv2::Bmv2Error::InUse { .. }), "{second}");
                let uri = format!("http://{LISTEN}");
                let mut connector =
                    P4RuntimeConnector::with_device_config(&uri, device_id, config.clone());
                let runtime = tokio::runtime::Builder::new_current_thread()
                    .enable_all()
                    .build()
                    .expect("one");
                let failures = runtime.block_on(async {
                    let mut failures = Vec::new();
                    for low in 1..=100 {
                        let id = ElectionId { high: 1, low };
                        match connector.connect(id).await {
                            Ok(mut driver) => {
                                let pushed = driver.ensure_pipeline().await;
                                failures.push(pushed.expect_err("it takes no such pipeline"));
                            }
                            // It has ended.
                            Err(error) => {
                                failures.push(error);
                                return failures;
                            }
                        }
                        tokio::time::sleep(Duration::from_millis(50)).await;
                    }
                    panic!("it still runs: {failures:?}");
                });
                let number = format!("--device-id ({device_id})");
                assert!(failures.len() > 1, "{failures:?}");
                for failure in failures {
                    let words = failure.to_string();
                    assert!(words.contains("--target") && words.contains(&number), "{words}");
                }
                assert!(process.try_wait().expect("our child").is_some(), "it crashed");
            });
        }
    }
}
