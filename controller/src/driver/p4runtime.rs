//! The driver for P4Runtime switches: the embedded switch, BMv2, P4 hardware.

mod convert;
mod stream;

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bluebridge_p4::p4info;
use bluebridge_p4::pipeline::SwitchPort;
use bluebridge_p4::proto::bluebridge::switch::v1 as switch;
use bluebridge_p4::proto::p4::v1;
use switch::switch_client::SwitchClient;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Response, Status, Streaming};
use v1::p4_runtime_client::P4RuntimeClient;

use super::protocol::explain_p4runtime;
use super::{
    Capabilities, DriverError, Installed, Pipeline, SwitchConnector, SwitchDriver, SwitchEvent,
    UpdateError,
};
use crate::core::{PORT_MAX, Ports};
use crate::plan::TableUpdate;
use crate::store::ElectionId;
use stream::Stream;

/// The most updates of a write: their errors are sent in a trailer, of which some switches and
/// clients accept only 8 KiB.
const BATCH_MAX: usize = 50;

/// Time limit of a connection attempt.
const CONNECT_DEADLINE: Duration = Duration::from_millis(500);

/// Time limit of a call.
const CALL_DEADLINE: Duration = Duration::from_secs(5);

/// The largest reading: 65,536 directory entries with counters take 4 MB.
const READ_BYTES_MAX: usize = 64 << 20;

/// The largest list of trailers that is accepted, in bytes.
const TRAILER_BYTES_MAX: u32 = 64 << 10;

/// Connects to one P4Runtime server and device.
#[derive(Clone, Debug)]
pub struct P4RuntimeConnector {
    uri: String,
    device_id: u64,
    device_config: Vec<u8>,
    /// Whether the switch ended a connection on which it got the pipeline, since it last took one.
    pipeline_ended_it: Arc<AtomicBool>,
}

impl P4RuntimeConnector {
    /// For the embedded switch, whose device configuration is known.
    #[must_use]
    pub fn new(uri: &str, device_id: u64) -> Self {
        Self::with_device_config(uri, device_id, p4info::DEVICE_CONFIG.to_vec())
    }

    /// For a target whose device configuration was compiled for it.
    #[must_use]
    pub fn with_device_config(uri: &str, device_id: u64, device_config: Vec<u8>) -> Self {
        Self { uri: uri.to_owned(), device_id, device_config, pipeline_ended_it: Arc::default() }
    }
}

#[tonic::async_trait]
impl SwitchConnector for P4RuntimeConnector {
    fn uri(&self) -> String {
        self.uri.clone()
    }

    async fn look(&mut self) -> Result<Installed, DriverError> {
        match self.try_look().await {
            Ok(installed) => Ok(installed),
            Err(error) => Err(self.explain(error).await),
        }
    }

    async fn connect(
        &mut self,
        election_id: ElectionId,
    ) -> Result<Box<dyn SwitchDriver>, DriverError> {
        match self.try_connect(election_id).await {
            Ok(driver) => Ok(Box::new(driver)),
            Err(error) => Err(self.explain(error).await),
        }
    }
}

impl P4RuntimeConnector {
    /// Why there is no connection.
    async fn explain(&self, error: DriverError) -> DriverError {
        match explain_p4runtime(error, self.authority()).await {
            DriverError::Lost(reason) if self.pipeline_ended_it.load(Ordering::Relaxed) => {
                let hint = pipeline_hint(&self.device_config, self.device_id);
                DriverError::Lost(format!("{reason}; it ended when it got the pipeline: {hint}"))
            }
            error => error,
        }
    }

    /// The host and the port of the server.
    fn authority(&self) -> &str {
        self.uri.split_once("://").map_or(self.uri.as_str(), |(_, rest)| rest)
    }

    async fn try_look(&self) -> Result<Installed, DriverError> {
        let client =
            P4RuntimeClient::new(self.channel().await?).max_decoding_message_size(READ_BYTES_MAX);
        let mut installed = Installed::default();
        match within("looking", read(client, self.device_id, convert::wildcards())).await? {
            Ok(entities) => {
                for entity in entities {
                    convert::install(entity, &mut installed);
                }
            }
            // Without a pipeline it has no tables.
            Err(status) if status.code() == Code::FailedPrecondition => {}
            Err(status) => return Err(DriverError::Lost(status.message().to_owned())),
        }
        Ok(installed)
    }

    async fn try_connect(&self, election_id: ElectionId) -> Result<P4RuntimeDriver, DriverError> {
        let channel = self.channel().await?;
        let client =
            P4RuntimeClient::new(channel.clone()).max_decoding_message_size(READ_BYTES_MAX);
        let stream = Stream::open(client.clone(), self.device_id, election_id).await?;
        let mut ports = SwitchClient::new(channel);
        // Only the embedded switch has this call.
        let watching = ports.watch_tables(switch::WatchTablesRequest {});
        let changes = within("watching the tables", watching).await.ok().and_then(Result::ok);
        Ok(P4RuntimeDriver {
            client,
            ports,
            changes: changes.map(Response::into_inner),
            stream,
            device_id: self.device_id,
            election_id,
            cookie: cookie(&self.device_config),
            device_config: self.device_config.clone(),
            pipeline_ended_it: Arc::clone(&self.pipeline_ended_it),
        })
    }

    async fn channel(&self) -> Result<Channel, DriverError> {
        let lost = |error: tonic::transport::Error| {
            use std::error::Error as _;
            let cause = error.source().map(|source| format!(": {source}")).unwrap_or_default();
            DriverError::Lost(format!("{error}{cause}"))
        };
        let endpoint = Endpoint::from_shared(self.uri.clone())
            .map_err(lost)?
            .connect_timeout(CONNECT_DEADLINE)
            .tcp_nodelay(true)
            .http2_max_header_list_size(TRAILER_BYTES_MAX)
            .http2_keep_alive_interval(Duration::from_secs(2))
            .keep_alive_timeout(Duration::from_secs(2));
        within("connect", endpoint.connect()).await?.map_err(lost)
    }
}

/// Reads entities; any client may.
async fn read(
    mut client: P4RuntimeClient<Channel>,
    device_id: u64,
    entities: Vec<v1::Entity>,
) -> Result<Vec<v1::Entity>, Status> {
    let request = v1::ReadRequest { device_id, entities, ..v1::ReadRequest::default() };
    let mut responses = client.read(request).await?.into_inner();
    let mut found = Vec::new();
    while let Some(response) = responses.message().await? {
        found.extend(response.entities);
    }
    Ok(found)
}

/// The cookie of a pipeline: a hash of its declaration and of the device configuration.
fn cookie(device_config: &[u8]) -> u64 {
    device_config.iter().fold(p4info::cookie(), |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
    })
}

async fn within<T>(
    what: &'static str,
    call: impl Future<Output = T> + Send,
) -> Result<T, DriverError> {
    tokio::time::timeout(CALL_DEADLINE, call).await.map_err(|_| DriverError::Timeout(what))
}

/// What an operator must check if a switch fails when it gets the pipeline.
fn pipeline_hint(device_config: &[u8], device_id: u64) -> String {
    let target = if device_config == p4info::DEVICE_CONFIG { "embedded" } else { "bmv2" };
    format!(
        "check that the switch is of the kind that --target names ({target}), and that its number is that of \
         --device-id ({device_id}); BMv2 crashes if one of them is wrong"
    )
}

/// A connection to one device, as its primary.
pub struct P4RuntimeDriver {
    client: P4RuntimeClient<Channel>,
    ports: SwitchClient<Channel>,
    /// Announces changes of the tables.
    changes: Option<Streaming<switch::WatchTablesResponse>>,
    stream: Stream,
    device_id: u64,
    election_id: ElectionId,
    cookie: u64,
    device_config: Vec<u8>,
    pipeline_ended_it: Arc<AtomicBool>,
}

impl std::fmt::Debug for P4RuntimeDriver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("P4RuntimeDriver")
            .field("device_id", &self.device_id)
            .field("election_id", &self.election_id)
            .finish_non_exhaustive()
    }
}

impl P4RuntimeDriver {
    const fn election(&self) -> Option<v1::Uint128> {
        Some(v1::Uint128 { high: self.election_id.high, low: self.election_id.low })
    }

    /// Interprets the failure of a whole call.
    fn failure(&self, what: &'static str, status: &Status) -> DriverError {
        if let Some(error) = self.stream.broken() {
            return error;
        }
        let reason = format!("{:?}: {}", status.code(), status.message());
        match status.code() {
            Code::InvalidArgument | Code::Unimplemented | Code::OutOfRange => {
                DriverError::Refused { what, reason }
            }
            // The pipeline may be gone, or another client may be primary by now: start again.
            _ => DriverError::Lost(format!("{what}: {reason}")),
        }
    }

    async fn call<T>(
        &self,
        what: &'static str,
        call: impl Future<Output = Result<Response<T>, Status>> + Send,
    ) -> Result<T, DriverError> {
        match within(what, call).await? {
            Ok(response) => Ok(response.into_inner()),
            Err(status) => Err(self.failure(what, &status)),
        }
    }

    async fn running_cookie(&mut self) -> Result<Option<u64>, DriverError> {
        let request = v1::GetForwardingPipelineConfigRequest {
            device_id: self.device_id,
            response_type: v1::get_forwarding_pipeline_config_request::ResponseType::CookieOnly
                .into(),
        };
        let mut client = self.client.clone();
        let call = client.get_forwarding_pipeline_config(request);
        match within("reading the pipeline's cookie", call).await? {
            Ok(response) => {
                let config = response.into_inner().config;
                Ok(config.and_then(|config| config.cookie).map(|cookie| cookie.cookie))
            }
            Err(status) if status.code() == Code::FailedPrecondition => Ok(None),
            Err(status) => Err(self.failure("reading the pipeline's cookie", &status)),
        }
    }

    async fn read_entities(
        &self,
        entities: Vec<v1::Entity>,
    ) -> Result<Vec<v1::Entity>, DriverError> {
        let what = "reading the tables";
        let reading = read(self.client.clone(), self.device_id, entities);
        within(what, reading).await?.map_err(|status| self.failure(what, &status))
    }

    async fn write(
        &self,
        updates: Vec<v1::Update>,
    ) -> Result<Vec<Result<(), UpdateError>>, DriverError> {
        let count = updates.len();
        let request = v1::WriteRequest {
            device_id: self.device_id,
            election_id: self.election(),
            updates,
            ..v1::WriteRequest::default()
        };
        let mut client = self.client.clone();
        match within("writing", client.write(request)).await? {
            Ok(_) => Ok(vec![Ok(()); count]),
            Err(status) => match convert::results(&status, count) {
                Some(results) => Ok(results),
                None => Err(self.failure("writing", &status)),
            },
        }
    }

    /// Some switches keep groups and clone sessions over a push but lose track of them,
    /// and would then copy frames twice.
    async fn clear_replication(&self) -> Result<(), DriverError> {
        let Ok(there) = self.read_entities(convert::replication_wildcards()).await else {
            // A switch without a pipeline has none.
            return Ok(());
        };
        for batch in convert::deletions(there).chunks(BATCH_MAX) {
            self.write(batch.to_vec()).await?;
        }
        Ok(())
    }

    async fn push(&self) -> Result<(), DriverError> {
        use v1::set_forwarding_pipeline_config_request::Action;
        let config = v1::ForwardingPipelineConfig {
            p4info: Some(p4info::p4info()),
            p4_device_config: self.device_config.clone(),
            cookie: Some(v1::forwarding_pipeline_config::Cookie { cookie: self.cookie }),
        };
        let request = v1::SetForwardingPipelineConfigRequest {
            device_id: self.device_id,
            election_id: self.election(),
            action: Action::VerifyAndCommit.into(),
            config: Some(config),
            ..v1::SetForwardingPipelineConfigRequest::default()
        };
        let mut client = self.client.clone();
        let pushed =
            self.call("the pipeline", client.set_forwarding_pipeline_config(request)).await;
        self.pipeline_ended_it
            .store(matches!(pushed, Err(DriverError::Lost(_))), Ordering::Relaxed);
        pushed.map(drop).map_err(|error| explain_push(error, &self.device_config, self.device_id))
    }
}

/// The failure of a push, with what to check. BMv2 reports an error without a cause, and crashes.
fn explain_push(error: DriverError, device_config: &[u8], device_id: u64) -> DriverError {
    match error {
        DriverError::Lost(reason) => {
            let hint = pipeline_hint(device_config, device_id);
            DriverError::Lost(format!("{reason}; {hint}"))
        }
        error => error,
    }
}

#[tonic::async_trait]
impl SwitchDriver for P4RuntimeDriver {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            driver: "P4Runtime",
            batch_max: BATCH_MAX,
            // The embedded switch can; a P4 program has no clock for its entries.
            keeps_time: self.device_config == p4info::DEVICE_CONFIG,
            announces_changes: self.changes.is_some(),
        }
    }

    async fn ensure_pipeline(&mut self) -> Result<Pipeline, DriverError> {
        if self.running_cookie().await? == Some(self.cookie) {
            return Ok(Pipeline::Kept);
        }
        self.clear_replication().await?;
        self.push().await?;
        Ok(Pipeline::Pushed)
    }

    async fn ports(&mut self) -> Result<Ports, DriverError> {
        let mut client = self.ports.clone();
        let call = client.list_ports(switch::ListPortsRequest {});
        match within("listing the ports", call).await? {
            Ok(response) => {
                let ports = response.into_inner().ports.into_iter().filter_map(|port| {
                    // Ports that P4Runtime cannot name are as if they did not exist: an entry for one would be
                    // refused again and again.
                    let number = u16::try_from(port.number).ok()?;
                    (1..=PORT_MAX).contains(&number).then_some((SwitchPort(number), port.name))
                });
                Ok(Ports::Listed(ports.collect::<BTreeMap<_, _>>()))
            }
            Err(status) if status.code() == Code::Unimplemented => Ok(Ports::Unlisted),
            Err(status) => Err(self.failure("listing the ports", &status)),
        }
    }

    async fn apply(
        &mut self,
        batch: &[TableUpdate],
    ) -> Result<Vec<Result<(), UpdateError>>, DriverError> {
        // Updates that this pipeline cannot express are refused here, on behalf of the switch.
        let encoded: Vec<_> = batch.iter().map(convert::update).collect();
        let sendable = encoded.iter().flatten().cloned().collect::<Vec<_>>();
        let mut results =
            if sendable.is_empty() { Vec::new() } else { self.write(sendable).await? }.into_iter();
        let results = encoded.into_iter().map(|update| match update {
            Ok(_) => results.next().unwrap_or_else(|| {
                Err(UpdateError::Refused("the switch did not report its result".to_owned()))
            }),
            Err(error) => Err(UpdateError::Refused(error.to_string())),
        });
        Ok(results.collect())
    }

    async fn read(&mut self) -> Result<Installed, DriverError> {
        let mut installed = Installed::default();
        for entity in self.read_entities(convert::wildcards()).await? {
            convert::install(entity, &mut installed);
        }
        Ok(installed)
    }

    async fn next_event(&mut self) -> SwitchEvent {
        let Some(changes) = &mut self.changes else { return self.stream.next().await };
        tokio::select! {
            biased;
            event = self.stream.next() => return event,
            change = changes.message() => if matches!(change, Ok(Some(_))) {
                return SwitchEvent::TablesChanged;
            },
        }
        // If the switch ended, the other stream tells why.
        self.changes = None;
        SwitchEvent::TablesChanged
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_switch_that_fails_at_the_push_is_compared_with_the_options() {
        let failed = |config: &[u8]| {
            let error = DriverError::Lost("the pipeline: Unknown: an error".to_owned());
            explain_push(error, config, 7).to_string()
        };
        let bmv2 = failed(b"{}");
        for part in ["an error; check that", "--target names (bmv2)", "--device-id (7)"] {
            assert!(bmv2.contains(part), "{bmv2}");
        }
        let embedded = failed(p4info::DEVICE_CONFIG);
        assert!(embedded.contains("--target names (embedded)"), "{embedded}");
        let reason = "InvalidArgument: not this one".to_owned();
        let refused = DriverError::Refused { what: "the pipeline", reason };
        assert_eq!(explain_push(refused.clone(), b"", 7), refused, "the switch gave the reason");
    }
}
