//! Racks for tests: the real daemons, in network namespaces, and clients in the test's process.
//!
//! * `daemon`, `switch`: control daemons and the switch; `observe`: counters of the kernel.
//! * `endpoint`: clients; `raw`: single requests without the client library.
//! * `traffic`, `mixed`, `million`, `flood`, `witness`: workloads; `stamp`: contents that identify their writer.

pub mod daemon;
pub mod endpoint;
pub mod flood;
pub mod million;
pub mod mixed;
pub mod observe;
pub mod raw;
pub mod stamp;
pub mod switch;
pub mod traffic;
pub mod witness;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use bluebridge_rack::daemon::READY_DEADLINE;
use bluebridge_rack::process::ProcessRecord;
use bluebridge_rack::spec::{DataPlane, Node, RackSpec, Redirects};
use bluebridge_rack::state::StateRoot;
use bluebridge_rack::{Cancel, Rack, Site};
use bluebridge_testkit::{Scratch, program, require_root};

/// Racks at the same time would compete for the cores and slow each other down.
static TURN: Mutex<()> = Mutex::new(());

/// The options of a test's rack; the default is two servers and two clients.
#[derive(Clone, Debug)]
pub struct RackOptions {
    /// Memory servers.
    pub servers: u16,
    /// Clients.
    pub clients: u16,
    /// Link sizes, in the format of the command line.
    pub mtu: &'static str,
    /// The switch.
    pub switch: DataPlane,
    /// The memory of each server, in the format of the command line.
    pub memory: &'static str,
    /// Which leased pages are redirected.
    pub redirects: Redirects,
    /// Whether the kernel answers READs where it can.
    pub direct_reads: bool,
}

impl RackOptions {
    /// Two servers of 256 MiB and two clients.
    pub const fn new(switch: DataPlane, mtu: &'static str) -> Self {
        Self {
            servers: 2,
            clients: 2,
            mtu,
            switch,
            memory: "256M",
            redirects: Redirects::Contended,
            direct_reads: true,
        }
    }

    /// The specification of a rack with that name.
    ///
    /// # Panics
    /// If a text is invalid.
    pub fn spec(&self, name: &str) -> RackSpec {
        RackSpec {
            name: name.parse().expect("a name"),
            servers: self.servers,
            clients: self.clients,
            mtu: self.mtu.parse().expect("sizes"),
            switch: self.switch,
            memory: self.memory.parse().expect("a size"),
            redirects: self.redirects,
            direct_reads: self.direct_reads,
        }
    }
}

/// A rack of this test, removed when dropped.
#[derive(Debug)]
pub struct TestRack {
    rack: Rack,
    /// The daemons that the test restarted.
    processes: BTreeMap<String, ProcessRecord>,
    program: PathBuf,
    scratch: Scratch,
    _turn: Option<MutexGuard<'static, ()>>,
}

impl TestRack {
    /// Builds a rack and starts all its daemons, when no other test has one.
    ///
    /// # Panics
    /// If that fails; the message has the reason.
    pub fn up(name: &str, options: &RackOptions) -> Self {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let mut rack = Self::beside(name, options);
        rack._turn = Some(turn);
        rack
    }

    /// As [`Self::up`], in addition to another rack of the same test.
    ///
    /// # Panics
    /// If that fails; the message has the reason.
    pub fn beside(name: &str, options: &RackOptions) -> Self {
        require_root();
        let program = program();
        let scratch = Scratch::new(name);
        let root = StateRoot::at(scratch.path().join("state"));
        let site = Site::with_state_root(root).unwrap_or_else(|error| panic!("{error}"));
        let name = format!("{name}-{}", std::process::id());
        let rack = Rack::build(&site, options.spec(&name), Cancel::default());
        let mut rack = rack.unwrap_or_else(|error| panic!("{error}"));
        rack.start_daemons(&program, READY_DEADLINE).unwrap_or_else(|error| panic!("{error}"));
        Self { rack, processes: BTreeMap::new(), program, scratch, _turn: None }
    }

    /// The rack itself.
    pub const fn rack(&self) -> &Rack {
        &self.rack
    }

    /// Runs `work` in a node's namespace.
    ///
    /// # Panics
    /// If there is no such node.
    pub fn enter<T: Send>(&self, node: Node, work: impl FnOnce() -> T + Send) -> T {
        self.rack.enter(node, work).unwrap_or_else(|error| panic!("{error}"))
    }

    /// The switch's port that leads to a node.
    ///
    /// # Panics
    /// If there is no such node.
    pub fn port(&self, node: Node) -> u16 {
        self.rack.layout().port_of(node).expect("a node of the rack").number
    }
}
