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

use etherparse::PacketBuilder;
use pcap_file::pcap::{PcapHeader, PcapPacket, PcapWriter};
use pcap_file::{DataLink, Endianness, PcapError, TsResolution};

use crate::{
    Capabilities, Counters, Incoming, Outgoing, Polled, ReceiveError, Timestamp, TransmitError,
    Transport, Wait, Wakeable, Waker,
};

/// The longest packet of the file: no IPv6 packet is longer.
const SNAP_BYTES: u32 = 262_144;
const HOP_LIMIT: u8 = 64;

/// A carrier whose datagrams are recorded, sent and received.
pub struct Capture<T, W: Write> {
    inner: T,
    record: Record<W>,
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
        Ok(Self { inner, record: Record::new(writer)?, origin })
    }

    /// Datagrams recorded so far.
    pub fn recorded_count(&self) -> u64 {
        self.record.recorded_count
    }

    /// Ends the recording and returns the carrier and the writer.
    ///
    /// # Errors
    ///
    /// The first error of `writer`; recording stopped there while the carrier continued.
    pub fn finish(self) -> io::Result<(T, W)> {
        Ok((self.inner, self.record.finish()?))
    }

    fn time(&self) -> Duration {
        self.origin.saturating_add(self.inner.now().saturating_since(Timestamp::ZERO))
    }
}

impl<T: Wakeable, W: Write> Wakeable for Capture<T, W> {
    fn waker(&mut self) -> io::Result<Waker> {
        self.inner.waker()
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
            self.record.add(time, &packet);
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
            self.record.add(time, &packet);
        }
        Ok(count)
    }

    fn polled(&self) -> Polled {
        self.inner.polled()
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

/// A file of packets; after an error nothing more is written.
struct Record<W: Write> {
    file: PcapWriter<W>,
    error: Option<io::Error>,
    recorded_count: u64,
}

impl<W: Write> Record<W> {
    fn new(writer: W) -> io::Result<Self> {
        let header = PcapHeader {
            snaplen: SNAP_BYTES,
            datalink: DataLink::RAW,
            ts_resolution: TsResolution::NanoSecond,
            endianness: Endianness::Little,
            ..PcapHeader::default()
        };
        let file = PcapWriter::with_header(writer, header).map_err(io_error)?;
        Ok(Self { file, error: None, recorded_count: 0 })
    }

    fn add(&mut self, time: Duration, packet: &Packet<'_>) {
        if self.error.is_some() {
            return;
        }
        match self.write(time, packet) {
            Ok(()) => self.recorded_count += 1,
            Err(error) => self.error = Some(error),
        }
    }

    fn write(&mut self, time: Duration, packet: &Packet<'_>) -> io::Result<()> {
        let payload = packet.parts.concat();
        let (source, destination) = (packet.source.octets(), packet.destination.octets());
        let headers = PacketBuilder::ipv6(source, destination, HOP_LIMIT)
            .udp(packet.source_port, packet.destination_port);
        let mut bytes = Vec::with_capacity(headers.size(payload.len()));
        headers.write(&mut bytes, &payload).map_err(io::Error::other)?;
        let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        self.file.write_packet(&PcapPacket::new(time, length, &bytes)).map_err(io_error)?;
        Ok(())
    }

    fn finish(self) -> io::Result<W> {
        if let Some(error) = self.error {
            return Err(error);
        }
        let mut writer = self.file.into_writer();
        writer.flush()?;
        Ok(writer)
    }
}

fn io_error(error: PcapError) -> io::Error {
    match error {
        PcapError::IoError(error) => error,
        other => io::Error::other(other),
    }
}
