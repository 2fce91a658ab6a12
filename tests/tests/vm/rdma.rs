//! RDMA between two machines: over rxe, which emulates an adapter over an ordinary interface, and over which nothing
//! is fast.

use std::time::Duration;

use bluebridge_testkit::{Scratch, example, program};
use bluebridge_vm::{Kernel, Link, Machine, MachineError, Output, run_together};

use crate::installed;

/// The runner ends a test after 240 s. On half a core each, both machines take most of this.
const DEADLINE: Duration = Duration::from_secs(200);

/// A host of a fabric, which also accepts packets to addresses that its interface does not have; `attack` sends packets
/// of RDMA to such addresses of the other one: in one piece and in fragments, to a pointer and to an endpoint address.
/// The device's packets have up to 4096 bytes of data.
const HOST: &str = r#"
set -eu
PEER=$((3 - VM))
ip link set eth0 mtu 4300
ip -6 addr add "fd00:bb:9::$VM/64" dev eth0 nodad
ip -6 addr add "fdbb:7:$VM:0:8000::1/128" dev eth0 nodad
"$BLUEBRIDGE" host up --interface eth0 $GUARD
ip -6 route add fdbb::/16 via "fd00:bb:9::$PEER" dev eth0 metric 1
rdma link add rxe0 type rxe netdev eth0

attack() {
    vm-barrier peaceful
    /usr/bin/python3 -c '
import socket, sys, time
sender = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
for address in ["0::1000", "0:8000::2"]:
    for length in [64, 6000] * 10:
        packet = bytes([0x64] + [255] * (length - 1))
        sender.sendto(packet, ("fdbb:7:" + sys.argv[1] + ":" + address, 4791))
        time.sleep(0.005)
' $PEER
    vm-barrier attacked
}
"#;

const SERVER: &str = r#"
attack
"$VERBS" serve fdbb:7:1:0:8000::1 >/tmp/log 2>&1 &
until grep -q listening /tmp/log; do
    kill -0 $!
    sleep 0.1
done
vm-barrier serving
vm-barrier used
kill -9 $!
wait $! || true
cat /tmp/log
vm-barrier done
"#;

const CLIENT: &str = r#"
attack
vm-barrier serving
"$VERBS" use fdbb:7:2:0:8000::1 fdbb:7:1:0:8000::1 >/tmp/log 2>&1 &
until grep -q "waiting for the end of the peer" /tmp/log; do
    kill -0 $! || { cat /tmp/log >&2; exit 1; }
    sleep 0.1
done
vm-barrier used
code=0
wait $! || code=$?
cat /tmp/log
[ $code = 0 ]
# With the device, but not with that of another machine.
code=0
"$VERBS" use fdbb:7:1:0:8000::1 fdbb:7:1:0:8000::1 2>/tmp/refused || code=$?
cat /tmp/refused
[ $code = 1 ]
grep -q "RDMA device rxe0 has no RoCE version 2 address fdbb:7:1:0:8000::1" /tmp/refused
# With more addresses than a queue pair can name.
AT=0
while [ $AT -lt 300 ]; do
    AT=$((AT + 1))
    echo "addr add fd00:bb:a::$AT/64 dev eth0 nodad"
done | ip -6 -batch -
until grep -q fd00:00bb:000a /sys/class/infiniband/rxe0/ports/1/gids/299; do
    sleep 0.1
done
code=0
"$VERBS" watch fd00:bb:a::300 2>/tmp/refused || code=$?
cat /tmp/refused
[ $code = 1 ]
grep -q "no RoCE version 2 address fd00:bb:a::300; .* the first 256 of them" /tmp/refused
"$VERBS" watch fdbb:7:2:0:8000::1 >/tmp/events &
until grep -q "watching rxe0, active: true" /tmp/events; do
    kill -0 $!
    sleep 0.1
done
ip link set eth0 down
wait $!
cat /tmp/events
grep -q "PortDown { port: 1 }" /tmp/events
rdma link delete rxe0
code=0
"$VERBS" devices 2>/tmp/refused || code=$?
cat /tmp/refused
[ $code = 1 ]
grep -q "no RDMA device" /tmp/refused
vm-barrier done
echo "all is well"
"#;

/// Runs a script in each of two hosts, which have different kernels.
fn pair(guard: &str, scripts: [&str; 2]) -> Vec<Result<Output, MachineError>> {
    let scratch = Scratch::new("rdma");
    let places = [(Kernel::V6_1, "one", "two"), (Kernel::V6_12, "two", "one")];
    let machines = [0, 1].map(|number: usize| {
        let (kernel, own, peer) = places[number];
        Machine::script(&installed(kernel), &format!("{HOST}{}", scripts[number]))
            .link(Link::Socket { own: scratch.file(own), peer: scratch.file(peer) })
            .rdma()
            .environment("BLUEBRIDGE", program())
            .environment("VERBS", example("verbs"))
            .environment("GUARD", guard)
            .deadline(DEADLINE)
    });
    run_together(&machines)
}

#[test]
fn reads_and_messages_between_hosts_of_a_fabric_succeed_or_fail_with_a_reason() {
    let results = pair("--guard-rdma", [SERVER, CLIENT]);
    for (result, name) in results.into_iter().zip(["server", "client"]).rev() {
        if let Ok(output) = &result {
            println!("{name}: {:.1} s\n{}", output.took.as_secs_f64(), text(output));
        }
        let text =
            result.and_then(Output::success).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(name == "server" || text.ends_with("all is well\n"), "{name}: {text}");
    }
}

/// If this fails, the kernel has been fixed, or the other test's attack is none.
#[test]
fn a_host_without_the_guard_panics_on_a_packet_to_an_address_that_it_does_not_have() {
    let panics = pair("", ["attack", "attack"]).into_iter().filter_map(|result| match result {
        Err(MachineError::Panicked { console }) => Some(console),
        _ => None,
    });
    let panics: Vec<_> = panics.collect();
    println!("{}", panics.join("\n"));
    // The first that panics ends the other one.
    assert!(!panics.is_empty(), "no kernel panicked");
}

fn text(output: &Output) -> String {
    let parts = [&output.stdout[..], &output.stderr, output.console.as_bytes()];
    parts.map(|part| String::from_utf8_lossy(part).into_owned()).concat()
}
