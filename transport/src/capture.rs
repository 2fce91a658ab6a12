//! A wrapper that records a carrier's datagrams in a pcap file.
//!
//! The IPv6 and UDP headers are built from the carrier's data, checksum included, so that every reader of pcap
//! files understands the packets; the link type is raw IP.

#[cfg(test)]
mod tests;

use core::time::Duration;
use std::io::{self, Write};
use std::net::Ipv6Addr;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::{
    Capabilities, Counters, Incoming, Outgoing, ReceiveError, Timestamp, TransmitError, Transport,
    Wait,
};

/// Link type of packets that begin with an IP header (LINKTYPE_RAW).
const LINK_TYPE_RAW: u32 = 101;
/// Magic number of a pcap file with nanoseconds.
const MAGIC: u32 = 0xa1b2_3c4d;
const SNAP_BYTES: u32 = 262_144;
const UDP_HEADER_BYTES: usize = 8;
const NEXT_HEADER_UDP: u8 = 17;
const HOP_LIMIT: u8 = 64;

/// A carrier whose datagrams are recorded, sent and received.
pub struct Capture<T, W: Write> {
    inner: T,
    writer: PcapWriter<W>,
    /// Start of the carrier's clock, as time since 1970.
    origin: Duration,
}

impl<T: Transport, W: Write> Capture<T, W> {
    /// Records the datagrams of `inner` with the time of day.
    ///
    /// # Errors
    ///
    /// Errors of `writer` when it writes the file's header.
    pub fn new(inner: T, writer: W) -> io::Result<Self> {
        let today = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let origin = today.saturating_sub(inner.now().saturating_since(Timestamp::ZERO));
        Self::with_origin(inner, writer, origin)
    }

    /// Records the datagrams of `inner`, whose clock started `origin` after 1970; for virtual time, so that equal runs
    /// produce equal files.
    ///
    /// # Errors
    ///
    /// Errors of `writer` when it writes the file's header.
    pub fn with_origin(inner: T, writer: W, origin: Duration) -> io::Result<Self> {
        Ok(Self { inner, writer: PcapWriter::new(writer)?, origin })
    }

    /// Datagrams recorded so far.
    pub fn recorded_count(&self) -> u64 {
        self.writer.recorded_count
    }

    /// Ends the recording and returns the carrier and the writer.
    ///
    /// # Errors
    ///
    /// The first error of `writer`; recording stopped there while the carrier continued.
    pub fn finish(self) -> io::Result<(T, W)> {
        Ok((self.inner, self.writer.finish()?))
    }

    fn time(&self) -> Duration {
        self.origin.saturating_add(self.inner.now().saturating_since(Timestamp::ZERO))
    }
}

impl<T: Transport, W: Write> Transport for Capture<T, W> {
    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }

    fn counters(&self) -> Counters {
        self.inner.counters()
    }

    fn local_port(&self) -> u16 {
        self.inner.local_port()
    }

    fn now(&self) -> Timestamp {
        self.inner.now()
    }

    fn transmit(&mut self, batch: &[Outgoing<'_>]) -> Result<usize, TransmitError> {
        let time = self.time();
        let count = self.inner.transmit(batch)?;
        let port = self.inner.local_port();
        for datagram in batch.iter().take(count) {
            let packet = Packet {
                source: datagram.source,
                source_port: port,
                destination: datagram.destination,
                destination_port: datagram.destination_port,
                parts: [datagram.header, datagram.data],
            };
            self.writer.record(time, &packet);
        }
        Ok(count)
    }

    fn receive(&mut self, wait: Wait) -> Result<usize, ReceiveError> {
        let count = self.inner.receive(wait)?;
        let time = self.time();
        let port = self.inner.local_port();
        for index in 0..count {
            let datagram = self.inner.incoming(index);
            let packet = Packet {
                source: datagram.source,
                source_port: datagram.source_port,
                destination: datagram.destination,
                destination_port: port,
                parts: [datagram.payload, &[]],
            };
            self.writer.record(time, &packet);
        }
        Ok(count)
    }

    fn incoming(&self, index: usize) -> Incoming<'_> {
        self.inner.incoming(index)
    }
}

/// A datagram to record.
struct Packet<'a> {
    source: Ipv6Addr,
    source_port: u16,
    destination: Ipv6Addr,
    destination_port: u16,
    parts: [&'a [u8]; 2],
}

impl Packet<'_> {
    /// The IPv6 and UDP headers (RFC 8200 section 3, RFC 768).
    fn headers(&self) -> [u8; crate::udp::HEADER_BYTES] {
        let payload_bytes = self.parts[0].len() + self.parts[1].len();
        let udp_bytes = u16::try_from(UDP_HEADER_BYTES + payload_bytes).unwrap_or(u16::MAX);
        let mut headers = [0; crate::udp::HEADER_BYTES];
        headers[0] = 6 << 4;
        headers[4..6].copy_from_slice(&udp_bytes.to_be_bytes());
        headers[6] = NEXT_HEADER_UDP;
        headers[7] = HOP_LIMIT;
        headers[8..24].copy_from_slice(&self.source.octets());
        headers[24..40].copy_from_slice(&self.destination.octets());
        headers[40..42].copy_from_slice(&self.source_port.to_be_bytes());
        headers[42..44].copy_from_slice(&self.destination_port.to_be_bytes());
        headers[44..46].copy_from_slice(&udp_bytes.to_be_bytes());
        let checksum = self.checksum(&headers, udp_bytes);
        headers[46..48].copy_from_slice(&checksum.to_be_bytes());
        headers
    }

    /// The UDP checksum over pseudo-header, header and payload (RFC 8200 section 8.1).
    fn checksum(&self, headers: &[u8], udp_bytes: u16) -> u16 {
        let pseudo = [0, NEXT_HEADER_UDP];
        let length = udp_bytes.to_be_bytes();
        let bytes = headers[8..].iter().chain(&pseudo).chain(&length);
        let bytes = bytes.chain(self.parts[0]).chain(self.parts[1]);
        let mut sum: u64 = 0;
        for (index, byte) in bytes.enumerate() {
            sum += u64::from(*byte) << if index % 2 == 0 { 8 } else { 0 };
        }
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        // Zero would mean that there is no checksum.
        match !u16::try_from(sum).unwrap_or(0) {
            0 => 0xffff,
            checksum => checksum,
        }
    }
}

/// Writes packets in the pcap format; after an error it writes nothing more.
struct PcapWriter<W: Write> {
    writer: W,
    error: Option<io::Error>,
    recorded_count: u64,
}

impl<W: Write> PcapWriter<W> {
    fn new(mut writer: W) -> io::Result<Self> {
        let version: [u8; 4] = [2, 0, 4, 0];
        writer.write_all(&MAGIC.to_le_bytes())?;
        writer.write_all(&version)?;
        writer.write_all(&[0; 8])?;
        writer.write_all(&SNAP_BYTES.to_le_bytes())?;
        writer.write_all(&LINK_TYPE_RAW.to_le_bytes())?;
        Ok(Self { writer, error: None, recorded_count: 0 })
    }

    fn record(&mut self, time: Duration, packet: &Packet<'_>) {
        if self.error.is_some() {
            return;
        }
        match self.write(time, packet) {
            Ok(()) => self.recorded_count += 1,
            Err(error) => self.error = Some(error),
        }
    }

    fn write(&mut self, time: Duration, packet: &Packet<'_>) -> io::Result<()> {
        let headers = packet.headers();
        let bytes = headers.len() + packet.parts[0].len() + packet.parts[1].len();
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        let seconds = u32::try_from(time.as_secs()).unwrap_or(u32::MAX);
        for field in [seconds, time.subsec_nanos(), bytes, bytes] {
            self.writer.write_all(&field.to_le_bytes())?;
        }
        self.writer.write_all(&headers)?;
        self.writer.write_all(packet.parts[0])?;
        self.writer.write_all(packet.parts[1])
    }

    fn finish(mut self) -> io::Result<W> {
        if let Some(error) = self.error {
            return Err(error);
        }
        self.writer.flush()?;
        Ok(self.writer)
    }
}
