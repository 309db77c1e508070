# A machine with a real systemd as PID 1, in its own namespaces. Source this file as root.

# machine_boot ROOT: boots, and waits until systemd is up. Sets $machine, the process ID of its systemd as seen here.
machine_boot() {
    machine_work=$(mktemp -d /var/tmp/tokenkeeperd-machine.XXXXXX)
    local name hierarchies=() hierarchy
    name=$(basename "$machine_work")
    if [ "$(stat -fc %T /sys/fs/cgroup)" = cgroup2fs ]; then
        hierarchies=(/sys/fs/cgroup)
    else
        for hierarchy in /sys/fs/cgroup/*/; do
            [ "$(basename "$hierarchy")" = cpuset ] || hierarchies+=("${hierarchy%/}")
        done
    fi
    machine_groups=("${hierarchies[@]/%//$name}")
    mkdir -p "${machine_groups[@]}"
    (
        # A separate group in each hierarchy, which becomes the machine's root.
        for group in "${machine_groups[@]}"; do echo $BASHPID >"$group/cgroup.procs"; done
        exec setsid unshare --mount --pid --fork --uts --ipc --net --cgroup --kill-child \
            "$(dirname "${BASH_SOURCE[0]}")/init" "$1" "$machine_work"
    ) >"$machine_work/log" 2>&1 &
    machine_keeper=$!
    local until=$((SECONDS + 180))
    while [ "$SECONDS" -lt "$until" ]; do
        kill -0 "$machine_keeper" 2>/dev/null || break
        machine=$(pgrep -P "$machine_keeper" -x systemd || true)
        # systemctl fails if the machine is degraded: on Debian 13, the kernel's modules cannot be loaded here.
        if [ -n "$machine" ] && [[ $(inside systemctl is-system-running 2>/dev/null || true) =~ running|degraded ]]; then return; fi
        sleep 0.1
    done
    echo "the machine does not boot; its systemd: ${machine:-has ended, or has not begun}" >&2
    cat "$machine_work/log" >&2
    if [ -n "${machine:-}" ]; then
        inside systemctl list-jobs --no-pager >&2 || true
        inside journalctl --no-pager -n 40 >&2 || true
    fi
    return 1
}

# inside COMMAND…: runs the command in the machine as root.
inside() {
    nsenter --target "$machine" --mount --pid --uts --ipc --net --cgroup -- "$@" </dev/null
}

machine_end() {
    [ -n "${machine_work:-}" ] || return 0
    # Its systemd ends with it (--kill-child), and everything in the machine with that.
    kill -KILL "$machine_keeper" 2>/dev/null || true
    wait "$machine_keeper" 2>/dev/null || true
    local group
    for group in "${machine_groups[@]}"; do
        find "$group" -depth -type d -exec rmdir {} \; 2>/dev/null || true
    done
    rm -rf "$machine_work"
    machine_work=
}
