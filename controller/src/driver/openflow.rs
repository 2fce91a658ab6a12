//! The driver for OpenFlow 1.3 switches, such as Open vSwitch.
//!
//! * `layout`: the pipeline as OpenFlow tables; `flow`: flows and groups as values.
//! * `compile`: entries to flows and groups; `read`: the opposite.
//! * `update`: executes updates; `primary`: which controller may write.
//! * `channel`: the connection; `listen`: the address to which a switch connects.
//!
//! OpenFlow differs from P4Runtime in these points:
//! * It counts time in seconds, so the controller ends redirects itself.
//! * Its flows have no metadata; entries with metadata are refused.
//! * A reading finds flows of others in the pipeline's tables. They could let frames pass, so they are deleted.

mod channel;
mod compile;
mod flow;
mod layout;
mod listen;
mod primary;
mod read;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod unlucky;
mod update;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use bluebridge_openflow::{
    ErrorMessage, FlowStatsRequest, FragmentHandling, GROUP_ALL, GROUP_ANY, MultipartPart,
    MultipartRequest, SwitchConfig, TABLE_ALL, port,
};
use bluebridge_p4::pipeline::{PACKET_IN_BYTES, SwitchPort};
use tokio::net::TcpStream;

use super::protocol::explain_openflow;
use super::{
    Capabilities, DriverError, Installed, Pipeline, SwitchConnector, SwitchDriver, SwitchEvent,
    UpdateError,
};
use crate::core::Ports;
use crate::plan::TableUpdate;
use crate::store::ElectionId;
use channel::{Change, Channel};
use flow::Flow;
use layout::{BASE_COOKIE, BASE_MASK};
use listen::Listener;
use read::{Contents, interpret};

/// The most updates of a batch; each may need several changes.
const BATCH_MAX: usize = 256;

/// Time limit of a connection attempt.
const CONNECT_DEADLINE: Duration = Duration::from_millis(500);

/// How an OpenFlow connection is made.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum OpenFlowAddress {
    /// The controller connects to the switch (`ptcp:` in Open vSwitch).
    Connect(SocketAddr),
    /// The switch connects to this address of the controller (`tcp:` in Open vSwitch).
    Listen(SocketAddr),
}

impl std::fmt::Display for OpenFlowAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Connect(address) => write!(f, "openflow://{address}"),
            Self::Listen(address) => write!(f, "openflow-listen://{address}"),
        }
    }
}

/// An OpenFlow switch of a controller.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct OpenFlowSwitch {
    /// How the connection is made.
    pub address: OpenFlowAddress,
    /// Its datapath id; others are refused. `None` for any switch.
    pub datapath_id: Option<u64>,
}

impl From<OpenFlowAddress> for OpenFlowSwitch {
    fn from(address: OpenFlowAddress) -> Self {
        Self { address, datapath_id: None }
    }
}

impl std::fmt::Display for OpenFlowSwitch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.datapath_id {
            Some(id) => write!(f, "{}?datapath-id={id:016x}", self.address),
            None => self.address.fmt(f),
        }
    }
}

/// Makes connections to one OpenFlow switch.
#[derive(Debug)]
pub struct OpenFlowConnector {
    switch: OpenFlowSwitch,
    listener: Listener,
    /// A connection that was only used for reading.
    idle: Option<Channel>,
}

impl OpenFlowConnector {
    /// For the switch at an address, or the one that connects to an address.
    #[must_use]
    pub fn new(switch: impl Into<OpenFlowSwitch>) -> Self {
        Self { switch: switch.into(), listener: Listener::default(), idle: None }
    }

    async fn channel(&mut self) -> Result<Channel, DriverError> {
        let OpenFlowSwitch { address, datapath_id } = self.switch;
        let address = match address {
            OpenFlowAddress::Connect(address) => address,
            OpenFlowAddress::Listen(address) => {
                return self.listener.accept(address, datapath_id).await;
            }
        };
        let stream = within(CONNECT_DEADLINE, "connect", TcpStream::connect(address))
            .await?
            .map_err(|error| DriverError::Lost(error.to_string()))?;
        match Channel::open(stream).await {
            Ok(channel) => check_datapath(&channel, datapath_id).map(|()| channel),
            Err(error) => Err(explain_openflow(error, &address.to_string()).await),
        }
    }
}

/// Refuses another switch than the required one.
fn check_datapath(channel: &Channel, wanted: Option<u64>) -> Result<(), DriverError> {
    let found = channel.features().datapath_id;
    match wanted {
        Some(wanted) if wanted != found => Err(DriverError::OtherSwitch { found, wanted }),
        _ => Ok(()),
    }
}

async fn within<T>(
    deadline: Duration,
    what: &'static str,
    call: impl Future<Output = T> + Send,
) -> Result<T, DriverError> {
    tokio::time::timeout(deadline, call).await.map_err(|_| DriverError::Timeout(what))
}

#[tonic::async_trait]
impl SwitchConnector for OpenFlowConnector {
    fn uri(&self) -> String {
        self.switch.to_string()
    }

    async fn look(&mut self) -> Result<Installed, DriverError> {
        let mut channel = self.channel().await?;
        let contents = read(&mut channel).await?;
        self.idle = Some(channel);
        Ok(contents.installed)
    }

    async fn connect(
        &mut self,
        election_id: ElectionId,
    ) -> Result<Box<dyn SwitchDriver>, DriverError> {
        let mut channel = match self.idle.take() {
            Some(channel) => channel,
            None => self.channel().await?,
        };
        let tables = channel.features().table_count;
        if tables < layout::TABLE_COUNT {
            return Err(DriverError::Refused {
                what: "the pipeline",
                reason: format!("it needs {} tables, the switch has {tables}", layout::TABLE_COUNT),
            });
        }
        primary::become_primary(&mut channel, election_id).await?;
        // Open vSwitch sends nothing unrequested to a controller that connected to it before this is set.
        let miss_send_bytes = u16::try_from(PACKET_IN_BYTES).unwrap_or(u16::MAX);
        channel
            .set_config(SwitchConfig { fragments: FragmentHandling::Normal, miss_send_bytes })
            .await?;
        Ok(Box::new(OpenFlowDriver { channel, election_id, contents: Contents::default() }))
    }
}

/// A connection to one switch, as its primary.
#[derive(Debug)]
pub struct OpenFlowDriver {
    channel: Channel,
    election_id: ElectionId,
    /// What the switch has: as last read, with later changes.
    contents: Contents,
}

/// Reads every flow and group.
async fn read(channel: &mut Channel) -> Result<Contents, DriverError> {
    let mut flows = Vec::new();
    for part in channel.multipart("reading the flows", all_flows(0, 0)).await? {
        if let MultipartPart::Flows(part) = part {
            flows.extend(part);
        }
    }
    let mut groups = Vec::new();
    for part in channel.multipart("reading the groups", MultipartRequest::Groups).await? {
        if let MultipartPart::Groups(part) = part {
            groups.extend(part);
        }
    }
    Ok(interpret(flows, &groups))
}

fn all_flows(cookie: u64, cookie_mask: u64) -> MultipartRequest {
    MultipartRequest::Flows(FlowStatsRequest {
        table: TABLE_ALL,
        out_port: port::ANY,
        out_group: GROUP_ANY,
        cookie,
        cookie_mask,
        fields: Vec::new(),
    })
}

impl OpenFlowDriver {
    /// Deletes the flows of ports to which no entry leads any more.
    async fn remove_unused_egress(&mut self) -> Result<(), DriverError> {
        let unused = std::mem::take(&mut self.contents.unused_egress);
        if unused.is_empty() {
            return Ok(());
        }
        tracing::debug!(flows = unused.len(), "flows of ports without entries are deleted");
        let changes = unused.iter().map(|key| (0, flow::delete(key).into())).collect();
        self.send(changes, &mut [Ok(())]).await?;
        self.contents.flows.retain(|key, _| !unused.contains(key));
        Ok(())
    }

    /// Deletes flows and groups that belong to nothing.
    async fn remove_foreign(&mut self) -> Result<(), DriverError> {
        let flows = std::mem::take(&mut self.contents.foreign_flows);
        let groups = std::mem::take(&mut self.contents.foreign_groups);
        if flows.is_empty() && groups.is_empty() {
            return Ok(());
        }
        tracing::warn!(
            flows = flows.len(),
            groups = groups.len(),
            "the switch had flows or groups of others in the pipeline's tables; they were deleted"
        );
        let flows = flows.iter().map(|flow| Change::from(flow::delete_foreign(flow)));
        let changes: Vec<Change> =
            flows.chain(groups.iter().map(|id| flow::delete_group(*id).into())).collect();
        let numbered = changes.into_iter().map(|change| (0, change)).collect();
        self.send(numbered, &mut [Ok(())]).await
    }

    /// Empties the switch and installs the flows that are always there, the version last.
    async fn push(&mut self) -> Result<(), DriverError> {
        self.empty().await?;
        let base = layout::base_flows().iter().map(|flow| flow.add().into()).collect();
        let pushed = match self.base_change(base).await {
            Ok(()) => self.base_change(vec![layout::version_record().add().into()]).await,
            Err(error) => Err(error),
        };
        if matches!(pushed, Err(DriverError::Refused { .. })) {
            // A part of the pipeline could let frames pass that the rest would drop.
            self.empty().await?;
        }
        pushed
    }

    /// Deletes every flow and group but the record of the primary.
    async fn empty(&mut self) -> Result<(), DriverError> {
        let groups = flow::delete_group(GROUP_ALL);
        self.base_change(vec![flow::delete_all().into(), groups.into()]).await?;
        self.contents = Contents::default();
        primary::record(&mut self.channel, self.election_id).await
    }

    /// Changes without which the pipeline does not work.
    async fn base_change(&mut self, changes: Vec<Change>) -> Result<(), DriverError> {
        let errors = self.channel.change(changes).await?;
        match errors.into_values().next() {
            None => Ok(()),
            Some(error) if error.is_not_primary() => {
                Err(primary::lost(&mut self.channel, self.election_id).await)
            }
            Some(error) => {
                Err(DriverError::Refused { what: "the pipeline", reason: reason(&error) })
            }
        }
    }
}

/// An error for people.
fn reason(error: &ErrorMessage) -> String {
    if error.is_full() { "the table is full".to_owned() } else { error.to_string() }
}

#[tonic::async_trait]
impl SwitchDriver for OpenFlowDriver {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            driver: "OpenFlow",
            batch_max: BATCH_MAX,
            keeps_time: false,
            announces_changes: false,
        }
    }

    async fn ensure_pipeline(&mut self) -> Result<Pipeline, DriverError> {
        primary::check(&mut self.channel, self.election_id).await?;
        let mut base = BTreeMap::new();
        let what = "reading the pipeline";
        for part in self.channel.multipart(what, all_flows(BASE_COOKIE, BASE_MASK)).await? {
            let MultipartPart::Flows(flows) = part else { continue };
            base.extend(flows.iter().filter_map(Flow::read).map(|flow| (flow.key(), flow)));
        }
        let version = self.version().await?;
        if version != Some(layout::version()) {
            self.push().await?;
            return Ok(Pipeline::Pushed);
        }
        let missing: Vec<Change> = layout::base_flows()
            .iter()
            .filter(|flow| base.get(&flow.key()) != Some(flow))
            .map(|flow| flow.add().into())
            .collect();
        if !missing.is_empty() {
            tracing::warn!(
                flows = missing.len(),
                "flows of the pipeline were missing; they were added"
            );
            self.base_change(missing).await?;
        }
        Ok(Pipeline::Kept)
    }

    async fn ports(&mut self) -> Result<Ports, DriverError> {
        let mut listed = BTreeMap::new();
        let what = "listing the ports";
        for part in self.channel.multipart(what, MultipartRequest::PortDescription).await? {
            let MultipartPart::PortDescription(ports) = part else { continue };
            for port in ports {
                // The numbers above are reserved, such as that of the switch's own interface.
                if let Ok(number @ 1..=bluebridge_p4::declaration::PORT_MAX) =
                    u16::try_from(port.number)
                {
                    listed.insert(SwitchPort(number), port.name);
                }
            }
        }
        Ok(Ports::Listed(listed))
    }

    async fn apply(
        &mut self,
        batch: &[TableUpdate],
    ) -> Result<Vec<Result<(), UpdateError>>, DriverError> {
        self.execute(batch).await
    }

    async fn read(&mut self) -> Result<Installed, DriverError> {
        self.contents = read(&mut self.channel).await?;
        self.remove_foreign().await?;
        self.remove_unused_egress().await?;
        Ok(self.contents.installed.clone())
    }

    async fn next_event(&mut self) -> SwitchEvent {
        self.channel.next_event().await
    }
}

impl OpenFlowDriver {
    /// The version of the pipeline that the switch has.
    async fn version(&mut self) -> Result<Option<u64>, DriverError> {
        let record = layout::version_record();
        let flow = primary::find_record(&mut self.channel, &record).await?;
        Ok(flow.map(|flow| flow.cookie))
    }
}
