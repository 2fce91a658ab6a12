//! Measures the rate at which copies become redirects: a controller, an agent and a data plane in one
//! process, with copies of BUSY replies at several rates.
//!
//! ```sh
//! cargo run --release -p bluebridge-controller --example redirect_rate    # the soft data plane
//! unshare -n target/release/examples/redirect_rate ebpf                   # as root
//! ```
//!
//! The time of a copy runs from its due time in the data plane until its entry is in the data plane's
//! table. It includes the agent, both directions of P4Runtime, and the controller's rules. Every lease
//! lasts 300 ms, so each entry is also deleted.

use std::collections::HashMap;
use std::error::Error;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bluebridge_controller::{Config, Controller, SwitchAddress};
use bluebridge_northbound::proto::controller_client::ControllerClient;
use bluebridge_northbound::proto::{LeaseStatus, StatusRequest};
use bluebridge_northbound::{Assignment, Attachment, Carrier, Membership, Registration, Role};
use bluebridge_p4::pipeline::{
    Counter, Entry, Impairment, Key, MacAddr, PACKET_IN_BYTES, SwitchPort,
};
use bluebridge_switch::agent::{Agent, AgentConfig};
use bluebridge_switch::dataplane::{
    CloneSession, DataPlane, Drops, ImpairmentError, InstalledEntry, PacketIn, PlaneError,
    PortError, PortStatus, Table, TableError,
};
use bluebridge_switch::ebpf::EbpfSwitch;
use bluebridge_switch::soft::{Link, Pipeline};
use bluebridge_testkit::UdpFrame;
use bluebridge_testkit::ip;
use bluebridge_wire::address::{Location, Pointer};
use bluebridge_wire::{
    Command, EndpointAddress, Header, ReplySource, Space, Status, Tag, UDP_PORT,
    header::HEADER_BYTES,
};
use tokio::sync::oneshot;

type Failure = Box<dyn Error + Send + Sync>;

const SPACE: Space = Space(1);
const LEASE_MS: u16 = 300;
const TIME: Duration = Duration::from_secs(3);
/// The name of the eBPF switch.
const NAME: &str = "redirect-rate";

/// The copies to make, and their results.
#[derive(Default)]
struct Load {
    /// The home and the owner, once they have joined.
    ends: Option<(Assignment, Assignment)>,
    /// Copies per second; 0 for none.
    rate: u64,
    began: Option<Instant>,
    sent: u64,
    next_page: u64,
    due: HashMap<u64, Instant>,
    took: Vec<Duration>,
}

impl Load {
    fn start(&mut self, rate: u64) {
        (self.rate, self.began, self.sent) = (rate, Some(Instant::now()), 0);
        self.due.clear();
        self.took.clear();
    }

    /// The copies that are due.
    fn copies(&mut self, limit: usize, out: &mut Vec<PacketIn>) {
        let (Some(began), Some((home, owner))) = (self.began, self.ends) else { return };
        let now = Instant::now();
        while out.len() < limit && self.rate != 0 {
            let due = began + Duration::from_nanos(self.sent * 1_000_000_000 / self.rate);
            if due > now {
                return;
            }
            self.sent += 1;
            // A line apart, because a renewal or a release changes the rest of a line.
            self.next_page += 8;
            self.due.insert(self.next_page, due);
            out.extend(busy(&home, &owner, self.next_page));
        }
    }

    fn note(&mut self, entry: &Entry) {
        let Key::Redirect { page, .. } = entry.key else { return };
        if let Some(due) = self.due.remove(&(page & ((1 << 36) - 1))) {
            self.took.push(due.elapsed());
        }
    }
}

/// The copy of a contended BUSY reply.
fn busy(home: &Assignment, owner: &Assignment, page: u64) -> Option<PacketIn> {
    let location = Location::new(home.generation, page << 12)?;
    let source = ReplySource {
        space: SPACE,
        node: home.node,
        command: Command::Update,
        status: Status::Busy,
        contended: true,
        location_bits: location.bits(),
    };
    let target = Pointer { space: SPACE, node: home.node, tag: Tag(1), location };
    let header = Header {
        node: owner.node.0,
        target: target.to_ipv6(),
        lease_epoch: 1,
        lease_remaining_ms: LEASE_MS,
        ..Header::default()
    };
    let mut payload = [0; HEADER_BYTES];
    header.emit(&mut payload, 0);
    let mut frame = UdpFrame {
        source_mac: [2, 0, 0, 0, 0, 1],
        destination_mac: [2, 0, 0, 0, 0, 0xfe],
        source: source.to_ipv6(),
        destination: EndpointAddress::new(SPACE, owner.node, 1).to_ipv6(),
        source_port: UDP_PORT,
        destination_port: 0x8000,
        payload: &payload,
    }
    .bytes();
    frame.truncate(PACKET_IN_BYTES);
    Some(PacketIn { ingress_port: SwitchPort(1), frame })
}

/// The data plane with the tables.
enum Plane {
    Ebpf(Box<EbpfSwitch>),
    Soft(Box<Pipeline>),
}

/// A data plane that makes copies and records when redirects appear.
struct Probe {
    plane: Plane,
    load: Arc<Mutex<Load>>,
    events: UnixStream,
}

fn lock(load: &Mutex<Load>) -> MutexGuard<'_, Load> {
    load.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Probe {
    fn at(&mut self) -> &mut dyn DataPlane {
        match &mut self.plane {
            Plane::Ebpf(switch) => switch.as_mut(),
            Plane::Soft(pipeline) => {
                // The pipeline has no clock of its own.
                let mut out = Vec::new();
                pipeline.handle_timeout(Instant::now(), &mut out);
                pipeline.as_mut()
            }
        }
    }
}

impl DataPlane for Probe {
    fn name(&self) -> &'static str {
        match &self.plane {
            Plane::Ebpf(switch) => switch.name(),
            Plane::Soft(pipeline) => pipeline.name(),
        }
    }
    fn insert(&mut self, entry: &Entry) -> Result<(), TableError> {
        self.at().insert(entry)?;
        lock(&self.load).note(entry);
        Ok(())
    }
    fn modify(&mut self, entry: &Entry) -> Result<(), TableError> {
        self.at().modify(entry)
    }
    fn delete(&mut self, key: &Key) -> Result<(), TableError> {
        self.at().delete(key)
    }
    fn entry(&mut self, key: &Key) -> Result<InstalledEntry, TableError> {
        self.at().entry(key)
    }
    fn entries(&mut self, table: Table) -> Result<Vec<InstalledEntry>, PlaneError> {
        self.at().entries(table)
    }
    fn set_counter(&mut self, key: &Key, counter: Counter) -> Result<(), TableError> {
        self.at().set_counter(key, counter)
    }
    fn set_flood_group(&mut self, group: Option<u16>) -> Result<(), TableError> {
        self.at().set_flood_group(group)
    }
    fn flood_group(&mut self) -> Result<Option<u16>, PlaneError> {
        self.at().flood_group()
    }
    fn set_group(&mut self, group: u16, ports: &[SwitchPort]) -> Result<(), TableError> {
        self.at().set_group(group, ports)
    }
    fn delete_group(&mut self, group: u16) -> Result<(), TableError> {
        self.at().delete_group(group)
    }
    fn groups(&mut self) -> Result<Vec<(u16, Vec<SwitchPort>)>, PlaneError> {
        self.at().groups()
    }
    fn set_clone_session(&mut self, session: Option<CloneSession>) -> Result<(), PlaneError> {
        self.at().set_clone_session(session)
    }
    fn clone_session(&mut self) -> Result<Option<CloneSession>, PlaneError> {
        self.at().clone_session()
    }
    fn pipeline_cookie(&mut self) -> Result<Option<u64>, PlaneError> {
        self.at().pipeline_cookie()
    }
    fn clear(&mut self, pipeline_cookie: Option<u64>) -> Result<(), PlaneError> {
        self.at().clear(pipeline_cookie)
    }
    fn drops(&mut self) -> Result<Drops, PlaneError> {
        self.at().drops()
    }
    fn add_port(&mut self, port: SwitchPort, interface: &str) -> Result<(), PortError> {
        self.at().add_port(port, interface)
    }
    fn remove_port(&mut self, port: SwitchPort) -> Result<(), PortError> {
        self.at().remove_port(port)
    }
    fn ports(&mut self) -> Result<Vec<PortStatus>, PlaneError> {
        self.at().ports()
    }
    fn packet_out(&mut self, port: SwitchPort, frame: &[u8]) -> Result<(), PortError> {
        self.at().packet_out(port, frame)
    }
    fn poll(&mut self, limit: usize, out: &mut Vec<PacketIn>) -> Result<(), PlaneError> {
        // The next tick makes it readable again.
        while self.events.read(&mut [0; 64]).is_ok_and(|bytes| bytes == 64) {}
        lock(&self.load).copies(limit, out);
        Ok(())
    }
    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.events.as_fd())
    }
    fn events_lost(&mut self) -> Result<u64, PlaneError> {
        self.at().events_lost()
    }
    fn set_impairment(
        &mut self,
        port: SwitchPort,
        impairment: Impairment,
    ) -> Result<(), ImpairmentError> {
        self.at().set_impairment(port, impairment)
    }
}

fn soft() -> Result<Plane, Failure> {
    let mut pipeline = Pipeline::new(Instant::now());
    for port in 1..=2 {
        let mac = MacAddr([2, 1, 0, 0, 0, 1]);
        pipeline.add_link(SwitchPort(port), Link { name: format!("sw{port}"), mac, mtu: 9000 })?;
    }
    Ok(Plane::Soft(Box::new(pipeline)))
}

fn ebpf() -> Result<Plane, Failure> {
    EbpfSwitch::remove(NAME)?;
    let mut switch = EbpfSwitch::open(NAME)?;
    ip("link set lo up");
    for (port, name) in [(1, "rr1"), (2, "rr2")] {
        ip(&format!("link add {name} mtu 9000 type veth peer name {name}h"));
        ip(&format!("link set {name} up"));
        switch.add_port(SwitchPort(port), name)?;
    }
    Ok(Plane::Ebpf(Box::new(switch)))
}

fn registration(name: &str, role: Role, port: u8) -> Registration {
    Registration {
        name: name.to_owned(),
        role,
        space: SPACE,
        mac: [2, 0, 0, 0, 0, port],
        switch: String::new(),
        attachment: Attachment::Port(port.into()),
        carrier: Carrier::Socket,
        mtu: 9000,
        previous: None,
        notices: false,
    }
}

/// A percentile in milliseconds.
fn percentile(sorted: &[Duration], percent: usize) -> f64 {
    let rank = (sorted.len() * percent / 100).min(sorted.len().saturating_sub(1));
    sorted.get(rank).map_or(0.0, |took| took.as_secs_f64() * 1e3)
}

async fn leases(uri: &str) -> Result<LeaseStatus, Failure> {
    let mut client = ControllerClient::connect(uri.to_owned()).await?;
    let status = client.status(StatusRequest { entries: false }).await?.into_inner();
    Ok(status.switches.into_iter().next().and_then(|switch| switch.leases).unwrap_or_default())
}

fn main() -> Result<(), Failure> {
    let is_ebpf = std::env::args().nth(1).is_some_and(|plane| plane == "ebpf");
    let load = Arc::new(Mutex::new(Load::default()));
    let (events, mut tick) = UnixStream::pair()?;
    events.set_nonblocking(true)?;
    tick.set_nonblocking(true)?;
    let plane = if is_ebpf { ebpf()? } else { soft()? };
    let probe = Probe { plane, load: Arc::clone(&load), events };
    std::thread::spawn(move || {
        loop {
            std::thread::sleep(Duration::from_micros(100));
            // A full one is readable anyway.
            let _ = tick.write(&[1]);
        }
    });
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let done = runtime.block_on(measure(Box::new(probe), &load));
    if is_ebpf {
        EbpfSwitch::remove(NAME)?;
    }
    done
}

async fn measure(probe: Box<dyn DataPlane>, load: &Mutex<Load>) -> Result<(), Failure> {
    let listen = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    println!("{}", probe.name());
    let agent = Agent::bind(AgentConfig { listen, device_id: 1 }, probe).await?;
    let mut config = Config::new(
        listen,
        vec![SwitchAddress::embedded(&format!("http://{}", agent.local_addr()))],
    );
    config.core.redirect_budget = 16_384;
    let controller = Controller::bind(config).await?;
    let uri = format!("http://{}", controller.local_addr()?);
    let (stop, stopped) = oneshot::channel::<()>();
    let switch = tokio::spawn(agent.serve(async {
        drop(stopped.await);
    }));
    let running = tokio::spawn(controller.run(std::future::pending()));
    let join = |name: &'static str, role, port| {
        let uri = uri.clone();
        tokio::task::spawn_blocking(move || Membership::join(&uri, registration(name, role, port)))
    };
    let home = join("s1", Role::Memory { capacity_pages: 1000, shard_count: 1 }, 1).await??;
    let owner = join("c1", Role::Client, 2).await??;
    lock(load).ends = Some((*home.assignment(), *owner.assignment()));
    println!(
        "   sent/s  installed/s  p50 ms  p99 ms  accepted  budget full  lost  refused by switch"
    );
    for rate in [100, 1000, 5000, 10_000, 20_000, 40_000] {
        let before = leases(&uri).await?;
        lock(load).start(rate);
        tokio::time::sleep(TIME).await;
        let mut took = {
            let mut load = lock(load);
            load.rate = 0;
            std::mem::take(&mut load.took)
        };
        took.sort_unstable();
        let after = leases(&uri).await?;
        println!(
            "{rate:9}  {:11.0}  {:6.2}  {:6.2}  {:6}  {:11}  {:4}  {:17}",
            f64::from(u32::try_from(took.len())?) / TIME.as_secs_f64(),
            percentile(&took, 50),
            percentile(&took, 99),
            after.accepted_count - before.accepted_count,
            after.budget_full_count - before.budget_full_count,
            after.lost_count - before.lost_count,
            after.switch_refused_count - before.switch_refused_count,
        );
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    tokio::task::spawn_blocking(move || drop((home, owner))).await?;
    running.abort();
    drop(stop);
    drop(switch.await?);
    Ok(())
}
