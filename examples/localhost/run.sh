#!/bin/sh
# Starts the server and three devices, each a process of its own, and waits for all of them.
# What the devices say goes to device-1.log …; Ctrl-C ends all four, and run.sh started again goes on.
set -eu
cd "$(dirname "$0")"

devices=""
for n in 1 2 3; do
    mycelia client --config "client-$n.toml" --once > "device-$n.log" 2>&1 &
    devices="$devices $!"
done
trap 'kill $devices 2> /dev/null || true' EXIT

mycelia serve --config server.toml "$@"
for device in $devices; do
    wait "$device"
done
