#!/usr/bin/busybox sh
# Executes the machine's command in its root, and reports its end through the folder that it shares with the runner.
export PATH=/run/vm/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export HOME=/root
own=/run/vm/own
box=/usr/bin/busybox

# An exit code that qemu has for nothing else: its own errors are 1, a panic or a power-off is 0.
leave() {
    $box sync
    printf "$1" | $box dd of=/dev/port bs=1 seek=244 count=1 2>/dev/null
    $box poweroff -f
}

fail() {
    echo "bluebridge-vm: $1" >/dev/console
    leave '\041'
}

share() {
    $box mkdir -p "$2"
    $box mount -t 9p -o "trans=virtio,version=9p2000.L,$3,msize=262144,cache=none" "$1" "$2" ||
        fail "cannot mount $1 at $2"
}

share own "$own" rw
share lab /run/vm/lab rw
while read -r tag access directory; do
    share "$tag" "$directory" "$access"
done <"$own/shares"
while read -r module; do
    modprobe "$module" || fail "cannot load the module $module"
done <"$own/modules"
$box mkdir -p /dev/pts /dev/shm
$box mount -t devpts devpts /dev/pts
$box mount -t tmpfs shm /dev/shm
[ ! -d /sys/fs/bpf ] || $box mount -t bpf bpf /sys/fs/bpf
[ ! -d /sys/kernel/debug ] || $box mount -t debugfs debug /sys/kernel/debug
$box ip link set lo up
. "$own/environment"
$box hostname "vm$VM"
cd "$(cat "$own/directory")" || fail "cannot enter the directory of the command"
/bin/sh "$own/command" </dev/null >"$own/stdout" 2>"$own/stderr"
# The name appears when the number is complete.
echo $? >"$own/code.part"
$box mv "$own/code.part" "$own/code"
leave '\052'
