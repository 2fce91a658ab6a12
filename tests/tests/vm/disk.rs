//! A file system on a disk of remote memory, with Linux's own block device: its module is in no kernel of the project's
//! machines.

use std::fs;
use std::time::Duration;

use bluebridge_testkit::namespace::in_child;
use bluebridge_vm::{Kernel, Output, run_together};

use crate::installed;
use crate::racks::{Rack, Switch};

/// On emulated processors of a machine that may be busy.
const DEADLINE: Duration = Duration::from_secs(220);

const SERVER: &str = r#"
"$BLUEBRIDGE" memserver --name s1 --memory 96M &
vm-barrier done
kill $!
wait $!
"#;

/// The process that serves the disk is killed while the file system writes. Its lease is longer than these machines stand
/// still on a busy host.
const CLIENT: &str = r#"
: >/tmp/log
trap '[ $? = 0 ] || cat /tmp/log >&2' EXIT

serve() {
    "$BLUEBRIDGE" disk "$@" --socket /tmp/disk --lease 4s --connections 2 --lock no \
        --deadline 60s --json \
        >/tmp/document 2>>/tmp/log &
    DISK=$!
    until grep -q '^}' /tmp/document; do
        kill -0 $DISK || exit 1
        sleep 0.2
    done
}

attach() {
    /usr/bin/python3 attach.py /tmp/disk "/dev/$1" &
    NBD=$!
    until [ -e "/sys/block/$1/pid" ]; do
        kill -0 $NBD
        sleep 0.1
    done
}

step() {
    read -r seconds _ </proc/uptime
    echo "$seconds s: $*" >&2
}

tries=0
until "$BLUEBRIDGE" ping s1 >/dev/null 2>&1; do
    tries=$((tries + 1))
    [ $tries -lt 60 ]
    sleep 0.2
done
serve --size 48M --slab 1M
P=$(sed -n 's/.*"pointer": "\(.*\)".*/\1/p' /tmp/document)
attach nbd0
[ "$(cat /sys/block/nbd0/size)" = $((48 << 11)) ]
[ "$(cat /sys/block/nbd0/queue/discard_max_bytes)" != 0 ]
step "attached"
mke2fs -q -F -t ext4 -m 0 /dev/nbd0
mount -t ext4 -o discard /dev/nbd0 /mnt
cp long /mnt/kept
cp long /mnt/removed
sync
rm /mnt/removed
sync
step "written"
(while busybox dd if=long of=/mnt/unfinished bs=64k conv=fsync 2>/dev/null; do :; done) &
WRITER=$!
sleep 0.5
kill -9 $DISK
wait $DISK || true
# It ends with an error of the disk.
wait $WRITER
umount /mnt || umount -l /mnt
step "killed"
serve --attach "$P"
attach nbd1
code=0
e2fsck -p /dev/nbd1 >&2 || code=$?
[ $code -le 1 ]
e2fsck -f -n /dev/nbd1 >&2
mkdir /again
mount -t ext4 /dev/nbd1 /again
cmp long /again/kept
[ ! -e /again/removed ]
umount /again
step "checked"
kill $DISK
wait $DISK
wait $NBD || true
[ "$("$BLUEBRIDGE" disk delete "$P" --deadline 60s --json | grep -c slab_count)" = 1 ]
vm-barrier done
echo "all is well"
"#;

#[test]
fn a_file_system_outlives_the_process_that_serves_its_disk() {
    in_child(|| {
        let mut rack = Rack::start(Switch::Soft);
        rack.write_long();
        fs::write(rack.file("attach.py"), include_str!("attach.py")).expect("written");
        let server = rack.endpoint(&installed(Kernel::V6_12), 1, "s1", SERVER).deadline(DEADLINE);
        let client = rack.endpoint(&installed(Kernel::V6_1), 2, "c1", CLIENT).deadline(DEADLINE);
        let client =
            ["ext4", "nbd"].into_iter().fold(client.memory_mib(512), |it, name| it.module(name));
        let results = run_together(&[server, client]);
        for (result, name) in results.into_iter().zip(["server", "client"]).rev() {
            if let Ok(output) = &result {
                println!("{name}: {:.1} s", output.took.as_secs_f64());
                println!("{}", String::from_utf8_lossy(&output.stderr));
            }
            let text = result.and_then(Output::success);
            let text = text.unwrap_or_else(|error| panic!("{name}: {error}\n{}", rack.report()));
            assert!(name == "server" || text.ends_with("all is well\n"), "{name}: {text}");
        }
    });
}
