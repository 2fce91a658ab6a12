//! `bluebridge disk`, with NBD clients of other authors.

use std::collections::BTreeMap;
use std::io::{BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use bluebridge_testkit::until;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::test_rack::TestRack;

/// Debian's own, as the package of the NBD shell's module uses it.
const PYTHON: &str = "/usr/bin/python3";

/// A process that serves a disk, killed when dropped.
pub(super) struct Serving {
    child: Child,
    pub(super) document: Value,
}

impl Serving {
    /// Without locked memory, which many tests at once could be refused.
    pub(super) fn start(rack: &TestRack, options: &[&str]) -> Self {
        Self::start_as_is(rack, &[options, &["--lock", "no"]].concat())
    }

    fn start_as_is(rack: &TestRack, options: &[&str]) -> Self {
        let socket = socket(rack);
        let socket = socket.to_str().expect("an ASCII path");
        let fixed = ["disk", "--json", "--lease", "1s", "--socket", socket];
        let mut command = rack.command(&[&fixed, options].concat());
        let log = std::fs::File::options().create(true).append(true).open(log(rack));
        let mut child =
            command.stdout(Stdio::piped()).stderr(log.expect("a log")).spawn().expect("starts");
        let out = BufReader::new(child.stdout.take().expect("piped"));
        let document = serde_json::Deserializer::from_reader(out).into_iter().next();
        let Some(Ok(document)) = document else {
            panic!("it printed no document: {}", said(rack));
        };
        Self { child, document }
    }

    pub(super) fn pointer(&self) -> &str {
        self.document["pointer"].as_str().expect("text")
    }

    fn uri(&self) -> &str {
        self.document["uri"].as_str().expect("text")
    }

    /// Locked memory of the process.
    fn locked_kib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()));
        let status = status.expect("it runs");
        let line = status.lines().find_map(|line| line.strip_prefix("VmLck:"));
        let number = line.and_then(|line| line.trim().strip_suffix(" kB"));
        number.and_then(|number| number.parse().ok()).unwrap_or_else(|| panic!("{status}"))
    }

    /// Ends it by SIGTERM.
    pub(super) fn stop(mut self) {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        kill_process(pid.expect("a pid"), Signal::TERM).expect("it runs");
        let mut status = None;
        until("it ends", || {
            status = self.child.try_wait().expect("our own child");
            status.is_some()
        });
        assert!(status.is_some_and(|status| status.success()), "{status:?}");
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        // One that has ended cannot be killed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn socket(rack: &TestRack) -> PathBuf {
    rack.scratch.path().join("disk")
}

fn log(rack: &TestRack) -> PathBuf {
    rack.scratch.path().join("disk.log")
}

fn said(rack: &TestRack) -> String {
    std::fs::read_to_string(log(rack)).unwrap_or_default()
}

/// Runs a program of another author, which must succeed.
#[track_caller]
fn succeeds(program: &str, arguments: &[&str]) -> String {
    let ran = Command::new(program).args(arguments).stdin(Stdio::null()).output();
    let output: Output = ran.unwrap_or_else(|error| panic!("{program}: {error}"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{program} {arguments:?}: {}: {out}{err}", output.status);
    out
}

/// Pages that the servers hold.
fn used_pages(rack: &TestRack) -> u64 {
    let servers = rack.json(&["stat"]);
    let servers = servers.as_array().expect("a list");
    let number = |server: &Value, field: &str| server[field].as_u64().expect("a number");
    servers.iter().map(|it| number(it, "capacity_pages") - number(it, "free_pages")).sum()
}

/// The names of the server that has the map of a disk, and of the other one.
fn servers(rack: &TestRack, pointer: &str) -> (String, String) {
    let stat = rack.json(&["stat"]);
    let servers = stat.as_array().expect("a list").iter();
    let home = pointer.split(':').nth(2).expect("a node");
    let home = u64::from_str_radix(home, 16).ok();
    let (homes, others): (Vec<_>, Vec<_>) =
        servers.partition(|server| server["node_id"].as_u64() == home);
    let name = |servers: &[&Value]| servers[0]["node"].as_str().expect("a name").to_owned();
    (name(&homes), name(&others))
}

/// What libnbd's Python module does with the disk at `uri`, of 64 MiB.
const SHELL: &str = r#"
import errno, os, nbd

def fails(number, call):
    try:
        call()
    except nbd.Error as error:
        assert error.errnum == number, error
    else:
        raise AssertionError("it did not fail")

for structured in (True, False):
    h = nbd.NBD()
    h.set_request_structured_replies(structured)
    h.set_strict_mode(0)
    h.connect_uri(os.environ["URI"])
    assert h.get_structured_replies_negotiated() == structured
    size = h.get_size()
    assert size == 64 << 20
    assert h.can_multi_conn() and h.can_fast_zero() and h.can_trim() and h.can_df() == structured
    # Parts of pages, over the border of slabs.
    h.pwrite(b"abcdef" * 1000, (4 << 20) - 3001, nbd.CMD_FLAG_FUA)
    assert h.pread(6002, (4 << 20) - 3002) == b"\0" + b"abcdef" * 1000 + b"\0"
    h.zero(100, (4 << 20) - 50, nbd.CMD_FLAG_FAST_ZERO)
    assert h.pread(102, (4 << 20) - 51) == b"e" + bytes(100) + b"d"
    h.zero(5 << 20, 30 << 20, nbd.CMD_FLAG_NO_HOLE)
    h.flush()
    h.trim(8 << 20, 0)
    assert h.pread(1 << 20, 0) == bytes(1 << 20)
    fails(errno.EINVAL, lambda: h.pread(2, size - 1))
    fails(errno.ENOSPC, lambda: h.pwrite(b"xy", size - 1))
    fails(errno.ENOSPC, lambda: h.zero(2, size - 1))
    fails(errno.EINVAL, lambda: h.trim(2, size - 1))
    fails(errno.EINVAL, lambda: h.pwrite(bytes((4 << 20) + 1), 0))
    fails(errno.EOVERFLOW if structured else errno.EINVAL, lambda: h.pread((4 << 20) + 1, 0))
    fails(errno.EINVAL, lambda: h.cache(512, 0))
    # Many outstanding.
    buffers = [nbd.Buffer.from_bytearray(bytearray([i]) * 4096) for i in range(200)]
    cookies = [h.aio_pwrite(b, (20 << 20) + 8192 * i) for i, b in enumerate(buffers)]
    while h.aio_in_flight():
        h.poll(-1)
    assert all(h.aio_command_completed(cookie) for cookie in cookies)
    for i in range(200):
        assert h.pread(4096, (20 << 20) + 8192 * i) == bytes([i]) * 4096
    h.shutdown()

h = nbd.NBD()
h.set_export_name("another")
fails(errno.ENOENT, lambda: h.connect_uri(os.environ["URI"].replace("///disk", "///another")))
"#;

#[test]
fn clients_of_other_authors_use_a_disk() {
    let rack = TestRack::up("disk-peers", &["--memory", "128M"]);
    let disk = Serving::start(&rack, &["--size", "64M", "--slab", "4M", "--placement", "striped"]);
    let uri = disk.uri();
    let info: Value = serde_json::from_str(&succeeds("nbdinfo", &["--json", uri])).expect("JSON");
    let export = &info["exports"][0];
    assert_eq!((&info["protocol"], &info["structured"]), (&"newstyle-fixed".into(), &true.into()));
    for (field, value) in [
        ("export-name", Value::from("disk")),
        ("export-size", (64 << 20).into()),
        ("is_read_only", false.into()),
        ("can_multi_conn", true.into()),
        ("can_fua", true.into()),
        ("can_flush", true.into()),
        ("can_trim", true.into()),
        ("can_zero", true.into()),
        ("can_fast_zero", true.into()),
        ("can_df", true.into()),
        ("block_size_minimum", 1.into()),
        ("block_size_preferred", 4096.into()),
        ("block_size_maximum", (4 << 20).into()),
    ] {
        assert_eq!(export[field], value, "{field}");
    }
    let list = succeeds("nbdinfo", &["--list", uri]);
    assert!(list.contains("export=\"disk\""), "{list}");

    let (script, file, back) = (
        rack.scratch.path().join("script.py"),
        rack.scratch.path().join("image"),
        rack.scratch.path().join("back"),
    );
    std::fs::write(&script, SHELL).expect("written");
    let ran = Command::new(PYTHON).arg(&script).env("URI", uri).output().expect("runs");
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));

    // A file goes there and back, over several connections.
    let image: Vec<u8> = (0..(64 << 20) / 8_u64).flat_map(|at| (at * at).to_le_bytes()).collect();
    std::fs::write(&file, &image).expect("written");
    let [file, back] = [&file, &back].map(|path| path.to_str().expect("an ASCII path"));
    succeeds("nbdcopy", &["--connections=4", file, uri]);
    succeeds("nbdcopy", &["--connections=4", uri, back]);
    assert!(std::fs::read(back).expect("readable") == image, "nbdcopy");
    succeeds("qemu-img", &["compare", "-f", "raw", "-F", "raw", file, uri]);
    succeeds("qemu-img", &["convert", "-n", "-f", "raw", "-O", "raw", file, uri]);
    let commands = [
        "write -P 0x5a 1000 5000",
        "read -P 0x5a 1000 5000",
        "write -z -u 8M 8M",
        "read -P 0 8M 8M",
        "discard 16M 8M",
        "aio_write -P 7 1M 2M",
        "aio_write -P 8 3M 2M",
        "aio_flush",
        "read -P 7 1M 2M",
        "read -P 8 3M 2M",
        "flush",
    ];
    let commands: Vec<_> = commands.iter().flat_map(|command| ["-c", command]).collect();
    succeeds("qemu-io", &[&["-f", "raw"], &commands[..], &[uri]].concat());
    // Slabs that were zeroed or discarded as a whole are free: 4 of 16.
    let used = used_pages(&rack);
    assert!(used <= 12 * 1024 + 16, "{used} pages are used");

    // Slabs move to another server while the disk is served.
    let pointer = disk.pointer().to_owned();
    let (_, other) = servers(&rack, &pointer);
    rack.text(&["drain", &other]);
    succeeds("qemu-io", &["-f", "raw", "-c", "read -P 7 1M 2M", "-c", "write -P 9 1M 2M", uri]);
    succeeds("qemu-io", &["-f", "raw", "-c", "read -P 9 1M 2M", "-c", "write -P 7 1M 2M", uri]);
    rack.text(&["undrain", &other]);
    // A disk has one owner; another endpoint asks.
    let (code, words) =
        rack.failure(&["disk", "delete", &pointer, "--as", "c2", "--deadline", "1s"]);
    assert_eq!(code, Some(3), "{words}");
    assert!(words.contains("serves this disk"), "{words}");
    disk.stop();
    assert!(!socket(&rack).exists(), "the socket's file is removed");

    let words = ["--attach", &pointer, "--read-only", "--export", "old", "--connections", "1"];
    let read_only = Serving::start_as_is(&rack, &words);
    assert!(read_only.locked_kib() > 8 << 10, "the buffers of a connection, at least");
    assert_eq!(read_only.document["size_bytes"], 64 << 20);
    let uri = read_only.uri();
    assert!(uri.contains("///old?"), "{uri}");
    succeeds("qemu-io", &["-r", "-f", "raw", "-c", "read -P 7 1M 2M", uri]);
    let refused = Command::new("qemu-io").args(["-f", "raw", "-c", "write 0 512", uri]).output();
    assert!(!refused.expect("runs").status.success(), "it is read-only");
    read_only.stop();

    // Without the right, and with a limit that is too small.
    let limited = r#"ulimit -l 64; exec setpriv --bounding-set=-ipc_lock "$0" "$@""#;
    let words = ["disk", "--attach", &pointer, "--listen", "[::1]:0"];
    let mut command = Command::new("bash");
    command.args(["-c", limited, env!("CARGO_BIN_EXE_bluebridge")]).args(words);
    let refused = command.env("BLUEBRIDGE_STATE", rack.state()).output().expect("runs");
    let words = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(5), "{words}");
    assert!(
        words.contains("RLIMIT_MEMLOCK is 65536 bytes") && words.contains("--lock no"),
        "{words}"
    );

    let (code, words) = rack.failure(&["disk", "--listen", "[::1]:0"]);
    assert_eq!(code, Some(2), "{words}");
    assert!(words.contains("--size") && words.contains("--attach"), "{words}");
    let deleted = rack.json(&["disk", "delete", &pointer]);
    assert_eq!(deleted["slab_count"], 12);
    assert_eq!(deleted["left"], Value::Array(Vec::new()));
    assert_eq!(used_pages(&rack), 0);
    let (code, words) = rack.failure(&["disk", "delete", &pointer]);
    assert_eq!(code, Some(3), "{words}");
}

/// A client that is made of bytes, with simple replies.
struct Peer(UnixStream);

impl Peer {
    fn connect(rack: &TestRack) -> Self {
        let stream = UnixStream::connect(socket(rack)).expect("it listens");
        stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a socket");
        let mut peer = Self(stream);
        peer.receive(18).expect("a greeting");
        peer.send(b"\x00\x00\x00\x03IHAVEOPT\x00\x00\x00\x01\x00\x00\x00\x00").expect("it reads");
        peer.receive(10).expect("the export");
        peer
    }

    fn send(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.0.write_all(bytes)
    }

    fn receive(&mut self, count: usize) -> std::io::Result<Vec<u8>> {
        let mut bytes = vec![0; count];
        self.0.read_exact(&mut bytes).map(|()| bytes)
    }

    fn request(&mut self, kind: u16, cookie: u64, offset: u64, bytes: u32) -> std::io::Result<()> {
        let mut request = vec![0x25, 0x60, 0x95, 0x13, 0, 0];
        request.extend(kind.to_be_bytes());
        request.extend(cookie.to_be_bytes());
        request.extend(offset.to_be_bytes());
        request.extend(bytes.to_be_bytes());
        self.send(&request)
    }

    /// The cookie and the error of the next reply.
    fn reply(&mut self) -> std::io::Result<(u64, u32)> {
        let reply = self.receive(16)?;
        let cookie = u64::from_be_bytes(reply[8..].try_into().expect("eight"));
        Ok((cookie, u32::from_be_bytes(reply[4..8].try_into().expect("four"))))
    }

    fn read(&mut self, offset: u64, bytes: u32) -> Result<Vec<u8>, u32> {
        self.request(0, offset, offset, bytes).expect("it reads");
        match self.reply().expect("it replies") {
            (_, 0) => Ok(self.receive(bytes as usize).expect("data")),
            (_, errno) => Err(errno),
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), u32> {
        self.request(1, 1, offset, u32::try_from(data.len()).expect("short")).expect("it reads");
        self.send(data).expect("it reads");
        match self.reply().expect("it replies") {
            (_, 0) => Ok(()),
            (_, errno) => Err(errno),
        }
    }
}

const BLOCK: u32 = 4096;
const SIZE: u64 = 64 << 20;

/// A block whose contents say which write it is of.
fn block(number: u64) -> Vec<u8> {
    number.to_be_bytes().repeat(BLOCK as usize / 8)
}

/// The process is killed while many writes are outstanding. What was acknowledged is there, whatever else is.
#[test]
fn acknowledged_writes_outlive_the_process() {
    const OUTSTANDING: u64 = 32;
    let rack = TestRack::up("disk-killed", &["--memory", "128M"]);
    let mut disk = Serving::start(&rack, &["--size", "64M", "--slab", "1M"]);
    let pointer = disk.pointer().to_owned();
    // By block: the number of the last write that was acknowledged, and the later ones that were not.
    let mut acknowledged = BTreeMap::<u64, u64>::new();
    let mut open = BTreeMap::<u64, u64>::new();
    let mut number = 0;
    let place = |number: u64| number * 7_919 % (SIZE / u64::from(BLOCK)) * u64::from(BLOCK);
    for round in 0..3_u64 {
        let mut peer = Peer::connect(&rack);
        let mut replies = 0;
        loop {
            while open.len() < usize::try_from(OUTSTANDING).expect("few") {
                number += 1;
                let sent = peer.request(1, number, place(number), BLOCK);
                open.insert(number, place(number));
                if sent.and_then(|()| peer.send(&block(number))).is_err() {
                    break;
                }
            }
            if replies == 600 + 300 * round {
                disk.child.kill().expect("it runs");
                disk.child.wait().expect("our own child");
            }
            // After the kill, those that were sent before.
            let Ok((cookie, errno)) = peer.reply() else { break };
            assert_eq!(errno, 0);
            acknowledged.insert(open.remove(&cookie).expect("it was sent"), cookie);
            replies += 1;
        }
        disk = Serving::start(&rack, &["--attach", &pointer]);
        let mut peer = Peer::connect(&rack);
        for (offset, number) in &acknowledged {
            let found = peer.read(*offset, BLOCK).expect("it is there");
            let found_number = u64::from_be_bytes(found[..8].try_into().expect("eight"));
            assert_eq!(found, block(found_number), "one write as a whole");
            let is_later = open.get(&found_number) == Some(offset);
            assert!(found_number == *number || is_later, "{found_number} instead of {number}");
        }
        // The next writes of the same blocks have other numbers; these may still be there.
        for (number, offset) in std::mem::take(&mut open) {
            acknowledged.remove(&offset);
            let found = peer.read(offset, BLOCK).expect("it can be read");
            let found_number = u64::from_be_bytes(found[..8].try_into().expect("eight"));
            assert!(found_number <= number, "{found_number} was never written");
        }
    }
    assert!(acknowledged.len() > 1000, "{}", acknowledged.len());
    disk.stop();
    // A slab that was being allocated when the process was killed may be left, at most one each time.
    rack.text(&["disk", "delete", &pointer]);
    assert!(used_pages(&rack) <= 3 * 256, "{} pages are left", used_pages(&rack));
}

#[test]
fn a_memory_server_that_is_killed_fails_its_slabs_until_it_is_back() {
    let rack = TestRack::up("disk-server", &["--memory", "64M"]);
    let disk = Serving::start(
        &rack,
        &["--size", "16M", "--slab", "1M", "--placement", "striped", "--deadline", "1s"],
    );
    let mut peer = Peer::connect(&rack);
    for slab in 0..4_u64 {
        peer.write(slab << 20, &block(slab + 1)).expect("there is room");
    }
    // The map is on one server, and slabs alternate between both.
    let (home, lost) = servers(&rack, disk.pointer());
    rack.text(&["rack", "kill", &lost]);
    let results: Vec<_> = (0..4_u64).map(|slab| peer.read(slab << 20, BLOCK)).collect();
    let failed: Vec<_> = (0..4).filter(|slab| results[*slab] == Err(5)).collect();
    assert!(failed == [0, 2] || failed == [1, 3], "{failed:?}");
    for slab in (0..4_u64).filter(|slab| !failed.contains(&usize::try_from(*slab).expect("few"))) {
        assert_eq!(results[usize::try_from(slab).expect("few")], Ok(block(slab + 1)));
        peer.write((slab << 20) + 8192, &block(9)).expect("its server is there");
    }
    rack.text(&["rack", "restart", &lost, "--keep"]);
    for slab in 0..4_u64 {
        let mut read = peer.read(slab << 20, BLOCK);
        until("its server is used again", || {
            if read.is_err() {
                read = peer.read(slab << 20, BLOCK);
            }
            read.is_ok()
        });
        assert_eq!(read, Ok(block(slab + 1)));
    }
    // The server of the map: nothing can be done without the lease on it, until the server is back.
    rack.text(&["rack", "kill", &home]);
    until("the lease has ended", || {
        peer.read(0, BLOCK) == Err(5) && peer.read(1 << 20, BLOCK) == Err(5)
    });
    // Another process waits for the server, too. Its restart must not make that one the owner: the first one lives.
    let place = rack.scratch.path().join("other");
    let place = place.to_str().expect("an ASCII path");
    let words = ["disk", "--attach", disk.pointer(), "--as", "c2", "--socket", place];
    let mut other = rack.command(&[&words[..], &["--lock", "no", "--deadline", "6s"]].concat());
    let other = other.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("starts");
    rack.text(&["rack", "restart", &home, "--keep"]);
    for slab in 0..4_u64 {
        until("the disk is used again", || peer.read(slab << 20, BLOCK) == Ok(block(slab + 1)));
    }
    peer.write(9 << 20, &block(10)).expect("the map can be changed again");
    let refused = other.wait_with_output().expect("our own child");
    let words = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(3), "{words}");
    assert!(words.contains("serves this disk"), "{words}");
    assert_eq!(peer.read(9 << 20, BLOCK), Ok(block(10)));
    let log = said(&rack);
    assert!(log.contains("the disk is this process's again"), "{log}");
    for words in ["a memory server does not respond", "a memory server responds again"] {
        assert!((1..=2).contains(&log.matches(words).count()), "{words}: {log}");
    }
    disk.stop();
}
