#!/usr/bin/busybox sh
# vm-barrier NAME: waits until every machine of the run is at the barrier. The machine's deadline bounds it.
: >"/run/vm/lab/$1.$VM"
number=1
while [ "$number" -le "$VMS" ]; do
    if [ -e "/run/vm/lab/$1.$number" ]; then
        number=$((number + 1))
    else
        /usr/bin/busybox sleep 0.05
    fi
done
