//! The server's sockets, with a client that is made of bytes.

use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};

use bluebridge_blockdev::nbd::Export;
use bluebridge_blockdev::server::{END_DEADLINE, Limits, Listener, STOP_DEADLINE, Server};
use bluebridge_testkit::Scratch;

use super::carrier::Before;
use super::*;

struct Served {
    server: Option<Server>,
    path: std::path::PathBuf,
    disk: Arc<Disk>,
    world: World,
    _keeper: Keeper<MemoryTransport>,
    _scratch: Scratch,
}

impl Served {
    fn start(threads: usize) -> Self {
        Self::start_with(threads, Limits::default())
    }

    fn start_with(threads: usize, limits: Limits) -> Self {
        Self::start_of(threads, limits, World::client)
    }

    fn start_of<T: Transport + Send + 'static>(
        threads: usize,
        limits: Limits,
        client: impl Fn(&World) -> Client<T>,
    ) -> Self {
        let world = World::new(2, 32 << 20);
        let pointer = world.create(8 * MIB, Placement::Striped);
        let (disk, keeper) = world.attach(pointer);
        let scratch = Scratch::new("disk-talk");
        let path = scratch.path().join("socket");
        let listener = Listener::Unix(UnixListener::bind(&path).expect("a socket"));
        let clients = (0..threads).map(|_| client(&world)).collect();
        let export = Export {
            name: "disk".into(),
            description: "".into(),
            size_bytes: disk.size_bytes(),
            is_read_only: false,
            payload_bytes_max: 1 << 20,
        };
        let server = Server::start(&disk, clients, listener, export, limits).expect("threads");
        Self { server: Some(server), path, disk, world, _keeper: keeper, _scratch: scratch }
    }

    /// A client that has chosen the export, with simple replies.
    fn connect(&self) -> Peer {
        let stream = UnixStream::connect(&self.path).expect("it listens");
        stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a socket");
        let mut peer = Peer(stream);
        assert_eq!(peer.receive(18), b"NBDMAGICIHAVEOPT\x00\x03");
        peer.send(b"\x00\x00\x00\x03IHAVEOPT\x00\x00\x00\x01\x00\x00\x00\x00");
        assert_eq!(peer.receive(10)[..8], (8 * MIB).to_be_bytes());
        peer
    }
}

struct Peer(UnixStream);

impl Peer {
    fn send(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).expect("it reads");
    }

    fn receive(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        self.0.read_exact(&mut bytes).expect("it replies");
        bytes
    }

    fn is_closed(&mut self) -> bool {
        self.0.read(&mut [0]).is_ok_and(|count| count == 0)
    }
}

fn request(kind: u16, cookie: u64, offset: u64, bytes: u32) -> Vec<u8> {
    let mut request = vec![0x25, 0x60, 0x95, 0x13, 0, 0];
    request.extend(kind.to_be_bytes());
    request.extend(cookie.to_be_bytes());
    request.extend(offset.to_be_bytes());
    request.extend(bytes.to_be_bytes());
    request
}

fn replied(errno: u32, cookie: u64) -> Vec<u8> {
    [&[0x67, 0x44, 0x66, 0x98][..], &errno.to_be_bytes(), &cookie.to_be_bytes()].concat()
}

#[test]
fn many_requests_are_outstanding_and_all_are_answered() {
    let served = Served::start(1);
    let mut peer = served.connect();
    let mut sent = Vec::new();
    for number in 0..300_u64 {
        sent.extend(request(1, number, number * 5000, 5000));
        sent.extend(vec![byte(number); 5000]);
    }
    let mut writer = peer.0.try_clone().expect("a socket");
    let thread = std::thread::spawn(move || writer.write_all(&sent).expect("it reads"));
    let mut cookies: Vec<_> = (0..300)
        .map(|_| {
            let reply = peer.receive(16);
            assert_eq!(reply[..8], replied(0, 0)[..8]);
            u64::from_be_bytes(reply[8..].try_into().expect("eight"))
        })
        .collect();
    cookies.sort_unstable();
    assert_eq!(cookies, (0..300).collect::<Vec<_>>());
    thread.join().expect("it sent all");
    // READs in one packet; requests that are refused are among them, one of them with data.
    let mut sent = Vec::new();
    for number in 0..60_u64 {
        sent.extend(request(0, number, number * 5000, 5000));
    }
    sent.extend(request(1, 1000, 8 * MIB, 3));
    sent.extend(b"abc");
    sent.extend(request(1, 1001, 0, (1 << 20) + 1));
    sent.extend(vec![1; (1 << 20) + 1]);
    sent.extend(request(99, 1002, 0, 1));
    sent.extend(request(3, 1003, 0, 0));
    let mut writer = peer.0.try_clone().expect("a socket");
    let thread = std::thread::spawn(move || writer.write_all(&sent).expect("it reads"));
    let mut refused = Vec::new();
    for _ in 0..64 {
        let reply = peer.receive(16);
        let cookie = u64::from_be_bytes(reply[8..].try_into().expect("eight"));
        match cookie {
            0..60 => {
                assert_eq!(reply[..8], replied(0, 0)[..8]);
                assert_eq!(peer.receive(5000), vec![byte(cookie); 5000]);
            }
            _ => refused.push((cookie, reply[7])),
        }
    }
    thread.join().expect("it sent all");
    refused.sort_unstable();
    assert_eq!(refused, [(1000, 28), (1001, 22), (1002, 22), (1003, 0)]);
    peer.send(&request(2, 0, 0, 0));
    assert!(peer.is_closed());
}

#[test]
fn a_client_that_breaks_the_protocol_loses_its_connection_alone() {
    let served = Served::start(2);
    let mut good = served.connect();
    for garbage in [&b"\x00\x00\x00\x03GET / HTTP/1.1\r\n\r\n"[..], b"\xff\xff\xff\xff"] {
        let mut stream = UnixStream::connect(&served.path).expect("it listens");
        stream.write_all(garbage).expect("it reads");
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
        assert_eq!(rest, b"NBDMAGICIHAVEOPT\x00\x03");
    }
    let mut bad = served.connect();
    bad.send(&[0; 28]);
    assert!(bad.is_closed());
    // One that goes away in the middle of a request.
    let mut gone = served.connect();
    gone.send(&request(1, 5, 0, 1000)[..20]);
    drop(gone);
    good.send(&[request(1, 7, 100, 2), b"ok".to_vec()].concat());
    assert_eq!(good.receive(16), replied(0, 7));
    let mut other = served.connect();
    other.send(&request(0, 8, 100, 2));
    assert_eq!(other.receive(18), [replied(0, 8), b"ok".to_vec()].concat());
}

#[test]
fn a_server_that_stops_answers_what_has_arrived() {
    let mut served = Served::start(2);
    let mut idle = served.connect();
    let mut busy = served.connect();
    for number in 0..40 {
        busy.send(&[request(1, number, number * 4096, 4096), vec![7; 4096]].concat());
    }
    served.server.take().expect("it runs").stop();
    for _ in 0..40 {
        assert_eq!(busy.receive(16)[..8], replied(0, 0)[..8]);
    }
    assert!(busy.is_closed() && idle.is_closed());
    let mut client = served.world.client();
    assert_eq!(read(&served.disk, &mut client, 39 * 4096, 4096), Ok(vec![7; 4096]));
}

/// Neither a client that always has requests in flight keeps a server from stopping, nor one that takes no replies.
#[test]
fn a_server_stops_whatever_its_clients_do() {
    let mut served = Served::start(2);
    let mut busy = served.connect();
    let mut deaf = served.connect();
    deaf.0.set_write_timeout(Some(Duration::from_millis(300))).expect("a socket");
    // More replies than fit into the socket.
    for number in 0..40 {
        if deaf.0.write_all(&request(0, number, 0, 1 << 20)).is_err() {
            break;
        }
    }
    let replies = Arc::new(AtomicU16::new(0));
    let counted = Arc::clone(&replies);
    let thread = std::thread::spawn(move || {
        let requests: Vec<u8> = (0..16).flat_map(|number| request(0, number, 0, 512)).collect();
        busy.send(&requests);
        let mut reply = vec![0; 16 + 512];
        // One for each that was answered.
        while busy.0.read_exact(&mut reply).is_ok() {
            counted.fetch_add(1, Ordering::SeqCst);
            if busy.0.write_all(&request(0, 1, 0, 512)).is_err() {
                break;
            }
        }
    });
    bluebridge_testkit::until("requests are answered", || replies.load(Ordering::SeqCst) > 16);
    let began = std::time::Instant::now();
    served.server.take().expect("it runs").stop();
    let limit = (STOP_DEADLINE + END_DEADLINE) * 5;
    assert!(began.elapsed() < limit, "{:?}", began.elapsed());
    thread.join().expect("its connection was closed");
    drop(deaf);
}

/// A client that sends a part of a request and no more does not keep its thread.
#[test]
fn a_client_that_does_not_finish_a_request_loses_its_connection() {
    let limits = Limits { request: Duration::from_millis(100), ..Limits::default() };
    let served = Served::start_with(1, limits);
    let mut peer = served.connect();
    peer.send(&[request(1, 7, 100, 2), b"ok".to_vec()].concat());
    assert_eq!(peer.receive(16), replied(0, 7));
    // Nothing of the next request has arrived, so its time has not begun.
    std::thread::sleep(2 * limits.request);
    peer.send(&request(0, 8, 100, 2));
    assert_eq!(peer.receive(18), [replied(0, 8), b"ok".to_vec()].concat());
    // A part of its head, of its data, and of data that is read over.
    for part in [
        request(1, 9, 0, 2)[..10].to_vec(),
        [request(1, 9, 0, 2), b"o".to_vec()].concat(),
        [request(1, 9, 8 * MIB, 2), b"o".to_vec()].concat(),
    ] {
        peer.send(&part);
        assert!(peer.is_closed());
        // There is one thread, which takes the next one.
        peer = served.connect();
    }
    peer.send(&request(0, 8, 100, 2));
    assert_eq!(peer.receive(18), [replied(0, 8), b"ok".to_vec()].concat());
}

/// WRITE_ZEROES that take long keep neither other requests from their replies, nor the server from stopping.
#[test]
fn long_requests_keep_nobody_waiting() {
    const COUNT: u64 = 120;
    let mut served = Served::start_of(1, Limits::default(), |world| {
        let node = NodeId(NEXT_CLIENT.fetch_add(1, Ordering::Relaxed));
        // It takes its time.
        let slow = || std::thread::sleep(Duration::from_millis(20));
        Client::open(world.config(node), Before(world.rack.attach(node), slow))
    });
    let mut peer = served.connect();
    // All of the disk, many times: far more than is done in the time in which a server stops.
    let mut zeroes = Vec::new();
    for number in 0..COUNT {
        let mut request = request(6, number, 0, length(usize::try_from(8 * MIB).expect("small")));
        // Memory is to be allocated.
        request[5] = 2;
        zeroes.extend(request);
    }
    zeroes.extend(request(0, 1000, 0, 512));
    peer.send(&zeroes);
    let mut done = 0;
    for number in 1000..1003_u64 {
        loop {
            let reply = peer.receive(16);
            assert_eq!(reply[..8], replied(0, 0)[..8]);
            if reply[8..] == number.to_be_bytes() {
                break;
            }
            done += 1;
        }
        peer.receive(512);
        assert!(done < COUNT, "a READ waited for all WRITE_ZEROES");
        // The others go on, and this one arrives meanwhile.
        peer.send(&request(0, number + 1, 0, 512));
    }
    served.server.take().expect("it runs").stop();
    let mut rest = Vec::new();
    let _ = peer.0.read_to_end(&mut rest);
    let others = rest.chunks(16).filter(|reply| reply.starts_with(&replied(0, 0)[..8])).count();
    assert!(done + (others as u64) < COUNT, "the server did all before it stopped");
}
