//! Random leases and changes of three clients, lost and repeated, against a model of every page.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::{
    direct::{read_directly, shared},
    leases::{Client, millis},
    *,
};

const PAGES: usize = 16;

#[derive(Clone, Copy, Debug)]
enum Step {
    Abort(usize, usize, usize),
    /// One of the last requests is repeated.
    Again(usize),
    /// A waiting number is used for another page.
    Renumber(usize, usize),
    Commit(usize, usize, usize),
    Pass(u64),
    Read(usize, usize, usize),
    Renew(usize, u16),
    Restart(usize),
    Update(usize, usize, usize, u16),
    /// An UPDATE that waits if necessary.
    Wait(usize, usize, usize),
    Write(usize, usize, usize),
}

fn step() -> impl Strategy<Value = Step> {
    // A client, a page and a number of pages, inside of a line.
    let place = || (0_usize..3, 0..PAGES, 1_usize..4);
    prop_oneof![
        2 => place().prop_map(|(client, lease, count)| Step::Abort(client, lease, count)),
        4 => any::<usize>().prop_map(Step::Again),
        1 => (any::<usize>(), 0..PAGES).prop_map(|(which, page)| Step::Renumber(which, page)),
        4 => place().prop_map(|(client, lease, count)| Step::Commit(client, lease, count)),
        2 => (1_u64..300).prop_map(Step::Pass),
        3 => place().prop_map(|(client, page, count)| Step::Read(client, page, count)),
        1 => (0_usize..3, 1_u16..500).prop_map(|(client, time)| Step::Renew(client, time)),
        1 => (0_usize..3).prop_map(Step::Restart),
        5 => (place(), 1_u16..500)
            .prop_map(|((client, page, count), time)| Step::Update(client, page, count, time)),
        2 => place().prop_map(|(client, page, count)| Step::Wait(client, page, count)),
        3 => place().prop_map(|(client, page, count)| Step::Write(client, page, count)),
    ]
}

#[derive(Clone, Copy, Debug)]
struct Held {
    client: usize,
    epoch: u64,
    expires_at: Timestamp,
}

/// An UPDATE that a client believes to have been granted.
#[derive(Clone, Copy, Debug)]
struct Grant {
    page: usize,
    count: usize,
    epoch: u64,
}

struct Model {
    world: World,
    at: Pointer,
    clients: Vec<Client>,
    grants: [Option<Grant>; 3],
    /// The value of every byte of a page, and its lease.
    pages: [(u8, Option<Held>); PAGES],
    sent: Vec<TestRequest>,
    /// Grants that clients wait for: client and number, and the requested pages.
    waiting: Vec<(usize, u64, usize, usize)>,
    /// The first final reply to every mutating request, by session and number: its status and lease
    /// epoch.
    first_replies: BTreeMap<(u64, u64), (Status, u64)>,
}

impl Model {
    fn new() -> Self {
        Self::of(World::new())
    }

    fn of(mut world: World) -> Self {
        let at = world.create(PAGES as u32);
        let clients =
            (0..3).map(|node| Client::with(&mut world, NodeId(30 + node), 1, 2048)).collect();
        let pages = [(0, None); PAGES];
        Self {
            world,
            at,
            clients,
            grants: [None; 3],
            pages,
            sent: Vec::new(),
            waiting: Vec::new(),
            first_replies: BTreeMap::new(),
        }
    }

    fn is_leased(&self, page: usize) -> bool {
        self.pages[page].1.is_some_and(|held| self.world.now < held.expires_at)
    }

    fn holds(&self, client: usize, page: usize, epoch: u64) -> bool {
        self.is_leased(page)
            && self.pages[page].1.is_some_and(|held| (held.client, held.epoch) == (client, epoch))
    }

    /// Sends datagrams, and returns all replies but those to waiters.
    fn send(&mut self, requests: &[TestRequest]) -> Vec<Reply> {
        let replies: Vec<_> =
            requests.iter().flat_map(|request| self.world.send(request)).collect();
        self.sent.extend(requests.iter().cloned());
        self.record_grants(replies)
    }

    /// Records the grants of UPDATEs that waited.
    fn record_grants(&mut self, replies: Vec<Reply>) -> Vec<Reply> {
        let mut own = Vec::new();
        for reply in replies {
            self.compare_with_first(&reply);
            let is_of = |&(client, number, ..): &(usize, u64, usize, usize)| {
                (self.clients[client].session, number)
                    == (reply.header.session, reply.header.sequence)
            };
            let waited = self.waiting.iter().position(is_of);
            match waited {
                Some(index) if reply.status.is_ok() => {
                    let (client, _, page, count) = self.waiting[index];
                    if reply.header.offset as usize == 0 {
                        self.granted(client, page, count, &reply);
                    }
                    let is_last =
                        reply.header.offset as usize + reply.data.len() == count * PAGE_BYTES;
                    if is_last {
                        self.waiting.remove(index);
                    }
                }
                _ => own.push(reply),
            }
        }
        own
    }

    /// The reply to a repetition is that to the first copy; only a lease may have been lost since.
    fn compare_with_first(&mut self, reply: &Reply) {
        let Reply { status, header, .. } = reply;
        let command = WireCommand::from_bits(reply.from.command).command();
        let is_temporary = matches!(
            status,
            Status::Expired | Status::Incomplete | Status::NoSession | Status::StaleIncarnation
        );
        let waits = header.flags.contains(Flags::QUEUED);
        if command.is_none_or(|command| !command.is_mutating()) || is_temporary || waits {
            return;
        }
        let name = (header.session, header.sequence);
        let (first, epoch) =
            *self.first_replies.entry(name).or_insert((*status, header.lease_epoch));
        let is_lease = matches!(command, Some(Command::Renew | Command::Update));
        if is_lease && first.is_ok() {
            let is_same = status.is_ok() && header.lease_epoch == epoch;
            assert!(is_same || *status == Status::LeaseLost, "{reply:?}");
        } else {
            assert_eq!(*status, first, "{reply:?}");
        }
    }

    /// Compares all pages with the model.
    fn check_pages(&self) -> Result<(), TestCaseError> {
        for (page, &(byte, _)) in self.pages.iter().enumerate() {
            let is_same = (0..PAGE_BYTES).all(|at| self.world.store.byte(page as u64, at) == byte);
            prop_assert!(is_same, "page {}", page);
        }
        Ok(())
    }

    /// A waiting number is repeated for another page: only its sender gets a reply.
    fn reuse_number(&mut self, which: usize, page: usize) -> Result<(), TestCaseError> {
        self.world.pass(Duration::ZERO);
        let replies = self.world.drain();
        prop_assert_eq!(self.record_grants(replies), []);
        let name_of = |header: &Header| (header.session, header.sequence);
        let waiting = self.world.responder.queue.iter().map(|waiter| name_of(&waiter.header));
        let names: Vec<_> = waiting.collect();
        let Some(&name) = which.checked_rem(names.len()).and_then(|index| names.get(index)) else {
            return Ok(());
        };
        let is_given_up = |name: &(u64, u64)| {
            let mut clients = self.clients.iter().filter(|client| client.session == name.0);
            clients.any(|client| client.low_water.is_some_and(|low| name.1 < low))
        };
        let request =
            self.sent.iter().find(|request| name_of(&request.header) == name).expect("it was sent");
        let at = page_of(self.at, page);
        let to = Fields { location: at.location.bits(), ..request.to };
        let changed = TestRequest { to, ..request.clone() }.with(|header| {
            (header.target, header.length) = (at.to_ipv6(), 1);
        });
        let status = self.world.status(&changed);
        let waiting = self.world.responder.queue.iter().map(|waiter| name_of(&waiter.header));
        let left: Vec<_> = waiting.collect();
        if status == Status::Expired {
            // Its client gave the number up, and the server heard of it. It forgets no other one.
            prop_assert!(is_given_up(&name) && !left.contains(&name));
            prop_assert!(names.iter().all(|name| left.contains(name) || is_given_up(name)));
        } else {
            prop_assert_eq!(status, Status::Malformed);
            prop_assert_eq!(left, names);
        }
        Ok(())
    }

    fn granted(&mut self, client: usize, page: usize, count: usize, reply: &Reply) {
        let header = reply.header;
        let left = millis(u64::from(header.lease_remaining_ms));
        let held = Held { client, epoch: header.lease_epoch, expires_at: self.world.now + left };
        for page in page..page + count {
            assert!(!self.is_leased(page), "page {page} is leased already");
            self.pages[page].1 = Some(held);
        }
        self.grants[client] = Some(Grant { page, count, epoch: header.lease_epoch });
        assert!(reply.data.iter().all(|&byte| byte == self.pages[page].0));
    }

    /// Whether a direct reader answers a READ, which it must if the page is not marked.
    fn is_read_directly(&self, request: &TestRequest, page: usize) -> Result<bool, TestCaseError> {
        let Some(readers) = &self.world.store.readers else { return Ok(false) };
        let bytes = read_directly(&self.world, request);
        prop_assert_eq!(bytes.is_none(), readers.leased.contains(&(page as u64)), "page {}", page);
        let Some(bytes) = bytes else { return Ok(false) };
        prop_assert!(!self.is_leased(page), "page {} is leased", page);
        prop_assert!(bytes.iter().all(|&byte| byte == self.pages[page].0), "page {}", page);
        Ok(true)
    }

    fn run(&mut self, number: usize, step: Step) -> Result<(), TestCaseError> {
        // The last 20 numbers of each client stay in the window.
        for client in &mut self.clients {
            client.low_water = Some(client.sequence.saturating_sub(19).max(1));
        }
        let in_line = |page: usize, count: usize| count.min(8 - page % 8);
        match step {
            Step::Pass(time) => {
                self.world.pass(millis(time));
                let replies = self.world.drain();
                prop_assert_eq!(self.record_grants(replies), []);
            }
            Step::Read(client, page, count) => {
                let count = in_line(page, count);
                let at = page_of(self.at, page);
                let request = self.clients[client].request(Command::Read, at, count * PAGE_BYTES);
                if count == 1 && self.is_read_directly(&request, page)? {
                    return Ok(());
                }
                let replies = self.send(&[request]);
                for page in page..page + count {
                    let offset = page_of(self.at, page).location.bits() - at.location.bits();
                    let first = replies.iter().find(|r| u64::from(r.header.offset) == offset);
                    let first = first.expect("a reply for the page");
                    let expected = if self.is_leased(page) { Status::Busy } else { Status::Ok };
                    prop_assert_eq!(first.status, expected, "page {}", page);
                    prop_assert!(first.data.iter().all(|&byte| byte == self.pages[page].0));
                }
            }
            Step::Write(client, page, count) => {
                let count = in_line(page, count);
                let stamp = (number % 256) as u8;
                let at = page_of(self.at, page);
                let request = self.clients[client].request(Command::Write, at, count * PAGE_BYTES);
                let reply = self.whole_train(request, &vec![stamp; count * PAGE_BYTES])?;
                let expected = (page..page + count)
                    .map(|page| if self.is_leased(page) { Status::Busy } else { Status::Ok });
                let expected: Vec<_> = expected.collect();
                let is_one = expected.iter().all(|status| *status == expected[0]);
                prop_assert_eq!(reply.status, if is_one { expected[0] } else { Status::Partial });
                for page in page..page + count {
                    if !self.is_leased(page) {
                        self.pages[page].0 = stamp;
                    }
                }
            }
            Step::Update(client, page, count, time) => {
                self.update(client, page, count, Some(time))?
            }
            Step::Wait(client, page, count) => self.update(client, page, count, None)?,
            Step::Commit(client, skip, count) => {
                let Some(grant) = self.grants[client] else { return Ok(()) };
                let (page, count) = part(grant, skip, count);
                let at = page_of(self.at, page);
                let length = count * PAGE_BYTES;
                let request = self.clients[client].under(Command::Commit, at, length, grant.epoch);
                let stamp = (number % 256) as u8;
                let holds = (page..page + count).all(|page| self.holds(client, page, grant.epoch));
                if holds {
                    self.pages[page..page + count].fill((stamp, None));
                }
                let reply = self.whole_train(request, &vec![stamp; length])?;
                let expected = if holds { Status::Ok } else { Status::LeaseLost };
                prop_assert_eq!(reply.status, expected);
            }
            Step::Abort(client, skip, count) => {
                let Some(grant) = self.grants[client] else { return Ok(()) };
                let (page, count) = part(grant, skip, count);
                self.release(client, page, count, grant.epoch)?;
            }
            Step::Renew(client, time) => {
                let Some(Grant { page, count, epoch }) = self.grants[client] else {
                    return Ok(());
                };
                let at = page_of(self.at, page);
                let request =
                    self.clients[client].under(Command::Renew, at, count * PAGE_BYTES, epoch);
                let holds = (page..page + count).all(|page| self.holds(client, page, epoch));
                let replies = self.send(&[request.with(|header| header.lease_remaining_ms = time)]);
                let expected = if holds { Status::Ok } else { Status::LeaseLost };
                prop_assert_eq!(replies[0].status, expected);
                let expires_at = self.world.now + millis(u64::from(time));
                for page in page..page + count {
                    if let (true, Some(held)) = (holds, &mut self.pages[page].1) {
                        held.expires_at = expires_at;
                    }
                }
            }
            Step::Restart(client) => {
                let Client { node, incarnation, .. } = self.clients[client];
                self.waiting.retain(|&(other, ..)| other != client);
                for page in &mut self.pages {
                    page.1 = page.1.filter(|held| held.client != client);
                }
                let request = open(node, incarnation + 1, number as u64, 2048);
                let replies = self.world.send(&request);
                let replies = self.record_grants(replies);
                prop_assert_eq!(replies.len(), 1);
                let session = replies[0].header.session;
                let of = &mut self.clients[client];
                (of.incarnation, of.session, of.sequence) = (incarnation + 1, session, 0);
                of.low_water = None;
                self.grants[client] = None;
            }
            Step::Again(which) if !self.sent.is_empty() => {
                let recent = self.sent.len().min(40);
                let request = self.sent[self.sent.len() - 1 - which % recent].clone();
                let replies = self.world.send(&request.clone().attempt(1));
                let is_read = request.to.command == Command::Read.code();
                for reply in self.record_grants(replies) {
                    let is_final = matches!(reply.status, Status::Ok | Status::Busy);
                    if is_read && is_final {
                        let place = reply.target.location - self.at.location.bits();
                        let page = (place as usize + usize::from(reply.header.offset)) / PAGE_BYTES;
                        let is_busy = reply.status == Status::Busy;
                        let page = if is_busy { place as usize / PAGE_BYTES } else { page };
                        prop_assert_eq!(is_busy, self.is_leased(page), "page {}", page);
                        prop_assert!(reply.data.iter().all(|&byte| byte == self.pages[page].0));
                    }
                }
                self.check_pages()?;
            }
            Step::Renumber(which, page) => self.reuse_number(which, page)?,
            Step::Again(_) => {}
        }
        Ok(())
    }

    /// Sends a train in another order, with a piece twice.
    fn whole_train(&mut self, request: TestRequest, data: &[u8]) -> Result<Reply, TestCaseError> {
        let mut train = pieces(request, 0, data, 2048);
        train.rotate_left(data.len() / PAGE_BYTES);
        train.push(train[0].clone());
        let mut replies = self.send(&train);
        prop_assert!(!replies.is_empty());
        // A train that was refused early is refused for every later piece, with the same status.
        let first = replies.remove(0);
        prop_assert!(replies.iter().all(|reply| reply.status == first.status));
        Ok(first)
    }

    fn update(
        &mut self,
        client: usize,
        page: usize,
        count: usize,
        time: Option<u16>,
    ) -> Result<(), TestCaseError> {
        let count = count.min(8 - page % 8);
        let at = page_of(self.at, page);
        let mut request = self.clients[client].request(Command::Update, at, count * PAGE_BYTES);
        match time {
            Some(time) => request.header.lease_remaining_ms = time,
            None => request.header.flags = Flags::QUEUED,
        }
        let name = (client, request.header.sequence);
        self.waiting.push((client, request.header.sequence, page, count));
        let is_free = !(page..page + count).any(|page| self.is_leased(page));
        let replies = self.send(&[request]);
        let still = self.waiting.iter().any(|&(other, number, ..)| (other, number) == name);
        if time.is_some() {
            prop_assert_eq!(!still, is_free);
        }
        if still {
            prop_assert_eq!(replies[0].status, Status::Busy);
            let is_queued = replies[0].header.flags.contains(Flags::QUEUED);
            prop_assert_eq!(is_queued, time.is_none());
            if !is_queued {
                self.waiting.retain(|&(other, number, ..)| (other, number) != name);
            }
        }
        Ok(())
    }

    fn release(
        &mut self,
        client: usize,
        page: usize,
        count: usize,
        epoch: u64,
    ) -> Result<(), TestCaseError> {
        let at = page_of(self.at, page);
        let request = self.clients[client].under(Command::Abort, at, count * PAGE_BYTES, epoch);
        let holds = (page..page + count).all(|page| self.holds(client, page, epoch));
        if holds {
            for page in &mut self.pages[page..page + count] {
                page.1 = None;
            }
        }
        let replies = self.send(&[request]);
        let expected = if holds { Status::Ok } else { Status::LeaseLost };
        prop_assert_eq!(replies[0].status, expected);
        Ok(())
    }
}

/// Some pages of a grant.
fn part(grant: Grant, skip: usize, count: usize) -> (usize, usize) {
    let skip = skip % grant.count;
    (grant.page + skip, count.min(grant.count - skip))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn leases_agree_with_a_model(steps in prop::collection::vec(step(), 120)) {
        run_all(Model::new(), &steps)?;
    }

    #[test]
    fn leases_agree_with_a_model_if_readers_answer(steps in prop::collection::vec(step(), 120)) {
        run_all(Model::of(shared(World::new)), &steps)?;
    }
}

fn run_all(mut model: Model, steps: &[Step]) -> Result<(), TestCaseError> {
    for (number, &step) in steps.iter().enumerate() {
        model.run(number, step)?;
    }
    model.check_pages()?;
    prop_assert_eq!(model.world.responder.trains.free_buffer_count(), 1024);
    Ok(())
}
