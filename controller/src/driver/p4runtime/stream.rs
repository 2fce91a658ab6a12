//! The stream on which a switch reports the primary and sends copies of frames.
//!
//! Its reader never blocks: a switch whose primary does not read stops forwarding. Messages that it
//! cannot pass on are counted and lost, which notices allow.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bluebridge_p4::bytestring;
use bluebridge_p4::declaration::PACKET_IN_FIELDS;
use bluebridge_p4::pipeline::SwitchPort;
use bluebridge_p4::proto::p4::v1;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Code;
use tonic::transport::Channel;
use v1::p4_runtime_client::P4RuntimeClient;
use v1::stream_message_response::Update;

use crate::driver::{DriverError, PACKET_INS_AT_ONCE, SwitchEvent};
use crate::redirect::PacketIn;
use crate::store::ElectionId;

/// Packet-ins that wait for the controller.
const PACKET_INS_MAX: usize = 4096;

/// How long the switch may take to report the primary.
const ARBITRATION_DEADLINE: Duration = Duration::from_secs(2);

/// The state of the stream.
#[derive(Clone, Debug)]
enum Standing {
    /// The bid was sent, there is no response yet.
    Asked,
    /// This controller may write.
    Primary,
    /// It has ended.
    Broken(DriverError),
}

/// An open stream on which this controller is the primary.
pub(super) struct Stream {
    standing: watch::Receiver<Standing>,
    packet_ins: mpsc::Receiver<PacketIn>,
    /// Copies that found no room.
    lost: Arc<AtomicU64>,
    /// Kept open as long as this controller wants to be the primary.
    _requests: mpsc::Sender<v1::StreamMessageRequest>,
    reader: JoinHandle<()>,
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

impl Stream {
    /// Opens the stream and waits until the switch has made this controller the primary.
    pub(super) async fn open(
        mut client: P4RuntimeClient<Channel>,
        device_id: u64,
        ours: ElectionId,
    ) -> Result<Self, DriverError> {
        let (requests, outgoing) = mpsc::channel(4);
        let arbitration = v1::MasterArbitrationUpdate {
            device_id,
            election_id: Some(v1::Uint128 { high: ours.high, low: ours.low }),
            ..v1::MasterArbitrationUpdate::default()
        };
        let request = v1::stream_message_request::Update::Arbitration(arbitration);
        requests
            .send(v1::StreamMessageRequest { update: Some(request) })
            .await
            .map_err(|error| DriverError::Lost(error.to_string()))?;
        let opening = client.stream_channel(ReceiverStream::new(outgoing));
        let responses = tokio::time::timeout(ARBITRATION_DEADLINE, opening)
            .await
            .map_err(|_| DriverError::Timeout("arbitration"))?
            .map_err(|status| DriverError::Lost(status.message().to_owned()))?
            .into_inner();
        let (stands, standing) = watch::channel(Standing::Asked);
        let (copies, packet_ins) = mpsc::channel(PACKET_INS_MAX);
        let lost = Arc::new(AtomicU64::new(0));
        let outlet = Outlet { copies, lost: Arc::clone(&lost) };
        let reader = tokio::spawn(read(responses, ours, stands, outlet));
        let mut stream = Self { standing, packet_ins, lost, _requests: requests, reader };
        let decided = stream.standing.wait_for(|standing| !matches!(standing, Standing::Asked));
        let standing = tokio::time::timeout(ARBITRATION_DEADLINE, decided)
            .await
            .map_err(|_| DriverError::Timeout("arbitration"))?
            .map_err(|_| DriverError::Lost("the stream's reader ended".to_owned()))?
            .clone();
        match standing {
            Standing::Broken(error) => Err(error),
            Standing::Asked | Standing::Primary => Ok(stream),
        }
    }

    /// The end of the stream, or the next copies of frames. Can be dropped without losing any.
    pub(super) async fn next(&mut self) -> SwitchEvent {
        let mut packets = Vec::new();
        let broken = self.standing.wait_for(|standing| matches!(standing, Standing::Broken(_)));
        tokio::select! {
            biased;
            standing = broken => SwitchEvent::Broken(match standing.as_deref() {
                Ok(Standing::Broken(error)) => error.clone(),
                _ => DriverError::Lost("the stream's reader ended".to_owned()),
            }),
            1.. = self.packet_ins.recv_many(&mut packets, PACKET_INS_AT_ONCE) => {
                SwitchEvent::PacketIns { packets, lost: self.lost.swap(0, Ordering::Relaxed) }
            }
        }
    }

    /// Why writing was refused, if the stream has a more exact reason.
    pub(super) fn broken(&self) -> Option<DriverError> {
        match &*self.standing.borrow() {
            Standing::Broken(error) => Some(error.clone()),
            Standing::Asked | Standing::Primary => None,
        }
    }
}

/// The destination of the reader's copies.
struct Outlet {
    copies: mpsc::Sender<PacketIn>,
    lost: Arc<AtomicU64>,
}

impl Outlet {
    /// A copy that does not fit is lost: waiting would stop the switch.
    fn pass(&self, packet: v1::PacketIn) {
        let copy = PacketIn { ingress_port: ingress_port(&packet), frame: packet.payload };
        if self.copies.try_send(copy).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// The port in a copy's metadata; 0, which is not a port, if there is none.
fn ingress_port(packet: &v1::PacketIn) -> SwitchPort {
    let [field, _] = PACKET_IN_FIELDS;
    let given = packet.metadata.iter().find(|given| given.metadata_id == field.id);
    let number = given.and_then(|given| bytestring::decode(&given.value, field.bitwidth).ok());
    SwitchPort(number.and_then(|number| u16::try_from(number).ok()).unwrap_or(0))
}

async fn read(
    mut responses: tonic::Streaming<v1::StreamMessageResponse>,
    ours: ElectionId,
    stands: watch::Sender<Standing>,
    outlet: Outlet,
) {
    let error = loop {
        match responses.message().await {
            Ok(Some(message)) => match message.update {
                Some(Update::Arbitration(update)) => match standing(&update, ours) {
                    Standing::Broken(error) => break error,
                    primary => drop(stands.send_replace(primary)),
                },
                Some(Update::Packet(packet)) => outlet.pass(packet),
                Some(Update::Error(error)) => {
                    tracing::warn!(message = error.message, "the switch reports a stream error");
                }
                _ => {}
            },
            Ok(None) => break DriverError::Lost("the switch ended the stream".to_owned()),
            Err(status) => break DriverError::Lost(status.message().to_owned()),
        }
    };
    stands.send_replace(Standing::Broken(error));
}

/// The result of an arbitration update for this controller (specification, section 5).
fn standing(update: &v1::MasterArbitrationUpdate, ours: ElectionId) -> Standing {
    let primary = update.election_id.as_ref();
    let theirs = primary.map(|id| ElectionId { high: id.high, low: id.low });
    let code = update.status.as_ref().map_or(Code::Ok, |status| Code::from_i32(status.code));
    match (code, theirs) {
        (Code::Ok, _) => Standing::Primary,
        (_, Some(theirs)) if theirs > ours => {
            Standing::Broken(DriverError::Fenced { ours, theirs })
        }
        _ => Standing::Broken(DriverError::Lost("the switch did not make us primary".to_owned())),
    }
}
