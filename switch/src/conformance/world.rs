//! Links for tests; they end with the namespace of the thread that created them.

use std::{
    io, thread,
    time::{Duration, Instant},
};

use bluebridge_p4::pipeline::SwitchPort;
use bluebridge_testkit::ip;

use super::{Outputs, PORTS};
use crate::{
    interface::Interface,
    packet_socket::{Batch, OFFLOAD_BYTES, PacketSocket},
};

/// How long frames may take from one end to the other; the full time passes only if some are missing.
const ARRIVAL: Duration = Duration::from_secs(10);
/// How long to wait for frames that must not arrive.
const QUIET: Duration = Duration::from_millis(3);

/// The hosts' ends of the links `s1`-`h1` to `s4`-`h4`, all in one namespace.
pub(super) struct Hosts {
    sockets: Vec<(SwitchPort, PacketSocket)>,
    batch: Batch,
}

impl Hosts {
    pub(super) fn new() -> Self {
        for port in PORTS {
            ip(&format!("link add s{port} mtu 9000 type veth peer name h{port} mtu 9000"));
            ip(&format!("link set s{port} up"));
            ip(&format!("link set h{port} up"));
        }
        let open = |port| {
            let interface = Interface::by_name(&format!("h{port}")).expect("rtnetlink responds");
            let index = interface.expect("the interface was just made").index;
            (SwitchPort(port), PacketSocket::open(index, true).expect("a packet socket opens"))
        };
        Self { sockets: PORTS.map(open).collect(), batch: Batch::new() }
    }

    pub(super) fn send(&self, port: SwitchPort, frame: &[u8]) -> io::Result<()> {
        let socket = self.sockets.iter().find(|(number, _)| *number == port);
        let (_, socket) = socket.expect("vectors use ports 1 to 4");
        socket.send([0; OFFLOAD_BYTES], frame)
    }

    /// Collects `expected` frames, and any that arrive soon after them.
    pub(super) fn gather(&mut self, expected: usize) -> Outputs {
        let start = Instant::now();
        let mut last = start;
        let mut got = Outputs::new();
        loop {
            for (port, socket) in &self.sockets {
                self.batch.receive(socket).expect("the socket is up");
                for received in self.batch.frames() {
                    got.push((*port, received.frame.to_vec()));
                    last = Instant::now();
                }
            }
            let wait = if got.len() < expected { ARRIVAL } else { QUIET };
            if last.elapsed() >= wait || start.elapsed() >= 2 * ARRIVAL {
                return got;
            }
            thread::yield_now();
        }
    }
}
