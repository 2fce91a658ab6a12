//! Reads and messages between two machines, each of which must succeed, or fail as it should.
//!
//! On one machine `verbs serve ADDRESS`, on the other `verbs use ADDRESS PEER`: addresses of interfaces with an
//! RDMA device. The second one ends after its last line, when the first one was killed. `verbs watch ADDRESS` shows what
//! the device reports until its port is down.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::process::ExitCode;
use std::ptr::NonNull;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use bluebridge_rdma::{
    Access, Arrival, Buffer, BufferPool, Device, DeviceEvent, Failure, MemoryRegion, Message,
    Messages, PathMtu, PoolError, Port, PostError, ProtectionDomain, QueuePair, QueuePairAddress,
    QueuePairOptions, Read, RemotePlace, Sent, device_names,
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// Where the ends tell each other how to connect.
const TCP_PORT: u16 = 18515;
/// A line and the head of a request.
const MESSAGE_BYTES: usize = 33 << 10;
const READ_BYTES_MAX: usize = 64 << 10;
/// Buffers for messages at each end: few, so that senders wait for credits.
const RECEIVES: u16 = 4;
/// For any single step, on emulated processors of a busy machine.
const STEP: Duration = Duration::from_secs(20);
const SPIN: Duration = Duration::from_micros(50);
/// A packet is repeated after this time, six times: an emulated machine may stand still for seconds.
const PATIENT: Duration = Duration::from_secs(1);
/// Of the queue pair that waits for the end of its peer.
const HASTY: Duration = Duration::from_millis(120);

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    let outcome = match arguments[..] {
        ["devices"] => {
            device_names().map_err(Into::into).map(|names| println!("{}", names.join(" ")))
        }
        ["serve", own] => serve(own),
        ["use", own, peer] => use_peer(own, peer),
        ["watch", own] => watch(own),
        _ => Err("usage: verbs devices | serve ADDRESS | use ADDRESS PEER | watch ADDRESS".into()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("verbs: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Prints the device's events until the port is down.
fn watch(own: &str) -> Outcome<()> {
    let (device, port) = Device::with_address(own.parse()?)?;
    println!("watching {}, active: {}", device.name(), port.is_active);
    let deadline = Instant::now() + STEP;
    while Instant::now() < deadline {
        while let Some(event) = device.next_event()? {
            println!("{event:?}");
            if event == (DeviceEvent::PortDown { port: port.number }) {
                let is_active = device.port_with(own.parse()?).is_ok_and(|port| port.is_active);
                println!("active: {is_active}");
                return Ok(());
            }
        }
        let mut fds = [PollFd::new(&device, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec { tv_sec: 1, tv_nsec: 0 }))?;
    }
    Err("the port did not go down".into())
}

/// An end of a connection.
struct End {
    domain: ProtectionDomain,
    pool: BufferPool,
    port: Port,
    messages: Messages,
}

impl End {
    fn new(own: Ipv6Addr, acknowledged_within: Duration) -> Outcome<Self> {
        let (device, port) = Device::with_address(own)?;
        let domain = ProtectionDomain::new(&device)?;
        let pool = BufferPool::new(&domain, 16, READ_BYTES_MAX)?;
        let messages = Self::queue_pair(&domain, port, &pool, acknowledged_within)?;
        println!("{} at {own}: {:?}, {:?}", device.name(), device.limits()?, port.mtu);
        Ok(Self { domain, pool, port, messages })
    }

    fn queue_pair(
        domain: &ProtectionDomain,
        port: Port,
        pool: &BufferPool,
        acknowledged_within: Duration,
    ) -> Outcome<Messages> {
        let options = QueuePairOptions {
            requests: 8,
            receives: RECEIVES.into(),
            acknowledged_within,
            ..QueuePairOptions::default()
        };
        Ok(Messages::new(QueuePair::new(domain, port, pool, options)?, pool, RECEIVES)?)
    }

    fn buffer(&self) -> Outcome<Buffer> {
        Ok(self.pool.take().ok_or("no buffer is free")?)
    }

    /// Exchanges what both ends need to know, in a line each, and connects.
    fn connect(&mut self, stream: &TcpStream, memory: RemotePlace) -> Outcome<RemotePlace> {
        stream.set_read_timeout(Some(STEP))?;
        let QueuePairAddress { address, number, first_packet } =
            self.messages.queue_pair().address();
        let RemotePlace { address: place, key } = memory;
        let mtu = self.port.mtu.bytes();
        let mut writer = stream;
        writeln!(writer, "{address} {number} {first_packet} {mtu} {place} {key}")?;
        let mut reader = BufReader::new(stream);
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let words: Vec<_> = line.split_whitespace().collect();
        let [address, number, first_packet, mtu, place, key] = words[..] else {
            return Err(format!("the peer says `{line}`").into());
        };
        let peer = QueuePairAddress {
            address: address.parse()?,
            number: number.parse()?,
            first_packet: first_packet.parse()?,
        };
        let mtu = PathMtu::from_bytes(mtu.parse()?).ok_or("no path MTU")?.min(self.port.mtu);
        self.messages.queue_pair().connect(peer, mtu, Instant::now() + STEP)?;
        // The peer may send when this line arrives.
        writeln!(writer, "connected")?;
        let memory = RemotePlace { address: place.parse()?, key: key.parse()? };
        line.clear();
        reader.read_line(&mut line)?;
        if line != "connected\n" {
            return Err("the peer did not connect".into());
        }
        Ok(memory)
    }

    /// Posts a chain and waits for its end.
    fn read(&mut self, buffer: Buffer, reads: &[Read]) -> Outcome<Result<Buffer, Failure>> {
        self.messages.read(7, buffer, reads).map_err(|(error, _)| error)?;
        match self.messages.wait(SPIN, Instant::now() + STEP)? {
            Some(Arrival::Read { token: 7, result }) => Ok(result),
            other => Err(format!("{other:?} instead of the end of the READs").into()),
        }
    }
}

/// What the served memory has at a place.
fn pattern(at: usize) -> u8 {
    (at.wrapping_mul(2_654_435_761) >> 7).to_le_bytes()[0]
}

fn served_memory() -> Vec<u8> {
    (0..READ_BYTES_MAX + 4096).map(pattern).collect()
}

/// Serves memory to one peer after another, and sends each message back.
fn serve(own: &str) -> Outcome<()> {
    let own: Ipv6Addr = own.parse()?;
    let memory = Arc::new(served_memory());
    let listener = TcpListener::bind((own, TCP_PORT))?;
    println!("listening");
    loop {
        let (stream, _) = listener.accept()?;
        let mut end = End::new(own, PATIENT)?;
        let all = NonNull::from(memory.as_slice());
        // SAFETY: the memory is that of the vector, which is not changed or freed as long as its `Arc` exists.
        let region = unsafe {
            MemoryRegion::register(&end.domain, all, Access::RemoteRead, memory.clone())
        }?;
        end.connect(&stream, region.place())?;
        thread::spawn(move || {
            let _region = region;
            if let Err(error) = echo(&mut end.messages) {
                println!("the connection ended: {error}");
            }
        });
    }
}

fn echo(messages: &mut Messages) -> Outcome<()> {
    // As many as have a buffer here: the peer has no credits for more.
    let mut unanswered: VecDeque<Message> = VecDeque::new();
    loop {
        while let Some(message) = unanswered.front() {
            if messages.send(message)? == Sent::NotNow {
                break;
            }
            unanswered.pop_front().into_iter().try_for_each(|it| messages.release(it))?;
        }
        if let Some(Arrival::Message(message)) = messages.wait(SPIN, Instant::now() + STEP)? {
            unanswered.push_back(message);
        }
    }
}

fn use_peer(own: &str, peer: &str) -> Outcome<()> {
    let (own, peer): (Ipv6Addr, Ipv6Addr) = (own.parse()?, peer.parse()?);
    let (mut end, memory) = connect(own, peer, PATIENT)?;
    reads_of_all_sizes(&mut end, memory)?;
    chains(&mut end, memory)?;
    messages(&mut end)?;
    for hindrance in [Hindrance::Reads, Hindrance::NoBuffer, Hindrance::Dropped] {
        credits_that_were_held_up(&mut end, memory, hindrance)?;
    }
    println!("credits are right");
    lengths(&mut end, memory)?;
    refusals(own, peer)?;
    let (mut end, memory) = connect(own, peer, HASTY)?;
    println!("waiting for the end of the peer");
    let failure = reads_until_failure(&mut end, memory)?;
    // The kernel that ends the peer may revoke its keys a moment before it destroys its queue pairs.
    if !matches!(failure, Failure::Unreachable | Failure::RemoteAccess) {
        return Err(format!("the peer was killed, and READs fail with: {failure}").into());
    }
    println!("the peer has ended");
    Ok(())
}

fn connect(
    own: Ipv6Addr,
    peer: Ipv6Addr,
    acknowledged_within: Duration,
) -> Outcome<(End, RemotePlace)> {
    let nowhere = RemotePlace { address: 0, key: 0 };
    let mut end = End::new(own, acknowledged_within)?;
    let stream = TcpStream::connect_timeout(&SocketAddr::from((peer, TCP_PORT)), STEP)?;
    let memory = end.connect(&stream, nowhere)?;
    Ok((end, memory))
}

fn expect_pattern(bytes: &[u8], from: usize) -> Outcome<()> {
    match bytes.iter().zip(from..).position(|(byte, at)| *byte != pattern(at)) {
        Some(at) => Err(format!("byte {at} of {} is wrong", bytes.len()).into()),
        None => Ok(()),
    }
}

fn reads_of_all_sizes(end: &mut End, memory: RemotePlace) -> Outcome<()> {
    for length in (6..=16).map(|shift| 1_usize << shift).chain([1, 4095, 4097, 60_001]) {
        let from = length % 4096;
        let mut buffer = end.buffer()?;
        buffer.fill(0xee);
        let read = Read { from: memory.offset(from as u64), into: 0, length };
        let buffer = end.read(buffer, &[read])??;
        expect_pattern(&buffer[..length], from)?;
        if buffer[length..].iter().any(|byte| *byte != 0xee) {
            return Err(format!("a READ of {length} bytes wrote more").into());
        }
    }
    println!("READs are right");
    Ok(())
}

/// Three READs each, several chains at the same time, which end in order.
fn chains(end: &mut End, memory: RemotePlace) -> Outcome<()> {
    let reads =
        |at: usize| {
            [(at, 0, 64), (at + 64, 64, 4096), (at, 64 + 4096, 64)]
                .map(|(from, into, length)| Read { from: memory.offset(from as u64), into, length })
        };
    for round in 0..10 {
        for token in 0..8 {
            let buffer = end.buffer()?;
            let at = (round * 8 + token) * 64;
            let posted = end.messages.read(token as u64, buffer, &reads(at));
            posted.map_err(|(error, _)| error)?;
        }
        if end.messages.queue_pair().has_room() {
            return Err("8 of 8 requests are outstanding, and there is room".into());
        }
        for expected in 0..8 {
            let arrival = end.messages.wait(SPIN, Instant::now() + STEP)?;
            let Some(Arrival::Read { token, result }) = arrival else {
                return Err("a chain did not end".into());
            };
            if token != expected as u64 {
                return Err(format!("chain {token} ended instead of {expected}").into());
            }
            let (buffer, at) = (result?, (round * 8 + expected) * 64);
            expect_pattern(&buffer[..64 + 4096], at)?;
            expect_pattern(&buffer[64 + 4096..][..64], at)?;
        }
    }
    println!("chains are right");
    Ok(())
}

/// More messages than the peer has buffers, up to the longest.
fn messages(end: &mut End) -> Outcome<()> {
    let lengths: Vec<_> = (0..24).map(|at| [1, 100, 4096, 9001, MESSAGE_BYTES][at % 5]).collect();
    let mut unsent = lengths.iter();
    let mut next = unsent.next();
    let (mut waits, mut arrived) = (0, 0);
    let contents = served_memory();
    while arrived < lengths.len() {
        while let Some(length) = next {
            if end.messages.send(&contents[..*length])? == Sent::NotNow {
                waits += 1;
                break;
            }
            next = unsent.next();
        }
        let arrival = end.messages.wait(SPIN, Instant::now() + STEP)?;
        let message = match arrival {
            Some(Arrival::Message(message)) => message,
            Some(Arrival::MaySend) => continue,
            _ => return Err(format!("no echo after {arrived} messages").into()),
        };
        let length = lengths[arrived];
        if message.len() != length {
            return Err(format!("an echo of {} instead of {length} bytes", message.len()).into());
        }
        expect_pattern(&message, 0)?;
        arrived += 1;
        end.messages.release(message)?;
    }
    if waits == 0 {
        return Err("24 messages never waited for a credit".into());
    }
    println!("messages are right; {waits} times there was no credit");
    Ok(())
}

/// Why an end cannot give credits when it releases messages.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Hindrance {
    /// All its requests are READs, and end later.
    Reads,
    /// The pool is empty.
    NoBuffer,
    /// It drops the messages.
    Dropped,
}

/// The peer has used its credits and has more to send: it gets them without a message of this end.
fn credits_that_were_held_up(
    end: &mut End,
    memory: RemotePlace,
    hindrance: Hindrance,
) -> Outcome<()> {
    let deadline = Instant::now() + STEP;
    let arrived = |arrival| match arrival {
        Some(Arrival::Message(message)) => Ok(message),
        other => Err(format!("{hindrance:?}: {other:?} instead of a message")),
    };
    let mut unsent = usize::from(RECEIVES);
    let mut held = Vec::new();
    let mut send = |end: &mut End| -> Outcome<()> {
        while unsent > 0 && end.messages.send(b"held up")? == Sent::Posted {
            unsent -= 1;
        }
        Ok(())
    };
    // One credit is for a message without contents, so the last echo must wait.
    while held.len() + 1 < RECEIVES.into() {
        send(end)?;
        match end.messages.wait(SPIN, deadline)? {
            Some(Arrival::MaySend) => {}
            arrival => held.push(arrived(arrival)?),
        }
    }
    send(end)?;
    while end.messages.queue_pair().outstanding() > 0 && Instant::now() < deadline {
        let early = end.messages.wait(SPIN, Instant::now() + Duration::from_millis(10))?;
        if early.is_some() {
            return Err(format!("{hindrance:?}: {early:?} without a credit").into());
        }
    }
    let mut buffers = Vec::new();
    match hindrance {
        Hindrance::Reads => {
            while end.messages.queue_pair().has_room() {
                let read = Read { from: memory, into: 0, length: 64 };
                end.messages.read(1, end.buffer()?, &[read]).map_err(|(error, _)| error)?;
            }
        }
        Hindrance::NoBuffer => buffers.extend(std::iter::from_fn(|| end.pool.take())),
        Hindrance::Dropped => drop(std::mem::take(&mut held)),
    }
    held.into_iter().try_for_each(|message| end.messages.release(message))?;
    let message = loop {
        match end.messages.wait(SPIN, deadline)? {
            Some(Arrival::Read { token: 1, result }) => expect_pattern(&result?[..64], 0)?,
            arrival => break arrived(arrival)?,
        }
    };
    drop(buffers);
    Ok(end.messages.release(message)?)
}

/// READs and messages without bytes are refused, and the queue pair goes on; so are buffers that no device takes.
fn lengths(end: &mut End, memory: RemotePlace) -> Outcome<()> {
    let read = |length| Read { from: memory, into: 0, length };
    let refused = end.messages.read(2, end.buffer()?, &[read(64), read(0)]);
    let sent = end.messages.send(&[]);
    let buffer = end.buffer()?;
    let posted = end.messages.queue_pair().send(2, buffer, 0);
    let (refused, posted) = (refused.map_err(|it| it.0), posted.map_err(|it| it.0));
    let (Err(PostError::NoBytes), Err(PostError::NoBytes), Err(PostError::NoBytes)) =
        (&refused, &sent, &posted)
    else {
        return Err(format!("no bytes: {refused:?}, {sent:?}, {posted:?}").into());
    };
    let pool = BufferPool::new(&end.domain, 1, 1 << 31);
    let Err(PoolError::TooLong { .. }) = pool else {
        return Err(format!("a buffer of 2 GiB: {pool:?}").into());
    };
    let buffer = end.buffer()?;
    let buffer = end.read(buffer, &[read(64)])??;
    expect_pattern(&buffer[..64], 0)?;
    println!("lengths are right");
    Ok(())
}

/// A wrong key, an address outside of the region, and requests after that.
fn refusals(own: Ipv6Addr, peer: Ipv6Addr) -> Outcome<()> {
    for what in ["key", "address"] {
        let (mut end, memory) = connect(own, peer, PATIENT)?;
        let wrong = match what {
            "key" => RemotePlace { key: memory.key ^ 0x100, ..memory },
            _ => memory.offset((READ_BYTES_MAX + 4096 - 32) as u64),
        };
        let read = |from, into| Read { from, into, length: 64 };
        let chain = [read(memory, 0), read(wrong, 64), read(memory, 128)];
        let free = end.pool.free();
        let buffer = end.buffer()?;
        let failure = end.read(buffer, &chain)?.err();
        if failure != Some(Failure::RemoteAccess) {
            return Err(format!("a READ with a wrong {what}: {failure:?}").into());
        }
        let buffer = end.buffer()?;
        let later = end.messages.read(8, buffer, &chain[..1]).map_err(|(error, _)| error);
        let is_refused = matches!(later, Err(PostError::NotConnected));
        if !is_refused {
            return Err(format!("after a failure a READ was posted: {later:?}").into());
        }
        if end.pool.free() != free - 1 {
            return Err("the buffer of a failed chain came back too early".into());
        }
        let End { messages, pool, .. } = end;
        drop(messages);
        if pool.free() != 16 {
            return Err("the buffers of a queue pair did not come back with its end".into());
        }
    }
    println!("refusals are right");
    Ok(())
}

fn reads_until_failure(end: &mut End, memory: RemotePlace) -> Outcome<Failure> {
    let begun = Instant::now();
    while begun.elapsed() < STEP {
        let buffer = end.buffer()?;
        let read = Read { from: memory, into: 0, length: 64 };
        if let Err(failure) = end.read(buffer, &[read])? {
            println!("a READ failed: {failure}");
            return Ok(failure);
        }
        thread::sleep(Duration::from_millis(20));
    }
    Err("the peer was not killed".into())
}
