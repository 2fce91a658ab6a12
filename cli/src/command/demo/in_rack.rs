//! The demo with real daemons in network namespaces.

mod hand_over;

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, ensure};
use bluebridge::{Client, Error, Placement, Pointer};
use bluebridge_controller::driver::OpenFlowAddress;
use bluebridge_rack::control::controller_status;
use bluebridge_rack::control::tables::{self, SwitchTables, TableLine};
use bluebridge_rack::daemon::{CONTROLLER, DEVICE_ID, MEMORY_SERVER, READY_DEADLINE};
use bluebridge_rack::layout::{OPENFLOW, P4RUNTIME};
use bluebridge_rack::process;
use bluebridge_rack::spec::{ByteSize, DataPlane, LinkMtus, Node, RackSpec, Redirects};
use bluebridge_rack::state::RACK_VARIABLE;
use bluebridge_rack::{Cancel, GRACE, Rack, Site};
use bluebridge_transport::udp::UdpTransport;
use bluebridge_wire::Space;

pub(super) use self::hand_over::HandOver;
use super::acts::Cast;
use super::screen::Screen;
use super::{ControllerRestart, KeptMemory, Mode, Summary, latency};
use crate::command::interrupt;
use crate::command::member::{identity_in, join_as_owner};
use crate::command::switch::openflow::read_tables;
use crate::command::switch_control::{TABLE_COLUMNS, port_names, table_rows};

/// Time limit of each operation.
const DEADLINE: Duration = Duration::from_secs(3);

/// How long a client retries a server that is gone.
const PATIENCE: Duration = Duration::from_secs(1);

/// How long clients poll for responses. The kernel's switch needs no processor of its own; the soft
/// one does, so a client must not occupy it.
const SPIN: [(DataPlane, Duration); 4] = [
    (DataPlane::Bmv2, Duration::from_micros(50)),
    (DataPlane::Ebpf, Duration::from_millis(2)),
    (DataPlane::Ovs, Duration::from_micros(50)),
    (DataPlane::Soft, Duration::from_micros(50)),
];

/// The memory of each server.
const MEMORY_BYTES: u64 = 32 << 20;

/// How long the controller is dead.
const DEAD: Duration = Duration::from_millis(400);

/// The server that is stopped.
const VICTIM: u16 = 3;

type Clients = Cast<UdpTransport>;

pub(super) fn show(
    site: &Site,
    switch: Option<DataPlane>,
    screen: &mut Screen,
) -> anyhow::Result<Summary> {
    let program = std::env::current_exe().context("cannot find this program's own path")?;
    let cancel = interrupt::watch().context("cannot watch for signals")?;
    let was_there = site.state_root().path().exists();
    let data_plane = switch.unwrap_or_else(|| site.data_plane());
    let shown = play(site, data_plane, program, &cancel, screen);
    if !was_there {
        // If another rack was created meanwhile, this fails and the directory stays.
        let _ = std::fs::remove_dir(site.state_root().path());
    }
    shown
}

fn play(
    site: &Site,
    data_plane: DataPlane,
    program: PathBuf,
    cancel: &Cancel,
    screen: &mut Screen,
) -> anyhow::Result<Summary> {
    let mut stage = Stage::build(site, data_plane, program, cancel, screen)?;
    let mut clients = stage.clients()?;

    screen.step("A pointer is an address")?;
    let pointer = clients.pointer(screen)?;

    screen.step("The switch is the directory")?;
    let before = stage.tables(screen)?;
    cancel.check()?;

    screen.step("Two clients, three servers: the clients share only a pointer")?;
    clients.share(screen)?;
    cancel.check()?;

    screen.step("Any size, across pages")?;
    let transferred_bytes = clients.sizes(screen)?;
    cancel.check()?;

    screen.step("Atomics")?;
    clients.atomics(screen)?;
    cancel.check()?;

    screen.step("A page gets another owner")?;
    let hand_over = stage.hand_over(&mut clients, screen)?;
    cancel.check()?;

    screen.step("A freed pointer is refused")?;
    let stale_pointer = clients.stale(screen)?;
    cancel.check()?;

    screen.step("Latency")?;
    let node = clients.node(0)?;
    let latency = latency::measure(&mut clients.first, node, how(data_plane), screen, cancel)?;

    screen.step("The switch counted")?;
    let directory_packets = stage.counters(&before, screen)?;

    screen.step("The controller is killed; data traffic continues")?;
    let controller_restart = stage.kill_controller(&mut clients, screen)?;
    cancel.check()?;

    screen.step("A server is stopped")?;
    let stopped_server = stage.stop_server(&mut clients, screen)?;
    cancel.check()?;

    screen.step("The server is killed, and comes back with its memory")?;
    let kept_memory = stage.return_server(&mut clients, screen)?;
    cancel.check()?;

    screen.step("Clean-up")?;
    drop(clients);
    let left_over = stage.take_down(screen)?;
    Ok(Summary {
        mode: Mode::Root,
        switch: data_plane.as_str(),
        seconds: 0.0,
        pointer: pointer.to_string(),
        entry_count: before.len(),
        transferred_bytes,
        hand_over: Some(hand_over),
        stale_pointer,
        latency,
        directory_packets: Some(directory_packets),
        controller_restart: Some(controller_restart),
        stopped_server,
        kept_memory: Some(kept_memory),
        left_over,
    })
}

/// Context for the reader of a latency.
fn how(data_plane: DataPlane) -> &'static str {
    match data_plane {
        DataPlane::Bmv2 => "BMv2 is made for tests of P4 programs, not for speed",
        DataPlane::Ebpf => "client and server poll, and the switch runs on the sender's core",
        DataPlane::Ovs => "Open vSwitch forwards in a process of its own",
        DataPlane::Soft => {
            "the soft switch is a separate process, and on few processors every hop waits for a wake-up"
        }
    }
}

/// The rack, and what is needed to change it.
struct Stage<'a> {
    rack: Rack,
    program: PathBuf,
    cancel: &'a Cancel,
}

impl<'a> Stage<'a> {
    fn build(
        site: &Site,
        data_plane: DataPlane,
        program: PathBuf,
        cancel: &'a Cancel,
        screen: &mut Screen,
    ) -> anyhow::Result<Self> {
        screen
            .step("A rack on this machine: a switch, a controller, three servers, two clients")?;
        let start = Instant::now();
        let spec = RackSpec {
            name: format!("demo-{}", std::process::id()).parse()?,
            servers: 3,
            clients: 2,
            mtu: LinkMtus::default(),
            switch: data_plane,
            memory: ByteSize(MEMORY_BYTES),
            redirects: Redirects::default(),
            direct_reads: true,
        };
        let mut rack = Rack::build(site, spec, cancel.clone())?;
        rack.start_daemons(&program, READY_DEADLINE)?;
        let rows = rack.state().daemons.iter().map(|daemon| {
            vec![
                daemon.name.clone(),
                daemon.process.as_ref().map_or_else(String::new, |it| it.pid.to_string()),
                format!("bb-{}-{}", rack.spec().name, daemon.node),
            ]
        });
        screen.table(&["process", "pid", "network namespace"], rows.collect())?;
        screen.say(&format!(
            "   Real processes, connected by virtual Ethernet links of {} bytes to a switch ({}). Ready after {:.1} s.",
            rack.spec().mtu,
            data_plane.as_str(),
            start.elapsed().as_secs_f64()
        ))?;
        Ok(Self { rack, program, cancel })
    }

    /// Joins both clients, each in its namespace.
    fn clients(&self) -> anyhow::Result<Clients> {
        let spin = SPIN.iter().find(|(plane, _)| *plane == self.rack.spec().switch);
        let spin = spin.map_or(Duration::ZERO, |(_, spin)| *spin);
        let session = |node| {
            let identity = identity_in(self.rack.state(), node, Space(1))?;
            let joined =
                self.rack.enter(node, || join_as_owner(&identity, DEADLINE, Some(spin)))?;
            joined.with_context(|| format!("{node} cannot join"))
        };
        let (first, second) = (session(Node::Client(1))?, session(Node::Client(2))?);
        let mut nodes: Vec<_> =
            first.nodes.iter().map(|node| (node.name.clone(), node.node)).collect();
        nodes.sort();
        ensure!(nodes.len() == 3, "{} memory nodes joined instead of 3", nodes.len());
        Ok(Cast { first: first.client, second: second.client, nodes })
    }

    fn read_tables(&self) -> anyhow::Result<SwitchTables> {
        let names = port_names(self.rack.layout());
        match self.rack.spec().switch {
            DataPlane::Bmv2 | DataPlane::Ebpf | DataPlane::Soft => {
                let read = || tables::read(P4RUNTIME.into(), DEVICE_ID, &names);
                Ok(self.rack.enter(Node::Switch, read)??)
            }
            DataPlane::Ovs => {
                let address = OpenFlowAddress::Connect(OPENFLOW.into());
                self.rack.enter(Node::Switch, || read_tables(address.into(), &names))?
            }
        }
    }

    fn tables(&self, screen: &Screen) -> anyhow::Result<Vec<TableLine>> {
        let lines = self.read_tables()?.lines;
        let protocol = match self.rack.spec().switch {
            DataPlane::Bmv2 | DataPlane::Ebpf | DataPlane::Soft => "P4Runtime",
            DataPlane::Ovs => "OpenFlow",
        };
        screen.say(&format!(
            "   The controller installed these entries when the nodes joined. `directory` forwards a pointer to \
             its home by the longest prefix, without a directory server, and `ingress_guard` prevents nodes \
             from using each other's addresses. Read from the switch over {protocol}:",
        ))?;
        screen.table(&TABLE_COLUMNS, table_rows(&lines))?;
        Ok(lines)
    }

    /// What the switch counted since `before`; returns the directory's packets.
    fn counters(&self, before: &[TableLine], screen: &Screen) -> anyhow::Result<u64> {
        let mut directory_packets = 0;
        let mut moved = Vec::new();
        let reading = self.read_tables()?;
        for mut line in reading.lines {
            let same = |old: &&TableLine| (old.table, &old.matches) == (line.table, &line.matches);
            let (packets, bytes) =
                before.iter().find(same).map_or((0, 0), |old| (old.packets, old.bytes));
            // Counters start again when an entry is rewritten, as that of `anycast` is with its weights.
            line.packets = line.packets.checked_sub(packets).unwrap_or(line.packets);
            line.bytes = line.bytes.checked_sub(bytes).unwrap_or(line.bytes);
            if line.table == "directory" {
                directory_packets += line.packets;
            }
            if line.packets > 0 && line.table != "l2" {
                moved.push(line);
            }
        }
        ensure!(directory_packets > 0, "the directory counted nothing");
        screen.table(&TABLE_COLUMNS, table_rows(&moved))?;
        let dropped: u64 = reading.drops.values().sum();
        screen.say(&format!("   Frames dropped by the switch so far: {dropped}."))?;
        Ok(directory_packets)
    }

    fn kill_controller(
        &mut self,
        clients: &mut Clients,
        screen: &Screen,
    ) -> anyhow::Result<ControllerRestart> {
        let node = clients.node(0)?;
        let region = clients.first.alloc_write_at(b"still here", Placement::Node(node))?;
        let pointer = region.base();
        let nodes = self.members()?;
        let stop = AtomicBool::new(false);
        let second = &mut clients.second;
        let (log, restarted) = thread::scope(|scope| {
            let reading = scope.spawn(|| Reading::until(&stop, second, pointer));
            let restarted = self.restart_controller(screen);
            stop.store(true, Ordering::Relaxed);
            (reading.join(), restarted)
        });
        let took = restarted?;
        let log = log.map_err(|_| anyhow!("the reading client panicked"))?;
        let same_nodes = nodes == self.members()?;
        ensure!(log.failed == 0, "{} of {} reads failed: {:?}", log.failed, log.count, log.error);
        ensure!(same_nodes, "nodes got other ids: {nodes:?}");
        clients.first.delete(region)?;
        screen.say(&format!(
            "   Killed, dead for {:.1} s, running again after another {:.1} s. Meanwhile c2 read {} times without an \
             error; the longest read took {:.0} us. Every node still has its id and incarnation.",
            DEAD.as_secs_f64(),
            took.as_secs_f64(),
            log.count,
            log.longest.as_secs_f64() * 1e6
        ))?;
        Ok(ControllerRestart {
            reads: log.count,
            failed_reads: log.failed,
            longest_read_us: log.longest.as_secs_f64() * 1e6,
            same_nodes,
        })
    }

    /// Kills the controller and starts it again; returns how long the start took.
    fn restart_controller(&mut self, screen: &Screen) -> anyhow::Result<Duration> {
        thread::sleep(Duration::from_millis(100));
        self.rack.stop_daemon(CONTROLLER, Duration::ZERO)?;
        let address = self.rack.layout().controller().into();
        if let Err(error) = self.rack.enter(Node::Switch, || controller_status(address))? {
            screen.say(&format!("   An operator sees: {error}."))?;
        } else {
            return Err(anyhow!("the controller responds although it was killed"));
        }
        thread::sleep(DEAD);
        self.cancel.check()?;
        let start = Instant::now();
        self.rack.restart_daemon(&self.program, CONTROLLER, &[], READY_DEADLINE)?;
        Ok(start.elapsed())
    }

    /// Name, id and incarnation of every member.
    fn members(&self) -> anyhow::Result<Vec<(String, u32, u32)>> {
        let address = self.rack.layout().controller().into();
        let status = self.rack.enter(Node::Switch, || controller_status(address))??;
        let members = status.nodes.into_iter();
        Ok(members.map(|node| (node.name, node.node, node.incarnation)).collect())
    }

    fn stop_server(&mut self, clients: &mut Clients, screen: &Screen) -> anyhow::Result<String> {
        let victim = clients.node(usize::from(VICTIM) - 1)?;
        let lost = clients.first.alloc_write_at(b"gone soon", Placement::Node(victim))?;
        let node = clients.node(0)?;
        let kept = clients.first.alloc_write_at(b"safe", Placement::Node(node))?;
        self.rack.stop_daemon(&format!("{MEMORY_SERVER}-{}", Node::Server(VICTIM)), GRACE)?;
        clients.second.set_deadline(PATIENCE);
        let start = Instant::now();
        let error = match clients.second.read(lost.base(), &mut [0; 9]) {
            Err(error @ (Error::Unreachable { .. } | Error::Refused { .. })) => error,
            Err(error) => return Err(error).context("a stopped server must be unreachable"),
            Ok(()) => return Err(anyhow!("a stopped server responded")),
        };
        let waited = start.elapsed();
        clients.second.set_deadline(DEADLINE);
        let mut bytes = [0; 4];
        clients.second.read(kept.base(), &mut bytes)?;
        ensure!(&bytes == b"safe", "another server's memory changed");
        clients.first.delete(kept)?;
        screen.say(&format!(
            "   s{VICTIM} (node {victim}) was stopped. c2, with a deadline of {:.0} s per call, reads {}:\n\n      {error}\n      \
             (after {:.2} s; fault: {:?})\n\n   Memory on the other servers is unchanged.",
            PATIENCE.as_secs_f64(),
            lost.base(),
            waited.as_secs_f64(),
            error.fault()
        ))?;
        Ok(error.to_string())
    }

    /// Starts the server that was stopped, writes to it, kills it, and looks for what was written.
    fn return_server(
        &mut self,
        clients: &mut Clients,
        screen: &Screen,
    ) -> anyhow::Result<KeptMemory> {
        let server = format!("{MEMORY_SERVER}-{}", Node::Server(VICTIM));
        self.rack.restart_daemon(&self.program, &server, &[], READY_DEADLINE)?;
        let victim = clients.node(usize::from(VICTIM) - 1)?;
        let region = clients.first.alloc_write_at(b"acknowledged", Placement::Node(victim))?;
        let start = Instant::now();
        self.rack.kill_daemon(&server)?;
        self.rack.restart_daemon(&self.program, &server, &[], READY_DEADLINE)?;
        let mut bytes = [0; 12];
        let read = clients.second.read(region.base(), &mut bytes);
        let took = start.elapsed();
        let is_kept = match read {
            Ok(()) => {
                ensure!(&bytes == b"acknowledged", "acknowledged bytes were lost");
                clients.first.delete(region)?;
                screen.say(&format!(
                    "   c1 wrote \"acknowledged\" to s{VICTIM}, which was killed and started again. {:.0} ms after the \
                     kill, c2 has read it at {}.\n   The memory was in a file in /dev/shm; the clients did nothing.",
                    took.as_secs_f64() * 1e3,
                    region.base()
                ))?;
                true
            }
            Err(Error::Refused { .. }) => {
                screen.say(&format!(
                    "   This machine has no room in /dev/shm, so s{VICTIM} lost its memory with its process, and the \
                     pointer is refused."
                ))?;
                false
            }
            Err(error) => return Err(error.into()),
        };
        Ok(KeptMemory { is_kept, until_read_ms: took.as_secs_f64() * 1e3 })
    }

    /// Takes the rack down and looks for leftovers.
    fn take_down(self, screen: &Screen) -> anyhow::Result<Vec<String>> {
        let id = self.rack.state().id.clone();
        let mut paths: Vec<PathBuf> =
            self.rack.state().namespaces.iter().map(|record| record.path.clone()).collect();
        paths.extend(self.rack.state().bpf_directory.clone());
        let taken = self.rack.take_down()?;
        let mut left_over: Vec<String> = paths
            .iter()
            .filter(|path| path.exists())
            .map(|path| path.display().to_string())
            .collect();
        let processes = process::find(|pid| process::has_environment(pid, RACK_VARIABLE, &id));
        left_over.extend(processes.iter().map(|it| format!("process {}", it.pid)));
        screen.say(&format!(
            "   {} processes stopped, {} namespaces removed. Left behind: {}.",
            taken.daemons.len(),
            taken.namespace_count,
            if left_over.is_empty() { "nothing".to_owned() } else { left_over.join(", ") }
        ))?;
        Ok(left_over)
    }
}

/// The results of a client that read continuously.
#[derive(Default)]
struct Reading {
    count: u64,
    failed: u64,
    longest: Duration,
    error: Option<String>,
}

impl Reading {
    fn until(stop: &AtomicBool, client: &mut Client<UdpTransport>, pointer: Pointer) -> Self {
        let mut log = Self::default();
        while !stop.load(Ordering::Relaxed) {
            let mut bytes = [0; 10];
            let start = Instant::now();
            let failure = match client.read(pointer, &mut bytes) {
                Ok(()) if &bytes == b"still here" => None,
                Ok(()) => Some("other bytes than were written".to_owned()),
                Err(error) => Some(error.to_string()),
            };
            log.count += 1;
            log.longest = log.longest.max(start.elapsed());
            if failure.is_some() {
                log.failed += 1;
                log.error = failure;
            }
            // Some machines have only two processors, and the controller starts meanwhile.
            thread::sleep(Duration::from_micros(200));
        }
        log
    }
}
