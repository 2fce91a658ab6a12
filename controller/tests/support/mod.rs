//! An agent on a soft data plane, a controller, and registrations, for the tests in this folder.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bluebridge_controller::core::Topology;
use bluebridge_controller::{Config, Controller, ControllerError, SwitchAddress};
use bluebridge_northbound::proto::controller_client::ControllerClient;
use bluebridge_northbound::proto::{self, watch_response::Event};
use bluebridge_northbound::{Attachment, Carrier, Registration, Role};
use bluebridge_p4::declaration::TABLES;
use bluebridge_p4::entry::{decode, encode, encode_key};
use bluebridge_p4::pipeline::{Action, Entry, Forward, Key, MacAddr, SwitchPort};
use bluebridge_p4::proto::p4::v1;
use bluebridge_switch::agent::{Agent as SwitchAgent, AgentConfig};
use bluebridge_switch::dataplane::DataPlane;
use bluebridge_switch::soft::{Link, Pipeline};
use bluebridge_testkit::{Scratch, own_loopback};
use bluebridge_wire::Space;
use tokio::runtime::Runtime;
use tokio::sync::oneshot;
use v1::entity::Entity as Kind;
use v1::p4_runtime_client::P4RuntimeClient;
use v1::packet_replication_engine_entry::Type as Replication;

/// The interval of heartbeats in these tests: long, so that no endpoint becomes silent because the machine is busy.
const HEARTBEAT: Duration = Duration::from_millis(500);

/// Timeout of every wait.
const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

pub(crate) fn client(name: &str, port: u16) -> Registration {
    let [high, low] = port.to_be_bytes();
    Registration {
        name: name.to_owned(),
        role: Role::Client,
        space: Space(1),
        mac: [2, 0, 0, 0, high, low],
        switch: String::new(),
        attachment: Attachment::Port(port),
        carrier: Carrier::Socket,
        mtu: 9000,
        previous: None,
        notices: true,
    }
}

pub(crate) fn memory(name: &str, port: u16) -> Registration {
    Registration {
        role: Role::Memory { capacity_pages: 1000, shard_count: 1 },
        ..client(name, port)
    }
}

type Serving = tokio::task::JoinHandle<Box<dyn DataPlane>>;

/// The switch: an agent on a soft data plane with unconnected ports.
pub(crate) struct Agent {
    runtime: Runtime,
    port_count: u16,
    pub(crate) address: SocketAddr,
    serving: Option<(oneshot::Sender<()>, Serving)>,
    plane: Option<Box<dyn DataPlane>>,
}

fn plane(port_count: u16) -> Box<dyn DataPlane> {
    let mut pipeline = Pipeline::new(Instant::now());
    for port in 1..=port_count {
        let link = Link { name: format!("sw{port}"), mac: MacAddr([2, 1, 0, 0, 0, 1]), mtu: 9000 };
        pipeline.add_link(SwitchPort(port), link).unwrap();
    }
    Box::new(pipeline)
}

impl Agent {
    pub(crate) fn start(port_count: u16) -> Self {
        let address = SocketAddr::from((own_loopback(), 0));
        let mut agent =
            Self { runtime: runtime(), port_count, address, serving: None, plane: None };
        agent.serve(plane(port_count));
        agent
    }

    fn serve(&mut self, plane: Box<dyn DataPlane>) {
        let config = AgentConfig { listen: self.address, device_id: 1 };
        let agent = self.runtime.block_on(SwitchAgent::bind(config, plane)).unwrap();
        self.address = agent.local_addr();
        let (stop, stopped) = oneshot::channel::<()>();
        let serving =
            self.runtime.spawn(async { agent.serve(async { drop(stopped.await) }).await.unwrap() });
        self.serving = Some((stop, serving));
    }

    /// Ends the agent and keeps its tables.
    pub(crate) fn stop(&mut self) {
        let (stop, serving) = self.serving.take().unwrap();
        drop(stop);
        self.plane = Some(self.runtime.block_on(serving).unwrap());
    }

    pub(crate) fn restart_empty(&mut self) {
        self.plane = None;
        self.serve(plane(self.port_count));
    }

    pub(crate) fn restart_with_tables(&mut self) {
        let plane = self.plane.take().unwrap();
        self.serve(plane);
    }

    pub(crate) fn uri(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Every table entry, read by a client that does not compete.
    pub(crate) fn entries(&self) -> BTreeMap<Key, Action> {
        self.runtime.block_on(async {
            match P4RuntimeClient::connect(self.uri()).await {
                Ok(mut client) => entries(&mut client).await.unwrap_or_default(),
                Err(_) => BTreeMap::new(),
            }
        })
    }

    /// Every multicast group.
    pub(crate) fn groups(&self) -> BTreeMap<u32, BTreeSet<Vec<u8>>> {
        let wildcard = Replication::MulticastGroupEntry(v1::MulticastGroupEntry::default());
        let port = |replica: v1::Replica| match replica.port_kind {
            Some(v1::replica::PortKind::Port(bytes)) => bytes,
            other => panic!("{other:?}"),
        };
        let group = |entry| match entry {
            Replication::MulticastGroupEntry(group) => {
                (group.multicast_group_id, group.replicas.into_iter().map(port).collect())
            }
            other => panic!("{other:?}"),
        };
        self.replication(wildcard).into_iter().map(group).collect()
    }

    /// The clone sessions' ids.
    pub(crate) fn clone_sessions(&self) -> Vec<u32> {
        let wildcard = Replication::CloneSessionEntry(v1::CloneSessionEntry::default());
        let id = |entry| match entry {
            Replication::CloneSessionEntry(session) => session.session_id,
            other => panic!("{other:?}"),
        };
        self.replication(wildcard).into_iter().map(id).collect()
    }

    fn replication(&self, wildcard: Replication) -> Vec<Replication> {
        let entry = v1::PacketReplicationEngineEntry { r#type: Some(wildcard) };
        let wanted = vec![Kind::PacketReplicationEngineEntry(entry)];
        let found = self.runtime.block_on(async {
            match P4RuntimeClient::connect(self.uri()).await {
                Ok(mut client) => read(&mut client, wanted).await.unwrap_or_default(),
                Err(_) => Vec::new(),
            }
        });
        let entry = |kind| match kind {
            Kind::PacketReplicationEngineEntry(entry) => entry.r#type,
            other => panic!("{other:?}"),
        };
        found.into_iter().filter_map(entry).collect()
    }

    /// Deletes every table entry, and adds a foreign one, in the primary's name.
    pub(crate) fn meddle(&self, election_id: v1::Uint128) {
        let foreign = Entry {
            key: Key::Redirect { dst_scope: 0xfdbb_0001, dst_node: 1, page: 7 },
            action: Action::Forward(Forward { port: SwitchPort(1), dst_mac: MacAddr([2; 6]) }),
            idle_timeout: None,
            metadata: b"foreign".to_vec(),
        };
        let update = |kind: v1::update::Type, message| v1::Update {
            r#type: kind.into(),
            entity: Some(v1::Entity { entity: Some(Kind::TableEntry(message)) }),
        };
        let mut updates: Vec<v1::Update> = self
            .entries()
            .keys()
            .map(|key| update(v1::update::Type::Delete, encode_key(key).unwrap()))
            .collect();
        updates.push(update(v1::update::Type::Insert, encode(&foreign).unwrap()));
        let request = v1::WriteRequest {
            device_id: 1,
            election_id: Some(election_id),
            updates,
            ..v1::WriteRequest::default()
        };
        self.runtime.block_on(async {
            let mut client = P4RuntimeClient::connect(self.uri()).await.unwrap();
            client.write(request).await.unwrap();
        });
    }

    /// Pushes the pipeline with another cookie, which empties the tables.
    pub(crate) fn push(&self, election_id: v1::Uint128) {
        use v1::set_forwarding_pipeline_config_request::Action;
        let config = v1::ForwardingPipelineConfig {
            p4info: Some(bluebridge_p4::p4info::p4info()),
            cookie: Some(v1::forwarding_pipeline_config::Cookie { cookie: 7 }),
            ..v1::ForwardingPipelineConfig::default()
        };
        let request = v1::SetForwardingPipelineConfigRequest {
            device_id: 1,
            election_id: Some(election_id),
            action: Action::VerifyAndCommit.into(),
            config: Some(config),
            ..v1::SetForwardingPipelineConfigRequest::default()
        };
        self.runtime.block_on(async {
            let mut client = P4RuntimeClient::connect(self.uri()).await.unwrap();
            client.set_forwarding_pipeline_config(request).await.unwrap();
        });
    }

    /// Reads all entries repeatedly, and compares them with the present ones.
    pub(crate) fn watch_entries(&self) -> Watching {
        let (uri, expected) = (self.uri(), self.entries());
        let (ending, readings) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (end, count) = (Arc::clone(&ending), Arc::clone(&readings));
        let thread = std::thread::spawn(move || {
            let runtime = runtime();
            let mut client = runtime.block_on(P4RuntimeClient::connect(uri)).unwrap();
            let mut differing = 0;
            while !end.load(Ordering::Relaxed) {
                let now = runtime.block_on(entries(&mut client)).unwrap();
                differing += u64::from(now != expected);
                count.fetch_add(1, Ordering::Relaxed);
            }
            differing
        });
        Watching { ending, readings, thread }
    }
}

pub(crate) struct Watching {
    ending: Arc<AtomicBool>,
    readings: Arc<AtomicU64>,
    thread: JoinHandle<u64>,
}

impl Watching {
    /// How often the entries were read.
    pub(crate) fn readings(&self) -> u64 {
        self.readings.load(Ordering::Relaxed)
    }

    /// How many of the readings differed.
    pub(crate) fn end(self) -> u64 {
        self.ending.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}

type Client = P4RuntimeClient<tonic::transport::Channel>;

async fn entries(client: &mut Client) -> Result<BTreeMap<Key, Action>, String> {
    let wanted = TABLES
        .iter()
        .map(|table| {
            Kind::TableEntry(v1::TableEntry { table_id: table.id, ..v1::TableEntry::default() })
        })
        .collect();
    let found = read(client, wanted).await?;
    Ok(found
        .into_iter()
        .map(|kind| match kind {
            Kind::TableEntry(message) => decode(&message).unwrap(),
            other => panic!("{other:?}"),
        })
        .map(|entry| (entry.key, entry.action))
        .collect())
}

async fn read(client: &mut Client, wanted: Vec<Kind>) -> Result<Vec<Kind>, String> {
    let reading = async {
        let entities = wanted.into_iter().map(|kind| v1::Entity { entity: Some(kind) }).collect();
        let request = v1::ReadRequest { device_id: 1, entities, ..v1::ReadRequest::default() };
        let text = |status: tonic::Status| status.to_string();
        let mut stream = client.read(request).await.map_err(text)?.into_inner();
        let mut found = Vec::new();
        while let Some(response) = stream.message().await.map_err(text)? {
            found.extend(response.entities.into_iter().filter_map(|entity| entity.entity));
        }
        Ok(found)
    };
    tokio::time::timeout(PATIENCE, reading).await.map_err(|error| error.to_string())?
}

/// A controller with its own runtime, so that it can be killed.
pub(crate) struct Running {
    runtime: Option<Runtime>,
    address: SocketAddr,
    running: Option<tokio::task::JoinHandle<Result<(), ControllerError>>>,
}

impl Running {
    pub(crate) fn start(agent: &Agent, folder: Option<&Scratch>) -> Self {
        Self::start_at(agent, folder, SocketAddr::from((own_loopback(), 0)))
    }

    pub(crate) fn start_at(agent: &Agent, folder: Option<&Scratch>, listen: SocketAddr) -> Self {
        let mut config = Self::config(agent);
        config.listen = listen;
        config.store = folder.map(|folder| folder.file("controller.redb"));
        Self::start_with(config)
    }

    pub(crate) fn config(agent: &Agent) -> Config {
        let mut config = Config::new(
            SocketAddr::from((own_loopback(), 0)),
            vec![SwitchAddress::embedded(&agent.uri())],
        );
        config.core.heartbeat_interval = HEARTBEAT;
        config
    }

    /// The switches t0, t1, .. of these agents in a line; the links use the ports 3 and 4.
    pub(crate) fn config_of_line(agents: &[Agent]) -> Config {
        let addresses = agents.iter().map(|agent| SwitchAddress::embedded(&agent.uri()));
        let mut config = Config::new(SocketAddr::from((own_loopback(), 0)), addresses.collect());
        let names: Vec<String> = (0..agents.len()).map(|number| format!("t{number}")).collect();
        let end = |name: &String, port| (name.clone(), SwitchPort(port));
        let links: Vec<_> =
            names.windows(2).map(|pair| (end(&pair[0], 3), end(&pair[1], 4))).collect();
        config.core.topology = Topology::new(names, &links).unwrap();
        config.core.heartbeat_interval = HEARTBEAT;
        config
    }

    pub(crate) fn start_with(config: Config) -> Self {
        Self::try_start(config).unwrap()
    }

    /// Starts, or returns why it does not.
    pub(crate) fn try_start(config: Config) -> Result<Self, ControllerError> {
        let runtime = runtime();
        let controller = runtime.block_on(Controller::bind(config))?;
        let address = controller.local_addr().unwrap();
        let running = runtime.spawn(controller.run(std::future::pending()));
        Ok(Self { runtime: Some(runtime), address, running: Some(running) })
    }

    pub(crate) fn uri(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Ends it without a shutdown, like SIGKILL; returns its address.
    pub(crate) fn kill(mut self) -> SocketAddr {
        self.runtime.take().unwrap().shutdown_timeout(PATIENCE);
        self.address
    }

    /// Waits until it ends by itself.
    pub(crate) fn end(mut self) -> Result<(), ControllerError> {
        let running = self.running.take().unwrap();
        let runtime = self.runtime.take().unwrap();
        let end = runtime.block_on(async { tokio::time::timeout(PATIENCE, running).await });
        runtime.shutdown_timeout(PATIENCE);
        end.expect("the controller ends by itself").unwrap()
    }

    fn on<T>(&self, future: impl Future<Output = T>) -> T {
        self.runtime.as_ref().unwrap().block_on(future)
    }

    pub(crate) fn status(&self) -> proto::StatusResponse {
        self.on(async {
            let mut client = ControllerClient::connect(self.uri()).await.unwrap();
            client.status(proto::StatusRequest { entries: true }).await.unwrap().into_inner()
        })
    }

    /// The only switch, in its view.
    pub(crate) fn switch(&self) -> proto::SwitchStatus {
        let [switch] = <[_; 1]>::try_from(self.status().switches).unwrap();
        switch
    }

    /// The election id under which it writes.
    pub(crate) fn election_id(&self) -> v1::Uint128 {
        let switch = self.switch();
        v1::Uint128 { high: switch.election_id_high, low: switch.election_id_low }
    }

    pub(crate) fn watch(&self) -> Watch<'_> {
        self.try_watch().unwrap()
    }

    /// Each watch has its own connection.
    pub(crate) fn try_watch(&self) -> Result<Watch<'_>, tonic::Status> {
        let stream = self.on(async {
            let mut client = ControllerClient::connect(self.uri()).await.unwrap();
            client.watch(proto::WatchRequest {}).await.map(tonic::Response::into_inner)
        })?;
        Ok(Watch { controller: self, stream })
    }
}

/// An open watch.
pub(crate) struct Watch<'a> {
    controller: &'a Running,
    stream: tonic::Streaming<proto::WatchResponse>,
}

impl Watch<'_> {
    pub(crate) fn next(&mut self) -> Option<Event> {
        let next = async { tokio::time::timeout(PATIENCE, self.stream.message()).await };
        self.controller
            .on(next)
            .expect("an event in time")
            .unwrap()
            .and_then(|message| message.event)
    }
}
