//! Cuts a batch into trains, and reads the ancillary data of received ones.

use std::net::Ipv6Addr;

use crate::Outgoing;

/// Consecutive datagrams of a batch that are sent at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Train {
    /// Datagrams in it, at least 1.
    pub(super) count: usize,
    /// Payload bytes of each datagram; the last may be shorter.
    pub(super) segment_bytes: u16,
}

/// Limits of one train.
#[derive(Clone, Copy, Debug)]
pub(super) struct TrainLimits {
    pub(super) segment_count: usize,
    pub(super) bytes: usize,
}

/// Cuts `batch` into the longest trains within `limits`, front to back.
pub(super) fn cut(batch: &[Outgoing<'_>], limits: TrainLimits, trains: &mut Vec<Train>) {
    trains.clear();
    let mut rest = batch;
    while let Some(first) = rest.first() {
        let count = length(first, &rest[1..], limits);
        let segment_bytes = u16::try_from(first.payload_bytes()).unwrap_or(u16::MAX);
        trains.push(Train { count, segment_bytes });
        rest = &rest[count..];
    }
}

/// How many datagrams the train that begins with `first` has.
fn length(first: &Outgoing<'_>, rest: &[Outgoing<'_>], limits: TrainLimits) -> usize {
    let segment_bytes = first.payload_bytes();
    if segment_bytes == 0 {
        return 1;
    }
    let mut count = 1;
    let mut total_bytes = segment_bytes;
    for next in rest {
        let bytes = next.payload_bytes();
        let fits = count < limits.segment_count && total_bytes + bytes <= limits.bytes;
        // An empty datagram would not be visible in the length of a train, so it is never part of one.
        if !fits || bytes == 0 || bytes > segment_bytes || !same_way(first, next) {
            break;
        }
        count += 1;
        total_bytes += bytes;
        if bytes < segment_bytes {
            break;
        }
    }
    count
}

fn same_way(one: &Outgoing<'_>, other: &Outgoing<'_>) -> bool {
    one.destination == other.destination
        && one.source == other.source
        && one.destination_port == other.destination_port
}

/// The contents of a reception's ancillary data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Ancillary {
    pub(super) destination: Option<Ipv6Addr>,
    /// Payload bytes of each datagram of a train; the last may be shorter.
    pub(super) segment_bytes: Option<usize>,
    /// The datagram arrived in fragments, or with IPv6 extension headers.
    pub(super) is_extended: bool,
}

impl Ancillary {
    /// Reads the control messages in `control`; skips other kinds, and stops at a malformed one.
    pub(super) fn parse(mut control: &[u8]) -> Self {
        let mut found = Self::default();
        while let Some((level, kind, data, rest)) = split_message(control) {
            control = rest;
            match (level, kind) {
                (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => {
                    found.destination = data.first_chunk::<16>().map(|a| Ipv6Addr::from(*a));
                }
                (libc::SOL_UDP, libc::UDP_GRO) => {
                    let bytes = data.first_chunk().map(|bytes| i32::from_ne_bytes(*bytes));
                    found.segment_bytes = bytes.and_then(|bytes| usize::try_from(bytes).ok());
                }
                (
                    libc::IPPROTO_IPV6,
                    libc::IPV6_RECVFRAGSIZE
                    | libc::IPV6_HOPOPTS
                    | libc::IPV6_DSTOPTS
                    | libc::IPV6_RTHDR,
                ) => found.is_extended = true,
                _ => {}
            }
        }
        found
    }
}

/// Splits off the first control message: level, type, data, and the rest.
fn split_message(control: &[u8]) -> Option<(i32, i32, &[u8], &[u8])> {
    let (length, rest) = control.split_first_chunk()?;
    let (level, rest) = rest.split_first_chunk()?;
    let (kind, _) = rest.split_first_chunk()?;
    let length = usize::from_ne_bytes(*length);
    let data = control.get(size_of::<libc::cmsghdr>()..length)?;
    let next = length.checked_next_multiple_of(size_of::<usize>())?;
    let rest = control.get(next..).unwrap_or(&[]);
    Some((i32::from_ne_bytes(*level), i32::from_ne_bytes(*kind), data, rest))
}
