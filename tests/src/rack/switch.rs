//! Impairs, reads and wipes the rack's switch.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bluebridge_controller::driver::{
    DriverError, OpenFlowAddress, OpenFlowConnector, SwitchConnector as _,
};
use bluebridge_northbound::proto::{NodeState, StatusResponse, SwitchStatus};
use bluebridge_p4::pipeline::{Action, Entry, Forward, Key, SwitchPort};
use bluebridge_p4::proto::bluebridge::switch::v1::{Impairment, ListPortsResponse};
use bluebridge_p4::proto::p4::v1;
use bluebridge_rack::control::tables::{self, Act, Match, PortNames, TableLine};
use bluebridge_rack::control::{controller_status, impair, switch_ports};
use bluebridge_rack::daemon::DEVICE_ID;
use bluebridge_rack::layout::{OPENFLOW, P4RUNTIME};
use bluebridge_rack::spec::{DataPlane, Node};
use bluebridge_wire::address::{NODE_PREFIX_LEN, PAGE_SHIFT};
use bluebridge_wire::{NodeId, Pointer};
use ipnet::Ipv6Net;
use v1::p4_runtime_client::P4RuntimeClient;
use v1::set_forwarding_pipeline_config_request::Action as ConfigAction;

use super::TestRack;
use super::endpoint::SPACE;

/// How long a controller that has just started may take to receive a heartbeat of every endpoint.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(20);

/// Loses 5 % of the frames and duplicates 5 %; if the data plane can, it also reorders 5 %.
pub fn trouble(switch: DataPlane, seed: u64) -> Impairment {
    let reorder = if switch == DataPlane::Soft { 0.05 } else { 0.0 };
    Impairment { seed, loss: 0.05, duplicate: 0.05, reorder, ..Impairment::default() }
}

impl TestRack {
    /// Impairs every port, including the controller's; each with its own random numbers.
    ///
    /// # Panics
    /// If the switch refuses.
    pub fn impair_all(&self, impairment: &Impairment) {
        let ports: Vec<u16> = self.rack().layout().ports().iter().map(|it| it.number).collect();
        self.enter(Node::Switch, || {
            for port in ports {
                let seed = impairment.seed + u64::from(port);
                let impairment = Impairment { seed, ..*impairment };
                let done = impair(P4RUNTIME.into(), port, impairment);
                done.unwrap_or_else(|error| panic!("port {port}: {error}"));
            }
        });
    }

    /// The ports of the switch and its drops.
    ///
    /// # Panics
    /// If the switch does not respond.
    pub fn switch_ports(&self) -> ListPortsResponse {
        let ports = self.enter(Node::Switch, || switch_ports(P4RUNTIME.into()));
        ports.unwrap_or_else(|error| panic!("{error}"))
    }

    /// The tables of the switch without their counters.
    ///
    /// # Errors
    /// A text, if the switch does not respond, or has no pipeline yet.
    pub fn tables(&self) -> Result<Vec<TableLine>, String> {
        let mut lines = self.counted_tables()?;
        for line in &mut lines {
            (line.packets, line.bytes) = (0, 0);
        }
        Ok(lines)
    }

    /// The tables of the switch with their counters.
    fn counted_tables(&self) -> Result<Vec<TableLine>, String> {
        let names = PortNames::new();
        self.enter(Node::Switch, || match self.rack().spec().switch {
            DataPlane::Bmv2 | DataPlane::Ebpf | DataPlane::Soft => {
                let read = tables::read(P4RUNTIME.into(), DEVICE_ID, &names);
                read.map(|reading| reading.lines).map_err(|error| error.to_string())
            }
            DataPlane::Ovs => read_openflow(&names).map_err(|error| error.to_string()),
        })
    }

    /// Packets that entries for pages counted, and not those for whole nodes.
    ///
    /// # Panics
    /// If the switch does not respond.
    pub fn page_packets(&self) -> u64 {
        let lines = self.counted_tables();
        let lines = lines.unwrap_or_else(|error| panic!("{error}")).into_iter();
        let is_of_pages = |line: &TableLine| match &line.matches {
            Match::Directory { destination } => {
                destination.parse::<Ipv6Net>().is_ok_and(|it| it.prefix_len() > NODE_PREFIX_LEN)
            }
            _ => false,
        };
        lines.filter(is_of_pages).map(|line| line.packets).sum()
    }

    /// The redirects of the switch, with their packet counters.
    ///
    /// # Panics
    /// If the switch does not respond.
    pub fn redirects(&self) -> Vec<TableLine> {
        let lines = self.counted_tables();
        let lines = lines.unwrap_or_else(|error| panic!("{error}")).into_iter();
        lines.filter(|line| line.table == "redirect").collect()
    }

    /// Whether the switch redirects a page to a client. The redirect of the previous owner may
    /// still be there.
    ///
    /// # Panics
    /// If the switch does not respond.
    pub fn is_redirected(&self, page: Pointer, client: u16) -> bool {
        let number = page.location.bits() >> PAGE_SHIFT;
        let owner = self.port(Node::Client(client));
        self.redirects().iter().any(|it| {
            matches!(it.matches, Match::Redirect { page, .. } if page == number)
                && matches!(&it.action, Act::Redirect { port, .. } if port.port == owner)
        })
    }

    /// The status of the controller.
    ///
    /// # Panics
    /// If the controller does not respond.
    pub fn controller_status(&self) -> StatusResponse {
        let address: SocketAddr = self.rack().layout().controller().into();
        let status = self.enter(Node::Switch, || controller_status(address));
        status.unwrap_or_else(|error| panic!("{error}"))
    }

    /// The rack's switch in the controller's view.
    ///
    /// # Panics
    /// If the controller does not respond.
    pub fn switch_status(&self) -> SwitchStatus {
        let status = self.controller_status();
        let [switch] = <[_; 1]>::try_from(status.switches).expect("a rack has one switch");
        switch
    }

    /// Waits until the controller has received heartbeats of `count` endpoints, which must be all
    /// live ones. After a start it also counts those in its store as live; a decrease of
    /// `silent_ms` proves a heartbeat.
    ///
    /// # Panics
    /// If that does not happen.
    pub fn await_heartbeats(&self, count: usize) {
        let until = Instant::now() + HEARTBEAT_TIMEOUT;
        let mut silences = BTreeMap::new();
        let mut seen = BTreeSet::new();
        loop {
            let nodes = self.controller_status().nodes.into_iter();
            let live: Vec<_> = nodes.filter(|it| it.state() == NodeState::Live).collect();
            for node in &live {
                let before = silences.insert(node.name.clone(), node.silent_ms);
                if before.is_some_and(|before| node.silent_ms < before) {
                    seen.insert(node.name.clone());
                }
            }
            if live.len() == count && live.iter().all(|it| seen.contains(&it.name)) {
                return;
            }
            assert!(
                Instant::now() < until,
                "{count} endpoints, only {seen:?} sent heartbeats: {live:?}"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Leads requests for a node's memory to another endpoint, with the primary's election id from
    /// the status. A controller that runs removes the entry soon.
    ///
    /// # Panics
    /// If the switch refuses.
    pub fn lead_astray(&self, switch: &SwitchStatus, node: NodeId, to: Node) {
        let election_id =
            v1::Uint128 { high: switch.election_id_high, low: switch.election_id_low };
        let port = self.rack().layout().port_of(to).expect("an endpoint of the rack");
        let forward = Forward { port: SwitchPort(port.number), dst_mac: port.peer_mac };
        // The node's prefix, and a clear first bit of the location: memory, and no endpoint address.
        let prefix = (u128::from(SPACE.scope()) << 80) | (u128::from(node.0) << 64);
        let entry = Entry {
            key: Key::Directory { prefix, prefix_len: NODE_PREFIX_LEN + 1 },
            action: Action::Forward(forward),
            idle_timeout: None,
            metadata: Vec::new(),
        };
        let entry = bluebridge_p4::entry::encode(&entry).expect("an entry of the pipeline");
        let entity = v1::Entity { entity: Some(v1::entity::Entity::TableEntry(entry)) };
        let update = v1::Update { r#type: v1::update::Type::Insert.into(), entity: Some(entity) };
        let request = v1::WriteRequest {
            device_id: DEVICE_ID,
            election_id: Some(election_id),
            updates: vec![update],
            ..v1::WriteRequest::default()
        };
        self.enter(Node::Switch, || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime").block_on(async {
                let uri = format!("http://{P4RUNTIME}");
                let mut client = P4RuntimeClient::connect(uri).await.expect("the switch listens");
                client.write(request).await.expect("the entry is taken");
            });
        });
    }

    /// Empties every table of the switch without the controller: pushes the pipeline again with
    /// another cookie, with the primary's election id.
    ///
    /// # Panics
    /// If the switch refuses.
    pub fn wipe_tables(&self) {
        let switch = self.switch_status();
        let election_id =
            v1::Uint128 { high: switch.election_id_high, low: switch.election_id_low };
        let config = v1::ForwardingPipelineConfig {
            p4info: Some(bluebridge_p4::p4info::p4info()),
            cookie: Some(v1::forwarding_pipeline_config::Cookie { cookie: 7 }),
            ..v1::ForwardingPipelineConfig::default()
        };
        let request = v1::SetForwardingPipelineConfigRequest {
            device_id: DEVICE_ID,
            election_id: Some(election_id),
            action: ConfigAction::VerifyAndCommit.into(),
            config: Some(config),
            ..v1::SetForwardingPipelineConfigRequest::default()
        };
        self.enter(Node::Switch, || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime").block_on(async {
                let uri = format!("http://{P4RUNTIME}");
                let mut client = P4RuntimeClient::connect(uri).await.expect("the switch listens");
                client.set_forwarding_pipeline_config(request).await.expect("the push is taken");
            });
        });
    }
}

fn read_openflow(names: &PortNames) -> Result<Vec<TableLine>, DriverError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let mut connector = OpenFlowConnector::new(OpenFlowAddress::Connect(OPENFLOW.into()));
    let installed = runtime.expect("a runtime").block_on(connector.look())?;
    let (entries, tables) = (installed.entries(), &installed.tables);
    Ok(tables::lines(entries, tables.flood_group, &tables.groups, names))
}
