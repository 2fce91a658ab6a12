//! Packets and notifications on the stream (P4Runtime specification, section 16).

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use bluebridge_p4::bytestring;
use bluebridge_p4::declaration::{PACKET_IN_FIELDS, PACKET_OUT_FIELDS};
use bluebridge_p4::entry::encode;
use bluebridge_p4::pipeline::SwitchPort;
use bluebridge_p4::proto::p4::v1;
use tonic::Code;
use v1::stream_message_request::Update as Message;
use v1::stream_message_response::Update as Notification;

use super::arbitration::StreamId;
use super::refusal::{ERROR_SPACE, Refusal, invalid};
use super::state::AgentState;
use crate::dataplane::PacketIn;

/// The most packet-ins read from the data plane at once.
pub(super) const PACKET_INS_AT_ONCE: usize = 256;

/// The most entries in one idle notification.
const IDLE_AT_ONCE: usize = 256;

impl AgentState {
    /// Handles a message on a stream; an error ends the stream.
    pub(super) fn handle_message(
        &mut self,
        stream: StreamId,
        message: v1::StreamMessageRequest,
    ) -> Result<(), Refusal> {
        if !self.arbitration.is_open(stream) {
            let message = "the stream was ended because its client does not read";
            return Err(Refusal::Request(Code::ResourceExhausted, message.to_owned()));
        }
        match message.update {
            Some(Message::Arbitration(bid)) => return self.arbitration.arbitrate(stream, &bid),
            Some(Message::Packet(packet)) => {
                if let Err(refusal) = self.packet_out(stream, &packet) {
                    let error = v1::PacketOutError { packet_out: Some(packet) };
                    let details = v1::stream_error::Details::PacketOut(error);
                    self.stream_error(stream, &refusal, Some(details));
                }
            }
            Some(Message::DigestAck(ack)) => {
                let error = v1::DigestListAckError { digest_list_ack: Some(ack) };
                let details = v1::stream_error::Details::DigestListAck(error);
                let refusal = invalid("the pipeline has no digests");
                self.stream_error(stream, &refusal, Some(details));
            }
            Some(Message::Other(other)) => {
                let error = v1::StreamOtherError { other: Some(other) };
                let refusal = invalid("this switch supports no other messages");
                let details = v1::stream_error::Details::Other(error);
                self.stream_error(stream, &refusal, Some(details));
            }
            None => self.stream_error(stream, &invalid("the message is empty"), None),
        }
        Ok(())
    }

    fn stream_error(
        &self,
        stream: StreamId,
        refusal: &Refusal,
        details: Option<v1::stream_error::Details>,
    ) {
        let error = v1::StreamError {
            canonical_code: refusal.code().into(),
            message: refusal.to_string(),
            space: ERROR_SPACE.to_owned(),
            code: 0,
            details,
        };
        self.arbitration.send(stream, Notification::Error(error));
    }

    fn packet_out(&mut self, stream: StreamId, packet: &v1::PacketOut) -> Result<(), Refusal> {
        if !self.arbitration.is_primary(stream) {
            let message = "only the primary may send packets".to_owned();
            return Err(Refusal::Request(Code::PermissionDenied, message));
        }
        self.pipeline.check_committed()?;
        self.plane.packet_out(egress_port(&packet.metadata)?, &packet.payload)?;
        Ok(())
    }

    /// Delivers packet-ins from the data plane to the primaries; false if none is left.
    pub(super) fn deliver_packets(&mut self) -> Result<bool, Refusal> {
        let mut packets = Vec::new();
        self.plane.poll(PACKET_INS_AT_ONCE, &mut packets)?;
        let more = packets.len() == PACKET_INS_AT_ONCE;
        for packet in packets {
            if !self.arbitration.send_to_primaries(&Notification::Packet(packet_in(packet))) {
                self.packet_ins_lost += 1;
            }
        }
        Ok(more)
    }

    /// Packet-ins that no controller received.
    pub(super) fn lost_packet_ins(&mut self) -> Result<u64, Refusal> {
        Ok(self.plane.events_lost()?.saturating_add(self.packet_ins_lost))
    }

    /// Notifies the primaries of idle entries, and again after every further timeout while they are
    /// idle. Returns false if there is no entry that could become idle.
    pub(super) fn notify_idle(&mut self) -> Result<bool, Refusal> {
        if self.timed.is_empty() {
            return Ok(false);
        }
        if !self.arbitration.has_primary() {
            return Ok(true);
        }
        let now = Instant::now();
        let expired = self.plane.expired()?;
        let due: Vec<_> = expired
            .into_iter()
            .map(|installed| installed.entry)
            .filter(|entry| {
                let last = self.idle_notified.get(&entry.key);
                let timeout = entry.idle_timeout.unwrap_or_default();
                last.is_none_or(|last| now.saturating_duration_since(*last) >= timeout)
            })
            .collect();
        for entries in due.chunks(IDLE_AT_ONCE) {
            let mut notification = v1::IdleTimeoutNotification {
                table_entry: Vec::with_capacity(entries.len()),
                timestamp: timestamp(),
            };
            for entry in entries {
                notification.table_entry.push(v1::TableEntry { action: None, ..encode(entry)? });
            }
            if self
                .arbitration
                .send_to_primaries(&Notification::IdleTimeoutNotification(notification))
            {
                self.idle_notified.extend(entries.iter().map(|entry| (entry.key, now)));
            }
        }
        Ok(true)
    }
}

fn timestamp() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}

fn packet_in(packet: PacketIn) -> v1::PacketIn {
    let values = [u128::from(packet.ingress_port.0), 0];
    let metadata = PACKET_IN_FIELDS.iter().zip(values).map(|(field, value)| v1::PacketMetadata {
        metadata_id: field.id,
        value: bytestring::encode(value),
    });
    v1::PacketIn { payload: packet.frame, metadata: metadata.collect() }
}

/// The port named in a packet-out's header; the padding may be omitted.
fn egress_port(metadata: &[v1::PacketMetadata]) -> Result<SwitchPort, Refusal> {
    let [port_field, pad_field] = PACKET_OUT_FIELDS;
    let mut port = None;
    let mut padded = false;
    for given in metadata {
        let field = PACKET_OUT_FIELDS.iter().find(|field| field.id == given.metadata_id);
        let id = given.metadata_id;
        let field = field.ok_or_else(|| invalid(format!("packet_out has no field {id}")))?;
        let value = bytestring::decode(&given.value, field.bitwidth)
            .map_err(|error| invalid(format!("packet_out: {}: {error}", field.name)))?;
        let twice = if field.id == pad_field.id {
            std::mem::replace(&mut padded, true)
        } else {
            port.replace(value).is_some()
        };
        if twice {
            return Err(invalid(format!("packet_out: {} is given twice", field.name)));
        }
    }
    let port = port.and_then(|port| u16::try_from(port).ok());
    port.map(SwitchPort)
        .ok_or_else(|| invalid(format!("packet_out: {} is missing", port_field.name)))
}
