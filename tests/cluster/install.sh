#!/usr/bin/env bash
# What the tests of this folder need besides Python packages, on Debian or Ubuntu, as root.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
# a network that is not there is found out soon
options=(-qq -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20 -o Acquire::Retries=1)
apt-get update "${options[@]}"
# no daemon of these packages is started by its installation: the tests start their own
if [ ! -e /usr/sbin/policy-rc.d ]; then
  trap 'rm -f /usr/sbin/policy-rc.d' EXIT
  printf '#!/bin/sh\nexit 101\n' > /usr/sbin/policy-rc.d
  chmod +x /usr/sbin/policy-rc.d
fi
apt-get install -y "${options[@]}" --no-install-recommends \
  slurmctld slurmd slurm-client munge openssh-server openssh-client shellcheck iproute2 util-linux procps chromium
