//! The demo's use of the rack's memory by two clients, over any carrier. Each act checks its claims.

use std::thread;
use std::time::Instant;

use anyhow::{Context, anyhow, ensure};
use bluebridge::{Client, Error, NodeId, Placement, Pointer};
use bluebridge_transport::Transport;
use bluebridge_wire::address::Fields;

use super::screen::Screen;

/// Sizes of the transfers: around a page, around a train, and large.
const SIZES: [usize; 7] = [1, 4095, 4096, 4097, 32_769, 1 << 20, 8 << 20];

/// Additions that each client makes to the shared counter.
const ADDITIONS: u64 = 500;

/// The two clients, and the memory nodes by name.
pub(super) struct Cast<T: Transport> {
    pub(super) first: Client<T>,
    pub(super) second: Client<T>,
    pub(super) nodes: Vec<(String, NodeId)>,
}

impl<T: Transport> Cast<T> {
    /// The memory node with an index, from 0.
    pub(super) fn node(&self, number: usize) -> anyhow::Result<NodeId> {
        let node = self.nodes.get(number).context("the rack has too few memory nodes")?;
        Ok(node.1)
    }

    fn name(&self, id: NodeId) -> &str {
        let node = self.nodes.iter().find(|(_, node)| *node == id);
        node.map_or("?", |(name, _)| name)
    }

    /// Allocates memory and explains the pointer; returns it.
    pub(super) fn pointer(&mut self, screen: &Screen) -> anyhow::Result<Pointer> {
        // The first page of an arena has location 0, which would explain little.
        let mut regions = Vec::new();
        let pointer = loop {
            let region = self.first.create(10_000)?;
            regions.push(region);
            if region.base().location.offset() != 0 || regions.len() > self.nodes.len() {
                break region.base();
            }
        };
        screen.say(&format!(
            "   Client c1 requested 10,000 bytes anywhere, and the switch chose {}. It got\n\n      {pointer}\n\n   \
             which is the destination address of every packet that uses it:",
            self.name(pointer.node)
        ))?;
        let fields = Fields::unpack(pointer.to_ipv6()).context("a pointer is a fabric address")?;
        let row = |field: &str, bits: &str, value: String, meaning: &str| {
            vec![field.to_owned(), bits.to_owned(), value, meaning.to_owned()]
        };
        let rows = vec![
            row(
                "scope",
                "0-31",
                format!("{:08x}", fields.space.scope()),
                "fdbb, and the space (tenant)",
            ),
            row("node", "32-47", format!("{:04x}", fields.node.0), self.name(fields.node)),
            row(
                "command",
                "48-55",
                format!("{:02x}", fields.command),
                "0 in a stored pointer; READ, WRITE, .. in a request",
            ),
            row(
                "tag",
                "56-63",
                format!("{:02x}", fields.tag),
                "colour; changes when the memory is freed",
            ),
            row(
                "location",
                "64-127",
                format!("{:016x}", fields.location),
                "arena generation and byte offset",
            ),
        ];
        screen.table(&["field", "bits", "value", "meaning"], rows)?;
        for region in regions {
            self.first.delete(region)?;
        }
        Ok(pointer)
    }

    /// On every server, each client writes and the other reads, with only the pointer.
    pub(super) fn share(&mut self, screen: &Screen) -> anyhow::Result<()> {
        let mut rows = Vec::new();
        for (name, node) in self.nodes.clone() {
            let greeting = format!("hello from c1, kept on {name}");
            let region = self.first.alloc_write_at(greeting.as_bytes(), Placement::Node(node))?;
            // This text is all that one client passes to the other.
            let text = region.base().to_string();
            let pointer: Pointer =
                text.parse().context("cannot convert a pointer to text and back")?;
            let mut read = vec![0; greeting.len()];
            self.second.read(pointer, &mut read)?;
            ensure!(read == greeting.as_bytes(), "c2 read other bytes than c1 wrote");
            let answer = b"HELLO from c2";
            self.second.write(pointer, answer)?;
            let mut changed = vec![0; greeting.len()];
            self.first.read(pointer, &mut changed)?;
            ensure!(changed.starts_with(answer), "c1 does not see what c2 wrote");
            self.first.zero(pointer, greeting.len() as u64)?;
            self.second.read(pointer, &mut read)?;
            ensure!(read.iter().all(|byte| *byte == 0), "zeroed memory is not zero");
            self.second.delete_pointer(pointer)?;
            let now = String::from_utf8_lossy(&changed).into_owned();
            rows.push(vec![text, greeting, now]);
        }
        screen.table(&["pointer", "c1 wrote, c2 read", "c2 changed, c1 read"], rows)
    }

    /// Transfers around the boundaries of pages and trains; returns their sizes.
    pub(super) fn sizes(&mut self, screen: &Screen) -> anyhow::Result<Vec<usize>> {
        let mut rows = Vec::new();
        for (number, size) in SIZES.into_iter().enumerate() {
            let node = self.node(number % self.nodes.len())?;
            let data: Vec<u8> = (0..size).map(|at| (at % 251).to_le_bytes()[0]).collect();
            let mut back = vec![0; size];
            let region = self.first.create_at(size as u64, Placement::Node(node))?;
            let start = Instant::now();
            self.first.write(region.base(), &data)?;
            let written = start.elapsed();
            let start = Instant::now();
            self.second.read(region.base(), &mut back)?;
            let read = start.elapsed();
            ensure!(data == back, "{size} bytes were read back changed");
            self.first.delete(region)?;
            let rate = |seconds: f64| {
                format!("{:.0} us, {:.0} MB/s", seconds * 1e6, size as f64 / seconds / 1e6)
            };
            rows.push(vec![
                size.to_string(),
                region.length_bytes().div_ceil(4096).to_string(),
                rate(written.as_secs_f64()),
                rate(read.as_secs_f64()),
            ]);
        }
        screen.table(&["bytes", "pages", "written by c1", "read by c2"], rows)?;
        Ok(SIZES.to_vec())
    }

    /// Both clients add to the same 8 bytes at once.
    pub(super) fn atomics(&mut self, screen: &Screen) -> anyhow::Result<()>
    where
        T: Send,
    {
        let region = self.first.create(8)?;
        let counter = region.base();
        let add = |client: &mut Client<T>| {
            (0..ADDITIONS).try_for_each(|_| client.fetch_add(counter, 1).map(drop))
        };
        let (first, second) = (&mut self.first, &mut self.second);
        thread::scope(|scope| {
            let other = scope.spawn(move || add(second));
            add(first)?;
            other.join().map_err(|_| anyhow!("a client's thread panicked"))??;
            Ok::<_, anyhow::Error>(())
        })?;
        let before = self.first.compare_swap(counter, 2 * ADDITIONS, 7)?;
        ensure!(before == 2 * ADDITIONS, "{before} additions arrived of {}", 2 * ADDITIONS);
        let refused = self.second.compare_swap(counter, 2 * ADDITIONS, 8)?;
        ensure!(refused == 7, "a compare-and-swap saw {refused}");
        self.first.delete(region)?;
        screen.say(&format!(
            "   {ADDITIONS} FETCH_ADD by each client at the same time: the counter is {before}, nothing lost or \
             doubled.\n   CAS({before} -> 7) by c1 succeeds; CAS({before} -> 8) by c2 fails and returns 7."
        ))
    }

    /// A freed pointer is refused and changes nothing; returns the refusal.
    pub(super) fn stale(&mut self, screen: &Screen) -> anyhow::Result<String> {
        let node = self.node(0)?;
        let region = self.first.alloc_write_at(b"old", Placement::Node(node))?;
        let pointer = region.base();
        self.first.delete(region)?;
        let newer = self.first.alloc_write_at(b"new", Placement::Node(node))?;
        let refusal = refused(self.second.read(pointer, &mut [0; 3]))?;
        let write = refused(self.second.write(pointer, b"bad"))?;
        let again = refused(self.second.delete_pointer(pointer))?;
        let mut bytes = [0; 3];
        self.second.read(newer.base(), &mut bytes)?;
        ensure!(&bytes == b"new", "a stale pointer changed memory");
        self.first.delete(newer)?;
        let (read, advice) = parts(&refusal);
        screen.say(&format!(
            "   c1 freed {pointer}. c2 still uses it:\n\n      read:   {}\n      write:  {}\n      \
             delete: {}\n      {advice}\n\n   Memory that was allocated since is unchanged.",
            read,
            parts(&write).0,
            parts(&again).0
        ))?;
        Ok(refusal)
    }
}

/// Splits a refusal into its reason and its advice, which is the same for all calls on one pointer.
fn parts(refusal: &str) -> (&str, &str) {
    refusal.split_once("; ").unwrap_or((refusal, ""))
}

/// The text of a refusal.
fn refused<V>(result: Result<V, Error>) -> anyhow::Result<String> {
    match result {
        Err(error @ Error::Refused { .. }) => Ok(error.to_string()),
        Err(error) => Err(error).context("a stale pointer should be refused"),
        Ok(_) => Err(anyhow!("a stale pointer was accepted")),
    }
}
