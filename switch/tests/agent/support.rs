//! Switches with a cable between their ports 1 and 2, behind a running agent.

use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use bluebridge_p4::pipeline::{Counter, Entry, Impairment, Key, SwitchPort};
use bluebridge_switch::agent::{Agent, AgentConfig};
use bluebridge_switch::dataplane::{
    CloneSession, DataPlane, Drops, ImpairmentError, InstalledEntry, PacketIn, PlaneError,
    PortError, PortStatus, Table, TableError,
};
use bluebridge_switch::ebpf::EbpfSwitch;
use bluebridge_switch::soft::{Offload, Pipeline};
use bluebridge_testkit::namespace::in_thread;
use bluebridge_testkit::{ip, require_ebpf};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// How often a frame may pass the cable.
const LAPS_MAX: usize = 64;

/// The soft pipeline; frames that leave port 1 arrive at port 2, and vice versa.
#[derive(Debug)]
pub(crate) struct Cabled(Pipeline);

impl Cabled {
    /// A pipeline with the ports 1 and 2, connected, and 3, unconnected.
    pub(crate) fn new() -> Self {
        let mut pipeline = Pipeline::new(Instant::now());
        for port in 1..=3 {
            pipeline.add_port(SwitchPort(port), &format!("test{port}")).unwrap();
        }
        Self(pipeline)
    }

    fn turn(&mut self) -> &mut Pipeline {
        let mut out: Vec<(SwitchPort, Vec<u8>)> = Vec::new();
        self.0.handle_timeout(Instant::now(), &mut out);
        for _ in 0..LAPS_MAX {
            for (port, mut frame) in std::mem::take(&mut out) {
                let ingress = match port.0 {
                    1 => SwitchPort(2),
                    2 => SwitchPort(1),
                    _ => continue,
                };
                let now = Instant::now();
                self.0.process(now, ingress, &mut frame, Offload::default(), &mut out);
            }
        }
        &mut self.0
    }
}

impl DataPlane for Cabled {
    fn name(&self) -> &'static str {
        self.0.name()
    }
    fn insert(&mut self, entry: &Entry) -> Result<(), TableError> {
        self.turn().insert(entry)
    }
    fn modify(&mut self, entry: &Entry) -> Result<(), TableError> {
        self.turn().modify(entry)
    }
    fn delete(&mut self, key: &Key) -> Result<(), TableError> {
        self.turn().delete(key)
    }
    fn entry(&mut self, key: &Key) -> Result<InstalledEntry, TableError> {
        self.turn().entry(key)
    }
    fn entries(&mut self, table: Table) -> Result<Vec<InstalledEntry>, PlaneError> {
        self.turn().entries(table)
    }
    fn set_counter(&mut self, key: &Key, counter: Counter) -> Result<(), TableError> {
        self.turn().set_counter(key, counter)
    }
    fn set_flood_group(&mut self, group: Option<u16>) -> Result<(), TableError> {
        self.0.set_flood_group(group)
    }
    fn flood_group(&mut self) -> Result<Option<u16>, PlaneError> {
        self.0.flood_group()
    }
    fn set_group(&mut self, group: u16, ports: &[SwitchPort]) -> Result<(), TableError> {
        self.0.set_group(group, ports)
    }
    fn delete_group(&mut self, group: u16) -> Result<(), TableError> {
        self.0.delete_group(group)
    }
    fn groups(&mut self) -> Result<Vec<(u16, Vec<SwitchPort>)>, PlaneError> {
        self.0.groups()
    }
    fn set_clone_session(&mut self, session: Option<CloneSession>) -> Result<(), PlaneError> {
        self.0.set_clone_session(session)
    }
    fn clone_session(&mut self) -> Result<Option<CloneSession>, PlaneError> {
        self.0.clone_session()
    }
    fn pipeline_cookie(&mut self) -> Result<Option<u64>, PlaneError> {
        self.0.pipeline_cookie()
    }
    fn clear(&mut self, pipeline_cookie: Option<u64>) -> Result<(), PlaneError> {
        self.0.clear(pipeline_cookie)
    }
    fn drops(&mut self) -> Result<Drops, PlaneError> {
        self.turn().drops()
    }
    fn add_port(&mut self, port: SwitchPort, interface: &str) -> Result<(), PortError> {
        self.0.add_port(port, interface)
    }
    fn remove_port(&mut self, port: SwitchPort) -> Result<(), PortError> {
        self.0.remove_port(port)
    }
    fn ports(&mut self) -> Result<Vec<PortStatus>, PlaneError> {
        self.turn().ports()
    }
    fn packet_out(&mut self, port: SwitchPort, frame: &[u8]) -> Result<(), PortError> {
        self.0.packet_out(port, frame)?;
        self.turn();
        Ok(())
    }
    fn poll(&mut self, limit: usize, out: &mut Vec<PacketIn>) -> Result<(), PlaneError> {
        self.turn().poll(limit, out)
    }
    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    fn events_lost(&mut self) -> Result<u64, PlaneError> {
        self.0.events_lost()
    }
    fn set_impairment(
        &mut self,
        port: SwitchPort,
        impairment: Impairment,
    ) -> Result<(), ImpairmentError> {
        self.0.set_impairment(port, impairment)
    }
}

/// An agent that serves in the background.
pub(crate) struct Running {
    pub(crate) address: SocketAddr,
    stop: oneshot::Sender<()>,
    served: JoinHandle<Result<Box<dyn DataPlane>, bluebridge_switch::agent::AgentError>>,
}

impl Running {
    /// Serves device 1 on a free port of the loopback.
    pub(crate) async fn start(plane: Box<dyn DataPlane>) -> Self {
        let config = AgentConfig { listen: "127.0.0.1:0".parse().unwrap(), device_id: 1 };
        let agent = Agent::bind(config, plane).await.unwrap();
        let address = agent.local_addr();
        let (stop, stopped) = oneshot::channel::<()>();
        let served = tokio::spawn(agent.serve(async {
            let _ = stopped.await;
        }));
        Self { address, stop, served }
    }

    /// Shuts the agent down, which must not take long, and returns the data plane.
    pub(crate) async fn stop(self) -> Box<dyn DataPlane> {
        let _ = self.stop.send(());
        let served = tokio::time::timeout(Duration::from_secs(30), self.served).await;
        served.expect("the agent ends in time").unwrap().unwrap()
    }
}

/// Runs a function in a thread with its own network namespace, in which a cable connects the
/// interfaces `cable1` and `cable2`.
pub(crate) fn in_namespace(work: impl FnOnce() + Send + 'static) {
    in_thread(move || {
        ip("link set lo up");
        ip("link add cable1 type veth peer name cable2");
        ip("link add cable3 type veth peer name loose");
        for interface in ["cable1", "cable2", "cable3", "loose"] {
            ip(&format!("link set {interface} up"));
        }
        work();
    });
}

/// Adds ports to a data plane: 1 and 2 with a cable between them, and 3.
pub(crate) fn cabled(mut plane: impl DataPlane + 'static) -> Box<dyn DataPlane> {
    for port in 1..=3 {
        plane.add_port(SwitchPort(port), &format!("cable{port}")).unwrap();
    }
    Box::new(plane)
}

/// Opens a switch in the kernel.
pub(crate) fn in_kernel(name: &str) -> EbpfSwitch {
    require_ebpf(EbpfSwitch::is_built());
    EbpfSwitch::open(name).expect("the eBPF switch opens")
}

/// Removes a switch from the kernel, even if its test failed.
pub(crate) struct Removed(pub(crate) String);

impl Drop for Removed {
    fn drop(&mut self) {
        EbpfSwitch::remove(&self.0).expect("the switch can be removed from the kernel");
    }
}
