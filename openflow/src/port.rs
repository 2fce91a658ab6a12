//! Ports (specification, sections 7.2.1, 7.3.5.6, 7.3.5.7 and 7.4.3).

use crate::cursor::{Cursor, pad, text};
use crate::{DecodeError, EncodeError};

/// The greatest number of a real port.
pub const MAX: u32 = 0xffff_ff00;
/// The ingress port.
pub const IN_PORT: u32 = 0xffff_fff8;
/// All ports except the ingress port.
pub const ALL: u32 = 0xffff_fffc;
/// The controller.
pub const CONTROLLER: u32 = 0xffff_fffd;
/// The switch's own interface.
pub const LOCAL: u32 = 0xffff_fffe;
/// Any port, in requests and deletions.
pub const ANY: u32 = 0xffff_ffff;

/// The bytes of a port's name.
const NAME_BYTES: usize = 16;

/// A port of a switch.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Port {
    /// Its number.
    pub number: u32,
    /// Its MAC address.
    pub mac: [u8; 6],
    /// Its name, up to 15 bytes.
    pub name: String,
    /// Bits of `ofp_port_config`.
    pub config: u32,
    /// Bits of `ofp_port_state`.
    pub state: u32,
    /// The current, advertised, supported and the peer's features: bits of `ofp_port_features`.
    pub features: [u32; 4],
    /// The current speed in kbit/s.
    pub speed: u32,
    /// The greatest speed in kbit/s.
    pub speed_max: u32,
}

impl Port {
    pub(crate) fn encode(&self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        out.extend_from_slice(&self.number.to_be_bytes());
        pad(out, 4);
        out.extend_from_slice(&self.mac);
        pad(out, 2);
        text(out, &self.name, NAME_BYTES, "the name of a port")?;
        let [current, advertised, supported, peer] = self.features;
        for number in [
            self.config,
            self.state,
            current,
            advertised,
            supported,
            peer,
            self.speed,
            self.speed_max,
        ] {
            out.extend_from_slice(&number.to_be_bytes());
        }
        Ok(())
    }

    pub(crate) fn decode(cursor: &mut Cursor<'_>) -> Result<Self, DecodeError> {
        let number = cursor.u32()?;
        cursor.skip(4)?;
        let mac = cursor.array()?;
        cursor.skip(2)?;
        let name = cursor.text(NAME_BYTES)?;
        let (config, state) = (cursor.u32()?, cursor.u32()?);
        let features = [cursor.u32()?, cursor.u32()?, cursor.u32()?, cursor.u32()?];
        let (speed, speed_max) = (cursor.u32()?, cursor.u32()?);
        Ok(Self { number, mac, name, config, state, features, speed, speed_max })
    }
}

/// What happened to a port.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum PortReason {
    /// It is new.
    Add,
    /// It is gone.
    Delete,
    /// It changed.
    Modify,
}

/// A change of a port.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct PortStatus {
    /// What happened.
    pub reason: PortReason,
    /// The port.
    pub port: Port,
}

impl PortStatus {
    pub(crate) fn encode(&self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        out.push(match self.reason {
            PortReason::Add => 0,
            PortReason::Delete => 1,
            PortReason::Modify => 2,
        });
        pad(out, 7);
        self.port.encode(out)
    }

    pub(crate) fn decode(mut cursor: Cursor<'_>) -> Result<Self, DecodeError> {
        let reason = match cursor.u8()? {
            0 => PortReason::Add,
            1 => PortReason::Delete,
            2 => PortReason::Modify,
            _ => return Err(DecodeError::Unsupported("the reason of a port's change")),
        };
        cursor.skip(7)?;
        let port = Port::decode(&mut cursor)?;
        cursor.finish()?;
        Ok(Self { reason, port })
    }
}

/// The counts of a port; [`u64::MAX`] for one that the switch does not have.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct PortStats {
    /// Its number.
    pub number: u32,
    /// Packets received and sent.
    pub packets: [u64; 2],
    /// Bytes received and sent.
    pub bytes: [u64; 2],
    /// Packets dropped, received and sent.
    pub dropped: [u64; 2],
    /// Errors, receiving and sending.
    pub errors: [u64; 2],
    /// Frame alignment errors, overruns, CRC errors, collisions.
    pub details: [u64; 4],
    /// Whole seconds since it was added, and nanoseconds beyond these.
    pub duration: [u32; 2],
}

impl PortStats {
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.number.to_be_bytes());
        pad(out, 4);
        let pairs = [self.packets, self.bytes, self.dropped, self.errors];
        for number in pairs.iter().flatten().chain(&self.details) {
            out.extend_from_slice(&number.to_be_bytes());
        }
        for number in self.duration {
            out.extend_from_slice(&number.to_be_bytes());
        }
    }

    pub(crate) fn decode(cursor: &mut Cursor<'_>) -> Result<Self, DecodeError> {
        let number = cursor.u32()?;
        cursor.skip(4)?;
        let mut pair = || Ok([cursor.u64()?, cursor.u64()?]);
        let (packets, bytes, dropped, errors) = (pair()?, pair()?, pair()?, pair()?);
        let details = [cursor.u64()?, cursor.u64()?, cursor.u64()?, cursor.u64()?];
        let duration = [cursor.u32()?, cursor.u32()?];
        Ok(Self { number, packets, bytes, dropped, errors, details, duration })
    }
}
