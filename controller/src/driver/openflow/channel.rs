//! A connection to an OpenFlow switch: handshake, requests and responses, echo, packet-ins.
//!
//! Two tasks own the socket. The reader never blocks on the controller: it answers the switch's echo
//! requests, keeps a bounded number of packet-ins, and passes everything else to the caller that waits.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bluebridge_openflow::{
    Body, DecodeError, ErrorMessage, Features, FlowMod, GroupMod, Hello, MESSAGE_BYTES_MAX,
    Message, MultipartPart, MultipartRequest, SwitchConfig, VERSION, frame_length,
};
use bluebridge_p4::pipeline::{PACKET_IN_BYTES, SwitchPort};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

use crate::driver::{DriverError, PACKET_INS_AT_ONCE, SwitchEvent};
use crate::redirect::PacketIn;

/// Time limit of a response.
const RESPONSE_DEADLINE: Duration = Duration::from_secs(5);

/// An echo request is sent after so long without a message from the switch. It is a request like others: the connection is
/// given up after [`RESPONSE_DEADLINE`].
const ECHO_INTERVAL: Duration = Duration::from_secs(2);

/// Messages that wait to be sent.
const OUTGOING_MAX: usize = 64;

/// Responses that wait for their reader. A switch that sends more unrequested messages is cut off.
const INCOMING_MAX: usize = 4096;

/// Packet-ins that wait for the controller.
const PACKET_INS_MAX: usize = 4096;

/// The most changes between two barriers, so that their errors always find room.
pub(super) const CHANGES_MAX: usize = INCOMING_MAX / 2;

/// The position of the hop limit in a frame: after 14 bytes of Ethernet and 7 of IPv6.
const HOP_LIMIT_AT: usize = 14 + 7;

/// The transaction id of messages to which no response is expected.
const NO_XID: u32 = 0;

/// A change of the switch.
#[derive(Debug)]
pub(super) enum Change {
    Flow(FlowMod),
    Group(GroupMod),
}

impl From<FlowMod> for Change {
    fn from(change: FlowMod) -> Self {
        Self::Flow(change)
    }
}

impl From<GroupMod> for Change {
    fn from(change: GroupMod) -> Self {
        Self::Group(change)
    }
}

/// An open connection.
#[derive(Debug)]
pub(super) struct Channel {
    features: Features,
    outgoing: mpsc::Sender<Vec<u8>>,
    incoming: mpsc::Receiver<Message>,
    packet_ins: mpsc::Receiver<PacketIn>,
    lost: Arc<AtomicU64>,
    broken: watch::Receiver<Option<DriverError>>,
    /// The switch reported a change of a port.
    ports_changed: Arc<Notify>,
    next_xid: u32,
    tasks: [JoinHandle<()>; 2],
}

impl Drop for Channel {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

impl Channel {
    /// Negotiates the version and asks for the switch's features.
    pub(super) async fn open(stream: TcpStream) -> Result<Self, DriverError> {
        stream.set_nodelay(true).map_err(|error| DriverError::Lost(error.to_string()))?;
        let (read_half, write_half) = stream.into_split();
        let (outgoing, to_send) = mpsc::channel(OUTGOING_MAX);
        let (responses, incoming) = mpsc::channel(INCOMING_MAX);
        let (copies, packet_ins) = mpsc::channel(PACKET_INS_MAX);
        let (ends, broken) = watch::channel(None);
        let lost = Arc::new(AtomicU64::new(0));
        let ports_changed = Arc::new(Notify::new());
        let reader = Reader {
            stream: read_half,
            buffer: Vec::new(),
            outgoing: outgoing.clone(),
            responses,
            copies,
            lost: Arc::clone(&lost),
            ports_changed: Arc::clone(&ports_changed),
        };
        let ends = Arc::new(ends);
        let tasks = [
            tokio::spawn(reader.run(Arc::clone(&ends))),
            tokio::spawn(write(write_half, to_send, ends)),
        ];
        let features = Features::default();
        let mut channel = Self {
            features,
            outgoing,
            incoming,
            packet_ins,
            lost,
            broken,
            ports_changed,
            next_xid: NO_XID,
            tasks,
        };
        channel.send(Body::Hello(Hello::for_version(VERSION))).await?;
        match channel
            .next_response("the handshake", |message| matches!(message.body, Body::Hello(_)))
            .await?
        {
            Body::Hello(hello) if hello.speaks(VERSION) => {}
            _ => {
                return Err(DriverError::Refused {
                    what: "the handshake",
                    reason: "it does not speak OpenFlow 1.3".to_owned(),
                });
            }
        }
        match channel.request("its features", Body::FeaturesRequest).await? {
            Body::FeaturesReply(features) => channel.features = features,
            other => return Err(unexpected("its features", &other)),
        }
        Ok(channel)
    }

    /// What the switch is.
    pub(super) const fn features(&self) -> &Features {
        &self.features
    }

    /// Sends a request and waits for its response. The switch's error is [`DriverError::Refused`].
    pub(super) async fn request(
        &mut self,
        what: &'static str,
        body: Body,
    ) -> Result<Body, DriverError> {
        match self.try_request(what, body).await? {
            Ok(body) => Ok(body),
            Err(error) => Err(DriverError::Refused { what, reason: error.to_string() }),
        }
    }

    /// Like [`Self::request`], with the switch's error as a value.
    pub(super) async fn try_request(
        &mut self,
        what: &'static str,
        body: Body,
    ) -> Result<Result<Body, ErrorMessage>, DriverError> {
        let xid = self.send(body).await?;
        match self.next_response(what, |message| message.xid == xid).await? {
            Body::Error(error) => Ok(Err(error)),
            body => Ok(Ok(body)),
        }
    }

    /// Sends a multipart request and waits for all parts of the response.
    pub(super) async fn multipart(
        &mut self,
        what: &'static str,
        request: MultipartRequest,
    ) -> Result<Vec<MultipartPart>, DriverError> {
        let xid = self.send(Body::MultipartRequest(request)).await?;
        let mut parts = Vec::new();
        loop {
            match self.next_response(what, |message| message.xid == xid).await? {
                Body::MultipartReply(reply) => {
                    parts.push(reply.part);
                    if !reply.more {
                        return Ok(parts);
                    }
                }
                Body::Error(error) => {
                    return Err(DriverError::Refused { what, reason: error.to_string() });
                }
                other => return Err(unexpected(what, &other)),
            }
        }
    }

    /// Sends changes (at most [`CHANGES_MAX`]) and a barrier, and waits for it: then all changes are executed.
    /// Returns the errors by the number of their change.
    pub(super) async fn change(
        &mut self,
        changes: impl IntoIterator<Item = Change>,
    ) -> Result<HashMap<usize, ErrorMessage>, DriverError> {
        let mut numbers = HashMap::new();
        for (number, change) in changes.into_iter().enumerate() {
            let body = match change {
                Change::Flow(change) => Body::FlowMod(change),
                Change::Group(change) => Body::GroupMod(change),
            };
            numbers.insert(self.send(body).await?, number);
        }
        let mut errors = HashMap::new();
        if numbers.is_empty() {
            return Ok(errors);
        }
        let barrier = self.send(Body::BarrierRequest).await?;
        loop {
            let wanted =
                |message: &Message| message.xid == barrier || numbers.contains_key(&message.xid);
            let (xid, body) = self.next_message("the barrier", wanted).await?;
            match (numbers.get(&xid), body) {
                (Some(number), Body::Error(error)) => drop(errors.insert(*number, error)),
                (None, Body::BarrierReply) => return Ok(errors),
                (_, other) => return Err(unexpected("the barrier", &other)),
            }
        }
    }

    /// Sets the configuration of the switch, and waits until it is set.
    pub(super) async fn set_config(&mut self, config: SwitchConfig) -> Result<(), DriverError> {
        let what = "its configuration";
        let xid = self.send(Body::SetConfig(config)).await?;
        let barrier = self.send(Body::BarrierRequest).await?;
        let wanted = |message: &Message| message.xid == xid || message.xid == barrier;
        match self.next_response(what, wanted).await? {
            Body::BarrierReply => Ok(()),
            Body::Error(error) => Err(DriverError::Refused { what, reason: error.to_string() }),
            other => Err(unexpected(what, &other)),
        }
    }

    /// Sends a message with a transaction id of its own.
    async fn send(&mut self, body: Body) -> Result<u32, DriverError> {
        self.next_xid = self.next_xid.checked_add(1).unwrap_or(1);
        let xid = self.next_xid;
        let mut bytes = Vec::new();
        Message { xid, body }.encode(&mut bytes).map_err(|error| DriverError::Refused {
            what: "a message",
            reason: error.to_string(),
        })?;
        // The connection cannot take a message only if the switch has stopped reading.
        match timeout(RESPONSE_DEADLINE, self.outgoing.send(bytes)).await {
            Ok(Ok(())) => Ok(xid),
            Ok(Err(_)) => Err(self.end()),
            Err(_) => Err(DriverError::Timeout("sending")),
        }
    }

    async fn next_response(
        &mut self,
        what: &'static str,
        wanted: impl Fn(&Message) -> bool,
    ) -> Result<Body, DriverError> {
        self.next_message(what, wanted).await.map(|(_, body)| body)
    }

    /// The next message that is wanted. Others are responses to calls that were given up.
    async fn next_message(
        &mut self,
        what: &'static str,
        wanted: impl Fn(&Message) -> bool,
    ) -> Result<(u32, Body), DriverError> {
        let deadline = Instant::now() + RESPONSE_DEADLINE;
        loop {
            match tokio::time::timeout_at(deadline, self.incoming.recv()).await {
                Err(_) => return Err(DriverError::Timeout(what)),
                Ok(None) => return Err(self.end()),
                Ok(Some(message)) if wanted(&message) => return Ok((message.xid, message.body)),
                Ok(Some(Message { body: Body::Error(error), .. })) => {
                    tracing::warn!(%error, "the switch reports an error without a request");
                }
                Ok(Some(_)) => {}
            }
        }
    }

    /// Why the connection ended.
    fn end(&self) -> DriverError {
        let end = self.broken.borrow().clone();
        end.unwrap_or_else(|| DriverError::Lost("the connection ended".to_owned()))
    }

    /// The end of the connection, a change of ports, or the next copies of frames. Can be dropped without losing
    /// any.
    pub(super) async fn next_event(&mut self) -> SwitchEvent {
        let mut packets = Vec::new();
        tokio::select! {
            biased;
            end = self.broken.wait_for(Option::is_some) => {
                let end = end.ok().and_then(|end| end.clone());
                SwitchEvent::Broken(
                    end.unwrap_or_else(|| DriverError::Lost("the connection ended".to_owned())),
                )
            }
            () = self.ports_changed.notified() => SwitchEvent::PortsChanged,
            1.. = self.packet_ins.recv_many(&mut packets, PACKET_INS_AT_ONCE) => {
                SwitchEvent::PacketIns { packets, lost: self.lost.swap(0, Ordering::Relaxed) }
            }
        }
    }
}

fn unexpected(what: &'static str, body: &Body) -> DriverError {
    DriverError::Refused { what, reason: format!("it sent an unexpected {}", body.name()) }
}

struct Reader {
    stream: OwnedReadHalf,
    buffer: Vec<u8>,
    outgoing: mpsc::Sender<Vec<u8>>,
    responses: mpsc::Sender<Message>,
    copies: mpsc::Sender<PacketIn>,
    lost: Arc<AtomicU64>,
    ports_changed: Arc<Notify>,
}

impl Reader {
    async fn run(mut self, ends: Arc<watch::Sender<Option<DriverError>>>) {
        let error = match self.read().await {
            Ok(never) => match never {},
            Err(error) => error,
        };
        ends.send_if_modified(|end| end.is_none() && end.replace(error).is_none());
    }

    async fn read(&mut self) -> Result<std::convert::Infallible, DriverError> {
        let lost = |reason: String| DriverError::Lost(reason);
        let mut echoed = false;
        loop {
            let limit = if echoed { RESPONSE_DEADLINE } else { ECHO_INTERVAL };
            match timeout(limit, self.receive()).await {
                Ok(received) => received?,
                Err(_) if echoed => return Err(DriverError::Timeout("an echo request")),
                Err(_) => {
                    echoed = true;
                    self.send(Body::EchoRequest(Vec::new()), NO_XID)?;
                    continue;
                }
            }
            echoed = false;
            let mut at = 0;
            while let Some(length) = self
                .buffer
                .get(at..)
                .map_or(Ok(None), frame_length)
                .map_err(|error| lost(error.to_string()))?
            {
                let frame = self.buffer.get(at..at + length).unwrap_or_default();
                at += length;
                match Message::decode(frame) {
                    Ok(message) => self.handle(message)?,
                    // A feature that the codec lacks; a caller that waits for this message times out.
                    Err(error @ DecodeError::Unsupported(_)) => {
                        tracing::warn!(%error, "the switch sent a message that is not understood");
                    }
                    Err(error) => {
                        return Err(lost(format!("it sent a malformed message: {error}")));
                    }
                }
            }
            self.buffer.drain(..at);
        }
    }

    /// Waits for more bytes.
    async fn receive(&mut self) -> Result<(), DriverError> {
        self.buffer.reserve(MESSAGE_BYTES_MAX);
        match self.stream.read_buf(&mut self.buffer).await {
            Ok(0) => Err(DriverError::Lost("the switch closed the connection".to_owned())),
            Ok(_) => Ok(()),
            Err(error) => Err(DriverError::Lost(error.to_string())),
        }
    }

    fn handle(&mut self, message: Message) -> Result<(), DriverError> {
        match message.body {
            Body::EchoRequest(data) => self.send(Body::EchoReply(data), message.xid),
            Body::EchoReply(_) | Body::FlowRemoved(_) => Ok(()),
            Body::PortStatus(_) => {
                // Only a hint: the ports are listed again, so any number of these is one change.
                self.ports_changed.notify_one();
                Ok(())
            }
            Body::PacketIn(packet) => {
                let port = packet.in_port().and_then(|port| u16::try_from(port).ok());
                let mut frame = packet.data;
                // Some switches send the whole frame.
                frame.truncate(PACKET_IN_BYTES);
                // The pipeline decrements it before it copies a frame.
                if let Some(hop_limit) = frame.get_mut(HOP_LIMIT_AT) {
                    *hop_limit = hop_limit.wrapping_add(1);
                }
                let copy = PacketIn { ingress_port: SwitchPort(port.unwrap_or(0)), frame };
                // A copy that finds no room is lost: waiting would stop the switch.
                if self.copies.try_send(copy).is_err() {
                    self.lost.fetch_add(1, Ordering::Relaxed);
                }
                Ok(())
            }
            body => self.responses.try_send(Message { xid: message.xid, body }).map_err(|_| {
                DriverError::Lost("it sends more messages than were requested".to_owned())
            }),
        }
    }

    fn send(&self, body: Body, xid: u32) -> Result<(), DriverError> {
        let mut bytes = Vec::new();
        let encoded = Message { xid, body }.encode(&mut bytes);
        if encoded.is_err() || self.outgoing.try_send(bytes).is_err() {
            return Err(DriverError::Lost("the switch does not read its messages".to_owned()));
        }
        Ok(())
    }
}

async fn write(
    mut stream: OwnedWriteHalf,
    mut outgoing: mpsc::Receiver<Vec<u8>>,
    ends: Arc<watch::Sender<Option<DriverError>>>,
) {
    let mut bytes = Vec::new();
    while let Some(next) = outgoing.recv().await {
        bytes.extend(next);
        while bytes.len() < MESSAGE_BYTES_MAX
            && let Ok(next) = outgoing.try_recv()
        {
            bytes.extend(next);
        }
        if let Err(error) = stream.write_all(&bytes).await {
            let error = DriverError::Lost(error.to_string());
            ends.send_if_modified(|end| end.is_none() && end.replace(error).is_none());
            return;
        }
        bytes.clear();
    }
}
