//! Several ranges as one update.

use core::time::Duration;

use bluebridge_transport::{Transport, udp::UdpTransport};
use bluebridge_wire::Pointer;

use super::{Held, UpdateOptions, part};
use crate::{client::Client, error::Error, work::lines};

/// A range of an update over several.
#[derive(Debug)]
pub struct UpdateRequest<'a> {
    /// The first byte.
    pub pointer: Pointer,
    /// Where the bytes go; its length is the range's.
    pub buffer: &'a mut [u8],
}

impl<'a> UpdateRequest<'a> {
    /// A range that is not leased yet.
    #[must_use]
    pub const fn new(pointer: Pointer, buffer: &'a mut [u8]) -> Self {
        Self { pointer, buffer }
    }
}

/// [`crate::Update`] of several ranges: all are held, or none.
#[must_use = "dropping an update aborts it"]
pub struct UpdateMany<'a, 'b, T: Transport = UdpTransport> {
    client: &'a mut Client<T>,
    ranges: &'a mut [UpdateRequest<'b>],
    held: Vec<Held>,
}

impl<T: Transport> Client<T> {
    /// [`Client::update`] of several ranges, all or none: their lines are leased in the order of
    /// the addresses, whatever the order of the ranges.
    ///
    /// # Errors
    /// [`Error::SharedPage`] if two ranges touch the same page; otherwise as [`Client::update`]. After an
    /// error nothing is leased, and the buffers' contents are unspecified.
    pub fn update_many<'a, 'b>(
        &'a mut self,
        ranges: &'a mut [UpdateRequest<'b>],
        options: UpdateOptions,
    ) -> Result<UpdateMany<'a, 'b, T>, Error> {
        let mut line_count = 0_u32;
        for range in &*ranges {
            let lines = lines::count(range.pointer, range.buffer.len() as u64)?;
            line_count = line_count.checked_add(lines).ok_or(Error::Length)?;
        }
        if line_count == 0 {
            return Err(Error::Length);
        }
        let mut held = self.begin_update(line_count)?;
        if let Err(error) = plan(ranges, &mut held) {
            self.recycle(held);
            return Err(error);
        }
        let until = self.driver.now() + self.deadline;
        for index in 0..held.len() {
            let Some(&part) = held.get(index) else { break };
            let buffer = ranges.get_mut(part.range).map(|range| &mut *range.buffer);
            let incoming = buffer.and_then(|buffer| buffer.get_mut(part.bytes()));
            match self.lease_part(part, incoming.unwrap_or_default(), options, until) {
                Ok(leased) => {
                    if let Some(part) = held.get_mut(index) {
                        *part = leased;
                    }
                }
                Err(error) => {
                    held.truncate(index);
                    return Err(self.fail_update(held, error));
                }
            }
        }
        let held = self.complete_update(held)?;
        Ok(UpdateMany { client: self, ranges, held })
    }
}

/// All parts of all ranges, in the order of their addresses.
fn plan(ranges: &[UpdateRequest<'_>], parts: &mut Vec<Held>) -> Result<(), Error> {
    for (index, range) in ranges.iter().enumerate() {
        let length = range.buffer.len() as u64;
        for line in 0..lines::count(range.pointer, length)? {
            parts.push(part(index, range.pointer, length, line)?);
        }
    }
    parts.sort_unstable_by_key(|part| part.pointer.to_ipv6());
    for pair in parts.windows(2) {
        let [first, second] = pair else { continue };
        let last = first.pointer.checked_add(u64::from(first.length.max(1) - 1));
        let last = last.map_err(|_| Error::Length)?;
        if second.pointer.page_start().to_ipv6() <= last.page_start().to_ipv6() {
            return Err(Error::SharedPage { pointer: second.pointer.page_start() });
        }
    }
    Ok(())
}

impl<T: Transport> UpdateMany<'_, '_, T> {
    /// The bytes of a range, by its index among the requests.
    ///
    /// # Panics
    /// If there is no such range.
    #[must_use]
    pub fn bytes(&mut self, range: usize) -> &mut [u8] {
        self.ranges[range].buffer
    }

    /// Writes all ranges back and releases their leases; as [`crate::Update::commit`].
    ///
    /// # Errors
    /// As [`crate::Update::commit`]; [`Error::PartlyCommitted`] says up to which address the ranges were
    /// written.
    pub fn commit(mut self) -> Result<(), Error> {
        let held = core::mem::take(&mut self.held);
        let ranges = &*self.ranges;
        self.client.commit_update(held, |part| {
            let bytes = ranges.get(part.range).and_then(|range| range.buffer.get(part.bytes()));
            bytes.unwrap_or_default()
        })
    }

    /// Leaves all ranges as they were and releases their leases.
    ///
    /// # Errors
    /// As [`crate::Update::abort`].
    pub fn abort(mut self) -> Result<(), Error> {
        let held = core::mem::take(&mut self.held);
        self.client.abort_update(held)
    }

    /// The client, for other calls while the guard lives.
    pub const fn client(&mut self) -> &mut Client<T> {
        self.client
    }

    /// How long the leases are certainly valid without renewal.
    #[must_use]
    pub fn time_left(&self) -> Duration {
        self.client.time_left(&self.held)
    }
}

impl<T: Transport> Drop for UpdateMany<'_, '_, T> {
    fn drop(&mut self) {
        let held = core::mem::take(&mut self.held);
        if !held.is_empty() {
            self.client.drop_update(held);
        }
    }
}

#[cfg(test)]
mod tests {
    use bluebridge_wire::{ArenaGeneration, Location, NodeId, Space, Tag};

    use super::*;

    fn pointer(node: u16, offset: u64) -> Pointer {
        let location = Location::new(ArenaGeneration::default(), offset).expect("48 bits");
        Pointer { space: Space(1), node: NodeId(node), tag: Tag(1), location }
    }

    fn planned(ranges: &[(u16, u64, usize)]) -> Result<Vec<(usize, usize, u32)>, Error> {
        let mut buffers: Vec<_> = ranges.iter().map(|range| vec![0; range.2]).collect();
        let requests = ranges.iter().zip(&mut buffers);
        let requests: Vec<_> = requests
            .map(|((node, offset, _), buffer)| UpdateRequest::new(pointer(*node, *offset), buffer))
            .collect();
        let mut parts = Vec::new();
        plan(&requests, &mut parts)?;
        Ok(parts.iter().map(|part| (part.range, part.start, part.length)).collect())
    }

    #[test]
    fn parts_are_in_the_order_of_their_addresses() {
        let parts = planned(&[(2, 0, 5), (1, 32_760, 20), (1, 4096, 4096)]);
        let parts = parts.expect("no page is shared");
        assert_eq!(parts, [(2, 0, 4096), (1, 0, 8), (1, 8, 12), (0, 0, 5)]);
    }

    #[test]
    fn a_page_of_two_ranges_is_told() {
        for ranges in
            [[(1, 0, 100), (1, 200, 100)], [(1, 8192, 1), (1, 0, 8193)], [(1, 0, 1), (1, 0, 1)]]
        {
            assert!(matches!(planned(&ranges), Err(Error::SharedPage { .. })), "{ranges:?}");
        }
        planned(&[(1, 0, 100), (2, 0, 100)]).expect("other nodes have other pages");
    }
}
