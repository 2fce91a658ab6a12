//! Very many pages: each has a pointer of its own, and all are in use at once.

use std::time::Duration;

use bluebridge::{
    Client, CreateRequest, DeleteRequest, Placement, Pointer, ReadRequest, Region, WriteRequest,
};
use bluebridge_transport::Transport;
use bluebridge_wire::address::PAGE_BYTES;
use rand::{RngCore, SeedableRng, rngs::SmallRng};
use serde::Serialize;

use crate::placement::now;

/// Requests of one pipelined call.
const CALL_COUNT: usize = 1024;

/// Bytes of each page that are written and read.
const STAMP_BYTES: usize = 64;

/// The result.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Report {
    /// Different pointers.
    pub pointer_count: usize,
    /// The time to create the pages, in seconds.
    pub create_s: f64,
    /// The time to write to each.
    pub write_s: f64,
    /// The time to read each.
    pub read_s: f64,
    /// The time to free them.
    pub delete_s: f64,
}

/// Why the run ended early.
#[derive(Debug, thiserror::Error)]
pub enum PagesError {
    /// An operation failed.
    #[error("{0}")]
    Operation(#[from] bluebridge::Error),
    /// Two allocations have the same pointer.
    #[error("{0} was allocated twice")]
    Twice(Pointer),
    /// A page does not hold its bytes.
    #[error("{0} holds other bytes than were written")]
    WrongBytes(Pointer),
}

/// Creates `count` pages by a request each, writes to each, reads each and compares, and frees them.
///
/// # Errors
/// The first failure; the pages are freed nevertheless, if that is possible.
pub fn run<T: Transport>(client: &mut Client<T>, count: usize) -> Result<Report, PagesError> {
    let mut regions = Vec::with_capacity(count);
    let used = use_pages(client, count, &mut regions);
    let start = now();
    let freed = delete(client, &regions);
    let [create, write, read] = used?;
    freed?;
    Ok(Report {
        pointer_count: regions.len(),
        create_s: create.as_secs_f64(),
        write_s: write.as_secs_f64(),
        read_s: read.as_secs_f64(),
        delete_s: (now() - start).as_secs_f64(),
    })
}

fn use_pages<T: Transport>(
    client: &mut Client<T>,
    count: usize,
    regions: &mut Vec<Region>,
) -> Result<[Duration; 3], PagesError> {
    let start = now();
    create(client, count, regions)?;
    let created = now();
    let mut pointers: Vec<_> = regions.iter().map(|region| region.base()).collect();
    pointers.sort_unstable_by_key(|pointer| pointer.to_ipv6());
    if let Some(twice) = pointers.windows(2).find(|two| two[0] == two[1]) {
        return Err(PagesError::Twice(twice[0]));
    }
    let sorted = now();
    write(client, &pointers)?;
    let written = now();
    read(client, &pointers)?;
    Ok([created - start, written - sorted, now() - written])
}

fn create<T: Transport>(
    client: &mut Client<T>,
    count: usize,
    regions: &mut Vec<Region>,
) -> Result<(), PagesError> {
    let mut left = count;
    while left > 0 {
        let request = |_| CreateRequest::new(PAGE_BYTES as u64, Placement::TwoChoices);
        let mut requests: Vec<_> = (0..left.min(CALL_COUNT)).map(request).collect();
        left -= requests.len();
        client.create_many(&mut requests)?;
        let mut failure = None;
        for request in requests {
            // Those that exist must be freed later, also if another one failed.
            match request.result {
                Ok(region) => regions.push(region),
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        failure.map_or(Ok(()), Err)?;
    }
    Ok(())
}

/// The bytes of a page follow from its pointer.
fn stamp(pointer: Pointer) -> [u8; STAMP_BYTES] {
    let address = pointer.to_ipv6().to_bits();
    let folded = u64::try_from(address & u128::from(u64::MAX)).unwrap_or(0)
        ^ u64::try_from(address >> 64).unwrap_or(0);
    let mut bytes = [0; STAMP_BYTES];
    SmallRng::seed_from_u64(folded).fill_bytes(&mut bytes);
    bytes
}

fn write<T: Transport>(client: &mut Client<T>, pointers: &[Pointer]) -> Result<(), PagesError> {
    for call in pointers.chunks(CALL_COUNT) {
        let stamps: Vec<_> = call.iter().map(|pointer| stamp(*pointer)).collect();
        let mut requests: Vec<_> = (call.iter().zip(&stamps))
            .map(|(pointer, stamp)| WriteRequest::new(*pointer, stamp))
            .collect();
        client.write_many(&mut requests)?;
        requests.into_iter().try_for_each(|request| request.result)?;
    }
    Ok(())
}

fn read<T: Transport>(client: &mut Client<T>, pointers: &[Pointer]) -> Result<(), PagesError> {
    let mut buffers = vec![[0; STAMP_BYTES]; CALL_COUNT];
    for call in pointers.chunks(CALL_COUNT) {
        let mut requests: Vec<_> = (call.iter().zip(&mut buffers))
            .map(|(pointer, buffer)| ReadRequest::new(*pointer, buffer))
            .collect();
        client.read_many(&mut requests)?;
        for request in requests {
            request.result?;
            if request.buffer[..] != stamp(request.pointer) {
                return Err(PagesError::WrongBytes(request.pointer));
            }
        }
    }
    Ok(())
}

fn delete<T: Transport>(client: &mut Client<T>, regions: &[Region]) -> Result<(), PagesError> {
    let mut failure = None;
    for call in regions.chunks(CALL_COUNT) {
        let mut requests: Vec<_> = call.iter().map(|region| DeleteRequest::new(*region)).collect();
        client.delete_many(&mut requests)?;
        let failed = requests.into_iter().find_map(|request| request.result.err());
        failure = failure.or(failed);
    }
    Ok(failure.map_or(Ok(()), Err)?)
}
