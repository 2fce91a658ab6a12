//! The rack's switch: troubled, looked at, and wiped.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bluebridge_northbound::proto::{NodeState, StatusResponse};
use bluebridge_p4::proto::bluebridge::switch::v1::{Impairment, ListPortsResponse};
use bluebridge_p4::proto::p4::v1;
use bluebridge_rack::control::tables::{self, Act, Match, PortNames, TableLine};
use bluebridge_rack::control::{ControlError, controller_status, impair, switch_ports};
use bluebridge_rack::daemon::DEVICE_ID;
use bluebridge_rack::layout::P4RUNTIME;
use bluebridge_rack::spec::{DataPlane, Node};
use bluebridge_wire::Pointer;
use bluebridge_wire::address::PAGE_SHIFT;
use v1::p4_runtime_client::P4RuntimeClient;
use v1::set_forwarding_pipeline_config_request::Action;

use super::TestRack;

/// How long endpoints may take to be heard by a controller that has just started.
const HEARD_PATIENCE: Duration = Duration::from_secs(20);

/// Five in a hundred lost and five doubled; where the data plane can, five held back as well.
pub fn trouble(switch: DataPlane, seed: u64) -> Impairment {
    let reorder = if switch == DataPlane::Soft { 0.05 } else { 0.0 };
    Impairment { seed, loss: 0.05, duplicate: 0.05, reorder, ..Impairment::default() }
}

impl TestRack {
    /// Troubles every port, the controller's as well; each with dice of its own.
    ///
    /// # Panics
    /// If the switch refuses.
    pub fn trouble_all(&self, impairment: &Impairment) {
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

    /// The ports and drops of the switch.
    ///
    /// # Panics
    /// If the switch does not answer.
    pub fn switch_ports(&self) -> ListPortsResponse {
        let ports = self.enter(Node::Switch, || switch_ports(P4RUNTIME.into()));
        ports.unwrap_or_else(|error| panic!("{error}"))
    }

    /// The tables of the switch without their counters.
    ///
    /// # Errors
    /// The switch does not answer, or has no pipeline yet.
    pub fn tables(&self) -> Result<Vec<TableLine>, ControlError> {
        let names = PortNames::new();
        let read = || tables::read(P4RUNTIME.into(), DEVICE_ID, &names);
        let mut lines = self.enter(Node::Switch, read)?;
        for line in &mut lines {
            (line.packets, line.bytes) = (0, 0);
        }
        Ok(lines)
    }

    /// The redirects of the switch, with the packets that met them.
    ///
    /// # Panics
    /// If the switch does not answer.
    pub fn redirects(&self) -> Vec<TableLine> {
        let names = PortNames::new();
        let lines = self.enter(Node::Switch, || tables::read(P4RUNTIME.into(), DEVICE_ID, &names));
        let lines = lines.unwrap_or_else(|error| panic!("{error}")).into_iter();
        lines.filter(|line| line.table == "redirect").collect()
    }

    /// Whether the switch redirects a page to a client. The redirect of the owner before may still be there.
    ///
    /// # Panics
    /// If the switch does not answer.
    pub fn is_redirected(&self, page: Pointer, client: u16) -> bool {
        let number = page.location.bits() >> PAGE_SHIFT;
        let owner = self.port(Node::Client(client));
        self.redirects().iter().any(|it| {
            matches!(it.matches, Match::Redirect { page, .. } if page == number)
                && matches!(&it.action, Act::Redirect { port, .. } if port.port == owner)
        })
    }

    /// What the controller knows.
    ///
    /// # Panics
    /// If the controller does not answer.
    pub fn controller_status(&self) -> StatusResponse {
        let address: SocketAddr = self.rack().layout().controller().into();
        let status = self.enter(Node::Switch, || controller_status(address));
        status.unwrap_or_else(|error| panic!("{error}"))
    }

    /// Waits until the controller has heard of this many endpoints, all that it takes for live. One that has just
    /// started takes those for live whom its store names; silence that became shorter is a heartbeat.
    ///
    /// # Panics
    /// If that does not happen.
    pub fn await_heard(&self, count: usize) {
        let until = Instant::now() + HEARD_PATIENCE;
        let mut silences = BTreeMap::new();
        let mut heard = BTreeSet::new();
        loop {
            let nodes = self.controller_status().nodes.into_iter();
            let live: Vec<_> = nodes.filter(|it| it.state() == NodeState::Live).collect();
            for node in &live {
                let before = silences.insert(node.name.clone(), node.silent_ms);
                if before.is_some_and(|before| node.silent_ms < before) {
                    heard.insert(node.name.clone());
                }
            }
            if live.len() == count && live.iter().all(|it| heard.contains(&it.name)) {
                return;
            }
            assert!(
                Instant::now() < until,
                "{count} endpoints, only {heard:?} were heard: {live:?}"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Empties every table of the switch behind the controller's back: pushes the pipeline anew under
    /// another mark, in the primary's name.
    ///
    /// # Panics
    /// If the switch refuses.
    pub fn wipe_tables(&self) {
        let switch = self.controller_status().switch.expect("a switch");
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
            action: Action::VerifyAndCommit.into(),
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
