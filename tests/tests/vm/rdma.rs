//! RDMA between two machines: over rxe, which emulates an adapter over an ordinary interface, and over which nothing
//! is fast.

use std::time::Duration;

use bluebridge_testkit::{Scratch, example};
use bluebridge_vm::{Installed, Kernel, Link, Machine, Output, run_together};

use crate::installed;

const DEADLINE: Duration = Duration::from_secs(120);

/// The device comes before the interface is up. Its packets have up to 4096 bytes of data.
const HOST: &str = r#"
set -eu
ip link set eth0 mtu 4300
ip -6 addr add "fd00:bb:9::$VM/64" dev eth0 nodad
rdma link add rxe0 type rxe netdev eth0
ip link set eth0 up
"#;

const SERVER: &str = r#"
"$VERBS" serve fd00:bb:9::1 >/tmp/log 2>&1 &
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
vm-barrier serving
"$VERBS" use fd00:bb:9::2 fd00:bb:9::1 >/tmp/log 2>&1 &
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
"$VERBS" use fd00:bb:9::1 fd00:bb:9::1 2>/tmp/refused || code=$?
cat /tmp/refused
[ $code = 1 ]
grep -q "RDMA device rxe0 has no RoCE version 2 address fd00:bb:9::1" /tmp/refused
"$VERBS" watch fd00:bb:9::2 >/tmp/events &
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

fn machine(
    installed: &Installed,
    own: &str,
    peer: &str,
    scratch: &Scratch,
    script: &str,
) -> Machine {
    Machine::script(installed, &format!("{HOST}{script}"))
        .link(Link::Socket { own: scratch.file(own), peer: scratch.file(peer) })
        .rdma()
        .environment("VERBS", example("verbs"))
        .deadline(DEADLINE)
}

#[test]
fn reads_and_messages_between_machines_succeed_or_fail_with_a_reason() {
    let scratch = Scratch::new("rdma");
    let machines = [
        machine(&installed(Kernel::V6_1), "one", "two", &scratch, SERVER),
        machine(&installed(Kernel::V6_12), "two", "one", &scratch, CLIENT),
    ];
    let results = run_together(&machines);
    for (result, name) in results.into_iter().zip(["server", "client"]).rev() {
        if let Ok(output) = &result {
            println!("{name}: {:.1} s\n{}", output.took.as_secs_f64(), text(output));
        }
        let text =
            result.and_then(Output::success).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(name == "server" || text.ends_with("all is well\n"), "{name}: {text}");
    }
}

fn text(output: &Output) -> String {
    let parts = [&output.stdout[..], &output.stderr, output.console.as_bytes()];
    parts.map(|part| String::from_utf8_lossy(part).into_owned()).concat()
}
