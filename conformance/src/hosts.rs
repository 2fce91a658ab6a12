//! Links for tests; they end with the namespace of the thread that created them.

use std::{
    cell::Cell,
    io, thread,
    time::{Duration, Instant},
};

use bluebridge_p4::pipeline::SwitchPort;
use bluebridge_switch::{
    interface::Interface,
    packet_socket::{Batch, OFFLOAD_BYTES, PacketSocket},
};
use bluebridge_testkit::ip;

use crate::{Outputs, PORTS};

/// How long frames may take from one end to the other; the full time passes only if some are missing.
const ARRIVAL: Duration = Duration::from_secs(10);
/// How long to wait for frames that must not arrive.
const QUIET: Duration = Duration::from_millis(3);

/// The hosts' ends of the links `s1`-`h1` to `s4`-`h4`, all in one namespace.
pub struct Hosts {
    sockets: Vec<(SwitchPort, PacketSocket)>,
    batch: Batch,
    sent_count: Cell<u64>,
}

impl Hosts {
    /// Creates the links in this thread's namespace.
    ///
    /// # Panics
    /// If this is not permitted.
    #[expect(clippy::new_without_default, reason = "it changes the namespace")]
    pub fn new() -> Self {
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
        let sent_count = Cell::new(0);
        Self { sockets: PORTS.map(open).collect(), batch: Batch::new(), sent_count }
    }

    /// Sends a frame from a host.
    ///
    /// # Errors
    /// If the link does not take it.
    ///
    /// # Panics
    /// If there is no such host.
    pub fn send(&self, port: SwitchPort, frame: &[u8]) -> io::Result<()> {
        let socket = self.sockets.iter().find(|(number, _)| *number == port);
        let (_, socket) = socket.expect("vectors use ports 1 to 4");
        socket.send([0; OFFLOAD_BYTES], frame)?;
        self.sent_count.set(self.sent_count.get() + 1);
        Ok(())
    }

    /// The number of frames sent so far.
    #[must_use]
    pub fn sent_count(&self) -> u64 {
        self.sent_count.get()
    }

    /// Collects `expected` frames, and any that arrive soon after them.
    ///
    /// # Panics
    /// If a socket fails.
    pub fn gather(&mut self, expected: usize) -> Outputs {
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
