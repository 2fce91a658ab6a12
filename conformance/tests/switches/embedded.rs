//! The data planes that the vectors run on.

use std::time::{Duration, Instant};

use bluebridge_conformance::{Hosts, Outputs, PORTS, Tables, Target, poll};
use bluebridge_p4::pipeline::SwitchPort;
use bluebridge_switch::{
    dataplane::DataPlane,
    ebpf::{ACTION_REDIRECT, EbpfSwitch, PortMode},
    offload::enable_receive_offload,
    soft::{Offload, Pipeline, Switch},
};
use bluebridge_testkit::require_ebpf;

/// A data plane of the embedded switch.
pub(super) trait Embedded: Target {
    fn plane(&mut self) -> &mut dyn DataPlane;
}

/// Bytes of Ethernet and IPv6 headers.
const IPV6_FRAME_BYTES_MIN: usize = 14 + 40;

/// The pipeline without I/O.
pub(super) struct SoftPipeline(Pipeline);

impl SoftPipeline {
    pub(super) fn new() -> Self {
        let mut pipeline = Pipeline::new(Instant::now());
        for port in PORTS {
            pipeline.add_port(SwitchPort(port), &format!("s{port}")).expect("the port is new");
        }
        Self(pipeline)
    }
}

impl Embedded for SoftPipeline {
    fn plane(&mut self) -> &mut dyn DataPlane {
        &mut self.0
    }
}

impl Target for SoftPipeline {
    fn tables(&mut self) -> &mut dyn Tables {
        &mut self.0
    }

    fn packet_ins(&mut self, _expected: usize) -> Result<Outputs, String> {
        poll(self.plane())
    }

    fn send(&mut self, port: SwitchPort, frame: &[u8], _expected: usize) -> Outputs {
        let mut out = Outputs::new();
        self.0.process(Instant::now(), port, &mut frame.to_vec(), Offload::default(), &mut out);
        out
    }
}

/// A switch in the kernel that is removed when this is dropped, even if a test fails.
pub(super) struct Pinned {
    /// Contains this process's number, because the kernel keeps switches by name for all processes.
    pub(super) name: String,
    pub(super) switch: EbpfSwitch,
}

impl Pinned {
    pub(super) fn open(name: &'static str) -> Self {
        require_ebpf(EbpfSwitch::is_built());
        let name = format!("{name}-{}", std::process::id());
        EbpfSwitch::remove(&name).expect("what an earlier run left can be removed");
        let switch = EbpfSwitch::open(&name).expect("the eBPF switch opens");
        Self { name, switch }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Err(error) = EbpfSwitch::remove(&self.name) {
            eprintln!("{} was not removed: {error}", self.name);
        }
    }
}

/// The program alone (`BPF_PROG_TEST_RUN`); only its copies are sent over links.
pub(super) struct EbpfTestRun {
    pinned: Pinned,
    hosts: Hosts,
}

impl EbpfTestRun {
    pub(super) fn new(name: &'static str) -> Self {
        let hosts = Hosts::new();
        let mut pinned = Pinned::open(name);
        for port in PORTS {
            pinned.switch.add_port(SwitchPort(port), &format!("s{port}")).expect("it attaches");
        }
        Self { pinned, hosts }
    }

    fn sent(&mut self) -> Vec<(SwitchPort, u64)> {
        let ports = self.pinned.switch.ports().expect("the maps can be read");
        ports.into_iter().map(|status| (status.port, status.tx.packets)).collect()
    }
}

impl Embedded for EbpfTestRun {
    fn plane(&mut self) -> &mut dyn DataPlane {
        &mut self.pinned.switch
    }
}

impl Target for EbpfTestRun {
    fn tables(&mut self) -> &mut dyn Tables {
        &mut self.pinned.switch
    }

    fn packet_ins(&mut self, _expected: usize) -> Result<Outputs, String> {
        poll(self.plane())
    }

    fn send(&mut self, port: SwitchPort, frame: &[u8], expected: usize) -> Outputs {
        // `BPF_PROG_TEST_RUN` does not accept IPv6 frames without a complete IPv6 header; over the
        // link the same program receives them.
        if frame.len() < IPV6_FRAME_BYTES_MIN && frame.get(12..14) == Some(&[0x86, 0xdd]) {
            self.hosts.send(port, frame).expect("the link takes it");
            return self.hosts.gather(expected);
        }
        let before = self.sent();
        let run = self.pinned.switch.test_run(port, frame, 1);
        let run = run.unwrap_or_else(|e| panic!("{e} on {frame:02x?}"));
        let after = self.sent();
        let is_redirected = run.action == ACTION_REDIRECT;
        let expected = expected - usize::from(is_redirected && expected > 0);
        // Counted copies will arrive, even on a busy machine.
        let counted = after.iter().zip(&before).map(|((_, after), (_, before))| after - before);
        let counted = usize::try_from(counted.sum::<u64>()).expect("a few");
        let mut out =
            self.hosts.gather(expected.max(counted - usize::from(is_redirected && counted > 0)));
        let copied: Vec<_> = out.iter().map(|(port, _)| *port).collect();
        for ((port, before), (_, after)) in before.into_iter().zip(after) {
            let copies = copied.iter().filter(|copied| **copied == port).count() as u64;
            // A counted frame that was not seen on a link is the redirected one.
            if after - before == copies + 1 && is_redirected {
                out.push((port, run.frame.clone()));
            }
        }
        out
    }
}

/// The switch in the kernel over veth links.
pub(super) struct EbpfLinks {
    pinned: Pinned,
    hosts: Hosts,
}

impl EbpfLinks {
    pub(super) fn new(name: &'static str, mode: Option<PortMode>) -> Self {
        let mut hosts = Hosts::new();
        let mut pinned = Pinned::open(name);
        for port in PORTS {
            let interface = format!("s{port}");
            pinned.switch.add_port_with(SwitchPort(port), &interface, mode).expect("it attaches");
            if mode == Some(PortMode::Xdp) {
                // A veth accepts XDP frames only if its other end runs XDP or GRO.
                enable_receive_offload(&format!("h{port}")).expect("a veth has GRO");
            }
        }
        hosts.gather(0);
        Self { pinned, hosts }
    }
}

impl Embedded for EbpfLinks {
    fn plane(&mut self) -> &mut dyn DataPlane {
        &mut self.pinned.switch
    }
}

impl Target for EbpfLinks {
    fn tables(&mut self) -> &mut dyn Tables {
        &mut self.pinned.switch
    }

    fn packet_ins(&mut self, _expected: usize) -> Result<Outputs, String> {
        poll(self.plane())
    }

    fn send(&mut self, port: SwitchPort, frame: &[u8], expected: usize) -> Outputs {
        self.hosts.send(port, frame).expect("the link takes it");
        self.hosts.gather(expected)
    }

    fn inject(&mut self, port: SwitchPort, frame: &[u8]) {
        self.hosts.send(port, frame).expect("the link takes it");
    }
}

/// The soft switch over veth links.
pub(super) struct SoftLinks {
    switch: Switch,
    hosts: Hosts,
}

impl SoftLinks {
    pub(super) fn new() -> Self {
        let hosts = Hosts::new();
        let mut switch = Switch::start(Duration::ZERO).expect("the soft switch starts");
        for port in PORTS {
            switch.add_port(SwitchPort(port), &format!("s{port}")).expect("it attaches");
        }
        Self { switch, hosts }
    }
}

impl Embedded for SoftLinks {
    fn plane(&mut self) -> &mut dyn DataPlane {
        &mut self.switch
    }
}

impl Target for SoftLinks {
    fn tables(&mut self) -> &mut dyn Tables {
        &mut self.switch
    }

    fn packet_ins(&mut self, _expected: usize) -> Result<Outputs, String> {
        poll(self.plane())
    }

    fn send(&mut self, port: SwitchPort, frame: &[u8], expected: usize) -> Outputs {
        self.hosts.send(port, frame).expect("the link takes it");
        let out = self.hosts.gather(expected);
        // The counters are up to date once the thread has responded.
        DataPlane::drops(&mut self.switch).expect("the thread responds");
        out
    }

    fn inject(&mut self, port: SwitchPort, frame: &[u8]) {
        self.hosts.send(port, frame).expect("the link takes it");
        // So that the thread keeps up: its socket has room for a limited number of frames.
        DataPlane::drops(&mut self.switch).expect("the thread responds");
    }
}
