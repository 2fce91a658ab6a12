//! An uncontended UPDATE and its COMMIT.

use bluebridge::{Client, NodeId, Placement, Region};
use bluebridge_transport::Transport;

use crate::contest::Contestant;

/// A part of a page that is leased, changed and written back repeatedly.
pub struct UpdateCommit<T: Transport> {
    client: Client<T>,
    region: Region,
    buffer: Vec<u8>,
}

impl<T: Transport> UpdateCommit<T> {
    /// Updates of `bytes` bytes, at least 1, of memory on `server`.
    ///
    /// # Errors
    /// A text, if there is no memory.
    pub fn new(mut client: Client<T>, server: NodeId, bytes: usize) -> Result<Self, String> {
        let region = client.create_at(bytes as u64, Placement::Node(server));
        let region = region.map_err(|error| error.to_string())?;
        Ok(Self { client, region, buffer: vec![0; bytes] })
    }

    /// Frees the memory and returns the client.
    ///
    /// # Errors
    /// A text.
    pub fn finish(mut self) -> Result<Client<T>, String> {
        self.client.delete(self.region).map_err(|error| error.to_string())?;
        Ok(self.client)
    }
}

impl<T: Transport> Contestant for UpdateCommit<T> {
    fn name(&self) -> &'static str {
        "UPDATE + COMMIT"
    }

    fn operate(&mut self) -> Result<(), String> {
        let update = self.client.update(self.region.base(), &mut self.buffer);
        let mut update = update.map_err(|error| error.to_string())?;
        if let Some(first) = update.first_mut() {
            *first = first.wrapping_add(1);
        }
        update.commit().map_err(|error| error.to_string())
    }
}
