# Functions for scripts that compare with the machine's own swap. CGROUP is the version of cgroups, COMPARED the program.
set -eu
mkdir -p /swap
mount -t ext4 /dev/vda /swap
if [ "$CGROUP" = 1 ]; then
    TOP=/sys/fs/cgroup/memory
    mount -t tmpfs cgroups /sys/fs/cgroup
    mkdir "$TOP"
    mount -t cgroup -o memory memory "$TOP"
else
    TOP=/sys/fs/cgroup
    mount -t cgroup2 cgroups "$TOP"
fi

# A line for whoever looks for what took long, or at which step it failed.
step() {
    read -r seconds _ </proc/uptime
    echo "$seconds s: $*" >&2
}

fail() {
    step "failed: $*"
    cat /proc/swaps >&2
    ls -d /swap/* "$TOP"/bluebridge-* /sys/block/zram* >&2
    exit 1
}

# An experiment in the place of this process; $1 is what is compared.
experiment() {
    compared=$1
    shift
    exec "$BLUEBRIDGE" experiment "$@" --rounds 1 --local 25% --compare "$compared" \
        --swap-directory /swap --switch soft --output /tmp/experiment --json
}

# A short one in the background, with its output in the file `said`; EXPERIMENT is its process.
begin() {
    (experiment "$1" testswap --size 4M >/tmp/said 2>&1) &
    EXPERIMENT=$!
}

begin_and_wait() {
    begin "$1"
    wait "$EXPERIMENT"
}

# Executes a command that must fail with this exit code.
fails_with() {
    wanted=$1
    shift
    code=0
    "$@" || code=$?
    [ "$code" = "$wanted" ] || fail "$* ended with $code instead of $wanted: $(cat /tmp/said)"
}

says() {
    grep -q -F -e "$1" /tmp/said || fail "it does not say '$1': $(cat /tmp/said)"
}

# Waits until a command succeeds. It looks rarely: the machine's only processor is emulated, and each look takes time
# from what is awaited.
await() {
    tries=0
    until "$@"; do
        tries=$((tries + 1))
        [ $tries -lt 300 ] || fail "never: $*"
        sleep 0.3
    done
}

# Whether pages are in swap: then the process in the cgroup is at work.
pages_are_out() {
    while read -r _ kind _ used _; do
        case $kind in
        file | partition) [ "$used" = 0 ] || return 0 ;;
        esac
    done </proc/swaps
    return 1
}

# Waits until EXPERIMENT has pages in swap; GUARDIAN is its guardian.
await_pages() {
    await guardian_has_started
    GUARDIAN=$(guardian)
    await pages_are_out_or_it_ended
    kill -0 "$EXPERIMENT" 2>/dev/null || fail "it ended early: $(cat /tmp/said)"
}

guardian_has_started() {
    [ -n "$(guardian)" ]
}

pages_are_out_or_it_ended() {
    pages_are_out || ! kill -0 "$EXPERIMENT" 2>/dev/null
}

# The guardian of EXPERIMENT.
guardian() {
    cat /proc/"$EXPERIMENT"/task/*/children 2>/dev/null | tr ' ' '\n' | while read -r child; do
        ! grep -q -s swap-guardian "/proc/$child/cmdline" || echo "$child"
    done
}

# Whether there is no trace of a comparison: no area, no file, no cgroup, no process, and no device but the first one,
# which comes with the module.
nothing_is_left() {
    ! grep -q -v '^Filename' /proc/swaps || return 1
    for left in /swap/bluebridge-* "$TOP"/bluebridge-* /sys/block/zram[1-9]*; do
        [ ! -e "$left" ] || return 1
    done
    ! grep -l -s -e swap-guardian -e swap-worker /proc/[0-9]*/cmdline >/dev/null
}
