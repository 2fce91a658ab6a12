//! Random requests, lost and repeated, against a model of bytes and counters.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

#[derive(Clone, Copy, Debug)]
enum Step {
    Add,
    Create(u32),
    Delete(usize),
    Read(usize, usize, usize),
    Write(usize, usize, usize),
    Zero(usize, usize, usize),
    /// One of the last requests is repeated, to the pointer or to the endpoint address.
    Again(usize, bool),
}

fn step() -> impl Strategy<Value = Step> {
    let range = || (any::<usize>(), 0_usize..65536, 1_usize..20000);
    prop_oneof![
        2 => Just(Step::Add),
        2 => (1_u32..9).prop_map(Step::Create),
        1 => any::<usize>().prop_map(Step::Delete),
        4 => range().prop_map(|(which, start, length)| Step::Read(which, start, length)),
        4 => range().prop_map(|(which, start, length)| Step::Write(which, start, length)),
        1 => range().prop_map(|(which, start, length)| Step::Zero(which, start, length)),
        4 => (any::<usize>(), any::<bool>()).prop_map(|(which, at)| Step::Again(which, at)),
    ]
}

/// Where an operation may lie in an allocation: inside of it, and inside of one line.
fn place(at: Pointer, bytes: usize, start: usize, length: usize) -> (Pointer, usize, usize) {
    let start = start % bytes;
    let in_line = (at.location.offset() as usize + start) % 32768;
    let length = length.min(bytes - start).min(32768 - in_line);
    (moved_by(at, start as u64), start, length)
}

struct Model {
    world: World,
    counter: Pointer,
    added: u64,
    live: Vec<(Pointer, Vec<u8>)>,
    sent: Vec<TestRequest>,
}

impl Model {
    fn new(piece_bytes: u16) -> Self {
        let mut world = World::with(&config(), 64, piece_bytes);
        let counter = world.create(1);
        Self { world, counter, added: 0, live: Vec::new(), sent: Vec::new() }
    }

    /// Gives the request a number that leaves the last 100 in the window, and keeps the request.
    fn numbered(&mut self, request: TestRequest) -> TestRequest {
        self.world.sequence += 1;
        self.world.low_water = self.world.sequence.saturating_sub(100).max(1);
        let request = self.world.numbered(request, self.world.sequence);
        self.sent.push(request.clone());
        request
    }

    fn run(&mut self, number: usize, step: Step) -> Result<(), TestCaseError> {
        let count = self.live.len().max(1);
        match step {
            Step::Add => {
                let request = TestRequest::new(Command::FetchAdd, self.counter.to_ipv6())
                    .carrying(&1_u64.to_be_bytes())
                    .with(|header| header.length = 8);
                let request = self.numbered(request);
                prop_assert_eq!(self.world.one(&request).data, self.added.to_be_bytes());
                self.added += 1;
            }
            Step::Create(pages) => {
                let request =
                    TestRequest::server(Command::Create).with(|header| header.length = pages);
                let request = self.numbered(request);
                let reply = self.world.one(&request);
                if reply.status.is_ok() {
                    let at = Pointer::from_ipv6(reply.header.target).unwrap();
                    self.live.push((at, vec![0; pages as usize * PAGE_BYTES]));
                } else {
                    prop_assert_eq!(reply.status, Status::OutOfMemory);
                }
            }
            Step::Delete(which) if !self.live.is_empty() => {
                let (at, bytes) = self.live.swap_remove(which % count);
                let request = self.numbered(TestRequest::new(Command::Delete, at.to_ipv6()));
                let reply = self.world.one(&request);
                prop_assert_eq!(reply.status, Status::Ok);
                prop_assert_eq!(reply.header.length as usize * PAGE_BYTES, bytes.len());
            }
            Step::Read(which, start, length) if !self.live.is_empty() => {
                let (at, bytes) = self.live[which % count].clone();
                let (at, start, length) = place(at, bytes.len(), start, length);
                prop_assert!(self.read(at, length) == bytes[start..start + length]);
            }
            Step::Write(which, start, length) if !self.live.is_empty() => {
                let (at, bytes) = &mut self.live[which % count];
                let (at, start, length) = place(*at, bytes.len(), start, length);
                let data = stamp(length, (number % 256) as u8);
                bytes[start..start + length].copy_from_slice(&data);
                self.write(at, &data)?;
            }
            Step::Zero(which, start, length) if !self.live.is_empty() => {
                let (at, bytes) = &mut self.live[which % count];
                let (at, start, length) = place(*at, bytes.len(), start, length);
                bytes[start..start + length].fill(0);
                let request = TestRequest::new(Command::Delete, at.to_ipv6()).with(zeroing);
                let request = self.numbered(request.with(|header| header.length = length as u32));
                prop_assert_eq!(self.world.status(&request), Status::Ok);
            }
            Step::Again(which, at_endpoint) if !self.sent.is_empty() => {
                let recent = self.sent.len().min(150);
                let request = self.sent[self.sent.len() - 1 - which % recent].clone();
                let request = if at_endpoint { request.at_endpoint() } else { request };
                self.world.send(&request.attempt(1));
            }
            _ => {}
        }
        Ok(())
    }

    fn write(&mut self, at: Pointer, data: &[u8]) -> Result<(), TestCaseError> {
        self.world.sequence += 1;
        self.world.low_water = self.world.sequence.saturating_sub(100).max(1);
        let mut train = self.world.train(Command::Write, at, data, self.world.sequence);
        self.sent.extend(train.iter().cloned());
        let turn = data.len() % train.len();
        train.rotate_left(turn);
        let replies: Vec<_> = train.iter().flat_map(|request| self.world.send(request)).collect();
        prop_assert_eq!(replies.len(), 1);
        prop_assert_eq!(replies[0].status, Status::Ok);
        Ok(())
    }

    /// Reads without moving low water as far as the usual helper does.
    fn read(&mut self, at: Pointer, length: usize) -> Vec<u8> {
        let request = TestRequest::new(Command::Read, at.to_ipv6());
        let request = self.numbered(request.with(|header| header.length = length as u32));
        let mut pieces: BTreeMap<u16, Vec<u8>> = BTreeMap::new();
        for reply in self.world.send(&request) {
            assert_eq!(reply.status, Status::Ok);
            pieces.insert(reply.header.offset, reply.data);
        }
        pieces.into_values().flatten().collect()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn agrees_with_a_model(
        piece_bytes in 1024_u16..=4096,
        steps in prop::collection::vec(step(), 150),
    ) {
        let mut model = Model::new(piece_bytes);
        for (number, &step) in steps.iter().enumerate() {
            model.run(number, step)?;
        }
        let used: usize = model.live.iter().map(|(_, bytes)| bytes.len() / PAGE_BYTES).sum();
        prop_assert_eq!(model.world.store.used_pages(), used + 1);
        for (at, bytes) in model.live.clone() {
            for start in (0..bytes.len()).step_by(PAGE_BYTES) {
                let read = model.read(moved_by(at, start as u64), PAGE_BYTES);
                prop_assert!(read == bytes[start..start + PAGE_BYTES]);
            }
        }
        let counter = model.read(model.counter, 8);
        prop_assert_eq!(counter, model.added.to_le_bytes());
        prop_assert_eq!(model.world.responder.trains.free_buffer_count(), 1024);
    }

    /// With arbitrary well-formed datagrams, the responder replies or drops, and stays consistent.
    #[test]
    fn arbitrary_requests_do_no_harm(
        fields in prop::collection::vec(any::<(u8, u8, u16, u16, u64, u32)>(), 60),
        data in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        let mut world = World::with(&config(), 16, 1024);
        let at = world.create(4);
        world.write(at, &[0xaa; 8192]);
        for (command, flags, offset, distance, number, word) in fields {
            let location = if word % 2 == 0 { at.location.bits() } else { number };
            let target = Fields {
                space: SPACE,
                node: if word % 7 == 0 { NodeId::ANY } else { SERVER },
                command: 0,
                tag: if word % 3 == 0 { at.tag.0 } else { flags },
                location: location | u64::from(word % 5 == 0) << 63,
            };
            let mut request = TestRequest::new(Command::Ping, target.to_ipv6()).carrying(&data);
            request.to.command = command & 0x7f;
            request = if word % 13 == 0 { request.at_endpoint() } else { request };
            request.header = Header {
                flags: Flags::from_bits(u16::from(flags)),
                session: if word % 11 == 0 { number } else { world.session },
                sequence: if word % 2 == 0 { number } else { u64::from(offset) },
                answered_distance: distance,
                length: if word % 3 == 0 { word } else { u32::from(offset) },
                offset: distance,
                detail: word,
                incarnation: 1 + word % 2,
                ..request.header
            };
            let _ = world.offer(&request);
            for reply in world.drain() {
                prop_assert_eq!(reply.from.node, SERVER);
                prop_assert_eq!(reply.to, request.from);
            }
            world.pass(Duration::from_millis(number % 100));
        }
    }
}
