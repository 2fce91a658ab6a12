//! Unmodified programs with remote memory.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use bluebridge_testkit::until;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::test_rack::TestRack;

/// Debian's own, as its packages use it.
const PYTHON: &str = "/usr/bin/python3";
/// Set in the process of the test that is the program.
const STRESS: &str = "BLUEBRIDGE_TEST_STRESS";

/// Whether no server holds memory of the clients.
fn is_all_free(rack: &TestRack) -> bool {
    let servers = rack.json(&["stat"]);
    let servers = servers.as_array().expect("a list");
    servers.iter().all(|server| server["capacity_pages"] == server["free_pages"])
}

fn run(rack: &TestRack, options: &[&str], program: &[&str]) -> Output {
    rack.call(&[&["run", "--size", "1G", "--json"], options, &["--"], program].concat())
}

/// What the program's processes did, by name, from the last line of the error output.
fn summary(output: &Output, program: &str) -> Value {
    let said = String::from_utf8_lossy(&output.stderr);
    let line = said.lines().rfind(|line| line.starts_with('{')).unwrap_or_else(|| panic!("{said}"));
    let document: Value = serde_json::from_str(line).expect("JSON");
    assert_eq!(document["not_freed"], 0, "{said}");
    let programs = document["programs"].as_array().expect("a list");
    let named = programs.iter().find(|one| one["name"] == program);
    named.unwrap_or_else(|| panic!("{program} is missing: {said}")).clone()
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is not a number"))
}

#[track_caller]
fn assert_well(output: &Output, words: &str) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {said}", output.status);
    assert!(String::from_utf8_lossy(&output.stdout).contains(words), "{said}");
}

#[test]
fn a_file_is_sorted_and_a_database_is_whole_with_little_local_memory() {
    let rack = TestRack::up("run-programs", &["--memory", "256M"]);
    let (file, sorted) = (rack.scratch.path().join("lines"), rack.scratch.path().join("sorted"));
    let mut random = SmallRng::seed_from_u64(1);
    let mut lines: Vec<String> = (0..60_000).map(|_| random.random::<u64>().to_string()).collect();
    std::fs::write(&file, lines.join("\n") + "\n").expect("written");
    lines.sort();
    let (file, target) = (file.to_str().expect("text"), sorted.to_str().expect("text"));
    let program = ["env", "LC_ALL=C", "sort", "-S", "32M", "--parallel=2", "-o", target, file];
    let output = run(&rack, &["--local", "1M"], &program);
    assert_well(&output, "");
    let is_same = std::fs::read_to_string(&sorted).expect("written") == lines.join("\n") + "\n";
    assert!(is_same, "the file is not sorted");
    let sort = summary(&output, "sort");
    assert!(number(&sort["faults"]["remote"]) > 100, "{sort}");
    assert!(number(&sort["local_bytes_max"]) <= 1 << 20, "{sort}");
    let book = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/json.md");
    let book = std::fs::read_to_string(book).expect("the chapter is there");
    let fields = [&sort, &sort["faults"]].map(|part| part.as_object().expect("an object").keys());
    for field in fields.into_iter().flatten() {
        assert!(book.contains(&format!("\"{field}\": ")), "{field} is not in docs/json.md");
    }

    let database = "
import random, sqlite3
random.seed(2)
base = sqlite3.connect(':memory:')
base.execute('create table words (id integer primary key, word text)')
rows = [(i, 'x' * random.randint(10, 100) + str(i)) for i in range(20000)]
base.executemany('insert into words values (?, ?)', rows)
base.execute('create index by_word on words (word)')
assert base.execute('pragma integrity_check').fetchone()[0] == 'ok'
assert list(base.execute('select * from words order by id')) == rows
print('whole')
";
    let output = run(&rack, &["--local", "2M", "--remote", "s2"], &[PYTHON, "-c", database]);
    assert_well(&output, "whole");
    let python = summary(&output, "python3");
    assert!(number(&python["bytes_written"]) > 1 << 20, "{python}");
    assert!(is_all_free(&rack));
}

#[test]
fn processes_that_fork_go_on_with_their_contents() {
    let rack = TestRack::up("run-forks", &["--memory", "256M", "--switch", "soft"]);
    let forks = "
import os, subprocess, sys
COUNT = 3000
def block(number): return bytes([number % 251]) * 4000
blocks = [block(i) for i in range(COUNT)]
def check(odd): return all(b == (odd if i % 3 == 0 else block(i)) if odd else b == block(i)
                           for i, b in enumerate(blocks))
children = []
for turn in range(3):
    child = os.fork()
    if child == 0:
        well = check(None)
        for i in range(0, COUNT, 3): blocks[i] = b'odd'
        grandchild = os.fork()
        if grandchild == 0:
            well = well and check(b'odd')
            os._exit(0 if well else 1)
        _, status = os.waitpid(grandchild, 0)
        os._exit(0 if well and status == 0 and check(b'odd') else 1)
    children.append(child)
    for i in range(turn, COUNT, 5): blocks[i] = block(i)
for child in children:
    _, status = os.waitpid(child, 0)
    assert status == 0, status
assert check(None)
shell = subprocess.run(['sh', '-c', 'echo $(seq 5)'], capture_output=True, text=True)
print('forked', shell.stdout.strip())
";
    let output = run(&rack, &["--local", "4M"], &[PYTHON, "-c", forks]);
    assert_well(&output, "forked 1 2 3 4 5");
    let python = summary(&output, "python3");
    assert_eq!(python["processes"], 7, "{python}");
    assert!(number(&python["faults"]["remote"]) > 100, "{python}");
    let lines = run(
        &rack,
        &["--local", "1M"],
        &[
            "bash",
            "-c",
            "seq 500 | while read i; do echo $((i * 2)); done | tail -1; (echo sub; exec env printf done)",
        ],
    );
    assert_well(&lines, "1000\nsub\ndone");
    assert!(is_all_free(&rack));
}

#[test]
fn mappings_can_be_protected_discarded_resized_and_reused() {
    let rack = TestRack::up("run-mappings", &["--memory", "256M"]);
    let mappings = "
import ctypes, errno, mmap
system = ctypes.CDLL(None, use_errno=True)
private = dict(flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
SIZE, MIB = 8 << 20, 1 << 20
def word(at): return (at + 7).to_bytes(8, 'little')
def check(memory, first):
    for at in range(first, SIZE, 4096):
        assert memory[at:at + 8] == word(at), at
memory = mmap.mmap(-1, SIZE, **private)
for at in range(0, SIZE, 4096): memory[at:at + 8] = word(at)
view = ctypes.c_char.from_buffer(memory)
start = ctypes.c_void_p(ctypes.addressof(view))
assert system.mprotect(start, 4 * MIB, 0) == 0
other = [bytes([i % 251]) * 4000 for i in range(3000)]
assert system.mprotect(start, 4 * MIB, 3) == 0
check(memory, 0)
assert system.madvise(start, MIB, 4) == 0
assert memory[:MIB] == bytes(MIB)
assert system.mlock(start, 4096) == -1 and ctypes.get_errno() == errno.EPERM
del view
memory.resize(4 * SIZE)
assert memory[:MIB] == bytes(MIB) and memory[SIZE:] == bytes(3 * SIZE)
check(memory, MIB)
memory.resize(SIZE)
check(memory, MIB)
memory.close()
assert mmap.mmap(-1, 2 * SIZE, **private)[:] == bytes(2 * SIZE)
assert all(block == bytes([i % 251]) * 4000 for i, block in enumerate(other))
print('as it should be')
";
    let output = run(&rack, &["--local", "4M"], &[PYTHON, "-c", mappings]);
    assert_well(&output, "as it should be");
    let python = summary(&output, "python3");
    assert!(number(&python["faults"]["remote"]) > 100, "{python}");
    assert!(is_all_free(&rack));
}

#[test]
fn what_the_c_library_promises_holds() {
    let rack = TestRack::up("run-corners", &["--memory", "256M"]);
    let file = rack.scratch.path().join("file");
    let corners = "
import ctypes, errno, mmap, os, sys, threading, time
system = ctypes.CDLL(None, use_errno=True)
for name in 'malloc', 'mmap', 'aligned_alloc': getattr(system, name).restype = ctypes.c_void_p
MIB, RW, NEW, FIXED = 1 << 20, 3, 0x22, 0x32
def map_at(start, size, flags):
    return system.mmap(ctypes.c_void_p(start), ctypes.c_size_t(size), RW, flags, -1, 0)
def unmap(start, size): return system.munmap(ctypes.c_void_p(start), ctypes.c_size_t(size))
def advise(start, size, advice):
    return system.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice)
def mark(start, value): ctypes.memset(start, value, 4096)
def seen(start): return ctypes.string_at(start, 4096) == ctypes.string_at(start, 1) * 4096, ctypes.string_at(start, 1)[0]

# Addresses that are given back twice, or taken in a hole, are handed out once.
start = map_at(0, 2 * MIB, NEW)
assert unmap(start, 2 * MIB) == 0 and unmap(start, 2 * MIB) == 0
start = map_at(0, 8 * MIB, NEW)
assert unmap(start + 2 * MIB, 2 * MIB) == 0
assert map_at(start + 2 * MIB, 2 * MIB, FIXED) == start + 2 * MIB
mark(start + 2 * MIB, 77)
others = [map_at(0, 2 * MIB, NEW) for _ in range(32)]
for value, other in enumerate(others): mark(other, value)
assert [seen(other) for other in others] == [(True, value) for value in range(32)]
assert seen(start + 2 * MIB) == (True, 77)
assert unmap(start, -1) == -1 and ctypes.get_errno() == errno.EINVAL
assert advise(start, MIB, 18) == -1, 'MADV_WIPEONFORK is not done'
assert advise(start + 1, 4096, 4) == -1 and advise(start, 4096, 9999) == -1

assert all(system.malloc(size) % 16 == 0 for size in (1, 7, 8, 9, 24) for _ in range(100))
assert system.aligned_alloc(24, 8) % 32 == 0

# A file that is opened for direct access is read whole, whatever leaves meanwhile.
with open(sys.argv[1], 'wb') as written:
    for at in range(12 * 256): written.write((at + 1).to_bytes(8, 'little') * 512)
direct = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT)
buffer = mmap.mmap(-1, 12 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
assert sum(os.preadv(direct, [memoryview(buffer)[at:at + MIB]], at) for at in range(0, 12 * MIB, MIB)) == 12 * MIB
for at in range(12 * 256):
    assert buffer[at * 4096:(at + 1) * 4096] == (at + 1).to_bytes(8, 'little') * 512, at

# The C library clears the values of other threads' keys in a child, before any handler runs.
keys = [ctypes.c_uint() for _ in range(60)]
for key in keys: assert system.pthread_key_create(ctypes.byref(key), None) == 0
blocks = []
def fill():
    for turn in range(2):
        for value in range(200):
            block = system.malloc(512)
            ctypes.memset(block, value + 1, 512)
            blocks.append((block, value + 1))
        for key in keys[32:]: system.pthread_setspecific(key, ctypes.c_void_p(1))
    done.wait()
done = threading.Event()
thread = threading.Thread(target=fill)
thread.start()
while len(blocks) < 400: time.sleep(0.001)
def check_blocks(): return all(ctypes.string_at(block, 512) == bytes([value]) * 512 for block, value in blocks)
def evict(): assert all(block == bytes([i % 251]) * 4000 for i, block in enumerate([bytes([i % 251]) * 4000 for i in range(2500)]))
def join(child):
    _, status = os.waitpid(child, 0)
    assert status == 0, status
evict()
child = os.fork()
if child == 0: os._exit(0 if check_blocks() else 1)
join(child)
child = system._Fork()
if child == 0: os._exit(0 if check_blocks() else 1)
join(child)
done.set()
thread.join()

# More forks than generations, each with changed contents.
data = bytearray(8 * MIB)
for turn in range(1, 25):
    for at in range(0, len(data), 4096): data[at] = turn
    child = os.fork()
    if child == 0: os._exit(0 if all(data[at] == turn for at in range(0, len(data), 4096)) else 1)
    join(child)

# A child that outlives its parent goes on, and is waited for.
pipe, end = os.pipe()
if os.fork() == 0:
    if os.fork() == 0:
        time.sleep(1)
        os.write(end, b'lives' if all(byte == 24 for byte in data[::4096]) else b'wrong')
        os._exit(0)
    os._exit(0)
os.close(end)
assert os.read(pipe, 9) == b'lives'
print('all promises hold')
";
    let program = [PYTHON, "-c", corners, file.to_str().expect("text")];
    let output = run(&rack, &["--local", "4M"], &program);
    assert_well(&output, "all promises hold");
    assert!(is_all_free(&rack));
    // What a shell has ignored stays ignored.
    let ignoring =
        "trap '' HUP; exec \"$0\" run --quiet --local 4M -- sh -c 'kill -HUP $$; echo survived'";
    let mut shell = Command::new("sh");
    shell.args(["-c", ignoring, env!("CARGO_BIN_EXE_bluebridge")]);
    let output = shell.env("BLUEBRIDGE_STATE", rack.state()).output().expect("runs");
    assert_well(&output, "survived");
}

/// The program of the next test: threads that allocate, resize, pass on and free, and check all contents.
fn stress() {
    const THREADS: u64 = 6;
    const KEPT: usize = 300;
    fn fill(data: &mut Vec<u8>, length: usize, value: u8) {
        data.clear();
        data.resize(length, value);
    }
    let passed = std::sync::Mutex::new(VecDeque::<Vec<u8>>::new());
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let passed = &passed;
            scope.spawn(move || {
                let mut random = SmallRng::seed_from_u64(thread);
                let mut kept: Vec<Vec<u8>> = Vec::new();
                for _ in 0..6000 {
                    let length = match random.random_range(0..100) {
                        0..70 => random.random_range(1..300),
                        70..97 => random.random_range(300..20_000),
                        _ => random.random_range(20_000..1_500_000),
                    };
                    let mut data = Vec::new();
                    fill(&mut data, length, random.random());
                    kept.push(data);
                    let at = random.random_range(0..kept.len());
                    let data = &mut kept[at];
                    assert!(data.iter().all(|byte| *byte == data[0]));
                    let (value, length) = (data[0], random.random_range(1..5000));
                    data.resize(length, value);
                    assert!(data.iter().all(|byte| *byte == value));
                    if kept.len() > KEPT / 2 && random.random() {
                        let data = kept.swap_remove(random.random_range(0..kept.len()));
                        let mut passed = passed.lock().expect("no thread panicked");
                        passed.push_back(data);
                        if passed.len() > KEPT {
                            let other = passed.pop_front().expect("there are some");
                            assert!(other.iter().all(|byte| *byte == other[0]));
                        }
                    }
                    if kept.len() > KEPT {
                        kept.swap_remove(random.random_range(0..KEPT));
                    }
                    if random.random_range(0..500) == 0 {
                        assert!(local_kib() <= 4096, "{} KiB are local", local_kib());
                    }
                }
            });
        }
    });
    println!("all contents were right");
}

/// KiB of this process that are local, of those mappings whose faults userfaultfd reports (`um` in `VmFlags`).
fn local_kib() -> u64 {
    let maps = std::fs::read_to_string("/proc/self/smaps").expect("Linux has it");
    let (mut resident, mut sum) = (0, 0);
    for line in maps.lines() {
        let mut words = line.split_ascii_whitespace();
        match words.next() {
            Some("Rss:") => resident = words.next().and_then(|word| word.parse().ok()).unwrap_or(0),
            Some("VmFlags:") if words.any(|flag| flag == "um") => sum += resident,
            _ => {}
        }
    }
    sum
}

#[test]
fn many_threads_allocate_and_the_limit_of_local_memory_holds() {
    if std::env::var_os(STRESS).is_some() {
        return stress();
    }
    let rack = TestRack::up("run-threads", &["--memory", "256M"]);
    let own = std::env::current_exe().expect("it has a path");
    let own = own.to_str().expect("text");
    let name = "root::run::many_threads_allocate_and_the_limit_of_local_memory_holds";
    let program = ["env", &format!("{STRESS}=1"), own, "--exact", name, "--nocapture"];
    let output = run(&rack, &["--local", "4M", "--handlers", "3"], &program);
    assert_well(&output, "all contents were right");
    // The kernel cuts a program's name.
    let program = own.rsplit('/').next().expect("a name").get(..15).expect("a long name");
    let threads = summary(&output, program);
    assert!(number(&threads["faults"]["remote"]) > 1000, "{threads}");
    assert!(number(&threads["local_bytes_max"]) <= 4 << 20, "{threads}");
    assert!(is_all_free(&rack));
}

/// A program that fills some memory, says so, waits for a line, and reads all of it.
const HOLDER: &str = "
import sys
blocks = [bytes([i % 251]) * 4000 for i in range(4000)]
print('filled', flush=True)
sys.stdin.readline()
assert all(b == bytes([i % 251]) * 4000 for i, b in enumerate(blocks))
print('right')
";

/// The program, when it has filled its memory.
struct Holder {
    child: std::process::Child,
    output: BufReader<std::process::ChildStdout>,
}

impl Holder {
    fn start(rack: &TestRack, options: &[&str]) -> Self {
        let arguments =
            [&["run", "--size", "1G", "--local", "4M"], options, &["--", PYTHON, "-c", HOLDER]];
        let mut command: Command = rack.command(&arguments.concat());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("starts");
        let mut output = BufReader::new(child.stdout.take().expect("piped"));
        let mut line = String::new();
        output.read_line(&mut line).expect("it says something");
        assert_eq!(line, "filled\n");
        Self { child, output }
    }

    /// Lets it go on; its exit code, and what it said.
    fn finish(mut self) -> (Option<i32>, String) {
        // It may have ended.
        let _ = self.child.stdin.take().expect("piped").write_all(b"\n");
        let mut said = String::new();
        for line in self.output.lines() {
            writeln!(said, "{}", line.expect("text")).expect("a string takes it");
        }
        let ended = self.child.wait_with_output().expect("ends");
        said += &String::from_utf8_lossy(&ended.stderr);
        (ended.status.code(), said)
    }
}

#[test]
fn a_program_ends_by_sigbus_if_its_contents_are_lost_and_waits_if_a_server_is_away() {
    let rack = TestRack::up("run-lost", &["--memory", "128M", "--servers", "1"]);
    let holder = Holder::start(&rack, &["--wait"]);
    rack.text(&["rack", "kill", "controller"]);
    let (code, said) = holder.finish();
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("right") && said.contains("remote memory of python3"), "{said}");
    rack.text(&["rack", "restart", "controller"]);

    let holder = Holder::start(&rack, &["--fault-deadline", "2s"]);
    rack.text(&["rack", "kill", "s1"]);
    rack.text(&["rack", "restart", "s1"]);
    let (code, said) = holder.finish();
    // 128 + SIGBUS, as in a shell.
    assert_eq!(code, Some(135), "{said}");
    assert!(said.contains("bluebridge: the memory at 0x"), "{said}");
    assert!(!said.contains("right"), "{said}");

    // What it leaves cannot be freed, but what it did is known.
    let holder = Holder::start(&rack, &["--fault-deadline", "1s"]);
    rack.text(&["rack", "kill", "s1"]);
    let (code, said) = holder.finish();
    assert_eq!(code, Some(135), "{said}");
    assert!(said.contains("could not be freed"), "{said}");
    assert!(said.contains("remote memory of python3"), "{said}");
    assert!(!said.contains("did not load"), "{said}");
}

#[test]
fn what_a_killed_program_leaves_is_freed_and_signals_are_passed_on() {
    let rack = TestRack::up("run-killed", &["--memory", "128M"]);
    let kill = format!("{HOLDER}\nimport os\nos.kill(os.getpid(), 9)");
    let output = run(&rack, &["--local", "4M"], &[PYTHON, "-c", &kill]);
    assert_eq!(output.status.code(), Some(137));
    assert!(String::from_utf8_lossy(&output.stdout).contains("right"));
    // It could not say at its end what it did.
    let python = summary(&output, "python3");
    assert!(number(&python["bytes_read"]) > 0, "{python}");
    assert!(is_all_free(&rack));

    let holder = Holder::start(&rack, &["--quiet"]);
    assert!(!is_all_free(&rack), "the program holds remote memory");
    let supervisor = Pid::from_child(&holder.child);
    kill_process(supervisor, Signal::TERM).expect("our own child");
    let (code, said) = holder.finish();
    assert_eq!(code, Some(143), "{said}");
    assert!(!said.contains("right") && !said.contains("remote memory"), "{said}");
    assert!(is_all_free(&rack));

    // Who is killed itself cannot free the memory, but the program goes on.
    let mut holder = Holder::start(&rack, &[]);
    // `wait` would close it.
    let mut input = holder.child.stdin.take().expect("piped");
    holder.child.kill().expect("our own child");
    holder.child.wait().expect("our own child");
    let _ = input.write_all(b"\n");
    let mut line = String::new();
    holder.output.read_line(&mut line).expect("it goes on");
    assert_eq!(line, "right\n");
    until("the endpoint's memory can be freed", || {
        std::thread::sleep(Duration::from_millis(200));
        rack.call(&["purge", "--all"]).status.success() && is_all_free(&rack)
    });
}

/// Such as a process substitution of the shell that this command has replaced.
#[test]
fn children_that_are_not_the_programs_are_not_waited_for() {
    let rack = TestRack::up("run-strangers", &["--memory", "64M", "--switch", "soft"]);
    let background = "import subprocess; subprocess.Popen(['sh', '-c', 'sleep 1; echo done'])";
    let run = rack.command(&["run", "--size", "1G", "--", PYTHON, "-c", background]);
    let mut shell = Command::new("sh");
    shell.args(["-c", "sleep 1000 >/dev/null 2>&1 & echo $!; exec \"$@\"", "sh"]);
    shell.arg(run.get_program()).args(run.get_args());
    for (name, value) in run.get_envs() {
        match value {
            Some(value) => shell.env(name, value),
            None => shell.env_remove(name),
        };
    }
    let output = shell.output().expect("starts");
    assert_well(&output, "done");
    let said = String::from_utf8_lossy(&output.stdout);
    let stranger = said.lines().next().and_then(|id| id.parse().ok()).and_then(Pid::from_raw);
    kill_process(stranger.expect("a process"), Signal::KILL).expect("it goes on");
}

#[test]
fn exit_codes_are_the_programs_and_mistakes_are_named() {
    let rack = TestRack::up("run-usage", &["--memory", "64M", "--switch", "soft"]);
    assert_eq!(run(&rack, &[], &["sh", "-c", "exit 7"]).status.code(), Some(7));
    let cases: [(&[&str], &[&str], i32, &str); 6] = [
        (&["--size", "1G", "--local", "1G"], &["true"], 2, "at most half of --size"),
        (&["--size", "16M", "--local", "1M"], &["true"], 2, "--size must be"),
        (&["--remote", "s9"], &["true"], 2, "no memory node s9"),
        (&["--library", "nowhere.so"], &["true"], 1, "looked for nowhere.so"),
        (&[], &["no-such-program"], 127, "no-such-program"),
        (&[], &["/etc/passwd"], 126, "/etc/passwd"),
    ];
    for (options, program, code, words) in cases {
        let arguments = [&["run"], options, &["--"], program].concat();
        let (ended, said) = rack.failure(&arguments);
        assert_eq!(ended, Some(code), "{options:?} {program:?}: {said}");
        assert!(said.contains(words), "{options:?} {program:?}: {said}");
    }
}
