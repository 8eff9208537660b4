#!/bin/sh
# Everything that is done once: data for three devices, an operator, keys for one server and three devices.
# On real machines each block is run by somebody else; see docs/deploy.md.
set -eu
cd "$(dirname "$0")"

python prepare.py "$@"

# The operator. Its key signs who takes part; the server never sees it.
mycelia enrol init --ca operator/
mycelia enrol server --ca operator/ --name localhost --dns localhost --ip 127.0.0.1 --out server-keys/

# Each device makes its own keys and asks; the operator answers; the device takes the answer.
for n in 1 2 3; do
    mycelia enrol request --operator operator/operator.pub --name "device $n" --out "identity-$n/"
    mycelia enrol issue "identity-$n/request-1.bin" --ca operator/ --out "reply-$n.bin"
    mycelia enrol accept "reply-$n.bin" --identity "identity-$n/"
done

# What the server is given of the operator: the signed list, and nothing else.
cp operator/roster.bin roster.bin
