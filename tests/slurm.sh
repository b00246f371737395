#!/usr/bin/env bash
# Starts Slurm with this machine as its only node, for `make launchers`. Needs root and Debian's slurmctld, slurmd and munge.
# usage: tests/slurm.sh start|stop
set -euo pipefail
STATE=/var/lib/slurm-layerskip

start() {
  mkdir -p "$STATE/ctld" "$STATE/d" /etc/slurm /run/munge
  chown munge: /run/munge
  cat > /etc/slurm/slurm.conf <<END
ClusterName=layerskip
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$STATE/ctld
SlurmdSpoolDir=$STATE/d
SlurmctldPidFile=$STATE/slurmctld.pid
SlurmdPidFile=$STATE/slurmd.pid
SlurmctldLogFile=$STATE/slurmctld.log
SlurmdLogFile=$STATE/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
KillWait=5
NodeName=$(hostname) NodeAddr=127.0.0.1 $(slurmd -C | grep -o 'CPUs=.*ThreadsPerCore=[0-9]*') State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
END
  echo "CgroupPlugin=cgroup/v1" > /etc/slurm/cgroup.conf
  pgrep -x munged > /dev/null || runuser -u munge -- munged
  slurmctld -c
  slurmd
  timeout 60 bash -c 'until sinfo -h -o %T | grep -q idle; do sleep 1; done'
  sinfo
}

stop() {
  for daemon in slurmd slurmctld; do
    [ ! -e "$STATE/$daemon.pid" ] || kill "$(cat "$STATE/$daemon.pid")"
  done
}

"$1"
