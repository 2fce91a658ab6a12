#!/bin/busybox sh
# First process of a machine: mounts the host's files, read-only below memory, as the root.
export PATH=/bin
/bin/busybox --install -s /bin
mount -t devtmpfs dev /dev
mount -t proc proc /proc
mount -t sysfs sys /sys

# The runner takes this exit code of qemu for a machine that did not start.
fail() {
    echo "bluebridge-vm: $1"
    printf '\041' | dd of=/dev/port bs=1 seek=244 count=1 2>/dev/null
    poweroff -f
}

for module in /modules/*.ko; do
    insmod "$module" || fail "cannot load $module"
done
lower=/tools:/kernel:/host
shares="host tools kernel"
if grep -q verbs /sys/bus/virtio/devices/*/mount_tag; then
    lower=/verbs:$lower
    shares="$shares verbs"
fi
mkdir -p /host /tools /kernel /verbs /memory /root
for tag in $shares; do
    mount -t 9p -o trans=virtio,version=9p2000.L,ro,msize=262144,cache=loose "$tag" "/$tag" ||
        fail "cannot mount the files of $tag"
done
mount -t tmpfs -o mode=0755 memory /memory || fail "cannot mount memory"
mkdir /memory/upper /memory/work
mount -t overlay -o "lowerdir=$lower,upperdir=/memory/upper,workdir=/memory/work" root /root ||
    fail "cannot mount the root"
mount -t devtmpfs dev /root/dev
mount -t proc proc /root/proc
mount -t sysfs sys /root/sys
mount -t tmpfs -o mode=0755 run /root/run || fail "cannot mount /run"
mkdir -p /root/run/vm/bin
cp /guest /root/run/vm/guest
cp /barrier /root/run/vm/bin/vm-barrier
exec switch_root /root /usr/bin/busybox sh /run/vm/guest
