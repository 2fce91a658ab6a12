//! One worker: its client, its regions and a copy of their contents.

use bluebridge::{Error, Placement, Pointer, Region};
use bluebridge_wire::address::PAGE_BYTES;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::{Kind, Shared, Tally};
use crate::rack::endpoint::UdpClient;
use crate::rack::stamp;

/// The largest operation.
const BYTES_MAX: usize = 64 << 10;

/// The most regions of a worker; at this number it deletes one first.
const REGIONS_MAX: usize = 24;

/// A region and its expected contents.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) region: Region,
    contents: Vec<u8>,
}

/// One client's thread.
pub(super) struct Worker {
    number: u32,
    client: UdpClient,
    shared: Shared,
    random: SmallRng,
    held: Vec<Held>,
    tally: Tally,
    buffer: Vec<u8>,
    /// The value of the shared counter after the worker's last addition.
    sum: u64,
    write_count: u32,
}

type Done<T = ()> = Result<T, String>;

impl Worker {
    pub(super) fn new(number: u32, seed: u64, client: UdpClient, shared: Shared) -> Self {
        Self {
            number,
            client,
            shared,
            random: SmallRng::seed_from_u64(seed << 8 | u64::from(number)),
            held: Vec::new(),
            tally: Tally::default(),
            buffer: vec![0; BYTES_MAX],
            sum: 0,
            write_count: 0,
        }
    }

    /// Executes `count` operations and then reads everything once more.
    pub(super) fn run(mut self, count: u32) -> Done<(Tally, UdpClient, Vec<Held>)> {
        for step in 0..count {
            let kind = self.draw();
            self.act(kind).map_err(|error| {
                format!("worker {}, step {step} of {count}, {kind:?}: {error}", self.number)
            })?;
            self.tally.note(kind);
        }
        for at in 0..self.held.len() {
            let length = self.contents(at)?.len();
            for start in (0..length).step_by(BYTES_MAX) {
                self.read_part(at, start, BYTES_MAX.min(length - start))
                    .map_err(|error| format!("worker {}, at the end: {error}", self.number))?;
            }
        }
        Ok((self.tally, self.client, self.held))
    }

    fn draw(&mut self) -> Kind {
        let kind = match self.random.random_range(0..100) {
            0..6 => Kind::AllocWrite,
            6..9 => Kind::AnywhereCreate,
            9..12 => Kind::Create,
            12..22 => Kind::Delete,
            22..46 => Kind::Write,
            46..70 => Kind::Read,
            70..76 => Kind::Zero,
            76..84 => Kind::FetchAdd,
            84..90 => Kind::CompareSwap,
            90..95 => Kind::SharedWrite,
            _ => Kind::SharedRead,
        };
        match kind {
            Kind::AllocWrite | Kind::AnywhereCreate | Kind::Create
                if self.held.len() >= REGIONS_MAX =>
            {
                Kind::Delete
            }
            Kind::Delete | Kind::Write | Kind::Read | Kind::Zero if self.held.len() < 2 => {
                Kind::AnywhereCreate
            }
            kind => kind,
        }
    }

    fn act(&mut self, kind: Kind) -> Done {
        match kind {
            Kind::AllocWrite => self.alloc_write(),
            Kind::AnywhereCreate => self.create(Placement::Anywhere),
            Kind::CompareSwap => self.compare_swap(),
            Kind::Create => {
                let node = self.random.random_range(0..self.shared.nodes.len());
                let node = self.shared.nodes.get(node).ok_or("no node")?.node;
                let two = self.random.random_bool(0.5);
                self.create(if two { Placement::TwoChoices } else { Placement::Node(node) })
            }
            Kind::Delete => {
                let at = self.random.random_range(0..self.held.len());
                let region = self.held.swap_remove(at).region;
                text_error(self.client.delete(region))
            }
            Kind::FetchAdd => self.fetch_add(),
            Kind::Read => {
                let (at, start, length) = self.part()?;
                self.read_part(at, start, length)
            }
            Kind::SharedRead => self.shared_read(),
            Kind::SharedWrite => {
                let pointer = self.shared_page()?;
                self.write_count += 1;
                let page = stamp::page(self.number, self.write_count);
                text_error(self.client.write(pointer, &page))
            }
            Kind::Write => self.write(),
            Kind::Zero => self.zero(),
        }
    }

    /// From 1 byte to the most, each order of magnitude with the same probability.
    fn size(&mut self) -> usize {
        let shift = self.random.random_range(0..=16);
        let below = (BYTES_MAX >> shift).max(1);
        self.random.random_range(below.div_ceil(2)..=below)
    }

    fn alloc_write(&mut self) -> Done {
        let size = self.size();
        let seed = self.random.random();
        let mut contents = vec![0; size.next_multiple_of(PAGE_BYTES)];
        let (data, _) = contents.split_at_mut(size);
        stamp::fill(data, seed);
        let region = text_error(self.client.alloc_write(data))?;
        self.held.push(Held { region, contents });
        Ok(())
    }

    fn create(&mut self, placement: Placement) -> Done {
        let size = self.size();
        let region = text_error(self.client.create_at(size as u64, placement))?;
        let contents = vec![0; size.next_multiple_of(PAGE_BYTES)];
        self.held.push(Held { region, contents });
        Ok(())
    }

    fn contents(&mut self, at: usize) -> Done<&mut Vec<u8>> {
        Ok(&mut self.held.get_mut(at).ok_or("no such region")?.contents)
    }

    fn pointer(&self, at: usize, start: usize) -> Done<Pointer> {
        let region = self.held.get(at).ok_or("no such region")?.region;
        region.at(start as u64).map_err(|error| error.to_string())
    }

    /// A part of an own region: its index, start and length.
    fn part(&mut self) -> Done<(usize, usize, usize)> {
        let at = self.random.random_range(0..self.held.len());
        let size = self.size();
        let there = self.contents(at)?.len();
        let length = size.min(there);
        let start = self.random.random_range(0..=there - length);
        Ok((at, start, length))
    }

    fn write(&mut self) -> Done {
        let (at, start, length) = self.part()?;
        let seed = self.random.random();
        let pointer = self.pointer(at, start)?;
        let part = self.held.get_mut(at).and_then(|it| it.contents.get_mut(start..start + length));
        let part = part.ok_or("no such part")?;
        stamp::fill(part, seed);
        text_error(self.client.write(pointer, part))
    }

    fn zero(&mut self) -> Done {
        let (at, start, length) = self.part()?;
        let pointer = self.pointer(at, start)?;
        self.contents(at)?.get_mut(start..start + length).ok_or("no such part")?.fill(0);
        text_error(self.client.zero(pointer, length as u64))
    }

    fn read_part(&mut self, at: usize, start: usize, length: usize) -> Done {
        let pointer = self.pointer(at, start)?;
        let buffer = self.buffer.get_mut(..length).ok_or("too long")?;
        buffer.fill(0xee);
        text_error(self.client.read(pointer, buffer))?;
        let held = self.held.get(at).and_then(|it| it.contents.get(start..start + length));
        let held = held.ok_or("no such part")?;
        if let Some(wrong) = held.iter().zip(&*buffer).position(|(held, read)| held != read) {
            let (count, first) = (length, pointer);
            return Err(format!("byte {wrong} of {count} from {first} is wrong"));
        }
        self.tally.compared_bytes += length as u64;
        Ok(())
    }

    fn shared_page(&mut self) -> Done<Pointer> {
        let page = self.random.random_range(0..self.shared.pages.len());
        Ok(*self.shared.pages.get(page).ok_or("no page")?)
    }

    fn shared_read(&mut self) -> Done {
        let pointer = self.shared_page()?;
        let page = self.buffer.get_mut(..PAGE_BYTES).ok_or("too long")?;
        text_error(self.client.read(pointer, page))?;
        self.tally.compared_bytes += PAGE_BYTES as u64;
        match stamp::writer(page) {
            Some(_) => Ok(()),
            None => Err(format!("the page at {pointer} is of no single write")),
        }
    }

    /// On the shared counter, whose value must have increased, or on a word of an own region with a
    /// known value.
    fn fetch_add(&mut self) -> Done {
        let addend = self.random.random_range(1..1000);
        if self.held.is_empty() || self.random.random_bool(0.5) {
            let before = text_error(self.client.fetch_add(self.shared.sum, addend))?;
            if before < self.sum {
                return Err(format!("the counter fell from {} to {before}", self.sum));
            }
            self.sum = before + addend;
            self.tally.added += addend;
            return Ok(());
        }
        let at = self.random.random_range(0..self.held.len());
        let words = self.contents(at)?.len() / 8;
        let start = self.random.random_range(0..words) * 8;
        let pointer = self.pointer(at, start)?;
        let before = text_error(self.client.fetch_add(pointer, addend))?;
        let word = self.contents(at)?.get_mut(start..start + 8).ok_or("no such word")?;
        let known = u64::from_le_bytes((&*word).try_into().map_err(|_| "no word")?);
        word.copy_from_slice(&known.wrapping_add(addend).to_le_bytes());
        if before == known {
            Ok(())
        } else {
            Err(format!("the word at {pointer} was {before:#x} instead of {known:#x}"))
        }
    }

    fn compare_swap(&mut self) -> Done {
        let mut word = [0; 8];
        text_error(self.client.read(self.shared.raised, &mut word))?;
        let known = u64::from_le_bytes(word);
        let before = text_error(self.client.compare_swap(self.shared.raised, known, known + 1))?;
        if before < known {
            return Err(format!("the counter fell from {known} to {before}"));
        }
        self.tally.raised += u64::from(before == known);
        Ok(())
    }
}

fn text_error<T>(result: Result<T, Error>) -> Done<T> {
    result.map_err(|error| format!("{error} ({error:?})"))
}
