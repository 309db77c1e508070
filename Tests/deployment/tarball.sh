# The tarball, on a system without the package. `run` sources this file.

# On the minimal system, without one of the libraries.
tarball_without_libraries() {
    show "the tarball has the program of the package" cmp "$work/package/usr/bin/tokenkeeperd" <(tar -xzOf "$tarball" --wildcards '*/bin/tokenkeeperd')
    in_minimal dpkg --remove tokenkeeperd >/dev/null
    tar -xzf "$tarball" -C "$work/minimal/root"
    local install refused=0
    install=/root/$(basename "$tarball" .tar.gz)/install
    in_minimal sh -c 'mkdir /root/away && mv /usr/lib/*/libpq.so.5* /root/away'
    in_minimal "$install" >"$work/out" 2>&1 || refused=$?
    show "without libpq, it is not installed" is "$refused" 69
    show "it names the library" grep -q 'libpq.so.5 => not found' "$work/out"
    show "and the packages to install" grep -q 'apt install libpq5 ' "$work/out"
    show "and leaves nothing" is "$(in_minimal find /usr/local -type f)" ""
    in_minimal sh -c 'mv /root/away/* /usr/lib/*-linux-gnu/'
    in_minimal "$install" >"$work/out"
    show "without systemd it is installed, too" is "$(in_minimal /usr/local/bin/tokenkeeperd --version)" "$(dpkg-deb -f "$package" Version)"
    show "as root's, and executable" is "$(in_minimal stat -c '%U %a' /usr/local/bin/tokenkeeperd /usr/local/share/man/man8/tokenkeeperd.8.gz | tr '\n' ' ')" \
        "root 755 root 644 "
}

restarted() { [ "$(main_pid)" != 0 ] && [ "$(main_pid)" != "$1" ]; }

# As docs/how-to/special-installations.md says, with systemd and PostgreSQL.
tarball_on_the_machine() {
    local name command commands before
    name=$(basename "$tarball")
    write "/root/$name" <"$tarball"
    mapfile -t commands < <(awk '/tar xzf/ { inside = 1 } /```/ { inside = 0 } inside' "$here/../../docs/how-to/special-installations.md" | sed 's/^ *//; s/ *#.*//')
    show "there are two commands" is "${#commands[@]}" 2
    for command in "${commands[@]}"; do
        inside bash -c "cd /root && ${command//tokenkeeperd-*-linux-*64/${name%.tar.gz}}" >"$work/out" 2>&1 || { cat "$work/out" && fail "$command"; }
        echo "ran: $command"
    done
    for command in "CREATE ROLE tokenkeeper_owner" "CREATE DATABASE push OWNER tokenkeeper_owner"; do inside sudo -u postgres psql -Xqc "$command"; done
    echo 'database_url = "postgresql:///push?host=/run/postgresql"' | write /etc/tokenkeeperd/tokenkeeperd.toml
    inside sudo -u postgres tokenkeeperd migrate --owner tokenkeeper_owner --grants >"$work/out" 2>&1 || { cat "$work/out" && fail "migrate"; }
    inside sudo -u postgres psql -Xqc 'CREATE ROLE tokenkeeperd LOGIN IN ROLE tokenkeeper_daemon'
    show "systemd-analyze verify says nothing about its unit" is "$(inside systemd-analyze verify --man=no tokenkeeperd.service 2>&1)" ""
    show "its service starts" inside systemctl start tokenkeeperd
    queue 1000
    await "and drains" all_recorded
    show "as the program of the tarball" is "$(inside readlink "/proc/$(main_pid)/exe")" /usr/local/bin/tokenkeeperd
    show "it reloads" inside systemctl reload tokenkeeperd
    before=$(main_pid)
    inside "/root/${name%.tar.gz}/install" >"$work/out"
    await "installed again, it restarts" restarted "$before"
    inside "/root/${name%.tar.gz}/install" --remove >"$work/out"
    show "removed, it does not run" is "$(inside systemctl is-active tokenkeeperd || true)" inactive
    command=$(sed -n 's/.*to remove them: //p' "$work/out")
    inside sh -c "$command"
    inside rm -rf "/root/${name%.tar.gz}" "/root/$name"
    ours >"$work/after"
    show "removed, it leaves no file of ours" diff "$work/before" "$work/after"
    inside sudo -u postgres psql -Xqc 'DROP DATABASE push'
    for command in $(inside sudo -u postgres psql -XAtqc "SELECT rolname FROM pg_roles WHERE rolname LIKE 'tokenkeeper%'"); do
        inside sudo -u postgres psql -Xqc "DROP ROLE $command"
    done
    queued=0
}
