//! Racks whose endpoints are machines: each has a kernel of its own. The soft switch joins them over sockets, the
//! switch in the kernel over tap interfaces.

use std::{
    fs::{self, File},
    path::PathBuf,
    process::{Child, Command, Stdio},
};

use bluebridge_switch::socket_link::SocketLink;
use bluebridge_testkit::{Scratch, ip, namespace::in_child, program, require_root};
use bluebridge_vm::{Installed, Kernel, Link, Machine, Output, run_together};

use crate::installed;

const CONTROLLER: &str = "[fd00:bb:7::1]:7700";
/// The controller's port of the switch; machine N has port N + 1.
const CONTROLLER_PORT: u16 = 1;
/// Bytes of the long transfer, of which each piece fills a frame.
const LONG: usize = 1_000_003;

/// What a machine does to be an endpoint.
const HOST: &str = r#"
set -eu
ip link set eth0 up
ip -6 addr add "fd00:bb:7::1:$VM/64" dev eth0 nodad
"$BLUEBRIDGE" host up --interface eth0
"#;

const SERVER: &str = r#"
"$BLUEBRIDGE" memserver --name s1 --memory 16M &
vm-barrier written
vm-barrier done
kill $!
wait $!
"#;

/// Its memory is in huge pages, and it is killed while the client uses it.
const SERVER_IN_HUGE_PAGES: &str = r#"
echo 16 >/proc/sys/vm/nr_hugepages
mkdir /huge
mount -t hugetlbfs none /huge
options="--name s1 --arena-file /huge/arena"
code=0
"$BLUEBRIDGE" memserver $options --memory 64M 2>/tmp/refused || code=$?
cat /tmp/refused
[ $code = 1 ]
grep -q "the system's pool has too few free huge pages of 2048 KiB" /tmp/refused
grep -q "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages" /tmp/refused
[ -z "$(ls /huge)" ]
# What a process leaves that is killed before its file has a header.
: >/huge/arena.making
"$BLUEBRIDGE" memserver $options --memory 16M &
vm-barrier written
kill -9 $!
wait $! || true
"$BLUEBRIDGE" memserver $options --memory 16M --claim on-demand 2>/tmp/log &
vm-barrier done
kill $!
wait $!
cat /tmp/log
grep -q "page_kind=Huge" /tmp/log
[ "$(ls /huge)" = arena ]
# Its own pages, also those that are only reserved for it, are there for its new contents.
echo 9 >/proc/sys/vm/nr_hugepages
"$BLUEBRIDGE" memserver $options --memory 16M --claim lock --fresh 2>/tmp/log &
until grep -q "joined the rack" /tmp/log; do
    kill -0 $!
    sleep 0.2
done
kill $!
wait $!
echo 16 >/proc/sys/vm/nr_hugepages
"$BLUEBRIDGE" arena drop /huge/arena
[ "$(cat /sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages)" = 16 ]
"#;

const CLIENT: &str = r#"
tries=0
until P=$("$BLUEBRIDGE" create 10000 --on s1); do
    tries=$((tries + 1))
    [ $tries -lt 60 ]
    sleep 0.2
done
"$BLUEBRIDGE" write "$P" "far away"
[ "$("$BLUEBRIDGE" read "$P" --length 8)" = "far away" ]
"$BLUEBRIDGE" update "$P" --set "MY TURN!"
[ "$("$BLUEBRIDGE" read "$P" --length 8)" = "MY TURN!" ]
L=$("$BLUEBRIDGE" alloc-write --on s1 --file long)
vm-barrier written
[ "$("$BLUEBRIDGE" read "$P" --length 8)" = "MY TURN!" ]
"$BLUEBRIDGE" delete "$P"
code=0
"$BLUEBRIDGE" read "$P" || code=$?
[ $code = 3 ]
"$BLUEBRIDGE" read "$L" --length "$LONG" >/tmp/read
cmp long /tmp/read
vm-barrier done
echo "all is well"
"#;

/// How machines are joined.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Switch {
    /// The soft switch, over sockets.
    Soft,
    /// The switch in the host's kernel, over tap interfaces.
    Ebpf,
}

/// The switch and the controller, as processes in this namespace.
pub(crate) struct Rack {
    switch: Switch,
    scratch: Scratch,
    daemons: Vec<(&'static str, Child)>,
}

impl Rack {
    /// Starts a rack with places for two machines.
    pub(crate) fn start(switch: Switch) -> Self {
        ip("link set lo up");
        ip("link add sw0 mtu 9000 type veth peer name ctl0 mtu 9000");
        ip("link set sw0 up");
        ip("link set ctl0 up");
        ip("-6 addr add fd00:bb:7::1/64 dev ctl0 nodad");
        let mut offload = Command::new(program());
        let done = offload.args(["host", "no-offload", "--interface", "ctl0"]).status();
        assert!(done.expect("it runs").success(), "no offload");
        let mut rack = Self { switch, scratch: Scratch::new("vm-rack"), daemons: Vec::new() };
        let ports = [1, 2].map(|machine| {
            let place = match switch {
                Switch::Soft => format!("unix:{}", rack.socket(machine).display()),
                Switch::Ebpf => {
                    ip(&format!("tuntap add dev tap{machine} mode tap"));
                    ip(&format!("link set tap{machine} mtu 9000 up"));
                    format!("tap{machine}")
                }
            };
            format!("{}={place}", machine + CONTROLLER_PORT)
        });
        let kind = match switch {
            Switch::Soft => "soft",
            Switch::Ebpf => "ebpf",
        };
        let own = format!("{CONTROLLER_PORT}=sw0");
        rack.daemon(
            "switch",
            &["--data-plane", kind, "--port", &own, "--port", &ports[0], "--port", &ports[1]],
        );
        let store = rack.scratch.file("controller.redb").display().to_string();
        let port = CONTROLLER_PORT.to_string();
        let place = ["--interface", "ctl0", "--switch-port", &port];
        rack.daemon(
            "controller",
            &[&["--listen", CONTROLLER, "--store", &store], &place[..]].concat(),
        );
        rack
    }

    fn daemon(&mut self, name: &'static str, arguments: &[&str]) {
        let log = File::create(self.log(name)).expect("made");
        let daemon = Command::new(program())
            .arg(name)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a descriptor"))
            .stderr(log)
            .spawn();
        self.daemons.push((name, daemon.expect("it starts")));
    }

    /// A path in the folder in which machines execute their scripts.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.scratch.file(name)
    }

    /// Writes the file of the long transfer.
    pub(crate) fn write_long(&self) {
        let byte = |at: usize| (at.wrapping_mul(31) >> 3).to_le_bytes()[0];
        let long: Vec<u8> = (0..LONG).map(byte).collect();
        fs::write(self.file("long"), &long).expect("written");
    }

    fn log(&self, daemon: &str) -> PathBuf {
        self.scratch.file(&format!("{daemon}.log"))
    }

    fn socket(&self, machine: u16) -> PathBuf {
        self.scratch.file(&format!("m{machine}"))
    }

    /// A machine that is an endpoint while it executes a script.
    pub(crate) fn endpoint(
        &self,
        installed: &Installed,
        number: u16,
        name: &str,
        script: &str,
    ) -> Machine {
        let link = match self.switch {
            Switch::Soft => {
                let peer = self.socket(number);
                Link::Socket { own: SocketLink::peer_of(&peer), peer }
            }
            Switch::Ebpf => Link::Tap { interface: format!("tap{number}") },
        };
        Machine::script(installed, &format!("{HOST}{script}"))
            .link(link)
            .directory(self.scratch.path())
            .environment("BLUEBRIDGE", program())
            .environment("BLUEBRIDGE_NAME", name)
            .environment("BLUEBRIDGE_INTERFACE", "eth0")
            .environment("BLUEBRIDGE_SWITCH_PORT", (number + CONTROLLER_PORT).to_string())
            .environment("BLUEBRIDGE_CONTROLLER", CONTROLLER)
            .environment("LONG", LONG.to_string())
    }

    /// The logs of the daemons, and those that have ended.
    pub(crate) fn report(&mut self) -> String {
        let logs = self.daemons.iter_mut().map(|(name, child)| (*name, child.try_wait()));
        let logs: Vec<_> = logs.collect();
        let text = |(name, ended): &(&str, _)| {
            let log = fs::read_to_string(self.log(name)).unwrap_or_default();
            format!("{name} (ended: {ended:?}):\n{log}\n")
        };
        logs.iter().map(text).collect()
    }
}

impl Drop for Rack {
    fn drop(&mut self) {
        for (_, daemon) in &mut self.daemons {
            // Both fail only for a process that has already been waited for.
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }
}

#[test]
fn a_client_uses_the_memory_of_a_server_in_another_machine() {
    in_child(|| memory_is_used_across_machines(Switch::Soft, SERVER_IN_HUGE_PAGES));
}

mod root {
    use super::*;

    #[test]
    fn machines_are_joined_by_the_switch_in_the_kernel_through_taps() {
        require_root();
        in_child(|| memory_is_used_across_machines(Switch::Ebpf, SERVER));
    }
}

fn memory_is_used_across_machines(switch: Switch, server: &str) {
    let mut rack = Rack::start(switch);
    rack.write_long();
    let machines = [
        rack.endpoint(&installed(Kernel::V6_1), 1, "s1", server),
        rack.endpoint(&installed(Kernel::V6_12), 2, "c1", CLIENT),
    ];
    for (result, name) in run_together(&machines).into_iter().zip(["server", "client"]) {
        let took = result.as_ref().map_or(0.0, |output| output.took.as_secs_f64());
        let text = result.and_then(Output::success);
        let text = text.unwrap_or_else(|error| panic!("{name}: {error}\n{}", rack.report()));
        println!("{name}: {took:.1} s");
        assert!(name == "server" || text.ends_with("all is well\n"), "{name}: {text}");
    }
}
