//! The client that no attack may affect, and that must always be served.

use core::time::Duration;

use bluebridge_wire::{
    Command, EndpointAddress, Header, Status, WireCommand,
    address::{Fields, PAGE_BYTES},
};

use super::{Attacker, World};
use crate::hostile::{draw::pieces, forge::Forged, shadow::Seen};

/// Tries of a request whose pieces found no buffer; in between the buffers of silent trains are
/// released.
const TRIES: usize = 5;

impl World {
    /// Places allocations of the victim between those of the attackers.
    pub(super) fn place_canaries(&mut self) {
        let victim = self.renewed_victim();
        for number in 0..8_u8 {
            let bytes: Vec<_> = (0..5 * PAGE_BYTES)
                .map(|at| at.to_be_bytes()[7].wrapping_mul(number | 1))
                .collect();
            let pointer = self.create(&victim, 5);
            self.write(&victim, pointer, &bytes);
            self.treasures.push((pointer, bytes));
        }
    }

    pub(super) fn check_canaries(&mut self) {
        let victim = self.renewed_victim();
        for (pointer, bytes) in self.treasures.clone() {
            assert!(
                self.read(&victim, pointer, bytes.len()) == bytes,
                "the victim's bytes were changed"
            );
        }
    }

    /// Opens a new session and uses every kind of request, after the attacks.
    ///
    /// # Panics
    /// If the victim is not served.
    pub fn serve_the_victim(&mut self) {
        self.check_canaries();
        let victim = self.renewed_victim();
        let bytes: Vec<u8> = (0..20_000_usize).map(|at| at.to_be_bytes()[7]).collect();
        let pointer = self.create(&victim, 8);
        assert_eq!(pointer.location % 4096, 0);
        self.write(&victim, pointer, &bytes);
        assert!(self.read(&victim, pointer, bytes.len()) == bytes, "the written bytes are read");
        let deleted = self.ask(&victim, Command::Delete, pointer, 8, &[]);
        assert_eq!(deleted[0].status, Status::Ok);
        let again = self.ask(&victim, Command::Delete, pointer, 8, &[]);
        assert!(matches!(again[0].status, Status::NotAllocated | Status::StaleTag));
    }

    fn renewed_victim(&mut self) -> Attacker {
        self.victim.opened += 1;
        let victim = self.victim.clone();
        let session = self.open(&victim, 0).expect("the limit per node keeps room for the victim");
        Attacker { sessions: [session, 0, 0], ..victim }
    }

    fn create(&mut self, victim: &Attacker, pages: u32) -> Fields {
        let address = EndpointAddress::of_shard(victim.space, self.servers[0].node, 0, 0);
        let target = Fields::unpack(address.to_ipv6()).expect("a fabric address");
        let replies = self.ask(victim, Command::Create, target, pages, &[]);
        assert_eq!(replies[0].status, Status::Ok);
        Fields::unpack(replies[0].header.target).expect("a pointer")
    }

    fn write(&mut self, victim: &Attacker, pointer: Fields, data: &[u8]) {
        for line in lines(pointer, data.len()) {
            let target = Fields { location: pointer.location + line.start as u64, ..pointer };
            let length = u32::try_from(line.len()).expect("a line");
            let replies = self.ask(victim, Command::Write, target, length, &data[line]);
            assert_eq!(replies.last().expect("a reply").status, Status::Ok);
        }
    }

    fn read(&mut self, victim: &Attacker, pointer: Fields, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        for line in lines(pointer, length) {
            let target = Fields { location: pointer.location + line.start as u64, ..pointer };
            let length = u32::try_from(line.len()).expect("a line");
            for reply in self.ask(victim, Command::Read, target, length, &[]) {
                assert_eq!(reply.status, Status::Ok);
                let start = line.start + usize::from(reply.header.offset);
                bytes[start..start + reply.data.len()].copy_from_slice(&reply.data);
            }
        }
        bytes
    }

    /// Sends a request to the first server through the switch, and repeats it while pieces are
    /// missing.
    fn ask(
        &mut self,
        victim: &Attacker,
        command: Command,
        target: Fields,
        length: u32,
        data: &[u8],
    ) -> Vec<Seen> {
        let session = victim.sessions[0];
        let open = self.servers[0].shadow.sessions.get(&session).expect("it was opened");
        let (low, piece_bytes) = (open.low, open.piece_bytes);
        let bits = WireCommand::request(command, true).bits();
        let source = EndpointAddress::new(victim.space, victim.node, 1).to_ipv6();
        let datagram = Forged {
            source,
            destination: Fields { command: bits, ..target }.to_ipv6(),
            source_port: 4001,
            header: Header {
                target: target.to_ipv6(),
                session,
                incarnation: victim.incarnation,
                sequence: low + 1,
                length,
                ..Header::default()
            },
            options: Vec::new(),
            data: Vec::new(),
            trailer: Vec::new(),
            patches: Vec::new(),
        };
        let in_page = usize::try_from(target.location % 4096).expect("inside of a page");
        let mut ranges = pieces(in_page, data.len(), piece_bytes);
        if ranges.is_empty() {
            ranges.push(0..0);
        }
        for attempt in 0..TRIES {
            let mut replies = Vec::new();
            for range in &ranges {
                let mut piece = datagram.clone();
                piece.header.offset = u16::try_from(range.start).expect("inside of a line");
                let attempt = u8::try_from(attempt).unwrap_or(u8::MAX);
                piece.header.flags = piece.header.flags.with_attempt(attempt);
                piece.data = data[range.clone()].to_vec();
                replies.extend(self.send(victim.port, &mut piece.frame(), None));
            }
            self.servers[0].send_all();
            if replies.iter().any(|reply| reply.status != Status::Incomplete) {
                replies.retain(|reply| reply.status != Status::Incomplete);
                return replies;
            }
            self.now = self.now + Duration::from_millis(20);
        }
        panic!("{command} has no reply after {TRIES} tries")
    }
}

fn lines(pointer: Fields, length: usize) -> Vec<core::ops::Range<usize>> {
    let mut lines = Vec::new();
    let mut start = 0;
    while start < length {
        let at = usize::try_from(pointer.location % 32_768).expect("inside of a line") + start;
        let end = (start + 32_768 - at % 32_768).min(length);
        lines.push(start..end);
        start = end;
    }
    lines
}
